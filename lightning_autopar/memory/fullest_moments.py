"""The footprint's moments as columns, for one rank's share of the batch and with blocks recomputed. Arithmetic only: no plan, no engine.

A footprint of a hundred blocks has a thousand moments, and a search looks at hundreds of plans: columns keep that under a millisecond each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from lightning_autopar.memory.footprint import Footprint, Moment

Column: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]

#: The bytes of the CPU's random state (``torch.get_rng_state``) that ``torch.utils.checkpoint`` keeps for each block, always in host
#: memory; a GPU's own state, of 16 bytes, lies there, too.
RNG_STATE_BYTES = 5056
#: Of a large draw on a GPU, up to so many rows are drawn one after the other, each with at most a window of about a million numbers before
#: it, if that is less than this share of the whole draw (``exact/random/rows_of_gpu_draws.py``); a window's input, output and mask.
DRAWN_ROWS, DRAWN_SHARE, _WINDOW_BYTES = 8, 0.7, 10 << 20
#: How many footprints' columns are cached.
_REMEMBERED = 8


@dataclass(frozen=True)
class Moments:
    """What a rank holds at the moments of a step, besides parameters, optimizer state, buffers and input, in columns.

    Args:
        forward: whether it is one of forward.
        backward: whether it is one of backward.
        held: how many leading blocks hold what they saved; the one that runs excepted.
        running: whether the block of that index runs, in forward or backward; else it is what comes before that block.
        boundary: whether that part of the step has just begun.
        ended: for a boundary in backward, the block whose backward ends there; -1 where none does.
        accumulated: for a moment of backward, whether backward adds to gradients of an earlier batch, which count as complete all the time.
        waiting: whether gradients of a batch that isn't the step's last one may be held, which replicas don't reduce yet.
        gradients: complete gradients.
        activations: tensors that forward made and that grow with the batch.
        temporary: everything else.
    """

    forward: Flags
    backward: Flags
    held: Column
    running: Flags
    boundary: Flags
    ended: Column
    accumulated: Flags
    waiting: Flags
    gradients: Column
    activations: Column
    temporary: Column


@dataclass(frozen=True)
class _Columns:
    """A footprint's figures, at the whole batch: its moments without bytes of fixed size, those bytes, and the blocks' figures."""

    moments: Moments
    fixed: Column
    sloping: Column
    slope: Column
    block_scaled: Column
    block_fixed: Column
    block_extra: Column
    block_peak: Column
    block_unsaved: Column
    block_draws: Column
    draws: Column


_known: dict[int, tuple[Footprint, _Columns]] = {}


def moments_of(footprint: Footprint, recomputed: Collection[int], share: float, *, random_bytes: int = 0) -> Moments:
    """The moments of a rank that computes ``share`` of the batch at a time.

    Recomputed blocks hold their input only, and the state of random numbers, from their forward to their backward; in their backward they
    hold everything. At its beginning their forward runs again, while the current random state is saved (``torch.random.fork_rng``). For a
    part of the batch, a random draw is made for the whole batch, and its rows are kept.

    Args:
        footprint: at the whole batch.
        recomputed: indices of blocks.
        share: the part of the batch; bytes of fixed size stay as they are.
        random_bytes: of a random state, where the device holds it: :data:`RNG_STATE_BYTES` on a CPU device, 0 on others.
    """
    columns = _columns_of(footprint)
    whole = columns.moments
    states = np.zeros_like(whole.held)
    scaled, fixed = whole.activations, columns.fixed - np.maximum(columns.sloping - np.rint(columns.slope * share).astype(np.int64), 0)
    again = np.zeros(0, dtype=np.intp)
    if recomputed:
        chosen = np.zeros(len(footprint.blocks), dtype=np.int64)
        chosen[list(recomputed)] = 1
        # A block that has just begun its backward hasn't run its forward again yet.
        states = random_bytes * _before(chosen, np.minimum(whole.held + whole.running, len(chosen)))
        begins = whole.backward & whole.running & whole.boundary
        gone = whole.held + begins
        scaled = scaled - _before(chosen * (columns.block_scaled - columns.block_extra), gone)
        fixed = fixed - _before(chosen * columns.block_fixed, gone)
        running = whole.backward & whole.running & ~whole.boundary
        scaled = scaled + np.where(running, _at(chosen * columns.block_extra, whole.held), 0)
        # In forward such a block saves nothing, but local names may hold a tensor past its last use: the middle of both.
        runs = whole.forward & whole.running & ~whole.boundary
        scaled = scaled - np.where(runs, _at(chosen * (columns.block_peak - columns.block_unsaved), whole.held), 0)
        again = np.flatnonzero(begins & (_at(chosen, whole.held) > 0))
    activations = np.maximum(scaled, 0)
    states = np.concatenate([states, states[again] + random_bytes])
    temporary = np.rint(whole.temporary * share).astype(np.int64) + np.maximum(fixed, 0)
    splits = int(share < 1)
    if len(again):
        blocks = whole.held[again]
        activations = np.concatenate([activations, activations[again] + columns.block_peak[blocks]])
        temporary = np.concatenate([temporary, temporary[again] + splits * columns.block_draws[blocks]])
    temporary[: len(columns.draws)] += splits * columns.draws

    inside = np.arange(len(activations)) >= len(whole.held)  # a forward that runs again is no boundary

    def flags(column: Flags) -> Flags:
        return np.concatenate([column, column[again]])

    def sizes(column: Column) -> Column:
        return np.concatenate([column, column[again]])

    return Moments(
        forward=flags(whole.forward),
        backward=flags(whole.backward),
        held=sizes(whole.held),
        running=flags(whole.running),
        boundary=flags(whole.boundary) & ~inside,
        ended=np.where(inside, -1, sizes(whole.ended)),
        accumulated=flags(whole.accumulated),
        waiting=flags(whole.waiting),
        gradients=sizes(whole.gradients),
        activations=np.rint(activations * share).astype(np.int64) + states,
        temporary=temporary,
    )


def drawn_bytes(draws: Iterable[int], rows: int, batch_size: int, *, on_cpu: bool = False) -> int:
    """The most bytes that one of these random draws over the samples takes at once on a rank that works on so many of the batch's, besides
    its own: the whole batch's numbers, of which it keeps its rows, or some rows' of a large draw.

    Args:
        draws: of the whole batch's (``LayerFootprint.draw_bytes``).
    """
    if rows >= batch_size:
        return 0

    def at_once(whole: int) -> int:
        piece = -(-whole // batch_size) + _WINDOW_BYTES
        return whole if on_cpu or rows > DRAWN_ROWS or rows * piece > DRAWN_SHARE * whole else piece

    return max(map(at_once, draws), default=0)


def _before(values: Column, counts: Column) -> Column:
    """For each count, the sum of so many leading values."""
    sums: Column = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(values)])
    return sums[counts]


def _at(values: Column, indices: Column) -> Column:
    """The values at these indices; 0 after the last one."""
    padded: Column = np.append(values, 0)
    return padded[indices]


def _columns_of(footprint: Footprint) -> _Columns:
    """A footprint's columns, made once while it is in use."""
    known = _known.get(id(footprint))
    if known is not None and known[0] is footprint:
        return known[1]
    while len(_known) >= _REMEMBERED:
        del _known[next(iter(_known))]
    columns = _make(footprint)
    _known[id(footprint)] = footprint, columns
    return columns


def _make(footprint: Footprint) -> _Columns:
    moments = footprint.moments or _all_at_once(footprint)
    blocks = footprint.blocks

    accumulated = _accumulated(moments)
    first = next((index for index, moment in enumerate(moments) if moment.phase == "backward"), 0)
    last = max((index + 1 for index, adds in enumerate(accumulated) if adds), default=0)

    def column(values: Collection[int]) -> Column:
        return np.fromiter(values, dtype=np.int64, count=len(values))

    def flags(values: Collection[bool]) -> Flags:
        return np.fromiter(values, dtype=np.bool_, count=len(values))

    whole = Moments(
        forward=flags([moment.phase == "forward" for moment in moments]),
        backward=flags([moment.phase == "backward" for moment in moments]),
        held=column([moment.held for moment in moments]),
        running=flags([moment.running for moment in moments]),
        boundary=flags([moment.boundary for moment in moments]),
        ended=column(_ended(moments)),
        accumulated=flags(accumulated),
        waiting=flags([first <= index < last for index in range(len(moments))]),
        gradients=column([moment.gradient_bytes for moment in moments]),
        activations=column([moment.activation_bytes for moment in moments]),
        temporary=column([moment.temporary_bytes for moment in moments]),
    )
    return _Columns(
        moments=whole,
        fixed=column([moment.fixed_bytes for moment in moments]),
        sloping=column([moment.sloping_bytes for moment in moments]),
        slope=column([moment.slope_bytes for moment in moments]),
        block_scaled=column([block.activation_bytes - block.fixed_bytes for block in blocks]),
        block_fixed=column([block.fixed_bytes for block in blocks]),
        block_extra=column([block.input_extra_bytes for block in blocks]),
        block_peak=column([block.forward_peak_bytes for block in blocks]),
        block_unsaved=column(
            [(block.forward_peak_bytes + (block.forward_unsaved_bytes or block.forward_peak_bytes)) // 2 for block in blocks]
        ),
        block_draws=column([max(block.draw_bytes, default=0) for block in blocks]),
        draws=column([moment.draw_bytes for moment in moments]),
    )


def _ended(moments: tuple[Moment, ...]) -> list[int]:
    """For each moment, the block whose backward ends there."""
    ended, last = [], -1
    for moment in moments:
        now = moment.held if moment.running and moment.phase == "backward" else -1
        ended.append(last if moment.boundary and moment.phase == "backward" and now != last else -1)
        last = now
    return ended


def _accumulated(moments: tuple[Moment, ...]) -> list[bool]:
    """For each moment, whether its backward found gradients when it began."""
    found, last, there = [], "", False
    for moment in moments:
        if moment.phase == "backward" and last != "backward":
            there = moment.boundary and moment.gradient_bytes > 0
        last = moment.phase
        found.append(there and last == "backward")
    return found


def _all_at_once(footprint: Footprint) -> tuple[Moment, ...]:
    """For a step that wasn't traced: forward's end as if all were held, and the same within each block, forward and backward."""
    end = Moment(
        phase="forward",
        held=len(footprint.blocks),
        gradient_bytes=footprint.gradient_bytes,
        activation_bytes=footprint.activation_bytes,
        temporary_bytes=footprint.temporary_bytes,
    )
    moments = [end]
    gradients, activations = 0, footprint.activation_bytes
    for index in reversed(range(len(footprint.blocks))):
        block = footprint.blocks[index]
        gradients += block.gradient_bytes
        within = replace(end, held=index, running=True, activation_bytes=activations)
        drawing = replace(within, draw_bytes=max(block.draw_bytes, default=0))
        moments += [drawing, replace(within, phase="backward", gradient_bytes=gradients)]
        activations -= block.activation_bytes
    return tuple(moments)
