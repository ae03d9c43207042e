"""Collectives by topology: what the narrowest place is, and what size and number of ranks do."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_autopar.devices.inventory import Device, Inventory, Link
from lightning_autopar.devices.spec import parse_spec
from lightning_autopar.timing.collectives import collective_seconds, topology
from lightning_autopar.timing.rates import COLLECTIVES, Collective
from tests.fakes.values import GIB, MIB, cpu, gpu, inventory

HOST = (64 * GIB, 64 * GIB)


def planned(spec: str) -> Inventory:
    return parse_spec(spec, host_bytes=HOST)


def seconds(here: Inventory, collective: Collective = "all_reduce", size_bytes: int = GIB, devices: int | None = None) -> float:
    return collective_seconds(collective, size_bytes, topology(here).group(here.devices[:devices]))


def bus(here: Inventory, collective: Collective = "all_reduce", size_bytes: int = 8 * GIB, devices: int | None = None) -> float:
    """Bytes per second as nccl-tests count them."""
    count = devices or len(here.devices)
    times = 2 if collective == "all_reduce" else 1
    return times * (count - 1) / count * size_bytes / seconds(here, collective, size_bytes, devices)


def test_large_all_reduces_reach_what_was_measured() -> None:
    # 235 GB/s on 8 A100, 482 with the switch's help on 8 H200, 313 on 8 MI300X and 48 on two of them
    # (https://github.com/stas00/ml-engineering, network/README.md and network/benchmarks/README.md).
    assert bus(planned("8xA100-80GB")) == pytest.approx(235e9, rel=0.05)
    assert bus(planned("8xH200")) == pytest.approx(482e9, rel=0.03)
    assert bus(planned("8xMI300X")) == pytest.approx(313e9, rel=0.05)
    assert bus(planned("8xMI300X"), devices=2) == pytest.approx(48e9, rel=0.1)
    assert bus(planned("8xH200"), "all_gather") < 400e9  # which the switch doesn't help with


def test_a_switch_helps_all_reduces_of_many_alone() -> None:
    assert bus(planned("2xH100-80GB")) < 400e9
    assert bus(planned("8xA100-80GB")) == pytest.approx(bus(planned("8xA100-80GB"), "all_gather"), rel=0.01)


def test_cards_without_peer_access_go_through_the_host() -> None:
    peers, strangers = planned("4xA40"), planned("4xRTX4090")
    direct = tuple(replace(link, kind="p2p") for link in strangers.links)
    assert bus(strangers) < 0.6 * bus(replace(strangers, links=direct))
    assert bus(peers) > bus(strangers)


def test_the_slowest_hop_of_the_best_way_counts() -> None:
    links = (
        Link(a="GPU-0000", b="GPU-0001", kind="nvlink", bytes_per_second=100e9),
        Link(a="GPU-0001", b="GPU-0002", kind="nvlink", bytes_per_second=50e9),
        Link(a="GPU-0000", b="GPU-0002", kind="pcie", bytes_per_second=10e9),
    )
    here = inventory(gpu(0), gpu(1), gpu(2), links=links)
    found, (a, b, c) = topology(here), here.devices
    groups = (found.group(each) for each in ((a, b, c), (c, b), (a, b)))
    whole, slow, fast = (min(group.intra, group.inter) for group in groups)
    assert whole == pytest.approx(slow) == pytest.approx(0.5 * fast)
    assert found.pair(a, c)[1] == found.pair(c, a)[1] < whole


def test_all_adapters_of_a_node_carry_what_leaves_it() -> None:
    near, far = planned("8xA100-80GB"), planned("2x8xA100-80GB")
    assert bus(far) == pytest.approx(8 * 25e9 * 0.96, rel=0.02)  # eight adapters of 200 Gb/s in the maker's system
    assert bus(far) < bus(near)
    slow = replace(far, links=(*far.links, Link(a=far.devices[0].id, b=far.devices[8].id, kind="network", bytes_per_second=1.25e9)))
    assert bus(slow) == pytest.approx(8 * 1.25e9 * 0.96, rel=0.02)
    unknown = inventory(gpu(0), gpu(1, node=1))
    assert bus(unknown) < 2e9


def test_more_ranks_take_more_steps() -> None:
    small = [seconds(planned(f"{nodes}x8xH100-80GB"), size_bytes=1024) for nodes in (1, 2, 8, 32)]
    assert small == sorted(small)
    assert small[0] < 100e-6
    assert small[-1] < 32 * small[0]  # a tree's steps grow with the logarithm
    gathers = [seconds(planned(f"{nodes}x8xH100-80GB"), "all_gather", 1024) for nodes in (1, 2, 8, 32)]
    assert gathers == sorted(gathers)
    assert gathers[-1] > small[-1]  # a ring's don't


def test_alone_there_is_nothing_to_say_and_on_cores_gloo_says_it() -> None:
    assert seconds(inventory(gpu(0))) == 0
    here = inventory(cpu(0), cpu(1))
    assert seconds(here, "reduce_scatter") == pytest.approx(2 * seconds(here, "all_gather"), rel=0.01)
    assert bus(here) < 5e9


@given(
    collective=st.sampled_from(COLLECTIVES),
    size_bytes=st.integers(1, 10 * GIB),
    more=st.integers(0, GIB),
    speed=st.floats(1e9, 1e12),
    factor=st.floats(1, 100),
)
def test_more_bytes_are_never_faster_and_faster_links_never_slower(
    collective: Collective, size_bytes: int, more: int, speed: float, factor: float
) -> None:
    devices: tuple[Device, ...] = (gpu(0), gpu(1), gpu(2, node=1), gpu(3, node=1))

    def here(rate: float) -> Inventory:
        return inventory(
            *devices,
            links=tuple(
                Link(a=a.id, b=b.id, kind="nvlink" if a.node == b.node else "network", bytes_per_second=rate)
                for a, b in itertools.combinations(devices, 2)
            ),
        )

    assert seconds(here(speed), collective, size_bytes + more) >= seconds(here(speed), collective, size_bytes)
    assert seconds(here(speed * factor), collective, size_bytes) <= seconds(here(speed), collective, size_bytes) * (1 + 1e-9)


def test_the_order_of_devices_means_nothing() -> None:
    here = planned("2x4xA100-80GB")
    links = topology(here)
    forward, backward = links.group(here.devices), links.group(here.devices[::-1])
    assert collective_seconds("all_reduce", 100 * MIB, forward) == collective_seconds("all_reduce", 100 * MIB, backward)
