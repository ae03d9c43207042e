"""Hugging Face's architectures that the GPU zoo lacks, of which nothing in the package was tuned. Knows no measurement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memory.zoo_gpu import GpuModel, hugging_face_model, token_batch

_WORDS, _WIDTH, _DEPTH, _HEADS, _LENGTH = 16000, 512, 6, 8, 512


def unseen_models() -> list[GpuModel]:
    """Every model, in a fixed order."""
    tokens = token_batch(8, _LENGTH, _WORDS)
    sizes = {"vocab_size": _WORDS, "hidden_size": _WIDTH, "num_hidden_layers": _DEPTH, "num_attention_heads": _HEADS}
    long = {**sizes, "intermediate_size": 4 * _WIDTH, "max_position_embeddings": 2 * _LENGTH}
    labels = {**long, "num_labels": 4}
    gpt = {"vocab_size": _WORDS, "n_embd": _WIDTH, "n_layer": _DEPTH, "n_head": _HEADS, "n_positions": _LENGTH}
    between = {
        "vocab_size": _WORDS,
        "d_model": _WIDTH,
        "encoder_layers": _DEPTH // 2,
        "decoder_layers": _DEPTH // 2,
        "encoder_attention_heads": _HEADS,
        "decoder_attention_heads": _HEADS,
        "encoder_ffn_dim": 4 * _WIDTH,
        "decoder_ffn_dim": 4 * _WIDTH,
        "max_position_embeddings": _LENGTH,
    }
    experts = {"moe_intermediate_size": _WIDTH, "shared_expert_intermediate_size": _WIDTH, "num_experts": 8, "num_experts_per_tok": 2}
    series = {"num_input_channels": 7, "context_length": 512, "patch_length": 16, "patch_stride": 8, "prediction_length": 96}
    return [
        hugging_face_model("BLOOM", "BloomForCausalLM", "BloomConfig", tokens, **{**sizes, "n_layer": _DEPTH, "n_head": _HEADS}),
        hugging_face_model("Falcon", "FalconForCausalLM", "FalconConfig", tokens, **sizes),
        hugging_face_model("CodeGen", "CodeGenForCausalLM", "CodeGenConfig", tokens, **gpt, rotary_dim=32),
        hugging_face_model("StableLM", "StableLmForCausalLM", "StableLmConfig", tokens, **long, num_key_value_heads=_HEADS),
        hugging_face_model("Gemma 2", "Gemma2ForCausalLM", "Gemma2Config", tokens, **long, num_key_value_heads=4, head_dim=64),
        hugging_face_model("OLMo 2", "Olmo2ForCausalLM", "Olmo2Config", tokens, **long, num_key_value_heads=_HEADS),
        hugging_face_model("Qwen2, experts", "Qwen2MoeForCausalLM", "Qwen2MoeConfig", tokens, **long, num_key_value_heads=4, **experts),
        hugging_face_model("Pegasus", "PegasusForConditionalGeneration", "PegasusConfig", tokens, **between),
        hugging_face_model("ALBERT", "AlbertForSequenceClassification", "AlbertConfig", _sentences(16), **labels, embedding_size=128),
        hugging_face_model("DeBERTa", "DebertaV2ForSequenceClassification", "DebertaV2Config", _sentences(16), **labels),
        hugging_face_model(
            "XLNet",
            "XLNetForSequenceClassification",
            "XLNetConfig",
            _sentences(16),
            d_model=_WIDTH,
            n_layer=_DEPTH,
            n_head=_HEADS,
            d_inner=4 * _WIDTH,
            vocab_size=_WORDS,
            num_labels=4,
        ),
        hugging_face_model(
            "BEiT",
            "BeitForImageClassification",
            "BeitConfig",
            _pictures,
            hidden_size=_WIDTH,
            num_hidden_layers=_DEPTH,
            num_attention_heads=_HEADS,
            intermediate_size=4 * _WIDTH,
            num_labels=10,
        ),
        hugging_face_model(
            "PatchTST",
            "PatchTSTForPrediction",
            "PatchTSTConfig",
            _series,
            d_model=_WIDTH // 2,
            ffn_dim=_WIDTH,
            num_hidden_layers=_DEPTH,
            num_attention_heads=_HEADS,
            **series,
        ),
    ]


def judging_models() -> list[GpuModel]:
    """Ten others, chosen before they were measured: by them it is decided for which engines the allocator is replayed.

    After their first figures one thing was mended, which MPNet had shown: dropout makes its mask before its output.
    """
    tokens = token_batch(8, _LENGTH, _WORDS)
    sizes = {"vocab_size": _WORDS, "hidden_size": _WIDTH, "num_hidden_layers": _DEPTH, "num_attention_heads": _HEADS}
    long = {**sizes, "intermediate_size": 4 * _WIDTH, "max_position_embeddings": 2 * _LENGTH}
    grouped = {**long, "num_key_value_heads": 4}
    labels = {**long, "num_labels": 4}
    series = {
        "num_input_channels": 7,
        "context_length": 512,
        "patch_length": 16,
        "patch_stride": 8,
        "prediction_length": 96,
        "num_layers": _DEPTH,
    }
    widths = {"encoder_layers": 3, "decoder_layers": 3, "encoder_ffn_dim": 4 * _WIDTH, "decoder_ffn_dim": 4 * _WIDTH}
    heads = {"encoder_attention_heads": _HEADS, "decoder_attention_heads": _HEADS}
    neo = {"attention_types": [[["global", "local"], _DEPTH // 2]], "intermediate_size": 4 * _WIDTH, "max_position_embeddings": _LENGTH}
    return [
        hugging_face_model("Qwen3", "Qwen3ForCausalLM", "Qwen3Config", tokens, **grouped, head_dim=64),
        hugging_face_model("Phi-3", "Phi3ForCausalLM", "Phi3Config", tokens, **grouped, pad_token_id=0),
        hugging_face_model("Cohere", "CohereForCausalLM", "CohereConfig", tokens, **grouped),
        hugging_face_model("GPT-Neo", "GPTNeoForCausalLM", "GPTNeoConfig", tokens, **_renamed(sizes), **neo),
        hugging_face_model("OLMoE", "OlmoeForCausalLM", "OlmoeConfig", tokens, **grouped, num_experts=8, num_experts_per_tok=2),
        hugging_face_model("MPNet", "MPNetForSequenceClassification", "MPNetConfig", _sentences(16), **labels),
        hugging_face_model("ESM", "EsmForSequenceClassification", "EsmConfig", _sentences(16), **labels, pad_token_id=1, mask_token_id=2),
        hugging_face_model("DINOv2", "Dinov2ForImageClassification", "Dinov2Config", _pictures, **_sight(), image_size=224, patch_size=16),
        hugging_face_model(
            "mBART", "MBartForConditionalGeneration", "MBartConfig", tokens, vocab_size=_WORDS, d_model=_WIDTH, **widths, **heads
        ),
        hugging_face_model("PatchTSMixer", "PatchTSMixerForPrediction", "PatchTSMixerConfig", _series, d_model=_WIDTH // 2, **series),
    ]


def _renamed(sizes: dict[str, int]) -> dict[str, int]:
    """GPT-Neo's names."""
    names = {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"}
    return {names.get(name, name): size for name, size in sizes.items()}


def _sight() -> dict[str, int]:
    return {"hidden_size": _WIDTH, "num_hidden_layers": _DEPTH, "num_attention_heads": _HEADS, "num_labels": 10}


def _sentences(rows: int) -> Callable[[], Any]:
    def batch() -> dict[str, Tensor]:
        mask = (torch.arange(_LENGTH) < torch.randint(_LENGTH // 2, _LENGTH + 1, (rows, 1))).long()
        return {"input_ids": torch.randint(5, _WORDS, (rows, _LENGTH)), "attention_mask": mask, "labels": torch.randint(0, 4, (rows,))}

    return batch


def _pictures() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(32, 3, 224, 224), "labels": torch.randint(0, 10, (32,))}


def _series() -> dict[str, Tensor]:
    return {"past_values": torch.randn(64, 512, 7), "future_values": torch.randn(64, 96, 7)}
