"""Sets of devices among which one is best, without looking at every subset. Knows memory, speed and links of devices, no model.

Ranks need equal memory. So among all sets of ``n`` devices that are at least so fast and at least so well linked, the ``n`` devices with
most free memory fit if any set does: for each speed and each kind of link, the prefixes of the devices in order of their budgets contain a
best set. Among groups of equal speed and links, such as eight nodes of one kind, the group whose set has most memory stands for all. Large
sizes are tried in steps first; the search looks between them where it matters (:func:`sizes_between`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from lightning_autopar.constraints import Constraints
from lightning_autopar.devices.inventory import Device, Inventory, Link, busy_share

#: Up to which every number of devices is tried.
_EVERY_SIZE = 32
#: How good a link is beside another one, before its rate is looked at.
LINKS = ("network", "host", "pcie", "p2p", "nvlink")
#: How many different kinds of link of one inventory are told apart; the others count as the next worse one.
_MOST_THRESHOLDS = 4

Speeds = Mapping[str, float]
_Rank = tuple[int, float]


def freest_first(devices: Sequence[Device], constraints: Constraints) -> list[Device]:
    """By budget; equal ones by who else is busy there, then in a fixed order, so that the inventory's order decides nothing."""
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
    """Of the MIG instances of one GPU the first alone: NCCL refuses two ranks on one GPU ("Duplicate GPU detected")."""
    found: dict[str, Device] = {}
    for device in devices:
        found.setdefault(device.part_of or device.id, device)
    return list(found.values())


def single_sets(inventory: Inventory, constraints: Constraints, speed: Speeds) -> list[tuple[Device, ...]]:
    """Of the devices that are alike, and on which others compute as much, the freest; each by itself."""
    best: dict[tuple[object, ...], Device] = {}
    for device in freest_first(inventory.devices, constraints):
        best.setdefault((device.kind, device.name, device.total_bytes, speed[device.id], busy_share(device)), device)
    return [(device,) for device in best.values()]


def device_sets(
    batch_size: int, inventory: Inventory, constraints: Constraints, speed: Speeds, *, sizes: Collection[int] | None = None
) -> list[tuple[Device, ...]]:
    """Sets of two or more devices of one kind among which is a best one, smaller sets first.

    Args:
        batch_size: no more devices than that where they share a batch.
        inventory: the devices and their links.
        constraints: how many at least and at most, and what of a device may be used.
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
        least: the smallest.
        most: the largest.
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
    """Numbers of devices next to the best one so far that are worth a look: those with which the fullest rank has a sample less.

    Args:
        batch_size: that the ranks share; 0 where each has its own.
        tried: those that were tried.
        best: of those the best.
        count: at most so many.
    """
    below = max((size for size in tried if size < best), default=best)
    above = min((size for size in tried if size > best), default=best)
    between = range(below + 1, above)
    if batch_size:
        fewest: dict[int, int] = {}
        for size in between:
            fewest.setdefault(-(-batch_size // size), size)
        chosen = sorted(fewest.values())
    else:
        chosen = list(between)
    chosen = [size for size in chosen if size != best]
    step = max(1, -(-len(chosen) // count))
    return chosen[::step]


def islands(inventory: Inventory, devices: Sequence[Device]) -> list[list[Device]]:
    """The groups of devices within which the best kind of link that occurs among them reaches everywhere, each in the given order."""
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
    """Of every pool the first devices, in numbers worth trying; of pools of one sort those with most memory."""
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
                    # In order of budgets the last one has least.
                    smallest = constraints.budget_bytes(chosen[-1])
                    if size not in best or smallest > best[size][0]:
                        best[size] = smallest, chosen
            yield from (chosen for _, chosen in best.values())
        if sizes is None:
            yield from _whole_nodes(fast, constraints, least, most)


def _pools(ordered: Sequence[Device], speed: Speeds) -> Iterator[list[Device]]:
    """Those that are at least so fast and at most so busy with others' work, for each speed and each share that occurs.

    A step that waits for its host is as fast on a busy device, so that speed alone wouldn't tell the idle ones apart.
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
    """As many devices of each of several nodes: those with most memory first, counted by the node's smallest budget."""
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
    """How good each known link between these devices is; a pair without one has the slowest kind."""
    return {(link.a, link.b): _link_rank(link) for link in inventory.links if link.a in ids and link.b in ids}


def _link_rank(link: Link) -> _Rank:
    return LINKS.index(link.kind), link.bytes_per_second or 0.0


def _connected(devices: Sequence[Device], rank: Mapping[tuple[str, str], _Rank], threshold: _Rank) -> list[list[Device]]:
    """Groups within which links of at least the threshold reach everywhere, each in the given order."""
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
