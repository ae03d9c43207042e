"""Optimizers on small stand-ins of a module's parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_autopar.memory.footprint import Conduct
from lightning_autopar.memory.trace.first_batch import FirstBatch
from lightning_autopar.strategies.fsdp.rehearsal import rehearse_fsdp
from lightning_autopar.strategies.trials import engine_rehearsal
from lightning_autopar.strategies.trials.optimizer_trial import stand_ins, step_apart


class ByHand(Optimizer):
    """Adam's first moment by hand: a parameter's update needs nothing of the others'."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    moment = self.state[parameter].setdefault("moment", torch.zeros_like(parameter))
                    moment.lerp_(parameter.grad, 0.1)
                    parameter.add_(moment / self.divisor(group), alpha=-group["lr"])
        return loss

    def divisor(self, group: dict[str, Any]) -> Any:
        """What updates are divided by."""
        return 1.0


class ByAll(ByHand):
    """The same by the norm of all gradients together."""

    def divisor(self, group: dict[str, Any]) -> Any:
        """The norm."""
        norms = [parameter.grad.norm() for parameter in group["params"] if parameter.grad is not None]
        return torch.stack(norms).norm()


class Early(ByHand):
    """Makes its state before the first step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["moment"] = torch.ones_like(parameter)


class Module(pl.LightningModule):
    """Two layers of sizes that a stand-in has not."""

    def __init__(self, optimizer: Callable[[Any], Optimizer]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(30, 11), nn.Linear(11, 4))
        self.optimizer = optimizer

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The outputs' square."""
        loss: Tensor = self.layers(batch).square().mean()
        return loss

    def configure_optimizers(self) -> Optimizer:
        """The case's."""
        return self.optimizer(self.parameters())


class Late(Module):
    """Builds itself in ``configure_model``."""

    def configure_model(self) -> None:
        """The same layers."""
        self.layers = nn.Sequential(nn.Linear(30, 11), nn.Linear(11, 4))


FIRST = FirstBatch(batch=torch.ones(4, 30), batch_size=4)


@pytest.mark.parametrize("kind", [Module, Late])
def test_one_stand_in_a_shape_as_even_or_odd_as_the_parameter(kind: type[Module]) -> None:
    (small,) = stand_ins(kind(ByHand), None)
    assert [tuple(weight.shape) for weight in small.weights] == [(9, 8), (9,), (4, 9), (4,)]
    assert small.optimizer.param_groups[0]["params"] == list(small.weights)


def test_torchs_elementwise_optimizers_need_no_trial() -> None:
    assert stand_ins(Module(torch.optim.AdamW), None) == []


def test_whether_a_parameter_steps_as_if_it_were_alone() -> None:
    for healthy in (ByHand, torch.optim.Adafactor):
        assert step_apart(Module(healthy), None).outcome == "passed"
    assert (
        step_apart(Module(ByAll), None).reason
        == "the optimizer ByAll updates a parameter by the values of others, and no stage has them all"
    )
    untold = step_apart(Module(Early), None)
    assert (untold.outcome, "Early holds state before its first step" in untold.reason) == ("not made", True)


@pytest.mark.parametrize(
    ("optimizer", "refusal"),
    [
        (ByHand, None),
        (ByAll, None),
        (torch.optim.Adafactor, "the optimizer Adafactor can't step shards of parameters (RuntimeError: "),
        (torch.optim.Muon, "the optimizer Muon steps a shard otherwise than it steps this part of a whole parameter"),
    ],
    ids=["by-hand", "by-all", "Adafactor", "Muon"],
)
@pytest.mark.parametrize("large", [False, True])
def test_optimizers_on_shards(optimizer: Any, refusal: str | None, large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if large:
        monkeypatch.setattr(engine_rehearsal, "PARAMETER_BYTES", 1000)  # less than the module has, and more than the stand-ins

    def matrices(parameters: Any) -> Optimizer:
        made: Optimizer = optimizer([parameter for parameter in parameters if parameter.dim() == 2])
        return made

    check = rehearse_fsdp(Module(matrices), None, FIRST, [], conduct=Conduct())
    if refusal is None:
        assert check.outcome == "passed", check
    else:
        assert (check.outcome, check.reason[: len(refusal)]) == ("failed", refusal)
