"""Does the planner choose well on a GPU? Its choice and its rivals run there: predicted beside measured seconds, and bytes.

A scenario is a model of the GPU zoo, a precision and a share of the memory that its plain plan needs. The machine's speed is measured
first; the planner is asked as ``lightning_autopar.plan`` asks it. Then the plan that it chose runs, and of each other way (engine, offload,
recomputation of none, some or all blocks, parts of a batch) the fastest that it says fits. Nothing that a run took corrects a prediction.

    python benchmarks/plans_gpu.py --json OUT [--seconds 120] [--only SUBSTRING]

Runs are made ready in waves, side by side; when all of a wave are, they train one after the other. On a stub GPU seconds mean nothing.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pickle
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import lightning.pytorch as pl
import torch
from machine import machine
from memory.gpu_job import adamw
from memory.job import Batches
from memory.zoo_gpu import gpu_models
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from lightning_autopar import AutoParallelStrategy, NothingFits, Plan, Report
from lightning_autopar import plan as ask_for_plans
from lightning_autopar.devices.discover import probe
from lightning_autopar.report.report import Candidate
from lightning_autopar.strategies.calibration.calibration import calibrate

#: Before the steps that are timed: the optimizer's state is made, and cuBLAS and cuDNN choose their kernels. After them some run under
#: torch's profiler, which says how long the GPU takes for each operation.
_WARM_UP, _STEPS, _PROFILED = 4, 8, 2
_RIVALS = 3
#: How many are made ready side by side, and the longest that a wave waits for its last. Of 16 two were killed: each holds a model and its
#: optimizer in the host's memory.
_WAVE, _READY_SECONDS = 8, 45.0
_MOST_SECONDS = 90.0
GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is trained.

    Args:
        model: in the GPU zoo.
        precision: the Trainer's.
        share: of the bytes that the plain plan on one device needs, those that plans may use; None for the whole device.
    """

    model: str
    precision: str
    share: float | None = None

    @property
    def name(self) -> str:
        return f"{self.model}, {self.precision}" + (f", {self.share:.0%} of the memory" if self.share else "")


SCENARIOS = (
    Scenario(model="GPT-2", precision="bf16-mixed", share=0.5),
    Scenario(model="ViT", precision="bf16-mixed", share=0.4),
    Scenario(model="BERT", precision="32-true"),
    Scenario(model="ResNet, bottlenecks", precision="bf16-mixed", share=0.6),
    Scenario(model="Llama", precision="32-true", share=0.3),
    Scenario(model="T5", precision="bf16-mixed", share=0.6),
    Scenario(model="ConvNeXt", precision="32-true", share=0.5),
    Scenario(model="GPT-2", precision="bf16-mixed"),
    Scenario(model="Llama", precision="bf16-true"),
    Scenario(model="MLP", precision="32-true", share=0.7),
    Scenario(model="U-Net", precision="bf16-mixed", share=0.5),
    Scenario(model="ViT", precision="bf16-mixed"),
)


def module_and_batch(scenario: Scenario, *, small: bool) -> tuple[pl.LightningModule, Any]:
    """The module, with AdamW as torch makes it, and a batch."""
    torch.manual_seed(0)
    model = next(model for model in gpu_models(small=small) if model.name == scenario.model)
    return model.build(adamw("foreach", on_gpu=True)), model.batch()


# -- in a process of its own: asking, and running ----------------------------------------------------------------------------------------


def ask(scenario: Scenario, small: bool) -> dict[str, Any]:
    """The chosen plan and its rivals, each with its prediction."""
    module, batch = module_and_batch(scenario, small=small)
    limit = None
    if scenario.share is not None:
        plain = Plan(engine="single", devices=(probe().devices[0].id,))
        (needs,) = ask_for_plans(module, batch=batch, precision=scenario.precision, pinned=plain).candidates[0].needs.values()
        limit = int(scenario.share * needs)
    begun = time.monotonic()
    try:
        report = ask_for_plans(module, batch=batch, precision=scenario.precision, memory_limit=limit)
    except NothingFits as nothing:
        return {"limit_bytes": limit, "chosen": None, "plans": [], "said": str(nothing)[:1000]}
    taken = time.monotonic() - begun
    chosen = report.best_candidate
    assert chosen is not None
    plans = [chosen, *rivals(report, chosen)]
    return {"limit_bytes": limit, "planning_seconds": taken, "chosen": chosen.plan.title(), "plans": [foreseen(one) for one in plans]}


def way(plan: Plan, most: int) -> tuple[object, ...]:
    """What sets plans apart that are worth a run each."""
    recomputed = "none" if not plan.recompute else "all" if len(plan.recompute) == most else "some"
    return plan.engine, plan.offload, recomputed, plan.micro_batches


def rivals(report: Report, chosen: Candidate) -> list[Candidate]:
    """Of each other way the one that is predicted to be fastest of those that fit, the fastest ways first."""
    known = [one for one in report.candidates if one.fits and one.seconds is not None and one.plan.engine != "zero"]
    most = max((len(one.plan.recompute) for one in report.candidates), default=0)
    found: dict[tuple[object, ...], Candidate] = {way(chosen.plan, most): chosen}
    for one in sorted(known, key=lambda one: one.seconds.step if one.seconds else 0.0):
        found.setdefault(way(one.plan, most), one)
    return [one for one in found.values() if one is not chosen][:_RIVALS]


def foreseen(candidate: Candidate) -> dict[str, Any]:
    """A plan, as a process hands it on, and what is predicted for it."""
    (held,) = candidate.bytes.values()
    assert candidate.seconds is not None
    return {
        "plan": pickle.dumps(candidate.plan).hex(),
        "title": candidate.plan.title(),
        "bytes": {name: size for name, size in held.to_dict().items() if isinstance(size, int)},
        "needs_bytes": next(iter(candidate.needs.values())),
        "seconds": candidate.seconds.to_dict(),
    }


class Alone(pl.Callback):
    """Says that its run is ready, waits for its turn, and writes down what the steps took."""

    def __init__(self, out: Path, lock: Path) -> None:
        self.out = out
        self.lock = lock
        self.held: Any = None
        self.at: list[float] = []
        self.issued: dict[float, float] = {}
        self.found: dict[str, Any] = {}
        self.profiler: Any = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.out.with_suffix(".ready").touch()
        self.held = self.lock.open("w")
        fcntl.flock(self.held, fcntl.LOCK_EX)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        torch.cuda.synchronize()
        self.at.append(time.perf_counter())
        if batch_idx == _WARM_UP + _STEPS:
            self.found = self.took()
            self.profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True)
            self.profiler.__enter__()

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.issued[self.at[-1]] = time.perf_counter()

    def took(self) -> dict[str, Any]:
        """What the timed steps took; up to the end of backward, how long the host was at it, which waits for nothing before."""
        steps = [after - before for before, after in zip(self.at, self.at[1:], strict=False)][_WARM_UP:]
        issued = [after - before for before, after in self.issued.items() if before >= self.at[_WARM_UP]]
        return {
            "step_seconds": statistics.median(steps),
            "steps": steps,
            "issued_seconds": statistics.median(issued) if issued else None,
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
            "retries": torch.cuda.memory_stats()["num_alloc_retries"],
        }

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        torch.cuda.synchronize()
        self.held.close()  # the next one may begin
        self.profiler.__exit__(None, None, None)
        self.found["operations"] = [
            {
                "name": each.key,
                "shapes": str(each.input_shapes),
                "count": each.count / _PROFILED,
                "seconds": each.self_device_time_total * 1e-6 / _PROFILED,
            }
            for each in self.profiler.key_averages(group_by_input_shape=True)
            if each.self_device_time_total
        ]
        self.out.write_text(json.dumps(self.found), encoding="utf-8")
        os._exit(0)  # the weights aren't asked for


def train(scenario: Scenario, small: bool, plan: Plan, out: Path, lock: Path) -> None:
    module, batch = module_and_batch(scenario, small=small)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    steps = _WARM_UP + _STEPS + _PROFILED
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=1,
        strategy=AutoParallelStrategy(plan=plan, calibrate="off"),
        precision=scenario.precision,  # type: ignore[arg-type]
        max_steps=steps,
        callbacks=[Alone(out, lock)],
        **quiet,  # type: ignore[arg-type]
    )
    trainer.fit(module, DataLoader(Batches(batch, steps), batch_size=None))


# -- in the main process -----------------------------------------------------------------------------------------------------------------


class Benchmark:
    """The runs, until time is up.

    Args:
        seconds: after which nothing is begun.
        small: small models, for a rehearsal on a stub GPU.
        rivals: how many other ways run beside the one that was chosen.
        calibration: what was measured before.
        folder: for what processes hand to each other.
        json: where the result goes, after every run anew.
    """

    def __init__(self, *, seconds: float, small: bool, rivals: int, calibration: dict[str, Any], folder: Path, json: Path) -> None:
        self.until = time.monotonic() + seconds
        self.small = small
        self.rivals = rivals
        self.calibration = calibration
        self.folder = folder
        self.json = json
        self.rows: list[dict[str, Any]] = []
        self.asked: dict[str, Any] = {}
        self.left_out: list[str] = []
        self._numbers = iter(range(1 << 30))
        self._mutex = threading.Lock()

    def run(self, scenarios: list[Scenario]) -> None:
        """All scenarios are asked about; then their plans run, those that were chosen first."""
        with ThreadPoolExecutor(len(scenarios)) as pool:
            answers = list(pool.map(lambda scenario: self._process(scenario, self._out(), ["--ask"]), scenarios))
        waiting = []
        for scenario, found in zip(scenarios, answers, strict=True):
            self.asked[scenario.name] = {name: value for name, value in found.items() if name != "plans"}
            plans = found.get("plans", ())[: 1 + self.rivals]
            waiting += [(number, scenario, foretold) for number, foretold in enumerate(plans)]
        waiting.sort(key=lambda run: run[0])
        for wave in (waiting[first : first + _WAVE] for first in range(0, len(waiting), _WAVE)):
            if time.monotonic() > self.until:
                self.left_out += [f"{scenario.name}: {foretold['title']}" for _, scenario, foretold in wave]
                continue
            self._wave(wave)

    def _wave(self, runs: list[tuple[int, Scenario, dict[str, Any]]]) -> None:
        outs = [self._out() for _ in runs]
        lock = self.folder / f"lock-{outs[0].stem}"
        with lock.open("w") as held, ThreadPoolExecutor(len(runs)) as pool:
            fcntl.flock(held, fcntl.LOCK_EX)
            ended = [
                pool.submit(self._train, number == 0, scenario, foretold, out, lock)
                for (number, scenario, foretold), out in zip(runs, outs, strict=True)
            ]
            until = time.monotonic() + _READY_SECONDS
            while time.monotonic() < until and not all(
                out.with_suffix(".ready").exists() or one.done() for out, one in zip(outs, ended, strict=True)
            ):
                time.sleep(0.1)
            fcntl.flock(held, fcntl.LOCK_UN)

    def write(self) -> None:
        """The result as far as it goes."""
        result = {**machine(), "summary": summary(self.rows), "asked": self.asked, "rows": self.rows, "left_out": self.left_out}
        result["calibration"] = self.calibration
        self.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    def _out(self) -> Path:
        return self.folder / f"{next(self._numbers)}.json"

    def _train(self, chosen: bool, scenario: Scenario, foretold: dict[str, Any], out: Path, lock: Path) -> None:
        found = self._process(scenario, out, ["--train", foretold["plan"], "--lock", str(lock)])
        row = {"scenario": scenario.name, "chosen": chosen, **{name: value for name, value in foretold.items() if name != "plan"}}
        row["measured"] = found
        if "step_seconds" in found:
            row["seconds_ratio"] = foretold["seconds"]["step"] / found["step_seconds"]
            row["allocated_ratio"] = foretold["bytes"]["allocated"] / found["allocated"]
            row["reserved_ratio"] = (foretold["bytes"]["reserved"] - foretold["bytes"]["context"]) / found["reserved"]
        with self._mutex:
            self.rows.append(row)
            print(words(row), flush=True)
            self.write()

    def _process(self, scenario: Scenario, out: Path, arguments: list[str]) -> dict[str, Any]:
        """What a process of this script's found; ``{"error": …}`` where it found nothing."""
        command = [sys.executable, str(Path(__file__).resolve()), "--scenario", str(SCENARIOS.index(scenario)), "--json", str(out)]
        command += [*arguments, *(["--small"] if self.small else [])]
        # The speed that was measured is asked for; what a run takes is told to nobody.
        environment = {**os.environ, **({"AUTOPAR_CACHE": "off"} if "--train" in arguments else {})}
        with out.with_suffix(".said").open("w+", encoding="utf-8") as said:
            process = subprocess.Popen(command, env=environment, stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                process.wait(min(_MOST_SECONDS, max(1.0, self.until + 40 - time.monotonic())))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            said.seek(0)
            words = said.read()[-1500:]
        if out.exists():
            found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
            return found
        return {"error": f"exit code {process.returncode}: {words}"}


def words(row: dict[str, Any]) -> str:
    """A row for people."""
    mark = "*" if row["chosen"] else " "
    predicted = f"{row['seconds']['step'] * 1e3:.1f} ms, {row['bytes']['allocated'] / GIB:.2f} GiB predicted"
    measured = row["measured"]
    if "error" in measured:
        return f"{mark} {row['scenario']}: {row['title']}: {predicted}; FAILED: {measured['error'][-300:]}"
    took = f"{measured['step_seconds'] * 1e3:.1f} ms, {measured['allocated'] / GIB:.2f} GiB"
    return f"{mark} {row['scenario']}: {row['title']}: {predicted}; {took} measured"


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors, and the chosen plans' speed against the best that was measured."""
    known = [row for row in rows if "seconds_ratio" in row]
    found: dict[str, Any] = {"runs": len(rows), "failed": len(rows) - len(known)}
    for name in ("seconds", "allocated", "reserved"):
        errors = sorted(abs(row[f"{name}_ratio"] - 1) for row in known)
        if errors:
            found[f"{name}_error"] = {"median": statistics.median(errors), "worst": errors[-1]}
    shares = {}
    for name in {row["scenario"] for row in known}:
        of = [row for row in known if row["scenario"] == name]
        chosen = [row["measured"]["step_seconds"] for row in of if row["chosen"]]
        if chosen and len(of) > 1:
            shares[name] = min(row["measured"]["step_seconds"] for row in of) / chosen[0]
    if shares:
        found["chosen_against_best"] = {"median": statistics.median(shares.values()), "worst": min(shares.values()), "of": shares}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="where the result goes")
    parser.add_argument("--seconds", type=float, default=120.0, help="after which no run is begun")
    parser.add_argument("--rivals", type=int, default=_RIVALS, help="how many other ways run beside the one that was chosen")
    parser.add_argument("--only", default="", help="scenarios with this in their name")
    parser.add_argument("--small", action="store_true", help="small models, for a rehearsal on a stub GPU")
    for name in ("--scenario", "--train", "--lock"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--ask", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.setdefault("AUTOPAR_LEDGER", "off")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if options.scenario is not None:
        warnings.simplefilter("ignore")
        scenario = SCENARIOS[int(options.scenario)]
        if options.ask:
            options.json.write_text(json.dumps(ask(scenario, options.small)), encoding="utf-8")
        else:
            train(scenario, options.small, pickle.loads(bytes.fromhex(options.train)), options.json, Path(options.lock))
        return
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["AUTOPAR_CACHE"] = f"{folder}/cache"
        rates = calibrate(probe(), progress=False)
        left = options.seconds - (time.monotonic() - begun)
        benchmark = Benchmark(
            seconds=left,
            small=options.small,
            rivals=options.rivals,
            calibration=rates.calibration.to_dict(),
            folder=Path(folder),
            json=options.json,
        )
        benchmark.run([scenario for scenario in SCENARIOS if options.only in scenario.name])
        benchmark.write()
    print(json.dumps({**summary(benchmark.rows), "left out": len(benchmark.left_out)}, indent=1))


if __name__ == "__main__":
    main()
