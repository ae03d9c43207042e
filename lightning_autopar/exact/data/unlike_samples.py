"""Samples with something that a loss may leave out, and that the first batch doesn't have: a mask's zeros, NaN, another label.

A mean over what counts is a mean over samples as long as all of it counts. So the first batch alone can't tell planning what a later one
weighs. Knows samples as a dataset gives them; no loss and no loader.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

#: Where in a sample, which kind, and a value.
Mark = tuple[tuple[Any, ...], str, float]
#: Larger ones are pictures: nobody ignores the entries of those, and looking at them takes time.
_MOST = 1 << 16
#: How deep in a sample tensors and numbers are looked for.
_DEEP = 5
_SECONDS = 0.05
#: Kinds of marks that say that something is left out, most likely.
_LEFT_OUT = ("nan", "negative", "zero")


@dataclass(frozen=True, kw_only=True)
class Known:
    """The marks of the first batch.

    Args:
        marks: of all its samples.
        varying: places and kinds of which more than half of the samples have a value of their own, as texts have: another one says nothing.
    """

    marks: frozenset[Mark]
    varying: frozenset[tuple[tuple[Any, ...], str]]

    @classmethod
    def of(cls, first: Collection[Any]) -> Known:
        """Those of the samples of a first batch."""
        found = frozenset(mark for sample in first for mark in marks(sample))
        values = Counter((place, kind_of) for place, kind_of, _ in found if kind_of not in _LEFT_OUT)
        return cls(marks=found, varying=frozenset(key for key, count in values.items() if 2 * count > max(2, len(first))))

    def new(self, sample: Any) -> set[Mark]:
        """A sample's marks that tell something new."""
        return {mark for mark in marks(sample) - self.marks if mark[:2] not in self.varying}


def unlike(
    samples: Sequence[Any], first: Collection[Any], size: int, *, seconds: float = _SECONDS, clock: Callable[[], float] = time.monotonic
) -> list[int]:
    """The numbers of as many samples as a batch has; the first quarter of them have something that the first batch has not.

    Args:
        samples: that may be taken.
        first: those of the first batch.
        seconds: how long that may take.

    Returns:
        The numbers; none where all samples are like the first batch's, or there are too few.
    """
    ends, known = clock() + seconds, Known.of(first)
    new: dict[Mark, int] = {}
    for number, sample in enumerate(samples):
        for mark in known.new(sample):
            new.setdefault(mark, number)
        if clock() > ends:
            break
    chosen = list(dict.fromkeys(new[mark] for mark in sorted(new, key=kind)))[: max(1, size // 4)]
    others = [number for number in range(len(samples)) if number not in chosen][: size - len(chosen)]
    return [*chosen, *others] if chosen and len(chosen) + len(others) == size else []


def marks(sample: Any) -> set[Mark]:
    """What a loss may go by in a sample: its whole numbers, of several ones the least and the greatest; zeros of a mask; NaN."""
    return {(place, *mark) for place, value in _values(sample, ()) for mark in _marks(value)}


def leaves_out(samples: Collection[Any], first: Collection[Any]) -> bool:
    """Whether samples have a mask's zeros, NaN or negative numbers in a place where the first batch has none."""
    known = Known.of(first)
    return any(mark[1] in _LEFT_OUT for sample in samples for mark in known.new(sample))


def kind(mark: Mark) -> int:
    """Which marks come first: what is likelier to be left out."""
    return (*_LEFT_OUT, "least", "greatest", "value").index(mark[1])


def _marks(value: Tensor) -> Iterator[tuple[str, float]]:
    if not 0 < value.numel() <= _MOST:
        return
    if value.is_floating_point() and bool(value.isnan().any()):
        yield "nan", 0
        return
    least, greatest, whole = float(value.min()), float(value.max()), not (value.is_floating_point() or value.dtype == torch.bool)
    if least == 0 and (greatest == 1 or (greatest == 0 and not whole)):
        yield "zero", 0
    if whole and least < 0:
        yield "negative", least
    if whole:
        yield from (("value", least),) if least == greatest else (("least", least), ("greatest", greatest))


def _values(value: Any, place: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    if isinstance(value, (bool, int, float)) or (isinstance(value, (numpy.ndarray, numpy.generic)) and value.dtype.kind in "biuf"):
        value = torch.as_tensor(value)
    if isinstance(value, Tensor):
        if value.layout is torch.strided and not value.is_nested and not value.is_complex():
            yield place, value.detach()
    elif len(place) < _DEEP:
        parts = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, (list, tuple)) else ()
        for key, part in parts:
            yield from _values(part, (*place, key))
