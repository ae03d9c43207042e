"""DeepSpeed's stages on real CPU ranks against plain Lightning on one device."""

from __future__ import annotations

import os
import signal
import traceback
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from lightning_autopar.plans import OFFLOADS, Plan
from lightning_autopar.strategies.auto import AutoParallelStrategy
from lightning_autopar.strategies.base.worker_exception import WorkerFailed
from tests.strategies.ddp.test_ddp import Hooked
from tests.strategies.fitted import QUIET, Fitted, assert_same, fit, numbers, plan
from tests.strategies.modules import Regression, loader, on_rank

pytest.importorskip("deepspeed")

STEPS: dict[str, Any] = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}


def zero(stage: int, ranks: int = 2, **more: Any) -> Plan:
    return plan("zero", zero_stage=stage, ranks=ranks, **more)


class Awkward(Fitted):
    """A parameter without dimensions, one that only some samples use, one used in some steps only, one never; a weight in two places.

    Groups with options of their own, one of them with nothing to be trained; a scheduler that goes on with each step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.rare, self.some, self.never = nn.Linear(8, 1), nn.Linear(8, 1), nn.Linear(3, 3)
        self.net[2][0].weight = self.net[1][0].weight
        self.frozen = nn.Linear(1, 1).requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        chosen = x[:, 0] > 1.2
        loss = mse_loss(self.frozen(self.net(x)) * self.scale, y)
        if chosen.any():
            loss = loss + self.rare(x[chosen]).square().sum() / len(x)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if batch_idx % 3 == 0:
            loss = loss + self.some(batch[0]).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "others": [loss.detach(), batch]}

    def configure_optimizers(self) -> Any:
        rest: list[Any] = [*self.net.parameters(), self.scale, *self.rare.parameters(), *self.some.parameters(), *self.never.parameters()]
        groups: list[dict[str, Any]] = [
            {"params": list(self.frozen.parameters())},
            {"params": rest[:3], "lr": 1e-2, "weight_decay": 0.5},
            {"params": rest[3:], "betas": (0.5, 0.9)},
        ]
        optimizer = torch.optim.AdamW(groups, lr=3e-2, weight_decay=0.3)
        rates = [lambda step: 1.0, lambda step: 0.9**step, lambda step: 1 / (step + 1)]
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rates)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _same_optimizers(ours: Any, theirs: Any, tolerance: float = 1e-5) -> None:
    mine, expected = ours.trainer.optimizers[0].state_dict(), theirs.trainer.optimizers[0].state_dict()
    torch.testing.assert_close(mine["state"], expected["state"], rtol=tolerance, atol=tolerance)
    assert mine["param_groups"] == expected["param_groups"]
    assert ours.trainer.global_step == theirs.trainer.global_step > 0


@pytest.mark.parametrize(
    ("under", "options"),
    [
        (zero(1), STEPS),
        (zero(2), STEPS),
        (zero(3), STEPS),
        (zero(2), {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
        (zero(2, offload=("optimizer",)), STEPS),
        (zero(3, 1, offload=OFFLOADS), STEPS),
        (zero(3, offload=OFFLOADS), STEPS),
    ],
    ids=lambda value: value.title() if isinstance(value, Plan) else "",
)
def test_training_is_plain_lightnings(under: Plan, options: dict[str, Any]) -> None:
    class Fair(Awkward):
        """At stage 3 all ranks have to run the same modules."""

        def loss(self, batch: Any) -> Tensor:
            x, y = batch
            return mse_loss(self.frozen(self.net(x)) * self.scale, y) + 0 * self.rare(x).sum()

    _same_optimizers(*assert_same(Fair if under.zero_stage == 3 else Awkward, numbers(), under, **options))


@pytest.mark.parametrize(
    ("under", "precision", "tolerance"),
    [
        (zero(2), "bf16-mixed", 2e-2),
        (zero(3, 1), "bf16-mixed", 1e-5),
        (zero(2, 1, offload=("optimizer",)), "bf16-true", 1e-5),
        (zero(3, 1), "bf16-true", 1e-5),
    ],
)
def test_precisions(under: Plan, precision: str, tolerance: float) -> None:
    assert_same(Awkward, numbers(), under, precision=precision, tolerance=tolerance)


@dataclass(slots=True)
class Packed:
    """What has no ``__dict__``."""

    rows: Tensor


class Packs(nn.Module):
    def forward(self, rows: Tensor) -> Packed:
        return Packed(rows)


class Counts(nn.Module):
    def forward(self, packed: Packed) -> int:
        return len(packed.rows)


class Unusual(Fitted):
    """Modules return an object with slots and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.packs, self.counts = Packs(), Counts()

    def loss(self, batch: Any) -> Tensor:
        packed = self.packs(batch[0])
        return (self.net(packed.rows) - batch[1]).square().sum() / self.counts(packed)


@pytest.mark.parametrize("stage", [2, 3])
def test_hooks_on_the_module_s_own_forward_are_called_by_that_alone(stage: int) -> None:
    assert_same(Hooked, numbers(), zero(stage))


def test_modules_may_return_what_has_no_attributes() -> None:
    _same_optimizers(*assert_same(Unusual, numbers(), zero(3), **STEPS))


class Meddling(Fitted):
    """Writes into parameters between two steps, past torch's count of that as well."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.data.clamp_(-0.2, 0.3)
            self.net[0].weight.mul_(0.9)

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.net[0].parameters(), "lr": 0.05}, {"params": self.net[1:].parameters()}]
        return torch.optim.Adagrad(groups, lr=0.01, initial_accumulator_value=0.1)


@pytest.mark.parametrize("offload", [(), ("optimizer",)])
def test_what_a_hook_writes_into_parameters_stays(offload: tuple[Any, ...]) -> None:
    assert_same(Meddling, numbers(), zero(2, offload=offload))


class Unlooking(Fitted):
    """Hooks that look at no gradients, but one does so in a later step, if it is asked to."""

    looks = False

    def on_after_backward(self) -> None:
        if self.looks and self.global_step == 2:
            self.log("gradient", self.net[0].weight.grad.norm())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("rate", optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("stage", [1, 3])
def test_hooks_that_look_at_no_gradients_are_called(stage: int) -> None:
    assert_same(Unlooking, numbers(), zero(stage), gradient_clip_val=0.1)


def test_a_hook_that_looks_at_gradients_in_a_later_step_ends_the_run_by_a_sentence() -> None:
    class Looking(Unlooking):
        looks = True

    with pytest.raises(ValueError, match=r"on_after_backward looks at the gradient of 'net\.0\.weight' in step 2, though"):
        fit(Looking, numbers(), zero(2))


class Exploding(Fitted):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) * (float("inf") if batch_idx == 2 else 1.0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net[3:].parameters(), 0.01)  # not all that is trained


@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.1}])
def test_gradients_that_are_not_finite_are_stepped_by(options: dict[str, Any]) -> None:
    ours, theirs = (fit(Exploding, numbers(), under, **options)[0] for under in (zero(3), None))
    assert not torch.isfinite(theirs.net[4].weight).any()
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()), equal_nan=True)


# -- planned, not only run ---------------------------------------------------------------------------------------------------------------


class Normed(Fitted):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(8), nn.Dropout(0.3)

    def loss(self, batch: Any) -> Tensor:
        return mse_loss(self.net(self.dropout(self.norm(batch[0]))), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), 1e-2)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def test_batch_norm_dropout_plateaus_and_early_stopping() -> None:
    found = []
    quiet: dict[str, Any] = {**STEPS, **QUIET}
    for strategy in (
        AutoParallelStrategy(plan=Plan(engine="zero", devices=("cpu:0", "cpu:1"), zero_stage=3), devices="2xcpu:2GiB"),
        "auto",
    ):
        pl.seed_everything(3, verbose=False)
        module, stopping = Normed(), EarlyStopping("val_loss", patience=3, min_delta=0.2)
        loaders = DataLoader(numbers(), batch_size=8, shuffle=True), DataLoader(numbers(), batch_size=8)
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            strategy=strategy,
            max_epochs=8,
            log_every_n_steps=1,
            callbacks=[stopping],
            val_check_interval=0.5,
            **quiet,
        )
        trainer.fit(module, *loaders)
        found.append((module, trainer, stopping))
    (ours, trainer, stopping), (theirs, expected, at) = found
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dict(trainer.callback_metrics), dict(expected.callback_metrics), rtol=1e-5, atol=1e-5)
    assert 0 < stopping.stopped_epoch == at.stopped_epoch
    assert trainer.optimizers[0].param_groups[0]["lr"] == expected.optimizers[0].param_groups[0]["lr"] < 1e-2
    _same_optimizers(ours, theirs)


# -- what goes wrong ---------------------------------------------------------------------------------------------------------------------


class Unwell(Exception):
    pass


def _unwell() -> None:
    raise Unwell("in the step")


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_in_a_step_ends_the_run(rank: int) -> None:
    with pytest.raises(Unwell) as raised:
        fit(lambda: Regression({"training_step": on_rank(rank, _unwell, batch_idx=1)}), numbers(), zero(3))
    assert traceback.extract_tb(raised.value.__traceback__)[-1].name == "_unwell"


def test_a_killed_worker_ends_the_run() -> None:
    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(WorkerFailed, match="rank 1 on cpu:1 ended without a word: killed by SIGKILL"):
        fit(lambda: Regression({"training_step": on_rank(1, die, batch_idx=1)}), numbers(), zero(3))


class Thawing(Fitted):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(True)


class Adding(Fitted):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(1, 1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), 0.1)

    def on_train_epoch_start(self) -> None:
        self.trainer.optimizers[0].add_param_group({"params": list(self.more.parameters())})


@pytest.mark.parametrize(("make", "words"), [(Thawing, "'net.0.weight' was frozen when the run began"), (Adding, "was given a group")])
def test_what_deepspeed_would_not_notice_is_an_error(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fit(make, numbers(), zero(1, 1))


def test_evaluation_alone() -> None:
    for stage in (2, 3):
        found = {}
        for under in (None, Plan(engine="zero", devices=("cpu:0", "cpu:1"), zero_stage=stage)):
            torch.manual_seed(0)
            strategy: Any = "auto" if under is None else AutoParallelStrategy(plan=under, devices="2xcpu:2GiB")
            trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, logger=False, enable_progress_bar=False)
            found[under] = trainer.test(Regression(), loader(), verbose=False)[0]["test_loss"]
        assert len(found) == 2
        assert len({round(value, 5) for value in found.values()}) == 1
