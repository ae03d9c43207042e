"""How the sizes of a run's batches vary, what a plan counts with, and how a step's bytes grow with them. Values; looks at no data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

#: Of the sizes that were seen, the part from which the largest one of all is told; how often that is to be enough; and at most how many
#: times as large as the largest that was seen it may be.
_TAIL_SHARE, _LEAST_TAIL, _CHANCE, _MOST_REACH = 0.1, 2, 0.9, 2.0
#: So many samples of one size say that nearly all have it: where one in thirty has another, 64 show none in one case of nine.
ENOUGH = 64
#: How many times as many samples there are of a dataset that draws random numbers: each epoch has others.
DRAWN_ANEW = 10


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """What a look at the sizes of a loader's samples, or of its batches, has shown.

    A size is a shape of the batch's largest tensor whose shape varies.

    Args:
        unseen: why nothing but the first batch was looked at; None where more was.
        unit: what was looked at.
        of: how many there are; None where nobody knows.
        name: where the tensor lies in the batch; "" where it is the batch, or where no single tensor can be named.
        usual: its shape in a batch like most, or in one that is shorter; empty where no size varies, as far as is known.
        timed: whether times are for that batch, rather than for the first one.
        longest: its shape in the batch that bytes are for.
        uncounted: why the bytes are those of the first batch all the same; None where they aren't.
        drawn: whether the dataset draws random numbers, so that each epoch has other samples.
        reach: how many times as large as the largest size that was seen the plan counts with.
        tight: whether it counts with no larger one as nothing fits otherwise.
        usual_bytes: what grows with the batch, at the fullest moment of a step with the usual one.
        longest_bytes: the same with the longest one.
    """

    unseen: str | None = None
    unit: Literal["samples", "batches"] = "samples"
    looked: int = 0
    of: int | None = None
    name: str = ""
    usual: tuple[int, ...] = ()
    longest: tuple[int, ...] = ()
    timed: bool = True
    uncounted: str | None = None
    drawn: bool = False
    reach: float = 1.0
    tight: bool = False
    usual_bytes: int = 0
    longest_bytes: int = 0

    @property
    def vary(self) -> bool:
        """Whether the plan counts with another batch than with the one that times are for."""
        return bool(self.longest) and self.uncounted is None

    @property
    def label(self) -> str:
        """The tensor, in words."""
        if self.name:
            return f"tensor {self.name}" if self.name.isdigit() else self.name
        if len(self.longest) == 1:
            return "numbers"
        return "the batch's shape" if len(self._varying) > 1 else f"the batch's dimension {self._varying[0]}"

    @property
    def open(self) -> bool:
        """Whether longer batches may come than those that were seen."""
        return self.unseen is not None or self.reach > 1 or self.tight

    @cached_property
    def _varying(self) -> tuple[int, ...]:
        """The dimensions in which the two shapes differ."""
        return tuple(index for index, (one, other) in enumerate(zip(self.usual, self.longest, strict=True)) if one != other)

    @property
    def growth(self) -> float:
        """How many times the bytes of the longest batch that was seen the plan counts with."""
        return self.growth_at(self.reach)

    def growth_at(self, times: float) -> float:
        """How many times as many bytes grow with a batch so many times as large as the longest that was seen.

        With a linear and a square part, as attention has: the curve goes through both batches that were traced, and through none at all.
        Where bytes grow slower than in proportion it is a straight line, and where they grow faster than with the square a power. Where
        that would be above the cube, a part of the size is of what has one size (an image beside its boxes): the cube of the rest.
        """
        sizes = [math.prod(shape[index] for index in self._varying) for shape in (self.usual, self.longest)]
        ratio, bytes_ratio = sizes[0] / max(1, sizes[1]), self.usual_bytes / max(1, self.longest_bytes)
        if not 0 < ratio < 1 or not 0 < bytes_ratio < 1:
            return times
        square = (1 - bytes_ratio / ratio) / (1 - ratio)
        if square > 1:
            power = math.log(bytes_ratio) / math.log(ratio)
            return float(times**power if power <= 3 else (1 + (times - 1) * (1 - bytes_ratio ** (1 / 3)) / (1 - ratio)) ** 3)
        if square < 0:
            return 1 + (1 - bytes_ratio) / (1 - ratio) * (times - 1)
        return (1 - square) * times + square * times**2

    def size(self, times: float) -> str:
        """The size of a batch so many times as large as the longest that was seen, in words."""
        if len(self._varying) == 1:
            return f"{int(self.longest[self._varying[0]] * times + 1e-6):,}"
        shape = " × ".join(f"{self.longest[index]:,}" for index in self._varying)
        return shape if abs(times - 1) < 5e-3 else f"{times:.2f} × ({shape})"

    def planned(self) -> int | None:
        """The largest size of one sample's tensor that the plan counts with; None where that depends on how many samples a batch has."""
        if not self.vary or len(self.longest) < 2 or 0 in self._varying:
            return None
        return math.floor(math.prod(self.longest[1:]) * self.reach)

    def usual_size(self) -> str:
        """The size of the usual batch, in words."""
        return " × ".join(f"{self.usual[index]:,}" for index in self._varying)

    def sentence(self) -> str:
        """What was seen, and what the plan counts with; empty where all that was seen has one size, and that was enough to tell."""
        if self.unseen is not None:
            return f"the sizes of later batches weren't looked at, as {self.unseen}; a batch larger than the first may not fit"
        some = self.of is not None and self.looked < self.of
        told = f"{self.looked:,} of {self.of:,} {self.unit}" if some else f"all {self.looked:,} {self.unit}"
        if not self.longest:
            return f"there was only time to look at {told}, which have one size" if some and self.looked < ENOUGH else ""
        longest = f"{told} were looked at, and the longest batch has size {self.size(1.0)} (of {self.label})"
        if self.timed:
            longest += f", a usual one {self.usual_size()}"
        if self.uncounted is not None:
            return f"{longest}. The plan counts with the first batch all the same, as {self.uncounted}; the longest may not fit"
        timed = "the usual one" if self.timed else "the first one"
        if self.reach <= 1:
            why = "as nothing fits with one" if self.tight else "as many are as long"
            why = f", without a margin, {why}" if some or self.drawn else ""
            return f"{longest}. The plan's memory is for the longest{why}; times are for {timed}"
        why = "as the dataset draws other samples in each epoch" if self.drawn else "as not all were looked at"
        more = f"{(self.reach - 1) * 100:.0f} % more, {why}"
        return f"{longest}. The plan's memory is for size {self.size(self.reach)}, {more}; times are for {timed}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "unseen": self.unseen,
            "unit": self.unit,
            "looked": self.looked,
            "of": self.of,
            "tensor": self.name,
            "usual": list(self.usual),
            "longest": list(self.longest),
            "uncounted": self.uncounted,
            "reach": self.reach,
        }


def reach_of(sizes: Sequence[int], of: float) -> float:
    """How many times as large as the largest of these sizes the largest of so many is, in nine of ten cases; at most twice.

    If the seen ones were picked at random, and sizes beyond a high threshold fall off exponentially, as they do for many distributions
    (Pickands, Balkema and de Haan, with shape 0). Where samples are cut off at a length many are equally long, and there is no margin.
    """
    ordered = sorted(sizes, reverse=True)
    tail = max(_LEAST_TAIL, math.ceil(len(ordered) * _TAIL_SHARE))
    if len(ordered) <= tail or of <= len(ordered) or ordered[0] <= 0:
        return 1.0
    excess = sum(ordered[:tail]) / tail - ordered[tail]
    largest = ordered[tail] + excess * (math.log(tail * of / len(ordered)) - math.log(-math.log(_CHANCE)))
    return max(1.0, min(_MOST_REACH, largest / ordered[0])) if excess else 1.0
