"""Snapshots on the snapshot store: the latest complete one, the one before where it is damaged, and a dead run's at its next start."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections import namedtuple
from pathlib import Path

import pytest

from lightning_autopar.strategies.elastic.snapshot_store import SnapshotStore, run_key
from lightning_autopar.strategies.processes.worker_supervisor import run_folder

Usage = namedtuple("Usage", ["total", "used", "free"])


@pytest.fixture
def key() -> str:
    """A run that nobody else has."""
    return run_key("test", os.getpid(), os.urandom(8))


def _write(snapshots: SnapshotStore, step: int, *, on_disk: bool = False, complete: bool = True) -> Path:
    target = snapshots.target(on_disk=on_disk)
    (target / "tensors").mkdir(parents=True)
    (target / "tensors" / "data").write_bytes(bytes([step]) * 1000)
    (target / "rest.pkl").write_bytes(b"rest")
    if complete:
        snapshots.keep(target, step)
    return target


def test_the_latest_complete_one_counts(key: str, tmp_path: Path) -> None:
    with SnapshotStore(key, tmp_path, 1000) as snapshots:
        assert snapshots.latest() is None
        first = _write(snapshots, 1)
        _write(snapshots, 2)
        _write(snapshots, 3, complete=False)
        latest = snapshots.latest()
        assert latest is not None
        assert latest.step == 2
        assert not latest.on_disk
        assert first.is_dir()
        _write(snapshots, 4)
        snapshots.settle()
        assert not first.is_dir(), "two are enough"
    assert not first.parent.exists(), "nothing is left behind"


@pytest.mark.parametrize("damage", ["short", "changed", "missing", "manifest"])
def test_a_damaged_one_is_passed_over_and_said(damage: str, key: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with SnapshotStore(key, tmp_path, 1000) as snapshots:
        _write(snapshots, 1)
        second = _write(snapshots, 2)
        snapshots.settle()
        file = second / "tensors" / "data"
        if damage == "short":
            file.write_bytes(b"x")
        elif damage == "changed":
            file.write_bytes(b"x" * 1000)
        elif damage == "missing":
            file.unlink()
        else:
            (second / "manifest.json").write_text("{", encoding="utf-8")
        with caplog.at_level(logging.WARNING):
            latest = snapshots.latest()
        assert latest is not None
        assert latest.step == 1
        assert str(second) in caplog.text


def test_what_does_not_fit_into_memory_goes_to_disk(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SnapshotStore(key, tmp_path, 10_000) as snapshots:
        assert tmp_path not in snapshots.target().parents
        assert tmp_path in snapshots.target(on_disk=True).parents
        monkeypatch.setattr("psutil.disk_usage", lambda path: Usage(20_000, 8_000, 12_000))
        assert tmp_path in snapshots.target().parents
        path = _write(snapshots, 5)
        latest = snapshots.latest()
        assert latest is not None
        assert latest.on_disk
        assert latest.path == path


def test_numbers_go_on_over_both_homes(key: str, tmp_path: Path) -> None:
    with SnapshotStore(key, tmp_path, 1000) as snapshots:
        _write(snapshots, 1)
        _write(snapshots, 2, on_disk=True)
        _write(snapshots, 3)
        latest = snapshots.latest()
        assert latest is not None
        assert latest.step == 3


def test_a_killed_runs_snapshot_is_there_at_its_next_start(key: str, tmp_path: Path) -> None:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        _write(SnapshotStore(key, tmp_path, 1000), 7)
        os.write(write, b"written")
        signal.pause()
    assert os.read(read, 100) == b"written"
    with SnapshotStore(key, tmp_path, 1000) as beside:
        assert beside.latest() is None, "a run that lives keeps its own"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with SnapshotStore(key, tmp_path, 1000) as again:
        latest = again.latest()
        assert latest is not None
        assert latest.step == 7
    with SnapshotStore(run_key("another"), tmp_path, 1000) as other:
        assert other.latest() is None


def test_a_run_that_is_to_go_on_keeps_them(key: str, tmp_path: Path) -> None:
    snapshots = SnapshotStore(key, tmp_path, 1000)
    _write(snapshots, 9, on_disk=True)
    snapshots.close(keep=True)
    with SnapshotStore(key, tmp_path, 1000) as again:
        latest = again.latest()
        assert latest is not None
        assert latest.step == 9


def test_long_dead_runs_are_removed(key: str, tmp_path: Path) -> None:
    snapshots = SnapshotStore(key, tmp_path, 1000)
    path = _write(snapshots, 9)
    snapshots.close(keep=True)
    os.utime(path.parent, (0, 0))
    with SnapshotStore(run_key("another"), tmp_path, 1000):
        assert not path.exists()


def test_a_manifest_says_what_was_written(key: str, tmp_path: Path) -> None:
    with SnapshotStore(key, tmp_path, 1000) as snapshots:
        path = _write(snapshots, 3)
        snapshots.settle()
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        assert manifest["step"] == 3
        assert manifest["bytes"] == {"rest.pkl": 4, "tensors/data": 1000}
        assert set(manifest["sums"]) == set(manifest["bytes"])


def test_a_shared_one_lies_on_disk_and_takes_over_what_one_process_left_in_memory(key: str, tmp_path: Path) -> None:
    alone = SnapshotStore(key, tmp_path, 1000)
    _write(alone, 1)
    beside = alone.target()
    beside.with_name(beside.name + ".files").write_text("what goes with a snapshot")
    alone.close(keep=True)
    with SnapshotStore(key, tmp_path, 1000, shared=True, job="7") as snapshots:
        latest = snapshots.latest()
        assert latest is not None
        assert latest.step == 1
        assert latest.on_disk
        assert (snapshots.home / f"{beside.name}.files").is_file()
        assert not list(beside.parent.glob("s*")), "nobody is to find an older one there later"
        assert _write(snapshots, 2).parent == snapshots.home
    assert not snapshots.home.exists()


def test_a_shared_one_is_one_runs_unless_the_same_job_comes_again(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SnapshotStore(key, tmp_path, 1000, shared=True, job="7") as dead:
        _write(dead, 3)
        memory = tmp_path / "another machine's memory"
        memory.mkdir()
        monkeypatch.setattr(
            "lightning_autopar.strategies.elastic.snapshot_store.Path", lambda *parts: memory if parts == ("/dev/shm",) else Path(*parts)
        )
        with SnapshotStore(key, tmp_path, 1000, shared=True, job="8") as other:
            assert other.latest() is None
        again = SnapshotStore(key, tmp_path, 1000, shared=True, job="7")
        latest = again.latest()
        assert latest is not None
        assert latest.step == 3
        again.close(keep=True)


def test_another_runs_start_leaves_it_alone(key: str, tmp_path: Path) -> None:
    """Every run removes the folders of dead runs; snapshots of one that is to go on aren't such a folder."""
    snapshots = SnapshotStore(key, tmp_path, 1000)
    _write(snapshots, 9)
    snapshots.close(keep=True)
    with run_folder(0):
        pass
    with SnapshotStore(key, tmp_path, 1000) as again:
        assert again.latest() is not None


def test_memory_of_an_old_snapshot_is_written_over_by_the_next(key: str, tmp_path: Path) -> None:
    snapshots = SnapshotStore(key, tmp_path, 1000)
    first = _write(snapshots, 1)
    (first / "tensors" / "__0_0.distcp").write_bytes(bytes(500))
    for step in (2, 3):
        _write(snapshots, step)
    snapshots.settle()
    spare = list((first.parent / "spare").iterdir())
    assert [file.stat().st_size for file in spare] == [500]
    assert not first.exists()
    latest = snapshots.latest()
    assert latest is not None
    assert latest.step == 3
    snapshots.close(keep=True)
    assert not (first.parent / "spare").exists(), "no memory is held that nobody uses"
    with SnapshotStore(key, tmp_path, 1000) as again:
        latest = again.latest()
        assert latest is not None
        assert latest.step == 3


def test_room_is_found_before_it_is_needed(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SnapshotStore(key, tmp_path, 10_000) as snapshots:
        home = snapshots.target().parent
        monkeypatch.setattr("psutil.disk_usage", lambda path: Usage(20_000, 8_000, 12_000))
        snapshots.provide(2)
        snapshots.settle()
        assert not (home / "spare").exists(), "it wouldn't fit"
        monkeypatch.undo()
        snapshots.provide(2)
        snapshots.settle()
        assert sorted(file.stat().st_size for file in (home / "spare").iterdir()) == [5_000, 5_000]
        before = sorted(file.stat().st_ino for file in (home / "spare").iterdir())
        snapshots.provide(2)
        snapshots.settle()
        assert sorted(file.stat().st_ino for file in (home / "spare").iterdir()) == before, "it is there"
