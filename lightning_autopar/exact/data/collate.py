"""What a rank's loader collates of a batch: its own samples, or the whole batch, of which it keeps its own rows. Runs in the loader's
workers.

Both ways return ``(number of samples in the global batch, the rank's part)``. Knows a rank's share and a batch's rows; no loader, no
Lightning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning_autopar.exact.data.batch_structure import count_rows, take_rows
from lightning_autopar.exact.data.rank_share import Dealing, cut
from lightning_autopar.memory.trace.first_batch import fresh

_REMEDY = (
    "let the DataLoader make the batches (batch_size=..., collate_fn=...), whose samples are then split before they are collated, "
    'or run on one device (allow=["single"])'
)


@dataclass(frozen=True)
class CollateSamples:
    """Collates only a rank's own samples."""

    collate: Callable[[Any], Any]
    rank: int
    dealing: Dealing

    def __call__(self, samples: Sequence[Any]) -> tuple[int, Any]:
        """Collate one batch's samples."""
        return len(samples), self.collate(samples if self.dealing.holders == 1 else cut(samples, self.rank, self.dealing))


class WithParts(NamedTuple):
    """A batch, and the parts that it runs in, each collated of its own samples."""

    batch: Any
    parts: tuple[Any, ...]


@dataclass(frozen=True)
class CollateParts:
    """Collates a batch, and each of the parts that it runs in one after the other: for batches whose rows aren't its samples."""

    collate: Callable[[Any], Any]
    parts: int

    def __call__(self, samples: Sequence[Any]) -> WithParts:
        """Collate one batch's samples."""
        dealing = Dealing.even(min(self.parts, len(samples)))
        own = [cut(fresh(samples), part, dealing) for part in range(dealing.holders)]
        return WithParts(self.collate(samples), tuple(map(self.collate, own)))


@dataclass(frozen=True)
class CollateAll:
    """Collates the whole batch and cuts a rank's rows out of it: exact, whatever the collate function does.

    Args:
        dealing: whose samples are whose.
        by_samples: whether a batch that isn't rows is collated of the rank's own samples instead.
    """

    collate: Callable[[Any], Any]
    rank: int
    dealing: Dealing
    by_samples: bool = False

    def __call__(self, samples: Sequence[Any]) -> tuple[int, Any]:
        """Collate and cut one batch's samples."""
        kept = fresh(samples)
        whole = self.collate(samples)
        try:
            return take_rows(whole, self.rank, self.dealing, samples=len(samples), one=lambda: self.collate(fresh(kept[:1])))
        except ValueError as error:
            if self.by_samples:
                return CollateSamples(self.collate, self.rank, self.dealing)(kept)
            raise ValueError(
                f"the collate function draws random numbers or pads, so a part of a batch can't be made by itself, and the whole "
                f'batch of {len(samples)} samples can\'t be split: {error}; run on one device (allow=["single"])'
            ) from error


@dataclass(frozen=True)
class CollateRows:
    """Cuts a rank's rows out of a batch that the dataset made whole."""

    collate: Callable[[Any], Any] | None
    rank: int
    dealing: Dealing

    def __call__(self, batch: Any) -> tuple[int, Any]:
        """Collate and cut one batch."""
        collated = batch if self.collate is None else self.collate(batch)
        if self.dealing.holders > 1:
            try:
                return take_rows(collated, self.rank, self.dealing)
            except ValueError as error:
                raise ValueError(f"{error}; {_REMEDY}") from error
        try:
            return count_rows(collated), collated
        except ValueError:  # nothing to split on one rank: any batch will do, and counts as one
            return 1, collated
