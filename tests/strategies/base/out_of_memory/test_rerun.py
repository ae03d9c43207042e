"""A batch that runs out of memory is run again in more parts, and the training run is that of plain Lightning, where nothing fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryAccuracy, BinaryF1Score

from lightning_autopar import AutoParallelStrategy
from lightning_autopar.exact.random.whole_batch_draws import DrawPlan
from lightning_autopar.plans import Plan
from lightning_autopar.strategies.base.engine_mixin import EngineMixin
from tests.strategies.fitted import QUIET, Fitted, assert_same, fit, numbers, plan

ACCUMULATED = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
#: In the epoch's first batch; in two in a row, the second of which begins a window of accumulated batches.
WHEN = [pytest.param((0,), {}, id="first"), pytest.param((1, 2), ACCUMULATED, id="accumulated")]

#: In the middle of forward; in backward's last layer, in the middle, and in its first one, with no gradient yet.
PLACES = [("forward", 3), ("backward", 1), ("backward", 3), ("backward", 5)]


def allocate(rows: int, most: int, where: str) -> None:
    """An allocation that fails where a step holds more samples than fit."""
    if rows > most:
        raise torch.OutOfMemoryError(f"a fake: {rows} samples in {where}")


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, most: int) -> Tensor:
        ctx.most = most
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        allocate(len(gradients[0]), ctx.most, "backward")
        return gradients[0], None


class Short(Fitted):
    """Runs out of memory under a plan of ours. Draws, logs, and has metrics.

    Args:
        point: where.
        layer: in front of which one; backward has done those behind it.
        rank: on which rank.
        most: how many samples fit, by the batch's index.
    """

    def __init__(self, point: str, layer: int = 3, rank: int = 0, most: Mapping[int, int] | None = None, *, width: int = 16) -> None:
        super().__init__()
        linear = [nn.Linear(width, width) for _ in range(3)]
        self.net = nn.Sequential(nn.Linear(8, width), nn.Tanh(), linear[0], nn.Dropout(0.3), linear[1], linear[2], nn.Linear(width, 1))
        self.f1 = BinaryF1Score()
        self.scores = MetricCollection([BinaryF1Score(), BinaryAccuracy()])
        self.fails = point, layer, rank, most or {}
        self.begun: list[int] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.begun.append(batch_idx)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (x, y), (point, layer, rank, most) = batch, self.fails
        strategy = self.trainer.strategy
        fits = most.get(batch_idx, 99) if isinstance(strategy, EngineMixin) and strategy.global_rank == rank else 99
        self.log("drawn", torch.rand(()))
        guesses, targets = (x[:, 0] > 0).long(), (y[:, 0] > 0).long()
        self.f1(guesses, targets)
        self.log("f1", self.f1, on_step=True, on_epoch=True)
        self.scores.update(guesses, targets)
        self.log_dict(self.scores, on_step=False, on_epoch=True)
        for index, module in enumerate(self.net):
            x = module(x)
            if index == layer and point == "forward":
                allocate(len(x), fits, point)
            if index == layer and point == "backward":
                x = _InBackward.apply(x, fits)
        loss = nn.functional.mse_loss(x, y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("rows", float(len(y)), reduce_fx="sum")
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Hooks(pl.Callback):
    """Writes down a batch's hooks, and what they find."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.calls.append(("start", trainer.global_step))

    def on_before_zero_grad(self, *_: Any) -> None:
        self.calls.append("zero")

    def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
        self.calls.append(("backward", round(float(loss.detach()), 4)))

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        self.calls.append(("after", [round(float(parameter.grad.norm()), 4) for parameter in module.parameters()]))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.state_dict()
        metrics = {name: round(float(value), 4) for name, value in trainer.callback_metrics.items()}
        self.calls.append(("end", round(float(outputs["loss"]), 4), progress, metrics))


@contextmanager
def said_by_reruns() -> Iterator[list[str]]:
    """The lines that this process says while open."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning_autopar.strategies.base.out_of_memory.rerun")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def rerun(make: Callable[[], Any], under: Plan, **options: Any) -> None:
    ours, theirs = assert_same(make, numbers(), under, tolerance=1e-5, draws=DrawPlan(), undivided=None, **options)
    assert ours.begun == theirs.begun, "no batch begins twice"


def short(make: Callable[[], Any], under: Plan, **options: Any) -> str:
    """The notes of the exception that ends the run."""
    with pytest.raises(torch.OutOfMemoryError) as raised:
        fit(make, numbers(), under, **{"draws": DrawPlan(), "undivided": None, **options})
    return "\n".join(getattr(raised.value, "__notes__", ()))


# -- one device ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batches", "options"), WHEN)
@pytest.mark.parametrize(("point", "layer"), PLACES)
def test_on_one_device(point: str, layer: int, batches: tuple[int, ...], options: Any) -> None:
    with said_by_reruns() as said:
        rerun(partial(Short, point, layer, 0, dict.fromkeys(batches, 2)), plan("single", ranks=1), **options)
    assert len(said) == (2 if point == "forward" else 1), "backward is completed in as many parts as it takes"
    assert f"in the {point} of batch {batches[0]}, whose 8 samples ran in one piece" in said[0]
    assert "in 4 parts" in said[-1]


@pytest.mark.parametrize(("number", "options"), [(1, ACCUMULATED), (2, {})], ids=["accumulated", "planned"])
@pytest.mark.parametrize("point", ["forward", "backward"])
def test_batches_that_already_run_in_parts(point: str, options: Any, number: int) -> None:
    """The last one, of two samples, has fewer parts than the plan."""
    fits = {0: 4, 2: 2, 3: 1} if number == 1 else {0: 2, 2: 1}
    with said_by_reruns() as said:
        rerun(partial(Short, point, 3, 0, fits), plan("single", ranks=1, micro_batches=number), **options)
    assert "ran in 2 parts" in "".join(said)


@pytest.mark.parametrize("point", ["forward", "backward"])
def test_hooks_are_called_once_and_find_what_they_would_find(point: str) -> None:
    found = []
    for under in (plan("single", ranks=1), None):
        seen = Hooks()
        fit(partial(Short, point, 3, 0, {1: 2}), numbers(), under, draws=DrawPlan(), undivided=None, callbacks=[seen])
        found.append(seen.calls)
    assert found[0] == found[1]


@pytest.mark.parametrize("point", ["forward", "backward"])
def test_a_gradient_scaler(point: str) -> None:
    scales = []
    for under in (plan("single", ranks=1), None):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
        made = partial(Short, point, 3, 0, {1: 2})
        module, losses, _ = fit(made, numbers(), under, draws=DrawPlan(), undivided=None, plugins=[plugin])
        scales.append((scaler.get_scale(), losses, dict(module.state_dict())))
    (ours, losses, weights), (theirs, their_losses, their_weights) = scales
    assert ours == theirs > 1024
    torch.testing.assert_close(losses, their_losses, rtol=2**-8, atol=2**-8)
    # AdamW's first steps are the gradients' signs, which half precision doesn't settle where they are small.
    torch.testing.assert_close(weights, their_weights, rtol=0.02, atol=0.02)


class Keeps(Short):
    """Keeps what a step finds."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: list[int] = []
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch_idx)
        self.steps += 1
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("engine", "rank"), [("single", 0), ("ddp", 1)])
@pytest.mark.parametrize("point", ["forward", "backward"])
def test_what_a_step_keeps_on_its_module_is_kept_once(point: str, engine: Any, rank: int) -> None:
    rules = {"training_step": {("seen", "+"): "same", ("steps",): "same"}}
    under = plan(engine, ranks=1 if engine == "single" else 2)
    module, _, _ = fit(partial(Keeps, point, 3, rank, {1: 2}), numbers(), under, draws=DrawPlan(), undivided=None, kept_rules=rules)
    assert module.seen == [0, 1, 2, 3] * 2
    assert module.steps == 8


# -- several -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batches", "options", "rank"), [((0,), {}, 0), ((1, 2), ACCUMULATED, 1)], ids=["first", "accumulated"])
@pytest.mark.parametrize(("point", "layer"), PLACES)
def test_on_two_ranks(point: str, layer: int, batches: tuple[int, ...], options: Any, rank: int) -> None:
    rerun(partial(Short, point, layer, rank, dict.fromkeys(batches, 1)), plan("ddp"), **options)


def test_planning_says_whether_batches_can_be_run_again() -> None:
    found = []
    for strategy in (AutoParallelStrategy(devices="2xcpu:4GiB", allow=["ddp"], calibrate="off"), "auto"):
        pl.seed_everything(3, verbose=False)
        module: Any = Short("backward", 3, 1, {1: 1})
        trainer = pl.Trainer(accelerator="cpu", devices="auto" if found == [] else 1, strategy=strategy, max_epochs=1, **QUIET)
        trainer.fit(module, DataLoader(numbers(), batch_size=8), DataLoader(numbers(), batch_size=8))
        found.append(dict(module.state_dict()))
        if isinstance(strategy, AutoParallelStrategy):
            assert [values["lacked_bytes"] for values in strategy.measured.values()] == [None, 0]
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


class Wide(Short):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-2)


@pytest.mark.parametrize("layer", [1, 3, 4])
def test_gradients_that_go_in_several_buckets(layer: int) -> None:
    """DDP sends gradients of one MiB, then of 25, and these are of 1.4 MiB each."""
    rerun(partial(Wide, "backward", layer, 1, {1: 1}, width=600), plan("ddp"), max_epochs=1)


@pytest.mark.parametrize(("number", "options"), [(1, ACCUMULATED), (2, {})], ids=["accumulated", "planned"])
@pytest.mark.parametrize("point", ["forward", "backward"])
def test_ranks_whose_batches_already_run_in_parts(point: str, options: Any, number: int) -> None:
    rerun(partial(Short, point, 3, 1, {1: 2, 3: 1} if number == 1 else {2: 1}), plan("ddp", micro_batches=number), **options)


# -- what can't be run again -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["forward", "backward"])
@pytest.mark.parametrize(("engine", "rank"), [("single", 0), ("ddp", 1)])
def test_one_sample_that_is_too_much(engine: Any, rank: int, point: str) -> None:
    under = plan(engine, ranks=1 if engine == "single" else 2)
    samples = 8 if engine == "single" else 4
    assert f"one of its {samples} samples alone takes more" in short(partial(Short, point, 3, rank, {1: 0}), under)


def test_a_module_whose_batches_cant_be_split() -> None:
    told = short(partial(Short, "forward", 3, 0, {1: 2}), plan("single", ranks=1), undivided="it has batch norms")
    assert "autopar: the batch wasn't run again in more parts: it has batch norms" in told


class Backward(Short):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)


def test_a_backward_of_the_users_own() -> None:
    rerun(partial(Backward, "forward", 3, 0, {1: 2}), plan("single", ranks=1))
    assert "a backward() of its own" in short(partial(Backward, "backward", 3, 0, {1: 2}), plan("single", ranks=1))


class Exchanging(Short):
    """Ranks exchange something in the step."""

    def __init__(self, early: bool, *args: Any) -> None:
        super().__init__(*args)
        self.early = early

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.early:
            dist.all_reduce(torch.zeros(1))
        loss = super().training_step(batch, batch_idx)
        if not self.early:
            dist.all_reduce(torch.zeros(1))
        return loss


def test_a_step_in_which_ranks_exchange_something() -> None:
    for point in ("forward", "backward"):
        assert "have exchanged something in its forward" in short(partial(Exchanging, True, point, 3, 1, {1: 2}), plan("ddp"))
    with pytest.raises(RuntimeError, match="exchanges something with other ranks, which run a batch in one piece"):
        fit(partial(Exchanging, False, "forward", 3, 1, {1: 2}), numbers(), plan("ddp"), draws=DrawPlan(), undivided=None)


class InOptimizer(Short):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        if batch_idx == 1:
            allocate(1, 0, "the optimizer")


class InValidation(Short):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            allocate(1, 0, "validation")


class ByHand(Short):
    def __init__(self) -> None:
        super().__init__("")
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        allocate(1, 0, "a step of manual optimization")


@pytest.mark.parametrize("engine", ["single", "ddp"])
@pytest.mark.parametrize("make", [partial(InOptimizer, ""), partial(InValidation, ""), ByHand])
def test_what_is_no_step_of_automatic_optimization_ends_the_run(make: Callable[[], Any], engine: Any) -> None:
    assert "samples ran in" not in short(make, plan(engine, ranks=1 if engine == "single" else 2))
