"""What the tracker recorded of a module → its blocks and the parts around them, in figures. Knows torch; no Lightning, no plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from torch import Tensor, nn

from lightning_autopar.memory.footprint import LayerFootprint, Moment
from lightning_autopar.memory.step_parts import parts_of
from lightning_autopar.memory.storages import tensor_bytes
from lightning_autopar.memory.tape import Tape
from lightning_autopar.memory.trace.attribution import Account, Places, account
from lightning_autopar.memory.trace.find_blocks import BlockCalls, BlockWatcher
from lightning_autopar.memory.trace.tape_recorder import MemoryTracker
from lightning_autopar.memory.work.tally import OPTIMIZER, collected
from lightning_autopar.memory.work.work import Work, flops, moved_bytes

#: Blocks of one list and class with less than this share of the parameters and of the activations aren't used as units.
_SHARE = 0.01

#: (parameter, gradient, optimizer) bytes of a parameter.
BytesOf = Callable[[nn.Parameter], tuple[int, int, int]]


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The parts of a traced step; see :class:`Footprint` for the fields."""

    tape: Tape
    blocks: tuple[LayerFootprint, ...]
    outer: tuple[LayerFootprint, ...]
    also_uses: tuple[tuple[int, str, int, int, int], ...]
    holders: Mapping[str, int]
    again: tuple[tuple[int, int], ...]
    repeats: float
    moments: tuple[Moment, ...]
    activation_bytes: int
    flops: int
    moved_bytes: int
    optimizer_work: tuple[Work, ...]


def layers(module: nn.Module, tracker: MemoryTracker, watcher: BlockWatcher, bytes_of: BytesOf, *, batches: int, updates: int) -> Layers:
    """Attribute the recorded step.

    Args:
        module: the traced copy.
        tracker: with the tape of the step.
        updates: how many of them were followed by the optimizers' steps: 1 under accumulation.
    """
    tape = tracker.tape
    assert tape is not None
    tape.batches = batches
    candidates = watcher.candidates
    first = account(
        Places(tape, _indices(candidates)).settled(tape, tracker.arrived, tracker.last_uses, tracker.let_go, tracker.reads),
        len(candidates),
    )
    kept = _large_enough(module, candidates, tape, first)
    places = Places(tape, kept)
    settled = places.settled(tape, tracker.arrived, tracker.last_uses, tracker.let_go, tracker.reads)
    found = account(settled, len(places.blocks))
    counts = tracker.tally.works(tracker.arrived)
    costs = _costs(counts, places, batches)
    optimizer_work = collected(counts.get((OPTIMIZER, False), Counter()), updates)
    records: list[BlockCalls] = [watcher.order[index] for index in places.blocks]
    owners, also_uses, holders = _owners(module, tracker, places, records, bytes_of)
    holding = _holding(module)
    parts: list[LayerFootprint] = []
    for part, own in enumerate(owners):
        record = records[part // 2] if part % 2 else None
        figures: dict[str, Any] = asdict(found.parts[part]) | costs[part]
        if record is not None:
            figures |= {"fqn": record.fqn, "recomputable": record.recomputable and record.repeated, "repeated": record.repeated}
        parts.append(replace(_held(own, bytes_of, holding), **figures))
    return Layers(
        tape=settled,
        blocks=tuple(parts[1::2]),
        outer=tuple(parts[::2]),
        also_uses=also_uses,
        holders=holders,
        again=tuple((2 * place + 1, part) for place, one in enumerate(records) for part in dict.fromkeys(map(places.part, one.again))),
        repeats=watcher.repeats,
        moments=tuple(dict.fromkeys(found.moments)),
        activation_bytes=found.activation_bytes,
        flops=sum(part.flops + part.backward_flops for part in parts),
        moved_bytes=sum(part.moved_bytes + part.backward_moved_bytes for part in parts) + moved_bytes(optimizer_work) * updates // batches,
        optimizer_work=optimizer_work,
    )


def forward_bytes(tracker: MemoryTracker, watcher: BlockWatcher, blocks: Sequence[str]) -> tuple[int, ...]:
    """The bytes that each part of a recorded forward holds at its fullest moment, with tensors of earlier parts, without parameters.

    Args:
        watcher: told it which candidates ran.
        blocks: FQNs of the blocks; if the forward ran others, or in another order, the result is empty.
    """
    tape = tracker.tape
    assert tape is not None
    places = Places(tape, _indices(record for record in watcher.candidates if record.fqn in blocks))
    if [watcher.order[index].fqn for index in places.blocks] != list(blocks):
        return ()
    settled = places.settled(tape, tracker.arrived, tracker.last_uses, tracker.let_go, tracker.reads)
    return tuple(part.forward_given.at(1.0) for part in parts_of(settled, len(blocks)))


def _indices(records: Iterable[BlockCalls]) -> set[int]:
    return {record.index for record in records if record.index is not None}


def _large_enough(module: nn.Module, candidates: list[BlockCalls], tape: Tape, found: Account) -> set[int]:
    """Indices of the candidates whose lists hold enough of the parameters or activations to matter to a plan."""
    places = Places(tape, _indices(candidates)).blocks
    elements = sum(parameter.numel() for parameter in module.parameters())
    groups: dict[tuple[str, type], list[BlockCalls]] = {}
    for record in candidates:
        if record.index in places:
            groups.setdefault((record.fqn.rpartition(".")[0], type(record.module)), []).append(record)
    kept: set[int] = set()
    for group in groups.values():
        share = sum(p.numel() for record in group for p in record.module.parameters()) / max(1, elements)
        saved = sum(found.parts[2 * places[index] + 1].activation_bytes for index in _indices(group))
        if max(share, saved / max(1, found.activation_bytes)) >= _SHARE:
            kept |= _indices(group)
    return kept


def _costs(counts: Mapping[tuple[int, bool], Counter[Work]], places: Places, batches: int) -> list[dict[str, Any]]:
    """Work of one batch, its FLOPs and bytes moved, by part, without the optimizer's."""
    merged: list[tuple[Counter[Work], Counter[Work]]] = [(Counter(), Counter()) for _ in range(2 * len(places.blocks) + 1)]
    for (part, backward), found in counts.items():
        if part != OPTIMIZER:
            merged[places.part(part)][backward].update(found)
    costs = []
    seen: dict[tuple[Work, ...], tuple[Work, ...]] = {}  # equal parts share one tuple
    for pair in merged:
        work, backward_work = (seen.setdefault(found, found) for found in (collected(side, batches) for side in pair))
        costs.append(
            {
                "work": work,
                "backward_work": backward_work,
                "flops": flops(work),
                "backward_flops": flops(backward_work),
                "moved_bytes": moved_bytes(work),
                "backward_moved_bytes": moved_bytes(backward_work),
            }
        )
    return costs


def _owners(
    module: nn.Module, tracker: MemoryTracker, places: Places, records: list[BlockCalls], bytes_of: BytesOf
) -> tuple[list[list[tuple[Tensor, bool]]], tuple[tuple[int, str, int, int, int], ...], dict[str, int]]:
    """By part, its own parameters and buffers; which other outer parts use which parameter, and which part holds it."""
    owners: list[list[tuple[Tensor, bool]]] = [[] for _ in range(2 * len(records) + 1)]
    of_blocks: dict[int, int] = {}
    for place, of_block in enumerate(records):
        own = (*of_block.module.parameters(), *of_block.module.buffers())
        of_blocks.update((id(tensor), 2 * place + 1) for tensor in own)
    also_uses: dict[tuple[int, str, int, int, int], None] = {}
    holders: dict[str, int] = {}
    for name, tensor, is_parameter in (
        *((name, parameter, True) for name, parameter in module.named_parameters()),
        *((name, buffer, False) for name, buffer in module.named_buffers()),
    ):
        uses = list(dict.fromkeys(places.part(part) for part in tracker.uses.get(id(tensor), ())))
        # A parameter of no block that only blocks use belongs to the part before the first of them.
        owner = of_blocks.get(id(tensor), uses[0] - uses[0] % 2 if uses else 0)
        owners[owner].append((tensor, is_parameter))
        if isinstance(tensor, nn.Parameter):
            sizes = bytes_of(tensor)
            others = [part for part in uses if part != owner and not part % 2]
            also_uses.update(dict.fromkeys((part // 2, name, *sizes) for part in others))
            if others:
                holders[name] = owner
    return owners, tuple(also_uses), holders


def _holding(module: nn.Module) -> dict[int, tuple[int, bool]]:
    """By the id of each parameter, the module that holds it directly: its number, and whether it contains others."""
    found: dict[int, tuple[int, bool]] = {}
    for number, child in enumerate(module.modules()):
        for parameter in child.parameters(recurse=False):
            found.setdefault(id(parameter), (number, bool(child._modules)))
    return found


def _held(own: Collection[tuple[Tensor, bool]], bytes_of: BytesOf, holding: Mapping[int, tuple[int, bool]]) -> LayerFootprint:
    """The figures of a part that follow from its parameters and buffers."""
    parameters = [cast(nn.Parameter, tensor) for tensor, is_parameter in own if is_parameter]
    sizes = [bytes_of(parameter) for parameter in parameters]
    return LayerFootprint(
        fqn="",
        recomputable=False,
        parameters=sum(parameter.numel() for parameter in parameters),
        parameter_bytes=sum(size[0] for size in sizes),
        gradient_bytes=sum(size[1] for size in sizes),
        optimizer_bytes=sum(size[2] for size in sizes),
        buffer_bytes=sum(tensor_bytes(tensor) for tensor, is_parameter in own if not is_parameter),
        parameter_rows=tuple(_rows(parameter) for parameter in parameters),
        parameter_modules=tuple(holding[id(parameter)] for parameter in parameters),
    )


def _rows(parameter: Tensor) -> tuple[int, int, bool]:
    """A parameter's rows, the bytes of a row, and whether it learns."""
    rows = parameter.shape[0] if parameter.dim() else 1
    return rows, tensor_bytes(parameter) // max(1, rows), parameter.requires_grad
