"""Sets of devices among which one is best, without looking at every subset. Knows memory, speed and links of devices, no model.

Ranks need equal memory. So among all sets of ``n`` devices that are at least so fast and at least so well linked, the ``n`` devices with
most free memory fit if any set does: for each speed and each kind of link, the prefixes of the devices in order of their budgets contain a
best set. Among groups of equal speed and links, such as eight nodes of one kind, the group whose set has most memory stands for all. Large
sizes are tried in steps first; the search looks between them where it matters (:func:`sizes_between`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from lightning_autopar.constraints import Constraints
from lightning_autopar.devices.inventory import Device, Inventory, busy_share

#: Up to this number, every number of devices is tried.
_EVERY_SIZE = 32
#: Numbers up to so many times the best one are near it.
_NEAR = 1.1
#: The kinds of link in order; the rate counts only between links of one kind.
LINKS = ("network", "host", "pcie", "p2p", "nvlink")
#: How many kinds of link of one inventory are told apart; the others count as the next worse kind.
_MOST_THRESHOLDS = 4

Speeds = Mapping[str, float]
_Rank = tuple[int, float]


def freest_first(devices: Sequence[Device], constraints: Constraints) -> list[Device]:
    """Devices by budget; equal ones by how busy others keep them, then in a fixed order that doesn't depend on the inventory's."""
    return sorted(
        devices,
        key=lambda device: (
            -constraints.budget_bytes(device),
            device.utilization or 0.0,
            device.slowdown,
            len(device.processes),
            device.node,
            -1 if device.index is None else device.index,
            device.id,
        ),
    )


def one_of_each_gpu(devices: Sequence[Device]) -> list[Device]:
    """Only the first of the MIG instances of each GPU: NCCL refuses two ranks on one GPU ("Duplicate GPU detected")."""
    found: dict[str, Device] = {}
    for device in devices:
        found.setdefault(device.part_of or device.id, device)
    return list(found.values())


def single_sets(inventory: Inventory, constraints: Constraints, speed: Speeds) -> list[tuple[Device, ...]]:
    """Sets of one device: of devices that are alike and equally busy with others' work, the one with most free memory."""
    best: dict[tuple[object, ...], Device] = {}
    for device in freest_first(inventory.devices, constraints):
        best.setdefault((device.kind, device.name, device.total_bytes, speed[device.id], busy_share(device)), device)
    return [(device,) for device in best.values()]


def device_sets(
    batch_size: int, inventory: Inventory, constraints: Constraints, speed: Speeds, *, sizes: Collection[int] | None = None
) -> list[tuple[Device, ...]]:
    """Sets of two or more devices of one kind, the best set among them, smaller sets first.

    Args:
        batch_size: the most devices, where they share a batch.
        constraints: the least and the most devices, and what may be used of a device.
        speed: of each device by id, in any unit.
        sizes: numbers of devices; unless given, those of :func:`coarse_sizes`.
    """
    most = largest_size(batch_size, inventory, constraints)
    least = max(2, constraints.min_devices or 2)
    found: dict[frozenset[str], tuple[Device, ...]] = {}
    for kind in dict.fromkeys(device.kind for device in inventory.devices):
        ordered = freest_first([device for device in inventory.devices if device.kind == kind], constraints)
        for chosen in _prefixes(ordered, inventory, constraints, speed, least, most, sizes):
            found.setdefault(frozenset(device.id for device in chosen), chosen)
    return sorted(found.values(), key=len)


def largest_size(batch_size: int, inventory: Inventory, constraints: Constraints) -> int:
    """How many devices a plan may have."""
    there = len(one_of_each_gpu(inventory.devices))
    most = min(there, constraints.max_devices or there)
    return min(most, batch_size) if constraints.split_batch else most


def coarse_sizes(least: int, most: int, node: int = 0) -> list[int]:
    """Numbers of devices: every small one, then powers of two and multiples of a node's, and the largest.

    Args:
        node: how many devices a node has; 0 where nodes differ.
    """
    sizes = set(range(least, min(most, _EVERY_SIZE) + 1)) | {most}
    size = _EVERY_SIZE
    while size < most:
        sizes.update((size, size + size // 2))
        size *= 2
    if node > 1:
        sizes |= {max(node, size - size % node) for size in sizes if size > _EVERY_SIZE}
    return sorted(size for size in sizes if least <= size <= most)


def sizes_between(batch_size: int, tried: Sequence[int], best: int, count: int = 8) -> list[int]:
    """Numbers of devices near the best one so far that are worth a look: those with which the fullest rank has one sample fewer.

    Args:
        batch_size: that the ranks share; 0 where each has its own.
        best: of those the best.
    """
    below = max((size for size in tried if size < best), default=best)
    last = best
    while last + 1 in tried and last < _NEAR * best:
        last += 1
    above = min((size for size in tried if size > last), default=last)
    between = range(below + 1, above)
    if batch_size:
        fewest: dict[int, int] = {}
        for size in between:
            fewest.setdefault(-(-batch_size // size), size)
        chosen = sorted(fewest.values())
    else:
        chosen = list(between)
    chosen = [size for size in chosen if size not in tried]
    step = max(1, -(-len(chosen) // count))
    return chosen[::step]


def islands(inventory: Inventory, devices: Sequence[Device]) -> list[list[Device]]:
    """The groups of devices that are connected by the best kind of link among them, each in the given order."""
    rank = _link_ranks(inventory, {device.id for device in devices})
    best = max(rank.values(), default=None)
    return [list(devices)] if best is None else _connected(devices, rank, best)


def _prefixes(
    ordered: Sequence[Device],
    inventory: Inventory,
    constraints: Constraints,
    speed: Speeds,
    least: int,
    most: int,
    sizes: Collection[int] | None,
) -> Iterator[tuple[Device, ...]]:
    """The first devices of every pool, in numbers worth trying; of pools of one sort, the one with most memory."""
    rank = _link_ranks(inventory, {device.id for device in ordered})
    thresholds = sorted(set(rank.values()), reverse=True)[:_MOST_THRESHOLDS]
    for fast in map(one_of_each_gpu, _pools(ordered, speed)):
        groups = [_connected(fast, rank, threshold) for threshold in thresholds]
        groups += [_by_node(fast), [fast]]
        for pools in groups:
            best: dict[int, tuple[int, tuple[Device, ...]]] = {}
            for pool in pools:
                top = min(most, len(pool))
                for size in coarse_sizes(least, top, _node_size(pool)) if sizes is None else [n for n in sizes if least <= n <= top]:
                    chosen = tuple(pool[:size])
                    # The devices are in order of budget: the last one has least.
                    smallest = constraints.budget_bytes(chosen[-1])
                    if size not in best or smallest > best[size][0]:
                        best[size] = smallest, chosen
            yield from (chosen for _, chosen in best.values())
        if sizes is None:
            yield from _whole_nodes(fast, constraints, least, most)


def _pools(ordered: Sequence[Device], speed: Speeds) -> Iterator[list[Device]]:
    """Pools of devices that are at least as fast and at most as busy with others' work as a bound, for each speed and share that occurs. A
    step that waits for its host is as fast on a busy device, so speed alone doesn't find the idle devices.
    """
    busy = {device.id: busy_share(device) for device in ordered}
    seen: set[frozenset[str]] = set()
    for slowest in sorted({speed[device.id] for device in ordered}, reverse=True):
        for busiest in sorted(set(busy.values())):
            pool = [device for device in ordered if speed[device.id] >= slowest and busy[device.id] <= busiest]
            ids = frozenset(device.id for device in pool)
            if ids and ids not in seen:
                seen.add(ids)
                yield pool


def _by_node(devices: Sequence[Device]) -> list[list[Device]]:
    nodes: dict[int, list[Device]] = {}
    for device in devices:
        nodes.setdefault(device.node, []).append(device)
    return list(nodes.values())


def _whole_nodes(devices: Sequence[Device], constraints: Constraints, least: int, most: int) -> Iterator[tuple[Device, ...]]:
    """Equally many devices of each of several nodes: nodes with most memory first, judged by their smallest budget."""
    nodes = _by_node(devices)
    if len(nodes) < 2:
        return
    each = min(len(node) for node in nodes)
    freest = sorted(nodes, key=lambda node: -constraints.budget_bytes(node[each - 1]))
    for count in coarse_sizes(2, len(nodes)):
        if least <= count * each <= most:
            yield tuple(device for node in freest[:count] for device in node[:each])


def _node_size(devices: Sequence[Device]) -> int:
    """How many devices each node has; 0 where there is one node, or they differ."""
    nodes = _by_node(devices)
    return len(nodes[0]) if len(nodes) > 1 and len({len(node) for node in nodes}) == 1 else 0


def _link_ranks(inventory: Inventory, ids: set[str]) -> dict[tuple[str, str], _Rank]:
    """The rank of each known link between these devices; a pair without a known link has the slowest kind."""
    found = [link for link in inventory.links if link.a in ids and link.b in ids]
    return {(link.a, link.b): (LINKS.index(link.kind), link.bytes_per_second or 0.0) for link in found}


def _connected(devices: Sequence[Device], rank: Mapping[tuple[str, str], _Rank], threshold: _Rank) -> list[list[Device]]:
    """Groups of devices that are connected by links of at least the threshold, each in the given order."""
    root = {device.id: device.id for device in devices}

    def find(device_id: str) -> str:
        while root[device_id] != device_id:
            root[device_id] = device_id = root[root[device_id]]
        return device_id

    for (a, b), how_good in rank.items():
        if how_good >= threshold and a in root and b in root:
            root[find(a)] = find(b)
    groups: dict[str, list[Device]] = {}
    for device in devices:
        groups.setdefault(find(device.id), []).append(device)
    return list(groups.values())
