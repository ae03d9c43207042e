"""What every run shows of itself, elastic or not: real runs that look at their own page, and that are never the worse for it."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_autopar._lightning_compat import TrainerFn
from lightning_autopar.sharing.process_ids import pid_namespace, started_ticks
from lightning_autopar.sharing.runs import own_status as showing
from lightning_autopar.sharing.runs import progress
from lightning_autopar.sharing.runs import status as run_files
from lightning_autopar.sharing.runs.own_status import RunDisplay
from lightning_autopar.sharing.runs.progress import Note, RunProgress, RunSpeed
from lightning_autopar.sharing.runs.requests import cancel, runs
from lightning_autopar.sharing.runs.status import RunStatus
from tests.strategies.modules import Regression, loader, trainer

SECOND = 1_000_000_000


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.setenv("AUTOPAR_RUNS", str(tmp_path / "runs"))


@pytest.fixture
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is shown at each batch."""
    monkeypatch.setattr(progress, "NOTE_NS", 0)
    monkeypatch.setattr(run_files, "SHOW_SECONDS", 0.0)
    monkeypatch.setattr(showing, "SHOW_SECONDS", 0.0)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C does what it does in a terminal, whatever started the tests, and Lightning leaves behind."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def when_running(action: Callable[[RunStatus], bool]) -> Callable[[Regression, int], None]:
    """At batches of rank 0, once the run is shown as running, until the action says that it is content with what is shown."""
    content: list[bool] = []

    def act(module: Regression, index: int) -> None:
        found = [] if content or rank_zero_only.rank else runs()  # to ask the module would be told of
        if not found or found[0].state != "running":
            return
        if action(found[0]):
            content.append(True)
        elif found[0].pid != os.getpid():
            time.sleep(0.06)  # until it is shown: the process that does so looks every 0.05 s

    return act


# -- real runs -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["single", "ddp"])
@pytest.mark.usefixtures("_at_once")
def test_a_plain_run_shows_its_plan_and_how_far_it_is(engine: str, tmp_path: Path) -> None:
    """In this process, and in forked workers."""

    def note(status: RunStatus) -> bool:
        if not status.step or status.step_seconds is None:
            return False
        (tmp_path / "seen.json").write_text(json.dumps(status.to_dict()))
        return True

    run = trainer(engine, tmp_path, max_epochs=3, accumulate_grad_batches=2)
    run.fit(Regression({"training_step": when_running(note)}), loader(samples=160), loader())
    seen = RunStatus.from_dict(json.loads((tmp_path / "seen.json").read_text()))
    assert (seen.pid, seen.started_ticks, seen.namespace) == (os.getpid(), started_ticks(os.getpid()), pid_namespace())
    assert (seen.task, seen.elastic, seen.external) == ("fit", False, False)
    plan = run.strategy.plan  # type: ignore[attr-defined]  # of ours
    assert (seen.plan, seen.devices) == (plan.title(), plan.devices)
    assert set(seen.predicted_bytes) == set(seen.devices)
    assert seen.step is not None
    assert 0 < seen.step < 30
    assert seen.steps == 30, "20 batches an epoch, two to a step, three epochs"
    assert seen.ends_at is not None
    assert seen.ends_at > (tmp_path / "seen.json").stat().st_mtime - 30
    assert runs() == []


@pytest.mark.parametrize("engine", ["single", "ddp"])
def test_a_run_is_cancelled_from_another_process(engine: str, tmp_path: Path, interruptible: None) -> None:
    def told(status: RunStatus) -> bool:
        child = os.fork()
        if not child:
            code = 1
            try:
                (tmp_path / "told").write_text(str(cancel(status.run_id)))
                code = 0
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    run = trainer(engine, tmp_path)
    with pytest.raises(SystemExit):  # Lightning makes that of a KeyboardInterrupt
        run.fit(Regression({"training_step": when_running(told)}), loader(samples=160), loader())
    assert (tmp_path / "told").read_text().endswith("by SIGINT; Lightning ends it as on Ctrl-C, and its checkpoints stay")
    assert run.interrupted
    assert runs() == []


@pytest.mark.usefixtures("_at_once")
def test_an_evaluation_is_shown_without_steps(tmp_path: Path) -> None:
    seen: list[RunStatus] = []

    def look(module: Regression, index: int) -> None:
        seen.extend(runs())

    trainer("single", tmp_path).validate(Regression({"validation_step": look}), loader())
    running = [status for status in seen if status.state == "running"]
    assert running
    assert {(status.task, status.step, status.ends_at) for status in running} == {("validate", None, None)}


@pytest.mark.usefixtures("_at_once")
def test_a_page_that_cannot_be_written_costs_the_run_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, data: Any, mode: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def fill(module: Regression, index: int) -> None:
        monkeypatch.setattr(run_files, "write_json", full)

    run = trainer("single", tmp_path)
    run.fit(Regression({"training_step": fill}), loader(), loader())
    assert run.global_step == 8
    assert sum("No space left" in record.message for record in caplog.records) == 1


def test_a_run_without_a_place_for_its_page_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_RUNS", str(tmp_path / "nowhere"))
    run = trainer("single", tmp_path)
    with pytest.warns(UserWarning, match="can't show itself on this host.*the run goes on, and lightning-autopar status doesn't see it"):
        run.fit(Regression(), loader(), loader())
    assert run.global_step == 8


# -- states --------------------------------------------------------------------------------------------------------------------------------


def test_states_follow_each_other(tmp_path: Path) -> None:
    promised = {"cpu:0": 5}
    called = types.SimpleNamespace(state=types.SimpleNamespace(fn=None))
    with showing.showing(called, lambda: promised) as shown:  # type: ignore[arg-type]
        (planned,) = runs()
        assert (planned.state, planned.task, planned.run_id) == ("planning", "fit", shown.run_id)
        shown.queued("4 GiB on cpu:0, behind b-1234", wanted_bytes={"cpu:0": 4}, priority=3)
        (queued,) = runs()
        assert (queued.state, queued.waits_for, queued.predicted_bytes) == ("queued", "4 GiB on cpu:0, behind b-1234", {"cpu:0": 4})
        assert (queued.priority, queued.leased_bytes) == (3, {"cpu:0": 5})
        assert queued.since >= planned.since
        shown.planning()
        (again,) = runs()
        assert (again.state, again.waits_for, again.priority) == ("planning", "", 3)
        child = os.fork()
        if not child:
            shown.show(state="running")  # the user's own fork, which isn't the run
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert runs()[0].state == "planning"
    assert runs() == []
    shown.show(state="running")
    assert (shown.run_id, shown.requests(), runs()) == (None, [], [])


def test_a_silent_one_shows_nothing() -> None:
    with showing.showing(types.SimpleNamespace(), silent=True) as shown:  # type: ignore[arg-type]
        shown.queued("nothing")
        shown.look()
        assert (runs(), shown.run_id, shown.requests()) == ([], None, [])


# -- how fast ------------------------------------------------------------------------------------------------------------------------------


def note(seconds: float, batch: int, **changes: Any) -> Note:
    values: dict[str, Any] = {"step": batch, "steps": None, "batches_left": 100 - batch, "accumulated": 1, "trains": True}
    return Note(at_ns=int(seconds * SECOND), batch=batch, **{**values, **changes})


def test_a_pace_leaves_the_first_batches_and_evaluations_out() -> None:
    pace = RunSpeed()
    for each in (note(0.0, 0), note(60.0, 1), note(90.0, 3)):  # slow at first
        pace.take(each)
        assert (pace.step_seconds, pace.seconds_left) == (None, None)
    pace.take(note(92.0, 7))
    assert pace.step_seconds == pytest.approx(0.5)
    assert pace.seconds_left == pytest.approx(93 * 0.5)
    pace.take(note(94.0, 10, trains=False))  # an evaluation
    pace.take(note(104.0, 10, trains=False))
    pace.take(note(104.5, 11))
    assert pace.step_seconds == pytest.approx(0.5), "a step is as it was"
    assert pace.seconds_left == pytest.approx(89 * 14.5 / 8), "but the run takes longer"
    pace.take(note(104.5, 11))  # the same again
    assert pace.seconds_left == pytest.approx(89 * 14.5 / 8)


def test_a_step_is_of_several_batches_and_an_end_may_be_unknown() -> None:
    pace = RunSpeed()
    for each in range(3, 9):
        pace.take(note(float(each), each, accumulated=4, batches_left=None))
    assert pace.step_seconds == pytest.approx(4.0)
    assert pace.seconds_left is None


def test_what_one_process_notes_another_reads() -> None:
    shared = RunProgress(2)
    assert shared.read() is None
    module = types.SimpleNamespace(automatic_optimization=True)
    counters = types.SimpleNamespace(total=types.SimpleNamespace(ready=7), current=types.SimpleNamespace(ready=7))
    loop = types.SimpleNamespace(epoch_loop=types.SimpleNamespace(batch_progress=counters))
    limits = {"max_steps": 9, "max_epochs": None, "current_epoch": 0, "num_training_batches": float("inf"), "accumulate_grad_batches": 2}
    run: Any = types.SimpleNamespace(
        state=types.SimpleNamespace(fn=TrainerFn.FITTING),
        training=True,
        global_step=3,
        fit_loop=loop,
        lightning_module=module,
        **limits,
    )
    looked: list[Note | None] = []
    child = os.fork()
    if not child:
        for _ in range(5):
            shared.at_batch(run, 0, torch.device("cpu"), lambda: looked.append(shared.read()))
        os._exit(0 if len(looked) == 1 else 2)  # at once, and then not for a while
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    read = shared.read()
    assert read is not None
    assert (read.step, read.steps, read.batch, read.batches_left, read.accumulated, read.trains) == (3, 9, 7, 12, 2, True)
    assert shared.used_bytes == [0, 0]
    shown = RunDisplay(None, dict)
    shown.look()
    assert shown.run_id is None
