"""Tape: the allocations of one traced step, in order. Data only, in columns: it doesn't know how it is recorded or what replays it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

Kind = Literal["parameters", "buffers", "input", "optimizer", "gradients", "activations", "temporary", "fixed"]
KINDS: tuple[Kind, ...] = ("parameters", "buffers", "input", "optimizer", "gradients", "activations", "temporary", "fixed")

Action = Literal[
    "allocate",
    "free",
    "become",
    "resize",
    "forward",
    "leave",
    "backward",
    "return",
    "optimizer",
    "input",
    "output",
    "unsaved",
    "product",
    "read",
]
ACTIONS: tuple[Action, ...] = get_args(Action)
#: The actions that are neither changes nor marks.
NOTES = frozenset({"input", "output", "unsaved", "product", "read"})
#: The marks: which part of the step runs from there on.
MARKS = frozenset({"forward", "leave", "backward", "return", "optimizer"})


class Event(NamedTuple):
    """One entry of a tape: a change of a storage, a mark, or a note on a storage that crosses a block's border.

    Changes are ``"allocate"`` a new storage; ``"free"`` it; it comes to hold something else (``"become"``: a gradient is complete, scratch
    turns out to be optimizer state); ``"resize"`` it in place.

    Marks say what the events after them belong to, up to the next mark. A step of n blocks has 2n + 1 parts: the outer parts 0 to n, which
    run before the first block, between two of them, after the last one, and the blocks 0 to n - 1; block i runs between the outer parts i
    and i + 1.

    ========== ======= ==========================================
    action     storage what begins
    ========== ======= ==========================================
    forward    i       the forward of block i
    leave      i       the forward of the outer part i + 1; -1 is the step's first mark
    backward   i       the backward of block i
    return     i       the backward of the outer part i; n is the first mark of backward (after the last block: head and loss)
    optimizer  -1      what follows backward: clipping, the optimizer's step, the rest of the step
    ========== ======= ==========================================

    A plain step is leave -1, forward 0, leave 0, … forward n-1, leave n-1, return n, backward n-1, return n-1, … backward 0, return 0,
    optimizer. Only blocks of the footprint are marked. A tape of several batches (``Tape.batches``) and one of manual optimization begin
    anew with ``leave``; the marks of a part may then come more than once. A block that has no backward (frozen, or its output unused) has
    no ``backward`` mark. Recomputation that the user's own code asks for (checkpointing) happens after the ``backward`` mark.

    Notes change nothing. Right after ``forward`` i an ``"input"`` for each storage of the block's arguments, made by whatever part;
    right before ``leave`` i an ``"output"`` for each storage of what the block returns, one that was passed through or belongs to a
    parameter included. An ``"unsaved"`` comes after the last operation of the forward that uses a storage which was made in it and is kept
    for backward alone, and after which the block's code let go of it: where nothing is saved (recomputation), it is free from here on. For
    an output that nothing uses after its block, it comes when the next block's forward is over. A ``"read"`` comes where the last node of
    backward that a block saved a storage for has read it: made again by recomputation, it is free from there on. The node itself frees it
    when what it gives has been summed to the shapes of its inputs. Right after the first product of matrices of the thread that runs
    forward (0) and of that which runs backward (1) a ``"product"``: there libraries take their workspaces. On a stream of the user's own,
    the n-th, it is that of 2 n and 2 n + 1.

    Args:
        storage: number of the storage, unique on the tape and never used again; of a mark the index in the table above.
        size_bytes: the storage's new size; 0 for marks, notes, and for what is freed.
        kind: what it holds from now on (of a ``"free"``: what it held); None for marks and notes. ``"input"``, ``"activations"`` and
            ``"temporary"`` grow with the batch, the others don't.
    """

    action: Action
    storage: int
    size_bytes: int
    kind: Kind | None


@dataclass
class Tape:
    """Events of one step in steady state, in columns of integers: some ten thousand of them for a large model.

    What is alive when the step begins (parameters, buffers, the batch, optimizer state, gradients of the step before) is ``"allocate"``d
    first, in the order in which it was made, before the first mark. Sizes are those that the tensors ask for, unrounded, at the whole
    batch; a storage of zero bytes is there, too. What a kernel takes inside of one operation is an ``"allocate"`` and a ``"free"`` without
    anything between them, after the operation's outputs.

    Args:
        batches: how many batches the step takes: 1, or 2 where gradients accumulate (one that isn't the last, then the last).
        slopes: of what kernels take, by storage, where a small share of the batch takes less than the fixed size on the tape: what the
            whole batch would take in proportion to it. The smaller one counts.
        draws: of random draws over the samples, by the storage that is filled: the sizes of the tensors through which the whole batch's is
            made, once that storage is there. A rank with a part of the batch makes them, keeps its rows, and frees them.
    """

    actions: array[int] = field(default_factory=lambda: array("b"))
    storages: array[int] = field(default_factory=lambda: array("q"))
    sizes: array[int] = field(default_factory=lambda: array("q"))
    kinds: array[int] = field(default_factory=lambda: array("b"))
    batches: int = 1
    slopes: dict[int, int] = field(default_factory=dict)
    draws: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def add(self, action: Action, storage: int, size_bytes: int = 0, kind: Kind | None = None) -> None:
        """Append an event."""
        self.actions.append(_ACTION_NUMBERS[action])
        self.storages.append(storage)
        self.sizes.append(size_bytes)
        self.kinds.append(-1 if kind is None else _KIND_NUMBERS[kind])

    def __len__(self) -> int:
        return len(self.actions)

    def __iter__(self) -> Iterator[Event]:
        return map(Event._make, self.rows())

    def rows(self) -> Iterator[tuple[Action, int, int, Kind | None]]:
        """The events as plain tuples, made without a Python step for each: a plan needs tens of thousands of them."""
        # The kind with number -1 is the last one, None.
        columns = map(ACTIONS.__getitem__, self.actions), self.storages, self.sizes, map((*KINDS, None).__getitem__, self.kinds)
        return zip(*columns, strict=True)


_ACTION_NUMBERS = {action: number for number, action in enumerate(ACTIONS)}
_KIND_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}
