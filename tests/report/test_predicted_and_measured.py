"""Predicted against measured as values, as a table and as warnings."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_autopar.memory.device_bytes import DeviceBytes
from lightning_autopar.plans import Plan
from lightning_autopar.report.predicted_and_measured import compare, metrics, table, warnings
from lightning_autopar.report.report import Candidate
from lightning_autopar.timing.step_seconds import Seconds
from tests.fakes.values import GIB, MIB

PLAN = Plan(engine="single", devices=("GPU-0",))
HELD = DeviceBytes(
    parameters=GIB,
    gradients=GIB,
    optimizer=2 * GIB,
    activations=3 * GIB,
    temporary=GIB // 2,
    input=GIB // 4,
    rounding=GIB // 2,
    context=GIB,
)


def candidate(held: DeviceBytes = HELD, **values: Any) -> Candidate:
    needs = {"GPU-0": held.reserved}
    return Candidate(**{"plan": PLAN, "fits": True, "bytes": {"GPU-0": held}, "needs": needs, "seconds": None, **values})


def measured(**values: Any) -> dict[str, dict[str, Any]]:
    nothing = {"peak_bytes": None, "step_seconds": None, "bytes": {}, "reserved_bytes": None, "context_bytes": None}
    return {"GPU-0": {**nothing, **values}}


def test_a_gpus_reserved_memory_and_context_stand_beside_their_predictions() -> None:
    seen = {"parameters": GIB, "gradients": 0, "optimizer": 2 * GIB, "buffers": 0, "rest": 5 * GIB}
    (found,) = compare(candidate(), measured(peak_bytes=8 * GIB, bytes=seen, reserved_bytes=9 * GIB, context_bytes=GIB))
    assert found.measured == {**seen, "allocated": 8 * GIB, "reserved": 9 * GIB, "context": GIB}
    assert found.predicted["rest"] == 3 * GIB + GIB // 2 + GIB // 4
    assert found.predicted["allocated"] == HELD.allocated
    assert found.predicted["reserved"] + found.predicted["context"] == HELD.reserved


def test_what_cannot_be_told_from_the_rest_is_compared_with_it() -> None:
    seen = {"parameters": GIB, "optimizer": 2 * GIB, "buffers": 0, "rest": 5 * GIB}
    (found,) = compare(candidate(), measured(bytes=seen))
    assert set(found.predicted) == {*seen, "allocated"}
    assert found.predicted["rest"] == HELD.gradients + HELD.activations + HELD.temporary + HELD.input


def test_a_correction_is_part_of_the_rest() -> None:
    (found,) = compare(candidate(DeviceBytes(parameters=8, correction=3)), measured())
    assert found.predicted == {"parameters": 8, "gradients": 0, "optimizer": 0, "buffers": 0, "rest": 3, "allocated": 11}
    assert found.measured == {}


def test_numbers_for_loggers() -> None:
    seconds = Seconds(compute=0.25, communication=0.05)
    numbers = metrics(compare(candidate(seconds=seconds), measured(peak_bytes=GIB, step_seconds=0.5)))
    assert numbers["autopar/rank0/measured_bytes/allocated"] == GIB
    assert numbers["autopar/rank0/predicted_bytes/allocated"] == HELD.allocated
    assert numbers["autopar/rank0/predicted_step_seconds"] == seconds.step
    assert numbers["autopar/rank0/measured_step_seconds"] == 0.5
    assert "autopar/rank0/measured_bytes/parameters" not in numbers


def test_the_table_leaves_out_what_is_nothing_on_both_sides() -> None:
    seen = {"parameters": GIB, "gradients": 0, "optimizer": 2 * GIB, "buffers": 0, "rest": 6 * GIB}
    text = table(compare(candidate(), measured(peak_bytes=9 * GIB, bytes=seen, step_seconds=0.5)), "what it took")

    def line(word: str) -> str:
        return " ".join(next(line for line in text.splitlines() if word in line).split())

    assert text.splitlines()[0] == "what it took"
    assert line("parameters") == "GPU-0 parameters 1 GiB 1 GiB +0.0%"
    assert line("gradients") == "gradients 1 GiB 0 B -100.0%"
    assert "buffers" not in text
    assert line("a step") == "a step – 500 ms"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"peak_bytes": HELD.reserved + GIB},
            "GPU-0 took 10.2 GiB, 1 GiB more than the 9.25 GiB allowed for; 1.75 GiB are left of the 12 GiB",
        ),
        ({"reserved_bytes": 12 * GIB, "context_bytes": 2 * GIB}, "it is 2 GiB beyond the 12 GiB that the plan may use there"),
        ({"reserved_bytes": 9 * GIB}, "GPU-0 took 10 GiB"),  # with the context as predicted
        ({"peak_bytes": HELD.reserved + MIB}, None),
        ({"peak_bytes": HELD.reserved - GIB}, None),
        ({}, None),
    ],
)
def test_who_took_more_than_was_allowed_for(values: dict[str, Any], words: str | None) -> None:
    one = candidate()
    found = warnings(one, {"GPU-0": 12 * GIB}, compare(one, measured(**values)))
    assert len(found) == (words is not None)
    assert words is None or words in found[0]


def test_a_device_without_a_prediction_is_left_out() -> None:
    assert compare(candidate(), {"GPU-1": measured()["GPU-0"]}) == ()
