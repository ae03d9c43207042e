"""The command line's list of devices: who is on which, what is free, what a plan would see."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightning_autopar.cli import device_users as users
from lightning_autopar.cli import devices, main
from lightning_autopar.devices.inventory import Device, DeviceProcess, Inventory
from lightning_autopar.sharing import ledger as promised
from lightning_autopar.sharing.lease_files import Lease
from lightning_autopar.sharing.ledger import Ledger
from lightning_autopar.sharing.process_ids import is_drivers
from lightning_autopar.sharing.runs.folders import user_name
from lightning_autopar.sharing.runs.status import open_run
from lightning_autopar.timing.measured_curves import Calibration, Curve

GIB = 1 << 30
UUIDS = ("GPU-7c1e9b04-1111-2222-3333-444455556666", "GPU-90aa77b1-1111-2222-3333-444455556666")


def _gpu(number: int, **more: Any) -> Device:
    values = {
        "id": UUIDS[number],
        "kind": "cuda",
        "name": "NVIDIA H200",
        "total_bytes": 100 * GIB,
        "free_bytes": 100 * GIB,
        "index": number,
    }
    return Device(**{**values, **more})


@pytest.fixture
def inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inventory:
    """Two GPUs: one that this process and a stranger are on, and one that has failed."""
    monkeypatch.setenv("AUTOPAR_RUNS", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    strangers = DeviceProcess(pid=2**22 + 1, used_bytes=None)  # more than Linux ever counts to
    there = _gpu(0, free_bytes=20 * GIB, utilization=0.97, processes=(DeviceProcess(pid=os.getpid(), used_bytes=3 * GIB), strangers))
    found = Inventory(
        devices=(there, _gpu(1, error="XID 79")), host_total_bytes=64 * GIB, host_free_bytes=16 * GIB, source="nvml", notes=("a [note]",)
    )
    monkeypatch.setattr(devices, "probe", lambda *_, **__: found)
    monkeypatch.setattr(devices, "accelerator_here", lambda: "cuda")
    monkeypatch.setattr(users, "is_drivers", lambda pid: True)
    monkeypatch.setattr(promised, "is_drivers", lambda pid: True)
    return found


def test_what_runs_were_promised_is_shown_and_not_there_for_a_plan(
    inventory: Inventory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ledger = tmp_path / "ledger"
    ledger.mkdir()
    monkeypatch.setenv("AUTOPAR_LEDGER", str(ledger))
    wants = {UUIDS[0]: 5 * GIB}
    with Ledger(ledger).claim(wants, lambda: lambda leases: wants, run="train (1)") as held:  # type: ignore[union-attr]  # nobody else is there
        assert held.bytes == wants
        assert main(["devices"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert next(line for line in lines if line.startswith("cuda:0")).split()[-2:] == ["17.1", "GiB"], "3 GiB of the 5 are taken already"
        assert any(line.split()[1:] == ["5", "GiB", "promised", "to", "train", "(1)", "of", user_name()] for line in lines)
        assert main(["devices", "--json"]) == 0
        first, second = json.loads(capsys.readouterr().out)["devices"]
        assert first["leases"] == [{"run": "train (1)", "user": user_name(), "pid": os.getpid(), "bytes": 5 * GIB}]
        assert second["leases"] == []


def test_it_says_who_is_where_and_what_a_plan_would_see(inventory: Inventory, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["device", "used", "of", "busy", "a", "plan", "sees"]
    first, failed = (next(line for line in lines if line.startswith(label)) for label in ("cuda:0", "cuda:1"))
    assert first.split()[-6:] == ["GiB", "100", "GiB", "97%", "19", "GiB"]
    assert first.count("█") == 16
    assert failed.split()[-2:] == ["0", "B"]
    assert any("XID 79" in line for line in lines)
    assert any("48 GiB of 64 GiB used" in line for line in lines)
    assert "a [note]" in lines
    (own,) = (line for line in lines if line.split()[:1] == [str(os.getpid())])
    assert own.split()[1:4] == ["3", "GiB", psutil.Process().username()]
    assert any(line.split() == [str(2**22 + 1), "?", "MiB", "not", "told"] for line in lines)
    assert max(len(line) for line in lines if "░" in line) <= 80


def test_no_heading_stands_over_nothing(inventory: Inventory, capsys: pytest.CaptureFixture[str]) -> None:
    """Of other devices than these something may be measured."""
    curve = Curve(subject="another", thing="add", dtype="fp32", ranks=1, sizes=(1, 2), seconds=(1.0, 2.0))
    devices._print_devices(inventory, Calibration(curves={("another", "add", "fp32"): {1: curve}}, day="2026-11-24"), {}, [])
    assert "measured on" not in capsys.readouterr().out


def test_a_users_own_run_is_named(inventory: Inventory, capsys: pytest.CaptureFixture[str]) -> None:
    with open_run("train_gpt.py") as files:  # this process is its agent
        files.show(replace(files.status, state="running", devices=UUIDS, leased_bytes=dict.fromkeys(UUIDS, 5 * GIB)))
        assert main(["devices"]) == 0
        told = [line for line in capsys.readouterr().out.splitlines() if f"[your run {files.run_id}]" in line]
        assert len(told) == 2  # by its process on one, and by its word on the other
        assert "5 GiB claimed" in told[1]
        assert main(["devices", "--json"]) == 0
        first, second = json.loads(capsys.readouterr().out)["devices"]
    assert [user["run"] for user in first["users"]] == [files.run_id, None]
    assert first["users"][0]["used_bytes"] == 3 * GIB
    assert (first["plan_bytes"], second["plan_bytes"]) == (19 * GIB, 0)
    assert second["users"][0]["leased_bytes"] == 5 * GIB


def test_another_users_run_is_named_as_theirs(
    inventory: Inventory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_run("train_gpt.py") as files:
        theirs = replace(files.status, user="ada", devices=UUIDS[1:], predicted_bytes={UUIDS[1]: 5 * GIB})
        monkeypatch.setattr(devices, "everyones_runs", lambda: [theirs])
        assert main(["devices"]) == 0
        assert f"5 GiB claimed  ada  [ada's run {files.run_id}]" in capsys.readouterr().out
        # A name that somebody else's run has, too, hides nobody.
        monkeypatch.setattr(
            devices, "everyones_runs", lambda: [replace(files.status, devices=UUIDS[:1]), replace(theirs, devices=UUIDS[:1])]
        )
        assert main(["devices"]) == 0
        shown = capsys.readouterr().out
        assert f"[your run {files.run_id}]" in shown
        assert f"[ada's run {files.run_id}]" in shown


def test_what_a_run_calls_itself_does_not_reach_the_terminal_as_it_is(
    inventory: Inventory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = Lease(name="x", uid=0, pid=7, run="\x1b]0;owned\x07", bytes={UUIDS[0]: GIB})
    monkeypatch.setattr(devices, "live", lambda: [lease])
    assert main(["devices"]) == 0
    shown = capsys.readouterr().out
    assert "promised to \ufffd]0;owned\ufffd of root" in shown
    assert "\x1b" not in shown


def test_in_a_container_nobody_is_named_by_anothers_number(tmp_path: Path) -> None:
    (tmp_path / "self" / "ns").mkdir(parents=True)
    (tmp_path / "self" / "ns" / "pid").touch()  # any inode but the host's
    handles = tmp_path / "7" / "fd"
    handles.mkdir(parents=True)
    assert not is_drivers(7, tmp_path)
    (handles / "0").symlink_to("/dev/null")
    assert not is_drivers(7, tmp_path)
    (handles / "1").symlink_to("/dev/nvidia0")
    assert is_drivers(7, tmp_path)
    assert not is_drivers(8, tmp_path)


def test_a_command_is_told_without_folders() -> None:
    assert users.short_command(["/usr/bin/python3", "-u", "/home/me/my train.py", "--lr=0.1"]) == "python3 -u 'my train.py' --lr=0.1"


def test_a_spec_of_other_hardware_is_only_planned_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices", "--devices", "2xH100-80GB"]) == 0
    shown = capsys.readouterr().out
    assert "H100-80GB:1" in shown
    assert "can be planned for, not run on" in shown


def test_every_command_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("devices", "calibrate", "plan", "run", "status", "yield", "pause", "resume", "cancel"):
        with pytest.raises(SystemExit) as left:
            main([command, "--help"])
        assert left.value.code == 0
        shown = capsys.readouterr().out
        assert f"lightning-autopar {command}" in shown.split("examples:")[1]
        assert "exit code" in shown
