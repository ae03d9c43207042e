"""The footprint of a model of many blocks, from those of two models of few. Knows footprints; no module.

A transformer's blocks are alike, so what one more of them adds is what the fourth adds to three: to every total, and to every moment of the
step that lies beyond it. That holds exactly for what is counted block by block. The tape is extended by :mod:`rows.tapes`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any, TypeVar

from lightning_autopar.memory.footprint import Footprint, Moment
from lightning_autopar.memory.tape import Tape
from lightning_autopar.memory.work.work import Work
from rows.tapes import taller_tape

#: The fewest blocks that the smaller of the two models may have.
FEWER = 3

_TOTALS = (
    "parameters",
    "trainable_parameters",
    "parameter_bytes",
    "gradient_bytes",
    "optimizer_bytes",
    "buffer_bytes",
    "activation_bytes",
    "temporary_bytes",
    "flops",
    "moved_bytes",
)
_SIZES = ("gradient_bytes", "activation_bytes", "temporary_bytes", "fixed_bytes")
_Part = TypeVar("_Part")


def taller(few: Footprint, fewer: Footprint, layers: int) -> Footprint:
    """The footprint of so many blocks.

    Args:
        few: of one block more than ``fewer``, nothing else of which may be a place for a cut.
        fewer: of at least :data:`FEWER`.
        layers: at least those of ``few``.

    Raises:
        ValueError: if the two aren't of one model, block for block.
    """
    counts = len(few.blocks), len(fewer.blocks)
    if not FEWER <= counts[1] < counts[0] == counts[1] + 1 <= layers or not all(block.repeated for block in (*few.blocks, *fewer.blocks)):
        raise ValueError(f"two models of {counts[0]} and {counts[1]} parts don't tell what {layers} blocks take; trace the whole one")
    more = layers - counts[0]
    totals = {name: getattr(few, name) + more * (getattr(few, name) - getattr(fewer, name)) for name in _TOTALS}
    name, first = few.blocks[0].fqn.rsplit(".", 1)

    def stretched(parts: tuple[_Part, ...], at: int) -> tuple[_Part, ...]:
        return (*parts[:at], *(parts[at : at + 1] * more), *parts[at:])

    blocks = tuple(replace(block, fqn=f"{name}.{int(first) + index}") for index, block in enumerate(stretched(few.blocks, 1)))
    return replace(
        few,
        **totals,
        blocks=blocks,
        outer=stretched(few.outer, 2),
        also_uses=tuple((index + more if index > 1 else index, *rest) for index, *rest in few.also_uses),
        optimizer_work=_work(few.optimizer_work, fewer.optimizer_work, more),
        moments=_moments(few, fewer, more),
        tape=_tape(few, fewer, layers),
    )


def fewest(small: Footprint) -> int:
    """How many blocks a model of this one's kind must have to be traced into blocks alone, told by one of :data:`FEWER` blocks.

    Where blocks are the smaller part of a model, a pipeline may be cut at its embedding and head too, so the trace has them as well.
    """
    own = sum(block.parameters for block in small.blocks if block.repeated)
    alone = own > 0 and all(block.repeated for block in small.blocks)
    return FEWER if alone else max(FEWER, -(-FEWER * (small.parameters - own) // max(1, own)))


def _tape(few: Footprint, fewer: Footprint, layers: int) -> Tape | None:
    """The tape, where blocks are enough alike for it."""
    if few.tape is None or fewer.tape is None:
        return None
    try:
        return taller_tape(few.tape, fewer.tape, len(few.blocks), layers)
    except ValueError:
        return None


def _grown(few: Any, fewer: Any, more: int, names: tuple[str, ...]) -> Any:
    return replace(few, **{name: max(0, getattr(few, name) + more * (getattr(few, name) - getattr(fewer, name))) for name in names})


def _moments(few: Footprint, fewer: Footprint, more: int) -> tuple[Moment, ...]:
    """Those before the third block as they are, its own again and again, those behind it with what the new blocks hold."""
    # What a block keeps, and its gradient: how the last moments of the two models differ.
    kept = _between(few, fewer, "forward", "activation_bytes")
    fixed = _between(few, fewer, "forward", "fixed_bytes")
    gradient = few.gradient_bytes - fewer.gradient_bytes
    found: list[Moment] = []
    for moment in few.moments:
        if moment.phase == "optimizer":
            continue
        backward = moment.phase == "backward"
        if moment.held < 2:
            found.append(replace(moment, gradient_bytes=moment.gradient_bytes + (gradient * more if moment.gradient_bytes else 0)))
        elif moment.held > 2:
            found.append(
                replace(
                    moment,
                    held=moment.held + more,
                    activation_bytes=moment.activation_bytes + kept * more,
                    fixed_bytes=moment.fixed_bytes + fixed * more,
                    gradient_bytes=moment.gradient_bytes + (gradient * more if moment.gradient_bytes and not backward else 0),
                )
            )
        else:
            found += (
                replace(
                    moment,
                    held=2 + extra,
                    activation_bytes=moment.activation_bytes + kept * extra,
                    fixed_bytes=moment.fixed_bytes + fixed * extra,
                    gradient_bytes=moment.gradient_bytes
                    + gradient * ((more - extra) if backward else more if moment.gradient_bytes else 0),
                )
                for extra in range(more + 1)
            )
    updates = [one for one in few.moments if one.phase == "optimizer"], [one for one in fewer.moments if one.phase == "optimizer"]
    if len(updates[0]) == len(updates[1]):
        return (*found, *(_grown(one, other, more, _SIZES) for one, other in zip(*updates, strict=True)))
    fullest = [max(moments, key=lambda one: one.total_bytes) for moments in updates if moments]
    return (*found, _grown(fullest[0], fullest[-1], more, _SIZES)) if fullest else tuple(found)


def _between(few: Footprint, fewer: Footprint, phase: str, name: str) -> int:
    """By how much the last boundary of a phase differs."""

    def last(footprint: Footprint) -> int:
        held = len(footprint.blocks)
        return max((getattr(one, name) for one in footprint.moments if one.phase == phase and one.held == held and one.boundary), default=0)

    return last(few) - last(fewer)


def _work(few: tuple[Work, ...], fewer: tuple[Work, ...], more: int) -> tuple[Work, ...]:
    """The optimizer's operations: of each kind and size as many more as a block has; those that go over all parameters at once grow."""
    mine, theirs = _counts(few), _counts(fewer)
    each = [replace(work, count=max(1, mine[work] + more * (mine[work] - theirs[work]))) for work in mine if work in theirs]
    alone, others = [[work for work in some if work not in rest] for some, rest in ((mine, theirs), (theirs, mine))]
    by_name: defaultdict[tuple[str, str, str], list[Work]] = defaultdict(list)
    for work in others:
        by_name[work.kind, work.name, work.dtype].append(work)
    for work in alone:
        smaller = by_name[work.kind, work.name, work.dtype]
        grown = work
        if smaller:
            grown = _grown(work, smaller.pop(0), more, ("flops", "moved_bytes", "fixed_bytes"))
        each.append(replace(grown, count=mine[work]))
    return tuple(each)


def _counts(works: tuple[Work, ...]) -> dict[Work, int]:
    """How often each operation runs."""
    found: dict[Work, int] = {}
    for work in works:
        one = replace(work, count=1)
        found[one] = found.get(one, 0) + work.count
    return found
