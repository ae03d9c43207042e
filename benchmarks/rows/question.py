"""From a published row to what we would be asked: a module, its batch, a precision. Knows what each library does; measures nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rows.adapters import adapters
from rows.pictures import Picture, picture
from rows.row import Fields, NotBuilt
from rows.shape import Shape
from rows.training import Numbers, Pictures, Published


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a row asks.

    Args:
        shape: of a transformer; or a model of pictures; or the widths of a plain network.
        precision: the Trainer's, under which the step is traced.
        optimizer: a name that :func:`rows.optimizers.make_optimizer` knows.
        rows: samples of one rank's micro-batch.
        wide_storage: between steps parameters and gradients are in fp32, though the step sees them in 16 bits (FSDP's mixed precision).
        in_backward: the optimizer's step is part of backward.
    """

    shape: Shape | Picture | tuple[int, ...]
    precision: str
    optimizer: str
    rows: int
    wide_storage: bool = False
    in_backward: bool = False

    def build(self) -> Any:
        """The module, on meta: no memory is taken."""
        with torch.device("meta"):
            if isinstance(self.shape, Shape):
                return Published(self.shape, self.optimizer, self.in_backward)
            if isinstance(self.shape, Picture):
                net = self.shape.build()
                if self.shape.channels_last:
                    net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
                return Pictures(net, self.optimizer, self.in_backward)
            sizes = zip(self.shape[:-1], self.shape[1:], strict=True)
            return Numbers(nn.Sequential(*(nn.Linear(a, b) for a, b in sizes)), self.optimizer, self.in_backward)

    def batch(self) -> tuple[Tensor, Tensor]:
        """A batch as the module's step gets it."""
        shape = self.shape
        if isinstance(shape, tuple):
            return torch.zeros(self.rows, shape[0]), torch.zeros(self.rows)
        classes = torch.zeros(self.rows, dtype=torch.long)
        if isinstance(shape, Picture) or shape.kind == "vit":
            pictures = torch.zeros(self.rows, 3, shape.image, shape.image)
            last = isinstance(shape, Picture) and shape.channels_last
            return pictures.contiguous(memory_format=torch.channels_last) if last else pictures, classes
        tokens = torch.zeros((self.rows, shape.length), dtype=torch.long)
        per_token = shape.kind in ("decoder", "encoder-decoder") or shape.task == "masked"
        return tokens, tokens.clone() if per_token else classes

    @property
    def is_transformer(self) -> bool:
        """Whether its blocks are alike, one after the other."""
        return isinstance(self.shape, Shape)

    def with_layers(self, layers: int) -> Question:
        """The same with another number of blocks."""
        assert isinstance(self.shape, Shape)
        return replace(self, shape=replace(self.shape, layers=layers))


def question(fields: Fields) -> Question:
    """What the row asks.

    Raises:
        NotBuilt: naming what isn't known.
    """
    kind = fields.kind
    rows = fields.whole("micro_batch_per_gpu", 1)
    name, in_backward = optimizer(fields)
    shape: Shape | Picture | tuple[int, ...]
    if kind in ("decoder", "encoder", "vit", "encoder-decoder"):
        shape = transformer(fields)
    elif kind == "mlp":
        if (width := fields.dimension("hidden")) is None:
            raise NotBuilt("its width isn't published")
        inner, layers = fields.dimension("ffn"), fields.dimension("n_layers") or 1
        # With an inner width each layer is a gated one, of three products: as many parameters and operations as these.
        shape = (width,) * (1 + layers) if inner is None else (width, inner, width, inner)[:4] + (width, inner, width) * (layers - 1)
    else:
        shape = picture(fields)
    precision, wide = _precision(fields)
    return Question(shape=shape, precision=precision, optimizer=name, rows=rows, wide_storage=wide, in_backward=in_backward)


def _required(fields: Fields, *names: str) -> int:
    found = fields.dimension(*names)
    if found is None or found < 1:
        raise NotBuilt(f"its {names[0]} isn't published")
    return found


def transformer(fields: Fields) -> Shape:
    """Dimensions and manner.

    Raises:
        NotBuilt: where a dimension without which there is no model is missing.
    """
    arch, kind, family = fields.arch, fields.kind, fields.family
    if whole_experts := fields.dimension("n_experts", "num_experts"):
        raise NotBuilt(f"no mixture of {whole_experts} experts")
    layers, hidden = _required(fields, "n_layers"), _required(fields, "hidden")
    heads = fields.dimension("n_heads")
    if heads is None:
        heads = max(1, hidden // 64)
        fields.assume(f"the number of heads isn't published: {heads}, of 64 features each")
    encoder_layers = 0
    if kind == "encoder-decoder":
        parts = [int(part) for part in str(arch.get("n_layers")).split("+") if part.strip().isdigit()]
        encoder_layers = parts[0] if len(parts) == 2 else layers
    act, norm, position = _act(fields), str(arch.get("norm") or "").casefold(), str(arch.get("pos") or "").casefold()
    ffn = fields.dimension("ffn")
    if ffn is None:
        ffn = 4 * hidden
        fields.assume("the MLP's width isn't published: four times the model's")
    length = fields.dimension("seq_len")
    image, patch = fields.dimension("image") or 224, fields.dimension("patch") or 16
    if kind == "vit":
        length = (image // patch) ** 2 + 1
    elif length is None:
        length = 512
        fields.assume("the length of the samples isn't published: 512")
    if kind != "vit" and fields.dimension("vocab") is None:
        raise NotBuilt("its vocab isn't published")
    rms = "rms" in norm or (not norm and ((kind == "decoder" and act in ("swiglu", "geglu")) or _is_t5(fields)))
    rank, targets, embeddings = adapters(fields)
    quantised = _quantised(fields)
    hugging_face = family in ("hf", "fsdp_qlora")
    compiled = bool(fields.row.get("compile")) or ("fused" in fields.text("framework") and "swiglu" in fields.text("framework"))
    gemma2 = "gemma-2-" in fields.text("model") or "gemma2" in fields.text("model")
    shape = Shape(
        kind=kind,
        layers=layers,
        encoder_layers=encoder_layers,
        hidden=hidden,
        heads=heads,
        kv_heads=fields.dimension("n_kv_heads") or heads,
        head_dim=fields.dimension("head_dim") or hidden // heads,
        ffn=ffn,
        vocab=fields.dimension("vocab") or 0,
        length=length,
        tied=bool(arch.get("tied_embeddings")) and "head" not in targets,
        act=act,
        positions=_positions(position, kind, act),
        rotary_share=0.5 if "partial" in position else 1.0,
        norm=_norm_style(fields, compiled) if rms else "layernorm",
        embedding_norm="embedding" in norm,
        sandwich=gemma2,
        head_norm=bool(arch.get("qk_norm")),
        attention=_attention(fields),
        keeps_scores=fields.keeps_scores,
        softcap=50.0 if gemma2 else 0.0,
        task=_task(fields),
        bias=not rms and not str(arch.get("bias") or "yes").casefold().startswith(("no", "false")) and not _is_t5(fields),
        qkv_bias=rms and "qwen" in fields.text("model") and "qwen3" not in fields.text("model"),
        dropout=_dropout(fields),
        parallel=bool(arch.get("parallel_residual")),
        recompute=_kept_operations(fields),
        targets=targets,
        rank=rank,
        fused_heads=family in ("litgpt", "megatron", "nanotron", "composer", "timm") or "c_attn" in fields.text("trainable"),
        padded_adapters=family == "litgpt",
        wide_adapters=bool(rank) and family == "hf" and "autocast" in str(fields.precision.get("compute")),
        quantised=quantised,
        quantised_head=bool(quantised) and family == "litgpt",
        keeps_input=family not in ("torchtune", "torchtitan"),
        image=image,
        patch=patch,
        classes=fields.dimension("classes") or (fields.dimension("vocab") if kind == "vit" else None) or 2,
        train_embeddings=embeddings,
        # The defaults of litgpt's configurations, of peft's examples, and of fsdp_qlora's train.py.
        adapter_dropout=0.0 if not rank else 0.05 if family in ("litgpt", "hf") else 0.1 if family == "fsdp_qlora" else 0.0,
        repeats_heads=family == "litgpt" or (hugging_face and fields.dimension("n_kv_heads") != heads),
        fused=compiled,
        holds_output=family == "fsdp_qlora",  # ``output`` in train.py's loop, until it is set to None after the step
    )
    return replace(shape, **_loss(fields, shape))


def _is_t5(fields: Fields) -> bool:
    return "t5" in fields.text("model")


def _is_gpt2(fields: Fields) -> bool:
    return bool(re.search(r"gpt-?2", fields.text("model")))


def _act(fields: Fields) -> str:
    said = str(fields.arch.get("act") or "").casefold()
    for word, act in (("swiglu", "swiglu"), ("silu", "swiglu"), ("geglu", "geglu"), ("relu", "relu"), ("gelu", "gelu")):
        if word in said:
            # ``activation_function`` in the configuration of every GPT-2 is "gelu_new"; MLP blocks of BERT and ViT call torch's own.
            if act == "gelu" and "bingbert" in fields.text("framework"):  # its own, scripted (turing/nvidia_modeling.py, ``bias_gelu``)
                return "erf gelu"
            return "new gelu" if act == "gelu" and _is_gpt2(fields) and fields.family == "hf" else act
    rms = "rms" in str(fields.arch.get("norm") or "").casefold()
    act = "swiglu" if rms else "relu" if fields.kind == "encoder-decoder" else "gelu"
    fields.assume(f"the activation isn't published: {act}")
    return act


def _positions(said: str, kind: str, act: str) -> str:
    for word, positions in (("rope", "rope"), ("rotary", "rope"), ("alibi", "alibi"), ("learned", "learned")):
        if word in said:
            return positions
    if said or kind in ("vit", "encoder-decoder"):
        return "none"
    return "rope" if kind == "decoder" and act in ("swiglu", "geglu") else "learned"


def _norm_style(fields: Fields, compiled: bool) -> str:
    """How a library computes the root mean square norm."""
    family, version = fields.family, fields.torch_version
    if compiled or family in ("nanotron", "automodel") or "fused" in str(fields.arch.get("norm")):
        return "fused"
    # torchtitan had its own, which comes back to 16 bits before the weight, and has torch's since March 2025 (3b39d7ab0); that is one
    # kernel since torch 2.8.
    if family == "torchtitan" and version is not None and version >= (2, 8):
        return "fused"
    return "float" if family == "litgpt" else "hf"  # litgpt keeps fp32 to the end


def _attention(fields: Fields) -> str:
    said = fields.text("attention")
    if "fused softmax" in said:
        return "softmax"
    if "flash" in said or "flex" in said or "xformers" in said:
        return "flash"
    if "sdpa" in said and not said.startswith("sdpa math"):
        return "sdpa"
    if said.startswith(("math", "eager", "sdpa math")):
        return "math"
    style = "math" if fields.is_old else "sdpa"
    fields.assume(f"the attention isn't published: {style}")
    return style


def _task(fields: Fields) -> str:
    said = fields.text("model")
    if fields.kind != "encoder":
        return "classes"
    if "pre-train" in said or "pretrain" in said or "mlm" in said:
        return "masked"
    return "span" if "squad" in said or "question" in said else "classes"


def _dropout(fields: Fields) -> float:
    if (said := fields.arch.get("dropout")) is not None:
        try:
            return float(said)
        except (TypeError, ValueError):
            fields.assume("the dropout can't be read: none")
            return 0.0
    # What their papers and configurations have; models since Llama have none.
    old = fields.kind in ("encoder", "encoder-decoder") or fields.family == "megatron"
    gpt2 = "gpt" in fields.text("model") and fields.kind == "decoder" and fields.family == "hf"
    return 0.1 if old or gpt2 else 0.0


def _kept_operations(fields: Fields) -> str:
    """The same, with what a policy by operation keeps of products in low precision.

    torchtitan's keeps those of ATen's operations (``distributed/activation_checkpoint.py``, ``_get_default_save_ops``, b5bcd76), float8's
    and MXFP8's ``_scaled_mm`` among them. NVFP4's products are a Triton kernel of torchao's, which isn't among them.
    """
    how = recompute(fields)
    return "attention" if how == "operations" and "nvfp4" in str(fields.precision.get("compute")).casefold() else how


def recompute(fields: Fields) -> str:
    """Which blocks are recomputed in backward."""
    said, note = fields.text("activation_checkpointing"), fields.text("quality_note")
    if said.startswith("full"):
        return "full"
    if said.startswith("selective"):
        if "selective layer" in said or '"selective layer" (' in note or 'as "selective layer"' in note:
            return "every 2nd"
        if fields.family == "torchtitan":
            return "operations"
        fields.assume("which operations are kept isn't published: every second product of matrices")
        return "operations"
    if said.startswith(("no", "false")):
        return "none"
    default = "operations" if fields.family == "torchtitan" else "none"
    fields.assume(f"activation checkpointing isn't published: {default}")
    return default


def _loss(fields: Fields, shape: Shape) -> dict[str, Any]:
    """How the library computes the loss of a language model."""
    family = fields.family
    notes = f"{fields.precision.get('note')} {fields.row.get('quality_note')} {fields.row.get('model')} {fields.row.get('id')}".casefold()
    fused = "fused ce" in fields.text("framework") or "fused cross" in notes
    chunked = "chunked" in notes or "logits chunk" in notes
    autocast = "autocast" in str(fields.precision.get("compute")).casefold()
    if shape.kind not in ("decoder", "encoder-decoder"):
        return {"loss": "plain"}
    if "liger" in notes and "noliger" not in notes and "no liger" not in notes:
        return {"loss": "fused", "logits": "one chunk", "chunks": max(2, 2 ** (-(-shape.vocab // shape.hidden) - 1).bit_length())}
    if family == "litgpt":
        if fused:
            return {"loss": "fused"}
        # Fabric's precision plugins give what a module returns in fp32 (``convert_output``).
        if shape.rank:
            return {"loss": "plain", "logits": "kept chunks", "chunks": max(1, -(-shape.length // 128)), "wide_output": True}
        return {"loss": "plain", "logits": "shifted", "wide_output": True}
    if family == "torchtune":
        loss = "fused" if shape.fused else "wide"
        # Its decoder gives whole logits in fp32 (``self.output(h).float()``); in chunks they are for the loss to widen.
        return {"loss": loss, "logits": "kept chunks", "chunks": 8} if chunked else {"loss": loss, "wide_output": True}
    if family in ("megatron", "nanotron"):
        return {"loss": "in place"}  # nanotron's ``sharded_cross_entropy`` is Megatron-LM's
    if family in ("torchtitan", "automodel"):
        return {"loss": "fused" if shape.fused else "wide"}
    if family in ("hf", "fsdp_qlora"):
        # transformers' models since Llama give their logits in fp32; those with code of their own beside the weights needn't.
        own = "c_attn" in fields.text("trainable")
        return {"loss": "wide", "logits": "shifted", "wide_output": autocast or (shape.norm != "layernorm" and not own)}
    if family == "composer":
        return {"loss": "fused"}  # llm-foundry's default, flash-attn's kernel
    return {"loss": "fused" if shape.fused or fused else "plain"}


def _quantised(fields: Fields) -> str:
    stored = str(fields.precision.get("params") or "").casefold()
    if "nf4-dq" in stored:
        return "nf4-dq"
    return "nf4" if "nf4" in stored or "int4" in stored or "4-bit" in stored else ""


def _precision(fields: Fields) -> tuple[str, bool]:
    """The Trainer's precision for the trace; and whether parameters are kept in fp32 all the same."""
    stored = str(fields.precision.get("params") or "").casefold()
    compute = str(fields.precision.get("compute") or "").casefold()
    if not stored and not compute:
        fields.assume("the precision isn't published: parameters in fp32, computation in bf16 under autocast")
        stored, compute = "fp32", "bf16 autocast"
    half = "16" if "fp16" in compute or "float16" in compute.replace("bfloat16", "") else "bf16"
    if any(word in compute for word in ("fp8", "float8", "rowwise", "tensorwise", "nvfp4", "mxfp", "int8")):
        fields.assume(f"products in {compute!r} are taken to keep what bf16 would")
    if "autocast" in compute:
        return f"{half}-mixed", False
    if stored.startswith("fp32"):
        if compute.startswith(("fp32", "tf32")) or not compute:
            return "32-true", False
        if fields.text("strategy").startswith("fsdp"):
            return f"{half}-true", True
        return f"{half}-mixed", False
    return ("16-true" if "fp16" in stored and "bf16" not in stored else f"{half}-true"), False


def optimizer(fields: Fields) -> tuple[str, bool]:
    """Its name, and whether its step is part of backward.

    Raises:
        NotBuilt: for one that isn't known.
    """
    said, stored = fields.text("optimizer"), str(fields.precision.get("params") or "").casefold()
    states = str(fields.precision.get("optimizer") or "").casefold()
    in_backward = "fused into backward" in said or "in backward" in said
    if not said:
        fields.assume("the optimizer isn't published: AdamW")
    name = _optimizer_name(fields, said, stored, states)
    elsewhere = "cpu " if "cpu" in said or ("cpu" in fields.text("offload") and "optimizer" in fields.text("offload")) else ""
    if "paged" in said and (not states or "paged" in states or "see" in states):
        elsewhere = "paged "
    if elsewhere:
        kept = {"adamw": "wide loop", "adamw loop": "wide loop", "adamw fused": "kernel same" if "bf16" in stored else "kernel"}
        name = elsewhere + kept.get(name, name if name in ("adam8bit", "master", "kernel", "kernel same") else "kernel")
    return name, in_backward


def _optimizer_name(fields: Fields, said: str, stored: str, states: str) -> str:
    family = fields.family
    low = (("4-bit", "adam4bit"), ("4bit", "adam4bit"), ("fp8", "adam fp8"), ("8bit", "adam8bit"), ("8-bit", "adam8bit"))
    for word, name in low:
        if word in said:
            return name
    for word in ("lion", "muon", "shampoo", "sophia", "soap"):
        if word in said:
            raise NotBuilt(f"no optimizer {said!r}")
    if "rmsprop" in said:
        return "rmsprop"
    if "adafactor" in said:
        return "adafactor"
    if "sgd" in said:
        plain = "no momentum" in said or "momentum" not in said
        return ("sgd" if plain else "momentum") + (" loop" if fields.is_old else "")
    adapters_only = "adapter" in said
    if "master" in stored and not stored.startswith("fp32") and not adapters_only:
        return {"megatron": "master cast", "nanotron": "master gradients"}.get(family, "master")
    half = "16" in stored.split("+")[0] and not stored.startswith("fp32")
    if "lamb" in said or "apex" in said or family == "nvidia":
        return "kernel"
    wide = ("fp32" in states and "/" not in states) or "(fp32" in said
    if stored.startswith("fp32") and fields.text("strategy").startswith("fsdp"):
        compute = str(fields.precision.get("compute") or "")
        if not compute.startswith(("fp32", "tf32")) and "autocast" not in compute:
            return "kernel" if "fused" in said else "wide loop"  # the parameters are in 16 bits in the trace, the states aren't
    if half and wide and not adapters_only:
        return "kernel"
    if "fused" in said.replace("fused into", "") or family == "torchtune":  # whose configurations have fused=True
        return "adamw fused"
    old_hf = "(hf" in said
    return "adamw loop" if fields.is_old or old_hf or family == "composer" else "adamw"
