"""Who uses a device: processes, by user and command, and runs. It reads the host's process table, without a driver and without torch."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from lightning_autopar.devices.inventory import Device, DeviceProcess
from lightning_autopar.sharing.process_ids import inner_pid, is_drivers
from lightning_autopar.sharing.runs.folders import user_name
from lightning_autopar.sharing.runs.requests import is_here
from lightning_autopar.sharing.runs.status import RunStatus
from lightning_autopar.text import format_bytes, printable

#: Characters of a command line.
_MOST_COMMAND = 1000


@dataclass(frozen=True, kw_only=True)
class DeviceUser:
    """A process on a device, or a run that says that it holds it.

    Args:
        pid: as the driver counts; of a run without processes there, its agent's.
        name: whose it is; None where that can't be told.
        used_bytes: what it holds of the device; None where unknown.
        run: the id of the run that it belongs to.
        owner: whose run that is.
        leased_bytes: what that run was promised of the device, or is predicted to take if nothing was promised.
        process: whether it is a process that the driver sees, and not only a run's claim.
    """

    pid: int
    name: str | None
    command: str | None
    used_bytes: int | None
    run: str | None = None
    owner: str | None = None
    leased_bytes: int | None = None
    process: bool = True

    def line(self) -> str:
        """For people: process, size, and who."""
        size = "? MiB" if self.used_bytes is None else format_bytes(self.used_bytes)
        if self.used_bytes is None and self.leased_bytes is not None:
            size = f"{format_bytes(self.leased_bytes)} claimed"
        whose = "your" if self.owner == user_name() else f"{self.owner}'s"
        run = "" if self.run is None else f"[{whose} run {self.run}]"
        who = "  ".join(words for words in (self.name or "not told", run, self.command) if words)
        return f"{self.pid:>8}  {size:>9}  {who}"


def users_of(device: Device, runs: Sequence[RunStatus]) -> tuple[DeviceUser, ...]:
    """Who is on a device, the largest first.

    Args:
        runs: everyone's, on this host.
    """
    found = [_user(process, device, runs) for process in device.processes]
    seen = {(user.run, user.owner) for user in found}  # two users' runs may have one name
    for run in runs:
        if device.id in run.devices and (run.run_id, run.user) not in seen:
            found.append(
                DeviceUser(
                    pid=run.pid,
                    name=run.user,
                    command=None,
                    used_bytes=run.used_bytes.get(device.id),
                    run=run.run_id,
                    owner=run.user,
                    leased_bytes=_claimed(run, device.id),
                    process=False,
                )
            )
    return tuple(sorted(found, key=lambda user: -(user.used_bytes or user.leased_bytes or 0)))


def _user(process: DeviceProcess, device: Device, runs: Sequence[RunStatus]) -> DeviceUser:
    name = command = None
    run: RunStatus | None = None
    if is_drivers(process.pid):
        with suppress(psutil.Error):  # it has ended, or is hidden
            there = psutil.Process(process.pid)
            name = there.username()
            ancestors = {process.pid, *(parent.pid for parent in there.parents())}
            run = next((each for each in runs if is_here(each) and each.pid in ancestors), None)
            if run is None:  # a container's run, which shows its process id there
                inner = {inner_pid(each) for each in ancestors}
                there_too = [each for each in runs if each.user == name and device.id in each.devices and not is_here(each)]
                run = next((each for each in there_too if each.pid in inner), None)
            command = printable(short_command(there.cmdline()) or there.name(), _MOST_COMMAND)
    return DeviceUser(
        pid=process.pid,
        name=name,
        command=command,
        used_bytes=process.used_bytes,
        run=None if run is None else run.run_id,
        owner=None if run is None else run.user,
        leased_bytes=None if run is None else _claimed(run, device.id),
    )


def _claimed(run: RunStatus, device: str) -> int | None:
    return run.leased_bytes.get(device, run.predicted_bytes.get(device))


def short_command(words: Sequence[str]) -> str:
    """A command line, programs without their folders: ``/usr/bin/python -u /home/me/train.py`` → ``python -u train.py``."""
    return shlex.join(Path(word).name if index == 0 or word.startswith("/") else word for index, word in enumerate(words) if word)
