"""Memory of copies that callbacks make of the network: predicted, and measured in the run."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_autopar import AutoParallelStrategy
from lightning_autopar.devices.spec import parse_spec
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.trace.first_batch import FirstBatch
from lightning_autopar.memory.trace.trace import trace
from lightning_autopar.planning.plan_bytes import replay
from lightning_autopar.strategies.preparation.callback_copies import with_copies
from lightning_autopar.strategies.preparation.planning_inputs import decide_again
from tests.strategies.fitted import Fitted, numbers, plan
from tests.strategies.modules import QUIET
from tests.strategies.preparation.test_planning_inputs import plan as decided
from tests.strategies.preparation.test_planning_inputs import trainer_for


class Average(pl.Callback):
    """Follows the weights, and takes their place in validations."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.average = copy.deepcopy(pl_module.net)

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        for mean, parameter in zip(self.average.parameters(), pl_module.net.parameters(), strict=True):
            mean.lerp_(parameter, 0.1)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.aside = {name: value.clone() for name, value in pl_module.state_dict().items()}

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        del self.aside


class Early(Average):
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.average = copy.deepcopy(pl_module.net)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pass


class Shadow:
    """What a package's average looks like."""

    def __init__(self, parameters: Any) -> None:
        self.shadow = [parameter.detach().clone() for parameter in parameters]


class InAnObject(Average):
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.average = Shadow(pl_module.parameters())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        pass


class Failing(Average):
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        raise OSError("no licence")


class Probe(pl.Callback):
    """A network of its own, and samples that stay where they are."""

    def __init__(self) -> None:
        self.probe, self.samples = nn.Linear(9, 7), torch.zeros(1000, 8)


class Other(pl.Callback):
    """Makes no copy, and may not be run before the run."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        raise AssertionError("it was run")


def bytes_with(callback: pl.Callback, module: Any = None) -> Footprint:
    module = module or Fitted()
    trainer = pl.Trainer(callbacks=[callback], accelerator="cpu", **QUIET)
    trainer.strategy._lightning_module = module
    batch = [each[:8] for each in numbers().tensors]
    return with_copies(trace(module, trainer, batch), trainer, FirstBatch(batch=batch, batch_size=8))


@pytest.mark.parametrize(
    ("make", "before", "after", "aside"),
    [(Average, 0, 1, 1), (Early, 1, 0, 1), (InAnObject, 0, 1, 1), (Failing, 0, 1, 1), (Other, 0, 0, 0)],
)
def test_copies_are_counted_by_when_they_are_made(make: Any, before: int, after: int, aside: int) -> None:
    found = bytes_with(make())
    size = found.parameter_bytes
    assert (found.buffer_bytes, found.copied_bytes, found.set_aside_bytes) == (before * size, after * size, aside * size)


def test_a_network_of_a_callbacks_own_is_counted_and_its_samples_arent() -> None:
    found = bytes_with(Probe())
    assert (found.buffer_bytes, found.copied_bytes) == (4 * (9 * 7 + 7), 0)
    assert found.assumptions[-1:] == ("Probe keeps copies of weights, or a network of its own, which are counted with the buffers",)


def test_a_module_that_keeps_an_average_in_an_object() -> None:
    module = Fitted()
    module.average = Shadow(module.parameters())  # type: ignore[assignment]
    footprint = trace(module, None, [each[:8] for each in numbers().tensors])
    assert footprint.buffer_bytes == footprint.parameter_bytes


@pytest.mark.parametrize(("engine", "share"), [("single", 1.0), ("ddp", 1.0), ("fsdp", 0.5)])
def test_the_replay_holds_them(engine: Any, share: float) -> None:
    found, ranks = bytes_with(Average()), 1 if engine == "single" else 2
    kept = [replay(each, plan(engine, ranks=ranks), 0).by_category.get("buffers", 0) for each in (found, replace(found, copied_bytes=0))]
    assert kept[0] - kept[1] == pytest.approx(share * found.copied_bytes, abs=600)


def test_what_a_run_hands_over_to_other_processes_is_whole(tmp_path: Any) -> None:
    """A rank's shards of a copy are made whole to be handed over, and stay so: a generation's memory isn't that of the first one."""
    loader = DataLoader(numbers(), batch_size=8)
    trainer = trainer_for(Fitted(), loader, tmp_path, callbacks=[Average()])
    decision = decided(trainer, allow=("fsdp",), elastic=True)
    moved = decide_again(trainer, decision, parse_spec("2xcpu:1GiB"))
    promised = decide_again(trainer, decision, parse_spec("2xcpu:1GiB"), begun=False)
    held = [each.candidate.bytes["cpu:0"].buffers for each in (decision, promised, moved)]
    whole = decision.report.footprint.copied_bytes
    assert held[0] == held[1] == pytest.approx(0.5 * whole, rel=0.05)
    assert held[2] == whole > 0


@pytest.mark.parametrize("engine", ["single", "ddp", "fsdp"])
@pytest.mark.parametrize("make", [Average, Early])
def test_the_prediction_is_what_a_run_takes(engine: str, make: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    strategy = AutoParallelStrategy(devices=f"{1 if engine == 'single' else 2}xcpu:4GiB", allow=[engine], calibrate="off")
    trainer = pl.Trainer(
        callbacks=[make()], accelerator="cpu", strategy=strategy, max_epochs=1, enable_checkpointing=False, **QUIET, limit_val_batches=0
    )
    trainer.fit(Fitted(), *(DataLoader(numbers(80), batch_size=8) for _ in range(2)))
    held = strategy.report.best_candidate.bytes
    for device, measured in strategy.measured.items():
        assert measured["bytes"]["buffers"] == pytest.approx(held[device].buffers, rel=0.05)  # shards of an odd row are uneven
        assert held[device].buffers > 0
