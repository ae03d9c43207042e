"""What a step keeps for later ones: found where ranks would part by it, and no reason against a split where they wouldn't."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_autopar import AutoParallelStrategy, Batch, NothingFits
from lightning_autopar.strategies.trials.split_probe import probe_split
from tests.strategies.fitted import QUIET
from tests.strategies.trials.test_split_probe import Base, first_of, samples


class Bank(Base):
    """A queue of earlier embeddings, which only training fills."""

    lazy = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.empty(0) if self.lazy else self.fresh())

    def fresh(self) -> Tensor:
        return F.normalize(torch.ones(4, 16) + torch.arange(16), dim=0)

    def loss(self, x: Tensor) -> Tensor:
        if self.bank.nelement() == 0:
            self.bank = self.fresh()
        z = F.normalize(self.layer(x), dim=1)
        loss = (z @ self.bank.clone().detach()).exp().mean(1).log().mean()
        if z.requires_grad:
            self.bank = torch.cat([z.detach().T, self.bank[:, : 16 - len(z)]], 1)
        return loss


class LazyBank(Bank):
    lazy = True


class Queue(Base):
    """The same in an attribute that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: Tensor | None = None

    def loss(self, x: Tensor) -> Tensor:
        z = self.layer(x)
        loss = z.square().mean() if self.queue is None else (z - self.queue).square().mean()
        if torch.is_grad_enabled():
            self.queue = z.detach().mean(0)
        return loss


class Deque(Base):
    """The same in a container that is filled in place."""

    def __init__(self) -> None:
        super().__init__()
        self.earlier: deque[Tensor] = deque(maxlen=2)

    def loss(self, x: Tensor) -> Tensor:
        z = self.layer(x)
        loss = z.square().mean() + sum(((z - each).square().mean() for each in self.earlier), torch.zeros(()))
        self.earlier.append(z.detach().mean(0))
        return loss


class Memory:
    """An object of the user's own."""

    def __init__(self) -> None:
        self.value = torch.zeros(4)


class InAnObject(Base):
    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory()

    def loss(self, x: Tensor) -> Tensor:
        z = self.layer(x)
        loss = (z - self.memory.value).square().mean()
        self.memory.value = self.memory.value + z.detach().sum(0)
        return loss


class FromAHook(Base):
    """A hook before the step keeps the batch's mean."""

    def on_fit_start(self) -> None:
        self.center = torch.zeros(4)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.before, self.center = self.center, batch.mean(0)

    def loss(self, x: Tensor) -> Tensor:
        return (self.layer(x) - self.before).square().mean()


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Bank, "'bank'"),
        (LazyBank, "'bank'"),
        (Queue, "'queue'"),
        (Deque, "by what the step keeps of a batch ('earlier')"),
        (InAnObject, "by what the step keeps of a batch ('memory')"),
        (FromAHook, "'center'"),
    ],
)
def test_what_ranks_would_part_by_rules_a_split_out(make: Any, name: str) -> None:
    torch.manual_seed(0)
    finding, _ = probe_split(make(), None, first_of(samples()))
    assert not finding.splittable
    assert name in str(finding.reason)


class Looked(Base):
    """Keeps what nothing is computed from, what is the same whatever the samples, and what a row leaves for the same row."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []
        self.mask: Tensor | None = None
        self.rows: Tensor | None = None
        self.last = 0.0
        self.register_buffer("teacher", torch.zeros(4, 4))

    def on_fit_start(self) -> None:
        self.weights = torch.arange(4.0)

    def loss(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones(4)
            self.register_buffer("positions", torch.arange(4.0))
        z = self.layer(x) * self.mask + self.positions
        z = z if self.rows is None else z + self.rows
        loss = (self.weights * z).square().mean()
        self.rows = z.detach()
        self.outputs.append(z.detach())
        self.last = float(loss.detach())
        self.teacher.lerp_(self.layer.weight.detach(), 0.1)
        return loss


def test_what_no_rank_misses_is_no_reason() -> None:
    finding, _ = probe_split(Looked(), None, first_of(samples()))
    assert (finding.splittable, finding.difference, finding.reason) == (True, 0.0, None)
    assert "positions" not in finding.counted


class Counting(Base):
    """Its loss grows with each step, of whatever batch."""

    def __init__(self) -> None:
        super().__init__()
        self.step_count = 0

    def loss(self, x: Tensor) -> Tensor:
        self.step_count += 1
        return F.dropout(self.layer(x), 0.5, self.training).square().mean() * self.step_count


def test_what_steps_count_is_no_reason_but_for_parts() -> None:
    finding, _ = probe_split(Counting(), None, first_of(samples()))
    assert (finding.splittable, finding.difference, finding.reason) == (True, 0.0, None)
    assert str(finding.part_reason).startswith("a step leaves 'step_count' to the next one, which parts of a batch")
    assert "'rows'" in str(probe_split(Looked(), None, first_of(samples()))[0].part_reason)


class Listening(Base):
    """Keeps its outputs for later, and a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.error, self.outputs = torchmetrics.MeanSquaredError(), list[Tensor]()

    def loss(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.outputs.append(y.detach())
        return self.error(y, x)  # type: ignore[no-any-return]


def test_what_no_loss_is_made_of_is_no_reason() -> None:
    finding, _ = probe_split(Listening(), None, first_of(samples()))
    assert (finding.splittable, finding.difference, finding.reason, finding.part_reason) == (True, 0.0, None, None)


class OwnOptimizer(Base):
    """Manual optimization by an optimizer that Lightning doesn't know, made in the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        if not hasattr(self, "own"):
            self.own = torch.optim.Adam(self.parameters(), 0.1)
        self.own.zero_grad()
        nn.functional.mse_loss(self.layer(batch), batch).backward()
        self.own.step()


def test_an_optimizer_of_the_users_own_writes_what_ranks_agree_on() -> None:
    finding, _ = probe_split(OwnOptimizer(), None, first_of(samples()))
    assert (finding.splittable, finding.difference, finding.reason) == (True, 0.0, None)


@pytest.mark.parametrize(("make", "name"), [(Bank, "buffers"), (Queue, "kept"), (Deque, "kept")])
def test_a_refusal_is_overruled_by_its_name_and_by_no_other(make: Any, name: str) -> None:
    refused, _ = probe_split(make(), None, first_of(samples()))
    assert f"; batch=Batch(despite=['{name}']) takes such plans all the same" in str(refused.reason)
    other, _ = probe_split(make(), None, first_of(samples()), despite=["batch_norm", *{"buffers", "kept"} - {name}])
    assert (other.splittable, other.reason) == (False, refused.reason)
    taken, draws = probe_split(make(), None, first_of(samples()), despite=[name])
    assert taken.splittable
    assert draws.draws is not None
    assert taken.notes[0].startswith(f"despite=['{name}']: {str(refused.reason).partition(';')[0]}")


def test_a_run_in_spite_of_a_refusal_says_so() -> None:
    strategy: Any = AutoParallelStrategy(allow=["ddp"], devices="2xcpu:1GiB", batch=Batch(despite=("buffers",)))
    trainer = Trainer(strategy=strategy, accelerator="cpu", max_epochs=1, **QUIET)
    told = r"despite=\['buffers'\]: the step writes to its own buffers: 'bank' depends on the batch"
    with pytest.warns(UserWarning, match=told):
        trainer.fit(Bank(), DataLoader(torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), batch_size=6))  # type: ignore[arg-type]
    assert strategy.plan.engine == "ddp"
    assert "despite=['buffers']: the step" in " ".join(strategy.report.best_candidate.notes)
    assert "despite=['buffers']:" in str(strategy.report)


class ByHand(Bank):
    """Ranks don't share the network of manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


def trained(make: Any, strategy: Any) -> Any:
    module = make()
    trainer = Trainer(strategy=strategy, accelerator="cpu", devices=1 if strategy == "auto" else "auto", max_epochs=2, **QUIET)
    trainer.fit(module, DataLoader(torch.randn(15, 4, generator=torch.Generator().manual_seed(0)), batch_size=6))  # type: ignore[arg-type]
    return module


def test_the_report_names_the_buffer() -> None:
    with pytest.raises(NothingFits, match="the step writes to its own buffers: 'bank' depends on the batch"):
        trained(ByHand, AutoParallelStrategy(allow=["ddp", "fsdp"], devices="2xcpu:1GiB"))


@pytest.mark.parametrize(
    ("make", "engine"), [(Bank, "ddp"), (LazyBank, "fsdp"), (Queue, "ddp"), (Deque, "fsdp"), (InAnObject, "ddp"), (FromAHook, "fsdp")]
)
def test_ranks_that_share_the_network_keep_what_one_device_would(make: Any, engine: str) -> None:
    ours, theirs = trained(make, AutoParallelStrategy(allow=[engine], devices="2xcpu:1GiB", exact=True)), trained(make, "auto")
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()), rtol=1e-5, atol=1e-5)
    if make is InAnObject:
        torch.testing.assert_close(ours.memory.value, theirs.memory.value, rtol=1e-5, atol=1e-5)
