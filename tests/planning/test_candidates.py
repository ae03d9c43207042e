import math
from dataclasses import replace
from typing import Any

import pytest

from lightning_autopar.memory.inventory import Link
from lightning_autopar.planning.candidates import Constraints, Option, SplitFinding, check_allow, enumerate_candidates
from tests.fakes.values import GIB, block, cpu, footprint, gpu, inventory


def options(step: Any = None, here: Any = None, **constraints: Any) -> list[Option]:
    return list(enumerate_candidates(step or footprint(), here or inventory(cpu(0), cpu(1)), Constraints(**constraints)))


def rejections(found: list[Option]) -> dict[str, str]:
    return {option.plan.engine: option.rejection for option in found if option.rejection is not None}


def taken(found: list[Option]) -> set[str]:
    return {option.plan.engine for option in found if option.rejection is None}


def device_sets(found: list[Option], engine: str = "ddp") -> list[tuple[str, ...]]:
    return list(dict.fromkeys(option.plan.devices for option in found if option.plan.engine == engine and option.rejection is None))


def test_every_engine_with_and_without_recomputation() -> None:
    titles = [option.plan.title() for option in options()]
    assert titles == [
        "single",
        "single, recompute 4",
        "ddp ×2",
        "ddp ×2, recompute 4",
        "fsdp ×2, reshard",
        "fsdp ×2, reshard, recompute 4",
        "fsdp ×2, keep gathered",
        "fsdp ×2, keep gathered, recompute 4",
    ]


def test_every_plan_says_why() -> None:
    assert all(option.plan.reasons for option in options())
    assert any("recomputed in backward" in reason for option in options() if option.plan.recompute for reason in option.plan.reasons)


def test_blocks_are_the_units_of_sharding_but_not_those_that_share_parameters_with_others() -> None:
    step = footprint(blocks=3, tied=(("net.0.weight", "head.weight"), ("net.1.a.weight", "net.1.b.weight")))
    plan = next(option.plan for option in options(step) if option.plan.engine == "fsdp")
    assert plan.shard == ("net.1", "net.2")
    assert any("net.0" in reason and "share parameters" in reason for reason in plan.reasons)


def test_nothing_is_recomputed_that_may_not_run_twice_or_saves_nothing_or_has_no_backward() -> None:
    blocks = (block("net.0", recomputable=False), block("net.1", activation_bytes=64, input_bytes=64), block("net.2"))
    assert {option.plan.recompute for option in options(replace(footprint(), blocks=blocks))} == {(), ("net.2",)}
    assert {option.plan.recompute for option in options(footprint(training=False))} == {()}


def test_of_equal_devices_the_freest_stands_for_all_and_different_ones_stand_for_themselves() -> None:
    here = inventory(gpu(0, 10 * GIB), gpu(1, 40 * GIB), gpu(2, 20 * GIB, utilization=0.5), gpu(3, 30 * GIB, name="Tesla T4"))
    assert device_sets(options(here=here), "single") == [("GPU-0001",), ("GPU-0003",), ("GPU-0002",)]


def test_the_freest_devices_are_taken_and_the_idler_of_equally_free_ones() -> None:
    here = inventory(gpu(0, 10 * GIB), gpu(1, 40 * GIB), gpu(2, 20 * GIB), gpu(3, 30 * GIB))
    assert device_sets(options(footprint(batch_size=12), here)) == [
        ("GPU-0001", "GPU-0003"),
        ("GPU-0001", "GPU-0002", "GPU-0003"),
        tuple(d.id for d in here.devices),
    ]
    here = inventory(gpu(0, utilization=0.04), gpu(1, utilization=0.0), gpu(2, utilization=0.01))
    assert device_sets(options(here=here), "single") == [("GPU-0001",)]


def test_a_slow_device_does_not_keep_the_fast_ones_from_being_a_set() -> None:
    here = inventory(gpu(0, 70 * GIB, utilization=0.9), gpu(1, 40 * GIB), gpu(2, 30 * GIB))
    assert ("GPU-0001", "GPU-0002") in device_sets(options(here=here))
    assert ("GPU-0000", "GPU-0001") in device_sets(options(here=here))


def test_devices_linked_by_nvlink_are_a_set_and_so_are_those_of_one_node() -> None:
    here = inventory(
        gpu(0, 40 * GIB),
        gpu(1, 30 * GIB),
        gpu(2, 40 * GIB),
        gpu(3, 30 * GIB),
        links=(
            Link(a="GPU-0000", b="GPU-0001", kind="nvlink"),
            Link(a="GPU-0002", b="GPU-0003", kind="nvlink"),
            Link(a="GPU-0000", b="GPU-0002", kind="pcie"),
        ),
    )
    assert {("GPU-0000", "GPU-0001"), ("GPU-0002", "GPU-0003"), ("GPU-0000", "GPU-0002")} == {
        s for s in device_sets(options(here=here)) if len(s) == 2
    }
    nodes = inventory(gpu(0, 40 * GIB), gpu(1, 30 * GIB), gpu(2, 40 * GIB, node=1), gpu(3, 30 * GIB, node=1))
    assert ("GPU-0000", "GPU-0001") in device_sets(options(here=nodes))


def test_devices_of_different_kinds_are_never_in_one_plan() -> None:
    here = inventory(cpu(0), cpu(1), gpu(0))
    assert device_sets(options(here=here)) == [("cpu:0", "cpu:1")]
    assert "at least two devices of one kind" in rejections(options(here=inventory(cpu(0), gpu(0))))["ddp"]


def test_no_more_ranks_than_samples_or_than_devices_allowed() -> None:
    here = inventory(*(cpu(index) for index in range(4)))
    assert max(map(len, device_sets(options(footprint(batch_size=3), here)))) == 3
    assert max(map(len, device_sets(options(here=here, max_devices=2)))) == 2
    assert min(map(len, device_sets(options(here=here, min_devices=3)))) == 3


def test_with_a_batch_for_each_rank_its_size_bounds_nothing() -> None:
    found = options(footprint(batch_size=1), split_batch=False)
    assert {"ddp", "fsdp"} <= taken(found)
    assert any("each rank takes a batch of its own" in reason for reason in found[-1].plan.reasons)


def test_the_freest_device_takes_the_larger_share_of_an_uneven_batch() -> None:
    here = inventory(cpu(0, 2 * GIB), cpu(1, 4 * GIB))
    assert device_sets(options(footprint(batch_size=5), here)) == [("cpu:1", "cpu:0")]
    assert device_sets(options(footprint(batch_size=4), here)) == [("cpu:0", "cpu:1")]
    assert device_sets(options(footprint(batch_size=5), here, min_devices=2)) == [("cpu:0", "cpu:1")]


@pytest.mark.parametrize(
    ("step", "devices", "constraints", "sentence"),
    [
        ({"batch_size": 1}, 2, {}, "a batch of 1 sample can't be split over ranks"),
        ({"batch_size": 0}, 2, {}, "the batch has no batch dimension, so it can't be split over ranks"),
        ({}, 1, {}, "needs at least two devices of one kind, but there is one: cpu:0"),
        ({}, 2, {"max_devices": 1}, "needs at least two devices, but the run may use only one"),
        ({}, 2, {"excluded": {"multi": "it draws its own batches"}}, "it draws its own batches"),
        ({"batch_size": 2}, 3, {"min_devices": 3}, "a batch of 2 samples can't be split over the 3 processes that were started"),
        ({}, 2, {"split": SplitFinding(splittable=False, reason="the batch is a generator")}, "the batch is a generator"),
        (
            {},
            2,
            {"exact": True, "split": SplitFinding(difference=0.0123, reason="the loss is a mean over tokens")},
            "exact=True, and the split batch's loss differs from the whole batch's by 0.012 of it (the loss is a mean over tokens)",
        ),
        (
            {},
            2,
            {"exact": True, "split": SplitFinding(difference=math.nan)},
            "exact=True, and the split batch's loss and the whole batch's can't be compared, as one isn't finite",
        ),
        (
            {},
            2,
            {"exact": True, "split": SplitFinding(probed=False, reason="the probe took too long")},
            "exact=True, and whether splitting the batch changes its loss is not known (the probe took too long)",
        ),
    ],
)
def test_why_no_plan_with_several_devices(step: dict[str, Any], devices: int, constraints: dict[str, Any], sentence: str) -> None:
    found = options(footprint(**step), inventory(*(cpu(index) for index in range(devices))), **constraints)
    assert [option.rejection for option in found if option.plan.engine != "single"] == [sentence, sentence]


def test_a_loss_that_changes_is_a_note_unless_the_run_must_be_exact() -> None:
    found = options(split=SplitFinding(difference=1e-3))
    notes = {option.plan.engine: option.notes for option in found}
    assert notes["single"] == ()
    assert (
        notes["ddp"]
        == notes["fsdp"]
        == ("the split batch's loss differs from the whole batch's by 0.001 of it; exact=True rules such plans out",)
    )
    assert not any(option.notes for option in options(split=SplitFinding(difference=9e-6), exact=True))
    assert taken(options(split=SplitFinding(difference=9e-6), exact=True)) == {"single", "ddp", "fsdp"}
    assert all(
        "is not known" in option.notes[0]
        for option in options(split=SplitFinding(probed=False, reason="it took too long"))
        if option.plan.world_size > 1
    )


def test_a_step_without_a_loss_has_nothing_to_probe() -> None:
    found = options(split=SplitFinding(probed=False), exact=True)
    assert taken(found) == {"single", "ddp", "fsdp"}
    assert not any(option.notes for option in found)


def test_engines_that_are_not_allowed_not_built_or_excluded_are_rejected_once_each() -> None:
    found = options(allow=("ddp", "zero", "fsdp"), excluded={"fsdp": "WeightAveraging copies the module"})
    assert taken(found) == {"ddp"}
    assert [option.plan.engine for option in found if option.rejection] == ["single", "fsdp", "zero"]
    assert rejections(found) == {
        "single": "not in allow=['ddp', 'zero', 'fsdp']",
        "fsdp": "WeightAveraging copies the module",
        "zero": "engine 'zero' is not built yet",
    }


@pytest.mark.parametrize(("devices", "title"), [(2, "pipeline 2 stages, 1f1b ×1"), (3, "pipeline 2 stages, 1f1b ×1"), (1, "single")])
def test_a_pipeline_that_is_refused_is_written_as_one_where_it_can_be(devices: int, title: str) -> None:
    here = inventory(*(cpu(index) for index in range(devices)))
    found = [one for one in options(footprint(blocks=2), here, allow=("pipeline",)) if "not built" in (one.rejection or "")]
    assert [(option.plan.title(), option.rejection) for option in found] == [(title, "engine 'pipeline' is not built yet")]


def test_processes_that_are_there_already_leave_no_plan_with_one_device() -> None:
    assert rejections(options(min_devices=2)) == {"single": "2 processes were started, and each has to have a device"}


def test_batch_norm_over_ranks_is_mentioned() -> None:
    plans = [option.plan for option in options(footprint(batch_norm=("bn",)))]
    assert all(any("batch norms" in reason for reason in plan.reasons) == (plan.world_size > 1) for plan in plans)


def test_allow_is_checked() -> None:
    assert check_allow("fsdp") == ("fsdp",)
    assert check_allow(["ddp", "single", "ddp"]) == ("ddp", "single")
    with pytest.raises(ValueError, match=r"unknown engine 'fdsp'.*'pipeline': did you mean 'fsdp'\?"):
        check_allow(["single", "fdsp"])
    with pytest.raises(ValueError, match="leaves no engine"):
        check_allow([])


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        ({"max_devices": 0}, "max_devices=0"),
        ({"memory_limit_bytes": 0}, "0 bytes"),
        ({"memory_margin": 1.0}, "memory_margin=1.0"),
        ({"memory_margin": math.nan}, "memory_margin=nan"),
        ({"objective": "cost"}, "choose 'speed' or 'memory'"),
        ({"allow": ("fast",)}, "unknown engine 'fast'"),
        ({"min_devices": 4, "max_devices": 2}, "4 processes were started"),
    ],
)
def test_constraints_are_checked(constraints: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Constraints(**constraints)


def test_the_budget_is_what_is_free_or_the_limit_less_the_margin() -> None:
    assert Constraints(memory_margin=0.25).budget_bytes(cpu(0, 4 * GIB)) == 3 * GIB
    assert Constraints(memory_margin=0.0, memory_limit_bytes=GIB).budget_bytes(cpu(0, 4 * GIB)) == GIB
    assert Constraints(memory_margin=0.0, memory_limit_bytes=8 * GIB).budget_bytes(cpu(0, 4 * GIB)) == 4 * GIB
