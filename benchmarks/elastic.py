"""How long a run stands still when it moves to another plan, beside a checkpoint and a new start of the script, and torchrun's restart.

A GPT trains on CPU devices and moves one device → another → DDP → FSDP2 → one device → pipeline → DDP, as a user's run would. The pause is
the time from the end of the last step under the old plan to the beginning of the first step under the new one, by the host's clock. The
same run by plain Lightning saves a checkpoint, ends, and is started again; under torchrun its ranks fail after a checkpoint and are
restarted. The goal: at most 2 s and twice the state at the measured rate of a copy, and at least four times shorter than a restart.

And what watching and snapshots cost while nothing happens: the share of the time in which a run of a minute stood still for snapshots, and
the agent's own processor time, with the callbacks' defaults.

    python benchmarks/elastic.py                       # 30M and 200M parameters, about ten minutes; results/elastic.json
    python benchmarks/elastic.py --sizes 30M --no-idle # a part, a table only
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

# Before torch is imported: one thread a rank; and no plan is corrected by what earlier runs took.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["AUTOPAR_CACHE"] = "off"
os.environ.setdefault("KINETO_LOG_LEVEL", "6")

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

import lightning.pytorch as pl  # noqa: E402
import torch  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from benchmarks.machine import machine  # noqa: E402
from benchmarks.memory.stage_rank import GPT  # noqa: E402

RESULTS = HERE / "results" / "elastic.json"
SIZES = {
    "2M": {"width": 128, "depth": 8, "words": 1024, "length": 16},
    "30M": {"width": 512, "depth": 8, "words": 4096, "length": 16},
    "200M": {"width": 1024, "depth": 16, "words": 1024, "length": 16},
}
ROWS, STEPS_BETWEEN = 4, 3
GOAL_SECONDS, GOAL_COPIES, GOAL_TIMES, GOAL_IDLE = 2.0, 2.0, 4.0, 0.01
IDLE_SECONDS = 60.0
#: How often torchrun's restart is tried, and how long it may take.
_TRIES, _TORCHRUN_SECONDS = 2, 75.0


class Clock(pl.Callback):
    """Writes down when each step begins and ends on rank 0, from whatever process trains."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def _note(self, trainer: pl.Trainer, what: str) -> None:
        if trainer.is_global_zero:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"{what} {time.monotonic()!r} {os.getpid()} {type(trainer.strategy).__name__} {trainer.world_size}\n")

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        self._note(trainer, "begin")

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._note(trainer, "end")


def pauses(path: Path) -> list[tuple[str, str, float]]:
    """Of each change of process: the strategies before and after, and the seconds between their steps."""
    lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    found = []
    for (what, at, pid, *name), (then, after, other, *following) in pairwise(lines):
        if pid != other:
            assert (what, then) == ("end", "begin"), (what, then)
            found.append((f"{name[0]} ×{name[1]}", f"{following[0]} ×{following[1]}", float(after) - float(at)))
    return found


def make(size: str, steps: int, clock: Path, **options: Any) -> tuple[pl.Trainer, pl.LightningModule, Any]:
    pl.seed_everything(1, verbose=False)
    module = GPT(**SIZES[size])  # type: ignore[arg-type]
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Clock(clock), *options.pop("callbacks", [])],
        default_root_dir=clock.parent,
        **options,
    )
    tokens = torch.randint(0, module.words, (4096, module.length), generator=torch.Generator().manual_seed(0))
    return trainer, module, DataLoader(tokens, batch_size=ROWS)  # type: ignore[arg-type]


# -- what is measured, each in a process of its own ------------------------------------------------------------------------------------


def moves(size: str, folder: Path) -> dict[str, Any]:
    """The pauses of a run that changes its plan every few steps."""
    from lightning_autopar import AutoParallelStrategy, CheckpointMigrate, Plan
    from lightning_autopar.strategies.preparation.decision import MoveRequest
    from lightning_autopar.strategies.preparation.planning_inputs import decide_again

    both = ("cpu:0", "cpu:1")
    blocks = tuple(f"blocks.{index}" for index in range(int(SIZES[size]["depth"])))
    ddp = Plan(engine="ddp", devices=both)
    plans = [
        Plan(engine="single", devices=("cpu:1",)),
        ddp,
        Plan(engine="fsdp", devices=both, reshard_after_forward=True, shard=blocks),
        Plan(engine="single", devices=("cpu:0",)),
        Plan(engine="pipeline", devices=both, cuts=(blocks[len(blocks) // 2],), schedule="1f1b", micro_batches=2),
        ddp,
    ]

    class Tour(pl.Callback):
        interval_seconds = 0.02

        def __init__(self) -> None:
            self.plans = list(plans)
            self.decisions: dict[Plan, Any] = {}
            self.next = STEPS_BETWEEN

        def look(self, run: Any) -> MoveRequest | None:
            if not self.plans or run.step is None or run.step < self.next:
                return None
            plan = self.plans.pop(0)
            decision = self.decisions.get(plan) or decide_again(trainer, run.decision, run.inventory(), plan=plan)
            self.decisions[plan] = decision
            self.next = run.step + STEPS_BETWEEN
            return MoveRequest(action="move", decision=decision, reason="the tour")

    strategy = AutoParallelStrategy(devices="2xcpu:20GiB", calibrate="off")
    steps = (STEPS_BETWEEN + 40) * (len(plans) + 1)

    class Enough(pl.Callback):
        """Ends the run some steps after its last move: how long a move is prepared isn't known in steps."""

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            names = {line.split()[2] for line in (folder / "clock").read_text(encoding="utf-8").splitlines()}
            trainer.should_stop = len(names) > len(plans)

    trainer, module, data = make(size, steps, folder / "clock", strategy=strategy, callbacks=[CheckpointMigrate(), Tour(), Enough()])
    trainer.fit(module, data)
    state_bytes = 3 * sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    return {"state_bytes": state_bytes, "pauses": pauses(folder / "clock"), "copy_bytes_per_second": copy_rate(state_bytes)}


def copy_rate(size_bytes: int) -> float:
    """Bytes a second of writing so much into shared memory and reading it back, the slower of the two."""
    tensor = torch.ones(size_bytes // 4)
    home = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
    path = home / f"autopar-copy-{os.getpid()}"
    try:
        started = time.monotonic()
        with path.open("wb") as file:
            file.write(tensor.numpy().data)
        written = time.monotonic()
        tensor.copy_(torch.from_file(str(path), size=tensor.numel()))
        read = time.monotonic()
    finally:
        path.unlink(missing_ok=True)
    return size_bytes / max(written - started, read - written)


def script(size: str, folder: Path) -> None:
    """A user's script: trains some steps, saves a checkpoint at the end, and goes on from one that is there."""
    path = folder / "last.ckpt"
    again = path.exists()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if again and int(os.environ.get("RANK", "0")):
        time.sleep(0.5)  # a rank that is there first reads the other's address of before the restart from torchrun's store (torch 2.13)
    options: dict[str, Any] = {"strategy": "ddp", "devices": world} if world > 1 else {"devices": 1}
    trainer, module, data = make(size, STEPS_BETWEEN * (2 if again else 1), folder / "clock", **options)
    trainer.fit(module, data, ckpt_path=path if again else None)
    if not again:
        trainer.save_checkpoint(path)
        if world > 1:
            trainer.strategy.barrier()
            os._exit(1)  # for torchrun to restart


def idle(size: str, folder: Path) -> dict[str, Any]:
    """What a minute of undisturbed training loses to snapshots and to watching."""
    from lightning_autopar import AutoParallelStrategy, CheckpointMigrate, ElasticReplan

    class Minute(pl.Callback):
        def __init__(self) -> None:
            self.until: float | None = None

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self.until = self.until or time.monotonic() + IDLE_SECONDS
            trainer.should_stop = time.monotonic() > self.until

    strategy = AutoParallelStrategy(devices="2xcpu:20GiB", calibrate="off", allow=["single"])
    trainer, module, data = make(
        size, 10**6, folder / "clock", strategy=strategy, callbacks=[CheckpointMigrate(), ElasticReplan(), Minute()]
    )
    usage = time.process_time()
    started = time.monotonic()
    trainer.fit(module, data)
    took, agent_seconds = time.monotonic() - started, time.process_time() - usage
    lines = [line.split() for line in (folder / "clock").read_text(encoding="utf-8").splitlines()]
    ends = [float(at) for what, at, *_ in lines if what == "end"]
    begins = [float(at) for what, at, *_ in lines if what == "begin"]
    between = [begin - end for end, begin in zip(ends, begins[1:], strict=False)]
    usual = sorted(between)[len(between) // 2]
    lost = sum(gap - usual for gap in between if gap > 5 * usual + 0.01)
    span = ends[-1] - begins[0]
    return {"seconds": span, "steps": len(ends), "snapshots_share": lost / span, "agent_share_of_a_core": agent_seconds / took}


def run(
    role: str, size: str, folder: Path, *, launcher: list[str] | None = None, within_seconds: float = 1800.0
) -> subprocess.CompletedProcess[str]:
    command = [*(launcher or [sys.executable]), str(Path(__file__).resolve()), "--role", role, "--sizes", size, "--folder", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=within_seconds, check=False)


def restart(size: str) -> float:
    """Saving a checkpoint, ending the script and starting it again, on one device."""
    with tempfile.TemporaryDirectory() as name:
        for _ in range(2):
            done = run("script", size, Path(name))
            assert done.returncode == 0, done.stderr
        ((_, _, seconds),) = pauses(Path(name) / "clock")
    return seconds


def torchrun(size: str) -> float | None:
    """A restart of two ranks by torchrun; None where they don't find each other after it, or wait for ever, see :func:`script`."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    for _ in range(_TRIES):
        with tempfile.TemporaryDirectory() as name, suppress(subprocess.TimeoutExpired):
            if run("script", size, Path(name), launcher=launcher, within_seconds=_TORCHRUN_SECONDS).returncode == 0:
                ((_, _, seconds),) = pauses(Path(name) / "clock")
                return seconds
    return None


def measured(role: str, size: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        done = run(role, size, Path(name))
        assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["30M", "200M"], choices=sorted(SIZES))
    parser.add_argument("--no-idle", action="store_true", help="leave out the minute without moves")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        warnings.simplefilter("ignore")
        roles: dict[str, Callable[[str, Path], Any]] = {"moves": moves, "script": script, "idle": idle}
        print(json.dumps(roles[arguments.role](arguments.sizes[0], arguments.folder)))
        return 0
    report: dict[str, Any] = {**machine(), "sizes": {}, "idle": None}
    good = True
    for size in arguments.sizes:
        found = measured("moves", size)
        restarts: dict[str, Any] = {"script": restart(size), "torchrun": torchrun(size)}
        bound = GOAL_SECONDS + GOAL_COPIES * found["state_bytes"] / found["copy_bytes_per_second"]
        report["sizes"][size] = {**found, "restart_seconds": restarts, "bound_seconds": bound}
        megabytes, rate = found["state_bytes"] / 1e6, found["copy_bytes_per_second"] / 1e9
        print(f"{size}: state {megabytes:.0f} MB, copied at {rate:.2f} GB/s: {bound:.2f} s allowed")
        by_torchrun = "not at all" if restarts["torchrun"] is None else f"{restarts['torchrun']:.2f} s"
        print(f"  script started again {restarts['script']:.2f} s, torchrun {by_torchrun}", flush=True)
        for before, after, seconds in found["pauses"]:
            times = restarts["script"] / seconds
            good = good and seconds <= bound and times >= GOAL_TIMES
            print(f"  {before:>20} → {after:<20} {seconds:6.2f} s, {times:5.1f} times shorter")
    if not arguments.no_idle:
        report["idle"] = measured("idle", arguments.sizes[0])
        share = report["idle"]["snapshots_share"]
        good = good and share <= GOAL_IDLE
        watching = report["idle"]["agent_share_of_a_core"]
        print(f"a minute without moves: {share:.2%} of the time for snapshots, the agent took {watching:.2%} of a core")
    if arguments.sizes == ["30M", "200M"] and not arguments.no_idle:
        RESULTS.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print("all goals are met" if good else "NOT all goals are met")
    return 0


if __name__ == "__main__":
    sys.exit(main())
