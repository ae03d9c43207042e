"""Functions of the user's own whose gradients for parts of a batch don't add up, in a batch that is split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_autopar import engines
from lightning_autopar.constraints import Constraints
from lightning_autopar.engines import Question
from lightning_autopar.memory.trace.first_batch import FirstBatch
from lightning_autopar.memory.trace.trace import trace
from lightning_autopar.strategies.trials.shared_network_probe import probe_sharing
from lightning_autopar.strategies.trials.split_probe import probe_split


class Floor(torch.autograd.Function):
    """Passes on the gradient of what lies below the floor only if it is negative, as image compression's lower bounds do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0.1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * ((ctx.saved_tensors[0] >= 0.1) | (gradients[0] < 0))


class Capped(torch.autograd.Function):
    """Clamps gradients that no first step has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].clamp(-100, 100)


class Rounded(torch.autograd.Function):
    """Passes the gradient straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (8 * x).round() / 8

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Layer(nn.Linear):
    """Its weight goes through the function."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.function.apply(self.weight), self.bias)  # type: ignore[no-untyped-call]


class OfActivations(Layer):
    """The function is applied to what each sample becomes."""

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(F.linear(x, self.weight, self.bias))  # type: ignore[no-any-return, no-untyped-call]


class Module(LightningModule):
    def __init__(self, layer: nn.Module, automatic: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.encoder, self.layer = nn.Linear(4, 4), layer
        self.automatic_optimization = automatic

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss = F.mse_loss(self.layer(self.encoder(batch)), batch)
        if not self.automatic_optimization:
            self.manual_backward(loss)
        return loss if self.automatic_optimization else None

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


def first() -> FirstBatch:
    return FirstBatch(batch=torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), batch_size=6)


@pytest.mark.parametrize("automatic", [True, False])
@pytest.mark.parametrize("function", [Floor, Capped])
def test_the_function_and_the_parameter_are_named(function: type[torch.autograd.Function], automatic: bool) -> None:
    finding, _ = probe_split(Module(Layer(function), automatic), None, first())
    assert finding.differs
    assert finding.reason == (
        f"its gradient isn't the sum of its parts' gradients: the backward of {__name__}.{function.__name__}, which makes that of "
        "'layer.weight', isn't linear in the gradient that it gets"
    )


@pytest.mark.parametrize("layer", [Layer(Rounded), OfActivations(Rounded), OfActivations(Floor)])
def test_linear_functions_and_those_of_single_samples_are_split(layer: nn.Module) -> None:
    finding, _ = probe_split(Module(layer), None, first())
    assert (finding.difference, finding.reason, finding.notes) == (0.0, None, ())


@pytest.mark.parametrize(("function", "shared"), [(Floor, {"encoder"}), (Rounded, {"encoder", "layer"})])
def test_ranks_share_what_is_beside_it(function: type[torch.autograd.Function], shared: set[str]) -> None:
    assert set(probe_sharing(Module(Layer(function)), None, first())[1]) == shared


class Stubborn(torch.autograd.Function):
    """Can be run backward once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.left = [None]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        ctx.left.pop()
        return gradients[0]


def test_a_function_that_cannot_be_tried_is_told() -> None:
    finding, _ = probe_split(Module(Layer(Stubborn)), None, first())
    assert any(note.startswith("not checked: whether the gradients of a batch's parts make") for note in finding.notes)


class Checkpointed(nn.Linear):
    """Computes its forward again in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(4, 4)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


class SecondOrder(Module):
    """Keeps the graph of its gradients, for an optimizer that asks for theirs (AdaHessian)."""

    def backward(self, loss: Tensor) -> None:
        loss.backward(create_graph=True)


@pytest.mark.parametrize(
    ("make", "name", "told"),
    [
        (lambda: Module(Checkpointed(True)), "torch.utils.checkpoint.CheckpointFunction", "use_reentrant=False"),
        (lambda: Module(Checkpointed(False)), "", ""),
        (lambda: SecondOrder(nn.Linear(4, 4)), "create_graph", "has no graph"),
    ],
)
def test_a_backward_pass_within_the_backward_pass_is_refused_under_ddp(make: Any, name: str, told: str) -> None:
    """Found in the trace: also where no gradients are compared, as under manual optimization."""
    footprint = trace(make(), None, first().batch)
    assert footprint.reentrant == name
    question = Question(footprint=footprint, inventory=None, constraints=Constraints())  # type: ignore[arg-type]
    refusal = engines.named("ddp").refusal(question)
    assert refusal is None if not name else refusal is not None and name in refusal and told in refusal
