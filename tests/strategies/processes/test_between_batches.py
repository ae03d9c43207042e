"""A run that goes back to a snapshot removes what it wrote since."""

from __future__ import annotations

from pathlib import Path

from lightning_autopar.strategies.processes.between_batches import CheckpointJournal


def _write(journal: CheckpointJournal, path: Path) -> None:
    journal.note(str(path))
    path.touch()


def _remove(name: str) -> None:
    Path(name).unlink(missing_ok=True)


def test_what_was_written_since_a_snapshot_is_removed_and_what_was_there_stays(tmp_path: Path) -> None:
    for name in ("s000001", "s000002", "s000003"):
        (tmp_path / name).mkdir()
    files = tmp_path / "files"
    files.mkdir()
    (files / "last").touch()
    for number in (1, 2, 3):
        _write(CheckpointJournal(tmp_path / f"s00000{number}"), files / f"after {number}")
        _write(CheckpointJournal(tmp_path / f"s00000{number}"), files / "last")
    CheckpointJournal(tmp_path / "s000003").note(str(files / "never written"))
    CheckpointJournal(tmp_path / "s000002").undo(_remove)
    assert sorted(path.name for path in files.iterdir()) == ["after 1", "last"]
    CheckpointJournal(tmp_path / "s000001").undo(_remove)
    assert [path.name for path in files.iterdir()] == ["last"]
    assert not list(tmp_path.glob("*.since"))


def test_journals_of_snapshots_that_are_gone_are_cleared(tmp_path: Path) -> None:
    (tmp_path / "s000002").mkdir()
    for number in (1, 2):
        _write(CheckpointJournal(tmp_path / f"s00000{number}"), tmp_path / f"file{number}")
    CheckpointJournal(tmp_path / "s000003").clear()
    assert [path.name for path in tmp_path.glob("*.since")] == ["s000002.since"]
