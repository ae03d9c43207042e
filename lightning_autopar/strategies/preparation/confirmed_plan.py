"""All that was found out about one call of the trainer. It gives the best plan for any set of devices, confirmed before it is taken.

What tracing didn't try is tried in a forked child. It reads the trainer and changes nothing in it; it knows neither the other plans nor how
a plan is executed.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from lightning_autopar import engines
from lightning_autopar._clean_process import CannotTravel, run_clean
from lightning_autopar._fork import ChildFailed
from lightning_autopar._lightning import Trainer
from lightning_autopar.constraints import Constraints
from lightning_autopar.devices.inventory import Inventory, usable
from lightning_autopar.engines import Check, Finding, FirstStep, not_made
from lightning_autopar.exact.logs.log_rules import LogComparison
from lightning_autopar.memory.cuda_overhead import target_of
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.planning.make_report import best_candidate
from lightning_autopar.plans import Engine, Plan
from lightning_autopar.report.report import NothingFits
from lightning_autopar.sharing.queue_order import Need
from lightning_autopar.strategies.base.run_plan import BatchRule, RunPlan
from lightning_autopar.strategies.preparation.decision import Decision, PlanningInputs, need_of
from lightning_autopar.strategies.preparation.module_findings import loaded_anew, look_later, stage_of
from lightning_autopar.strategies.preparation.plain_run import failure_of_step
from lightning_autopar.strategies.trials.engine_rehearsal import STEPS

log = logging.getLogger(__name__)

#: How long the trial of a plan's stages may take.
_CONFIRM_SECONDS = 180.0


def after_look(trainer: Trainer, look: PlanningInputs, name: Engine) -> PlanningInputs:
    """The inputs, with what an engine finds that hasn't looked at the step yet."""
    assert look.questions is not None, "an engine was left for later"
    finding = look_later(trainer, replace(look.questions, engines=(name,)), look.findings)[name]
    findings, constraints = look.findings, look.constraints
    later = tuple(each for each in findings.later if each != name)
    findings = replace(findings, engines={**findings.engines, name: finding}, later=later)
    excluded = {each: words for each, words in finding.refusals.items() if words is not None} | dict(constraints.excluded)
    uncuttable = {**constraints.uncuttable, **finding.uncuttable}
    notes = {each: told for each, told in {**constraints.notes, name: finding.notes}.items() if told}
    return replace(look, findings=findings, constraints=replace(constraints, excluded=excluded, uncuttable=uncuttable, notes=notes))


def after_trial(trainer: Trainer, look: PlanningInputs, plan: Plan) -> Constraints:
    """The constraints, with what a trial of the plan found out; it tries only what planning hasn't tried."""
    constraints, footprint, engine = look.constraints, look.findings.footprint, engines.of(plan)
    finding = look.findings.engines.get(plan.engine, Finding())
    if not engine.untried(plan, footprint, finding):
        return constraints
    check = rehearse(trainer, footprint, plan, finding)
    if check.refusal is not None:
        return replace(constraints, excluded={**constraints.excluded, **dict.fromkeys(engine.ruled_out(plan), check.refusal)})
    notes = {name: told for name, told in {**constraints.notes, plan.engine: check.notes}.items() if told}
    return constraints if notes == constraints.notes else replace(constraints, notes=notes)


def rehearse(trainer: Trainer, footprint: Footprint, plan: Plan, finding: Finding) -> Check:
    """Whether a plan runs the step as one process does, tried in a forked child.

    Args:
        plan: one of which planning has left something untried.
    """
    try:
        return run_clean(_rehearse, trainer, footprint, plan, finding, timeout_seconds=_CONFIRM_SECONDS)
    except (ChildFailed, CannotTravel) as error:
        log.debug("the plan can't be rehearsed", exc_info=True)
        return not_made(error.reason if isinstance(error, CannotTravel) else f"its trial didn't finish ({error.reason})")


def _rehearse(trainer: Trainer, footprint: Footprint, plan: Plan, finding: Finding) -> Check:
    first = FirstStep(trainer=trainer, stage=stage_of(trainer), footprint=footprint, **loaded_anew(trainer))
    return engines.of(plan).rehearse(plan, first, finding)


#: From this size on, only rank 0 builds the whole module.
LARGE_BYTES = 1024**3


class Prospect:
    """What was found out about one call of the trainer, before any plan is chosen. It is valid for any devices."""

    def __init__(
        self, trainer: Trainer, look: PlanningInputs, *, batch: BatchRule, from_snapshot: bool, weights_only: bool | None, elastic: bool
    ) -> None:
        self._trainer, self._look, self._batch = trainer, look, batch
        self._from_snapshot, self._weights_only, self._elastic = from_snapshot, weights_only, elastic
        self._tried: set[tuple[object, ...]] = set()

    def decision(self, inventory: Inventory | None = None) -> Decision:
        """The best plan for these devices, by default the first inventory's.

        Raises:
            NothingFits: if no plan fits.
            ValueError: if the pinned plan can't be run on these devices.
        """
        if inventory is not None:
            self._look = replace(self._look, inventory=usable(inventory))
        nothing: NothingFits | None = None
        try:
            while not self._has_stood():
                pass
        except NothingFits as error:
            nothing = error
        if nothing is not None:  # not within the handler, which would add to what the user's exception says of its causes
            raise self._failure_of_step() or nothing
        look, report, findings = self._look, self._look.report, self._look.findings
        plan = report.best
        assert plan is not None, "make_report raises where nothing fits"
        return Decision(
            report=report,
            look=look,
            batches=findings.batches,
            memory_margin=look.constraints.memory_margin,
            run_plan=RunPlan(
                plan=plan,
                devices=tuple(look.inventory.device(device) for device in plan.devices),
                batch=self._batch,
                draws=findings.draws,
                shared=findings.shared if plan.may_share_network else {},
                needs_group=findings.split is None or findings.split.raised,
                data_draws=findings.data_draws,
                loadings=findings.loadings,
                log_rules={} if findings.split is None else LogComparison(matching=findings.split.log_rules).rules,
                unweighed=() if findings.split is None or "later_entries" in look.constraints.despite else findings.split.unweighed,
                known={} if "later_entries" in look.constraints.despite else findings.known,
                kept_rules={} if findings.split is None else findings.split.kept_rules,
                metric_rules={} if findings.split is None else findings.split.metric_rules,
                from_snapshot=self._from_snapshot,
                weights_only=self._weights_only,
                large=findings.footprint.parameter_bytes >= LARGE_BYTES,
                candidate=report.best_candidate,
                budgets=report.budgets,
                findings={name: each.value for name, each in findings.engines.items() if each.value is not None},
                elastic=self._elastic,
                undivided=look.undivided,
                unknown=look.unknown,
                lengths=findings.footprint.lengths,
            ),
        )

    def _failure_of_step(self) -> BaseException | None:
        """What the user's own step raises without any plan, where trials ruled plans out: it says more than the table of refusals."""
        findings = self._look.findings
        if stage_of(self._trainer) != "fit" or not (self._tried or any(found.refusals for found in findings.engines.values())):
            return None
        failure = failure_of_step(self._trainer, target_of(self._look.inventory.devices), batches=STEPS, last_resort=True)
        return None if failure is None else failure.exception()

    def _has_stood(self) -> bool:
        """Whether the best plan has passed its trial; a plan that fails it is ruled out for good.

        Raises:
            NothingFits: if no plan fits.
        """
        plan = self._look.report.best
        assert plan is not None, "make_report raises where nothing fits"
        if plan.engine in self._look.findings.later:
            self._look = after_look(self._trainer, self._look, plan.engine)
            return False
        what = (plan.engine, plan.zero_stage, plan.offload, plan.world_size == 1, plan.cuts)
        if what in self._tried:
            return True
        self._tried.add(what)
        constraints = after_trial(self._trainer, self._look, plan)
        if constraints is self._look.constraints:
            return True
        self._look = replace(self._look, constraints=constraints)
        return False

    def need(self, inventory: Inventory) -> Need | None:
        """What the best plan for these devices needs, by prediction only; None where nothing fits, or a pinned plan's device is gone."""
        look = replace(self._look, inventory=usable(inventory))
        pinned, there = look.constraints.pinned, {device.id for device in look.inventory.devices}
        if pinned is not None and not there.issuperset(pinned.devices):
            return None
        found = best_candidate(look.findings.footprint, look.inventory, look.constraints, rates=look.rates)
        if found is not None and found.plan.engine in look.findings.later:
            self._look = after_look(self._trainer, self._look, found.plan.engine)
            return self.need(inventory)
        return None if found is None else need_of(found, look.findings.batches, self._batch, look.constraints.memory_margin)
