"""The same question with one thing changed: another optimizer, a smaller validation batch, one device more, more host memory.

Each function returns the changed question for the planner, or None where the change makes no difference. Knows no search; traces nothing.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction

from lightning_autopar.devices.inventory import Inventory
from lightning_autopar.devices.spec import catalogue_link
from lightning_autopar.memory.footprint import Footprint, LayerFootprint
from lightning_autopar.memory.tape import Tape
from lightning_autopar.memory.work.work import Work, moved_bytes

#: The optimizers that have a fused kernel in torch, and those that have an 8-bit state in bitsandbytes.
_FUSED = frozenset({"Adam", "AdamW", "SGD", "Adagrad"})
_EIGHT_BIT = frozenset({"Adam", "AdamW"})
#: Operations that autocast runs in 16 bits.
_PRODUCTS = frozenset({"matmul", "attention", "convolution", "recurrent"})
#: Two states with one byte an element, and one fp32 scale for every 256 elements (bitsandbytes, ``optimizer.py``, ``blocksize=256``).
_EIGHT_BIT_BYTES = 2 * (1 + Fraction(4, 256))
#: An operation of the update on fewer bytes than this isn't one over parameters.
_SMALL_BYTES = 2048


def fused(footprint: Footprint) -> Footprint | None:
    """The footprint with ``fused=True`` in torch's optimizers: one pass over what they read and write, and no temporaries. None where they
    are fused already, or a class has no such kernel.
    """
    if not _has_plain_update(footprint) or not _FUSED.issuperset(footprint.optimizer_classes):
        return None
    passes = 3 * footprint.gradient_bytes + 2 * footprint.optimizer_bytes  # parameters and states are read and written, gradients only read
    return _updated(footprint, f"_fused_{footprint.optimizer_classes[0].lower()}_", passes, footprint.optimizer_classes)


def eight_bit(footprint: Footprint) -> Footprint | None:
    """The footprint with bitsandbytes' Adam, whose state has 8 bits; None where another optimizer runs, or nothing gets smaller."""
    state_bytes = math.ceil(footprint.trainable_parameters * _EIGHT_BIT_BYTES)
    known = bool(footprint.optimizer_classes) and _EIGHT_BIT.issuperset(footprint.optimizer_classes)
    if not footprint.training or not known or state_bytes >= footprint.optimizer_bytes:
        return None
    share = Fraction(state_bytes, footprint.optimizer_bytes)

    def less(size: int) -> int:
        return math.ceil(size * share)

    def smaller(layer: LayerFootprint) -> LayerFootprint:
        return replace(layer, optimizer_bytes=less(layer.optimizer_bytes))

    changed = replace(
        footprint,
        optimizer_bytes=less(footprint.optimizer_bytes),
        blocks=tuple(map(smaller, footprint.blocks)),
        outer=tuple(map(smaller, footprint.outer)),
        also_uses=tuple((*use[:4], less(use[4])) for use in footprint.also_uses),
    )
    if changed.tape is not None:
        tape = Tape(batches=changed.tape.batches, slopes=changed.tape.slopes)
        for action, storage, size, kind in changed.tape.rows():
            tape.add(action, storage, less(size) if kind == "optimizer" else size, kind)
        changed = replace(changed, tape=tape)
    passes = 3 * changed.gradient_bytes + 2 * changed.optimizer_bytes
    return _updated(changed, "optimizer_update_8bit_blockwise", passes, ())


def narrow_products(footprint: Footprint, dtype: str) -> Footprint | None:
    """The footprint with its products of matrices in this dtype of 16 bits, as under autocast; its bytes stay. None where none changes."""

    def narrowed(works: tuple[Work, ...]) -> tuple[Work, ...]:
        return tuple(replace(one, dtype=dtype) if one.kind in _PRODUCTS and one.dtype in ("fp32", "bf16") else one for one in works)

    def changed(layer: LayerFootprint) -> LayerFootprint:
        return replace(layer, work=narrowed(layer.work), backward_work=narrowed(layer.backward_work))

    found = replace(footprint, blocks=tuple(map(changed, footprint.blocks)), outer=tuple(map(changed, footprint.outer)))
    return None if found == footprint else found


def validated(footprint: Footprint, share: float) -> Footprint:
    """The footprint with a validation batch that is so many times as large."""
    evaluation = footprint.evaluation_bytes
    parts = tuple(round(size * share) for size in footprint.evaluation_parts)
    return replace(footprint, evaluation_bytes=None if evaluation is None else round(evaluation * share), evaluation_parts=parts)


def more_devices(inventory: Inventory, count: int) -> Inventory | None:
    """The inventory with so many more like devices on the first node, whose host's memory stays as it is, stated or assumed: more of it is
    advice of its own. None if devices aren't alike, or aren't whole GPUs.
    """
    if count > 1 and (fewer := more_devices(inventory, count - 1)) is not None:
        inventory = fewer
    devices = [device for device in inventory.devices if device.node == inventory.devices[0].node]
    last = devices[-1]
    if last.kind == "cpu" or last.part_of or len({device.name for device in inventory.devices}) > 1:
        return None
    known = {device.id for device in inventory.devices}
    new = next(name for number in itertools.count() if (name := f"{last.name}:{number}") not in known)
    more = replace(last, id=new, index=(last.index or 0) + 1, free_bytes=last.total_bytes)
    place = inventory.devices.index(last) + 1
    found = replace(inventory, devices=(*inventory.devices[:place], more, *inventory.devices[place:]))
    if last.kind != "catalogue":
        return found  # linked through the host, as if on another socket: the worst case
    return replace(found, links=(*inventory.links, *(catalogue_link(device, more) for device in devices)))


def with_host(inventory: Inventory, size: int) -> Inventory:
    """The inventory whose hosts have at least so many free bytes."""
    nodes = tuple(max(size, have) for have in inventory.node_host_bytes)
    total, free = (max(size, have) for have in (inventory.host_total_bytes, inventory.host_free_bytes))
    return replace(inventory, host_total_bytes=total, host_free_bytes=free, node_host_bytes=nodes)


def _has_plain_update(footprint: Footprint) -> bool:
    """Whether torch's own optimizers update in several passes."""
    known = footprint.training and bool(footprint.optimizer_classes) and bool(footprint.optimizer_work)
    return known and not any(work.name.startswith("_fused_") for work in footprint.optimizer_work)


def _updated(footprint: Footprint, name: str, passes_bytes: int, classes: tuple[str, ...]) -> Footprint:
    """The footprint with an update that goes over so many bytes in one kernel, and takes no memory."""
    before = footprint.optimizer_work
    clips = any(work.kind == "reduce" and "norm" in work.name for work in before)
    # Counting steps, and clipping's operations on its norm, are small and stay.
    kept = [work for work in before if work.kind not in ("pointwise", "copy") or (4 < work.moved_bytes <= _SMALL_BYTES)]
    dtype = next((work.dtype for work in before if work.kind == "pointwise"), "fp32")
    if clips:  # clipping multiplies gradients in place
        twice = 2 * footprint.gradient_bytes
        kept.append(Work(kind="pointwise", name="_foreach_mul_", dtype=dtype, moved_bytes=twice, fixed_bytes=twice))
    kept.append(Work(kind="pointwise", name=name, dtype=dtype, moved_bytes=passes_bytes, fixed_bytes=passes_bytes))
    moments = tuple(replace(moment, fixed_bytes=0) if moment.phase == "optimizer" else moment for moment in footprint.moments)
    others = [moment.temporary_bytes + moment.fixed_bytes for moment in moments]
    return replace(
        footprint,
        optimizer_work=tuple(kept),
        moved_bytes=max(0, footprint.moved_bytes - moved_bytes(before) + moved_bytes(kept)),
        moments=moments,
        temporary_bytes=min(footprint.temporary_bytes, max(others)) if others else footprint.temporary_bytes,
        tape=None if footprint.tape is None else _without_scratch(footprint.tape),
        optimizer_classes=classes,
    )


def _without_scratch(tape: Tape) -> Tape:
    """The tape without the temporaries that the optimizer's step allocates and frees."""
    rows = list(tape.rows())
    begins = max((index for index, row in enumerate(rows) if row[0] == "optimizer"), default=len(rows))
    made = {row[1] for row in rows[begins:] if row[0] == "allocate" and row[3] == "fixed"}
    touched = {row[1] for row in itertools.islice(rows, begins, None) if row[0] in ("become", "resize")}
    freed = {row[1] for row in rows[begins:] if row[0] == "free"}
    scratch = (made & freed) - touched
    found = Tape(batches=tape.batches, slopes=tape.slopes)
    for action, storage, size, kind in rows:
        if action not in ("allocate", "free") or storage not in scratch:
            found.add(action, storage, size, kind)
    return found
