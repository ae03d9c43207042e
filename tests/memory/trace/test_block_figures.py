"""Blocks and the parts around them: together they are the step, each holds what is its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from lightning_autopar.memory.batch_scaling import drawn_by_rank
from lightning_autopar.memory.footprint import Footprint, LayerFootprint
from lightning_autopar.memory.fullest_moments import moments_of
from lightning_autopar.memory.trace.trace import trace
from tests.memory.tapes import levels, marks
from tests.memory.trace.test_trace import GPT, Block, Module, images, make_trainer, mlp, resnet, tokens, vectors


def gpt_footprint(net: nn.Module, **kwargs: Any) -> Footprint:
    return trace(Module(net), None, next(iter(DataLoader(tokens(), 4))), **kwargs)


def frozen() -> nn.Module:
    net = GPT()
    for part in (net.tokens, net.blocks[0]):
        part.requires_grad_(False)
    return net


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], int]] = {
    "gpt": (GPT, tokens, 4),
    "resnet": (resnet, images, 8),
    "mlp": (mlp, vectors, 64),
    "frozen": (frozen, tokens, 4),
}


@pytest.fixture(scope="module", params=CASES)
def traced(request: pytest.FixtureRequest) -> tuple[Module, Any, Footprint]:
    net, data, size = CASES[request.param]
    torch.manual_seed(0)
    module = Module(net())
    batch = next(iter(DataLoader(data(), size)))
    return module, batch, trace(module, None, batch)


def total(footprint: Footprint, name: str) -> int:
    return sum(getattr(part, name) for part in (*footprint.blocks, *footprint.outer))


def test_parts_add_up_to_the_whole(traced: tuple[Module, Any, Footprint]) -> None:
    _, _, footprint = traced
    assert len(footprint.blocks) >= 3
    assert len(footprint.outer) == len(footprint.blocks) + 1
    for name in ("parameters", "parameter_bytes", "gradient_bytes", "optimizer_bytes", "buffer_bytes"):
        assert total(footprint, name) == getattr(footprint, name)
    saved = total(footprint, "activation_bytes") + total(footprint, "input_bytes") - total(footprint, "input_extra_bytes")
    assert saved == footprint.activation_bytes > 0
    assert total(footprint, "flops") + total(footprint, "backward_flops") == footprint.flops
    moved = total(footprint, "moved_bytes") + total(footprint, "backward_moved_bytes")
    # The rest is the optimizer's: it reads and writes parameters, gradients and state at least.
    assert footprint.moved_bytes - moved >= 2 * footprint.optimizer_bytes


def attention(query: Any, key: Any, value: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
    return int(sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape))


def counter() -> FlopCounterMode:
    """Torch's counter; it knows every kernel of attention but the CPU's."""
    own = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
    }
    for formula in own.values():
        formula._get_raw = True  # type: ignore[attr-defined]  # it gets tensors
    return FlopCounterMode(display=False, custom_mapping=own)


def test_flops_are_those_that_torch_counts_in_a_real_step(traced: tuple[Module, Any, Footprint]) -> None:
    module, batch, footprint = traced
    with counter() as forward:
        loss = F.cross_entropy(module.net(batch[0]).flatten(0, -2), batch[1].flatten())
    with counter() as backward:
        loss.backward()
    assert total(footprint, "flops") == forward.get_total_flops() > 0
    assert total(footprint, "backward_flops") == backward.get_total_flops() > 0
    module.zero_grad()


def test_peaks_are_those_of_the_tape(traced: tuple[Module, Any, Footprint]) -> None:
    """Of each part, the fullest moment of its forward and backward beyond what was there when it began."""
    _, _, footprint = traced
    assert footprint.tape is not None
    grown: dict[tuple[str, int], float] = {}
    start, part = 0.0, None
    for event, by_kind in zip(footprint.tape, levels(footprint.tape), strict=True):
        level = sum(by_kind.values())
        if event.action in ("forward", "leave", "backward", "return", "optimizer"):
            start, part = level, (event.action, event.storage)
            grown.setdefault(part, 0)
        elif part is not None:
            grown[part] = max(grown[part], level - start)
    for index, block in enumerate(footprint.blocks):
        assert block.forward_peak_bytes == grown["forward", index]  # in forward nothing older is freed meanwhile
        assert block.activation_bytes + block.output_bytes <= block.forward_peak_bytes
        assert block.output_bytes <= block.forward_unsaved_bytes <= block.forward_peak_bytes
        assert block.backward_peak_bytes >= grown.get(("backward", index), 0) - block.gradient_bytes


def test_marks_are_in_the_order_of_the_contract(traced: tuple[Module, Any, Footprint]) -> None:
    _, _, footprint = traced
    assert footprint.tape is not None
    count = len(footprint.blocks)
    found = marks(footprint.tape)
    forward = [("leave", -1), *(mark for index in range(count) for mark in (("forward", index), ("leave", index)))]
    assert found[: len(forward)] == forward
    learning = [index for index in reversed(range(count)) if footprint.blocks[index].backward_flops]
    backward = [("return", count), *(mark for index in learning for mark in (("backward", index), ("return", index)))]
    assert found[len(forward) :] == [*backward, ("optimizer", -1)]


def test_backward_is_told_by_autograd_not_by_hooks() -> None:
    """Every product of two matrices in backward belongs to the block whose forward had it."""
    footprint = gpt_footprint(GPT())
    for block in footprint.blocks:
        # Two products for each one; attention's backward takes two and a half.
        attention = 4 * 4 * 4 * 64 * 64 * 16
        assert block.backward_flops == 2 * (block.flops - attention) + int(2.5 * attention)


def test_who_uses_which_parameter() -> None:
    footprint = gpt_footprint(GPT())
    weight = 200 * 64 * 4
    assert footprint.also_uses == ((3, "net.tokens.weight", weight, weight, 2 * weight + 4),)
    assert footprint.outer[0].parameter_bytes == weight
    assert footprint.outer[-1].parameters == 2 * 64
    assert footprint.outer[0].parameter_rows == ((200, 256, True),)
    assert [rows for rows, _, _ in footprint.blocks[1].parameter_rows] == [p.shape[0] for p in Block(64).parameters()]
    assert sum(rows * row_bytes for rows, row_bytes, _ in footprint.blocks[1].parameter_rows) == footprint.blocks[1].parameter_bytes
    assert [name for name, _ in footprint.parts()] == [
        "(before net.blocks.0)",
        "net.blocks.0",
        "(before net.blocks.1)",
        "net.blocks.1",
        "(before net.blocks.2)",
        "net.blocks.2",
        "(after net.blocks.2)",
    ]


class Penalised(Module):
    """Adds the size of its first block's weights to the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + self.net.blocks[0].out.weight.square().sum()


def test_a_penalty_uses_a_blocks_parameters_outside() -> None:
    footprint = trace(Penalised(GPT()), None, next(iter(DataLoader(tokens(), 4))))
    assert [use[:3] for use in footprint.also_uses] == [
        (3, "net.tokens.weight", 200 * 64 * 4),
        (3, "net.blocks.0.out.weight", 64 * 64 * 4),
    ]
    assert footprint.blocks[0].parameters == footprint.blocks[1].parameters


def test_a_frozen_block_has_no_backward() -> None:
    footprint = gpt_footprint(frozen())
    first, second, _ = footprint.blocks
    assert (first.gradient_bytes, first.optimizer_bytes, first.backward_flops, first.backward_peak_bytes) == (0, 0, 0, 0)
    assert first.activation_bytes == 0
    assert second.activation_bytes > 0
    assert [learns for _, _, learns in first.parameter_rows] == [False] * len(first.parameter_rows)


def test_accumulated_batches_are_counted_as_one() -> None:
    batch = next(iter(DataLoader(vectors(), 64)))
    plain, accumulating = (trace(Module(mlp()), make_trainer(accumulate_grad_batches=n), batch) for n in (1, 2))
    assert plain.tape is not None
    assert accumulating.tape is not None
    assert (plain.tape.batches, accumulating.tape.batches) == (1, 2)
    assert marks(accumulating.tape).count(("forward", 0)) == 2
    assert plain.flops == accumulating.flops
    for one, other in zip(plain.blocks, accumulating.blocks, strict=True):
        assert (one.flops, one.activation_bytes, one.moved_bytes) == (other.flops, other.activation_bytes, other.moved_bytes)


def test_an_evaluation_has_a_forward_alone() -> None:
    footprint = trace(Module(mlp()), None, next(iter(DataLoader(vectors(), 64))), stage="validate")
    assert footprint.tape is not None
    assert {action for action, _ in marks(footprint.tape)} == {"forward", "leave"}
    assert [(block.backward_flops, block.backward_moved_bytes) for block in footprint.blocks] == [(0, 0)] * 3
    assert sum(block.flops for block in footprint.blocks) == footprint.flops


def test_what_is_shown() -> None:
    shown = gpt_footprint(GPT()).to_dict()
    assert [part["fqn"] for part in shown["blocks"]][:3] == ["(before net.blocks.0)", "net.blocks.0", "(before net.blocks.1)"]
    assert sum(part["bytes"]["optimizer"] for part in shown["blocks"]) == shown["bytes"]["optimizer"]
    assert sum(part["flops"] for part in shown["blocks"]) == shown["flops"]
    assert LayerFootprint(fqn="a").to_dict()["bytes"]["temporary"] == 0


class DrawsFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 1024), nn.Linear(1024, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(F.gelu(self.wide(F.dropout(x, 0.1))))


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_a_draw_has_its_place_among_the_blocks_moments(target: Any) -> None:
    """Each block draws at its beginning, and is at its fullest later; an earlier version added the draw to that."""
    net = nn.Sequential(nn.Linear(128, 64), nn.Sequential(*(DrawsFirst() for _ in range(3))), nn.Linear(64, 10))
    footprint = trace(Module(net), None, next(iter(DataLoader(vectors(), 64))), target=target)
    drawn = 64 * 64 * (4 if target == "cpu" else 2 * 4 + 1)
    assert [block.draw_bytes for block in footprint.blocks] == [(), *[(drawn,)] * 3, ()]
    alone = drawn_by_rank(footprint)
    for place in range(1, 4):
        (draws,) = (one for one in footprint.moments if one.draw_bytes and one.held == place)
        fullest = max(one.activation_bytes for one in alone.moments if (one.phase, one.held) == ("forward", place))
        assert (draws.phase, draws.running, draws.draw_bytes) == ("forward", True, drawn)
        assert draws.activation_bytes <= fullest - 2 * 64 * 1024 * 4
    half, without = (moments_of(one, (), 0.5) for one in (footprint, alone))
    fullest_half, fullest_without = (max((one.activations + one.temporary)[one.forward]) for one in (half, without))
    assert fullest_half == fullest_without
    few, without = (moments_of(one, (), 1 / 64) for one in (footprint, alone))
    assert max((few.activations + few.temporary)[few.forward]) > max((without.activations + without.temporary)[without.forward])


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_the_largest_draw_over_the_samples_is_each_parts_own(target: Any) -> None:
    footprint = trace(Module(GPT(dropout=0.1)), None, next(iter(DataLoader(tokens(), 4))), target=target)
    # A mask of four-byte integers while it is drawn on a CPU; input, output and a mask of bytes on CUDA.
    assert {block.draw_bytes for block in footprint.blocks} == {(4 * 64 * 64 * (4 if target == "cpu" else 2 * 4 + 1),)}
    assert [part.draw_bytes for part in footprint.outer] == [()] * 4
    assert {block.draw_bytes for block in gpt_footprint(GPT(), target=target).blocks} == {()}
    drawn = [[work.name for work in block.work if work.drawn for _ in range(work.count)] for block in footprint.blocks]
    assert set(map(tuple, drawn)) == {("bernoulli_" if target == "cpu" else "native_dropout",) * len(drawn[0])}
    assert not any(work.drawn for block in gpt_footprint(GPT(), target=target).blocks for work in block.work)
