"""What code around a run on one device finds, during the run and after it: the same as under plain Lightning."""

from __future__ import annotations

import copy
import itertools
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_autopar import AutoParallelStrategy
from lightning_autopar.sharing.runs.progress import batches_left
from tests.strategies.modules import QUIET, TWO, Regression, loader

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*LeafSpec")


def fitter(folder: Path, allow: tuple[str, ...] = ("single",), **options: Any) -> pl.Trainer:
    strategy = AutoParallelStrategy(devices=TWO, calibrate="off", allow=allow)
    arguments: dict[str, Any] = {**QUIET, "enable_checkpointing": False, "max_epochs": 1, "num_sanity_val_steps": 0, **options}
    return pl.Trainer(accelerator="cpu", strategy=strategy, default_root_dir=folder, **arguments)


def test_module_and_callbacks_can_be_saved_whole(tmp_path: Path) -> None:
    module, trainer = Regression(), fitter(tmp_path)
    trainer.fit(module, loader(), loader())
    torch.save(module, tmp_path / "module.pt")
    pickle.dumps(trainer.callbacks)
    copy.deepcopy(trainer)


class Copied(Callback):
    copies = 0

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        """Deep-copies what leads to the running strategy, in recorded steps, too."""
        copy.deepcopy(trainer.strategy)
        self.copies += 1


def test_the_trainer_can_be_copied_while_it_runs(tmp_path: Path) -> None:
    callback = Copied()
    fitter(tmp_path, callbacks=[callback]).fit(Regression(), loader(), loader())
    assert callback.copies == 4


def test_a_list_of_batches_and_a_stream_are_loaders_in_a_collection(tmp_path: Path) -> None:
    class Given(Regression):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return batch, batch_idx, dataloader_idx

    given = {"a": [0, 1], "b": [2, 3]}
    assert fitter(tmp_path).predict(Given(), given) == [[(0, 0, 0), (1, 1, 0)], [(2, 0, 1), (3, 1, 1)]]
    streams = fitter(tmp_path, limit_predict_batches=2).predict(Given(), [itertools.count(), itertools.count(5)])
    assert streams == [[(0, 0, 0), (1, 1, 0)], [(5, 0, 1), (6, 1, 1)]]


class Replays(Regression):
    """Reads batches from what ``on_fit_start`` has filled and each batch goes on filling, as agents do that play a game."""

    def __init__(self) -> None:
        super().__init__()
        self.played: list[Any] = []

    def _play(self) -> None:
        x = torch.full((8,), float(len(self.played)))
        self.played.append((x, x[:1]))

    def on_fit_start(self) -> None:
        for _ in range(4):
            self._play()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._play()

    def train_dataloader(self) -> Any:
        class Latest(IterableDataset[Any]):
            def __iter__(other) -> Any:
                assert self.played
                return iter(self.played[-4:])

        return DataLoader(Latest(), batch_size=4)


def test_a_loader_reads_what_a_hook_before_the_first_batch_makes(tmp_path: Path) -> None:
    module = Replays()
    trainer = fitter(tmp_path, max_epochs=2)
    trainer.fit(module, val_dataloaders=loader())
    assert trainer.global_step == 2
    assert len(module.played) == 6, "planning plays for itself"


def test_setup_is_called_with_lightnings_own_word(tmp_path: Path) -> None:
    class Strict(Regression):
        def setup(self, stage: str) -> None:
            assert isinstance(stage, TrainerFn)

    fitter(tmp_path).fit(Strict(), loader(), loader())


@pytest.mark.parametrize("ending", [SystemExit, KeyboardInterrupt, ValueError])
def test_how_a_hook_ends_the_run_comes_out(ending: type[BaseException], tmp_path: Path) -> None:
    class Ending(Regression):
        def on_fit_start(self) -> None:
            raise ending("enough")

    heard: list[str] = []

    class Heard(CSVLogger):
        def finalize(self, status: str) -> None:
            heard.append(status)

    class Asked(Callback):
        def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
            heard.append(repr(exception))

    with pytest.raises(SystemExit if ending is KeyboardInterrupt else ending):  # Lightning leaves by an exit after Ctrl-C
        fitter(tmp_path, logger=Heard(tmp_path), callbacks=[Asked()]).fit(Ending(), loader(), loader())
    assert heard == [repr(ending("enough")), "failed"]


def test_an_optimizer_that_steps_without_a_backward_is_planned_for_under_every_engine(tmp_path: Path) -> None:
    class Unmoved(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            optimizer: Any = self.optimizers()
            optimizer.step()
            return loss

    trainer = fitter(tmp_path, ("single", "ddp", "fsdp", "zero", "pipeline"))
    module = Unmoved()
    before = copy.deepcopy(module.state_dict())
    trainer.fit(module, loader(), loader())
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_backward_is_lightnings_own_where_nothing_is_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = Strategy.backward

    def backward(self: Strategy, *args: Any, **kwargs: Any) -> Any:
        calls.append(type(self).__name__)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Strategy, "backward", backward)
    fitter(tmp_path, limit_train_batches=3).fit(Regression(), loader(), loader())
    assert calls == ["SingleEngine"] * 3


def test_a_stream_that_is_past_its_last_epoch_has_no_known_end() -> None:
    progress = SimpleNamespace(current=SimpleNamespace(ready=3))
    trainer: Any = SimpleNamespace(
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress)),
        num_training_batches=float("inf"),
        max_steps=-1,
        max_epochs=1,
        current_epoch=1,
    )
    assert batches_left(trainer) is None
