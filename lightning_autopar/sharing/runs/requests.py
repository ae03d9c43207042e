"""The runs of this host as other processes see them: listed (``runs()``, ``everyones_runs()``), asked (``ask()``, ``yield_run()``) and
ended (``cancel()``).

Nothing here waits for a run, which may be stopped or hang: a request is a file that lies there until the run takes it. ``cancel()`` sends a
signal, as Ctrl-C in the run's terminal would, and first checks that the number still means the process that the run has shown. Needs the
standard library alone (and psutil, for workers and other users' processes), so that the command line starts at once. Knows no plan and no
trainer.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_autopar.sharing.process_ids import ignores, is_stopped, lives, owner_uid, pid_namespace, started_ticks
from lightning_autopar.sharing.runs.folders import (
    folders_in,
    is_abandoned,
    is_alive,
    read_json,
    remove_folder,
    roots,
    user_name,
    write_json,
)
from lightning_autopar.sharing.runs.status import STATUS_FILE, Request, RunStatus

log = logging.getLogger(__name__)

#: Seconds between two looks for an answer.
_POLL_SECONDS = 0.02
#: Another user's run in a container that has shown nothing for so long counts as dead: its process can't be seen from here.
_FORGOTTEN_SECONDS = 3600.0


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What came of a request.

    Args:
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
                f"{self.run_id} hasn't answered within {self.waited_seconds:.3g} s; the request stays, and the run answers when "
                "it looks next (it may be stopped, or in a long step)"
            )
        what = self.request.ask + (f" {self.request.device}" if self.request.device else "")
        return f"{self.run_id} has been asked to {what}; it answers between two batches"


def runs() -> list[RunStatus]:
    """This user's runs on this host, by their names. The folders of dead ones are removed on the way."""
    return [status for _, status in _live()]


def everyones_runs() -> list[RunStatus]:
    """All users' runs on this host: this user's first, then by owner, each by their names.

    What another user shows is believed if the file system and the kernel confirm it: the files' owner, and a live process of that user that
    began when the run says.
    """
    return [*runs(), *(status for _, status in sorted((_theirs()), key=lambda each: (each[1].user, each[1].run_id)))]


def is_here(status: RunStatus) -> bool:
    """Whether its process id is of this process's namespace, and not of a container's."""
    return bool(status.namespace) and status.namespace == pid_namespace()


def ask(run: str | int, request: Request, *, wait_seconds: float | None = None) -> Asked:
    """Ask a run for something. It may be stopped or hang: only an answer is waited for, and only for so long.

    Args:
        run: its id, a beginning of it that no other run's id has, or a pid: of the script or of one of its workers.
        request: what for. Its device may be the beginning of an id too.
        wait_seconds: how long to wait for an answer; by default not at all.

    Raises:
        ValueError: if it isn't known which run is meant, it is another user's, it has ended, it can't do that, or isn't on that device.
    """
    if wait_seconds is not None and not 0 <= wait_seconds < math.inf:
        raise ValueError(f"the seconds to wait for an answer must be at least 0, but are {wait_seconds}")
    folder, status = find(str(run).strip())
    if (why := _why_not(status)) is not None:
        raise ValueError(f"{status.run_id} {why}")
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
        time.sleep(_POLL_SECONDS)  # another process's file: without inotify, which Python lacks, there is no event


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


def find(text: str) -> tuple[Path, RunStatus]:
    """Find the folder and the status of the meant run of this user.

    Raises:
        ValueError: if it isn't known which run is meant, it is another user's, or it has ended.
    """
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
    others = [status for _, status in _theirs()]
    if text and (meant := [status for status in others if status.run_id.startswith(text)]):
        whose = meant[0].user
        raise ValueError(f"the run {meant[0].run_id} is {whose}'s, and only {whose} can ask it for something")
    names = ", ".join(sorted({status.user for status in others}))
    theirs = f"; runs of others ({names}) only they can ask" if names else ""
    ended = " (one that has ended isn't there any more)" if "-" in text else ""
    there = f"there is no run {text!r} of yours{ended}; there are: {known}" if live else f"you have no run on this host{ended}"
    raise ValueError(there + theirs)


def _live() -> list[tuple[Path, RunStatus]]:
    """This user's runs, by their names."""
    found = []
    for root, uid in roots():
        if uid != os.geteuid():
            continue
        for folder in folders_in(root):
            if is_abandoned(folder):
                remove_folder(folder)
            if folder.name.startswith(".") or not is_alive(folder):
                continue
            try:
                status = _read(folder, uid)
            except FileNotFoundError:  # the run is ending
                continue
            except (OSError, ValueError, RecursionError) as error:
                log.warning("autopar: a run isn't shown, as %s can't be read (%s)", folder / STATUS_FILE, error)
                continue
            if status.run_id == folder.name:
                found.append((folder, status))
    return sorted(found, key=lambda each: each[1].run_id)


def _theirs() -> list[tuple[Path, RunStatus]]:
    """Other users' runs, if they can be believed; unreadable ones are skipped."""
    found = []
    for root, uid in roots():
        if uid == os.geteuid():
            continue
        for folder in folders_in(root):
            with suppress(OSError, ValueError, RecursionError):
                status = _read(folder, uid)
                if status.run_id == folder.name and _is_believed(status, uid):
                    found.append((folder, status))
    return found


def _read(folder: Path, uid: int) -> RunStatus:
    """The status that a run shows, with its owner by the file system."""
    return replace(RunStatus.from_dict(read_json(folder / STATUS_FILE, uid)), user=user_name(uid))


def _is_believed(status: RunStatus, uid: int) -> bool:
    """Whether another user's run is alive, and its process that user's."""
    if not is_here(status):
        return time.time() - status.shown_at < _FORGOTTEN_SECONDS
    return lives(status.pid, status.started_ticks) and owner_uid(status.pid) in (None, uid)


def _why_not(status: RunStatus) -> str | None:
    """Why a run can't be asked to move, park, go on or save itself; None where it can."""
    if status.state == "finished":
        return "has finished, and its process is about to end; it takes no requests any more"
    if status.state == "queued":
        return f"is queued, and holds no device; 'lightning-autopar cancel {status.run_id}' takes it out of the queue"
    if status.external:
        return "was started by torchrun or Slurm, which decide where its processes are; ask there"
    if not status.elastic:
        return (
            f"isn't elastic, and keeps its devices until its end; 'lightning-autopar cancel {status.run_id}' ends it now; add "
            "CheckpointMigrate() to the Trainer's callbacks, so that its next start can be asked"
        )
    return None


def _device(status: RunStatus, text: str | None) -> str | None:
    """The meant device's id; as it was given if the run holds none right now.

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
    """A process and its ancestors: ``nvidia-smi`` shows workers, and a run is known by its agent.

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


@dataclass(frozen=True, kw_only=True)
class Cancelled:
    """What came of it.

    Args:
        run_id: which run was told to end.
        signal: by which signal, such as ``"SIGINT"``.
        outlook: what becomes of the run, in words.
        ended: whether it has ended; None where nobody waited.
        waited_seconds: how long its end was waited for.
    """

    run_id: str
    signal: str
    outlook: str
    ended: bool | None = None
    waited_seconds: float = 0.0

    def __str__(self) -> str:
        if self.ended:
            return f"{self.run_id} has ended by {self.signal}; {self.outlook}"
        told = f"{self.run_id} has been told to end by {self.signal}; {self.outlook}"
        return told if self.ended is None else f"{told}; after {self.waited_seconds:.3g} s it is still there"


def cancel(run: str | int, *, wait_seconds: float | None = None) -> Cancelled:
    """End a queued, planning or running run of this user: by SIGINT, or by SIGTERM if its process ignores that.

    Args:
        run: its id, a beginning of it that no other run's id has, or a pid: of the script or of one of its workers.
        wait_seconds: how long to wait for its end; by default not at all.

    Raises:
        ValueError: if it isn't known which run is meant, it is another user's, it has ended, or can't be ended from here.
    """
    if wait_seconds is not None and not 0 <= wait_seconds < math.inf:
        raise ValueError(f"the seconds to wait for the run's end must be at least 0, but are {wait_seconds}")
    folder, status = find(str(run).strip())
    if status.external:
        raise ValueError(
            f"{status.run_id} was started by torchrun or Slurm, which would start it anew or leave its other processes behind; end it "
            "there (Ctrl-C, or scancel)"
        )
    if not is_here(status):
        raise ValueError(f"{status.run_id} runs in another container; cancel it there")
    number = _tell(status)
    stopped = f"; its process is stopped, and ends once you continue it (kill -CONT {status.pid})" if is_stopped(status.pid) else ""
    cancelled = Cancelled(run_id=status.run_id, signal=number.name, outlook=_outlook(status, number) + stopped)
    if not wait_seconds:
        return cancelled
    until = time.monotonic() + wait_seconds
    while (alive := is_alive(folder)) and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)  # another process's lock: its release gives no event
    return replace(cancelled, ended=not alive, waited_seconds=wait_seconds)


def _tell(status: RunStatus) -> signal.Signals:
    """Send the signal that ends the run in order, only to its process; returns the signal.

    Raises:
        ValueError: if the process has ended, or ignores what would end it.
    """
    gone = f"{status.run_id} has just ended"
    try:
        process = os.pidfd_open(status.pid)
    except ProcessLookupError:
        raise ValueError(gone) from None
    try:
        # From here on, the id can't be another process's: the descriptor belongs to the process that had it, even if it is dead.
        if started_ticks(status.pid) != status.started_ticks:
            raise ValueError(gone)
        for number in (signal.SIGINT, signal.SIGTERM):
            if not ignores(status.pid, number):
                signal.pidfd_send_signal(process, number)
                return number
    except ProcessLookupError:
        raise ValueError(gone) from None
    finally:
        os.close(process)
    raise ValueError(f"{status.run_id} ignores SIGINT and SIGTERM; only 'kill -KILL {status.pid}' ends it, without its last checkpoint")


def _outlook(status: RunStatus, number: signal.Signals) -> str:
    """What becomes of the run and of what it wrote, in words."""
    if status.state == "queued":
        return "it leaves the queue; it hadn't begun to train"
    if status.state == "planning":
        return "it hadn't begun to train"
    if not status.elastic:
        return "Lightning ends it as on Ctrl-C, and its checkpoints stay"
    if number is signal.SIGTERM:
        return "it saves a snapshot first, and the next start of the same script goes on from there"
    return "its checkpoints stay, and its snapshots are deleted"
