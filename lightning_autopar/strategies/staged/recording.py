"""What is known of a step that is to be cut into stages: which tensors cross each cut, which parts use which parameters. Data only.

A step's code runs in parts: part ``2 i + 1`` is block ``i``, part ``2 i`` what runs before it and after the block before, the last one what
follows the last block. It is the numbering of :attr:`lightning_autopar.memory.footprint.Footprint.parts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, kw_only=True)
class Carried:
    """A tensor that a stage hands to the next one.

    Args:
        index: which of the tensors that code outside of blocks sees, in the order in which they come to be: results of operations, and
            what blocks return.
        shape: at the recorded batch.
        dtype: its type.
        requires_grad: whether a gradient comes back for it.
    """

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True, kw_only=True)
class StepRecording:
    """One hook's step (``"training_step"``, ``"validation_step"``, …), as it ran on the recorded batch.

    Args:
        hook: its name.
        blocks: FQNs of the blocks in the order in which they ran, each once.
        crossings: for each block that a stage may begin with, what crosses that cut: all that was made before, depends on parameters or
            random draws, and is used after. In the order in which it is sent.
        uncuttable: blocks that no stage may begin with, with the reason in a sentence.
        parameters: FQN of each parameter (tied ones under each of their names) → the parts that use it.
        buffers: the same of buffers.
        draws: how many random draws were made before each block, and last, how many in all; as :class:`.observe.Observation` counts them.
        rows: samples of the recorded batch.
    """

    hook: str
    blocks: tuple[str, ...]
    crossings: Mapping[str, tuple[Carried, ...]]
    uncuttable: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, frozenset[int]] = field(default_factory=dict)
    buffers: Mapping[str, frozenset[int]] = field(default_factory=dict)
    draws: tuple[int, ...] = ()
    rows: int = 0


@dataclass(frozen=True, kw_only=True)
class Staging:
    """All that an engine needs to run a module in stages: a recording of each hook that the run may call.

    Args:
        hooks: recordings by hook.
        refusal: why the module can't be run in stages, in a sentence; None where it can.
    """

    hooks: Mapping[str, StepRecording] = field(default_factory=dict)
    refusal: str | None = None
