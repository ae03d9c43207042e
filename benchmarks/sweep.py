"""How soon is a sweep over? Twelve runs on four devices, placed by `lightning-autopar sweep`'s own scheduler and by rules that people use.

The devices are simulated: four of the catalogue's. How long a run would take in each way is the planner's prediction for real models (GPTs
of several sizes, traced), times its number of batches, and a start of 30 s. What it "really" takes is that times a random factor
(lognormal, sigma 0.2) that nobody knows beforehand. Three kinds of sweeps, of each a number of random ones: `mixed`, runs of any model and
any length between 1 and 30 times; `sizes`, any model, all as many batches; `alike`, one model and length twelve times, where there is
next to nothing to gain.
Instances are drawn from seeds; none is looked at before, none left out.

The rules, each in the order of the list, without looking ahead:
- `one`: each run on as few whole devices as it fits on, which is one for most: what task-spooler does (first come, first served);
- `fastest`: each run on the number of devices on which it is fastest by itself;
- `all`: each on all devices, one after the other, as a script with devices="auto" does.

With six runs the same is held against the best schedule of all that knows the real lengths beforehand (branch and bound).

    python benchmarks/sweep.py               # a minute or two; writes benchmarks/results/sweep.json
    python benchmarks/sweep.py --real        # and runs two small sweeps on two CPU devices, some minutes; needs two quiet cores
    python benchmarks/sweep.py --quick       # a few instances, a table only
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

import torch  # noqa: E402

from benchmarks.machine import machine  # noqa: E402
from benchmarks.memory.stage_rank import GPT  # noqa: E402
from benchmarks.sweep_exact import TooMany, best_schedule, bound_seconds  # noqa: E402
from lightning_autopar.constraints import Constraints  # noqa: E402
from lightning_autopar.devices.spec import parse_spec  # noqa: E402
from lightning_autopar.memory.trace.trace import trace  # noqa: E402
from lightning_autopar.planning.make_report import make_report  # noqa: E402
from lightning_autopar.sharing.sweep.scheduler import (  # noqa: E402
    Job,
    Listing,
    RunOption,
    SweepDevice,
    at_most,
    devices_of,
    options_of,
    scaled,
    schedule,
)

RESULTS = HERE / "results" / "sweep.json"
SPECS = ("4xH100-80GB", "4xRTX-4090")
#: Width, blocks, length and rows of a batch of each GPT.
MODELS = ((256, 6, 256, 32), (512, 8, 512, 32), (768, 12, 1024, 16), (1024, 24, 1024, 16), (1600, 32, 1024, 8), (2048, 24, 2048, 8))
KINDS = ("mixed", "sizes", "alike")
INSTANCES, RUNS, FEW_RUNS = 10, 12, 6
START_SECONDS, SIGMA = 30.0, 0.2
SHORTEST_BATCHES, LONGEST_SHARE = 2_000, 30.0
#: No worse than so many times the best schedule, and so much better than first come, first served.
WORST_OF_BEST, BETTER_THAN_FIRST = 1.15, 1.3
_NODES = 60_000


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A sweep, and how many times longer than predicted each of its runs really takes."""

    jobs: tuple[Job, ...]
    factors: dict[str, float]
    devices: tuple[SweepDevice, ...]

    def really(self) -> list[Job]:
        """The jobs as they really are."""
        return [replace(job, options=scaled(job.options, self.factors[job.name])) for job in self.jobs]


def pool(spec: str) -> tuple[list[tuple[RunOption, ...]], list[SweepDevice]]:
    """The ways of each model for a run of a single batch, without its start, as the planner predicts them; and the devices."""
    found = []
    inventory = parse_spec(spec)
    devices: list[SweepDevice] = []
    for width, blocks, length, rows in MODELS:
        with torch.device("meta"):
            model = GPT(width=width, depth=blocks, words=32000, length=length, heads=width // 64)
        footprint = trace(model, None, torch.zeros(rows, length, dtype=torch.long), target="cuda", precision="bf16-mixed")
        report = make_report(footprint, inventory, Constraints(precision="bf16-mixed"))
        words = report.to_dict()
        for candidate, each in zip(report.candidates, words["candidates"], strict=True):
            each["run_seconds"] = None if candidate.seconds is None else candidate.step_seconds
        found.append(options_of(words))
        devices = devices_of(words)
    return found, devices


def drawn(kind: str, runs: int, options: list[tuple[RunOption, ...]], devices: list[SweepDevice], seed: int) -> Instance:
    """One random sweep."""
    draw = random.Random(f"{kind} {runs} {seed}")
    same = draw.randrange(len(options))
    jobs = []
    for index in range(runs):
        model = same if kind == "alike" else draw.randrange(len(options))
        batches = SHORTEST_BATCHES * LONGEST_SHARE ** (draw.random() if kind == "mixed" else 0.5)
        made = tuple(replace(option, seconds=START_SECONDS + batches * option.seconds) for option in options[model])
        jobs.append(Job(name=f"run {index}", options=made))
    factors = {job.name: draw.lognormvariate(0.0, SIGMA) for job in jobs}
    return Instance(jobs=tuple(jobs), factors=factors, devices=tuple(devices))


# -- how runs are placed ---------------------------------------------------------------------------------------------------------------

#: What starts now, of what waits, in which way and where; with the expected seconds until each busy device is free.
Policy = Callable[[Sequence[Job], Sequence[SweepDevice], dict[str, float]], list[tuple[Job, RunOption, tuple[str, ...]]]]


def by_schedule(
    waiting: Sequence[Job], devices: Sequence[SweepDevice], busy: dict[str, float]
) -> list[tuple[Job, RunOption, tuple[str, ...]]]:
    """As the sweep's controller does: what the schedule of the rest starts now."""
    by_name = {job.name: job for job in waiting}
    return [(by_name[place.job], place.option, place.devices) for place in schedule(waiting, devices, busy).now]


def first_come(choose: Callable[[Sequence[RunOption], int], int]) -> Policy:
    """The first of the list as soon as there is room for it, in the way that is chosen by itself."""

    def start(
        waiting: Sequence[Job], devices: Sequence[SweepDevice], busy: dict[str, float]
    ) -> list[tuple[Job, RunOption, tuple[str, ...]]]:
        found, taken = [], dict(busy)
        for job in waiting:
            option = job.options[choose(job.options, len(devices))]
            placed = Listing([Job(name=job.name, options=(option,))], devices, taken).schedule([0], [0]).placed[0]
            if placed.start_seconds > 0:
                break
            found.append((job, option, placed.devices))
            taken.update(dict.fromkeys(placed.devices, option.seconds))
        return found

    return start


def _most(options: Sequence[RunOption], devices: int) -> int:
    return max(range(len(options)), key=lambda index: (len(options[index].needs), -options[index].seconds))


RULES: dict[str, Policy] = {
    "one": first_come(lambda options, devices: at_most(options, 1)),
    "fastest": first_come(lambda options, devices: at_most(options, devices)),
    "all": first_come(_most),
}


def played(instance: Instance, policy: Policy) -> float:
    """When the last run is over. A device's expected end is by prediction; one that is overdue is expected to be free soon."""
    waiting, running, now = list(instance.jobs), list[tuple[float, float, tuple[str, ...]]](), 0.0
    while waiting or running:
        busy = {device: max(expected - now, 0.1 * now + 1.0) for expected, _, devices in running for device in devices}
        idle = len(instance.devices) > len(busy)
        for job, option, devices in policy(waiting, instance.devices, busy) if waiting and idle else []:
            waiting.remove(job)
            running.append((now + option.seconds, now + option.seconds * instance.factors[job.name], devices))
        assert running, "whoever can run is started where all is idle"
        now = min(ends for _, ends, _ in running)
        running = [run for run in running if run[1] > now]
    return now


# -- what comes of it ------------------------------------------------------------------------------------------------------------------


def many(spec: str, options: list[tuple[RunOption, ...]], devices: list[SweepDevice], instances: int) -> Iterator[dict[str, Any]]:
    """Twelve runs: by the schedule and by each rule."""
    for kind in KINDS:
        for seed in range(instances):
            instance = drawn(kind, RUNS, options, devices, seed)
            seconds = {"schedule": played(instance, by_schedule), **{name: played(instance, rule) for name, rule in RULES.items()}}
            bound = bound_seconds(Listing(instance.really(), instance.devices))
            yield {"devices": spec, "kind": kind, "seed": seed, "seconds": seconds, "no_schedule_is_shorter_seconds": bound}


def few(spec: str, options: list[tuple[RunOption, ...]], devices: list[SweepDevice], instances: int) -> Iterator[dict[str, Any]]:
    """Six runs: by the schedule, and the best of all, which knows what they really take."""
    for kind in KINDS:
        for seed in range(instances):
            instance = drawn(kind, FEW_RUNS, options, devices, 1_000 + seed)
            exact = replace(instance, factors=dict.fromkeys(instance.factors, 1.0))
            row: dict[str, Any] = {"devices": spec, "kind": kind, "seed": 1_000 + seed}
            try:
                row["best_seconds"] = best_schedule(instance.really(), instance.devices, most_nodes=_NODES).makespan_seconds
                row["best_predicted_seconds"] = best_schedule(instance.jobs, instance.devices, most_nodes=_NODES).makespan_seconds
            except TooMany:
                yield {**row, "best_seconds": None}
                continue
            yield {**row, "seconds": played(instance, by_schedule), "planned_seconds": played(exact, by_schedule)}


def spread(values: Sequence[float], *, worst: Callable[[Sequence[float]], float]) -> dict[str, float]:
    """Median, worst, and how many there are."""
    return {"median": round(statistics.median(values), 3), "worst": round(worst(values), 3), "count": len(values)}


def summary(large: Sequence[dict[str, Any]], small: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Ratios by kind, and whether the goals are met on mixed sweeps (which is what a sweep's scheduler is for) and on all."""
    found: dict[str, Any] = {}
    for kind in (*KINDS, "every"):
        rows = [row for row in large if kind in (row["kind"], "every")]
        solved = [row for row in small if kind in (row["kind"], "every") and row["best_seconds"] is not None]
        found[kind] = {
            **{
                f"better_than_{name}": spread([row["seconds"][name] / row["seconds"]["schedule"] for row in rows], worst=min)
                for name in RULES
            },
            "of_bound": spread([row["seconds"]["schedule"] / row["no_schedule_is_shorter_seconds"] for row in rows], worst=max),
            "of_best": spread([row["seconds"] / row["best_seconds"] for row in solved], worst=max),
            "of_best_as_planned": spread([row["planned_seconds"] / row["best_predicted_seconds"] for row in solved], worst=max),
        }
    found["unsolved"] = sum(row["best_seconds"] is None for row in small)
    found["goals"] = {
        kind: {
            f"at most {WORST_OF_BEST} of the best (median)": found[kind]["of_best"]["median"] <= WORST_OF_BEST,
            f"at least {BETTER_THAN_FIRST} better than first come (median)": found[kind]["better_than_one"]["median"] >= BETTER_THAN_FIRST,
        }
        for kind in (*KINDS, "every")
    }
    return found


# -- for real --------------------------------------------------------------------------------------------------------------------------

_SCRIPT = """
import sys
import lightning as L, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Model(L.LightningModule):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 10))
    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

width, steps = map(int, sys.argv[1:])
data = TensorDataset(torch.randn(4096, 64), torch.randint(10, (4096,)))
trainer = L.Trainer(max_steps=steps, max_epochs=-1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer.fit(Model(width), DataLoader(data, batch_size=256))
"""
#: Width and steps, in the order of the list: a student's, the long one last.
_REAL_RUNS = ((256, 800), (512, 600), (256, 1200), (512, 400), (768, 300), (1024, 1000))


def real() -> dict[str, Any]:
    """Six small runs on two CPU devices of a core each: the sweep, and each run in its turn on the device that falls idle first.

    What they take is mostly their start and their steps in about equal parts; planning for the sweep is told by itself.
    """
    env = {
        **os.environ,
        "AUTOPAR_DEVICES": "2xcpu:1GiB",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(HERE.parent),
        "PYTHONWARNINGS": "ignore",
    }
    commands = [f"train.py {width} {steps}" for width, steps in _REAL_RUNS]
    program = [sys.executable, "-m", "lightning_autopar"]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(_SCRIPT)
        quiet: dict[str, Any] = {"cwd": folder, "env": env, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        began = time.monotonic()
        subprocess.run([*program, "sweep", "--name", "real", "--dry-run", "--", *commands], **quiet, check=True)
        planning = time.monotonic() - began
        subprocess.run([*program, "sweep", "--name", "real", "--json", "real.json", "--", *commands], **quiet, check=True)
        result = json.loads(Path(folder, "real.json").read_text())
        began, waiting, running = time.monotonic(), list(commands), dict[str, subprocess.Popen[bytes]]()
        while waiting or running:
            for device in ("cpu:0", "cpu:1"):
                if device in running and running[device].poll() is not None:
                    assert running.pop(device).returncode == 0, "a run failed"
                if device not in running and waiting:
                    Path(folder, device).write_text(device)
                    words = [*program, "run", "--devices", "auto", *waiting.pop(0).split()]
                    alone = {**quiet, "env": {**env, "AUTOPAR_DEVICES_FILE": str(Path(folder, device))}}
                    running[device] = subprocess.Popen(words, **alone)
            time.sleep(0.05)
        first_come_seconds = time.monotonic() - began
    return {
        "runs": result["runs"],
        "sweep_seconds": round(result["seconds"], 1),
        "predicted_seconds": round(result["predicted_seconds"], 1),
        "planning_seconds": round(planning, 1),
        "first_come_seconds": round(first_come_seconds, 1),
        "load_of_the_machine": os.getloadavg()[0],
    }


def main() -> None:
    """Simulate, print and keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--real", action="store_true")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    large: list[dict[str, Any]] = []
    small: list[dict[str, Any]] = []
    models = {}
    instances = 2 if arguments.quick else INSTANCES
    for spec in SPECS:
        options, devices = pool(spec)
        models[spec] = [
            {"gpt": model, "ways": [{"plan": option.title, "step_seconds": option.seconds} for option in found]}
            for model, found in zip(MODELS, options, strict=True)
        ]
        large += many(spec, options, devices, instances)
        print(f"{spec}: {len(large)} sweeps of {RUNS}", flush=True)
        small += few(spec, options, devices, instances)
        print(f"{spec}: {len(small)} sweeps of {FEW_RUNS}", flush=True)
    found = summary(large, small)
    for kind in (*KINDS, "every"):
        print(f"{kind}:")
        for name, values in found[kind].items():
            print(f"  {name:20} median {values['median']:.2f}, worst {values['worst']:.2f} of {values['count']}")
    print(found["goals"])
    if arguments.quick:
        return
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    executed = {**machine(), **real()} if arguments.real else before.get("real")
    if executed is not None:
        print(f"real: {executed['sweep_seconds']} s, {executed['first_come_seconds']} s first come, first served")
    words = {**machine(), "summary": found, "models": models, "twelve_runs": large, "six_runs": small, "real": executed}
    RESULTS.write_text(json.dumps(words, indent=1) + "\n")


if __name__ == "__main__":
    main()
