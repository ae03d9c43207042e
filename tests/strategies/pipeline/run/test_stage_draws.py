"""Random draws over stages, by hand: each rank runs its own block of a step whose outer code every rank runs."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_autopar.exact.data.rank_share import BatchShare, Dealing, cut, share_of
from lightning_autopar.exact.random import generator_states as rng
from lightning_autopar.exact.random.whole_batch_draws import DrawPlan, GlobalDraws
from lightning_autopar.strategies.pipeline.run.stage_draws import StageDraws
from lightning_autopar.strategies.trials.draw_probe import observe
from tests.ranks import run_ranks

Step = Callable[["Stages", Tensor, Any], Tensor]
SAMPLES = 7


class Stages:
    """Where the step is cut; on one device nowhere."""

    def __init__(self, *here: int) -> None:
        self.here, self.on_entry, self.on_exit = here, [], []  # type: ignore[var-annotated]

    def run(self, block: int, call: Callable[[Tensor], Tensor], x: Tensor, travel: Any) -> Tensor:
        """A block, if it is here: what it is given comes from the rank before, what it gives goes to the next one."""
        if travel is None:
            return call(x)
        if block not in self.here:
            return torch.zeros_like(x)
        if block:
            x = travel.receive(block, x)
            for each in self.on_entry:
                each()
        y = call(x)
        if block < travel.last:
            for each in self.on_exit:
                each()
            travel.send(block, y)
            raise StopIteration
        return y


class Travel:
    """Activations and their gradients between ranks, for one micro-batch."""

    def __init__(self, rank: int, last: int, chunk: int) -> None:
        self.rank, self.last, self.chunk = rank, last, chunk
        self.received: Tensor | None = None
        self.sent: Tensor | None = None
        self.works: list[Any] = []

    def receive(self, block: int, like: Tensor) -> Tensor:
        self.received = torch.empty_like(like)
        dist.recv(self.received, self.rank - 1, tag=self.chunk)
        return self.received.requires_grad_()

    def send(self, block: int, y: Tensor) -> None:
        self.sent = y
        self.works.append(dist.isend(y.detach().contiguous(), self.rank + 1, tag=self.chunk))

    def backward(self, loss: Tensor | None) -> None:
        if loss is None:
            assert self.sent is not None
            gradient = torch.empty_like(self.sent)
            dist.recv(gradient, self.rank + 1, tag=1000 + self.chunk)
            self.sent.backward(gradient)
        else:
            loss.backward()
        if self.received is not None:
            assert self.received.grad is not None
            self.works.append(dist.isend(self.received.grad.contiguous(), self.rank - 1, tag=1000 + self.chunk))

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class Net(nn.Module):
    """Three blocks that draw, with draws before, between and after them."""

    def __init__(self, recompute: bool = False, quirk: str = "") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True) for _ in range(3))
        self.head = nn.Linear(8, 1)
        self.recompute, self.quirk = recompute, quirk
        self.generator = torch.Generator()

    def block(self, index: int, x: Tensor) -> Tensor:
        if self.quirk == "python" and index == 0:
            random.random()
        if self.quirk == "generator" and index == 1:
            x = x + torch.randn(x.shape, generator=self.generator)
        if self.quirk == "backward" and index == 1:
            x = DrawsInBackward.apply(x)  # type: ignore[no-untyped-call]
        layer = self.blocks[index]
        y: Tensor = checkpoint(layer, x, use_reentrant=False) if self.recompute and index else layer(x)
        return y + torch.rand(8)  # one draw for all samples

    def forward(self, stages: Stages, x: Tensor, travel: Any) -> Tensor:
        scale = random.random() + numpy.random.rand()
        x = F.dropout(x, 0.3)
        for index in range(3):
            x = stages.run(index, lambda x, index=index: self.block(index, x), x, travel)  # type: ignore[misc]
        x = F.dropout(self.head(x) * scale, 0.3) * random.gauss(1.0, 0.1)
        return (x * torch.randn_like(x)).mean()


class DrawsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * torch.rand(())


def batch_of() -> Tensor:
    return torch.randn(SAMPLES, 5, 8, generator=torch.Generator().manual_seed(0))


def fingerprint() -> str:
    return hashlib.md5(repr(rng.to_plain(rng.capture({}, cuda=False))).encode()).hexdigest()


def seed() -> None:
    torch.manual_seed(7)
    random.seed(7)
    numpy.random.seed(7)


def observed() -> DrawPlan:
    net, stages, batch = Net(), Stages(), batch_of()[:4]
    shares = [share_of(4, rank, Dealing.even(2)) for rank in range(2)]
    return observe(lambda x: net(stages, x, None), lambda share: cut(batch, share.rank, share.dealing), shares).draws


def run_one_device(rank: int, world_size: int, recompute: bool, batches: int) -> Any:
    seed()
    net = Net(recompute)
    states = []
    for _ in range(batches):
        net(Stages(), batch_of(), None).backward()
        states.append(fingerprint())
    return {name: parameter.grad for name, parameter in net.named_parameters()}, states


def run_stages(rank: int, world_size: int, recompute: bool, batches: int, parts: int, order: str, quirk: str = "") -> Any:
    """Stage ``rank`` has the block ``rank``; the whole batch's gradients and, after each batch, the random states."""
    plan = observed()
    seed()
    net, stages, batch = Net(recompute, quirk), Stages(rank), batch_of()
    with GlobalDraws(lambda: staged.share, plan) as draws:
        staged = StageDraws(draws, ranks=range(world_size))
        staged.adopt(stages, rank)
        states = []
        for _ in range(batches):
            draws.begin()
            whole = share_of(SAMPLES, 0, Dealing.even(1))
            staged.begin(whole, parts)
            travels = [Travel(rank, world_size - 1, chunk) for chunk in range(parts)]
            losses: dict[int, Tensor | None] = {}

            def forward(chunk: int, travels: Any = travels, losses: Any = losses, whole: BatchShare = whole) -> None:
                losses[chunk] = None
                with staged.forward(chunk, rank):
                    for each in stages.on_entry if rank == 0 else ():
                        each()
                    try:
                        loss = net(stages, cut(batch, chunk, Dealing.even(parts)), travels[chunk])
                    except StopIteration:
                        return
                    for each in stages.on_exit:
                        each()
                    losses[chunk] = loss * whole.part(chunk, parts).rows / SAMPLES

            def backward(chunk: int, travels: Any = travels, losses: Any = losses) -> None:
                with staged.backward(chunk):
                    travels[chunk].backward(losses[chunk])

            ahead = parts if order == "gpipe" else min(parts, world_size - rank)
            for chunk in range(parts + ahead):
                if chunk < parts:
                    forward(chunk)
                if chunk >= ahead - (order != "gpipe") and chunk - ahead + (order != "gpipe") < parts:
                    backward(chunk - ahead + (order != "gpipe"))
            staged.finish()
            for travel in travels:
                travel.wait()
            assert staged.share is None
            states.append(fingerprint())
    own = {name for name, _ in net.named_parameters() if name.startswith((f"blocks.{rank}.", "head")[: 1 + (rank == world_size - 1)])}
    return {name: parameter.grad for name, parameter in net.named_parameters() if name in own}, states


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("order", "recompute", "parts"), [("gpipe", False, 3), ("1f1b", False, 4), ("1f1b", True, 3), ("1f1b", True, 7)])
def test_stages_draw_what_one_device_draws(order: str, recompute: bool, parts: int) -> None:
    """Two batches, one after the other: the second's draws go on where the first's ended, on every rank."""
    ((whole, states),) = run_ranks(run_one_device, 1, recompute, 2)
    found: dict[str, Tensor] = {}
    for gradients, others in run_ranks(run_stages, 3, recompute, 2, parts, order, timeout_seconds=20):
        assert others == states, "the generators are out of step"
        found |= gradients
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("quirk", "sentence"),
    [
        ("python", "isn't in one state on all ranks where stage 1"),
        ("generator", "draws from a torch.Generator of its own"),
        ("backward", "draws random numbers in backward"),
    ],
)
def test_what_cannot_be_one_devices_is_refused(quirk: str, sentence: str) -> None:
    with pytest.raises(RuntimeError, match=sentence):
        run_ranks(run_stages, 3, False, 1, 2, "gpipe", quirk)
