"""PlanMonitor shows predicted and measured figures at the end of a run, and logs predictions and changes of plan as numbers."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from lightning_autopar._lightning import Callback, CSVLogger, Logger, TensorBoardLogger, pl, rank_zero_info, rank_zero_warn
from lightning_autopar.report.predicted_and_measured import Comparison, compare, metrics, table, warnings
from lightning_autopar.strategies.base.engine_mixin import EngineMixin
from lightning_autopar.strategies.base.run_plan import Arrival, PlanChanges


class PlanMonitor(Callback):
    """Shows and logs predicted against measured memory by category, and seconds a step, for each device, when a training run ends.

    It warns where a device took more than the plan had allowed for. The figures go to all of the trainer's loggers as
    ``autopar/rank0/measured_bytes/parameters`` and so on. At the first step of each plan they get ``autopar/world_size``,
    ``autopar/predicted_step_seconds`` and ``autopar/predicted_peak_bytes``, and if an elastic run has changed its plan
    ``autopar/plan_changes``, ``autopar/pause_seconds``, and the change in words: in TensorBoard as a text, elsewhere as the hyperparameter
    ``autopar/change_1`` and so on. (The first plan is among the hyperparameters also without this callback.) After the run ``comparisons``
    holds the figures, one for each rank. Under another strategy than autopar it only warns.
    """

    def __init__(self) -> None:
        self.comparisons: tuple[Comparison, ...] = ()
        self._said = False
        #: The run's folder and how many changes of plan were logged so far. In a later plan's workers, as in the snapshot.
        self._logged: tuple[str, int] | None = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Warn if there is no plan, once a run: workers of later plans go on with this object's state."""
        self._logged = None
        if not isinstance(trainer.strategy, EngineMixin) or trainer.strategy.run_plan.candidate is None:
            if not self._said:
                name = type(trainer.strategy).__name__
                rank_zero_info(f"PlanMonitor: there is no plan to watch, as the strategy is {name}; use Trainer(strategy='autopar')")
            self._said = True

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        """At the first batch of each plan: log what is predicted, and how the run came to it."""
        engine: Any = trainer.strategy
        if not isinstance(engine, EngineMixin):
            return
        changes, before = engine.plan_changes, self._logged
        self._logged = str(changes.folder), len(changes.changes)
        if self._logged == before or not trainer.is_global_zero:
            return
        logged = before[1] if before is not None and before[0] == self._logged[0] else 0
        now = {"autopar/world_size": float(engine.run_plan.plan.world_size), **engine.run_plan.predictions}
        latest = changes.arrive(trainer.global_step) if changes.changes else None
        for logger in _loggers(trainer):
            # A CSV file was cut back to the snapshot from which this plan goes on: later values are logged anew.
            again = isinstance(logger, CSVLogger) and latest is not None
            arrivals = changes.arrivals().values() if again else [] if latest is None else [latest]
            for arrival in (each for each in arrivals if each.number > logged):
                _log_change(logger, changes, arrival)
            logger.log_metrics(now, step=trainer.global_step)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare, on rank 0; every rank calls it, with its own figures."""
        engine: Any = trainer.strategy
        if not isinstance(engine, EngineMixin):
            return
        run_plan, candidate = engine.run_plan, engine.run_plan.candidate
        if candidate is None:
            return
        engine.meter.finish(engine)
        measured = [engine.meter.measured.to_dict()]
        if run_plan.plan.world_size > 1:
            measured *= run_plan.plan.world_size
            dist.all_gather_object(measured, measured[0])
        if not trainer.is_global_zero:
            return
        self.comparisons = compare(candidate, dict(zip(run_plan.plan.devices, measured, strict=True)))
        rank_zero_info(table(self.comparisons, f"autopar: plan {run_plan.plan.title()}, predicted and measured"))
        for words in warnings(candidate, run_plan.budgets, self.comparisons):
            rank_zero_warn(f"autopar: {words}")
        for logger in _loggers(trainer):
            logger.log_metrics(metrics(self.comparisons), step=trainer.global_step)


def _log_change(logger: Logger, changes: PlanChanges, arrival: Arrival) -> None:
    """Log a change of plan, at the step at which it was over."""
    figures = {"autopar/plan_changes": float(arrival.number)}
    if arrival.pause_seconds is not None:
        figures["autopar/pause_seconds"] = arrival.pause_seconds
    logger.log_metrics(figures, step=arrival.step)
    words = changes.words(arrival)
    if isinstance(logger, TensorBoardLogger):  # it shows a run's first hyperparameters only
        logger.experiment.add_text("autopar/changes", words, arrival.step)
    else:
        logger.log_hyperparams({f"autopar/change_{arrival.number}": words})


def _loggers(trainer: pl.Trainer) -> list[Logger]:
    loggers: list[Logger] = trainer.loggers
    return loggers
