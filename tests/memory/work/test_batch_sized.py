"""What depends on the batch: a step's tape, scaled to a part of its batch, peaks where a step on that part does, traced or real."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_autopar.memory.tape import MARKS, Event
from lightning_autopar.memory.trace.trace import trace
from lightning_autopar.memory.work.batch_sized import Dependence, Input
from tests.memory.measured import Copies, real_peak_bytes
from tests.memory.tapes import peak_of
from tests.memory.trace.test_trace import GPT, resnet


class Regression(pl.LightningModule):
    """Any net; the loss is the mean square of what it gives."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3)


class Queries(nn.Module):
    """Learned queries and a token for each sample, as in DETR and ViT."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.token = nn.Parameter(torch.randn(40, 64)), nn.Parameter(torch.randn(1, 1, 64))
        self.layer = nn.TransformerDecoderLayer(64, 4, 128, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        return self.layer(self.queries.expand(len(x), -1, -1) * 1.0, x)


class Tables(nn.Module):
    """Masks and positions that know no batch, and a buffer of its flattened length."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(64, 64), nn.Parameter(torch.ones(1, 64))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.full((512, 512), 1.0).triu().sum(1)[:32, None] * self.scale
        gathered = torch.zeros(x.shape[0] * x.shape[1], 256)
        gathered = gathered.index_copy(1, torch.arange(64), self.layer(x + mask).flatten(0, 1))
        return gathered.exp()


def square() -> nn.Module:
    """As many rows as columns, in the batch and in the weights: shapes alone can't tell gradients apart."""
    return nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(256, 256), nn.ReLU(), nn.LayerNorm(256))))


def reparametrized() -> nn.Module:
    normed, bounded = parametrizations.weight_norm(nn.Linear(128, 512)), parametrizations.spectral_norm(nn.Linear(512, 512))
    return nn.Sequential(normed, nn.ReLU(), bounded, nn.ReLU(), nn.Linear(512, 10))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "square": (square, (256, 256)),
    "queries": (Queries, (8, 30, 64)),
    "tables": (Tables, (8, 32, 64)),
    "reparametrized": (reparametrized, (64, 128)),
    "resnet": (resnet, (8, 16, 24, 24)),
    "tokens": (GPT, (8, 64)),
}


def batch_of(shape: tuple[int, ...], rows: int) -> Tensor:
    return torch.randint(0, 200, (rows, *shape[1:])) if shape == (8, 64) else torch.randn(rows, *shape[1:])


def _of_the_batch(events: Iterable[Event]) -> list[Event]:
    """Without what doesn't grow with the batch, such as what oneDNN takes inside: with AMX it isn't the same at half the rows."""
    events = list(events)
    fixed = {event.storage for event in events if event.kind == "fixed"}
    return [event for event in events if event.kind != "fixed" and (event.action in MARKS or event.storage not in fixed)]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", CASES)
def test_half_of_a_step_is_the_step_on_half_of_the_batch(name: str, precision: str) -> None:
    net, shape = CASES[name]
    torch.manual_seed(0)
    module = Regression(net())
    whole, half = (trace(module, None, batch_of(shape, rows), precision=precision) for rows in (shape[0], shape[0] // 2))
    assert whole.traced
    assert half.traced
    assert whole.tape is not None
    assert half.tape is not None
    assert peak_of(_of_the_batch(whole.tape), 0.5) == pytest.approx(peak_of(_of_the_batch(half.tape)), rel=1e-3)


@pytest.mark.parametrize("name", ["square", "queries", "tokens"])
def test_a_quarter_of_a_step_is_a_real_step_on_a_quarter_of_the_batch(name: str) -> None:
    net, shape = CASES[name]
    torch.manual_seed(0)
    module = Regression(net())
    whole = trace(module, None, batch_of(shape, shape[0]))
    assert whole.tape is not None
    assert peak_of(whole.tape, 0.25) == pytest.approx(real_peak_bytes(module, Copies(batch_of(shape, shape[0] // 4))), rel=0.01)


def entry(shape: tuple[int, ...], *, scaled: bool, storage_elements: int | None = None) -> Input:
    tensor = torch.empty(shape, device="meta")
    return Input(tensor, scaled, 4 * (tensor.numel() if storage_elements is None else storage_elements))


@pytest.mark.parametrize(
    ("inputs", "shape", "scaled"),
    [
        ([entry((8, 4), scaled=True), entry((4, 4), scaled=False)], (4, 4), True),
        ([entry((64, 64), scaled=False)], (64, 64), False),
        ([entry((8, 64), scaled=False, storage_elements=64)], (8, 64), True),  # an expanded table
        ([entry((8, 64), scaled=False)], (8, 64), False),  # a parameter that happens to have that length
        ([], (8, 3), True),
        ([], (256, 3), True),  # the batch of 8 × 32, flattened
        ([], (256, 256), False),  # a mask
        ([], (12, 3), False),
    ],
)
def test_what_forward_makes(inputs: list[Input], shape: tuple[int, ...], scaled: bool) -> None:
    dependence = Dependence(8)
    dependence.add_batch((8, 32, 5))
    assert dependence.of_forward(inputs, torch.empty(shape, device="meta")) is scaled


def test_the_gradient_of_one_factor_is_made_of_the_other() -> None:
    x, weight = entry((64, 64), scaled=True), entry((64, 64), scaled=False)
    dependence = Dependence(64)
    dependence.note(5, [x, weight], None)
    product = torch.empty(64, 64, device="meta")
    assert dependence.of_backward(5, [entry((64, 64), scaled=True), weight], product, 0)
    assert not dependence.of_backward(5, [entry((64, 64), scaled=True), x], product, 0)
    assert not dependence.of_backward(5, [weight], product, 0)
    assert dependence.of_backward(6, [x], product, 0)
    dependence.begin_step()
    assert dependence.of_backward(5, [entry((64, 64), scaled=True), x], product, 0)


def test_an_operation_belongs_to_the_node_that_was_made_for_it() -> None:
    found: list[int | None] = []
    dependence = Dependence(8)

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found.append(dependence.maker())
            return func(*args, **kwargs or {})

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2 + 1

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return gradients[0] * 2

    x, constant = torch.ones(3, requires_grad=True), torch.ones(3)
    dependence.begin_step()
    with Watch():
        y = x * 3
        assert found == [y.grad_fn._sequence_nr()]
        constant * 2
        with torch.no_grad():
            x * 2
        assert found[1:] == [None, None]
        z = Own.apply(y)
        assert found[3:] == [z.grad_fn._sequence_nr()] * 2
        constant + 1
        with torch.no_grad():
            constant + 1
        assert found[5:] == [None, None]
        z.sum().backward()
        assert len(found) > 8
        assert found[7] is not None  # the sum's own
        assert set(found[8:]) == {None}
