"""``lightning-autopar doctor``: one file for a bug report, without the user's code, data, names or paths.

It takes what is on its list and nothing else: versions, figures of devices and leases, this package's settings, the last plan.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

from lightning_autopar._version import __version__
from lightning_autopar.memory.learned.cache_files import cache_folder, read_json

_EXAMPLES = """\
examples:
  lightning-autopar doctor                              write autopar-doctor.json
  lightning-autopar doctor report.json                  or another file
  lightning-autopar doctor -                            print it

Read it before you send it. It has the versions of Python and of the packages below, the devices' names and memory, how much runs have
leased, which AUTOPAR_* variables are set, and the last plan with its candidates' figures and what was found on its first batch. It has no
names or text of your modules, no data, no paths, users, hosts or other variables.

exit codes: 0 written, 2 it can't be
"""
_PACKAGES = (
    *("torch", "lightning", "pytorch-lightning", "transformers", "peft", "accelerate", "deepspeed", "bitsandbytes"),
    *("torchmetrics", "nvidia-ml-py", "jsonargparse", "numpy", "psutil", "rich", "cloudpickle"),
)
#: Variables of ours whose values are settings; of the others, which may hold paths or names, only whether they are set.
_PLAIN = ("AUTOPAR_WAIT", "AUTOPAR_PRIORITY", "AUTOPAR_QUANTUM", "AUTOPAR_EARLIER_RUNS", "LIGHTNING_AUTOPAR_AUTOLOAD")
_MOST_CHARACTERS = 40


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``doctor`` to the command line's commands."""
    command = commands.add_parser(
        "doctor",
        help="write one file for a bug report, without your code, data, names or paths",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("file", nargs="?", default="autopar-doctor.json", help="where to; - prints it (default: autopar-doctor.json)")


def write_report(file: str) -> int:
    """``lightning-autopar doctor``; returns the exit code.

    Raises:
        ValueError: if the file can't be written.
    """
    words = json.dumps(examined(), indent=2)
    if file == "-":
        print(words)
        return 0
    try:
        Path(file).write_text(words + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{file} can't be written: {error.strerror}; name another file, or - to print it") from error
    print(f"wrote {file}; read it before you send it")
    return 0


def examined() -> dict[str, Any]:
    """What the file says."""
    return {
        "lightning-autopar": __version__,
        "python": platform.python_version(),
        "system": {"name": platform.system(), "release": platform.release().partition("-")[0], "machine": platform.machine()},
        "packages": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "settings": {name: _setting(name) for name in sorted(os.environ) if name.startswith(("AUTOPAR_", "LIGHTNING_AUTOPAR_"))},
        "devices": _or_failure(_devices),
        "leases": _or_failure(_leases),
        "last_plan": _or_failure(_last_plan),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _setting(name: str) -> str:
    value = os.environ[name].strip()
    return value if (name in _PLAIN and len(value) <= _MOST_CHARACTERS) or value.lower() == "off" else "set"


def _or_failure(look: Any) -> Any:
    """What a look finds; the kind of error where it fails, whose words may hold a path. The rest of the file is worth having."""
    try:
        return look()
    except Exception as error:  # whatever is broken on this machine, the report names it
        return {"failed": type(error).__name__}


def _devices() -> dict[str, Any]:
    from lightning_autopar.cli.devices import accelerator_here
    from lightning_autopar.devices.discover import probe

    there = probe(None, accelerator=accelerator_here())
    return {
        "devices": [
            {
                "kind": device.kind,
                "name": device.name,
                "total_bytes": device.total_bytes,
                "free_bytes": device.free_bytes,
                "threads": device.threads,
                "processes": len(device.processes),
                "in_error": device.error is not None,
            }
            for device in there.devices
        ],
        "host": {"total_bytes": there.host_total_bytes, "free_bytes": there.host_free_bytes, "cores": there.host_threads},
    }


def _leases() -> dict[str, Any]:
    from lightning_autopar.sharing.ledger import live

    found = live()
    return {"count": len(found), "bytes": [sum(lease.bytes.values()) for lease in found], "elastic": sum(lease.elastic for lease in found)}


def _last_plan() -> Any:
    folder = cache_folder("last_plan")
    return None if folder is None else read_json(folder / "plan.json")
