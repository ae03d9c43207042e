"""Whether a module's steps can run in stages, and where they can be cut: found out on the first batch, before any worker starts.

A step is recorded, then really run in stages (:mod:`.side_by_side`), or, where it is too large for that, recorded under fake tensors. A cut
whose stages compute something else is never a candidate. Knows Lightning modules; nothing of devices, schedules or how plans are chosen.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import psutil
import torch
from torch.nn.parameter import is_lazy

from lightning_autopar._fork import ChildFailed, run_forked
from lightning_autopar._lightning import LightningModule, Trainer
from lightning_autopar._lightning_compat import evaluating, is_overridden, transfer_batch
from lightning_autopar.engines import PASSED, Check, Finding, FirstStep, failed, not_made
from lightning_autopar.exact.data.loader_calls import called_by_loaders
from lightning_autopar.exact.random.whole_batch_draws import GlobalDraws
from lightning_autopar.exact.step.kept_attributes import is_variable, title
from lightning_autopar.exact.step.micro_batches import take_part
from lightning_autopar.memory.fakes.fake_copies import as_if_real, drawing_nothing, fake_copy, fake_mode
from lightning_autopar.memory.fakes.shadow_values import ShadowValues
from lightning_autopar.memory.footprint import Conduct, Footprint
from lightning_autopar.memory.trace.bare_step import STEPS
from lightning_autopar.memory.trace.find_blocks import find_blocks
from lightning_autopar.memory.trace.first_batch import FirstBatch, batch_size_of, copied, some_batches
from lightning_autopar.strategies.pipeline.rehearsal.in_one_process import Precision
from lightning_autopar.strategies.pipeline.rehearsal.side_by_side import CannotTry, Script, Trial, recorded_together
from lightning_autopar.strategies.pipeline.stages.cut_tensors import Staging, StepRecording, with_loader
from lightning_autopar.strategies.pipeline.stages.possible_cuts import record
from lightning_autopar.strategies.trials.draw_probe import everything
from lightning_autopar.strategies.trials.optimizer_trial import step_apart


def untried_words(reason: str) -> str:
    """The sentence that nothing was compared, and why."""
    return f"whether its stages compute the same is only checked as they run: no trial was made, as {reason}"


def refused(reason: str) -> Finding:
    """The finding for a module that can't run in stages."""
    return Finding(value=Staging(refusal=reason))


_LOG = logging.getLogger(__name__)

#: The most FLOPs of all steps, forward and backward: some seconds on a CPU core.
_FLOPS = 1e11
#: The steps of a probe: recording, and two steps each of the whole module and of three ways to cut it.
_STEPS = 9
#: The steps of a trial of a plan's cuts: recording, and one step each of the whole module and of its stages.
_CONFIRM_FLOPS = 1e12
_CONFIRM_STEPS = 3
#: The share of the host's free memory for the whole module and its stages, each with gradients and optimizer states.
_HOST_SHARE = 0.5
_COPIES = 10
_TIMEOUT_SECONDS = 120.0


def probe_stages(
    module: LightningModule,
    trainer: Trainer | None,
    batches: Mapping[str, FirstBatch],
    fn: str = "fit",
    *,
    precision: Precision | None = None,
    flops: int = 0,
    blocks: Sequence[str] = (),
) -> Finding:
    """Record the steps that a run will call, and compare them in stages with whole ones.

    The finding's value is a :class:`Staging`, with the reason where there are no stages. What is only recorded is ``untried``, as a plan's
    own cuts are before it is taken (:func:`confirm_stages`).

    Args:
        module: the user's module, set up; it stays as it is.
        batches: the first batch of each hook that the run calls: ``"training_step"``, ``"validation_step"``, …
        fn: what the trainer does: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        precision: of the run; single unless given.
        flops: of a step on the whole batch, forward and backward.
        blocks: FQNs of the footprint's; the module's repeated blocks unless given.
    """
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            return refused(f"the parameter {name!r} gets its shape in the first step, and a pipeline is cut before")
    if fn == "fit" and not module.automatic_optimization:
        return refused("a pipeline's schedule runs backward, but the module calls backward by itself")
    found = len(blocks or find_blocks(module))
    if found < 2 and not is_overridden("configure_model", module):
        return refused(
            f"a pipeline is cut between blocks or layers that share no parameters and run once a step, and the module has {found}"
        )
    precision = precision or Precision()
    why = _too_large(module, batches, flops)
    began = time.monotonic()
    if why is None:
        try:
            finding = run_forked(_try, module, trainer, batches, fn, precision, flops, blocks, timeout_seconds=_TIMEOUT_SECONDS)
        except ChildFailed as error:
            _LOG.debug("the stages can't be tried", exc_info=True)
            if time.monotonic() - began < _TIMEOUT_SECONDS:
                return refused(f"the step can't be tried in stages ({error.reason})")
            finding = f"trying them takes more than {_TIMEOUT_SECONDS:.0f} s"
        if isinstance(finding, Finding):
            return finding
        why = finding
    try:
        return run_forked(_structure, module, trainer, batches, precision, why, blocks, timeout_seconds=_TIMEOUT_SECONDS)
    except ChildFailed as error:
        _LOG.debug("the step can't be recorded", exc_info=True)
        return refused(f"it can't be told where the step can be cut into stages ({error.reason})")


def confirm_stages(
    module: LightningModule,
    trainer: Trainer | None,
    batches: Mapping[str, FirstBatch],
    fn: str,
    cuts: Sequence[str],
    *,
    precision: Precision | None = None,
    flops: int = 0,
    blocks: Sequence[str] = (),
) -> Finding:
    """Try one plan's cuts where :func:`probe_stages` has only recorded, with a step or two of few samples; in this process.

    Args:
        module: the user's module, set up; meant for a forked child.

    Returns:
        With a refusal where the stages compute something else, or where the whole step can't be run; with ``untried`` where it is
        too large.
    """
    why = _too_large(module, batches, flops, steps=_CONFIRM_STEPS, most=_CONFIRM_FLOPS)
    if why is not None:
        return Finding(value=Staging(), untried=why)
    count = _samples(batches, flops, _CONFIRM_STEPS, _CONFIRM_FLOPS)
    trial, several = _trial(module, trainer, batches, fn, precision or Precision(), count, blocks, steps=1)
    if isinstance(trial, str):
        return refused(not_made(trial).reason)
    if several is not None:
        return refused(several)
    words = trial.compare(tuple(cuts))
    if words is None and trial.appended:  # found out too late to tell the run of it
        words = f"the step appends values to the module's {next(iter(trial.appended))!r} that only the last stage would have"
    return Finding(value=Staging(hooks=trial.recordings, refusal=words))


def kept_apart(first: FirstStep, appended: Sequence[str] = ()) -> dict[str, str]:
    """Why stages can't keep what a step keeps: on the module no pipeline can, besides those lists, and in variables none that runs a batch
    in parts. Empty where nothing kept depends on its samples.
    """
    found: dict[str, str] = {}
    for hook, rules in () if first.split is None else first.split.kept_rules.items():
        for name, *_ in rules:
            words = f"{hook} keeps {title(first.trainer.lightning_module, name)}, which"
            if is_variable(name):
                found.setdefault("pipeline_parts", f"{words} each part of a batch would change by itself")
            elif name not in appended:
                found.setdefault("pipeline", f"{words} each rank of a pipeline would have of its own stages alone")
    return found


def needed_by_loaders(first: FirstStep) -> str | None:
    """Why loaders can't make their batches on a rank that has a part of the module; None where nothing says so."""
    called = called_by_loaders((first.batch, first.validation()), first.trainer.lightning_module)
    return None if called is None else f"the loader {called} to make a batch, and each rank of a pipeline has a part of the module"


def layers_of(footprint: Footprint) -> tuple[str, ...]:
    """FQNs of the blocks and layers before which a stage may begin; none where there are repeated blocks alone."""
    return () if all(block.repeated for block in footprint.blocks) else tuple(block.fqn for block in footprint.blocks)


def appended_apart(staging: Staging) -> str | None:
    """Why a batch must run through the stages in one piece: parts of it would each append to a list; None where it need not."""
    if not staging.appended:
        return None
    return f"the step appends to the module's {staging.appended[0]!r}: each part of a batch would append"


def check_cuts(first: FirstStep, cuts: Sequence[str], notes: tuple[str, ...], *, runs_again: bool = False) -> Check:
    """Whether stages with these cuts, only recorded so far, compute what the whole module computes.

    Args:
        first: the step; meant for a forked child.
        notes: the probe's, kept if the plan can't be tried and does nothing that may differ in stages.
        runs_again: whether blocks have several calls, whose order stages change.
    """
    trainer, precision = first.trainer, precision_of(str(first.trainer.precision))
    flops = first.footprint.flops
    told: Any = {"precision": precision, "flops": flops, "blocks": layers_of(first.footprint)}
    found = confirm_stages(trainer.lightning_module, trainer, batches_of(first), first.stage, cuts, **told)
    if found.value.refusal is not None:
        return failed(found.value.refusal)
    if found.untried is None:
        return PASSED
    if runs_again:
        return not_made(f"{found.untried}, and its blocks run several times")
    check = unstaged(first.footprint.conduct, found.untried)
    return Check(outcome="passed", notes=notes) if check is None else check


def unstaged(conduct: Conduct | None, untried: str) -> Check | None:
    """Why not to take a pipeline whose stages can't be tried; None where nothing in the traced step could run differently in stages.

    Args:
        untried: why they can't be tried, as the end of a sentence.
    """
    if conduct is None:
        return not_made(f"{untried}, and it couldn't be traced either")
    names = (*dict(conduct.written), *conduct.exchanged)
    return not_made(f"{untried}, and it writes to the parameter {names[0]!r} by itself") if names else None


def batches_of(first: FirstStep) -> dict[str, FirstBatch]:
    """The hooks that the run calls."""
    batches: dict[str, FirstBatch] = {STEPS[first.stage]: first.batch}
    if (validation := first.validation()) is not None:
        batches[STEPS["validate"]] = validation
    return {hook: batch if hook == STEPS["fit"] else _with_others(batch, first.trainer) for hook, batch in batches.items()}


def _with_others(batch: FirstBatch, trainer: Trainer) -> FirstBatch:
    """An evaluation's first batch, with those of its other loaders, whose steps may be others."""
    found: list[FirstBatch] = []
    for number, loader in enumerate(batch.loaders[1:] if batch.kind != "combined" else (), 1):
        try:
            with evaluating(trainer):
                for drawn in some_batches(loader, 0)[:1]:
                    given = transfer_batch(trainer.lightning_module, drawn.batch, number)
                    found.append(replace(drawn, batch=given, batch_size=drawn.batch_size or batch_size_of(given), loader=number))
        except Exception:  # of the user's loader, which the run will meet as well
            _LOG.debug("loader %d of an evaluation gives no batch", number, exc_info=True)
    return replace(batch, besides=tuple(found))


def _too_large(
    module: LightningModule, batches: Mapping[str, FirstBatch], flops: int, *, steps: int = _STEPS, most: float = _FLOPS
) -> str | None:
    size_bytes = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    if size_bytes * _COPIES > psutil.virtual_memory().available * _HOST_SHARE:
        return f"{_COPIES} copies of the module, which a trial may need, don't fit into the host's memory"
    if not _samples(batches, flops, steps, most):
        return f"a step of {flops:.1e} floating-point operations is too long to try on the CPU"
    return None


def _samples(batches: Mapping[str, FirstBatch], flops: int, steps: int = _STEPS, most: float = _FLOPS) -> int:
    """How many samples to try: all, or two if a step is long; 0 for none."""
    whole = max(1, next(iter(batches.values())).batch_size)
    if flops * steps <= most:
        return whole
    return 2 if whole > 2 and flops * steps * 2 / whole <= most else 0


# -- in the forked child ---------------------------------------------------------------------------------------------------------------


def _try(
    module: LightningModule,
    trainer: Trainer | None,
    batches: Mapping[str, FirstBatch],
    fn: str,
    precision: Precision,
    flops: int,
    blocks: Sequence[str] = (),
) -> Finding | str:
    """Record with real tensors, and compare; a reason if the whole step can't be run, so that nothing is known about its stages."""
    trial, several = _trial(module, trainer, batches, fn, precision, _samples(batches, flops), blocks)
    if isinstance(trial, str):
        return trial
    if several is not None:
        return refused(several)
    recordings = trial.recordings
    uncuttable = merged(recordings)
    refusal = nowhere(recordings, uncuttable) or trial.narrow(next(iter(recordings.values())).blocks, uncuttable)
    refusal = refusal or nowhere(recordings, uncuttable)
    staging = Staging(hooks=recordings, refusal=refusal, appended=tuple(trial.appended))
    return Finding(value=staging, uncuttable=uncuttable, counted=trial.counted)


def _trial(
    module: LightningModule,
    trainer: Trainer | None,
    batches: Mapping[str, FirstBatch],
    fn: str,
    precision: Precision,
    count: int,
    blocks: Sequence[str],
    steps: int = 2,
) -> tuple[Trial | str, str | None]:
    """Run the whole module's steps and record them; the trial, or the reason why they fail, and the reason if no stages could run such
    steps.
    """
    if is_overridden("configure_model", module):
        module.configure_model()
        module.__dict__["configure_model"] = lambda: None
    scripts = {hook: _script(module, trainer, first, count, steps) for hook, first in batches.items()}
    trial = Trial(module, trainer, scripts, fn, precision, blocks)
    draws, drawn_from = GlobalDraws(lambda: everything(1)), list[torch.Generator]()
    draws.on_generator = drawn_from.append
    try:
        with draws:
            several = trial.run_whole()
    except CannotTry as error:
        return f"the step can't be run on the CPU ({error})", None
    if any(each is not torch.default_generator for each in drawn_from):
        several = several or "it draws from a torch.Generator of its own, which the stages can't keep in step"
    if several is None:
        try:
            trial.record()
        except CannotTry as error:
            several = str(error)
    return trial, several


def _structure(
    module: LightningModule,
    trainer: Trainer | None,
    batches: Mapping[str, FirstBatch],
    precision: Precision,
    why: str,
    given: Sequence[str],
) -> Finding:
    def one(hook: str, written: frozenset[str]) -> StepRecording:
        found = of(batches[hook], hook, written)
        for each in batches[hook].besides:
            found = with_loader(found, of(each, hook, written), each.loader)
        return found

    def of(first: FirstBatch, hook: str, written: frozenset[str]) -> StepRecording:
        mode, shadow = fake_mode(), ShadowValues()
        copy: LightningModule = fake_copy(module, mode, shadow, dtype=precision.true)
        batch = fake_copy(first.batch, mode, shadow, dtype=precision.true)
        with drawing_nothing(), as_if_real(shadow, "cpu"), mode, shadow:
            if is_overridden("configure_model", copy):
                copy.configure_model()
                copy.__dict__["configure_model"] = lambda: None
            told: Any = {"rows": first.batch_size, "loader": first.loader, "context": precision.context, "written": written}
            return record(copy, trainer, hook, batch, given or list(find_blocks(copy)), **told)

    if "training_step" in batches and (refusal := step_apart(module, trainer).refusal) is not None:
        return refused(refusal)
    recordings = recorded_together(list(batches), one)
    uncuttable = merged(recordings)
    written = recordings["training_step"].written if "training_step" in recordings else ()
    return Finding(
        value=Staging(hooks=recordings, refusal=nowhere(recordings, uncuttable)),
        uncuttable=uncuttable,
        untried=why,
        notes=(untried_words(why),),
        counted=tuple(sorted(name for name, _ in module.named_buffers() if name in written)),
    )


def merged(recordings: Mapping[str, StepRecording]) -> dict[str, str]:
    """Blocks that can't begin a stage in one of the hooks, or come in another order there, with the reason."""
    first = next(iter(recordings.values()))
    found: dict[str, str] = {}
    for hook, recording in recordings.items():
        prefix = "" if hook == "training_step" else f"in {hook}, "
        for block, reason in recording.uncuttable.items():
            found.setdefault(block, prefix + reason)
        for block in {*first.blocks, *recording.blocks}:
            if block not in recording.blocks or block not in first.blocks:
                found.setdefault(block, f"{block!r} doesn't run in {hook if block in first.blocks else first.hook}")
            elif set(_before(recording, block)) != set(_before(first, block)):
                found.setdefault(block, f"{block!r} comes at another place in {hook} than in {first.hook}")
    return found


def _before(recording: StepRecording, block: str) -> tuple[str, ...]:
    return recording.blocks[: recording.blocks.index(block)]


def nowhere(recordings: Mapping[str, StepRecording], uncuttable: Mapping[str, str]) -> str | None:
    """Why there is no place for a cut; None where there is one."""
    blocks = next(iter(recordings.values())).blocks
    if len(blocks) < 2:
        reasons = Counter(uncuttable.values())
        common = f": {reasons.most_common(1)[0][0]}" if reasons else ""
        return f"a pipeline is cut between blocks that run once each, and the step has {len(blocks)}{common}"
    if all(block in uncuttable for block in blocks[1:]):
        return f"the step can't be cut before any of its blocks: {Counter(uncuttable[block] for block in blocks[1:]).most_common(1)[0][0]}"
    return None


def _script(module: LightningModule, trainer: Trainer | None, first: FirstBatch, count: int, steps: int) -> Script:
    """The first batch, or a few of its samples, and a part of that for a second step: stages get parts of all sizes."""
    several = first.kind == "combined"

    def whole() -> Any:
        """The batch anew each time, since a step may change what it gets."""
        if 0 < count < first.batch_size:
            if first.samples is not None and first.collate is not None:
                batch = first.collate(first.samples[:count])
                return batch if trainer is None else transfer_batch(module, batch, first.loader)
            return take_part(first.batch, 0, first.batch_size // count, several=several)
        return copied(first.batch)

    def half() -> Any:
        return take_part(whole(), 0, 2, several=several)

    rows = min(count, first.batch_size)
    besides = tuple(_script(module, trainer, each, count, 1) for each in first.besides)
    told: Any = {"rows": rows, "loader": first.loader, "besides": besides}
    try:
        half()
    except ValueError:  # the batch can't be split, and no plan will split it
        return Script(batches=(whole, whole)[:steps], **told)
    return Script(batches=(whole, half if rows > 3 else whole)[:steps], **told)


def precision_of(name: str) -> Precision:
    """The precision of that Lightning name."""
    types = {"16": torch.float16, "bf16": torch.bfloat16, "64": torch.float64}
    kind = next((found for word, found in types.items() if name.startswith(word)), None)
    if name in ("transformer-engine", "transformer-engine-float16"):
        kind = torch.bfloat16 if name == "transformer-engine" else torch.float16
        return Precision(true=kind)
    return Precision(autocast=kind) if name in ("16", "bf16") or name.endswith("-mixed") else Precision(true=kind)
