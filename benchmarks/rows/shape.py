"""A transformer's dimensions and the manner in which a library computes it. Data only: it builds nothing and knows no row."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Dimensions and manner of a model.

    Args:
        kind: ``"decoder"``, ``"encoder"``, ``"vit"`` or ``"encoder-decoder"``.
        layers: of the stack; of an encoder-decoder those of its decoder.
        encoder_layers: of an encoder-decoder.
        act: ``"gelu"``, ``"new gelu"`` (the approximation by tanh, written out), ``"erf gelu"`` (the exact one, written out), ``"relu"``,
            ``"swiglu"``, ``"geglu"``.
        positions: ``"learned"``, ``"rope"``, ``"alibi"``, ``"none"``.
        rotary_share: the part of each head that is rotated.
        norm: ``"layernorm"``, or a style of :class:`rows.layers.RMSNorm`.
        embedding_norm: whether the embeddings are normalised.
        sandwich: whether attention and MLP are normalised on their way out, too (Gemma 2).
        head_norm: whether queries and keys are normalised by head (Qwen 3).
        attention: a style of :func:`rows.layers.attend`.
        keeps_scores: a softmax saves what enters it beside what it makes (torch before 1.11).
        softcap: bound of the scores, and logits are bounded likewise; 0 for none.
        loss: ``"plain"``, ``"wide"``, ``"fused"`` or ``"in place"``, as :func:`rows.fused.cross_entropy` has them.
        logits: ``"whole"``; ``"shifted"``: a copy without the last position first (Hugging Face); ``"kept chunks"``: made piece by piece,
            all of them there before the first loss (litgpt, torchtune); ``"one chunk"``: each piece's loss at once (a fused linear loss).
        chunks: pieces of the logits.
        wide_output: the logits are copied to fp32 on their way out of the model, as accelerate does under autocast.
        task: of an encoder: ``"classes"``, ``"span"`` (SQuAD) or ``"masked"`` (pre-training).
        bias: in the blocks' linear layers.
        qkv_bias: in those of query, key and value.
        dropout: after attention and MLP, and on attention's weights.
        parallel: attention and MLP both read the block's input.
        recompute: ``"none"``, ``"full"``, ``"every 2nd"`` block, ``"operations"``: all but attention and every other product, or
            ``"attention"``: all but that (torchtitan).
        targets: which linear layers get an adapter: of q, k, v, o, up, gate, down, head.
        rank: of the adapters; 0 for none.
        fused_heads: query, key and value are one layer; of litgpt's their adapters are padded.
        wide_adapters: adapters in fp32.
        quantised: the blocks' linear layers are frozen in four bits: ``""``, ``"nf4"`` or ``"nf4-dq"``.
        quantised_head: and so is the head.
        keeps_input: whether a quantised layer saves its input.
        image: side of the pictures; patch: of a patch; classes: of a classifier.
        train_embeddings: beside the adapters.
        adapter_dropout: on what enters an adapter.
        repeats_heads: shared keys and values are repeated before attention, rather than by its kernel.
        fused: chains of pointwise operations are one kernel each (a compiler).
        holds_output: the loop keeps the model's logits to the end of the step.
    """

    kind: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    length: int
    tied: bool
    encoder_layers: int = 0
    act: str = "gelu"
    positions: str = "learned"
    rotary_share: float = 1.0
    norm: str = "layernorm"
    embedding_norm: bool = False
    sandwich: bool = False
    head_norm: bool = False
    attention: str = "sdpa"
    keeps_scores: bool = False
    softcap: float = 0.0
    loss: str = "plain"
    logits: str = "whole"
    chunks: int = 1
    wide_output: bool = False
    task: str = "classes"
    bias: bool = True
    qkv_bias: bool = False
    dropout: float = 0.0
    parallel: bool = False
    recompute: str = "none"
    targets: tuple[str, ...] = ()
    rank: int = 0
    fused_heads: bool = False
    padded_adapters: bool = False
    wide_adapters: bool = False
    quantised: str = ""
    quantised_head: bool = False
    keeps_input: bool = True
    image: int = 0
    patch: int = 0
    classes: int = 2
    train_embeddings: bool = False
    adapter_dropout: float = 0.0
    repeats_heads: bool = False
    fused: bool = False
    holds_output: bool = False
