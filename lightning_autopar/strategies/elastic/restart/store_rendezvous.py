"""Lets the ranks of a run that a launcher started meet at one boundary between two batches, by a key-value store, without a collective.

It does for processes without shared memory and without an agent what ``processes/agent_protocol`` does for others: rank 0 says when. Knows
ranks and counts; no trainer and no snapshot.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Literal

#: What a rank may request from rank 0: that the run leaves, as its process was told to, or that it writes a snapshot.
Word = Literal["leave", "save"]
_WORDS: tuple[Word, ...] = ("leave", "save")
_NOT_SAID, _SAID = "0", "1"


@dataclass(frozen=True, kw_only=True)
class Stop:
    """What rank 0 wants of all ranks at one boundary.

    Args:
        number: of the stop, from 1.
        boundary: the first at which ranks may stop; inside an accumulation window, the one at its end.
        leave: whether the processes leave afterwards.
        target: the folder for the snapshot.
    """

    number: int
    boundary: int
    leave: bool
    target: str


class StoreRendezvous:
    """One rank's side of the rendezvous.

    Rank 0 writes at its boundary ``c``, before it goes on, that all stop at ``c + 2 × accumulation``. No rank can have passed that boundary
    yet: the optimizer's steps before it wait for rank 0's gradients of batch ``c`` and later ones. So each rank finds the message if it
    reads the store at each of its boundaries; one read is a round trip.

    Args:
        store: one that only these processes use.
        name: tells this run from others of the process.
    """

    def __init__(self, store: Any, rank: int, world_size: int, name: str) -> None:
        self._store, self._rank, self._world_size, self._name = store, rank, world_size, name
        self._stop: Stop | None = None
        self._done = 0
        #: How many boundaries this rank has come to.
        self.count = 0
        if rank == 0:
            for word in _WORDS:
                store.set(self._key(word), _NOT_SAID)
            store.set(self._key("stop"), "null")

    def _key(self, *parts: object) -> str:
        return "/".join(["elastic", self._name, *map(str, parts)])

    def request(self, word: Word) -> None:
        """Send a request to rank 0."""
        self._store.set(self._key(word), _SAID)

    def requests(self) -> list[Word]:
        """Rank 0: the ranks' requests; a request for a snapshot is returned once."""
        values = self._store.multi_get([self._key(word) for word in _WORDS])
        words = [word for word, value in zip(_WORDS, values, strict=True) if value.decode() == _SAID]
        if "save" in words:
            self._store.set(self._key("save"), _NOT_SAID)
        return words

    @property
    def waits(self) -> bool:
        """Rank 0: whether it has called a stop that isn't done yet."""
        return self._stop is not None and self._stop.number > self._done

    def call(self, *, accumulation: int, leave: bool, target: str) -> None:
        """Rank 0, at its boundary: call a stop of all ranks at a later one.

        Args:
            accumulation: batches to an optimizer's step.
        """
        assert not self.waits, "one stop at a time"
        self._stop = Stop(number=self._done + 1, boundary=self.count + 2 * accumulation, leave=leave, target=target)
        self._store.set(self._key("stop"), json.dumps(asdict(self._stop)))

    def arrived(self, *, in_window: bool) -> Stop | None:
        """This rank is at its next boundary; returns the stop that is due here, if any. Rank 0 calls :meth:`call` afterwards.

        Args:
            in_window: whether gradients of earlier batches still wait for their optimizer's step. The same on all ranks.
        """
        self.count += 1
        if in_window:
            return None
        if self._rank != 0:
            found = json.loads(self._store.get(self._key("stop")))
            self._stop = None if found is None else Stop(**found)
        due = self._stop is not None and self._stop.number > self._done and self.count >= self._stop.boundary
        return self._stop if due else None

    def gather(self, stop: Stop, within_seconds: float) -> bool:
        """Whether all ranks have come to the same boundary; the same answer on each, unless rank 0 doesn't come.

        Args:
            stop: the one that they have come for.
            within_seconds: how long rank 0 waits for the others.
        """
        self._done = stop.number
        self._store.set(self._key(stop.number, "here", self._rank), str(self.count))
        if self._rank != 0:
            return self.hear(stop, "go", 2 * within_seconds) is True
        keys = [self._key(stop.number, "here", rank) for rank in range(self._world_size)]
        together = self._wait(keys, within_seconds) and {int(count) for count in self._store.multi_get(keys)} == {self.count}
        self.say(stop, "go", together)
        return together

    def leave(self, stop: Stop, within_seconds: float) -> None:
        """This rank's last call. Rank 0 waits for the others, as the store may end with its process."""
        if self._rank != 0:
            self._store.set(self._key(stop.number, "left", self._rank), "")
        else:
            self._wait([self._key(stop.number, "left", rank) for rank in range(1, self._world_size)], within_seconds)

    def say(self, stop: Stop, what: str, yes: bool) -> None:
        """Rank 0: answer the others' question about a stop, such as whether its snapshot is ``"done"``."""
        self._store.set(self._key(stop.number, what), _SAID if yes else _NOT_SAID)

    def hear(self, stop: Stop, what: str, within_seconds: float) -> bool | None:
        """The others: what rank 0 answers; None where it answers nothing."""
        key = self._key(stop.number, what)
        return bool(self._store.get(key).decode() == _SAID) if self._wait([key], within_seconds) else None

    def _wait(self, keys: list[str], within_seconds: float) -> bool:
        if not keys:
            return True
        try:
            self._store.wait(keys, timedelta(seconds=max(within_seconds, 1e-3)))
        except RuntimeError:  # DistStoreError: a key isn't there, or the store is gone
            return False
        return True
