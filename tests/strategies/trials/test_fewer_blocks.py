"""A step that is too long is tried with few of its repeated blocks, and what is found is what the whole module shows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_autopar.memory.trace.first_batch import FirstBatch
from lightning_autopar.strategies.trials.fewer_blocks import do_without, spared
from lightning_autopar.strategies.trials.split_probe import probe_split
from tests.strategies.trials.test_split_probe import Base

TOO_LONG = 10**12


@pytest.fixture(autouse=True)
def few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more threads, longer steps are tried whole."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(4, width), "full"
        self.back = nn.Linear(width, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return x + self.back(self.layer(x))


class Tupled(Block):
    """Returns more than it is given, as attention's weights."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return super().forward(x, mask), None


class Swapped(Block):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return {"x": super().forward(x, mask)}


class Stack(Base):
    """Six blocks, which are asked for an attribute before they run; the loss is a mean over samples."""

    def __init__(self, block: type[Block] = Block, sizes: tuple[int, ...] = (4,) * 6) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(block(size) for size in sizes)
        self.ran = 0

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            assert block.kind == "full"
            found = block(x, mask=None)
            x = found if isinstance(found, Tensor) else next(iter(found.values() if isinstance(found, dict) else found))
        return x

    def loss(self, x: Tensor) -> Tensor:
        return F.mse_loss(self(x), x)


class Masked(Stack):
    """A mean over positions that exceed the one before, of which parts have different numbers."""

    def loss(self, x: Tensor) -> Tensor:
        return (self(x) - x).square()[x > x.roll(1, 1)].mean()


def batch(samples: int = 6) -> FirstBatch:
    torch.manual_seed(3)
    return FirstBatch(batch=torch.randn(samples, 4), batch_size=samples)


def names(count: int = 6) -> dict[str, int]:
    return {f"blocks.{number}": TOO_LONG // 3 // count for number in range(count)}


@pytest.mark.parametrize("block", [Block, Tupled])
@pytest.mark.parametrize(("module", "same"), [(Stack, True), (Masked, False)])
def test_what_splitting_changes_is_found_with_two_of_six_blocks(block: type[Block], module: type[Stack], same: bool) -> None:
    finding, draws = probe_split(module(block), None, batch(), flops=TOO_LONG, blocks=names())
    assert finding.probed
    assert (finding.difference == 0) == same
    assert finding.notes[0].endswith("what splitting the batch changes was tried with 2 of its 6 blocks")
    assert draws.draws is None, "those of the other blocks aren't known"


def test_blocks_that_return_another_form_than_they_get_leave_it_unknown() -> None:
    finding, _ = probe_split(Stack(Swapped), None, batch(), flops=TOO_LONG, blocks=names())
    assert not finding.probed
    assert "too long to try on the CPU, and not with 2 of its 6 blocks either" in str(finding.reason)


def test_a_step_that_is_short_runs_with_all_blocks() -> None:
    module = Stack()
    finding, _ = probe_split(module, None, batch(), flops=10**6, blocks=names())
    assert (finding.probed, finding.notes) == (True, ())
    assert all(block.layer.weight.numel() for block in module.blocks)


def test_the_first_and_the_last_block_of_each_sort_stay() -> None:
    module = Stack(sizes=(4, 4, 8, 4, 8, 4, 8, 8))
    sorts = spared(module, [*names(8), "elsewhere"])
    assert sorts == [["blocks.0", "blocks.1", "blocks.3"], ["blocks.2", "blocks.4", "blocks.6"]]
    do_without(module, sorts)
    left = [number for number, block in enumerate(module.blocks) if list(block.parameters())]
    assert left == [0, 2, 5, 7]
    x = torch.randn(2, 4)
    expected = x
    for number in left:
        expected = module.blocks[number](expected)
    torch.testing.assert_close(module(x), expected)
