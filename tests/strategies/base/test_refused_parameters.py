"""Trained parameters that a hook puts into the module after the run has begun are refused under every engine of several ranks; copies that
nobody trains are not, and those that it only unfreezes are trained.
"""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_autopar import AutoParallelStrategy
from lightning_autopar.plans import Plan
from tests.strategies.fitted import BLOCKS, QUIET, Fitted, assert_same, fit, numbers, plan


class NewHead(Fitted):
    """Another layer in the place of its last one, of the same name."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net[4] = nn.Linear(16, 1)
            self.trainer.strategy.setup_optimizers(self.trainer)


@pytest.mark.parametrize("engine", ["ddp", "fsdp", "pipeline", "zero"])
def test_a_new_layer_of_an_old_name_is_refused(engine: Any) -> None:
    strategy = AutoParallelStrategy(devices="2xcpu:1GiB", allow=[engine], calibrate="off")
    trainer = pl.Trainer(**QUIET, strategy=strategy, max_epochs=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'net\.4\.(weight|bias)' was put into the module after the run had begun"):
        trainer.fit(NewHead(), DataLoader(numbers(), batch_size=8), DataLoader(numbers(8), batch_size=8))


class NewLayer(Fitted):
    """Another layer in the middle of the last epoch."""

    more: Any

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if (self.current_epoch, batch_idx) == (1, 1):
            self.more = nn.Linear(1, 1)
            self.trainer.optimizers[0].add_param_group({"params": list(self.more.parameters())})

    def loss(self, batch: Any) -> Any:
        found = self.net(batch[0])
        return nn.functional.mse_loss(self.more(found) if hasattr(self, "more") else found, batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


@pytest.mark.parametrize("under", [plan("ddp"), plan("fsdp", shard=BLOCKS), plan("zero", zero_stage=1)], ids=Plan.title)
def test_a_new_layer_in_the_middle_of_an_epoch_is_refused(under: Plan) -> None:
    with pytest.raises(ValueError, match=r"'more\.(weight|bias)' was put into the module after the run had begun"):
        fit(NewLayer, numbers(), under)


class Copies(Fitted):
    """Validates an average of its network, which it copies when the first epoch has ended; unfreezes a layer later."""

    distilled = False

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)
        self.average: Any = None

    def on_validation_epoch_start(self) -> None:
        if self.trainer.sanity_checking:
            return
        if self.average is None:
            self.average = copy.deepcopy(self.net)
        with torch.no_grad():
            for average, weight in zip(self.average.parameters(), self.net.parameters(), strict=True):
                average.lerp_(weight, 0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss + self.average(batch[0]).mean() if self.distilled and self.average is not None else loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        net = self.net if self.average is None else self.average
        self.log("val_loss", nn.functional.mse_loss(net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), 0.05)


class Distils(Copies):
    distilled = True


class UnfreezesLater(Copies):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[0].requires_grad_(self.current_epoch == 2)


UNDER = [plan("ddp"), plan("fsdp", shard=BLOCKS), plan("zero", zero_stage=1), plan("zero", zero_stage=3)]


@pytest.mark.filterwarnings("ignore:.*is used outside of a step, where ZeRO-3")
@pytest.mark.parametrize("under", UNDER, ids=Plan.title)
def test_a_copy_that_nobody_trains_may_come_later(under: Plan) -> None:
    assert_same(UnfreezesLater if under.engine == "ddp" else Copies, numbers(), under, max_epochs=3)


@pytest.mark.filterwarnings("ignore:.*is used outside of a step, where ZeRO-3")
@pytest.mark.parametrize("under", [under for under in UNDER if under.engine != "fsdp"], ids=Plan.title)  # FSDP2 reduces a copy's, too
def test_a_copy_that_gradients_reach_is_refused(under: Plan) -> None:
    with pytest.raises(ValueError, match=r"'average\.4\.(weight|bias)' was put into the module after the run had begun"):
        fit(Distils, numbers(), under, max_epochs=3)


class Unfreezes(Fitted):
    """Trains its last layer at first; more in the middle of an epoch, in the middle of a window of accumulated batches."""

    def __init__(self) -> None:
        super().__init__()
        self.net[:4].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.current_epoch == 0 and batch_idx == 1:
            self.net[2:4].requires_grad_(True)
        if self.current_epoch == 1:
            self.net.requires_grad_(True)


class Backbone(Fitted):
    @property
    def backbone(self) -> Any:
        return self.net[:4]


@pytest.mark.parametrize(
    ("under", "options"),
    [(plan("ddp"), {"accumulate_grad_batches": 2}), (plan("ddp", micro_batches=2), {}), (plan("fsdp", shard=BLOCKS), {})],
    ids=["ddp", "micro-batches", "fsdp"],
)
def test_what_is_unfrozen_is_trained(under: Any, options: dict[str, Any]) -> None:
    assert_same(Unfreezes, numbers(), under, **options)


@pytest.mark.parametrize("under", [plan("ddp"), plan("fsdp", shard=BLOCKS)], ids=["ddp", "fsdp"])
def test_lightnings_finetuning(under: Any) -> None:
    def callbacks() -> Any:
        return [pl.callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.02)]

    ours, losses, _ = fit(Backbone, numbers(), under, callbacks=callbacks(), max_epochs=3)
    theirs, others, _ = fit(Backbone, numbers(), None, callbacks=callbacks(), max_epochs=3)
    torch.testing.assert_close(losses, others, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()), rtol=1e-5, atol=1e-5)
