"""What leases promise of devices, less what their runs' processes show there already."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_autopar.devices.inventory import Device, DeviceProcess, Inventory
from lightning_autopar.sharing import ledger as promised
from lightning_autopar.sharing.lease_files import Lease
from lightning_autopar.sharing.ledger import is_leased, open_ledger, promised_bytes, room_bytes, without_leased


def gpu(*processes: DeviceProcess, free_bytes: int = 80, **options: object) -> Device:
    return Device(id="GPU-0", kind="cuda", name="GPU", total_bytes=100, free_bytes=free_bytes, processes=processes, **options)  # type: ignore[arg-type]


def lease(pid: int, size: int, *, here: bool = True, device: str = "GPU-0", name: str = "a") -> Lease:
    return Lease(name=name, uid=0, pid=pid, here=here, run="run", bytes={device: size})


def inventory(*devices: Device) -> Inventory:
    return Inventory(devices=devices, host_total_bytes=1, host_free_bytes=1, source="nvml")


@pytest.fixture
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver counts processes as they are counted here."""
    monkeypatch.setattr(promised, "is_drivers", lambda pid: True)


@pytest.mark.usefixtures("on_the_host")
def test_what_a_run_has_taken_is_promised_no_more() -> None:
    me = os.getpid()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        seen = gpu(DeviceProcess(pid=child.pid, used_bytes=20), DeviceProcess(pid=1, used_bytes=9))
        assert promised_bytes(gpu(), [lease(me, 30)]) == 30
        assert promised_bytes(seen, [lease(me, 30)]) == 10, "a worker's memory is its run's"
        assert promised_bytes(seen, [lease(me, 15)]) == 0, "never less than nothing"
        assert promised_bytes(seen, [lease(me, 30), lease(me, 30, name="b")]) == 40, "a run in a move has two"
        assert promised_bytes(seen, [lease(me, 30), lease(2**22 + 1, 5)]) == 15
    finally:
        child.communicate(b"\n")


@pytest.mark.usefixtures("on_the_host")
@pytest.mark.parametrize("used_bytes", [None, 20])
def test_a_containers_processes_are_not_known(used_bytes: int | None) -> None:
    me = os.getpid()
    seen = gpu(DeviceProcess(pid=me, used_bytes=used_bytes))
    assert promised_bytes(seen, [lease(me, 30, here=False)]) == 30
    assert promised_bytes(seen, [lease(me, 30)]) == (30 if used_bytes is None else 10)


def test_in_a_container_a_number_of_the_drivers_is_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promised, "is_drivers", lambda pid: False)
    assert promised_bytes(gpu(DeviceProcess(pid=os.getpid(), used_bytes=20)), [lease(os.getpid(), 30)]) == 30


def test_an_inventory_less_promises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpu = Device(id="cpu:0", kind="cpu", name="CPU", total_bytes=50, free_bytes=50)
    far = gpu(node=1)
    here = inventory(gpu(), cpu)
    leases = [lease(2**22 + 1, 30), lease(2**22 + 1, 20, device="cpu:0", name="b")]
    monkeypatch.delenv("AUTOPAR_LEDGER", raising=False)
    assert [device.free_bytes for device in without_leased(here, leases).devices] == [50, 50], "CPU devices are each run's own idea"
    assert not is_leased(far)
    assert without_leased(here, []) is here
    monkeypatch.setenv("AUTOPAR_LEDGER", str(tmp_path))
    assert [device.free_bytes for device in without_leased(here, leases).devices] == [50, 30]
    assert room_bytes(here, [lease(2**22 + 1, 300)]) == {"GPU-0": 0, "cpu:0": 50}


def test_the_ledger_that_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AUTOPAR_LEDGER", "off")
    assert open_ledger() is None
    monkeypatch.setenv("AUTOPAR_LEDGER", str(tmp_path))
    found = open_ledger()
    assert found is not None
    assert found.folder == tmp_path
    monkeypatch.setenv("AUTOPAR_LEDGER", str(tmp_path / "missing"))
    with pytest.raises(ValueError, match=r"AUTOPAR_LEDGER=.*missing can't be used"):
        open_ledger()
