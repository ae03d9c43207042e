"""PlanMonitor: at the end of a training run what was predicted beside what was measured, shown and logged."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_autopar.planning.comparison import Comparison, compare, metrics, table, warnings
from lightning_autopar.strategies.engine import EngineMixin


class PlanMonitor(Callback):
    """Shows and logs predicted against measured memory by category, and seconds a step, for each device, when a training run ends.

    It warns where a device took more than the plan had allowed for. The figures go to all of the trainer's loggers as
    ``autopar/rank0/measured_bytes/parameters`` and so on; the plan is logged with the hyperparameters. After the run ``comparisons`` holds
    them, one for each rank. Under another strategy than autopar it does nothing but say so.
    """

    def __init__(self) -> None:
        self.comparisons: tuple[Comparison, ...] = ()
        self._said = False

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the plan."""
        engine: Any = trainer.strategy
        if not isinstance(engine, EngineMixin) or engine.assignment.candidate is None:
            if not self._said:
                rank_zero_info(
                    f"PlanMonitor: there is no plan to watch, as the strategy is {type(engine).__name__}; use Trainer(strategy='autopar')"
                )
            self._said = True
            return
        plan = engine.assignment.plan
        if trainer.is_global_zero:
            for logger in _loggers(trainer):
                logger.log_hyperparams({"autopar/plan": plan.title(), "autopar/engine": plan.engine, "autopar/world_size": plan.world_size})

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare, on rank 0; every rank calls it, with its own figures."""
        engine: Any = trainer.strategy
        if not isinstance(engine, EngineMixin):
            return
        assignment, candidate = engine.assignment, engine.assignment.candidate
        if candidate is None:
            return
        engine.meter.finish(engine)
        measured = [engine.meter.measured.to_dict()]
        if assignment.plan.world_size > 1:
            measured *= assignment.plan.world_size
            dist.all_gather_object(measured, measured[0])
        if not trainer.is_global_zero:
            return
        self.comparisons = compare(candidate, dict(zip(assignment.plan.devices, measured, strict=True)))
        rank_zero_info(table(self.comparisons, f"autopar: plan {assignment.plan.title()}, predicted and measured"))
        for words in warnings(candidate, assignment.budgets, self.comparisons):
            rank_zero_warn(f"autopar: {words}")
        for logger in _loggers(trainer):
            logger.log_metrics(metrics(self.comparisons), step=trainer.global_step)


def _loggers(trainer: pl.Trainer) -> list[Logger]:
    loggers: list[Logger] = trainer.loggers
    return loggers
