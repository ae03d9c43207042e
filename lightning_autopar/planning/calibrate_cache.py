"""The cache of calibrations: one small JSON file for each machine and set of versions. It measures nothing, and imports no torch.

A file that can't be read is left out with a warning, one that can't be written costs a run nothing.
"""

from __future__ import annotations

import logging
from pathlib import Path

from lightning_autopar.memory.cache_files import cache_folder, read_json, write_json
from lightning_autopar.memory.identity import machine_identity, machine_key
from lightning_autopar.memory.inventory import Inventory
from lightning_autopar.planning.calibrate_curves import Calibration

log = logging.getLogger(__name__)

_KIND = "rates"


def cache_file(inventory: Inventory) -> Path | None:
    """Where this machine's rates are kept; None where nothing is to be kept."""
    folder = cache_folder(_KIND)
    return None if folder is None else folder / f"{machine_key(inventory.host_threads)}.json"


def load_calibration(inventory: Inventory) -> Calibration:
    """What was measured on this machine with these versions; nothing where that is nothing, or can't be read."""
    path = cache_file(inventory)
    try:
        data = None if path is None else read_json(path)
        if data is None:
            return Calibration()
        if not isinstance(data, dict):
            raise ValueError("it holds no object")
        return Calibration.from_dict(data.get("calibration"))
    except (OSError, ValueError, RecursionError) as error:
        log.warning("autopar: this machine's measured rates are left out: %s can't be read (%s)", path, error)
        return Calibration()


def keep_calibration(inventory: Inventory, calibration: Calibration) -> None:
    """Replace this machine's file."""
    path = cache_file(inventory)
    if path is not None:
        write_json(path, {"machine": machine_identity(inventory.host_threads), "calibration": calibration.to_dict()})
