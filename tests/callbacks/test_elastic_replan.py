from __future__ import annotations

import copy
import gc
import multiprocessing
import pickle
import sys
import weakref
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from lightning.pytorch.cli import LightningCLI

from lightning_autopar.callbacks import device_watch as watching
from lightning_autopar.callbacks.elastic_replan import ElasticReplan
from lightning_autopar.devices.inventory import Inventory
from lightning_autopar.planning.move_verdict import fits, must_leave
from lightning_autopar.plans import Plan
from lightning_autopar.strategies.preparation.decision import Decision, MoveRequest
from tests.fakes.runs import FakeRun
from tests.fakes.traced import traced
from tests.fakes.values import GIB, MIB, cpu, gpu, inventory
from tests.strategies.modules import Regression, loader

FOOTPRINT = traced()
#: Of a plan on one device, and on two.
ALONE, TOGETHER = ("cpu:0",), ("cpu:0", "cpu:1")


class Clock:
    """Looks every so often, and does what the callback wishes."""

    def __init__(self, callback: ElasticReplan, run: FakeRun) -> None:
        self.callback, self.run, self.now = callback, run, 0.0
        self.wishes: list[MoveRequest] = []

    def look(self, times: int = 1, *, follow: bool = True) -> MoveRequest | None:
        move = None
        for _ in range(times):
            self.now += self.callback.interval_seconds
            move = self.callback.look(self.run, self.now)
            if move is not None:
                self.wishes.append(move)
                if follow:
                    self.run.follow(move, self.now)
        return move


def watch(there: Inventory | None = None, *, allow: tuple[str, ...] = ("single", "ddp"), **options: Any) -> Clock:
    run = FakeRun(FOOTPRINT, there or inventory(cpu(0), cpu(1)), allow=allow)
    return Clock(ElasticReplan(**options), run)


def words(clock: Clock, kind: str) -> list[str]:
    return [moment.word for moment in clock.callback.timeline if moment.kind == kind]


# -- what it does ----------------------------------------------------------------------------------------------------------------------


def test_nothing_happens_where_nothing_changes() -> None:
    clock = watch()
    clock.look(50)
    assert clock.wishes == []
    assert clock.run.asked == []
    assert clock.callback.timeline == []


def test_it_leaves_at_once_and_comes_back_when_that_pays() -> None:
    clock = watch()
    clock.look(2)
    clock.run.set("cpu:1", free_bytes=100 * MIB)
    move = clock.look()
    assert move is not None
    assert (move.action, move.urgent) == ("move", True)
    assert clock.run.plan.devices == ALONE
    clock.run.set("cpu:1", free_bytes=4 * GIB)
    assert clock.look() is None, "one look isn't believed"
    clock.look(20)
    assert clock.run.plan.devices == TOGETHER
    assert [(move.action, move.urgent) for move in clock.wishes] == [("move", True), ("move", False)]
    assert words(clock, "event") == ["shrank", "grew"]
    assert [word for word in words(clock, "verdict") if word != "stay"] == ["move", "move"]
    assert clock.callback.timeline[0].to_dict()["device"] == "cpu:1"


def test_a_device_in_error_is_left_and_not_planned_for() -> None:
    clock = watch()
    clock.run.set("cpu:0", error="XID 79")
    move = clock.look()
    assert move is not None
    assert move.urgent
    assert "XID 79" in move.reason
    assert [device.id for device in clock.run.asked[-1].devices] == ["cpu:1"]
    assert clock.run.plan.devices == ("cpu:1",)


def test_a_run_that_fits_nowhere_is_parked_and_resumes() -> None:
    clock = watch()
    for device in TOGETHER:
        clock.run.set(device, free_bytes=MIB)
    move = clock.look()
    assert move is not None
    assert (move.action, move.decision, move.urgent) == ("park", None, True)
    clock.look(10)
    assert clock.run.parked
    assert len(clock.wishes) == 1
    clock.run.set("cpu:1", free_bytes=4 * GIB)
    assert clock.look(2) is None
    move = clock.look()
    assert move is not None
    assert (move.action, clock.run.parked, clock.run.plan.devices) == ("move", False, ("cpu:1",))
    assert words(clock, "verdict")[-1] == "resume"


def test_a_run_is_parked_for_want_of_host_memory_and_resumes() -> None:
    clock = watch(inventory(cpu(0), cpu(1), host_total_bytes=16 * GIB, host_free_bytes=16 * GIB))
    clock.run.there = inventory(cpu(0), cpu(1), host_total_bytes=16 * GIB, host_free_bytes=GIB)
    move = clock.look()
    assert move is not None
    assert move.action == "park"
    assert "host's memory" in move.reason
    clock.run.there = inventory(cpu(0), cpu(1), host_total_bytes=16 * GIB, host_free_bytes=12 * GIB)
    clock.look(3)
    assert not clock.run.parked


def test_a_pinned_plan_waits_for_its_device() -> None:
    run = FakeRun(FOOTPRINT, inventory(cpu(0), cpu(1)), pinned=Plan(engine="single", devices=("cpu:1",)))
    clock = Clock(ElasticReplan(), run)
    clock.look(2)
    run.set("cpu:1", gone=True)
    move = clock.look()
    assert move is not None
    assert move.action == "park"
    assert any("'cpu:1', which isn't there" in moment.text for moment in clock.callback.timeline)
    run.set("cpu:1")
    clock.look(5)
    assert (run.parked, run.plan.devices) == (False, ("cpu:1",))


def test_a_run_without_any_device_is_parked() -> None:
    clock = watch(inventory(cpu(0)))
    clock.run.set("cpu:0", gone=True)
    move = clock.look()
    assert move is not None
    assert move.action == "park"
    assert clock.run.asked == [], "there is nothing to plan for"
    clock.look(3)
    clock.run.set("cpu:0")
    clock.look(3)
    assert not clock.run.parked


def test_it_goes_to_where_it_is_faster() -> None:
    clock = watch(inventory(cpu(0), cpu(1, 100 * MIB)))
    assert clock.run.plan.devices == ALONE
    clock.look(3)
    clock.run.set("cpu:0", slowdown=3.0)
    clock.run.set("cpu:1", free_bytes=4 * GIB)
    clock.run.step_seconds = 3 * 12.0
    clock.look(3)
    assert clock.run.plan.shares == (1, 3)


def test_what_was_measured_to_take_more_is_planned_for_as_more() -> None:
    clock = watch(inventory(cpu(0), cpu(1, 3 * GIB)))
    held = clock.run.decision.candidate.bytes["cpu:1"]
    predicted = max(held.allocated, held.reserved)
    clock.run.measured_bytes = {"cpu:0": predicted, "cpu:1": predicted + GIB}
    clock.look(2)
    assert clock.wishes == []
    clock.run.set("cpu:1", free_bytes=predicted + GIB // 2)
    move = clock.look()
    assert move is not None
    assert "measured" in move.reason
    assert clock.run.plan.devices == ALONE
    asked = clock.run.asked[-1].device("cpu:1")
    assert asked.free_bytes == predicted - GIB // 2
    assert "takes more memory than predicted" in clock.run.asked[-1].notes[-1]


def test_its_own_work_on_a_gpu_is_nobody_elses() -> None:
    clock = watch(inventory(gpu(0, utilization=0.0), gpu(1, free_bytes=100 * MIB, utilization=0.0)))
    clock.look(2)
    assert clock.run.plan.devices == ("GPU-0000",)
    clock.run.set("GPU-0000", utilization=1.0)
    clock.run.set("GPU-0001", free_bytes=79 * GIB, utilization=0.0)
    clock.look(2)
    assert clock.run.asked[-1].device("GPU-0000").utilization == 0.0
    assert words(clock, "event") == ["grew"]


def test_a_device_that_steps_show_to_be_slow_is_left() -> None:
    """Nothing but the run's own steps shows it."""
    clock = watch(inventory(cpu(0), cpu(1)), allow=("single",))
    (first,) = clock.run.plan.devices
    usual = clock.run.step_seconds
    assert usual is not None
    clock.look(10)
    clock.run.step_seconds = 2 * usual
    clock.look(5)
    assert words(clock, "event") == [], "a long step or two are nothing"
    clock.look(10)
    assert words(clock, "event")[0] == "slower"
    clock.look(10)
    assert len(clock.wishes) == 1
    assert clock.run.plan.devices != (first,)
    # What was slow is taken to be so for a while; then the run could go back, but gains nothing by it.
    clock.look(200)
    assert len(clock.wishes) == 1


def test_a_wish_that_isnt_followed_isnt_repeated_at_once() -> None:
    clock = watch(inventory(cpu(0), cpu(1, 100 * MIB)))
    clock.run.set("cpu:1", free_bytes=4 * GIB)
    while clock.look(follow=False) is None:
        pass
    asked_at = clock.now
    while clock.look(follow=False) is None:
        pass
    assert clock.now - asked_at >= 60
    clock = watch()
    clock.run.set("cpu:1", gone=True)
    assert clock.look(follow=False) is not None
    assert clock.look(follow=False) is not None, "what can't stay is said again"
    tries = [clock.look(follow=False) is not None for _ in range(100)]
    assert 4 < sum(tries) < 12, "less and less often"


def test_a_move_by_somebody_else_is_noticed() -> None:
    clock = watch()
    clock.look(2)
    clock.run.set("cpu:1", gone=True)
    clock.run.follow(MoveRequest(action="move", decision=clock.run.replan(clock.run.there), reason="asked for"), clock.now)
    assert clock.look(2) is None
    clock.run.set("cpu:1")
    clock.look(2)
    assert clock.wishes == []
    clock.look(10)
    assert clock.run.plan.devices == TOGETHER


def test_another_run_begins_anew() -> None:
    clock = watch()
    clock.run.set("cpu:1", gone=True)
    clock.look(2)
    timeline = list(clock.callback.timeline)
    assert timeline
    second = Clock(clock.callback, FakeRun(FOOTPRINT, inventory(cpu(0), cpu(1))))
    second.look(3)
    assert second.wishes == []
    assert clock.callback.timeline == timeline


HAPPENINGS = st.tuples(
    st.sampled_from(["cpu:0", "cpu:1", "cpu:2"]),
    st.sampled_from(
        [{"free_bytes": MIB}, {"free_bytes": 2 * GIB}, {"free_bytes": 4 * GIB}, {"gone": True}, {"error": "XID 79"}, {"slowdown": 3.0}]
    ),
    st.integers(1, 8),
)


@settings(max_examples=20, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
@given(course=st.lists(HAPPENINGS, min_size=5, max_size=20))
def test_whatever_happens_it_is_where_it_can_be(course: list[tuple[str, dict[str, Any], int]]) -> None:
    clock = watch(inventory(cpu(0), cpu(1), cpu(2)))
    for device, figures, looks in course:
        clock.run.set(device, **({"error": None, "slowdown": 1.0} | figures))
        for _ in range(looks):
            move = clock.look()
            there = clock.run.there
            if move is not None and move.decision is not None:
                assert fits(move.decision.candidate, there)
            if not clock.run.parked:
                assert must_leave(clock.run.decision.candidate, there) is None
    for device in ("cpu:0", "cpu:1", "cpu:2"):
        clock.run.set(device, free_bytes=4 * GIB, error=None, slowdown=1.0)
    clock.look(200)
    assert not clock.run.parked, "it resumes in the end"


# -- what it costs and says ------------------------------------------------------------------------------------------------------------


class SlowPlanning(FakeRun):
    """Planning takes a second of a clock that the test has."""

    clock = 0.0

    def replan(self, inventory: Inventory) -> Decision:
        SlowPlanning.clock += 1.0
        return super().replan(inventory)


def test_planning_again_keeps_to_its_share_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    SlowPlanning.clock = 0.0
    monkeypatch.setattr(watching.time, "perf_counter", lambda: SlowPlanning.clock)
    run = SlowPlanning(FOOTPRINT, inventory(cpu(0), cpu(1), cpu(2, 100 * MIB)))
    run.step_seconds = None  # it never moves of its own accord
    clock = Clock(ElasticReplan(), run)
    for turn in range(1000):
        run.set("cpu:2", free_bytes=(4 if turn % 2 else 3) * GIB)
        clock.look()
    assert 4 <= len(run.asked) <= 4 + 0.005 * clock.now
    before = len(run.asked)
    run.set("cpu:0", gone=True)
    assert clock.look() is not None, "what can't stay isn't kept waiting"
    assert len(run.asked) == before + 1


def test_what_is_said_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    clock = watch()
    with caplog.at_level("INFO"):
        clock.run.set("cpu:1", free_bytes=100 * MIB)
        clock.look()
        clock.run.set("cpu:1", free_bytes=4 * GIB)
        clock.look(11)
    told = [record.getMessage() for record in caplog.records if record.getMessage().startswith("autopar: ")]
    assert len(told) == len(set(told))
    # Two events, and why it stays: too few looks, a move lately. Moves are the agent's to tell.
    assert len(told) == 4, told
    assert "shrank by 3.9 GiB" in told[0]


# -- as an object ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"interval_seconds": 0}, ("interval_seconds=0", "0.01")),
        ({"interval_seconds": True}, ("interval_seconds=True",)),
        ({"min_gain": 1.5}, ("min_gain=1.5", "0.99")),
        ({"min_gain": "5%"}, ("min_gain='5%'", "0.05")),
        ({"patience": 0}, ("patience=0", "1 to 1000")),
        ({"patience": 2.0}, ("patience=2.0",)),
        ({"min_seconds_between_moves": -1}, ("min_seconds_between_moves=-1", "from 0")),
        ({"price_factor": 0.5}, ("price_factor=0.5", "from 1")),
        ({"max_overhead": float("nan")}, ("max_overhead=nan",)),
    ],
)
def test_options_are_checked(options: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as refusal:
        ElasticReplan(**options)
    assert all(word in str(refusal.value) for word in words)


@pytest.mark.filterwarnings("ignore")
def test_it_can_be_written_in_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])  # LightningCLI warns of arguments in both places
    config = tmp_path / "config.yaml"
    config.write_text(
        """
        trainer:
          accelerator: cpu
          logger: false
          callbacks:
            - class_path: lightning_autopar.callbacks.elastic_replan.ElasticReplan
              init_args: {min_gain: 0.2, patience: 5}
        """
    )
    cli = LightningCLI(Regression, args=["--config", str(config)], run=False, save_config_callback=None)
    (made,) = [callback for callback in cli.trainer.callbacks if isinstance(callback, ElasticReplan)]
    assert (made.rules.min_gain, made.rules.patience, made.interval_seconds) == (0.2, 5, 5.0)


def test_it_survives_pickling_copying_and_forking() -> None:
    clock = watch(min_gain=0.2)
    clock.run.set("cpu:1", gone=True)
    clock.look(2)
    for copied in (pickle.loads(pickle.dumps(clock.callback)), copy.deepcopy(clock.callback)):
        assert copied.rules == clock.callback.rules
        assert copied.timeline == []
    assert len(clock.callback.timeline) == 2
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_look_there, args=(clock.callback, clock.run, theirs))
    child.start()
    assert ours.recv() == "stay"
    child.join()
    assert child.exitcode == 0
    assert len(clock.callback.timeline) == 2


def _look_there(callback: ElasticReplan, run: FakeRun, pipe: Any) -> None:
    move = callback.look(run, 1000.0)
    pipe.send("stay" if move is None else move.action)


def test_what_it_saw_isnt_among_its_attributes() -> None:
    """They travel between workers and agent, and would overwrite what the agent knows."""
    clock = watch()
    before = dict(vars(clock.callback))
    clock.run.set("cpu:1", gone=True)
    clock.look(3)
    assert vars(clock.callback) == before


def test_nothing_is_kept_of_a_callback_that_is_gone() -> None:
    clock = watch()
    clock.look()
    gone = weakref.ref(clock.callback)
    del clock
    gc.collect()
    assert gone() is None


def test_under_another_strategy_it_only_says_so(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    callback = ElasticReplan()
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_steps": 1}
    with caplog.at_level("INFO"):
        pl.Trainer(accelerator="cpu", callbacks=[callback], default_root_dir=tmp_path, **options).fit(Regression(), loader(), loader())
    assert sum("no plan to change" in record.getMessage() for record in caplog.records) == 1
    assert callback.timeline == []
