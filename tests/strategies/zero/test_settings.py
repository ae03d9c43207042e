"""Sizes of DeepSpeed's buffers under our engine: a small share of small models, Lightning's own for large ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_autopar.plans import Plan
from lightning_autopar.strategies.zero.settings import ZeroSettings, settings_of, zero_settings
from tests.fakes.values import footprint

LIGHTNINGS = ZeroSettings()


def plan(stage: int = 2, ranks: int = 2, **values: object) -> Plan:
    return Plan(engine="zero", devices=tuple(f"GPU-{index}" for index in range(ranks)), zero_stage=stage, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize("parameters", [10**5, 10**7, 3 * 10**8])
@pytest.mark.parametrize("on_cpu", [True, False])
def test_buffers_are_a_small_share_of_the_model(parameters: int, on_cpu: bool) -> None:
    found = zero_settings(plan(3), parameters=parameters, trainable=parameters, on_cpu=on_cpu)
    assert found.reduce_bucket_elements <= max(1 << 16, parameters // 16)
    assert found.prefetch_elements <= found.max_live_elements // 4 <= parameters // 32
    assert found.persistence_elements <= parameters // 2_500


def test_large_models_have_lightnings_sizes() -> None:
    found = zero_settings(plan(3), parameters=70 * 10**9, trainable=70 * 10**9, on_cpu=False)
    assert replace(found, converts=True) == LIGHTNINGS


def test_few_trained_parameters_have_a_small_bucket() -> None:
    few = zero_settings(plan(3), parameters=7 * 10**9, trainable=16 * 10**6, on_cpu=False)
    assert (few.reduce_bucket_elements, few.prefetch_elements) == (10**6, LIGHTNINGS.prefetch_elements)


def test_on_cpu_devices_nothing_is_done_ahead() -> None:
    """But stage 1, which without two buckets reduces nothing before all gradients are there."""
    found = {stage: zero_settings(plan(stage), parameters=10**8, trainable=10**8, on_cpu=True) for stage in (1, 2, 3)}
    assert [one.overlap_comm for one in found.values()] == [True, False, False]
    assert (found[3].prefetch_elements, found[3].max_reuse_elements) == (0, 0)
    assert not zero_settings(plan(2, 1), parameters=10**8, trainable=10**8, on_cpu=False).overlap_comm


def test_pages_are_locked_for_a_gpu_that_offloads() -> None:
    offloads = plan(2, offload=("optimizer",))
    assert zero_settings(offloads, parameters=10**6, trainable=10**6, on_cpu=False).pin_memory
    assert not zero_settings(offloads, parameters=10**6, trainable=10**6, on_cpu=True).pin_memory
    assert not zero_settings(plan(2), parameters=10**6, trainable=10**6, on_cpu=False).pin_memory


def test_planning_has_them_from_the_footprint() -> None:
    known = footprint()
    counted = {"parameters": known.parameters, "trainable": known.trainable_parameters}
    assert settings_of(known, plan(3), on_cpu=True) == zero_settings(plan(3), **counted, on_cpu=True)


def test_one_rank_has_the_least_bucket() -> None:
    """There is nothing to send in it."""
    alone, two = (zero_settings(plan(3, ranks), parameters=10**9, trainable=10**9, on_cpu=False) for ranks in (1, 2))
    assert (alone.reduce_bucket_elements, two.reduce_bucket_elements) == (1 << 16, 10**9 // 16)
