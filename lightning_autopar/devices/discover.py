"""Inventory: the devices as they are now. Knows nothing of models or plans, and creates no CUDA context."""

from __future__ import annotations

import os
from typing import Literal

from lightning_autopar.devices.inventory import Device, Inventory

#: The environment variable with a spec of the devices.
DEVICES_VARIABLE = "AUTOPAR_DEVICES"


def probe(
    spec: str | None = None,
    *,
    accelerator: Literal["cuda", "cpu"] = "cuda",
    cpu_devices: int = 1,
    own_host_bytes: int = 0,
) -> Inventory:
    """The devices as they are now. It never initialises CUDA in this process, and with NVML in none. The file that the environment variable
    ``AUTOPAR_NEIGHBOURS`` names changes CPU devices, wherever they come from (:mod:`lightning_autopar.devices.simulated_neighbours`). Where
    ``AUTOPAR_DEVICES_FILE`` names one, only the devices that it allows are left (:mod:`lightning_autopar.devices.allowed`).

    Args:
        spec: the devices, as :func:`lightning_autopar.devices.spec.parse_spec` reads it; by default the environment variable
            ``AUTOPAR_DEVICES``, where it is set and not empty.
        accelerator: without a spec, ``"cuda"`` asks NVML, or torch.cuda in a child process if NVML isn't available; ``"cpu"`` splits the
            host.
        cpu_devices: into how many devices the host is split: each has its share of the cores and of the free memory.
        own_host_bytes: what the caller holds of the host's memory, which counts as free: CPU devices without a budget share that, too.

    Raises:
        ValueError: if the spec, the neighbours' file or that of the allowed devices is malformed, the accelerator unknown or
            ``cpu_devices`` less than 1.
    """
    # They use this module's classes.
    from lightning_autopar.devices.allowed import with_allowed
    from lightning_autopar.devices.simulated_neighbours import read_neighbours, with_neighbours

    found = with_allowed(_probe(spec, accelerator, cpu_devices, own_host_bytes))
    return with_neighbours(found, read_neighbours())


def of_its_gpu(device: Device) -> str:
    """What the driver says of a failed process's GPU, if anything is wrong with it: CUDA's own words don't name one that has vanished."""
    if device.kind != "cuda":
        return ""
    found = probe()
    now = next((each for each in found.devices if each.id == device.id), None)
    said = "; ".join(found.notes) if now is None else now.error
    return f"; of its GPU: {said}" if said else ""


def _probe(spec: str | None, accelerator: str, cpu_devices: int, own_host_bytes: int) -> Inventory:
    """The result of :func:`probe`, before the neighbours' file is applied."""
    # Those modules use this one's classes.
    from lightning_autopar.devices import nvml
    from lightning_autopar.devices import spec as specs
    from lightning_autopar.devices import torch_cuda as torchcuda
    from lightning_autopar.devices.host import host_cores, host_memory

    total_bytes, free_bytes = host_memory()
    free_bytes = min(total_bytes, free_bytes + own_host_bytes)
    host_bytes = total_bytes, free_bytes
    if spec is not None:
        return specs.parse_spec(spec, host_bytes=host_bytes)
    if (variable := os.environ.get(DEVICES_VARIABLE, "")).strip():
        try:
            return specs.parse_spec(variable, host_bytes=host_bytes)
        except ValueError as error:
            raise ValueError(f"the environment variable {DEVICES_VARIABLE}: {error}") from error
    if accelerator == "cpu":
        return specs.split_host(cpu_devices, host_bytes=host_bytes)
    if accelerator != "cuda":
        raise ValueError(f"devices of accelerator {accelerator!r} can't be probed; choose 'cuda' or 'cpu'")
    source = "nvml"
    try:
        devices, links, notes = nvml.read_devices()
    except nvml.NvmlUnavailable as error:
        source = "torch.cuda"
        devices, links, notes = torchcuda.read_devices()
        notes = (f"{error}; torch.cuda was asked instead, in a process of its own", *notes)
    return Inventory(
        devices=devices,
        links=links,
        host_total_bytes=total_bytes,
        host_free_bytes=free_bytes,
        source=source,
        notes=notes,
        host_threads=host_cores(),
    )
