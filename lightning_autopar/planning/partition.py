"""Where a pipeline is cut: a dynamic programme over blocks, in the manner of PipeDream (https://arxiv.org/abs/1806.03377). Arithmetic only.

It knows what each stage would cost, not why: seconds and bytes of stages are :mod:`stages`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Table = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Stages of a pipeline.

    Args:
        starts: index of the block with which each stage begins; the first is 0.
        slowest_seconds: of the stage that takes longest.
        total_seconds: of all stages together.
    """

    starts: tuple[int, ...]
    slowest_seconds: float
    total_seconds: float


def partition(seconds: Sequence[Table], cuttable: Sequence[bool] | None = None) -> Partition | None:
    """The stages of which the slowest is fastest, and of those the ones that take least together; None where there are none.

    In time proportional to the stages and to the square of the blocks.

    Args:
        seconds: of each stage, in order, a table of ``blocks + 1`` rows and columns: what it takes for the blocks from row to column, the
            last excepted; infinite where the device lacks the memory. A stage has a block at least.
        cuttable: of each block whether a stage may begin with it; all unless given. The first is never asked about.
    """
    blocks = len(seconds[0]) - 1
    allowed = np.ones(blocks + 1, dtype=bool)
    if cuttable is not None:
        allowed[1:blocks] = np.asarray(cuttable, dtype=bool)[1:]
    barred = np.where(allowed, 0.0, np.inf)
    later = np.where(np.triu(np.ones((blocks + 1, blocks + 1), dtype=bool), 1), 0.0, np.inf)
    added = {id(table): table + later for table in seconds}  # stages alike share a table
    tables = [added[id(table)] for table in seconds]
    slowest = np.full(blocks + 1, np.inf)
    slowest[0] = 0.0
    for table in tables:
        slowest = np.maximum(slowest[:, None], table).min(axis=0) + barred
    bound = slowest[blocks]
    if not np.isfinite(bound):
        return None
    total = np.full(blocks + 1, np.inf)
    total[0] = 0.0
    came_from = []
    for table in tables:
        sums = total[:, None] + np.where(table <= bound, table, np.inf)
        came_from.append(sums.argmin(axis=0))
        total = sums.min(axis=0) + barred
    starts, end = [], blocks
    for chosen in reversed(came_from):
        end = int(chosen[end])
        starts.append(end)
    return Partition(starts=tuple(reversed(starts)), slowest_seconds=float(bound), total_seconds=float(total[blocks]))
