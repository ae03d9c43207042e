from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from lightning_autopar.devices.discover import probe
from lightning_autopar.devices.inventory import Device, Inventory
from lightning_autopar.devices.simulated_neighbours import (
    NEIGHBOURS_VARIABLE,
    Neighbour,
    read_neighbours,
    with_neighbours,
    write_neighbours,
)

GIB = 1024**3


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the neighbours are set; nobody is there yet."""
    path = tmp_path / "neighbours.json"
    monkeypatch.setenv(NEIGHBOURS_VARIABLE, str(path))
    return path


def free_bytes(inventory: Inventory) -> dict[str, int]:
    return {device.id: device.free_bytes for device in inventory.devices}


def test_nobody_is_there_without_a_file(file: Path) -> None:
    assert not file.exists()
    assert read_neighbours() == {}
    assert free_bytes(probe("2xcpu:4GiB")) == {"cpu:0": 4 * GIB, "cpu:1": 4 * GIB}


def test_without_the_variable_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NEIGHBOURS_VARIABLE, raising=False)
    assert read_neighbours() == {}


def test_memory_is_taken_and_given_back(file: Path) -> None:
    file.write_text('{"cpu:0": {"taken": "1GiB"}, "cpu:1": {"taken": 1024}}')
    inventory = probe("2xcpu:4GiB")
    assert free_bytes(inventory) == {"cpu:0": 3 * GIB, "cpu:1": 4 * GIB - 1024}
    assert [device.total_bytes for device in inventory.devices] == [4 * GIB, 4 * GIB]
    assert any("1 GiB are taken" in note for note in inventory.notes)
    file.write_text("{}")
    assert free_bytes(probe("2xcpu:4GiB")) == {"cpu:0": 4 * GIB, "cpu:1": 4 * GIB}


def test_no_more_is_taken_than_there_is(file: Path) -> None:
    file.write_text('{"cpu:0": {"taken": "40GiB"}}')
    assert free_bytes(probe("cpu:4GiB")) == {"cpu:0": 0}


def test_a_device_is_gone_slowed_or_in_error(file: Path) -> None:
    file.write_text('{"cpu:0": {"gone": true}, "cpu:1": {"slowdown": 1.5, "error": "XID 79"}, "cpu:2": {}}')
    inventory = probe("3xcpu:1GiB")
    assert [(device.id, device.slowdown, device.error) for device in inventory.devices] == [("cpu:1", 1.5, "XID 79"), ("cpu:2", 1.0, None)]
    assert [(link.a, link.b) for link in inventory.links] == [("cpu:1", "cpu:2")]
    assert inventory.to_dict()["devices"][0]["error"] == "XID 79"


def test_the_hosts_own_cpu_devices_have_neighbours_too(file: Path) -> None:
    alone = probe(accelerator="cpu", cpu_devices=2)
    file.write_text('{"cpu:1": {"gone": true}}')
    assert len(alone.devices) == 2
    assert [device.id for device in probe(accelerator="cpu", cpu_devices=2).devices] == ["cpu:0"]


def test_other_devices_have_none(file: Path) -> None:
    """A GPU's neighbours are real."""
    gpu = Device(id="cpu:0", kind="cuda", name="a GPU of that name", total_bytes=2, free_bytes=2)
    there = Inventory(devices=(gpu,), host_total_bytes=1, host_free_bytes=1, source="nvml")
    assert with_neighbours(there, {"cpu:0": Neighbour(gone=True), "cpu:9": Neighbour(taken_bytes=1)}) == there
    file.write_text('{"H100-80GB:0": {"taken": "1GiB"}}')
    assert probe("H100-80GB").devices[0].free_bytes == probe("H100-80GB").devices[0].total_bytes


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("{", "Expecting"),
        ("[]", "it holds []"),
        ("7", "it holds 7"),
        ('{"cpu:0": 1}', "'cpu:0' is 1"),
        ('{"cpu:0": {"takn": 1}}', "'takn'"),
        ('{"cpu:0": {"taken": "much"}}', "'much'"),
        ('{"cpu:0": {"taken": -1}}', "-1"),
        ('{"cpu:0": {"taken": true}}', "True"),
        ('{"cpu:0": {"taken": 1.5}}', "1.5"),
        ('{"cpu:0": {"slowdown": 0.5}}', "0.5"),
        ('{"cpu:0": {"slowdown": NaN}}', "nan"),
        ('{"cpu:0": {"slowdown": "2"}}', "'2'"),
        ('{"cpu:0": {"gone": 1}}', "'gone'"),
        ('{"cpu:0": {"error": 79}}', "79"),
    ],
)
def test_a_malformed_file_is_refused(file: Path, text: str, wrong: str) -> None:
    file.write_text(text)
    with pytest.raises(ValueError) as refusal:
        probe("cpu:1GiB")
    assert all(word in str(refusal.value) for word in (NEIGHBOURS_VARIABLE, str(file), wrong))


def test_a_file_that_cant_be_read_is_refused(file: Path) -> None:
    file.mkdir()
    with pytest.raises(ValueError, match=NEIGHBOURS_VARIABLE):
        read_neighbours()


@pytest.mark.parametrize("settings", [{"taken_bytes": 5}, {"slowdown": 2.5}, {"gone": True}, {"error": "XID 48"}, {}])
def test_what_is_written_is_read(file: Path, settings: dict[str, Any]) -> None:
    neighbours = {"cpu:0": Neighbour(**settings)}
    write_neighbours(file, neighbours)
    assert read_neighbours() == neighbours
    assert list(file.parent.iterdir()) == [file]


def test_whoever_reads_sees_one_file_or_the_other(file: Path) -> None:
    """Long files, replaced while they are read."""
    states = [{f"cpu:{index}": Neighbour(taken_bytes=size) for index in range(300)} for size in (1, 2)]
    write_neighbours(file, states[0])
    done = threading.Event()

    def replace_often() -> None:
        for turn in range(100):
            write_neighbours(file, states[turn % 2])
        done.set()

    thread = threading.Thread(target=replace_often)
    thread.start()
    while not done.is_set():
        assert read_neighbours() in states
    thread.join()
    assert json.loads(file.read_text())["cpu:0"]["taken"] == 2
