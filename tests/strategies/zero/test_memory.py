"""The predicted memory under DeepSpeed against what real runs of it took, and against its definition."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from benchmarks.memory_zero import GOAL, MODELS, RESULTS, ROWS, Case, cases
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.trace.trace import trace
from lightning_autopar.planning.plan_bytes import ROUNDING_BYTES
from lightning_autopar.plans import OFFLOADS, Plan
from lightning_autopar.strategies.zero.engine import Zero
from lightning_autopar.strategies.zero.gather_groups import course_of, layers_of
from lightning_autopar.strategies.zero.memory import ZeroSettings, zero_bytes, zero_host_bytes
from tests.memory.tapes import drawing
from tests.strategies.fitted import Fitted
from tests.strategies.pipeline.test_memory import hand_made

#: A bucket of nothing to speak of: what is left are states and activations.
SMALL = ZeroSettings(reduce_bucket_elements=0)
MEASURED = {row.get("title"): row for row in json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]}
#: Runs whose footprint a plain trace gives: it knows no accumulation.
TRACED = [case for case in cases() if case.model == "gpt" and case.stage and case.accumulate == 1 and case.title() in MEASURED]


def plan(stage: int, ranks: int = 2, **values: Any) -> Plan:
    return Plan(engine="zero", devices=tuple(f"GPU-{rank}" for rank in range(ranks)), zero_stage=stage, **values)


@cache
def gpt() -> Footprint:
    module: Any = MODELS["gpt"][0]()
    return trace(module, None, torch.zeros(ROWS, module.length, dtype=torch.long))


@pytest.mark.parametrize("case", TRACED, ids=Case.title)
def test_a_real_run_took_what_is_predicted(case: Case) -> None:
    row = MEASURED[case.title()]
    device = zero_bytes(gpt(), case.plan(), share=1 / case.ranks, on_cpu=True)
    assert device.allocated == pytest.approx(row["measured_bytes"], rel=GOAL)
    host = sum(zero_host_bytes(gpt(), case.plan(), on_cpu=True)) * case.ranks
    assert host == pytest.approx(row["host_measured_bytes"], rel=GOAL)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("precision", "element"), [("32-true", 4), ("bf16-mixed", 2), ("bf16-true", 2), ("16-mixed", 2)])
def test_states_are_those_of_the_definition(precision: str, element: int, stage: int, ranks: int) -> None:
    footprint = replace(hand_made(16), parameters=160, trainable_parameters=160, gradient_bytes=640, optimizer_bytes=1280)
    found = zero_bytes(footprint, plan(stage, ranks), share=1 / ranks, precision=precision, settings=SMALL)
    # https://arxiv.org/abs/1910.02054: K = 12 for Adam, of which 4 are a copy of the parameters.
    assert found.optimizer == 12 * 160 / ranks
    assert found.parameters == element * 160 / (ranks if stage == 3 else 1)
    if stage == 3:
        assert found.gradients == element * 160 / ranks


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_more_ranks_never_take_more_of_each(stage: int) -> None:
    footprint = hand_made(16)
    sizes = [zero_bytes(footprint, plan(stage, ranks), share=1 / ranks, settings=SMALL).allocated for ranks in (2, 4, 8)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1]


def test_a_bucket_of_lightnings_size_is_counted_twice_where_two_take_turns() -> None:
    footprint = hand_made(4)
    default, one = (zero_bytes(footprint, plan(2), share=0.5, settings=ZeroSettings(overlap_comm=overlap)) for overlap in (True, False))
    assert default.communication - one.communication == 200_000_000 * 4
    assert zero_bytes(footprint, plan(3), share=0.5, settings=ZeroSettings()).communication >= 200_000_000 * 4
    ours = zero_bytes(footprint, plan(2), share=0.5)
    assert default.communication - ours.communication > 1_500_000_000


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("precision", "element"), [("32-true", 4), ("bf16-mixed", 4), ("bf16-true", 2)])
def test_our_engine_steps_the_parameters_own_parts(precision: str, element: int, stage: int) -> None:
    """Without a copy, and under mixed precision in 32 bits."""
    footprint = replace(
        hand_made(16), parameters=160, trainable_parameters=160, gradient_bytes=160 * element, optimizer_bytes=320 * element
    )
    found = zero_bytes(footprint, plan(stage), share=0.5, precision=precision)
    assert found.parameters == element * 160 / (2 if stage == 3 else 1)
    assert found.optimizer == 2 * element * 80
    offloads = plan(stage, offload=("optimizer",))
    # A copy, its gradients, two states, a part on its way; at stages 1 and 2 a buffer for one gradient, here of all parameters.
    largest = 0 if stage == 3 else max((size for layer in layers_of(footprint, 0) for size in layer.gradients), default=0)
    assert zero_host_bytes(footprint, offloads, precision=precision, on_cpu=True) == (element * (5 * 80 + largest), 0)
    if stage == 3:
        both = plan(3, offload=("optimizer", "parameters"))
        assert zero_host_bytes(footprint, both, precision=precision, on_cpu=True) == (5 * element * 80, 0)


def test_a_gradient_that_several_ranks_have_a_part_of_is_whole_on_each() -> None:
    """DeepSpeed copies it as it was reduced, and beside lies the one that backward made; a head larger than a rank's part weighs most."""
    body = gpt()
    head = 10 * body.parameters
    outer = (*body.outer[:-1], replace(body.outer[-1], parameter_rows=((head, 4, True),), parameter_modules=()))
    elements = head + body.parameters - sum(rows * row_bytes // 4 for rows, row_bytes, _ in body.outer[-1].parameter_rows)
    footprint = replace(body, outer=outer, parameters=elements, trainable_parameters=elements, parameter_bytes=4 * elements)
    for ranks in (4, 8):
        assert zero_bytes(footprint, plan(2, ranks), share=1 / ranks).gradients >= 4 * 2 * head


def test_page_locked_memory_comes_in_powers_of_two() -> None:
    footprint = replace(hand_made(16), parameters=160, trainable_parameters=160, gradient_bytes=640, optimizer_bytes=1280)
    pageable, locked = zero_host_bytes(footprint, plan(3, offload=("optimizer", "parameters")))
    # The states; and gradients, those that are reduced, and the parameters, 320 bytes each.
    assert (pageable, locked) == (640, 3 * 512)


def test_offload_moves_states_to_the_host() -> None:
    footprint = replace(hand_made(16), parameters=160, trainable_parameters=160, gradient_bytes=640, optimizer_bytes=1280)
    whole, optimizer, both = plan(3), plan(3, offload=("optimizer",)), plan(3, offload=("optimizer", "parameters"))
    of = {one: zero_bytes(footprint, one, share=0.5, precision="bf16-mixed", settings=SMALL) for one in (whole, optimizer, both)}
    assert (of[whole].optimizer, of[optimizer].optimizer, of[both].optimizer) == (960, 0, 0)
    assert (of[whole].parameters, of[optimizer].parameters, of[both].parameters) == (160, 160, 0)
    deepspeeds = ZeroSettings()
    assert zero_host_bytes(footprint, whole, precision="bf16-mixed", settings=deepspeeds) == (0, 0)
    # The copy and its gradients in fp32, two states, and the gradients in 16 bits: 4 + 4 + 8 + 2 bytes for each of 80 elements.
    assert zero_host_bytes(footprint, optimizer, precision="bf16-mixed", settings=deepspeeds) == (18 * 80, 0)
    assert zero_host_bytes(footprint, both, precision="bf16-mixed", settings=deepspeeds) == (18 * 80, 2 * 80)
    assert zero_host_bytes(footprint, both, precision="bf16-mixed", settings=ZeroSettings(pin_memory=True)) == (0, 20 * 80)


def test_parameters_are_gathered_as_far_ahead_as_may_be() -> None:
    footprint = gpt()
    whole = footprint.parameter_bytes
    tight = ZeroSettings(
        reduce_bucket_elements=0, max_live_elements=500_000, max_reuse_elements=1, persistence_elements=0, prefetch_elements=100_000
    )
    choices = (SMALL, tight, replace(tight, prefetch_elements=0))
    found = [zero_bytes(footprint, plan(3), share=1.0, settings=settings) for settings in choices]
    assert found[0].communication > 1.5 * whole  # everything, and the buffers through which it came
    assert found[0].allocated > found[1].allocated > found[2].allocated
    assert found[2].communication < whole / 2


def test_micro_batches_make_activations_smaller_and_keep_gradients() -> None:
    footprint = hand_made(16)
    once, often = (zero_bytes(footprint, plan(2, micro_batches=count), share=1.0, settings=SMALL) for count in (1, 4))
    assert often.allocated < once.allocated
    assert zero_bytes(footprint, plan(1, micro_batches=4), share=1.0, settings=SMALL).gradients > often.gradients


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_rank_draws_for_the_whole_batch(stage: int, recompute: bool) -> None:
    """MPNet's ranks took up to 8.6 % more than was predicted."""
    asked = plan(stage, recompute=MODELS["gpt"][1] if recompute else ())
    with_draws, without = (zero_bytes(each, asked, share=0.5).allocated for each in (drawing(gpt(), 64 << 20), gpt()))
    assert 0.8 * (64 << 20) < with_draws - without <= 64 << 20
    alone = plan(stage, 1, recompute=asked.recompute)
    assert zero_bytes(drawing(gpt(), 64 << 20), alone, share=1) == zero_bytes(gpt(), alone, share=1)


def test_what_the_allocator_holds_beyond_what_it_gives_out_is_never_a_twentieth_too_low() -> None:
    """A tenth, as of other engines, was up to 15 % too low where what is allocated was right."""
    rows = json.loads(RESULTS.with_name("memory_nullgpu_zero.json").read_text(encoding="utf-8"))["rows"]
    for row in rows:
        asked = plan(row["stage"], 2, offload=tuple(row["offload"]), recompute=("a",) if row["recompute"] else ())
        for rank in row["ranks"]:
            measured = rank["measured"]
            told = measured["allocated"] * (1 + Zero().lost_share(asked)) + ROUNDING_BYTES
            assert told >= 0.95 * measured["reserved"], row["job"]


def test_recomputed_blocks_keep_less() -> None:
    footprint = hand_made(16)
    names = tuple(block.fqn for block in footprint.blocks)
    again = zero_bytes(footprint, plan(2, recompute=names), share=1.0, settings=SMALL)
    assert again.allocated < zero_bytes(footprint, plan(2), share=1.0, settings=SMALL).allocated / 2


def test_a_module_that_was_not_traced_is_predicted_from_its_totals() -> None:
    footprint = replace(hand_made(16), tape=None)
    found = zero_bytes(footprint, plan(2), share=1.0, settings=SMALL)
    assert found.allocated >= footprint.parameter_bytes + footprint.activation_bytes


def test_a_plan_for_another_module_is_refused() -> None:
    with pytest.raises(ValueError, match="'head'"):
        zero_bytes(hand_made(2), plan(1, recompute=("head",)), share=1.0)


def test_a_recomputed_block_has_its_parameters_until_their_backward() -> None:
    """On a CPU device, where modules else gather theirs one after the other."""
    footprint = gpt()
    block = layers_of(footprint, 10_000)[1]
    # Those of the modules before, and its own, while each gradient is made; norms and biases stay gathered.
    assert [*block.again] == sorted(block.again)
    assert (block.again[0], block.again[-1]) == (0, block.passing)
    names = tuple(block.fqn for block in footprint.blocks)
    none = ZeroSettings(reduce_bucket_elements=0, prefetch_elements=0, max_reuse_elements=0, persistence_elements=10_000, converts=False)
    again, once = (
        zero_bytes(footprint, plan(3, 1, offload=OFFLOADS, recompute=recompute), share=1e-6, on_cpu=True, settings=none).communication
        for recompute in (names, ())
    )
    assert again > 4 * block.passing > once - 4 * 10_000


def test_what_one_rank_copies_to_reduce_nothing() -> None:
    """Stage 3 makes a flat copy of several gradients in a bucket, and gloo another."""
    footprint = gpt()
    bucket = ZeroSettings(reduce_bucket_elements=300_000, converts=False, prefetch_elements=0, max_reuse_elements=0)
    alone = plan(3, 1, offload=("optimizer", "parameters"))
    on_gpu, on_cpu = (zero_bytes(footprint, alone, share=1e-6, on_cpu=on_cpu, settings=bucket).communication for on_cpu in (False, True))
    # Of four parameters of a block three fill it best.
    assert 200_000 * 4 < on_cpu - on_gpu <= 300_000 * 4


def test_casts_of_parameters_pass_at_stage_3() -> None:
    """Elsewhere autocast's casts are there until backward."""
    module: Any = MODELS["gpt"][0]()
    footprint = trace(module, None, torch.zeros(ROWS, module.length, dtype=torch.long), precision="bf16-mixed")
    course = {casts: course_of(footprint, 1e-6, frozenset(), casts=casts, shrink=1.0) for casts in (True, False)}
    ends = {
        casts: max(step_phase.end for step_phase in step_phases if step_phase.phase == "forward") for casts, step_phases in course.items()
    }
    linear = sum(layer.passing for layer in layers_of(footprint, 10_000)[1:])
    # Two bytes of each matrix after the embeddings, which nobody casts.
    assert ends[True] - ends[False] == pytest.approx(2 * linear, rel=0.05)
    assert all(one.most >= other.most for one, other in zip(course[True], course[False], strict=True))


class Doubled(nn.Module):
    """Makes a weight of a parameter."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class Parametrized(Fitted):
    """Its weights are made in forward, as those of LoRA or of a weight norm."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 256), *(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(4)), nn.Linear(256, 1))
        for block in self.net[1:5]:
            parametrize.register_parametrization(block[0], "weight", Doubled())


@pytest.mark.parametrize("stage", [2, 3])
def test_weights_that_a_step_makes_are_no_casts(stage: int) -> None:
    """At stage 3 they had been left out: a LoRA by parametrizations took 3.4 % more on stub GPUs than was predicted."""
    footprint = trace(Parametrized(), None, [torch.zeros(4, 4), torch.zeros(4, 1)], target="cuda")
    found = zero_bytes(footprint, plan(stage), share=1e-6, settings=replace(SMALL, converts=False))
    assert found.activations + found.temporary > 4 * 4 * 256 * 256
