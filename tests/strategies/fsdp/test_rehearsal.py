"""What FSDP2 can't run, or would run wrong, is a sentence before any worker starts."""

from __future__ import annotations

import copy
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from lightning_autopar._fork import run_forked
from lightning_autopar.engines import PASSED, Check, FirstStep
from lightning_autopar.memory.trace.first_batch import FirstBatch
from lightning_autopar.memory.trace.trace import trace
from lightning_autopar.planning.block_units import shardable
from lightning_autopar.plans import Plan
from lightning_autopar.strategies.fsdp.rehearsal import held, rehearse_fsdp, unshardable, why_unsharded
from lightning_autopar.strategies.trials import engine_rehearsal as rehearse
from lightning_autopar.strategies.zero.rehearsal import rehearse_zero
from tests.strategies.fitted import BLOCKS, Fitted, numbers
from tests.strategies.fsdp.test_fsdp import Averaging, LeftOut, Outside, Probed, ProbedByHand
from tests.strategies.written import Averaged, Exchanging, FollowedByHook, Held, InPlace, Normed, Penalised, Sharing, Tying

TWINS = (*BLOCKS, *(name.replace("net", "target") for name in BLOCKS))


class Twice(Fitted):
    """Wraps a parameter in another one, as Bayesian layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(self.net[0].weight)


class Manifold(Fitted):
    """Its optimizer treats parameters of a class in another way, as that of geoopt does."""

    class Parameter(nn.Parameter):
        pass

    def __init__(self) -> None:
        super().__init__()
        self.net[0].weight = self.Parameter(self.net[0].weight.detach())

    def configure_optimizers(self) -> Any:
        rates = [{"params": [each], "lr": 0.5 if isinstance(each, self.Parameter) else 0.01} for each in self.parameters()]
        return torch.optim.SGD(rates)


class Sparse(Fitted):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(17, 8, sparse=True)


class Mixed(Fitted):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))


class Late(Fitted):
    def __init__(self) -> None:
        super().__init__()
        self.net[1][0] = nn.LazyLinear(16)


class Regularised(Fitted):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.1 * self.net[2][0].weight.pow(2).sum()


class Rescaling(Fitted):
    """Changes a whole parameter in its step."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            self.scale.data.mul_(0.5)
        return mse_loss(self.net(batch[0]) * self.scale.sum(), batch[1])


class Crashing(Fitted):
    def on_train_batch_end(self, *_: Any) -> None:
        torch.stack([torch.ones(16, 16), self.net[1][0].weight])


class ByRows(torch.optim.SGD):
    """Keeps a plain tensor for each parameter, as Adafactor written by hand does."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                mean = self.state[parameter].setdefault("mean", torch.zeros(parameter.shape[0]))
                mean.add_(parameter.grad.pow(2).flatten(1).mean(1) if parameter.dim() > 1 else parameter.grad.pow(2))
        return loss


class Transposed(Fitted):
    """A weight whose elements lie in another order in memory, as those of a model in channels_last do."""

    def __init__(self) -> None:
        super().__init__()
        weight = self.net[1][0].weight
        weight.data = weight.data.t().contiguous().t()


class Hiding(nn.Sequential):
    """Has ``named_parameters`` of its own, with the arguments that torch's had at first, as torchrl's losses do."""

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Any:  # type: ignore[override]
        return super().named_parameters(prefix, recurse)


class Nested(Fitted):
    def __init__(self) -> None:
        super().__init__()
        self.net = Hiding(*self.net)


class Rowwise(Fitted):
    def configure_optimizers(self) -> Any:
        return ByRows(self.parameters(), 0.1)


def _first() -> FirstBatch:
    return FirstBatch(batch=next(iter(DataLoader(numbers(), batch_size=8))), batch_size=8)


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (Twice, "the parameters 'mean' and 'net.0.weight' share their memory, and FSDP2 shards each by itself"),
        (Manifold, "the parameter 'net.0.weight' is a Parameter, and the shards that FSDP2 puts in its place aren't"),
        (Late, "'net.1.0.weight' gets its shape in the first step, and FSDP2 shards it before"),
        (Sparse, "'table' has sparse gradients"),
        (Mixed, "several dtypes"),
        (Regularised, "uses a block's parameters outside of the block's forward"),
        (Tying, "the step has replaced the parameter 'weight' of Linear, which FSDP2 holds in shards, by another one; write to"),
        (Sharing, "the step has made the parameter 'weight' share another one's memory"),
        (Held, "'both' holds the parameter 'target.0.weight' itself, in the place of which FSDP2 puts shards"),
        (Rowwise, "the optimizer ByRows computes with tensors of its own together with parameters or gradients"),
        (Outside, "the optimizer SGD steps a parameter of shape [1, 8] that isn't in the module"),
        (LeftOut, "configure_model has sharded a module around 'net.late' without it"),
        (Crashing, "on_train_batch_end was left out, as it failed"),
    ],
)
def test_the_cause_is_named(make: Any, cause: str) -> None:
    sentence = rehearse_fsdp(make(), None, _first(), BLOCKS).refusal
    assert sentence is not None
    assert cause in sentence


def test_what_runs_is_not_refused_and_stays_as_it_was() -> None:
    module = Fitted()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    assert rehearse_fsdp(module, None, _first(), BLOCKS) == PASSED
    torch.testing.assert_close(dict(module.state_dict()), before, rtol=0, atol=0)
    assert type(module) is Fitted


@pytest.mark.parametrize(
    ("make", "units"),
    [
        (Rescaling, BLOCKS),
        (Exchanging, TWINS),
        (Normed, BLOCKS),
        (Regularised, ()),
        (Averaging, BLOCKS),
        (Transposed, BLOCKS),
        (Nested, BLOCKS),
        (Probed, ()),
        (ProbedByHand, ()),
    ],
)
def test_the_step_has_the_same_effect_on_shards(make: Any, units: tuple[str, ...]) -> None:
    assert rehearse_fsdp(make(), None, _first(), units) == PASSED


def test_dropout_draws_the_same_on_shards() -> None:
    class Dropping(Fitted):
        def loss(self, batch: Any) -> Tensor:
            return mse_loss(nn.functional.dropout(self.net(batch[0]), 0.5), batch[1])

    assert rehearse_fsdp(Dropping(), None, _first(), BLOCKS) == PASSED


def test_a_step_that_fails_anyway_says_nothing_about_shards_and_doesnt_pass() -> None:
    class Broken(Fitted):
        def loss(self, batch: Any) -> Tensor:
            raise ValueError("broken")

    check = rehearse_fsdp(Broken(), None, _first(), BLOCKS)
    assert check.outcome == "not made"
    assert check.refusal is not None
    words = "couldn't be checked, as the step fails on the CPU with whole parameters, too (ValueError: broken, at test_rehearsal.py:"
    assert words in check.refusal


def test_a_loader_that_calls_the_module_is_refused() -> None:
    trainer: Any = SimpleNamespace(lightning_module=Fitted())
    told: Any = {"trainer": trainer, "stage": "fit", "validation": lambda: None, "footprint": None}
    assert why_unsharded(FirstStep(batch=_first(), **told), None) is None
    refusal = why_unsharded(FirstStep(batch=replace(_first(), calls="net"), **told), None)
    assert refusal == "the loader calls 'net' to make a batch, and FSDP2 has whole parameters within steps only"
    loader = DataLoader(TensorDataset(torch.ones(2)), collate_fn=lambda rows: trainer.lightning_module.net(rows[0]))
    refusal = why_unsharded(FirstStep(batch=replace(_first(), loaders=(loader,)), **told), None)
    assert refusal == "the loader may call 'net' to make a batch, and FSDP2 has whole parameters within steps only"


def test_a_step_that_copies_its_network_is_refused_by_its_line() -> None:
    class Copying(Fitted):
        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch) + 0.0 * sum(weight.sum() for weight in copy.deepcopy(self.net).parameters())

    line = Copying.loss.__code__.co_firstlineno + 1
    refusal = rehearse_fsdp(Copying(), None, _first(), BLOCKS).refusal
    assert refusal is not None
    assert f"the step copies a module (copy.deepcopy, at test_rehearsal.py:{line}), and FSDP2 can't copy one" in refusal


def test_a_step_that_takes_too_long_doesnt_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Fitted):
        def loss(self, batch: Any) -> Tensor:
            time.sleep(60)
            return super().loss(batch)

    monkeypatch.setattr(rehearse, "TIMEOUT_SECONDS", 2.0)
    check = rehearse_fsdp(Slow(), None, _first(), BLOCKS)
    assert check.outcome == "not made"
    assert "it takes more than 2 s" in (check.refusal or "")


def test_a_process_in_a_group_rehearses_nothing(tmp_path: Path) -> None:
    def in_group() -> Check:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
        return rehearse_fsdp(Fitted(), None, _first(), BLOCKS)

    assert "is in a process group already" in (run_forked(in_group, timeout_seconds=60).refusal or "")


def large(make: Any, units: Any = None, **plan: Any) -> str | None:
    """What a module is refused for that is too large to be rehearsed, as the whole of planning would."""
    module = make()
    footprint = trace(module, None, _first())
    if plan:
        return rehearse_zero(module, None, _first(), Plan(engine="zero", devices=("a", "b"), **plan), conduct=footprint.conduct).refusal
    return rehearse_fsdp(
        module, None, _first(), shardable(footprint, None)[0] if units is None else units, conduct=footprint.conduct
    ).refusal


@pytest.mark.parametrize("make", [Fitted, Rescaling, Regularised, Exchanging, InPlace, Normed, Averaged, Penalised])
def test_what_is_too_large_to_rehearse_is_passed_by_its_trace(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearse, "PARAMETER_BYTES", 0)
    assert large(make) is None
    assert large(make, zero_stage=3) is None


@pytest.mark.parametrize(
    ("make", "fsdp", "zero"),
    [
        (Tying, "replaces the parameter 'other.weight', which FSDP2", "the parameter 'other.weight', which ZeRO-3"),
        (
            Sharing,
            "makes the parameter 'other.weight' share another one's memory",
            "makes the parameter 'other.weight' share another one's memory",
        ),
        (FollowedByHook, "on_train_batch_end uses the parameter 'net.0.weight' together with tensors that aren't parameters", None),
        (Held, "'both' holds the parameter 'target.0.weight' itself", None),
    ],
)
def test_what_is_too_large_to_rehearse_is_refused_by_its_trace(
    make: Any, fsdp: str, zero: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearse, "PARAMETER_BYTES", 0)
    assert fsdp in (large(make) or "")
    refusal = large(make, zero_stage=3)
    assert refusal is None if zero is None else zero in (refusal or "")


def test_a_long_step_that_could_not_be_traced_either_does_not_pass() -> None:
    check = rehearse_fsdp(Fitted(), None, _first(), BLOCKS, flops=10**15)
    assert check.outcome == "not made"
    assert "too long to try on the CPU, and it couldn't be traced either" in (check.refusal or "")


def test_a_recurrent_layers_own_list_of_its_parameters_is_no_reason() -> None:
    class Recurrent(Fitted):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent = nn.LSTM(4, 4)

    assert held(Recurrent()) is None


@pytest.mark.parametrize(("crashes", "passes"), [(1, True), (2, False)])
def test_a_child_that_crashes_is_tried_once_more(crashes: int, passes: bool) -> None:
    crashed = torch.zeros((), dtype=torch.int64).share_memory_()  # a trial's files aren't written

    class Aborted(Fitted):
        """The rank that judges dies in its first sharded step, so often."""

        def loss(self, batch: Any) -> Tensor:
            if dist.group.WORLD is not None and dist.get_rank() == 0 and crashed < crashes:
                crashed.add_(1)
                os.kill(os.getpid(), signal.SIGABRT)
            return super().loss(batch)

    sentence = rehearse_fsdp(Aborted(), None, _first(), BLOCKS).refusal
    assert sentence is None if passes else "SIGABRT" in (sentence or "")


def test_nothing_is_run_for_rounding_where_nothing_differs() -> None:
    waiting = rehearse._Swinging(rehearse.Run(losses=(), weights={}, notes=()), Fitted(), None, lambda: 1 / 0)
    assert not waiting.found(wanted=False)
    assert waiting.swings == rehearse.Swings()
    failing = rehearse._Swinging(rehearse.Run(losses=(), weights={}, notes=()), Fitted(), None, lambda: 1 / 0)
    assert failing.found(wanted=True)
    assert failing.swings == rehearse.Swings(), "steps that fail give no tolerance"


def test_unshardable_passes_an_ordinary_module_and_a_frozen_table() -> None:
    frozen = Sparse()
    frozen.table.requires_grad_(False)
    assert unshardable(Fitted()) is None
    assert unshardable(frozen) is None, "it has no gradients, sparse or not"


class Shifted(Fitted):
    """Adds to all logits what softmax takes out again: the gradient is rounding, and Adam makes a whole step of it."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1))
        self.wide = nn.Linear(1, 7)

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + (self.wide(self.net(batch[0])) + self.shift).softmax(-1).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.05, eps=1e-16)


def test_weights_that_go_by_rounding_are_told_from_those_that_do_not() -> None:
    torch.manual_seed(0)
    module, batch = Shifted(), lambda: (torch.randn(8, 8, generator=torch.Generator().manual_seed(1)), torch.ones(8, 1))
    plain = rehearse._plain_steps(copy.deepcopy(module), None, batch)
    waiting = rehearse._Swinging(plain, module, None, batch)
    assert waiting.found(wanted=True)
    swings = waiting.swings
    assert swings.weights["shift"] > 0.05
    assert max(swing for name, swing in swings.weights.items() if name != "shift") < 1e-4
    engine: Any = rehearse.Engine(steps=lambda *_: plain, where="here", lost="lost", sentence=str, traced=lambda _: None)
    for name, change in (("shift", 0.05), ("wide.weight", 0.001)):
        ours = replace(plain, weights={**plain.weights, name: plain.weights[name] + change})
        assert "has other values" in (rehearse._difference(plain, ours, engine, rehearse.Swings()) or "")
        assert (rehearse._difference(plain, ours, engine, swings) is None) == (name == "shift")


def test_a_single_weight_of_many_may_go_by_rounding_where_others_do() -> None:
    """Nudged parameters needn't show it: one entry of a large tensor has a gradient that is only rounding."""
    plain = rehearse.Run(losses=(), weights={"large": torch.zeros(200, 100), "bias": torch.zeros(4)}, notes=())
    swings = rehearse.Swings(weights={"large": 1e-6, "bias": 2e-4})
    engine: Any = rehearse.Engine(steps=lambda *_: plain, where="here", lost="lost", sentence=str, traced=lambda _: None)
    for entries, change, passes in ((2, 1e-4, True), (3, 1e-4, False), (1, 3e-4, False), (1, float("nan"), False)):
        weight = torch.zeros(200, 100)
        weight.view(-1)[:entries] = change
        ours = replace(plain, weights={**plain.weights, "large": weight})
        assert (rehearse._difference(plain, ours, engine, swings) is None) == passes


class Speech(pl.LightningModule):
    """Wav2Vec2, of whose layers each step skips some at random."""

    def __init__(self, layerdrop: float = 0.5) -> None:
        super().__init__()
        config = transformers.Wav2Vec2Config(
            hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16, num_feat_extract_layers=1, conv_dim=(8,),
            conv_stride=(4,), conv_kernel=(8,), num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, mask_time_prob=0.0,
            layerdrop=layerdrop,
        )  # fmt: skip
        self.model = transformers.Wav2Vec2ForSequenceClassification(config)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Its own loss."""
        loss: Tensor = self.model(input_values=batch, labels=torch.zeros(len(batch), dtype=torch.long)).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Without moments, so that rounding stays small."""
        return torch.optim.SGD(self.parameters(), 0.1)


class Otherwise(Speech):
    """Draws once more where its parameters are shards."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """After that draw."""
        if isinstance(self.model, FSDPModule):
            torch.rand(())
        return super().training_step(batch, batch_idx)


def test_layers_that_are_skipped_at_random_draw_as_on_one_device() -> None:
    first = FirstBatch(batch=torch.randn(4, 100, generator=torch.Generator().manual_seed(0)), batch_size=4)
    torch.manual_seed(0)
    assert rehearse_fsdp(Speech(), None, first, ["model"]).outcome == "passed"
    assert rehearse_fsdp(Otherwise(), None, first, ["model"]).reason.endswith(": the step draws other random numbers there")
