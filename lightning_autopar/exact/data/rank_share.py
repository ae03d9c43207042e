"""A rank's share of a global batch: which samples are its own, and how to take them out of anything that can be sliced.

A plan deals samples out in turns, evenly or not. :mod:`.batch_structure` knows the structure of batches; this module knows numbers, tensors
and sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy
import torch
from torch.utils._pytree import SequenceKey, tree_flatten_with_path

from lightning_autopar.constraints import overrule
from lightning_autopar.plans import count_dealt


@dataclass(frozen=True)
class Dealing:
    """Who gets which sample of a batch: sample ``i`` goes to the holder ``turns[i % len(turns)]``. A holder is a rank, or a part of a
    rank's samples. A holder whose turns come at equal distances, as all do in an even dealing, gets a slice of the samples.

    Args:
        turns: holders, from 0 without a gap; see :attr:`lightning_autopar.plans.Plan.dealing`.
    """

    turns: tuple[int, ...]

    @classmethod
    def even(cls, holders: int) -> Dealing:
        """One sample each in turn: holder ``r`` gets the samples ``[r::holders]``."""
        return cls(tuple(range(holders)))

    @cached_property
    def holders(self) -> int:
        """How many holders there are."""
        return max(self.turns) + 1

    def rows(self, of: int, holder: int) -> int:
        """How many of a batch's ``of`` samples the holder gets."""
        return count_dealt(self.turns, of)[holder]

    def indices(self, of: int, holder: int) -> range | tuple[int, ...]:
        """The indices of the holder's samples in a batch of ``of``, in order: a range where they come at equal distances."""
        return _indices(self.turns, of, holder)

    def split(self, parts: int) -> Dealing:
        """The dealing that splits each holder's samples evenly into parts: part ``p`` of holder ``r`` is its holder ``r * parts + p``."""
        seen, turns = [0] * self.holders, []
        for holder in self.turns * parts:
            turns.append(holder * parts + seen[holder] % parts)
            seen[holder] += 1
        return Dealing(tuple(turns))


@lru_cache(maxsize=1024)
def _indices(turns: tuple[int, ...], of: int, holder: int) -> range | tuple[int, ...]:
    """See :meth:`Dealing.indices`."""
    period = len(turns)
    places = [place for place, whose in enumerate(turns) if whose == holder]
    gaps = {after - before for before, after in zip(places, [*places[1:], places[0] + period], strict=True)}
    if len(gaps) == 1:
        return range(min(places[0], of), of, gaps.pop())
    return tuple(sample for begin in range(0, of, period) for sample in (begin + place for place in places) if sample < of)


@dataclass(frozen=True, kw_only=True)
class Tally:
    """How many of a batch's entries that count (:mod:`.counted_entries`) a share holds.

    Args:
        of_all: gives how many the global batch has.
        samples: gives the number of each of its samples.
    """

    own: float
    of_all: Callable[[], float]
    samples: Callable[[], Sequence[float]]

    def __reduce__(self) -> tuple[Any, ...]:
        """Other ranks get the numbers alone."""
        return partial(Tally, own=self.own, of_all=partial(float, self.total), samples=tuple), ()

    @property
    def total(self) -> float:
        """How many the global batch has; may wait for other ranks."""
        return self.of_all()

    def part(self, number: int, parts: int, fed: int) -> Tally:
        """That of one of the parts of its ``fed`` samples, which are dealt out to them in turns."""
        if parts == 1:
            return self
        samples = self.samples()
        if len(samples) != fed:
            raise ValueError(f"this batch has counts for {len(samples)} rows, but {fed} samples, so the weight of a part of it isn't known")
        own = samples[number::parts]
        return replace(self, own=float(sum(own)), samples=lambda: own)


@dataclass(frozen=True, kw_only=True)
class BatchShare:
    """What one rank, or a part of one, holds of a global batch.

    A rank that gets no sample, as the batch is smaller than the world size, is fed the batch's first sample and has ``rows == 0``: it takes
    part in every collective, with weight 0.

    Args:
        rows: how many samples of the global batch are its own.
        of: how many samples the global batch has.
        rank: the holder's number in the dealing: this rank, or a part of its samples.
        dealing: who gets which sample; if None, the ranks in turn.
        parts: the parts that its samples run in one after the other, where the loader has made them.
        by: what the loss is a mean over: ``"mean"``: samples; a key of ``tallies``: entries that count; ``"sum"``: nothing, as it is a sum.
        tallies: what it has of the entries that count.
    """

    rows: int
    of: int
    rank: int
    world_size: int
    dealing: Dealing = None  # type: ignore[assignment]  # made in __post_init__
    parts: tuple[Any, ...] = field(default=(), compare=False)
    by: Any = field(default="mean", compare=False)
    tallies: Mapping[Any, Tally] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if self.dealing is None:
            object.__setattr__(self, "dealing", Dealing.even(self.world_size))

    @property
    def weight(self) -> float:
        """The factor of this share's loss, given that gradients are averaged over the ranks; of means, all weights sum to world_size."""
        if self.by == "mean":
            return self.rows * self.world_size / self.of
        return self.fraction(self.by) * self.world_size

    def fraction(self, by: Any = None) -> float:
        """The factor of this share's value in the sum that is the whole batch's; ``by`` as above, by default what the loss goes by."""
        by = self.by if by is None else by
        if by == "sum":
            return float(self.rows > 0)
        tally = None if by == "mean" else self.tallies[by]
        if tally is None or not tally.total:  # without anything that counts, every part's loss is what one device's is: NaN, say
            return self.rows / self.of
        return tally.own / tally.total

    @property
    def fed(self) -> int:
        """How many samples it is fed."""
        return max(self.rows, 1)

    @property
    def whole(self) -> bool:
        """Whether it has all samples of the batch."""
        return self.dealing.holders == 1

    @property
    def indices(self) -> range | tuple[int, ...]:
        """The indices of the global batch's samples that it is fed: its own, or the first one where it has none."""
        return self.dealing.indices(self.of, self.rank) if self.rows else range(1)

    def part(self, number: int, parts: int) -> BatchShare:
        """One of ``parts`` parts of its samples, dealt out to them in turns."""
        holder, dealing = self.rank * parts + number, self.dealing.split(parts)
        rows = dealing.rows(self.of, holder) if self.rows else 0
        tallies = {key: tally.part(number, parts, self.fed) for key, tally in self.tallies.items()}
        return BatchShare(rows=rows, of=self.of, rank=holder, world_size=self.world_size, dealing=dealing, by=self.by, tallies=tallies)


def share_of(of: int, rank: int, dealing: Dealing) -> BatchShare:
    """A rank's share of a batch of ``of`` samples under this dealing."""
    return BatchShare(rows=dealing.rows(of, rank), of=of, rank=rank, world_size=dealing.holders, dealing=dealing)


def cut(samples: Any, rank: int, dealing: Dealing) -> Any:
    """The rank's part of anything that can be sliced; the first sample where the part would be empty.

    A tensor lies in memory as the whole one does, without gaps: users' code says ``view(-1)``.
    """
    own = dealing.indices(len(samples), rank)
    if not own:
        return samples[:1]
    if isinstance(own, range):
        part = samples[own.start : own.stop : own.step]
        return _without_gaps(part, samples) if isinstance(part, torch.Tensor) else part
    if isinstance(samples, torch.Tensor):
        return _picked(samples, own)
    if isinstance(getattr(samples, "batch_size", None), torch.Size):  # a TensorDict
        return samples[index_of(own, torch.device("cpu"))]
    if isinstance(samples, numpy.ndarray):
        return samples[list(own)]
    picked = [samples[index] for index in own]
    return tuple(picked) if isinstance(samples, tuple) else picked


def _picked(whole: torch.Tensor, own: tuple[int, ...]) -> torch.Tensor:
    """Those rows, with the dimensions in the whole tensor's order in memory; indexing alone would lay them out anew."""
    strides = whole.stride()
    order = sorted(range(whole.ndim), key=lambda dim: -strides[dim])
    part = whole.permute(order).index_select(order.index(0), index_of(own, whole.device))
    return part.permute([order.index(dim) for dim in range(whole.ndim)])


@lru_cache(maxsize=256)
def index_of(own: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """The samples' indices as a tensor on the device, only to be read. The host doesn't wait for the copy, which is queued."""
    with torch.inference_mode(False):
        return torch.tensor(own).to(device, non_blocking=True)


def _without_gaps(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """The part itself where the whole tensor has gaps, too."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    for layout in (torch.contiguous_format, formats.get(whole.ndim, torch.contiguous_format)):
        if whole.is_contiguous(memory_format=layout):
            return part.contiguous(memory_format=layout)
    return part


def common_share(shares: Sequence[BatchShare]) -> BatchShare:
    """A rank's share of a step's batch, which may come from several loaders.

    Raises:
        ValueError: if the loaders' parts would weigh differently.
    """
    if any(share.weight != shares[0].weight for share in shares):
        sizes = ", ".join(str(share.of) for share in shares)
        raise ValueError(
            f"the loaders' batches of one step have {sizes} samples, so their parts on each device would have different weights; "
            "set drop_last=True with batch sizes that the devices divide evenly, or run on one device (allow=['single'])"
        )
    return shares[0]


@dataclass(frozen=True, kw_only=True)
class KnownTensors:
    """Which tensors the batches have with which planning tried a step. Of another batch (one with weights of samples, say) nobody knows
    what its parts weigh.

    Args:
        tried: of each batch, where its tensors are, and how many dimensions each has.
        listed: where lists have an entry a sample: their lengths tell nothing.
    """

    tried: tuple[frozenset[tuple[str, int]], ...]
    listed: frozenset[str] = frozenset()

    @classmethod
    def of(cls, batches: Sequence[tuple[Any, int]]) -> KnownTensors:
        """Those of batches, each with the number of its samples."""
        listed: set[str] = set()
        for batch, samples in batches:
            lengths: dict[str, set[Any]] = {}
            for path, _ in _leaves(batch):
                for depth, key in enumerate(path):
                    lengths.setdefault("".join(map(str, path[:depth])), set()).add(key)
            listed.update(place for place, keys in lengths.items() if len(keys) == samples and isinstance(next(iter(keys)), SequenceKey))
        return cls(tried=tuple(_tensors(batch, listed) for batch, _ in batches), listed=frozenset(listed))

    def check(self, batch: Any) -> None:
        """Raises:
        ValueError: if this batch, or a part of one, has other tensors than each of those.
        """
        if (found := _tensors(batch, self.listed)) in self.tried:
            return
        nearest = min(self.tried, key=lambda tensors: len(tensors ^ found))
        sides = (found - nearest, nearest - found)
        more, less = (", ".join(f"batch{place} of {ndim} dimensions" for place, ndim in sorted(each)) for each in sides)
        raise ValueError(
            f"this batch {' and '.join(words for words, any_ in ((f'has {more}', more), (f'lacks {less}', less)) if any_)}, unlike the "
            "batches that planning looked at, so it isn't known what its parts weigh. Run the model on one device in one piece "
            "(plan=Plan(engine='single', devices=[...])), or give all batches the same tensors" + overrule("later_entries")
        )


def _leaves(batch: Any) -> list[tuple[tuple[Any, ...], Any]]:
    return tree_flatten_with_path(dict(batch) if isinstance(batch, Mapping) else batch)[0]


def _tensors(batch: Any, listed: Collection[str]) -> frozenset[tuple[str, int]]:
    found = ((path, leaf.ndim) for path, leaf in _leaves(batch) if isinstance(leaf, (torch.Tensor, numpy.ndarray)))
    return frozenset((_place(path, listed), ndim) for path, ndim in found)


def _place(path: tuple[Any, ...], listed: Collection[str]) -> str:
    keys = list(map(str, path))
    return "".join("[...]" if "".join(keys[:depth]) in listed else key for depth, key in enumerate(keys))
