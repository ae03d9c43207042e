"""CheckpointMigrate: makes a run movable and lets it survive its workers, by snapshots that the run's agent asks for.

It only says how; the agent (``strategies/elastic/agent.py``) does it. No ``from __future__ import annotations`` here: jsonargparse reads
the annotations as objects.
"""

from pathlib import Path

from lightning_autopar._lightning import Callback
from lightning_autopar.strategies.elastic.snapshot_schedule import SnapshotSettings
from lightning_autopar.text import is_number


class CheckpointMigrate(Callback):
    """Saves the run between batches, so that it can go on under any plan, and after a failure goes on from there. With it, ``fit`` under
    autopar trains in worker processes under every plan. A worker that dies, runs out of memory or hangs costs the work since the last
    snapshot; SIGTERM saves on disk before the process leaves; the next start of the same script goes on from there. Snapshots lie in memory
    where they fit. The run is the same as without: no sample is left out or seen twice.

    Args:
        snapshot_seconds: From one snapshot to the next. By default as often as ``overhead`` allows for the time that they take.
        overhead: The share of the time that snapshots may take, more than 0 and at most 0.5.
        folder: Where snapshots go that don't fit into memory or must survive the machine. By default ".autopar" in the trainer's
            ``default_root_dir``.
        hang_seconds: When no batch has begun for so long, workers count as hung, are ended, and the run goes on from its last snapshot.
            Give more than the longest time between two batches.
        failures: So many failures at the same step end the run with the exception of the last one.

    Raises:
        ValueError: if an argument isn't allowed, with the value, the bound and the remedy.
    """

    def __init__(
        self,
        snapshot_seconds: float | None = None,
        overhead: float = 0.01,
        folder: str | Path | None = None,
        hang_seconds: float = 600.0,
        failures: int = 3,
    ) -> None:
        if snapshot_seconds is not None and not (is_number(snapshot_seconds) and snapshot_seconds > 0):
            raise ValueError(f"snapshot_seconds={snapshot_seconds!r} must be more than 0; leave it out for as often as overhead allows")
        if not (is_number(overhead) and 0 < overhead <= 0.5):
            raise ValueError(f"overhead={overhead!r} must be a share of more than 0 and at most 0.5, such as 0.01")
        if folder is not None and not isinstance(folder, (str, Path)):
            raise ValueError(f"folder={folder!r} must be a folder's path; leave it out for '.autopar' in default_root_dir")
        if not (is_number(hang_seconds) and hang_seconds > 0):
            raise ValueError(f"hang_seconds={hang_seconds!r} must be more than 0; give some minutes, or float('inf') for never")
        if isinstance(failures, bool) or not isinstance(failures, int) or failures < 1:
            raise ValueError(f"failures={failures!r} must be a whole number of at least 1; 1 ends the run at the first failure")
        self.autopar_moving = SnapshotSettings(
            snapshot_seconds=snapshot_seconds,
            overhead=overhead,
            folder=None if folder is None else Path(folder),
            hang_seconds=hang_seconds,
            failures=failures,
        )
