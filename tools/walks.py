"""Which modules of the package a reader meets on three walks. `make walks` runs it.

It fails above a ceiling, and where docs/architecture.md says otherwise.

A tiny module trains on CPU devices, and every module of the package whose code runs is noted, in the order of its first call:

- a batch through one DDP step, and one FSDP2 step: rank 0, from one batch's start to the next, with a logged value;
- a plan, from the search's end to rank 0's first batch: modules that are handed the plan or an object that holds one;
- a move, from the request to the new generation's first batch: modules that neither a start nor a step runs.

Whoever shortens a walk lowers its ceiling, and takes the module out of the page.
"""

from __future__ import annotations

import logging
import mmap
import os
import re
import sys
import tempfile
import threading
import warnings
from collections.abc import Collection
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_autopar import AutoParallelStrategy
from lightning_autopar.callbacks.checkpoint_migrate import CheckpointMigrate
from lightning_autopar.plans import Plan
from lightning_autopar.strategies.preparation.decision import MoveRequest
from lightning_autopar.strategies.preparation.planning_inputs import decide_again

PACKAGE = "lightning_autopar."
#: Modules that run in a DDP step and not in an FSDP step.
_DDP_ALONE = ("strategies.ddp.strategy",)
#: Modules of each walk, at most.
CEILINGS = {"ddp step": 18, "fsdp step": 23, "plan": 20, "move": 8}
#: Where they are told, and under which heading. Under FSDP2 the page says what is met in the place of DDP's strategy.
PAGE = Path(__file__).parent.parent / "docs" / "architecture.md"
HEADINGS = {
    "ddp step": "A batch through a DDP step",
    "fsdp step": "The same under FSDP2",
    "plan": "A plan, from the search to the first batch",
    "move": "A move between generations",
}
#: Walks of one process after the other: the page has their modules in the order in which they are met.
ORDERED = ("ddp step", "plan")
SEARCH, START, STEP, MOVE, OTHER = range(5)
#: The batch whose step is walked; the steps before it are measured.
_BATCH = 12
#: A run moves after so many batches.
_MOVE_AT = 20
_BATCHES = 60


def holds_a_plan(value: Any, depth: int = 3) -> bool:
    """Whether this is a plan, or one of our objects that has one within three attributes."""
    if isinstance(value, Plan):
        return True
    if depth == 0 or not type(value).__module__.startswith(PACKAGE):
        return False
    inside = getattr(value, "__dict__", None) or {name: getattr(value, name, None) for name in getattr(type(value), "__slots__", ())}
    return any(holds_a_plan(each, depth - 1) for each in inside.values())


class Recorder:
    """Notes which modules run, in this process and in those forked from it, by what the run is doing.

    Args:
        path: each line is a phase, a process, whether the call was handed a plan, and a module.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        #: The phase, and whether the run moves: by the agent's word, so that an old worker's batch that begins just then doesn't end it.
        self._phase = mmap.mmap(-1, 2)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._seen: set[tuple[int, int, bool, str]] = set()

    def enter(self, phase: int) -> None:
        """All processes are in this phase from now on, or when a move has ended."""
        self._phase[0] = phase

    def move(self, moves: bool) -> None:
        """A move begins or ends."""
        self._phase[1] = moves

    @property
    def phase(self) -> int:
        """What the run is doing."""
        return MOVE if self._phase[1] else self._phase[0]

    def start(self) -> None:
        """Note this thread's calls, and those of threads and processes that begin later."""
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(f"{PACKAGE}planning.") and frame.f_code.co_name in ("make_report", "advise") and self.phase in (SEARCH, START):
            self.enter(START if event == "return" else SEARCH)
        if event != "call" or not name.startswith(PACKAGE) or frame.f_code.co_name == "<module>":
            return
        phase, process = self.phase, os.getpid()
        if (phase, process, True, name) in self._seen:
            return
        code = frame.f_code
        arguments = [frame.f_locals.get(each) for each in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if each != "self"]
        key = (phase, process, phase == START and any(map(holds_a_plan, arguments)), name)
        if key not in self._seen:
            self._seen.add(key)
            os.write(self._file, " ".join(map(str, key)).encode() + b"\n")

    def modules(self, phase: int, *, processes: Collection[int] = (), plan: bool = False) -> list[str]:
        """What ran in a phase, in the order of the first calls.

        Args:
            processes: by these alone; by all unless given.
            plan: that were handed a plan.
        """
        found: dict[str, None] = {}
        for line in self.path.read_text(encoding="utf-8").splitlines():
            its, pid, handed, name = line.split()
            if int(its) == phase and (not processes or int(pid) in processes) and (handed == "True" or not plan):
                found[name.removeprefix(PACKAGE)] = None
        return list(found)


class Phases(pl.Callback):
    """Tells the recorder what rank 0 is doing."""

    def __init__(self, recorder: Recorder, rank_0: mmap.mmap) -> None:
        self.recorder, self.rank_0 = recorder, rank_0

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        """Rank 0 begins a batch."""
        if trainer.global_rank != 0:
            return
        process = os.getpid().to_bytes(8, "little")
        if process != self.rank_0[:8]:  # the old workers go on until the new ones are ready
            self.recorder.move(False)
            self.rank_0[:8] = process
        self.recorder.enter(STEP if batch_idx == _BATCH else OTHER)

    # As Lightning's own callbacks': what a user's hooks need is met only where there are some.
    on_train_batch_start.__module__ = pl.callbacks.Callback.__module__


class MoveOnce(pl.Callback):
    """A watcher that moves the run to two other devices once."""

    interval_seconds = 0.01

    def __init__(self, recorder: Recorder, trainer: Any, plan: Plan) -> None:
        self.recorder, self.trainer, self.plan = recorder, trainer, plan
        self.done = False

    def look(self, run: Any) -> MoveRequest | None:
        """The move, when enough batches are done."""
        if self.done or (run.step or 0) < _MOVE_AT:
            return None
        self.done = True
        decision = decide_again(self.trainer, run.decision, run.inventory(), plan=self.plan)
        self.recorder.move(True)
        return MoveRequest(action="move", decision=decision, reason="a walk")


class Net(pl.LightningModule):
    """Six blocks and a logged loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(6)))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Its inputs again."""
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[0])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters())


def walk(folder: Path, plan: Plan, then: Plan | None = None) -> tuple[Recorder, int]:
    """A run under a plan, which another follows in the middle of it; what was noted, and rank 0's process."""
    recorder, rank_0 = Recorder(folder / "calls.txt"), mmap.mmap(-1, 8)
    strategy = AutoParallelStrategy(plan=plan, devices="4xcpu:1GiB", calibrate="off")
    callbacks: list[Any] = [Phases(recorder, rank_0)]
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_steps=_BATCHES,
        log_every_n_steps=1,
        callbacks=callbacks,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if then is not None:
        trainer.callbacks += [CheckpointMigrate(snapshot_seconds=60.0), MoveOnce(recorder, trainer, then)]  # type: ignore[attr-defined]
    recorder.start()
    try:
        trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(4 * _BATCHES, 8)), batch_size=4))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return recorder, int.from_bytes(rank_0[:8], "little")


def told(page: str) -> dict[str, list[str]]:
    """The walks as the page has them."""
    sections = {part.partition("\n")[0].lstrip("# "): part for part in re.split(r"^(?=##+ )", page, flags=re.MULTILINE)}
    found = {
        walk: [row.replace("/", ".") for row in re.findall(r"^\| `(.+?)`", sections[title], re.MULTILINE)]
        for walk, title in HEADINGS.items()
    }
    found["fsdp step"] += [module for module in found["ddp step"] if module not in _DDP_ALONE]
    return found


def wrong(walk: str, met: list[str], page: list[str]) -> str:
    """What the page says otherwise, in words; nothing where it is right."""
    if set(met) != set(page):
        return f"met, and not on the page: {sorted({*met} - {*page})}; on the page, and not met: {sorted({*page} - {*met})}"
    return "the page has them in another order" if walk in ORDERED and met != page else ""


def main() -> int:
    """Prints the walks; 1 where one is longer than its ceiling, or another one than the page's."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    os.environ.update(AUTOPAR_CACHE="off", AUTOPAR_LEDGER="off", OMP_NUM_THREADS="1")
    pl.seed_everything(0, verbose=False)
    ddp = Plan(engine="ddp", devices=("cpu:0", "cpu:1"))
    elsewhere = Plan(engine="ddp", devices=("cpu:2", "cpu:3"))
    fsdp = Plan(engine="fsdp", devices=("cpu:0", "cpu:1"), shard=tuple(f"net.{number}" for number in range(6)), reshard_after_forward=True)
    with tempfile.TemporaryDirectory() as name:
        runs = [(Path(name) / each) for each in ("ddp", "fsdp", "move")]
        for each in runs:
            each.mkdir()
        (replicated, rank), (sharded, its_rank), (moved, _) = walk(runs[0], ddp), walk(runs[1], fsdp), walk(runs[2], ddp, elsewhere)
        known = {module for phase in (SEARCH, START, STEP, OTHER) for module in replicated.modules(phase)}
        walks = {
            "ddp step": replicated.modules(STEP, processes=[rank]),
            "fsdp step": sharded.modules(STEP, processes=[its_rank]),
            "plan": replicated.modules(START, processes=[os.getpid(), rank], plan=True),
            "move": [module for module in moved.modules(MOVE) if module not in known],
        }
    page, failed = told(PAGE.read_text(encoding="utf-8")), False
    for title, modules in walks.items():
        print(f"{title}: {len(modules)} modules of at most {CEILINGS[title]}: {', '.join(modules)}\n")
        if otherwise := wrong(title, modules, page[title]):
            print(f"docs/architecture.md is wrong: {otherwise}\n")
        failed |= len(modules) > CEILINGS[title] or bool(otherwise)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
