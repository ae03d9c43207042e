"""The first batch and its parts, as ranks would be fed them.

Knows how a batch is made and cut, not what a step does with it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lightning_autopar.memory.batch import FirstBatch
from lightning_autopar.state.dealing import Dealing
from lightning_autopar.state.share import BatchShare, cut, take_rows
from lightning_autopar.strategies.observe import everything

_LOG = logging.getLogger(__name__)


class BatchParts:
    """The first batch and its parts, each made anew every time, since a step may change what it gets.

    Args:
        first: the batch.
        count: how many of its samples count.
        hooks: whether the module has transfer hooks to apply, which need a trainer.
    """

    def __init__(self, first: FirstBatch, count: int, *, hooks: bool) -> None:
        self.first = first
        self.count = count
        self.double = False
        #: Whether the parts are as the transfer hooks get them, or have been through them already.
        self.raw = first.samples is not None and first.collate is not None and hooks
        #: Whether collating draws random numbers.
        self.random = False

    def part(self, share: BatchShare) -> Any:
        """What the rank of that share is fed."""
        first, state = self.first, torch.get_rng_state()
        if first.samples is not None and first.collate is not None:
            samples = first.samples[: self.count]
            part = samples if share.world_size == 1 else cut(samples, share.rank, share.dealing)
            batch = first.collate(part)
        else:
            batch = take_rows(tree_map(_copied, first.batch), share.rank, share.dealing)[1]
        self.random |= not torch.equal(state, torch.get_rng_state())
        return tree_map(_doubled, batch) if self.double else batch

    def uneven(self, shares: Sequence[BatchShare]) -> bool:
        """Whether parts have other shapes than the rows of the whole batch, as when samples are padded to the longest one."""
        try:
            whole = self.part(everything(self.count))
            return any(_shapes(take_rows(whole, share.rank, share.dealing)[1]) != _shapes(self.part(share)) for share in shares)
        except ValueError:  # no rows to compare with
            return False


def pads(first: FirstBatch) -> bool:
    """Whether collating a part gives other shapes than the part's rows of the whole batch, as when samples are padded to the longest."""
    if first.samples is None or first.collate is None or len(first.samples) < 2:
        return False
    try:
        whole, halves = first.collate(first.samples), Dealing.even(2)
        return any(
            _shapes(take_rows(whole, rank, halves)[1]) != _shapes(first.collate(cut(first.samples, rank, halves))) for rank in range(2)
        )
    except Exception:  # the user's collate function may want more samples, and a batch may have no rows: then it isn't cut into them
        _LOG.debug("whether the batch is padded can't be told", exc_info=True)
        return False


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _doubled(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _shapes(batch: Any) -> list[torch.Size]:
    return [leaf.shape for leaf in tree_leaves(dict(batch) if hasattr(batch, "keys") else batch) if isinstance(leaf, Tensor)]
