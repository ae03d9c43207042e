"""absent tensors tell shapes, types and devices, and never a value."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_autopar.exact.absent.absent_tensor import AbsentMode, MissingValue, absent_like, hole_of, hole_parameter, is_absent, provide
from lightning_autopar.exact.absent.rules import recording_absence, set_strict

CPU = torch.device("cpu")


def absent(*shape: int, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return hole_of(shape, dtype, CPU, "the tensor", **options)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.layer_norm(F.gelu(x @ torch.ones(4, 6)), (6,)),
        lambda x: x.transpose(0, 1)[1:, None].expand(-1, 5, -1).reshape(-1, 3),
        lambda x: torch.cat([x, x.to(torch.bfloat16).float()]).softmax(-1).unbind(0)[1],
        lambda x: torch.where(x > 0, x, torch.zeros(())).sum(-1).argmax(0),
        lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None], is_causal=True),
        lambda x: F.embedding(torch.arange(3), x).cumsum(0).chunk(2, -1)[1],
        lambda x: torch.einsum("ij,kj->ik", x, torch.ones(7, 4)).new_zeros(2, 3),
        lambda x: x[torch.tensor([True, False, True])] * 2,
        lambda x: F.dropout(x, 0.5) + torch.randn_like(x),
        lambda x: torch.zeros_like(x).long() + x.size(0),
        lambda x: F.cross_entropy(x, torch.tensor([0, 1, 2])),
    ],
)
def test_operations_give_holes_of_the_shape_and_type_that_they_would_have(function: Callable[[Tensor], Tensor]) -> None:
    result, real = function(absent(3, 4)), function(torch.ones(3, 4))
    assert is_absent(result)
    assert (result.shape, result.dtype, result.device) == (real.shape, real.dtype, real.device)


def test_autocast_and_the_need_of_gradients_are_as_for_real_tensors() -> None:
    x, layer = absent(3, 4, requires_grad=True), nn.Linear(4, 5)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    assert layer(x).requires_grad
    assert not layer(x).is_leaf
    assert not x.detach().requires_grad
    with torch.no_grad():
        assert not layer(x).requires_grad
    assert layer(absent(3, 4)).requires_grad


@pytest.mark.parametrize(
    "read",
    [
        float,
        int,
        bool,
        lambda x: x.item(),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: f"{x:.3f}",
        lambda x: torch.equal(x, x),
        lambda x: x in x,
        lambda x: torch.allclose(x, x),
        lambda x: range(5)[x.long()],
        pickle.dumps,
        lambda x: x.sum().backward(),
    ],
)
def test_reading_a_value_raises_and_says_which_is_missing(read: Callable[[Tensor], Any]) -> None:
    with pytest.raises((MissingValue, RuntimeError), match=r"the tensor|does not require grad"):
        read(absent())


def test_shapes_that_depend_on_values_raise() -> None:
    with pytest.raises(MissingValue, match="needs values that aren't here"):
        absent(3, 4)[absent(3, 4) > 0]
    with pytest.raises(MissingValue, match="nonzero"):
        absent(3).nonzero()


def test_a_hole_describes_itself() -> None:
    x = absent(3, 4)
    assert repr(x) == str(x) == "AbsentTensor((3, 4), torch.float32, 'cpu': the tensor)"
    assert (len(x), x.ndim, x.numel(), x.size(1), x.stride(), x.is_contiguous(), x.element_size()) == (3, 2, 12, 4, (4, 1), True, 4)
    assert absent_like(torch.ones(2, 3).t(), "it").stride() == (1, 3)


@contextmanager
def strictly() -> Iterator[None]:
    """As where the code that runs is a stage's own."""
    before = set_strict(True)
    try:
        yield
    finally:
        set_strict(before)


def test_a_filled_hole_stands_for_its_tensor() -> None:
    x, value = absent(3), torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    provide(x, value)
    assert not is_absent(x)
    assert x.tolist() == [1, 2, 3]
    result = (x * torch.ones(3)).sum() + torch.stack([x, x])[0, 1]
    assert type(result) is Tensor
    result.backward()
    assert value.grad is not None
    assert value.grad.tolist() == [1, 2, 1]
    with strictly():
        assert float(x.sum().detach()) == 6
    assert "2., 3." in repr(x)


def test_where_code_is_a_stages_own_holes_may_be_described_but_not_computed_with() -> None:
    with strictly():
        assert absent(3).shape == (3,)
        with pytest.raises(MissingValue, match="'mul' needs the values of the tensor"):
            absent(3) * 2
    assert is_absent(absent(3) * 2)


def test_a_parameter_that_is_a_hole_is_one_to_modules_and_optimizers() -> None:
    layer = nn.Linear(4, 5)
    weight = hole_parameter(layer.weight, "the parameter 'weight'")
    layer._parameters["weight"] = weight  # type: ignore[assignment]
    assert isinstance(layer.weight, nn.Parameter)
    assert layer.weight.requires_grad
    assert layer.weight.is_leaf
    assert layer.weight.grad is None
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]
    assert is_absent(layer(torch.ones(2, 4)))
    optimizer = torch.optim.AdamW(layer.parameters(), weight_decay=0.1, foreach=True)
    before = layer.bias.detach().clone()
    layer.bias.grad = torch.ones(5)
    torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    optimizer.step()
    assert not torch.equal(layer.bias.detach(), before)
    assert set(optimizer.state) == {layer.bias}
    optimizer.zero_grad()
    layer.to(torch.bfloat16).to("cpu").requires_grad_(False)
    assert layer.weight is weight
    assert weight.dtype == torch.bfloat16
    assert not weight.requires_grad
    assert is_absent(layer.state_dict()["weight"])
    layer.load_state_dict({"weight": torch.ones(5, 4), "bias": torch.ones(5)})
    assert is_absent(layer.weight)
    assert layer.bias.tolist() == [1] * 5


def test_gradients_may_be_holes() -> None:
    weight = hole_parameter(torch.ones(3, requires_grad=True), "a")
    weight.grad = absent_like(weight, "the gradient of 'a'").detach()
    with pytest.raises(MissingValue, match="the gradient of 'a'"):
        float(weight.grad.norm())
    weight.grad = None
    assert weight.grad is None


def test_copies_are_holes_and_tied_ones_stay_tied() -> None:
    weight = hole_parameter(torch.ones(3, requires_grad=True), "a")
    module = nn.ModuleList([nn.Module(), nn.Module()])
    for child in module:
        child.register_parameter("weight", weight)  # type: ignore[arg-type]
    copied = copy.deepcopy(module)
    assert is_absent(copied[0].weight)
    assert copied[0].weight is copied[1].weight
    assert copied[0].weight is not weight
    assert isinstance(copied[0].weight, nn.Parameter)
    assert copied[0].weight.requires_grad


def test_writes_in_place() -> None:
    x = absent(3)
    assert x.add_(1) is x
    assert x.copy_(torch.ones(3)) is x
    assert is_absent(x)
    x += 1
    x[0] = 5
    assert is_absent(x)
    real = torch.zeros(3)
    with pytest.raises(MissingValue, match="is written to with the tensor"):
        real.add_(x)
    with pytest.raises(MissingValue, match="is written to with the tensor"):
        nn.Parameter(torch.zeros(3)).data.mul_(x)
    assert real.tolist() == [0, 0, 0]


def test_in_a_replay_a_real_tensor_that_is_written_to_becomes_a_hole() -> None:
    table, whole, kept = torch.zeros(3, 4), torch.zeros(2, 3), torch.zeros(3)
    row = whole[0]
    with recording_absence(lambda: frozenset({id(kept)})):
        table[:, 1:] = absent(3, 3)
        row.copy_(absent(3))
        kept.add_(absent(3))
    for tensor in (table, whole, row):
        assert is_absent(tensor)
        assert is_absent(tensor + 1)
        assert is_absent(tensor[0])
    assert kept.tolist() == [0, 0, 0]
    assert not is_absent(kept)
    assert table.add_(1) is table
    provide(table, torch.ones(3, 4))
    assert float(table.sum()) == 12


def test_real_tensors_are_neither_read_nor_written_nor_random_numbers_drawn_as_holes() -> None:
    weight, state = torch.ones(3, requires_grad=True), torch.get_rng_state()
    with AbsentMode():
        results = [weight * 2, torch.rand(3), F.dropout(torch.ones(3))]
    assert all(map(is_absent, results))
    assert results[0].requires_grad
    assert torch.equal(torch.get_rng_state(), state)
    with AbsentMode(simulated=True):
        ones = torch.ones(3).add_(weight.detach())
        weight.detach().add_(1)
    assert is_absent(ones)
    assert weight.tolist() == [1, 1, 1]


def test_a_hooks_draw_for_a_hole_advances_the_generator_as_for_the_real_tensor() -> None:
    torch.manual_seed(0)
    torch.nn.init.normal_(torch.empty(20, 3))
    torch.rand_like(torch.empty(5))
    state = torch.get_rng_state()
    torch.manual_seed(0)
    assert is_absent(torch.nn.init.normal_(absent(20, 3)))
    assert is_absent(torch.rand_like(absent(5)))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_filled_hole_that_would_lose_its_gradient_raises() -> None:
    x = absent(3)
    provide(x, torch.ones(3, requires_grad=True))
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(MissingValue, match="its gradient would be lost"):
        x * 2


def test_sequences_are_packed_and_padded_by_lengths_that_are_here() -> None:
    lengths = torch.tensor([5, 3, 1])
    packed = nn.utils.rnn.pack_padded_sequence(absent(3, 5, 2, requires_grad=True), lengths, batch_first=True)
    assert is_absent(packed.data)
    assert packed.data.shape == (9, 2)
    assert packed.data.requires_grad
    assert packed.batch_sizes.tolist() == [3, 2, 2, 1, 1]
    padded, found = nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)
    assert is_absent(padded)
    assert padded.shape == (3, 5, 2)
    assert found.tolist() == lengths.tolist()
    with pytest.raises(MissingValue, match="reads lengths that another stage has"):
        nn.utils.rnn.pack_padded_sequence(absent(3, 5, 2), absent(3, dtype=torch.int64), batch_first=True)


def test_functions_of_lists_skip_what_is_absent_alone() -> None:
    here, other = torch.ones(2), torch.full((2,), 3.0)
    torch._foreach_lerp_([absent(3), here], [absent(3), other], 0.5)
    assert here.tolist() == [2.0, 2.0]
    missing, found = torch._foreach_mul([absent(3), here], 2.0)
    assert is_absent(missing)
    assert found.tolist() == [4.0, 4.0]
    with pytest.raises(MissingValue, match="is written to with the tensor, whose values another stage has"):
        torch._foreach_copy_([here], [absent(2)])
