"""Language models of Hugging Face, built from their configurations: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memory.job import Job, Learner, MakeOptimizer, adam, adamw, hugging_face, momentum, own_loss, sgd

VOCABULARY = 8000
WIDTH, DEPTH, HEADS = 256, 4, 4


def _hf(model: str, config: str, optimizer: MakeOptimizer = adamw, checkpointing: bool = False, **settings: Any) -> Any:
    """A function that builds the model of that class with that configuration."""

    def build() -> Learner:
        net = hugging_face(model, config, checkpointing=checkpointing, **settings)
        return Learner(net, own_loss, optimizer)

    return build


def _tokens(rows: int = 4, length: int = 128, vocabulary: int = VOCABULARY, mask: bool = False) -> Any:
    def batch() -> dict[str, Tensor]:
        tokens = torch.randint(5, vocabulary, (rows, length))
        return {"input_ids": tokens, "labels": tokens.clone()} | ({"attention_mask": torch.ones_like(tokens)} if mask else {})

    return batch


def _sentences(rows: int = 4, length: int = 128, labels: int = 4) -> Any:
    def batch() -> dict[str, Tensor]:
        tokens = torch.randint(5, VOCABULARY, (rows, length))
        mask = (torch.arange(length) < torch.randint(length // 2, length + 1, (rows, 1))).long()
        return {"input_ids": tokens, "attention_mask": mask, "labels": torch.randint(0, labels, (rows,))}

    return batch


def _adafactor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, 1e-3)


def _job(name: str, build: Any, batch: Any = None, *, quick: bool = False, **trainer: Any) -> Job:
    return Job(name=name, family="language", build=build, batch=batch or _tokens(), trainer=trainer, quick=quick)


_LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 688,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 1024,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS,
    "num_labels": 4,
}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": DEPTH, "n_head": HEADS}

LANGUAGE: list[Job] = [
    _job("GPT-2", _hf("GPT2LMHeadModel", "GPT2Config", **_GPT2), quick=True),
    _job("GPT-2 124M", _hf("GPT2LMHeadModel", "GPT2Config"), _tokens(1, 256, 50257)),
    _job("GPT-2 (bf16-mixed)", _hf("GPT2LMHeadModel", "GPT2Config", **_GPT2), _tokens(2, 48), precision="bf16-mixed"),
    _job("GPT-2 (checkpointing)", _hf("GPT2LMHeadModel", "GPT2Config", checkpointing=True, **_GPT2), _tokens(8, 256)),
    _job("GPT-2 (eager attention)", _hf("GPT2LMHeadModel", "GPT2Config", attn_implementation="eager", **_GPT2), _tokens(4, 256)),
    _job("Llama", _hf("LlamaForCausalLM", "LlamaConfig", **_LLAMA), gradient_clip_val=1.0),
    _job("Llama (bf16-true)", _hf("LlamaForCausalLM", "LlamaConfig", **_LLAMA), _tokens(2, 48), precision="bf16-true"),
    _job("Llama (accumulating)", _hf("LlamaForCausalLM", "LlamaConfig", momentum, **_LLAMA), accumulate_grad_batches=2),
    _job("Mistral", _hf("MistralForCausalLM", "MistralConfig", sliding_window=64, **_LLAMA)),
    _job("Qwen2", _hf("Qwen2ForCausalLM", "Qwen2Config", adam, **_LLAMA)),
    _job("Qwen3", _hf("Qwen3ForCausalLM", "Qwen3Config", head_dim=64, **_LLAMA)),
    _job("Gemma", _hf("GemmaForCausalLM", "GemmaConfig", head_dim=64, **_LLAMA)),
    _job("Phi", _hf("PhiForCausalLM", "PhiConfig", **_LLAMA | {"num_key_value_heads": 4})),
    _job("OLMo2", _hf("Olmo2ForCausalLM", "Olmo2Config", **_LLAMA), _tokens(mask=True)),
    _job("GPT-NeoX", _hf("GPTNeoXForCausalLM", "GPTNeoXConfig", **_BERT)),
    _job(
        "OPT",
        _hf(
            "OPTForCausalLM",
            "OPTConfig",
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            ffn_dim=1024,
            num_hidden_layers=DEPTH,
            num_attention_heads=HEADS,
            word_embed_proj_dim=WIDTH,
        ),
    ),
    _job("Bloom", _hf("BloomForCausalLM", "BloomConfig", vocab_size=VOCABULARY, hidden_size=WIDTH, n_layer=DEPTH, n_head=HEADS)),
    _job(
        "Falcon",
        _hf(
            "FalconForCausalLM",
            "FalconConfig",
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_hidden_layers=DEPTH,
            num_attention_heads=HEADS,
        ),
    ),
    _job("Mixtral", _hf("MixtralForCausalLM", "MixtralConfig", num_local_experts=4, num_experts_per_tok=2, **_LLAMA)),
    _job(
        "Mixtral (eager experts)",
        _hf("MixtralForCausalLM", "MixtralConfig", num_local_experts=4, num_experts_per_tok=2, experts_implementation="eager", **_LLAMA),
    ),
    _job("Mamba", _hf("MambaForCausalLM", "MambaConfig", vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2), _tokens(2, 64)),
    _job("BERT", _hf("BertForSequenceClassification", "BertConfig", **_BERT), _sentences(), quick=True),
    _job("BERT (masked tokens)", _hf("BertForMaskedLM", "BertConfig", **_BERT), _tokens(mask=True)),
    _job("RoBERTa", _hf("RobertaForSequenceClassification", "RobertaConfig", sgd, **_BERT), _sentences()),
    _job("ELECTRA", _hf("ElectraForSequenceClassification", "ElectraConfig", embedding_size=128, **_BERT), _sentences()),
    _job("ALBERT", _hf("AlbertForSequenceClassification", "AlbertConfig", embedding_size=128, **_BERT), _sentences()),
    _job(
        "DeBERTa",
        _hf(
            "DebertaV2ForSequenceClassification",
            "DebertaV2Config",
            relative_attention=True,
            position_buckets=64,
            pos_att_type=["p2c", "c2p"],
            **_BERT,
        ),
        _sentences(),
    ),
    _job(
        "DistilBERT",
        _hf(
            "DistilBertForSequenceClassification",
            "DistilBertConfig",
            vocab_size=VOCABULARY,
            dim=WIDTH,
            hidden_dim=1024,
            n_layers=DEPTH,
            n_heads=HEADS,
            num_labels=4,
        ),
        _sentences(),
    ),
    _job(
        "ModernBERT",
        _hf(
            "ModernBertForSequenceClassification",
            "ModernBertConfig",
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            cls_token_id=1,
            sep_token_id=2,
            **_BERT,
        ),
        _sentences(),
    ),
    _job(
        "T5",
        _hf(
            "T5ForConditionalGeneration",
            "T5Config",
            _adafactor,
            vocab_size=VOCABULARY,
            d_model=WIDTH,
            d_kv=64,
            d_ff=1024,
            num_layers=3,
            num_heads=HEADS,
            decoder_start_token_id=0,
        ),
        _tokens(4, 96),
    ),
    _job(
        "BART",
        _hf(
            "BartForConditionalGeneration",
            "BartConfig",
            vocab_size=VOCABULARY,
            d_model=WIDTH,
            encoder_layers=3,
            decoder_layers=3,
            encoder_attention_heads=HEADS,
            decoder_attention_heads=HEADS,
            encoder_ffn_dim=1024,
            decoder_ffn_dim=1024,
        ),
        _tokens(4, 96),
    ),
]
