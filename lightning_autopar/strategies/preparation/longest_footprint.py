"""The footprint for batches of any length that was seen: memory for the longest one, with a margin that is told; time for a usual one.

Knows footprints and looks at loaders; not how a step is traced.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from lightning_autopar._fork import ChildFailed
from lightning_autopar._lightning import LightningModule
from lightning_autopar._lightning_compat import transfer_batch
from lightning_autopar.exact.data.longest_batch import Look, between, look
from lightning_autopar.memory import batch_scaling
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.length_spread import Lengths
from lightning_autopar.memory.trace.first_batch import FirstBatch

log = logging.getLogger(__name__)

#: How long the sizes of a validation's batches may be looked at.
_VALIDATION_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What was seen of sizes.

    Args:
        look: at the stage's batches.
        validation: the longest batch of the validation within a fit; None where there is none.
        validation_reach: as ``Lengths.reach``.
        validation_unlike: as ``Look.unlike``.
        notes: a sentence for each stage of which a batch with something new can't be made.
    """

    look: Look
    validation: FirstBatch | None = None
    validation_reach: float = 1.0
    validation_unlike: FirstBatch | None = None
    notes: tuple[str, ...] = ()

    def without_makers(self) -> Seen:
        """The same without the objects that make batches."""
        usual = self.look.usual
        longest = tuple(each.without_makers() for each in self.look.longest)
        found = replace(self.look, usual=None if usual is None else usual.without_makers(), longest=longest, unlike=None)
        validation = None if self.validation is None else self.validation.without_makers()
        return replace(self, look=found, validation=validation, validation_unlike=None)


def seen_sizes(module: LightningModule | None, batch: FirstBatch, validation: FirstBatch | None) -> Seen:
    """Look at the loaders that gave these first batches; to be called in a forked child.

    Args:
        module: the user's, whose hooks transfer batches; None where nothing is done to them.
        validation: the first one of the validation within a fit.
    """
    found = _arrived(module, look(batch))
    if validation is None:
        return Seen(look=found, notes=_unmade(found))
    other = _arrived(module, look(validation, seconds=_VALIDATION_SECONDS))
    longest = next(iter(other.longest), validation)
    notes = (*_unmade(found), *_unmade(other, " of the validation"))
    return Seen(look=found, validation=longest, validation_reach=other.lengths.reach, validation_unlike=other.unlike, notes=notes)


def _unmade(found: Look, of: str = "") -> tuple[str, ...]:
    words = (
        f"not checked: whether a batch{of} in parts gives the same values where samples have what the first batch hasn't (a mask's zeros, "
        f"NaN, other labels), as making a batch of such samples fails ({found.unmade})"
    )
    return (words,) if found.unmade else ()


def _arrived(module: LightningModule | None, found: Look) -> Look:
    """The batches as the module's step gets them."""
    if module is None:
        return found
    try:
        usual = None if found.usual is None else replace(found.usual, batch=transfer_batch(module, found.usual.batch))
        longest = tuple(replace(each, batch=transfer_batch(module, each.batch)) for each in found.longest)
    except Exception as error:  # the module's hooks may raise anything; the run will say so
        log.debug("the longest batch can't be transferred", exc_info=True)
        lengths = Lengths(unseen=f"a hook of the module fails on others ({type(error).__name__})")
        return replace(found, lengths=lengths, usual=None, longest=())
    return replace(found, usual=usual, longest=longest)


def at_lengths(traced: Callable[[FirstBatch], Footprint], batch: FirstBatch, footprint: Footprint, seen: Seen) -> Footprint:
    """The first batch's footprint, with the bytes of the longest batch that was seen and of what is longer still, and a usual one's work.

    Args:
        traced: gives the footprint of a batch's step; where it fails, the result says so.
        footprint: of its step, and of the longest batch of the validation.
    """
    if footprint.evaluation_bytes is not None:  # at most, as attention grows
        footprint = replace(footprint, evaluation_bytes=round(footprint.evaluation_bytes * seen.validation_reach**2))
    found, steps = seen.look, [(batch, footprint)]
    if found.usual is None and not found.longest:
        return replace(footprint, lengths=found.lengths)
    why = None if footprint.traced else "its step can't be traced"
    for each in (*found.longest, *([] if found.usual is None else [found.usual])) if why is None else ():
        try:
            steps.append((each, traced(each)))
            why = None if steps[-1][1].traced else "; ".join(steps[-1][1].assumptions[:1])
        except ChildFailed as error:
            log.debug("the longest batch can't be traced", exc_info=True)
            why = error.reason
        if why is not None:
            why = f"another one's step can't be traced ({why})"
            break
    if why is not None:
        lengths = between(found.lengths, found.usual or batch, (*found.longest, batch)[0])
        return replace(footprint, lengths=replace(lengths, uncounted=why))
    usual, used = steps[0] if found.usual is None else steps[-1]
    longest, most = max(steps, key=lambda step: step_bytes(step[1]))
    if longest is usual:
        return replace(footprint, lengths=found.lengths)
    lengths = replace(
        between(found.lengths, usual, longest),
        timed=not found.times_of_first,
        usual_bytes=batch_scaling.growing_bytes(used),
        longest_bytes=batch_scaling.growing_bytes(most),
    )
    timed = footprint if found.times_of_first else used
    longer = batch_scaling.longer(batch_scaling.at_lengths(footprint, timed, most), lengths.growth)
    return replace(longer, lengths=lengths, evaluation_bytes=footprint.evaluation_bytes)


def without_margin(footprint: Footprint) -> Footprint | None:
    """The footprint for batches no longer than those that were seen; None where it is that already."""
    lengths = footprint.lengths
    if lengths is None or not lengths.vary or lengths.growth <= 1:
        return None
    found = batch_scaling.longer(footprint, 1 / lengths.growth)
    return replace(found, lengths=replace(lengths, reach=1.0, tight=True))


def step_bytes(footprint: Footprint) -> int:
    """At most the bytes of a step on one device, without what lies around it."""
    state = (
        footprint.parameter_bytes + footprint.gradient_bytes + footprint.optimizer_bytes + footprint.buffer_bytes + footprint.copied_bytes
    )
    return state + footprint.activation_bytes + footprint.temporary_bytes + footprint.input_bytes
