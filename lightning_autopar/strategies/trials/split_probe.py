"""Whether a module's loss stays the same when its first batch is split, and how its random draws relate to the samples.

It runs the user's own step on the CPU, on the whole batch and on the parts that ranks would get. Meant for a forked child, as the module is
changed. Knows Lightning modules and how a batch is made and cut; nothing of devices or plans.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_autopar._lightning import LightningModule, Trainer
from lightning_autopar._lightning_compat import evaluating, is_overridden, transfer_batch
from lightning_autopar._temporary import patched
from lightning_autopar.constraints import LOSS, SplitFinding, overrule, overruled
from lightning_autopar.exact.data.counted_entries import Count
from lightning_autopar.exact.data.rank_share import BatchShare, Dealing, share_of
from lightning_autopar.exact.logs.kept_by_hooks import tried_hooks
from lightning_autopar.exact.logs.log_rules import LogComparison, Logged
from lightning_autopar.exact.random import generator_states as rng
from lightning_autopar.exact.random.drawing_operators import draws_apart, held
from lightning_autopar.exact.random.whole_batch_draws import DrawPlan, Rows
from lightning_autopar.exact.step.batch_norm import NormRuns, fix
from lightning_autopar.exact.step.gradient_hooks import GradientHooks
from lightning_autopar.memory.footprint import Conduct
from lightning_autopar.memory.trace.bare_step import BareStep
from lightning_autopar.memory.trace.first_batch import FirstBatch
from lightning_autopar.strategies.trials import undo
from lightning_autopar.strategies.trials.draw_probe import Observation, everything, observe
from lightning_autopar.strategies.trials.fewer_blocks import do_without, extent
from lightning_autopar.strategies.trials.first_batch_parts import BatchParts
from lightning_autopar.strategies.trials.nudged_weights import LaterSteps, nudged
from lightning_autopar.strategies.trials.part_weights import Weighing
from lightning_autopar.strategies.trials.recorded_backward import EQUAL, Backwards, OwnStepError, difference_of, groups_first_of
from lightning_autopar.text import error_line, users_line

_LOG = logging.getLogger(__name__)

_UNCOMPARED = "not checked: whether the gradients of a batch's parts make those of the whole batch (comparing them failed)"
_SECONDS = 60.0  # how long a probe may take
_ALONE = 4  # samples of which each is run alone, to see which submodules it calls
_ORDERS = 4  # how often a step that shuffles samples at random is compared again


@held()
def probe_split(
    module: LightningModule,
    trainer: Trainer | None,
    first: FirstBatch,
    *,
    world_sizes: Sequence[int] = (2,),
    flops: int = 0,
    blocks: Mapping[str, int] | None = None,
    routes: bool = True,
    conduct: Conduct | None = None,
    despite: Sequence[str] = (),
    known: Collection[Count] = (),
    tries_others: bool = True,
    time_limit_seconds: float = _SECONDS,
) -> tuple[SplitFinding, DrawPlan]:
    """Compare the training loss of the first batch with the mean of its parts' losses, weighted by their samples.

    BatchNorm layers use fixed statistics meanwhile, as the engines compute theirs over the whole batch. Under manual optimization every
    loss that is passed to ``backward`` is compared; no optimizer steps.

    Args:
        module: the user's module, set up; it is changed.
        world_sizes: how many parts to try; those larger than the batch are left out.
        flops: the footprint's, of forward and backward on the whole batch; a large step is probed on a few samples, then without most of
            its repeated blocks, or not at all.
        blocks: FLOPs of the forward of each repeated block, by FQN.
        routes: whether it matters which of these a single sample calls: no plan whose ranks have the whole module asks.
        conduct: what the traced step itself does to parameters; None where it wasn't traced.
        known: what explains other batches.
        tries_others: whether the batch is changed as well, to have entries that don't count.
        time_limit_seconds: how long the probe may take, estimated after its first run.

    Returns:
        The finding about splitting, and the plan of the random draws, which is empty where nothing could be run.
    """
    sizes = [size for size in world_sizes if 1 < size <= first.batch_size]
    if not sizes:
        return SplitFinding(probed=False, reason="the first batch holds one sample, so that taking it apart can't be tried"), DrawPlan()
    few = (2 * max(sizes), max(sizes)) if first.samples is not None else ()
    counts = [first.batch_size, *(count for count in few if count < first.batch_size)]
    chosen = extent(module, blocks or {}, flops / 3 / first.batch_size, counts, first.batch_size)
    too_long = f"a step of {flops:.1e} floating-point operations is too long to try on the CPU"
    if chosen is None:
        return SplitFinding(probed=False, reason=too_long), DrawPlan()
    count, sorts, left = chosen
    batches = BatchParts(first, count, hooks=trainer is not None)
    try:
        batches.part(share_of(count, 0, Dealing.even(sizes[0])))
    except Exception as error:  # the user's collate function, on fewer samples than it is used to
        _LOG.debug("the first batch can't be split", exc_info=True)
        return SplitFinding(splittable=False, probed=False, reason=f"the batch can't be taken apart ({error_line(error)})"), DrawPlan()
    state, routes = rng.capture({}), routes and bool(blocks)
    try:
        try:
            configure_model(module, trainer)
        except Exception as error:
            return _untried(error), DrawPlan()
        do_without(module, sorts)
        with nudged(module):
            probe = _Probe(module, trainer, batches, conduct, despite, known, tries_others)
            found, draws = probe.run(sizes, time_limit_seconds, routes=routes)
        if (unfit := found.raised or math.isnan(found.difference)) or not probe.finite:  # a step that only its own weights fit
            probe = _Probe(module, trainer, batches, conduct, despite, known, tries_others)
            own, own_draws = probe.run(sizes, time_limit_seconds, routes=routes)
            found, draws = (own, own_draws) if unfit else (replace(found, log_rules={**own.log_rules, **found.log_rules}), draws)
    finally:
        rng.restore(state, {})
    if not sorts:
        return found, draws
    if found.probed:
        note = f"{too_long}: what splitting the batch changes was tried with {left}"
        found = replace(found, notes=(note, *found.notes))
    else:
        found = replace(found, reason=f"{too_long}, and not with {left} either: {found.reason}")
    return found, DrawPlan()  # the other blocks' draws aren't known


@held()
def probe_evaluation(
    module: LightningModule,
    trainer: Trainer | None,
    first: FirstBatch,
    hook: str,
    known: Collection[Count] = (),
    tries_others: bool = True,
    configures: bool = True,
) -> SplitFinding:
    """How the values that an evaluation step logs and keeps for parts of a batch combine into the whole batch's.

    Args:
        module: the user's module, set up; it is changed.
        first: a batch of that step.
        hook: ``"validation_step"`` or ``"test_step"``.
        known: what explains other batches.
        configures: whether ``configure_model`` may be called: what it builds may be larger than the host's memory.
    """
    if first.batch_size < 2:
        return SplitFinding()
    state = rng.capture({})

    def probed() -> tuple[SplitFinding, bool]:
        batches = BatchParts(first, first.batch_size, hooks=trainer is not None)
        probe = _Probe(module, trainer, batches, known=known, tries_others=tries_others)
        return probe.evaluation(hook), probe.finite

    try:
        with evaluating(trainer, testing=hook == "test_step"):
            if configures:
                configure_model(module, trainer)
            with suppress(Exception), nudged(module):
                found, finite = probed()
                if finite:
                    return found
            return probed()[0]  # a step that only its own weights fit
    except Exception as error:  # the user's step, under conditions that it isn't made for
        _LOG.debug("the %s can't be tried on parts of a batch", hook, exc_info=True)
        note = f"not checked: whether what {hook} logs and keeps is the same when a batch is split ({error_line(error)})"
        return SplitFinding(notes=(note,), raised=True)
    finally:
        rng.restore(state, {})


def configure_model(module: LightningModule, trainer: Trainer | None) -> None:
    """Let the module build its late parts, before a probe looks at its parameters or moves them."""
    BareStep(module, trainer, "fit", autocast_dtype=None, default_dtype=None, enter=lambda phase: None).configure()


def _untried(error: Exception) -> SplitFinding:
    """The finding where the user's step or ``configure_model`` fails."""
    _LOG.debug("the first batch's step can't be run", exc_info=error)
    return SplitFinding(probed=False, raised=True, reason=f"the step can't be tried on the CPU ({error_line(error)})")


class _Probe(LaterSteps):
    """The step without side effects: it can run any number of times and leaves the module as it was."""

    def __init__(
        self,
        module: LightningModule,
        trainer: Trainer | None,
        batches: BatchParts,
        conduct: Conduct | None = None,
        despite: Sequence[str] = (),
        known: Collection[Count] = (),
        tries_others: bool = False,
    ) -> None:
        super().__init__(module, batches, None if conduct is None else dict(conduct.written))
        #: Whether the batch is changed as well, to have entries that don't count.
        self.tries_others = tries_others
        self.despite = despite
        if trainer is not None and str(trainer.precision) == "64-true":  # as Lightning makes it before the run
            module.double()
            batches.converted = True
        self.weighing = Weighing(module, batches, known)
        self.rehearsal = BareStep(module, trainer, "fit", autocast_dtype=None, default_dtype=None, enter=lambda phase: None)
        self.rehearsal.hooks, self.rehearsal.loader = {} if trainer is None else tried_hooks(trainer), batches.first.loader
        self.backwards = Backwards(dict(module.named_parameters()), automatic=module.automatic_optimization)
        self.backwards.unseen = module.automatic_optimization and not is_overridden("backward", module)
        self.buffers: dict[str, Tensor] = {}  # the values before the step; empty until they are known
        self._prepared = False
        self.logs: list[dict[tuple[str, str], Logged]] = []
        #: For a step's number and a split: the batch, and the values that the step logged of it in double precision.
        self.logs_in_double: dict[tuple[int | None, Dealing], tuple[FirstBatch, list[dict[tuple[str, str], Logged]]]] = {}
        self.moved: list[dict[str, Tensor]] = []
        self.norms = NormRuns({})
        #: The generators' states after each run, and the names of those that a part of the batch leaves in another state than the whole.
        self.ends: list[rng.RngState] = []
        self.drawn_apart: tuple[str, ...] = ()
        self.observed: Observation | None = None  # the last runs
        self.uneven_calls: tuple[str, ...] = ()
        self.counted: tuple[str, ...] = ()
        self.logged = LogComparison()
        self.drifting: tuple[float, str] | None = None
        self.written: tuple[float, str] | None = None

    @property
    def finite(self) -> bool:
        """Whether all that the last run of the whole batch logged is finite: else nothing is known of its parts' values."""
        return all(math.isfinite(logged.value) for logged in self.logs[0].values()) if self.logs else True

    def run(self, sizes: Sequence[int], time_limit_seconds: float, *, routes: bool = False) -> tuple[SplitFinding, DrawPlan]:
        try:
            self._prepare()
            started = time.monotonic()
            with self.numbered():
                self.listen(self.losses)
                self.find_metrics(self.losses, min(sizes))
            seconds = (time.monotonic() - started) * 6 * len(sizes)
        except OwnStepError as error:
            reason = (
                f"training_step makes gradients and steps an optimizer by itself{users_line(error)}, while automatic_optimization is True"
            )
            exchanged = "each rank would step by its own samples' gradients, which only manual optimization exchanges"
            return SplitFinding(splittable=False, reason=f"{reason}: {exchanged} (automatic_optimization = False)"), DrawPlan()
        except Exception as error:
            return _untried(error), DrawPlan()
        if seconds > time_limit_seconds:
            return SplitFinding(probed=False, reason=f"trying a split batch on the CPU would take about {seconds:.0f} s"), DrawPlan()
        found, plan = SplitFinding(), DrawPlan()
        for size in sizes:
            finding, observed = self._split(size)
            if finding.splittable:
                self.logged = self._settled(self.losses, self.logged)
                if observed.draws and not finding.difference and self.observed and self.logs:  # the loss may be the same by chance
                    by = self.logged.apart_as(self.observed.whole, self.logs[0])
                    finding = replace(finding, difference=by, reason="in another run, with other draws") if by else finding
            finding = replace(
                finding,
                log_rules={**self.logged.matching, LOSS: self.weighing.loss_rules() if not finding.difference else ()},
                notes=(*finding.notes, *(overruled(name, words) for name, words in self.overruled.items()), *self.logged.notes),
                uneven_calls=self.uneven_calls,
                counted=self.counted,
                drawn_apart=self.drawn_apart,
            )
            if finding.splittable:
                finding = self.with_late(self.with_kept(finding, "training_step", self.losses, size))
            plan = replace(observed, seeded=observed.seeded or plan.seeded)
            if not finding.splittable:
                return finding, plan
            if not finding.difference <= found.difference or not found.log_rules:
                found = finding
        places = self._places(self.changed())
        found, plan = self.in_later_steps(found, plan, sizes[0], time_limit_seconds)
        plan, failed = self.with_later_draws(plan, places, sizes[0])
        found = replace(found, part_reason=found.part_reason or self.apart_from_hook(self.weighing.shares(sizes[0])))
        if routes:
            found = self._with_routes(found)
        notes = (f"not checked: whether the step draws other random numbers later in the run (with its counters far, it fails: {failed})",)
        if self.tries_others and found.splittable and not found.difference:
            found = self.holding(found, self.losses)
        even = self.weighing.even() if found.splittable else ()
        return replace(found, notes=found.notes + notes * bool(failed), skips=self.skips, even=even), plan

    def evaluation(self, hook: str) -> SplitFinding:
        """How the values that an evaluation step logs and keeps for parts of the batch combine into the whole batch's."""
        self.rehearsal.begin_evaluation(hook.removesuffix("_step"))

        def step(batch: Any) -> list[Tensor]:
            self.metrics.next_run()
            with self._harmless(), self._buffers_noted(), torch.no_grad():
                given = transfer_batch(self.module, batch, self.rehearsal.loader) if self.batches.raw else batch
                _, logged = self._stepped(hook, given, self.number or 0)
            self.logs.append(logged)
            return []

        with self.numbered():
            self.listen(step)
            self.find_metrics(step, 2)
            compared = self._compare_logs(step, 2)
            seen = self.observed
            drawn = () if seen is None else tuple(dict.fromkeys((*self._drawn_apart(seen), *seen.apart)))
            found, unknown = self._settled(step, compared), self._moved_apart(hook)
        for number in self.later(_SECONDS):
            try:
                with self.numbered(number):
                    found = found.narrowed(self._settled(step, self._compare_logs(step, 2)))
            except Exception as error:  # a number that the step isn't made for
                _LOG.debug("%s can't be tried as number %d", hook, number, exc_info=True)
                unknown.append(f"not checked: what {hook} logs in step {number:,} ({error_line(error)})")
        finding = SplitFinding(log_rules=found.matching, notes=(*found.notes, *unknown), drawn_apart=drawn)
        finding = self.with_kept(finding, hook, step, 2)
        return self.holding(finding, step) if self.tries_others else finding

    @contextmanager
    def _harmless(self) -> Iterator[undo.StepEffects]:
        """The context of a run; afterwards the module is as before."""
        with nullcontext(undo.StepEffects()) if self.lasting else undo.undone(self.module, self.writes, self.variables) as effects:
            yield effects
            self.left.append(self._watched())
            self.ends.append(rng.capture(rng.find_generators(self.module.named_modules())))
        self.effects.append(effects)

    def _compare_logs(self, step: Callable[[Any], list[Tensor]], size: int | Dealing) -> LogComparison:
        """Compare what a step logs on the whole batch with what it logs on ``size`` parts."""
        shares = self.weighing.shares(size)
        first, logs = self.logs_in_double.get((self.number, shares[0].dealing), (None, []))
        if self.batches.double and step == self.losses and first is self.batches.first:
            self.logs = logs[:]
        else:
            self._observed(step, shares)
        return self._logs_compared(shares)

    def _with_new_logs(self, found: SplitFinding, shares: Sequence[BatchShare]) -> SplitFinding:
        """The finding, with the rules for values that no earlier step has logged."""
        if all(key in found.log_rules for key in self.logs[0]):
            return found
        logged = self._settled(self.losses, self._logs_compared(shares))
        new = LogComparison(
            matching={key: rules for key, rules in logged.matching.items() if key not in found.log_rules}, apart=logged.apart
        )
        return replace(found, log_rules={**new.matching, **found.log_rules}, notes=(*found.notes, *new.notes))

    def _settled(self, step: Callable[[Any], list[Tensor]], found: LogComparison) -> LogComparison:
        """Where single precision leaves several rules or none, double precision decides; where that leaves several, another split does."""
        if all(found.matching.values()) and not (found.ambiguous or self.weighing.undecided(found, every=True)):
            return found
        try:
            with self._in_double():
                found = self._narrowed(step, self._compare_logs(step, 2))
                return self.weighing.told_apart(found, partial(self._compare_logs, step))
        except Exception:  # the step insists on single precision
            _LOG.debug("the step can't be tried in double precision", exc_info=True)
            return self._narrowed(step, found)

    def _narrowed(self, step: Callable[[Any], list[Tensor]], found: LogComparison) -> LogComparison:
        """Where the first split leaves several rules, another split decides."""
        if not (found.ambiguous or self.weighing.telling) or self.batches.count < 3:
            return found
        try:
            return found.narrowed(self._compare_logs(step, self.weighing.telling[-1] if self.weighing.telling else 3))
        except Exception:  # parts with one or two samples, for which the user's step may not be made
            _LOG.debug("the step can't be tried on three parts of a batch", exc_info=True)
            return found

    def _prepare(self) -> None:
        """Train mode, but with the statistics of BatchNorm layers fixed to the whole batch's."""
        module = self.module.train()
        self.rehearsal.build()
        for optimizer in self.rehearsal.optimizers:
            optimizer.step = self.backwards.step  # type: ignore[method-assign]
        self.norms = fix(module, lambda: self.losses(self.batches.part(everything(self.batches.count))))
        self.buffers, self._prepared = {name: buffer.clone() for name, buffer in module.named_buffers()}, True

    def losses(self, batch: Any) -> list[Tensor]:
        """The losses of one step: by hand each backward pass's, with what tells of its gradients; else the returned one."""
        return self._steps([batch])

    def _steps(self, batches: Sequence[Any], *, random: rng.RngState | None = None) -> list[Tensor]:
        losses: list[Tensor] = []
        moved: dict[str, Tensor] = {}
        self.metrics.next_run()
        automatic = self.module.automatic_optimization
        backwards = self.backwards.recorded if self.backward or not automatic else (lambda _: nullcontext())
        with self._harmless(), self.norms.noted():
            for index, given in enumerate(batches):
                recorded: list[Tensor] = []
                if random is not None:
                    rng.restore(random, {})
                # With gradients enabled, as in the run: some steps keep values only then.
                with torch.enable_grad(), backwards(recorded):
                    # As in the engines, the draws of the transfer hooks (augmentation on the device) belong to the step.
                    given = transfer_batch(self.module, given) if self.batches.raw else given
                    if self.number is not None:
                        index += self.number
                        self.rehearsal._hook("on_train_epoch_start")
                    output, logged = self._stepped("training_step", given, index)
                    loss = output.get("loss") if isinstance(output, Mapping) else output
                    if self.backward and isinstance(loss, Tensor) and loss.requires_grad:
                        self.module.backward(loss)
                        if self.backwards.touched():
                            self.part_reason = "the module's backward changes gradients, and would do so after each part of a batch"
                    elif automatic:
                        recorded, self.skips = [] if loss is None else [loss], self.skips or loss is None
                self.module.zero_grad()
                losses += [loss.detach().double().mean() for loss in self.metrics.looked_at(recorded)]
                output = loss = recorded = None  # type: ignore[assignment]  # and with them the step's graph
            for name, buffer in self.module.named_buffers() if self._prepared else ():
                before = self.buffers.get(name)
                if before is None or buffer.shape != before.shape or not undo.same_values(buffer, before):
                    moved[name] = buffer.detach().double()
        undo.put_back(self.module, self.buffers)
        self.logs.append(logged)
        self.moved.append(moved)
        return losses

    def _split(self, size: int) -> tuple[SplitFinding, DrawPlan]:
        """Compare the whole batch with ``size`` parts of it."""
        reason: str | None
        try:
            at_once = self._compared_at_once(size)
            difference, observed = at_once or self._compare(size)
            grouped = any(
                isinstance(draw.choice, Rows) and draw.shape[draw.choice.dim] > self.batches.count for draw in observed.draws.draws or ()
            )
            if grouped and not difference <= EQUAL:
                other, reordered = self._compare(size, groups_first=True)
                if other < difference:
                    difference, observed = other, reordered
            # A few samples may come in the same order by chance.
            for _ in range(_ORDERS if any(draw.op == "randperm" for draw in observed.draws.draws or ()) else 0):
                if difference <= EQUAL:
                    difference, observed = self._compare(size, groups_first=groups_first_of(observed))
        except Exception as error:
            _LOG.debug("the step fails on a part of the first batch", exc_info=True)
            reason = f"the step fails on a part of a batch, though not on the whole ({error_line(error)})"
            return SplitFinding(splittable=False, reason=reason), DrawPlan()
        apart = self.norms.apart()
        if self.backwards.differentiates:
            reason = "training_step makes gradients without backward (torch.autograd.grad), and each rank would have its own samples'"
            return SplitFinding(splittable=False, reason=reason), DrawPlan()
        if self.written is not None:
            return SplitFinding(splittable=False, reason=f"the step writes to its own parameters: {self.written[1]}"), DrawPlan()
        if self.drifting is not None and self._refuses("buffers", drift := f"the step writes to its own buffers: {self.drifting[1]}"):
            return SplitFinding(splittable=False, reason=drift + overrule("buffers")), DrawPlan()
        if difference <= EQUAL and not observed.draws.seeded and (reason := self._kept(size, observed)) is not None:
            return SplitFinding(splittable=False, reason=reason), DrawPlan()
        again = partial(self._compare, size, groups_first=groups_first_of(observed))
        if EQUAL < difference < math.inf:  # this may still be rounding, where large terms cancel
            difference = self._unrounded(difference, lambda: again()[0])
        if difference <= EQUAL and not observed.draws.seeded:
            difference, failed = self.weighing.among_few(size, partial(self._observed, self.losses), self._in_double)
            if failed:
                reason = f"it picks samples by their values, and fails on two samples: {failed}"
                return SplitFinding(probed=False, reason=reason, part_reason=self.part_reason), observed.draws
        draws, run = observed.draws, partial(self._observed, self.losses, groups_first=groups_first_of(observed))
        if self.weighing.explains(difference, observed, self.weighing.shares(size), run, self._in_double):
            return self._split(size)
        uneven = self.batches.uneven(self.weighing.shares(size))
        drawn = f"each part makes its own draws of {', '.join(self.drawn_apart)}" if self.drawn_apart else ""
        if difference <= EQUAL and apart is not None:
            return SplitFinding(splittable=False, reason=apart), DrawPlan()
        if difference <= EQUAL:
            difference, reason = 0.0, None
        elif math.isnan(difference):
            reason = "a loss isn't finite"
        elif len({len(losses) for losses in (observed.whole, *observed.parts)}) > 1:
            reason = "a part of a batch has another number of losses than the whole"
        elif self.batches.random:
            reason = "making the batch draws random numbers, which each rank draws for its part"
        elif uneven:
            reason = "a part's samples are collated into other shapes than in the whole batch, as where they are padded to the longest one"
        elif draws.seeded:
            reason = "the shapes of its random draws depend on the data"
        elif drawn:
            reason = drawn
        else:
            reason = f"it {'' if self.module.automatic_optimization else 'or its gradient '}is no mean over the samples"
        by = 0.0 if at_once or reason is not None or draws.seeded else self._gradients_differ(size, again)
        if self.backwards.missed[0] > difference:
            difference, reason = self.backwards.missed
        elif EQUAL < by < math.inf:
            difference, reason = by, "its gradient is no mean over the samples, though its value is" + (drawn and f": {drawn}")
        draws = replace(draws, seeded=draws.seeded or uneven)
        notes = (_UNCOMPARED,) * (not math.isfinite(by))
        return SplitFinding(difference=difference, reason=reason, part_reason=self.part_reason, notes=notes), draws

    def _gradients_differ(self, size: int, compare: Callable[[], tuple[float, Observation]]) -> float:
        """By how much gradients differ where the loss doesn't, as with advantages centred over the batch; not finite if that failed."""
        if self.metrics.trained or not self.module.automatic_optimization:
            return 0.0
        earlier = self.changed()
        try:
            with self._with_gradients():
                by, _ = compare()
                self.find_late(earlier, self.losses, size)
                return by if by <= EQUAL else self._unrounded(by, lambda: compare()[0])  # as of the loss
        except Exception:  # the forward ran
            _LOG.debug("the gradient can't be compared", exc_info=True)
            return math.inf

    @contextmanager
    def _with_gradients(self) -> Iterator[None]:
        """While open, runs have a backward pass, and each parameter's gradient is compared."""
        hooks = GradientHooks(self.module.parameters())
        hooks.hold()  # they wait for the whole batch's gradient
        try:
            with patched(self, "backward", True), patched(self.backwards, "each", True):
                yield
        finally:
            hooks.release()

    def _compared_at_once(self, size: int) -> tuple[float, Observation] | None:
        """The comparison of losses and gradients in the same runs, where nothing differs and a run leaves nothing behind. Else None, and
        they are compared one after the other: that tells what forward does from what the backward pass does.
        """
        if self.changed() or not self.backwards.unseen:  # a backward of the user's own may draw
            return None
        state, told = rng.capture({}), (self.part_reason, self.skips)
        try:
            with self._with_gradients():
                found = self._compare(size)
            unlike = self.backwards.differentiates or self.backwards.missed[0] or found[1].draws.seeded or self.metrics.exchanged
            left = self.changed() or self.written or self.drifting or self.norms.apart() or self.part_reason != told[0]
            if found[0] <= EQUAL and not (unlike or left):
                return found
        except Exception:
            _LOG.debug("the loss and its gradient can't be compared at once", exc_info=True)
        self.backwards.differentiates, self.backwards.missed = False, (0.0, "")
        self.part_reason, self.skips = told
        rng.restore(state, {})
        return None

    def _with_routes(self, found: SplitFinding) -> SplitFinding:
        """With the submodules that some samples alone call more or less often than the whole batch does: parts of this batch may hold
        samples of each kind, and those of a later one not.
        """
        shares = self.weighing.shares(self.batches.count)[:_ALONE]
        try:
            self._observed(self.losses, shares)
        except Exception as error:  # the step isn't made for one sample
            _LOG.debug("the step fails on one sample", exc_info=True)
            note = f"not checked: whether single samples call the same modules as the whole batch ({error_line(error)})"
            return replace(found, notes=(*found.notes, note))
        alone = undo.uneven([effects.calls for effects in self.effects])
        return replace(found, uneven_calls=tuple(sorted({*found.uneven_calls, *alone})))

    def _compare(self, size: int, *, groups_first: bool = False) -> tuple[float, Observation]:
        shares = self.weighing.shares(size)
        observed = self._observed(self.losses, shares, groups_first=groups_first)
        if not self.batches.double:
            self.logged = self._logs_compared(shares)
            self.drifting = undo.changing_buffers(self.moved)
            same_shape = (name for name, value in self.moved[0].items() if name in self.buffers and value.shape == self.buffers[name].shape)
            self.counted = tuple(sorted(same_shape))
            self.written = undo.changing_buffers([effects.written for effects in self.effects])
            if self.writes is None and self.effects[0].written:  # else the trace tells
                name = next(iter(self.effects[0].written))
                self.part_reason = f"the step writes to the parameter {name!r}, which each part of a batch would do"
            self.part_reason = self.part_reason or self.running()
            self.uneven_calls = undo.uneven([effects.calls for effects in self.effects])
            self.drawn_apart = self._drawn_apart(observed)
        return difference_of(observed, shares), observed

    def _drawn_apart(self, observed: Observation) -> tuple[str, ...]:
        """What draws other numbers for a part, by the generators' states: a draw for each sample may change no loss in the first batch."""
        differing = [name for end in self.ends[1:] for name in rng.changed(self.ends[0], end)]
        # It is known already that these draw alone.
        known = observed.draws.seeded or any(draw.choice is not None and draws_apart(draw.op) for draw in observed.draws.draws or ())
        return tuple(dict.fromkeys(rng.words(name) for name in differing if not (known and name == "torch")))

    def _observed(self, step: Callable[[Any], list[Tensor]], shares: Sequence[BatchShare], *, groups_first: bool = False) -> Observation:
        """Run the step on the whole batch and on its parts, whose metrics exchange their states as ranks' metrics do."""
        state = rng.capture({})

        def observed(*, merge: bool) -> Observation:
            for noted in (self.logs, self.moved, self.norms, self.effects, self.left, self.ends):
                noted.clear()
            self.backwards.begin()
            with self.metrics.runs(shares, merge=merge):
                seen = observe(step, self.batches.part, shares, groups_first=groups_first)
            self.observed = seen
            if self.batches.double and step == self.losses:
                self.logs_in_double[self.number, shares[0].dealing] = self.batches.first, self.logs[:]
            return seen

        apart = observed(merge=False)
        self.apart = self.left[:] if self.metrics.exchanged else []
        if not self.metrics.exchanged:
            return apart
        rng.restore(state, {})
        if self.metrics.trained and not difference_of(apart, shares) <= 10 * EQUAL:
            self.part_reason = (
                f"the loss goes by {', '.join(self.metrics.trained)}, which is no mean over the samples, and a part of a batch would be "
                "trained on its own"
            )
        return observed(merge=True)
