"""Allowed devices: which of a host's devices this run may use, as a file says that somebody else writes. Knows no plan and no run.

The environment variable ``AUTOPAR_DEVICES_FILE`` names the file: ids of devices, one a line; empty lines and what follows a ``#`` are
passed over. ``lightning-autopar sweep`` writes one for each run. It is read anew whenever devices are probed, so that who started an
elastic run can give it devices and take them away. Whoever changes it renames a new one over it (:func:`write_allowed` does so).
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from lightning_autopar.devices.inventory import Inventory

log = logging.getLogger(__name__)

#: The environment variable that names the file.
ALLOWED_VARIABLE = "AUTOPAR_DEVICES_FILE"
_REMEDY = "write one device id a line, as lightning-autopar devices --json has them"
#: A larger file isn't a list of devices.
_MOST_CHARACTERS = 1_000_000

#: The last contents of each file in this process, and the warnings that were given.
_last: dict[str, frozenset[str]] = {}
_told: set[str] = set()


def with_allowed(inventory: Inventory) -> Inventory:
    """The inventory without the devices that this process may not use. Devices that can only be planned for aren't checked. After the file
    was valid once, it may be missing, malformed or name no device that is here: then its last valid contents count, with one warning, or no
    device is left.

    Raises:
        ValueError: if the file can't be read, or names no device that is here, and was never valid before.
    """
    path = os.environ.get(ALLOWED_VARIABLE, "").strip()
    if not path or all(device.kind == "catalogue" for device in inventory.devices):
        return inventory
    before = path in _last
    allowed = _allowed(path)
    kept = tuple(device for device in inventory.devices if device.id in allowed)
    if not kept and not before:
        del _last[path]
        there = ", ".join(device.id for device in inventory.devices)
        named = ", ".join(sorted(allowed))
        raise ValueError(f"the file that {ALLOWED_VARIABLE} names allows {named}, but there are {there}; {_REMEDY}")
    return inventory.with_devices(kept)


def _allowed(path: str) -> frozenset[str]:
    """The file's ids, or its last valid ones.

    Raises:
        ValueError: if it isn't valid, and never was.
    """
    try:
        found = _read(Path(path))
        if not found and path not in _last:
            raise ValueError(f"it names no device; {_REMEDY}")
    except (OSError, ValueError) as error:
        what = error.strerror if isinstance(error, OSError) and error.strerror else error
        message = f"the environment variable {ALLOWED_VARIABLE} names {path!r}, which can't be taken: {what}"
        if path not in _last:
            raise ValueError(message if isinstance(error, ValueError) else f"{message}; {_REMEDY}") from error
        if message not in _told:
            _told.add(message)
            log.warning("autopar: %s; the devices that it named before stay", message)
        return _last[path]
    _last[path] = found
    return found


def write_allowed(path: str | Path, devices: Iterable[str]) -> None:
    """Replace the file at once, so that a reader sees either the old or the new one."""
    path = Path(path)
    number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with open(number, "w", encoding="utf-8") as file:
        file.writelines(f"{device}\n" for device in devices)
    os.replace(name, path)


def _read(path: Path) -> frozenset[str]:
    """The ids that a file names.

    Raises:
        OSError: if it can't be read.
        ValueError: if it isn't one.
    """
    with open(path, encoding="utf-8") as file:
        words = file.read(_MOST_CHARACTERS + 1)
    if len(words) > _MOST_CHARACTERS or "\0" in words:
        raise ValueError(f"it is no list of devices; {_REMEDY}")
    lines = [line.partition("#")[0].strip() for line in words.splitlines()]
    if wrong := next((line for line in lines if len(line.split()) > 1), None):
        raise ValueError(f"the line {wrong!r} holds more than an id; {_REMEDY}")
    return frozenset(line for line in lines if line)
