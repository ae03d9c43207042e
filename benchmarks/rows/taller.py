"""The footprint of a model of many blocks, from those of two models of few. Knows footprints; no module.

A transformer's blocks are alike, so what one more of them adds is what the fourth adds to three: to every total, and to every moment of the
step that lies beyond it. That holds exactly for what is counted block by block. The tape isn't extended: whoever replays it needs the
whole model traced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, TypeVar

from lightning_autopar.memory.footprint import Footprint, Moment
from lightning_autopar.memory.work import Work

#: How many blocks the two models have.
FEW, FEWER = 4, 3

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
        few: of :data:`FEW` blocks.
        fewer: of :data:`FEWER`.
        layers: more than that.

    Raises:
        ValueError: if the two aren't of one model, block for block.
    """
    if (len(few.blocks), len(fewer.blocks)) != (FEW, FEWER) or layers < FEW:
        raise ValueError(f"the models have {len(few.blocks)} and {len(fewer.blocks)} blocks, not {FEW} and {FEWER}; trace the whole one")
    more = layers - FEW
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
        tape=None,
    )


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
    """The optimizer's operations: of each kind and size, as many more as a block has."""
    key: Callable[[Work], tuple[object, ...]] = lambda work: (work.kind, work.name, work.dtype, work.flops, work.moved_bytes, work.shape)  # noqa: E731
    names = {field.name for field in fields(Work)}
    assert {"count", "moved_bytes"} <= names
    counts: dict[tuple[object, ...], int] = {}
    for work in fewer:
        counts[key(work)] = counts.get(key(work), 0) + work.count
    mine: dict[tuple[object, ...], int] = {}
    for work in few:
        mine[key(work)] = mine.get(key(work), 0) + work.count
    if set(mine) == set(counts):  # one operation for each parameter
        unique = {key(work): work for work in few}
        return tuple(replace(unique[k], count=max(1, mine[k] + more * (mine[k] - counts[k]))) for k in unique)
    if len(few) == len(fewer):  # one for all of them
        return tuple(_grown(a, b, more, ("flops", "moved_bytes", "fixed_bytes")) for a, b in zip(few, fewer, strict=True))
    total, before = sum(w.count * w.moved_bytes for w in few), sum(w.count * w.moved_bytes for w in fewer)
    share = (total + more * (total - before)) / max(1, total)
    return tuple(
        replace(w, flops=round(w.flops * share), moved_bytes=round(w.moved_bytes * share), fixed_bytes=round(w.fixed_bytes * share))
        for w in few
    )
