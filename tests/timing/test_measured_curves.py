"""Where measured rates are kept: by machine and versions, whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_autopar.devices import host as identity
from lightning_autopar.devices.inventory import Inventory
from lightning_autopar.devices.spec import parse_spec
from lightning_autopar.timing.measured_curves import Calibration, Curve, cache_file, keep_calibration, load_calibration

KNOWN = Calibration().with_curves(
    [Curve(subject="cpu/1", thing="add", dtype="fp32", sizes=(1.0, 2.0), seconds=(0.5, 0.75))], day="2026-11-22", took_seconds=3.0
)


@pytest.fixture
def inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inventory:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path / "cache"))
    return parse_spec("2xcpu:1MiB", cores=2)


def test_it_comes_back(inventory: Inventory) -> None:
    assert not load_calibration(inventory)
    keep_calibration(inventory, KNOWN)
    assert load_calibration(inventory).to_dict() == KNOWN.to_dict()
    path = cache_file(inventory)
    assert path is not None
    assert path.parent.name == "rates"
    assert "torch" in json.loads(path.read_text())["machine"][2]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"calibration": {"curves": 1}}', "null", "[" * 100_000])
def test_a_spoilt_file_is_left_out_with_a_word(inventory: Inventory, text: str, caplog: pytest.LogCaptureFixture) -> None:
    path = cache_file(inventory)
    assert path is not None
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert not load_calibration(inventory)
    assert "can't be read" in caplog.text
    keep_calibration(inventory, KNOWN)
    assert load_calibration(inventory)


def test_other_versions_are_another_machine(inventory: Inventory, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_calibration(inventory, KNOWN)
    real = identity.version
    for name in ("torch", "lightning-autopar"):
        with monkeypatch.context() as patched:
            patched.setattr(identity, "version", lambda asked, name=name: "0" if asked == name else real(asked))
            assert not load_calibration(inventory)
    assert load_calibration(inventory)


def test_other_cores_processors_and_drivers_are_other_machines(inventory: Inventory, tmp_path: Path) -> None:
    keep_calibration(inventory, KNOWN)
    assert not load_calibration(parse_spec("2xcpu:1MiB", cores=3))
    assert load_calibration(parse_spec("1xcpu:1MiB", cores=2)), "as many cores, however they are shared"
    (tmp_path / "proc" / "driver" / "nvidia").mkdir(parents=True)
    (tmp_path / "proc" / "cpuinfo").write_text("processor : 0\nmodel name\t: Some CPU\n")
    found = [identity.machine_key(2, root=tmp_path)]
    assert identity.machine_identity(2, root=tmp_path)[0] == "Some CPU"
    (tmp_path / "proc" / "driver" / "nvidia" / "version").write_text("NVRM version: 555.1\nGCC\n")
    found.append(identity.machine_key(2, root=tmp_path))
    (tmp_path / "proc" / "cpuinfo").write_text("")
    found.append(identity.machine_key(2, root=tmp_path))
    assert len(set(found)) == 3


def test_off_keeps_nothing(inventory: Inventory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", "off")
    assert cache_file(inventory) is None
    keep_calibration(inventory, KNOWN)
    assert not load_calibration(inventory)


def test_a_folder_that_cannot_be_written_costs_nothing(inventory: Inventory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path / "file"))
    keep_calibration(inventory, KNOWN)
    assert not load_calibration(inventory)
