"""From a published row to what we would be asked: a module, its batch, a precision. Knows what each library does; measures nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rows.transformer import Published, Shape

Row = Mapping[str, Any]


class NotBuilt(ValueError):
    """A row whose model or setting this file has no word for."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a row asks.

    Args:
        shape: of the model.
        precision: the Trainer's.
        optimizer: ``"adamw"``, ``"adamw fused"``, ``"sgd"``.
        rows: samples of one rank's micro-batch.
    """

    shape: Shape
    precision: str
    optimizer: str
    rows: int

    def build(self) -> Published:
        """The module, on meta: no memory is taken."""
        with torch.device("meta"):
            return Published(self.shape, OPTIMIZERS[self.optimizer])

    def batch(self) -> tuple[Tensor, Tensor]:
        """A batch as the module's step gets it."""
        shape = self.shape
        if shape.kind == "vit":
            return torch.randn(self.rows, 3, shape.image, shape.image), torch.zeros(self.rows, dtype=torch.long)
        tokens = torch.randint(0, shape.vocab, (self.rows, shape.length))
        return tokens, tokens.clone() if shape.kind == "decoder" else torch.zeros(self.rows, dtype=torch.long)


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 1e-4),
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, 1e-4, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, 1e-3),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 1e-3, momentum=0.9),
}


def question(row: Row) -> Question:
    """What the row asks.

    Raises:
        NotBuilt: naming what isn't known.
    """
    return Question(shape=_shape(row), precision=_precision(row), optimizer=_optimizer(row), rows=int(row["micro_batch_per_gpu"]))


def _shape(row: Row) -> Shape:
    arch = row["arch"]
    kind = arch["type"]
    if kind not in ("decoder", "encoder", "vit"):
        raise NotBuilt(f"no model of type {kind!r}")
    if arch.get("seq_len") is None:
        raise NotBuilt("the length of its samples isn't published")
    framework = row["framework"]
    norm = str(arch.get("norm") or "layernorm")
    litgpt, tune = framework.startswith("litgpt"), framework == "torchtune"
    hugging_face = framework.startswith(("HF", "ms-swift", "fsdp_qlora", "Accelerate"))
    rank, targets, embeddings = _adapters(row)
    length = int(arch["seq_len"])
    hidden, heads = int(arch["hidden"]), int(arch["n_heads"])
    position = str(arch.get("pos") or "none")
    attention = str(row.get("attention") or "math")
    loss, chunks = "plain", 1
    if litgpt:
        loss, chunks = "chunked plain", max(1, length // 128)
    elif "chunked" in f"{row['precision'].get('note')} {row.get('quality_note')}".lower():
        loss, chunks = "chunked", 8
    elif hugging_face or tune:
        loss = "wide"
    return Shape(
        kind=kind,
        layers=int(arch["n_layers"]),
        hidden=hidden,
        heads=heads,
        kv_heads=int(arch["n_kv_heads"]),
        head_dim=int(arch.get("head_dim") or hidden // heads),
        ffn=int(arch["ffn"]),
        vocab=int(arch["vocab"] or 0),
        length=length,
        tied=bool(arch["tied_embeddings"]) and kind == "decoder" and "head" not in targets,
        act=str(arch["act"]),
        positions="rope" if position.startswith("rope") else "learned" if position.startswith("learned") else "none",
        rotary_share=0.5 if "partial" in position else 1.0,
        norm="layernorm" if "layernorm" in norm else "float" if litgpt else "hf",
        attention="softmax" if "fused softmax" in attention else "math" if attention.startswith("math") else "sdpa",
        loss=loss,
        chunks=chunks,
        bias=kind != "decoder" or norm.startswith(("layernorm", "low")),
        dropout=float(arch.get("dropout") or (0.1 if kind == "encoder" else 0.0)),
        parallel=bool(arch.get("parallel_residual")),
        checkpointing=str(row["activation_checkpointing"]).startswith("full"),
        targets=targets,
        rank=rank,
        fused_heads=litgpt,
        quantised=_quantised(row),
        image=int(arch.get("image") or 0),
        patch=int(arch.get("patch") or 0),
        classes=int(arch.get("classes") or arch.get("vocab") or 2) if kind == "vit" else 2,
        train_embeddings=embeddings,
        adapter_dropout=0.05 if litgpt and rank else 0.0,
        repeats_heads=litgpt,
    )


#: What libraries call the linear layers of a block.
_NAMES = {
    "c_attn": ("q", "k", "v"),
    "c_proj": ("o", "down"),
    "w1": ("up",),
    "w2": ("gate",),
    "mlp": ("gate", "up", "down"),
    "MLP": ("gate", "up", "down"),
    "all *_proj": ("q", "k", "v", "o", "gate", "up", "down"),
}


def _adapters(row: Row) -> tuple[int, tuple[str, ...], bool]:
    """Rank of the adapters, the layers that have one, and whether the embeddings are trained beside them."""
    said = str(row["trainable"])
    if said == "full":
        return 0, (), False
    found = re.match(r"q?lora(?:\(.*?\))? r(\d+)(?: alpha\d+)? on ([^+(]+(?:\+ MLP)?)", said)
    if found is None:
        raise NotBuilt(f"no word for the trainable part {said!r}")
    names = [name.strip() for name in found[2].replace("+", ",").split(",") if name.strip()]
    targets = tuple(layer for name in names for layer in _NAMES.get(name, (name,)))
    if unknown := set(targets) - {"q", "k", "v", "o", "gate", "up", "down", "head"}:
        raise NotBuilt(f"no layer called {sorted(unknown)[0]!r}")
    return int(found[1]), targets, "trainable wte" in said


def _quantised(row: Row) -> str:
    stored = str(row["precision"]["params"])
    if "nf4-dq" in stored:
        return "nf4-dq"
    return "nf4" if "nf4" in stored or "int4" in stored else ""


def _precision(row: Row) -> str:
    stored, compute = str(row["precision"]["params"]), str(row["precision"]["compute"])
    if "autocast" in compute:
        return "16-mixed" if compute.startswith("fp16") else "bf16-mixed"
    if stored.startswith("fp32") and compute == "fp32":
        return "32-true"
    if stored == "bf16" or "+ bf16 adapters" in stored:
        return "bf16-true"
    if "fp16 adapters" in stored:
        return "16-true"
    raise NotBuilt(f"no precision that stores {stored!r} and computes in {compute!r}")


def _optimizer(row: Row) -> str:
    said = str(row["optimizer"])
    unknown = ("fused into backward", "8bit", "FP8", "4-bit", "CPU", "LAMB", "RMSprop", "Adafactor", "Paged")
    if any(word in said for word in unknown):
        raise NotBuilt(f"no optimizer {said!r}")
    if said.startswith("SGD"):
        return "momentum" if "momentum 0" in said else "sgd"
    return "adamw fused" if "fused" in said else "adamw"
