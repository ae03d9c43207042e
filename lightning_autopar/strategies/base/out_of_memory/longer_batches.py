"""Says where a training batch is longer than any that the plan counts with. Knows neither engines nor what becomes of the batch."""

from __future__ import annotations

import logging
import math
from typing import Any

from lightning_autopar._lightning import Trainer
from lightning_autopar.exact.data.longest import shapes_in
from lightning_autopar.memory.lengths import Lengths

_LOG = logging.getLogger(__name__)


class LongerBatches:
    """Looks at each batch of a rank.

    Args:
        lengths: what the plan counts with.
        most: the largest size of a sample in it.
    """

    def __init__(self, lengths: Lengths, most: int) -> None:
        self._lengths, self._most = lengths, most

    @classmethod
    def of(cls, lengths: Lengths) -> LongerBatches | None:
        """What looks at batches; None where their sizes don't vary, or a longer one can't be told by a sample."""
        most = lengths.planned()
        return None if most is None else cls(lengths, most)

    def look(self, trainer: Trainer, batch: Any, rank: int) -> None:
        """Log a line for a batch that is longer than planned for, and than all before it."""
        if not trainer.training:
            return
        shape = shapes_in(batch, tensors=True).get(self._lengths.name, ())
        if len(shape) != len(self._lengths.longest) or math.prod(shape[1:]) <= self._most:
            return
        times = math.prod(shape[1:]) / math.prod(self._lengths.longest[1:])
        self._most = math.prod(shape[1:])
        _LOG.warning(
            f"autopar: rank {rank} has a batch of {self._lengths.size(times)} ({self._lengths.label}), and its plan counts with at most "
            f"{self._lengths.size(self._lengths.reach)}; memory may run out"
        )
