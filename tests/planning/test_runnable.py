from typing import Any

import pytest

from lightning_autopar.planning.refusals import cannot_run
from lightning_autopar.plans import Plan

TWO = ("cpu:0", "cpu:1")
FSDP = {"engine": "fsdp", "reshard_after_forward": True}


@pytest.mark.parametrize(
    ("values", "missing"),
    [
        ({"engine": "single", "devices": TWO[:1], "recompute": ("a",)}, None),
        ({"engine": "zero", "devices": TWO, "zero_stage": 2}, "add 'zero' to allow= to use this"),
        ({"engine": "pipeline", "devices": TWO, "cuts": ("a",), "schedule": "1f1b", "micro_batches": 2}, None),
        ({**FSDP, "devices": TWO, "offload": ("optimizer", "parameters")}, None),
        ({**FSDP, "devices": TWO, "shares": (1, 2), "micro_batches": 2}, None),
    ],
)
def test_what_of_a_plan_cannot_be_run(values: dict[str, Any], missing: str | None) -> None:
    assert cannot_run(Plan(**values)) == missing


def test_what_is_pinned_may_be_what_planning_takes_not_by_itself() -> None:
    plan = Plan(engine="zero", devices=TWO, zero_stage=2)
    assert cannot_run(plan, allow=("single", "ddp")) == "add 'zero' to allow= to use this"
    assert cannot_run(plan, allow=("single", "zero")) is None
    assert cannot_run(plan, pinned=True) is None
