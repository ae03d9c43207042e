"""A bug in the user's step is raised first and alone, on whatever devices; a step that only planning fails to run is run."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
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
from lightning_autopar.plans import Engine
from lightning_autopar.strategies.preparation.plain_run import _is_the_users
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


def _refuses(net: Any, batch: Any) -> Any:
    raise ValueError("what kind of image is this?")


BUGS: dict[str, tuple[type[Exception], Callable[[Any, Any], Any]]] = {
    "labels": (RuntimeError, lambda net, batch: cross_entropy(net.layer(batch[0]), batch[1].float())),
    "shape": (RuntimeError, lambda net, batch: cross_entropy(net.layer(batch[0][:, :3]), batch[1])),
    "name": (NameError, lambda net, batch: cross_entropy(net.layer(batch[0]), labels)),  # type: ignore[name-defined]  # noqa: F821
    "key": (TypeError, lambda net, batch: cross_entropy(net.layer(batch["x"]), batch[1])),
    "label": (IndexError, lambda net, batch: cross_entropy(net.layer(batch[0]), batch[1] + 3)),
    "attribute": (AttributeError, lambda net, batch: cross_entropy(net.network(batch[0]), batch[1])),
    "raised": (ValueError, _refuses),
}


def right(net: Any, batch: Any) -> Any:
    return cross_entropy(net.layer(batch[0]), batch[1])


def fit(
    module: Net, root: Path, devices: str = "1xcpu:1GiB", *, allow: Sequence[Engine] | None = None, validate: bool = False, **options: Any
) -> AutoParallelStrategy:
    data = DataLoader(TensorDataset(torch.randn(8, 4), torch.randint(3, (8,))), batch_size=4)
    strategy = AutoParallelStrategy(devices=devices, **({} if allow is None else {"allow": allow}))  # type: ignore[arg-type]
    quiet = {"accelerator": "cpu", "enable_checkpointing": False, "max_epochs": 1, **QUIET}
    pl.Trainer(strategy=strategy, default_root_dir=root, **{**quiet, **options}).fit(module, data, data if validate else None)
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
    assert f'test_plain_run.py", line {loss.__code__.co_firstlineno + (bug == "raised")}, in {loss.__name__}' in shown
    assert "in training_step" in shown
    assert "direct cause" not in shown
    told = "".join([*capfd.readouterr(), caplog.text])
    alone = bug != "label" or run != "one device"  # real labels are seen only where a plan of several devices is tried
    assert not [words for words in ("Chosen", "could not be traced", "fake_tensor") if alone and words in told]


class Odd(Exception):
    """The user's own."""


@pytest.mark.parametrize("engine", ["ddp", "fsdp", "pipeline"])
def test_the_users_own_class_is_raised_whatever_the_engine(engine: Engine, tmp_path: Path) -> None:
    """In its third batch: a trial of the engine meets it on copies of the first one."""

    def odd(net: Any, batch: Any) -> Any:
        net.seen = getattr(net, "seen", 0) + 1
        if net.seen > 2 and not torch._guards.detect_fake_mode():
            try:
                {}["a"]
            except KeyError as error:
                raise Odd(net.seen) from error
        return right(net, batch)

    module = Net(odd)
    module.layer = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))  # type: ignore[assignment]
    with pytest.raises(Odd) as caught:
        fit(module, tmp_path, "2xcpu:1GiB", allow=[engine], max_epochs=3)
    assert isinstance(caught.value.__cause__, KeyError)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "odd"


@pytest.mark.parametrize("devices", [1, 2])
def test_a_bug_in_validation_comes_before_the_plan(devices: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    class Validates(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", self.los(self, batch))  # type: ignore[operator]

    allow: list[Engine] = ["single", "ddp"]
    with pytest.raises(AttributeError, match="los"):
        fit(Validates(right), tmp_path, f"{devices}xcpu:1GiB", allow=allow[devices - 1 :], num_sanity_val_steps=2, validate=True)
    assert "Chosen" not in "".join(capfd.readouterr())


def _grouped(net: Any, batch: Any) -> Any:
    if not torch.distributed.is_initialized():
        raise RuntimeError("several processes are wanted")
    return right(net, batch)


def _started(net: Any, batch: Any) -> Any:
    if os.environ.get("WORLD_SIZE", "1") == "1":
        raise RuntimeError("a launcher is wanted")
    return right(net, batch)


def _asserts(net: Any, batch: Any) -> Any:
    assert torch.distributed.is_initialized()
    return right(net, batch)


@pytest.mark.filterwarnings("ignore:autopar", "ignore::FutureWarning")  # the first say that the step couldn't be tried
@pytest.mark.parametrize(
    "step",
    [
        lambda net, batch: right(net, batch) * {2: 1.0}[net.trainer.world_size],
        lambda net, batch: right(net, batch) * len(net.all_gather(batch[0]).flatten(0, 1)[:1].shape),
        lambda net, batch: right(net, batch) * float(os.environ["WORLD_SIZE"]),
        lambda net, batch: right(net, batch) * len(list(net.trainer.strategy.model.module.parameters())),
        lambda net, batch: right(net, batch) * torch.distributed.get_world_size(),
        lambda net, batch: right(net, batch) * [0, 1, 2][net.trainer.strategy.num_processes],
        _grouped,
        _started,
        _asserts,
    ],
    ids=["world_size", "all_gather", "environment", "strategy", "group", "processes", "raise", "variable", "assert"],
)
def test_a_step_that_needs_several_processes_is_run(step: Any, tmp_path: Path) -> None:
    assert fit(Net(step), tmp_path, "2xcpu:1GiB", allow=["ddp"]).plan is not None


def test_a_step_that_needs_a_gpu_is_nobodys_bug() -> None:
    """What a CPU alone can't do, and what the code itself finds wrong with its surroundings."""

    def training_step(step: Callable[[], Any]) -> BaseException:
        try:
            return step()  # type: ignore[no-any-return]
        except Exception as error:
            return error

    def wants() -> None:
        raise ValueError("give me a GPU")

    device: Any = torch.device("cpu").index
    steps = {
        "an operator": (lambda: torch.ones(2, 3) @ torch.ones(2, 3), False, True),
        "memory": (lambda: torch.empty(1 << 60), False, False),
        "CUDA": (lambda: torch.ones(1).cuda(), False, False),
        "a file": (lambda: Path("/nowhere/lock").read_text(), False, False),
        "a condition": (wants, False, True),  # on CPUs it has asked for nothing that differs in the run; see `_note_call`
        "a name": (lambda: labels, True, True),  # type: ignore[name-defined]  # noqa: F821
        "an index": (lambda: [1][device], True, True),
    }
    for name, (step, *theirs) in steps.items():
        error = training_step(step)
        assert [_is_the_users(error, target) for target in ("cuda", "cpu")] == theirs, name


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


@pytest.mark.parametrize("call", ["predict", "test", "validate"])
def test_a_bug_in_another_loops_step_comes_before_the_plan(call: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    class Evaluates(Net):
        def step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch)  # the loader's batch is a list

        predict_step = test_step = validation_step = step

    data = DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=4)
    trainer = pl.Trainer(strategy=AutoParallelStrategy(devices="2xcpu:1GiB"), default_root_dir=tmp_path, accelerator="cpu", **QUIET)
    with pytest.raises(TypeError, match="list"):
        getattr(trainer, call)(Evaluates(right), data)
    assert "Chosen" not in "".join(capfd.readouterr())
