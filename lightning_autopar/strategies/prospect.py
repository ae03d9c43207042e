"""What was found out about one call of the trainer, from which the best plan follows for whatever devices there are.

Reads the trainer where a plan is tried, and changes nothing in it; doesn't know how a plan is executed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from lightning_autopar.memory.inventory import Inventory
from lightning_autopar.memory.reservation import Need
from lightning_autopar.planning.changes import usable
from lightning_autopar.planning.planner import best_candidate
from lightning_autopar.strategies.assignment import Assignment, BatchRule
from lightning_autopar.strategies.confirm import after_trial
from lightning_autopar.strategies.decision import Decision, Look, need_of
from lightning_autopar.strategies.logrules import Comparison

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

#: From this size on, a module is built whole on rank 0 alone.
_LARGE_BYTES = 1024**3


class Prospect:
    """What was found out about one call of the trainer, before any plan is chosen. It holds whatever devices there are.

    Args:
        trainer: with module and data attached.
        look: what was found out.
        batch: what a batch is to several devices.
        from_snapshot: see :class:`.assignment.Assignment`.
        weights_only: see there.
        elastic: see :func:`.decide.consider`.
    """

    def __init__(
        self, trainer: Trainer, look: Look, *, batch: BatchRule, from_snapshot: bool, weights_only: bool | None, elastic: bool
    ) -> None:
        self._trainer, self._look, self._batch = trainer, look, batch
        self._from_snapshot, self._weights_only, self._elastic = from_snapshot, weights_only, elastic
        self._tried: set[tuple[object, ...]] = set()

    def decision(self, inventory: Inventory | None = None) -> Decision:
        """The best plan for these devices, by default those that there were at first.

        Raises:
            NothingFits: if no plan fits.
            ValueError: if the pinned plan can't be run on these devices.
        """
        if inventory is not None:
            self._look = replace(self._look, inventory=usable(inventory))
        while not self._has_stood():
            pass
        look, report, findings = self._look, self._look.report, self._look.findings
        plan = report.best
        assert plan is not None, "make_report raises where nothing fits"
        return Decision(
            report=report,
            look=look,
            batches=findings.batches,
            memory_margin=look.constraints.memory_margin,
            assignment=Assignment(
                plan=plan,
                devices=tuple(look.inventory.device(device) for device in plan.devices),
                batch=self._batch,
                draws=findings.draws,
                data_draws=findings.data_draws,
                loadings=findings.loadings,
                log_rules={} if findings.split is None else Comparison(matching=findings.split.log_rules).rules,
                kept_rules={} if findings.split is None else findings.split.kept_rules,
                from_snapshot=self._from_snapshot,
                weights_only=self._weights_only,
                large=findings.footprint.parameter_bytes >= _LARGE_BYTES,
                candidate=report.best_candidate,
                budgets=report.budgets,
                staging=None if findings.staging is None else findings.staging.staging,
                elastic=self._elastic,
            ),
        )

    def _has_stood(self) -> bool:
        """Whether the best plan has stood its trial; what fails it is ruled out for good.

        Raises:
            NothingFits: if no plan fits.
        """
        plan = self._look.report.best
        assert plan is not None, "make_report raises where nothing fits"
        what = (plan.engine, plan.zero_stage, plan.offload, plan.world_size == 1, plan.cuts)
        if what in self._tried:
            return True
        self._tried.add(what)
        constraints = after_trial(self._trainer, self._look, plan)
        if constraints == self._look.constraints:
            return True
        self._look = replace(self._look, constraints=constraints)
        return False

    def need(self, inventory: Inventory) -> Need | None:
        """What the best plan for these devices takes, by prediction alone; None where nothing fits, or a pinned plan's device is gone."""
        look = replace(self._look, inventory=usable(inventory))
        pinned, there = look.constraints.pinned, {device.id for device in look.inventory.devices}
        if pinned is not None and not there.issuperset(pinned.devices):
            return None
        found = best_candidate(look.findings.footprint, look.inventory, look.constraints, rates=look.rates)
        return None if found is None else need_of(found, look.findings.batches, self._batch, look.constraints.memory_margin)
