"""GPUs as torch.cuda sees them, where NVML can't be had: asked in a process of its own, so that this one stays free of CUDA."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from lightning_autopar.devices.catalogue import find_by_device_name
from lightning_autopar.devices.inventory import Device, Link

_MARK = "lightning-autopar devices: "
_TIMEOUT_SECONDS = 120.0

# mem_get_info creates a context on the device, which fork can't carry over and which holds memory for as long as the process lives.
_CHILD = f"""
import json, torch
devices, notes, peers = [], [], []
for index in range(torch.cuda.device_count()):
    try:
        properties = torch.cuda.get_device_properties(index)
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    except RuntimeError as error:
        notes.append(f"CUDA device {{index}} can't be read ({{str(error).splitlines()[0]}}) and is left out")
        continue
    uuid = str(getattr(properties, "uuid", ""))
    devices.append(dict(index=index, name=properties.name, uuid=uuid, free_bytes=free_bytes, total_bytes=total_bytes))
indices = [device["index"] for device in devices]
peers = [[a, b] for a in indices for b in indices if a < b and torch.cuda.can_device_access_peer(a, b)]
print({_MARK!r} + json.dumps(dict(devices=devices, notes=notes, peers=peers)))
"""


def _run_child(arguments: Sequence[str], timeout_seconds: float) -> subprocess.CompletedProcess[str]:
    """The child, its output captured."""
    return subprocess.run(arguments, capture_output=True, text=True, timeout=timeout_seconds, check=False)


def read_devices(
    *, run: Callable[[Sequence[str], float], subprocess.CompletedProcess[str]] = _run_child
) -> tuple[tuple[Device, ...], tuple[Link, ...], tuple[str, ...]]:
    """Devices, links and notes of torch.cuda; no devices and a note if it fails. Free memory is measured with the child's own context on
    the device, so it is a few hundred MiB too low.

    Args:
        run: runs a command line within so many seconds and captures its output.
    """
    try:
        result = run([sys.executable, "-c", _CHILD], _TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        return (), (), (f"torch.cuda didn't answer within {_TIMEOUT_SECONDS:.0f} s, so no GPU is known",)
    except OSError as error:
        return (), (), (f"no Python could be started to ask torch.cuda ({error}), so no GPU is known",)
    answer = next((line for line in reversed(result.stdout.splitlines()) if line.startswith(_MARK)), None)
    if result.returncode != 0 or answer is None:
        reason = (result.stderr.strip().splitlines() or [f"exit status {result.returncode}"])[-1]
        return (), (), (f"torch.cuda failed ({reason}), so no GPU is known",)
    found: dict[str, Any] = json.loads(answer.removeprefix(_MARK))
    devices = tuple(
        Device(
            id=_device_id(entry["uuid"], entry["index"]),
            kind="cuda",
            name=entry["name"],
            total_bytes=entry["total_bytes"],
            free_bytes=entry["free_bytes"],
            index=entry["index"],
        )
        for entry in found["devices"]
    )
    notes = list(found["notes"])
    if devices:
        notes.append("free memory was measured beside a CUDA context of the measuring process: there may be a few hundred MiB more")
    else:
        notes.append("torch.cuda sees no device")
    peers = {(a, b) for a, b in found["peers"]}
    links = tuple(_link(a, b, peer=(a.index, b.index) in peers) for a, b in itertools.combinations(devices, 2))
    return devices, links, tuple(notes)


def _device_id(uuid: str, index: int) -> str:
    """The UUID as NVML writes it; an older torch doesn't tell it."""
    if not uuid:
        return f"cuda:{index}"
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def _link(a: Device, b: Device, *, peer: bool) -> Link:
    """Peer access, or through the host: torch.cuda doesn't tell NVLink from PCIe."""
    rates = [model.pcie_bytes_per_second for model in map(find_by_device_name, (a.name, b.name)) if model is not None]
    return Link(a=a.id, b=b.id, kind="p2p" if peer else "host", bytes_per_second=min(rates) if len(rates) == 2 else None)
