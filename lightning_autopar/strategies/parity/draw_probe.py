"""Finds how a step's random draws relate to its batch's samples, by running it on the whole batch and on parts.

Knows draws and shares only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_autopar.exact import random_state as rng
from lightning_autopar.exact.data.share import BatchShare, Dealing, share_of
from lightning_autopar.exact.step.draws import Choice, Draw, DrawPlan, GlobalDraws, Rows, has_gaps, memory_order

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What a step gave on the whole batch and on its parts, and the draws that it made."""

    whole: Any
    parts: tuple[Any, ...]
    draws: DrawPlan


def observe(
    step: Callable[[Any], Any],
    part: Callable[[BatchShare], Any],
    shares: Sequence[BatchShare],
    *,
    groups_first: bool = False,
) -> Observation:
    """Run a step on the whole batch and on the parts, all from the present random state, and relate their random draws.

    Args:
        step: of a batch.
        part: makes the batch of a share; asked for the whole one as the share of a single rank.
        shares: the parts, each with at least one sample.
        groups_first: how samples are taken to lie in a dimension of k entries a sample; see :class:`Rows`.
    """
    state = rng.capture({})
    whole = _Observer(everything(shares[0].of), None, groups_first)
    output = whole.run(step, part)
    outputs, observers = [], []
    for share in shares:
        rng.restore(state, {})
        observers.append(_Observer(share, whole.draws, groups_first))
        outputs.append(observers[-1].run(step, part))
    seeded = any(observer.irregular for observer in observers)
    choices = [[draw.choice for draw in observer.draws] for observer in observers]
    if any(other != choices[0] for other in choices) or len(choices[0]) != len(whole.draws):
        seeded = True
    draws = tuple(observers[0].draws) if not seeded else tuple(draw for draw in observers[0].draws if draw.choice != "own")
    return Observation(whole=output, parts=tuple(outputs), draws=DrawPlan(draws=draws, batch_size=shares[0].of, seeded=seeded))


class _Observer(GlobalDraws):
    """Notes a step's draws on the whole batch; on a part, decides on each by comparing its shape with the whole batch's."""

    def __init__(self, share: BatchShare, whole: list[Draw] | None, groups_first: bool) -> None:
        super().__init__(lambda: share)
        self.of = share
        self.whole = whole
        self.groups_first = groups_first
        self.draws: list[Draw] = []
        self.irregular = False
        self._before: dict[tuple[str, tuple[int, ...]], Choice] = {}

    def run(self, step: Callable[[Any], _T], part: Callable[[BatchShare], Any]) -> _T:
        """The step on this share, its draws as one device would make them."""
        state = rng.capture({})
        batch = part(self.of)
        rng.restore(state, {})
        with self:
            return step(batch)

    def rows_for(self, op: str, tensor: Tensor, generator: torch.Generator | None, shape: tuple[int, ...] | None = None) -> Choice:
        """As :meth:`GlobalDraws.rows_for`, from what the whole batch's step drew."""
        shape = tuple(tensor.shape) if shape is None else shape
        if torch._C._current_graph_task_id() != -1:  # recomputation: not a draw of its own
            return self._before.get((op, shape))
        index = len(self.draws)
        if self.whole is None:
            # Which dimension runs over the samples shows on a part only, the layout in memory on the whole.
            layout = Rows(dim=0, order=memory_order(tensor), gaps=has_gaps(tensor)) if shape == tuple(tensor.shape) else Rows(dim=0)
            draw = Draw(op=op, shape=shape, choice=layout)
        elif index < len(self.whole):
            draw = self._relate(self.whole[index], op, shape)
        else:
            draw = Draw(op=op, shape=shape, choice="own")
        self.irregular |= draw.choice == "own"
        self.draws.append(draw)
        self._before[op, shape] = draw.choice
        return None if self.whole is None else draw.choice

    def _relate(self, whole: Draw, op: str, shape: tuple[int, ...]) -> Draw:
        """The whole batch's draw, with how a part makes it."""
        samples, of = self.of.rows, self.of.of
        if whole.op != op or len(whole.shape) != len(shape):
            return Draw(op=op, shape=shape, choice="own")
        scaled = [dim for dim, (ours, all_) in enumerate(zip(shape, whole.shape, strict=True)) if ours != all_]
        if not scaled:
            return replace(whole, choice=None)
        dim = scaled[0]
        if len(scaled) > 1 or whole.shape[dim] % of or shape[dim] * of != whole.shape[dim] * samples:
            return replace(whole, choice="own")
        assert isinstance(whole.choice, Rows)
        return replace(whole, choice=replace(whole.choice, dim=dim, groups_first=self.groups_first and whole.shape[dim] > of))


def everything(count: int) -> BatchShare:
    """The whole batch, as the share of a single rank."""
    return BatchShare(rows=count, of=count, rank=0, world_size=1)


def shares_of(count: int, size: int) -> list[BatchShare]:
    """The shares of ``size`` ranks in a batch of ``count`` samples."""
    return [share_of(count, rank, Dealing.even(size)) for rank in range(size)]
