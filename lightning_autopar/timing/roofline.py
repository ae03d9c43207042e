"""What one rank computes: seconds of each part of a step on one device, by its operations. It knows no links and no schedule.

A GPU runs its stream of kernels while the host issues the next ones: the longer of the two over the whole step counts. A CPU does one after
the other. Results are cached by operations, share of the batch and kind of device, since blocks are alike and so are devices.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple

from lightning_autopar.devices.inventory import Device
from lightning_autopar.memory.footprint import Footprint, LayerFootprint
from lightning_autopar.memory.work.work import Work
from lightning_autopar.timing.rates import Phase, Rates

#: The assumed operations for each parameter of a part that wasn't traced: a product or norm, and something before the next.
_GUESSED_OPERATIONS = 3
#: Operations of an update on numbers on the host: how often each parameter was updated.
_ON_HOST = frozenset(("_local_scalar_dense",))
_SCALERS = "_amp_foreach_non_finite_check"
#: Seconds of drawing the whole batch's random numbers on a rank, besides the operations (``benchmarks/draws.py``).
DRAW = 62
_REMEMBERED = 16384


class Load(NamedTuple):
    """What a part takes.

    Args:
        stream: seconds of its operations on the device.
        issue: seconds of the host to issue them.
    """

    stream: float
    issue: float


class Layer(NamedTuple):
    """A part of the step: a block, or what runs between two.

    Args:
        fqn: the block's name; None between blocks.
        forward: its operations, by number among those of the layout.
        backward: likewise.
        gradients: bytes of each of its gradients, in the order of its parameters.
        parameters: bytes of its parameters.
        received: bytes that enter it, at the whole batch.
    """

    fqn: str | None
    forward: int
    backward: int
    gradients: tuple[int, ...]
    parameters: int
    received: int


@dataclass(frozen=True)
class Layout:
    """The parts of a step in the order in which they run, and the different lists of operations among them.

    Args:
        layers: blocks and what lies between.
        works: the different lists of operations; layers name them by their index.
        optimizer: operations of the update.
        tokens: what the lists are remembered by.
        synced: whether the host waits for the device before the update: a scaler of gradients asks whether they are finite.
    """

    layers: tuple[Layer, ...]
    works: tuple[tuple[Work, ...], ...]
    optimizer: tuple[Work, ...]
    tokens: tuple[int, ...]
    synced: bool = False


def computing_dtype(precision: str) -> str:
    """The dtype of products at a precision, by Lightning's name."""
    if precision.startswith("64"):
        return "fp64"
    if precision.startswith(("bf16", "transformer-engine")):
        return "fp16" if precision.endswith("float16") and not precision.startswith("bf16") else "bf16"
    return "fp16" if precision.startswith("16") else "fp32"


_LAYOUTS: dict[tuple[int, str], tuple[weakref.ref[Footprint], Layout]] = {}


def layout_of(footprint: Footprint, precision: str) -> Layout:
    """The parts of a footprint's step; worked out once for each.

    Args:
        footprint: where its operations weren't traced they are guessed from totals, from its FLOPs or else its parameters.
        precision: Lightning's name, for operations that are guessed.
    """
    key = id(footprint), computing_dtype(precision)
    known = _LAYOUTS.get(key)
    if known is None or known[0]() is not footprint:
        known = weakref.ref(footprint, lambda _: _LAYOUTS.pop(key, None)), _layout(footprint, key[1])
        _LAYOUTS[key] = known
    return known[1]


def _layout(footprint: Footprint, dtype: str) -> Layout:
    works: dict[tuple[Work, ...], int] = {}
    rest = _rest(footprint)
    parts: list[tuple[str | None, LayerFootprint]] = [(block.fqn, block) for block in footprint.blocks]
    if footprint.outer:
        for index, part in reversed(list(enumerate(footprint.outer))):
            parts.insert(index, (None, part))
    elif rest.flops or rest.parameter_bytes or not parts:
        parts.append((None, rest))
    traced = any(part.work for _, part in parts)
    layers = []
    for fqn, part in parts:
        forward, backward = part.work, part.backward_work if footprint.training else ()
        if not traced:
            forward, backward = _guess(part, footprint.training, dtype)
        layers.append(
            Layer(
                fqn,
                works.setdefault(forward, len(works)),
                works.setdefault(backward, len(works)),
                _gradients(part) if footprint.training else (),
                part.parameter_bytes,
                part.input_bytes,
            )
        )
    optimizer = (footprint.optimizer_work or _guess_update(footprint)) if footprint.training else ()
    synced = any(work.name.startswith(_SCALERS) for work in optimizer)
    return Layout(tuple(layers), tuple(works), optimizer, tuple(_token(work) for work in works), synced)


def _gradients(part: LayerFootprint) -> tuple[int, ...]:
    """Bytes of each of a part's gradients; all together where its parameters aren't known one by one."""
    sizes = tuple(rows * row_bytes for rows, row_bytes, learns in part.parameter_rows if learns)
    return sizes or ((part.gradient_bytes,) if part.gradient_bytes else ())


def _rest(footprint: Footprint) -> LayerFootprint:
    """All outside of blocks, as one part; the step's FLOPs are guessed from its parameters if they weren't counted."""
    times = 3 if footprint.training else 1
    flops = footprint.flops or 2 * footprint.parameters * max(1, footprint.batch_size) * times
    known = sum(block.flops + (block.backward_flops or (times - 1) * block.flops) for block in footprint.blocks)
    uncounted = not any(block.flops for block in footprint.blocks)
    blocks = footprint.blocks
    return LayerFootprint(
        fqn="",
        parameters=max(0, footprint.parameters - sum(block.parameters for block in blocks)),
        parameter_bytes=max(0, footprint.parameter_bytes - sum(block.parameter_bytes for block in blocks)),
        gradient_bytes=max(0, footprint.gradient_bytes - sum(block.gradient_bytes for block in blocks)),
        optimizer_bytes=max(0, footprint.optimizer_bytes - sum(block.optimizer_bytes for block in blocks)),
        activation_bytes=max(0, footprint.activation_bytes - sum(block.activation_bytes for block in blocks)),
        input_bytes=footprint.input_bytes,
        flops=flops // times if uncounted and not blocks else max(0, flops - known) // times,
    )


def _guess(part: LayerFootprint, training: bool, dtype: str) -> tuple[tuple[Work, ...], tuple[Work, ...]]:
    """Operations of a part that wasn't traced, by its totals; backward does twice what forward does."""
    number = _GUESSED_OPERATIONS * max(1, len(part.parameter_rows))
    weights = part.parameter_bytes
    moved = part.moved_bytes or weights + 2 * part.activation_bytes

    def work(flops: int, moved: int, fixed: int, count: int) -> tuple[Work, ...]:
        if not flops and not moved:
            return ()
        moved = max(moved, fixed + count)  # at least one byte grows with the batch, and so do the FLOPs
        each = Work(
            kind="matmul",
            name="guess",
            dtype=dtype,
            count=count,
            flops=flops // count,
            moved_bytes=moved // count,
            fixed_bytes=fixed // count,
        )
        return (each,)

    forward = work(part.flops, moved, min(weights, moved), number)
    if not training:
        return forward, ()
    back = part.backward_moved_bytes or 2 * moved
    return forward, work(part.backward_flops or 2 * part.flops, back, min(weights + part.gradient_bytes, back), 2 * number)


def _guess_update(footprint: Footprint) -> tuple[Work, ...]:
    """The update of the usual optimizer, tensor lists at once (``foreach``), by the size of its state.

    AdamW on lists (torch/optim/adamw.py, ``_multi_tensor_adamw``) goes over its tensors in eight calls: decay (2), ``lerp`` of the first
    moment (3), ``mul`` and ``addcmul`` of the second (2 + 3), root, division and epsilon on a copy of it (2 + 2 + 2), and ``addcdiv`` (4):
    20 times the parameters' bytes. Momentum alone takes 2 + 3 + 3, nothing but a rate 3.
    """
    if not footprint.gradient_bytes:
        return ()
    state = footprint.optimizer_bytes / footprint.gradient_bytes
    passes = 20 if state > 1.5 else 8 if state > 0.5 else 3
    calls = 8 if state > 1.5 else 3 if state > 0.5 else 1
    moved = passes * footprint.gradient_bytes
    # A call's kernels take some hundred tensors each.
    return (Work(kind="pointwise", name="_foreach", dtype="fp32", count=4 * calls, moved_bytes=moved // (4 * calls), fixed_bytes=moved),)


_TOKENS: dict[tuple[Work, ...], int] = {}
_numbers = count(1)


def _token(works: tuple[Work, ...]) -> int:
    """A number that lists of equal operations share, so that they are compared only once; each number is used once."""
    if len(_TOKENS) > _REMEMBERED:
        _TOKENS.clear()
    return _TOKENS.setdefault(works, next(_numbers))


def drawn_seconds(work: Work, share: float, device: Device, rates: Rates) -> float:
    """Seconds of random numbers for a share of the batch: they are drawn for the whole batch, into new memory, and the share's rows are
    copied. A GPU may skip much of a large draw (``exact.step.rows_of_gpu_draws``); how much was never measured, so it isn't subtracted.
    """
    kept = Work(kind="copy", name="copy_", dtype=work.dtype, moved_bytes=2 * work.at(share).moved_bytes)
    new = Work(kind="copy", name="fill_", dtype=work.dtype, moved_bytes=work.moved_bytes)
    new_memory = rates.work_seconds(device, new) if device.kind == "cpu" else 0.0  # torch's allocator keeps a GPU's memory
    return rates.work_seconds(device, work) + new_memory + rates.work_seconds(device, kept)


_LOADS: dict[tuple[Hashable, ...], Load] = {}


def part_load(layout: Layout, index: int, share: float, device: Device, rates: Rates, phase: Phase) -> Load:
    """Seconds of one list of a layout's operations on a device that nobody else uses.

    Args:
        index: of the list among ``layout.works``.
        share: of the traced batch.
    """
    key = layout.tokens[index], share, phase, rates.device_class(device), rates.token
    found = _LOADS.get(key)
    if found is None:
        if len(_LOADS) > _REMEMBERED:
            _LOADS.clear()
        works = layout.works[index]
        drawn = [work for work in works if work.drawn and share < 1.0]
        stream = sum(work.count * drawn_seconds(work, share, device, rates) for work in drawn)
        stream += sum(work.count * rates.work_seconds(device, work.at(share)) for work in works if not work.drawn or share >= 1.0)
        issue = rates.issue_seconds(device, phase) * sum(work.count for work in works)
        issue += rates.python_seconds(device, "call") * DRAW * sum(work.count for work in drawn)
        found = _LOADS[key] = Load(stream, issue)
    return found


def update_load(layout: Layout, held: float, device: Device, rates: Rates) -> Load:
    """Seconds of the part ``held`` of the update."""
    key = "update", id(layout), held, rates.device_class(device), rates.token
    found = _UPDATES.get(key)
    if found is None or found[0] is not layout:
        if len(_UPDATES) > _REMEMBERED:
            _UPDATES.clear()
        stream = issue = 0.0
        for work in layout.optimizer:
            part = work if held == 1.0 else _shrunk(work, held)
            if device.kind == "cpu" or work.name not in _ON_HOST:
                stream += work.count * rates.work_seconds(device, part)
            issue += work.count * rates.issue_seconds(device, "optimizer")
        found = _UPDATES[key] = layout, Load(stream, issue)
    return found[1]


_UPDATES: dict[tuple[Hashable, ...], tuple[Layout, Load]] = {}


def _shrunk(work: Work, held: float) -> Work:
    """The work on shards."""
    moved = round(work.moved_bytes * held)
    return replace(work, flops=round(work.flops * held), moved_bytes=moved, fixed_bytes=moved, shape=(), growing=None)
