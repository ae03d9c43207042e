from __future__ import annotations

import json
from typing import Any

import pytest

from lightning_autopar.devices.discover import probe
from lightning_autopar.devices.inventory import Device, DeviceProcess, Inventory, Link

GIB = 2**30


def gpu(index: int | None, *, node: int = 0) -> Device:
    return Device(id=f"GPU-{node}{index}", kind="cuda", name="GPU", total_bytes=GIB, free_bytes=GIB, index=index, node=node)


def inventory(*devices: Device) -> Inventory:
    links = tuple(Link(a=a.id, b=b.id, kind="nvlink") for a in devices for b in devices if a.id < b.id)
    return Inventory(devices=devices, links=links, host_total_bytes=8 * GIB, host_free_bytes=4 * GIB, source="nvml", notes=("a note",))


FOUR = inventory(*(gpu(index) for index in range(4)))


@pytest.mark.parametrize("devices", ["auto", -1, "-1", " auto "])
def test_auto_leaves_everything(devices: Any) -> None:
    assert FOUR.restrict(devices) == (FOUR, None)


@pytest.mark.parametrize(("devices", "bound"), [(1, 1), (3, 3), (4, 4), ("2", 2)])
def test_a_number_bounds_the_plan(devices: Any, bound: int) -> None:
    assert FOUR.restrict(devices) == (FOUR, bound)


@pytest.mark.parametrize(
    ("devices", "expected"),
    [([0, 2], ["GPU-00", "GPU-02"]), ((2, 0), ["GPU-00", "GPU-02"]), ("0,2", ["GPU-00", "GPU-02"]), ("3,", ["GPU-03"])],
)
def test_a_list_names_the_devices(devices: Any, expected: list[str]) -> None:
    restricted, bound = FOUR.restrict(devices)
    assert bound is None
    assert [device.id for device in restricted.devices] == expected
    assert [(link.a, link.b) for link in restricted.links] == ([tuple(expected)] if len(expected) == 2 else [])
    assert restricted.notes == FOUR.notes


@pytest.mark.parametrize(("devices", "left", "bound"), [(6, 4, 6), ([0, 7], 1, None), ([7], 0, None), ("auto", 4, None)])
def test_in_the_middle_of_a_run_devices_may_be_missing(devices: Any, left: int, bound: int | None) -> None:
    restricted, most = FOUR.restrict(devices, fewer=True)
    assert (len(restricted.devices), most) == (left, bound)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (0, r"devices=0: a number of devices is at least 1"),
        ("0", r"devices='0': a number of devices is at least 1"),
        (-2, r"devices=-2: .* -1 for all"),
        (5, r"devices=5 asks for 5, but there are 4; choose at most 4, or 'auto'"),
        ([], r"names no device"),
        (",", r"names no device"),
        ([1, 1], r"names a device twice"),
        ([0, 7], r"names device 7, but there are: 0, 1, 2, 3"),
        ([-1], r"names device -1"),
        ("two", r"devices='two' is neither a number nor indices"),
        ("0,x", r"neither a number nor indices"),
        (True, r"devices=True is neither"),
        ([True], r"is neither"),
        (None, r"devices=None is neither"),
        (1.5, r"is neither"),
        (["0"], r"is neither"),
    ],
)
def test_a_wrong_value_is_refused_with_its_remedy(devices: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FOUR.restrict(devices)


def test_there_being_no_device_is_said() -> None:
    with pytest.raises(ValueError, match=r"asks for 1, but there are 0; check the driver"):
        inventory().restrict(1)
    with pytest.raises(ValueError, match="there are: none"):
        inventory().restrict([0])
    assert inventory().restrict("auto") == (inventory(), None)


def test_numbers_count_on_each_node() -> None:
    two_nodes = inventory(*(gpu(index, node=node) for node in (0, 1) for index in range(2)))
    assert two_nodes.restrict(2) == (two_nodes, 4)
    assert two_nodes.restrict(1) == (two_nodes, 2)
    assert [device.id for device in two_nodes.restrict([1])[0].devices] == ["GPU-01", "GPU-11"]
    with pytest.raises(ValueError, match="there are 2"):
        two_nodes.restrict(3)


def test_a_device_that_this_process_cannot_count_is_not_named_by_index() -> None:
    mixed = inventory(gpu(0), gpu(None))
    assert [device.id for device in mixed.restrict([0])[0].devices] == ["GPU-00"]
    assert mixed.restrict(2) == (mixed, 2)


def test_device_and_link_by_id() -> None:
    assert FOUR.device("GPU-02").index == 2
    assert FOUR.link("GPU-03", "GPU-01") == Link(a="GPU-01", b="GPU-03", kind="nvlink")
    unlinked = Inventory(devices=(gpu(0), gpu(1), gpu(0, node=1)), host_total_bytes=1, host_free_bytes=1, source="nvml")
    assert unlinked.link("GPU-00", "GPU-01").kind == "host"
    assert unlinked.link("GPU-00", "GPU-10").kind == "network"
    with pytest.raises(ValueError, match="there is no device 'GPU-99' here; there are: GPU-00"):
        unlinked.device("GPU-99")


def test_to_dict_is_the_reports_object() -> None:
    device = Device(
        id="GPU-a",
        kind="cuda",
        name="NVIDIA H200",
        total_bytes=5,
        free_bytes=3,
        reserved_bytes=1,
        index=0,
        utilization=0.5,
        processes=(DeviceProcess(pid=7, used_bytes=None),),
    )
    data = Inventory(
        devices=(device,),
        links=(Link(a="GPU-a", b="GPU-b", kind="p2p", bytes_per_second=1e9),),
        host_total_bytes=10,
        host_free_bytes=9,
        source="nvml",
        notes=("one",),
    ).to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data == {
        "devices": [
            {
                "id": "GPU-a",
                "kind": "cuda",
                "name": "NVIDIA H200",
                "total_bytes": 5,
                "free_bytes": 3,
                "reserved_bytes": 1,
                "index": 0,
                "threads": None,
                "utilization": 0.5,
                "processes": [{"pid": 7, "used_bytes": None, "own": False}],
                "node": 0,
                "slowdown": 1.0,
                "error": None,
                "part_of": None,
                "in_doubt": False,
            }
        ],
        "links": [{"a": "GPU-a", "b": "GPU-b", "kind": "p2p", "bytes_per_second": 1e9}],
        "host": {"total_bytes": 10, "free_bytes": 9, "threads": 0, "nodes_bytes": [], "assumed_nodes": []},
        "source": "nvml",
        "notes": ["one"],
    }


def test_probe_splits_the_host_for_cpu() -> None:
    found = probe(accelerator="cpu", cpu_devices=3)
    assert [device.id for device in found.devices] == ["cpu:0", "cpu:1", "cpu:2"]
    assert found.source == "cpu"
    assert sum(device.free_bytes for device in found.devices) <= found.host_free_bytes
    assert all((device.threads or 0) >= 1 for device in found.devices)


@pytest.mark.parametrize("count", [0, -1, 4097])
def test_probe_refuses_a_number_of_cpu_devices_that_cannot_be(count: int) -> None:
    with pytest.raises(ValueError, match=f"1 to 4096 CPU devices, not {count}"):
        probe(accelerator="cpu", cpu_devices=count)


def test_probe_refuses_an_unknown_accelerator() -> None:
    with pytest.raises(ValueError, match="accelerator 'tpu'"):
        probe(accelerator="tpu")  # type: ignore[arg-type]


def test_the_variable_says_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_DEVICES", "2xcpu:1GiB")
    found = probe(accelerator="cuda")
    assert [(device.id, device.free_bytes) for device in found.devices] == [("cpu:0", GIB), ("cpu:1", GIB)]
    assert found.source == "spec"
    assert len(probe("3xcpu:1MiB").devices) == 3, "a spec given goes before the variable"


def test_an_empty_variable_is_no_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_DEVICES", "  ")
    assert probe(accelerator="cpu").source == "cpu"


def test_an_error_in_the_variable_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_DEVICES", "2xcpu:lots")
    with pytest.raises(ValueError, match=r"environment variable AUTOPAR_DEVICES: .*'lots' is no memory size"):
        probe()


def test_what_the_caller_holds_of_the_host_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_autopar.devices.host.host_memory", lambda: (16 * GIB, 4 * GIB))
    assert [device.free_bytes for device in probe("2xcpu").devices] == [2 * GIB, 2 * GIB]
    own = probe("2xcpu", own_host_bytes=2 * GIB)
    assert [device.free_bytes for device in own.devices] == [3 * GIB, 3 * GIB]
    assert own.host_free_bytes == 6 * GIB
    split = probe(accelerator="cpu", cpu_devices=2, own_host_bytes=2 * GIB)
    assert [device.free_bytes for device in split.devices] == [3 * GIB, 3 * GIB]
    # A budget is nobody's else, and there is no more than there is.
    assert probe("cpu:1GiB", own_host_bytes=2 * GIB).devices[0].free_bytes == GIB
    assert probe("cpu", own_host_bytes=99 * GIB).host_free_bytes == 16 * GIB
