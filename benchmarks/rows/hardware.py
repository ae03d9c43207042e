"""The GPUs that a row was measured on, as an inventory of catalogue devices. Knows the form of a row; measures nothing."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from itertools import combinations

from lightning_autopar.devices import catalogue
from lightning_autopar.devices.inventory import Inventory, Link
from lightning_autopar.devices.spec import parse_spec
from rows.row import Fields, NotBuilt

#: Of another run's host nothing is known; it is taken to have room for what is offloaded.
_HOST_BYTES = (2 << 40, 2 << 40)


def inventory(fields: Fields) -> Inventory:
    """The row's devices on their nodes, with the links that it names.

    Raises:
        NotBuilt: if the GPU is none of the catalogue.
    """
    model = device_model(fields)
    count = fields.whole("n_gpus", 1)
    said = fields.row.get("gpus_per_node")
    each = min(count, int(said) if isinstance(said, (int, float)) and said >= 1 else 8)
    while count % each:
        each -= 1
    network, slow, direct = _interconnect(fields, count > each, each)
    return _inventory(model, count // each, each, network, slow, direct)


@lru_cache(maxsize=256)
def _inventory(model: str, nodes: int, each: int, network: float | None, slow: bool, direct: bool) -> Inventory:
    """Devices of one model."""
    spec = f"{nodes}x{each}x{model}" if nodes > 1 else f"{each}x{model}"
    found = parse_spec(spec, host_bytes=_HOST_BYTES, cores=64)
    links = list(found.links)
    if slow or direct:
        pcie = catalogue.KNOWN_DEVICES[model].pcie_bytes_per_second
        kind = "p2p" if direct else "host"
        links = [Link(a=link.a, b=link.b, kind=kind, bytes_per_second=pcie) for link in links if link.kind != "network"]  # type: ignore[arg-type]
    if network is not None:
        first = {device.node: device.id for device in reversed(found.devices)}
        ids = [first[node] for node in sorted(first)]
        links += [Link(a=a, b=b, kind="network", bytes_per_second=network) for a, b in combinations(ids, 2)]
    return replace(found, links=tuple(links))


def _interconnect(fields: Fields, several_nodes: bool, each: int) -> tuple[float | None, bool, bool]:
    """Bytes per second that each device has for itself between nodes, None for the maker's reference system; whether a node's devices
    reach each other through the host's memory alone; and whether over PCIe though they could over NVLink."""
    said = fields.text("interconnect")
    network = None
    if several_nodes:
        rate = re.search(r"(?:(\d+)\s*x\s*)?(\d+(?:\.\d+)?)\s*gb(?:/s|ps|it)", said)
        if rate is not None and "node" in said:
            network = float(rate[1] or 1) * float(rate[2]) / 8 * 1e9
            if ("bandwidth" in said and "4 nodes" in said) or "per node" in said or rate[1] or "nodes" in said:
                network /= each
        elif "ethernet" in said:
            network = 1.25e9 / each
            fields.assume("the speed of the network isn't published: 10 Gb/s a node")
        else:
            fields.assume("the speed of the network isn't published: that of the maker's reference system")
    slow = "p2p_disable" in said or "host memory" in said
    without = "no nvlink" in said or ("pcie" in said and "nvlink" not in said)
    if each > 1 and "nvlink" not in said and "not stated" in said and not without:
        fields.assume("how its devices are linked isn't published: as those of their model are in its maker's reference system")
    return network, slow, without and not slow


def host_slowness(fields: Fields) -> float:
    """How many times slower the host's memory is than that of the server whose CPU-Adam the data sheet knows: six channels of DDR4-2666 on
    each of two sockets, 256 GB/s. A desktop's processor has two, of DDR4-3200 51 GB/s, of DDR5-5600 90 GB/s."""
    said = fields.text("interconnect")
    if not re.search(r"ryzen|core i\d|threadripper", said):
        return 1.0
    channels = 4 if "threadripper" in said else 2
    return 256.0 / (channels * (44.8 if "ddr5" in said else 25.6))


def device_model(fields: Fields) -> str:
    """The row's GPU by the catalogue's name.

    Raises:
        NotBuilt: if it is none of the catalogue.
    """
    said = fields.text("gpu_model")
    size = fields.dimension_of("gpu_memory_gib")
    if not said:
        fields.assume("the GPU isn't published: H100-80GB")
        return "H100-80GB"
    found = _model(said, size)
    if found is None:
        raise NotBuilt(f"no GPU {fields.row.get('gpu_model')!r} in the catalogue")
    return found


@lru_cache(maxsize=256)
def _model(said: str, size: float | None) -> str | None:
    """The model whose words are all said: the most specific one, then that whose memory is nearest."""
    squeezed = re.sub(r"[^a-z0-9]+", "", said.replace("super 16gb", "super"))
    if "sm100" in squeezed or ("blackwell" in squeezed and "rtx" not in squeezed):
        squeezed += "b200"
    told = re.search(r"(\d+)\s*gi?b", said)
    memory = float(told[1]) if told else size
    best: tuple[tuple[float, ...], str] | None = None
    for name in catalogue.KNOWN_DEVICES:
        parts = name.lower().split("-")
        chip = re.sub(r"[^a-z0-9]+", "", parts[0])
        short = chip.removeprefix("rtx").removeprefix("gtx")
        if short not in squeezed or not re.search(rf"(?<![a-z0-9]){short}|{short}", squeezed):
            continue
        capacity = float(re.sub(r"\D", "", parts[1]))
        pcie = ("pcie" in squeezed) == ("pcie" in parts)
        nvl = ("nvl" in parts) == bool(re.search(r"\bnvl\b", said))
        key = (float(len(short)), float(pcie), float(nvl), -abs((memory or capacity) - capacity))
        if best is None or key > best[0]:
            best = key, name
    return best[1] if best else None
