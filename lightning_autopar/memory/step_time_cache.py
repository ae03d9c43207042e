"""The cache of step times: one small JSON file for each machine and set of versions. Knows nothing of how records are used."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lightning_autopar.memory import cache_files
from lightning_autopar.memory.identity import machine_key
from lightning_autopar.memory.step_times import StepTime

_KIND = "step_times"
#: Records of a module, records in all.
_MOST_OF_ONE, _MOST = 16, 512


def load_step_times(host_threads: int) -> tuple[StepTime, ...]:
    """Every record of this machine and these versions, the newest first; none where they can't be read.

    Args:
        host_threads: the inventory's.
    """
    return cache_files.read_records(_path(host_threads), StepTime.from_dict, "how long earlier runs' steps took")


def add_step_time(host_threads: int, record: StepTime) -> None:
    """Put a record in front; the oldest of its module, and the oldest of all, make room."""
    path = _path(host_threads)
    if path is not None:
        kept = list(_bounded((record, *load_step_times(host_threads))))
        cache_files.write_json(path, {"records": [each.to_dict() for each in kept[:_MOST]]})


def _bounded(records: Iterable[StepTime]) -> Iterable[StepTime]:
    counts: dict[str, int] = {}
    for record in records:
        counts[record.module] = counts.get(record.module, 0) + 1
        if counts[record.module] <= _MOST_OF_ONE:
            yield record


def _path(host_threads: int) -> Path | None:
    folder = cache_files.cache_folder(_KIND)
    return None if folder is None else folder / f"{machine_key(host_threads)}.json"
