import json
from pathlib import Path
from typing import Any

import pytest

from lightning_autopar.plans import Plan

PLAN = Plan(
    engine="fsdp",
    devices=("GPU-a", "GPU-b"),
    reshard_after_forward=True,
    shard=("net.0", "net.1"),
    recompute=("net.1",),
    reasons=("it fits",),
)


def test_a_plan_is_the_same_after_json(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(PLAN.to_json())
    assert Plan.from_json(PLAN.to_json()) == Plan.from_json(path) == Plan.from_json(str(path)) == PLAN
    assert hash(Plan.from_json(path)) == hash(PLAN)


def test_a_title_says_what_matters() -> None:
    assert PLAN.title() == "fsdp ×2, reshard, recompute 1"
    assert Plan(engine="single", devices=("cpu:0",)).title() == "single"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"engine": "ddpp"}, "'ddpp'"),
        ({"devices": []}, "at least one device"),
        ({"devices": ["GPU-a", "GPU-a"]}, "each device once"),
        ({"engine": "single"}, "names 2"),
        ({"colour": "red"}, "'colour'"),
        ({"devices": "GPU-a"}, "list of strings"),
        ({"reshard_after_forward": None}, "reshard_after_forward"),
    ],
)
def test_what_is_no_plan_is_refused_by_name(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Plan.from_dict({**json.loads(PLAN.to_json()), **change})


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ValueError, match="'devices'"):
        Plan.from_dict({"engine": "single"})


@pytest.mark.parametrize("text", ["{", "[1]", "nowhere.json"])
def test_a_source_that_holds_no_plan_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"JSON|can't be read"):
        Plan.from_json(path if text != "nowhere.json" else tmp_path / text)
