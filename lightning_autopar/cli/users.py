"""Who is on a device: processes by user and command, and this user's own runs. Asks the host's process table, no driver and no torch."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from lightning_autopar.memory.driver_pids import is_drivers
from lightning_autopar.memory.inventory import Device, DeviceProcess
from lightning_autopar.strategies.run_files import RunStatus


@dataclass(frozen=True, kw_only=True)
class DeviceUser:
    """A process on a device, or a run that holds it by word alone.

    Args:
        pid: as the driver counts; of a run without processes there, its agent's.
        name: whose it is; None where that can't be told.
        command: what it runs; None where that can't be told.
        used_bytes: what it holds of the device; None where unknown.
        run: the id of this user's elastic run that it belongs to.
        leased_bytes: what that run has claimed of the device.
    """

    pid: int
    name: str | None
    command: str | None
    used_bytes: int | None
    run: str | None = None
    leased_bytes: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def users_of(device: Device, runs: Sequence[RunStatus]) -> tuple[DeviceUser, ...]:
    """Who is on a device, the largest first.

    Args:
        device: with its processes.
        runs: this user's, on this host.
    """
    found = [_user(process, device, runs) for process in device.processes]
    seen = {user.run for user in found}
    for run in runs:
        if device.id in run.devices and run.run_id not in seen:
            found.append(
                DeviceUser(
                    pid=run.pid,
                    name=run.user,
                    command=None,
                    used_bytes=run.used_bytes.get(device.id),
                    run=run.run_id,
                    leased_bytes=run.leased_bytes.get(device.id),
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
            run = next((each for each in runs if each.pid in ancestors), None)
            command = short_command(there.cmdline()) or there.name()
    return DeviceUser(
        pid=process.pid,
        name=name,
        command=command,
        used_bytes=process.used_bytes,
        run=None if run is None else run.run_id,
        leased_bytes=None if run is None else run.leased_bytes.get(device.id),
    )


def short_command(words: Sequence[str]) -> str:
    """A command line, programs without their folders: ``/usr/bin/python -u /home/me/train.py`` → ``python -u train.py``."""
    return shlex.join(Path(word).name if index == 0 or word.startswith("/") else word for index, word in enumerate(words) if word)
