"""What a rank's loader collates of a batch: its own samples, or the whole batch, of which it keeps its own rows. Runs in the loader's
workers.

Both ways return ``(number of samples in the global batch, the rank's part)``. Collating the whole batch and cutting its rows is exact
whatever the collate function does, but every rank then loads all samples. Where that is expensive, and each row of the batch seems to
depend on its own sample alone, as a trial on some batches shows, ranks collate their own samples, and compare the shapes of their parts at
every batch. Knows a rank's share and a batch's rows; no module, no Lightning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from torch.utils.data import default_collate, default_convert

from lightning_autopar.exact.data.batch_structure import alike, count_rows, take_rows
from lightning_autopar.exact.data.fingerprint import fingerprint
from lightning_autopar.exact.data.rank_share import Dealing, cut
from lightning_autopar.exact.random import generator_states as rng
from lightning_autopar.memory.trace.first_batch import FirstBatch, fresh, some_batches

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


_LOG = logging.getLogger(__name__)

#: "whole": a rank's rows are cut out of the whole batch. "rows": its own samples make the same rows, and loading all is dear. "samples":
#: the batch has no rows (graphs, say), so a rank collates its own samples.
Collation = Literal["whole", "rows", "samples"]
#: Seconds from which loading and collating a whole batch is dear (benchmarks/collating.py): padded texts take some milliseconds, pictures a
#: hundred, and a message between ranks 0.1 ms.
_DEAR_SECONDS = 0.005
#: Seconds that all loaders of a stage may take together.
_LOOK_SECONDS = 0.4


@dataclass(frozen=True, kw_only=True)
class Loading:
    """What was found out about a loader.

    Args:
        draws: where making a batch draws random numbers; see :class:`.run_plan.RunPlan`.
        collation: how ranks make its batches; None where that isn't known.
        parts: whether the parts that a training batch runs in are collated as well: they can't be cut out of it.
    """

    draws: tuple[str, ...] = ()
    collation: Collation | None = None
    parts: bool = False


def loader_key(loader: Any) -> str:
    """A key that is the same in every process, and differs for loaders of other datasets or collate functions."""
    collate = getattr(loader, "collate_fn", None)
    while isinstance(collate, partial):
        collate = collate.func
    dataset, made_by = type(getattr(loader, "dataset", None)), collate if hasattr(collate, "__qualname__") else type(collate)
    return f"{dataset.__module__}.{dataset.__qualname__} {made_by.__module__}.{made_by.__qualname__}"  # type: ignore[union-attr]


def makes_rows(loader: Any) -> bool:
    """Whether a loader's collate function is known to treat samples one by one."""
    return getattr(loader, "collate_fn", None) in (default_collate, default_convert) and getattr(loader, "batch_sampler", None) is not None


def look_at(loaders: Sequence[Any]) -> tuple[dict[str, Loading], list[list[FirstBatch]]]:
    """Loads some batches of each loader in this process: what they show, by the loader's key, and the batches of each loader."""
    found: dict[str, Loading] = {}
    looked: list[list[FirstBatch]] = []
    state = rng.capture({})
    for loader in loaders:
        batches: list[FirstBatch] = []
        try:
            batches = some_batches(loader, _LOOK_SECONDS / len(loaders))
        except Exception:  # the user's dataset or collate function; if it is at fault, the run will say so
            _LOG.debug("not all batches of a loader can be looked at", exc_info=True)
        looked.append(batches)
        if batches:
            key, loading = loader_key(loader), Loading(draws=_draws(batches), collation=collation_of(batches))
            found[key] = loading if key not in found else _both(found[key], loading)
    rng.restore(state, {})
    return found, looked


def _draws(batches: Iterable[FirstBatch]) -> tuple[str, ...]:
    return tuple(sorted({name for batch in batches for name in batch.draws}))


def _both(one: Loading, other: Loading) -> Loading:
    """What holds for both of two loaders that have the same key."""
    collations = {one.collation, other.collation}
    collation = one.collation if len(collations) == 1 else "whole" if collations == {"whole", "rows"} else None
    return Loading(draws=tuple(sorted({*one.draws, *other.draws})), collation=collation)


def collation_of(batches: Sequence[FirstBatch]) -> Collation | None:
    """How two ranks would have to make batches like these; None where that can't be told."""
    several = [batch for batch in batches if batch.batch_size > 1 and batch.collate is not None]
    if not several:
        return None
    own = True
    for batch in several:
        assert batch.collate is not None
        for rank in range(2):
            try:
                _, part = CollateAll(batch.collate, rank, Dealing.even(2))(fresh(batch.samples))
            except ValueError as error:
                _LOG.debug("a batch is no rows: %s", error)
                return "samples"
            own = own and _makes(batch, rank, part)
    return "rows" if own and min(batch.seconds for batch in batches) > _DEAR_SECONDS else "whole"


def _makes(batch: FirstBatch, rank: int, part: Any) -> bool:
    """Whether a rank's own samples, collated alone, give the same as its part of the whole batch."""
    assert batch.collate is not None
    try:
        _, own = CollateSamples(batch.collate, rank, Dealing.even(2))(fresh(batch.samples))
    except Exception:  # the user's collate function, on fewer samples than it is used to
        _LOG.debug("a part of a batch can't be collated", exc_info=True)
        return False
    return alike(part, own) and fingerprint(part) == fingerprint(own)


def collation_for(loader: Any, loadings: Mapping[str, Loading]) -> tuple[Collation | None, tuple[str, ...]]:
    """How ranks make a loader's batches (None where nothing is known about them), and where making them draws random numbers."""
    loading = loadings.get(loader_key(loader), Loading())
    if makes_rows(loader) or (loading.collation is None and getattr(loader, "batch_sampler", None) is None):
        return "samples", loading.draws
    return loading.collation, loading.draws
