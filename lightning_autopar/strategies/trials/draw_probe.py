"""Finds how a step's random draws relate to its batch's samples, by running it on the whole batch and on parts.

Knows draws and shares only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_autopar.exact.data.rank_share import BatchShare
from lightning_autopar.exact.random import generator_states as rng
from lightning_autopar.exact.random.whole_batch_draws import (
    Choice,
    Draw,
    DrawPlan,
    GlobalDraws,
    Rows,
    default_generator,
    has_gaps,
    memory_order,
    state_of,
)

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Observation:
    """The results of a step on the whole batch and on its parts, and its random draws."""

    whole: Any
    parts: tuple[Any, ...]
    draws: DrawPlan
    apart: tuple[str, ...] = ()
    """The draws that no part can make as the whole batch does."""


def observe(
    step: Callable[[Any], Any],
    part: Callable[[BatchShare], Any],
    shares: Sequence[BatchShare],
    *,
    groups_first: bool = False,
) -> Observation:
    """Run a step on the whole batch and on the parts, all from the current random state, and relate their random draws.

    Args:
        part: makes the batch of a share; for the whole batch it gets the share of a single rank.
        shares: the parts, each with at least one sample.
        groups_first: the assumed order of samples in a dimension with k entries a sample; see :class:`Rows`.
    """
    state = rng.capture({})
    whole = DrawObserver(everything(shares[0].of), None, groups_first)
    output = whole.run(step, part)
    outputs, observers = [], []
    for share in shares:
        rng.restore(state, {})
        observers.append(DrawObserver(share, whole.draws, groups_first, whole.sizes))
        outputs.append(observers[-1].run(step, part))
    seeded = any(observer.irregular for observer in observers)
    choices = [[draw.choice for draw in observer.draws] for observer in observers]
    if any(other != choices[0] for other in choices) or len(choices[0]) != len(whole.draws):
        seeded = True
    draws = tuple(observers[0].draws) if not seeded else tuple(draw for draw in observers[0].draws if draw.choice != "own")
    apart = tuple(sorted(set().union(*(observer.unreproducible for observer in observers))))
    plan = DrawPlan(draws=draws, batch_size=shares[0].of, seeded=seeded)
    return Observation(whole=output, parts=tuple(outputs), draws=plan, apart=apart)


class DrawObserver(GlobalDraws):
    """Records a step's draws on the whole batch; on a part, relates each draw to the whole batch's by comparing shapes."""

    def __init__(self, share: BatchShare, whole: list[Draw] | None, groups_first: bool, sizes: Sequence[int] = ()) -> None:
        super().__init__(lambda: share)
        self.of = share
        self.whole = whole
        self.groups_first = groups_first
        self.draws: list[Draw] = []
        #: Of each draw, how large the tensor is that it is given, which isn't its result for a choice among weights; and the whole batch's.
        self.sizes: list[int] = []
        self._whole_sizes = sizes
        self.irregular = False
        self._before: dict[tuple[object, ...], Choice] = {}

    def run(self, step: Callable[[Any], _T], part: Callable[[BatchShare], Any]) -> _T:
        """Run the step on this share, with the draws that one device would make."""
        state = rng.capture({})
        batch = part(self.of)
        rng.restore(state, {})
        with self:
            return step(batch)

    def plan(self) -> DrawPlan:
        """The draws that it has seen."""
        return DrawPlan(draws=tuple(self.draws), batch_size=self.of.of)

    def rows_for(self, op: str, tensor: Tensor, generator: torch.Generator | None, shape: tuple[int, ...] | None = None) -> Choice:
        """Like :meth:`GlobalDraws.rows_for`, from the draws of the whole batch's step."""
        shape = tuple(tensor.shape) if shape is None else shape
        by_state = (op, shape, state_of(generator or default_generator(tensor.device)))
        if torch._C._current_graph_task_id() != -1:  # recomputation: not a new draw
            return self._before.get(by_state, self._before.get((op, shape)))
        index = len(self.draws)
        if self.whole is None:
            # Only a part shows which dimension runs over the samples, and only the whole shows the layout in memory.
            layout = Rows(dim=0, order=memory_order(tensor), gaps=has_gaps(tensor)) if shape == tuple(tensor.shape) else Rows(dim=0)
            draw = Draw(op=op, shape=shape, choice=layout)
        elif index < len(self.whole):
            draw = self._relate(self.whole[index], op, shape)
        else:
            draw = Draw(op=op, shape=shape, choice="own")
        self.irregular |= draw.choice == "own"
        among_samples = tensor.ndim == 1 and tensor.numel() not in self._whole_sizes[index : index + 1]
        if op == "multinomial" and isinstance(draw.choice, Rows) and among_samples:
            self.unreproducible.add("a choice among the samples (multinomial)")
        self.draws.append(draw)
        self.sizes.append(tensor.numel())
        self._before[op, shape] = self._before[by_state] = draw.choice
        return None if self.whole is None else draw.choice

    def _relate(self, whole: Draw, op: str, shape: tuple[int, ...]) -> Draw:
        """The whole batch's draw, and how a part gets its rows of it."""
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
