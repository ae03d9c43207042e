"""Which submodules ranks can share by rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_autopar.memory.trace.first_batch import FirstBatch
from lightning_autopar.strategies.trials.shared_network_probe import probe_sharing


class Net(nn.Module):
    """Takes a mask that isn't by rows, and hands on a number that depends on no row."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(6, 4), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, *, mask: Tensor) -> dict[str, Tensor]:
        return {"rows": self.linear(x * mask), "scale": self.scale.exp()}


class Mixing(Net):
    """Its rows depend on each other."""

    def forward(self, x: Tensor, *, mask: Tensor) -> dict[str, Tensor]:
        found = super().forward(x, mask=mask)
        return {**found, "rows": found["rows"] - found["rows"].mean(0)}


class Counting(Net):
    """Keeps how many rows it got."""

    def forward(self, x: Tensor, *, mask: Tensor) -> dict[str, Tensor]:
        self.rows = len(x)
        return super().forward(x, mask=mask)


class Ghost(Net):
    """Normalises a few rows at a time: with fixed statistics it maps rows to rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor, *, mask: Tensor) -> dict[str, Tensor]:
        return super().forward(torch.cat([self.norm(rows) for rows in x.split(4)]), mask=mask)


class Module(pl.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        found = self.net(batch, mask=torch.ones(6))
        rows = F.normalize(found["rows"], dim=1)
        return F.cross_entropy(found["scale"] * rows @ rows.T, torch.arange(len(rows)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class ByHand(Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.automatic_optimization = False


class Asking(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        try:
            size = dist.get_world_size()
        except ValueError:  # there is no process group
            size = 1
        return super().training_step(batch, batch_idx) / size


class Captured(Module):
    """A hook brings what a layer within computes to the loss, as routers' losses come about in transformers."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        found: list[Tensor] = []
        hook = self.net.linear.register_forward_hook(lambda layer, given, output: found.append(output))
        loss = super().training_step(batch, batch_idx)
        hook.remove()
        return loss + torch.cat(found).softmax(1).mean(0).square().sum()


LEAKED: list[Tensor] = []


class Leaking(Net):
    """Leaves what a layer within computes where the step finds it."""

    def forward(self, x: Tensor, *, mask: Tensor) -> dict[str, Tensor]:
        LEAKED.append(self.linear(x * mask))
        return {"rows": LEAKED[-1].tanh(), "scale": self.scale.exp()}


class Sloping(Module):
    """Has the slopes of its rows after its inputs, or after what the network has left, in the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        given = batch.clone().requires_grad_()
        found = self.net(given, mask=torch.ones(6))["rows"].sin()
        after = LEAKED[-1] if LEAKED else given
        LEAKED.clear()
        slopes = torch.autograd.grad(found.square().sum(), after, create_graph=True)[0]
        return slopes.square().sum() / slopes.square().amax() + (found @ found.T).square().mean()


class Watched(Module):
    """A hook keeps a statistic, which is logged."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.seen: list[Tensor] = []
        self.net.linear.register_forward_hook(lambda layer, given, output: self.seen.append(output.detach().square().mean()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("seen", torch.stack(self.seen).mean())
        self.seen.clear()
        return loss


def batch(rows: int = 8) -> FirstBatch:
    return FirstBatch(batch=torch.randn(rows, 6, generator=torch.Generator().manual_seed(rows)), batch_size=rows)


def test_arguments_and_outputs_are_told_apart() -> None:
    sharing, shared = probe_sharing(Module(Net()), None, batch())
    assert sharing is not None
    assert sharing.modules == ("net",)
    assert shared["net"].cut == {"[0][0]"}
    assert shared["net"].whole == {"[1]['mask']"}
    assert shared["net"].gathered == {"['rows']"}
    assert shared["net"].kept == {"['scale']"}
    assert sharing.work_share == pytest.approx(2 * 8 * 6 * 4 / (2 * 8 * 6 * 4 + 2 * 8 * 8 * 4))
    assert (sharing.gathers, sharing.gathered_bytes) == (1, 8 * 4 * 4)


@pytest.mark.parametrize("net", [Mixing, Counting])
def test_where_the_whole_is_no_map_of_rows_its_submodules_are_shared(net: Any) -> None:
    _, shared = probe_sharing(Module(net()), None, batch())
    assert set(shared) == {"net.linear"}


def test_a_network_that_normalises_a_few_rows_at_a_time_is_not_shared_but_the_norm_is() -> None:
    _, shared = probe_sharing(Module(Ghost()), None, batch())
    assert set(shared) == {"net.norm", "net.linear"}


def test_where_a_part_comes_to_the_loss_past_the_output_its_submodules_are_shared() -> None:
    """Here, the hook gets each part; a rank's would get its own alone. Past the layer's own output it is called with all rows."""
    _, shared = probe_sharing(Captured(Net()), None, batch())
    assert set(shared) == {"net.linear"}


@pytest.mark.parametrize(("net", "shared"), [(Net, "net"), (Leaking, "net.linear")])
def test_gradients_may_be_asked_for_after_what_goes_into_a_network_not_after_what_is_within(net: Any, shared: str) -> None:
    assert set(probe_sharing(Sloping(net()), None, batch())[1]) == {shared}


def test_what_a_hook_within_keeps_without_gradient_is_of_all_rows() -> None:
    """A rank's hook would see its own rows: the network's layer is shared, past whose own output hooks are called with all of them."""
    assert set(probe_sharing(Watched(Net()), None, batch())[1]) == {"net.linear"}


@pytest.mark.parametrize("make", [ByHand, Asking])
def test_some_steps_share_nothing(make: Any) -> None:
    assert probe_sharing(make(Net()), None, batch()) == (None, {})


def test_other_batches_must_agree() -> None:
    """A batch of one row shows nothing, and in one of six rows the mask is no more by rows than before. Rows that depend on each other in
    small batches alone end it.
    """

    class Few(Net):
        def forward(self, x: Tensor, *, mask: Tensor) -> dict[str, Tensor]:
            return super().forward(x - x.mean(0) if len(x) == 5 else x, mask=mask)

    assert probe_sharing(Module(Few()), None, batch(), [batch(1), batch(6)])[1]
    assert probe_sharing(Module(Few()), None, batch(), [batch(5)]) == (None, {})


class Jacobian(Module):
    """Asks for gradients in several directions at once, as flows that integrate a trace do."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch.clone().requires_grad_()
        out = self.net(x, mask=torch.ones(6))["rows"]
        directions = torch.eye(out[0].numel())[:, None].expand(-1, len(x), -1)
        (found,) = torch.autograd.grad(out, x, directions, retain_graph=True, is_grads_batched=True)
        return found.square().mean() + super().training_step(batch, batch_idx)


def test_where_gradients_come_in_batches_nothing_is_shared() -> None:
    assert probe_sharing(Jacobian(Net()), None, batch())[1] == {}


class _Adjoint(torch.autograd.Function):
    """Runs a network anew in its backward, as an adjoint solver does."""

    @staticmethod
    def forward(ctx: Any, net: Any, x: Tensor, mask: Tensor, *parameters: Tensor) -> Tensor:
        ctx.net, ctx.mask = net, mask
        ctx.save_for_backward(x)
        with torch.no_grad():
            rows: Tensor = net(x, mask=mask)["rows"]
        return rows

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            rows = ctx.net(ctx.saved_tensors[0], mask=ctx.mask)["rows"]
        return None, None, None, *torch.autograd.grad(rows, list(ctx.net.linear.parameters()), gradient)


class Solved(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        solved: Any = _Adjoint.apply  # which torch gives no types
        rows = F.normalize(solved(self.net, batch, torch.ones(6), *self.net.linear.parameters()), dim=1)
        return F.cross_entropy(rows @ rows.T, torch.arange(len(rows)))


def test_what_a_functions_own_backward_calls_is_not_shared() -> None:
    assert probe_sharing(Solved(Net()), None, batch())[1] == {}


class Bayesian(nn.Linear):
    """Draws its weights, which are the same for all rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(x, self.weight + 0.1 * torch.randn_like(self.weight))


class Dropping(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(super().forward(x), 0.2)


class Deep(Module):
    """Six blocks, of which two are tried."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows = F.normalize(self.net(batch), dim=1)
        return F.cross_entropy(rows @ rows.T, torch.arange(len(rows)))


@pytest.mark.parametrize(("block", "shared"), [(Bayesian, False), (Dropping, True)])
def test_draws_of_blocks_that_are_not_tried_must_be_by_rows(block: Any, shared: bool) -> None:
    """Ranks guess them by their shapes: where a rank has three rows, a drawn matrix of six would be taken for two of each. Six blocks are
    too many to be run as often as it takes, and two aren't.
    """
    blocks = [SimpleNamespace(fqn=f"net.{number}", flops=10**10, repeated=True) for number in range(6)]
    long: Any = SimpleNamespace(blocks=blocks, flops=3 * 6 * 10**10, conduct=None)
    sharing, modules = probe_sharing(Deep(nn.Sequential(*(block(6, 6) for _ in range(6)))), None, batch(), footprint=long)
    assert (sharing is not None, all(not each.draws for each in modules.values())) == (shared, True)
    assert probe_sharing(Deep(nn.Sequential(*(block(6, 6) for _ in range(6)))), None, batch())[0] is not None
