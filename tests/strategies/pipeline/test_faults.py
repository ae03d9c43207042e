"""Pipelines whose stages fail, die or are interrupted in the middle of a schedule: what the user sees, and how soon all is over."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_autopar.plans import Plan, Schedule
from lightning_autopar.strategies.auto import AutoParallelStrategy
from lightning_autopar.strategies.base.worker_exception import WorkerFailed
from tests.processes import descendants, left_since
from tests.strategies.modules import QUIET, HookCounter

#: The fault comes in this batch, in its second micro-batch, when the schedule is in full swing.
BATCH, MICRO_BATCHES = 2, 3


class Unwell(ValueError):
    """A user's own exception, whose constructor wants something else than its words."""

    def __init__(self, place: str, code: int) -> None:
        super().__init__(f"{place} is unwell")
        self.place, self.code = place, code


class Block(nn.Module):
    """Calls ``act`` in its forward, or in the backward of what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.act: Callable[[str], None] = lambda moment: None

    def forward(self, x: Tensor) -> Tensor:
        self.act("forward")
        x = self.layer(x).tanh()
        if x.requires_grad:
            x.register_hook(self._backward)
        return x

    def _backward(self, gradient: Tensor) -> None:
        self.act("backward")


class Net(pl.LightningModule):
    """Three blocks; ``act`` of the module is called where its own code has the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList(Block() for _ in range(3))
        self.act: Callable[[str], None] = lambda moment: None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.act("loss")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05)


class Fault:
    """Does something once, at a certain moment of a run's worker, and writes down when and in which process.

    Args:
        moment: ``"forward"``, ``"backward"``, ``"loss"`` or ``"validation"``.
        action: what to do.
        folder: where to write.
    """

    def __init__(self, moment: str, action: Callable[[], None], folder: Path) -> None:
        self.moment, self.action, self.file = moment, action, folder / "fault"
        self.calls = 0

    def __call__(self, moment: str) -> None:
        evaluates = not torch.is_grad_enabled() and moment == "forward"
        if not _in_run() or ("validation" if evaluates else moment) != self.moment:
            return
        self.calls += 1
        if self.calls == (1 if evaluates else BATCH * MICRO_BATCHES + 2):
            self.file.write_text(str(os.getpid()))
            self.action()


def _in_run() -> bool:
    """Not while the plan is being made: there the process is a child that has no generation."""
    return "AUTOPAR_RENDEZVOUS_FILE" in os.environ


def _raise(place: str) -> Callable[[], None]:
    def unwell() -> None:
        raise Unwell(place, 7)

    return unwell


def _fit(module: Net, folder: Path, schedule: Schedule) -> HookCounter:
    """In three stages, as many micro-batches."""
    cuts = ("blocks.1", "blocks.2")
    plan = Plan(engine="pipeline", devices=("cpu:0", "cpu:1", "cpu:2"), schedule=schedule, micro_batches=MICRO_BATCHES, cuts=cuts)
    counter = HookCounter(folder / "hooks")
    quiet: dict[str, Any] = dict(QUIET)
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=AutoParallelStrategy(plan=plan, devices="3xcpu:1GiB"),
        max_epochs=1,
        default_root_dir=folder,
        callbacks=[counter],
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        **quiet,
    )
    x = torch.randn(36, 8, generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(x, x.roll(1, 1)), batch_size=6)
    trainer.fit(module, loader, loader)
    return counter


def _fails(kind: type[BaseException], module: Net, fault: Fault, folder: Path, schedule: Schedule = "1f1b") -> BaseException:
    """Fit, and expect to fail, with no process left. A rank that waited for a lost peer would wait half an hour."""
    before = descendants()
    with pytest.raises(kind) as raised:
        _fit(module, folder, schedule)
    assert not psutil.pid_exists(int(fault.file.read_text()))
    assert not left_since(before)
    return raised.value


@pytest.mark.parametrize(
    ("stage", "moment", "schedule"),
    [(0, "forward", "1f1b"), (1, "backward", "1f1b"), (2, "forward", "1f1b"), (0, "backward", "gpipe"), (1, "validation", "1f1b")],
)
def test_a_stages_exception_is_the_users_own(stage: int, moment: str, schedule: Schedule, tmp_path: Path) -> None:
    module = Net()
    module.blocks[stage].act = fault = Fault(moment, _raise(f"stage {stage}"), tmp_path)
    error = _fails(Unwell, module, fault, tmp_path, schedule)
    assert isinstance(error, Unwell)
    assert (error.place, error.code) == (f"stage {stage}", 7)
    assert traceback.extract_tb(error.__traceback__)[-1].name == "unwell"
    lines = HookCounter(tmp_path / "hooks").lines()
    step = 6 if moment == "validation" else BATCH
    assert f"{stage} {step} Unwell PipelineEngine" in lines
    assert len({line[0] for line in lines}) == len(lines)


def test_an_exception_in_the_loss_is_the_users_own(tmp_path: Path) -> None:
    module = Net()
    module.act = fault = Fault("loss", _raise("the loss"), tmp_path)
    error = _fails(Unwell, module, fault, tmp_path)
    assert isinstance(error, Unwell)
    assert "training_step" in [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert "2 2 Unwell PipelineEngine" in HookCounter(tmp_path / "hooks").lines()


@pytest.mark.parametrize(("stage", "moment"), [(0, "backward"), (1, "forward"), (2, "backward")])
def test_a_killed_worker_holds_up_nobody(stage: int, moment: str, tmp_path: Path) -> None:
    module = Net()
    module.blocks[stage].act = fault = Fault(moment, lambda: os.kill(os.getpid(), signal.SIGKILL), tmp_path)
    error = _fails(WorkerFailed, module, fault, tmp_path)
    assert f"rank {stage} on cpu:{stage} ended without a word: killed by SIGKILL" in str(error)


def test_an_interruption_ends_all_stages_at_the_same_batch(tmp_path: Path) -> None:
    """Ctrl-C reaches the user's process while the last stage is in the middle of a schedule."""
    module, user = Net(), os.getpid()
    module.blocks[2].act = fault = Fault("forward", lambda: os.kill(user, signal.SIGINT), tmp_path)
    # A shell starts what it runs in the background with interrupts ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        error = _fails(SystemExit, module, fault, tmp_path)  # Lightning makes that of a KeyboardInterrupt
    finally:
        signal.signal(signal.SIGINT, before)  # Lightning leaves it ignored
    assert isinstance(error, SystemExit)
    assert error.code == 1
    lines = HookCounter(tmp_path / "hooks").lines()
    step = lines[0].split()[1]
    assert int(step) > BATCH
    assert lines == [f"{rank} {step} KeyboardInterrupt PipelineEngine" for rank in range(3)]
