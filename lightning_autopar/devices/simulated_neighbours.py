"""A file that simulates other users of this host's CPU devices. Knows no plan and no run.

A CPU device is a budget that nobody else can take from. Tests and demonstrations need somebody who does: the environment variable
``AUTOPAR_NEIGHBOURS`` names a JSON file, which may appear, change and disappear at any moment::

    {"cpu:0": {"taken": "1GiB", "slowdown": 1.5, "gone": false, "error": "XID 79"}}

To change it, write another file in the same folder and rename that over it, so that nobody reads half of it (:func:`write_neighbours` does
so).
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_autopar.devices.inventory import Inventory
from lightning_autopar.text import format_bytes, parse_memory

#: The environment variable that names the file.
NEIGHBOURS_VARIABLE = "AUTOPAR_NEIGHBOURS"
_KEYS = ("taken", "slowdown", "gone", "error")


@dataclass(frozen=True, kw_only=True)
class Neighbour:
    """What others do on one CPU device.

    Args:
        taken_bytes: memory that they hold.
        slowdown: how many times longer work takes than on an idle device, at least 1.
        error: what is wrong with it; None for nothing.
    """

    taken_bytes: int = 0
    slowdown: float = 1.0
    gone: bool = False
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The values in the file."""
        return {"taken": self.taken_bytes, "slowdown": self.slowdown, "gone": self.gone, "error": self.error}


def read_neighbours() -> dict[str, Neighbour]:
    """The file's neighbours, by device id; empty if the variable isn't set or the file doesn't exist.

    Raises:
        ValueError: if the file can't be read or isn't valid, with the variable, the file and what is wrong.
    """
    path = os.environ.get(NEIGHBOURS_VARIABLE, "").strip()
    if not path:
        return {}
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the environment variable {NEIGHBOURS_VARIABLE} names {path!r}, which can't be read: {error}") from error
    try:
        return _parse(text)
    except ValueError as error:
        raise ValueError(
            f"the environment variable {NEIGHBOURS_VARIABLE} names {path!r}, which is malformed: {error}; write for example "
            '{"cpu:0": {"taken": "1GiB", "slowdown": 1.5}}, to another name first, and rename it'
        ) from error


def write_neighbours(path: str | Path, neighbours: Mapping[str, Neighbour]) -> None:
    """Replace the file in one piece, so that whoever reads it sees the old or the new one."""
    path = Path(path)
    words = {device: neighbour.to_dict() for device, neighbour in neighbours.items()}
    number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with open(number, "w", encoding="utf-8") as file:
        json.dump(words, file)
    os.replace(name, path)


def with_neighbours(inventory: Inventory, neighbours: Mapping[str, Neighbour]) -> Inventory:
    """The inventory that the neighbours leave. Only CPU devices have neighbours; other ids are ignored. The host's free memory stays as
    measured: a neighbour in a file takes nothing of it.
    """
    devices, notes = [], []
    for device in inventory.devices:
        by = neighbours.get(device.id) if device.kind == "cpu" else None
        if by is None:
            devices.append(device)
            continue
        if by.gone:
            notes.append(f"{device.id} is gone, as {NEIGHBOURS_VARIABLE} says")
            continue
        if by.taken_bytes:
            notes.append(f"of {device.id} {format_bytes(min(by.taken_bytes, device.free_bytes))} are taken, as {NEIGHBOURS_VARIABLE} says")
        free_bytes = max(0, device.free_bytes - by.taken_bytes)
        devices.append(replace(device, free_bytes=free_bytes, slowdown=device.slowdown * by.slowdown, error=by.error or device.error))
    return replace(inventory.with_devices(devices), notes=(*inventory.notes, *notes))


def _parse(text: str) -> dict[str, Neighbour]:
    """The file's text.

    Raises:
        ValueError: with what is wrong, without saying where the text is from.
    """
    words = json.loads(text)
    if not isinstance(words, dict):
        raise ValueError(f"it holds {text.strip()[:40]} where an object of devices belongs")
    return {device: _neighbour(device, settings) for device, settings in words.items()}


def _neighbour(device: str, settings: object) -> Neighbour:
    if not isinstance(settings, dict):
        raise ValueError(f"{device!r} is {settings!r}, not an object with any of {', '.join(_KEYS)}")
    if unknown := sorted(set(settings) - set(_KEYS)):
        raise ValueError(f"{device!r} has the unknown key {unknown[0]!r}; there are {', '.join(_KEYS)}")
    taken, slowdown = settings.get("taken", 0), settings.get("slowdown", 1.0)
    gone, error = settings.get("gone", False), settings.get("error")
    try:
        taken_bytes = 0 if taken in (0, None) and not isinstance(taken, bool) else parse_memory(taken)
    except ValueError as wrong:
        raise ValueError(f"'taken' of {device!r}: {wrong}") from wrong
    number = isinstance(slowdown, (int, float)) and not isinstance(slowdown, bool)
    if not number or not 1 <= slowdown < math.inf:
        raise ValueError(f"'slowdown' of {device!r} is {slowdown!r}, but must be a number of at least 1, such as 1.5")
    if not isinstance(gone, bool):
        raise ValueError(f"'gone' of {device!r} is {gone!r}, but must be true or false")
    if error is not None and not isinstance(error, str):
        raise ValueError(f"'error' of {device!r} is {error!r}, but must be a text or null")
    return Neighbour(taken_bytes=taken_bytes, slowdown=float(slowdown), gone=gone, error=error or None)
