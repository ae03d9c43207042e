"""Hooks that put parameters into the module once the run has begun, and their healthy neighbours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lightning_autopar.strategies.preparation.trainer_options import late_parameters
from tests.strategies.modules import Regression, trainer


class Probes(Callback):
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.probe = nn.Linear(4, 2).to(pl_module.device)


class Registers(Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.register_parameter("scale", nn.Parameter(next(pl_module.parameters()).new_ones(1)))


class Appends(Callback):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.heads.append(nn.Linear(4, 2))


class Swaps(Callback):
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.heads[-1] = nn.Linear(4, 3)


class Nested(Callback):
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.heads.probe = nn.Linear(4, 3)


class ByName(Callback):
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        for name, part in [("probe", nn.Linear(4, 3))]:
            setattr(pl_module, name, part)


class Writes(Callback):
    """Must not be run twice."""

    def __init__(self, path: Path) -> None:
        self.path, self.seen = path, list[str]()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append(str(pl_module.device))
        self.path.touch(exist_ok=False)


class Remembers(Callback):
    """Writes to the module, but no parameters; and keeps a probe of its own."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.began = True
        pl_module.frozen = nn.Linear(4, 2).requires_grad_(False)
        self.probe = nn.Linear(4, 2)


class Needs(Callback):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.batches = trainer.train_dataloader.dataset.nothing


class Lazy(Regression):
    def on_fit_start(self) -> None:
        self.extra = nn.Linear(4, 2)


def found(folder: Path, *callbacks: Callback, module: Any = None) -> str | None:
    run = trainer("single", folder, callbacks=[*callbacks])
    run.strategy._lightning_module = module or Regression()
    run.lightning_module.heads = nn.ModuleList([nn.Identity()])
    run.state.fn = TrainerFn.FITTING
    sentence = late_parameters(run)
    assert not hasattr(run.lightning_module, "probe")  # it was tried elsewhere
    return sentence


@pytest.mark.parametrize(
    ("callback", "words"),
    [
        (Probes(), "the callback Probes puts the parameter 'probe.weight' into the module in on_fit_start"),
        (Appends(), "the callback Appends puts the parameter 'heads.1.weight' into the module in on_train_epoch_start"),
        (Registers(), "the callback Registers puts the parameter 'scale' into the module in on_train_start"),
        (Swaps(), "the callback Swaps puts the parameter 'heads.0.weight' into the module in on_fit_start"),
        (Nested(), "the callback Nested puts the parameter 'heads.probe.weight' into the module in on_fit_start"),
        (ByName(), "the callback ByName puts the parameter 'probe.weight' into the module in on_fit_start"),
    ],
)
def test_a_callback_that_adds_some_is_named(callback: Callback, words: str, tmp_path: Path) -> None:
    assert (found(tmp_path, Remembers(), callback) or "").startswith(words)


def test_a_module_that_adds_some_is_named(tmp_path: Path) -> None:
    assert (found(tmp_path, module=Lazy()) or "").startswith("the module puts the parameter 'extra.weight' into the module in on_fit_start")


def test_others_are_not(tmp_path: Path) -> None:
    assert found(tmp_path, Remembers(), Needs(), Writes(tmp_path / "began")) is None
    assert not (tmp_path / "began").exists()
    assert found(tmp_path) is None
