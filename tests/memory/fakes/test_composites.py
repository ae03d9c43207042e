"""Fakes are written in place where real tensors are, by torch's profiler: in forward and in backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_autopar.memory.fakes.composites import attention_unfused, composites_as_real
from lightning_autopar.memory.trace.tape_recorder import MemoryTracker

aten = torch.ops.aten


def learns(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_()


def places(most: int, *shape: int) -> Tensor:
    return torch.randint(0, most, shape)


def attention(heads: int = 4, dtype: torch.dtype = torch.float32, mask: Any = None, dropout: float = 0.0, **kwargs: Any) -> Tensor:
    query, key, value = learns(2, 4, 8, 16, dtype=dtype), learns(2, heads, 8, 16, dtype=dtype), learns(2, heads, 8, 16, dtype=dtype)
    output: Tensor = aten._scaled_dot_product_attention_math(query, key, value, mask, dropout, **kwargs)[0]
    return output


#: By what is written in place, where the tensors are real.
IN_PLACE: dict[str, tuple[str, Callable[[], Tensor]]] = {
    "attention": ("add", lambda: attention(mask=torch.randn(8, 8))),
    "attention, causal": ("add", lambda: attention(is_causal=True)),
    "attention, grouped, half": ("add", lambda: attention(2, torch.bfloat16, torch.randn(8, 8).bfloat16(), enable_gqa=True)),
    "attention, as many heads": ("add", lambda: attention(mask=torch.randn(2, 4, 8, 8), enable_gqa=True)),
    "attention, boolean mask, dropout": ("add", lambda: attention(mask=torch.rand(8, 8) > 0.5, dropout=0.1)),
    "linear, transposed": ("add", lambda: F.linear(learns(4, 8, 16).transpose(0, 1), learns(3, 16), learns(3))),
    "linear, cut": ("add", lambda: F.linear(learns(4, 8, 20)[..., :16], learns(3, 16), learns(3))),
    "gather": ("scatter_add", lambda: learns(4, 8).gather(1, places(8, 4, 3))),
    "take_along_dim": ("scatter_add", lambda: learns(4, 8).take_along_dim(places(8, 4, 3), 1)),
    "index": ("index_put", lambda: learns(4, 8)[places(4, 5)]),
    "index_select": ("index_add", lambda: learns(4, 8).index_select(0, places(4, 5))),
    "max": ("scatter", lambda: learns(4, 8).max(1)[0]),
    "topk": ("scatter", lambda: learns(4, 8).topk(2)[0]),
    "sort": ("scatter", lambda: learns(4, 8).sort()[0]),
    "cummax": ("scatter_add", lambda: learns(4, 8).cummax(1)[0]),
    "quantile": ("scatter_add", lambda: learns(4, 8).quantile(torch.tensor([0.5]))),  # of a number torch 2.11 asks for values
    "take": ("put", lambda: learns(4, 8).take(places(32, 5))),
    "binary cross entropy": ("sub", lambda: F.binary_cross_entropy_with_logits(learns(4, 8), torch.rand(4, 8))),
    "binary cross entropy, weights": (
        "mul",
        lambda: F.binary_cross_entropy_with_logits(learns(4, 8), torch.rand(4, 8), torch.rand(8), pos_weight=torch.rand(8)),
    ),
    "atan2": ("masked_fill", lambda: torch.atan2(learns(4), learns(4))),
}
#: Nothing is written in place here.
OUT_OF_PLACE: dict[str, Callable[[], Tensor]] = {
    "attention, no mask": lambda: attention(scale=-0.3),
    "linear": lambda: F.linear(learns(4, 8, 16), learns(3, 16), learns(3)),
    "linear, matrix": lambda: F.linear(learns(8, 4).t(), learns(3, 8), learns(3)),
    "linear, vector": lambda: F.linear(learns(16), learns(3, 16), learns(3)),
    "linear, no bias": lambda: F.linear(learns(4, 8, 16).transpose(0, 1), learns(3, 16)),
    "linear, four dimensions": lambda: F.linear(learns(2, 4, 8, 16), learns(3, 16), learns(3)),
    "index_put": lambda: learns(4, 8).index_put((places(4, 2),), learns(2, 8)),
    "scatter": lambda: learns(4, 8).scatter(1, places(8, 4, 2), learns(4, 2)),
    "scatter_add": lambda: learns(4, 8).scatter_add(1, places(8, 4, 2), learns(4, 2)),
    "masked_scatter": lambda: learns(4, 8).masked_scatter(torch.rand(4, 8) > 0.5, learns(32)),
    "of probabilities": lambda: F.binary_cross_entropy(learns(4, 8).sigmoid(), torch.rand(4, 8)),
    "the user's own": lambda: (learns(4, 8) @ learns(8, 8)).add(learns(8)).mul(learns(8)).sub(learns(8)),
}


class Seen(TorchDispatchMode):
    """Counts what runs below it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten":
            self.names[func.overloadpacket.__name__] += 1
        return func(*args, **kwargs or {})


def step(run: Callable[[], Tensor]) -> None:
    torch.manual_seed(0)
    (run() * torch.ones(())).sum().backward()


def traced(run: Callable[[], Tensor]) -> Counter[str]:
    """What runs of a step on fakes."""
    tracker, seen = MemoryTracker(batch_size=4), Seen()
    with FakeTensorMode(), composites_as_real(), seen, tracker:
        tracker.enter("forward")
        loss = (run() * torch.ones(())).sum()
        tracker.enter("backward")
        loss.backward()
    return seen.names


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # torch 2.11
@pytest.mark.parametrize("name", IN_PLACE)
def test_fakes_are_written_in_place_where_real_tensors_are(name: str) -> None:
    operation, run = IN_PLACE[name]
    loss = (run() * torch.ones(())).sum()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        run() if operation == "add" else loss.backward()
    real = Counter(event.name.removeprefix("aten::") for event in profiled.events())
    found = traced(run)
    in_place = "_index_put_impl_" if operation == "index_put" else f"{operation}_"
    assert found[f"{operation}_"] == real[in_place] > 0
    if operation != "mul":  # the formula's own, and this test's
        assert found[operation] == real[operation]


@pytest.mark.parametrize("name", OUT_OF_PLACE)
def test_what_makes_a_tensor_with_real_ones_makes_one_with_fakes(name: str) -> None:
    run = OUT_OF_PLACE[name]
    seen = Seen()
    with FakeTensorMode(), seen:
        step(run)
    assert traced(run) == seen.names


@pytest.mark.parametrize("mask", [None, torch.bool, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unfused_attention_is_torchs(mask: torch.dtype | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 8, 16, dtype=dtype) for heads in (4, 2, 2))
    attn_mask = None if mask is None else (torch.randn(8, 8) > 0).to(mask)
    if attn_mask is not None and mask is not torch.bool:
        attn_mask = attn_mask.to(dtype)
    for kwargs in ({}, {"scale": -0.5}, {"is_causal": mask is None}):
        expected = aten._scaled_dot_product_attention_math(query, key, value, attn_mask, 0.0, enable_gqa=True, **kwargs)
        found = attention_unfused(query, key, value, attn_mask, 0.0, enable_gqa=True, **kwargs)
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=0)
