"""What runs of a step keep on the module and in variables: how that of a batch's parts combines into that of the whole batch.

Ranks and parts exchange what a step keeps when its forward is over. A hook may keep something during the backward pass, such as the norm
of an activation's gradient. Nobody exchanges that; the report names it. Knows runs of a step; nothing of losses, draws or logs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torchmetrics import Metric
from torchmetrics.wrappers import Running

from lightning_autopar._lightning import LightningModule
from lightning_autopar._temporary import patched
from lightning_autopar.constraints import SplitFinding, overrule
from lightning_autopar.exact.data.rank_share import BatchShare
from lightning_autopar.exact.logs.metrics_of_values import keeping_apart, rules_of
from lightning_autopar.exact.logs.metrics_of_values import settled as settled_metric
from lightning_autopar.exact.logs.metrics_over_ranks import named_metrics
from lightning_autopar.exact.random import generator_states as rng
from lightning_autopar.exact.step.attribute_rules import MISSING, Evidence, Path, alike, plain, taken
from lightning_autopar.exact.step.kept_attributes import Place, attributes, settled, title, variables
from lightning_autopar.memory.trace.first_batch import copied
from lightning_autopar.strategies.trials import undo
from lightning_autopar.strategies.trials.draw_probe import Observation, everything
from lightning_autopar.strategies.trials.first_batch_parts import BatchParts
from lightning_autopar.strategies.trials.metric_trial import MetricTrial
from lightning_autopar.strategies.trials.part_weights import Weighing
from lightning_autopar.strategies.trials.recorded_backward import EQUAL, difference_of, groups_first_of
from lightning_autopar.text import error_line

_LOG = logging.getLogger(__name__)
#: A step, run on a batch; its losses.
Step = Callable[[Any], list[Tensor]]


class KeptRuns:
    """The runs of a module's step, and what they keep.

    Args:
        writes: names of the parameters that a step may write to; None where that isn't known.
    """

    weighing: Weighing

    def __init__(self, module: LightningModule, batches: BatchParts, writes: Collection[str] | None) -> None:
        self.module, self.batches, self.writes = module, batches, writes
        self.effects: list[undo.StepEffects] = []
        #: Variables outside of the module in which its step may keep something.
        self.variables = variables(module)
        #: The attributes and variables that are compared, and their values after each run; and whether a run's effects are kept.
        self.watched: tuple[str, ...] = ()
        #: The metrics whose states are compared, by name.
        self.metered: dict[str, Metric] = {}
        self.metrics = MetricTrial(module)
        self.left: list[dict[str, Any]] = []
        #: The latter where metrics exchange nothing, as in parts that run one after the other; empty where there are no metrics.
        self.apart: list[dict[str, Any]] = []
        self.lasting = False
        self.earlier = 0  # batches before the first one that is run
        self.backward = False  # whether the gradient of a loss that the step returns is compared as well
        #: Why one rank can't run a batch in parts; None where it can.
        self.part_reason: str | None = None
        #: Rules for what only a step with its backward pass changes.
        self.late: dict[Path, Any] = {}
        #: Refusals that are overruled; and the reasons against a split that are, by the refusal's name.
        self.despite: Collection[str] = ()
        self.overruled: dict[str, str] = {}

    def _observed(self, step: Step, shares: Sequence[Any], *, groups_first: bool = False) -> Observation:
        raise NotImplementedError

    def _drawn_apart(self, observed: Observation) -> tuple[str, ...]:
        """What draws other numbers for a part than for the whole batch, in words."""
        raise NotImplementedError

    def _steps(self, batches: Sequence[Any], *, random: rng.RngState | None = None) -> list[Tensor]:
        """The losses of several steps, each of which begins with what the one before has left.

        Args:
            random: the random state that each begins in, if it is to be the same for all.
        """
        raise NotImplementedError

    def _without_rounding(self, compare: Callable[[], float]) -> float:
        """A difference without single precision's rounding; infinite where the step only runs in single precision."""
        raise NotImplementedError

    def _watched(self) -> dict[str, Any]:
        found = ((name, space.get(key, MISSING)) for name, (space, key) in self._places(self.watched).items())
        states: dict[str, Any] = {name: metric._copy_state_dict() for name, metric in self.metered.items()}
        return states | {name: taken(value) for name, value in found if value is not MISSING}

    def _places(self, names: Collection[str]) -> dict[str, Place]:
        """Where the attributes and variables of these names are, as far as a step may keep something there."""
        places = attributes(self.module, made=names) | self.variables
        return {name: places[name] for name in names if name in places}

    def changed(self) -> dict[str, None]:
        """Names of what the last runs changed."""
        return dict.fromkeys(name for effects in self.effects for name in effects.kept)

    def with_kept(self, finding: SplitFinding, hook: str, step: Step, size: int) -> SplitFinding:
        """The finding, with how the values that the step keeps of a batch's parts combine into those of the whole batch."""
        finding = self._with_metrics(finding, hook, step, size)
        self.watched = tuple(self._places(self.changed()))
        if not self.watched:
            return finding
        try:
            rules, unknown = self._kept_rules(step, size)
        except Exception as error:  # the step ran on these parts, but fails on others or a second time
            _LOG.debug("what %s keeps can't be tried", hook, exc_info=True)
            names = ", ".join(title(self.module, name) for name in self.watched)
            note = f"not checked: how what {hook} keeps in {names} grows with the samples ({error_line(error)})"
            return replace(finding, metric_rules=keeping_apart(finding.metric_rules, hook), notes=(*finding.notes, note))
        finally:
            self.watched = ()
        notes = [
            f"{title(self.module, name)}, which {hook} changes, {reason}: each rank and each part keeps that of its own samples"
            for name, reason in {path[0]: reason for path, reason in unknown.items()}.items()
        ]
        found = {**finding.kept_rules, hook: rules} if rules else finding.kept_rules
        metric_rules = keeping_apart(finding.metric_rules, hook) if unknown else finding.metric_rules
        return replace(finding, kept_rules=found, metric_rules=metric_rules, notes=(*finding.notes, *notes))

    def find_metrics(self, step: Step, size: int) -> None:
        """Find the metrics to which the step gives a value of its batch (its loss) rather than its samples."""
        metered, state, reason = dict(named_metrics(self.module)), rng.capture({}), self.part_reason
        self.metrics.rules, self.metrics.failed = {}, None
        try:  # parts of unlike sizes tell rules apart
            self.metrics.rules = self._metric_rules(metered, step, min(size + 1, self.batches.count)) if metered else {}
        except Exception as error:  # the step may run on larger parts
            _LOG.debug("the metrics of a step can't be tried", exc_info=True)
            self.metrics.failed = error_line(error)
        finally:
            rng.restore(state, {})
            self.part_reason = reason

    def _with_metrics(self, finding: SplitFinding, hook: str, step: Step, size: int) -> SplitFinding:
        """The finding, with those metrics."""
        if self.metrics.failed or None in self.metrics.rules.values():  # by now it is known what the loss goes by
            self.find_metrics(step, size)
        kinds = {name: type(metric).__name__ for name, metric in named_metrics(self.module)}
        notes = [
            f"the metric {name!r} ({kinds[name]}) gets from {hook} what is no sum over samples: each rank and each part "
            "gives it that of its own"
            for name in dict.fromkeys(name for (name, _), rule in self.metrics.rules.items() if rule is None)
        ]
        if self.metrics.failed:
            notes.append(f"not checked: the metrics that {hook} updates ({self.metrics.failed})")
        found = {**finding.metric_rules, hook: self.metrics.settled} if self.metrics.settled else finding.metric_rules
        return replace(finding, metric_rules=found, notes=(*finding.notes, *notes))

    def _metric_rules(self, metered: dict[str, Metric], step: Step, size: int) -> dict[tuple[str, str], str | None]:
        """By what parts of a batch make each state of each metric."""
        shares = self.weighing.shares(size)
        with patched(self, "metered", metered):
            before = self._watched()
            seen = self._observed(step, shares)
            whole, *parts = self.apart or self.left
        if seen.draws.seeded or seen.apart or self._drawn_apart(seen):  # states of other draws tell nothing
            return {}
        found: dict[tuple[str, str], str | None] = {}
        for name, metric in metered.items():
            left = [[each[name][state] for each in (before, whole, *parts)] for state in metric._reductions]
            rules = {
                state: rules_of(reduction, first, one, others, shares)
                for (state, reduction), (first, one, *others) in zip(metric._reductions.items(), left, strict=True)
            }
            found |= {(name, state): rule for state, rule in settled_metric(rules).items()}
        return found

    def find_late(self, earlier: Mapping[str, None], step: Step, size: int) -> None:
        """Find what the last runs changed in their backward pass.

        Args:
            earlier: what runs without a backward pass change.
            step: with a backward pass.
        """
        late = {name: None for name in self.changed() if name not in earlier}
        with patched(self, "watched", tuple(self._places(earlier))):
            state, left = rng.capture({}), list[dict[str, Any]]()
            for backward in (False, True) if self.watched else ():
                rng.restore(state, {})
                with patched(self, "backward", backward):
                    self._observed(step, self.weighing.shares(size))
                left.append({name: plain(value) for name, value in self.left[0].items()})
            late |= {name: None for name in self.watched if not alike(left[0].get(name), left[1].get(name))}
        with patched(self, "watched", tuple(self._places(late))):
            if self.watched:
                rules, unknown = self._kept_rules(step, size)
                self.late = {**rules, **unknown}

    def with_late(self, finding: SplitFinding) -> SplitFinding:
        """The finding, with what the backward pass changes."""
        names = {path[0]: None for path, rule in self.late.items() if rule != "same"}
        titles = [title(self.module, name) for name in names]
        notes = [f"{each}, which the backward pass changes, is that of each rank's and each part's own samples" for each in titles]
        reason = finding.part_reason
        for again in [path[0] for path in self.late if path[0] not in names]:
            reason = reason or f"the backward pass changes {title(self.module, again)}, and would do so after each part of a batch"
        kept = {**finding.kept_rules, "the backward pass": self.late} if self.late else finding.kept_rules
        return replace(finding, kept_rules=kept, notes=(*finding.notes, *notes), part_reason=reason)

    def running(self) -> str | None:
        """Why a batch can't run in parts: a metric over the last few updates would count each. None where there is no such metric."""
        children = dict(self.module.named_modules())
        for owner, _, _ in (name.rpartition(".") for name in self.changed()):
            if isinstance(children.get(owner), Running):
                return f"{title(self.module, owner)} (torchmetrics' Running) counts updates, and each part of a batch would be one"
        return None

    def _kept_rules(self, step: Step, size: int) -> tuple[dict[Path, Any], dict[Path, str]]:
        """The rules for what a step keeps, and why other paths have none: at a run's beginning, after a step, and in other splits."""
        evidence = Evidence()

        def see(size: int) -> None:
            shares = self.weighing.shares(size)
            before = self._watched()
            self._observed(step, shares)
            for left in filter(None, (self.left, self.apart)):
                evidence.see(before, left[0], left[1:], shares)

        def twice(batch: Any) -> list[Tensor]:
            with undo.undone(self.module, self.writes, self.variables):
                with patched(self, "lasting", True):
                    step(copied(batch))
                with patched(self, "earlier", 1):
                    return step(batch)

        see(size)
        rows, goes_on = list(evidence.row_bytes), False
        with undo.undone(self.module, self.writes, self.variables):
            with patched(self, "lasting", True):
                # On the whole batch: then the least of all losses is changed by one part and not by another, and is no mean of theirs.
                step(self.batches.part(everything(self.batches.count)))
            with patched(self, "earlier", 1):
                try:
                    see(size)
                except Exception:  # of the user's step, on a part with the whole batch's rows; without rows it has another cause
                    if not rows:
                        raise
                    _LOG.debug("a part doesn't go on with the whole batch's rows", exc_info=True)
                    goes_on = True
                if self.batches.count > size and not goes_on:
                    see(size + 1)
        rules, unknown = settled(evidence)
        if goes_on:  # a part's rows with those that it left itself, and not with the whole batch's
            self._observed(twice, self.weighing.shares(size))  # raises where it can't; :meth:`_kept` compares the losses
            rules = {path: rule for path, rule in rules.items() if path not in rows}
            unknown |= dict.fromkeys(rows, "holds rows with which the next batch's go on")
        return rules, unknown

    def _kept(self, size: int, one: Observation) -> str | None:
        """Why ranks would diverge by what a step leaves to the next one, though ``one`` step alone gives the whole batch's loss."""
        overruled_too = dict(self.module.named_buffers()) if "buffers" in self.overruled else ()
        ignored = {*vars(LightningModule()), "trainer", *overruled_too}
        kept = [name for name in self.changed() if name not in ignored]
        if not kept:
            return None
        shares = self.weighing.shares(size)
        try:
            difference = self._after_two(shares, groups_first_of(one))
        except Exception as error:  # the first step ran
            _LOG.debug("a second step fails", exc_info=True)
            return f"a second step fails on a part of the batch, after a first one on it ({error_line(error)})"
        names = ", ".join(repr(name) for name in kept if not name.rpartition(".")[2].startswith("_")) or repr(kept[0])
        if EQUAL < difference < math.inf:  # this may be the rounding of two steps
            difference = min(difference, self._without_rounding(lambda: self._after_two(shares, groups_first_of(one))))
        if difference <= EQUAL:
            if self.module.automatic_optimization and self._left_to_parts(shares):
                words = f"a step leaves {names} to the next one, which parts of a batch that run one after the other would do, too"
                if self._refuses("kept", words):
                    self.part_reason = words + overrule("kept")
            return None
        words = (
            f"by what the step keeps of a batch ({names}) the next one's loss differs by {difference:.2g} of it when split, as each rank "
            "would keep its own part"
        )
        return words + overrule("kept") if self._refuses("kept", words) else None

    def _after_two(self, shares: Sequence[BatchShare], groups_first: bool) -> float:
        """By how much the losses of two steps on the same batch differ."""
        two = self._observed(lambda batch: self._steps([copied(batch), batch]), shares, groups_first=groups_first)
        return difference_of(two, shares)

    def _left_to_parts(self, shares: Sequence[BatchShare]) -> bool:
        """Whether a part's loss changes if another part ran before it."""
        one, other = (self.batches.part(share) for share in shares[:2])
        random = rng.capture({})
        alone = self._steps([other], random=random)
        try:
            both = self._steps([one, self.batches.part(shares[1])], random=random)
        except Exception:  # it ran alone
            _LOG.debug("a part's step fails after another's", exc_info=True)
            return True
        return any(not abs(after - before) <= EQUAL * abs(before) for after, before in zip(both[-len(alone) :], alone, strict=True))

    def _refuses(self, name: str, reason: str) -> bool:
        """Whether a reason against a split isn't overruled."""
        if name in self.despite:
            self.overruled[name] = reason
        return name not in self.despite
