"""Gradients in one order on all ranks, whatever order they come in; and clipped as torch does."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lightning_autopar.plans import OFFLOADS, Plan
from lightning_autopar.strategies.zero.gradient_reduction import Clipping, Reduction
from lightning_autopar.strategies.zero.settings import ZeroSettings, deepspeed_config
from tests.ranks import run_ranks


def _order(rank: int, world_size: int) -> list[Any]:
    parameters = [nn.Parameter(torch.full((2,), float(number))) for number in range(5)]
    reduction = Reduction(parameters)
    rounds = []
    for arriving in ([[4, 2, 3], [3, 2]], [[2, 4, 3, 0], [0, 3]]):
        done: list[tuple[int, float]] = []

        def reduce(parameter: nn.Parameter, *more: Any, done: list[Any] = done) -> None:
            assert parameter.grad is not None
            done.append((int(parameter[0]), float(parameter.grad.sum())))
            parameter.grad = None

        for number in arriving[rank]:
            parameters[number].grad = torch.ones(2)
            reduction.arrive(reduce, parameters[number])
        early = len(done)
        reduction.finish(reduce, lambda parameter: ())
        used = (
            sorted(int(parameter[0]) for parameter in parameters if id(parameter) in settled)
            if (settled := reduction.settle(torch.device("cpu")))
            else []
        )
        rounds.append((early, done, used))
    return rounds


def test_ranks_reduce_in_one_order_and_what_they_lack_as_zeros() -> None:
    first, second = run_ranks(_order, 2)
    # Backwards at first; then in rank 0's order of arrival.
    assert first[0] == (3, [(4, 2.0), (3, 2.0), (2, 2.0), (1, 0.0), (0, 0.0)], [2, 3, 4])
    assert second[0] == (0, [(4, 0.0), (3, 2.0), (2, 2.0), (1, 0.0), (0, 0.0)], [2, 3, 4])
    assert [number for number, _ in first[1][1]] == [number for number, _ in second[1][1]] == [4, 2, 3, 1, 0]
    assert first[1][2] == second[1][2] == [0, 2, 3, 4]


def _courses(rank: int, world_size: int) -> str:
    reduction = Reduction([nn.Parameter(torch.ones(1))])
    for number in (1, 2, 1):
        reduction.ran(number)
    reduction.settle(torch.device("cpu"))
    for number in (1, rank):
        reduction.ran(number)
    with pytest.raises(RuntimeError) as raised:
        reduction.settle(torch.device("cpu"))
    return str(raised.value)


def test_ranks_that_run_different_modules_are_told() -> None:
    assert all("the ranks ran different modules in this step" in words for words in run_ranks(_courses, 2))


def _clip(rank: int, world_size: int) -> list[list[float]]:
    found = []
    for bound, by_value, scale in ((0.5, False, 1.0), (100.0, False, 1.0), (0.5, True, 1.0), (0.5, False, float("nan"))):
        whole = torch.linspace(-2, 3, 8) * scale
        own = whole.chunk(world_size)[rank].clone()
        parts = [own[:1], own[1:], own[:0]]
        clipping = Clipping(partial(iter, parts))
        clipping.apply(own)
        assert torch.equal(own, whole.chunk(world_size)[rank]) or scale != 1.0
        clipping.ask(bound, by_value=by_value)
        clipping.measure(torch.device("cpu"))
        clipping.apply(own)
        clipping.done()
        parameter = nn.Parameter(torch.zeros(8))
        parameter.grad = whole.clone()
        (nn.utils.clip_grad_value_ if by_value else nn.utils.clip_grad_norm_)([parameter], bound)
        torch.testing.assert_close(own, parameter.grad.chunk(world_size)[rank], equal_nan=True)
        found.append(own.tolist())
    return found


def test_clipping_is_torchs() -> None:
    first, second = run_ranks(_clip, 2)
    assert max(map(abs, first[2] + second[2])) == 0.5


def test_what_deepspeed_is_told() -> None:
    settings = ZeroSettings(reduce_bucket_elements=101, overlap_comm=False, pin_memory=True, prefetch_elements=7)
    told = deepspeed_config(Plan(engine="zero", devices=("cpu:0",), zero_stage=3, offload=OFFLOADS), settings, element="bf16")
    assert told["gradient_clipping"] == 0.0  # left out it is 1
    assert told["data_types"] == {"grad_accum_dtype": "bf16"}
    zero = told["zero_optimization"]
    assert zero["reduce_bucket_size"] == 101
    assert zero["allgather_bucket_size"] % 2 == 0  # it asserts so
    assert zero["stage3_prefetch_bucket_size"] == 7
    assert zero["offload_param"] == zero["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    plain = deepspeed_config(Plan(engine="zero", devices=("cpu:0", "cpu:1"), zero_stage=2), ZeroSettings())["zero_optimization"]
    assert not [name for name in plain if name.startswith(("stage3", "offload"))]
