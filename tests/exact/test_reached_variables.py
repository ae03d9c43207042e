"""Lists beside the class, counters in a closure: after a run in workers they hold what they would hold after plain Lightning."""

from __future__ import annotations

import threading
import warnings
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from lightning_autopar import AutoParallelStrategy, CheckpointMigrate
from lightning_autopar._fork import run_forked
from lightning_autopar.strategies.processes.handover import back_to_script
from lightning_autopar.strategies.processes.handover.to_next_generation import carry_loggers_in, read_objects, write_objects

LOSSES: list[torch.Tensor] = []
COUNT = 0
SEEN: Counter[int] = Counter()
LATEST: deque[int] = deque(maxlen=2)
CURVE = np.zeros(8)
SUM = torch.zeros(1)
LOCK = threading.Lock()
HELD: list[Any] = []
NOTES = SimpleNamespace(lines=[])


def note(index: int) -> None:
    NOTES.lines.append(index)


class Net(pl.LightningModule):
    batches: ClassVar[list[int]] = []
    steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        global COUNT
        with LOCK:
            COUNT += 1
        loss = mse_loss(self.layer(batch[0]), batch[1])
        LOSSES.append(loss)
        SEEN[index] += 1
        LATEST.append(index)
        CURVE[index] += 1
        SUM.add_(1)
        self.batches.append(index)
        Net.steps += 1
        Net.latest = index  # the class has no such attribute before
        note(index)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def train_dataloader(self) -> Any:
        x = torch.randn(32, 4, generator=torch.Generator().manual_seed(3))
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)


class Closing(pl.Callback):
    """Its function closes over variables of ``run``."""

    def __init__(self, function: Callable[[int], None]) -> None:
        self.function = function

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.function(index)


def trainer_with(strategy: Any, callbacks: Any, tmp_path: Path, **options: Any) -> pl.Trainer:
    flags: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return pl.Trainer(
        strategy=strategy, accelerator="cpu", callbacks=callbacks, max_epochs=1, default_root_dir=tmp_path, **flags, **options
    )


@pytest.fixture(autouse=True)
def fresh() -> None:
    clear()


def clear() -> None:
    global COUNT
    COUNT = 0
    for each in (LOSSES, SEEN, LATEST, HELD, Net.batches, NOTES.lines):
        each.clear()
    Net.steps = 0
    if hasattr(Net, "latest"):
        del Net.latest
    CURVE[:] = 0
    SUM.zero_()


def run(strategy: Any, tmp_path: Path, *more: Any, **options: Any) -> tuple[Any, ...]:
    """Everything that the run appended to, each the object that it was before."""
    indices: list[int] = []
    last, before = -1, (id(LOSSES), id(SEEN), id(CURVE), id(SUM))

    def keep(index: int) -> None:
        nonlocal last
        last = index
        indices.append(index)

    trainer_with(strategy, [Closing(keep), *more], tmp_path, **options).fit(Net())
    assert (id(LOSSES), id(SEEN), id(CURVE), id(SUM)) == before, "others may refer to them"
    assert all(isinstance(loss, torch.Tensor) for loss in LOSSES)
    kept = COUNT, dict(SEEN), list(LATEST), CURVE.tolist(), float(SUM), list(Net.batches), list(NOTES.lines)
    return ([loss.item() for loss in LOSSES], *kept, Net.steps, Net.latest, indices, last)


def test_what_workers_append_to_is_here_afterwards(tmp_path: Path) -> None:
    """Of a loss, rank 0 has that of its rows, as of an attribute; counts and indices are plain Lightning's."""
    plain = run("auto", tmp_path, devices=1)
    clear()
    ours = run(AutoParallelStrategy(devices="2xcpu:4GiB", allow=["ddp"]), tmp_path)
    assert len(ours[0]) == len(plain[0]) == 8
    assert ours[1:] == plain[1:]


def test_one_worker_has_all_of_plain_lightnings_values(tmp_path: Path) -> None:
    """An elastic run on one device is in a worker."""
    found = []
    for strategy, more in (("auto", ()), (AutoParallelStrategy(devices="cpu:4GiB"), (CheckpointMigrate(folder=tmp_path / "snapshots"),))):
        clear()
        pl.seed_everything(1, verbose=False)
        found.append(run(strategy, tmp_path, *more, devices=1))
    assert found[0] == found[1]


def test_what_changed_and_cannot_come_back_is_named_and_nothing_else(tmp_path: Path) -> None:
    class Holding(pl.Callback):
        def on_train_end(self, trainer: Any, module: Any) -> None:
            HELD.append(threading.Lock())

    with pytest.warns(UserWarning, match=r"could not be brought back to the main process: global [\w.]*test_reached_variables\.HELD \("):
        found = run(AutoParallelStrategy(devices="2xcpu:4GiB", allow=["ddp"]), tmp_path, Holding())
    assert HELD == []
    assert found[1] == 8


def test_generations_carry_them_on_and_say_nothing_of_what_cannot_move(tmp_path: Path) -> None:
    """Two workers one after the other, forked from this process; the second begins anew and takes over what the first had."""
    indices: list[int] = []
    total = 0

    def keep(index: int) -> None:
        nonlocal total
        total += index
        indices.append(index)
        if index == 1:
            HELD.append(threading.Lock())

    trainer = trainer_with("auto", [Closing(keep)], tmp_path, devices=1)
    module = Net()
    trainer.strategy._lightning_module = module
    before = back_to_script.survey(trainer)
    trainer.strategy.connect(module)

    def first() -> None:
        for index in range(3):
            keep(index)
            note(index)
        write_objects(trainer, before, tmp_path, 0)

    def second() -> tuple[Any, ...]:
        carry_loggers_in(trainer, before, tmp_path)
        keep(0)  # as in a hook that runs again
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            read_objects(trainer, before, tmp_path)
        for index in range(3, 5):
            keep(index)
            note(index)
        return list(indices), total, list(NOTES.lines), sorted(before.left)

    run_forked(first)
    assert indices == []
    found = run_forked(second)
    assert found[:3] == ([0, 1, 2, 3, 4], 10, [0, 1, 2, 3, 4])
    assert [name.rpartition(".")[2] for name in found[3]] == ["HELD[0]"], "it is told when the run ends"
