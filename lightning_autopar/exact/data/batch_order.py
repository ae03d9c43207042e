"""The order of a global batch stream: the user's own sampler, cut for one rank, with what is needed to replay it.

Samplers draw from the process's random generators at moments of their own choosing: when an epoch's iterator is made, at its first index,
or at every one. A :class:`DrawLog` keeps the random states that a replay must set again, and no others. Knows no Lightning and no dataset.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from lightning_autopar.exact.data.rank_share import Dealing, cut
from lightning_autopar.exact.random import generator_states as rng

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

#: The most entries of a draw log; beyond it exact replay is given up: about 50 MB of random states.
LOG_LIMIT = 10_000

_DRAW_AT_START = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)


def index_sampler(loader: Any) -> Any:
    """The sampler that gives a map-style loader its next index or batch of indices."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def innermost_sampler(loader: Any) -> Any:
    """The sampler of single indices inside a plain batch sampler, or the sampler itself."""
    sampler = index_sampler(loader)
    sampler = getattr(sampler, "_batch_sampler", sampler)  # Lightning's wrapper around the batch sampler of a predict loader
    return sampler.sampler if type(sampler) is BatchSampler else sampler


def draws_nothing(loader: Any) -> bool:
    """Whether the order is the same whatever the random state is."""
    return type(innermost_sampler(loader)) in (SequentialSampler, DistributedSampler)


def draws_at_start_only(loader: Any) -> bool:
    """Whether a map-style loader's order is known to draw from the process's generators no later than at its first index. Taken from
    torch/utils/data/sampler.py; nothing is known about classes that torch doesn't define.
    """
    return type(innermost_sampler(loader)) in _DRAW_AT_START


class DrawLog:
    """The random states to set again when the order's draws are replayed, as others (dropout's, say) came between them. A state is kept
    only where it differs from the one after the previous logged draw: a sampler that draws once has one entry.
    """

    def __init__(self) -> None:
        self.entries: dict[int, rng.RngState] = {}
        self.complete = True
        self._left: rng.RngState = {}

    def note(self, number: int, before: rng.RngState, after: rng.RngState) -> None:
        """Log that the interaction ``number`` with the source took the random state from ``before`` to ``after``."""
        drawn = rng.changed(before, after)
        if not drawn:
            return
        fresh = {name: value for name, value in drawn.items() if name not in self._left or rng.changed({name: value}, self._left)}
        if fresh and self.complete:
            if len(self.entries) >= LOG_LIMIT:
                self.complete = False
                self.entries.clear()
                _log.warning(
                    "the sampler or dataset draws from the global random state at every batch: a checkpoint that is saved after %d "
                    "batches of this epoch or later won't resume exactly; give the sampler or dataset a generator of its own",
                    LOG_LIMIT,
                )
            else:
                self.entries[number] = fresh
        self._left.update({name: after[name] for name in drawn})

    def draw(self, number: int, own: Mapping[str, Any], function: Callable[[], _T]) -> _T:
        """Calls ``function()``, and logs it as the interaction ``number``."""
        before = rng.capture(own, cuda=False)
        try:
            return function()
        finally:
            self.note(number, before, rng.capture(own, cuda=False))

    def to_plain(self) -> list[tuple[int, dict[str, Any]]]:
        """For a checkpoint."""
        return [(number, rng.to_plain(state)) for number, state in self.entries.items()]

    @classmethod
    def from_plain(cls, data: Iterable[tuple[int, Mapping[str, Any]]]) -> DrawLog:
        """The log of what :meth:`to_plain` gave."""
        log = cls()
        log.entries = {number: rng.from_plain(state) for number, state in data}
        return log


@dataclass(frozen=True, kw_only=True)
class DrawnBatch:
    """One batch that the order handed to the loader."""

    rows: int
    of: int
    #: The whole batch's indices, where the sampler gives batches of indices.
    indices: Any = None


class Order:
    """A batch sampler for a torch DataLoader that gives one rank's part of the user's global batches.

    Args:
        batches: the user's batch sampler, or the sampler whose indices are loaded one by one.
        split: how each batch of indices is dealt out to the ranks; None: every rank gets it whole.
        whole: rank r gets the whole batches r, r + world_size, …; in the last round, ranks without one repeat the last batch.
        batched: whether what ``batches`` gives is a batch of indices, rather than one index.
        own: the user's generator objects, by name.
        watch: whether every draw is logged, rather than those at the start alone.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        *,
        rank: int,
        world_size: int,
        split: Dealing | None,
        whole: bool,
        batched: bool,
        own: Mapping[str, Any],
        watch: bool,
    ) -> None:
        self.batches = batches
        self.log = DrawLog()
        self.taken: deque[DrawnBatch] = deque()
        #: How many global batches the sampler has given in this epoch.
        self.made = 0
        self.ended = False
        #: Called when indices were drawn and their samples are about to be loaded.
        self.on_drawn: Callable[[], None] | None = None
        self._rank, self._world_size, self._split, self._whole = rank, world_size, split, whole
        self._batched, self._own, self._watch = batched, own, watch
        self._pending: deque[Any] = deque()
        self._replayed: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        if self._replayed is not None:
            return self._run(self._replayed)
        self.log, self.made, self.ended = DrawLog(), 0, False
        self.taken.clear()
        self._pending.clear()
        return self._run(self.log.draw(0, self._own, lambda: iter(self.batches)))

    def replay(self, log: DrawLog, *, made: int, skip: int, ended: bool) -> None:
        """Draw the epoch's order again, and let the next iterator start at batch ``skip`` of it.

        Args:
            log: the epoch's draws so far.
            made: how many batches the sampler had given; it gives those from ``skip`` on again without a draw.
            skip: how many batches are done.
            ended: whether the sampler had been found empty.

        Raises:
            ValueError: if the sampler gives fewer batches than it did.
        """
        self.taken.clear()
        rng.restore(log.entries.get(0, {}), self._own)
        source = iter(self.batches)
        self._pending.clear()
        for number in range(made):
            rng.restore(log.entries.get(number + 1, {}), self._own)
            try:
                batch = next(source)
            except StopIteration:
                raise ValueError(
                    f"the checkpoint was saved after {made} batches of an epoch, but the loader's sampler now gives only {number}; "
                    "resume with the dataset and batch size that it was saved with"
                ) from None
            if number >= skip:
                self._pending.append(batch)
        # Earlier draws stay in the log, or a second resume in this epoch would miss them.
        self.log, self.made, self.ended = log, made, ended
        self._replayed = iter(()) if ended else source

    def replayed(self) -> None:
        """Called when the iterator over the replayed rest was made: the next one belongs to a new epoch."""
        self._replayed = None

    def _next(self, source: Iterator[Any]) -> Any:
        if self._pending:
            return self._pending.popleft()
        try:
            if self._watch or self.made == 0:
                batch = self.log.draw(self.made + 1, self._own, partial(next, source))
            else:
                batch = next(source)
        except StopIteration:
            self.ended = True
            raise
        self.made += 1
        return batch

    def _run(self, source: Iterator[Any]) -> Iterator[Any]:
        while True:
            try:
                batch = self._next_round(source) if self._whole else self._next_batch(source)
            except StopIteration:
                return
            if self.on_drawn is not None:
                self.on_drawn()
            yield batch

    def _next_batch(self, source: Iterator[Any]) -> Any:
        batch = self._next(source)
        if self._batched and not hasattr(batch, "__len__"):
            batch = list(batch)
        of = len(batch) if self._batched else 1
        rows = of if self._split is None else self._split.rows(of, self._rank)
        self.taken.append(DrawnBatch(rows=rows, of=of, indices=batch))
        return batch if self._split is None or self._world_size == 1 else cut(batch, self._rank, self._split)

    def _next_round(self, source: Iterator[Any]) -> Any:
        group = [self._next(source)]
        while len(group) < self._world_size:
            try:
                group.append(self._next(source))
            except StopIteration:
                break
        mine = min(self._rank, len(group) - 1)
        of = len(group[mine]) if self._batched and hasattr(group[mine], "__len__") else 1
        self.taken.append(DrawnBatch(rows=of if self._rank < len(group) else 0, of=of))
        # Lightning's predict loop reads a round's sample indices off this list of its batch sampler, by the rank's own batch count.
        seen = getattr(self.batches, "seen_batch_indices", None)
        if isinstance(seen, list) and self._world_size > 1:
            del seen[len(seen) - len(group) :]
            seen.append(group[mine])
        return group[mine]
