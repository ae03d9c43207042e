"""A snapshot's folder, and the files of old snapshots that new ones are written over. Imports neither torch nor what writes tensors, as
most runs ask only whether they begin with a snapshot.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

#: The folder beside snapshots whose files may be overwritten, by the first rank that takes them.
SPARE = "spare"
#: A snapshot's last file: the snapshot is complete once it exists.
REST = "rest.pkl"


def is_snapshot(path: Any) -> bool:
    """Whether this path is a folder that :func:`.snapshot.save_snapshot` wrote."""
    return path is not None and Path(str(path)).joinpath(REST).is_file()


def set_aside(folder: Path, spare: Path) -> None:
    """Remove a snapshot; its files may be overwritten from now on. Fewer files are kept if there are some already.

    Args:
        folder: the snapshot's, of which nobody reads any more.
        spare: on the same file system.
    """
    spare.mkdir(exist_ok=True)
    for old in spare.iterdir():
        old.unlink(missing_ok=True)  # a rank may just take it
    for file in folder.rglob("*.distcp"):
        file.replace(spare / f"{folder.name}-{file.name}")


def spare_bytes(spare: Path) -> int:
    """The bytes of the files that may be overwritten."""
    total = 0
    with suppress(FileNotFoundError):  # no such folder, or a rank takes one
        for file in spare.iterdir():
            total += file.stat().st_size
    return total


def provide(spare: Path, sizes_bytes: list[int]) -> None:
    """Make files to be overwritten, with their pages allocated.

    Args:
        spare: their folder, on a file system that can allocate.
        sizes_bytes: one for each file.

    Raises:
        OSError: if there is no room.
    """
    spare.mkdir(exist_ok=True)
    for number, size_bytes in enumerate(sizes_bytes):
        partial = spare.with_name(f"{spare.name}.part")
        try:
            with partial.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, max(1, size_bytes))
            partial.replace(spare / f"new-{number}")
        finally:
            partial.unlink(missing_ok=True)
