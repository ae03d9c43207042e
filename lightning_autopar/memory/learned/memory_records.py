"""The file of records of earlier runs' memory: one JSON file for each module, precision and set of versions, in the user's cache folder.

A module is identified by its structure and code, not by its weights. A failed read or write costs a run nothing. Knows nothing of how
records are used.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_autopar import _version
from lightning_autopar._lightning import pl
from lightning_autopar._root import LIGHTNING
from lightning_autopar.devices.inventory import Inventory
from lightning_autopar.memory.learned import cache_files
from lightning_autopar.memory.learned.corrections import Corrections, RunRecord, device_name
from lightning_autopar.memory.learned.step_times import StepTimes, load_step_times

_FOREIGN = ("torch.", *LIGHTNING, "builtins")


def module_hash(module: nn.Module) -> str:
    """A digest of names, classes, shapes and dtypes of all parts, and of the source of the module's class and of each part's ``forward``.

    Two modules with the same digest take the same memory for the same batch, unless something outside of them makes a difference.

    Args:
        module: as it is before a run, whole.
    """
    digest = hashlib.sha256()
    for line in _lines(module):
        digest.update(line.encode(errors="backslashreplace"))
        digest.update(b"\0")
    return digest.hexdigest()


def _lines(module: nn.Module) -> Iterator[str]:
    classes: dict[type, None] = {}
    for name, part in module.named_modules():
        classes[type(part)] = None
        yield f"{name}: {type(part).__module__}.{type(part).__qualname__}"
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield f"{name}: {_shape(parameter)} {parameter.dtype} {parameter.requires_grad}"
    for name, buffer in module.named_buffers(remove_duplicate=False):
        yield f"{name}: {_shape(buffer)} {buffer.dtype}"
    for base in type(module).__mro__:
        if not f"{base.__module__}.".startswith(_FOREIGN):
            yield _source(base)
    for each in classes:
        yield _source(getattr(each, "forward", None))


def _shape(tensor: torch.Tensor) -> Any:
    """Its shape; None for what gets its shape in the first step."""
    return None if is_lazy(tensor) else tuple(tensor.shape)


def _source(code: Any) -> str:
    """The source's text; empty where there is none, as for code typed into an interpreter."""
    try:
        return inspect.getsource(code)
    except (OSError, TypeError, IndentationError):
        return ""


_FORMAT = 1
#: The most records of the same step and plan in a file, and the most records in a file.
_MOST_ALIKE, _MOST_RECORDS = 3, 32


def cache_folder() -> Path | None:
    """Where residuals are kept; None if nothing is to be kept."""
    return cache_files.cache_folder("residuals")


def load_residuals(module: torch.nn.Module, precision: str, inventory: Inventory, *, rates: str = "data sheet") -> Corrections:
    """What is known of a module at this precision and with these versions, on such devices.

    Args:
        inventory: the devices that records are looked up for.
        rates: those that predict steps; see :class:`lightning_autopar.memory.learned.step_times.StepTimes`.
    """
    if cache_folder() is None:
        return Corrections()
    versions = (torch.__version__, pl.__version__, _version.__version__)
    parts = json.dumps([_FORMAT, module_hash(module), precision, *versions])
    key = hashlib.sha256(parts.encode()).hexdigest()[:32]
    devices = {device.id: device_name(device) for device in inventory.devices}
    times = StepTimes(records=load_step_times(inventory.host_threads), module=key, rates=rates)
    return Corrections(records=load_records(key), devices=devices, key=key, times=times)


def load_records(key: str) -> tuple[RunRecord, ...]:
    """The records of a key, newest first; none where there are none, or where they can't be read."""
    folder = cache_folder()
    path = None if folder is None else folder / f"{key}.json"
    return cache_files.read_records(path, RunRecord.from_dict, "what earlier runs were measured to take")


def add_record(key: str, record: RunRecord) -> None:
    """Add a record at the front of a key's; the oldest of the same step and plan, and the oldest of all, are dropped."""
    folder = cache_folder()
    if folder is None:
        return
    kept = [record]
    for other in load_records(key):
        if not other.same_as(record) or sum(each.same_as(record) for each in kept) < _MOST_ALIKE:
            kept.append(other)
    data = {"format": _FORMAT, "records": [asdict(each) for each in kept[:_MOST_RECORDS]]}
    cache_files.write_json(folder / f"{key}.json", data)
