"""What a split of its batches changes in a step, found out in forked children: of the first batch, beside the trace where that is likely to
help, and of others; and what the steps of an evaluation log and keep of it, in each loader.

Also whether a rank can run a training batch in parts, by how it was made: cut out of the collated batch, or collated anew of their samples.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._pytree import keystr, tree_flatten_with_path

from lightning_autopar._fork import ChildFailed, forked, run_forked
from lightning_autopar._lightning import Callback, LightningModule, Trainer
from lightning_autopar._lightning_compat import evaluating, is_overridden, transfer_batch
from lightning_autopar._root import PYTORCH
from lightning_autopar.constraints import LOSS, SPLIT_TOLERANCE, SplitFinding
from lightning_autopar.exact.data.collate import Loading
from lightning_autopar.exact.data.counted_entries import Count
from lightning_autopar.exact.data.rank_share import KnownTensors
from lightning_autopar.exact.data.unlike_samples import leaves_out
from lightning_autopar.exact.logs.log_rules import LogComparison
from lightning_autopar.exact.logs.metrics_of_values import keeping_apart
from lightning_autopar.exact.random import generator_states as rng
from lightning_autopar.exact.random.whole_batch_draws import DrawPlan
from lightning_autopar.exact.step.micro_batches import why_whole
from lightning_autopar.memory.footprint import Conduct, Footprint
from lightning_autopar.memory.trace.find_blocks import find_blocks
from lightning_autopar.memory.trace.first_batch import FirstBatch, first_batch, fresh, tensors_of
from lightning_autopar.strategies.trials.fewer_blocks import extent
from lightning_autopar.strategies.trials.split_probe import probe_evaluation, probe_split

log = logging.getLogger(__name__)

#: Other batches than the first are probed where a step has no more floating-point operations, bytes moved and operations than this, with
#: which its probe takes some 0.4 s on a core: the run's first step waits for the probes. Seconds would differ from run to run, and the
#: verdict with them.
QUICK_FLOPS, QUICK_BYTES, QUICK_OPERATIONS = 10**10, 15 * 10**8, 5000
#: A step is probed while it is traced if its parameters have no more bytes, and its batch no more numbers: a large step would take the
#: host's memory twice before the trace shows that it is large.
EARLY_BYTES, EARLY_NUMBERS = 64 << 20, 1 << 16
#: Finds out what a split of a batch changes.
Split = Callable[..., tuple[SplitFinding, DrawPlan]]


def is_quick(footprint: Footprint) -> bool:
    """Whether the step is small enough to be probed on several batches, by what was counted in it."""
    works = (work for part in (*footprint.blocks, *footprint.outer) for work in (*part.work, *part.backward_work))
    return footprint.flops <= QUICK_FLOPS and footprint.moved_bytes <= QUICK_BYTES and sum(work.count for work in works) <= QUICK_OPERATIONS


def idle_threads() -> int:
    """How many threads a trial may compute with: as many as a step of the run, but not more than cores were idle in the last minute.
    Threads that have to take turns wait for each other at every operation: a pipeline's trial was seen to take ten times as long.
    """
    return max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) - round(os.getloadavg()[0])))


class EarlySplits:
    """Probes of split batches beside the trace, where another core is there for them. They take for granted what nearly every trace shows:
    a quick step that writes to no parameter. Where the trace shows something else, they are made again.

    Args:
        told: further arguments of :func:`.split_probe.probe_split`.
    """

    def __init__(self, children: ExitStack, trainer: Trainer, told: Mapping[str, Any]) -> None:
        self._children, self._trainer, self._told = children, trainer, told
        self._begun: dict[int, tuple[FirstBatch, Callable[[], tuple[SplitFinding, DrawPlan]]]] = {}

    def begin(self, batches: Sequence[FirstBatch]) -> None:
        """Begin to probe these, of which the first one is changed as well."""
        module = self._trainer.lightning_module
        # What configure_model builds may be large: the trace says so first.
        late = is_overridden("configure_model", module) or any(is_lazy(parameter) for parameter in module.parameters())
        if (os.cpu_count() or 1) < 2 or late or sum(parameter.nbytes for parameter in module.parameters()) > EARLY_BYTES:
            return
        for number, batch in enumerate(batches):
            small = sum(tensor.numel() for tensor in tensors_of(batch.batch)) <= EARLY_NUMBERS
            if small and batch.batch_size > 1 and batch.samples is not None and "collate" not in batch.draws:
                told = {**self._told, "tries_others": number == 0}
                result = forked(_split_early, module, self._trainer, batch, told)
                self._begun[id(batch)] = batch, self._children.enter_context(result)

    def found(self, batch: FirstBatch, footprint: Footprint, known: Collection[Count]) -> tuple[SplitFinding, DrawPlan] | None:
        """What the probe of this batch has found; None where there is none that was told the same. It wasn't told the counts that are
        ``known`` of other batches, which is the same where parts of this one have as many of these as of samples.
        """
        _, result = self._begun.pop(id(batch), (batch, None))
        module, size, conduct = self._trainer.lightning_module, batch.batch_size, footprint.conduct
        blocks = any(block.repeated for block in footprint.blocks)
        same = conduct is not None and not conduct.written and blocks == bool(find_blocks(module)) and is_quick(footprint)
        if result is None or not same or extent(module, {}, footprint.flops / 3 / size, [size], size) is None:
            return None
        try:
            found = result()
        except ChildFailed:  # it is made again, which says why
            log.debug("the probe of a split batch beside the trace failed", exc_info=True)
            return None
        return found if {*known} <= {*found[0].even} else None


def _split_early(module: LightningModule, trainer: Trainer, batch: FirstBatch, told: dict[str, Any]) -> tuple[SplitFinding, DrawPlan]:
    """In a forked child that shares the cores with the trace."""
    torch.set_num_threads(max(1, idle_threads() // 2))
    return probe_split(module, trainer, batch, conduct=Conduct(), blocks=dict.fromkeys(find_blocks(module), 0), **told)


def split_as_made(split_one: Split, batch: FirstBatch) -> tuple[FirstBatch, SplitFinding, DrawPlan, str | None]:
    """What a split batch changes, with parts made as ranks make them: cut from the whole batch, or collated alone if that differs less.

    Then, at the end, why no part may be cut out of the collated batch.
    """
    if "collate" in batch.draws:  # ranks cut their rows from the collated batch, and so does the probe
        batch = replace(batch, samples=None, collate=None)
    split, draws = split_one(batch)
    if not batch.cut or batch.samples is None or (split.splittable and split.probed and split.difference <= SPLIT_TOLERANCE):
        return batch, split, draws, None
    apart = replace(batch, cut=False)
    other, others_draws = split_one(apart)
    truer = other.splittable and other.probed and (not split.splittable or other.difference < split.difference)
    words = f"parts are cut out of the collated batch, and {split.reason or 'their loss is another one'}"
    return (apart, other, others_draws, words) if truer else (batch, split, draws, None)


def with_others(
    split_one: Split, module: LightningModule, looked: Sequence[FirstBatch], split: SplitFinding, draws: DrawPlan, again: bool = False
) -> tuple[SplitFinding, DrawPlan]:
    """The finding of the first batch, with what the splits of the others add to it."""
    for batch in looked[1:]:
        if batch.batch_size < 2 or not split.splittable:
            continue
        if "collate" in batch.draws or batch.samples is None:
            batch = replace(batch, batch=transfer_batch(module, batch.batch), samples=None, collate=None)
        other, others_draws = split_one(batch, known=counts_in(split), tries_others=False)
        draws = replace(draws, seeded=draws.seeded or others_draws.seeded)
        split = replace(split, uneven_calls=tuple(sorted({*split.uneven_calls, *other.uneven_calls})))
        split = with_logs(split, LogComparison(matching=other.log_rules))
        if not other.splittable or (other.probed and not other.difference <= max(split.difference, SPLIT_TOLERANCE)):
            reason = f"{other.reason}, in another batch than the first, of {batch.batch_size} samples"
            split = replace(split, splittable=other.splittable, difference=other.difference, reason=reason)
        elif split.difference <= SPLIT_TOLERANCE and not split.log_rules.get(LOSS, ("mean",)):
            if not again:  # what doesn't count here may not have been in the first batch
                return with_others(split_one, module, looked, split_one(looked[0], known=counts_in(other))[0], draws, again=True)
            reason = f"parts of another batch than the first, of {batch.batch_size} samples, weigh by something else"
            return replace(split, difference=math.inf, reason=reason), draws
    return split, draws


def split_of(
    module: LightningModule,
    trainer: Trainer,
    batch: FirstBatch,
    *,
    footprint: Footprint,
    despite: tuple[str, ...],
    routes: bool = True,
    known: Collection[Count] = (),
    tries_others: bool = True,
    early: EarlySplits | None = None,
) -> tuple[SplitFinding, DrawPlan]:
    """Finds out in another child what a split batch changes."""
    if late := [name for name, parameter in module.named_parameters() if is_lazy(parameter)]:
        when = "gets its shape in the first step, or in configure_model"
        reason = f"the parameter {late[0]!r} {when}, and parts of a batch are tried before: call its layer in setup()"
        return SplitFinding(splittable=False, probed=False, reason=reason), DrawPlan()
    if early is not None and (found := early.found(batch, footprint, known)) is not None:
        return found
    try:
        told: Any = {"flops": footprint.flops, "conduct": footprint.conduct, "despite": despite, "routes": routes, "known": known}
        told["tries_others"] = tries_others
        told["blocks"] = {block.fqn: block.flops for block in footprint.blocks if block.repeated}
        return run_forked(partial(probe_split, **told), module, trainer, batch)
    except ChildFailed as error:
        reason = f"not checked: whether a batch in parts gives the same loss and gradients ({error.reason})"
        return SplitFinding(splittable=False, probed=False, reason=reason), DrawPlan()


def validation_batch(module: LightningModule, trainer: Trainer) -> FirstBatch | None:
    """The first batch of the validation within ``fit``, also where the sanity check is off; None where there is none."""
    if not is_overridden("validation_step", module) or not trainer.limit_val_batches:
        return None
    try:
        with evaluating(trainer):
            return first_batch(module, trainer, "validate", prepared=True)
    except Exception:  # no validation data, or the user's loader fails: the run will say so
        log.debug("there is no validation batch to look at", exc_info=True)
        return None


def _counts(rules: Sequence[Any], batch: Any) -> bool:
    """Whether what the likeliest rule counts, if it does, is in this batch: at each batch of the run it is counted."""
    try:
        return not isinstance(rules[0], Count) or rules[0].total(batch) >= 0
    except (LookupError, TypeError):
        return False


def counts_in(split: SplitFinding) -> list[Count]:
    """What losses and logged values were found to be means over."""
    rules = (rule for ways in split.log_rules.values() for rule in ways)
    return list(dict.fromkeys(rule for rule in rules if isinstance(rule, Count)))


def with_logs(split: SplitFinding, other: LogComparison) -> SplitFinding:
    """The finding, with only the rules for logged values that hold for another batch too, and a sentence for each value without a rule.
    Where that batch, as it is, contradicts one that was changed to have entries that don't count, such entries may not come.
    """
    together = LogComparison(matching=split.log_rules).narrowed(other).matching
    real = {
        key: rules for key, rules in LogComparison(matching=split.real_rules).narrowed(other).matching.items() if key in split.real_rules
    }
    against = split.log_rules.get(LOSS, ()) if not together.get(LOSS) and real.get(LOSS) else ()
    unweighed = (*split.unweighed, *(count for count in against if isinstance(count, Count) and count.kind not in ("sum", "rows")))
    together = {key: rules or real.get(key, ()) for key, rules in together.items()}
    lost = {key: rules for key, rules in together.items() if not rules and split.log_rules.get(key) != () and key != LOSS}
    notes = (*split.notes, *LogComparison(matching=lost).notes)
    return replace(split, log_rules=together, real_rules=real, unweighed=unweighed, notes=notes)


def _contradicts(other: SplitFinding, found: SplitFinding) -> bool:
    """Whether another batch leaves no rule for a value that has one."""
    together = LogComparison(matching=found.log_rules).narrowed(LogComparison(matching=other.log_rules)).matching
    return any(rules and not together[key] for key, rules in found.log_rules.items())


def transferred(module: LightningModule, batches: Sequence[FirstBatch]) -> list[FirstBatch]:
    """The batches, with those after the first as the module's transfer hooks leave them, where their loader has made them by itself."""
    others = (each if each.samples is not None else replace(each, batch=transfer_batch(module, each.batch)) for each in batches[1:])
    return [*batches[:1], *others]


def with_evaluation(
    split: SplitFinding,
    module: LightningModule,
    trainer: Trainer,
    batches: Sequence[FirstBatch],
    apart: Sequence[FirstBatch],
    stage: str,
    quick: bool,
) -> SplitFinding:
    """The finding, with the rules for the values that an evaluation step logs.

    Args:
        batches: of the first loader; later ones decide what the first leaves open, and what entries weigh that it lacks.
        quick: whether all of them may be tried in any case.
        apart: the first ones of the other loaders, for which the step may do something else.
    """
    hook = "test_step" if stage == "test" else "validation_step"
    if not split.splittable or not is_overridden(hook, module) or not batches:
        return split
    if (batches := [each for each in batches if each.batch_size != 1] or batches)[0].batch_size == 1:
        ones = all(getattr(loader, "batch_size", None) == 1 for loader in batches[0].loaders)  # which nobody splits
        note = f"not checked: how the values that {hook} logs combine when a batch is split, as the first one has one sample"
        split = split if ones else replace(split, notes=(*split.notes, note))
    try:
        probed = partial(run_forked, partial(probe_evaluation, configures=quick), module, trainer)
        found: SplitFinding = probed(batches[0], hook, counts_in(split))
        tried: list[FirstBatch] = []
        for batch in batches[1:]:
            gaps = leaves_out(batch.known_samples, batches[0].known_samples)
            if quick or gaps or LogComparison(matching=found.log_rules).ambiguous:
                tried.append(batch)
                others: list[SplitFinding] = [probed(batch, hook, counts_in(found), False)]
                new = [count for count in counts_in(others[0]) if count not in counts_in(found)]
                if new and _contradicts(others[0], found):  # all of it counts in the first batch
                    found = probed(batches[0], hook, [*counts_in(split), *new])
                    others = [probed(each, hook, counts_in(found), False) for each in tried]
                for other in others:
                    found = with_logs(found, LogComparison(matching=other.log_rules))
        for number, batch in enumerate(apart, 1):
            with evaluating(trainer, testing=stage == "test"):
                ready = transfer_batch(module, batch.batch, number) if batch.samples is None else batch.batch
            other = probed(replace(batch, batch=ready, loader=number), hook, counts_in(found))
            lacking = {key: rules for key, rules in other.log_rules.items() if rules and not _counts(rules, batches[0].batch)}
            own = {key: rules for key, rules in other.log_rules.items() if rules and key not in lacking}
            found = with_logs(found, LogComparison(matching=own))
            words = (
                f"the value {name!r} logged in {step} is a mean over {rules[0]}, which the first loader's batches lack: a rank's weighs by "
                "its samples"
                for (step, name), rules in lacking.items()
            )
            kept = {**other.kept_rules.get(hook, {}), **found.kept_rules.get(hook, {})}
            metrics = {**other.metric_rules.get(hook, {}), **found.metric_rules.get(hook, {})}
            notes = tuple(dict.fromkeys((*found.notes, *other.notes, *words)))
            found = replace(found, notes=notes, kept_rules={**found.kept_rules, hook: kept} if kept else found.kept_rules)
            found = replace(found, metric_rules={**found.metric_rules, hook: metrics} if metrics else found.metric_rules)
    except ChildFailed as error:
        note = f"not checked: how the values that {hook} logs combine when a batch is split ({error.reason})"
        return replace(split, metric_rules=keeping_apart(split.metric_rules, hook), notes=(*split.notes, note))
    rules, kept_rules = {**split.log_rules, **found.log_rules}, {**split.kept_rules, **found.kept_rules}
    raised = split.raised or (found.raised and bool(trainer.num_sanity_val_steps))  # else a later state's step
    drawn = (f"each rank draws its own random numbers in {hook} for {', '.join(found.drawn_apart)}; one device draws others",)
    ranks = (*split.rank_notes, *drawn * bool(found.drawn_apart))
    metric_rules = {**split.metric_rules, **found.metric_rules}
    split = replace(split, log_rules=rules, kept_rules=kept_rules, metric_rules=metric_rules)
    return replace(split, notes=(*split.notes, *found.notes), rank_notes=ranks, raised=raised)


#: Hooks that may change a batch before its step, besides ``on_train_batch_start``.
_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def whole_of(batches: Iterable[FirstBatch], stage: str, *, collates: bool) -> str | None:
    """Why one of a training step's batches, the first such, can't run in parts; None where all can."""
    for batch in batches if stage == "fit" else ():
        samples = None if batch.samples is None else batch.batch_size
        if (words := why_whole(batch.batch, samples, several=batch.kind == "combined", collates=collates)) is not None:
            return words
        if (words := _counted_in(batch)) is not None:
            return f"parts are cut out of the collated batch, {words}"
    return None


def _counted_in(batch: FirstBatch) -> str | None:
    """Why a number in the batch keeps it whole: samples add up to it, such as their count, or nobody could try whether they do. A part that
    is cut out would have the whole batch's.
    """
    if not isinstance(batch.samples, list) or batch.collate is None or len(batch.samples) < 2:
        return None
    whole = {name: value for name, value in _numbers(batch.batch).items() if value}
    if not whole:
        return None
    state = rng.capture({}, cuda=False)
    try:
        parts = [_numbers(batch.collate(fresh(each))) for each in (batch.samples[::2], batch.samples[1::2])]
    except Exception as error:  # the user's collate function, on fewer samples than it is used to
        log.debug("the numbers of a batch's parts aren't known", exc_info=True)
        return f"and whether its number {next(iter(whole))} is a sum over samples couldn't be tried ({type(error).__name__}: {error})"
    finally:
        rng.restore(state, {})
    added = next((name for name, value in whole.items() if sum(part.get(name, 0.0) for part in parts) == value), None)
    return None if added is None else f"whose number {added} is that of all its samples"


def _numbers(batch: Any) -> dict[str, float]:
    """Python's numbers in a batch, by their places."""
    leaves, _ = tree_flatten_with_path(batch)
    return {keystr(path): leaf for path, leaf in leaves if type(leaf) in (int, float)}


def made_of_samples(trainer: Trainer, batch: FirstBatch, loading: Loading) -> bool:
    """Whether the loader can collate each part that the batch runs in of its own samples, and nobody could change the batch in between."""
    if batch.kind != "map" or batch.samples is None or loading.collation != "samples" or "collate" in {*batch.draws, *loading.draws}:
        return False
    if is_overridden("on_train_batch_start", trainer.lightning_module) or _transfers(trainer):
        return False
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    foreign = (each for each in callbacks if not type(each).__module__.startswith((*PYTORCH, "lightning_autopar.")))
    return not any(is_overridden("on_train_batch_start", each) for each in foreign)


def known_tensors(trainer: Trainer, step: str, batches: Iterable[FirstBatch]) -> dict[str, KnownTensors]:
    """The tensors of a step's batches; nothing where several loaders or the user's hooks make what goes to the device."""
    tried = list(batches)
    if not tried or _transfers(trainer) or any(each.kind == "combined" for each in tried):
        return {}
    return {step: KnownTensors.of([(each.batch, each.batch_size) for each in tried])}


def _transfers(trainer: Trainer) -> bool:
    """Whether the user's hooks may change a batch on its way to the device."""
    owners = (trainer.lightning_module, getattr(trainer, "datamodule", None))
    return any(is_overridden(hook, owner) for owner in owners if owner is not None for hook in _TRANSFERS)
