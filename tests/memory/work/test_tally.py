"""Calls of operations → work: which lengths of a product grow, what is read and written, how calls are put together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_autopar.memory.work.batch_sized import Input
from lightning_autopar.memory.work.operations import operation
from lightning_autopar.memory.work.tally import OPTIMIZER, Tally, collected
from lightning_autopar.memory.work.work import Work

aten = torch.ops.aten

FIXED = torch.ones(12, 5)
ROWS = torch.ones(7, 12)


def entry(tensor: Tensor, scaled: bool, number: int = 0) -> Input:
    return Input(tensor, scaled, tensor.untyped_storage().nbytes(), (number,))


def tally(function: Any, args: tuple[Any, ...], scaled: tuple[bool, ...], made: bool = True, *, part: int = 1, **kwargs: Any) -> Work:
    """The work of one call in forward, of tensors of which some depend on the batch."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    inputs = [entry(tensor, grows, number) for number, (tensor, grows) in enumerate(zip(tensors, scaled, strict=True))]
    output = function(*args, **kwargs)
    found = Tally()
    outputs = [entry(value, made, 99) for value in (output if isinstance(output, tuple) else (output,)) if isinstance(value, Tensor)]
    found.add(part, False, function, operation(function), args, kwargs, inputs, output, outputs)
    ((key, counts),) = found.works(()).items()
    assert key == (part, False)
    ((work, count),) = counts.items()
    assert count == 1
    return work


@pytest.mark.parametrize(
    ("function", "args", "scaled", "made", "shape", "growing"),
    [
        (aten.mm.default, (ROWS, FIXED), (True, False), True, (1, 7, 5, 12), 1),
        (aten.mm.default, (ROWS, FIXED), (False, True), True, (1, 7, 5, 12), 2),
        (aten.mm.default, (ROWS, FIXED), (True, True), False, (1, 7, 5, 12), 3),
        (aten.mm.default, (ROWS, FIXED), (False, False), False, (1, 7, 5, 12), None),
        (aten.mm.default, (ROWS, FIXED), (True, True), True, (1, 7, 5, 12), 1),
        (aten.mv.default, (ROWS, torch.ones(12)), (True, False), True, (1, 7, 1, 12), 1),
        (aten.mv.default, (ROWS, torch.ones(12)), (False, True), True, (1, 7, 1, 12), None),
        (aten.dot.default, (torch.ones(12), torch.ones(12)), (True, True), False, (1, 1, 1, 12), 3),
        (aten.bmm.default, (torch.ones(3, 7, 12), torch.ones(3, 12, 5)), (True, True), True, (3, 7, 5, 12), 0),
        (aten.bmm.default, (torch.ones(3, 7, 12), torch.ones(3, 12, 5)), (True, False), True, (3, 7, 5, 12), 1),
        (aten.bmm.default, (torch.ones(3, 7, 12), FIXED.expand(3, 12, 5)), (True, False), True, (3, 7, 5, 12), 0),
        (aten.addmm.default, (torch.ones(5), ROWS, FIXED), (False, True, False), True, (1, 7, 5, 12), 1),
        (
            aten.baddbmm.default,
            (torch.ones(1, 7, 5), torch.ones(3, 7, 12), torch.ones(3, 12, 5)),
            (False, True, True),
            True,
            (3, 7, 5, 12),
            0,
        ),
    ],
)
def test_a_length_of_a_product_grows(
    function: Any, args: tuple[Tensor, ...], scaled: tuple[bool, ...], made: bool, shape: tuple[int, ...], growing: int | None
) -> None:
    work = tally(function, args, scaled, made)
    assert (work.kind, work.shape, work.growing) == ("matmul", shape, growing)
    batch, m, n, k = shape
    assert work.flops == 2 * batch * m * n * k


def test_fixed_bytes_are_those_of_tensors_that_know_no_batch() -> None:
    work = tally(aten.mm.default, (ROWS, FIXED), (True, False))
    assert (work.moved_bytes, work.fixed_bytes) == (4 * (7 * 12 + 12 * 5 + 7 * 5), 4 * 12 * 5)
    update = tally(aten.mul_.Tensor, (ROWS.clone(), torch.ones(1)), (True, True), part=OPTIMIZER)
    assert update.moved_bytes == update.fixed_bytes


@pytest.mark.parametrize(
    ("run", "moved"),
    [
        (lambda: tally(aten.baddbmm.default, (torch.ones(1, 7, 5), ROWS[None], FIXED[None]), (True,) * 3, beta=0), 84 + 60 + 35),
        (lambda: tally(aten.fill_.Scalar, (torch.ones(100), 1.0), (True,)), 100),
        (lambda: tally(aten.copy_.default, (torch.ones(100), torch.ones(100)), (True, True)), 200),
        (lambda: tally(aten.add_.Tensor, (torch.ones(100), torch.ones(100)), (True, True)), 300),
        (lambda: tally(aten.zeros_like.default, (torch.ones(100),), (True,)), 100),
        (lambda: tally(aten.select_backward.default, (torch.ones(10), [5, 10], 0, 2), (True,)), 50 + 2 * 10),
        (lambda: tally(aten._safe_softmax.default, (torch.ones(4, 5), -1), (True,)), 5 * 20),
    ],
)
def test_bytes_moved_are_those_that_kernels_read_and_write(run: Callable[[], Work], moved: int) -> None:
    assert run().moved_bytes == 4 * moved


def test_a_norm_over_the_batch_reads_it_twice_in_training_only() -> None:
    image, each = torch.ones(2, 3, 4, 4), torch.ones(3)
    training, evaluating = (
        tally(aten.native_batch_norm.default, (image, each, each, each.clone(), each.clone(), train, 0.1, 1e-5), (True,) + (False,) * 4)
        for train in (True, False)
    )
    assert training.moved_bytes - evaluating.moved_bytes == image.numel() * 4 + 2 * 12  # and it gives the statistics


def test_what_arrives_as_a_gradient_was_fixed_from_the_start() -> None:
    found = Tally()
    gradient, rows = torch.ones(12, 7), torch.ones(7, 5)
    product = gradient @ rows
    function = aten.mm.default
    arguments = entry(gradient, True, 1), entry(rows, True, 2)
    found.add(1, True, function, operation(function), (gradient, rows), {}, arguments, product, [entry(product, True, 3)])
    cast = product.to(torch.float64)
    function = aten._to_copy.default
    found.add(1, True, function, operation(function), (product,), {}, [entry(product, True, 3)], cast, [entry(cast, True, 4)])
    for arrived, growing, fixed in (((), 1, 0), ((4,), 3, 4 * 60)):
        counts = found.works(arrived)[1, True]
        (work,) = (work for work in counts if work.kind == "matmul")
        assert (work.growing, work.fixed_bytes) == (growing, fixed)


def test_work_of_several_batches_is_shared_out() -> None:
    often, seldom = (Work(kind="pointwise", name=name, dtype="fp32", flops=100, moved_bytes=50, fixed_bytes=10) for name in ("add", "add_"))
    first, second = collected(Counter({seldom: 3, often: 4}), 2)
    assert (first.name, first.count, first.flops) == ("add", 2, 100)
    # Three times in two batches: twice in each, of three quarters.
    assert (second.name, second.count, second.flops, second.moved_bytes, second.fixed_bytes) == ("add_", 2, 75, 38, 8)
    (once,) = collected(Counter({seldom: 1}), 2)
    assert (once.count, once.flops) == (1, 50)
