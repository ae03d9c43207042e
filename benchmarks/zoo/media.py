"""Models of pictures and sound of Hugging Face, small, without dropout: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.zoo.member import ROWS, Member, hugging_face

WIDTH, DEPTH, HEADS, SIDE = 32, 4, 4, 16

_VIT: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS,
    "intermediate_size": 64,
    "image_size": SIDE,
    "patch_size": 4,
    "num_labels": 5,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_TOWER: dict[str, Any] = {"hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": HEADS, "intermediate_size": 64}


def pictures(side: int = SIDE) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(ROWS, 3, side, side), "labels": torch.randint(0, 5, (ROWS,))}


def large_pictures() -> dict[str, Tensor]:
    return pictures(32)


def segments() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(ROWS, 3, 64, 64), "labels": torch.randint(0, 5, (ROWS, 64, 64))}


def captions() -> dict[str, Any]:
    words = torch.randint(5, 90, (ROWS, 10))
    words[:, -1] = 95  # the end, by which the text's embedding is found
    return {"input_ids": words, "pixel_values": torch.randn(ROWS, 3, SIDE, SIDE), "return_loss": True}


def spectra() -> dict[str, Tensor]:
    return {"input_features": torch.randn(ROWS, 16, 40), "labels": torch.randint(5, 90, (ROWS, 8))}


def waves() -> dict[str, Tensor]:
    return {"input_values": torch.randn(ROWS, 1600), "labels": torch.randint(1, 30, (ROWS, 3))}


def _seeing(name: str, model: str, config: str, *, quick: bool = False, **settings: Any) -> Member:
    return hugging_face(name, model, config, pictures, quick=quick, **{**_VIT, **settings})


MEDIA: list[Member] = [
    _seeing("ViT", "ViTForImageClassification", "ViTConfig"),
    _seeing("DeiT", "DeiTForImageClassification", "DeiTConfig"),
    _seeing("BEiT", "BeitForImageClassification", "BeitConfig", use_relative_position_bias=True, drop_path_rate=0.0),
    _seeing("DINOv2", "Dinov2ForImageClassification", "Dinov2Config", mlp_ratio=2, drop_path_rate=0.0),
    hugging_face(
        "Swin",
        "SwinForImageClassification",
        "SwinConfig",
        large_pictures,
        image_size=32,
        patch_size=4,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        num_labels=5,
        drop_path_rate=0.0,
    ),
    hugging_face(
        "ConvNeXt",
        "ConvNextForImageClassification",
        "ConvNextConfig",
        large_pictures,
        hidden_sizes=[16, 24, 32, 48],
        depths=[1, 1, 2, 1],
        num_labels=5,
        drop_path_rate=0.0,
    ),
    hugging_face(
        "SegFormer",
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        segments,
        hidden_sizes=[16, 16, 32, 32],
        num_attention_heads=[1, 2, 2, 4],
        depths=[1, 1, 1, 1],
        decoder_hidden_size=32,
        num_labels=5,
        drop_path_rate=0.0,
        classifier_dropout_prob=0.0,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    ),
    hugging_face(
        "CLIP",
        "CLIPModel",
        "CLIPConfig",
        captions,
        mean=False,
        projection_dim=16,
        text_config=_TOWER | {"vocab_size": 96, "eos_token_id": 95, "bos_token_id": 1, "pad_token_id": 0, "max_position_embeddings": 16},
        vision_config=_TOWER | {"image_size": SIDE, "patch_size": 4},
    ),
    hugging_face(
        "Whisper",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        spectra,
        vocab_size=96,
        num_mel_bins=16,
        d_model=WIDTH,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=20,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        dropout=0.0,
    ),
    hugging_face(
        "Wav2Vec2",
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        waves,
        vocab_size=32,
        hidden_size=WIDTH,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        intermediate_size=64,
        conv_dim=[16] * 4,
        conv_stride=[5, 4, 4, 2],
        conv_kernel=[10, 8, 4, 4],
        num_feat_extract_layers=4,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=4,
        apply_spec_augment=False,
        layerdrop=0.0,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        feat_proj_dropout=0.0,
        final_dropout=0.0,
        pad_token_id=0,
        ctc_loss_reduction="mean",
    ),
    hugging_face(
        "ResNet",
        "ResNetForImageClassification",
        "ResNetConfig",
        large_pictures,
        embedding_size=8,
        hidden_sizes=[16, 16, 32, 32],
        depths=[1, 2, 2, 1],
        num_labels=5,
    ),
]
