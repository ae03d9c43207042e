"""What a module's code says of what it logs, and who gets to see a step's loss."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from torch import Tensor, nn

from lightning_autopar.exact.logs.logging_hooks import (
    logs_between_steps,
    logs_in_training_step,
    looks_within_step,
    may_stop,
    reads_batch,
    sees_loss,
)


def tell(module: Any, value: Tensor) -> None:
    module.log("told", value)


helpers = ModuleType("helpers")
helpers.say = lambda module, value: module.log("said", value)  # type: ignore[attr-defined]


class Silent(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch).mean())


class ByMethod(Silent):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.shared(batch)

    def shared(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.net(batch).mean()
        self.log("loss", loss)
        return loss


class ByFunction(Silent):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).mean()
        tell(self, loss)
        return loss


class Teller:
    """An object of the user's that knows the module."""

    def __init__(self, module: Any) -> None:
        self.module = [module]

    def say(self, value: Tensor) -> None:
        tell(self.module[0], value)

    @staticmethod
    def count(value: Tensor) -> int:
        return value.numel()


class ByObject(Silent):
    def __init__(self) -> None:
        super().__init__()
        self.teller = Teller(self)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).mean()
        self.teller.say(loss)
        return loss


class ByQuietObject(ByObject):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).mean()
        self.teller.count(loss)
        return loss


class ByPythonModule(Silent):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).mean()
        helpers.say(self, loss)
        return loss


def by_closure() -> Any:
    def say(module: Any, value: Tensor) -> None:
        tell(module, value)

    class ByClosure(Silent):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss: Tensor = self.net(batch).mean()
            say(self, loss)
            return loss

    return ByClosure()


class Head(nn.Module):
    def forward(self, x: Tensor, module: Any) -> Tensor:
        module.log("inside", x.mean())
        return x


class BySubmodule(Silent):
    def __init__(self) -> None:
        super().__init__()
        self.head = Head()


class InHook(Silent):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", torch.zeros(()))


class Quiet(pl.Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.seen = batch_idx


class Watcher(pl.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen = outputs


def trainer(module: Any, *callbacks: Any, optimizer: Any = torch.optim.AdamW) -> Any:
    return SimpleNamespace(lightning_module=module, callbacks=list(callbacks), optimizers=[optimizer(module.parameters(), lr=0.1)])


@pytest.mark.parametrize(
    ("kind", "logs"),
    [
        (Silent, False),
        (ByMethod, True),
        (ByFunction, True),
        (BySubmodule, True),
        (InHook, False),
        (ByObject, True),
        (ByQuietObject, False),
        (ByPythonModule, True),
        (by_closure, True),
    ],
)
def test_whether_a_training_step_may_log(kind: Any, logs: bool) -> None:
    assert logs_in_training_step(trainer(kind())) is logs


def test_whether_hooks_of_a_batch_may_log() -> None:
    assert not logs_between_steps(trainer(Silent(), Quiet(), ModelCheckpoint()))
    assert logs_between_steps(trainer(InHook()))


class Stops(Silent):
    def on_train_batch_end(self, *args: Any) -> None:
        self.trainer.should_stop = True


def test_whether_the_users_code_may_end_a_fit() -> None:
    """A run whose code doesn't has no collective for it at each batch."""
    assert not may_stop(trainer(Silent(), Quiet(), ModelCheckpoint()))
    assert may_stop(trainer(Stops()))


def test_who_sees_a_steps_loss() -> None:
    assert not sees_loss(trainer(Silent(), Quiet(), ModelCheckpoint()))
    assert sees_loss(trainer(Silent(), Watcher()))
    assert sees_loss(trainer(Silent(), optimizer=torch.optim.LBFGS))


def test_who_may_look_before_a_step_is_over() -> None:
    assert not looks_within_step(trainer(Silent(), Watcher(), Quiet(), ModelCheckpoint()))
    assert looks_within_step(trainer(InHook()))
    assert looks_within_step(trainer(Silent(), optimizer=torch.optim.LBFGS))


class Reads(pl.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        print(len(batch))


class Passes(pl.Callback):
    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)


class Counts(pl.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        print(batch_idx, outputs)


class Ignores(pl.Callback):
    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        print(self)


class ModuleReads(pl.LightningModule):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.last = lambda: batch


class ModuleCounts(pl.LightningModule):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        print(outputs)


def test_who_uses_the_batch_at_its_end() -> None:
    given = LambdaCallback(on_train_batch_end=lambda trainer, pl_module, outputs, batch, batch_idx: print(batch))
    counted = LambdaCallback(on_train_batch_end=lambda trainer, pl_module, outputs, batch, batch_idx: print(batch_idx))
    unseen = LambdaCallback(on_train_batch_end=print)
    for owner, reads in [(Reads(), True), (Passes(), True), (Counts(), False), (Ignores(), False), (ModuleReads(), True), (given, True)]:
        assert reads_batch(owner, "on_train_batch_end") is reads, owner
    for owner, reads in [(ModuleCounts(), False), (counted, False), (unseen, True)]:
        assert reads_batch(owner, "on_train_batch_end") is reads, owner
