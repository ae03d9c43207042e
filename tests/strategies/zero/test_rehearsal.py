"""A rehearsal under DeepSpeed passes what runs there, and names what doesn't."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_autopar.memory.trace.first_batch import FirstBatch
from lightning_autopar.plans import Plan
from lightning_autopar.strategies.zero.rehearsal import rehearse_zero
from tests.strategies.fitted import Fitted
from tests.strategies.written import Exchanging, Normed, Sharing

pytest.importorskip("deepspeed")


def zero(stage: int, count: int = 2, **values: Any) -> Plan:
    return Plan(engine="zero", zero_stage=stage, devices=tuple(f"cpu:{rank}" for rank in range(count)), **values)


def rehearsed(module: Any, plan: Plan) -> str | None:
    torch.manual_seed(1)
    first = FirstBatch(batch=(torch.randn(8, 8), torch.randn(8, 1)), batch_size=8)
    return rehearse_zero(module, None, first, plan).refusal


class InnerSteps(Fitted):
    """Runs its network with weights that an inner step has made, as MAML does."""

    def loss(self, batch: Any) -> Tensor:
        weights = dict(self.net.named_parameters())
        made = {name: 0.9 * weight for name, weight in weights.items()}
        return nn.functional.mse_loss(torch.func.functional_call(self.net, made, (batch[0],)), batch[1])


class Dropping(Fitted):
    """Draws, ties weights, has a part without a gradient, and clips."""

    def __init__(self) -> None:
        super().__init__()
        self.net[1][0] = self.net[2][0]
        self.unused = nn.Linear(3, 3)
        self.dropout = nn.Dropout(0.2)

    def loss(self, batch: Any) -> Tensor:
        return super().loss((self.dropout(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.05, weight_decay=0.5)


class Labelled(Tensor):
    """Rows of a class of the user's, which results of torch's functions keep. Copies have their attributes, as MONAI's have."""

    def detach(self) -> Any:
        made: Any = super().detach()
        vars(made).update(vars(self))
        return made

    def clone(self, *args: Any, **kwargs: Any) -> Any:
        made: Any = super().clone(*args, **kwargs)
        vars(made).update(copy.deepcopy(vars(self)))
        return made


class Labelling(Fitted):
    """Looks at what its rows are, changes them in place, and has a function of its own in the place of ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.bent = nn.LeakyReLU(inplace=True)
        self.forward = self.labelled  # type: ignore[method-assign]

    def labelled(self, rows: Tensor) -> Tensor:
        found: Tensor = self.bent(self.net(rows.as_subclass(Labelled)))
        scaled = found @ self.net[4].weight  # the rows come first, the parameter second
        if {type(found), type(scaled)} != {Labelled}:
            raise TypeError(f"the rows' class is lost: {type(found)}, {type(scaled)}")
        return scaled.mean(1, keepdim=True)

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1])


@pytest.mark.parametrize("plan", [zero(2), zero(3, offload=("optimizer", "parameters")), zero(3, count=1)], ids=Plan.title)
def test_what_runs_is_not_refused_and_stays_as_it_was(plan: Plan) -> None:
    module = Dropping()
    before = [parameter.detach().clone() for parameter in module.parameters()]
    assert rehearsed(module, plan) is None
    assert all(map(torch.equal, before, module.parameters()))


@pytest.mark.parametrize("make", [Exchanging, Normed])
@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_written_is_kept(make: Any, stage: int) -> None:
    assert rehearsed(make(), zero(stage)) is None


class Bending(Fitted):
    """Has second derivatives after its inputs in the loss."""

    def loss(self, batch: Any) -> Tensor:
        rows = batch[0].clone().requires_grad_()
        slopes = torch.autograd.grad(self.net(rows).sum(), rows, create_graph=True)[0]
        bends = torch.autograd.grad(slopes.sum(), rows, create_graph=True)[0]
        return nn.functional.mse_loss(bends.sum(1, keepdim=True), batch[1])


@pytest.mark.slow
def test_derivatives_through_parameters_that_were_freed_are_told() -> None:
    words = "the step differentiates by itself (torch.autograd.grad), through parameters that ZeRO-3 frees after each use; ZeRO-2 keeps"
    assert (rehearsed(Bending(), zero(3)) or "").startswith(words)
    assert rehearsed(Bending(), zero(2)) is None


def test_rows_keep_their_class_and_the_module_its_own_forward() -> None:
    module = Labelling()
    assert rehearsed(module, zero(3)) is None
    assert module.forward == module.labelled


def test_what_would_part_is_seen() -> None:
    assert "share another one's memory" in (rehearsed(Sharing(), zero(2)) or "")
    assert "under ZeRO-3" in (rehearsed(Sharing(), zero(3)) or "")


def test_tensors_in_the_place_of_parameters_are_told() -> None:
    sentence = rehearsed(InnerSteps(), zero(3)) or ""
    assert "functional_call" in sentence
    assert "ds_" not in sentence
    assert rehearsed(InnerSteps(), zero(2)) is None
