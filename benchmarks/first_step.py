"""From a script's start to the end of its first step, by part: with autopar, and with Lightning alone.

Each run is a fresh process that imports Lightning, makes a GPT (six blocks, 5.0 M parameters, four samples of 32 tokens, so that its steps
are short) and trains it for one step. Told are the least and the median seconds from the end of ``import lightning`` to the end of that
step, and the processor's seconds of all processes, which other people's work disturbs less. The plain runs are Lightning's own strategies:
one device, and ``ddp_fork``, with which each plan of two devices is compared. Before these runs the machine is measured; that takes its own
time in an empty cache, which is told apart ("cold").

    python benchmarks/first_step.py               # writes benchmarks/results/first_step.json; wants both cores, takes some five minutes
    python benchmarks/first_step.py --quick       # a smoke test: one round
    python benchmarks/first_step.py --only one ddp --rounds 5 --out /tmp/first.json
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from machine import machine

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "first_step.json"
sys.path.insert(0, str(HERE.parent / "examples"))

#: The cases: engines allowed, devices, and the plain run that they are compared with.
CASES: dict[str, tuple[list[str] | None, int, str]] = {
    "one": (["single"], 1, "plain_one"),
    "ddp": (["ddp"], 2, "plain_two"),
    "fsdp": (["fsdp"], 2, "plain_two"),
    "pipeline": (["pipeline"], 2, "plain_two"),
    "any": (None, 2, "plain_two"),
}
PLAIN = {"plain_one": ("auto", 1), "plain_two": ("ddp_fork", 2)}
#: Goals in seconds over the plain run.
GOALS = {"one": 0.9, "ddp": 1.2, "fsdp": 2.0, "pipeline": 2.0, "any": 2.0}
#: The engines that a cold calibration is for, and its goal.
COLD = {"ddp": (["ddp"], 7.0), "fsdp": (["fsdp"], 7.0), "pipeline": (["pipeline"], 7.0), "all": (None, 9.0)}
#: The parts: where each function is called from, and its name there. Parts lie within "planning", and may lie within each other.
PARTS = {
    "planning": ("lightning_autopar.strategies.launcher", "find_prospect"),
    "finding out": ("lightning_autopar.strategies.preparation.planning_inputs", "find_out"),
    "first batch": ("lightning_autopar.strategies.preparation.module_findings", "first_batch"),
    "trace": ("lightning_autopar.strategies.preparation.module_findings", "_looked_at"),
    "split": ("lightning_autopar.strategies.preparation.module_findings", "split_as_made"),
    "engines look": ("lightning_autopar.strategies.preparation.module_findings", "looks"),
    "report": ("lightning_autopar.strategies.preparation.decision", "make_report"),
    "trial of the chosen plan": ("lightning_autopar.strategies.preparation.confirmed_plan", "rehearse"),
    "to workers' end": ("lightning_autopar.strategies.launcher", "run_generation"),
}


# -- one run, in a process of its own --------------------------------------------------------------------------------------------------


def run(arguments: argparse.Namespace) -> None:
    """Train for one step; append to ``arguments.out`` what was when, and what each part took, a JSON list a line."""

    def note(name: str, seconds: float) -> None:
        with open(arguments.out, "a", encoding="utf-8") as file:  # in forked children as well
            file.write(json.dumps([name, seconds]) + "\n")

    began = time.monotonic()
    import lightning as L
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    from train_gpt import ByteGPT

    imported = time.monotonic()
    note("import torch and lightning", imported - began)

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_rank == 0:
                note("over import", time.monotonic() - imported)

        def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            if trainer.global_rank == 0:
                note("ended", time.monotonic())

    options: dict[str, Any]
    if arguments.case in PLAIN:
        strategy, count = PLAIN[arguments.case]
        options = {"devices": count, "strategy": strategy}
    else:
        engines, count, _ = CASES[arguments.case]
        from lightning_autopar import AutoParallelStrategy

        note("import autopar", time.monotonic() - imported)
        for part, (module, name) in PARTS.items():
            _timed(importlib.import_module(module), name, functools.partial(note, part))
        options = {"strategy": AutoParallelStrategy(allow=engines, devices=f"{count}xcpu:2GiB")}
    L.seed_everything(1)
    model = ByteGPT(layers=6, width=256, heads=4, context=32, dropout=0.1)
    data = TensorDataset(*torch.randint(0, 256, (2, 64, 32)).unbind(0))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(accelerator="cpu", max_steps=1, callbacks=[Watch()], **quiet, **options)
    trainer.fit(model, DataLoader(data, batch_size=4 if arguments.case not in PLAIN else 4 // count, shuffle=True))
    note("returned", time.monotonic())


def _timed(module: Any, name: str, note: Callable[[float], None]) -> None:
    function = getattr(module, name)

    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        begun = time.monotonic()
        try:
            return function(*args, **kwargs)
        finally:
            note(time.monotonic() - begun)

    setattr(module, name, timed)


def calibrate(arguments: argparse.Namespace) -> None:
    """Measure this machine for the engines that a strategy of this case allows, and note the seconds."""
    import lightning  # noqa: F401  # as in a run, before the clock starts

    from lightning_autopar import AutoParallelStrategy, engines
    from lightning_autopar.strategies.calibration import calibration

    wanted = AutoParallelStrategy(allow=COLD[arguments.case][0], devices="2xcpu:2GiB")
    begun = time.monotonic()
    things = {thing for name in wanted.settings.allow for thing in engines.named(name).measured}
    calibration.calibrate(wanted.inventory()[0], wanted={*things, "attention"})  # as a transformer's step has it
    with open(arguments.out, "a", encoding="utf-8") as file:
        file.write(json.dumps(["calibration", time.monotonic() - begun]) + "\n")


# -- the comparison --------------------------------------------------------------------------------------------------------------------


def measured(case: str, cache: Path, *, cold: bool = False) -> dict[str, float]:
    """What one run of a case took: seconds by part, and the processor's.

    Raises:
        RuntimeError: if it failed, with its output.
    """
    with tempfile.TemporaryDirectory(prefix="first-step-") as folder:
        out, log = Path(folder) / "out", Path(folder) / "log"
        environment = {**os.environ, "AUTOPAR_CACHE": str(cache), "AUTOPAR_LEDGER": "off"}
        for name in ("AUTOPAR_DEVICES", "OMP_NUM_THREADS", "PYTHONDONTWRITEBYTECODE"):  # an installed package has its bytecode
            environment.pop(name, None)
        command = [sys.executable, str(Path(__file__).resolve()), "--cold" if cold else "--run", case, "--out", str(out)]
        with log.open("wb") as file:
            process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
            _, status, used = os.wait4(process.pid, 0)
            ended = time.monotonic()
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            raise RuntimeError(f"exit code {process.returncode} of {command}\n{log.read_text(encoding='utf-8', errors='replace')[-6000:]}")
        found: dict[str, float] = {"processor": used.ru_utime + used.ru_stime}
        for line in out.read_text(encoding="utf-8").splitlines():
            name, seconds = json.loads(line)
            found[name] = found.get(name, 0.0) + seconds
    if not cold:
        end, back = found.pop("ended"), found.pop("returned")
        found["end of training to return of fit"] = back - end
        found["return of fit to end of process"] = ended - back
    return found


def summary(runs: list[dict[str, float]]) -> dict[str, Any]:
    """The least and the median of each part."""
    names = dict.fromkeys(name for each in runs for name in each)
    values = {name: [each[name] for each in runs if name in each] for name in names}
    return {name: {"least": round(min(found), 3), "median": round(statistics.median(found), 3)} for name, found in values.items()}


def benchmark(cases: list[str], rounds: int) -> dict[str, Any]:
    """All figures, as the JSON file holds them. Cases take turns, in opposite order every other round."""
    plain = list(dict.fromkeys(CASES[case][2] for case in cases if case in CASES))
    warm: dict[str, list[dict[str, float]]] = {name: [] for name in (*plain, *(case for case in cases if case in CASES))}
    with tempfile.TemporaryDirectory(prefix="first-step-cache-") as folder:
        cache = Path(folder)
        for name in warm:  # measures the machine, and compiles bytecode
            measured(name, cache)
        for index in range(rounds):
            for name in warm if index % 2 == 0 else reversed(warm):
                warm[name].append(measured(name, cache))
                print(f"{name}: {warm[name][-1]['over import']:.2f}", flush=True)
    told: dict[str, Any] = {"warm": {name: summary(runs) for name, runs in warm.items()}, "over_plain": {}}
    for case in (name for name in warm if name in CASES):
        ours, base = told["warm"][case], told["warm"][CASES[case][2]]
        told["over_plain"][case] = {
            "seconds": round(ours["over import"]["least"] - base["over import"]["least"], 3),
            "processor": round(ours["processor"]["least"] - base["processor"]["least"], 3),
            "goal": GOALS[case],
        }
    return told


def calibrations(names: list[str], rounds: int) -> dict[str, Any]:
    """What measuring the machine takes, each time in an empty cache."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for index in range(rounds):
        for name in names if index % 2 == 0 else reversed(names):
            with tempfile.TemporaryDirectory(prefix="first-step-cold-") as folder:
                found[name].append(measured(name, Path(folder), cold=True))
            print(f"calibration, {name}: {found[name][-1]['calibration']:.2f}", flush=True)
    return {name: {**summary(runs), "goal": COLD[name][1]} for name, runs in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke test: one round, one device")
    parser.add_argument("--only", nargs="+", choices=[*CASES, "cold"], default=[*CASES, "cold"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", help="the JSON file to write", default=str(RESULTS))
    parser.add_argument("--run", dest="case", choices=[*CASES, *PLAIN], help=argparse.SUPPRESS)
    parser.add_argument("--cold", dest="cold_case", choices=list(COLD), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        run(arguments)
        return
    if arguments.cold_case:
        arguments.case = arguments.cold_case
        calibrate(arguments)
        return
    rounds, only = (1, ["one"]) if arguments.quick else (arguments.rounds, arguments.only)
    report: dict[str, Any] = {**machine(), "quick": arguments.quick, "rounds": rounds, "load": round(os.getloadavg()[0], 1)}
    if cases := [name for name in only if name != "cold"]:
        report |= benchmark(cases, rounds)
        for case, over in report["over_plain"].items():
            print(f"{case}: {over['seconds']:+.2f} s over plain (goal {over['goal']}), processor {over['processor']:+.2f} s")
    if "cold" in only:
        report["cold"] = calibrations(list(COLD), max(1, rounds - 1))
    Path(arguments.out).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
