"""Pipelines as candidates: pinned, asked for, in training and for steps without gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.memory.stage_rank import GPT, make_plan
from lightning_autopar.constraints import Constraints, SplitFinding
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.trace.first_batch import FirstBatch
from lightning_autopar.memory.trace.trace import trace
from lightning_autopar.planning.make_report import make_report
from lightning_autopar.planning.plan_bytes import predict
from lightning_autopar.planning.plan_seconds import predict_seconds
from lightning_autopar.plans import Plan
from lightning_autopar.report.report import Report
from tests.fakes.values import cpu, inventory
from tests.memory.stages import ROWS

HERE = inventory(cpu(0), cpu(1))


class Evaluated(GPT):
    def validation_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        return self.training_step(tokens, batch_idx)


def traced(stage: str, **values: Any) -> Footprint:
    model = Evaluated(**values)
    batch = FirstBatch(batch=torch.zeros(ROWS, model.length, dtype=torch.long), batch_size=ROWS)
    return trace(model, None, batch, stage=stage, precision="32-true", target="cpu", validation=batch if stage == "fit" else None)


@pytest.fixture(scope="module")
def training() -> Footprint:
    return traced("fit")


@pytest.fixture(scope="module")
def evaluation() -> Footprint:
    return traced("validate")


def report(step: Footprint, here: Any = HERE, **constraints: Any) -> Report:
    return make_report(step, here, Constraints(memory_margin=0.0, **constraints))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("allow", [{}, {"allow": ("pipeline",)}])
def test_a_pinned_pipeline_is_taken_as_it_is(training: Footprint, evaluation: Footprint, schedule: Any, allow: dict[str, Any]) -> None:
    plan = make_plan(schedule, 2, 4, 8)
    for step in (training, evaluation):
        found = report(step, pinned=plan, **allow)
        assert found.best == plan
        assert found.best_candidate is not None
        assert found.best_candidate.step_seconds > 0


@pytest.mark.parametrize(
    ("plan", "constraints", "message"),
    [
        (
            make_plan("1f1b", 2, 4, 8),
            {"uncuttable": {"blocks.4": "it runs twice"}},
            "'blocks.4', with which no stage may begin: it runs twice",
        ),
        (make_plan("1f1b", 2, 4, 8), {"excluded": {"pipeline": "the loss differs"}}, "the loss differs"),
        (make_plan("1f1b", 2, 4, 8), {"excluded": {"micro_batches": "a hook counts"}}, "a hook counts"),
        (make_plan("gpipe", 2, 17, 8), {}, "16 samples into 17"),
        (make_plan("gpipe", 2, 1, 8, replicas=2), {"exact": True, "split": SplitFinding(difference=0.5)}, "loss differs"),
        (make_plan("gpipe", 2, 1, 8), {"max_devices": 1}, "may use only one"),
        (make_plan("gpipe", 2, 1, 8), {"allow": ("single",)}, "not in allow"),
    ],
)
def test_a_pinned_pipeline_that_cannot_be_run_is_an_error(
    training: Footprint, plan: Plan, constraints: dict[str, Any], message: str
) -> None:
    here = inventory(*(cpu(index) for index in range(4)))
    with pytest.raises(ValueError, match=message):
        report(training, here, pinned=plan, **constraints)


def test_a_batch_smaller_than_the_number_of_stages_is_one_that_a_pipeline_takes_whole(training: Footprint) -> None:
    one = replace(training, batch_size=1)
    here = inventory(cpu(0), cpu(1), cpu(2))
    assert report(one, here, pinned=make_plan("gpipe", 3, 1, 8)).best is not None
    six = inventory(*(cpu(index) for index in range(6)))
    with pytest.raises(ValueError, match="3 pipelines for a batch of 2"):
        report(replace(training, batch_size=2), six, pinned=make_plan("gpipe", 2, 1, 8, replicas=3))


def test_a_pipeline_is_chosen_where_it_is_fastest(training: Footprint) -> None:
    found = report(training, allow=("single", "pipeline"))
    assert found.best is not None
    assert found.best.engine == "pipeline"
    assert "pipeline 2 stages" in str(found)
    exact = report(training, allow=("single", "pipeline"), exact=True, split=SplitFinding(difference=0.5))
    assert [one.plan.micro_batches for one in exact.candidates if one.plan.engine == "pipeline"] == [1]


def test_without_gradients_the_batch_goes_whole_through_one_stage_after_the_other(evaluation: Footprint) -> None:
    found = report(evaluation, allow=("single", "pipeline"))
    single, pipeline = (next(one for one in found.candidates if one.plan.engine == engine) for engine in ("single", "pipeline"))
    assert (pipeline.plan.schedule, pipeline.plan.micro_batches, pipeline.plan.recompute) == ("gpipe", 1, ())
    # Stages wait for each other: it is never faster than one device, and so never chosen where that one suffices.
    assert found.best == single.plan
    assert pipeline.step_seconds > single.step_seconds
    # The same of a plan that was made for training.
    seconds = {predict_seconds(evaluation, make_plan("1f1b", 2, parts, 8), HERE).step for parts in (2, 8)}
    assert len(seconds) == 1
    assert seconds.pop() == pytest.approx(pipeline.step_seconds)


def test_a_model_that_is_too_large_for_a_device_is_evaluated_in_stages() -> None:
    wide = traced("validate", width=256, length=8, words=256)
    alone = report(wide, allow=("single",)).best_candidate
    assert alone is not None
    free = alone.needs["cpu:0"] * 3 // 4
    here = inventory(cpu(0, free), cpu(1, free))
    found = report(wide, here, excluded={"fsdp": "it counts its parameters"}, allow=("single", "ddp", "fsdp", "pipeline"))
    assert found.best is not None
    assert (found.best.engine, found.best.schedule) == ("pipeline", "gpipe")


def test_validation_between_steps_counts_where_it_runs() -> None:
    # The last stage has the words' logits of the whole batch, and training those of a micro-batch.
    step = traced("fit", words=8192)
    assert step.evaluation_bytes is not None
    assert max(step.evaluation_parts) == step.evaluation_parts[-1] == step.evaluation_bytes
    plan = make_plan("1f1b", 2, 8, 8)
    first, last = predict(step, plan, HERE).values()
    assert (first.occasion, last.occasion) == ("step", "validation")
    assert last.temporary == step.evaluation_bytes
    assert last.gradients == last.activations == 0
    # Where it isn't known which part takes how much, each stage may take all of it.
    unknown = replace(step, evaluation_parts=())
    assert {size.occasion for size in predict(unknown, plan, HERE).values()} == {"validation"}
    assert {size.occasion for size in predict(replace(step, evaluation_bytes=None), plan, HERE).values()} == {"step"}


def test_validation_that_runs_other_blocks_is_known_as_a_whole_only() -> None:
    class Half(GPT):
        def validation_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
            return self.loss(self.blocks[1](self.embed(tokens)), tokens)

    model = Half(depth=3)
    batch = FirstBatch(batch=torch.zeros(ROWS, model.length, dtype=torch.long), batch_size=ROWS)
    step = trace(model, None, batch, stage="fit", precision="32-true", target="cpu", validation=batch)
    assert step.evaluation_bytes
    assert step.evaluation_parts == ()


def test_what_a_reader_should_know_of_pipelines_stands_with_each_of_them(training: Footprint) -> None:
    found = report(training, notes={"pipeline": ("the stages were checked in structure only",)})
    told = {one.plan.engine for one in found.candidates if "the stages were checked in structure only" in one.notes}
    assert told == {"pipeline"}
