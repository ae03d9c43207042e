"""Predictions of all ranks put together in the user's order.

Knows which rank predicts which batches, not how they come to this process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_autopar.plans import Plan


class Dropped:
    """Stands for the prediction of a batch that a rank only ran to keep the others company."""


def put_together(values: list[Any], plan: Plan) -> Any:
    """What ``predict`` returns of what each rank's gave; ranks of one replica, one after the other, have the same batches.

    Args:
        values: in rank order.
        plan: that they predicted under.
    """
    return interleaved(values[:: plan.world_size // plan.data_ranks])


def interleaved(values: list[Any]) -> Any:
    """All ranks' predictions in the user's order: rank r has batches r, r + W, r + 2W, …; of each data loader where there are several."""
    first = values[0]
    if first is None:
        return None
    if first and isinstance(first[0], list) and _several_loaders(values):
        return [interleaved(list(parts)) for parts in zip(*values, strict=True)]
    merged: list[Any] = []
    for index in range(max(len(value) for value in values)):
        merged.extend(value[index] for value in values if index < len(value))
    return [prediction for prediction in merged if not isinstance(prediction, Dropped)]


def _several_loaders(values: list[Any]) -> bool:
    return all(isinstance(part, list) for value in values for part in value)
