"""Which operations a step ran, and how large they were: calls → :class:`Work`. Knows torch's operations; no ledger, module, or plan.

A call is looked into once: another one with tensors of the same shapes and types is the same work. What a tensor is to the batch may turn
out later (a small gradient is known as a parameter's when it has arrived there), so that work is made of the calls at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from lightning_autopar.memory.work.batch_sized import Input
from lightning_autopar.memory.work.calls import Piece, channels_last, pieces
from lightning_autopar.memory.work.operations import Operation
from lightning_autopar.memory.work.work import Work

#: The optimizers' part of a step.
OPTIMIZER = -1
#: Operations whose inputs are a parameter's gradients if their output is one.
_PASSES = frozenset({"_to_copy", "clone", "add", "add_"})


class _Call:
    """A call that was analysed, and stands for equal ones."""

    __slots__ = ("_found", "_pieces", "_scaled")

    def __init__(self, pieces: list[Piece], scaled: list[bool]) -> None:
        self._pieces = pieces
        self._scaled = scaled
        self._found: dict[tuple[int, ...], tuple[Work, ...]] = {}

    def works(self, fixed: tuple[int, ...] = ()) -> tuple[Work, ...]:
        """Its work, if the tensors at those places don't depend on the batch after all."""
        found = self._found.get(fixed)
        if found is None:
            scaled = [grows and place not in fixed for place, grows in enumerate(self._scaled)]
            found = self._found[fixed] = tuple(piece.settled(scaled) for piece in self._pieces)
        return found


class Tally:
    """Counts the operations of a step, by part, forward and backward apart."""

    def __init__(self) -> None:
        self._calls: dict[Any, _Call] = {}
        self._known: dict[tuple[int, bool], Counter[_Call]] = {}
        #: Calls in backward: (part, call, inputs and outputs).
        self._open: list[tuple[int, _Call, tuple[tuple[int, ...], ...]]] = []
        self._passed: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def add(
        self,
        part: int,
        backward: bool,
        function: Any,
        known: Operation,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: Sequence[Input],
        output: Any,
        made: Sequence[Input],
    ) -> None:
        """A call that has run.

        Args:
            part: of the step; :data:`OPTIMIZER` for the optimizers'.
            backward: whether it ran in backward.
            inputs: the tensors among both, in order.
            made: the tensors in it, in order.
        """
        if not known.moves:
            return
        tensors = (*inputs, *made)
        key = (
            function,
            len(inputs),
            tuple([(_shape(item.tensor), item.tensor.dtype, item.scaled, item.storage_bytes) for item in tensors]),
            _plain((*args, *kwargs.values())) if known.flops is not None else None,
            tuple([channels_last(item.tensor) for item in inputs]) if known.kind == "convolution" else None,
        )
        call = self._calls.get(key)
        if call is None:
            scaled = [item.scaled and part != OPTIMIZER for item in tensors]
            call = self._calls[key] = _Call(list(pieces(known, args, kwargs, inputs, output, made)), scaled)
        if not backward:
            counts = self._known.get((part, False))
            if counts is None:
                counts = self._known[part, False] = Counter()
            counts[call] += 1
            return
        self._open.append((part, call, tuple([item.storages if item.scaled else () for item in tensors])))
        if made and known.short_name in _PASSES:
            self._passed.append((made[0].storages, tuple([number for item in inputs for number in item.storages])))

    def works(self, arrived: Collection[int]) -> dict[tuple[int, bool], Counter[Work]]:
        """The work of each part, of its forward and its backward, with how often it ran.

        Args:
            arrived: numbers of the storages in which gradients of parameters have arrived.
        """
        fixed = set(arrived)
        for made, read in reversed(self._passed):
            if not fixed.isdisjoint(made):
                fixed.update(read)
        found: dict[tuple[int, bool], Counter[Work]] = {}
        for key, calls in self._known.items():
            counts = found.setdefault(key, Counter())
            for call, count in calls.items():
                for work in call.works():
                    counts[work] += count
        for part, call, storages in self._open:
            counts = found.setdefault((part, True), Counter())
            places = tuple([place for place, numbers in enumerate(storages) if numbers and not fixed.isdisjoint(numbers)])
            for work in call.works(places):
                counts[work] += 1
        return found


def collected(counts: Mapping[Work, int], batches: int = 1) -> tuple[Work, ...]:
    """Work with its counts, in an order that depends on nothing else: equal parts have equal tuples.

    Args:
        batches: in so many batches. Work that didn't run equally often in each (gradients are added from the second batch on) gets its
            share of the FLOPs and bytes of a run.
    """
    found = []
    for work, count in counts.items():
        if count % batches == 0:
            found.append(replace(work, count=count // batches))
            continue
        whole = max(1, round(count / batches))
        share = count / (batches * whole)
        found.append(
            replace(
                work,
                count=whole,
                flops=round(work.flops * share),
                moved_bytes=round(work.moved_bytes * share),
                fixed_bytes=round(work.fixed_bytes * share),
            )
        )
    return tuple(sorted(found, key=_order))


def _order(work: Work) -> tuple[Any, ...]:
    growing = -1 if work.growing is None else work.growing
    return work.kind, work.name, work.dtype, work.shape, work.flops, work.moved_bytes, work.fixed_bytes, growing, work.drawn, work.count


def _shape(tensor: Tensor) -> Any:
    return (tensor.numel(),) if tensor.is_nested else tensor.shape


def _plain(values: Any) -> tuple[Any, ...]:
    """The arguments that aren't tensors; those that can't be compared by value are taken by their text."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(Tensor)
        elif isinstance(value, (list, tuple)):
            found.append(_plain(value))
        else:
            found.append(value if value.__hash__ is not None else repr(value))
    return tuple(found)
