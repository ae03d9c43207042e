"""Each thing that can go wrong in a run, once: the run is the plain one all the same, or ends as plain Lightning would end it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_autopar.strategies.elastic import snapshot_store as snapshots
from tests.chaos.chaos_modules import Variant
from tests.chaos.chaos_runs import Run, compare, fit_plainly, fit_with
from tests.chaos.chaos_schedules import ddp, single
from tests.chaos.chaos_stage import Action

VARIANT = Variant(seed=6)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return fit_plainly(VARIANT, tmp_path_factory.mktemp("plain"))


class Said(logging.Handler):
    """What was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.words = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.words += record.getMessage() + "\n"


def _run(folder: Path, *actions: Action, allow: Any = ("single",), **options: Any) -> Run:
    return fit_with(VARIANT, folder, actions, allow=allow, **options)


def _fault(where: str, at: int = 10, **more: Any) -> Action:
    return Action(at=at, what="fault", where=where, **more)


def test_a_hang_an_exception_that_goes_away_and_a_step_out_of_memory(plain: Run, tmp_path: Path) -> None:
    move = Action(at=3, what="move", plan=ddp(0, 1))
    faults = move, _fault("stopped", rank=1), _fault("exception", 15), _fault("out_of_memory", 20, rank=1)
    run = _run(tmp_path, *faults, allow=("single", "ddp"), migrate={"hang_seconds": 1.5})
    figures = compare(plain, run)
    assert figures.faults == 3
    assert any("OutOfMemoryError" in span.reason for span in run.timeline)


def test_a_run_without_another_plan_goes_on_after_it_was_out_of_memory(plain: Run, tmp_path: Path) -> None:
    run = _run(tmp_path, _fault("out_of_memory", 10), _fault("out_of_memory", 20), devices="1xcpu:2GiB")
    assert compare(plain, run, exact=True).faults == 2
    assert [span.title for span in run.timeline] == ["single"] * 3, "it waits for nobody: its own limit is what didn't let it fit"


def test_a_full_file_system_and_a_damaged_snapshot(plain: Run, tmp_path: Path) -> None:
    said = Said()
    snapshots.log.addHandler(said)
    try:
        run = _run(tmp_path, _fault("no_space", 8), _fault("damaged", 15), Action(at=20, what="move", plan=single(1)))
    finally:
        snapshots.log.removeHandler(said)
    compare(plain, run, exact=True)
    assert "can't be used, so the one before it is" in said.words


def test_a_full_shared_memory_sends_snapshots_to_the_disk(plain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots.SnapshotStore, "_fits", lambda self: False)
    homes = []
    target = snapshots.SnapshotStore.target
    monkeypatch.setattr(snapshots.SnapshotStore, "target", lambda self, **options: homes.append(target(self, **options)) or homes[-1])
    run = _run(tmp_path, _fault("outside", 8), Action(at=15, what="move", plan=single(1)))
    compare(plain, run, exact=True)
    assert homes
    assert all(tmp_path / ".autopar" in home.parents for home in homes)


def test_nowhere_to_write_leaves_the_run_where_it_is(plain: Run, tmp_path: Path) -> None:
    full = _fault("no_space", 5, times=10**6)
    moves = Action(at=2, what="move", plan=ddp(0, 1)), full, Action(at=10, what="move", plan=single(1))
    figures = compare(plain, _run(tmp_path, *moves, allow=("single", "ddp")))
    assert list(figures.entered) == ["ddp ×2"]


class Ends(pl.Callback):
    """Counts how it ends."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "ends"

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{type(exception).__name__}\n")


def test_an_exception_that_stays_is_raised(tmp_path: Path) -> None:
    fault = _fault("exception", times=3)
    with pytest.raises(ArithmeticError, match="the user's own") as caught:
        _run(tmp_path, fault, migrate={"failures": 3}, watchers=[Ends(tmp_path)])
    assert "on_train_batch_start" in [frame.name for frame in caught.traceback]
    assert (tmp_path / "ends").read_text(encoding="utf-8") == "ArithmeticError\n"


def test_ctrl_c_ends_the_run_as_plain_lightning_does(tmp_path: Path) -> None:
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        _run(tmp_path, _fault("interrupt"), watchers=[Ends(tmp_path)])
    assert (tmp_path / "ends").read_text(encoding="utf-8") == "KeyboardInterrupt\n"
