"""What a stage runs of a step, and what it has to look at meanwhile. Data only."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_autopar.strategies.staged.recording import EXTRA, Carried, StepRecording


class Span:
    """What a stage runs of a hook.

    Attributes:
        low, high: its first block, and the one that isn't its own any more.
        entering, leaving: what crosses the cuts at its ends.
    """

    def __init__(self, recording: StepRecording, cuts: Sequence[str], stage: int) -> None:
        bounds = recording.bounds(cuts)
        self.recording = recording
        self.stage = stage
        self.first, self.last = stage == 0, stage == len(cuts)
        self.low, self.high = bounds[stage], bounds[stage + 1]
        self.entering: tuple[Carried, ...] = () if self.first else recording.crossings[recording.blocks[self.low]]
        self.leaving: tuple[Carried, ...] = () if self.last else recording.crossings[recording.blocks[self.high]]
        #: Numbers whose tensors are needed, at the stage's entry or at its exit.
        self.wanted = frozenset(index for each in (*self.entering, *self.leaving) for index in (each.index, *each.aliases))
        #: Blocks that give some of them.
        self.looked_at = frozenset(
            index
            for index, fqn in enumerate(recording.blocks)
            if any(leaf.index in self.wanted for output in recording.outputs.get(fqn, ()) for leaf in output.leaves)
        )
        #: Parts outside of blocks where one of them is made: there the step has to run as recorded.
        firsts = (*recording.firsts, EXTRA)
        self.checked = frozenset(
            part for part in range(len(recording.firsts)) if any(firsts[part] <= index < firsts[part + 1] for index in self.wanted)
        )
