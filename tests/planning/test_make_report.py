from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from lightning_autopar.constraints import Constraints, SplitFinding
from lightning_autopar.devices.inventory import Inventory
from lightning_autopar.devices.spec import parse_spec
from lightning_autopar.memory.device_bytes import DeviceBytes
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.planning.make_report import make_report
from lightning_autopar.plans import Plan
from lightning_autopar.report.report import NothingFits, Report
from tests.fakes.values import GIB, MIB, cpu, footprint, gpu, inventory
from tests.work import counted


def report(step: Any = None, here: Any = None, *, predict: Any = None, **constraints: Any) -> Report:
    constraints.setdefault("memory_margin", 0.0)
    return make_report(step or footprint(), here or inventory(cpu(0), cpu(1)), Constraints(**constraints), predict=predict)


def unfit(*arguments: Any, **keywords: Any) -> NothingFits:
    with pytest.raises(NothingFits) as caught:
        report(*arguments, **keywords)
    return caught.value


def needs(allocated: int, reserved: int | None = None) -> Any:
    """A prediction that says the same of every device."""

    def predict(step: Footprint, plan: Plan, here: Inventory) -> Mapping[str, DeviceBytes]:
        size = DeviceBytes(parameters=allocated, rounding=(reserved or allocated) - allocated)
        return dict.fromkeys(plan.devices, size)

    return predict


def by_title(sizes: Mapping[str, int]) -> Any:
    """A prediction that knows these plans and takes every other for far too large."""

    def predict(step: Footprint, plan: Plan, here: Inventory) -> Mapping[str, DeviceBytes]:
        return {device: DeviceBytes(parameters=sizes.get(plan.title(), 100 * GIB)) for device in plan.devices}

    return predict


def test_the_fastest_that_fits_is_best_and_the_rest_follows_in_order() -> None:
    found = report(footprint(flops=10**13))
    assert found.best is not None
    assert found.best_index == 0
    assert found.best.world_size == 2
    best, *others = [candidate.step_seconds for candidate in found.candidates if candidate.fits]
    assert others == sorted(others)
    assert best <= min(others) * 1.01


def test_a_simpler_plan_that_is_hardly_slower_is_taken_and_says_so() -> None:
    found = report(footprint(flops=10**13), allow=("ddp", "fsdp"))
    fastest = min((one for one in found.candidates if one.fits), key=lambda one: one.step_seconds)
    best = found.best_candidate
    assert best is not None
    assert fastest.plan.engine == "fsdp"
    assert (best.plan.engine, best.step_seconds > fastest.step_seconds) == ("ddp", True)
    assert any("faster, too little to be worth more than the simpler plan" in reason for reason in best.plan.reasons)


def test_a_small_model_stays_on_one_device() -> None:
    step = footprint(flops=3 * 10**6, parameter_bytes=4096, activation_bytes=4096)
    found = report(replace(step, blocks=tuple(replace(block, flops=10**5) for block in step.blocks)))
    assert found.best is not None
    assert found.best.title() == "single"


def test_for_memory_the_least_allocated_is_best() -> None:
    found = report(footprint(flops=10**13), objective="memory")
    fullest = [max(need.allocated for need in candidate.bytes.values()) for candidate in found.candidates if candidate.fits]
    assert fullest == sorted(fullest)
    assert found.best is not None
    assert (found.best.engine, len(found.best.recompute)) == ("fsdp", 4)


def test_what_a_plan_reserves_must_fit_and_the_footprints_margin_on_top() -> None:
    here = inventory(cpu(0, GIB))
    assert report(here=here, predict=needs(GIB)).best
    assert unfit(here=here, predict=needs(GIB // 2, GIB + 1))
    assert report(footprint(margin=0.1), here, predict=needs(int(GIB / 1.1))).best
    assert unfit(footprint(margin=0.1), here, predict=needs(int(GIB / 1.1) + 1))


def test_the_memory_margin_and_the_limit_count() -> None:
    here = inventory(cpu(0, GIB))
    assert report(here=here, predict=needs(int(0.95 * GIB)), memory_margin=0.05).best
    message = str(unfit(here=here, predict=needs(GIB), memory_margin=0.05))
    assert "needs 1 GiB on cpu:0, which has 973 MiB (1 GiB free less the 5 % margin)" in message
    message = str(unfit(here=here, predict=needs(GIB), memory_limit_bytes=512 * MIB))
    assert "needs 1 GiB on cpu:0, which has 512 MiB (512 MiB by the memory limit)" in message


def test_a_shortage_that_rounding_hides_is_said_in_bytes() -> None:
    assert "needs 1 GiB on cpu:0, which has 1 GiB (1 GiB free), 7 B too little" in str(
        unfit(here=inventory(cpu(0, GIB)), predict=needs(GIB + 7))
    )


def test_devices_of_the_host_share_its_memory() -> None:
    here = inventory(cpu(0), cpu(1), host_free_bytes=3 * GIB)
    found = report(here=here, predict=needs(2 * GIB), excluded={"offload": "all stays on the devices"})
    assert found.best is not None
    assert found.best.engine == "single"
    reason = next(candidate.reason for candidate in found.candidates if candidate.plan.engine == "ddp")
    assert reason == "needs 4 GiB of the host's memory over all its ranks, which has 3 GiB"


def test_as_few_blocks_are_recomputed_as_let_it_fit() -> None:
    step = footprint(blocks=8, activation_bytes=128 * MIB)
    whole = {"allow": ("single",), "excluded": {"micro_batches": "not here"}}
    plain = report(step, **whole).candidates[0]
    need = next(iter(plain.needs.values()))
    assert plain.plan.recompute == ()
    found = report(step, inventory(cpu(0, need - 300 * MIB)), **whole)
    assert found.best is not None
    count = len(found.best.recompute)
    assert 0 < count < 8
    fewer = replace(found.best, recompute=found.best.recompute[:-1])
    assert "needs" in str(unfit(step, inventory(cpu(0, need - 300 * MIB)), pinned=fewer))
    assert any("without recomputation it needs" in reason for reason in found.best.reasons)


def test_of_equal_configurations_only_the_best_choice_of_devices_is_reported() -> None:
    here = inventory(gpu(0, utilization=0.5), gpu(1), gpu(2), gpu(3, utilization=0.9))
    found = report(footprint(flops=10**15), here)
    titles = [candidate.plan.title() for candidate in found.candidates if candidate.plan.world_size > 1]
    assert len(titles) == len(set(titles))
    pair = next(candidate.plan for candidate in found.candidates if candidate.plan.title() == "ddp ×2")
    assert pair.devices == ("GPU-0001", "GPU-0002")


def test_slow_devices_with_memory_are_taken_where_the_fast_ones_have_none() -> None:
    here = inventory(gpu(0, GIB), gpu(1, GIB), gpu(2, 60 * GIB, utilization=0.5), gpu(3, 50 * GIB, utilization=0.5))
    found = report(here=here, allow=("ddp",))
    assert found.best is not None
    assert found.best.devices == ("GPU-0002", "GPU-0003")


def test_the_best_plan_says_why_it_is_and_nothing_simpler() -> None:
    sizes = {"single": 5 * GIB, "fsdp ×2, reshard": 3 * GIB}
    found = report(predict=by_title(sizes))
    assert found.best is not None
    assert found.best.title() == "fsdp ×2, reshard"
    text = "; ".join(found.best.reasons)
    assert "one device alone needs 5 GiB on cpu:0, which has 4 GiB" in text
    assert "replicas: ddp ×2 needs 100 GiB" in text
    assert "no other plan that was looked at fits" in text


def test_a_plan_that_offloads_on_one_device_shards_nothing_and_is_compared_with_plans_of_one_device() -> None:
    found = report(
        here=inventory(gpu(0, 4 * GIB), gpu(1, GIB)), predict=by_title({"fsdp, reshard, offload optimizer + parameters": 3 * GIB})
    )
    assert found.best is not None
    assert found.best.world_size == 1
    text = "; ".join(found.best.reasons)
    assert "on one device FSDP2 shards nothing" in text
    assert "single needs 100 GiB on cuda:0" in text
    assert not any(words in text for words in ("each device holds its part", "gathered", "ddp", "one device alone"))


def test_without_a_device_there_is_no_plan() -> None:
    with pytest.raises(ValueError, match="there is no device to plan for"):
        report(here=inventory())


def test_a_pinned_plan_is_the_only_candidate() -> None:
    pinned = Plan(engine="ddp", devices=("cpu:1", "cpu:0"), recompute=("net.1",))
    found = report(pinned=pinned)
    assert [candidate.plan for candidate in found.candidates] == [pinned]
    assert found.best is pinned


def test_a_pinned_plan_has_one_mig_instance_of_a_gpu() -> None:
    here = inventory(*(replace(gpu(index), part_of="GPU-a") for index in (0, 1)))
    with pytest.raises(ValueError, match="MIG instances"):
        report(None, here, pinned=Plan(engine="ddp", devices=("GPU-0000", "GPU-0001")))


def test_a_pinned_plan_of_one_fsdp_rank_needs_no_second_device() -> None:
    pinned = Plan(engine="fsdp", devices=("cpu:0",), reshard_after_forward=True, shard=("net.0",))
    assert report(footprint(batch_size=1), inventory(cpu(0)), pinned=pinned).best is pinned


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    "values",
    [
        {"engine": "zero", "zero_stage": 2},
        {"engine": "zero", "zero_stage": 3, "offload": ("optimizer", "parameters")},
        {"engine": "fsdp", "reshard_after_forward": True, "offload": ("optimizer", "parameters")},
    ],
)
def test_plans_with_zero_and_offload_can_be_pinned(values: dict[str, Any], count: int) -> None:
    here = inventory(*(cpu(index) for index in range(count)))
    pinned = Plan(devices=tuple(device.id for device in here.devices), **values)
    assert report(here=here, pinned=pinned).best == pinned


@pytest.mark.parametrize(
    ("plan", "constraints", "message"),
    [
        ({"engine": "single", "devices": ("cpu:7",)}, {}, r"names 'cpu:7', which isn't there; there are: cpu:0, cpu:1"),
        ({"engine": "single", "devices": ("cpu:0",), "micro_batches": 9}, {}, "splits 8 samples into 9 micro-batches; use at most 8"),
        (
            {"engine": "single", "devices": ("cpu:0",), "micro_batches": 2},
            {"exact": True, "split": SplitFinding(difference=0.5)},
            "exact=True, and the split batch's loss differs",
        ),
        (
            {"engine": "single", "devices": ("cpu:0",), "recompute": ("net.1",)},
            {"excluded": {"recompute": "hooks count its forwards"}},
            "hooks count its forwards",
        ),
        (
            {"engine": "fsdp", "devices": ("cpu:0", "cpu:1", "cpu:2", "cpu:3"), "reshard_after_forward": True, "replicas": 2},
            {"excluded": {"replicas": "a callback knows one copy only"}},
            "a callback knows one copy only",
        ),
        (
            {"engine": "ddp", "devices": ("cpu:0", "cpu:1"), "shares": (1, 2)},
            {"excluded": {"shares": "the batch comes from several loaders"}},
            "the batch comes from several loaders",
        ),
        ({"engine": "ddp", "devices": ("cpu:0", "cpu:1")}, {"allow": ("single",)}, r"not in allow=\['single'\]"),
        ({"engine": "fsdp", "devices": ("cpu:0",), "reshard_after_forward": True}, {"allow": ("single",)}, r"not in allow=\['single'\]"),
        (
            {"engine": "fsdp", "devices": ("cpu:0",), "reshard_after_forward": True},
            {"excluded": {"fsdp": "no shards here"}},
            "no shards here",
        ),
        ({"engine": "ddp", "devices": ("cpu:0", "cpu:1")}, {"max_devices": 1}, "may use only one"),
        ({"engine": "ddp", "devices": ("cpu:0", "cpu:1", "GPU-0000")}, {"max_devices": 2}, "the run may use 2"),
        ({"engine": "ddp", "devices": ("cpu:0", "cpu:1")}, {"min_devices": 3}, "3 processes were started"),
        ({"engine": "single", "devices": ("cpu:0",)}, {"min_devices": 2}, "2 processes were started"),
        ({"engine": "ddp", "devices": ("cpu:0", "GPU-0000")}, {}, "mixes devices of kinds cpu, cuda"),
        ({"engine": "single", "devices": ("cpu:0",), "recompute": ("net.9",)}, {}, "'net.9', which is none of the module's blocks"),
        (
            {"engine": "ddp", "devices": ("cpu:0", "cpu:1")},
            {"exact": True, "split": SplitFinding(difference=0.5)},
            "loss differs",
        ),
    ],
)
def test_a_pinned_plan_that_cannot_be_run_here_is_an_error(plan: dict[str, Any], constraints: dict[str, Any], message: str) -> None:
    here = inventory(cpu(0), cpu(1), gpu(0)) if "GPU" in str(plan) else inventory(cpu(0), cpu(1), cpu(2), cpu(3))
    with pytest.raises(ValueError, match=message) as caught:
        report(here=here, pinned=Plan(**plan), **constraints)
    assert not isinstance(caught.value, NothingFits)


def test_a_pinned_plan_in_parts_of_an_engine_that_runs_none_is_an_error() -> None:
    here = inventory(cpu(0), cpu(1))
    pinned = Plan(engine="zero", devices=("cpu:0", "cpu:1"), zero_stage=2)
    assert report(here=here, pinned=pinned).best == pinned
    with pytest.raises(ValueError, match="engine 'zero' has no micro-batches"):
        report(here=here, pinned=replace(pinned, micro_batches=2))


def test_a_pinned_plan_with_more_ranks_than_samples_or_a_block_that_must_not_run_twice_is_an_error() -> None:
    three = inventory(cpu(0), cpu(1), cpu(2))
    with pytest.raises(ValueError, match="3 ranks for a batch of 2"):
        report(footprint(batch_size=2), three, pinned=Plan(engine="ddp", devices=("cpu:0", "cpu:1", "cpu:2")))
    step = footprint()
    step = replace(step, blocks=(replace(step.blocks[0], recomputable=False), *step.blocks[1:]))
    with pytest.raises(ValueError, match=r"'net\.0', which must not run twice"):
        report(step, pinned=Plan(engine="single", devices=("cpu:0",), recompute=("net.0",)))


def test_a_pinned_plan_that_does_not_fit_is_an_error_with_numbers() -> None:
    error = unfit(predict=needs(6 * GIB), pinned=Plan(engine="single", devices=("cpu:1",)))
    assert "needs 6 GiB on cpu:1, which has 4 GiB (4 GiB free)" in str(error)
    assert error.report.best is None


def test_with_a_batch_for_each_rank_a_rank_needs_what_one_device_alone_does() -> None:
    found = report(footprint(flops=10**13), split_batch=False, allow=("single", "ddp"))
    single = next(candidate for candidate in found.candidates if candidate.plan.title() == "single")
    double = next(candidate for candidate in found.candidates if candidate.plan.title() == "ddp ×2")
    assert double.bytes["cpu:0"].to_dict()["activations"] == single.bytes["cpu:0"].to_dict()["activations"]
    assert double.step_seconds > single.step_seconds
    assert found.best == found.candidates[0].plan
    assert found.best.title() == "ddp ×2"


def test_eight_devices_are_planned_for_at_once() -> None:
    here = parse_spec("8xH100-80GB")
    step = footprint(blocks=48, parameter_bytes=600 * MIB, activation_bytes=4 * GIB, batch_size=64, flops=10**16)
    report(step, here)
    found, calls = counted(report, step, here)
    assert found.best
    assert calls < 400_000, "a tenth of a second"


def test_a_thousand_devices_take_two_seconds_at_most() -> None:
    here = parse_spec("128x8xH100-80GB")
    step = footprint(blocks=96, parameter_bytes=600 * MIB, activation_bytes=4 * GIB, batch_size=4096)
    found, calls = counted(report, step, here)
    assert calls < 5_000_000, "two seconds"
    assert found.best is not None
    # Nodes communicate for longer than they save by more devices, which are told apart by their seconds alone.
    assert max(candidate.plan.world_size for candidate in found.candidates if candidate.bytes) >= 128


def test_what_cannot_be_run_yet_is_shown_behind_what_can() -> None:
    found = report()
    places = [0 if one.fits else 1 if one.needs and not one.runnable else 2 for one in found.candidates]
    assert {"zero"} == {one.plan.engine for one in found.candidates if not one.runnable}
    assert places[: places.count(0)] == [0] * places.count(0)
