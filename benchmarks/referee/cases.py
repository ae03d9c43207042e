"""Random cases of planning: a model of real size, devices of the catalogue, precision, batch and optimizer. It knows no plan."""

from __future__ import annotations

import hashlib
import pickle
import random
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from memory.job import MakeOptimizer
from memory.zoo_gpu import GpuModel, gpu_models, hugging_face_model, token_batch
from rows.tracing import sources

from lightning_autopar.devices.inventory import Inventory
from lightning_autopar.devices.spec import parse_spec
from lightning_autopar.memory.batch_scaling import scaled
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.trace.trace import trace

#: Blocks, width, heads, heads of keys and values, width of the MLP, words and length of Llamas from 0.2 to 13 billion parameters.
LLAMAS = (
    (12, 1024, 16, 16, 2816, 32000, 512),
    (24, 1024, 16, 16, 2816, 32000, 1024),
    (22, 2048, 32, 4, 5632, 32000, 512),
    (16, 2048, 32, 8, 8192, 128256, 1024),
    (24, 2048, 16, 16, 5632, 32000, 512),
    (12, 2048, 16, 16, 5632, 32000, 512),
    (12, 2560, 20, 20, 6912, 32000, 1024),
    (12, 3072, 24, 24, 8192, 32000, 512),
    (28, 3072, 24, 8, 8192, 128256, 1024),
    (32, 4096, 32, 8, 14336, 128256, 1024),
    (40, 5120, 40, 40, 13824, 32000, 2048),
)
#: Models of the memory benchmark's zoo: other blocks, two stacks, pictures, none that repeat.
ZOO = ("GPT-2", "Gemma", "Mixtral", "T5", "BERT", "Wav2Vec2", "ViT", "ConvNeXt", "Swin", "ResNet, bottlenecks", "MLP")
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 1e-4),
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, 1e-4, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, 1e-3, fused=True),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, 1e-3, momentum=0.9),
}
DEVICES = ("RTX4090", "L4", "A10G", "RTX3090", "A100-40GB", "A100-80GB", "H100-80GB", "T4", "V100-32GB", "L40S")
COUNTS = (1, 1, 1, 1, 2, 2, 3, 4, 4, 6, 8, 8, 16, 32, 64)
ROWS_A_DEVICE = (1, 1, 2, 3, 4, 4, 6, 8, 16, 32)
_FOLDER = Path(__file__).resolve().parents[1] / ".cache" / "referee"
_TRACED_ROWS = 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """One question for the planner.

    Args:
        seed: that it was drawn from.
        model: name of one of :func:`models`.
        optimizer: name of one of ``OPTIMIZERS``.
        precision: Lightning's name.
        batch: samples of the global batch.
        devices: text of the devices.
        free: of each device, the share of its memory that is free.
        tight: where it says so, memory is cut to this share of the way from the least that a plan needs to what the fastest one needs.
    """

    seed: int
    model: str
    optimizer: str
    precision: str
    batch: int
    devices: str
    free: tuple[float, ...]
    tight: float | None

    def words(self) -> str:
        """A line for a table."""
        memory = "ample" if self.tight is None else f"tight {self.tight:.2f}"
        even = "" if len(set(self.free)) == 1 else ", uneven"
        return f"{self.model}, {self.optimizer}, {self.precision}, batch {self.batch}, {self.devices}{even}, {memory}"


def drawn(seed: int) -> Case:
    """The case of a seed; every second one is tight in memory."""
    draw = random.Random(seed)
    llama = draw.random() < 0.7
    model = f"Llama {draw.randrange(len(LLAMAS))}" if llama else draw.choice(ZOO)
    # Two optimizers a model, so that each is traced a few times and not dozens.
    optimizer = list(OPTIMIZERS)[(sum(map(ord, model)) + draw.randrange(2)) % len(OPTIMIZERS)]
    count, kind = draw.choice(COUNTS), draw.choice(DEVICES)
    devices = f"{count}x{kind}" if count <= 8 else f"{count // 8}x8x{kind}"
    free = (draw.uniform(0.85, 1.0),) * count
    shape = draw.random() if count > 1 else 1.0
    if shape < 0.25:
        free = tuple(draw.uniform(0.3, 1.0) for _ in range(count))
    elif shape < 0.4 and count in (2, 4, 8):
        other = draw.choice([name for name in DEVICES if name != kind])
        devices = f"{count // 2}x{kind},{count // 2}x{other}"
    batch = count * draw.choice(ROWS_A_DEVICE)
    if draw.random() < 0.2:
        batch = max(1, batch + draw.randrange(-count // 2, count // 2 + 1))
    return Case(
        seed=seed,
        model=model,
        optimizer=optimizer,
        precision=draw.choice(PRECISIONS),
        batch=batch,
        devices=devices,
        free=free,
        tight=draw.random() if seed % 2 else None,
    )


def models() -> dict[str, GpuModel]:
    """Every model, by name."""
    found = {model.name: model for model in gpu_models(small=False)}
    for number, (blocks, width, heads, key_heads, inner, words, length) in enumerate(LLAMAS):
        found[f"Llama {number}"] = hugging_face_model(
            f"Llama {number}",
            "LlamaForCausalLM",
            "LlamaConfig",
            token_batch(_TRACED_ROWS, length, words),
            vocab_size=words,
            hidden_size=width,
            intermediate_size=inner,
            num_hidden_layers=blocks,
            num_attention_heads=heads,
            num_key_value_heads=key_heads,
            max_position_embeddings=length,
        )
    return found


def footprint_of(case: Case) -> Footprint:
    """The case's step at its batch; each model is traced once for a precision and an optimizer, and kept on disk."""
    key = hashlib.sha256(f"{case.model} {case.optimizer} {case.precision} {_digest()}".encode()).hexdigest()[:24]
    file = _FOLDER / f"{key}.pickle"
    if file.is_file():
        found: Footprint = pickle.loads(file.read_bytes())
    else:
        found = traced(case.model, case.optimizer, case.precision)
        file.parent.mkdir(parents=True, exist_ok=True)
        (file.parent / ".gitignore").write_text("*\n", encoding="utf-8")
        part = file.with_suffix(f".{id(found)}.part")
        part.write_bytes(pickle.dumps(found))
        part.replace(file)
    return scaled(found, case.batch)


def inventory_of(case: Case) -> Inventory:
    """The case's devices with what is free on them, before a tight case's memory is cut."""
    here = parse_spec(case.devices)
    devices = tuple(replace(one, free_bytes=int(one.free_bytes * share)) for one, share in zip(here.devices, case.free, strict=True))
    return replace(here, devices=devices)


def traced(name: str, optimizer: str, precision: str) -> Footprint:
    """The step of a model of that name on a few samples."""
    model = models()[name]
    batch = model.batch()
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        built = model.build(OPTIMIZERS[optimizer])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = trace(built, None, batch, precision=precision, target="cuda")
    assert found.traced, (name, found.assumptions)
    return found


def _digest() -> str:
    """Of the code that makes a footprint."""
    digest = hashlib.sha256(repr((LLAMAS, _TRACED_ROWS)).encode())
    for name, code in sorted(sources().items()):
        digest.update(name.encode() + code)
    return digest.hexdigest()
