"""What is known of a step that is to be cut into stages: which tensors cross each cut, and which parts use which parameters. Data only.

A step's code runs in parts: part ``2 i + 1`` is the call ``i`` of a block, part ``2 i`` the code between the call ``i - 1`` and the call
``i``, and the last part the code after the last call. Where each block has one call,
:attr:`lightning_autopar.memory.footprint.Footprint.parts` has the same numbers. A block that runs again has several calls where the step
can then be cut before more blocks, as with two views of a batch: a stage runs all calls of its blocks, and the code that follows each.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class CutTensor:
    """A tensor that a stage sends to the next one.

    Args:
        index: its number among the *tainted* tensors that code outside of blocks sees, in order of creation: results of operations, and
            what blocks return.
        requires_grad: whether a gradient comes back for it.
        written: whether it is written to in place after the cut.
        aliases: all indices under which code outside of blocks got this same tensor; ``index`` is the first of them.
    """

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    written: bool = False
    aliases: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One leaf of what a block returns, so that a stage that leaves the block out can return an absent tensor of the same shape.

    Args:
        same_as: where among the block's arguments the very same object is: keys and positions from ``(args, kwargs)``.
        value: what it is, where it is neither a tensor nor an argument.
        computed: whether that is a number, which the block may compute from shapes: found out anew for other shapes.
        shape: of a tensor, at the recorded batch; None where it isn't a tensor.
        dims: for each dimension, the arguments' dimensions whose product it is: (place among the arguments, dimension); none where it
            always has the recorded size.
        dtype_of: the argument whose type it shares, if any.
        like: the argument whose shape and type it has, if no other argument has that shape.
        requires_grad: whether a gradient comes back for it.
        index: its number among the tensors of code outside of blocks; None where it has none.
    """

    same_as: tuple[Any, ...] | None = None
    value: Any = None
    computed: bool = False
    shape: tuple[int, ...] | None = None
    dims: tuple[tuple[tuple[tuple[Any, ...], int], ...], ...] = ()
    dtype: torch.dtype | None = None
    dtype_of: tuple[Any, ...] | None = None
    like: tuple[Any, ...] | None = None
    requires_grad: bool = False
    index: int | None = None


@dataclass(frozen=True, kw_only=True)
class Output:
    """What a block returns, or something in it leaves for later code.

    Args:
        structure: of the value, with :attr:`leaves` as its leaves.
        leaves: in the order of ``torch.utils._pytree``.
        module: FQN of the inner module whose output a hook catches; None for the block's own output.
        attribute: the attribute of ``module`` in which the block leaves it.
    """

    structure: Any
    leaves: tuple[Leaf, ...]
    module: str | None = None
    attribute: str | None = None


#: Numbers from here on belong to tensors that leave a block without being returned.
EXTRA = 1 << 40


@dataclass(frozen=True, kw_only=True)
class StepRecording:
    """One hook's step (``"training_step"``, ``"validation_step"``, …), as it ran on the recorded batch.

    Args:
        blocks: FQNs of the blocks in the order in which they ran first, each once.
        calls: of the block that each call runs, the index among them, in the order of the calls; -1 for none, where the code that comes
            before the first block runs again.
        crossings: for each block with which a stage may begin, the tensors that cross that cut, in the order in which they are sent: all
            that stages before it make, depend on parameters or random draws, and are used by later ones.
        uncuttable: blocks with which no stage may begin, with the reason in a sentence.
        parameters: FQN of each parameter (tied ones under each of their names) → the parts that use it.
        buffers: the same of buffers.
        rows: samples of the recorded batch.
        outputs: of each call what it returns, then what else leaves it; empty where that isn't known.
        operations: of each part the operations outside of blocks that gave tainted tensors, by name; their numbers follow one another.
        firsts: the first number of each part.
        written: FQNs of buffers and parameters that the step writes to.
        counters: modules and their attributes, numbers that the step changes.
        autocast: the type of automatic mixed precision under which it was recorded.
        changes_batch: whether the step writes to the tensors of its batch, so that each stage needs a batch of its own.
    """

    hook: str
    blocks: tuple[str, ...]
    crossings: Mapping[str, tuple[CutTensor, ...]]
    uncuttable: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, frozenset[int]] = field(default_factory=dict)
    buffers: Mapping[str, frozenset[int]] = field(default_factory=dict)
    rows: int = 0
    calls: tuple[int, ...] = ()
    outputs: tuple[tuple[Output, ...], ...] = ()
    operations: tuple[tuple[str, ...], ...] = ()
    firsts: tuple[int, ...] = ()
    written: frozenset[str] = frozenset()
    counters: tuple[tuple[str, str], ...] = ()
    autocast: torch.dtype | None = None
    changes_batch: bool = False

    def bounds(self, cuts: Sequence[str]) -> tuple[int, ...]:
        """The index of each stage's first block, and at the end the number of blocks.

        Raises:
            ValueError: if a stage can't begin with one of the cuts, with the reason.
        """
        for cut in cuts:
            if cut not in self.blocks:
                raise ValueError(f"the {self.hook} doesn't run {cut!r}, so that no stage of it can begin there; cut at another block")
            if cut in self.uncuttable:
                raise ValueError(f"no stage can begin with {cut!r}: {self.uncuttable[cut]}; cut at another block")
        indices = [self.blocks.index(cut) for cut in cuts]
        if indices != sorted(set(indices)):
            raise ValueError(f"the {self.hook} runs the blocks {', '.join(cuts)} in another order; name the cuts in the order of the step")
        return (0, *indices, len(self.blocks))

    def stage_of(self, part: int, cuts: Sequence[str]) -> int:
        """The stage that runs a part: that of the call, or of the one before the code."""
        block = block_of(part, self.calls)
        return sum(self.blocks.index(cut) <= block for cut in cuts)

    @property
    def runs_again(self) -> bool:
        """Whether a block has several calls."""
        return len(self.calls) > len(self.blocks)

    @cached_property
    def at_first(self) -> frozenset[str]:
        """Parameters of the code before the first block, where it runs again."""
        return frozenset(name for name, parts in self.parameters.items() if -1 in self.calls and 0 in parts)


def with_loader(found: StepRecording, other: StepRecording, loader: int) -> StepRecording:
    """The recording of the first loader's step, with the reasons against cuts at which that of another loader runs otherwise."""
    if [found.blocks[call] if call >= 0 else "" for call in found.calls] != [
        other.blocks[call] if call >= 0 else "" for call in other.calls
    ]:
        words = f"for loader {loader} it runs other blocks than for the first one, or runs them another number of times"
        return replace(found, uncuttable=dict.fromkeys(found.blocks, words) | dict(found.uncuttable))
    reasons = {block: f"for loader {loader}, {reason}" for block, reason in other.uncuttable.items()}
    for block in found.crossings:
        places, theirs = _places(found, block), _places(other, block)
        parts = {part for part, _ in places if part >= 0}
        if not theirs <= places or any(found.operations[part] != other.operations[part] for part in parts):
            reasons.setdefault(block, f"for loader {loader} the code before it makes other tensors than for the first one")
    return replace(found, uncuttable=reasons | dict(found.uncuttable))


def _places(recording: StepRecording, block: str) -> set[tuple[int, int]]:
    """Where the tensors are made that cross a cut: the part, and the number in it; -1 for what a block hasn't returned."""
    found: set[tuple[int, int]] = set()
    for index in (each for tensor in recording.crossings.get(block, ()) for each in (tensor.index, *tensor.aliases)):
        part = bisect_right(recording.firsts, index) - 1
        found.add((-1, index) if index >= EXTRA else (part, index - recording.firsts[part]))
    return found


def block_of(part: int, calls: Sequence[int]) -> int:
    """The index of the block that a part runs, or after which it runs; -1 before the first one."""
    return -1 if part < 1 else calls[(part - 1) // 2]


@dataclass(frozen=True, kw_only=True)
class Staging:
    """All that an engine needs to run a module in stages: a recording of each hook that the run may call.

    Args:
        refusal: why the module can't be run in stages, in a sentence; None where it can.
        appended: lists to which a step appends what only the last stage has, and must hand to the others: attributes, by a dotted name.
    """

    hooks: Mapping[str, StepRecording] = field(default_factory=dict)
    refusal: str | None = None
    appended: tuple[str, ...] = ()
