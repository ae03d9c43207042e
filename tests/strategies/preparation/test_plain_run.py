"""A bug in the user's step is raised first and alone, on whatever devices; a step that only planning fails to run is run."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lightning_autopar import AutoParallelStrategy, CheckpointMigrate, ElasticReplan
from tests.strategies.modules import QUIET


class Net(pl.LightningModule):
    """Classifies; ``loss`` is what the step does, right or wrong."""

    def __init__(self, loss: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.loss = loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.loss(self, batch)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


BUGS: dict[str, tuple[type[Exception], Callable[[Any, Any], Any]]] = {
    "labels": (RuntimeError, lambda net, batch: cross_entropy(net.layer(batch[0]), batch[1].float())),
    "shape": (RuntimeError, lambda net, batch: cross_entropy(net.layer(batch[0][:, :3]), batch[1])),
    "name": (NameError, lambda net, batch: cross_entropy(net.layer(batch[0]), labels)),  # type: ignore[name-defined]  # noqa: F821
    "key": (TypeError, lambda net, batch: cross_entropy(net.layer(batch["x"]), batch[1])),
    "attribute": (AttributeError, lambda net, batch: cross_entropy(net.network(batch[0]), batch[1])),
}


def right(net: Any, batch: Any) -> Any:
    return cross_entropy(net.layer(batch[0]), batch[1])


def fit(module: Net, root: Path, devices: str = "1xcpu:1GiB", **options: Any) -> AutoParallelStrategy:
    data = DataLoader(TensorDataset(torch.randn(8, 4), torch.randint(3, (8,))), batch_size=4)
    strategy = AutoParallelStrategy(devices=devices)
    quiet = {"accelerator": "cpu", "enable_checkpointing": False, **QUIET}
    pl.Trainer(strategy=strategy, max_epochs=1, default_root_dir=root, **{**quiet, **options}).fit(module, data)
    return strategy


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.parametrize("run", ["one device", "two devices", "elastic"])
def test_the_users_own_exception_comes_alone(
    bug: str, run: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    error, loss = BUGS[bug]
    callbacks: list[Callback] = [CheckpointMigrate(), ElasticReplan()] if run == "elastic" else []
    with pytest.raises(error) as caught:
        fit(Net(loss), tmp_path, "1xcpu:1GiB" if run == "one device" else "2xcpu:1GiB", callbacks=callbacks)
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.count("\n") <= 40
    assert f'test_plain_run.py", line {loss.__code__.co_firstlineno}, in <lambda>' in shown
    assert shown.index("in training_step") < shown.index("direct cause")
    told = "".join([*capfd.readouterr(), caplog.text])
    assert not [words for words in ("Chosen", "could not be traced", "fake_tensor") if words in told]


def test_a_step_that_only_the_run_can_make_is_run(tmp_path: Path) -> None:
    """Planning's view of a trainer has no loader; Lightning's loop has."""

    def asks(net: Any, batch: Any) -> Any:
        return right(net, batch) * len(net.trainer.train_dataloader)

    assert fit(Net(asks), tmp_path).plan is not None


class Gives(Callback):
    """Sets what the step needs; planning calls no callbacks."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.scale = 2.0


def test_a_step_that_needs_a_callback_is_run(tmp_path: Path) -> None:
    assert fit(Net(lambda net, batch: right(net, batch) * net.scale), tmp_path, callbacks=[Gives()]).plan is not None


def test_a_step_that_needs_its_logger_is_run(tmp_path: Path) -> None:
    def writes(net: Any, batch: Any) -> Any:
        Path(net.logger.log_dir, "step").touch()
        return right(net, batch)

    logs = tmp_path / "logs" / "net" / "version_0"
    logs.mkdir(parents=True)
    fit(Net(writes), tmp_path, logger=CSVLogger(tmp_path, "logs/net", version=0))
    assert (logs / "step").exists()
