"""What a step keeps beyond its forward: in its backward pass, and in metrics that count updates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torchmetrics import MeanMetric
from torchmetrics.wrappers import Running

from lightning_autopar.constraints import SplitFinding
from lightning_autopar.memory.trace.first_batch import FirstBatch
from lightning_autopar.strategies.trials.split_probe import probe_split
from tests.strategies.trials.test_split_probe import Base


class Hooked(Base):
    """A hook on an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        self.passes = 0

    def loss(self, x: Tensor) -> Tensor:
        hidden = self.layer(x).tanh()
        if hidden.requires_grad:
            hidden.register_hook(self.note)
        return hidden.square().mean()

    def note(self, gradient: Tensor) -> Any:
        """Changes it, and keeps nothing."""
        return gradient * 0.5


class Norms(Hooked):
    def note(self, gradient: Tensor) -> Any:
        self.seen.append(float(gradient.norm()))


class Counts(Hooked):
    def note(self, gradient: Tensor) -> Any:
        self.passes += 1


class Lately(Base):
    """A metric over the last three batches."""

    def __init__(self) -> None:
        super().__init__()
        self.lately = Running(MeanMetric(), window=3)

    def loss(self, x: Tensor) -> Tensor:
        found = self.layer(x).square().mean()
        self.lately.update(found.detach())
        return found


def finding(module: Base) -> SplitFinding:
    samples = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    return probe_split(module, None, FirstBatch(batch=samples, batch_size=8))[0]


def test_a_hook_that_keeps_nothing_is_no_matter() -> None:
    found = finding(Hooked())
    assert (found.difference, found.notes, found.part_reason, found.kept_rules) == (0.0, (), None, {})


class Both(Norms):
    """The step keeps something there as well."""

    def loss(self, x: Tensor) -> Tensor:
        loss = super().loss(x)
        self.seen.append(float(loss))
        return loss


@pytest.mark.parametrize("module", [Norms, Both])
def test_what_the_backward_pass_keeps_of_samples_is_told(module: Any) -> None:
    found = finding(module())
    said = "which the backward pass changes, is that of each rank's and each part's own samples"
    assert found.notes[-1] == f"{module.__name__}.seen, {said}"
    assert {path[0] for path in found.kept_rules["the backward pass"]} == {"seen"}, "a pipeline would have it of one stage"


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Counts, "the backward pass changes Counts.passes, and would do so after each part of a batch"),
        (Lately, r"Lately.lately (torchmetrics' Running) counts updates, and each part of a batch would be one"),
    ],
)
def test_what_counts_batches_speaks_against_parts_alone(module: Any, words: str) -> None:
    found = finding(module())
    assert (found.difference, found.notes, found.part_reason) == (0.0, (), words)


class Continued(Base):
    """A state for each row, with which the next batch's rows go on: every batch but each second one."""

    def __init__(self) -> None:
        super().__init__()
        self.state: list[Tensor] = []
        self.total = 0.0

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.state = [] if batch_idx % 2 == 0 else [each.detach() for each in self.state]

    def loss(self, x: Tensor) -> Tensor:
        state = (self.layer(x) + (self.state[0] if self.state else 0.0)).tanh()
        self.state = [state]
        self.total += float(state.detach().sum())
        return state.square().mean()


def test_rows_with_which_the_next_batch_goes_on_stay_with_their_rank() -> None:
    found = finding(Continued())
    assert found.difference == 0.0
    assert set(found.kept_rules["training_step"]) == {("total",)}, "a rank's rows can't go on with the whole batch's"
    assert found.notes == (
        "Continued.state, which training_step changes, holds rows with which the next batch's go on: each rank and each part keeps that of "
        "its own samples",
    )
    assert found.part_reason is not None
    assert found.part_reason.startswith("a step leaves 'state', 'total' to the next one")


class Recurrent(Base):
    """A recurrent layer, whose state has the samples in dimension 1.

    Args:
        goes_on: whether the next batch begins with it.
    """

    def __init__(self, goes_on: bool) -> None:
        super().__init__()
        self.goes_on = goes_on
        self.recurrent = torch.nn.LSTM(4, 3, num_layers=2, batch_first=True)
        self.state: Any = None

    def loss(self, x: Tensor) -> Tensor:
        found, state = self.recurrent(self.layer(x)[:, None].expand(-1, 5, 4), self.state if self.goes_on else None)
        self.state = tuple(each.detach() for each in state)
        return found.square().mean()


def test_a_recurrent_layers_state_is_the_whole_batchs() -> None:
    found = finding(Recurrent(goes_on=False))
    assert (found.difference, found.notes) == (0.0, ())
    assert found.kept_rules["training_step"] == {("state", 0): "columns", ("state", 1): "columns"}


def test_a_recurrent_layers_state_with_which_the_next_batch_goes_on_stays_with_its_rank() -> None:
    found = finding(Recurrent(goes_on=True))
    assert found.difference == 0.0
    assert "training_step" not in found.kept_rules, "a rank's columns can't go on with the whole batch's"
    assert found.notes == (
        "Recurrent.state, which training_step changes, holds rows with which the next batch's go on: each rank and each part keeps that of "
        "its own samples",
    )
    assert found.part_reason is not None
    assert found.part_reason.startswith("a step leaves 'state' to the next one")
