"""What is recorded of a step: what crosses each cut, who uses which parameters, and where no cut is possible."""

from __future__ import annotations

import copy
import pickle
import random
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_autopar.memory.fakes.fake_copies import as_if_real, drawing_nothing, fake_copy, fake_mode
from lightning_autopar.memory.fakes.shadow_values import ShadowValues
from lightning_autopar.strategies.pipeline.stages.possible_cuts import record
from tests.strategies.pipeline.chained import Block, Stacked, blocks_of, numbers, recorded


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


ALL = {f"blocks.{index}" for index in range(4)}


def reasons(module: Any, **options: Any) -> dict[str, str]:
    return dict(recorded(module, **options).uncuttable)


def test_what_crosses_is_what_was_made_before_and_is_used_after() -> None:
    class Steps(Stacked):
        def run(self, x: Tensor) -> Tensor:
            early = self.stem(x)
            mask = x.sum(-1, keepdim=True) > 0  # of the batch alone: every stage makes it
            x = early
            for index, block in enumerate(self.blocks):
                x = block(x) * mask
                if index == 1:
                    x = x + early
            return self.head(x)

    recording = recorded(Steps(), rows=4)
    assert recording.blocks == ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
    assert recording.rows == 4
    assert {name: len(carried) for name, carried in recording.crossings.items()} == {
        "blocks.0": 1,
        "blocks.1": 2,
        "blocks.2": 1,
        "blocks.3": 1,
    }
    assert not recording.uncuttable
    assert all(each.shape == (4, 8) and each.requires_grad for carried in recording.crossings.values() for each in carried)
    assert recording.parameters["stem.weight"] == {0}
    assert recording.parameters["blocks.2.layer.bias"] == {5}
    assert recording.parameters["head.weight"] == {8}
    assert [recording.stage_of(part, ["blocks.2"]) for part in range(9)] == [0] * 5 + [1] * 4
    assert pickle.loads(pickle.dumps(recording)) == recording


def test_tied_parameters_are_used_under_all_of_their_names_and_buffers_where_they_are_read() -> None:
    class Ties(Stacked):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(4, 8)
            self.out.weight = self.stem.weight
            self.unused = nn.Linear(2, 2)
            self.register_buffer("scale", torch.ones(8))

        def run(self, x: Tensor) -> Tensor:
            ramp = self.scale * 2
            return super().run(x) + self.out(x).mean() + ramp.mean()

    recording = recorded(Ties())
    assert recording.parameters["stem.weight"] == recording.parameters["out.weight"] == {0, 8}
    assert recording.parameters["unused.weight"] == set()
    assert recording.buffers["scale"] == {0}


def test_the_module_and_the_generators_are_left_as_they_were() -> None:
    class Changes(Stacked):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)
            self.register_buffer("seen", torch.zeros(()))
            self.last: Any = None

        def run(self, x: Tensor) -> Tensor:
            self.seen += 1
            self.last = F.dropout(self.norm(super().run(x).expand(-1, 8)))
            self.blocks[0].register_forward_hook(lambda *_: None)
            return self.last.mean(-1, keepdim=True)

    module = Changes()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    torch.manual_seed(5)
    state, forward = torch.get_rng_state(), module.blocks[0].forward
    batch = numbers()
    copied = [tensor.clone() for tensor in batch]
    recorded(module, batch)
    torch.testing.assert_close(dict(module.state_dict()), before, rtol=0, atol=0)
    assert module.last is None
    assert module.blocks[0].forward == forward
    assert not module.blocks[0]._forward_hooks
    assert "training_step" not in vars(module)
    assert "log" not in vars(module)
    assert module.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in module.parameters())
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(batch, copied, strict=True))


class Reads(Stacked):
    """Decides by a value of the model's in the middle."""

    def run(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 1 and x.mean() > 0:
                x = x * 2
        return self.head(x)


class Shapes(Stacked):
    """Chooses rows by the model's values in the middle."""

    def run(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 1:
                x = x + x[x[:, 0] > x[:, 0].mean()].mean()
        return self.head(x)


class Differentiates(Stacked):
    def run(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        y = super().run(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + slope.pow(2).mean()


class FromDistances(Stacked):
    """Computes what its blocks get from an input whose gradients are the forces."""

    def run(self, x: Tensor) -> Tensor:
        return super().run(x.requires_grad_().square())


class Inferred(Stacked):
    """Has a first block as a frozen teacher's features."""

    def run(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            taught = self.blocks[0](torch.ones(1, 8))
        return super().run(x) + taught.mean()


class Moves(Stacked):
    """Takes its blocks to the device where they are needed, which moves their gradients as well."""

    def run(self, x: Tensor) -> Tensor:
        self.blocks.to(x.device)
        return super().run(x)


class Twice(Stacked):
    """The second block runs again at the end."""

    def run(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.blocks[1](x))


class Appends(Block):
    """Leaves a tensor in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        self.kept[:] = [self.layer(x)]
        return super().forward(x)


class SideChannel(Stacked):
    def __init__(self) -> None:
        super().__init__(Appends)

    def run(self, x: Tensor) -> Tensor:
        return super().run(x) + self.blocks[1].kept[0].mean()


class Counts(Block):
    """Returns a number that it reads from its values."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), float(x.detach().sum())


class Numbers(Stacked):
    def __init__(self) -> None:
        super().__init__(Counts)

    def run(self, x: Tensor) -> Tensor:
        x, total = self.stem(x), 0.0
        for block in self.blocks:
            x, number = block(x)
            total += number
        return self.head(x) * total


class Updates(Stacked):
    """A running mean that it writes to at the beginning and reads at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def run(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        for block in self.blocks:
            x = block(x)
        return self.head(x - self.mean)


class Entangled(Stacked):
    """A view and its base both live on, and one of them is written to at the end."""

    def run(self, x: Tensor) -> Tensor:
        x = self.stem(x) * 1
        kept = x * 1
        view = kept[:, :4]
        for block in self.blocks:
            x = block(x)
        view.mul_(2)
        return self.head(x + kept)


class Draws(Block):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * (1 + random.random()) * float(np.random.rand())


class HostDraws(Stacked):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = Draws()


class Explores(Stacked):
    """Now and then it runs a block twice, as an agent that acts at random or asks its network."""

    def run(self, x: Tensor) -> Tensor:
        if random.random() < 0.5:
            self.blocks[0](self.stem(x).detach())
        return super().run(x)


class Mixes(Stacked):
    """Draws a number, and does the same with all."""

    def run(self, x: Tensor) -> Tensor:
        return super().run(x * random.random())


class Takes(Block):
    """Appends to a list that it is given."""

    def forward(self, x: Tensor, states: list[Tensor]) -> Any:  # type: ignore[override]
        states.append(x)
        return super().forward(x)


class Containers(Stacked):
    def __init__(self) -> None:
        super().__init__(Takes)

    def run(self, x: Tensor) -> Tensor:
        x, states = self.stem(x), []
        for block in self.blocks:
            x = block(x, states)
        return self.head(x + torch.stack(states).sum(0))


class Writes(Block):
    """Writes to a tensor of the batch's that it is given."""

    def forward(self, x: Tensor, counts: Tensor) -> Any:  # type: ignore[override]
        counts += x.detach().mean()
        return super().forward(x)


class WritesArguments(Stacked):
    def __init__(self) -> None:
        super().__init__(Writes)

    def run(self, x: Tensor) -> Tensor:
        x, counts = self.stem(x), torch.zeros(1)
        for block in self.blocks:
            x = block(x, counts)
        return self.head(x) * counts


class Thing:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class Wraps(Block):
    def forward(self, x: Any) -> Any:
        return Thing(super().forward(x.x))


class Objects(Stacked):
    """Blocks return an object that isn't known."""

    def __init__(self) -> None:
        super().__init__(Wraps)

    def run(self, x: Tensor) -> Tensor:
        thing = Thing(self.stem(x))
        for block in self.blocks:
            thing = block(thing)
        return self.head(thing.x)


class Hoards(Stacked):
    """Adds up what it saw in the steps before; not in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Any = torch.zeros(8)

    def run(self, x: Tensor) -> Tensor:
        x = self.stem(x) + self.seen
        for block in self.blocks:
            x = block(x)
        self.seen = self.seen * 0.9 + x.detach().mean(0)
        return self.head(x)


class Reversed(torch.autograd.Function):
    """Runs blocks, and keeps what they return in an object that it is given, as a cache is."""

    @staticmethod
    def forward(_: Any, x: Tensor, blocks: Any, cache: Any) -> Tensor:
        """All blocks' results, of which the first makes two."""
        for block in blocks:
            cache.kept.append(x := block(x))
        return torch.stack(cache.kept).sum(0)

    @staticmethod
    def backward(_: Any, gradient: Any) -> Any:
        """Not what differentiation would give, and it needn't be."""
        return gradient, None, None


class RunsBlocks(Stacked):
    """A function with a backward of its own runs the middle blocks, as reversible layers do."""

    def run(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.stem(x))
        x = Reversed.apply(x, self.blocks[1:3], SimpleNamespace(kept=[]))
        return self.head(self.blocks[3](x))


@pytest.mark.parametrize(
    ("kind", "blocks", "words"),
    [
        (RunsBlocks, {"blocks.1", "blocks.2", "blocks.3"}, r"Reversed\.apply( \(it)? runs 'blocks\.[12]'( within itself|\))"),
        (Reads, {"blocks.2", "blocks.3"}, r"reads a value of the model's \(__bool__, at test_possible_cuts\.py:\d+\)"),
        (Shapes, {"blocks.2", "blocks.3"}, "__getitem__"),
        (Differentiates, ALL, "differentiates by itself"),
        (FromDistances, ALL, r"asks for gradients of a tensor that isn't a parameter \(requires_grad_\)"),
        (Inferred, ALL, r"runs under torch\.inference_mode, .* use torch\.no_grad\(\) there"),
        (Moves, ALL, r"asks for a parameter's gradient, as module\.to\(\)"),
        (Twice, {"blocks.2", "blocks.3"}, r"'blocks\.1' runs before it and again after it"),
        (SideChannel, {"blocks.2", "blocks.3"}, "without having been returned"),
        (Numbers, {"blocks.1", "blocks.2", "blocks.3"}, "a number that depends on values"),
        (Updates, ALL, "'mean' is written to, and used before it and after it"),
        (Entangled, ALL, "share memory, which is written to after it"),
        (Explores, ALL, "random numbers of Python's or NumPy's decide what the step computes"),
        (HostDraws, {"blocks.2", "blocks.3"}, "Python's or NumPy's generator"),
        (Containers, {"blocks.1", "blocks.2", "blocks.3"}, "changes a list or dictionary"),
        (WritesArguments, {"blocks.1", "blocks.2", "blocks.3"}, "writes to a tensor that it is given"),
        (Hoards, ALL, "keeps 'seen' for the next one"),
        (Objects, {"blocks.1", "blocks.2", "blocks.3"}, "a Thing"),
    ],
)
def test_where_no_cut_is_possible_the_reason_is_told(kind: type[Stacked], blocks: set[str], words: str) -> None:
    found = reasons(kind(), blocks=sorted(ALL))
    assert set(found) == blocks
    for reason in found.values():
        assert re.search(words, reason), reason


def test_a_block_that_doesnt_run_isnt_in_the_recording_and_an_unknown_one_is_an_error() -> None:
    class Half(Stacked):
        def run(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for block in self.blocks[:2]:
                x = block(x)
            return self.head(x)

    recording = recorded(Half())
    assert recording.blocks == ("blocks.0", "blocks.1")
    with pytest.raises(ValueError, match=r"doesn't run 'blocks\.3'"):
        recording.bounds(["blocks.3"])
    with pytest.raises(ValueError, match="in another order"):
        recording.bounds(["blocks.1", "blocks.0"])
    with pytest.raises(ValueError, match="no block 'nowhere'"):
        record(Half(), None, "training_step", numbers(), ["nowhere"])
    with pytest.raises(ValueError, match=r"no stage can begin with 'blocks\.2': .*reads a value"):
        recorded(Reads()).bounds(["blocks.2"])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_torch_doesnt_show_is_refused() -> None:
    compiled = Stacked()
    compiled.head.compile(backend="eager")
    assert "'head' was given to torch.compile" in recorded(compiled, blocks=sorted(ALL)).uncuttable["blocks.1"]
    scripted = Stacked()
    scripted.stem = torch.jit.trace(scripted.stem, numbers()[0])  # type: ignore[assignment,no-untyped-call]
    assert "'stem' is scripted" in recorded(scripted, blocks=sorted(ALL)).uncuttable["blocks.1"]


def test_tables_that_are_made_once_and_losses_that_are_only_kept_are_no_reason() -> None:
    class Caches(Stacked):
        def __init__(self) -> None:
            super().__init__()
            self.table: Any = None
            self.last: Any = None

        def run(self, x: Tensor) -> Tensor:
            if self.table is None:
                self.table = torch.linspace(0, 1, 8)
            self.last = super().run(x + self.table[:4])
            return self.last

    assert not recorded(Caches()).uncuttable
    assert not recorded(Mixes()).uncuttable


def test_a_frozen_network_may_be_moved_in_the_step() -> None:
    class Judged(Stacked):
        def __init__(self) -> None:
            super().__init__()
            self.judge = torch.nn.Linear(4, 4).requires_grad_(False)

        def run(self, x: Tensor) -> Tensor:
            return super().run(self.judge.to(x.device)(x))

    assert not recorded(Judged()).uncuttable


def test_a_batch_that_is_written_to_is_noted() -> None:
    class Doubles(Stacked):
        def run(self, x: Tensor) -> Tensor:
            return super().run(x.mul_(2))

    assert recorded(Doubles()).changes_batch
    assert not recorded(Stacked()).changes_batch


def test_a_large_step_is_recorded_under_fake_tensors() -> None:
    module = Stacked()
    real = recorded(copy.deepcopy(module), rows=4)
    mode, shadow = fake_mode(), ShadowValues()
    fake, batch = fake_copy(module, mode, shadow), fake_copy(numbers(), mode, shadow)
    with drawing_nothing(), as_if_real(shadow, "cpu"), mode, shadow:
        recording = record(fake, None, "training_step", batch, blocks_of(fake), rows=4)
    assert recording == real


def test_other_hooks_run_without_gradients_and_in_their_own_mode() -> None:
    class Modes(Stacked):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            assert not self.training
            assert not torch.is_grad_enabled()
            return self.run(batch[0])

    module = Modes().train()
    recording = recorded(module, hook="validation_step")
    assert recording.hook == "validation_step"
    assert module.training
    assert module.blocks[0].training
    assert not any(each.requires_grad for carried in recording.crossings.values() for each in carried)
