from dataclasses import replace
from typing import Any

import pytest

from lightning_autopar.constraints import Constraints, SplitFinding
from lightning_autopar.devices.inventory import Inventory
from lightning_autopar.devices.spec import parse_spec
from lightning_autopar.memory.batch_scaling import drawn_by_rank, scaled
from lightning_autopar.memory.footprint import Footprint, Moment
from lightning_autopar.memory.work.work import Work
from lightning_autopar.planning import advice as subject
from lightning_autopar.planning.make_report import make_report
from lightning_autopar.planning.what_if import more_devices, validated, with_host
from lightning_autopar.plans import Plan
from lightning_autopar.report.report import Advice, NothingFits, Report
from tests.fakes.values import GIB, MIB, cpu, footprint, gpu, inventory

#: Without what would help by itself wherever a little memory is missing.
WHOLE = {
    "micro_batches": "the batch is run whole",
    "shares": "the batch is shared evenly",
    "offload": "all stays on the devices",
}


def made(step: Footprint, here: Inventory, **constraints: Any) -> Report:
    constraints = {"memory_margin": 0.0, **constraints, "excluded": {**WHOLE, **constraints.get("excluded", {})}}
    try:
        return make_report(step, here, Constraints(**constraints))
    except NothingFits as error:
        return error.report


def nothing_fits(step: Any = None, here: Any = None, **constraints: Any) -> list[Advice]:
    report = made(step or footprint(), here or inventory(cpu(0, GIB // 2), cpu(1, GIB // 2)), **constraints)
    assert report.best is None
    return list(report.advice)


def starting(found: list[Advice], words: str) -> list[Advice]:
    return [advice for advice in found if str(advice).startswith(words)]


def of_kind(found: Any, kind: str) -> list[Advice]:
    return [advice for advice in found if advice.kind == kind]


def fixed(step: Footprint) -> Footprint:
    """The same without blocks that can be recomputed."""
    return replace(step, blocks=tuple(replace(block, recomputable=False) for block in step.blocks))


ALL = ("single", "ddp", "fsdp", "pipeline")
#: So much to compute that two devices are nearly twice as fast, whatever else a step costs.
HEAVY = fixed(footprint(batch_size=16, activation_bytes=256 * MIB, flops=4 * 10**13))


# -- where nothing fits ----------------------------------------------------------------------------------------------------------------


def test_another_engine_that_would_fit_is_named() -> None:
    (found,) = starting(nothing_fits(allow=("single",)), "allow=['single', 'ddp', 'fsdp', 'pipeline']: fsdp ×2")
    assert found.change == {"allow": ["single", "ddp", "fsdp", "pipeline"]}
    assert found.plan is not None
    assert found.plan.engine == "fsdp"
    assert found.speedup is None
    assert not starting(nothing_fits(here=inventory(cpu(0, GIB // 8)), allow=("single",)), "allow=")


def test_the_largest_batch_that_fits_does_and_one_more_does_not() -> None:
    step, here = fixed(footprint(activation_bytes=GIB)), inventory(cpu(0, 2 * GIB))
    (found,) = of_kind(nothing_fits(step, here), "batch_size")
    assert found.text.startswith("a batch of 2 instead of 8 (accumulate_grad_batches keeps the effective size): single would fit, with ")
    assert found.change == {"batch_size": 2}
    best = made(scaled(step, 2), here).best
    assert best is not None
    assert replace(best, reasons=()) == replace(found.plan or best, reasons=())
    assert made(scaled(step, 3), here).best is None
    assert not of_kind(nothing_fits(step, inventory(cpu(0, GIB // 8))), "batch_size")


def test_the_missing_memory_would_do() -> None:
    step, here = footprint(), inventory(cpu(0, GIB // 2))
    found = nothing_fits(step, here, memory_margin=0.1)[0]
    assert found.kind == "memory"
    missing = found.change["more_free_bytes"]["cpu:0"]
    assert found.plan is not None
    assert found.text.startswith(f"{missing / MIB:.3g} MiB more on cpu:0: {found.plan.title()} would fit, with 657 MiB on the fullest ")
    assert found.text.endswith(" s a step")
    assert made(step, inventory(cpu(0, GIB // 2 + missing)), memory_margin=0.1).best
    assert made(step, inventory(cpu(0, GIB // 2 + missing - 10)), memory_margin=0.1).best is None


@pytest.mark.parametrize(
    ("free", "words"),
    [
        ((200, 200, 200, 200), "348 MiB more on each of cpu:0-3: "),
        ((200, 250, 200, 300), "348 MiB more on each of cpu:0,2, 298 MiB more on cpu:1, 248 MiB more on cpu:3: "),
        ((200, 250, 300, 350), "348 MiB more on cpu:0, 298 MiB more on cpu:1, 248 MiB more on cpu:2, at most 198 MiB more on 1 other: "),
    ],
)
def test_devices_that_lack_as_much_are_named_together(free: tuple[int, ...], words: str) -> None:
    here = inventory(*(cpu(index, size * MIB) for index, size in enumerate(free)))
    assert starting(of_kind(nothing_fits(here=here, allow=("ddp",), min_devices=4), "memory"), words)


def test_what_a_setting_costs_is_said() -> None:
    one = {"here": inventory(cpu(0, GIB), cpu(1, GIB)), "allow": ("single",)}
    assert starting(nothing_fits(memory_limit_bytes=GIB // 2, **one), "lift the memory limit: single")
    assert starting(nothing_fits(memory_margin=0.6, **one), "memory_margin=0.0: single")
    two = inventory(cpu(0, 450 * MIB), cpu(1, 450 * MIB))
    changed = SplitFinding(difference=0.1)
    assert starting(nothing_fits(here=two, exact=True, split=changed), "exact=False, which accepts the changed loss: fsdp ×2")
    assert starting(nothing_fits(here=two, max_devices=1), "let it use all 2 devices: fsdp ×2")
    pinned = Plan(engine="single", devices=("cpu:0",))
    assert starting(nothing_fits(here=two, pinned=pinned), "leave the plan unpinned: fsdp ×2")


def test_memory_that_others_hold_would_do() -> None:
    (found,) = starting(nothing_fits(here=inventory(gpu(0, GIB // 4))), "free what others hold on cuda:0: single would fit")
    assert found.change == {"free": ["GPU-0000"]}


def changed(step: Footprint, here: Inventory, change: dict[str, Any], constraints: dict[str, Any]) -> Report:
    """What is planned where one does as advice says."""
    constraints = constraints | {name: change[name] for name in ("exact", "memory_margin") if name in change}
    constraints |= {"allow": tuple(change["allow"])} if "allow" in change else {}
    constraints |= {"pinned": None} if "plan" in change else {}
    here = with_host(here, change["host_bytes"]) if "host_bytes" in change else here
    here = more_devices(here, change["more_devices"]) or here if "more_devices" in change else here
    more = change.get("more_free_bytes", {})
    here = replace(here, devices=tuple(replace(one, free_bytes=one.free_bytes + more.get(one.id, 0)) for one in here.devices))
    return made(scaled(step, change.get("batch_size", step.batch_size)), here, **constraints)


LARGE = replace(fixed(footprint(blocks=16, parameter_bytes=512 * MIB)), optimizer_classes=("AdamW",))


@pytest.mark.parametrize(
    ("step", "spec", "constraints"),
    [
        (LARGE, "RTX4090@16GiB", {"allow": ("single",)}),
        (LARGE, "RTX4090", {"exact": True}),
        (LARGE, "2xL4", {"allow": ("ddp",), "exact": True, "split": SplitFinding(difference=0.1)}),
        (LARGE, "2xT4", {"memory_margin": 0.1}),
        (fixed(footprint(blocks=8, parameter_bytes=400 * GIB)), "RTX4090", {}),
        (LARGE, "2xL4", {"pinned": Plan(engine="ddp", devices=("L4-24GB:0", "L4-24GB:1")), "exact": True}),
    ],
)
def test_advice_holds_where_one_does_as_it_says(step: Footprint, spec: str, constraints: dict[str, Any]) -> None:
    """It asks for no more memory than a device has, and for nothing that changes nothing."""
    here = parse_spec(spec)
    report = made(step, here, **constraints)
    assert report.best is None
    told = report.advice
    assert told
    known = {"exact", "memory_margin", "allow", "plan", "host_bytes", "more_devices", "more_free_bytes", "batch_size"}
    for one in told:
        for device, size in one.change.get("more_free_bytes", {}).items():
            assert here.device(device).free_bytes + size <= here.device(device).total_bytes, one.text
        if one.change and known.issuperset(one.change):
            assert changed(step, here, dict(one.change), constraints).best is not None, one.text
    if step is not LARGE:
        assert any("comes nearest, and needs" in one.text for one in told)


def test_why_recomputation_does_not_help() -> None:
    step, here = footprint(), inventory(cpu(0, GIB // 8))
    words = "recomputation can't help, as running a block's forward twice would change the run: net.0 changes a buffer, or an object"
    assert starting(nothing_fits(fixed(step), here), words)
    first, *others = fixed(step).blocks
    embedded = (replace(first, fqn="embed", repeated=False), *others)  # a layer that a stage may begin with is no block
    assert starting(nothing_fits(replace(step, blocks=embedded), here), words.replace("net.0", "net.1"))
    assert starting(nothing_fits(replace(step, blocks=()), here), "recomputation can't help, as the module has no repeated blocks")
    assert not starting(nothing_fits(step, here), "recomputation")


#: About 7 billion parameters under AdamW in single precision; 1 billion with large activations.
SEVEN, ONE = footprint(blocks=32, parameter_bytes=800 * MIB), footprint(blocks=8, parameter_bytes=128 * MIB, activation_bytes=GIB)
NEAR = footprint(blocks=8, parameter_bytes=800 * MIB, activation_bytes=16 * MIB)
STAYS, ROUGH = {"offload": "all stays on the devices"}, {**WHOLE, "recompute": "nothing runs twice"}


@pytest.mark.parametrize(
    ("step", "allow", "excluded", "first", "less"),
    [
        (SEVEN, ("fsdp", "pipeline"), STAYS, {"more_devices": 6}, {"more_devices": 5}),
        (SEVEN, ("single",), {}, {"allow": [*ALL], "host_bytes": 121 * GIB}, {"host_bytes": 120 * GIB}),
        (SEVEN, ("fsdp",), {}, {"host_bytes": 121 * GIB}, {"host_bytes": 120 * GIB}),
        (replace(ONE, evaluation_bytes=30 * GIB), ALL, {}, {"validation_batch": 0.5}, {"validation_batch": 0.75}),
        (replace(ONE, batch_size=64, activation_bytes=400 * GIB), ("single",), ROUGH, {"batch_size": 2}, {"batch_size": 3}),
        (NEAR, ("single",), ROUGH, {"allow": [*ALL], "more_devices": 1}, {"more_devices": 0}),
    ],
)  # fmt: skip
def test_the_smallest_change_comes_first_and_does(step: Footprint, allow: Any, excluded: Any, first: Any, less: Any) -> None:
    def planned(change: dict[str, Any]) -> Report:
        footprint = scaled(validated(step, change.get("validation_batch", 1)), change.get("batch_size", step.batch_size))
        spec = f"{1 + change.get('more_devices', 0)}xRTX4090@{change.get('host_bytes', 32 * GIB) // GIB}GiB"
        rules = Constraints(allow=tuple(change.get("allow", allow)), excluded=excluded)
        try:
            return make_report(footprint, parse_spec(spec), rules)
        except NothingFits as refused:
            return refused.report

    report = planned({})
    assert report.best is None
    found = report.advice[0]
    assert found.change == first, [str(one) for one in report.advice]
    then = planned(dict(found.change)).best
    assert then is not None
    assert (found.plan, " would fit, with " in found.text) == (replace(then, reasons=found.plan.reasons if found.plan else ()), True)
    assert planned({**found.change, **less}).best is None
    narrow = [str(one) for one in report.advice if one.change == {"precision": "bf16-true"}]
    assert all("optimizer's states take 12.5 GiB instead of 25 GiB: single may fit" in one for one in narrow)
    assert bool(narrow) == (step is NEAR)


@pytest.mark.parametrize(("gpu", "knows"), [("V100-32GB", False), ("A10G", True)])
def test_weights_in_bf16_are_advised_only_where_the_gpu_knows_bf16(gpu: str, knows: bool) -> None:
    here = parse_spec(f"1x{gpu}@32GiB")
    here = replace(here, devices=tuple(replace(one, free_bytes=24 * GIB, total_bytes=24 * GIB) for one in here.devices))
    with pytest.raises(NothingFits) as refused:
        make_report(NEAR, here, Constraints(allow=("single",), excluded=ROUGH))
    assert any(one.change == {"precision": "bf16-true"} for one in refused.value.report.advice) == knows


# -- where something fits --------------------------------------------------------------------------------------------------------------


def test_a_little_more_memory_lets_a_faster_plan_fit() -> None:
    alone = made(HEAVY, inventory(cpu(0, 8 * GIB), cpu(1, 8 * GIB)), allow=("single", "ddp"))
    need = max(alone.candidates[0].needs.values())
    assert alone.candidates[0].plan.engine == "ddp"
    assert not of_kind(alone.advice, "memory")
    here = inventory(cpu(0, 8 * GIB), cpu(1, need - 50 * MIB))
    report = made(HEAVY, here, allow=("single", "ddp"))
    assert report.best is not None
    assert report.best.engine == "single"
    (found,) = of_kind(report.advice, "memory")
    lack = found.change["more_free_bytes"]
    assert set(lack) == {"cpu:1"}
    assert found.text.startswith("50 MiB more on cpu:1: ddp ×2 would fit, ")
    assert "faster than single" in found.text
    then = made(HEAVY, inventory(cpu(0, 8 * GIB), cpu(1, need - 50 * MIB + lack["cpu:1"])), allow=("single", "ddp"))
    assert then.best == replace(found.plan or report.best, reasons=then.best.reasons if then.best else ())
    assert found.speedup == pytest.approx(report.candidates[0].step_seconds / then.candidates[0].step_seconds)


def test_memory_that_cannot_be_had_is_not_asked_for() -> None:
    need = max(made(HEAVY, inventory(cpu(0, 8 * GIB), cpu(1, 8 * GIB)), allow=("ddp",)).candidates[0].needs.values())
    far = made(HEAVY, inventory(cpu(0, 8 * GIB), cpu(1, need // 2)), allow=("single", "ddp"))
    assert not of_kind(far.advice, "memory")  # twice its memory is no small change
    heavy = replace(HEAVY, flops=10**17)
    whole = max(made(heavy, inventory(gpu(0), gpu(1)), allow=("ddp",)).candidates[0].needs.values())
    small = {"free_bytes": whole - 50 * MIB, "allow": ("single", "ddp")}
    held = made(heavy, inventory(gpu(0), gpu(1, small["free_bytes"])), allow=("single", "ddp"))
    assert starting(of_kind(held.advice, "memory"), "50 MiB more on cuda:1: ddp ×2 would fit")
    full = made(heavy, inventory(gpu(0), gpu(1, small["free_bytes"], total_bytes=small["free_bytes"])), allow=("single", "ddp"))
    assert full.best is not None
    assert not of_kind(full.advice, "memory")  # nobody holds any of it


def test_a_slightly_smaller_batch_fits_a_faster_plan() -> None:
    # Two devices: the whole batch fits only with recomputed activations or in shards; a slightly smaller one without.
    need = max(made(HEAVY, inventory(cpu(0, 8 * GIB), cpu(1, 8 * GIB)), allow=("ddp",)).candidates[0].needs.values())
    here = inventory(cpu(0, 8 * GIB), cpu(1, need - 130 * MIB))
    report = made(HEAVY, here, allow=("single", "ddp"))
    assert report.best is not None
    assert report.best.engine == "single"
    (found,) = of_kind(report.advice, "batch_size")
    batch = found.change["batch_size"]
    assert 8 <= batch < 16
    assert found.text.startswith(f"a batch of {batch} instead of 16: ddp ×2 would fit, ")
    assert "faster a sample than single" in found.text
    assert made(scaled(HEAVY, batch), here, allow=("ddp",)).best is not None
    assert made(scaled(HEAVY, batch + 2), here, allow=("ddp",)).best is None
    then = made(scaled(HEAVY, batch), here, allow=("ddp",)).candidates[0]
    assert found.speedup == pytest.approx(report.candidates[0].step_seconds / 16 / (then.step_seconds / batch))


def test_faster_engines_devices_and_settings_are_named() -> None:
    two = inventory(cpu(0, 8 * GIB), cpu(1, 8 * GIB))
    (found,) = made(HEAVY, two, allow=("single",)).advice
    assert found.kind == "setting"
    assert found.change == {"allow": ["single", "ddp", "fsdp", "pipeline"]}
    assert found.plan is not None
    assert found.plan.world_size == 2
    assert found.speedup is not None
    assert 1.5 < found.speedup < 2.1
    assert starting(list(made(HEAVY, two, max_devices=1).advice), "let it use all 2 devices: ddp ×2 would be ")
    assert starting(list(made(HEAVY, two, exact=True, split=SplitFinding(difference=0.1)).advice), "exact=False")
    assert starting(list(made(HEAVY, two, pinned=Plan(engine="single", devices=("cpu:0",))).advice), "leave the plan unpinned: ddp ×2")
    busy = inventory(gpu(0, utilization=0.9))
    (others,) = made(replace(HEAVY, flops=10**17), busy).advice
    assert others.kind == "others"
    assert others.text.startswith("free what others hold on cuda:0: single would be ")


def test_draws_of_each_ranks_own_are_advised_where_they_pay() -> None:
    """What is drawn for the whole batch on each rank takes longer than all the rest."""
    draw = Work(kind="pointwise", name="bernoulli_", dtype="fp32", moved_bytes=64 * GIB, drawn=True)
    drawing = replace(HEAVY, blocks=tuple(replace(block, work=(draw,), draw_bytes=(GIB // 8,)) for block in HEAVY.blocks))
    two = inventory(cpu(0, 8 * GIB), cpu(1, 8 * GIB))
    (found,) = starting(list(made(drawing, two).advice), "batch=Batch(draws='per-rank')")
    assert found.change == {"draws": "per-rank"}
    assert "with other random numbers than one device's: ddp ×2 would be " in found.text
    assert (found.speedup or 0) > 1.5
    for other, constraints in ((drawn_by_rank(drawing), {}), (HEAVY, {}), (drawing, {"exact": True}), (drawing, {"split_batch": False})):
        assert not starting(list(made(other, two, **constraints).advice), "batch=Batch")


def test_there_is_no_advice_where_nothing_would_help_much() -> None:
    assert made(HEAVY, inventory(cpu(0, 8 * GIB), cpu(1, 8 * GIB))).advice == ()
    assert made(HEAVY, inventory(cpu(0, 8 * GIB)), allow=("single",)).advice == ()
    assert made(HEAVY, inventory(cpu(0, 8 * GIB), cpu(1, 8 * GIB)), allow=("single",), objective="memory").advice == ()


def on_a_card(step: Footprint, spec: str = "RTX4090@16GiB", **constraints: Any) -> tuple[Advice, ...]:
    return made(step, parse_spec(spec), **{"allow": ("single", "fsdp"), **constraints}).advice


def updating(parameter_bytes: int = 512 * MIB) -> Footprint:
    """A step whose fullest moment is the optimizer's, whose scratch is as large as the parameters."""
    gradients = 8 * parameter_bytes
    moment = Moment(phase="optimizer", gradient_bytes=gradients, fixed_bytes=gradients)
    work = (Work(kind="pointwise", name="_foreach_mul_", dtype="fp32", count=18, moved_bytes=2 * gradients, fixed_bytes=2 * gradients),)
    step = footprint(blocks=8, parameter_bytes=parameter_bytes, activation_bytes=64 * MIB, optimizer_work=work, moments=(moment,))
    return fixed(replace(step, optimizer_classes=("AdamW",)))


def test_another_optimizer_is_advised_where_its_scratch_is_in_the_way() -> None:
    """16 GiB of parameters, gradients and states fit on the card, 4 GiB of scratch and more don't."""
    found = on_a_card(updating(600 * MIB))
    (plain,) = starting(list(found), "fused=True in AdamW: single would fit")
    assert plain.change == {"optimizer": {"fused": True}}
    assert plain.kind == "module"
    assert "in the optimizer's step" in " ".join(str(made(updating(600 * MIB), parse_spec("RTX4090"), allow=("single",))).split())
    assert "in the optimizer's step" not in str(made(HEAVY, parse_spec("RTX4090"), allow=("single",)))
    (small,) = starting(list(found), "bitsandbytes' AdamW8bit, whose updates differ from AdamW's: single would fit")
    assert small.change == {"optimizer": {"bits": 8}}
    assert not starting(list(on_a_card(updating(600 * MIB), precision="16-mixed")), "fused"), "it can't be clipped there"


def test_a_fused_optimizer_is_advised_where_it_is_much_faster() -> None:
    (found,) = starting(list(on_a_card(replace(updating(64 * MIB), flops=10**9))), "fused=True in AdamW: single would be ")
    assert (found.speedup or 0) > 1.2
    assert (found.gained_seconds or 0) > 0
    assert found.gained_bytes == pytest.approx(8 * 64 * MIB, rel=0.2), "the scratch, and what the allocator rounds it by"
    assert " a step instead of " in found.text
    assert found.to_dict()["gained_seconds"] == found.gained_seconds


def test_a_smaller_validation_batch_is_advised_where_validation_is_in_the_way() -> None:
    step = replace(fixed(footprint()), evaluation_bytes=40 * GIB)
    report = made(step, parse_spec("RTX4090@16GiB"), allow=("single",))
    assert report.best is None
    (found,) = starting(list(report.advice), "a validation batch of 0.5 of its size: single would fit")
    assert found.change == {"validation_batch": 0.5}
    assert "in validation" in str(report)
    roomy = replace(step, evaluation_bytes=MIB)
    assert not starting(list(on_a_card(roomy)), "a validation")
    assert "in validation" not in str(made(roomy, parse_spec("RTX4090"), allow=("single",)))


def test_validation_is_found_behind_a_plan_that_has_a_remedy_for_its_step() -> None:
    """The whole batch doesn't fit, micro-batches would, but for validation: the search shows neither, and offloads."""
    step = fixed(footprint(blocks=4, parameter_bytes=256 * MIB, activation_bytes=4 * GIB, flops=10**12))
    slow = replace(step, evaluation_bytes=18 * GIB)
    report = make_report(slow, parse_spec("RTX4090"), Constraints(allow=("single", "fsdp")))
    assert report.best is not None
    assert report.best.offload
    (found,) = starting(list(report.advice), "a validation batch of 0.5 of its size: single, micro-batches ")
    assert (found.speedup or 0) > 1.2
    quick = make_report(replace(step, evaluation_bytes=19 * GIB // 2), parse_spec("RTX4090"), Constraints(allow=("single", "fsdp")))
    assert replace(found.plan or report.best, reasons=()) == replace(quick.best or report.best, reasons=())


def test_more_memory_of_the_host_and_one_device_more_are_advised() -> None:
    large = replace(fixed(footprint(blocks=16, parameter_bytes=512 * MIB)), optimizer_classes=("AdamW",))
    without_offload = {"micro_batches": WHOLE["micro_batches"], "shares": WHOLE["shares"]}
    report_of = lambda spec: make_report(large, parse_spec(spec), Constraints(allow=("single", "fsdp"), excluded=without_offload))  # noqa: E731
    with pytest.raises(NothingFits) as refused:
        report_of("RTX4090@16GiB")
    (found,) = [one for one in refused.value.report.advice if "host memory" in one.text]
    assert " GiB of host memory instead of 16 GiB: fsdp, keep gathered, offload" in found.text
    enough = found.change["host_bytes"]
    assert report_of(f"RTX4090@{enough // GIB + 1}GiB").best is not None
    with pytest.raises(NothingFits):
        report_of(f"RTX4090@{enough // GIB - 1}GiB")
    for one in of_kind(refused.value.report.advice, "memory"):
        assert "host memory" in one.text or not (one.plan and one.plan.offload), (
            "more memory of the card lets no plan fit that its host can't hold"
        )
    (more,) = of_kind(refused.value.report.advice, "devices")
    assert more.text.startswith("one RTX4090-24GB more: fsdp ×2")
    assert more.change == {"more_devices": 1}


@pytest.mark.parametrize(("spec", "precision"), [("T4", "16-mixed"), ("2xV100-32GB", "16-mixed"), ("L4", "bf16-mixed"), ("1xcpu:8GiB", "")])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_products_in_half_are_something_to_try_where_they_are_much_faster(spec: str, precision: str, dtype: str) -> None:
    step, now = footprint(batch_size=16), {"fp32": "32-true", "bf16": "bf16-mixed"}[dtype]
    work = Work(kind="matmul", name="mm", dtype=dtype, flops=2 * 4096**3, shape=(1, 4096, 4096, 4096), growing=1)
    products = replace(step, blocks=tuple(replace(block, work=(work,) * 8, backward_work=(work,) * 16) for block in step.blocks))
    found = [one for one in made(products, parse_spec(spec), precision=now).advice if "precision" in one.change]
    assert [one.change for one in found] == ([{"precision": precision}] if precision not in ("", now) else [])
    for one in found:
        half = {"16-mixed": "fp16", "bf16-mixed": "bf16"}[precision]
        assert f"as its matrix products then run in {half} (not predicted: the step was traced in {now})" in one.text
        assert one.speedup is not None
        assert one.speedup > 1.5
    assert not [one for one in made(products, parse_spec(spec), precision="16-mixed").advice if "precision" in one.change]


def test_advice_that_is_cut_short_asks_for_no_more_than_the_plan_needs_that_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "MOST_SEARCHES_UNFIT", 4)  # the last of which has all the host memory that is tried
    with pytest.raises(NothingFits) as refused:
        make_report(SEVEN, parse_spec("RTX4090@32GiB"), Constraints(allow=("fsdp",)))
    assert refused.value.report.advice[0].change == {"host_bytes": 121 * GIB}


def test_a_size_is_found_by_halves_where_the_moments_of_no_plan_fit_though_a_replay_shows_that_one_does() -> None:
    with pytest.raises(NothingFits) as refused:
        make_report(SEVEN, parse_spec("RTX4090@32GiB"), Constraints(allow=("fsdp",)))
    arguments, asked = refused.value.report.adviser.args, []  # type: ignore[union-attr]  # it is a partial

    class Blind:
        """Without ``confirm`` it says that nothing fits."""

        def __init__(self) -> None:
            self.ask = arguments[-1]()

        def best(self, question: Any) -> Any:
            asked.append(question)
            return self.ask.best(question)

        def evaluate(self, question: Any, plan: Plan, *, confirm: bool = False) -> Any:
            found = self.ask.evaluate(question, plan, confirm=confirm)
            return found if confirm else replace(found, fits=False, reason="its moments take more")

    advise: Any = subject.advise
    assert advise(*arguments[:-1], Blind)[0].change == {"host_bytes": 121 * GIB}
    assert len(asked) < 30


def test_an_engine_that_is_asked_for_by_name_is_advised_only_where_it_helps() -> None:
    two = inventory(cpu(0, 8 * GIB), cpu(1, 8 * GIB))
    assert not [one for one in made(HEAVY, two).advice if "zero" in one.text]


# -- what it costs ---------------------------------------------------------------------------------------------------------------------


def test_engines_that_the_report_shows_to_be_no_faster_are_not_searched() -> None:
    """By default zero alone isn't allowed. Its search took the seconds in which one card more would have been found to be twice as fast."""
    report = made(HEAVY, parse_spec("2xRTX4090"))
    assert {one.plan.engine for one in report.candidates if one.held_back and one.seconds is not None} == {"zero"}
    arguments: Any = report.adviser.args  # type: ignore[union-attr]  # it is a partial
    asked: list[Any] = []

    class Noting:
        """Notes which engines each search may take."""

        def __init__(self) -> None:
            self.ask = arguments[-1]()

        def best(self, question: Any) -> Any:
            asked.append(question.constraints.allow)
            return self.ask.best(question)

        def evaluate(self, question: Any, plan: Plan, *, confirm: bool = False) -> Any:
            return self.ask.evaluate(question, plan, confirm=confirm)

    advise: Any = subject.advise
    advise(*arguments[:-1], Noting)
    assert asked
    assert not any("zero" in allow for allow in asked)


def test_the_search_does_not_wait_for_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    original = subject._Adviser.changes

    def counted(adviser: Any) -> Any:
        asked.append("changes")
        return original(adviser)

    monkeypatch.setattr(subject._Adviser, "changes", counted)
    report = made(HEAVY, parse_spec("4xcpu:8GiB"))
    assert asked == []
    assert report.advice is report.advice
    assert asked == ["changes"]


@pytest.mark.parametrize("free_bytes", [400 * MIB, 1000 * MIB, 8 * GIB])  # nothing fits, some plans do, all do
def test_it_asks_the_search_a_bounded_number_of_times(free_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"best": 0, "evaluate": 0}
    step = replace(HEAVY, batch_size=256)
    here = inventory(cpu(0, max(free_bytes, 8 * GIB * (free_bytes > GIB // 2))), *(cpu(index, free_bytes) for index in range(1, 4)))
    report = made(step, here, allow=("single", "ddp"), exact=True, max_devices=2, memory_limit_bytes=7 * GIB, memory_margin=0.05)
    assert report.adviser is not None
    ask: Any = report.adviser.args[-1]()  # type: ignore[attr-defined]

    class Counting:
        def best(self, *arguments: Any) -> Any:
            counts["best"] += 1
            return ask.best(*arguments)

        def evaluate(self, *arguments: Any, **keywords: Any) -> Any:
            counts["evaluate"] += 1
            return ask.evaluate(*arguments, **keywords)

    arguments: Any = report.adviser.args  # type: ignore[attr-defined]
    advise: Any = subject.advise
    advise(*arguments[:-1], Counting)
    most = 30 if report.best is None else 7
    assert 3 <= counts["best"] <= most
    assert counts["evaluate"] <= 4 * most + 32
    assert (counts["evaluate"] > 0) == (free_bytes == 1000 * MIB)
    monkeypatch.setattr(subject, "MOST_SEARCHES_UNFIT", 2)
    cut = [str(one) for one in advise(*arguments) if "weren't tried" in str(one)]
    assert cut == ["other changes weren't tried: advice ends after 2 searches or 10 s"] * (report.best is None)
