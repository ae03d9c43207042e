"""Batches worked off in parts: the same training run as with whole ones, hooks included, on every engine."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import BinaryF1Score

from lightning_autopar import AutoParallelStrategy
from lightning_autopar.exact.random.whole_batch_draws import DrawPlan
from lightning_autopar.exact.step.micro_batches import take_part, why_whole
from lightning_autopar.plans import Engine, Plan
from tests.strategies.base.test_rank_measurement import Text
from tests.strategies.fitted import BLOCKS, QUIET, Fitted, _decided, assert_same, fit, numbers, plan
from tests.strategies.written import InPlace, Twin

ENGINES: tuple[Engine, ...] = ("single", "ddp", "fsdp")


def parts(engine: Engine, number: int, **more: Any) -> Plan:
    """A plan of ``number`` parts; on several ranks of two."""
    return plan(engine, ranks=1 if engine == "single" else 2, micro_batches=number, **more)


class Dropped(Fitted):
    """Dropout in a block, part of which is recomputed in backward, and an optimizer that sees every bit."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Tanh())
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(16, 1))

    def loss(self, batch: Any) -> Tensor:
        hidden = checkpoint(self.net, batch[0], use_reentrant=False)
        return nn.functional.mse_loss(self.head(hidden), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2, weight_decay=0.1)


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}], ids=["plain", "accumulated, clipped"])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_run_is_that_of_whole_batches(engine: Engine, options: dict[str, Any]) -> None:
    """Three parts don't divide a batch of eight; the last one, of two samples, comes in fewer parts."""
    under = parts(engine, 3)
    assert_same(Dropped, numbers(), under, tolerance=1e-6, draws=DrawPlan(), **options)


@pytest.mark.parametrize("engine", ENGINES)
def test_with_blocks_recomputed_and_more_parts_than_samples(engine: Engine) -> None:
    more = {"shard": BLOCKS} if engine == "fsdp" else {}
    assert_same(Fitted, numbers(), parts(engine, 9, recompute=BLOCKS[:2], **more), tolerance=1e-6, gradient_clip_val=0.5)


def test_ranks_with_fewer_samples_than_others_run_empty_parts() -> None:
    under = plan("ddp", shares=(1, 3), micro_batches=3)
    assert_same(Dropped, numbers(), under, tolerance=1e-6, draws=DrawPlan())


@pytest.mark.parametrize("engine", ["single", "fsdp"])
def test_bf16_mixed(engine: Engine) -> None:
    assert_same(Fitted, numbers(), parts(engine, 2), tolerance=2**-6, precision="bf16-mixed")


def test_a_gradient_scaler_scales_every_part() -> None:
    def plugin() -> MixedPrecision:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        return MixedPrecision("16-mixed", "cpu", scaler=scaler)

    ours, losses, trainer = fit(Fitted, numbers(), parts("single", 2), plugins=[plugin()])
    theirs, their_losses, their_trainer = fit(Fitted, numbers(), None, plugins=[plugin()])
    torch.testing.assert_close(losses, their_losses, rtol=2**-8, atol=2**-8)
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()), rtol=2**-8, atol=2**-8)
    assert trainer.precision_plugin.scaler.get_scale() == their_trainer.precision_plugin.scaler.get_scale() > 1024


def test_random_generators_end_as_after_whole_batches() -> None:
    states = []
    for under in (parts("single", 3), None):
        fit(Dropped, numbers(), under, draws=DrawPlan())
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


class OwnGenerators(Fitted):
    """Draws one number a batch from generators of its own, one of which is made anew for each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.torchs, self.pythons, self.numpys = torch.Generator().manual_seed(5), random.Random(5), numpy.random.default_rng(5)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.numpys = numpy.random.default_rng(batch_idx)

    def loss(self, batch: Any) -> Tensor:
        factor = torch.rand((), generator=self.torchs) + self.pythons.random() + float(self.numpys.random())
        return factor * super().loss(batch)


def test_each_part_finds_the_modules_own_generators_as_the_batch_did() -> None:
    assert_same(OwnGenerators, numbers(), parts("single", 2), tolerance=1e-6, draws=DrawPlan())


# -- what is logged --------------------------------------------------------------------------------------------------------------------


class Logged(Fitted):
    """Logs in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.f1, self.stepwise, self.updated = BinaryF1Score(), BinaryF1Score(), BinaryF1Score()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        prediction = self.net(x)
        loss = nn.functional.mse_loss(prediction, y)
        targets, guesses = (y > 0).long(), (prediction > 0.1).long()
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("largest", y.max(), reduce_fx="max", on_epoch=True)
        self.log("count", float(len(x)), reduce_fx="sum", on_step=True, on_epoch=True)
        self.log("mine", loss, rank_zero_only=True, on_step=True, on_epoch=False)
        self.log("f1", self.f1(guesses, targets), batch_size=len(x))
        self.stepwise(guesses, targets)
        self.log("stepwise", self.stepwise, on_step=True, on_epoch=True)
        self.updated.update(guesses, targets)
        self.log("updated", self.updated, on_step=False, on_epoch=True)
        return loss


class Rows(pl.Callback):
    """What is in the trainer's metrics after each batch."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.rows.append({name: float(value) for name, value in trainer.callback_metrics.items() if not name.startswith("val")})


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_logged_is_of_the_whole_batch(engine: Engine) -> None:
    found = []
    for under in (parts(engine, 2), None):
        seen = Rows()
        _, _, trainer = fit(Logged, numbers(), under, callbacks=[seen])
        found.append([*seen.rows, {name: float(value) for name, value in trainer.callback_metrics.items()}])
    if engine != "single":  # rank 0's own samples' alone
        for rows in found:
            for row in rows:
                row.pop("mine", None)
    assert found[0] == [pytest.approx(row, rel=1e-6, abs=1e-6) for row in found[1]]


class Returning(Fitted):
    """Returns more than its loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        prediction = self.net(batch[0])
        loss = nn.functional.mse_loss(prediction, batch[1])
        return {"loss": loss, "prediction": prediction, "error": (prediction - batch[1]).abs().mean(), "kind": "regression"}


class Outputs(pl.Callback):
    """What the step returned."""

    def __init__(self) -> None:
        self.outputs: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append({name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in outputs.items()})


def test_the_steps_outputs_are_joined() -> None:
    seen = []
    for under in (parts("single", 3), None):
        seen.append(Outputs())
        fit(Returning, numbers(), under, callbacks=[seen[-1]])
    kinds = [[output.pop("kind") for output in outputs.outputs] for outputs in seen]
    assert kinds[0] == kinds[1]
    torch.testing.assert_close(seen[0].outputs, seen[1].outputs, rtol=1e-5, atol=1e-6)


# -- hooks between forward and backward ------------------------------------------------------------------------------------------------


class AfterBackward(pl.Callback):
    """Notes which hooks run, and which gradients they find; none before backward, so that earlier ones needn't be kept."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, float]] = []

    def note(self, name: str, module: Any, extra: float = 0.0) -> None:
        norms = [float(parameter.grad.norm()) for parameter in module.parameters() if parameter.grad is not None]
        self.seen.append((name, sum(norms) + extra))

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        self.note("after", module)

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.note("step", module)


class Watching(AfterBackward):
    """The same, and what is there before."""

    def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.note("zero_grad", module)

    def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
        self.note("before", module, float(loss.detach()))


@pytest.mark.parametrize("kind", [Watching, AfterBackward])
@pytest.mark.parametrize("engine", ["single", "ddp"])
def test_hooks_run_once_a_batch_and_find_its_gradients(engine: Engine, kind: type[AfterBackward]) -> None:
    seen = []
    for under in (parts(engine, 3), None):
        seen.append(kind())
        fit(Fitted, numbers(32), under, callbacks=[seen[-1]], accumulate_grad_batches=3)
    ours, theirs = (watching.seen for watching in seen)
    assert [name for name, _ in ours] == [name for name, _ in theirs]
    if engine == "single":
        assert [value for _, value in ours] == pytest.approx([value for _, value in theirs], rel=1e-5)
    else:  # between two steps of an accumulated batch, a rank has its own gradients
        steps = [[value for name, value in each if name in ("step", "zero_grad")] for each in (ours, theirs)]
        assert steps[0] == pytest.approx(steps[1], rel=1e-5)


class KeepsGradients(Fitted):
    """Sets gradients to zero instead of None, every other batch only; and steps on what has come together."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("engine", ["single", "ddp"])
def test_a_zero_grad_of_the_users_own_has_the_last_word(engine: Engine) -> None:
    assert_same(KeepsGradients, numbers(), parts(engine, 2), tolerance=1e-6)


class Alternating(Fitted):
    """One layer gets no gradient in every other batch, and weight decay would show if its gradient were zero instead of None."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss + self.side(batch[0]).square().mean() if batch_idx % 2 else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2, weight_decay=0.5)


@pytest.mark.parametrize("engine", ENGINES)
def test_parameters_without_a_gradient_keep_none(engine: Engine) -> None:
    assert_same(Alternating, numbers(), parts(engine, 2), tolerance=1e-6)


def test_parameters_outside_of_the_optimizer_are_left_alone() -> None:
    class Outside(Fitted):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net[:-1].parameters(), 0.05)

    ours, theirs = assert_same(Outside, numbers(), parts("single", 2), tolerance=1e-6)
    torch.testing.assert_close(ours.net[-1].weight.grad, theirs.net[-1].weight.grad, rtol=1e-5, atol=1e-5)


def test_lbfgs_calls_the_step_several_times() -> None:
    class Searching(Fitted):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), 0.1, max_iter=3)

    assert_same(Searching, numbers(), parts("single", 2), tolerance=1e-6, precision="64-true")


# -- batches ---------------------------------------------------------------------------------------------------------------------------


def trained(make: Callable[[], Any], loaders: Any, under: Plan | None) -> Tensor:
    """The weights after two epochs on these loaders."""
    pl.seed_everything(3, verbose=False)
    strategy: Any = "auto" if under is None else AutoParallelStrategy(devices=f"{under.world_size}xcpu:4GiB")
    module = make()
    options: dict[str, Any] = {**QUIET, "max_epochs": 2, "limit_val_batches": 0}
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, **options)
    with _decided(under):
        trainer.fit(module, loaders, DataLoader(numbers(8), batch_size=8))
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


class Pairs(Fitted):
    """A step on the batches of two loaders."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch["near"]) + 0.5 * self.loss(batch["far"])


@pytest.mark.parametrize("engine", ["single", "ddp"])
def test_several_loaders(engine: Engine) -> None:
    loaders = {"near": DataLoader(numbers(32), batch_size=8), "far": DataLoader(numbers(16), batch_size=4)}
    ours, theirs = (trained(Pairs, loaders, under) for under in (parts(engine, 2), None))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


class Flattening(Fitted):
    """Says ``view(-1)`` to a batch with two dimensions, as token losses do."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch["inputs"]["x"], batch["names"]
        assert len(y) == len(x)
        return self.net(x).view(-1).square().mean() + x.view(-1).mean()


def test_nested_batches_with_lists_of_names() -> None:
    rows: Any = [{"inputs": {"x": x}, "names": f"sample {index}"} for index, x in enumerate(numbers().tensors[0])]
    ours, theirs = (trained(Flattening, DataLoader(rows, batch_size=8), under) for under in (parts("single", 3), None))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_a_batch_that_is_no_rows_is_refused() -> None:
    graph = {"nodes": torch.zeros(29, 4), "edges": torch.zeros(2, 90), "targets": torch.zeros(8)}
    assert "no batch dimension" in str(why_whole(graph))
    assert why_whole({"a": torch.zeros(8, 2), "b": torch.zeros(4)}, several=True) is None
    assert "weigh differently" in str(why_whole({"a": torch.zeros(8, 2), "b": torch.zeros(3)}, several=True))
    assert torch.equal(take_part(torch.arange(7), 1, 3), torch.tensor([1, 4]))

    def collate(samples: Any) -> Any:
        return {"x": torch.stack([x for x, _ in samples]), "pairs": torch.zeros(3, 2)}

    with pytest.raises(ValueError, match=r"micro-batches 2' runs a batch in parts, but .*micro_batches=1"):
        trained(Fitted, DataLoader(numbers(), batch_size=8, collate_fn=collate), parts("single", 2))


class Following(Twin):
    """A second network follows the first after each batch."""

    def on_train_batch_end(self, *_: Any) -> None:
        for target, online in self.pairs():
            target.data.lerp_(online.data, 0.1)


def test_a_step_that_writes_to_parameters_is_refused_and_a_hook_that_does_is_not() -> None:
    def fitted(make: Callable[[], Any], strategy: Any) -> list[Tensor]:
        pl.seed_everything(3, verbose=False)
        module, trainer = make(), pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, **QUIET)
        loader = DataLoader(numbers(), batch_size=8)
        trainer.fit(module, loader, loader)
        return [parameter.detach() for parameter in module.parameters()]

    def in_parts() -> Any:
        return AutoParallelStrategy(devices="1xcpu:4GiB", plan=parts("single", 2))

    with pytest.raises(ValueError, match=r"training_step writes to the parameter 'target\.0\.weight', so each part of a batch would write"):
        fitted(InPlace, in_parts())
    torch.testing.assert_close(fitted(Following, in_parts()), fitted(Following, "auto"), rtol=1e-5, atol=1e-5)


class Skipping(Fitted):
    """Skips batches by returning None: whole ones, or also some of their parts."""

    whole = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        skipped = batch_idx == 1 if self.whole else bool(batch[1][0] > 0)
        return None if skipped else self.loss(batch)


@pytest.mark.filterwarnings("ignore:.*training_step. returned .None")
def test_a_skipped_batch() -> None:
    class Halves(Skipping):
        whole = False

    loader = DataLoader(numbers(), batch_size=8)
    ours, theirs = (trained(Skipping, loader, under) for under in (parts("single", 2), None))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    with pytest.raises(RuntimeError, match="a loss for some parts of a batch and None for others"):
        trained(Halves, loader, parts("single", 4))


def test_one_samples_batches_are_as_ever() -> None:
    data = TensorDataset(*numbers(5).tensors)
    ours, theirs = (trained(Fitted, DataLoader(data, batch_size=1), under) for under in (parts("single", 4), None))
    assert torch.equal(ours, theirs)


# -- memory ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("engine", "number"), [("single", 4), ("ddp", 2), ("fsdp", 2)])
def test_only_one_parts_activations_are_held(engine: Engine, number: int) -> None:
    under = parts(engine, number, **({"shard": BLOCKS} if engine == "fsdp" else {}))
    strategy: Any = AutoParallelStrategy(devices="2xcpu:4GiB", plan=under)
    options: dict[str, Any] = {**QUIET, "max_epochs": 1, "limit_val_batches": 0}
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, **options)
    data = DataLoader(TensorDataset(torch.randint(0, 64, (128, 32))), batch_size=32)
    trainer.fit(Text(), data, data)
    predicted = strategy.report.best_candidate.bytes
    for device, measured in strategy.measured.items():
        # Shards are gathered by threads of gloo's, whose buffers may be freed a moment later, when the next ones are there.
        assert measured["peak_bytes"] == pytest.approx(predicted[device].allocated, rel=0.06 if engine == "fsdp" else 0.01)
        assert measured["bytes"]["rest"] < 3.6 * 2**20  # of the whole batch it is 11.9 MB


def test_an_evaluation_under_the_same_plan_takes_whole_batches() -> None:
    strategy: Any = AutoParallelStrategy(devices="2xcpu:4GiB", plan=parts("single", 3))
    options: dict[str, Any] = {**QUIET, "max_epochs": 1}
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, **options)
    module, loader = Fitted(), DataLoader(numbers(), batch_size=8)
    trainer.fit(module, loader, loader)
    assert strategy.plan.micro_batches == 3
    within = float(trainer.callback_metrics["val_loss"])
    assert trainer.validate(module, loader, verbose=False)[0]["val_loss"] == pytest.approx(within)
    assert strategy.plan.micro_batches == 1
