"""Stages of a step compute what the whole step computes, however its code passes tensors around; or they raise."""

from __future__ import annotations

import copy
import gc
import inspect
import weakref
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_autopar.exact.absent.absent_tensor import MissingValue, is_absent
from lightning_autopar.strategies.pipeline.stages.cut_tensors import Staging
from lightning_autopar.strategies.pipeline.stages.module_state import take_stages
from lightning_autopar.strategies.pipeline.stages.stage_module import StageModule
from tests.strategies.pipeline.chained import CPU, Block, Chained, Stacked, assert_parity, cuts_of, numbers, recorded


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def test_a_plain_stack_is_the_same_in_stages() -> None:
    chained = assert_parity(Stacked())
    assert len(chained.stages) == 4


def test_a_stage_may_begin_with_the_first_block_and_stages_may_be_uneven() -> None:
    module = Stacked()
    assert_parity(module, cuts=["blocks.0", "blocks.3"])
    assert_parity(module, cuts=["blocks.2"])


class Several(nn.Module):
    """Takes keyword arguments, nested ones too, and returns a dictionary with a tuple and other things in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.other = nn.Linear(8, 4)

    def forward(self, *, state: dict[str, Any], scale: float, nothing: None = None) -> dict[str, Any]:
        x, (y, mask) = state["x"], state["rest"]
        x = (x + self.layer(x).tanh() * scale) * mask
        y = y + self.other(x)
        return {"x": x, "rest": (y, mask), "nothing": nothing, "name": "block", "width": x.shape[-1]}


class PassesSeveral(Stacked):
    def __init__(self) -> None:
        super().__init__(Several)

    def run(self, x: Tensor) -> Tensor:
        mask = (x[..., :1] > -1).float()
        state: dict[str, Any] = {"x": self.stem(x), "rest": (x, mask)}
        for block in self.blocks:
            state = block(state=state, scale=0.5)
            assert state["name"] == "block"
            assert state["nothing"] is None
            assert state["width"] == 8
        return self.head(state["x"]) + state["rest"][0].sum(-1, keepdim=True)


class Flows(nn.Module):
    """Takes each row to another one, and gives how much volume that takes up: a number for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        log_scale = self.layer(x).tanh()
        return x * log_scale.exp(), log_scale.sum(-1)


class Flow(Stacked):
    """A normalizing flow, whose loss goes by the shape of what its first block returned."""

    def __init__(self) -> None:
        super().__init__(Flows)

    def run(self, x: Tensor) -> Tensor:
        x, volumes = self.stem(x), []
        for block in self.blocks:
            x, volume = block(x)
            volumes.append(volume)
        assert volumes[0].shape == x.shape[:1]
        return self.head(x) + (x.square().sum() - sum(volumes).sum()) / volumes[0].numel()


class TwoTexts(nn.Module):
    """Reads one text, and changes another one, which may be as long."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, source: Tensor, x: Tensor) -> Tensor:
        return x + self.layer(x).tanh() + source.mean(1, keepdim=True)


class Translates(Stacked):
    """Its loss goes by how long what its first block returned is."""

    def __init__(self) -> None:
        super().__init__(TwoTexts)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        source, x = map(self.stem, batch)
        lengths = []
        for block in self.blocks:
            x = block(source, x)
            lengths.append(x.shape[1])
        return self.head(x).square().sum() / lengths[0]


def test_a_skipped_block_returns_as_many_numbers_as_it_would() -> None:
    """It returns a number for each row of what it is given, or something as long as one of two arguments that were alike when recorded."""
    assert_parity(Flow())
    texts = torch.randn(4, 5, 4), torch.randn(4, 5, 4)
    assert_parity(Translates(), texts, batches=[texts, (texts[0], texts[1][:, :3])])


@dataclass
class Between:
    """What x-transformers' attention gives beside its result."""

    values: Tensor
    kind: str
    pair: tuple[Tensor, Tensor | None] | None = None


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Between]:
        y = self.layer(x).tanh()
        return x + y, Between(values=y * 2, kind="attention", pair=(y[..., :3], None))


class Rows(Stacked):
    """A list a layer, of a norm and a block, of which every second one returns a dataclass; all that they returned is used at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList([nn.LayerNorm(8), kind()]) for kind in (Attends, Block) * 2)

    def run(self, x: Tensor) -> Tensor:
        x, left = self.stem(x), []
        for norm, block in self.blocks:
            if isinstance(block, Attends):
                x, between = block(norm(x))
                assert between.kind == "attention"
                left.append(between)
            else:
                x = x + block(norm(x))
        assert left[0].pair is not None
        return self.head(x + left[0].values) + left[0].pair[0].sum() + left[1].values.mean()


class Skips(Stacked):
    """Every block's output is used at the end, and what the stem gave."""

    def run(self, x: Tensor) -> Tensor:
        states = [self.stem(x)]
        for block in self.blocks:
            states.append(block(states[-1]))
        return self.head(torch.stack(states).mean(0)) + states[0].mean() + states[1][..., :1]


class InPlace(Stacked):
    """Writes to what blocks return, to tensors that cross cuts, to a view, and to a tensor of its own that takes in the model's."""

    def run(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        kept = x * 2
        table = torch.zeros(*x.shape[:-1], 10)
        table[..., :8] = x
        for index, block in enumerate(self.blocks):
            x = block(x)
            x += index
            x[..., 0] *= 2
            kept.mul_(0.9).add_(x.detach())
            table[..., 9] += x.mean(-1)
        table.mul_(0.5)
        return self.head(x + kept) + table.sum(-1, keepdim=True)


class Masked(Stacked):
    """Writes to what a block returns itself, as sequences' masks are multiplied between blocks."""

    def run(self, x: Tensor) -> Tensor:
        mask = (x[..., :1] > 0).to(x)
        x = self.stem(x)
        for block in self.blocks:
            x *= mask
            x = block(x)
            x[..., 0] *= 2
        return self.head(x)


class Views(Stacked):
    """Views of a tensor cross cuts beside it."""

    def run(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        first, transposed = x[..., :1], x.transpose(0, -1)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * first + transposed.mean()


class Tied(Stacked):
    """The stem's weight is used again at the end, and in the middle."""

    def run(self, x: Tensor) -> Tensor:
        given = x
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 1:
                x = x + self.stem(given)
        return (x @ self.stem.weight).sum(-1, keepdim=True)


class Scales(Stacked):
    """A parameter for each block, used outside of it, and a weight of a block in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(8) * (index + 1)) for index in range(4))

    def run(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for scale, block in zip(self.scales, self.blocks, strict=True):
            x = x + scale * block(x)
        return self.head(x) + self.blocks[1].layer.weight.pow(2).mean()


class Frozen(Stacked):
    """What comes first isn't trained."""

    def __init__(self) -> None:
        super().__init__()
        self.stem.requires_grad_(False)
        self.blocks[0].requires_grad_(False)
        self.blocks[2].requires_grad_(False)


class Buffers(Stacked):
    """Positions from a buffer, a mask from the batch, a table in each block."""

    def __init__(self) -> None:
        super().__init__(Looks)
        self.register_buffer("positions", torch.linspace(0, 1, 8), persistent=False)

    def run(self, x: Tensor) -> Tensor:
        rotary = torch.cos(self.positions * x.shape[0])
        mask = x.sum(-1, keepdim=True) > 0
        x = self.stem(x)
        for block in self.blocks:
            x = block(x * rotary, mask)
        return self.head(x)


class Looks(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.rand(8))

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        return torch.where(mask, super().forward(x) + self.table, x)


class Normalises(Stacked):
    """Running statistics in the prologue and in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.blocks[2].layer = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))  # type: ignore[assignment]

    def run(self, x: Tensor) -> Tensor:
        return super().run(self.norm(x))


class Checkpoints(Stacked):
    """Recomputes its blocks by itself, in both ways."""

    def run(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=bool(index % 2))
        return self.head(checkpoint(torch.tanh, x, use_reentrant=False))


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.factor * 3, None  # as no formula of torch's would have it


class OwnFunctions(Stacked):
    def run(self, x: Tensor) -> Tensor:
        x = Double.apply(self.stem(x), 2.0)
        kept = x
        for block in self.blocks:
            x = Double.apply(block(x), 0.5)
        return self.head(x) + Double.apply(kept, 1.5).mean()


class Describes(Stacked):
    """Looks at shapes, types and devices everywhere, and at its parameters'."""

    def run(self, x: Tensor) -> Tensor:
        x = self.stem(x).to(self.head.weight.dtype)
        rows, width = x.shape
        ramp = torch.arange(width, device=x.device, dtype=x.dtype) / len(x)
        assert x.dim() == x.ndim == 2
        assert x.size(1) == width
        assert x.numel() == rows * width
        assert x.is_floating_point()
        for block in self.blocks:
            x = block(x) + ramp.to(x)
            if x.requires_grad and not x.is_leaf:
                x = x.view(len(x), -1, 2).flatten(1).type_as(self.blocks[3].layer.weight)
        return self.head(x.contiguous())


class Branches(Stacked):
    """What it does depends on the batch, which every stage has."""

    def run(self, x: Tensor) -> Tensor:
        ones = torch.ones(3)
        if x.shape[0] > 3 and bool((x > -100).all()):
            ones = ones * 2 + 1 - 1
            ones = ones.cumsum(0)
        x = self.stem(x * ones[0])
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Keeps(Block):
    """Leaves a loss in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.penalty: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        self.penalty = self.layer(x).pow(2).mean()
        return super().forward(x)


class CollectsAttributes(Stacked):
    def __init__(self) -> None:
        super().__init__(Keeps)

    def run(self, x: Tensor) -> Tensor:
        result = super().run(x)
        return result + sum(block.penalty for block in self.blocks)  # type: ignore[misc]


class CollectsByHooks(Stacked):
    """A forward hook on a layer inside of each block sees what it gives, as Hugging Face's models capture router logits."""

    def __init__(self) -> None:
        super().__init__()
        self.caught: list[Tensor] = []
        for block in self.blocks:
            block.layer.register_forward_hook(Catch(self.caught))

    def run(self, x: Tensor) -> Tensor:
        self.caught.clear()
        result = super().run(x)
        return result + torch.stack(self.caught).pow(2).mean()


class Catch:
    def __init__(self, into: list[Tensor]) -> None:
        self.into = into

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.into.append(output)


class Randomly(Stacked):
    """Layers that are dropped with probability zero: the random number isn't needed to know."""

    def run(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            chance = torch.rand([])
            if self.training and chance < 0.0:
                continue
            x = block(x)
        return self.head(F.dropout(x, 0.0) + F.dropout(x, 0.5, training=False))


class Functional(Stacked):
    """Its blocks are called through ``functional_call`` and from a nested function."""

    def run(self, x: Tensor) -> Tensor:
        def through(block: nn.Module, x: Tensor) -> Tensor:
            return torch.func.functional_call(block, dict(block.named_parameters()), (x,))  # type: ignore[no-any-return]

        x = self.stem(x)
        for block in self.blocks:
            x = through(block, x)
        return self.head(x)


class Masks(Stacked):
    """Rows that the batch chooses, of what the stem gives."""

    def run(self, x: Tensor) -> Tensor:
        chosen = x[:, 0] > -0.5
        h = self.stem(x)
        rows = h[chosen]
        h = h.masked_fill(~chosen[:, None], 0.0)
        for block in self.blocks:
            h, rows = block(h), rows * 1
        return self.head(h) + self.head(rows).mean()


class Nested(Stacked):
    """Blocks within modules that are no blocks, and one list within another."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Sequential(self.blocks[0], self.blocks[1]))
        self.blocks = self.blocks[2:]

    def run(self, x: Tensor) -> Tensor:
        x = self.inner(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Lists(Stacked):
    """Blocks are given a list, and return one."""

    def __init__(self) -> None:
        super().__init__(OnLists)

    def run(self, x: Tensor) -> Tensor:
        both = [self.stem(x), x]
        for block in self.blocks:
            both = block(both)
        return self.head(both[0]) + both[1].mean()


class OnLists(Block):
    def forward(self, both: list[Tensor]) -> Any:  # type: ignore[override]
        x, y = both
        return [super().forward(x), y + x.mean()]


class Scatters(Stacked):
    """Writes what a block gives into a tensor that is made for it."""

    def run(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            index = torch.arange(len(x)).flip(0)[:, None].repeat(1, x.shape[1])
            x = torch.zeros(x.shape).scatter_reduce_(0, index, block(x), reduce="sum", include_self=False)[index[:, 0]]
        return self.head(x)


class Recurrent(Stacked):
    """A fused recurrent layer in the prologue, whose weights torch keeps in a list as well."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 4, batch_first=True)

    def run(self, x: Tensor) -> Tensor:
        return super().run(self.rnn(x[:, None])[0][:, 0])


@pytest.mark.parametrize(
    "kind",
    [
        PassesSeveral,
        Rows,
        Skips,
        InPlace,
        Masked,
        Views,
        Tied,
        Scales,
        Frozen,
        Buffers,
        Normalises,
        Checkpoints,
        OwnFunctions,
        Describes,
        Branches,
        CollectsAttributes,
        CollectsByHooks,
        Randomly,
        Functional,
        Masks,
        Nested,
        Lists,
        Scatters,
        Recurrent,
    ],
)
def test_stages_give_the_whole_steps_loss_and_gradients(kind: type[Stacked]) -> None:
    module = kind().train()
    assert_parity(module)
    recording = recorded(copy.deepcopy(module))
    assert_parity(module, cuts=cuts_of(recording)[-1:])


def test_sequences_may_have_other_lengths_than_recorded() -> None:
    assert_parity(Skips(), numbers(4, 6), batches=[numbers(4, 6), numbers(5, 3), numbers(1, 9)])


def test_what_is_logged_is_the_owners_and_what_is_returned_is_whole() -> None:
    class Logs(Stacked):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            embedded = self.stem(batch[0])
            self.log("embedded", embedded.mean())
            x = embedded
            for block in self.blocks:
                x = block(x)
            loss = F.mse_loss(self.head(x), batch[1])
            self.log("late", embedded.std())
            self.log("loss", loss)
            return {"loss": loss, "embedded": embedded, "targets": batch[1]}

    module = Logs()
    chained = assert_parity(module, batches=[numbers()])
    assert [set(logged) for logged in chained.logged] == [{"embedded"}, set(), set(), {"late", "loss"}]
    output = chained.stages[-1].replay.outputs.pop(0)
    torch.testing.assert_close(output["embedded"], module.stem(numbers()[0]))
    assert type(output["embedded"]) is Tensor


def test_evaluation_runs_in_stages_as_recorded() -> None:
    module = Skips().eval()
    hooks = {hook: recorded(module, hook=hook) for hook in ("training_step", "validation_step")}
    chained = Chained(module, Staging(hooks=hooks), ["blocks.1", "blocks.3"])
    torch.testing.assert_close(chained.evaluate("validation_step", numbers(3)), module.run(numbers(3)[0]))


def test_two_stages_of_one_rank_share_a_module() -> None:
    module = Skips()
    staging, cuts = Staging(hooks={"training_step": recorded(module)}), ["blocks.1", "blocks.2", "blocks.3"]
    whole = copy.deepcopy(module)
    whole.training_step(numbers(), 0).backward()
    ranks = [copy.deepcopy(module) for _ in range(2)]
    stages: list[StageModule] = []
    for index in range(4):
        rank = ranks[index % 2]
        stages.append(StageModule(rank, staging, cuts, index, lambda hook, chunk, rank=rank: rank.training_step(numbers(), 0)))
    for index, rank in enumerate(ranks):
        owned = take_stages(rank, staging, cuts, [index, index + 2], CPU)
        assert not is_absent(rank.get_parameter(f"blocks.{index}.layer.weight"))
        assert f"blocks.{index + 2}.layer.bias" in owned.names
        assert is_absent(rank.get_parameter(f"blocks.{1 - index}.layer.weight"))
    value: Any = ()
    for stage in stages:
        value = stage(*(value if isinstance(value, tuple) else (value,)))
    value.backward()
    found = {name: p.grad for rank in ranks for name, p in rank.named_parameters() if p.grad is not None}
    torch.testing.assert_close(found, {name: p.grad for name, p in whole.named_parameters()})


def test_stages_of_one_rank_count_once() -> None:
    class Warms(Stacked):
        """Its loss grows with the steps that it has seen, in the prologue as well as at the end."""

        def __init__(self) -> None:
            super().__init__()
            self.seen, self.done = 0, 0

        def run(self, x: Tensor) -> Tensor:
            self.seen += 1
            result = super().run(x * self.seen) * self.seen
            self.done += 1
            return result * self.done

    module = Warms()
    staging, cuts = Staging(hooks={"training_step": recorded(module)}), ["blocks.1", "blocks.2", "blocks.3"]
    whole = copy.deepcopy(module)
    expected = [float(whole.training_step(numbers(), 0).detach()) for _ in range(3)]
    ranks = [copy.deepcopy(module) for _ in range(2)]
    calls = [lambda hook, chunk, rank=rank: rank.training_step(numbers(), 0) for rank in ranks]
    stages = [StageModule(ranks[index % 2], staging, cuts, index, calls[index % 2]) for index in range(4)]
    values: list[Any] = [()] * 3
    for stage in stages:
        for chunk in range(3):
            stage.chunk = chunk
            given = values[chunk]
            values[chunk] = stage(*(given if isinstance(given, tuple) else (given,)))
    assert [float(value.detach()) for value in values] == pytest.approx(expected)
    assert [(rank.seen, rank.done) for rank in ranks] == [(3, 0), (3, 3)]


def test_hooks_are_called_where_the_stages_own_code_begins_and_ends() -> None:
    module, seen = Stacked(), []
    chained = Chained(module, Staging(hooks={"training_step": recorded(module)}), ["blocks.2"])
    for index, stage in enumerate(chained.stages):
        stage.replay.on_entry.append(lambda index=index, stage=stage: seen.append((index, "in", stage.replay.owns_now)))
        stage.replay.on_exit.append(lambda index=index: seen.append((index, "out", None)))
    chained.train([numbers()])
    assert seen == [(0, "in", True), (0, "out", None), (1, "in", True), (1, "out", None)]
    assert not any(stage.replay.owns_now for stage in chained.stages)


def test_a_step_that_runs_otherwise_than_recorded_raises() -> None:
    class Changes(Stacked):
        more = False

        def run(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            if self.more:
                x = x * 2
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    module = Changes()
    chained = Chained(module, Staging(hooks={"training_step": recorded(module)}), ["blocks.2"])
    for stage in chained.stages:
        stage.module.more = True
    chained.train([numbers()])  # nothing of that part crosses a cut
    skips = Skips()
    chained = Chained(skips, Staging(hooks={"training_step": recorded(skips)}), ["blocks.2"])
    for stage in chained.stages:
        original = stage.module.stem.forward
        stage.module.stem.forward = lambda x, original=original: original(x) * 2
    with pytest.raises(RuntimeError, match="'mul' where it called nothing more when it was recorded"):
        chained.train([numbers()])


def test_blocks_in_another_order_raise() -> None:
    class Reorders(Stacked):
        backwards = False

        def run(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for block in reversed(self.blocks) if self.backwards else self.blocks:  # type: ignore[call-overload]
                x = block(x)
            return self.head(x)

    module = Reorders()
    chained = Chained(module, Staging(hooks={"training_step": recorded(module)}), ["blocks.2"])
    for stage in chained.stages:
        stage.module.backwards = True
    with pytest.raises(RuntimeError, match=r"runs the block 'blocks\.3' where 'blocks\.0' ran"):
        chained.train([numbers()])


def test_a_step_that_ends_early_raises() -> None:
    class Ends(Stacked):
        early = False

        def run(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for block in self.blocks[:1] if self.early else self.blocks:
                x = block(x)
            return x.mean(-1, keepdim=True)

    module = Ends()
    chained = Chained(module, Staging(hooks={"training_step": recorded(module)}), ["blocks.2"])
    for stage in chained.stages:
        stage.module.early = True
    chained.batch = [numbers()]
    with pytest.raises(RuntimeError, match=r"ended before the block 'blocks\.2' ran, with which the next stage begins"):
        chained.stages[0].replay()
    with pytest.raises(RuntimeError, match=r"ended before the block 'blocks\.2' ran, with which the stage begins"):
        chained.stages[1].replay(torch.zeros(4, 8))


def test_tensors_of_another_number_or_shape_are_refused() -> None:
    module = Stacked()
    chained = Chained(module, Staging(hooks={"training_step": recorded(module)}), ["blocks.2"])
    chained.batch = [numbers()]
    with pytest.raises(RuntimeError, match="gets 2 tensors, but 1 cross"):
        chained.stages[1].replay(torch.zeros(4, 8), torch.zeros(4, 8))
    with pytest.raises(RuntimeError, match=r"shape \(3, 8\).*was received"):
        chained.stages[1].replay(torch.zeros(3, 8))


def test_a_value_that_the_recording_missed_raises_when_it_is_used() -> None:
    class Sometimes(Stacked):
        uses = False

        def run(self, x: Tensor) -> Tensor:
            embedded = self.stem(x)
            x = embedded
            for block in self.blocks:
                x = block(x)
            return self.head(x + embedded if self.uses else x)

    module = Sometimes()
    chained = Chained(module, Staging(hooks={"training_step": recorded(module)}), ["blocks.2"])
    chained.stages[1].module.uses = True
    with pytest.raises(MissingValue, match="the recorded step didn't use it here"):
        chained.train([numbers()])


def test_the_users_own_error_comes_through_and_the_module_can_be_run_again() -> None:
    class Fails(Stacked):
        fails = True

        def run(self, x: Tensor) -> Tensor:
            x = super().run(x)
            if self.fails and torch.is_grad_enabled() and x.shape[0] == 3:
                raise KeyError("the user's")
            return x

    module = Fails()
    chained = Chained(module, Staging(hooks={"training_step": recorded(module)}), ["blocks.2"])
    with pytest.raises(KeyError, match="the user's"):
        chained.train([numbers(3)])
    assert chained.train([numbers(4)]) == [pytest.approx(float(module.training_step(numbers(4), 0).detach()))]
    assert torch.overrides._len_torch_function_stack() == 0
    assert Double.apply(torch.ones(1), 2.0) == 2


def test_a_copy_of_a_stages_module_has_blocks_of_its_own() -> None:
    module = Stacked()
    chained = Chained(module, Staging(hooks={"training_step": recorded(module)}), ["blocks.2"])
    chained.train([numbers()])
    mine = chained.stages[0].module
    copied = copy.deepcopy(mine)
    nn.init.zeros_(copied.blocks[0].layer.weight)
    nn.init.zeros_(copied.blocks[0].layer.bias)
    x = torch.ones(2, 8)
    torch.testing.assert_close(copied.blocks[0](x), x)
    torch.testing.assert_close(mine.blocks[0](x), module.blocks[0](x))
    assert list(inspect.signature(mine.blocks[0].forward).parameters) == ["x"]


def test_nothing_of_a_run_waits_for_the_garbage_collector() -> None:
    module = Skips()
    chained = Chained(module, Staging(hooks={"training_step": recorded(module)}), ["blocks.2"])
    chained.batch = [numbers()]
    gc.collect()
    gc.disable()
    try:
        first, last = (stage.replay for stage in chained.stages)
        given = first()
        received = tuple(tensor.detach().requires_grad_() for tensor in given)
        loss = last(*received)
        loss.backward()
        last.outputs.clear()
        alive = [weakref.ref(tensor) for tensor in (*given, *received, loss)]
        del given, received, loss
        assert [reference() for reference in alive] == [None] * len(alive)
    finally:
        gc.enable()


def test_except_clauses_of_the_user_dont_catch_a_stages_end() -> None:
    class Catches(Stacked):
        def run(self, x: Tensor) -> Tensor:
            try:
                return super().run(x)
            except Exception:
                return torch.zeros(1)

    assert_parity(Catches())


def test_recomputed_blocks_are_the_same() -> None:
    from lightning_autopar.exact.step.recompute import recomputed

    module = Skips()
    staging = Staging(hooks={"training_step": recorded(module)})
    whole = copy.deepcopy(module)
    whole.training_step(numbers(), 0).backward()
    for before in (True, False):
        chained = Chained(module, staging, ["blocks.2"])
        if before:
            for stage in chained.stages:
                contexts = recomputed(stage.module, ["blocks.1", "blocks.2"])
                contexts.__enter__()
        losses = chained.train([numbers()])
        assert losses == [pytest.approx(float(whole.training_step(numbers(), 0).detach()))]
        torch.testing.assert_close(chained.gradients(), {name: p.grad for name, p in whole.named_parameters()})


def test_mixed_precision_of_a_run_needs_none_in_the_recording() -> None:
    module = Skips()
    staging = Staging(hooks={"training_step": recorded(module)})
    whole = copy.deepcopy(module)
    with torch.autocast("cpu", torch.bfloat16):
        whole.training_step(numbers(), 0).backward()
        chained = Chained(module, staging, ["blocks.1", "blocks.3"])
        chained.train([numbers()])
    torch.testing.assert_close(chained.gradients(), {name: p.grad for name, p in whole.named_parameters()}, rtol=1e-2, atol=1e-3)


def test_a_module_without_lightnings_is_refused_nowhere() -> None:
    class Plain(pl.LightningModule):
        """No blocks between anything: the first block is the first thing that runs."""

        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(batch[0]).pow(2).mean()

    assert_parity(Plain(), blocks=["net.0", "net.1", "net.2", "net.3"])


class Padded(pl.LightningModule):
    """An evaluation on padded samples, which torch's encoder makes nested tensors of where nobody watches."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, norm=nn.LayerNorm(8))

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, padded = batch
        encoded = self.encoder(self.stem(x), src_key_padding_mask=padded)
        return encoded[:, : x.shape[1]].masked_fill(padded[..., None], 0.0).sum(1)


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")
def test_an_encoder_evaluates_padded_samples_in_stages() -> None:
    module, x = Padded().eval(), torch.randn(3, 5, 4)
    padded = torch.arange(5) >= torch.tensor([[5], [2], [3]])
    recording = recorded(copy.deepcopy(module), (x, padded), hook="validation_step")
    chained = Chained(copy.deepcopy(module), Staging(hooks={"validation_step": recording}), cuts_of(recording))
    assert len(chained.stages) == 4
    for batch in ((x, padded), (x, torch.zeros(3, 5, dtype=torch.bool)), (x[:2, :3], padded[:2, :3])):
        with torch.no_grad():
            expected = module.validation_step(batch, 0)
        torch.testing.assert_close(chained.evaluate("validation_step", batch), expected)
    unpadded = recorded(module, (x, torch.zeros(3, 5, dtype=torch.bool)), hook="validation_step")
    assert {"has no padding" in reason for reason in unpadded.uncuttable.values()} == {True}
