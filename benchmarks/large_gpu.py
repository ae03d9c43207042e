"""A model of seven billion parameters on one GPU of which 24 GiB may be used: what autopar chooses, and predicted beside measured.

    python benchmarks/large_gpu.py --json results/large_gpu.json           # two runs, some two minutes each
    python benchmarks/large_gpu.py --devices 1xcpu:2GiB --json out.json    # a rehearsal with tiny sizes: its figures are no GPU's

The module is of Llama 2 7B's shape, written here; nothing is downloaded, and weights are constants, as nothing measured depends on them. A
run is what a user's script would do: ``Trainer(strategy=AutoParallelStrategy(memory_limit=…))``, and ``fit``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import lightning.pytorch as pl
import torch
from offload_gpu import LLAMA, TINY, Llama, Size
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_autopar import AutoParallelStrategy

GIB, MIB = 1 << 30, 1 << 20
_WARM_UP, _STEPS = 2, 4
_MOST_SECONDS = 200.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """How a model is trained.

    Args:
        layers: of the model.
        adapter_rank: of adapters beside frozen layers; 0 where all parameters learn.
        limit_bytes: what of the device may be used.
    """

    layers: int
    adapter_rank: int
    limit_bytes: int

    @property
    def name(self) -> str:
        return f"{self.layers} layers, {'adapters' if self.adapter_rank else 'all parameters'}, {self.limit_bytes / GIB:.3g} GiB"


CASES = (Case(layers=32, adapter_rank=0, limit_bytes=24 * GIB), Case(layers=32, adapter_rank=16, limit_bytes=24 * GIB))
TINY_CASES = (Case(layers=8, adapter_rank=0, limit_bytes=8 * MIB), Case(layers=8, adapter_rank=4, limit_bytes=12 * MIB))


class Adapted(nn.Module):
    """A frozen linear layer, and beside it one of low rank that learns."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        whole, beside = self.layer(x), self.up(self.down(x))
        return torch.add(whole, beside)


class Tuned(Llama):
    """Writes down what its steps took, and leaves."""

    def __init__(self, size: Size, case: Case, out: Path) -> None:
        super().__init__(size, case.layers)
        self.case, self.target = case, out

    def configure_model(self) -> None:
        layers: Any = self.layers
        if layers is not None:
            return
        super().configure_model()
        if not self.case.adapter_rank:
            return
        self.requires_grad_(False)
        layers = self.layers
        for layer in layers:
            for name in ("query", "value"):
                setattr(layer, name, Adapted(getattr(layer, name), self.case.adapter_rank))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=1e-5)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize()
        self.begun.append(time.perf_counter())
        if batch_idx < _WARM_UP + _STEPS:
            return
        strategy: Any = self.trainer.strategy
        candidate = strategy.run_plan.candidate
        (held,), (needs,) = candidate.bytes.values(), candidate.needs.values()
        found = {
            "plan": candidate.plan.title(),
            "predicted": {
                "allocated_bytes": held.allocated,
                "reserved_bytes": held.reserved,
                "context_bytes": held.context,
                "needs_bytes": needs,
                "host": None if candidate.host is None else candidate.host.to_dict(),
                "seconds": candidate.seconds.to_dict(),
            },
            "measured": {
                "steps": [after - before for before, after in zip(self.begun, self.begun[1:], strict=False)][_WARM_UP:],
                "allocated_bytes": torch.cuda.max_memory_allocated() if on_gpu else strategy.meter.measured.peak_bytes,
                "reserved_bytes": torch.cuda.max_memory_reserved() if on_gpu else None,
                "retries": torch.cuda.memory_stats()["num_alloc_retries"] if on_gpu else None,
            },
        }
        found["step_seconds"] = statistics.median(found["measured"]["steps"])
        found["seconds_ratio"] = candidate.seconds.step / found["step_seconds"]
        found["allocated_ratio"] = held.allocated / found["measured"]["allocated_bytes"]
        self.target.write_text(json.dumps(found), encoding="utf-8")
        os._exit(0)  # what it would hand back to the script is as large as the host


def train(number: int, devices: str | None, out: Path) -> None:
    """The user's script."""
    case, size = (TINY_CASES[number], TINY) if devices else (CASES[number], LLAMA)
    tokens = TensorDataset(torch.randint(size.vocabulary, (size.batch * (_WARM_UP + _STEPS + 2), size.length + 1)))
    trainer = pl.Trainer(
        accelerator="cpu" if devices else "gpu",
        strategy=AutoParallelStrategy(devices=devices, memory_limit=case.limit_bytes),
        precision="32-true" if devices else "bf16-true",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Tuned(size, case, out), DataLoader(tokens, batch_size=size.batch))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="where the result goes")
    parser.add_argument("--devices", help="a CPU device such as 1xcpu:2GiB, for a rehearsal")
    parser.add_argument("--train", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        train(options.train, options.devices, options.json)
        return
    from machine import machine

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(TINY_CASES if options.devices else CASES):
            out, said = Path(folder) / f"{number}.json", Path(folder) / f"{number}.txt"
            command = [sys.executable, __file__, "--train", str(number), "--json", str(out)]
            begun = time.monotonic()
            with said.open("w+", encoding="utf-8") as words:
                process = subprocess.Popen(
                    [*command, *(["--devices", options.devices] if options.devices else [])], stdout=words, stderr=subprocess.STDOUT
                )
                try:
                    process.wait(_MOST_SECONDS)
                except subprocess.TimeoutExpired:
                    process.terminate()
                    process.wait()
                words.seek(0)
                last = words.read()
            found = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"error": f"exit code {process.returncode}"}
            rows.append({"case": case.name, **found, "took_seconds": round(time.monotonic() - begun, 1), "said": last[-6000:]})
            print(json.dumps({name: value for name, value in rows[-1].items() if name != "said"}), flush=True)
            if "error" in found:
                print(last[-3000:], flush=True)
            options.json.write_text(json.dumps({**machine(), "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
