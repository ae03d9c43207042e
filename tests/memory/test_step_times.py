"""Measured step times correct the next prediction: the arithmetic, and the cache on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_autopar.memory.step_time_cache import add_step_time, load_step_times
from lightning_autopar.memory.step_times import StepTime, StepTimes

CPU2 = ("cpu: CPU", "cpu: CPU")


def ran(ratio: float, *, module: str = "ours", engine: str = "ddp", shape: str = "a", rates: str = "data sheet") -> StepTime:
    devices = CPU2[:1] if engine == "single" else CPU2
    return StepTime(module=module, shape=shape, devices=devices, rates=rates, predicted=2.0, measured=2.0 * ratio, day="2026-11-22")


def factor(*records: StepTime, engine: str = "ddp", shape: str = "a", rates: str = "data sheet") -> float:
    devices = CPU2[:1] if engine == "single" else CPU2
    return StepTimes(records=records, module="ours", rates=rates).factor(shape, devices)[0]


def test_nothing_known_corrects_nothing() -> None:
    assert StepTimes().factor("a", CPU2) == (1.0, ())
    assert factor(ran(1.3, rates="measured")) == 1.0, "predicted by other rates"
    assert StepTimes(records=(ran(1.3),), module="ours").factor("a", ("cuda: A", "cuda: A")) == (1.0, ())


def test_a_measured_run_corrects_and_says_so() -> None:
    found, told = StepTimes(records=(ran(1.07),), module="ours").factor("a", CPU2)
    assert found == pytest.approx(1.07)
    assert told == ("time corrected ×1.07, by measured runs of this module",)


def test_measuring_one_plan_does_not_change_the_order_of_plans() -> None:
    for shape in "abc":
        assert factor(ran(1.3, shape="a"), shape=shape) == pytest.approx(1.3)
    # Two plans that differ by less than two runs of one do: the same factor for all.
    noisy = (ran(1.30, shape="a"), ran(1.26, shape="b"))
    assert len({factor(*noisy, shape=shape) for shape in "abc"}) == 1
    # One that is really slower counts for itself.
    slow = (ran(1.0, shape="a"), ran(1.0, shape="b"), ran(1.6, shape="c"))
    assert [factor(*slow, shape=shape) for shape in "abc"] == pytest.approx([1.0, 1.0, 1.6])
    assert "of this plan" in StepTimes(records=slow, module="ours").factor("c", CPU2)[1][0]


def test_the_median_of_the_last_runs_counts() -> None:
    assert factor(ran(1.1), ran(9.0), ran(1.1)) == pytest.approx(1.1), "one run beside somebody else's job"
    assert factor(*[ran(1.2)] * 5, *[ran(1.8)] * 20) == pytest.approx(1.2), "the last five"


def test_it_is_bounded_and_small_ones_are_none() -> None:
    assert factor(ran(40.0)) == 2.0
    assert factor(ran(0.01)) == 0.5
    assert factor(ran(1.01)) == 1.0


def test_other_modules_count_when_there_are_several() -> None:
    others = [ran(1.4, module=name) for name in "xyz"]
    assert factor(*others[:2]) == 1.0
    assert factor(*others) == pytest.approx(1.4)
    assert factor(*others, engine="single") == pytest.approx(1.4), "whichever engine ran: the order of plans stays"
    assert factor(*others, ran(1.1)) == pytest.approx(1.1), "the module's own runs come first"
    many = [*[ran(1.4, module="x")] * 30, ran(1.0, module="y"), ran(1.1, module="z")]
    assert factor(*many) == pytest.approx(1.1), "each module counts once"


# -- the cache -------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    return tmp_path / "times"


def test_records_come_back_the_newest_first_and_bounded(folder: Path) -> None:
    assert load_step_times(2) == ()
    for index in range(20):
        add_step_time(2, ran(1 + index / 10))
    add_step_time(2, ran(1.0, module="other"))
    found = load_step_times(2)
    assert [record.module for record in found] == ["other", *["ours"] * 16]
    assert found[1].ratio == pytest.approx(2.9)
    assert load_step_times(3) == (), "another machine"
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"records": [{}]}', '{"records": [{"module": 1, "devices": []}]}', '{"records": 3}', '{"records": [1]}']
)
def test_a_spoilt_file_is_left_out_with_a_word(folder: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    add_step_time(2, ran(1.0))
    next(folder.iterdir()).write_text(text)
    assert load_step_times(2) == ()
    assert "can't be read" in caplog.text


def test_what_is_no_record() -> None:
    good = ran(1.0).to_dict()
    assert StepTime.from_dict(good) == ran(1.0)
    for wrong in ({"predicted": 0.0}, {"measured": float("nan")}, {"measured": True}, {"day": 3}, {"devices": None}):
        with pytest.raises(ValueError, match="not a record"):
            StepTime.from_dict({**good, **wrong})
