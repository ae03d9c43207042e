"""Vision and audio models of Hugging Face, built from their configurations: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memory.job import Job, adamw, momentum
from memory.zoo_language import _hf


def _images(rows: int = 8, side: int = 64, classes: int = 10) -> Any:
    return lambda: {"pixel_values": torch.randn(rows, 3, side, side), "labels": torch.randint(0, classes, (rows,))}


def _job(name: str, family: str, build: Any, batch: Any, **trainer: Any) -> Job:
    return Job(name=name, family=family, build=build, batch=batch, trainer=trainer)


_VIT = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "image_size": 64,
    "patch_size": 8,
    "num_labels": 10,
}


def _whisper() -> dict[str, Tensor]:
    return {"input_features": torch.randn(2, 80, 400), "labels": torch.randint(5, 2000, (2, 40))}


def _speech() -> dict[str, Tensor]:
    return {"input_values": torch.randn(2, 16000), "labels": torch.randint(1, 30, (2, 12))}


def _clip() -> dict[str, Any]:
    return {"input_ids": torch.randint(5, 2000, (8, 32)), "pixel_values": torch.randn(8, 3, 64, 64), "return_loss": True}


def _segments() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(4, 3, 128, 128), "labels": torch.randint(0, 10, (4, 128, 128))}


_TOWER = {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 1024}

MEDIA: list[Job] = [
    _job("ViT", "vision", _hf("ViTForImageClassification", "ViTConfig", **_VIT), _images()),
    _job("DeiT", "vision", _hf("DeiTForImageClassification", "DeiTConfig", **_VIT), _images(2), precision="bf16-mixed"),
    _job(
        "Swin",
        "vision",
        _hf(
            "SwinForImageClassification",
            "SwinConfig",
            image_size=64,
            patch_size=4,
            embed_dim=64,
            depths=[2, 2, 2],
            num_heads=[2, 4, 8],
            window_size=4,
            num_labels=10,
        ),
        _images(),
    ),
    _job(
        "ConvNeXt",
        "vision",
        _hf("ConvNextForImageClassification", "ConvNextConfig", hidden_sizes=[48, 96, 192, 384], depths=[2, 2, 4, 2], num_labels=10),
        _images(8, 96),
    ),
    _job(
        "CLIP",
        "vision",
        _hf(
            "CLIPModel",
            "CLIPConfig",
            text_config=_TOWER | {"vocab_size": 2000, "eos_token_id": 2},
            vision_config=_TOWER | {"image_size": 64, "patch_size": 8},
        ),
        _clip,
    ),
    _job(
        "SegFormer",
        "vision",
        _hf("SegformerForSemanticSegmentation", "SegformerConfig", hidden_sizes=[32, 64, 128, 160], decoder_hidden_size=128, num_labels=10),
        _segments,
    ),
    _job(
        "ResNet (Hugging Face)",
        "vision",
        _hf(
            "ResNetForImageClassification",
            "ResNetConfig",
            momentum,
            embedding_size=32,
            hidden_sizes=[64, 128, 256, 512],
            depths=[2, 2, 2, 2],
            num_labels=10,
        ),
        _images(),
    ),
    _job(
        "Whisper",
        "audio",
        _hf(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            vocab_size=2000,
            d_model=256,
            encoder_layers=3,
            decoder_layers=3,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=1024,
            decoder_ffn_dim=1024,
            max_source_positions=200,
            max_target_positions=64,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        ),
        _whisper,
    ),
    _job(
        "Wav2Vec2",
        "audio",
        _hf(
            "Wav2Vec2ForCTC",
            "Wav2Vec2Config",
            adamw,
            vocab_size=32,
            hidden_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=1024,
            conv_dim=[128] * 7,
            num_conv_pos_embeddings=32,
            num_conv_pos_embedding_groups=8,
            mask_time_prob=0.0,
            layerdrop=0.0,
            pad_token_id=0,
            ctc_loss_reduction="mean",
        ),
        _speech,
    ),
]
