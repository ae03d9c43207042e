"""When an elastic run saves a snapshot, and whether one was saved: the agent's side. The snapshot store knows where, a rank knows how."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightning_autopar._lightning import rank_zero_warn
from lightning_autopar.strategies.elastic.generation_progress import RunningGeneration
from lightning_autopar.strategies.elastic.snapshot_store import Snapshot, SnapshotStore
from lightning_autopar.strategies.processes.agent_protocol import Ask, GenerationFiles

#: How fast a snapshot is written and read, as long as none was measured: pickled, through shared memory.
COPY_BYTES_PER_SECOND = 1e9
#: Seconds that writing a snapshot takes, however few its bytes.
SAVE_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True)
class SnapshotSettings:
    """How a run is saved and moved.

    Args:
        snapshot_seconds: from one snapshot to the next; None: as often as ``overhead`` allows for the time that they take.
        overhead: the share of the time that snapshots may take.
        folder: where snapshots go that don't fit into memory, or must survive a restart of the machine; None: a folder in the trainer's.
        hang_seconds: without a batch for so long, workers count as hung.
        failures: so many failures at the same step end the run.
    """

    snapshot_seconds: float | None = None
    overhead: float = 0.01
    folder: Path | None = None
    hang_seconds: float = 600.0
    failures: int = 3

    def home(self, root: str) -> Path:
        """The folder on disk: the user's, or one in the trainer's folder."""
        return self.folder or Path(root) / ".autopar"


def save_seconds(state_bytes: int) -> float:
    """The predicted seconds to write a snapshot, as long as none was measured."""
    return SAVE_SECONDS + state_bytes / COPY_BYTES_PER_SECOND


class Saver:
    """Asks a generation's ranks for snapshots, one at a time, and keeps the latest.

    Args:
        state_bytes: about what one takes.
        first_at_once: whether a run that has none makes one before its second batch: then a failure needn't begin the run anew, with a
            second version of its logs. Else the first one keeps within ``overhead`` as well.
        say: says why one couldn't be written.
    """

    def __init__(
        self,
        snapshots: SnapshotStore,
        moving: SnapshotSettings,
        state_bytes: int,
        *,
        first_at_once: bool = True,
        say: Callable[[str], None] = rank_zero_warn,
    ) -> None:
        self._snapshots, self._moving, self._state_bytes = snapshots, moving, state_bytes
        self._first_at_once, self._say = first_at_once, say
        self.latest: Snapshot | None = snapshots.latest()
        self._pending: Path | None = None
        self._saved_at = time.monotonic()
        self._save_seconds: float | None = None
        self._periodic = False
        self._began, self._spent = time.monotonic(), 0.0

    @property
    def waits(self) -> bool:
        """Whether a snapshot is being made."""
        return self._pending is not None

    def begin(self) -> None:
        """Another generation begins; the time to the next snapshot counts from here."""
        at_once = self.latest is None and self._first_at_once
        self._pending, self._saved_at = None, float("-inf") if at_once else time.monotonic()

    def soon(self) -> None:
        """Have the next snapshot made at once."""
        self._saved_at = float("-inf")

    def look_back(self) -> Snapshot | None:
        """The latest undamaged snapshot, to go on from after something went wrong."""
        self.latest = self._snapshots.latest()
        return self.latest

    def watch(self, files: GenerationFiles) -> None:
        """Keep a snapshot that is complete, or have one made when it is due."""
        if self._pending is not None:
            self.take_in(files)
        elif files.rendezvous.progress().boundaries >= 1 and self._is_due(time.monotonic()):
            try:
                self.ask(files, "snapshot")
                self._periodic = True
            except OSError as error:  # no room for the request, where the workers' files are: training goes on
                self._say(f"autopar: a snapshot couldn't be asked for: {error}")
                self.give_up(files)
                self._saved_at = time.monotonic()

    def _is_due(self, now: float) -> bool:
        """Whether a snapshot is due that nobody has asked for. By default each snapshot, and all together, keep within ``overhead`` of the
        time; the first may exceed it, and the later ones make up for that.
        """
        overhead = self._moving.overhead
        since = now - self._saved_at
        if self._moving.snapshot_seconds is not None or since == float("inf"):
            return since > (self._moving.snapshot_seconds or 0.0)
        takes = save_seconds(self._state_bytes) if self._save_seconds is None else self._save_seconds
        return min(since, now - self._began - self._spent / overhead) > takes / overhead

    def provide(self, ranks: int) -> None:
        """Prepare for a snapshot of so many ranks, which will be asked for soon."""
        self._snapshots.provide(ranks)

    def ask(self, files: GenerationFiles, what: Ask, *, on_disk: bool = False) -> None:
        """Ask the ranks for a snapshot."""
        assert self._pending is None, "one at a time"
        self._pending = self._snapshots.target(on_disk=on_disk)
        files.request(self._pending)
        files.rendezvous.ask(what)

    def take_in(self, files: GenerationFiles) -> bool | None:
        """Whether the snapshot that was asked for has been written; None while it is being made."""
        assert self._pending is not None, "one was asked for"
        done = files.rendezvous.answered()
        if done is None:
            return None
        target, self._pending, self._saved_at = self._pending, None, time.monotonic()
        pace = files.rendezvous.progress()
        if self._periodic:
            self._spent += pace.save_seconds or 0.0
        self._periodic = False
        if not done:
            self._say(f"autopar: a snapshot couldn't be written to {target}: {files.refusal()}")
            self._snapshots.discard(target)
            return False
        self._save_seconds = pace.save_seconds
        self.latest = self._snapshots.keep(target, pace.step)
        return True

    def give_up(self, files: GenerationFiles) -> None:
        """The ranks have ended: remove their unfinished snapshot."""
        files.rendezvous.withdraw()
        if self._pending is not None:
            self._snapshots.discard(self._pending)
            self._pending = None

    def pause(self, running: RunningGeneration, noted: list[type[BaseException]], *, within_seconds: float, on_disk: bool = False) -> bool:
        """Have the workers leave with a snapshot; False where they ended otherwise, or it couldn't be written anywhere."""
        until = time.monotonic() + within_seconds
        while self._pending is not None and not running.generation.gone and time.monotonic() < until:
            running.round(noted)
            self.take_in(running.elastic)
        if running.generation.gone or self._pending is not None:
            return False
        self.ask(running.elastic, "pause", on_disk=on_disk)
        while time.monotonic() < until:
            running.round(noted, timeout_seconds=0.005)
            if self._pending is not None and self.take_in(running.elastic) is False:
                if on_disk:
                    return False
                on_disk = True
                self.ask(running.elastic, "pause", on_disk=True)
            if running.generation.gone:
                return running.generation.paused and self._pending is None
        return False
