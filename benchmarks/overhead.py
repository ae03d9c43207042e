"""What autopar costs over the same plan written by hand with Lightning's own strategy.

Three figures, each from fresh processes, by hand and with autopar in turns:

- step: seconds a step, the same plan on both sides (one device, DDP, FSDP2). Both sides' processes are there at once and train in turns, a
  block of steps each; which side comes first changes from block to block. Two processes of one side differ by up to 3 % for as long as
  they live: so several pairs of processes are started, one after the other. Told are the median of their ratios and its 95 % interval, of
  the wall's seconds and of the CPU seconds of all ranks together, which other people's work disturbs less;
- first_step: seconds from the call of ``fit`` to the start of the first step, autopar's planning included, against Lightning's DDP;
- memory: host memory (sum of PSS over all processes) of four ranks around one model, at its peak before the first step.

Steps are measured with and without dropout. Under several ranks autopar draws every random number of the whole batch on each rank, so
that the run is that of one device; by hand each rank draws its own, which is less work and another run.

On both sides the global batch is the same: by hand each rank loads batch / ranks samples. Each rank computes with one thread.

    python benchmarks/overhead.py                 # writes benchmarks/results/overhead.json
    python benchmarks/overhead.py --quick         # a smoke test: seconds instead of minutes, figures without meaning
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from machine import machine

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "overhead.json"
sys.path.insert(0, str(HERE.parent / "examples"))

ENGINES = ("single", "ddp", "fsdp")
SIDES = ("hand", "autopar")
RANKS = {"single": 1, "ddp": 2, "fsdp": 2}
STEP_BOUNDS = {"single": 1.01, "ddp": 1.02, "fsdp": 1.02}
DROPOUTS = {"no_dropout": 0.0, "dropout": 0.02}
FIRST_STEP_BOUND = 1.0
MEMORY_BOUND = 1.5
MEMORY_RANKS = 4


# -- one run, in a process of its own ------------------------------------------------------------


def run(arguments: argparse.Namespace) -> None:
    """Train for a few steps; rank 0 leaves the times in ``arguments.out``, every rank a mark when it reaches its first step."""
    import lightning as L
    import psutil
    import torch
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
    from torch.utils.data import DataLoader, TensorDataset
    from train_gpt import ByteGPT

    class Recorder(L.Callback):
        """Writes down when each step began and ended, and the CPU seconds that this rank had used by then."""

        def __init__(self) -> None:
            self.begun: list[float] = []
            self.blocks: list[dict[str, float]] = []
            self.since: tuple[float, float] | None = None

        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            torch.set_num_threads(1)

        def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int) -> None:
            self.begun.append(time.monotonic())
            if batch_idx == 0:
                Path(f"{arguments.out}.rank{trainer.global_rank}").touch()
            if arguments.block and batch_idx % arguments.block == 0:
                self.take_turns(trainer.global_rank, batch_idx // arguments.block)

        def take_turns(self, rank: int, block: int) -> None:
            """A block is over: write down what it took, and wait for the next turn."""
            if self.since is not None:
                wall, cpu = self.since
                self.blocks.append({"wall": time.monotonic() - wall, "cpu": time.process_time() - cpu})
            Path(f"{arguments.out}.at{block}.rank{rank}").touch()
            go = Path(f"{arguments.out}.go{block}")
            while not go.exists():
                time.sleep(0.002)
            self.since = time.monotonic(), time.process_time()

        def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            times = {"fit": fit, "begun": self.begun, "blocks": self.blocks, "world_size": trainer.world_size}
            Path(f"{arguments.out}.times{trainer.global_rank}").write_text(json.dumps(times), encoding="utf-8")

    class HandSharded(ByteGPT):
        """What somebody writes to run ByteGPT under Lightning's FSDP2."""

        def configure_model(self) -> None:
            from torch.distributed.fsdp import FSDPModule, fully_shard

            if isinstance(self, FSDPModule):
                return
            mesh = self.device_mesh["data_parallel"]
            for block in self.blocks:
                fully_shard(block, mesh=mesh, reshard_after_forward=True)
            fully_shard(self, mesh=mesh)

    class Wide(L.LightningModule):
        """As many bytes of parameters as asked for, in square layers. Ends when its first step is due."""

        def __init__(self, model_bytes: int) -> None:
            super().__init__()
            width = min(4096, int((model_bytes / 8) ** 0.5))  # at least two layers: one alone is no repeated block
            layers = round(model_bytes / (4 * width * width))
            self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=False) for _ in range(layers))

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int:
            return -1

        def training_step(self, batch: tuple[torch.Tensor], batch_idx: int) -> torch.Tensor:
            x = batch[0].expand(-1, self.layers[0].in_features)
            for layer in self.layers:
                x = layer(x)
            return x.square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    torch.set_num_threads(1)
    L.seed_everything(1)
    ranks, by_hand = arguments.ranks, arguments.side == "hand"
    share = arguments.batch // ranks if by_hand else arguments.batch
    if arguments.model == "gpt":
        kind = HandSharded if by_hand and arguments.engine == "fsdp" else ByteGPT
        model: L.LightningModule = kind(layers=arguments.layers, width=arguments.width, context=128, dropout=arguments.dropout)
        data = TensorDataset(*torch.randint(0, 256, (2, arguments.batch * arguments.steps, 128)).unbind(0))
    else:
        model = Wide(arguments.model_bytes)
        data = TensorDataset(torch.randn(arguments.batch * arguments.steps, 1))

    options: dict[str, Any]
    if by_hand:
        strategies: dict[str, Any] = {
            "single": lambda: "auto",
            "ddp": lambda: DDPStrategy(process_group_backend="gloo", gradient_as_bucket_view=True),
            "fsdp": lambda: ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1, process_group_backend="gloo"),
        }
        options = {"accelerator": "cpu", "devices": ranks, "strategy": strategies[arguments.engine]()}
    else:
        from lightning_autopar import AutoParallelStrategy, Plan

        devices = tuple(f"cpu:{rank}" for rank in range(ranks))
        blocks = tuple(f"{'blocks' if arguments.model == 'gpt' else 'layers'}.{index}" for index in range(arguments.layers))
        sharding = {"reshard_after_forward": True, "shard": blocks} if arguments.engine == "fsdp" else {}
        plan = Plan(engine=arguments.engine, devices=devices, **sharding) if arguments.pinned else None
        spec = f"{ranks}xcpu:{arguments.budget}"
        options = {"accelerator": "cpu", "strategy": AutoParallelStrategy(allow=[arguments.engine], plan=plan, devices=spec)}
    trainer = L.Trainer(
        **options,
        max_steps=arguments.steps,
        max_epochs=1,
        callbacks=[Recorder()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    Path(f"{arguments.out}.built").write_text(str(psutil.Process().memory_full_info().pss), encoding="utf-8")
    fit = time.monotonic()
    trainer.fit(model, DataLoader(data, batch_size=share, shuffle=True))


# -- the comparison ------------------------------------------------------------


class Runs:
    """Starts the runs and reads what they leave."""

    def __init__(self, folder: Path, timeout_seconds: float) -> None:
        self.folder = folder
        self.timeout_seconds = timeout_seconds
        self.count = 0

    def start(self, side: str, engine: str, ranks: int, **options: Any) -> tuple[subprocess.Popen[bytes], Path]:
        """A fresh process that runs :func:`run`, and the file in which it will leave its times."""
        self.count += 1
        out = self.folder / f"{self.count}.json"
        command = [
            sys.executable,
            str(Path(__file__).resolve()),
            "--run",
            "--side",
            side,
            "--engine",
            engine,
            "--ranks",
            str(ranks),
            "--out",
            str(out),
        ]
        for name, value in options.items():
            command += (
                [f"--{name.replace('_', '-')}"] if value is True else [] if value is False else [f"--{name.replace('_', '-')}", str(value)]
            )
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment.pop("AUTOPAR_DEVICES", None)
        log = out.with_suffix(".log").open("wb")
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT), out

    def times(self, side: str, engine: str, ranks: int, **options: Any) -> list[dict[str, Any]]:
        """Run to the end; the times that each rank left.

        Raises:
            RuntimeError: if the run failed, with its output.
        """
        process, out = self.start(side, engine, ranks, **options)
        return self._left(process, out, ranks)

    def in_blocks(self, engine: str, ranks: int, *, blocks: int, block: int, **options: Any) -> dict[str, list[list[dict[str, float]]]]:
        """Both sides train in turns, a block of steps each; what each block took on each rank, by side, block and rank.

        Raises:
            RuntimeError: if a run failed, with its output.
        """
        steps = blocks * block + 1  # with the last one a rank comes to the end of the last block
        begun = {side: self.start(side, engine, ranks, steps=steps, block=block, **options) for side in SIDES}
        try:
            for number in range(blocks + 1):
                for side in in_turns(number):
                    self._wait_for(*begun[side], number, ranks)
                for side in in_turns(number):
                    process, out = begun[side]
                    Path(f"{out}.go{number}").touch()
                    if number < blocks:
                        self._wait_for(process, out, number + 1, ranks)
            left = {side: self._left(*begun[side], ranks) for side in SIDES}
        finally:
            for process, _ in begun.values():
                process.kill()
                process.wait()
        return {side: [list(each) for each in zip(*(rank["blocks"] for rank in left[side]), strict=True)] for side in SIDES}

    def _wait_for(self, process: subprocess.Popen[bytes], out: Path, block: int, ranks: int) -> None:
        """Until all ranks of a side wait for their turn at this block."""
        deadline = time.monotonic() + self.timeout_seconds
        while not all(Path(f"{out}.at{block}.rank{rank}").exists() for rank in range(ranks)):
            if process.poll() is not None or time.monotonic() > deadline:
                process.terminate()
                self._ended(process, out)
                raise RuntimeError(f"{process.args} ended before block {block}")
            time.sleep(0.002)

    def _left(self, process: subprocess.Popen[bytes], out: Path, ranks: int) -> list[dict[str, Any]]:
        self._ended(process, out)
        left: list[dict[str, Any]] = [json.loads(Path(f"{out}.times{rank}").read_text(encoding="utf-8")) for rank in range(ranks)]
        if left[0]["world_size"] != ranks:
            raise RuntimeError(f"{process.args} ran on {left[0]['world_size']} ranks, not {ranks}")
        return left

    def loading(self, side: str, engine: str, ranks: int, **options: Any) -> dict[str, int]:
        """Run to the end; the peak of all its processes' PSS until every rank was at its first step, and the PSS at the call of ``fit``."""
        import psutil

        process, out = self.start(side, engine, ranks, **options)
        peak = 0
        deadline = time.monotonic() + self.timeout_seconds
        # Nothing tells of another process's memory but looking.
        while not all(Path(f"{out}.rank{rank}").exists() for rank in range(ranks)) and process.poll() is None:
            if time.monotonic() > deadline:
                process.terminate()
            peak = max(peak, total_pss(psutil.Process(process.pid)))
            time.sleep(0.02)
        self._ended(process, out)
        return {"peak_bytes": peak, "built_bytes": int(Path(f"{out}.built").read_text(encoding="utf-8"))}

    def _ended(self, process: subprocess.Popen[bytes], out: Path) -> None:
        try:
            code = process.wait(timeout=self.timeout_seconds)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
            code = -1
        if code != 0:
            raise RuntimeError(
                f"exit code {code} of {process.args}\n{out.with_suffix('.log').read_text(encoding='utf-8', errors='replace')[-6000:]}"
            )


def total_pss(root: Any) -> int:
    """Bytes of memory of a process and all below it, each shared page counted once."""
    import psutil

    total = 0
    try:
        for process in (root, *root.children(recursive=True)):
            try:
                total += process.memory_full_info().pss
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue  # it ended between being listed and being looked at
    except psutil.NoSuchProcess:
        pass
    return total


def in_turns(repetition: int) -> tuple[str, str]:
    """Both sides, each first as often as the other."""
    return SIDES if repetition % 2 == 0 else (SIDES[1], SIDES[0])


def compare(measured: dict[str, list[float]], bound: float) -> dict[str, Any]:
    """The sides' figures, the median of the pairs' ratios and its 95 % interval."""
    ratios = [autopar / hand for hand, autopar in zip(measured["hand"], measured["autopar"], strict=True)]
    ratio = statistics.median(ratios)
    rounded = {side: [round(value, 6) for value in values] for side, values in measured.items()}
    return {
        **rounded,
        "ratios": [round(value, 4) for value in ratios],
        "ratio": round(ratio, 4),
        "interval": [round(value, 4) for value in median_interval(ratios)],
        "bound": bound,
        "within": ratio <= bound,
    }


def median_interval(values: list[float]) -> tuple[float, float]:
    """In which the median lies with 95 %, however the values are distributed: between two of them (the sign test's interval)."""
    ordered, count = sorted(values), len(values)
    below, place = 0.0, 0
    while (below := below + math.comb(count, place) / 2**count) <= 0.025:
        place += 1
    place = max(0, place - 1)
    return ordered[place], ordered[-1 - place]


def measure_steps(runs: Runs, engine: str, pairs: int, blocks: int, block: int, **model: Any) -> dict[str, Any]:
    """Seconds a step of one engine, the plan pinned: of each process the median block's. The first block warms up."""
    wall: dict[str, list[float]] = {side: [] for side in SIDES}
    cpu: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(pairs):
        found = runs.in_blocks(engine, RANKS[engine], blocks=blocks + 1, block=block, pinned=True, **model)
        for side in SIDES:
            # A step is over when all ranks are there; what it costs is what all of them took together.
            wall[side].append(statistics.median(max(rank["wall"] for rank in ranks) / block for ranks in found[side][1:]))
            cpu[side].append(statistics.median(sum(rank["cpu"] for rank in ranks) / block for ranks in found[side][1:]))
    return {**compare(wall, STEP_BOUNDS[engine]), "cpu": compare(cpu, STEP_BOUNDS[engine])}


def measure_first_step(runs: Runs, repetitions: int, **model: Any) -> dict[str, Any]:
    """Seconds from the call of ``fit`` to the start of the first step; autopar finds its plan itself."""
    measured: dict[str, list[float]] = {side: [] for side in SIDES}
    for repetition in range(repetitions):
        for side in in_turns(repetition):
            times = runs.times(side, "ddp", 2, steps=2, **model)
            measured[side].append(times[0]["begun"][0] - times[0]["fit"])
    return compare(measured, FIRST_STEP_BOUND)


def measure_memory(runs: Runs, engines: tuple[str, ...], model_bytes: int, layers: int) -> dict[str, Any]:
    """Host memory of four ranks under autopar's engines, against Lightning's DDP."""
    options = {"model": "wide", "model_bytes": model_bytes, "layers": layers, "steps": 2, "batch": 8, "budget": "16GiB"}
    found: dict[str, Any] = {"model_bytes": model_bytes, "ranks": MEMORY_RANKS, "bound": MEMORY_BOUND}
    for side, engine in (("hand", "ddp"), *(("autopar", engine) for engine in engines)):
        loading = runs.loading(side, engine, MEMORY_RANKS, pinned=True, **options)
        found[f"{side}_{engine}"] = {**loading, "peak_over_model": round(loading["peak_bytes"] / model_bytes, 3)}
    found["within"] = all(found[f"autopar_{engine}"]["peak_over_model"] <= MEMORY_BOUND for engine in engines)
    return found


def benchmark(quick: bool, only: str | None = None, engine: str | None = None) -> dict[str, Any]:
    """All figures, or those asked for, as the JSON file holds them; each is printed when it is known."""
    if quick:
        repetitions, pairs, blocks, block = 1, 1, 1, 3
        model: dict[str, Any] = {"layers": 2, "width": 64, "batch": 4}
        model_bytes, layers = 8 * 1024**2, 2
    else:
        repetitions, pairs, blocks, block = 5, 8, 6, 4
        model = {"layers": 4, "width": 128, "batch": 16}
        model_bytes, layers = 1024**3, 16
    settings = {"repetitions": repetitions, "pairs": pairs, "blocks": blocks, "steps_a_block": block, **model}
    report: dict[str, Any] = {**machine(), "quick": quick, "settings": settings}
    engines = (engine,) if engine else ENGINES
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        runs = Runs(Path(folder), timeout_seconds=300)
        if only in (None, "step"):
            report["step"] = {}
            for name, (kind, dropout) in itertools.product(engines, DROPOUTS.items()):
                found = measure_steps(runs, name, pairs, blocks, block, dropout=dropout, **model)
                report["step"].setdefault(name, {})[kind] = found
                print(f"step, {name}, {kind}: {line(found)}; CPU: {line(found['cpu'])}", flush=True)
        if only in (None, "first_step"):
            report["first_step"] = measure_first_step(runs, repetitions, **model)
            print(f"first step: {line(report['first_step'])}", flush=True)
        if only in (None, "memory"):
            sharing = tuple(name for name in engines if name != "single")
            report["memory"] = found = measure_memory(runs, sharing, model_bytes, layers)
            peaks = {name: value["peak_over_model"] for name, value in found.items() if isinstance(value, dict)}
            print(f"memory, peak over the model: {peaks} (bound {found['bound']})", flush=True)
    return report


def line(found: dict[str, Any]) -> str:
    """One comparison in a line."""
    hand, autopar = (statistics.median(found[side]) for side in SIDES)
    return f"by hand {hand:.4f} s, autopar {autopar:.4f} s, ratio {found['ratio']}, 95 % {found['interval']} (bound {found['bound']})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke test")
    parser.add_argument("--only", choices=["step", "first_step", "memory"])
    parser.add_argument("--out", help="the JSON file to write", default=str(RESULTS))
    parser.add_argument("--engine", choices=ENGINES, help="this engine alone")
    one = parser.add_argument_group("one run", "what this script starts itself with")
    one.add_argument("--run", action="store_true")
    one.add_argument("--side", choices=SIDES)
    one.add_argument("--ranks", type=int, default=1)
    one.add_argument("--steps", type=int, default=2)
    one.add_argument("--block", type=int, default=0)
    one.add_argument("--batch", type=int, default=16)
    one.add_argument("--layers", type=int, default=4)
    one.add_argument("--width", type=int, default=128)
    one.add_argument("--dropout", type=float, default=0.0)
    one.add_argument("--model", choices=["gpt", "wide"], default="gpt")
    one.add_argument("--model-bytes", type=int, default=0)
    one.add_argument("--budget", default="4GiB")
    one.add_argument("--pinned", action="store_true")
    arguments = parser.parse_args()
    if arguments.run:
        run(arguments)
        return
    report = benchmark(arguments.quick, arguments.only, arguments.engine)
    out = Path(arguments.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"written to {out}")


if __name__ == "__main__":
    main()
