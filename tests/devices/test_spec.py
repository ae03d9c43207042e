from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_autopar.devices.catalogue import KNOWN_DEVICES
from lightning_autopar.devices.inventory import Inventory
from lightning_autopar.devices.spec import parse_spec

GIB = 2**30
HOST = (64 * GIB, 48 * GIB)


def parse(spec: str, *, cores: int = 8) -> Inventory:
    return parse_spec(spec, host_bytes=HOST, cores=cores)


def test_cpu_devices_with_a_budget() -> None:
    inventory = parse("2xcpu:4GiB")
    assert [(device.id, device.kind, device.index, device.threads) for device in inventory.devices] == [
        ("cpu:0", "cpu", 0, 4),
        ("cpu:1", "cpu", 1, 4),
    ]
    assert {(device.total_bytes, device.free_bytes) for device in inventory.devices} == {(4 * GIB, 4 * GIB)}
    assert (inventory.host_total_bytes, inventory.host_free_bytes) == HOST
    assert inventory.source == "spec"
    assert inventory.notes == ()
    assert [(link.a, link.b, link.kind) for link in inventory.links] == [("cpu:0", "cpu:1", "host")]


def test_uneven_budgets() -> None:
    assert [(device.id, device.free_bytes) for device in parse("cpu:2GiB, 2 x CPU : 6GiB").devices] == [
        ("cpu:0", 2 * GIB),
        ("cpu:1", 6 * GIB),
        ("cpu:2", 6 * GIB),
    ]


def test_without_a_budget_the_free_memory_is_shared() -> None:
    (whole,) = parse("cpu").devices
    assert (whole.total_bytes, whole.free_bytes, whole.threads) == (64 * GIB, 48 * GIB, 8)
    assert [device.free_bytes for device in parse("2xcpu").devices] == [24 * GIB] * 2
    assert [device.free_bytes for device in parse("cpu:16GiB,2xcpu").devices] == [16 * GIB, 16 * GIB, 16 * GIB]


def test_every_device_has_a_thread() -> None:
    assert [device.threads for device in parse("5xcpu:1GiB", cores=2).devices] == [1] * 5


def test_budgets_beyond_the_host_are_kept_and_noted() -> None:
    inventory = parse("4xcpu:16GiB")
    assert [device.free_bytes for device in inventory.devices] == [16 * GIB] * 4
    assert "come to 64 GiB, but the host has 48 GiB free of 64 GiB" in inventory.notes[0]


def test_catalogue_devices() -> None:
    inventory = parse("8xh100-80gb")
    assert [device.id for device in inventory.devices] == [f"H100-80GB:{number}" for number in range(8)]
    device = inventory.devices[3]
    total_bytes = KNOWN_DEVICES["H100-80GB"].total_bytes
    assert (device.kind, device.index, device.node, device.total_bytes, device.free_bytes) == ("catalogue", 3, 0, total_bytes, total_bytes)
    assert len(inventory.links) == 28
    assert {(link.kind, link.bytes_per_second) for link in inventory.links} == {("nvlink", 450e9)}
    assert "not run on" in inventory.notes[0]


@pytest.mark.parametrize(
    ("spec", "hosts_gib", "assumed"),
    [
        ("2x8xA100-80GB@512GiB", [512, 512], ()),
        ("8xH200", [2048], (0,)),
        ("T4, L4 @ 32GiB", [32], ()),
        ("2xT4@32GiB,2x4xB200@1TiB,4xV100-32GB-PCIe@32GiB", [32, 1024, 1024], ()),
        ("2x8xH200,T4@64GiB", [2048, 2048, 64], (0, 1)),
    ],
)
def test_hosts_of_catalogue_devices(spec: str, hosts_gib: list[int], assumed: tuple[int, ...]) -> None:
    inventory = parse(spec)
    assert inventory.node_host_bytes == tuple(size * GIB for size in hosts_gib)
    assert inventory.assumed_hosts == assumed
    assert inventory.host_free_bytes == inventory.host_total_bytes == inventory.host_free_on(0)
    assert inventory.host_free_on(len(hosts_gib) - 1) == hosts_gib[-1] * GIB
    assert inventory.to_dict()["host"]["assumed_nodes"] == list(assumed)


def test_an_assumed_host_has_twice_its_devices_memory() -> None:
    inventory = parse("2xT4,L4")
    assert inventory.host_free_bytes == 2 * sum(device.total_bytes for device in inventory.devices)


def test_nodes() -> None:
    inventory = parse("2x8xA100-40GB")
    assert [device.node for device in inventory.devices] == [0] * 8 + [1] * 8
    assert [device.index for device in inventory.devices] == list(range(8)) * 2
    assert [device.id for device in inventory.devices] == [f"A100-40GB:{number}" for number in range(16)]
    assert {(link.kind, inventory.device(link.a).node == inventory.device(link.b).node) for link in inventory.links} == {("nvlink", True)}
    assert len(inventory.links) == 2 * 28, "none across nodes, which counts as the network"
    across = inventory.link("A100-40GB:7", "A100-40GB:8")
    assert (across.kind, across.bytes_per_second) == ("network", None)


def test_host_threads() -> None:
    assert parse_spec("4xcpu:1MiB", cores=2).host_threads == 2
    assert {device.threads for device in parse_spec("4xcpu:1MiB", cores=2).devices} == {1}, "ranks that share cores"
    assert parse_spec("2xcpu:1MiB", cores=7).host_threads == 7


def test_mixed_models() -> None:
    inventory = parse("2xH200,T4,H200")
    assert [(device.id, device.index) for device in inventory.devices] == [
        ("H200-141GB:0", 0),
        ("H200-141GB:1", 1),
        ("T4-16GB:0", 2),
        ("H200-141GB:2", 3),
    ]
    assert inventory.link("H200-141GB:0", "H200-141GB:2").kind == "nvlink"
    slow = inventory.link("H200-141GB:0", "T4-16GB:0")
    assert (slow.kind, slow.bytes_per_second) == ("pcie", KNOWN_DEVICES["T4-16GB"].pcie_bytes_per_second)


def test_parts_without_nodes_share_one() -> None:
    inventory = parse("T4,2x2xH200,L4")
    assert [(device.name, device.node) for device in inventory.devices] == [
        ("T4-16GB", 0),
        ("L4-24GB", 0),
        ("H200-141GB", 1),
        ("H200-141GB", 1),
        ("H200-141GB", 2),
        ("H200-141GB", 2),
    ]
    assert [device.index for device in inventory.devices] == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", r"can't be empty, but is ''.*'2xcpu:4GiB'"),
        ("cpu,,cpu", r"'' is no device.*'2xcpu:4GiB'"),
        ("2.5xcpu:1GiB", r"'2\.5xcpu:1GiB' is no device.*'2xcpu:4GiB'"),
        ("0xcpu:1GiB", r"has a count of 0, but one is at least 1"),
        ("-2xcpu:1GiB", r"has a count of -2"),
        ("0x8xH200", r"has a count of 0"),
        ("cpu:", r"'' is no memory size"),
        ("cpu:0", r"must be positive"),
        ("cpu:1", r"has 1 bytes, but a CPU device has at least 1 MiB.*'cpu:4GiB'"),
        ("cpu:4GiB,cpu:lots", r"'cpu:lots': 'lots' is no memory size"),
        ("2x2xcpu:1GiB", r"CPU devices are this host's; write '4xcpu:4GiB'"),
        ("cpu:48GiB,cpu", r"leave nothing for 1 CPU device"),
        ("cpu,H200", r"mixes 'cpu', which can be run on, with 'H200'"),
        ("2xH200,cpu:4GiB", r"mixes 'cpu:4GiB', .* with '2xH200'"),
        ("8xH100", r"'8xH100': 'H100' may be several devices: write H100-80GB or "),
        ("H300", r"there is no device 'H300' in the catalogue; did you mean H"),
        ("cuda:0", r"real GPUs are found without one and chosen by Trainer"),
        ("2xgpu", r"real GPUs are found without one"),
        ("auto", r"real GPUs are found without one"),
        ("8xH200:40GiB", r"has a memory budget, which only CPU devices have; write '8xH200-141GB'"),
        ("T4@32GiB,L4@64GiB", r"'L4@64GiB' has 64 GiB of host memory, but its node has 32 GiB; say it once for a node"),
        ("cpu:2GiB@4GiB", r"CPU devices are this host's, whose memory is known; leave '@4GiB' out"),
        ("T4@lots", r"'T4@lots': host memory 'lots' is no memory size"),
        ("T4@16", r"has a host of 16 bytes, but one has at least 1 GiB; write a size such as 'T4@64GiB'"),
        ("4097xcpu:1MiB", r"describes 4097 devices; at most 4096"),
        ("100x100xH200", r"describes 10000 devices"),
    ],
)
def test_a_wrong_spec_names_the_part_and_the_remedy(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(spec)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), min_size=1, max_size=5))
def test_any_list_of_budgets_comes_back(parts: list[tuple[int, int]]) -> None:
    inventory = parse(",".join(f"{count}xcpu:{gib}GiB" for count, gib in parts))
    assert [device.free_bytes for device in inventory.devices] == [gib * GIB for count, gib in parts for _ in range(count)]
    assert [device.id for device in inventory.devices] == [f"cpu:{index}" for index in range(len(inventory.devices))]
    assert bool(inventory.notes) is (sum(count * gib for count, gib in parts) > 48)


@given(st.text(alphabet="0123456789xcpuHA-:GiB, ", max_size=20))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        inventory = parse(text)
    except ValueError:
        return
    assert inventory.devices
    assert len({device.id for device in inventory.devices}) == len(inventory.devices)
    assert all(0 < device.free_bytes <= device.total_bytes for device in inventory.devices)


def test_a_users_bound_on_threads_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """``OMP_NUM_THREADS`` is the user's setting: a device doesn't get more threads for there being more cores."""
    monkeypatch.setattr("lightning_autopar.devices.spec.host_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [device.threads for device in parse_spec("2xcpu").devices] == [4, 4]
    monkeypatch.setenv("OMP_NUM_THREADS", "3,2")
    assert [device.threads for device in parse_spec("2xcpu").devices] == [3, 3]
    monkeypatch.setenv("OMP_NUM_THREADS", "16")
    assert [device.threads for device in parse_spec("2xcpu").devices] == [4, 4]
