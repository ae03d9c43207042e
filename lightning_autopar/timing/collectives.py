"""Seconds of collectives by size and topology: NCCL's rings and trees, gloo's rings. Arithmetic on links: it measures nothing.

The model is NCCL's own (NVIDIA/nccl, ``src/graph/tuning.cc`` and ``topo.h``, 5067397c): a base latency, a latency a step by the kind of
link, and the bytes that a ring or a tree moves over the narrowest place. A ring of n moves (n − 1) / n of the bytes of a gather or scatter
past each rank, twice that of an all-reduce. Over several nodes the rings of all devices of a node leave it through all of its adapters.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log2
from operator import attrgetter

from lightning_autopar.devices import catalogue
from lightning_autopar.devices.inventory import Device, Inventory
from lightning_autopar.timing.rates import Collective, Rates, slowed

#: Nominal bytes per second of links whose rate isn't known, one direction.
_LINK_BYTES_PER_SECOND = {"nvlink": 150e9, "p2p": 15.75e9, "pcie": 15.75e9, "host": 15.75e9, "network": 1.25e9}
#: The share of a nominal rate that NCCL's rings reach. NVLink by generation: 18 of 20, 20 of 25, 12 of 14.06, 20.6 of 25, 40.1 of 50 GB/s a
#: link (``SM60_NVLINK_BW`` and so on). PCIe with peer access: 12 of 15.75 (``PCI_BW``). Network: 12 of 12.5 (``NET_BW``).
_NVLINK_SHARE = {"pascal": 0.9, "volta": 0.8, "turing": 0.8, "ampere": 0.8, "hopper": 0.824, "blackwell": 0.802, "cdna3": 0.7, "cdna2": 0.7}
_SHARE = {"nvlink": 0.8, "p2p": 0.76, "network": 0.96}
#: Without peer access each hop goes through the host's memory, in both directions at once on every device's link: half of what PCIe
#: reaches. Between different bridges it also crosses between the sockets: NCCL takes 10 GB/s for that on Skylake and 16 on EPYC
#: (``SKL_QPI_BW``, ``AMD_BW``) for all devices of a socket.
_SHARED_MEMORY_SHARE = 0.38
_SOCKET_BYTES_PER_SECOND = 10e9
#: The reduction inside the switch (NVLink SHARP), Hopper and later, all-reduce only: 482 GB/s measured of 450 on 8 H200
#: (https://github.com/stas00/ml-engineering, network/benchmarks/README.md, 744d01e).
_IN_SWITCH_SHARE = 1.07
#: NCCL's base latencies of a tree and a ring, and of a step over NVLink, PCIe and network, protocol LL128 for small and Simple for large
#: sizes (``ncclTunerConstantsDefaults``), in seconds. A call's launch and the streams' waiting for each other come on top.
_RING_BASE_SECONDS, _TREE_BASE_SECONDS = 8.4e-6, 8.4e-6
_STEP_SECONDS = {"nvlink": 3.4e-6, "p2p": 5.7e-6, "pcie": 5.7e-6, "host": 5.7e-6, "network": 14e-6}
_SMALL_STEP_SECONDS = {"nvlink": 1.9e-6, "p2p": 2.5e-6, "pcie": 2.5e-6, "host": 2.5e-6, "network": 4.0e-6}
_TREE_STEP_SECONDS = {"nvlink": 1.25e-6, "p2p": 1.9e-6, "pcie": 1.9e-6, "host": 1.9e-6, "network": 8.5e-6}
_TREE_SHARE = 0.92 * 0.85
_SMALL_SHARE = 0.92
_LAUNCH_SECONDS = 10e-6
#: gloo between processes of one host: TCP over loopback, copied by the cores. A rough rule until it is measured.
_GLOO_BYTES_PER_SECOND = 1.5e9
_GLOO_LATENCY_SECONDS = 0.1e-3


@dataclass(frozen=True)
class Group:
    """The links that a collective between some devices uses.

    Args:
        nodes: on how many nodes.
        most: on one node at most.
        intra: bytes per second that a rank reaches on its node, infinite where each is alone there; those of an all-reduce in ``reducing``.
        inter: bytes per second that leave a node, for each of its ranks; infinite on one node.
        kind: of the slowest link of a node.
        on_cpu: whether gloo does it.
    """

    size: int
    nodes: int
    most: int
    intra: float
    reducing: float
    inter: float
    kind: str
    on_cpu: bool


class Topology:
    """The links of an inventory, cached."""

    def __init__(self, inventory: Inventory) -> None:
        self.devices = {device.id: device for device in inventory.devices}
        self.links: dict[tuple[str, str], tuple[str, float | None]] = {}
        self.network: dict[tuple[int, int], float] = {}
        self._groups: dict[tuple[str, ...], Group] = {}
        self._crews: dict[tuple[tuple[str, ...], Hashable], tuple[list[Device], Rates, list[Hashable]]] = {}
        for link in inventory.links:
            if link.kind == "network":
                if link.bytes_per_second is not None and link.a in self.devices and link.b in self.devices:
                    ends = self.devices[link.a].node, self.devices[link.b].node
                    self.network[min(ends), max(ends)] = link.bytes_per_second
            else:
                self.links[link.a, link.b] = self.links[link.b, link.a] = link.kind, link.bytes_per_second

    def group(self, devices: Sequence[Device]) -> Group:
        """The links that a collective between these devices uses."""
        key = tuple(map(_BY_ID, devices))
        found = self._groups.get(key)
        if found is None:
            if len(self._groups) > 4096:
                self._groups.clear()
            found = self._groups[key] = self._measure(devices)
        return found

    def crew(self, device_ids: tuple[str, ...], rates: Rates, inventory: Inventory) -> tuple[list[Device], Rates, list[Hashable]]:
        """These devices, the rates while a rank works on each of them, and for each a value that is equal for equally fast and busy
        devices. Cached, as plans of a search share their devices.

        Raises:
            ValueError: if one of them isn't there.
        """
        key = device_ids, rates.token
        found = self._crews.get(key)
        if found is None:
            if len(self._crews) > 1024:
                self._crews.clear()
            devices = [self.devices[device_id] if device_id in self.devices else inventory.device(device_id) for device_id in device_ids]
            among = slowed(rates.among(devices, inventory), devices)
            sorts: list[Hashable] = [(among.device_class(device), device.utilization) for device in devices]
            found = self._crews[key] = devices, among, sorts
        return found

    def pair(self, a: Device, b: Device) -> tuple[str, float]:
        """Kind of the link between two devices, and the bytes per second that are reached over it in one direction."""
        if a.node != b.node:
            return "network", self._network(a, b)
        kind, nominal = self.links.get((a.id, b.id), ("host", None))
        model_a, model_b = known_model(a), known_model(b)
        if nominal is None:
            nominal = _LINK_BYTES_PER_SECOND[kind]
            if kind != "nvlink" and model_a and model_b:
                nominal = min(model_a.pcie_bytes_per_second, model_b.pcie_bytes_per_second)
        if kind == "nvlink":
            return kind, nominal * (_NVLINK_SHARE.get(model_a.generation, _SHARE["nvlink"]) if model_a else _SHARE["nvlink"])
        if kind == "pcie" and a.kind == b.kind == "catalogue" and model_a and model_b and model_a.peer_access and model_b.peer_access:
            kind = "p2p"  # all that is known of catalogue devices is that they are on one host
        if kind == "p2p":
            return kind, nominal * _SHARE["p2p"]
        reached = nominal * _SHARED_MEMORY_SHARE
        return kind, reached if kind == "pcie" else min(reached, _SOCKET_BYTES_PER_SECOND)

    def _network(self, a: Device, b: Device) -> float:
        """Bytes per second that a device has for itself between two nodes."""
        nominal = self.network.get((min(a.node, b.node), max(a.node, b.node)))
        if nominal is None:
            models = known_model(a), known_model(b)
            rates = [model.network_bytes_per_second if model and a.kind == "catalogue" else None for model in models]
            nominal = min(rate or _LINK_BYTES_PER_SECOND["network"] for rate in rates)
        return nominal * _SHARE["network"]

    def _measure(self, devices: Sequence[Device]) -> Group:
        """The narrowest place inside a node and between two."""
        nodes: dict[int, list[Device]] = {}
        for device in devices:
            nodes.setdefault(device.node, []).append(device)
        on_cpu = any(device.kind == "cpu" for device in devices)
        intra = reducing = inter = float("inf")
        kind = "nvlink"
        shapes: dict[tuple[object, ...], tuple[str, float]] = {}
        for members in nodes.values():
            if len(members) > 1 and not on_cpu:
                shape = tuple((m.name, self.links.get((members[0].id, m.id))) for m in members)
                if shape not in shapes or len({link for _, link in shape[1:]}) > 1:
                    shapes[shape] = self._inside(members)
                slowest, speed = shapes[shape]
                if speed < intra:
                    intra, kind = speed, slowest
        whole = {len(members) for members in nodes.values()}
        reducing = intra
        models = {known_model(device) for device in devices}
        if kind == "nvlink" and len(nodes) == 1 and max(whole) >= 4 and all(m and m.generation in ("hopper", "blackwell") for m in models):
            reducing = max(intra, intra / 0.82 * _IN_SWITCH_SHARE)
        if len(nodes) > 1:
            first = [members[0] for members in nodes.values()]
            inter = min(self._network(a, b) for a, b in zip(first, [*first[1:], first[0]], strict=True))
            if on_cpu:
                inter = min(inter, _LINK_BYTES_PER_SECOND["network"])
            inter *= min(whole)
        return Group(len(devices), len(nodes), max(whole), intra, reducing, inter, kind, on_cpu)

    def _inside(self, members: Sequence[Device]) -> tuple[str, float]:
        """The slowest hop of the best ring in a node: in a mesh, each device's links to those that take part."""
        model = known_model(members[0])
        if model is not None and model.mesh and model.nvlink_bytes_per_second is not None:
            part = min(1.0, (len(members) - 1) / model.nvlink_links)
            if self.links.get((members[0].id, members[1].id), ("", None))[0] == "nvlink":
                return "nvlink", model.nvlink_bytes_per_second * part * _NVLINK_SHARE.get(model.generation, 0.7)
        slowest = ("nvlink", float("inf"))
        left = {device.id: device for device in members[1:]}
        ways = {device: self.pair(members[0], left[device]) for device in left}
        while ways:
            nearest = left.pop(max(ways, key=lambda device: (ways[device][1], device)))
            kind, speed = ways.pop(nearest.id)
            if speed < slowest[1]:
                slowest = kind, speed
            for device, other in left.items():
                if (way := self.pair(nearest, other))[1] > ways[device][1]:
                    ways[device] = way
        return slowest


_BY_ID = attrgetter("id")
_TOPOLOGIES: dict[int, tuple[weakref.ref[Inventory], Topology]] = {}


def topology(inventory: Inventory) -> Topology:
    """The links of an inventory; computed once for each."""
    key = id(inventory)
    known = _TOPOLOGIES.get(key)
    if known is None or known[0]() is not inventory:
        known = weakref.ref(inventory, lambda _: _TOPOLOGIES.pop(key, None)), Topology(inventory)
        _TOPOLOGIES[key] = known
    return known[1]


@lru_cache(maxsize=4096)
def _model_of(kind: str, name: str) -> catalogue.KnownDevice | None:
    if kind == "cpu":
        return None
    return catalogue.KNOWN_DEVICES.get(name) if kind == "catalogue" else catalogue.find_by_device_name(name)


def known_model(device: Device) -> catalogue.KnownDevice | None:
    """The catalogue's row of a GPU; None if it has none, and for a CPU device."""
    return _model_of(device.kind, device.name)


def collective_seconds(collective: Collective, size_bytes: int, group: Group) -> float:
    """Seconds of one collective, from the moment when the last rank starts it."""
    if group.size < 2:
        return 0.0
    if group.on_cpu:
        return _gloo_seconds(collective, size_bytes, group)
    if collective == "send":
        kind = "network" if group.nodes > 1 else group.kind
        speed = group.inter / group.most if group.nodes > 1 else group.intra
        return _LAUNCH_SECONDS + _STEP_SECONDS[kind] + size_bytes / speed
    part = (group.size - 1) / group.size
    steps = 2 * (group.size - 1) if collective == "all_reduce" else group.size - 1
    times = 2.0 if collective == "all_reduce" else 1.0
    speed = min(group.reducing if collective == "all_reduce" else group.intra, group.inter)
    across = (2 if collective == "all_reduce" else 1) * (group.nodes - 1)
    moved = times * part * size_bytes

    def ring(step: dict[str, float]) -> float:
        """Seconds of all steps of a ring; those between nodes use the network."""
        return _RING_BASE_SECONDS + (steps - across) * step[group.kind] + across * step["network"]

    seconds = min(ring(_STEP_SECONDS) + moved / speed, ring(_SMALL_STEP_SECONDS) + moved / (speed * _SMALL_SHARE))
    if collective == "all_reduce":
        latency = 2 * ((group.most - 1) * _TREE_STEP_SECONDS[group.kind] + ceil(log2(group.nodes)) * _TREE_STEP_SECONDS["network"])
        seconds = min(seconds, _TREE_BASE_SECONDS + latency + moved / (min(group.intra, group.inter) * _TREE_SHARE))
    return _LAUNCH_SECONDS + seconds


def _gloo_seconds(collective: Collective, size_bytes: int, group: Group) -> float:
    """Seconds of a ring through the host; gloo's reduce-scatter is an all-reduce of which each rank keeps its part."""
    times = 2.0 if collective in ("all_reduce", "reduce_scatter") else 1.0
    part = 1.0 if collective == "send" else (group.size - 1) / group.size
    bandwidth = _GLOO_BYTES_PER_SECOND if group.nodes == 1 else min(_GLOO_BYTES_PER_SECOND, group.inter)
    steps = times * (1 if collective == "send" else group.size - 1)
    return steps * _GLOO_LATENCY_SECONDS + times * part * size_bytes / bandwidth
