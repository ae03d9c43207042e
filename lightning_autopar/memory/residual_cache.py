"""The cache of residuals: one small JSON file for each module, precision and set of versions, in the user's cache folder.

What can't be read or written costs the run nothing. Knows nothing of how records are used.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import lightning
import torch

import lightning_autopar
from lightning_autopar.memory import cache_files
from lightning_autopar.memory.inventory import Inventory
from lightning_autopar.memory.module_hash import module_hash
from lightning_autopar.memory.residuals import Record, Residuals, device_name
from lightning_autopar.memory.step_time_cache import load_step_times
from lightning_autopar.memory.step_times import StepTimes

_FORMAT = 1
#: Records of the same step and plan in a file, records in a file.
_MOST_ALIKE, _MOST_RECORDS = 3, 32


def cache_folder() -> Path | None:
    """Where residuals are kept; None if nothing is to be kept."""
    return cache_files.cache_folder("residuals")


def load_residuals(module: torch.nn.Module, precision: str, inventory: Inventory, *, rates: str = "data sheet") -> Residuals:
    """What is known of a module under this precision and these versions, on such devices.

    Args:
        module: as it is before a run, whole.
        precision: Lightning's name of it.
        inventory: the devices that records are looked up for.
        rates: by what steps are predicted; see :class:`lightning_autopar.memory.step_times.StepTimes`.
    """
    if cache_folder() is None:
        return Residuals()
    versions = (torch.__version__, lightning.__version__, lightning_autopar.__version__)
    parts = json.dumps([_FORMAT, module_hash(module), precision, *versions])
    key = hashlib.sha256(parts.encode()).hexdigest()[:32]
    devices = {device.id: device_name(device) for device in inventory.devices}
    times = StepTimes(records=load_step_times(inventory.host_threads), module=key, rates=rates)
    return Residuals(records=load_records(key), devices=devices, key=key, times=times)


def load_records(key: str) -> tuple[Record, ...]:
    """The records of a key, newest first; none where there are none, or where they can't be read."""
    folder = cache_folder()
    path = None if folder is None else folder / f"{key}.json"
    return cache_files.read_records(path, Record.from_dict, "what earlier runs were measured to take")


def add_record(key: str, record: Record) -> None:
    """Put a record in front of a key's; the oldest of the same step and plan, and the oldest of all, make room."""
    folder = cache_folder()
    if folder is None:
        return
    kept = [record]
    for other in load_records(key):
        if not other.same_as(record) or sum(each.same_as(record) for each in kept) < _MOST_ALIKE:
            kept.append(other)
    data = {"format": _FORMAT, "records": [each.to_dict() for each in kept[:_MOST_RECORDS]]}
    cache_files.write_json(folder / f"{key}.json", data)
