"""Topology: how GPUs of this host reach each other, as NVML tells it. Knows NVLink, NVSwitch and PCIe, nothing of devices' memory."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from lightning_autopar.devices.catalogue import PCIE_LANE_BYTES_PER_SECOND, find_by_device_name
from lightning_autopar.devices.inventory import Link

# As in nvml.h. The module's own NVML_P2P_CAPS_INDEX_READ is a tuple by a stray comma, which ctypes refuses.
_P2P_READ, _P2P_WRITE, _P2P_NVLINK = 0, 1, 2
_P2P_OK = 0
_TOPOLOGY_HOSTBRIDGE = 30

# Bytes per second and link, one direction, by NVML's number of the version (2 and 3 are NVLink 2, 4 and 5 NVLink 3).
# Only for models that the catalogue doesn't know: boards of one version run their links at different rates.
_NVLINK_BYTES_PER_SECOND = {1: 20e9, 2: 25e9, 3: 25e9, 4: 25e9, 5: 25e9, 6: 25e9, 7: 50e9}


class Port(NamedTuple):
    """An end of links: a device with NVML's handle and the PCI address of its GPU."""

    handle: Any
    id: str
    name: str
    bus_id: str
    mig: bool


class _NvLinks(NamedTuple):
    """Active NVLinks of a GPU: how many to each GPU, how many to anything else (an NVSwitch), and the rate of one."""

    to_gpus: Counter[str]
    to_switch: int
    bytes_per_second: float | None


def bus_id(pci: Any) -> str:
    """The PCI address of NVML's structure, spelt so that two can be compared."""
    return str(pci.busId).strip("\0 ").lower()


def links(pynvml: Any, ports: Sequence[Port]) -> tuple[Link, ...]:
    """One link for each pair; what the driver doesn't tell counts as absent, so that no link is assumed wrongly."""
    buses = {port.bus_id for port in ports}
    nvlinks = [_nvlinks(pynvml, port, buses) for port in ports]
    pcie = [_pcie_bytes_per_second(pynvml, port) for port in ports]
    return tuple(
        _link(pynvml, ports[a], ports[b], (nvlinks[a], nvlinks[b]), _smaller(pcie[a], pcie[b]))
        for a, b in itertools.combinations(range(len(ports)), 2)
    )


def _link(pynvml: Any, a: Port, b: Port, nvlinks: tuple[_NvLinks, _NvLinks], pcie: float | None) -> Link:
    """The best way between two devices."""
    if a.mig or b.mig:
        # MIG instances have no access to each other's memory, on one GPU or two.
        return Link(a=a.id, b=b.id, kind="host", bytes_per_second=pcie)
    nvlink = _p2p(pynvml, a, b, _P2P_NVLINK)
    direct = min(nvlinks[0].to_gpus[b.bus_id], nvlinks[1].to_gpus[a.bus_id])
    count = direct or min(nvlinks[0].to_switch, nvlinks[1].to_switch)
    # Links can be active but unusable (no fabric manager, peer access switched off), or usable though a virtual machine hides them.
    if nvlink or (nvlink is None and direct):
        rate = _smaller(nvlinks[0].bytes_per_second, nvlinks[1].bytes_per_second)
        return Link(a=a.id, b=b.id, kind="nvlink", bytes_per_second=count * rate if count and rate else None)
    kind: Literal["p2p", "pcie", "host"] = "host"
    if _p2p(pynvml, a, b, _P2P_READ) and _p2p(pynvml, a, b, _P2P_WRITE):
        kind = "p2p"
    else:
        with contextlib.suppress(pynvml.NVMLError):
            kind = "pcie" if pynvml.nvmlDeviceGetTopologyCommonAncestor(a.handle, b.handle) <= _TOPOLOGY_HOSTBRIDGE else "host"
    return Link(a=a.id, b=b.id, kind=kind, bytes_per_second=pcie)


def _p2p(pynvml: Any, a: Port, b: Port, capability: int) -> bool | None:
    """Whether peer access of that kind works; None where the driver doesn't tell."""
    try:
        return bool(pynvml.nvmlDeviceGetP2PStatus(a.handle, b.handle, capability) == _P2P_OK)
    except pynvml.NVMLError:
        return None


def _nvlinks(pynvml: Any, port: Port, gpus: set[str]) -> _NvLinks:
    """The active NVLinks of a GPU, by where they lead."""
    to_gpus: Counter[str] = Counter()
    to_switch = 0
    version = None
    for number in range(0 if port.mig else int(getattr(pynvml, "NVML_NVLINK_MAX_LINKS", 18))):
        try:
            active = pynvml.nvmlDeviceGetNvLinkState(port.handle, number)
        except pynvml.NVMLError:
            # A GPU without NVLink, or the number past the last link.
            break
        if not active:
            continue
        try:
            remote = bus_id(pynvml.nvmlDeviceGetNvLinkRemotePciInfo(port.handle, number))
            version = version or pynvml.nvmlDeviceGetNvLinkVersion(port.handle, number)
        except pynvml.NVMLError:
            remote = ""
        if remote in gpus:
            to_gpus[remote] += 1
        else:
            to_switch += 1
    model = find_by_device_name(port.name)
    if model is not None and model.nvlink_bytes_per_second is not None:
        rate: float | None = model.nvlink_bytes_per_second / model.nvlink_links
    else:
        rate = _NVLINK_BYTES_PER_SECOND.get(version) if version is not None else None
    return _NvLinks(to_gpus, to_switch, rate)


def _pcie_bytes_per_second(pynvml: Any, port: Port) -> float | None:
    """One direction of the widest and fastest PCIe that GPU and slot agree on; the data sheet's where NVML doesn't tell."""
    with contextlib.suppress(pynvml.NVMLError):
        rate = PCIE_LANE_BYTES_PER_SECOND.get(int(pynvml.nvmlDeviceGetMaxPcieLinkGeneration(port.handle)))
        if rate is not None:
            return rate * int(pynvml.nvmlDeviceGetMaxPcieLinkWidth(port.handle))
    model = find_by_device_name(port.name)
    return model.pcie_bytes_per_second if model is not None else None


def _smaller(a: float | None, b: float | None) -> float | None:
    """The smaller rate, None if one is unknown."""
    return None if a is None or b is None else min(a, b)
