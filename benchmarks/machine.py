"""What a benchmark's figures were made on, and with."""

from __future__ import annotations

import datetime
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

_PACKAGES = ("torch", "lightning", "lightning-autopar", "transformers", "peft", "deepspeed", "accelerate")


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def machine() -> dict[str, Any]:
    """Date, processor, memory, GPUs and versions, as every result file names them."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": names[0] if names else platform.machine(),
            "cores": os.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
            "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        },
        "versions": {"python": platform.python_version()} | {name: version(name) for name in _PACKAGES if _installed(name)},
    }
