"""Predicted and measured seconds of a training step on CPU devices, by model and engine.

Rates are measured first, into a folder of this run's own; then each model is trained for some steps under each engine, on its own plan.
What an earlier run took corrects no prediction here. ``ratio`` is predicted over measured, ``measured`` the least of ``--repeats`` runs'
median step, as others' work on the machine makes a run longer, never shorter. ``busy`` is rank 0's processor time of a step, which others'
work changes less: of one rank, which never waits, it is the step's time on a quiet machine. One thread a device.

    python benchmarks/step_time.py                 # writes benchmarks/results/step_time.json
    python benchmarks/step_time.py --only gpt:ddp  # one of them, printed alone
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "step_time.json"
DEVICES = {"single": "2xcpu:2GiB", "ddp": "2xcpu:2GiB", "fsdp": "2xcpu:2GiB"}
MODELS = ("mlp", "gpt", "resnet", "lstm")
BOUND = 0.10


def module(name: str) -> tuple[Any, Any]:
    """A LightningModule and its samples."""
    import lightning as L
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
            self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, length, width = x.shape
            query, key, value = self.mix(self.before(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).reshape(batch, length, width)
            x = x + self.out(mixed)
            return x + self.down(F.gelu(self.up(self.between(x))))

    class GPT(nn.Module):
        def __init__(self, width: int = 192, layers: int = 6, length: int = 128) -> None:
            super().__init__()
            self.embed, self.place = nn.Embedding(256, width), nn.Embedding(length, width)
            self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x) + self.place(torch.arange(x.shape[1]))
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x)).flatten(0, 1)

    class Residual(nn.Module):
        def __init__(self, before: int, after: int) -> None:
            super().__init__()
            stride = after // before
            self.one, self.two = nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.Conv2d(after, after, 3, 1, 1, bias=False)
            self.a, self.b = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
            self.short = nn.Identity() if before == after else nn.Conv2d(before, after, 1, stride, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu(self.b(self.two(F.relu(self.a(self.one(x))))) + self.short(x))

    class LSTM(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lstm, self.head = nn.Embedding(256, 128), nn.LSTM(128, 256, 2, batch_first=True), nn.Linear(256, 256)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.lstm(self.embed(x))[0]).flatten(0, 1)

    samples = 64 * 40
    torch.manual_seed(0)
    if name == "mlp":
        layers = [
            nn.Linear(256, 1024),
            nn.GELU(),
            *(part for _ in range(4) for part in (nn.Linear(1024, 1024), nn.GELU())),
            nn.Linear(1024, 10),
        ]
        net, x, y = nn.Sequential(*layers), torch.randn(samples, 256), torch.randint(10, (samples,))
    elif name == "resnet":
        widths = [(32, 32), (32, 64), (64, 64), (64, 128), (128, 128)]
        blocks = (Residual(*width) for width in widths)
        net = nn.Sequential(
            nn.Conv2d(3, 32, 3, 1, 1), nn.BatchNorm2d(32), nn.ReLU(), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)
        )
        x, y = torch.randn(samples // 4, 3, 32, 32), torch.randint(10, (samples // 4,))
    else:
        net = GPT() if name == "gpt" else LSTM()
        text = torch.randint(256, (samples // 4, 129))
        x, y = text[:, :-1].contiguous(), text[:, 1:].contiguous()

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1].flatten())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    return Module(), torch.utils.data.TensorDataset(x, y)


BATCH = {"mlp": 64, "gpt": 16, "resnet": 16, "lstm": 16}


def busy_callback(path: Path) -> Any:
    """Rank 0 writes down the median of its steps' processor time."""
    import lightning as L

    class Busy(L.Callback):
        def __init__(self) -> None:
            self.taken: list[float] = []

        def on_train_batch_start(self, *args: Any) -> None:
            self.taken.append(time.process_time())

        def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            if trainer.global_rank == 0:
                steps = [b - a for a, b in itertools.pairwise(self.taken)][5:]
                path.write_text(repr(statistics.median(steps)), encoding="utf-8")

    return Busy()


def run(name: str, engine: str, steps: int) -> dict[str, Any]:
    """One model under one engine, in this process."""
    import lightning as L
    import torch
    from torch.utils.data import DataLoader

    from lightning_autopar.strategies.auto import AutoParallelStrategy

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    net, data = module(name)
    strategy = AutoParallelStrategy(allow=[engine], devices=DEVICES[engine])
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "busy"
        trainer = L.Trainer(accelerator="cpu", strategy=strategy, max_steps=steps, callbacks=[busy_callback(out)], **quiet)
        trainer.fit(net, DataLoader(data, batch_size=BATCH[name]))
        busy = float(out.read_text(encoding="utf-8"))
    assert strategy.report is not None
    best = strategy.report.best_candidate
    assert best is not None
    assert best.seconds is not None
    measured = max(values["step_seconds"] for values in strategy.measured.values())
    return {
        "model": name,
        "engine": engine,
        "plan": best.plan.title(),
        "predicted": best.seconds.to_dict(),
        "measured": measured,
        "busy": busy,
    }


def forget_runs(cache: Path) -> None:
    """Take what earlier runs took out of a cache. Measured rates stay: what isn't named here goes, under whatever name it is kept."""
    for folder in cache.glob("*"):
        if folder.name != "rates":
            shutil.rmtree(folder)


def run_anew(script: str, asked: Sequence[str], cache: Path) -> dict[str, Any]:
    """What a script prints last when it is called with ``--run``, in a process of its own that knows the rates and nothing else."""
    forget_runs(cache)
    environment = {**os.environ, "AUTOPAR_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, script, "--run", *asked]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(asked)} failed:\n{done.stderr[-3000:]}")
    printed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return printed


def measure(name: str, engine: str, cache: Path, repeats: int, steps: int) -> dict[str, Any]:
    """The best of some runs."""
    rows = [run_anew(__file__, [f"{name}:{engine}", "--steps", str(steps)], cache) for _ in range(repeats)]
    best = min(rows, key=lambda row: float(row["measured"]))
    return {**best, "ratio": best["predicted"]["step"] / best["measured"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="MODEL:ENGINE, or either alone")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--cache", type=Path, help="measured rates to use instead of measuring them first")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        print(json.dumps(run(*arguments.run.split(":"), arguments.steps)))
        return
    from machine import machine

    begun = time.monotonic()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        cache = arguments.cache or Path(folder)
        for name in MODELS:
            for engine in DEVICES:
                if arguments.only and arguments.only not in (f"{name}:{engine}", name, engine):
                    continue
                row = measure(name, engine, cache, arguments.repeats, arguments.steps)
                rows.append(row)
                parts = ", ".join(f"{part} {seconds * 1e3:.1f}" for part, seconds in row["predicted"].items() if seconds)
                taken = f"{row['measured'] * 1e3:8.2f} ms measured, ratio {row['ratio']:.2f}, busy {row['busy'] * 1e3:.2f} ms"
                print(f"{name:7} {row['plan']:22} {taken} ({parts})", flush=True)
    errors = sorted(abs(row["ratio"] - 1) for row in rows)
    summary = {
        "median_error": statistics.median(errors),
        "worst_error": errors[-1],
        "within_bound": sum(error <= BOUND for error in errors),
        "of": len(errors),
    }
    print(summary, f"{time.monotonic() - begun:.0f} s")
    if not arguments.only:
        RESULTS.write_text(json.dumps({**machine(), "bound": BOUND, "summary": summary, "rows": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
