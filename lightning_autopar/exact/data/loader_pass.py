"""One pass over an exact loader: the iterator that loads the batches.

Its record (``pass_record``) outlives the iterator: the loader keeps the record, while Lightning drops the iterator and its workers.

The user's data code runs as on one device: ``torch.distributed`` tells it that there is no process group. Batches are cut for the ranks
after they are made. A sampler or dataset that dealt samples out by rank itself would deal them out twice.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from lightning_autopar._lightning import sized_len
from lightning_autopar.exact.data.batch_order import DrawLog, Order
from lightning_autopar.exact.data.batch_structure import part_number
from lightning_autopar.exact.data.collate import CollateRows, WithParts
from lightning_autopar.exact.data.pass_record import EpochProgress, PassRecord, WorkerStates, load_sampler_states, states_of
from lightning_autopar.exact.data.rank_share import BatchShare, Dealing, share_of
from lightning_autopar.exact.random import generator_states as rng

if TYPE_CHECKING:
    from lightning_autopar.exact.data.loader import ExactLoader

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
#: The variables by which launchers tell a process of the others, as Python's copy of the environment has them.
_TOLD = tuple(
    os.fsencode(name)
    for name in (
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"),
        *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    )
)


@contextmanager
def without_group() -> Iterator[None]:
    """While open, torch sees no process group in this process and in workers that it forks, and no variable tells of one. For code without
    collectives.
    """
    # Python's copy alone: while the C library's changes, no other thread may read it, and NCCL's threads do.
    variables: Any = os.environ._data  # type: ignore[attr-defined]
    known = {name: variables.pop(name) for name in _TOLD if name in variables}
    torchs: Any = dist.distributed_c10d._world  # what ``dist.group.WORLD`` reads
    group, torchs.default_pg = torchs.default_pg, None
    try:
        yield
    finally:
        variables.update(known)
        if group is not None:
            torchs.default_pg = group


def alone(call: Callable[..., _T], *args: Any) -> _T:
    """Calls the user's code as if there were no process group; returns what it returns."""
    with without_group():
        return call(*args)


class LoaderPass(Iterator[Any]):
    """An iterator over an exact loader, from iter() to exhaustion."""

    def __init__(self, loader: ExactLoader) -> None:
        self._loader = loader
        self._own: Mapping[str, Any] = loader._own
        self._inner: Iterator[Any] | None = None
        self._stream: rng.RngState | None = None
        self._outside: rng.RngState | None = None
        self._before: rng.RngState | None = None
        #: In a resumed pass: the random states before its first, repeated fetches and before the first new one.
        self._ahead: deque[rng.RngState] = deque()
        self._settle: rng.RngState | None = None
        self._running = False
        self._skipped = 0
        #: What is known of the loader's workers from before this pass.
        self._workers: Mapping[str, Any] | None = None
        #: Whether a batch may be handed out and not yet finished, so that the random states around its fetch are kept.
        self._keeps = loader._progress is not None
        self._late = loader._draws_late
        self._counts = loader._counts
        if loader._resume is None:
            self._start()
        else:  # at the first batch: only then has Lightning told the sampler its epoch
            loader._shared_random.waiting.append(weakref.ref(self))

    def _begin_track(self, workers: Mapping[str, Any] | None = None, skip: int = 0) -> Any:
        """The inner loader of a new pass, and its empty record.

        Args:
            workers: what is known of the loader workers whose work the pass continues.
            skip: how many of its batches are done.
        """
        loader = self._loader
        before = loader._track
        if workers is not None:
            self._workers = workers
            inner = loader._make_inner(workers, skip)
        else:
            lived = before is not None and before.workers is not None and before.workers_persist
            self._workers = before.workers.at(before.handed) if lived and before and before.workers else None
            inner = loader._make_inner(self._workers if loader._inner is None else None)
        order: Order | None = loader._order if loader._source == "order" else None
        self._previous: PassRecord | None = loader._track
        samplers = {name: place for name, place in loader._places() if "sampler" in name and place is not None}
        self._track = PassRecord(order, samplers if loader._source == "order" else {}, alone(sized_len, loader))
        loader.__dict__["_track"] = self._track
        if order is not None:
            order.on_drawn = self._drawn if not loader.num_workers and (self._keeps or loader._isolates) else None
        return inner

    def _start(self, workers: Mapping[str, Any] | None = None) -> None:
        self._agree()
        inner = self._begin_track(workers)
        if self._track.order is None:
            self._inner = self._track.log.draw(0, self._own, lambda: alone(iter, inner))
        else:
            self._inner = alone(iter, inner)
            self._listen()
        self._seed_stream()

    def _fitting(self, state: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """What a loader's state says about its workers; None where it says nothing, or they were more or fewer than now."""
        workers: Mapping[str, Any] | None = state.get("workers")
        return workers if workers is not None and self._loader._tells and len(workers["states"]) == self._loader.num_workers else None

    def _listen(self) -> None:
        """From here on, record the random states that the loader's workers send."""
        loader, track = self._loader, self._track
        if not loader._tells:
            return
        if (workers := self._workers) is None:
            iterator: Any = self._inner
            track.workers = WorkerStates(base=int(iterator._base_seed), states=[None] * loader.num_workers)
        else:
            track.workers = WorkerStates(base=int(workers["base"]), states=states_of(workers))
        track.workers_persist = bool(loader.persistent_workers)

    def _take_up(self) -> None:
        """Resume, if that's still to be done."""
        state, self._loader.__dict__["_resume"] = self._loader._resume, None
        if state is not None:
            self._inner = None
            self._resume(state)

    def _resume(self, state: dict[str, Any]) -> None:
        shared_random = self._loader._shared_random
        if "base" not in state:  # an epoch that had not begun: it begins, as usual, from the random state at that time
            shared_random.settle(rng.from_plain(state["rng"]), self._own)
            self._start(self._fitting(state))
            return
        others = rng.capture({}) if shared_random.done else {}
        if not state["exact"]:
            _log.warning("the data order drew from the global random state too often to be replayed; the rest of this epoch may differ")
        skip, workers = int(state["finished"]), self._fitting(state)
        inner = self._begin_track(workers, skip)
        track = self._track
        log = DrawLog.from_plain(state["log"])
        load_sampler_states(track.samplers, state["samplers"])
        track.sampler_states = state["samplers"]
        if track.order is not None:
            track.order.replay(log, made=int(state["made"]), skip=skip, ended=bool(state["ended"]))
            self._inner = alone(iter, inner)
            track.order.replayed()
            self._listen()
        else:
            rng.restore(log.entries.get(0, {}), self._own)
            self._inner = alone(iter, inner)
            for number in range(skip):
                rng.restore(log.entries.get(number + 1, {}), self._own)
                if alone(next, self._inner, self) is self:
                    raise ValueError(
                        f"the checkpoint was saved after {skip} batches of an epoch, but the dataset now gives only {number}; "
                        "resume with the dataset and batch size that it was saved with"
                    )
            track.log = log
        track.base, track.handed, track.unsettled = int(state["base"]), skip, state
        self._skipped = skip
        self._ahead.extend(rng.from_plain(before) for before in state["ahead"])
        self._settle, self._running = rng.from_plain(state["rng"]), bool(state["running"])
        self._seed_stream()
        rng.restore(others, {})

    def _agree(self) -> None:
        """Give every rank the random state of rank 0."""
        if self._loader._sync is not None:
            state: Any = self._loader._sync(rng.capture(self._own))
            rng.restore(state, self._own)

    def _seed_stream(self) -> None:
        """A random stream of this rank's own for its samples' augmentation."""
        if self._loader._isolates:
            generator = torch.Generator()
            generator.set_state(torch.get_rng_state())
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
            self._stream = rng.seeded((seed + self._loader._rank * 0x9E3779B97F4A7C15 + self._skipped) % 2**63)

    def _drawn(self) -> None:
        """Called when indices are drawn and their samples are about to be loaded in this process."""
        self._before = rng.capture(self._own)
        if self._stream is not None:
            self._outside = {name: value for name, value in self._before.items() if name in self._stream}
            rng.restore(self._stream, {})

    def __next__(self) -> Any:
        loader = self._loader
        if loader._resume is not None and (self._inner is None or self._track.handed == self._skipped):
            shared_random = loader._shared_random
            for waiting in [] if shared_random.mid_epoch else shared_random.waiting:
                if (other := waiting()) is not None:
                    other._take_up()
            self._take_up()
        assert self._inner is not None
        track = self._track
        first = track.handed == self._skipped
        if first and track.unsettled is None:
            track.base = _base(loader._progress() if loader._progress else None, self._previous)
        if first and track.base == 0:
            loader.shares.clear()
        if self._ahead:
            rng.restore(self._ahead.popleft(), self._own)
        elif self._settle is not None:
            self._settled()
        if loader._boundary is not None:
            loader._boundary(track.base + track.handed)
        if first or self._late:
            self._agree()
        # The random state for a repeated fetch of this batch: then its indices are known, but its samples are loaded again.
        self._before = rng.capture(self._own) if track.order is None else None
        try:
            batch, share = self._fetch(self._inner)
        except StopIteration:
            track.exhausted = True
            self._note()
            raise
        if self._running and not self._ahead:
            self._settled()
        loader.shares.append(share)
        if self._keeps or track.order is None:
            after = self._note()
            track.fetches.append((track.handed, self._before or after, after))
        track.handed += 1
        return batch

    def _settled(self) -> None:
        shared_random = self._loader._shared_random
        assert self._settle is not None
        if self._running:  # each loader's last fetch set its own; the step began after the last of them
            rng.restore(self._settle, self._own)
        else:
            shared_random.settle(self._settle, self._own)
        self._settle, self._running, self._track.unsettled = None, False, None

    def _note(self) -> rng.RngState:
        """Keep the random state after a fetch; for a stream, log the fetch's draws."""
        after = rng.capture(self._own)
        if self._track.order is None:
            assert self._before is not None
            self._track.log.note(self._track.handed + 1, self._before, after)
        return after

    def _fetch(self, inner: Iterator[Any]) -> tuple[Any, BatchShare]:
        loader, track = self._loader, self._track
        if loader._whole_batches and track.order is None:
            return self._fetch_whole(inner)
        try:
            got = alone(next, inner)
        finally:
            if self._outside is not None:
                self._stream = rng.capture({}, cuda=False)
                rng.restore(self._outside, {})
                self._outside = None
        rows: int | None = None
        if loader._source == "iterable":
            got = CollateRows(None, *loader._cutting())(got)
        if track.workers is not None:
            got, told = got
            track.workers.note(track.handed, told)
        if track.order is not None:
            taken = track.order.taken.popleft()
            rows, of = taken.rows, taken.of
            if loader._alike is not None and not loader._alike(part_number(got, max(rows, 1))):
                of, got = loader.collated_whole(taken.indices)
                return got, self._share(of, None)
        if self._counts:
            of, got = got
            rows = min(rows, 1) * of if loader._whole_batches and rows is not None else None
        if isinstance(got, WithParts):
            return got.batch, replace(self._share(of, rows), parts=got.parts)
        return got, self._share(of, rows)

    def _fetch_whole(self, inner: Iterator[Any]) -> tuple[Any, BatchShare]:
        """A round of a stream: every rank reads all its batches and keeps one."""
        loader = self._loader
        got: Any = None
        read = 0
        while read < loader._world_size:
            try:
                item = alone(next, inner)
            except StopIteration:
                if read == 0:
                    raise
                break
            if read <= loader._rank:
                got = item
            read += 1
        of, batch = CollateRows(None, 0, Dealing.even(1))(got) if loader._source == "iterable" else got
        return batch, self._share(of, of if loader._rank < read else 0)

    def _share(self, of: int, rows: int | None) -> BatchShare:
        share = share_of(of, self._loader._rank, self._loader._dealing)
        return share if rows is None else replace(share, rows=rows)


def _base(progress: EpochProgress | None, previous: PassRecord | None) -> int:
    """The position in the epoch of a pass's first batch: not 0 where Lightning cycles through a shorter loader again."""
    if progress is None or progress.started == 0 or (progress.last and progress.finished == progress.started):
        return 0
    return progress.started if previous is None else previous.base + previous.handed
