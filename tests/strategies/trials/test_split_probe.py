"""The probe tells losses that survive a split from those that don't, and finds which draws run over the samples."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, default_collate

from lightning_autopar.constraints import LOSS, Constraints
from lightning_autopar.exact.data.counted_entries import Count
from lightning_autopar.exact.random.whole_batch_draws import Rows
from lightning_autopar.memory.trace.first_batch import FirstBatch, first_batch
from lightning_autopar.planning.refusals import split_refusal
from lightning_autopar.strategies.trials import nudged_weights, split_probe, undo
from lightning_autopar.strategies.trials.nudged_weights import nudged
from lightning_autopar.strategies.trials.split_probe import probe_evaluation, probe_split

SAMPLES = 6


class Base(LightningModule):
    """A linear model on (B, 4) with a mean-squared error."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(4, 4)
        self.seen = 0
        self.register_buffer("steps", torch.zeros(()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def loss(self, x: Tensor) -> Tensor:
        self.steps += 1
        return F.mse_loss(self.layer(x) * self.steps, x)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Dropout(Base):
    def loss(self, x: Tensor) -> Tensor:
        return F.mse_loss(F.dropout(self.layer(x), 0.5, self.training), x)


class VAE(Base):
    def loss(self, x: Tensor) -> Tensor:
        mean = self.layer(x)
        return F.mse_loss(mean + torch.randn_like(mean), x) + mean.square().mean()


class Tokens(Base):
    """A mean over some positions: their number differs between parts."""

    def loss(self, x: Tensor) -> Tensor:
        return (self.layer(x) - x).square()[x.exp() > 1].mean()


class Positive(Base):
    """The same, and which ones it are is told by the batch's entries."""

    def loss(self, x: Tensor) -> Tensor:
        return (self.layer(x) - x).square()[x > 0].mean()


class Contrastive(Base):
    def loss(self, x: Tensor) -> Tensor:
        z = F.normalize(self.layer(x), dim=-1)
        return F.cross_entropy(z @ F.normalize(x, dim=-1).T, torch.arange(len(x)))


class Views(Base):
    """Dropout over two concatenated views."""

    def loss(self, x: Tensor) -> Tensor:
        one, two = F.dropout(self.layer(torch.cat([x, x + 1])), 0.5).chunk(2)
        return (one * two + one).square().mean()


class Mixup(Base):
    def loss(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.layer(x), x[torch.randperm(len(x))])


class Norm(Base):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, **kwargs)

    def loss(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.norm(100 * self.layer(x)), x)


class Ghost(Norm):
    """A batch norm that takes a few samples at a time, as TabNet's does."""

    def loss(self, x: Tensor) -> Tensor:
        return F.mse_loss(torch.cat([self.norm(rows) for rows in (100 * self.layer(x)).split(2)]), x)


class FirstTwo(Norm):
    def loss(self, x: Tensor) -> Tensor:
        rows = 100 * self.layer(x)
        return F.mse_loss(torch.cat([self.norm(rows[:2]), self.norm(rows[2:])]), x)


class Half(Norm):
    """Of ranks' parts, to which samples are dealt in turn, the first halves are that of the whole batch."""

    def loss(self, x: Tensor) -> Tensor:
        one, other = (100 * self.layer(x)).chunk(2)
        return F.mse_loss(torch.cat([self.norm(one), self.norm(other)]), x)


class Penalty(Base):
    """Differentiates within the step, which needs gradients."""

    def loss(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(self.layer(x).square().sum(), x, create_graph=True)
        return grad.square().mean()


class Recomputed(Base):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for _ in range(2):
            block = nn.Sequential(self.layer, nn.Dropout(0.5))
            loss = F.mse_loss(checkpoint(block, checkpoint(block, batch, use_reentrant=False), use_reentrant=False), batch)
            self.manual_backward(loss)
        optimizer.step()


class Attending(Base):
    """A checkpoint makes draws of one shape again that lie in memory in two ways; a part of one sample doesn't show in which."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.TransformerEncoderLayer(4, 2, 4, 0.3, batch_first=True)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        tokens = torch.stack([batch, self.layer(batch), -batch], dim=1)
        return F.mse_loss(checkpoint(self.attention, tokens, use_reentrant=False)[:, 0], batch)


class GAN(Base):
    """Two optimizers by hand; the discriminator sees real and generated samples as one batch, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.judge = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for_generator, for_judge = self.optimizers()
        fake = self.layer(torch.randn(len(batch), 4))
        self.toggle_optimizer(for_generator)
        self.manual_backward(F.softplus(-self.judge(fake)).mean())
        for_generator.step()
        for_generator.zero_grad()
        self.untoggle_optimizer(for_generator)
        real, generated = self.judge(torch.cat([batch, fake.detach()])).chunk(2)
        self.judged(F.softplus(-real).mean() + F.softplus(generated).mean())
        for_judge.step()
        for_judge.zero_grad()
        self.log("real", real.mean())

    def judged(self, loss: Tensor) -> None:
        loss.backward()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.layer.parameters()), torch.optim.Adam(self.judge.parameters())


class LopsidedGAN(GAN):
    """The second loss is no mean over samples."""

    def judged(self, loss: Tensor) -> None:
        self.manual_backward(loss * loss)


class Cancelling(Base):
    """The difference of two large means: single precision leaves few digits of it."""

    def loss(self, x: Tensor) -> Tensor:
        y = self.layer(x) + 1e4
        return (y + 1e-3 * x).mean() - y.mean()


class NearlyCancelling(Base):
    """The same with less that cancels, in single precision alone: a difference of some millionths may be rounding."""

    def loss(self, x: Tensor) -> Tensor:
        if self.layer.weight.dtype == torch.float64:
            raise TypeError("not in double precision")
        y = self.layer(x) + 8
        return (y + x.square()).mean() - y.mean()


class Adaptive(Base):
    """Takes steps whose length the whole batch decides, as an adaptive solver: its error, and so its loss, hardly depends on that."""

    def loss(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return F.mse_loss(y, x) * (1 + 2e-5 * y.detach().std())


class Returns(Base):
    """A dictionary, and no batch index asked for."""

    def training_step(self, batch: Tensor) -> dict[str, Any]:  # type: ignore[override]
        return {"loss": self.loss(batch), "output": batch}


class Skips(Base):
    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        return None


class Routed(Base):
    """Noise for the chosen rows only: how many is known to no other rank."""

    def loss(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        chosen = y[x[:, 0] > 0]
        return y.mean() + (F.dropout(chosen) + torch.randn_like(chosen)).sum() / len(x)


class Even(Base):
    """Fails on an odd number of samples."""

    def loss(self, x: Tensor) -> Tensor:
        return self.layer(x.view(2, -1, 4)).mean()


class Scalar(Base):
    """A draw for the whole batch, as large as a part of it: only comparing shows that it isn't split."""

    def loss(self, x: Tensor) -> Tensor:
        return (self.layer(x) * torch.rand(4) * torch.rand(())).sum(1).mean() + (torch.rand(3) * torch.arange(3)).sum()


def collate(samples: list[Tensor]) -> Tensor:
    return torch.stack(samples)


class Numbered(Base):
    """A term of its loss goes by the step's number: one that compares samples in each third step, or one that grows."""

    def __init__(self, compares: bool) -> None:
        super().__init__()
        self.compares = compares

    def loss(self, x: Tensor) -> Tensor:
        y, step = self.layer(x), self.trainer.global_step
        if self.compares:
            return F.mse_loss(y, x) + (y.mean(0).pow(2).sum() if step % 3 == 2 else 0.0)
        return F.mse_loss(y, x) + min(1.0, step / 100) * y.pow(2).mean()


@pytest.mark.parametrize("compares", [True, False])
def test_what_a_step_does_by_its_number_is_tried_in_later_steps(compares: bool) -> None:
    finding, _ = probe_split(Numbered(compares), None, first_of(samples()))
    assert (finding.difference > 1e-3) == compares
    assert ("in a later step: the step goes by its number, as in step 2" in (finding.reason or "")) == compares


class Now(Base):
    """Compares samples in some later steps."""

    count = 0
    on = False

    def __init__(self, now: Callable[[Any, int], bool]) -> None:
        super().__init__()
        self.now = now

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.seen += 1
        y = self.layer(batch)
        return F.mse_loss(y, batch) + (y.mean(0).pow(2).sum() if self.now(self, batch_idx) else 0.0)

    def on_train_epoch_start(self) -> None:
        self.on = self.current_epoch > 2

    def on_train_batch_end(self, *_: Any) -> None:
        self.count += 1


@pytest.mark.parametrize(
    ("now", "step"),
    [
        (lambda module, index: module.trainer.global_step % 100 == 37, 37),
        (lambda module, index: module.global_step > 3000 and (module.global_step + 1) % 7 == 3, 3005),
        (lambda module, index: module.global_step / 1000 >= 0.5, 500),
        (lambda module, index: index in (5, 9), 5),
        (lambda module, index: module.seen // 10 == 2, 19),
        (lambda module, index: not (module.count - 4), 4),
        (lambda module, index: module.on, 3),
        (lambda module, index: int(module.global_step) % 10 == 7, 7),
        (lambda module, index: index in {15, 10}, 10),
    ],
)
def test_a_term_of_some_later_steps_is_found_by_what_numbers_are_compared_with(now: Callable[[Any, int], bool], step: int) -> None:
    finding, _ = probe_split(Now(now), None, first_of(samples()))
    assert finding.difference > 1e-3
    assert (finding.reason or "").endswith(f"the step goes by its number, as in step {step:,}")


class InABuffer(Base):
    """Counts in one, and compares samples in each sixth step, or after some."""

    def __init__(self, *, in_place: bool, often: bool) -> None:
        super().__init__()
        self.in_place, self.often, self.warmup = in_place, often, 40
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if self.in_place:
            self.steps.add_(1)
        else:
            self.steps += 1
        y = self.layer(batch)
        compares = int(self.steps) % 6 == 5 if self.often else self.steps > self.warmup
        return F.mse_loss(y, batch) + (y.mean(0).square().sum() if compares else 0.0)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("often", [False, True])
def test_a_term_of_later_steps_is_found_by_the_integers_that_a_count_in_a_buffer_meets(often: bool, in_place: bool) -> None:
    finding, _ = probe_split(InABuffer(in_place=in_place, often=often), None, first_of(samples()))
    assert finding.difference > 1e-3


class Logs(Base):
    """Logs and draws more in some later steps, also of the validation; and validates only with the weights that it begins with."""

    def __init__(self) -> None:
        super().__init__()
        self.begins_with = float(self.layer.weight.detach().sum())

    def loss(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.global_step % 50 == 49:
            self.log("largest", y.max(), reduce_fx="mean")
            return (y * torch.randn(4)).square().mean()
        return y.square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if float(self.layer.weight.detach().sum()) != self.begins_with:
            raise RuntimeError("these are other weights")
        self.log("sum", batch.sum())
        if self.current_epoch > 1:
            self.log("apart", batch.std())


def test_what_only_later_steps_log_and_draw_is_found() -> None:
    finding, draws = probe_split(Logs(), None, first_of(samples()))
    assert finding.log_rules["training_step", "largest"] == ("max",)
    assert [draw.shape for draw in draws.draws or ()] == [(4,)]


def test_a_validation_that_only_its_own_weights_fit_is_tried_with_these_and_in_a_later_epoch() -> None:
    finding = probe_evaluation(Logs(), None, first_of(samples()), "validation_step")
    assert finding.log_rules == {("validation_step", "sum"): ("sum",), ("validation_step", "apart"): ()}
    assert not any("not checked" in note for note in finding.notes)


class Counts(Base):
    """Its loss can't be computed in a later step, or isn't finite there."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails = fails

    def loss(self, x: Tensor) -> Tensor:
        step = self.trainer.global_step
        if step > 1 and self.fails:
            raise IndexError("beyond the table")
        return F.mse_loss(self.layer(x), x) + (math.nan if step > 1 else 0.0)


@pytest.mark.parametrize(
    ("fails", "words"), [(True, "(IndexError: beyond the table, at test_split_probe.py:"), (False, "whose loss isn't finite")]
)
def test_a_later_step_that_cannot_be_compared_is_told(fails: bool, words: str) -> None:
    finding, _ = probe_split(Counts(fails), None, first_of(samples()))
    assert any(note.startswith("not checked: splitting the batch of step 27,719,999") and words in note for note in finding.notes)


class Pairs(Base):
    """Takes two samples at least."""

    def loss(self, x: Tensor) -> Tensor:
        if len(x) < 2:
            raise ValueError("no pair")
        return F.mse_loss(self.layer(x), x)


def test_single_samples_that_cannot_be_run_are_told() -> None:
    finding, _ = probe_split(Pairs(), None, first_of(samples()), blocks={"layer": 1})
    assert any(note.startswith("not checked: whether single samples call") and "ValueError: no pair" in note for note in finding.notes)


def first_of(samples: list[Any], collate: Callable[[list[Any]], Any] = collate) -> FirstBatch:
    return FirstBatch(batch=collate(samples), samples=samples, collate=collate, batch_size=len(samples), kind="map")


def samples(count: int = SAMPLES) -> list[Tensor]:
    return list(torch.randn(count, 4, generator=torch.Generator().manual_seed(0)))


class Hardest(Base):
    """Half of the samples, which in halves of the batch happen to be the same ones."""

    def loss(self, x: Tensor) -> Tensor:
        errors = (self.layer(x) * 0 - x).square().mean(1)
        return errors.topk(max(1, len(x) // 2)).values.mean() + 0 * self.layer.bias.sum()


class HardestThree(Base):
    """Of samples that are all equally hard, so that parts agree by chance; two samples have no three."""

    def loss(self, x: Tensor) -> Tensor:
        return (self.layer(x * 0) + 1).square().mean(1).topk(3).values.mean()


class ByHand(Base):
    """Manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Advantages(ByHand):
    """Its loss is 0 for every batch, as each batch's advantages are centred; its gradient goes by the batch."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        probabilities, advantages = self.layer(batch).log_softmax(1)[:, 0], batch[:, 0] - batch[:, 0].mean()
        ratios = (probabilities - probabilities.detach()).exp()
        self.manual_backward((ratios * advantages / advantages.std()).mean())


class ReturnedAdvantages(Base):
    """The same, returned."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        probabilities, advantages = self.layer(batch).log_softmax(1)[:, 0], batch[:, 0] - batch[:, 0].mean()
        ratios = (probabilities - probabilities.detach()).exp()
        return (ratios * advantages / advantages.std()).mean() + probabilities.square().mean()


class Unwilling(torch.autograd.Function):
    """Its backward refuses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise NotImplementedError


class BackwardOfItsOwn(ReturnedAdvantages):
    """Keeps the graph."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(retain_graph=True)


class Clipping(BackwardOfItsOwn):
    """Clips gradients once they are there, if they are larger than these are."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss)
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1e3)


class Keeping(Clipping):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(retain_graph=True)


class Hooked(ReturnedAdvantages):
    """Clamps a weight's gradient, which engines do once it is the whole batch's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


class HookedMean(Hooked):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)


class RedrawnAfterAThousand(Base):
    """A projection that is drawn anew now and then: as large as a rank's samples times three."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("projection", torch.eye(6)[:4])

    def loss(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls % 1000 == 0:
            self.projection.copy_(torch.randn(6, 6)[:4])
        return F.mse_loss(self.layer(x) @ self.projection, x.new_zeros(len(x), 6))


class RedrawnByABuffer(RedrawnAfterAThousand):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("left", torch.tensor(0))

    def loss(self, x: Tensor) -> Tensor:
        if self.left >= 1000:
            self.projection.copy_(torch.randn(6, 6)[:4])
            self.left.zero_()
        self.left += 1
        return F.mse_loss(self.layer(x) @ self.projection, x.new_zeros(len(x), 6))


class WithoutGradient(Base):
    """Its loss has no gradient on the CPU."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return Unwilling.apply(self.layer(batch)).square().mean()  # type: ignore[no-any-return, no-untyped-call]


class GradientsByHand(ByHand):
    """Makes each sample's gradient, and gives their mean to the optimizer, which steps and clears it."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        found = [torch.func.grad(lambda weight, x=x: F.linear(x, weight).square().mean())(self.layer.weight.detach()) for x in batch]
        self.layer.weight.grad = torch.stack([each / each.norm() for each in found]).mean(0)
        optimizer = self.optimizers()
        optimizer.step()  # type: ignore[union-attr]
        optimizer.zero_grad()  # type: ignore[union-attr]


class OwnStep(Base):
    """Runs backward and steps within the training step, though Lightning is to do so; without ``makes`` it only steps."""

    makes = True

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if self.makes:
            loss.backward()
        self.optimizers().step()  # type: ignore[union-attr]
        return None if self.makes else loss


class EarlyStep(OwnStep):
    """Its step has nothing to step by."""

    makes = False


class OwnGradients(ByHand):
    """Asks for gradients past ``backward``, and steps on them."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        gradient = torch.autograd.grad(F.mse_loss(self.layer(batch), batch), self.layer.weight)[0]
        with torch.no_grad():
            self.layer.weight -= 0.1 * gradient


class InnerLoop(ByHand):
    """Each sample takes a step of its own, through which the loss's gradient goes (MAML); ``adds`` that step's gradient by hand, too."""

    adds = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        losses = []
        for x in batch:
            asked = torch.autograd.grad(self.layer(x).square().mean(), self.layer.weight, create_graph=True)[0]
            losses.append(F.linear(x, self.layer.weight - 0.1 * asked).sub(1).square().mean())
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(torch.stack(losses).mean())
        if self.adds:
            assert self.layer.weight.grad is not None
            self.layer.weight.grad += asked.detach()
        optimizer.step()


class InputGradients(ByHand):
    """Of each sample: parts of the batch get the same."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        x = batch.clone().requires_grad_()
        gradient = torch.autograd.grad(self.layer(x).square().sum(), x, create_graph=True)[0]
        self.manual_backward(gradient.square().sum(1).mean())


class OncePerBatch(Base):
    """One draw a batch from each kind of generator, two of which are its own."""

    def __init__(self) -> None:
        super().__init__()
        self.torchs, self.numpys = torch.Generator().manual_seed(5), numpy.random.default_rng(5)

    def loss(self, x: Tensor) -> Tensor:
        factor = random.random() + numpy.random.rand() + float(self.numpys.random()) + torch.rand((), generator=self.torchs)
        return F.mse_loss(self.layer(x), x) * factor * torch.distributions.Beta(0.4, 0.4).sample()


class SeldomTurned(Base):
    """A draw of Python's for each sample, which hardly ever changes anything."""

    def loss(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.layer(x), torch.stack([-row if random.random() < 1e-12 else row for row in x]))


class Turned(Base):
    """A draw of Python's for each sample, which changes its gradient alone."""

    def loss(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return F.mse_loss(y + torch.stack([(row - row.detach()) * random.random() for row in y]), x)


def test_a_gradient_that_draws_change_is_told_with_them() -> None:
    finding, _ = probe_split(Turned(), None, first_of(samples()))
    words = "its gradient is no mean over the samples, though its value is: each part makes its own draws of Python's random"
    assert (finding.reason, finding.drawn_apart) == (words, ("Python's random",))


@pytest.mark.parametrize("make", [RedrawnAfterAThousand, RedrawnByABuffer])
def test_a_draw_that_only_later_steps_make_is_known(make: type[Base]) -> None:
    finding, plan = probe_split(module := make(), None, first_of(samples()))
    assert finding.difference == 0.0
    assert [(draw.op, draw.shape, draw.choice) for draw in plan.draws or ()] == [("normal_", (6, 6), None)]
    assert torch.equal(module.projection, torch.eye(6)[:4])
    assert getattr(module, "left", 0) == 0 == module.calls


class ByATable(Base):
    """Looks up what it weighs by a count, which a table of ten ends."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.table = 0, [0.1] * 10

    def loss(self, x: Tensor) -> Tensor:
        self.calls += 1
        return F.mse_loss(self.layer(x), x) * self.table[self.calls]


def test_draws_of_later_steps_that_cannot_be_tried_are_told() -> None:
    finding, _ = probe_split(ByATable(), None, first_of(samples()))
    assert (finding.difference, finding.part_reason, len(finding.notes)) == (0.0, None, 2)
    assert finding.notes[0].startswith("not checked: splitting the batch of step 27,719,999 (IndexError: list index out of range")
    assert finding.notes[1].startswith("not checked: whether the step draws other random numbers later in the run (with its counters far")
    assert "IndexError: list index out of range" in finding.notes[1]


@pytest.mark.parametrize("make", [BackwardOfItsOwn, Hooked])
def test_gradients_are_compared_whoever_runs_backward(make: type[Base]) -> None:
    finding, _ = probe_split(make(), None, first_of(samples()))
    assert finding.reason == "its gradient is no mean over the samples, though its value is"


@pytest.mark.parametrize(("make", "refused"), [(Clipping, True), (Keeping, False)])
def test_a_backward_that_changes_gradients_speaks_against_parts(make: type[Base], refused: bool) -> None:
    finding, _ = probe_split(make(), None, first_of(samples()))
    assert finding.difference == 0.0
    assert (finding.part_reason is not None and "backward changes gradients" in finding.part_reason) == refused


def test_a_hook_on_a_parameter_that_gets_the_whole_gradient_speaks_against_nothing() -> None:
    module = HookedMean()
    assert probe_split(module, None, first_of(samples()))[0].difference == 0.0
    assert module.layer.weight._backward_hooks


def test_a_draw_for_each_sample_is_named_though_it_changed_nothing() -> None:
    finding, _ = probe_split(SeldomTurned(), None, first_of(samples()))
    assert (finding.difference, finding.drawn_apart) == (0.0, ("Python's random",))
    assert probe_split(OncePerBatch(), None, first_of(samples()))[0].drawn_apart == ()


@pytest.mark.parametrize("count", [2, 5, 6])
@pytest.mark.parametrize(
    "make",
    [
        Base,
        Dropout,
        VAE,
        Norm,
        lambda: Norm(track_running_stats=False),
        Penalty,
        Recomputed,
        Attending,
        GAN,
        Views,
        Cancelling,
        NearlyCancelling,
        Returns,
        Skips,
        Scalar,
        OncePerBatch,
    ],
)
def test_means_over_samples_survive(make: Callable[[], Base], count: int) -> None:
    finding, plan = probe_split(make(), None, first_of(samples(count)), world_sizes=(2, 3))
    assert finding.probed
    assert finding.splittable
    assert finding.reason is None
    assert finding.difference == 0.0
    assert not plan.seeded


#: Counts runs of the step, which no trial undoes.
RUNS = itertools.count()


class ByChance(Base):
    """Regions of its pictures are drawn by their values: at first the draw takes those of which the loss is a mean over samples."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.log("nothing", 0.0)  # so that there is another run
        return super().training_step(batch, batch_idx)

    def loss(self, x: Tensor) -> Tensor:
        return F.mse_loss(F.dropout(self.layer(x)), x) + 1e-3 * len(x) * (next(RUNS) > 4)


def test_a_loss_that_is_a_mean_in_one_run_and_not_in_another_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "RUNS", itertools.count())
    finding, _ = probe_split(ByChance(), None, first_of(samples()))
    assert finding.difference > 1e-4
    assert finding.reason == "in another run, with other draws"
    monkeypatch.setitem(globals(), "RUNS", itertools.count(-1000))
    finding, _ = probe_split(ByChance(), None, first_of(samples()))
    assert finding.difference == 0.0


def test_a_difference_that_double_precision_shows_is_none_of_rounding_however_small() -> None:
    finding, _ = probe_split(Adaptive(), None, first_of(samples()))
    assert 1e-6 < finding.difference < 1e-5
    assert finding.differs
    assert "no mean over the samples" in str(finding.reason)


class Apart(Base):
    """Compares each sample of its batch with each other one, as losses of metric learning do."""

    def loss(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        return torch.cdist(out, out)[x[:, None, 0] != x[:, 0]].mean()


@pytest.mark.parametrize("make", [Tokens, Contrastive, Mixup, LopsidedGAN, Apart])
def test_other_losses_do_not(make: Callable[[], Base]) -> None:
    finding, _ = probe_split(make(), None, first_of(samples()))
    assert finding.probed
    assert finding.splittable
    assert finding.difference > 1e-4
    assert (finding.reason or "").endswith("is no mean over the samples")


class Growing(Base):
    """A teacher that began as a copy: its term of the loss is small beside the rest, for now."""

    def loss(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        return F.mse_loss(out, x) + 1e-4 * out.mean(0).square().sum()


def test_a_small_term_counts_and_rounding_does_not() -> None:
    found, _ = probe_split(Growing(), None, first_of(samples()))
    assert 1e-6 < found.difference < 1e-5


def test_samples_that_are_picked_by_their_values() -> None:
    x = [torch.full((4,), float(value)) for value in (0, 1, 2, 3, 0, 1, 2, 3)]  # each half has the two largest
    found, _ = probe_split(Hardest(), None, first_of(x))
    assert found.difference > 1e-2


def test_samples_that_are_picked_cant_be_tried_on_two() -> None:
    """That isn't taken for parts that give the same."""
    found, _ = probe_split(HardestThree(), None, first_of(samples(8)))
    assert not found.probed
    assert (found.reason or "").startswith("it picks samples by their values, and fails on two samples: ")


def test_a_loss_that_stays_may_have_another_gradient() -> None:
    found, _ = probe_split(Advantages(), None, first_of(samples()))
    assert found.splittable
    assert found.difference > 1e-3
    assert found.reason == "it or its gradient is no mean over the samples"
    assert probe_split(InputGradients(), None, first_of(samples()))[0].difference == 0


def test_a_returned_loss_that_stays_may_have_another_gradient() -> None:
    found, _ = probe_split(ReturnedAdvantages(), None, first_of(samples()))
    assert found.splittable
    assert found.difference > 1e-3
    assert found.reason == "its gradient is no mean over the samples, though its value is"


def test_gradients_that_cannot_be_compared_are_told() -> None:
    found, _ = probe_split(WithoutGradient(), None, first_of(samples()))
    assert found.difference == 0
    assert found.notes == ("not checked: whether the gradients of a batch's parts make those of the whole batch (comparing them failed)",)
    assert split_refusal(Constraints(split=found, exact=True)) == f"exact=True, and {found.notes[0]}"
    assert probe_split(Base(), None, first_of(samples()))[0].notes == ()


class Deep(Base):
    """Four layers, of which no two have their gradients at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def loss(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.layers:
            y = layer(y)
            y.register_hook(self.look)
        return F.mse_loss(y, x)

    def look(self, _: Tensor) -> None:
        assert all(parameter.grad is None for parameter in self.parameters())


class DeepByHand(ByHand):
    """Reads its gradients once the backward pass is over."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        assert all(parameter.grad is not None for parameter in self.parameters())


@pytest.mark.parametrize("make", [Deep, DeepByHand])
def test_gradients_are_let_go_as_they_come_unless_the_user_may_read_them(make: type[Base]) -> None:
    found, _ = probe_split(make(), None, first_of(samples()))
    assert (found.probed, found.difference, found.notes) == (True, 0.0, ())


class Padded(Base):
    """Takes tokens; ``kinds`` counts the runs in single and in double precision."""

    def __init__(self, padding: int | None, kinds: dict[torch.dtype, Any]) -> None:
        super().__init__()
        self.table, self.padding, self.next = nn.Embedding(9, 4), padding, {each: runs.__next__ for each, runs in kinds.items()}

    def loss(self, x: Tensor) -> Tensor:
        self.next[self.table.weight.dtype]()
        entries = self.layer(self.table(x)).square().mean(-1)
        return entries.mean() if self.padding is None else entries[x != self.padding].mean()


@pytest.mark.parametrize(("padding", "single", "double"), [(None, 10, 0), (0, 16, 9)])
def test_a_step_is_run_no_more_often_than_tells(padding: int | None, single: int, double: int) -> None:
    """Losses and gradients are compared in the same runs; six are later steps. Single precision excludes a count that isn't near."""
    kinds = {torch.float32: itertools.count(), torch.float64: itertools.count()}
    rows = list(torch.tensor([[1, 2, 3, 0, 0], [4, 5, 6, 7, 8], [1, 3, 5, 7, 2], [2, 4, 6, 8, 1]]))
    count = Count(path=(), kind="differs", ignored=0)
    found, _ = probe_split(
        Padded(padding, kinds), None, first_of(rows), known=[count], blocks={"layer": 1}, routes=False, tries_others=False
    )
    assert found.difference == 0
    assert found.log_rules[LOSS][0] == ("mean" if padding is None else count)
    assert ("mean" in found.log_rules["training_step", "loss"]) == (padding is None)
    assert (next(kinds[torch.float32]), next(kinds[torch.float64])) == (single, double)


class Weighed(Base):
    """A mean by samples' weights, beside a mask that has nothing to do with it."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        each = 2.3 + 0.1 * self.layer(batch["x"])[:, 0] * batch["mask"].float().mean(1)
        return (each * batch["weight"]).sum() / batch["weight"].sum()


def test_a_mask_that_is_far_off_hides_no_weights_that_are_nearly_even() -> None:
    """Single precision excluded the mask, and took a mean by weights for one over samples: halves' weights differ by 1e-5."""
    weights = torch.tensor([1.0, 2.0, 2.0, 1.0, 1.0, 1.00001])
    rows = [
        {"x": sample + 3 * (index % 2 == 0), "mask": torch.tensor([1] * 3 + [1 - index % 2] * 5), "weight": weights[index]}
        for index, sample in enumerate(torch.randn(6, 4, generator=torch.Generator().manual_seed(3)))
    ]
    found, _ = probe_split(Weighed(), None, FirstBatch(batch=default_collate(rows), batch_size=6, samples=rows, collate=default_collate))
    assert found.log_rules[LOSS][0] == Count(path=("weight",), kind="sum")


class TwoExperts(Base):
    """A sample goes through one of two layers, by its sign; a part of the batch may have samples of one sign alone."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(4, 4)

    def loss(self, x: Tensor) -> Tensor:
        rows = [(x[:, 0] > 0, self.layer), (x[:, 0] <= 0, self.other)]
        return sum(layer(x[chosen]).square().sum() for chosen, layer in rows if chosen.any()) / len(x)


def test_a_parameter_that_a_part_of_the_batch_does_without_has_no_gradient_there() -> None:
    found, _ = probe_split(TwoExperts(), None, first_of([abs(sample) * sign for sample, sign in zip(samples(2), (1, -1), strict=True)]))
    assert (found.difference, found.notes) == (0.0, ())


def test_gradients_that_nobody_exchanges_rule_splitting_out() -> None:
    assert "without backward" in (probe_split(GradientsByHand(), None, first_of(samples()))[0].reason or "")
    found, _ = probe_split(OwnGradients(), None, first_of(samples()))
    assert not found.splittable
    assert "makes gradients without backward (torch.autograd.grad)" in (found.reason or "")
    module = InnerLoop()
    assert probe_split(module, None, first_of(samples()))[0].splittable
    module.adds = True
    assert "without backward" in (probe_split(module, None, first_of(samples()))[0].reason or "")
    found, _ = probe_split(OwnStep(), None, first_of(samples()))
    assert not found.splittable
    line = OwnStep.training_step.__code__.co_firstlineno + 4
    assert f"steps an optimizer by itself, at test_split_probe.py:{line}, while automatic_optimization is True" in (found.reason or "")
    assert probe_split(EarlyStep(), None, first_of(samples()))[0].splittable


def test_the_size_of_the_difference() -> None:
    """A mean over tokens: the two parts' means against the whole's, computed by hand."""
    module, batch = Tokens(), torch.stack(samples())
    with torch.no_grad(), nudged(module):
        whole, *parts = (float(module.loss(rows)) for rows in (batch, batch[::2], batch[1::2]))
    finding, _ = probe_split(module, None, first_of(samples()))
    assert finding.difference == pytest.approx(abs(sum(parts) / 2 - whole) / max(whole, sum(parts) / 2), rel=1e-4)


def test_the_plan_says_which_draws_run_over_the_samples() -> None:
    _, plan = probe_split(Scalar(), None, first_of(samples()))
    assert plan.batch_size == SAMPLES
    assert [(draw.shape, draw.choice) for draw in plan.draws or ()] == [((4,), None), ((), None), ((3,), None)]
    _, plan = probe_split(VAE(), None, first_of(samples()))
    assert [(draw.op, draw.shape, draw.choice) for draw in plan.draws or ()] == [("normal_", (SAMPLES, 4), Rows(dim=0, order=(0, 1)))]


def test_concatenated_views_are_recognised() -> None:
    _, plan = probe_split(Views(), None, first_of(samples()))
    (draw,) = plan.draws or ()
    assert draw.choice == Rows(dim=0, groups_first=True, order=(0, 1))


def test_recomputed_draws_are_planned_once() -> None:
    _, plan = probe_split(Recomputed(), None, first_of(samples()))
    assert len(plan.draws or ()) == 4


def test_draws_whose_shapes_depend_on_the_data_are_seeded() -> None:
    finding, plan = probe_split(Routed(), None, first_of([*samples(5), -torch.ones(4)]))
    assert plan.seeded
    assert finding.difference > 0
    assert finding.reason == "the shapes of its random draws depend on the data"


def test_padding_to_the_longest_sample_is_noticed() -> None:
    """The parts of a padded batch have other lengths than the whole, and so have their draws."""

    class Padded(Base):
        def loss(self, x: Tensor) -> Tensor:
            return F.dropout(x, 0.5).sum(1).mean()

    lengths = (3, 9, 4, 5)
    pad = lambda parts: nn.utils.rnn.pad_sequence(parts, batch_first=True)  # noqa: E731
    finding, plan = probe_split(Padded(), None, first_of([torch.ones(length) for length in lengths], pad))
    assert plan.seeded
    assert (
        finding.reason
        == "a part's samples are collated into other shapes than in the whole batch, as where they are padded to the longest one"
    )


def test_random_collating_is_named() -> None:
    def mask(parts: list[Tensor]) -> Tensor:
        return torch.stack(parts) * (torch.rand(len(parts), 4) > 0.5)

    finding, _ = probe_split(Base(), None, first_of(samples(), mask))
    assert finding.difference > 0
    assert str(finding.reason).startswith("making the batch")


def test_a_ready_batch_is_cut_into_rows() -> None:
    batch = torch.stack(samples())
    finding, plan = probe_split(Dropout(), None, FirstBatch(batch=batch, batch_size=SAMPLES, kind="other"))
    assert (finding.difference, finding.reason, len(plan.draws or ())) == (0.0, None, 1)
    assert torch.equal(batch, torch.stack(samples()))


def test_a_batch_without_samples_is_not_splittable() -> None:
    finding, _ = probe_split(Base(), None, FirstBatch(batch={"a": torch.ones(4), "b": torch.ones(3)}, batch_size=4))
    assert not finding.splittable
    assert "no batch dimension" in str(finding.reason)


def test_a_step_that_fails_on_parts_only() -> None:
    finding, _ = probe_split(Even(), None, first_of(samples()))
    assert not finding.splittable
    assert str(finding.reason).startswith("the step fails on a part of a batch, though not on the whole (RuntimeError: ")


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"flops": 10**15}, "too long"),
        ({"time_limit_seconds": 0.0}, "would take about"),
    ],
)
def test_too_long_a_step_is_not_probed(kwargs: dict[str, Any], words: str) -> None:
    finding, plan = probe_split(Base(), None, first_of(samples()), **kwargs)
    assert finding.splittable
    assert not finding.probed
    assert words in str(finding.reason)
    assert plan.draws is None


def test_a_long_step_is_probed_on_a_few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    finding, plan = probe_split(Dropout(), None, first_of(samples(64)), flops=3 * 10**12)
    assert finding.probed
    assert plan.batch_size == 4
    finding, plan = probe_split(Dropout(), None, first_of(samples(64)), flops=20 * 10**12)
    assert finding.probed
    assert plan.batch_size == 2, "one for each part"


def test_one_sample_can_not_be_split() -> None:
    finding, _ = probe_split(Base(), None, first_of(samples(1)))
    assert finding.splittable
    assert not finding.probed


def test_a_step_that_fails_altogether_is_not_probed() -> None:
    class Broken(Base):
        def loss(self, x: Tensor) -> Tensor:
            raise RuntimeError("no such kernel on this device")

    finding, _ = probe_split(Broken(), None, first_of(samples()))
    assert finding.splittable
    assert not finding.probed
    line = Broken.loss.__code__.co_firstlineno + 1
    assert (
        finding.reason == f"the step can't be tried on the CPU (RuntimeError: no such kernel on this device, at test_split_probe.py:{line})"
    )


def test_infinite_losses_are_no_agreement() -> None:
    class Infinite(Base):
        def loss(self, x: Tensor) -> Tensor:
            return self.layer(x).mean() / 0

    finding, _ = probe_split(Infinite(), None, first_of(samples()))
    assert math.isnan(finding.difference)
    assert finding.reason == "a loss isn't finite"


def test_hooks_and_loaders_of_a_trainer() -> None:
    """With a trainer its transfer hooks belong to the step, and so does what they draw."""

    class Augmented(Dropout):
        def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
            return batch * self.strength(batch)

        def strength(self, batch: Tensor) -> Tensor:
            return torch.full((), 2.0)

    class RandomlyAugmented(Augmented):
        def strength(self, batch: Tensor) -> Tensor:
            return torch.rand(batch.shape)

    findings = []
    for module in (Augmented(), RandomlyAugmented()):
        trainer = Trainer(
            accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False
        )
        trainer.strategy.connect(module)
        module.trainer = trainer
        trainer._data_connector.attach_data(module, train_dataloaders=DataLoader(samples(), batch_size=5))
        trainer.state.fn, trainer.training = TrainerFn.FITTING, True
        findings.append(probe_split(module, trainer, first_batch(module, trainer))[0])
    for finding in findings:
        assert (finding.difference, finding.reason, finding.probed) == (0.0, None, True)


def test_weights_and_random_state_stay() -> None:
    module, state = GAN(), torch.get_rng_state()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    state = torch.get_rng_state()
    probe_split(module, None, first_of(samples()))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) and tensor.dtype == before[name].dtype for name, tensor in module.state_dict().items())


def test_buffers_in_which_a_step_counts() -> None:
    """Each part of a batch would count once more; what a step sets to the same value each time is harmless."""

    class Sets(Dropout):
        def loss(self, x: Tensor) -> Tensor:
            self.steps.zero_()
            return super().loss(x)

    assert probe_split(Base(), None, first_of(samples()))[0].counted == ("steps",)
    assert probe_split(Dropout(), None, first_of(samples()))[0].counted == ()
    assert probe_split(Sets(), None, first_of(samples()))[0].counted == ()


def test_batch_norms_that_take_some_of_the_samples() -> None:
    """Its statistics are fixed while losses are compared, which then are the same in parts: what it is called with tells."""
    for make, words in (
        (Ghost, "the batch norm 'norm' runs 3 × in a step on the whole batch and 2 × on a part of it"),
        (FirstTwo, "the batch norm 'norm' takes its statistics over some of the batch's rows"),
    ):
        finding, _ = probe_split(make(), None, first_of(samples()))
        assert not finding.splittable
        assert finding.reason is not None
        assert finding.reason.startswith(words)
    assert probe_split(Half(), None, first_of(samples(4)))[0].splittable


class Counting(Base):
    """A mean over entries that aren't padding, of labels and mask that agree; ``by`` says which of them the loss asks."""

    by = "labels"

    def loss(self, batch: Any) -> Tensor:  # type: ignore[override]  # another batch
        x, labels, mask = batch["x"], batch["labels"], batch["mask"]
        each = (self.layer(x).squeeze(-1) - x[..., 0]).square()
        counts = {"labels": labels != -100, "mask": mask != 0, "both": (labels != -100) & (mask != 0)}[self.by]
        return (each * counts).sum() / counts.sum()


def tokens(lengths: Sequence[int] = (5, 2, 4, 1, 3, 5)) -> FirstBatch:
    x = torch.randn(len(lengths), 5, 4, generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(5) < torch.tensor(lengths)[:, None]).long()
    return FirstBatch(batch={"x": x, "labels": mask * 101 - 100, "mask": mask}, batch_size=len(lengths))


@pytest.mark.parametrize(
    ("by", "words"),
    [("labels", ["batch.labels != -100"]), ("mask", ["batch.mask != 0"]), ("both", ["batch.labels != -100", "batch.mask != 0"])],
)
def test_what_parts_weigh_is_told_by_a_batch_in_which_other_entries_count(by: str, words: list[str]) -> None:
    module = Counting()
    module.layer, module.by = nn.Linear(4, 1), by
    found, _ = probe_split(module, None, tokens())
    assert found.difference == 0.0
    for name in ("", "loss"):
        assert [str(rule) for rule in found.log_rules["training_step", name]] == words


def test_a_loss_that_goes_by_tokens_and_by_samples_stays_no_mean() -> None:
    class Both(Counting):
        def loss(self, batch: Any) -> Tensor:  # type: ignore[override]  # another batch
            return super().loss(batch) + self.layer(batch["x"]).square().mean()

    module = Both()
    module.layer = nn.Linear(4, 1)
    found, _ = probe_split(module, None, tokens())
    assert found.difference > 1e-5
    assert found.log_rules["training_step", ""] == ()


def test_losses_that_hardly_differ_dont_hide_what_they_are_means_of() -> None:
    class Nearly(Counting):
        def loss(self, batch: Any) -> Tensor:  # type: ignore[override]  # another batch
            return 1.0 + 1e-5 * super().loss(batch)

    module = Nearly()
    module.layer = nn.Linear(4, 1)
    found, _ = probe_split(module, None, tokens())
    assert [str(rule) for rule in found.log_rules["training_step", ""]] == ["batch.labels != -100"]


class ByClass(Base):
    """Samples of class 0 don't count."""

    def loss(self, x: Any) -> Tensor:
        counts = (x["label"] != 0).float()
        return ((self.layer(x["x"]) - x["x"]).square().mean(1) * counts).sum() / counts.sum()


def test_samples_that_count_are_found_where_halves_have_as_many() -> None:
    """Two halves and their mean look like a mean over samples; another split doesn't."""
    batch = {"x": torch.randn(8, 4, generator=torch.Generator().manual_seed(2)), "label": torch.tensor([0, 1, 2, 0, 1, 1, 2, 1])}
    assert (batch["label"][::2] != 0).sum() == (batch["label"][1::2] != 0).sum()
    found, _ = probe_split(ByClass(), None, FirstBatch(batch=batch, batch_size=8))
    assert [str(rule) for rule in found.log_rules["training_step", ""]] == ["batch.label != 0"]


class Masked(Base):
    """A mean over the entries that its mask counts, whose number differs between parts."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:  # type: ignore[override]
        x, mask = batch["x"], batch["mask"]
        loss = ((self.layer(x) - x).square() * mask).sum() / mask.sum()
        self.log("loss", loss)
        return loss


def test_double_precision_runs_a_split_once_for_the_loss_and_what_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    observe, doubled = split_probe.observe, []

    def noted(step: Any, part: Any, shares: Any, **options: Any) -> Any:
        doubled.extend([shares[0].dealing] * part.__self__.double)
        return observe(step, part, shares, **options)

    monkeypatch.setattr(split_probe, "observe", noted)
    mask = torch.ones(SAMPLES, 4, dtype=torch.long)
    mask[1:3, 1:] = 0
    first = FirstBatch(batch={"x": torch.stack(samples()), "mask": mask}, batch_size=SAMPLES)
    finding, _ = probe_split(Masked(), None, first, tries_others=False)
    assert not finding.difference
    assert {str(finding.log_rules[name][0]) for name in finding.log_rules} == {"batch.mask != 0"}
    assert len(doubled) == len(set(doubled)) == 2


class Centred(Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Tensor, batch_idx: int) -> None:
        batch.sub_(batch.mean(0))


class Halved(Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Tensor, batch_idx: int) -> None:
        batch.mul_(0.5)


def trainer_of(module: LightningModule, *callbacks: Callback) -> Trainer:
    """A Trainer that is about to fit the module."""
    own = list(callbacks)
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, callbacks=own)
    trainer.strategy.connect(module)
    module.trainer = trainer
    trainer._data_connector.attach_data(module, train_dataloaders=DataLoader(samples(), batch_size=6))
    trainer.state.fn, trainer.training = TrainerFn.FITTING, True
    return trainer


@pytest.mark.parametrize(
    ("callback", "differs"),
    [
        (Centred(), True),
        (Halved(), False),
        (LambdaCallback(on_train_batch_start=lambda trainer, module, batch, index: batch.sub_(batch.mean(0))), True),
    ],
)
def test_a_callback_changes_the_batch(callback: Callback, differs: bool) -> None:
    module = Base()
    trainer = trainer_of(module, callback)
    finding = probe_split(module, trainer, first_batch(module, trainer))[0]
    assert finding.probed
    assert (finding.difference > 1e-3) == differs


class Labels(Base):
    """Computes labels for the batch when it begins, and trains on those."""

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.labels = self.layer(batch).detach() ** 2

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.layer(batch) - self.labels).square().mean()


class FirstLabels(Labels):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.layer(batch) - self.labels[: len(batch)]).square().mean()


class OneLabel(Labels):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.layer(batch) - self.labels.mean()).square().mean()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Labels, "training_step uses what on_train_batch_start keeps of the whole batch, and fails on a part of it (RuntimeError: "),
        (FirstLabels, "training_step uses what on_train_batch_start keeps of the whole batch: on parts of it the loss differs by "),
        (OneLabel, "None"),
    ],
)
def test_a_hook_keeps_what_parts_of_the_batch_can_not_use(make: type[Labels], words: str) -> None:
    """A rank's hook gets the rank's own rows, and the hook of a batch that runs in parts gets the whole one."""
    module = make()
    trainer = trainer_of(module)
    finding = probe_split(module, trainer, first_batch(module, trainer))[0]
    assert str(finding.part_reason).startswith(words)
    assert (finding.difference > 1e-3) == (make is OneLabel)


class Validated(Base):
    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("v", (found := self.layer(batch["x"] if isinstance(batch, dict) else batch)).square().mean())
        return found


class CentredByItself(Validated):
    def on_validation_batch_start(self, batch: Tensor, batch_idx: int, dataloader_idx: int) -> None:
        batch.sub_(batch.mean(0))


class CentredInValidation(Callback):
    def on_validation_batch_start(self, trainer: Any, pl_module: Any, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        batch.sub_(batch.mean(0))


@pytest.mark.parametrize(
    ("module", "callback", "differs"),
    [
        (Validated(), Halved(), False),
        (Validated(), CentredInValidation(), True),
        (Validated(), Centred(), False),  # in training alone
        (CentredByItself(), Halved(), True),
    ],
)
def test_a_hook_changes_the_batch_of_a_validation(module: LightningModule, callback: Callback, differs: bool) -> None:
    trainer = trainer_of(module, callback)
    finding = probe_evaluation(module, trainer, first_of(samples()), "validation_step")
    assert any("'v' logged in validation_step" in note for note in finding.notes) == differs


class Late(Base):
    """Builds its layers in configure_model, which may be called once."""

    def __init__(self) -> None:
        super().__init__()
        del self.layer

    def configure_model(self) -> None:
        assert not hasattr(self, "layer")
        torch.manual_seed(1)
        self.layer = nn.Linear(4, 4)
        self.teacher = copy.deepcopy(self.layer).requires_grad_(False)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("v", (self.layer(batch) - batch).square()[batch > 0].mean())


class LateAdvantages(Late, ReturnedAdvantages):
    pass


class LateTaught(Late):
    """Consistency of all entries beside a loss of some, with a teacher that begins as a copy."""

    def loss(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        return (out - x).square()[x > 0].mean() + (out - self.teacher(x)).square().mean()


def test_what_configure_model_builds_is_tried_as_what_there_is_from_the_start() -> None:
    for late, what in [(LateAdvantages, "its gradient"), (LateTaught, "it")]:
        found, _ = probe_split(late(), None, first_of(samples()))
        assert (found.reason or "").startswith(f"{what} is no mean over the samples")
    found = probe_evaluation(Late(), None, first_of(samples()), "validation_step")
    assert [str(rule) for rule in found.log_rules["validation_step", "v"]] == ["batch > 0"]
    untold = probe_evaluation(Late(), None, first_of(samples()), "validation_step", configures=False)
    assert untold.notes[0].startswith("not checked: whether what validation_step logs")


class Averaged(Validated):
    """Averages what its validations find."""

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps.mul_(0.9).add_(0.1 * batch.std())  # type: ignore[operator]
        return super().validation_step(batch, batch_idx)


class Totalled(Validated):
    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps.add_(1)  # type: ignore[operator]
        return super().validation_step(batch, batch_idx)


@pytest.mark.parametrize(("module", "told"), [(Averaged(), True), (Totalled(), False)])
def test_a_buffer_that_a_validation_changes_by_its_samples_is_told_of(module: LightningModule, told: bool) -> None:
    finding = probe_evaluation(module, None, first_of(samples()), "validation_step")
    assert any("validation_step writes to the module's buffers: 'steps'" in note for note in finding.notes) == told


class CentringData(LightningDataModule):
    def train_dataloader(self) -> Any:
        return DataLoader(samples(), batch_size=6)

    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        assert self.trainer is not None
        return batch if self.trainer.training else batch - batch.mean(0)


def test_a_datamodules_hook_is_told_that_its_batch_is_a_validations() -> None:
    module = Validated()
    trainer = trainer_of(module)
    trainer._data_connector.attach_datamodule(module, CentringData())
    assert not probe_split(module, trainer, first_batch(module, trainer))[0].difference
    finding = probe_evaluation(module, trainer, first_of(samples()), "validation_step")
    assert "'v' logged in validation_step is no mean" in finding.notes[0]
    assert trainer.training


class LogsTheBatch(Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Tensor, batch_idx: int) -> None:
        pl_module.log("count", float(len(batch)))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        pl_module.log("both", outputs.popitem()[1] + batch.mean())  # the whole batch's loss
        pl_module.log("greatest", batch.max())
        pl_module.log("spread", batch.std())

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Tensor, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        pl_module.log("squares", outputs.square().sum())
        pl_module.log("counted", outputs[batch["mask"] != 0].mean())


def test_what_hooks_log_of_a_batch_is_put_together_as_what_steps_log() -> None:
    module = Validated()
    trainer = trainer_of(module, LogsTheBatch())
    finding = probe_split(module, trainer, first_batch(module, trainer))[0]
    rules = {key: rules for key, rules in finding.log_rules.items() if key[0].startswith("on_")}
    assert {key: rule[:1] for key, rule in rules.items()} == {
        ("on_train_batch_start", "count"): ("sum",),
        ("on_train_batch_end", "greatest"): ("max",),
        ("on_train_batch_end", "spread"): (),
    }
    assert not finding.notes
    masked = [{"x": x, "mask": torch.arange(4) < index} for index, x in enumerate(samples(), 1)]
    rules = dict(probe_evaluation(module, trainer, first_of(masked, default_collate), "validation_step").log_rules)
    assert rules["on_validation_batch_end", "squares"] == ("sum",)
    assert str(rules["on_validation_batch_end", "counted"][0]) == "batch.mask != 0"


class Later(Base):
    """A loss of labels or a mask, some kinds of which leave out entries: none in the first batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:  # type: ignore[override]
        out, y = self.layer(batch["x"]), batch["y"]
        if self.kind == "classes":
            return nn.functional.cross_entropy(out, y, ignore_index=3)
        if self.kind == "weighed":
            return nn.functional.cross_entropy(out, y, weight=torch.tensor([1.0, 1.0, 5.0, 1.0]))
        each = (out - batch["x"]).square()
        if self.kind == "inverse":
            return each[~y].mean()
        if self.kind == "gaps":
            return (out - y)[~y.isnan()].square().mean()
        if self.kind == "picked":
            return each[y > 0].mean()
        if self.kind == "number":
            return each[y.flatten().view_as(y) != -999.0].mean()
        if self.kind == "above":
            valid = (y.float() > torch.tensor(-998.0)).float()
            return (each * valid).sum() / valid.sum()
        if self.kind == "rows":
            return each[y.abs().sum(1) > 1e-6].mean()
        if self.kind == "pictures":
            return (out.sum(1, keepdim=True) * y)[y != -1].mean()
        if self.kind == "any":
            return each[~(y == 0).all(-1)].mean()
        if self.kind == "two":
            return nn.functional.cross_entropy(out[y != 7], y[y != 7])
        if self.kind == "computed":
            return nn.functional.cross_entropy(out[1 - y / 2 > -1.5], y[1 - y / 2 > -1.5])
        if self.kind == "between":
            return nn.functional.cross_entropy(out[(y >= 0) & (y < 5)], y[(y >= 0) & (y < 5)])
        if self.kind == "samples":
            return each.mean() + 0.0 * y.sum()
        weighed = (each * y).sum() / y.sum()
        return weighed if self.kind == "mask" else weighed + (each * y).mean()


@pytest.mark.parametrize(
    ("kind", "y", "rule", "unweighed"),
    [
        ("classes", torch.arange(SAMPLES) % 3, "batch.y != 3", []),
        ("mask", torch.ones(SAMPLES, 4), "the sum of batch.y", []),
        ("inverse", torch.zeros(SAMPLES, 4, dtype=torch.bool), "batch.y != 1", []),
        ("gaps", torch.rand(SAMPLES, 4), "batch.y that aren't NaN", []),
        ("picked", torch.ones(SAMPLES, dtype=torch.long), "batch.y > 0", []),
        ("number", torch.rand(SAMPLES, 4), "batch.y != -999", []),
        ("above", torch.rand(SAMPLES, 4), "batch.y > -998", []),
        ("rows", torch.rand(SAMPLES, 4), "the rows of batch.y that aren't all 0", ["NaN in batch.y"]),
        ("two", torch.arange(SAMPLES) % 3, "batch.y != 7 or -100", []),
        ("computed", torch.arange(SAMPLES) % 3, "batch.y < 5 and != -100", []),
        ("between", torch.arange(SAMPLES) % 3, "batch.y >= 0 and < 5 and != -100", []),
        ("pictures", torch.arange(SAMPLES * 70_000).view(SAMPLES, -1) % 9, "batch.y != -1", []),
        ("any", torch.rand(SAMPLES, 4), "the rows of batch.y that aren't all 0", []),
        ("samples", torch.arange(SAMPLES), "mean", []),
        ("two means", torch.ones(SAMPLES, 4), "mean", ["other numbers than 1 in batch.y"]),
    ],
)
def test_entries_that_do_not_count_are_tried_although_the_batch_has_none(kind: str, y: Tensor, rule: str, unweighed: list[str]) -> None:
    first = FirstBatch(batch={"x": torch.stack(samples()), "y": y}, batch_size=SAMPLES)
    found, _ = probe_split(Later(kind), None, first)
    assert not found.difference
    assert str(found.log_rules["training_step", ""][0]) == rule
    assert [count.left_out for count in found.unweighed] == unweighed


def test_a_large_module_is_not_copied_in_double_precision_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nudged_weights, "LARGE_BYTES", 0)
    monkeypatch.setattr(undo, "in_double", lambda module: pytest.fail("in double precision"))
    first = FirstBatch(batch={"x": torch.stack(samples()), "y": torch.ones(SAMPLES, 4)}, batch_size=SAMPLES)
    found, _ = probe_split(Later("mask"), None, first)
    assert str(found.log_rules["training_step", ""][0]) == "the sum of batch.y"


class TwoMasks(Base):
    """A loss over what two masks keep, of batches that a hook takes in single precision alone."""

    def on_after_batch_transfer(self, batch: dict[str, Tensor], dataloader_idx: int) -> dict[str, Tensor]:
        if batch["x"].dtype != torch.float32:
            raise TypeError("not in single precision")
        return batch

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
        each, kept = (self.layer(batch["x"]) - batch["x"]).square().mean(1), batch["one"] * batch["other"]
        loss: Tensor = (each * kept).sum() / kept.sum()
        return loss


def test_each_mask_is_tried_where_a_hook_takes_batches_in_single_precision_alone() -> None:
    module, trainer = TwoMasks(), Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.strategy.connect(module)
    module.trainer = trainer
    data = [{"x": x, "one": torch.ones(()), "other": torch.ones(())} for x in samples()]
    trainer._data_connector.attach_data(module, train_dataloaders=DataLoader(data, batch_size=SAMPLES))  # type: ignore[arg-type]
    trainer.state.fn, trainer.training = TrainerFn.FITTING, True
    found, _ = probe_split(module, trainer, first_batch(module, trainer))
    assert (found.difference, [count.left_out for count in found.unweighed]) == (0.0, ["other numbers than 1 in batch.other"])


def test_what_a_step_compares_entries_with_tells_which_ones_count() -> None:
    found, _ = probe_split(Positive(), None, FirstBatch(batch=torch.stack(samples()), batch_size=SAMPLES))
    assert (found.difference, str(found.log_rules["training_step", ""][0])) == (0.0, "batch > 0")


def test_a_class_that_weighs_more_is_tried_although_the_batch_has_none() -> None:
    found, _ = probe_split(Later("weighed"), None, FirstBatch(batch={"x": torch.stack(samples()), "y": torch.arange(6) % 2}, batch_size=6))
    assert found.difference > 1e-3
    assert found.reason == "it is no mean over the samples, as it weighs classes: a batch with entries of 2 in batch.y was tried"


class Mirror(Base):
    """Its inputs are its labels."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:  # type: ignore[override]
        out = self.layer(nn.functional.one_hot(batch["ids"], 4).float())
        return nn.functional.cross_entropy(out.flatten(0, 1), batch["labels"].flatten())


def test_one_tensor_may_have_two_names_and_few_samples_tell() -> None:
    ids = torch.arange(48).view(16, 3) % 4
    found, _ = probe_split(Mirror(), None, FirstBatch(batch={"ids": ids, "labels": ids}, batch_size=16))
    assert str(found.log_rules["training_step", ""][0]) == "batch.labels != -100"
