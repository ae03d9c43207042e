"""This user's runs on this host as other processes see them: ``runs()`` lists them, ``ask()`` and ``yield_run()`` ask them for something.

Nothing here waits for a run, which may be stopped or hang: a request is a file that lies there until it is taken. Needs the standard
library alone (and psutil, for workers and other users' processes), so that the command line starts at once. Knows no plan and no trainer.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_autopar.strategies.run_files import STATUS_FILE, Request, RunStatus
from lightning_autopar.strategies.run_folders import (
    is_abandoned,
    is_alive,
    is_own,
    read_json,
    remove_folder,
    run_homes,
    user_name,
    write_json,
)

log = logging.getLogger(__name__)

#: Between two looks for an answer.
_POLL_SECONDS = 0.02


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What came of a request.

    Args:
        run_id: which run was asked.
        request: as it was written.
        answered: the run's own words; None if none came, or nobody waited.
        waited_seconds: how long an answer was waited for; 0 where nobody wanted to wait.
        ended: whether the run ended meanwhile.
    """

    run_id: str
    request: Request
    answered: str | None = None
    waited_seconds: float = 0.0
    ended: bool = False

    def __str__(self) -> str:
        if self.answered is not None:
            return f"{self.run_id}: {self.answered}"
        if self.ended:
            return f"{self.run_id} ended before it answered"
        if self.waited_seconds:
            return (
                f"{self.run_id} hasn't answered within {self.waited_seconds:.3g} s; the request stays, and is taken as soon as the run "
                "looks (it may be stopped, or in a long step)"
            )
        what = self.request.ask + (f" {self.request.device}" if self.request.device else "")
        return f"{self.run_id} has been asked to {what}; it looks at its next boundary"


def runs() -> list[RunStatus]:
    """This user's runs on this host, by their names. The folders of dead ones are removed on the way."""
    return [status for _, status in _live()]


def ask(run: str | int, request: Request, *, wait_seconds: float | None = None) -> Asked:
    """Ask a run for something. It may be stopped or hang: only an answer is waited for, and only for so long.

    Args:
        run: its id, the beginning of it if no other run has it, or a pid: of the script or of one of its workers.
        request: what for. Its device may be the beginning of an id too.
        wait_seconds: how long to wait for an answer; by default not at all.

    Raises:
        ValueError: if it isn't known which run is meant, it is another user's, it has ended, or it isn't on that device.
    """
    if wait_seconds is not None and not 0 <= wait_seconds < math.inf:
        raise ValueError(f"an answer can't be waited for {wait_seconds} s; give a number of seconds from 0 on")
    folder, status = _find(str(run).strip())
    if status.state == "finished":
        raise ValueError(f"{status.run_id} has finished, and is only leaving; there is nothing to ask it for")
    request = replace(request, device=_device(status, request.device), id=f"{time.time_ns():020d}-{secrets.token_hex(4)}")
    words = {"ask": request.ask, "device": request.device, "at": request.at, "by": request.by}
    try:
        write_json(folder / f"request-{request.id}.json", words)
    except OSError as error:
        if not is_alive(folder):
            raise ValueError(f"{status.run_id} has just ended") from error
        raise ValueError(f"the request can't be written into {folder} ({error.strerror}); make room there, and ask again") from error
    asked = Asked(run_id=status.run_id, request=request)
    if not wait_seconds:
        return asked
    answer, until = folder / f"answer-{request.id}.json", time.monotonic() + wait_seconds
    while True:
        alive = is_alive(folder)
        with suppress(FileNotFoundError):
            answered = str(read_json(answer)["answered"])
            answer.unlink(missing_ok=True)
            return replace(asked, answered=answered)
        if not alive:
            return replace(asked, ended=True)
        if time.monotonic() >= until:
            return replace(asked, waited_seconds=wait_seconds)
        time.sleep(_POLL_SECONDS)  # another process's file: there is no event without inotify, which Python lacks


def yield_run(run: str | int, device: str | None = None, *, wait_seconds: float | None = None) -> Asked:
    """Ask a run of this user on this host to move off its devices now; the run decides where to, and loses no step.

    Args:
        run: its id (``"train-gpt-3f2a"``, as ``lightning-autopar status`` shows it), the beginning of it, or a pid.
        device: the id of the one device to leave; all that it holds by default.
        wait_seconds: how long to wait for the run's answer; by default not at all.

    Raises:
        ValueError: if it isn't known which run is meant, it is another user's, it has ended, or it isn't on that device.
    """
    return ask(run, Request(ask="yield", device=device), wait_seconds=wait_seconds)


def _live() -> list[tuple[Path, RunStatus]]:
    found = []
    for home in run_homes():
        root = home / f"autopar-runs-{os.geteuid()}"
        if not is_own(root):
            continue
        for folder in sorted(root.iterdir()):
            if folder.is_symlink() or not folder.is_dir():
                continue
            if is_abandoned(folder):
                remove_folder(folder)
            if folder.name.startswith(".") or not is_alive(folder):
                continue
            try:
                status = RunStatus.from_dict(read_json(folder / STATUS_FILE))
            except FileNotFoundError:  # it is leaving
                continue
            except (OSError, ValueError, RecursionError) as error:
                log.warning("autopar: a run is passed over: %s can't be read (%s)", folder / STATUS_FILE, error)
                continue
            if status.run_id == folder.name:
                found.append((folder, status))
    return sorted(found, key=lambda each: each[1].run_id)


def _find(text: str) -> tuple[Path, RunStatus]:
    live = _live()
    found = [each for each in live if each[1].run_id == text]
    if not found and text:
        found = [each for each in live if each[1].run_id.startswith(text) or str(each[1].pid) == text]
    if not found and text.isdecimal():
        pids = _ancestors(int(text))
        found = [each for each in live if each[1].pid in pids]
    if len(found) == 1:
        return found[0]
    known = ", ".join(f"{status.run_id} (pid {status.pid}, {status.state})" for _, status in (found or live))
    if found:
        raise ValueError(f"{text!r} may be any of the runs {known}; say more of its name")
    theirs = f"; runs of others ({', '.join(others)}) only they can ask" if (others := _others(text)) else ""
    raise ValueError((f"there is no run {text!r} of yours; there are: {known}" if live else "you have no run on this host") + theirs)


def _device(status: RunStatus, text: str | None) -> str | None:
    """The id that is meant; as it was given where the run holds none right now.

    Raises:
        ValueError: if the run isn't on it.
    """
    if text is None or text in status.devices or not status.devices:
        return text
    found = [device for device in status.devices if device.startswith(text)]
    if len(found) == 1:
        return found[0]
    problem = "may mean several devices" if found else "is no device"
    raise ValueError(f"{text!r} {problem} of {status.run_id}, which is on {', '.join(status.devices)}; give one of these")


def _ancestors(pid: int) -> set[int]:
    """The processes that a process comes from: ``nvidia-smi`` shows workers, and a run is known by its agent.

    Raises:
        ValueError: if the process is another user's.
    """
    import psutil

    try:
        process = psutil.Process(pid)
        uid = process.uids().effective
        if uid != os.geteuid():
            raise ValueError(f"the process {pid} is {user_name(uid)}'s, and only {user_name(uid)} can ask it for something")
        return {parent.pid for parent in process.parents()}
    except psutil.Error:
        return set()


def _others(text: str) -> list[str]:
    """Who else has runs here.

    Raises:
        ValueError: if a run of that name is seen to be theirs, which only root can see.
    """
    names = set()
    for home in run_homes():
        for root in home.glob("autopar-runs-*"):
            with suppress(OSError):
                owner = root.lstat().st_uid
                if owner == os.geteuid() or root.is_symlink():
                    continue
                name = user_name(owner)
                names.add(name)
                if text and any(entry.startswith(text) for entry in os.listdir(root)):
                    raise ValueError(f"the run {text!r} is {name}'s, and only {name} can ask it for something")
    return sorted(names)
