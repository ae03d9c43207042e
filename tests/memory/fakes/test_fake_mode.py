"""The lean fake mode against torch's own: the same outputs, the same tape, faster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from lightning_autopar.memory.fakes.fake_mode import FastFakeMode, in_place
from lightning_autopar.memory.trace.tape_recorder import MemoryTracker
from tests.memory.trace.test_tape_recorder import NETS, record

aten = torch.ops.aten


def described(mode: FakeTensorMode, function: Callable[..., Any], shapes: list[tuple[int, ...]]) -> list[Any]:
    """Everything that a fake tensor tells of what the function gives, twice: the second time from memory, if there is one."""
    found: list[Any] = []
    with mode:
        for _ in range(2):
            inputs = [torch.empty(shape) for shape in shapes]
            outputs = [leaf for leaf in tree_leaves(function(*inputs)) if isinstance(leaf, Tensor)]
            sources = [tensor.untyped_storage()._cdata for tensor in inputs]
            found.append(
                [
                    (
                        tuple(leaf.shape),
                        leaf.stride(),
                        leaf.dtype,
                        leaf.device,
                        leaf.storage_offset(),
                        leaf.untyped_storage().nbytes(),
                        [leaf.untyped_storage()._cdata == source for source in sources],
                    )
                    for leaf in outputs
                ]
            )
    return found


FUNCTIONS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "matmul": (lambda a, b: a @ b, [(4, 8, 16), (16, 3)]),
    "views": (lambda a: (a.t(), a[1:, 2:], a.view(-1), a.unsqueeze(0).expand(3, -1, -1), a.split(2), a.diagonal()), [(4, 4)]),
    "numbers by type": (lambda a: (a.long() + 1, a.long() + 1.0, a.long() + True, a > 0, a.bool() + 1), [(4,)]),
    "convolution": (lambda x, w: F.conv2d(x.to(memory_format=torch.channels_last), w, stride=2), [(2, 3, 9, 9), (5, 3, 3, 3)]),
    "several outputs": (lambda x: (x.sort(), x.topk(2), x.max(1), F.max_pool1d(x, 2, return_indices=True)), [(4, 8)]),
    "attention": (lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), [(2, 4, 8, 16)]),
    "in place": (lambda a, b: (a.add_(b), a.mul_(2), a.zero_(), a.copy_(b)), [(4, 4), (4,)]),
    "made of nothing": (lambda a: (torch.zeros(3, 4), torch.arange(5), a.new_ones(2), torch.full((2,), 1), torch.tensor([1, 2])), [(1,)]),
    "nothing to do": (lambda a: (a.contiguous(), a.to(torch.float32), a.float(), a.detach()), [(4, 4)]),
    "types": (lambda a: (a.to(torch.bfloat16), a.double() * a, torch.complex(a, a), torch.complex(a, a).conj() * 2), [(4, 4)]),
    "strided": (lambda a: (a.t().relu(), a.t().contiguous(), a[:, ::2].clone(), a.t().reshape(-1)), [(4, 6)]),
    "changes of shape": (lambda a: (a.t_(), a.unsqueeze_(0), a.resize_(2, 3)), [(4, 6)]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_outputs_are_those_of_torchs_own_mode(name: str) -> None:
    function, shapes = FUNCTIONS[name]
    expected = described(FakeTensorMode(), function, shapes)
    assert described(FastFakeMode(), function, shapes) == expected


@pytest.mark.parametrize("name", NETS)
def test_tapes_are_those_of_torchs_own_mode(name: str) -> None:
    tapes = []
    for mode in (FakeTensorMode(), FastFakeMode()):
        with mode:
            tracker, _ = record(NETS[name](), torch.empty(16, 32))
        tapes.append(list(tracker.tape or ()))
    assert tapes[0] == tapes[1]
    assert len(tapes[0]) > 50


def test_values_that_torch_remembers_are_remembered() -> None:
    with FastFakeMode():
        one = torch.tensor(1.0)
        one += 1
        assert one.item() == 2
        assert (torch.tensor(3) + 4).item() == 7


def test_memory_is_given_back() -> None:
    """Nothing that the mode remembers holds a tensor."""
    with FastFakeMode():
        tracker = MemoryTracker()
        with tracker:
            for _ in range(3):
                x = torch.ones(8, 8)
                y = (x @ x).t().relu()
            del x, y
            assert tracker.total_bytes == 0


@pytest.mark.parametrize(
    "operator",
    [aten.add_.Tensor, aten.zero_.default, aten.copy_.default, aten.index_put_.default, aten._foreach_add_.Scalar, aten.addcdiv_.default],
)
def test_what_works_in_place(operator: Any) -> None:
    assert in_place(operator)


@pytest.mark.parametrize(
    "operator",
    [
        aten.add.Tensor,
        aten.add.out,
        aten.t_.default,
        aten.resize_.default,
        aten.set_.source_Tensor,
        aten.unsqueeze_.default,
        aten._fused_adamw_.default,
        aten._foreach_add.Scalar,
    ],
)
def test_what_does_not_work_in_place(operator: Any) -> None:
    assert not in_place(operator)


def test_gradients_and_versions_are_kept() -> None:
    with FastFakeMode():
        layer = nn.Linear(4, 4)
        x = torch.ones(2, 4)
        version = x._version
        x.mul_(2)
        assert x._version == version + 1
        y = layer(x).exp()
        y.sum().backward()
        assert isinstance(layer.weight.grad, FakeTensor)
        z = layer(x).exp()
        z.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.AdamW], ids=lambda make: make.__name__)
def test_a_fused_update_runs_no_kernel(make: Callable[..., torch.optim.Optimizer]) -> None:
    with FastFakeMode(allow_non_fake_inputs=True):
        parameter = nn.Parameter(torch.empty(1 << 44))  # 64 TiB: torch's fallback would allocate them
        optimizer = make([parameter], fused=True)
        parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        assert isinstance(parameter, FakeTensor)
