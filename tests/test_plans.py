import json
from dataclasses import asdict, replace
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


FOUR = ("GPU-a", "GPU-b", "GPU-c", "GPU-d")
PIPELINE: dict[str, Any] = {
    "engine": "pipeline",
    "devices": FOUR,
    "replicas": 2,
    "micro_batches": 8,
    "cuts": ("net.2",),
    "schedule": "1f1b",
}
ZERO: dict[str, Any] = {"engine": "zero", "devices": FOUR, "zero_stage": 3}
FSDP: dict[str, Any] = {"engine": "fsdp", "devices": FOUR, "reshard_after_forward": True}


@pytest.mark.parametrize(
    ("values", "title"),
    [
        (asdict(PLAN), "fsdp ×2, reshard, recompute 1"),
        ({"engine": "single", "devices": ("cpu:0",)}, "single"),
        ({"engine": "single", "devices": ("cpu:0",), "micro_batches": 4}, "single, micro-batches 4"),
        ({**FSDP, "replicas": 2}, "fsdp ×4, reshard, 2 replicas"),
        ({**FSDP, "offload": ("parameters", "optimizer")}, "fsdp ×4, reshard, offload optimizer + parameters"),
        ({**ZERO, "offload": ("optimizer",)}, "zero-3 ×4, offload optimizer"),
        (
            {**ZERO, "devices": ("GPU-a",), "zero_stage": 1, "micro_batches": 2, "recompute": ("net.0",)},
            "zero-1, recompute 1, micro-batches 2",
        ),
        (PIPELINE, "pipeline 2 stages, 1f1b ×8, 2 replicas"),
        ({**PIPELINE, "shard": ("net.0",)}, "pipeline 2 stages, 1f1b ×8, 2 sharded replicas"),
        (
            {**PIPELINE, "replicas": 1, "cuts": tuple(f"net.{index}" for index in range(1, 8)), "schedule": "interleaved_1f1b"},
            "pipeline 8 stages, interleaved_1f1b ×8",
        ),
    ],
)
def test_a_plan_that_can_be_is_titled_and_survives_json(values: dict[str, Any], title: str) -> None:
    plan = Plan(**values)
    assert plan.title() == title
    assert Plan.from_json(plan.to_json()) == plan


def test_what_an_engine_of_another_package_has_besides_travels_with_its_plan() -> None:
    bare = Plan(engine="ddp", devices=FOUR)
    plan = replace(bare, options={"sent": "fp16"})  # type: ignore[arg-type]  # a mapping will do
    assert Plan.from_json(plan.to_json()) == plan != bare
    assert "options" not in bare.to_dict()


def test_the_order_in_which_offloads_are_named_makes_no_difference() -> None:
    assert Plan(**ZERO, offload=("parameters", "optimizer")) == Plan(**ZERO, offload=("optimizer", "parameters"))


def test_a_pipeline_knows_its_stages_and_ranks() -> None:
    plan = Plan(**PIPELINE)
    assert (plan.world_size, plan.devices_per_replica, plan.stages) == (4, 2, 2)
    assert PLAN.stages == 1


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({**FSDP, "micro_batches": 0}, "micro_batches .*at least 1, but is 0"),
        ({**FSDP, "micro_batches": True}, "micro_batches .* but is True"),
        ({**FSDP, "micro_batches": "4"}, "micro_batches .* but is '4'"),
        ({**FSDP, "replicas": 3}, "3 doesn't divide 4; choose one of 1, 2$"),
        ({**FSDP, "replicas": 4}, "choose engine 'ddp'"),
        (
            {"engine": "ddp", "devices": FOUR, "replicas": 2},
            "replicas is 2, .* choose 'fsdp' or 'pipeline'",
        ),
        ({**ZERO, "zero_stage": None}, "needs zero_stage 1, 2 or 3, but it is None"),
        ({**ZERO, "zero_stage": 0}, "but it is 0"),
        ({**ZERO, "zero_stage": True}, "but it is True"),
        ({**ZERO, "zero_stage": 3.0}, "but it is 3.0"),
        ({**FSDP, "zero_stage": 2}, "the engine is 'fsdp'; leave it out"),
        ({**ZERO, "offload": ("gradients",)}, "unknown offload 'gradients'; choose from optimizer, parameters"),
        ({**ZERO, "offload": ("optimizer", "optimizer")}, "each offload once"),
        ({**ZERO, "zero_stage": 2, "offload": ("parameters",)}, "at stage 3, but zero_stage is 2"),
        ({**ZERO, "options": ("ab",)}, r"options are plain values by name, but they are \('ab',\); write options=\{'name': value\}"),
        ({**FSDP, "offload": ("optimizer",)}, "fsdp offloads optimizer and parameters together"),
        ({"engine": "single", "devices": ("cpu:0",), "offload": ("optimizer",)}, "offload is .*, but the engine is 'single'"),
        ({**FSDP, "cuts": ("net.1",)}, "cuts is .*; leave it out"),
        ({**FSDP, "schedule": "gpipe"}, "schedule is 'gpipe'"),
        ({**PIPELINE, "cuts": ()}, "at least one cut"),
        ({**PIPELINE, "cuts": ("net.2", "net.2")}, "each cut once"),
        ({**PIPELINE, "schedule": None}, "needs a schedule"),
        ({**PIPELINE, "schedule": "2f2b"}, "'2f2b'; choose one of gpipe, 1f1b, interleaved_1f1b"),
        ({**PIPELINE, "replicas": 1}, "'1f1b' on 4 devices needs as many stages, but 1 cuts make 2; have 3"),
        ({**PIPELINE, "replicas": 4}, "at least two"),
        ({**PIPELINE, "devices": ("GPU-a",), "replicas": 1}, "at least two devices"),
        ({**PIPELINE, "schedule": "interleaved_1f1b"}, "needs 4 stages, or a larger multiple of 2, but 1 cuts make 2; have 3"),
        ({**PIPELINE, "schedule": "interleaved_1f1b", "cuts": ("a", "b", "c"), "micro_batches": 5}, "2 equal rounds .* are 5; choose 4"),
        ({**PIPELINE, "replicas": 1, "devices": FOUR[:2], "shard": ("net.0",)}, "shards over its replicas, but has 1"),
    ],
)
def test_a_plan_that_no_engine_can_run_is_refused_with_the_remedy(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Plan(**values)
    with pytest.raises(ValueError, match=says):
        Plan.from_dict({name: list(value) if isinstance(value, tuple) else value for name, value in values.items()})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"engine": "ddpp"}, "'ddpp'"),
        ({"devices": []}, "at least one device"),
        ({"devices": ["GPU-a", "GPU-a"]}, "each device once"),
        ({"engine": "single"}, "names 2"),
        ({"colour": "red"}, "'colour'"),
        ({"devices": "GPU-a"}, "list of strings"),
        ({"offload": "optimizer"}, "'offload' must be a list of strings"),
        ({"cuts": [1]}, "'cuts' must be a list of strings"),
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
