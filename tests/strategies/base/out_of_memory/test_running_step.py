"""Where in a batch memory ran out, as the error says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_autopar import AutoParallelStrategy
from lightning_autopar.strategies.base.out_of_memory import running_step
from lightning_autopar.strategies.base.worker_exception import WHERE
from tests.strategies.base.out_of_memory.test_rerun import allocate
from tests.strategies.fitted import QUIET, Fitted, fit, numbers, plan


class _Short(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]  # as torch's own
        loss = None if closure is None else closure()
        allocate(1, 0, "the optimizer")
        return loss


class Lacks(Fitted):
    """Runs out at the first batch's end, or in the optimizer's step."""

    def __init__(self, place: str, *, automatic: bool) -> None:
        super().__init__()
        self.place, self.automatic_optimization = place, automatic

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            self.manual_backward(loss)
            self.optimizers().step()  # type: ignore[union-attr]  # one optimizer
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        if self.place == "end":
            allocate(1, 0, "a hook")

    validation_step: Any = None

    def configure_optimizers(self) -> Any:
        return (_Short if self.place == "optimizer" else torch.optim.SGD)(self.parameters(), 0.05)


@pytest.mark.parametrize("automatic", [True, False])
@pytest.mark.parametrize(("place", "words"), [("end", "in a hook"), ("optimizer", "in the optimizer's step of batch 0")])
def test_an_error_says_where_memory_ran_out(
    place: str, words: str, automatic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOPAR_DEVICES", "1xcpu:2GiB")
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, strategy=AutoParallelStrategy(calibrate="off"), default_root_dir=tmp_path, **QUIET
    )
    with pytest.raises(torch.OutOfMemoryError) as raised:
        trainer.fit(Lacks(place, automatic=automatic), DataLoader(numbers(), batch_size=8))
    assert vars(raised.value)[WHERE] == f"cpu:0 ran out of memory {words}"
    assert not any("wasn't run again in more parts" in note for note in raised.value.__notes__), "more parts wouldn't have helped"


class Vanishes(pl.Callback):
    """The GPU is lost before the first batch."""

    def on_train_batch_start(self, *_: Any) -> None:
        raise torch.AcceleratorError("CUDA error: CUDA-capable device(s) is/are busy or unavailable")


def test_an_error_of_cudas_gets_what_the_driver_says_of_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_DEVICES", "1xcpu:2GiB")
    monkeypatch.setattr(running_step, "of_its_gpu", lambda device: f"; of its GPU: {device.id} is lost")
    strategy = AutoParallelStrategy(calibrate="off")
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, strategy=strategy, callbacks=[Vanishes()], default_root_dir=tmp_path, **QUIET)
    with pytest.raises(torch.AcceleratorError) as raised:
        trainer.fit(Fitted(), *(DataLoader(numbers(), batch_size=8) for _ in range(2)))
    assert raised.value.__notes__[0] == "autopar: this is rank 0 on cpu:0; of its GPU: cpu:0 is lost"


class MakesAFolder(Fitted):
    """As one process may, without asking whether it is there."""

    folder = Path()

    def on_train_epoch_end(self) -> None:
        self.folder.mkdir()


def test_a_folder_that_another_rank_has_made_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MakesAFolder, "folder", tmp_path / "pictures")
    with pytest.raises(FileExistsError) as raised:
        fit(MakesAFolder, numbers(8), plan("ddp"), max_epochs=1)
    words = r"this is rank [01] of 2, and all of them run this code: another one may have made '.*pictures' first\. Let it be there"
    assert re.search(words, "".join(raised.value.__notes__))


class RefusesToShare(pl.Callback):
    """As packages' callbacks do that can't run in several processes, or one that fails for a reason of its own."""

    def __init__(self, words: str) -> None:
        self.words = words

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.world_size > 1:
            raise ValueError(self.words)


@pytest.mark.parametrize(("words", "noted"), [("this storage isn't supported in DDP.", True), ("no file of this name", False)])
def test_an_error_that_speaks_of_several_processes_says_what_plans_one(words: str, noted: bool) -> None:
    with pytest.raises(ValueError, match=words) as raised:
        fit(Fitted, numbers(8), plan("ddp"), max_epochs=1, callbacks=[RefusesToShare(words)])
    told = r"this is rank [01] of 2, under the plan 'ddp.*'\. If the code .* AutoParallelStrategy\(allow=\['single'\]\) plans for one"
    assert bool(re.search(told, "".join(getattr(raised.value, "__notes__", ())))) == noted
