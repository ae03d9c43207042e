"""The cache of residuals: one small JSON file for each module, precision and set of versions, in the user's cache folder.

Files are replaced as a whole, so that runs beside each other can't spoil one; of two that end together one may be forgotten. What can't be
read or written costs the run nothing. Knows nothing of how records are used.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning
import torch

import lightning_autopar
from lightning_autopar.memory.inventory import Inventory
from lightning_autopar.memory.module_hash import module_hash
from lightning_autopar.memory.residuals import Record, Residuals, device_name

log = logging.getLogger(__name__)

#: A folder to keep residuals in, or "off".
VARIABLE = "AUTOPAR_CACHE"
_OFF = ("off", "0", "no", "false")
_FORMAT = 1
#: Records of the same step and plan in a file, records in a file, files in the folder.
_MOST_ALIKE, _MOST_RECORDS, _MOST_FILES = 3, 32, 256
#: Larger files aren't ours.
_MOST_BYTES = 1 << 20


def cache_folder() -> Path | None:
    """Where residuals are kept: what AUTOPAR_CACHE says, or ``lightning_autopar`` in the user's cache folder; None if it says "off"."""
    asked = os.environ.get(VARIABLE, "").strip()
    if asked.lower() in _OFF:
        return None
    if asked:
        return Path(asked).expanduser() / "residuals"
    home = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(home) if os.path.isabs(home) else Path.home() / ".cache"  # a relative one is invalid by the XDG specification
    except RuntimeError:  # no home
        return None
    return base / "lightning_autopar" / "residuals"


def load_residuals(module: torch.nn.Module, precision: str, inventory: Inventory) -> Residuals:
    """What is known of a module under this precision and these versions, on such devices.

    Args:
        module: as it is before a run, whole.
        precision: Lightning's name of it.
        inventory: the devices that records are looked up for.
    """
    if cache_folder() is None:
        return Residuals()
    versions = (torch.__version__, lightning.__version__, lightning_autopar.__version__)
    parts = json.dumps([_FORMAT, module_hash(module), precision, *versions])
    key = hashlib.sha256(parts.encode()).hexdigest()[:32]
    devices = {device.id: device_name(device) for device in inventory.devices}
    return Residuals(records=load_records(key), devices=devices, key=key)


def load_records(key: str) -> tuple[Record, ...]:
    """The records of a key, newest first; none where there are none, or where they can't be read."""
    folder = cache_folder()
    path = None if folder is None else folder / f"{key}.json"
    try:
        if path is None or not path.exists():
            return ()
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES} bytes")
        data: Any = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or not isinstance(data.get("records"), list):
            raise ValueError("it holds no list of records")
        return tuple(Record.from_dict(each) for each in data["records"])
    except (OSError, ValueError, RecursionError) as error:
        log.warning("autopar: what earlier runs were measured to take is left out: %s can't be read (%s)", path, error)
        return ()


def add_record(key: str, record: Record) -> None:
    """Put a record in front of a key's; the oldest of the same step and plan, and the oldest of all, make room."""
    folder = cache_folder()
    if folder is None:
        return
    kept = [record]
    for other in load_records(key):
        if not other.same_as(record) or sum(each.same_as(record) for each in kept) < _MOST_ALIKE:
            kept.append(other)
    text = json.dumps({"format": _FORMAT, "records": [each.to_dict() for each in kept[:_MOST_RECORDS]]})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, prefix=f".{key}-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(name, folder / f"{key}.json")
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise
        _make_room(folder)
    except OSError:
        log.debug("what the run was measured to take can't be kept in %s", folder, exc_info=True)


def _make_room(folder: Path) -> None:
    """Remove the files that were written longest ago."""
    found = []
    for path in folder.glob("*.json"):
        with suppress(OSError):  # another run has removed it
            found.append((path.stat().st_mtime, path))
    for _, path in sorted(found)[:-_MOST_FILES]:
        path.unlink(missing_ok=True)
