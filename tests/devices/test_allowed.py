"""The devices that a file allows: read anew each time, clear about what is wrong at first, and patient later."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from lightning_autopar.devices.allowed import ALLOWED_VARIABLE, with_allowed, write_allowed
from lightning_autopar.devices.discover import probe
from lightning_autopar.devices.spec import parse_spec


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(ALLOWED_VARIABLE, str(tmp_path / "devices.txt"))
    return tmp_path / "devices.txt"


def ids() -> list[str]:
    return [device.id for device in probe("3xcpu:1GiB").devices]


def test_without_the_variable_all_devices_are_allowed() -> None:
    assert ids() == ["cpu:0", "cpu:1", "cpu:2"]


def test_only_what_the_file_names_is_there_as_it_is_now(file: Path) -> None:
    file.write_text("# mine\ncpu:2\n\n cpu:0  # as well\ncpu:9\n")
    found = probe("3xcpu:1GiB")
    assert [(device.id, device.index, device.threads) for device in found.devices] == [
        (device.id, device.index, device.threads) for device in parse_spec("3xcpu:1GiB").devices if device.id != "cpu:1"
    ]
    assert [(link.a, link.b) for link in found.links] == [("cpu:0", "cpu:2")]
    write_allowed(file, ["cpu:1"])
    assert ids() == ["cpu:1"]
    assert os.listdir(file.parent) == ["devices.txt"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file"),
        ("", "names no device"),
        ("cpu:0 cpu:1", "'cpu:0 cpu:1' holds more than an id"),
        ("GPU-1", "allows GPU-1, but there are cpu:0, cpu:1, cpu:2"),
        ("cpu:0\0", "no list of devices"),
    ],
)
def test_what_is_wrong_at_first_is_said_with_the_remedy(file: Path, text: str | None, words: str) -> None:
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=words) as error:
        ids()
    assert ALLOWED_VARIABLE in str(error.value)
    assert "one device id a line" in str(error.value)


@pytest.mark.parametrize("text", [None, "cpu:0 cpu:1"])
def test_what_is_wrong_later_leaves_things_as_they_were(file: Path, text: str | None, caplog: pytest.LogCaptureFixture) -> None:
    file.write_text("cpu:1")
    assert ids() == ["cpu:1"]
    file.unlink()
    if text is not None:
        file.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert ids() == ids() == ["cpu:1"]
    assert len(caplog.records) == 1
    file.write_text("cpu:2")
    assert ids() == ["cpu:2"]


def test_all_devices_may_be_taken_away_later(file: Path) -> None:
    file.write_text("cpu:1")
    assert ids() == ["cpu:1"]
    file.write_text("")
    assert ids() == []
    file.write_text("GPU-1")
    assert ids() == []


def test_devices_that_can_only_be_planned_for_are_nobodys_to_allow(file: Path) -> None:
    file.write_text("cpu:1")
    assert len(with_allowed(parse_spec("4xH100-80GB")).devices) == 4
