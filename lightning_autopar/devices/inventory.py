"""The devices of a machine as values: their memory, their links, who is on them. And what happened to them between
two looks, as sentences with numbers. Knows no driver, and asks none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal

from lightning_autopar.text import format_bytes

DeviceKind = Literal["cuda", "cpu", "catalogue"]


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
        in_doubt: whether CUDA may give it another ordinal than ``index``, as a GPU before it can't be read.
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
    in_doubt: bool = False

    def known_by_name(self) -> Device:
        """This GPU as a process finds it that names it alone in ``CUDA_VISIBLE_DEVICES``."""
        return replace(self, index=0, in_doubt=False)


@dataclass(frozen=True, kw_only=True)
class Link:
    """How two devices reach each other.

    Args:
        a: id of one device; the order of the two doesn't matter.
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
    """The devices, the links between them, and the host's memory.

    Args:
        devices: in a stable order (by node, then index).
        links: one for each pair that is known to have one; the slowest kind is assumed for the others.
        host_total_bytes: the smaller of physical memory and the cgroup's limit; of devices that are only planned for, that of node 0.
        host_free_bytes: what is available of that now.
        node_host_bytes: of devices that are only planned for, the memory of each node's host; empty where there is this host alone.
        assumed_hosts: the nodes whose hosts' memory wasn't stated, so that a rule assumes it (``devices/spec.py``).
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

    def among(self, ids: Sequence[str]) -> list[Device]:
        """The devices of these ids; where one isn't there, it fails as :meth:`device` does."""
        known = self._by_id
        return [known[device_id] if device_id in known else self.device(device_id) for device_id in ids]

    def in_order(self, devices: Iterable[Device]) -> list[Device]:
        """Some of its devices in its own order."""
        return sorted(devices, key=lambda device: self._places[device.id])

    def link(self, a: str, b: str) -> Link:
        """The link between two devices; through the network or the host if none is known.

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
    def _places(self) -> dict[str, int]:
        return {device.id: place for place, device in enumerate(self.devices)}

    @cached_property
    def _by_ends(self) -> dict[frozenset[str], Link]:
        return {frozenset((link.a, link.b)): link for link in reversed(self.links)}

    def restrict(self, devices: Literal["auto"] | int | str | Sequence[int], *, fewer: bool = False) -> tuple[Inventory, int | None]:
        """This inventory restricted by ``Trainer(devices=...)``, and how many of its devices a plan may use. As in Lightning, the numbers
        count on each node. A number of devices bounds the plan, which chooses those with most free memory; a list names those it may use.

        Args:
            devices: ``"auto"`` or ``-1``: all; ``2`` or ``"2"``: at most so many; ``[0, 2]`` or ``"0,2"``: those indices.
            fewer: whether some of them may be missing, as they may in the middle of a run.

        Returns:
            The inventory of the devices that a plan may use, and the most that it may use at once on all nodes; None
            where it may use all of them.

        Raises:
            ValueError: if the value isn't allowed, asks for more devices than there are, or names one that isn't there.
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
        return self.with_devices(device for device in self.devices if device.index in chosen), None

    def with_devices(self, devices: Iterable[Device]) -> Inventory:
        """The inventory with these devices instead of its own, and the links between them."""
        kept = {device.id: device for device in devices}
        links = tuple(link for link in self.links if link.a in kept and link.b in kept)
        return replace(self, devices=tuple(kept.values()), links=links)

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


_SLOWEST_RATE_SHARE = 0.1  # the share of a device that others keep fully busy: the driver gives turns


_LITTLE_BUSY = 0.1


def idle_share(device: Device) -> float:
    """The share of a device that others leave to us, in tenths: NVML's samples over a second aren't more precise."""
    return max(_SLOWEST_RATE_SHARE, 1 - round(device.utilization or 0.0, 1))


def busy_share(device: Device) -> float:
    """The share of a device that others keep busy; 0 for a tenth or less, which a display or a monitoring program takes."""
    busy = round(1 - idle_share(device), 1)
    return busy if busy > _LITTLE_BUSY else 0.0


def device_label(device: Device) -> str:
    """A device's usual name: ``"cuda:0"`` rather than its UUID."""
    return f"cuda:{device.index}" if device.kind == "cuda" and device.index is not None else device.id


def devices_label(devices: Iterable[Device]) -> str:
    """Several devices' names, runs of numbers drawn together: ``"cuda:0-3,6"``."""
    runs: dict[str, list[list[int]]] = {}
    others: list[str] = []
    for label in sorted(map(device_label, devices), key=_number_last):
        name, number = _number_last(label)
        if number < 0:
            others.append(label)
        elif runs.get(name) and runs[name][-1][-1] == number - 1:
            runs[name][-1].append(number)
        else:
            runs.setdefault(name, []).append([number])
    drawn = [f"{name}:" + ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in parts) for name, parts in runs.items()]
    return ", ".join((*drawn, *others))


def _number_last(label: str) -> tuple[str, int]:
    """``"cpu:3"`` → ``("cpu", 3)``; −1 where there is no number."""
    name, _, number = label.rpartition(":")
    return (name, int(number)) if name and number.isdecimal() else (label, -1)


#: Changes of free memory by a smaller share of the device aren't reported: allocators cause them all the time.
_NOTABLE_SHARE = 0.02
#: The host's memory is short if a smaller share of it is free.
_SHORT_HOST_SHARE = 0.05
#: Changes of speed by less aren't reported.
_NOTABLE_SPEED = 1.1

EventKind = Literal["shrank", "grew", "appeared", "vanished", "error", "recovered", "slower", "faster", "host"]


@dataclass(frozen=True, kw_only=True)
class DeviceEvent:
    """Something that happened to the devices.

    Args:
        device: to which, by id; None for the host.
        text: a sentence with the numbers.
        ours: whether the run's plan uses the device.
    """

    kind: EventKind
    device: str | None
    text: str
    ours: bool = False


def device_events(before: Inventory, now: Inventory, devices: Collection[str] = ()) -> tuple[DeviceEvent, ...]:
    """What happened between two looks.

    Args:
        devices: ids of those that the run's plan uses.
    """
    was, there = ({device.id: device for device in inventory.devices} for inventory in (before, now))
    events: list[DeviceEvent] = []
    for device in before.devices:
        if device.id not in there:
            events.append(
                DeviceEvent(
                    kind="vanished", device=device.id, text=f"the run can no longer use {device_label(device)}", ours=device.id in devices
                )
            )
    for device in now.devices:
        ours = device.id in devices
        if device.id not in was:
            free = f"{format_bytes(device.free_bytes)} free"
            events.append(
                DeviceEvent(kind="appeared", device=device.id, text=f"the run can now use {device_label(device)}, with {free}", ours=ours)
            )
        else:
            events += _of_device(was[device.id], device, ours)
    return (*events, *_of_host(before, now))


def _of_device(was: Device, device: Device, ours: bool) -> list[DeviceEvent]:
    events = []
    name = device_label(device)
    if device.error != was.error:
        kind: EventKind = "error" if device.error else "recovered"
        text = f"{name} is in error: {device.error}" if device.error else f"{name} is no longer in error ({was.error})"
        events.append(DeviceEvent(kind=kind, device=device.id, text=text, ours=ours))
    change = device.free_bytes - was.free_bytes
    if abs(change) > _NOTABLE_SHARE * max(was.total_bytes, device.total_bytes):
        there = f"{format_bytes(was.free_bytes)} to {format_bytes(device.free_bytes)}"
        who = "somebody took it" if change < 0 else "somebody gave it back"
        verb: EventKind = "shrank" if change < 0 else "grew"
        text = f"the free memory of {name} {verb} by {format_bytes(abs(change))}, from {there}: {who}"
        events.append(DeviceEvent(kind=verb, device=device.id, text=text, ours=ours))
    ratio = _slowness(device) / _slowness(was)
    if ratio >= _NOTABLE_SPEED or ratio <= 1 / _NOTABLE_SPEED:
        pace: EventKind = "slower" if ratio > 1 else "faster"
        text = f"{name} became {pace}: its work takes {_slowness(device):.3g} times as long as by itself, after {_slowness(was):.3g} times"
        events.append(DeviceEvent(kind=pace, device=device.id, text=text, ours=ours))
    return events


def _of_host(before: Inventory, now: Inventory) -> list[DeviceEvent]:
    """The event that the host's memory got short, or is no longer short."""
    short = [at.host_total_bytes > 0 and at.host_free_bytes < _SHORT_HOST_SHARE * at.host_total_bytes for at in (before, now)]
    if short[0] == short[1]:
        return []
    free = f"{format_bytes(now.host_free_bytes)} of {format_bytes(now.host_total_bytes)}"
    text = f"the host's memory is {'short' if short[1] else 'no longer short'}: {free} are free"
    return [DeviceEvent(kind="host", device=None, text=text)]


def _slowness(device: Device) -> float:
    """How many times longer work takes on the device than on an idle one, as planning assumes."""
    return device.slowdown / idle_share(device)


def usable(inventory: Inventory) -> Inventory:
    """The inventory without the devices that are in error: nothing new should run on them."""
    if all(device.error is None for device in inventory.devices):
        return inventory
    notes = tuple(f"{device_label(device)} is left out: {device.error}" for device in inventory.devices if device.error is not None)
    kept = inventory.with_devices(device for device in inventory.devices if device.error is None)
    return replace(kept, notes=(*inventory.notes, *notes))
