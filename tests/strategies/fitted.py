"""Run a LightningModule under plain Lightning and under a plan of ours, and compare what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_autopar.exact.random.whole_batch_draws import DrawPlan
from lightning_autopar.memory.learned.corrections import Corrections
from lightning_autopar.plans import Engine, Plan
from lightning_autopar.report.report import Candidate
from lightning_autopar.state.snapshot_folder import is_snapshot
from lightning_autopar.strategies import launcher
from lightning_autopar.strategies.auto import AutoParallelStrategy
from lightning_autopar.strategies.base.run_plan import RunPlan
from lightning_autopar.strategies.preparation.decision import Decision

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}


def mlp(width: int = 16) -> nn.Sequential:
    """Three equal blocks, ``1`` to ``3``, between two layers."""
    blocks = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(nn.Linear(8, width), *blocks, nn.Linear(width, 1))


BLOCKS = ("net.1", "net.2", "net.3")


class Fitted(pl.LightningModule):
    """A regression; subclasses change one thing."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.net: Any = mlp(width)

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([parameter for parameter in self.parameters() if parameter.requires_grad], 0.05)


def numbers(rows: int = 26) -> TensorDataset:
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, keepdim=True))


def tokens(rows: int = 26) -> TensorDataset:
    return TensorDataset(torch.randint(0, 17, (rows, 6), generator=torch.Generator().manual_seed(0)))


class _Losses(pl.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        metrics = trainer.callback_metrics
        self.losses += [float(metrics[name]) for name in ("loss_step", "loss") if name in metrics][:1]


def fit(
    make: Callable[[], Any],
    data: Any,
    plan: Plan | None,
    *,
    draws: DrawPlan | None = None,
    large: bool = False,
    undivided: str | None = "not asked",
    kept_rules: Any = None,
    findings: Any = None,
    resume: Path | None = None,
    **options: Any,
) -> Any:
    """Train a module that ``make`` builds; under plain Lightning where there is no plan. Returns module, losses and trainer."""
    pl.seed_everything(3, verbose=False)
    module, losses = make(), _Losses()
    strategy: Any = "auto" if plan is None else AutoParallelStrategy(devices=f"{plan.world_size}xcpu:4GiB")
    callbacks = [losses, *options.pop("callbacks", ())]
    trainer = pl.Trainer(
        **{"accelerator": "cpu", "devices": 1, "strategy": strategy, "max_epochs": 2, "log_every_n_steps": 1, **QUIET, **options},
        callbacks=callbacks,
    )
    loaders = DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=8)
    found = {"draws": draws, "kept_rules": kept_rules or {}, "findings": findings or {}}
    with _decided(plan, large=large, undivided=undivided, from_snapshot=is_snapshot(resume), **found):
        trainer.fit(module, *loaders, ckpt_path=resume)
    return module, losses.losses, trainer


@contextmanager
def _decided(plan: Plan | None, **assigned: Any) -> Iterator[None]:
    """While open, this plan is what planning comes to, without planning."""

    def decided(bound: Any) -> Decision:
        assert plan is not None
        footprint = SimpleNamespace(parameter_bytes=0, optimizer_bytes=0, lengths=None)
        report: Any = SimpleNamespace(footprint=footprint, best_candidate=Candidate(plan=plan, fits=True), residuals=Corrections())
        return Decision(
            report=report,
            run_plan=RunPlan(plan=plan, devices=tuple(found for found in bound[0].devices if found.id in plan.devices), **assigned),
        )

    def find_prospect(trainer: Any, settings: Any, bound: Any, **_: Any) -> Any:
        return SimpleNamespace(decision=lambda inventory=None: decided(bound))

    with mock.patch.object(launcher, "find_prospect", find_prospect):
        yield


def plan(
    engine: Engine, *, ranks: int = 2, reshard: bool = True, shard: Sequence[str] = (), recompute: Sequence[str] = (), **more: Any
) -> Plan:
    devices = tuple(f"cpu:{rank}" for rank in range(ranks))
    if engine == "fsdp":
        return Plan(engine=engine, devices=devices, reshard_after_forward=reshard, shard=tuple(shard), recompute=tuple(recompute), **more)
    return Plan(engine=engine, devices=devices, recompute=tuple(recompute), **more)


def assert_same(make: Callable[[], Any], data: Any, under: Plan, *, tolerance: float = 1e-5, large: bool = False, **options: Any) -> Any:
    """Losses, metrics and weights under the plan are plain Lightning's. Returns both modules."""
    ours, our_losses, our_trainer = fit(make, data, under, large=large, **options)
    theirs, their_losses, their_trainer = fit(make, data, None, **options)
    assert len(our_losses) == len(their_losses) > 0
    torch.testing.assert_close(our_losses, their_losses, rtol=tolerance, atol=tolerance)
    metrics = {name: value.float() for name, value in their_trainer.callback_metrics.items()}
    torch.testing.assert_close(
        {name: value.float() for name, value in our_trainer.callback_metrics.items()}, metrics, rtol=tolerance, atol=tolerance
    )
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()), rtol=tolerance, atol=tolerance)
    return ours, theirs
