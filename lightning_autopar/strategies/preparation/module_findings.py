"""What planning finds out about a module in forked children: its footprint, what a split batch changes, and what each engine finds.

Engines look at the first step one by one, and their long trials run beside the probes of a split batch. It reads the trainer and changes
nothing in it; it doesn't know which plans there are.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from lightning_autopar import engines
from lightning_autopar._clean_process import CannotTravel, run_clean
from lightning_autopar._fork import ChildFailed, forked, run_forked
from lightning_autopar._lightning import Trainer, rank_zero_warn
from lightning_autopar._lightning_compat import attach_model_callbacks, evaluating
from lightning_autopar.constraints import SplitFinding
from lightning_autopar.engines import Finding, FirstStep, not_made
from lightning_autopar.exact.data.collate import CollateAll, Loading, loader_key, look_at, makes_rows
from lightning_autopar.exact.data.rank_share import Dealing, KnownTensors
from lightning_autopar.exact.data.unlike_samples import leaves_out
from lightning_autopar.exact.logs.kept_by_hooks import as_callbacks_leave, keeping_hooks, late_hooks
from lightning_autopar.exact.logs.log_rules import LogComparison
from lightning_autopar.exact.random.drawing_operators import draws_apart
from lightning_autopar.exact.random.whole_batch_draws import DrawPlan
from lightning_autopar.exact.step.micro_batches import why_whole
from lightning_autopar.exact.step.shared_network import SharedModules
from lightning_autopar.memory import batch_scaling
from lightning_autopar.memory.cuda_overhead import Target
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.trace.first_batch import RAISED, FirstBatch, first_batch, fresh, tensors_of
from lightning_autopar.memory.trace.guessed_footprint import guess
from lightning_autopar.memory.trace.trace import trace
from lightning_autopar.strategies.base.worker_exception import Failure
from lightning_autopar.strategies.preparation.callback_copies import with_copies
from lightning_autopar.strategies.preparation.longest_footprint import Seen, at_lengths, seen_sizes, step_bytes
from lightning_autopar.strategies.preparation.plain_run import failure_of_step
from lightning_autopar.strategies.preparation.split_findings import (
    EarlySplits,
    idle_threads,
    is_quick,
    known_tensors,
    made_of_samples,
    split_as_made,
    split_of,
    transferred,
    validation_batch,
    whole_of,
    with_evaluation,
    with_others,
)
from lightning_autopar.strategies.trials.shared_network_probe import with_shared_network

log = logging.getLogger(__name__)

#: How long tracing and probing together may take; after that the estimate is coarse, and the report says so.
TRACE_SECONDS = 600.0
#: A step that reads one of these from its trainer may do something on one rank alone, and its peers would wait for it in a collective.
_RANKS = {"is_global_zero", "global_rank", "local_rank", "node_rank"}
_OWN_DRAWS = "draws='per-rank': each rank, and each part of a batch, draws random numbers of its own, so results differ from one device's"


@dataclass(frozen=True, kw_only=True)
class Questions:
    """The kinds of plans that planning considers.

    Args:
        split: whether some plans split the batch.
        room_bytes: the bytes of a step from which one device may have to run its batch in parts; None where no plan does so.
        engines: names of the engines whose plans may be taken.
        later: whether those that look long may do so once a plan of theirs is the best one (:func:`look_later`).
        several: whether some plans run on several devices.
        excluded: what is ruled out already, as ``Constraints.excluded``.
        target: what the step is traced for.
    """

    split: bool = False
    room_bytes: int | None = None
    engines: tuple[str, ...] = ()
    later: bool = False
    several: bool = False
    excluded: Mapping[str, str] = field(default_factory=dict)
    target: Target = "cpu"
    despite: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What was found out about the module.

    Args:
        split: what a split batch changes; None where no candidate splits it.
        shared: the submodules that ranks can share where splitting the batch would change its loss; see ``footprint.sharing``.
        draws: the step's random draws; None where it draws nothing.
        data_draws: where making a batch draws, see :class:`.run_plan.RunPlan`.
        engines: what each engine that was asked found, by its name.
        later: names of the engines that haven't looked yet.
        several_loaders: whether a batch comes from several of them.
        whole: why a training step's batch can't run in parts; None where it can.
        rowless: the same for parts that are rows of its tensors, whose shapes follow from the batch's.
        collated: why its parts can't be cut out of it, where its loader collates them instead.
        counted: FQNs of buffers that a training step changes, and would change once for each part of a batch.
        batches: training batches of the whole fit, at most; None where nobody knows, and where nothing is trained.
        loadings: how ranks may make the batches of loaders, by :func:`.collate.loader_key`.
        known: which tensors the batches have that were tried in parts, by step.
        together: the numbers of samples of several loaders' batches of one step, also of validation; see :class:`.memory.batch.FirstBatch`.
        untraced: why the step couldn't be traced, so that memory and time are guessed; None where it was.
    """

    footprint: Footprint
    split: SplitFinding | None
    draws: DrawPlan | None
    data_draws: tuple[str, ...]
    shared: SharedModules = field(default_factory=dict)
    engines: Mapping[str, Finding] = field(default_factory=dict)
    later: tuple[str, ...] = ()
    several_loaders: bool = False
    whole: str | None = None
    rowless: str | None = None
    collated: str | None = None
    counted: tuple[str, ...] = ()
    batches: int | None = None
    loadings: Mapping[str, Loading] = field(default_factory=dict)
    known: Mapping[str, KnownTensors] = field(default_factory=dict)
    together: tuple[tuple[int, ...], ...] = ()
    untraced: str | None = None


def find_out(trainer: Trainer, questions: Questions) -> Findings:
    """Find out about the step in a forked child; if that takes too long or is killed, make a coarse estimate.

    Raises:
        BaseException: what the user's own ``prepare_data``, ``setup``, loader or training step raised, with the child's traceback as its
            cause.
        RuntimeError: if not even the first batch can be loaded.
    """
    try:
        findings = run_clean(_find, trainer, questions, timeout_seconds=TRACE_SECONDS, meanwhile=partial(_import_early, questions.engines))
        raised = isinstance(findings, Findings) and findings.split is not None and findings.split.raised
        if findings is None or raised or (isinstance(findings, Findings) and findings.footprint.evaluation_failed):
            findings = failure_of_step(trainer, questions.target) or findings
        if findings is None:
            findings = run_clean(_find, trainer, questions, True, timeout_seconds=TRACE_SECONDS)
        assert findings is not None
    except CannotTravel as error:
        findings = _find_here(trainer, questions, error.reason)
    except ChildFailed as error:
        rank_zero_warn(f"autopar: the step could not be traced, so its memory and time are guessed: {error.reason}")
        try:
            findings = run_forked(_guess, trainer, questions, error.reason, timeout_seconds=TRACE_SECONDS)
        except ChildFailed as again:
            raise RuntimeError(
                f"planning needs the run's first batch, but couldn't load it: {again.reason}; check that next(iter(loader)) gives a batch"
            ) from again
    if isinstance(findings, Failure):
        raise findings.exception()
    if findings.untraced is not None:
        rank_zero_warn(f"autopar: the step could not be traced, so its memory and time are guessed: {findings.untraced}")
    return _with_draws_apart(findings)


def _with_draws_apart(findings: Findings) -> Findings:
    """The findings, with the names of the random draws that no rank can make as one device would."""
    names = sorted(name.removeprefix("aten.") for name in findings.footprint.random_draws if draws_apart(name))
    if findings.split is None:
        return findings
    plan = findings.draws
    draws = () if plan is None or plan.seeded else plan.draws or ()
    # Ranks whose generators are in one state make a draw of one shape alike.
    alike = {draw.op for draw in draws} - {draw.op for draw in draws if draw.choice is not None}
    apart = (*(name for name in names if name not in alike), *findings.split.drawn_apart)
    return replace(findings, split=replace(findings.split, drawn_apart=apart))


def drawn_by_rank(findings: Findings) -> Findings:
    """The findings for a run in which each rank draws its own samples' random numbers, from a stream of its own."""
    if findings.draws is None:
        return findings
    split = findings.split
    return replace(
        findings,
        footprint=batch_scaling.drawn_by_rank(findings.footprint),
        draws=replace(findings.draws, seeded=True),
        split=None if split is None else replace(split, notes=(*split.notes, _OWN_DRAWS)),
    )


def _find(trainer: Trainer, questions: Questions, guessing: bool = False) -> Findings | Failure | None:
    """In the forked child: the user's first batch, the traced step, and what engines and a split of its batch change. None where the step
    could be neither traced nor run and ``guessing`` doesn't say that it isn't the user's bug.

    The batch is loaded here, once. Backward passes run in further forked children, never in this process.
    """
    with ExitStack() as children:
        return _find_with(children, trainer, questions, guessing)


def _find_with(children: ExitStack, trainer: Trainer, questions: Questions, guessing: bool) -> Findings | Failure | None:
    """The same; ``children`` ends those that still run."""
    module = trainer.lightning_module
    stage = stage_of(trainer)
    try:
        attach_model_callbacks(trainer)
        batch = first_batch(module, trainer, stage)
    except RAISED as error:  # the user's own code, which would raise in the run as well
        return Failure.of(error)
    validation = validation_batch(module, trainer) if stage == "fit" else None
    seen = seen_sizes(module, batch, validation)
    told: dict[str, Any] = {"despite": questions.despite, "routes": any(not engines.named(name).whole for name in questions.engines)}
    early, loaded = EarlySplits(children, trainer, told), None
    if questions.split and stage == "fit":
        loaded = _loaded(batch, validation, seen)
        if not all(engines.named(name).looks_long for name in questions.engines):  # whose trials wait for the trace alone
            early.begin(loaded.batches)
    footprint, untraced = _looked_at(trainer, questions, batch, seen.validation)
    footprint = with_copies(at_lengths(partial(run_forked, _traced_apart, trainer, questions), batch, footprint, seen), trainer, batch)
    torch.set_num_threads(idle_threads())  # the trace counts what the run's own threads take
    if (footprint.conduct if stage == "fit" else footprint.tape) is None and not footprint.traced and not guessing:
        return None
    room_bytes = questions.room_bytes
    full = room_bytes is not None and step_bytes(footprint) > room_bytes
    # A batch that is longer than any that was seen may run out of memory, and is run again in parts where that gives its loss.
    unsure = room_bytes is not None and questions.target != "cpu" and footprint.lengths is not None and footprint.lengths.open
    probe = questions.split or (stage == "fit" and (full or unsure))
    # So that a batch of an evaluation can be run again in parts; its trial has no backward passes.
    probe = probe or (stage in ("validate", "test") and is_quick(footprint))
    as_drawn = batch, validation
    first = _first_step(trainer, questions, batch=batch, validation=lambda: as_drawn[1], footprint=footprint)
    surely = probe and stage == "fit" and not (questions.later and len(questions.engines) > 1) and is_quick(footprint)
    trials = begin_trials(children, questions.engines if surely else (), first, timeout_seconds=TRACE_SECONDS)
    # An evaluation has no loss to train on; its draws are told by their shapes.
    split, draws = None, DrawPlan() if footprint.random_draws else None
    if loaded is None:
        loaded = _loaded(batch, validation, seen) if probe and stage != "predict" else _Loaded(batches=(batch,))
    (batch, *more), validation, loadings = loaded.batches, next(iter(loaded.validations), validation), loaded.loadings
    whole, rowless = (whole_of((batch, *more), stage, collates=collates) for collates in (True, False))
    collated: str | None = None
    known: dict[str, KnownTensors] = {}
    key = loader_key(batch.loaders[0]) if batch.loaders else ""
    if whole is not None and key in loadings and all(made_of_samples(trainer, each, loadings[key]) for each in (batch, *more)):
        collated, whole, loadings[key] = whole, None, replace(loadings[key], parts=True)
    if probe and stage == "fit":
        split_one = partial(split_of, module, trainer, footprint=footprint, early=early, **told)
        batch, split, draws, uncut = split_as_made(split_one, batch)
        if uncut is not None:
            more = [replace(each, cut=False) for each in more]
            key = loader_key(batch.loaders[0])
            loading = replace(loadings[key], collation="samples")
            parts = whole is None and all(made_of_samples(trainer, each, loading) for each in (batch, *more))
            loadings[key] = replace(loading, parts=parts)
            collated, whole, rowless = (uncut, None, rowless or uncut) if parts else (collated, whole or uncut, rowless or uncut)
        # A loader that makes its batches by itself: ranks cut the rows of its batches, whatever the samples were.
        unmade = whole_of([each for each in more if each.samples is None], stage, collates=False)
        if unmade is not None and split.splittable:
            split = replace(split, splittable=False, reason=f"{unmade}, in another batch than the first")
        # Other batches decide what the first leaves open (a count that is 0 in it may be a mean or a sum), however long that takes.
        if not (LogComparison(matching=split.log_rules).ambiguous or is_quick(footprint)):
            unlike = None if seen.look.unlike is None else seen.look.unlike.samples
            more = [each for each in more if each.samples is unlike and leaves_out(each.known_samples, batch.known_samples)]
        if split.probed:
            split, draws = with_others(split_one, module, [batch, *more], split, draws)
            known |= known_tensors(trainer, "training_step", [batch, *more])
    if probe and stage != "predict":
        evaluated = [*(loaded.validations if stage == "fit" else (batch, *more))]
        apart = zip(evaluated[0].loaders, loaded.looked[-len(evaluated[0].loaders) :], strict=True) if evaluated and loaded.looked else ()
        firsts = [_marked(each[0], loader, loadings) for loader, each in apart if each and evaluated[0].kind != "combined"]
        split = with_evaluation(split or SplitFinding(), module, trainer, evaluated, firsts[1:], stage, is_quick(footprint))
        known |= known_tensors(trainer, "test_step" if stage == "test" else "validation_step", [*evaluated, *firsts])
        kept = (*LogComparison(matching=split.log_rules).hook_notes, *keeping_hooks(trainer))
        split = replace(split, notes=(*split.notes, *seen.notes, *late_hooks(trainer)), rank_notes=(*split.rank_notes, *kept))
    if questions.several and stage == "predict" and (kept := keeping_hooks(trainer, predicting=True)):
        split = replace(split or SplitFinding(), rank_notes=kept)
    shared: SharedModules = {}
    if questions.split and stage == "fit" and split is not None and split.differs and not _RANKS & {*footprint.asked}:
        trained = transferred(module, [as_drawn[0], *(more if is_quick(footprint) else ())])
        with evaluating(trainer):
            evaluated = transferred(module, evaluated)
        footprint, shared = with_shared_network(footprint, module, trainer, trained[0], trained[1:], evaluated)
    # What a long look finds of buffers, the probe of a split batch finds as well.
    waits = questions.later and len(questions.engines) > 1 and split is not None and split.probed
    later = tuple(name for name in questions.engines if waits and engines.named(name).looks_long)
    now = [name for name in questions.engines if name not in later]
    found = looks(now, replace(first, footprint=footprint, split=split), trials())
    return Findings(
        footprint=footprint,
        split=split,
        draws=draws,
        shared=shared,
        data_draws=batch.draws,
        engines=found,
        later=later,
        several_loaders=batch.kind == "combined",
        whole=whole,
        rowless=rowless,
        collated=collated,
        counted=(*(name for each in found.values() for name in each.counted), *(() if split is None else split.counted)),
        batches=_batches_of_fit(trainer, batch),
        loadings=loadings,
        known=known,
        together=(*batch.together, *(() if validation is None else validation.together)),
        untraced=untraced,
    )


def _import_early(names: Iterable[str]) -> None:
    """While a child traces the step, import what these engines' trials and workers need, if another core is there for it."""
    for name in names if (os.cpu_count() or 1) > 1 else ():
        engines.named(name).import_early()


def look_later(trainer: Trainer, questions: Questions, findings: Findings) -> dict[str, Finding]:
    """What engines find that haven't looked yet; those in question are ruled out where they can't."""
    try:
        return run_clean(_look_again, trainer, questions, findings.footprint, findings.split, timeout_seconds=TRACE_SECONDS)
    except (ChildFailed, CannotTravel) as error:
        log.debug("engines can't look at the step", exc_info=True)
        words = not_made(error.reason).reason
        return {name: Finding(refusals={name: words}) for name in questions.engines}


def _look_again(trainer: Trainer, questions: Questions, footprint: Footprint, split: SplitFinding | None) -> dict[str, Finding]:
    """In another forked child, which loads the first batch anew."""
    return looks(questions.engines, _first_step(trainer, questions, footprint=footprint, split=split, **loaded_anew(trainer)))


def loaded_anew(trainer: Trainer) -> dict[str, Any]:
    """For a :class:`FirstStep` in a forked child, whose threads it sets: the first batch, and what loads that of the validation."""
    module, stage = trainer.lightning_module, stage_of(trainer)
    torch.set_num_threads(idle_threads())
    batch = first_batch(module, trainer, stage)
    return {"batch": batch, "validation": lambda: validation_batch(module, trainer) if stage == "fit" else None}


def _first_step(trainer: Trainer, questions: Questions, **told: Any) -> FirstStep:
    return FirstStep(trainer=trainer, stage=stage_of(trainer), several=questions.several, excluded=questions.excluded, **told)


def _looked_at(trainer: Trainer, questions: Questions, batch: FirstBatch, validation: FirstBatch | None) -> tuple[Footprint, str | None]:
    """The step's footprint, and why it is a coarse one if it is; then the other checks still follow. Tracing can end its process: torch
    asks a fake tensor for its device through Python, even in C++ functions that are ``noexcept`` (``c10::TensorImpl::device_custom``), and
    there an exception or a full stack ends it. For real tensors it doesn't, so the step then runs for real in another process.
    """
    try:
        early = partial(_import_early, questions.engines)
        return run_forked(_traced_apart, trainer, questions, batch, validation, meanwhile=early), None
    except ChildFailed as error:
        log.debug("the step can't be traced", exc_info=True)
        failed_by = error
    if failed_by.crashed:
        try:
            return run_forked(_traced_apart, trainer, questions, batch, validation, failed_by.reason), None
        except ChildFailed as error:
            log.debug("the step can't be run for real either", exc_info=True)
            failed_by = error
    module, stage = trainer.lightning_module, stage_of(trainer)
    return run_forked(partial(guess, stage=stage, dtype=None, reason=failed_by.reason), module, trainer, batch), failed_by.reason


def _marked(batch: FirstBatch, loader: Any, loadings: Mapping[str, Loading]) -> FirstBatch:
    """The batch, with how ranks make its parts, and with what other batches of its loader show."""
    loading = loadings.get(loader_key(loader))
    if batch.samples is None or loading is None:
        return batch
    batch = replace(batch, draws=tuple(sorted({*batch.draws, *loading.draws})))
    if loading.collation != "whole" or makes_rows(loader):
        return batch
    rows = CollateAll(batch.collate, 0, Dealing.even(1))(fresh(batch.samples))[0] if batch.collate is not None else batch.batch_size
    if rows == batch.batch_size:
        return replace(batch, cut=True)
    return replace(batch, samples=None, collate=None, batch_size=rows)  # its collate function leaves samples out


@dataclass(frozen=True, kw_only=True)
class _Loaded:
    """The batches that are probed, the first one and some more, as ranks make their parts; and of the validation within a fit. What other
    batches of the loaders show, by the loader's key, and some batches of each.
    """

    batches: Sequence[FirstBatch]
    validations: Sequence[FirstBatch] = ()
    loadings: dict[str, Loading] = field(default_factory=dict)
    looked: Sequence[Sequence[FirstBatch]] = ()


def _loaded(batch: FirstBatch, validation: FirstBatch | None, seen: Seen) -> _Loaded:
    own, validating = batch.loaders, () if validation is None else validation.loaders
    loadings, looked = look_at([*own, *validating])
    batches, validations = [batch], list[FirstBatch]()
    if batch.kind != "combined":
        batches = [_marked(each, own[0], loadings) for each in (batch, *_some(looked[0], seen.look.unlike))]
    if validation is not None:
        more = _some(looked[len(own)], seen.validation_unlike)
        validations = [_marked(each, validating[0], loadings) for each in (validation, *more)]
    return _Loaded(batches=batches, validations=validations, loadings=loadings, looked=looked)


def _some(looked: Sequence[FirstBatch], unlike: FirstBatch | None) -> list[FirstBatch]:
    """Besides the first batch: the largest and the last one of its loader, one unlike the first, and one without rows if there is one."""
    more = looked[1:]
    largest = max(more, key=lambda batch: sum(tensor.numel() for tensor in tensors_of(batch.batch)), default=None)
    last = more[0] if more else None  # see `some_batches`
    uncut = next((batch for batch in more if batch.samples is None and why_whole(batch.batch) is not None), None)
    return list({id(batch): batch for batch in (largest, last, unlike, uncut) if batch is not None}.values())


def stage_of(trainer: Trainer) -> str:
    """What the trainer is about to do; ``"fit"`` where it doesn't say."""
    return str(trainer.state.fn.value) if trainer.state.fn is not None else "fit"


def _traced(
    trainer: Trainer, questions: Questions, batch: FirstBatch, validation: FirstBatch | None = None, crashed: str | None = None
) -> Footprint:
    """Traces the step as it will run on the present devices; see :func:`.trace.trace`."""
    asked: dict[str, Any] = {"precision": str(trainer.precision), "target": questions.target, "validation": validation, "crashed": crashed}
    return trace(trainer.lightning_module, trainer, batch, stage=stage_of(trainer), **asked)


def _traced_apart(trainer: Trainer, questions: Questions, batch: FirstBatch, *given: Any) -> Footprint:
    """The same in a forked child, where callbacks may be called: with the batch as they leave it for the step."""
    loop = {"fit": "train", "validate": "validation"}.get(stage := stage_of(trainer), stage)
    left, unknown = as_callbacks_leave(batch.batch, trainer, loop)
    footprint = _traced(trainer, questions, replace(batch, batch=left), *given)
    return replace(footprint, assumptions=(*footprint.assumptions, *unknown, *batch.unprepared))


def _find_here(trainer: Trainer, questions: Questions, reason: str) -> Findings | Failure:
    """Find out the same where that child can't run: another child loads the batches, and the step is traced here on a fake copy. Checks
    that need backward passes on real copies aren't made, and plans that depend on them are left out.

    Args:
        reason: why that child can't run, as the end of a sentence.
    """
    stage = stage_of(trainer)
    batches = run_forked(_batches, trainer, stage, timeout_seconds=TRACE_SECONDS)
    if isinstance(batches, Failure):
        return batches
    batch, validation, seen = batches
    footprint = _traced(trainer, questions, batch, seen.validation)
    footprint = with_copies(at_lengths(partial(_traced, trainer, questions), batch, footprint, seen), trainer, batch)
    first = _first_step(trainer, questions, batch=batch, validation=lambda: validation, footprint=footprint, untried=reason)
    untried = SplitFinding(
        splittable=False, probed=False, reason=f"not checked: whether a batch in parts gives the same loss and gradients, as {reason}"
    )
    return Findings(
        footprint=footprint,
        split=untried if stage != "predict" else None,
        draws=DrawPlan() if stage == "fit" or footprint.random_draws else None,
        data_draws=batch.draws,
        engines=looks(questions.engines, first),
        several_loaders=batch.kind == "combined",
        whole=whole_of((batch,), stage, collates=True),
        rowless=whole_of((batch,), stage, collates=False),
        batches=_batches_of_fit(trainer, batch),
    )


def _batches(trainer: Trainer, stage: str) -> tuple[FirstBatch, FirstBatch | None, Seen] | Failure:
    """In a forked child: the first batches, without the objects that make them, which may not be picklable."""
    module = trainer.lightning_module
    try:
        batch = first_batch(module, trainer, stage)
    except RAISED as error:  # as in _find
        return Failure.of(error)
    validation = validation_batch(module, trainer) if stage == "fit" else None
    seen = seen_sizes(module, batch, validation).without_makers()
    return batch.without_makers(), None if validation is None else validation.without_makers(), seen


def _batches_of_fit(trainer: Trainer, batch: FirstBatch) -> int | None:
    """The training batches of a whole fit, by the trainer's limits; a fit from a checkpoint, or stopped early, has fewer."""
    if stage_of(trainer) != "fit":
        return None
    an_epoch, epochs, steps, found = batch.epoch_batches, trainer.max_epochs, trainer.max_steps, []
    if an_epoch is not None and epochs is not None and epochs >= 0:
        found.append(an_epoch * epochs)
    if steps >= 0 and trainer.lightning_module.automatic_optimization:  # otherwise a batch may have any number of steps
        each = trainer.accumulate_grad_batches
        if an_epoch:  # an epoch's last step may have fewer batches
            whole, rest = divmod(steps, -(-an_epoch // each))
            found.append(whole * an_epoch + rest * each)
        else:
            found.append(steps * each)
    return min(found, default=None)


def _guess(trainer: Trainer, questions: Questions, reason: str) -> Findings | Failure:
    """In another forked child: guess a footprint from the parameters and the first batch; nothing is known about a split or draws."""
    module = trainer.lightning_module
    stage = stage_of(trainer)
    try:
        batch = first_batch(module, trainer, stage)
    except RAISED as error:  # as above
        return Failure.of(error)
    footprint = with_copies(guess(module, trainer, batch, stage=stage, dtype=None, reason=reason), trainer, batch)
    words = f"the step could not be traced: {reason}"
    first = _first_step(trainer, questions, batch=batch, validation=lambda: None, footprint=footprint, untried=words, fakes=False)
    return Findings(
        footprint=footprint,
        split=SplitFinding(probed=False, reason=words),
        draws=DrawPlan(),
        data_draws=batch.draws,
        engines=looks(questions.engines, first),
        several_loaders=batch.kind == "combined",
        whole=whole_of((batch,), stage, collates=True),
        rowless=whole_of((batch,), stage, collates=False),
        batches=_batches_of_fit(trainer, batch),
    )


def looks(names: Iterable[str], first: FirstStep, trials: Mapping[str, Any] | None = None) -> dict[str, Finding]:
    """What each of these engines finds; one whose look fails is ruled out.

    Args:
        trials: what their trials found that have run already, by the engine's name.
    """
    found: dict[str, Finding] = {}
    for name in names:
        try:
            found[name] = engines.named(name).look(replace(first, trial=(trials or {}).get(name)))
        except Exception as error:  # the module may raise anything outside of a plain step
            log.debug("the engine %s can't look at the step", name, exc_info=True)
            words = not_made(f"looking at it failed ({type(error).__name__}: {error})").reason
            found[name] = Finding(refusals={name: words})
    return found


def begin_trials(children: ExitStack, names: Iterable[str], first: FirstStep, *, timeout_seconds: float) -> Callable[[], dict[str, Any]]:
    """Begin these engines' long trials in a child, where another core is there for it: gives what waits for what they find, by the
    engine's name. This process and the child share its threads from then on.

    Args:
        children: ends the child if nobody has waited for it.
        names: of engines that are surely to look.
        first: the step, small enough to run twice at a time, without what splitting its batch changes.
        timeout_seconds: ends the child after so long.
    """
    long = [name for name in names if engines.named(name).looks_long]
    if not long or (os.cpu_count() or 1) < 2:
        return dict
    torch.set_num_threads(max(1, torch.get_num_threads() // 2))
    result = children.enter_context(forked(_try, long, first, timeout_seconds=timeout_seconds))

    def trials() -> dict[str, Any]:
        try:
            return result()
        except ChildFailed:  # the looks make them again, one by one, and say which fails
            log.debug("trials beside the probes of a split batch failed", exc_info=True)
            return {}

    return trials


def _try(names: Sequence[str], first: FirstStep) -> dict[str, Any]:
    return {name: engines.named(name).trial(first) for name in names}
