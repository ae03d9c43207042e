"""Which checkpoint files a run has written since its latest snapshot, so that a run that goes back to the snapshot removes them first.

Else ``ModelCheckpoint``, whose state is the snapshot's, would find files that it doesn't know: it would give the same checkpoint another
name ("-v1"), and leave the file behind. Knows paths; no callback, no snapshot's content.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from lightning.fabric.utilities.cloud_io import get_filesystem

_SUFFIX = ".since"


class Journal:
    """The files written since one snapshot.

    Args:
        beside: the snapshot's folder, or another path that stands for the run's begin; the journal lies beside it.
    """

    def __init__(self, beside: Path) -> None:
        self._beside = beside
        self._path = beside.with_name(beside.name + _SUFFIX)

    def note(self, file: str) -> None:
        """A file is about to be written. One that is there already is passed over: it will be written again."""
        if get_filesystem(file).exists(file):
            return
        with self._path.open("a", encoding="utf-8") as journal:
            journal.write(json.dumps(file) + "\n")

    def undo(self, remove: Callable[[str], None]) -> None:
        """Remove what was written since, after later snapshots as well; on the process that writes, before anything is written."""
        for path in self._journals():
            if path.name >= self._path.name:
                for line in path.read_text(encoding="utf-8").splitlines():
                    remove(json.loads(line))
                path.unlink()

    def clear(self) -> None:
        """Forget the journals of snapshots that aren't there any more."""
        for path in self._journals():
            if not path.with_name(path.name.removesuffix(_SUFFIX)).exists() and path != self._path:
                path.unlink()

    def _journals(self) -> Iterator[Path]:
        yield from sorted(self._beside.parent.glob(f"{self._beside.name[:1]}*{_SUFFIX}"))
