"""Language models of Hugging Face, small, without dropout: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.zoo.member import ROWS, Member, hugging_face

WORDS, WIDTH, DEPTH, HEADS, LENGTH = 96, 32, 4, 4, 12

_LLAMA: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_BERT: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "pad_token_id": 0,
}


def tokens() -> dict[str, torch.Tensor]:
    words = torch.randint(5, WORDS, (ROWS, LENGTH))
    return {"input_ids": words, "labels": words.clone()}


def padded() -> dict[str, torch.Tensor]:
    """Sentences of several lengths, with a label each."""
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (ROWS, 1))
    mask = (torch.arange(LENGTH) < lengths).long()
    return {"input_ids": torch.randint(5, WORDS, (ROWS, LENGTH)) * mask, "attention_mask": mask, "labels": torch.randint(0, 3, (ROWS,))}


def masked() -> dict[str, torch.Tensor]:
    """As many words to guess in each sentence, so that the loss is a mean over the samples."""
    words = torch.randint(5, WORDS, (ROWS, LENGTH))
    labels = torch.full_like(words, -100)
    labels[:, 2::4] = words[:, 2::4]
    return {"input_ids": words.masked_fill(labels != -100, 4), "attention_mask": torch.ones_like(words), "labels": labels}


def pairs() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(5, WORDS, (ROWS, LENGTH)), "labels": torch.randint(5, WORDS, (ROWS, LENGTH - 3))}


def _causal(name: str, model: str, config: str, *, quick: bool = False, **settings: Any) -> Member:
    return hugging_face(name, model, config, tokens, quick=quick, **{**_LLAMA, **settings})


def _encoder(name: str, model: str, config: str, *, batch: Any = padded, quick: bool = False, **settings: Any) -> Member:
    return hugging_face(name, model, config, batch, quick=quick, **{**_BERT, **settings})


_SEQUENCE = {
    "vocab_size": WORDS,
    "d_model": WIDTH,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
_BART: dict[str, Any] = {
    **_SEQUENCE,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
}

LANGUAGE: list[Member] = [
    hugging_face(
        "GPT-2",
        "GPT2LMHeadModel",
        "GPT2Config",
        tokens,
        quick=True,
        vocab_size=WORDS,
        n_embd=WIDTH,
        n_layer=DEPTH,
        n_head=HEADS,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
    _causal("Llama", "LlamaForCausalLM", "LlamaConfig"),
    _causal("Mistral", "MistralForCausalLM", "MistralConfig", sliding_window=4),
    _causal("Qwen2", "Qwen2ForCausalLM", "Qwen2Config"),
    _causal("Qwen3", "Qwen3ForCausalLM", "Qwen3Config", head_dim=8),
    _causal("Gemma", "GemmaForCausalLM", "GemmaConfig", head_dim=8),
    _causal("Gemma 2", "Gemma2ForCausalLM", "Gemma2Config", head_dim=8, sliding_window=4, query_pre_attn_scalar=8),
    _causal("Phi", "PhiForCausalLM", "PhiConfig", resid_pdrop=0.0, embd_pdrop=0.0, attention_dropout=0.0),
    _causal("Phi-3", "Phi3ForCausalLM", "Phi3Config", resid_pdrop=0.0, embd_pdrop=0.0, attention_dropout=0.0),
    _causal("OLMo 2", "Olmo2ForCausalLM", "Olmo2Config"),
    _causal("StableLM", "StableLmForCausalLM", "StableLmConfig", hidden_dropout=0.0, attention_dropout=0.0),
    _causal("Granite", "GraniteForCausalLM", "GraniteConfig"),
    _causal("Cohere", "CohereForCausalLM", "CohereConfig"),
    _causal("Mixtral", "MixtralForCausalLM", "MixtralConfig", num_local_experts=4, num_experts_per_tok=2, experts_implementation="eager"),
    _causal("GPT-NeoX", "GPTNeoXForCausalLM", "GPTNeoXConfig", hidden_dropout=0.0, attention_dropout=0.0),
    hugging_face(
        "GPT-J",
        "GPTJForCausalLM",
        "GPTJConfig",
        tokens,
        vocab_size=WORDS,
        n_embd=WIDTH,
        n_layer=DEPTH,
        n_head=HEADS,
        n_positions=64,
        rotary_dim=4,
        bos_token_id=1,
        eos_token_id=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
    hugging_face(
        "OPT",
        "OPTForCausalLM",
        "OPTConfig",
        tokens,
        vocab_size=WORDS,
        hidden_size=WIDTH,
        ffn_dim=64,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        word_embed_proj_dim=WIDTH,
        max_position_embeddings=64,
        dropout=0.0,
        pad_token_id=1,
    ),
    hugging_face(
        "BLOOM",
        "BloomForCausalLM",
        "BloomConfig",
        tokens,
        vocab_size=WORDS,
        hidden_size=WIDTH,
        n_layer=DEPTH,
        n_head=HEADS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    hugging_face(
        "Falcon",
        "FalconForCausalLM",
        "FalconConfig",
        tokens,
        vocab_size=WORDS,
        hidden_size=WIDTH,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    _encoder("BERT", "BertForMaskedLM", "BertConfig", batch=masked),
    _encoder("RoBERTa", "RobertaForSequenceClassification", "RobertaConfig", num_labels=3),
    _encoder("ELECTRA", "ElectraForSequenceClassification", "ElectraConfig", num_labels=3, embedding_size=16),
    _encoder(
        "ALBERT",
        "AlbertForSequenceClassification",
        "AlbertConfig",
        num_labels=3,
        embedding_size=16,
        classifier_dropout_prob=0.0,
        quick=True,
    ),
    _encoder(
        "DeBERTa v2",
        "DebertaV2ForSequenceClassification",
        "DebertaV2Config",
        num_labels=3,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=8,
        pooler_hidden_size=WIDTH,
        pooler_dropout=0.0,
    ),
    _encoder(
        "ModernBERT",
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        batch=masked,
        global_attn_every_n_layers=2,
        local_attention=8,
        embedding_dropout=0.0,
        mlp_dropout=0.0,
        attention_dropout=0.0,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
    ),
    hugging_face(
        "DistilBERT",
        "DistilBertForSequenceClassification",
        "DistilBertConfig",
        padded,
        vocab_size=WORDS,
        dim=WIDTH,
        hidden_dim=64,
        n_layers=DEPTH,
        n_heads=HEADS,
        max_position_embeddings=64,
        dropout=0.0,
        attention_dropout=0.0,
        seq_classif_dropout=0.0,
        num_labels=3,
    ),
    hugging_face(
        "T5",
        "T5ForConditionalGeneration",
        "T5Config",
        pairs,
        quick=True,
        vocab_size=WORDS,
        d_model=WIDTH,
        d_kv=8,
        d_ff=64,
        num_layers=3,
        num_decoder_layers=3,
        num_heads=HEADS,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    ),
    hugging_face("BART", "BartForConditionalGeneration", "BartConfig", pairs, **_BART),
    hugging_face("Pegasus", "PegasusForConditionalGeneration", "PegasusConfig", pairs, **_BART),
    _causal("RecurrentGemma", "RecurrentGemmaForCausalLM", "RecurrentGemmaConfig", num_hidden_layers=6, lru_width=WIDTH),
]
