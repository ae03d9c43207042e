"""Inventory: the devices as they are now. Knows nothing of models or plans, and creates no CUDA context."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal

DeviceKind = Literal["cuda", "cpu", "catalogue"]

#: The environment variable that says, as a spec, what devices there are.
DEVICES_VARIABLE = "AUTOPAR_DEVICES"


@dataclass(frozen=True, kw_only=True)
class DeviceProcess:
    """A process on a device.

    Args:
        pid: as the driver counts: in a container the host's number, not the one that the process itself sees.
        used_bytes: None where the driver won't say (other users, containers).
        own: whether it is known to be this very process.
    """

    pid: int
    used_bytes: int | None
    own: bool = False


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device as it is now.

    Args:
        id: a GPU's NVML UUID (``"GPU-…"``, ``"MIG-…"``), ``"cpu:0"``, or ``"H100-80GB:0"`` of the catalogue.
        kind: ``"cuda"`` and ``"cpu"`` can be run on, ``"catalogue"`` only planned for.
        name: what it is called: ``"NVIDIA H200"``, ``"CPU"``.
        total_bytes: memory that a process could ever have on it.
        free_bytes: memory that a new process could take now.
        reserved_bytes: the driver's own, part of neither.
        index: CUDA ordinal as a process with this one's environment sees it, None where such a process doesn't see it
            (all MIG instances but the first); the number of a CPU device; that of a catalogue device on its node.
        threads: CPU devices: the share of the host's cores that one rank on it uses.
        utilization: share of the last seconds in which it computed, 0 to 1; None where unknown.
        processes: who is on it.
        node: which host it belongs to; 0 is this one.
        slowdown: how many times longer it takes than it would by itself, at least 1: what somebody knows beyond ``utilization``.
        error: what is wrong with it, as the driver says it; None where nothing is known to be. Nothing new should run on it.
        part_of: of a MIG instance the id of its GPU; None of a whole device.
    """

    id: str
    kind: DeviceKind
    name: str
    total_bytes: int
    free_bytes: int
    reserved_bytes: int = 0
    index: int | None = None
    threads: int | None = None
    utilization: float | None = None
    processes: tuple[DeviceProcess, ...] = ()
    node: int = 0
    slowdown: float = 1.0
    error: str | None = None
    part_of: str | None = None


@dataclass(frozen=True, kw_only=True)
class Link:
    """How two devices reach each other.

    Args:
        a: id of one device; the order of the two means nothing.
        b: id of the other.
        kind: ``"nvlink"``; ``"p2p"``: peer access over PCIe; ``"pcie"``: none, but the same PCIe host bridge; ``"host"``:
            through the host's memory; ``"network"``: between nodes.
        bytes_per_second: nominal rate in one direction, None where unknown. Without peer access it is an upper bound.
    """

    a: str
    b: str
    kind: Literal["nvlink", "p2p", "pcie", "host", "network"]
    bytes_per_second: float | None = None


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """What there is: devices, links between them, the host's memory.

    Args:
        devices: in a stable order (by node, then index).
        links: one for each pair that is known to have one; the slowest kind is assumed for the others.
        host_total_bytes: the smaller of physical memory and the cgroup's limit; of devices that are only planned for, that of node 0.
        host_free_bytes: what is available of that now.
        node_host_bytes: of devices that are only planned for, the memory of each node's host; empty where there is this host alone.
        assumed_hosts: the nodes of which nobody said what their hosts have, so that a rule says it (``memory/spec.py``).
        source: where it came from: ``"nvml"``, ``"torch.cuda"``, ``"cpu"``, ``"spec"``.
        notes: what a reader should know, a sentence each (NVML missing, a device unreadable).
        host_threads: cores of this host that this process may use, by affinity and cgroup quota; 0 where unknown.
    """

    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()
    host_total_bytes: int
    host_free_bytes: int
    source: str
    notes: tuple[str, ...] = ()
    host_threads: int = 0
    node_host_bytes: tuple[int, ...] = ()
    assumed_hosts: tuple[int, ...] = ()

    def host_free_on(self, node: int) -> int:
        """Free bytes of a node's host; 0 where that isn't known."""
        return self.node_host_bytes[node] if self.node_host_bytes else self.host_free_bytes

    def device(self, device_id: str) -> Device:
        """The device of that id.

        Raises:
            ValueError: if there is none, naming those that are there.
        """
        if (device := self._by_id.get(device_id)) is not None:
            return device
        there = ", ".join(device.id for device in self.devices) or "none"
        raise ValueError(f"there is no device {device_id!r} here; there are: {there}")

    def link(self, a: str, b: str) -> Link:
        """How two devices of that id reach each other; through the network or the host where no link is known.

        Raises:
            ValueError: if there is no such device.
        """
        if (link := self._by_ends.get(frozenset((a, b)))) is not None:
            return link
        return Link(a=a, b=b, kind="host" if self.device(a).node == self.device(b).node else "network")

    @cached_property
    def _by_id(self) -> dict[str, Device]:
        return {device.id: device for device in reversed(self.devices)}

    @cached_property
    def _by_ends(self) -> dict[frozenset[str], Link]:
        return {frozenset((link.a, link.b)): link for link in reversed(self.links)}

    def restrict(self, devices: Literal["auto"] | int | str | Sequence[int], *, fewer: bool = False) -> tuple[Inventory, int | None]:
        """What ``Trainer(devices=...)`` leaves of this inventory, and how many devices of it a plan may use.

        As in Lightning the numbers count on each node. A number of devices bounds the plan, which chooses the freest; a
        list names those it may use.

        Args:
            devices: ``"auto"`` or ``-1``: all; ``2`` or ``"2"``: at most so many; ``[0, 2]`` or ``"0,2"``: those indices.
            fewer: whether some of them may be missing, as they may in the middle of a run.

        Returns:
            The inventory of the devices that a plan may use, and the most that it may use at once on all nodes; None
            where it may use all of them.

        Raises:
            ValueError: if the value is no such thing, asks for more devices than there are, or names one that isn't there.
        """
        chosen = _parse_devices(devices)
        if chosen is None:
            return self, None
        nodes = {device.node for device in self.devices}
        if isinstance(chosen, int):
            there = min((sum(device.node == node for device in self.devices) for node in nodes), default=0)
            if chosen > there and not fewer:
                raise ValueError(f"devices={devices!r} asks for {chosen}, but there are {there}; {_at_most(there)}")
            return self, chosen * len(nodes)
        there_indices = sorted({device.index for device in self.devices if device.index is not None})
        if (missing := [index for index in chosen if index not in there_indices]) and not fewer:
            listed = ", ".join(map(str, there_indices)) or "none"
            raise ValueError(f"devices={devices!r} names device {missing[0]}, but there are: {listed}; choose among those or use 'auto'")
        kept = tuple(device for device in self.devices if device.index in chosen)
        ids = {device.id for device in kept}
        return replace(self, devices=kept, links=tuple(link for link in self.links if link.a in ids and link.b in ids)), None

    def to_dict(self) -> dict[str, Any]:
        """The report's ``inventory`` object."""
        return {
            "devices": [{**asdict(device), "processes": [asdict(process) for process in device.processes]} for device in self.devices],
            "links": [asdict(link) for link in self.links],
            "host": {
                "total_bytes": self.host_total_bytes,
                "free_bytes": self.host_free_bytes,
                "threads": self.host_threads,
                "nodes_bytes": list(self.node_host_bytes),
                "assumed_nodes": list(self.assumed_hosts),
            },
            "source": self.source,
            "notes": list(self.notes),
        }


def probe(
    spec: str | None = None,
    *,
    accelerator: Literal["cuda", "cpu"] = "cuda",
    cpu_devices: int = 1,
    own_host_bytes: int = 0,
) -> Inventory:
    """The devices as they are now. Initialises CUDA neither here nor, NVML being there, anywhere.

    What the file that the environment variable ``AUTOPAR_NEIGHBOURS`` names says of CPU devices is done to them, wherever they come from
    (:mod:`lightning_autopar.memory.neighbours`). Where ``AUTOPAR_DEVICES_FILE`` names one, only the devices that it allows are left
    (:mod:`lightning_autopar.memory.allowed`).

    Args:
        spec: what there is, as :func:`lightning_autopar.memory.spec.parse_spec` reads it; by default the environment
            variable ``AUTOPAR_DEVICES``, where it is set and not empty.
        accelerator: without a spec, ``"cuda"`` asks NVML, or torch.cuda in a child process where NVML can't be had;
            ``"cpu"`` splits the host.
        cpu_devices: into how many devices the host is split: each has its share of the cores and of the free memory.
        own_host_bytes: what the caller holds of the host's memory and counts as free: CPU devices without a budget share that, too.

    Raises:
        ValueError: if the spec, the neighbours' file or that of the allowed devices is malformed, the accelerator unknown or
            ``cpu_devices`` less than 1.
    """
    # They build on this module's classes.
    from lightning_autopar.memory.allowed import with_allowed
    from lightning_autopar.memory.neighbours import read_neighbours, with_neighbours

    found = with_allowed(_probe(spec, accelerator, cpu_devices, own_host_bytes))
    return with_neighbours(found, read_neighbours())


def _probe(spec: str | None, accelerator: str, cpu_devices: int, own_host_bytes: int) -> Inventory:
    """What :func:`probe` gives, before neighbours of CPU devices."""
    # Those modules build on this one's classes.
    from lightning_autopar.memory import nvml, torchcuda
    from lightning_autopar.memory import spec as specs
    from lightning_autopar.memory.host import host_cores, host_memory

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


def _parse_devices(devices: object) -> int | list[int] | None:
    """The Trainer's ``devices``: None for all, a number, or indices; text as Lightning reads it (``"0,"`` is a list)."""
    value = devices
    if isinstance(value, str):
        words = value.strip()
        if words == "auto":
            return None
        try:
            value = [int(word) for word in words.split(",") if word.strip()] if "," in words else int(words)
        except ValueError:
            raise ValueError(f"devices={devices!r} is neither a number nor indices; write 'auto', '2' or '0,2'") from None
    if isinstance(value, int) and not isinstance(value, bool):
        if value == -1:
            return None
        if value < 1:
            raise ValueError(f"devices={devices!r}: a number of devices is at least 1, or -1 for all; write 'auto' for all")
        return value
    if isinstance(value, Sequence) and all(isinstance(index, int) and not isinstance(index, bool) for index in value):
        indices = list(value)
        if not indices:
            raise ValueError(f"devices={devices!r} names no device; write 'auto' for all")
        if len(set(indices)) != len(indices):
            raise ValueError(f"devices={devices!r} names a device twice; name each once")
        return indices
    raise ValueError(f"devices={devices!r} is neither 'auto', a number nor a list of indices; write 'auto', 2 or [0, 2]")


def _at_most(there: int) -> str:
    """The remedy for a number of devices that is too large."""
    return f"choose at most {there}, or 'auto'" if there else "check the driver and CUDA_VISIBLE_DEVICES, or set accelerator='cpu'"
