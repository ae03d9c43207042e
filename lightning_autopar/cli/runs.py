"""The commands about runs: ``status`` for all of them; ``yield``, ``pause``, ``resume`` and ``cancel`` for the user's own.

Imports neither torch nor Lightning.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_autopar.cli.device_users import DeviceUser, users_of
from lightning_autopar.cli.spinner import progress
from lightning_autopar.devices import nvml
from lightning_autopar.sharing.process_ids import is_stopped
from lightning_autopar.sharing.runs.folders import Leftover, leftovers, remove, user_name
from lightning_autopar.sharing.runs.requests import ask, cancel, everyones_runs, is_here
from lightning_autopar.sharing.runs.status import Ask, Request, RunStatus
from lightning_autopar.text import format_bytes, format_length, format_seconds, printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from lightning_autopar.devices.inventory import Device

_DONE, _NO_ANSWER = 0, 1
_ASKS: dict[str, Ask] = {"yield": "yield", "pause": "park", "resume": "resume"}
_STATUS_EXAMPLES = """\
examples:
  lightning-autopar status
  lightning-autopar status --watch                      again every 2 s, until Ctrl-C
  lightning-autopar status --json                       for a program to read
  lightning-autopar status --watch 10 --json            a line of JSON every 10 s

exit codes: 0 shown, even if there are no runs, 2 the options don't go together
"""
_YIELD_EXAMPLES = """\
examples:
  lightning-autopar yield train-gpt-3f2a                move off its devices, or wait where there are no others
  lightning-autopar yield train                         the beginning of a name is enough if one run has it
  lightning-autopar yield 12345                         a pid, as nvidia-smi shows it
  lightning-autopar yield train --device GPU-7c1e9b04   off this device only, by its UUID or the beginning of it
  lightning-autopar yield train --wait 30               and wait for the run's answer

exit codes: 0 the run was asked (with --wait: has answered), 1 no answer came, 2 it can't be asked: there is no such run, it is another
user's, or it isn't elastic
"""
_PAUSE_EXAMPLES = """\
examples:
  lightning-autopar pause train-gpt-3f2a                save, give all devices back, and wait until it is resumed
  lightning-autopar pause train --wait 30               and wait for the run's answer

exit codes: the same as of yield
"""
_RESUME_EXAMPLES = """\
examples:
  lightning-autopar resume train-gpt-3f2a               go on as soon as there is room, at the step where it was paused
  lightning-autopar resume train --wait 30              and wait for the run's answer

exit codes: the same as of yield
"""
_CLEAN_EXAMPLES = """\
examples:
  lightning-autopar clean                               remove the files that killed runs of yours have left
  lightning-autopar clean --snapshots                   and the snapshots from which their next start would go on

Nothing of a run that still lives is removed. lightning-autopar status lists what killed runs have left.

exit codes: 0 all of it is removed, 1 something couldn't be removed
"""
_CANCEL_EXAMPLES = """\
examples:
  lightning-autopar cancel train-gpt-3f2a               end it, as Ctrl-C in its terminal does; queued ones, too
  lightning-autopar cancel train --wait 60              and wait for its end

exit codes: 0 the run was told (with --wait: has ended), 1 it hasn't ended in that time, 2 it can't be told: there is no such run, it is
another user's, or torchrun or Slurm has to end it
"""


def add_run_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``status``, ``yield``, ``pause``, ``resume``, ``cancel`` and ``clean`` to the command line's commands."""
    status = _add(commands, "status", "list all runs on this host, of all users: what they do, where, and why", _STATUS_EXAMPLES)
    status.add_argument("--json", action="store_true", help="print JSON instead of a table; with --watch a line at each look")
    status.add_argument(
        "--watch",
        metavar="SECONDS",
        nargs="?",
        type=float,
        const=WATCH_SECONDS,
        help=f"show it again every so many seconds ({WATCH_SECONDS:g} unless given), until Ctrl-C",
    )
    move = _add(commands, "yield", "ask one of your elastic runs to move off its devices now, without losing a step", _YIELD_EXAMPLES)
    move.add_argument("--device", metavar="UUID", help="leave this device only, which lightning-autopar status names")
    pause = _add(commands, "pause", "ask one of your elastic runs to save, give its devices back and wait to be resumed", _PAUSE_EXAMPLES)
    resume = _add(
        commands, "resume", "let one of your elastic runs go on after pause, and use all devices again after yield", _RESUME_EXAMPLES
    )
    end = _add(commands, "cancel", "end one of your runs, as Ctrl-C in its terminal does", _CANCEL_EXAMPLES)
    clean = _add(commands, "clean", "remove what killed runs of yours have left in memory and on disk", _CLEAN_EXAMPLES)
    clean.add_argument("--snapshots", action="store_true", help="also the snapshots from which their next start would go on")
    for command in (move, pause, resume, end):
        what = "end" if command is end else "answer"
        command.add_argument("run", metavar="RUN", help="its name, the beginning of it, or a pid")
        command.add_argument("--wait", metavar="SECONDS", type=float, help=f"how long to wait for the run's {what}")
        command.add_argument("--json", action="store_true", help="print JSON instead of a sentence")


def _clean(*, snapshots: bool) -> int:
    """``lightning-autopar clean``; returns the exit code."""
    code, now = _DONE, time.time()
    for left in leftovers():
        if left.goes_on and not snapshots:
            print(f"kept {left.path}: {left_words(left, now)}; --snapshots removes it")
        elif remove(left):
            print(f"removed {left.path}: {left_words(left, now)}")
        else:
            print(f"could not remove {left.path}")
            code = _NO_ANSWER
    return code


def _add(commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, what: str, examples: str) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=what, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter)


def run_command(options: argparse.Namespace) -> int:
    """Do one of these commands; returns the exit code.

    Raises:
        ValueError: if it can't be done, with the reason.
    """
    if options.command == "status":
        return show_status(as_json=options.json, watch_seconds=options.watch)
    if options.command == "clean":
        return _clean(snapshots=options.snapshots)
    if options.command == "cancel":
        return _cancel(options.run, options.wait, as_json=options.json)
    return _ask(_ASKS[options.command], options.run, getattr(options, "device", None), options.wait, as_json=options.json)


def _ask(what: Ask, run: str, device: str | None, wait_seconds: float | None, *, as_json: bool) -> int:
    with progress() as show:
        if wait_seconds:
            show(f"waiting for the answer of {run}")
        asked = ask(run, Request(ask=what, device=device, by=f"{user_name()} (command line)"), wait_seconds=wait_seconds)
    if as_json:
        words = {"run": asked.run_id, "device": asked.request.device, "answered": asked.answered, "ended": asked.ended}
        print(json.dumps({**words, "message": str(asked)}, indent=2))
    else:
        print(asked)
    return _NO_ANSWER if wait_seconds and asked.answered is None else _DONE


def _cancel(run: str, wait_seconds: float | None, *, as_json: bool) -> int:
    with progress() as show:
        if wait_seconds:
            show(f"waiting for the end of {run}")
        told = cancel(run, wait_seconds=wait_seconds)
    if as_json:
        print(json.dumps({"run": told.run_id, "signal": told.signal, "ended": told.ended, "message": str(told)}, indent=2))
    else:
        print(told)
    return _NO_ANSWER if told.ended is False else _DONE


#: A run updates its status every few seconds; if it is silent for longer, it is in a long step, hangs, or was stopped.
_SILENT_SECONDS = 60.0
#: The characters shown of a GPU's or a MIG device's UUID.
_DEVICE_CHARACTERS = 12
#: Between two looks of --watch.
WATCH_SECONDS = 2.0
_LEAST_WATCH_SECONDS = 0.2
_STATE_STYLES = {"running": "green", "moving": "yellow", "queued": "cyan", "planning": "cyan", "parked": "magenta"}


@dataclass(frozen=True, kw_only=True)
class Box:
    """A host at a moment.

    Args:
        at: when, in seconds since the epoch.
        runs: everyone's, this user's first.
        devices: the GPUs that the driver shows, with who is on each.
        notes: what couldn't be read.
        left: what this user's killed runs have left.
    """

    at: float
    runs: tuple[RunStatus, ...]
    devices: tuple[tuple[Device, tuple[DeviceUser, ...]], ...]
    notes: tuple[str, ...]
    left: tuple[Leftover, ...] = ()

    def strangers(self) -> Iterator[tuple[Device, list[DeviceUser]]]:
        """The devices that have processes of no run, with these processes."""
        for device, users in self.devices:
            found = [user for user in users if user.run is None]
            if found:
                yield device, found

    def used_bytes(self, status: RunStatus, device: str) -> int | None:
        """The bytes of a device that a run takes: by the driver if it shows the run's processes, else by the run's own status."""
        users = next((users for each, users in self.devices if each.id == device), ())
        its = [user for user in users if user.process and (user.run, user.owner) == (status.run_id, status.user)]
        seen = [user.used_bytes for user in its if user.used_bytes is not None]
        return sum(seen) if seen else status.used_bytes.get(device)

    def to_dict(self) -> dict[str, Any]:
        """As ``--json`` prints it."""
        runs = []
        for status in self.runs:
            seen = {device: size for device in status.devices if (size := self.used_bytes(status, device)) is not None}
            words = {**status.to_dict(), "used_bytes": seen, "own": _is_own(status), "silent_seconds": max(0.0, self.at - status.shown_at)}
            runs.append(words)
        devices = [
            {
                "id": device.id,
                "name": device.name,
                "total_bytes": device.total_bytes,
                "free_bytes": device.free_bytes,
                "utilization": device.utilization,
                "error": device.error,
                "users": [asdict(user) for user in users],
            }
            for device, users in self.devices
        ]
        left = [{"path": str(each.path), "kind": each.kind, "bytes": each.size_bytes, "since": each.since} for each in self.left]
        return {"at": self.at, "runs": runs, "devices": devices, "notes": list(self.notes), "left": left}


def look() -> Box:
    """The host as it is now."""
    found = everyones_runs()
    devices: tuple[Device, ...] = ()
    notes: tuple[str, ...] = ()
    with contextlib.suppress(nvml.NvmlUnavailable):  # no GPUs, and so no strangers on them
        # All devices of the host, even those that this process may not use.
        devices, _, notes = nvml.read_devices(environment={})
        notes = () if not devices else notes
    seen = tuple((device, users_of(device, found)) for device in devices)
    return Box(at=time.time(), runs=tuple(found), devices=seen, notes=notes, left=leftovers())


def show_status(*, as_json: bool, watch_seconds: float | None) -> int:
    """``lightning-autopar status``; returns the exit code.

    Args:
        as_json: values instead of words.
        watch_seconds: show it again so often, until Ctrl-C; None: once.

    Raises:
        ValueError: if it can't be watched so.
    """
    if watch_seconds is not None and not _LEAST_WATCH_SECONDS <= watch_seconds < 86400:
        raise ValueError(f"--watch {watch_seconds:g} must be at least {_LEAST_WATCH_SECONDS:g} seconds")
    if watch_seconds is not None and not as_json and not sys.stdout.isatty():
        raise ValueError("--watch draws on a terminal, and standard output is none; add --json for a line of JSON at each look")
    try:
        if watch_seconds is None:
            if as_json:
                print(json.dumps(look().to_dict(), indent=2))
            else:
                _console().print(_page(look()))
        elif as_json:
            while True:
                print(json.dumps(look().to_dict()), flush=True)
                time.sleep(watch_seconds)
        else:
            _watch_page(watch_seconds)
        sys.stdout.flush()
    except KeyboardInterrupt:
        if watch_seconds is None:
            raise
    except BrokenPipeError:  # the reader has closed the pipe; Python would report that once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _watch_page(seconds: float) -> None:
    from rich.live import Live

    console = _console()
    with Live(console=console, auto_refresh=False, screen=False) as live:
        while True:
            live.update(_page(look(), every_seconds=seconds), refresh=True)
            time.sleep(seconds)


def _console() -> Console:
    from rich.console import Console

    return Console()


# -- for people ------------------------------------------------------------------------------------------------------------------------


def _page(box: Box, every_seconds: float | None = None) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    if every_seconds is not None:
        clock = time.strftime("%H:%M:%S", time.localtime(box.at))
        parts.append(Text(f"{clock}, every {every_seconds:g} s; Ctrl-C ends it", style="dim"))
    if not box.runs:
        parts.append(Text("No runs on this host."))
    parts.extend(_blocks(box))
    for device, strangers in box.strangers():
        used_bytes = device.total_bytes - device.free_bytes
        told = all(user.name is not None for user in strangers)  # in a container, even a run's own processes may be among these
        whose = "by no run" if told else "by no run, or by one that isn't visible here"
        parts.append(
            Text.assemble(
                (short_device(device.id), "bold"),
                f"  {printable(device.name)}, {format_bytes(used_bytes)} of {format_bytes(device.total_bytes)} used {whose}:",
            )
        )
        parts.extend(Text(f"  {user.line()}", no_wrap=True, overflow="ellipsis") for user in strangers)
    parts.extend(Text(line) for line in _left_lines(box))
    parts.extend(Text(printable(note), style="dim") for note in box.notes)
    return Group(*parts)


def _left_lines(box: Box) -> Iterator[str]:
    """What killed runs have left, and the command that removes it."""
    if box.left:
        yield f"Left by runs of yours that have ended ({format_bytes(sum(each.size_bytes for each in box.left))}):"
    for each in box.left:
        yield f"  {each.path}  {left_words(each, box.at)}"
    if box.left:
        yield "lightning-autopar clean removes what no run needs, and clean --snapshots all of it."


def left_words(left: Leftover, now: float) -> str:
    """What it is, how large, and how old."""
    what = "snapshots, from which the run's next start goes on" if left.goes_on else "files of its processes"
    return f"{what}: {format_bytes(left.size_bytes)}, {format_seconds(max(0.0, now - left.since))} old"


def _blocks(box: Box) -> Iterator[RenderableType]:
    """Each run in several lines."""
    from rich.padding import Padding
    from rich.text import Text

    for status in box.runs:
        yield Text.assemble(
            (status.run_id, "bold" if _is_own(status) else ""),
            f"  {status.user}  {_script(status)}  ",
            (status.state, _STATE_STYLES.get(status.state, "")),
            f" {_ago(box.at - status.since)}",
            f"  {status.plan}" if status.plan else "",
        )
        lines, used, last = [], _used(box, status), "wanted" if status.state == "queued" else "predicted"
        for device in _places(status):
            figures = ((used, "used"), (status.leased_bytes, "leased"), (status.predicted_bytes, last))
            sizes = ", ".join(f"{format_bytes(kind[device])} {word}" for kind, word in figures if device in kind)
            lines.append(f"{short_device(device)}  {sizes}")
        pace, ends = ("" if status.step_seconds is None else f"{status.step_seconds:.3g}"), _ends(status, box.at)
        words = [f"step {_steps(status)}" if _steps(status) else "", f"{pace} s/step" if pace else "", f"ends in {ends}" if ends else ""]
        lines.append(", ".join(filter(None, words)))
        lines.append(_why(status, box.at))
        for line in filter(None, lines):
            yield Padding(Text(line), (0, 0, 0, 2), expand=False)


def _places(status: RunStatus) -> Sequence[str]:
    """The devices that it is on, or waits for."""
    return status.devices or tuple(status.predicted_bytes)


def _used(box: Box, status: RunStatus) -> dict[str, int]:
    return {device: size for device in status.devices if (size := box.used_bytes(status, device)) is not None}


def _script(status: RunStatus) -> str:
    name = Path(status.script).name or status.script
    return name if status.task == "fit" else f"{name} ({status.task})"


def _steps(status: RunStatus) -> str:
    return "" if status.step is None else str(status.step) + ("" if status.steps is None else f"/{status.steps}")


def _ends(status: RunStatus, now: float) -> str:
    """In how long it is expected to end; empty if that is unknown or past."""
    return "" if status.ends_at is None or status.ends_at < now else _ago(status.ends_at - now)


def _why(status: RunStatus, now: float) -> str:
    """Why it is where it is, or what it waits for; and whether it is silent."""
    words: Iterable[str] = (status.waits_for if status.state == "queued" else "", status.reason)
    if is_here(status) and is_stopped(status.pid):
        words = (f"stopped; kill -CONT {status.pid} lets it go on", *words)
    elif now - status.shown_at > _SILENT_SECONDS:
        doing = "planning takes long" if status.state == "planning" else "in a long step"
        words = (f"silent for {_ago(now - status.shown_at)}: {doing}, or it hangs", *words)
    return "; ".join(filter(None, words))


def _is_own(status: RunStatus) -> bool:
    return status.user == user_name()


def short_device(device: str) -> str:
    """The part of a UUID that tells a host's devices apart, and that ``yield --device`` takes."""
    return device[:_DEVICE_CHARACTERS] if device.startswith(("GPU-", "MIG-")) else device


def _ago(seconds: float) -> str:
    return "now" if seconds < 1 else format_length(seconds)
