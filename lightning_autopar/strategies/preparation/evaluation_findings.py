"""What the steps of an evaluation log and keep of a split batch, in each of its loaders."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from lightning_autopar._fork import ChildFailed, run_forked
from lightning_autopar._lightning import LightningModule, Trainer
from lightning_autopar._lightning_compat import evaluating, is_overridden, transfer_batch
from lightning_autopar.constraints import LOSS, SplitFinding
from lightning_autopar.exact.data.counted_entries import Count
from lightning_autopar.exact.data.unlike_samples import leaves_out
from lightning_autopar.exact.logs.log_rules import LogComparison
from lightning_autopar.memory.trace.first_batch import FirstBatch, first_batch
from lightning_autopar.strategies.parity.split_probe import probe_evaluation

log = logging.getLogger(__name__)


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
        probed = partial(run_forked, probe_evaluation, module, trainer)
        found: SplitFinding = probed(batches[0], hook, counts_in(split))
        for batch in batches[1:]:
            gaps = leaves_out(batch.samples or (), batches[0].samples or ())
            if quick or gaps or LogComparison(matching=found.log_rules).ambiguous:
                other = probed(batch, hook, counts_in(found), False)
                if new := [count for count in counts_in(other) if count not in counts_in(found)]:  # all of it counts in the first batch
                    found = probed(batches[0], hook, [*counts_in(split), *new])
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
            notes = tuple(dict.fromkeys((*found.notes, *other.notes, *words)))
            found = replace(found, notes=notes, kept_rules={**found.kept_rules, hook: kept} if kept else found.kept_rules)
    except ChildFailed as error:
        note = f"not checked: how the values that {hook} logs combine when a batch is split ({error.reason})"
        return replace(split, notes=(*split.notes, note))
    rules, kept_rules = {**split.log_rules, **found.log_rules}, {**split.kept_rules, **found.kept_rules}
    raised = split.raised or (found.raised and bool(trainer.num_sanity_val_steps))  # else a later state's step
    return replace(split, log_rules=rules, kept_rules=kept_rules, notes=(*split.notes, *found.notes), raised=raised)
