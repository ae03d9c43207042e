"""A run's status and its requests, as small files in a folder of its user's. All may read the status; the rest is its user's alone.

The run's main process opens the folder, writes its status there and takes requests; other processes list runs, and those of the same user
send requests (:mod:`.requests`). Needs the standard library alone. Knows no plan, no trainer and no device: it passes on words and numbers.
"""

from __future__ import annotations

import logging
import math
import os
import re
import secrets
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from lightning_autopar.sharing.live_files import let_go
from lightning_autopar.sharing.process_ids import pid_namespace, started_ticks
from lightning_autopar.sharing.runs.folders import (
    PUBLIC,
    RUNS_VARIABLE,
    make_folder,
    own_root,
    read_json,
    remove_folder,
    run_homes,
    take_away,
    user_name,
    write_json,
)
from lightning_autopar.text import printable

log = logging.getLogger(__name__)

RunState = Literal["planning", "queued", "running", "moving", "parked", "finished"]
Ask = Literal["yield", "park", "resume", "snapshot"]

#: The shortest time between two writes of a status, unless more than its figures changed.
SHOW_SECONDS = 0.5
#: Its file's name in the run's folder.
STATUS_FILE = "status.json"
#: How many unread answers are kept.
_MOST_ANSWERS = 64
_LONGEST_STEM = 24
#: The fields that may change with each step; a change of another field is written at once.
_FIGURES = {"used_bytes", "step", "steps", "step_seconds", "since", "shown_at", "ends_at", "waits_for"}
#: Later than any run ends (the year 5138), and still valid for a clock's functions.
_LAST_SECONDS = 1e11


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """What a run shows of itself.

    Args:
        run_id: its name on this host, such as ``"train-gpt-3f2a"``.
        pid: the script's process, as its namespace counts.
        plan: what runs, in words.
        devices: ids of the devices that it holds.
        leased_bytes: for each of them, what it was promised.
        used_bytes: and what it takes; without those that weren't measured.
        predicted_bytes: and what its plan was predicted to take; of a queued run, what it waits for.
        step: optimizer steps done; None before there is a figure.
        steps: steps of the whole run; None where unknown.
        step_seconds: measured lately; None before there is a figure.
        generation: how many sets of workers came before this one.
        since: when the state began, in seconds since the epoch.
        reason: why it is in this state on these devices.
        shown_at: when this was written; set by :meth:`RunFiles.show`. Long ago means a long step, or that the run hangs or was stopped.
        ends_at: when it is expected to end, in seconds since the epoch; None where unknown.
        waits_for: of a queued run, what for and behind whom.
        priority: in the queue, larger first.
        elastic: whether it can move, park and go on.
        external: whether torchrun or Slurm started its processes, and decides where they are.
        task: what the trainer was called for: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        started_ticks: when its process began, in the kernel's ticks; 0 where unknown.
        namespace: which processes' numbers ``pid`` is one of; empty where unknown.
    """

    run_id: str
    pid: int
    user: str
    script: str
    state: RunState
    plan: str = ""
    devices: tuple[str, ...] = ()
    leased_bytes: Mapping[str, int] = field(default_factory=dict)
    used_bytes: Mapping[str, int] = field(default_factory=dict)
    step: int | None = None
    steps: int | None = None
    step_seconds: float | None = None
    generation: int = 0
    since: float
    reason: str = ""
    shown_at: float = 0.0
    predicted_bytes: Mapping[str, int] = field(default_factory=dict)
    ends_at: float | None = None
    waits_for: str = ""
    priority: int = 0
    elastic: bool = False
    external: bool = False
    task: str = "fit"
    started_ticks: int = 0
    namespace: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Values for JSON; a figure that is infinite or not a number is null."""
        found = {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in vars(self).items()}
        sizes = {name: dict(vars(self)[name]) for name in ("leased_bytes", "used_bytes", "predicted_bytes")}
        return {**found, "devices": list(self.devices), **sizes}

    @classmethod
    def from_dict(cls, data: Any) -> RunStatus:
        """The inverse of :meth:`to_dict`. Control characters are removed, as the text may be another user's.

        Raises:
            ValueError: if it is no status.
        """
        try:
            if data["state"] not in get_args(RunState):
                raise ValueError(f"{data['state']!r} is no state of a run")
            texts = ("run_id", "user", "script", "plan", "reason", "waits_for", "namespace", "task")
            found: dict[str, Any] = {name: printable(str(data[name])) for name in texts}
            found.update({name: _sizes(data[name]) for name in ("leased_bytes", "used_bytes", "predicted_bytes")})
            found.update({name: bool(data[name]) for name in ("elastic", "external")})
            found.update({name: _whole(data[name]) for name in ("pid", "generation", "priority", "started_ticks")})
            found.update({name: None if data[name] is None else _whole(data[name]) for name in ("step", "steps")})
            return cls(
                **found,
                state=data["state"],
                since=_moment(data["since"]),
                shown_at=_moment(data["shown_at"]),
                devices=tuple(printable(str(device)) for device in data["devices"]),
                step_seconds=None if data["step_seconds"] is None else _moment(data["step_seconds"]),
                ends_at=None if data["ends_at"] is None else _moment(data["ends_at"]),
            )
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"it is no run's status ({type(error).__name__}: {error})") from error


def _sizes(data: Any) -> dict[str, int]:
    return {printable(str(device)): _whole(size) for device, size in data.items()}


def _whole(data: Any) -> int:
    number = int(data)
    if abs(number) >= 2**63:
        raise ValueError(f"a number of {number.bit_length()} bits is none of a run's")
    return number


def _moment(data: Any) -> float:
    seconds = float(data)
    if not 0 <= seconds <= _LAST_SECONDS:
        raise ValueError(f"{data!r} is no number of seconds")
    return seconds


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a run is asked for.

    Args:
        ask: ``"yield"`` to move off now, ``"park"`` to give all devices back and wait, ``"resume"`` to end that, ``"snapshot"`` to write
            the training state now.
        device: ``"yield"`` only: the id of the one device to leave; None for all of them.
        at: when, in seconds since the epoch.
        id: its file's; set by :func:`ask`. Empty for what didn't come by a file, such as a signal.

    Raises:
        ValueError: if there is no such request.
    """

    ask: Ask
    device: str | None = None
    at: float = field(default_factory=time.time)
    by: str = field(default_factory=user_name)
    id: str = ""

    def __post_init__(self) -> None:
        if self.ask not in get_args(Ask):
            raise ValueError(f"a run can't be asked for {self.ask!r}; ask for one of {', '.join(get_args(Ask))}")
        if self.device is not None and self.ask != "yield":
            raise ValueError(f"the request {self.ask!r} takes no device; only 'yield' does")
        if self.device is not None and (not isinstance(self.device, str) or not self.device):
            raise ValueError(f"the device {self.device!r} is no device's id; lightning-autopar status shows a run's")


class RunFiles:
    """A run's folder, for its agent: shows the status and takes requests. Made by :func:`open_run`.

    If writing fails, the run only logs a warning: its status must not end it.
    """

    def __init__(self, folder: Path, lock: int, status: RunStatus) -> None:
        self.folder = folder
        self._lock = lock
        self._status = status
        self._pid = os.getpid()
        self._shown = time.monotonic()
        self._warned = False

    @property
    def run_id(self) -> str:
        """The run's name on this host."""
        return self._status.run_id

    @property
    def status(self) -> RunStatus:
        """What :meth:`show` was given last, to be replaced in parts: ``show(replace(files.status, state="running"))``."""
        return self._status

    def show(self, status: RunStatus) -> None:
        """Show this from now on; cheap enough for every batch, and to be called at least every few seconds.

        Args:
            status: of this run. Where only figures changed it is written once in :data:`SHOW_SECONDS`.
        """
        assert os.getpid() == self._pid, "a run's status is its agent's to show"
        assert (status.run_id, status.pid) == (self._status.run_id, self._status.pid), "a run shows its own status"
        now = time.monotonic()
        soon = now - self._shown < SHOW_SECONDS and _but_figures(status) == _but_figures(self._status)
        self._status = replace(status, shown_at=time.time())
        if soon:
            return
        self._shown = now
        try:
            if not os.fstat(self._lock).st_nlink:
                self._make_again()
            write_json(self.folder / STATUS_FILE, self._status.to_dict(), PUBLIC)
        except OSError as error:
            if not self._warned:
                log.warning("autopar: what this run does can't be shown in %s any more (%s); the run goes on", self.folder, error)
            self._warned = True

    def requests(self) -> list[Request]:
        """The waiting requests, in order; each is returned once. Files that hold no request are removed with a warning."""
        assert os.getpid() == self._pid, "a run's requests are its agent's to take"
        taken = []
        try:
            names = sorted(name for name in os.listdir(self.folder) if name.startswith("request-"))
        except OSError:  # the folder was removed; the next status makes it again
            return []
        for name in names:
            path = self.folder / name
            try:
                request = _read_request(path)
            except (OSError, ValueError, RecursionError) as error:
                request = None
                log.warning("autopar: this run ignores a request, as %s can't be read (%s)", path, error)
            if take_away(path) and request is not None:
                taken.append(request)
        return taken

    def answer(self, request: Request, words: str) -> None:
        """Say what is done about a request, for whoever waits.

        Args:
            request: as :meth:`requests` gave it; one that came by no file has nobody waiting.
            words: a sentence, with the reason.
        """
        if not request.id:
            return
        with suppress(OSError):
            write_json(self.folder / f"answer-{request.id}.json", {"answered": words})
            for path in sorted(self.folder.glob("answer-*.json"))[:-_MOST_ANSWERS]:
                path.unlink(missing_ok=True)

    def _make_again(self) -> None:
        """The folder was removed under the run: systemd's ``RemoveIPC`` does so when its user logs out, and cleaners of old files do."""
        remove_folder(self.folder)
        lock = make_folder(self.folder, {STATUS_FILE: self._status.to_dict()})
        let_go(self._lock)
        self._lock = lock

    def _leave(self) -> None:
        """Remove the folder; does nothing in a forked child, which doesn't own it."""
        if os.getpid() == self._pid:
            remove_folder(self.folder)
            let_go(self._lock)


@contextmanager
def open_run(script: str | Path | None = None) -> Iterator[RunFiles]:
    """A folder for this process's run, with the status ``"planning"``; removed on leaving.

    Args:
        script: the run's name comes from it; by default the one that this process runs.

    Raises:
        ValueError: if no folder can be made anywhere.
    """
    script = str(sys.argv[0] if script is None else script)
    problems = []
    for home in run_homes():
        try:
            files = _open_in(own_root(home), script)
        except OSError as error:
            problems.append(f"{home}: {error.strerror or error}")
            continue
        try:
            yield files
        finally:
            files._leave()
        return
    raise ValueError(
        f"this run can't show itself on this host ({'; '.join(problems)}); set {RUNS_VARIABLE} to a folder of your own that exists"
    )


def _open_in(root: Path, script: str) -> RunFiles:
    while True:
        run_id = f"{_stem(script)}-{secrets.token_hex(2)}"
        now = time.time()
        status = RunStatus(
            run_id=run_id,
            pid=os.getpid(),
            user=user_name(),
            script=script,
            state="planning",
            since=now,
            shown_at=now,
            started_ticks=started_ticks(os.getpid()),
            namespace=pid_namespace(),
        )
        try:
            return RunFiles(root / run_id, make_folder(root / run_id, {STATUS_FILE: status.to_dict()}), status)
        except FileExistsError:  # one in 65536 pairs of runs of a script draws the same
            continue


def _stem(script: str) -> str:
    """The usable part of a script's name: ``"train_GPT (2).py"`` → ``"train-gpt-2"``."""
    path = Path(script)
    name = path.parent.name if path.stem == "__main__" else "" if script == "-c" else path.stem
    return re.sub(r"[^a-z0-9]+", "-", name.lower())[:_LONGEST_STEM].strip("-") or "run"


def _but_figures(status: RunStatus) -> dict[str, Any]:
    return {name: value for name, value in vars(status).items() if name not in _FIGURES}


def _read_request(path: Path) -> Request:
    data = read_json(path)
    try:
        identity = path.name.removeprefix("request-").removesuffix(".json")
        return Request(ask=data["ask"], device=data["device"], at=float(data["at"]), by=str(data["by"]), id=identity)
    except (KeyError, TypeError) as error:
        raise ValueError(f"it is no request ({type(error).__name__}: {error})") from error
