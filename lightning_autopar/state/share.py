"""A rank's share of a global batch: which rows are its own, and how they are cut out.

Knows batches and nothing else: no loader, no random state, no Lightning.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch

from lightning_autopar.state.dealing import Dealing

try:
    import numpy
except ImportError:  # torch runs without it
    numpy = None  # type: ignore[assignment]

_REMEDY = (
    "let the DataLoader make the batches (batch_size=..., collate_fn=...), whose samples are then split before they are collated, "
    'or run on one device (allow=["single"])'
)


@dataclass(frozen=True, kw_only=True)
class BatchShare:
    """What one rank, or a part of one, holds of a global batch.

    A rank that gets no sample of a batch smaller than the world size is fed the batch's first sample and has ``rows == 0``: it takes part
    in every collective, with weight 0.

    Args:
        rows: how many samples of the global batch are its own.
        of: how many samples the global batch has.
        rank: who it is in the dealing: this rank, or a part of its samples.
        world_size: how many ranks share the batch.
        dealing: who gets which sample; if None, the ranks in turn.
    """

    rows: int
    of: int
    rank: int
    world_size: int
    dealing: Dealing = None  # type: ignore[assignment]  # made in __post_init__

    def __post_init__(self) -> None:
        if self.dealing is None:
            object.__setattr__(self, "dealing", Dealing.even(self.world_size))

    @property
    def weight(self) -> float:
        """The factor of this share's mean loss, given that gradients are averaged over the ranks; all weights sum to world_size."""
        return self.rows * self.world_size / self.of

    @property
    def indices(self) -> range | tuple[int, ...]:
        """Which of the global batch's samples it is fed: its own, the first one where it has none."""
        return self.dealing.indices(self.of, self.rank) if self.rows else range(1)

    def part(self, number: int, parts: int) -> BatchShare:
        """One of ``parts`` parts of its samples, dealt out to them in turns."""
        holder, dealing = self.rank * parts + number, self.dealing.split(parts)
        rows = dealing.rows(self.of, holder) if self.rows else 0
        return BatchShare(rows=rows, of=self.of, rank=holder, world_size=self.world_size, dealing=dealing)


def share_of(of: int, rank: int, dealing: Dealing) -> BatchShare:
    """A rank's share of a batch of ``of`` samples that are dealt out so."""
    return BatchShare(rows=dealing.rows(of, rank), of=of, rank=rank, world_size=dealing.holders, dealing=dealing)


def cut(samples: Any, rank: int, dealing: Dealing) -> Any:
    """The rank's part of anything that can be sliced, the first sample where that would be empty.

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
    if _is_array(samples):
        return samples[list(own)]
    picked = [samples[index] for index in own]
    return tuple(picked) if isinstance(samples, tuple) else picked


def _picked(whole: torch.Tensor, own: tuple[int, ...]) -> torch.Tensor:
    """Those rows, with the dimensions in the whole tensor's order in memory; indexing alone would lay them out anew."""
    strides = whole.stride()
    order = sorted(range(whole.ndim), key=lambda dim: -strides[dim])
    part = whole.permute(order).index_select(order.index(0), torch.tensor(own, device=whole.device))
    return part.permute([order.index(dim) for dim in range(whole.ndim)])


def _without_gaps(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """The part itself where the whole tensor has gaps, too."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    for layout in (torch.contiguous_format, formats.get(whole.ndim, torch.contiguous_format)):
        if whole.is_contiguous(memory_format=layout):
            return part.contiguous(memory_format=layout)
    return part


def count_rows(batch: Any) -> int:
    """The size of dimension 0 that a collated batch's tensors and arrays agree on.

    Raises:
        ValueError: if they disagree, or there are none.
    """
    shapes: list[tuple[int, ...]] = []
    _collect_shapes(batch, shapes)
    sizes = {shape[0] for shape in shapes if shape}
    if len(sizes) != 1 or 0 in sizes:
        found = ", ".join(str(shape) for shape in shapes[:6]) or "no tensors"
        raise ValueError(
            f"this batch, a {type(batch).__name__}, has no batch dimension: its tensors' sizes in dimension 0 must be one and the same, "
            f"at least 1, but it has {found}; {_REMEDY}"
        )
    return sizes.pop()


def take_rows(batch: Any, rank: int, dealing: Dealing) -> tuple[int, Any]:
    """How many samples a collated batch has, and the rank's rows of it.

    Every tensor and array is cut along dimension 0; so are lists of strings or numbers with an entry a sample. What has no dimension
    (a number, a string, a scalar tensor) belongs to the batch as a whole and stays.

    Raises:
        ValueError: if there is no batch dimension, or something in the batch can't be cut.
    """
    of = count_rows(batch)
    return of, _cut_tree(batch, of, rank, dealing)


def _is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (numpy is not None and isinstance(value, numpy.ndarray))


def _is_leaf(value: Any) -> bool:
    """Whether a value has no rows at all."""
    return value is None or isinstance(value, (str, bytes, int, float, complex)) or (numpy is not None and isinstance(value, numpy.generic))


def _collect_shapes(value: Any, shapes: list[tuple[int, ...]]) -> None:
    if _is_array(value):
        shapes.append(tuple(value.shape))
    elif isinstance(value, Mapping):
        for item in value.values():
            _collect_shapes(item, shapes)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect_shapes(item, shapes)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            _collect_shapes(getattr(value, field.name), shapes)


def _cut_tree(value: Any, of: int, rank: int, dealing: Dealing) -> Any:
    if _is_array(value):
        return cut(value, rank, dealing) if value.ndim else value
    if _is_leaf(value):
        return value
    if isinstance(value, Mapping):
        items = {key: _cut_tree(item, of, rank, dealing) for key, item in value.items()}
        if type(value) is dict:
            return items
        result: Any = copy.copy(value)
        for key, item in items.items():
            result[key] = item
        return result
    if isinstance(value, (list, tuple)):
        if value and all(_is_leaf(item) for item in value):
            if len(value) == of:
                return cut(value, rank, dealing)
            raise ValueError(f"a {type(value).__name__} of {len(value)} values in a batch of {of} samples can't be split; {_REMEDY}")
        parts = [_cut_tree(item, of, rank, dealing) for item in value]
        if isinstance(value, tuple):
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        return parts
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _cut_tree(getattr(value, f.name), of, rank, dealing) for f in fields(value) if f.init})
    raise ValueError(f"a {type(value).__name__} in a batch can't be split over {dealing.holders} devices; {_REMEDY}")


@dataclass(frozen=True)
class CollateSamples:
    """Collates only a rank's own samples; gives ``(samples of the global batch, collated share)``. Runs in the loader's workers."""

    collate: Callable[[Any], Any]
    rank: int
    dealing: Dealing

    def __call__(self, samples: Sequence[Any]) -> tuple[int, Any]:
        """Collate one batch's samples."""
        return len(samples), self.collate(samples if self.dealing.holders == 1 else cut(samples, self.rank, self.dealing))


@dataclass(frozen=True)
class CollateAll:
    """Collates the whole batch and cuts a rank's rows out of it: for a collate function that draws random numbers or pads."""

    collate: Callable[[Any], Any]
    rank: int
    dealing: Dealing

    def __call__(self, samples: Sequence[Any]) -> tuple[int, Any]:
        """Collate and cut one batch's samples."""
        rows, part = take_rows(self.collate(samples), self.rank, self.dealing)
        if rows != len(samples):
            raise ValueError(
                f"the collate function draws random numbers or pads, and makes {rows} rows of {len(samples)} samples: they can't be split; "
                f"{_REMEDY}"
            )
        return rows, part


@dataclass(frozen=True)
class CollateRows:
    """Cuts a rank's rows out of a batch that the dataset made whole; gives ``(samples of the global batch, share)``."""

    collate: Callable[[Any], Any] | None
    rank: int
    dealing: Dealing

    def __call__(self, batch: Any) -> tuple[int, Any]:
        """Collate and cut one batch."""
        collated = batch if self.collate is None else self.collate(batch)
        if self.dealing.holders > 1:
            return take_rows(collated, self.rank, self.dealing)
        try:
            return count_rows(collated), collated
        except ValueError:  # nothing to split on one rank: any batch will do, and counts as one
            return 1, collated
