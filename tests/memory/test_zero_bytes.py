"""The predicted memory under DeepSpeed against what real runs of it took, and against its definition."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.memory_zero import CASES, GOAL, RESULTS, footprint_of, predicted
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.zero_bytes import ZeroSettings, zero_bytes, zero_host_bytes
from lightning_autopar.plans import Plan
from tests.memory.test_pipeline_bytes import hand_made

MEASURED = {json.dumps(row["case"]): row["measured_bytes"] for row in json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]}
#: A bucket of nothing to speak of: what is left are states and activations.
SMALL = ZeroSettings(reduce_bucket_elements=0)
_TRACED: dict[str, Footprint] = {}


def plan(stage: int, ranks: int = 2, **values: Any) -> Plan:
    return Plan(engine="zero", devices=tuple(f"GPU-{rank}" for rank in range(ranks)), zero_stage=stage, **values)


@pytest.mark.parametrize("case", CASES, ids=json.dumps)
def test_a_real_run_took_what_is_predicted(case: dict[str, Any]) -> None:
    precision = case.get("precision", "32-true")
    if precision not in _TRACED:
        _TRACED[precision] = footprint_of(precision)
    device, host = predicted(case, _TRACED[precision])
    assert device.allocated + sum(host) == pytest.approx(MEASURED[json.dumps(case)], rel=GOAL)


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
    assert zero_bytes(footprint, plan(3), share=0.5).communication >= 200_000_000 * 4
    assert default == zero_bytes(footprint, plan(2), share=0.5)


def test_offload_moves_states_to_the_host() -> None:
    footprint = replace(hand_made(16), parameters=160, trainable_parameters=160, gradient_bytes=640, optimizer_bytes=1280)
    whole, optimizer, both = plan(3), plan(3, offload=("optimizer",)), plan(3, offload=("optimizer", "parameters"))
    of = {one: zero_bytes(footprint, one, share=0.5, precision="bf16-mixed", settings=SMALL) for one in (whole, optimizer, both)}
    assert (of[whole].optimizer, of[optimizer].optimizer, of[both].optimizer) == (960, 0, 0)
    assert (of[whole].parameters, of[optimizer].parameters, of[both].parameters) == (160, 160, 0)
    assert zero_host_bytes(footprint, whole, precision="bf16-mixed") == (0, 0)
    # The copy and its gradients in fp32, two states, and the gradients in 16 bits: 4 + 4 + 8 + 2 bytes for each of 80 elements.
    assert zero_host_bytes(footprint, optimizer, precision="bf16-mixed") == (18 * 80, 0)
    assert zero_host_bytes(footprint, both, precision="bf16-mixed") == (18 * 80, 2 * 80)
    assert zero_host_bytes(footprint, both, precision="bf16-mixed", settings=ZeroSettings(pin_memory=True)) == (0, 20 * 80)


def test_parameters_are_gathered_as_far_ahead_as_may_be() -> None:
    footprint = _TRACED.setdefault("32-true", footprint_of("32-true"))
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
