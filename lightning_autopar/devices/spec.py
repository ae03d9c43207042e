"""Spec: devices written as text, such as ``2xcpu:4GiB`` or ``8xH100-80GB``. Reads no GPU.

CPU devices are shares of this host and can be run on; catalogue devices can be planned for only.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from lightning_autopar.devices import catalogue
from lightning_autopar.devices.host import asked_threads, host_cores, host_memory
from lightning_autopar.devices.inventory import Device, Inventory, Link
from lightning_autopar.text import format_bytes, parse_memory

_PART = re.compile(
    r"(?:(?P<first>-?\d+)\s*x\s*)?(?:(?P<second>-?\d+)\s*x\s*)?"
    r"(?P<name>[a-z][\w .-]*?|\d{4})\s*(?::\s*(?P<size>[^@]*))?(?:@\s*(?P<host>.*))?",
    re.I,
)
_EXAMPLES = (
    "write for example '2xcpu:4GiB', 'cpu:2GiB,cpu:6GiB', '8xH100-80GB' or '2x8xA100-40GB@1TiB' (two nodes of eight, each with 1 TiB of "
    "host memory)"
)
_MOST_DEVICES = 4096
_LEAST_BUDGET_BYTES, _LEAST_HOST_BYTES = 2**20, 2**30
#: The memory that a catalogue device's host is assumed to have where the spec states none: so many times its devices' memory, and at most
#: so much for each of them. Common cloud nodes of eight have at least as much: 1,266 GiB for A100 of 80 GB (a2-ultragpu-8g has as much,
#: p4de.24xlarge 1,152), 2 TiB for B200 and H200 (p6-b200.48xlarge, p5en.48xlarge), 352 GiB for L4 (g2-standard-96: 384 GB).
_HOST_TIMES, _MOST_HOST_BYTES = 2, 256 * 2**30


class _Part(NamedTuple):
    """One comma-separated part: ``nodes`` is None where it isn't written."""

    text: str
    nodes: int | None
    each: int
    name: str
    size: str | None
    host: str | None

    @property
    def is_cpu(self) -> bool:
        return self.name.casefold() == "cpu"


def parse_spec(spec: str, *, host_bytes: tuple[int, int] | None = None, cores: int | None = None) -> Inventory:
    """The inventory that a text describes.

    Parts are joined by commas; a part is ``[[nodes x] count x] name [:memory] [@host memory]``. The name is ``cpu``, or that of a model in
    the catalogue; memory is the budget of each CPU device, and those without one share what memory is free. Parts without a number of nodes
    are on one node; each part with a number adds as many nodes. Host memory is that of each node, for all its catalogue devices; if no part
    of a node states it, twice their memory is assumed, at most 256 GiB a device.

    Args:
        spec: the text, such as ``"2xcpu:4GiB"``; case and blanks don't matter.
        host_bytes: this host's total and free memory; by default as it is.
        cores: the host's cores; by default those that this process may use.

    Raises:
        ValueError: if the text is malformed, names an unknown model, or mixes CPU with catalogue devices.
    """
    if not isinstance(spec, str):
        raise ValueError(f"devices={spec!r} must be a text that describes devices; {_EXAMPLES}")
    if not spec.strip():
        raise ValueError(f"a device spec can't be empty, but is {spec!r}; {_EXAMPLES}")
    parts = [_parse_part(text, spec) for text in spec.split(",")]
    if (asked := sum((part.nodes or 1) * part.each for part in parts)) > _MOST_DEVICES:
        raise ValueError(f"the device spec {spec!r} describes {asked} devices; at most {_MOST_DEVICES} can be planned for")
    if all(part.is_cpu for part in parts):
        return _cpu_inventory([budget for part in parts for budget in _budgets(part, spec)], "spec", host_bytes, cores)
    if any(part.is_cpu for part in parts):
        cpu, other = (next(part.text for part in parts if part.is_cpu is is_cpu) for is_cpu in (True, False))
        raise ValueError(
            f"the device spec {spec!r} mixes {cpu!r}, which can be run on, with {other!r}, which can only be planned for; "
            "write one kind only"
        )
    return _catalogue_inventory(parts, spec, cores)


def split_host(count: int, *, host_bytes: tuple[int, int] | None = None) -> Inventory:
    """The host as ``count`` CPU devices, each with its share of the cores and of the free memory.

    Raises:
        ValueError: if ``count`` is less than 1, or too large.
    """
    if not 1 <= count <= _MOST_DEVICES:
        raise ValueError(f"the host can be split into 1 to {_MOST_DEVICES} CPU devices, not {count!r}; choose such a number")
    return _cpu_inventory([None] * count, "cpu", host_bytes, None)


def _where(text: str, spec: str) -> str:
    """The part that an error is about, with the spec around it if that has others."""
    return f"the device spec {spec!r}" if text == spec.strip() else f"in the device spec {spec!r}, {text!r}"


def _parse_part(text: str, spec: str) -> _Part:
    """One part of a spec, its syntax checked."""
    text = text.strip()
    where = _where(text, spec)
    match = _PART.fullmatch(text)
    if match is None:
        raise ValueError(f"{where} is no device; {_EXAMPLES}")
    numbers = [int(match[group]) for group in ("first", "second") if match[group] is not None]
    if any(number < 1 for number in numbers):
        raise ValueError(f"{where} has a count of {min(numbers)}, but one is at least 1; {_EXAMPLES}")
    name = match["name"]
    if name.casefold() in ("cuda", "gpu", "auto"):
        raise ValueError(
            f"{where} is no device of a spec; real GPUs are found without one and chosen by Trainer(devices=...) or "
            f"CUDA_VISIBLE_DEVICES; {_EXAMPLES}"
        )
    return _Part(text, numbers[0] if len(numbers) == 2 else None, numbers[-1] if numbers else 1, name, match["size"], match["host"])


def _budgets(part: _Part, spec: str) -> list[int | None]:
    """The budgets in bytes of a CPU part's devices; None where it names none."""
    where = _where(part.text, spec)
    if part.nodes is not None:
        raise ValueError(f"{where} has a number of nodes, but CPU devices are this host's; write '{part.nodes * part.each}xcpu:4GiB'")
    if part.host is not None:
        raise ValueError(f"{where} has host memory, but CPU devices are this host's, whose memory is known; leave '@{part.host}' out")
    if part.size is None:
        return [None] * part.each
    try:
        budget = parse_memory(part.size)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if budget < _LEAST_BUDGET_BYTES:
        raise ValueError(f"{where} has {budget} bytes, but a CPU device has at least 1 MiB; write a size such as 'cpu:4GiB'")
    return [budget] * part.each


def _stated_host(part: _Part, where: str) -> int | None:
    """Bytes that a catalogue part states for each of its nodes' hosts; None if it states none."""
    if part.host is None:
        return None
    try:
        stated = parse_memory(part.host)
    except ValueError as error:
        raise ValueError(f"{where}: host memory {error}") from error
    if stated < _LEAST_HOST_BYTES:
        raise ValueError(f"{where} has a host of {stated} bytes, but one has at least 1 GiB; write a size such as '{part.name}@64GiB'")
    return stated


def _cpu_inventory(budgets: Sequence[int | None], source: str, host_bytes: tuple[int, int] | None, cores: int | None) -> Inventory:
    """CPU devices, each with its budget or, without one, a share of what the budgets leave."""
    total_bytes, free_bytes = host_bytes or host_memory()
    asked = asked_threads() if cores is None else None
    cores = cores or host_cores()
    threads = min(max(1, cores // len(budgets)), asked or cores)
    claimed = sum(budget or 0 for budget in budgets)
    sharing = sum(budget is None for budget in budgets)
    notes = []
    if claimed > free_bytes:
        notes.append(
            f"the CPU devices' budgets come to {format_bytes(claimed)}, but the host has {format_bytes(free_bytes)} free of "
            f"{format_bytes(total_bytes)}; they may run out of memory together"
        )
    if sharing and free_bytes - claimed < sharing * _LEAST_BUDGET_BYTES:
        raise ValueError(
            f"of the host's {format_bytes(free_bytes)} of free memory the budgets of {format_bytes(claimed)} leave nothing for "
            f"{sharing} CPU device(s) without one; give each a budget, as in 'cpu:4GiB', or lower the others"
        )
    devices = []
    for index, budget in enumerate(budgets):
        total, free = (budget, budget) if budget is not None else ((total_bytes - claimed) // sharing, (free_bytes - claimed) // sharing)
        devices.append(Device(id=f"cpu:{index}", kind="cpu", name="CPU", total_bytes=total, free_bytes=free, index=index, threads=threads))
    return Inventory(
        devices=tuple(devices),
        links=tuple(Link(a=a.id, b=b.id, kind="host") for a, b in itertools.combinations(devices, 2)),
        host_total_bytes=total_bytes,
        host_free_bytes=free_bytes,
        source=source,
        notes=tuple(notes),
        host_threads=cores,
    )


def _catalogue_inventory(parts: Sequence[_Part], spec: str, cores: int | None) -> Inventory:
    """Catalogue devices with the links that their data sheets promise."""
    placed: list[tuple[int, catalogue.KnownDevice]] = []
    stated: dict[int, int] = {}
    shared_node: int | None = None
    next_node = 0
    for part in parts:
        where = _where(part.text, spec)
        try:
            model = catalogue.find(part.name)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        if part.size is not None:
            raise ValueError(f"{where} has a memory budget, which only CPU devices have; write '{part.each}x{model.name}'")
        if part.nodes is None:
            if shared_node is None:
                shared_node, next_node = next_node, next_node + 1
            nodes = [shared_node]
        else:
            nodes, next_node = list(range(next_node, next_node + part.nodes)), next_node + part.nodes
        placed += [(node, model) for node in nodes for _ in range(part.each)]
        if (host_bytes := _stated_host(part, where)) is not None:
            if stated.setdefault(nodes[0], host_bytes) != host_bytes:
                there = format_bytes(stated[nodes[0]])
                raise ValueError(f"{where} has {format_bytes(host_bytes)} of host memory, but its node has {there}; say it once for a node")
            stated.update(dict.fromkeys(nodes, host_bytes))
    placed.sort(key=lambda item: item[0])
    on_node: dict[int, int] = {}
    of_model: dict[str, int] = {}
    devices: list[Device] = []
    for node, model in placed:
        index, number = on_node.get(node, 0), of_model.get(model.name, 0)
        on_node[node], of_model[model.name] = index + 1, number + 1
        devices.append(
            Device(
                id=f"{model.name}:{number}",
                kind="catalogue",
                name=model.name,
                total_bytes=model.total_bytes,
                free_bytes=model.total_bytes,
                index=index,
                node=node,
            )
        )
    hosts = [0] * next_node
    for device in devices:
        hosts[device.node] += assumed_host_bytes(device)
    hosts = [stated.get(node, assumed) for node, assumed in enumerate(hosts)]
    return Inventory(
        devices=tuple(devices),
        links=tuple(
            catalogue_link(a, b)
            for _, on_one in itertools.groupby(devices, attrgetter("node"))
            for a, b in itertools.combinations(on_one, 2)
        ),
        host_total_bytes=hosts[0],
        host_free_bytes=hosts[0],
        source="spec",
        notes=("the devices are the catalogue's: they can be planned for, not run on",),
        host_threads=cores or host_cores(),
        node_host_bytes=tuple(hosts),
        assumed_hosts=tuple(node for node in range(next_node) if node not in stated),
    )


def assumed_host_bytes(device: Device) -> int:
    """The assumed memory of a host for each device that is only planned for."""
    return min(_HOST_TIMES * device.total_bytes, _MOST_HOST_BYTES)


def catalogue_link(a: Device, b: Device) -> Link:
    """The link that two models on one node have in their usual board: NVLink if both are of one model that has it, else PCIe."""
    first, second = catalogue.KNOWN_DEVICES[a.name], catalogue.KNOWN_DEVICES[b.name]
    if first is second and first.nvlink_bytes_per_second is not None:
        return Link(a=a.id, b=b.id, kind="nvlink", bytes_per_second=first.nvlink_bytes_per_second)
    return Link(a=a.id, b=b.id, kind="pcie", bytes_per_second=min(first.pcie_bytes_per_second, second.pcie_bytes_per_second))
