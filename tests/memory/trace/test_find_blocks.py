"""Which modules are blocks, and what their hooks tell the ledger."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_autopar.memory.trace.find_blocks import BlockWatcher, CallCounter, batch_norms, find_blocks, find_layers, tied_groups
from lightning_autopar.memory.trace.tape_recorder import MemoryTracker
from tests.memory.tapes import marks


class Wide(nn.Module):
    def __init__(self, *, gives: Any = lambda x, y: (x, y)) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.gives = gives

    def forward(self, x: Tensor, y: Tensor, **_: Any) -> Any:
        return self.gives(self.layer(x), y)


class Chain(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)


def watched(net: Chain) -> tuple[BlockWatcher, MemoryTracker]:
    tracker = MemoryTracker(batch_size=4)
    for parameter in net.parameters():
        tracker.mark(parameter, "parameters")
    return BlockWatcher(find_blocks(net), tracker), tracker


def test_what_enters_and_leaves_a_block_is_noted() -> None:
    net = Chain([Wide(), Wide()])
    watcher, tracker = watched(net)
    with tracker:
        watcher.begin_step()
        tracker.record()
        tracker.enter("forward")
        x, mask = torch.ones(4, 8), torch.ones(4, 8)
        x, same = net.blocks[0](x, y=mask)
        x, same = net.blocks[1](x, same, extra={"again": [x]})
    assert tracker.tape is not None
    numbers = {event.storage: event.size_bytes for event in tracker.tape if event.action == "allocate"}
    notes = [[event.storage for event in tracker.tape if event.action == action] for action in ("input", "output")]
    assert len(notes[0]) == 4  # two and two: a tensor that comes twice is noted once
    assert len(notes[1]) == 4
    assert notes[0][1] == notes[1][1] == notes[0][3] == notes[1][3]  # the mask is passed through
    assert notes[1][0] == notes[0][2]
    assert set(notes[0] + notes[1]) <= set(numbers)
    assert marks(tracker.tape)[1:] == [("leave", -1), ("forward", 0), ("leave", 0), ("forward", 1), ("leave", 1)]
    assert [record.calls for record in watcher.order] == [1, 1]
    assert all(record.recomputable for record in watcher.order)


@pytest.mark.parametrize(
    ("block", "arguments"),
    [
        (Wide(gives=lambda x, y: [x, object()]), {}),
        (Wide(), {"cache": object()}),
        (Chain([nn.Linear(8, 8), nn.BatchNorm1d(8)]), {}),
    ],
)
def test_blocks_that_may_not_run_twice(block: nn.Module, arguments: dict[str, Any]) -> None:
    if isinstance(block, Chain):
        norm = block.blocks[1]
        block = Wide(gives=lambda x, y: norm(x))
        block.norm = norm
    net = Chain([block, Wide()])
    watcher, tracker = watched(net)
    with tracker:
        watcher.begin_step()
        tracker.enter("forward")
        for part in net.blocks:
            part(torch.ones(4, 8), torch.ones(4, 8), **(arguments if part is block else {}))
    assert [record.recomputable for record in watcher.order] == [False, True]


def test_a_second_call_in_a_step_leaves_no_marks() -> None:
    net = Chain([Wide(), Wide()])
    watcher, tracker = watched(net)
    with tracker:
        tracker.record()
        for _ in range(2):
            watcher.begin_step()
            tracker.enter("forward")
            x, y = torch.ones(4, 8), torch.ones(4, 8)
            for block in (*net.blocks, net.blocks[0]):
                x, y = block(x, y)
    assert [record.calls for record in watcher.order] == [2, 1]
    assert tracker.tape is not None
    assert marks(tracker.tape).count(("forward", 0)) == 2
    assert marks(tracker.tape).count(("forward", 1)) == 2


def test_calls_in_backward_are_the_users_own_recomputation() -> None:
    net = Chain([Wide(), Wide()])
    watcher, tracker = watched(net)
    with tracker:
        watcher.begin_step()
        tracker.record()
        tracker.enter("backward")
        net.blocks[0](torch.ones(4, 8), torch.ones(4, 8))
    assert tracker.tape is not None
    assert not [event for event in tracker.tape if event.action == "forward"]
    assert watcher.order == []


def test_names_of_what_is_special() -> None:
    tied = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "norm": nn.BatchNorm1d(4), "still": nn.BatchNorm1d(4).eval()})
    tied["b"].weight = tied["a"].weight
    assert tied_groups(tied) == (("a.weight", "b.weight"),)
    assert list(batch_norms(tied)) == ["norm"]
    assert find_blocks(tied) == {}


class Different(nn.Module):
    """Layers of different kinds; one returns an object, one runs twice, one has vectors alone."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 2)
        self.twice = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.told = Wide(gives=lambda x, y: (object(), x))
        self.deep = nn.Sequential(nn.Sequential(nn.Linear(8, 32), nn.Tanh()), nn.Sequential(nn.ReLU(), nn.Linear(32, 8)))
        self.unused = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.deep(self.twice(x)))
        _, x = self.told(self.twice(x), x)
        found: Tensor = self.head(x)
        return found


def layers_of(module: nn.Module, *blocks: str) -> list[str]:
    counter = CallCounter(module, lambda: True)
    module(torch.ones(4, 8))
    counter.remove()
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in module.modules())
    return list(find_layers(module, counter.calls, blocks))


def test_layers_stand_in_the_order_in_which_they_run() -> None:
    # The largest is taken apart, one that returns an object gives way to the one within it, and one that ran twice stays whole.
    assert layers_of(Different()) == ["twice", "deep.0", "deep.1", "told.layer", "head"]


def test_layers_leave_out_blocks_and_what_has_them() -> None:
    assert layers_of(Different(), "deep.0", "deep.1") == ["twice", "told.layer", "head"]


def test_layers_share_nothing() -> None:
    module = Different()
    module.unused.weight = module.told.layer.weight
    assert layers_of(module) == ["twice", "deep.0", "deep.1", "head"]


def test_layers_are_few() -> None:
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(30)))
    found = layers_of(module)
    assert len(found) == 8
    assert found == sorted(found, key=int)


class Renaming(nn.Linear):
    """Its `named_parameters` takes other arguments and gives other names, as those of torchrl's losses do."""

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Any:  # type: ignore[override]
        return ((f"own.{name}", parameter) for name, parameter in super().named_parameters(prefix, recurse))


def test_blocks_may_name_their_parameters_otherwise() -> None:
    assert [*find_blocks(nn.Sequential(Renaming(8, 8), Renaming(8, 8)))] == ["0", "1"]
