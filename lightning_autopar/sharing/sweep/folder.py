"""A sweep's folder: finished runs, the devices that each run may use, and the logs. One sweep at a time uses it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_autopar.sharing.live_files import let_go, own
from lightning_autopar.sharing.runs.folders import write_json
from lightning_autopar.sharing.sweep.runs_file import ListedRun, ListedSweep

_DONE = "done.json"


class SweepFolder:
    """The folder ``sweep-<name>``. Made by :func:`sweep_folder`, which locks it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: dict[str, dict[str, Any]] = _read(path / _DONE).get("runs", {})

    def log(self, run: ListedRun) -> Path:
        """Its log's file."""
        return self.path / f"{run.name}.log"

    def devices(self, run: ListedRun) -> Path:
        """The file of the devices that it may use."""
        return self._in("devices", f"{run.name}.txt")

    def summary(self, run: ListedRun) -> Path:
        """What ``lightning-autopar run --json`` writes of it."""
        return self._in("results", f"{run.name}.json")

    def plan(self, run: ListedRun) -> Path:
        """What ``lightning-autopar plan --json`` says of it, while it is read, and where it can't be."""
        return self._in("plans", f"{run.name}.json")

    def is_done(self, run: ListedRun) -> dict[str, Any] | None:
        """What came of it, if this very run has ended well before."""
        entry = self.done.get(run.name)
        return entry if isinstance(entry, dict) and entry.get("exit_code") == 0 and entry.get("key") == key_of(run) else None

    def note(self, run: ListedRun, entry: Mapping[str, Any]) -> None:
        """Keep what came of a run."""
        self.done[run.name] = {"key": key_of(run), "command": run.command, **entry}
        write_json(self.path / _DONE, {"runs": self.done})

    def _in(self, folder: str, name: str) -> Path:
        (self.path / folder).mkdir(exist_ok=True)
        return self.path / folder / name


@contextlib.contextmanager
def sweep_folder(sweep: ListedSweep, parent: str | Path = ".") -> Iterator[SweepFolder]:
    """While open, the sweep's folder, made if need be, belongs to this process alone.

    Raises:
        ValueError: if another process has it, or it can't be made.
    """
    path = Path(parent).absolute() / f"sweep-{sweep.name}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = own(os.open(path / "lock", os.O_CREAT | os.O_RDWR, 0o600))
    except OSError as error:
        raise ValueError(f"the sweep's folder {str(path)!r} can't be made ({error.strerror}); start it where you may write") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"the sweep {sweep.name!r} runs already, in {str(path)!r}; give this one another name (--name)") from error
        yield SweepFolder(path)
    finally:
        let_go(lock)


def key_of(run: ListedRun) -> str:
    """A run's identity: its command, its folder, and its variables."""
    identity = json.dumps([run.words, os.path.abspath(run.cwd), sorted(run.env.items())])
    return hashlib.sha256(identity.encode()).hexdigest()[:32]


def _read(path: Path) -> dict[str, Any]:
    """A file's contents; empty if it is missing or malformed: then the work is done again."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}
