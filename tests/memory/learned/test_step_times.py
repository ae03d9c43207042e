"""Measured step times correct the next prediction: the arithmetic, and the cache on disk."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_autopar.memory.learned.step_times import StepTime, StepTimes, TimeFactors, add_step_time, disturbance, load_step_times

CPU2 = ("cpu: CPU", "cpu: CPU")


def ran(ratio: float, *, module: str = "ours", shape: str = "a", links: float = 0.0, **figures: Any) -> StepTime:
    """A run that was predicted to take two seconds, ``links`` of them on links."""
    values = {"devices": CPU2, "rates": "data sheet", "predicted": 2.0, "measured": 2.0 * ratio, "day": "2026-11-22", **figures}
    return StepTime(module=module, shape=shape, links=links, **values)


def factors(*records: StepTime, rates: str = "data sheet") -> TimeFactors:
    return StepTimes(records=records, module="ours", rates=rates).factors({"cpu: CPU"})


def test_nothing_known_corrects_nothing() -> None:
    assert factors() == TimeFactors()
    assert factors(ran(1.3, rates="measured")) == TimeFactors(), "predicted by other rates"
    assert factors(ran(1.3, devices=("cuda: A",))) == TimeFactors(), "on other devices"


def test_a_measured_run_corrects_all_plans_alike_and_says_so() -> None:
    for links in (0.0, 0.5, 2.0):
        found = factors(ran(1.07, links=links))
        assert (found.compute, found.links) == pytest.approx((1.07, 1.07)), "one run can't tell computing from links"
        assert found.told == ("time corrected ×1.07, by measured runs of this module",)


def test_runs_that_use_links_more_and_less_tell_them_apart() -> None:
    # Computing takes as long as predicted, links 1.8 times as long.
    runs = [ran(1 + 0.8 * links / 2, shape=str(links), links=links) for links in (0.0, 0.5, 1.0, 1.5, 2.0)]
    found = factors(*runs)
    assert found.compute == pytest.approx(1.05, abs=0.06)
    assert found.links == pytest.approx(1.65, abs=0.15), "a little cautious"
    assert "for computing and ×" in found.told[0]


def test_one_plan_alone_says_nothing_of_links() -> None:
    """It may have been disturbed unnoticed, and what it says of its links would make plans slower for using them."""
    quiet = [ran(1.0, shape=str(links), links=links) for links in (0.0, 0.4, 0.8)]
    found = factors(*quiet, ran(1.9, shape="disturbed", links=1.5))
    assert found.compute == found.links
    assert factors(ran(1.0), ran(1.9, shape="b", links=1.5)).compute == factors(ran(1.0), ran(1.9, shape="b", links=1.5)).links


def test_of_a_plans_runs_the_fastest_of_the_last_ones_counts() -> None:
    assert factors(ran(1.9), ran(1.2), ran(1.9)).compute == pytest.approx(1.2), "what disturbs makes slower, never faster"
    assert factors(*[ran(1.2)] * 5, *[ran(1.1)] * 20).compute == pytest.approx(1.2), "the last five"


def test_it_is_bounded_and_small_ones_are_none() -> None:
    assert (factors(ran(40.0)).compute, factors(ran(40.0)).links) == (2.0, 2.0)
    assert factors(ran(0.01)).compute == 0.5
    assert factors(ran(1.01)) == TimeFactors()


def test_other_modules_count_when_there_are_several() -> None:
    others = [ran(1.4, module=name) for name in "xyz"]
    assert factors(*others[:2]) == TimeFactors()
    assert factors(*others).compute == pytest.approx(1.4)
    assert "of other modules" in factors(*others).told[0]
    assert factors(*others, ran(1.1)).compute == pytest.approx(1.1), "the module's own runs come first"
    many = [*[ran(1.4, module="x", shape=str(shape)) for shape in range(30)], ran(1.0, module="y"), ran(1.0, module="z")]
    assert factors(*many).compute < 1.2, "each module counts once"


@given(
    st.lists(st.tuples(st.floats(0.2, 5), st.floats(0, 1)), min_size=1, max_size=8),
    st.lists(st.tuples(st.floats(0.01, 10), st.floats(0, 10)), min_size=2, max_size=6),
)
def test_plans_that_compute_alike_keep_their_order_whichever_ran(runs: list[tuple[float, float]], plans: list[tuple[float, float]]) -> None:
    """Of two plans with as many seconds on links, or as much longer in both parts, none is overtaken for having run."""
    found = factors(*(ran(ratio, shape=str(index), links=2 * share) for index, (ratio, share) in enumerate(runs)))
    took = {plan: found.compute * plan[0] + found.links * plan[1] for plan in plans}
    for one, other in itertools.permutations(plans, 2):
        if one[0] <= other[0] and one[1] <= other[1]:
            assert took[one] <= took[other]


def test_a_disturbed_run_is_told_from_a_quiet_one() -> None:
    assert disturbance(spread=0.05, waited=0.02) is None
    assert "waited for a core 50 % of its time" in (disturbance(spread=0.05, waited=0.5) or "")
    assert disturbance(spread=0.05, waited=0.5, own_wait=0.5) is None, "four ranks on two cores take half from each other"
    assert "within 60 % of the median" in (disturbance(spread=0.6, waited=0.0) or "")
    assert "devices busy: 40 %" in (disturbance(spread=0.05, waited=0.02, busy=0.4) or "")
    assert disturbance(spread=None, waited=0.0) == "it had too few steps"
    assert "doesn't tell" in (disturbance(spread=0.05, waited=None) or ""), "what couldn't be looked at is no quiet run"


# -- the cache -------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    return tmp_path / "step_times"


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
    good = asdict(ran(1.0))
    assert StepTime.from_dict(good) == ran(1.0)
    wrongs: list[dict[str, Any]] = [{"predicted": 0.0}, {"measured": float("nan")}, {"measured": True}, {"day": 3}, {"devices": None}]
    for wrong in [*wrongs, {"links": 3.0}, {"links": -1.0}]:
        with pytest.raises(ValueError, match="not a record"):
            StepTime.from_dict({**good, **wrong})
