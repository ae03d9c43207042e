import math
from dataclasses import replace
from typing import Any

import pytest

from lightning_autopar.constraints import Constraints, SplitFinding
from lightning_autopar.devices.spec import parse_spec
from lightning_autopar.engines import Question
from lightning_autopar.memory.footprint import LayerFootprint, Sharing
from lightning_autopar.memory.tape import Tape
from lightning_autopar.planning import refusals
from lightning_autopar.planning.enumerate_plans import Option, enumerate_candidates, notes_of, ruled_out
from lightning_autopar.planning.refusals import engine_refusal, feature_refusal, micro_batch_refusal, multi_refusal, undivided
from lightning_autopar.plans import ENGINES, Plan
from tests.fakes.values import cpu, footprint, gpu, inventory


def asked(engine: str, step: Any, here: Any, constraints: Constraints) -> str | None:
    return engine_refusal(engine, Question(footprint=step, inventory=here, constraints=constraints))


def options(step: Any = None, here: Any = None, **constraints: Any) -> list[Option]:
    """What there is, of engines that can be run, and what is ruled out."""
    question = Question(footprint=step or footprint(), inventory=here or inventory(cpu(0), cpu(1)), constraints=Constraints(**constraints))
    found = [one for one in enumerate_candidates(question) if one.plan.engine in ("single", "ddp", "fsdp") and not one.plan.offload]
    return [*found, *ruled_out(question)]


def rejections(found: list[Option]) -> dict[str, str]:
    """By engine; those of pipelines have tests of their own."""
    plain = [one for one in found if one.plan.engine != "pipeline" and one.plan.micro_batches == 1]
    return {one.plan.engine: one.rejection for one in plain if one.rejection is not None}


def taken(found: list[Option]) -> set[str]:
    return {option.plan.engine for option in found if option.rejection is None}


@pytest.mark.parametrize(
    ("step", "devices", "constraints", "sentence"),
    [
        (
            {"batch_size": 1},
            2,
            {},
            "a batch of 1 sample can't be split over ranks; what the dataset returns at once counts as 1 sample, so where that is a whole "
            "batch, use DataLoader(..., batch_size=None)",
        ),
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
    assert [rejections(found)[engine] for engine in ("ddp", "fsdp")] == [sentence, sentence]


def test_a_refused_pipeline_on_one_device_does_not_say_that_single_needs_two() -> None:
    step = footprint(tape=Tape(), outer=OUTER)
    question = Question(footprint=step, inventory=inventory(cpu(0)), constraints=Constraints(allow=("pipeline",)))
    sentence = "no pipeline: needs at least two devices of one kind, but there is one: cpu:0"
    assert [one.rejection for one in ruled_out(question)][-1] == sentence


def test_a_loss_that_changes_is_a_note_unless_the_run_must_be_exact() -> None:
    found = options(split=SplitFinding(difference=1e-3))
    notes = {option.plan.engine: option.notes for option in found}
    assert notes["single"] == ()
    assert (
        notes["ddp"]
        == notes["fsdp"]
        == ("the split batch's loss differs from the whole batch's by 0.001 of it; exact=True rules such plans out",)
    )
    assert not any(option.notes for option in options(split=SplitFinding(difference=9e-7), exact=True))
    assert taken(options(split=SplitFinding(difference=9e-7), exact=True)) == {"single", "ddp", "fsdp"}
    assert all(
        "is not known" in option.notes[0]
        for option in options(split=SplitFinding(probed=False, reason="it took too long"))
        if option.plan.world_size > 1 and option.rejection is None
    )


def test_draws_that_are_each_ranks_own_are_a_note_unless_the_run_must_be_exact() -> None:
    split = SplitFinding(probed=False, drawn_apart=("_scaled_dot_product_flash_attention",))
    notes = {option.plan.engine: option.notes for option in options(split=split) if option.rejection is None}
    assert notes["single"] == ()
    (said,) = notes["ddp"]
    assert said.startswith(
        "each rank and each part of a batch draws its own random numbers for _scaled_dot_product_flash_attention; one device"
    )
    assert taken(options(split=split, exact=True)) == {"single"}
    assert "_scaled_dot_product_flash_attention" in rejections(options(split=split, exact=True))["ddp"]


def test_a_step_without_a_loss_has_nothing_to_probe() -> None:
    found = options(split=SplitFinding(probed=False), exact=True)
    assert taken(found) == {"single", "ddp", "fsdp"}
    assert not any(option.notes for option in found)


def test_engines_that_are_not_allowed_or_excluded_are_rejected_once_each() -> None:
    found = options(allow=("ddp", "zero", "fsdp"), excluded={"fsdp": "WeightAveraging copies the module"})
    assert taken(found) == {"ddp"}
    assert rejections(found) == {"single": "not in allow=['ddp', 'zero', 'fsdp']", "fsdp": "WeightAveraging copies the module"}


def test_engines_that_cannot_be_run_are_shown_where_the_choice_is_open_or_they_are_asked_for() -> None:
    here = parse_spec("2xH100-80GB")
    assert asked("zero", footprint(), here, Constraints()) is None
    assert asked("zero", footprint(), here, Constraints(allow=("zero",))) is None
    assert "not in allow" in (asked("zero", footprint(), here, Constraints(allow=("ddp",))) or "")


@pytest.mark.parametrize(("devices", "title"), [(2, "pipeline 2 stages, gpipe ×1"), (3, "pipeline 2 stages, gpipe ×1"), (1, "single")])
def test_a_pipeline_that_is_refused_is_written_as_one_where_it_can_be(devices: int, title: str) -> None:
    here = inventory(*(cpu(index) for index in range(devices)))
    found = [one for one in options(footprint(blocks=2), here, allow=("pipeline",)) if "stages" in (one.rejection or "")]
    assert [option.plan.title() for option in found] == [title]


@pytest.mark.parametrize(
    ("step", "constraints", "sentence"),
    [
        ({"training": False}, {}, "a step without gradients has no optimizer's state to partition"),
        ({"optimizers": 2}, {}, "DeepSpeed needs one optimizer, and the module configures 2"),
        (
            {"automatic_optimization": False},
            {},
            "DeepSpeed runs backward and the optimizer's step, but the module calls them by itself",
        ),
        (
            {},
            {"precision": "64-true"},
            "precision '64-true' isn't plain Lightning's under DeepSpeed; ZeRO takes 32-true, bf16-mixed, bf16-true",
        ),
    ],
)
def test_what_speaks_against_zero(step: dict[str, Any], constraints: dict[str, Any], sentence: str) -> None:
    assert asked("zero", footprint(**step), parse_spec("2xH100-80GB"), Constraints(**constraints)) == sentence


def test_zero_needs_its_package_on_devices_that_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "zero", replace(ENGINES["zero"], package=("no_such_package", "extra")))  # type: ignore[arg-type]
    here = inventory(cpu(0), cpu(1))
    missing = refusals.missing_packages(here)
    sentence = "the package no_such_package is not installed; install lightning-autopar[extra]"
    assert missing == {"zero": sentence}
    assert asked("zero", footprint(), here, Constraints(excluded=missing)) == sentence
    assert refusals.missing_packages(parse_spec("2xH100-80GB")) == {}


def test_stage_3_may_be_ruled_out_alone() -> None:
    sentence = "the step fails under ZeRO-3"
    constraints = Constraints(excluded={"zero_3": sentence}, allow=("single", "zero"))
    question = Question(footprint=footprint(), inventory=inventory(cpu(0), cpu(1)), constraints=constraints)
    stages = {one.plan.zero_stage for one in enumerate_candidates(question) if one.plan.engine == "zero"}
    assert stages == {1, 2}
    assert [(one.plan.title(), one.rejection) for one in ruled_out(question) if one.plan.engine == "zero"] == [("zero-3 ×2", sentence)]


OUTER = tuple(LayerFootprint(fqn="") for _ in range(5))


@pytest.mark.parametrize(
    ("step", "constraints", "sentence"),
    [
        (
            {"training": False},
            {"split_batch": False},
            "each rank takes a batch of its own, but the ranks of a pipeline work on the same batch",
        ),
        ({"batch_size": 0}, {}, "the batch has no batch dimension along which a pipeline could split it"),
        ({"blocks": 3}, {"uncuttable": {"net.1": "odd", "net.2": "odd"}}, "no block can begin a stage: odd"),
        ({"blocks": 2, "tied": (("net.0.w", "net.1.w"),)}, {}, "no block can begin a stage: it shares a parameter with a block before it"),
        ({"tape": None}, {}, "the step wasn't traced, and can't be cut into stages without its trace"),
        (
            {"blocks": 1},
            {},
            "a pipeline is cut between blocks or layers that share no parameters and run once a step, and the module has 1",
        ),
        ({"optimizers": 2}, {}, "a pipeline needs one optimizer, and the module configures 2"),
        ({"automatic_optimization": False}, {}, "a pipeline's schedule runs backward, but the module calls backward by itself"),
        ({}, {"excluded": {"pipeline": "a callback looks at the whole module"}}, "a callback looks at the whole module"),
        ({}, {"max_devices": 1}, "needs at least two devices, but the run may use only one"),
    ],
)
def test_what_speaks_against_a_pipeline(step: dict[str, Any], constraints: dict[str, Any], sentence: str) -> None:
    values = {"tape": Tape(), "outer": OUTER, **step}
    assert asked("pipeline", footprint(**values), inventory(cpu(0), cpu(1)), Constraints(**constraints)) == sentence


@pytest.mark.parametrize(
    ("step", "constraints"),
    [
        ({"training": False}, {}),
        ({"batch_size": 1}, {}),
        ({"batch_norm": ("bn",)}, {}),
        ({}, {"exact": True, "split": SplitFinding(difference=0.5)}),
        ({}, {"uncuttable": {"net.1": "odd"}}),
    ],
)
def test_a_pipeline_needs_not_take_the_batch_apart(step: dict[str, Any], constraints: dict[str, Any]) -> None:
    values = {"tape": Tape(), "outer": OUTER, **step}
    assert asked("pipeline", footprint(**values), inventory(cpu(0), cpu(1)), Constraints(**constraints)) is None


@pytest.mark.parametrize(
    ("step", "constraints", "sentence"),
    [
        ({"batch_norm": ("a", "b")}, {}, "the statistics of 2 batch norms would be a micro-batch's, not the whole batch's"),
        ({"automatic_optimization": False}, {}, "the module calls backward by itself"),
        ({"batch_size": 1}, {}, "the batch has fewer than two samples"),
        ({"training": False}, {}, "a step without gradients keeps nothing for backward"),
        ({}, {"split_batch": False}, "each rank takes a whole batch of its own, and runs it in one piece"),
        ({}, {"excluded": {"micro_batches": "a callback counts forwards"}}, "a callback counts forwards"),
        ({}, {"exact": True, "split": SplitFinding(difference=0.5)}, "exact=True, and the split batch's loss differs"),
        ({}, {}, None),
    ],
)
def test_what_speaks_against_micro_batches(step: dict[str, Any], constraints: dict[str, Any], sentence: str | None) -> None:
    refusal = micro_batch_refusal(footprint(**step), Constraints(**constraints))
    assert (refusal is None) == (sentence is None)
    assert (refusal or "").startswith(sentence or "")


def test_parts_that_are_collated_anew_are_no_micro_batches_of_a_pipeline() -> None:
    constraints = Constraints(excluded={"pipeline_parts": "its tensors have no row a sample"})
    assert micro_batch_refusal(footprint(), constraints) is None
    assert micro_batch_refusal(footprint(), constraints, staged=True) == "its tensors have no row a sample"


def test_a_batch_whose_parts_were_collated_ahead_is_not_run_again_in_more() -> None:
    constraints = Constraints(excluded={"rerun": "its parts are collated ahead"})
    assert micro_batch_refusal(footprint(), constraints) is None
    assert undivided(footprint(), constraints) == "its parts are collated ahead"


def test_that_a_batch_cannot_be_taken_apart_is_said_once() -> None:
    found = [one.rejection for one in options(footprint(batch_norm=("bn",))) if one.plan.micro_batches > 1]
    overrule = "; batch=Batch(despite=['batch_norm']) takes such plans all the same"
    assert found == [f"the statistics of 1 batch norm would be a micro-batch's, not the whole batch's{overrule}"]
    assert not [one for one in options() if one.plan.micro_batches > 1]


def test_batch_norm_in_parts_may_be_asked_for_and_is_told() -> None:
    step, constraints = footprint(batch_norm=("a", "b")), Constraints(despite=("batch_norm",))
    assert micro_batch_refusal(step, constraints) is None
    assert micro_batch_refusal(step, Constraints(despite=("kept",))) is not None
    told = "despite=['batch_norm']: the statistics of 2 batch norms are a micro-batch's, so results differ from one device's"
    for plan, notes in (
        (Plan(engine="single", devices=("cpu:0",), micro_batches=2), (told,)),
        (Plan(engine="ddp", devices=("cpu:0", "cpu:1"), micro_batches=2), (told,)),
        (Plan(engine="ddp", devices=("cpu:0", "cpu:1")), ()),
    ):
        assert notes_of(plan, step, constraints) == notes


def test_half_precision_is_told_of_plans_that_train_on_parts_of_the_batch() -> None:
    half, stages = (
        Constraints(precision="16-mixed"),
        Plan(engine="pipeline", devices=("cpu:0", "cpu:1"), cuts=("blocks.1",), schedule="gpipe"),
    )
    splits = Plan(engine="ddp", devices=("cpu:0", "cpu:1")), Plan(engine="single", devices=("cpu:0",), micro_batches=2)
    for plan in (*splits, replace(stages, micro_batches=2)):
        (told,) = notes_of(plan, footprint(), half)
        assert "one device skips a step if a gradient of the whole batch overflows" in told
        assert notes_of(plan, footprint(), Constraints(precision="bf16-mixed")) == ()
        assert notes_of(plan, footprint(training=False), half) == ()
    for plan in (Plan(engine="single", devices=("cpu:0",)), stages):
        assert notes_of(plan, footprint(), half) == ()


def test_what_else_a_run_may_rule_out() -> None:
    constraints = Constraints(excluded={"replicas": "a callback knows one copy only", "offload": "nothing is to lie on the host"})
    assert feature_refusal("replicas", footprint(), constraints) == "a callback knows one copy only"
    assert feature_refusal("offload", footprint(), constraints) == "nothing is to lie on the host"
    assert feature_refusal("shares", footprint(), constraints) is None
    assert "no batch to divide" in (feature_refusal("shares", footprint(), Constraints(split_batch=False)) or "")


def test_processes_that_are_there_already_leave_no_plan_with_one_device() -> None:
    assert rejections(options(min_devices=2)) == {"single": "2 processes were started, and each needs a device"}


@pytest.mark.parametrize(("started", "gpus"), [(None, ("a", "a")), (3, ("a", "a", "b"))])
def test_mig_instances_of_one_gpu_have_no_plan_together(started: int | None, gpus: tuple[str, ...]) -> None:
    here = inventory(*(replace(gpu(index), part_of=f"GPU-{whose}") for index, whose in enumerate(gpus)))
    refusal = asked("ddp", footprint(), here, Constraints(min_devices=started))
    whose = "one GPU" if started is None else "2 GPUs"
    assert refusal == f"the {len(gpus)} devices are MIG instances of {whose}, and NCCL takes one rank of each GPU"


def test_ranks_that_share_the_network_need_not_split_the_batch() -> None:
    """One engine's plans are taken all the same, each rank with the whole batch; in parts, and by engines that can't, they aren't."""
    sharing = Sharing(modules=("encoder", "head"), work_share=0.5, gathered_bytes=1 << 20, gathers=2)
    step, split = footprint(sharing=sharing), SplitFinding(splittable=False, reason="the step fills a bank")
    found = options(step, split=split, exact=True)
    assert taken(found) == {"single", "ddp", "fsdp"}
    chosen = next(one for one in found if one.plan.engine == "ddp")
    assert step.rows(chosen.plan) == (step.batch_size,) * 2
    assert "each rank runs 'encoder' and 1 other submodules on its own rows" in " ".join(chosen.plan.reasons)
    assert not chosen.notes
    assert micro_batch_refusal(step, Constraints(split=split)) == "the step fills a bank"
    in_parts = replace(chosen.plan, micro_batches=2)
    assert step.rows(in_parts) == in_parts.rows(step.batch_size)
    assert multi_refusal(Question(footprint=step, inventory=inventory(cpu(0), cpu(1)), constraints=Constraints(split=split))) is not None


def test_what_ranks_alone_do_to_hooks_is_said_of_ranks_alone() -> None:
    """In micro-batches a hook of a batch sees the whole of it."""
    step, split = footprint(), SplitFinding(rank_notes=("a hook sees its rank's samples",))
    ranks = Plan(engine="ddp", devices=("cpu:0", "cpu:1"))
    parts = Plan(engine="single", devices=("cpu:0",), micro_batches=2)
    assert notes_of(ranks, step, Constraints(split=split)) == split.rank_notes
    assert notes_of(parts, step, Constraints(split=split)) == ()
    exact = Constraints(split=split, exact=True)
    assert micro_batch_refusal(step, exact) is None
    here = inventory(cpu(0), cpu(1))
    assert asked("ddp", step, here, exact) == "exact=True, and a hook sees its rank's samples"
