"""The first batch and its parts, as a step that is tried gets them. Knows how a batch is made and cut; no module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_autopar.exact.data.batch_structure import alike, take_rows
from lightning_autopar.exact.data.collate import CollateAll, CollateSamples
from lightning_autopar.exact.data.rank_share import BatchShare
from lightning_autopar.memory.trace.first_batch import FirstBatch, copied, fresh, mapped
from lightning_autopar.strategies.trials.draw_probe import everything


class BatchParts:
    """The first batch and its parts, each made anew every time, since a step may change what it gets.

    Args:
        count: how many of its samples count.
        hooks: whether the module has transfer hooks to apply, which need a trainer.
    """

    def __init__(self, first: FirstBatch, count: int, *, hooks: bool) -> None:
        self.first = first
        self.count = count
        #: Whether batches are in double precision: to compare without rounding; and always, as the run's are.
        self.double = self.converted = False
        #: Whether the transfer hooks still have to be applied to the parts.
        self.raw = first.samples is not None and first.collate is not None and hooks
        #: Whether collating draws random numbers.
        self.random = False

    def part(self, share: BatchShare) -> Any:
        """The batch that the rank of this share is fed."""
        first, state = self.first, torch.get_rng_state()
        if first.samples is not None and first.collate is not None:
            samples = first.samples[: self.count]
            collate = CollateAll if first.cut and share.world_size > 1 else CollateSamples
            batch = collate(first.collate, share.rank, share.dealing)(fresh(samples))[1]
        else:
            batch = copied(first.batch)
            if not share.whole:  # whose rows may be uneven, as several loaders' are
                batch = take_rows(batch, share.rank, share.dealing)[1]
        self.random |= not torch.equal(state, torch.get_rng_state())
        return mapped(batch, _doubled) if self.double or self.converted else batch

    def uneven(self, shares: Sequence[BatchShare]) -> bool:
        """Whether parts have other shapes than the rows of the whole batch, as when samples are padded to the longest one."""
        try:
            whole = self.part(everything(self.count))
            return any(not alike(take_rows(whole, share.rank, share.dealing)[1], self.part(share)) for share in shares)
        except ValueError:  # no rows to compare with
            return False


def _doubled(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
