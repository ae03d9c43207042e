"""Steps of a pipeline that are out of the ordinary, against plain Lightning on one device."""

from __future__ import annotations

import gc
import random
import traceback
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tests.strategies.fitted import BLOCKS, Fitted, numbers
from tests.strategies.pipeline.test_pipeline import same
from tests.strategies.pipelines import pipeline, run

UNDER = pipeline(("net.2",), schedule="1f1b", micro_batches=3)


class Sometimes(Fitted):
    """No loss for every third batch: neither weights nor the optimizer's state nor accumulated gradients change by it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return None if batch_idx % 3 == 2 else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2, weight_decay=0.5)


@pytest.mark.filterwarnings("ignore:.*returned `None`")
@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_batch_without_a_loss_changes_nothing(accumulated: int) -> None:
    same(Sometimes, numbers(40), UNDER, accumulate_grad_batches=accumulated)


class Never(Fitted):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


@pytest.mark.filterwarnings("ignore:.*returned `None`")
def test_a_step_without_any_loss_trains_nothing() -> None:
    """And one sample at a time is fewer than there are stages."""
    same(Never, numbers(3), UNDER, batch_size=1)


class Gathering(Fitted):
    """Gathers all ranks' outputs, in a step and in a hook: one device has them."""

    def loss(self, batch: Any) -> Tensor:
        outputs: Any = self.all_gather(self.net(batch[0]), sync_grads=True)
        return torch.nn.functional.mse_loss(outputs, batch[1])

    def on_train_batch_end(self, *args: Any) -> None:
        assert self.all_gather(torch.ones(3)).shape == (3,)


def test_what_one_device_has_is_not_gathered() -> None:
    same(Gathering, numbers(6), UNDER)


def test_batches_of_one_sample() -> None:
    same(Fitted, numbers(5), pipeline(("net.2", "net.3"), schedule="1f1b", micro_batches=3), batch_size=1)
    same(Fitted, numbers(5), pipeline(("net.1", "net.2", "net.3"), schedule="interleaved_1f1b", micro_batches=4, ranks=2), batch_size=4)


class Graphs(Dataset[Any]):
    """Samples that aren't rows of anything."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return torch.randn(2 + index % 3, 8, generator=torch.Generator().manual_seed(index))


class Bag:
    """A batch of the user's own class."""

    def __init__(self, samples: list[Tensor]) -> None:
        self.samples = torch.cat(samples)

    def to(self, *args: Any, **kwargs: Any) -> Bag:
        self.samples = self.samples.to(*args, **kwargs)
        return self


class OnBags(Fitted):
    def loss(self, batch: Any) -> Tensor:
        return self.net(batch.samples).pow(2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch.samples.add_(0.5)  # in place: each stage has its own to change
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=1)


def test_a_batch_that_has_no_rows_runs_whole() -> None:
    under = pipeline(("net.2",), schedule="gpipe", micro_batches=1)
    same(OnBags, Graphs(), under, batch_size=2, collate=Bag)


def test_a_batch_that_has_no_rows_is_not_taken_apart() -> None:
    with pytest.raises(ValueError, match="micro_batches=1"):
        run(OnBags, Graphs(), UNDER, blocks=BLOCKS, batch_size=2, collate=Bag)


class Fails(Fitted):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if batch_idx == 1 and self.trainer.global_step == 1:
            self.fail()
        return loss

    def fail(self) -> None:
        raise KeyError("the last stage's own words")


def test_what_the_last_stage_raises_reaches_the_user() -> None:
    with pytest.raises(KeyError, match="the last stage's own words") as caught:
        run(Fails, numbers(), UNDER, blocks=BLOCKS, hooks=["training_step"], limit_val_batches=0)
    text = "".join(traceback.format_exception(caught.value))
    assert "in fail" in text
    assert "failed to run forward" not in text


class Mixed(Fitted):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return None if len(batch[0]) == 2 else loss


def test_a_loss_for_some_parts_only_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="for some parts of a batch and None for others"):
        run(Mixed, numbers(), UNDER, blocks=BLOCKS, hooks=["training_step"], limit_val_batches=0)


class Frozen(Fitted):
    """The first stage has nothing to train until the second epoch; whether anything crosses with a gradient changes then."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)
        self.net[1].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net[:2].requires_grad_(True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_what_is_trained_may_change(schedule: Any) -> None:
    same(Frozen, numbers(), pipeline(("net.2",), schedule=schedule), max_epochs=3)


class OfTwo(Fitted):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (x, y), (more, of_more) = batch["one"], batch["other"]
        return self.loss((torch.cat([x, more]), torch.cat([y, of_more])))


def test_a_batch_of_two_loaders() -> None:
    """Each part has a part of both."""
    x, y = numbers().tensors
    options = {"sample": {"one": [x[:2], y[:2]], "other": [x[2:4], y[2:4]]}}
    results = []
    for plan in (UNDER, None):
        loaders = {name: DataLoader(numbers(24), batch_size=8, shuffle=True) for name in ("one", "other")}
        module, losses, _, _ = run(OfTwo, numbers(), plan, blocks=BLOCKS, train=loaders, **options)
        results.append((losses, dict(module.state_dict())))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


class Regularised(Fitted):
    """A loss over parameters of the last stage's."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.1 * self.net[4].weight.pow(2).sum()


def test_a_loss_over_the_last_stages_weights() -> None:
    same(Regularised, numbers(), UNDER)


def test_several_optimizer_groups_and_a_closure_of_the_users() -> None:
    class Grouped(Fitted):
        def configure_optimizers(self) -> Any:
            groups = [{"params": self.net[:2].parameters(), "lr": 0.1}, {"params": self.net[2:].parameters(), "weight_decay": 0.1}]
            return torch.optim.SGD(groups, 0.05, momentum=0.9, nesterov=True)

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            for group in optimizer.param_groups:
                group["lr"] *= 0.95
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    same(Grouped, numbers(), UNDER)


def test_manual_optimization_is_refused() -> None:
    class Manual(Fitted):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    with pytest.raises(ValueError, match="automatic optimization"):
        run(Manual, numbers(), UNDER, blocks=BLOCKS)


class Augmented(Dataset[Any]):
    """Random in the main process: from the global generators, or from one of its own that each process seeds anew."""

    def __init__(self, own: bool) -> None:
        self.own = own

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        x = torch.full((8,), float(index)) / 10
        noise = float(numpy.random.default_rng().normal()) if self.own else float(torch.randn(()) + random.random() + numpy.random.rand())
        return x + noise, x.sum(0, keepdim=True) + noise


def test_all_stages_draw_the_same_augmentation() -> None:
    same(Fitted, Augmented(own=False), UNDER, batch_size=4)


def test_stages_that_drew_other_augmentations_say_so() -> None:
    with pytest.raises(RuntimeError, match="given different batches"):
        run(Fitted, Augmented(own=True), UNDER, blocks=BLOCKS, batch_size=4)


class Alive(pl.Callback):
    """How many tensors of the size of an activation are there after a step, without the garbage collector's help."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, trainer: Any, module: Any) -> None:
        gc.collect()
        gc.disable()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx < 2:
            return
        alive = [each for each in gc.get_objects() if type(each) is Tensor and each.shape[:1] == (6,) and each.shape[-1:] == (67,)]
        (self.folder / f"{trainer.global_rank}").write_text(str(len(alive)))
        gc.enable()


@pytest.mark.filterwarnings("ignore")
def test_nothing_of_a_step_stays(tmp_path: Path) -> None:
    class Wide(Fitted):
        def __init__(self) -> None:
            super().__init__(67)

    under = pipeline(("net.2",), schedule="1f1b", micro_batches=4)
    run(Wide, numbers(96), under, blocks=BLOCKS, batch_size=24, max_epochs=1, limit_val_batches=0, callbacks=[Alive(tmp_path)])
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["0", "0"]
