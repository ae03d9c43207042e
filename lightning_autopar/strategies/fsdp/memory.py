"""FSDP2 on one rank: what ``fully_shard`` holds at each moment of a step. Arithmetic only: neither torch nor Lightning, no other engine.

As torch 2.13 does it (``torch/distributed/fsdp/_fully_shard``):

- Each parameter is cut by rows, padded to as many on each rank (``_fsdp_param.py``, ``_init_sharded_param``).
- A unit is gathered into one flat buffer and copied out of it into its parameters (``_fsdp_collectives.py``, ``foreach_all_gather``). In
  forward the buffer stays until the next unit's parameters are copied out (``_fsdp_param_group.py``, "Overlapping all-gather copy-in and
  all-gather"); the end of forward lets the last one go.
- The root's own parameters stay gathered from its forward to the end of backward; a block's until its forward's end, if it reshards, and
  again in its backward. There the next block's buffer is gathered ahead, once this block's parameters are copied out.
- Gradients are whole until the unit's backward ends (``post_backward``). Then the parameters go, the gradients are copied into a padded
  flat buffer and freed, and the reduced part becomes this rank's gradients, with its padding. The flat buffer stays until the next unit's
  gradients are ready. The root's own are reduced last.
- gloo makes a copy of the whole buffer of each collective (``ProcessGroupGloo.cpp``); NCCL makes none in torch's allocator.
- A rank that shares with nobody gathers nothing: it copies each parameter from its shard, without a buffer, and nothing is ahead
  (``_fsdp_param_group.py``, ``unshard``). Its gradients are reduced as others' are, through two buffers, without a collective.
- Offloaded, shards of gradients lie in host memory, and the optimizer works there. Whole gradients are the device's, and so is a GPU's
  reduced part, until it is copied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import accumulate, chain

import numpy as np

from lightning_autopar.engines import Rank
from lightning_autopar.memory.device_bytes import DeviceBytes
from lightning_autopar.memory.footprint import Footprint, FootprintCache, LayerFootprint
from lightning_autopar.memory.fullest_moments import Column, Moments
from lightning_autopar.plans import Plan


@dataclass(frozen=True, kw_only=True)
class Widths:
    """Factors on the traced bytes of a module that was traced in the ``param_dtype`` of FSDP2's ``MixedPrecisionPolicy``.

    Args:
        stored: for a parameter, its gradient and the optimizer's state of its type, between steps.
        reduced: for a gradient while it is reduced (``reduce_dtype``).
    """

    stored: float = 1.0
    reduced: float = 1.0


AS_TRACED = Widths()


@dataclass(frozen=True, kw_only=True)
class Unit:
    """The bytes of a unit of FSDP2, whose parameters are gathered and reduced together.

    Args:
        gathered: its parameters, whole and padded; the flat buffer is equally large.
        shard: a rank's part of them, padding included.
        own: a rank's part without padding, to which its optimizer's state is proportional.
        whole: its parameters before sharding.
        gradients: whole gradients, without padding.
        reduced: the padded flat buffer through which they are reduced.
        kept: a rank's part of the gradients, padding included.
    """

    gathered: int = 0
    shard: int = 0
    own: int = 0
    whole: int = 0
    gradients: int = 0
    reduced: int = 0
    kept: int = 0


def unit_of(layers: Iterable[LayerFootprint], shards: int, rank: int = 0, widths: Widths = AS_TRACED) -> Unit:
    """The parameters of these layers as one unit.

    Args:
        layers: blocks or parts of the module.
        shards: over how many ranks they are cut.
        rank: among these.
        widths: at rest and on the wire.
    """
    gathered = own = whole = gradients = reduced = 0
    for layer in layers:
        rows = layer.parameter_rows or ((layer.parameter_bytes, 1, layer.gradient_bytes > 0),)
        for count, row_bytes, learns in rows:
            part = -(-count // shards)
            padded = part * shards * row_bytes
            gathered += padded
            whole += count * row_bytes
            own += max(0, min(part, count - rank * part)) * row_bytes
            if learns:
                gradients += count * row_bytes
                reduced += padded
    return Unit(
        gathered=gathered,
        shard=round(gathered // shards * widths.stored),
        own=own,
        whole=whole,
        gradients=gradients,
        reduced=round(reduced * widths.reduced),
        kept=round(reduced // shards * widths.stored),
    )


@dataclass(frozen=True)
class Sharding:
    """A footprint's units under a plan, as one rank sees them.

    Args:
        root: the unit of all parameters outside of the blocks' units.
        blocks: a unit for each block of the footprint; an empty one if the root has its parameters.
        total: all of them together.
        shards: over how many ranks each parameter is cut.
    """

    root: Unit
    blocks: tuple[Unit, ...]
    total: Unit
    shards: int


#: A search asks for the same units again with each choice of devices.
_SHARDINGS: FootprintCache[Sharding] = FootprintCache(64)


def sharding_of(footprint: Footprint, plan: Plan, rank: int = 0, widths: Widths = AS_TRACED) -> Sharding:
    """The units of a plan.

    Args:
        plan: an fsdp plan; ``replicas`` copies of the model, each sharded over ``world_size / replicas`` ranks.
        widths: of parameters and gradients, beside those in the trace.
    """
    shards = max(1, plan.world_size // plan.replicas)
    among, names = rank % shards, plan.shard
    return _SHARDINGS.get(footprint, (names, shards, among, widths), lambda: _sharding(footprint, frozenset(names), shards, among, widths))


def _sharding(footprint: Footprint, names: frozenset[str], shards: int, rank: int, widths: Widths) -> Sharding:
    units: dict[object, Unit] = {}  # most blocks are alike, and so are their units
    blocks = []
    for block in footprint.blocks:
        alike = block.parameter_rows or (block.parameter_bytes, block.gradient_bytes)
        if block.fqn not in names:
            blocks.append(Unit())
            continue
        if alike not in units:
            units[alike] = unit_of((block,), shards, rank, widths)
        blocks.append(units[alike])
    if footprint.outer:
        root = unit_of((*footprint.outer, *(block for block in footprint.blocks if block.fqn not in names)), shards, rank, widths)
    else:
        gradients = max(0, footprint.gradient_bytes - sum(unit.gradients for unit in blocks))
        frozen = max(0, footprint.parameter_bytes - sum(unit.whole for unit in blocks) - gradients)
        root = unit_of((LayerFootprint(fqn="", parameter_rows=((gradients, 1, True), (frozen, 1, False))),), shards, rank, widths)
    total = Unit(**{field.name: sum(getattr(unit, field.name) for unit in (root, *blocks)) for field in fields(Unit)})
    return Sharding(root, tuple(blocks), total, shards)


def fsdp_bytes(
    footprint: Footprint, plan: Plan, moments: Moments, *, rank: int, share: float, copies: bool, widths: Widths = AS_TRACED
) -> DeviceBytes:
    """What a rank holds at the peak of a step.

    Args:
        moments: of the footprint, on the rank's share of the batch, with the plan's blocks recomputed.
        copies: whether a collective copies what it sends, as gloo does.
    """
    sharding = sharding_of(footprint, plan, rank, widths)
    adds = plan.micro_batches > 1 or bool(moments.accumulated.any())
    how = bool(plan.reshard_after_forward), copies, adds, bool(plan.offload)
    key = plan.shard, sharding.shards, rank % sharding.shards, widths, *how
    levels = _LEVELS.get(footprint, key, lambda: _levels(sharding, *how))
    best: tuple[int, int, _Occasion] | None = None
    for occasion in chain(_in_forward(levels, moments), _in_backward(levels, moments), _after_backward(levels, moments)):
        if len(occasion.rows):
            sums = occasion.total(moments)
            place = int(np.argmax(sums))
            if best is None or sums[place] > best[0]:
                best = int(sums[place]), place, occasion
    resident = resident_bytes(footprint, plan, sharding, share=share)
    if best is None:
        return resident
    _, place, occasion = best
    row = occasion.rows[place]
    return replace(
        resident,
        gradients=int(occasion.gradients[place]),
        activations=int(moments.activations[row]),
        temporary=int(moments.temporary[row]) // occasion.parts if occasion.parts else 0,
        communication=int(occasion.communication[place]),
        updates=not (moments.forward[row] or moments.backward[row]),
    )


def resident_bytes(footprint: Footprint, plan: Plan, sharding: Sharding, *, share: float, set_aside_bytes: int = 0) -> DeviceBytes:
    """What a rank holds between two steps: with its part of the batch, without its gradients.

    Args:
        set_aside_bytes: more copies of the whole parameters that its hooks hold shards of.
    """
    total = sharding.total
    optimizer, copies = (
        round(size * total.own / max(1, total.whole)) for size in (footprint.optimizer_bytes, footprint.copied_bytes + set_aside_bytes)
    )
    return DeviceBytes(
        parameters=0 if "parameters" in plan.offload else total.shard,
        optimizer=0 if "optimizer" in plan.offload else optimizer,
        buffers=footprint.buffer_bytes + copies,
        input=round(footprint.input_bytes * share),
    )


def evaluation_communication(sharding: Sharding, *, reshard: bool) -> tuple[int, int]:
    """Bytes of gathered parameters and buffers while a step of validation, test or prediction runs.

    Returns:
        The most while a block begins and copies its parameters out of its buffer, and the most while a block computes.
    """
    gathered = before = sharding.root.gathered
    if sharding.shards == 1:
        sizes = [unit.gathered for unit in sharding.blocks]
        most = gathered + (max(sizes, default=0) if reshard else sum(sizes))
        return most, most
    begins, computes = 2 * gathered, 2 * gathered
    for unit in sharding.blocks:
        if unit.gathered:
            begins = max(begins, gathered + before + 2 * unit.gathered)
            computes = max(computes, gathered + 2 * unit.gathered)
            before = unit.gathered
            gathered += 0 if reshard else unit.gathered
    return begins, computes


@dataclass(frozen=True)
class _Occasion:
    """Some of a step's moments, with the bytes that FSDP2 adds to them.

    Args:
        rows: which moments.
        gradients: of each, gradients that lie sharded or whole.
        communication: of each, what is gathered and in buffers.
        parts: the divisor of the optimizer's temporaries, as it works on shards; 0 before it runs.
    """

    rows: Column
    gradients: Column
    communication: Column
    parts: int = 1

    def total(self, moments: Moments) -> Column:
        """Bytes besides those that are always held."""
        sums: Column = self.gradients + self.communication + moments.activations[self.rows]
        return sums + moments.temporary[self.rows] // self.parts if self.parts else sums


@dataclass(frozen=True)
class _Levels:
    """Sums over a sharding's units, each by the index i of a block, and of the end.

    Args:
        copy: buffers that a collective makes of its own, 0 or 1.
        adds: whether memory holds gradients of an earlier batch or part.
        offloads: whether shards of gradients lie in host memory.
        own: block i, gathered.
        flat: the buffer through which it is gathered.
        reduced: its gradients' flat buffer.
        output: with offload, its reduced part on its way to the host; a CPU device makes it there.
        behind: the buffer of the last unit that forward gathered before block i.
        ahead: the buffer that backward gathers ahead in block i: that of the unit before it.
        left: the flat gradients that are left of the first unit from i on.
        stays: the parameters of the blocks before i that forward leaves gathered.
        whole: whole gradients of the blocks from i on.
        sharded: the same in shards, as far as those lie on the device.
    """

    sharding: Sharding
    copy: int
    adds: bool
    offloads: bool
    own: Column
    flat: Column
    reduced: Column
    output: Column
    behind: Column
    ahead: Column
    left: Column
    stays: Column
    whole: Column
    sharded: Column

    @property
    def root_part(self) -> int:
        """The root's gradients in shards."""
        return 0 if self.offloads else self.sharding.root.kept

    @property
    def all_sharded(self) -> int:
        """All gradients in shards."""
        return int(self.sharded[0]) + self.root_part


#: Plans that differ only in their batch or in what they recompute have the same.
_LEVELS: FootprintCache[_Levels] = FootprintCache(64)


def _levels(sharding: Sharding, reshard: bool, copies: bool, adds: bool, offloads: bool) -> _Levels:
    root, blocks = sharding.root, sharding.blocks
    gathered, reduced = [unit.gathered for unit in blocks], [unit.reduced for unit in blocks]
    nothing = [0] * (len(blocks) + 1)
    alone = sharding.shards == 1
    kept = [0 if offloads else unit.kept for unit in blocks]
    return _Levels(
        sharding,
        1 if copies and not alone else 0,
        adds,
        offloads,
        own=_array([*gathered, 0]),
        flat=_array(nothing if alone else [*gathered, 0]),
        reduced=_array([*reduced, 0]),
        output=_array([*(unit.kept for unit in blocks), 0] if offloads and not copies else nothing),
        behind=_array(nothing if alone else _carried(gathered, root.gathered)),
        ahead=_array(_carried(gathered, 0) if reshard and not alone else nothing),
        left=_array(_carried(reduced[::-1], 0)[::-1]),
        stays=_array(nothing if reshard else accumulate(gathered, initial=0)),
        whole=_array([*accumulate((unit.gradients for unit in reversed(blocks)), initial=0)][::-1]),
        sharded=_array([*accumulate(reversed(kept), initial=0)][::-1]),
    )


def _in_forward(levels: _Levels, moments: Moments) -> Iterator[_Occasion]:
    """Moments of forward: units are gathered, and compute. The last step's gradients are held until they are set to None."""
    rows = np.flatnonzero(moments.forward)
    held, running, boundary = moments.held[rows], moments.running[rows], moments.boundary[rows]
    there = (moments.gradients[rows] > 0) | levels.adds
    gradients = np.where(there, levels.all_sharded, 0)
    always, gathers = levels.sharding.root.gathered, levels.own[held] > 0
    buffer = np.where(running & gathers, levels.flat[held], levels.behind[held])
    yield _Occasion(rows, gradients, always + levels.stays[held] + running * levels.own[held] + buffer)
    begins = boundary & running & gathers
    # The buffer before it is freed when the copy is done, as a local name holds it so long (``wait_for_unshard``,
    # ``prev_all_gather_state``).
    copying = always + levels.stays + levels.behind + levels.own + levels.flat
    yield _Occasion(rows[begins], gradients[begins], copying[held[begins]])
    first = boundary & ~running & (held == 0)
    yield _Occasion(rows[first], gradients[first], np.full(int(first.sum()), always * (1 + levels.copy), dtype=np.int64))


def _in_backward(levels: _Levels, moments: Moments) -> Iterator[_Occasion]:
    """Moments of backward: units are gathered ahead, and reduced when a block's backward ends. A backward that adds to an earlier batch's
    gradients is the same, with those gradients in shards besides.
    """
    rows = np.flatnonzero(moments.backward & ~moments.accumulated)
    adds = levels.adds
    held, running, boundary, ended = (column[rows] for column in (moments.held, moments.running, moments.boundary, moments.ended))
    blocks = len(levels.own) - 1
    done = np.minimum(held + running, blocks)  # blocks from here on have reduced their gradients
    complete = moments.gradients[rows]
    rest = complete - np.minimum(levels.whole[done], complete)
    gradients = rest + (levels.all_sharded if adds else levels.sharded[done])
    always = levels.sharding.root.gathered
    here = always + levels.stays[held] + running * levels.own[held] + levels.left[done]
    ahead = levels.ahead[held]
    yield _Occasion(rows, gradients, here + ahead)
    fetching = boundary & (running | (held == blocks))
    yield _Occasion(rows[fetching], gradients[fetching], (here + ahead * (1 + levels.copy))[fetching])
    # A block's own buffer, gathered ahead, is held until its parameters are copied out of it.
    begins = boundary & running & (levels.ahead[held + running] > 0)
    yield _Occasion(rows[begins], gradients[begins], (here + levels.own[held])[begins])
    ends = ended >= 0
    at = ended[ends]
    around = always + (levels.stays + levels.ahead)[at]
    part, whole = (sums[at] - sums[at + 1] for sums in (levels.sharded, levels.whole))
    # The reduced part becomes the rank's gradients, or is added to them.
    replaced, added = (np.zeros_like(part), part) if adds else (part, np.zeros_like(part))
    yield _Occasion(rows[ends], gradients[ends] + whole - replaced, around + levels.reduced[at])
    yield _Occasion(rows[ends], gradients[ends] + added, around + levels.reduced[at] * (1 + levels.copy) + levels.output[at])


def _after_backward(levels: _Levels, moments: Moments) -> Iterator[_Occasion]:
    """The root reduces last, then blocks whose end of backward autograd couldn't tell; the optimizer works on shards."""
    rows = np.flatnonzero(~moments.forward & ~moments.backward)
    root, parts = levels.sharding.root, levels.sharding.shards
    told = set(moments.ended.tolist())
    late = [unit for index, unit in enumerate(levels.sharding.blocks) if index not in told]
    gathered = sum(unit.gathered for unit in late)
    base = levels.all_sharded if levels.adds else levels.all_sharded - levels.root_part
    waiting = np.full(len(rows), base + sum(unit.gradients - (0 if levels.offloads else unit.kept) for unit in late), dtype=np.int64)
    output = root.kept if levels.output.any() else 0
    yield _Occasion(rows, waiting + root.gradients, np.full_like(rows, root.reduced + gathered), 0)
    yield _Occasion(rows, waiting + levels.root_part, np.full_like(rows, root.reduced * (1 + levels.copy) + output + gathered), 0)
    if not levels.offloads:
        yield _Occasion(rows, np.full_like(rows, levels.all_sharded), np.zeros_like(rows), parts)


def _carried(values: list[int], start: int) -> list[int]:
    """For each place, and one after the last, the last value before it that isn't 0; ``start`` where there is none."""
    return [*accumulate(values, lambda last, value: value or last, initial=start)]


def _array(values: Iterable[int]) -> Column:
    return np.array([*values], dtype=np.int64)


def rank_bytes(rank: Rank, widths: Widths = AS_TRACED) -> Iterator[DeviceBytes]:
    """A rank's fullest moments: of a step, of a validation between two steps, and of a checkpoint."""
    footprint, plan = rank.footprint, rank.plan
    yield fsdp_bytes(footprint, plan, rank.moments(), rank=rank.number, share=rank.share, copies=rank.on_cpu, widths=widths)
    sharding = sharding_of(footprint, plan, rank.number)
    if (runs := rank.evaluation_bytes) is not None:  # Lightning has set the gradients to None (``on_validation_model_zero_grad``)
        begins, computes = evaluation_communication(sharding, reshard=bool(plan.reshard_after_forward))
        # While a block is gathered, memory holds its input, not yet its output.
        enters = round((max((block.input_bytes for block in footprint.blocks), default=0) + footprint.input_bytes) * rank.share)
        communication, temporary = max((begins, min(enters, runs)), (computes, runs), key=sum)
        held = resident_bytes(footprint, plan, sharding, share=0, set_aside_bytes=footprint.set_aside_bytes)
        yield replace(held, temporary=temporary, communication=communication, occasion="validation")
    if footprint.training:
        yield checkpoint_bytes(rank, sharding)


def checkpoint_bytes(rank: Rank, sharding: Sharding) -> DeviceBytes:
    """Bytes while a checkpoint is saved after a step: tensors are gathered one at a time (``state/checkpoint.py``), and gradients are still
    held. ``DTensor.full_tensor`` pads a rank's part where it is shorter than the others', and gathers into a buffer of equal parts; gloo
    makes a copy of that.
    """
    held = resident_bytes(rank.footprint, rank.plan, sharding, share=rank.share)
    gradients = 0 if "optimizer" in rank.plan.offload else sharding.total.kept
    tensors = _parameters(rank.footprint)
    gathered = max((_gathered_bytes(*tensor, sharding.shards, rank.number, rank.on_cpu) for tensor in tensors), default=0)
    return replace(held, gradients=gradients, communication=gathered, occasion="checkpoint")


def _parameters(footprint: Footprint) -> set[tuple[int, int]]:
    """Rows and bytes of a row of each parameter; where they aren't known, the largest one as a single column."""
    layers = (*footprint.blocks, *footprint.outer)
    return _ROWS.get(
        footprint,
        None,
        lambda: (
            {(rows, row_bytes) for layer in layers for rows, row_bytes, _ in layer.parameter_rows}
            or {(footprint.largest_parameter_bytes, 1)}
        ),
    )


_ROWS: FootprintCache[set[tuple[int, int]]] = FootprintCache()


def _gathered_bytes(rows: int, row_bytes: int, shards: int, rank: int, copies: bool) -> int:
    """The bytes that gathering one tensor takes."""
    part = -(-rows // shards)
    short = rows - (rank % shards) * part < part
    return part * row_bytes * (shards * (1 + copies) + short)


def offloaded_bytes(footprint: Footprint, plan: Plan, *, on_cpu: bool) -> tuple[int, int]:
    """Bytes that all ranks keep in pageable and in page-locked host memory.

    torch's allocator of page-locked memory rounds each tensor up to a power of two (``CachingHostAllocator``, ``c10::llvm::PowerOf2Ceil``);
    FSDP2 locks each shard and each gradient by itself.

    Args:
        on_cpu: whether the devices are CPUs, which lock no pages.
    """
    if not plan.offload:
        return 0, 0
    sharding = sharding_of(footprint, plan)
    states, ranks = footprint.optimizer_bytes * plan.replicas, plan.world_size
    if on_cpu:
        return states + (sharding.total.shard + sharding.total.kept) * ranks, 0
    rows = _ROWS_BY_SIZE.get(footprint, None, lambda: _all_rows(footprint))
    return states, ranks * sum(count * _locked_bytes(*row, sharding.shards) for row, count in rows.items())


def _locked_bytes(rows: int, row_bytes: int, learns: bool, shards: int) -> int:
    """Page-locked memory for a rank's part of a parameter, and of its gradient where it has one."""
    part = -(-rows // shards) * row_bytes
    return (1 + learns) * (1 << (part - 1).bit_length()) if part else 0


def _all_rows(footprint: Footprint) -> Counter[tuple[int, int, bool]]:
    """The rows of a parameter, their bytes, whether it learns, and how many such there are; all as one where they aren't known."""
    found = Counter(row for layer in (*footprint.blocks, *footprint.outer) for row in layer.parameter_rows)
    frozen = footprint.parameter_bytes - footprint.gradient_bytes
    return found or Counter([(1, footprint.gradient_bytes, True), (1, frozen, False)])


_ROWS_BY_SIZE: FootprintCache[Counter[tuple[int, int, bool]]] = FootprintCache()
