"""A step in stages, chained by hand in one process, beside the whole one: each stage on a copy of its own, as a worker would have it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_autopar.memory.trace.find_blocks import find_blocks
from lightning_autopar.strategies.pipeline.stages.cut_tensors import Staging, StepRecording
from lightning_autopar.strategies.pipeline.stages.module_state import StageParameters, take_stages
from lightning_autopar.strategies.pipeline.stages.possible_cuts import record
from lightning_autopar.strategies.pipeline.stages.stage_module import StageModule

CPU = torch.device("cpu")


class Block(nn.Module):
    """A residual layer."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Any:
        return x + torch.tanh(self.layer(x))


class Stacked(pl.LightningModule):
    """A layer, four blocks, a head; subclasses change how they are called."""

    def __init__(self, block: Callable[[], nn.Module] = Block, count: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(block() for _ in range(count))
        self.head = nn.Linear(8, 1)

    def run(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.mse_loss(self.run(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.run(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([parameter for parameter in self.parameters() if parameter.requires_grad], 0.1)


def numbers(rows: int = 4, *more: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(rows, *more, 4, generator=generator), torch.randn(rows, *more, 1, generator=generator)


def blocks_of(module: nn.Module) -> list[str]:
    return list(find_blocks(module))


def recorded(module: Any, batch: Any = None, *, hook: str = "training_step", **options: Any) -> StepRecording:
    batch = numbers() if batch is None else batch
    return record(module, None, hook, batch, options.pop("blocks", None) or blocks_of(module), **options)


@dataclass
class Stage:
    """One stage's copy."""

    module: Any
    owned: StageParameters
    replay: StageModule


class Chained:
    """All stages, one after the other.

    Args:
        module: whole; it is copied.
        staging: recordings of its hooks.
        cuts: where to cut.
    """

    def __init__(self, module: Any, staging: Staging, cuts: Sequence[str]) -> None:
        self.batch: Any = None
        self.logged: list[dict[str, Any]] = [{} for _ in range(len(cuts) + 1)]
        self.stages = [self._stage(copy.deepcopy(module), staging, cuts, index) for index in range(len(cuts) + 1)]

    def _stage(self, module: Any, staging: Staging, cuts: Sequence[str], index: int) -> Stage:
        owned = take_stages(module, staging, cuts, [index], CPU)

        def log(name: str, value: Any, *_: Any, **__: Any) -> None:
            if replay.owns_now:
                self.logged[index][name] = float(torch.as_tensor(value).detach())

        module.__dict__["log"] = log

        def call(hook: str, chunk: int) -> Any:
            return getattr(module, hook)(fresh(self.batch[chunk]), 0)

        replay = StageModule(module, staging, cuts, index, call)
        return Stage(module, owned, replay)

    def train(self, batches: Sequence[Any]) -> list[float]:
        """Forward and backward of each micro-batch; the loss is the mean over them. Returns their losses."""
        self.batch = batches
        return [self._chunk(chunk, 1 / len(batches)) for chunk in range(len(batches))]

    def _chunk(self, chunk: int, weight: float) -> float:
        received: tuple[Tensor, ...] = ()
        passed = []
        for stage in self.stages:
            stage.replay.hook, stage.replay.chunk = "training_step", chunk
            given = stage.replay(*received)
            given = given if isinstance(given, tuple) else (given,)
            assert all(tensor.is_contiguous() and type(tensor) in (Tensor, nn.Parameter) for tensor in given)
            passed.append((received, given))
            received = tuple(tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in given)
        loss = passed[-1][1][0]
        gradients: tuple[Tensor | None, ...] = (torch.full_like(loss, weight),)
        for received, given in reversed(passed):
            pairs = [(tensor, its) for tensor, its in zip(given, gradients, strict=True) if tensor.requires_grad and its is not None]
            if pairs:
                torch.autograd.backward([tensor for tensor, _ in pairs], [its for _, its in pairs])
            gradients = tuple(tensor.grad for tensor in received)
        return float(loss.detach())

    def evaluate(self, hook: str, batch: Any) -> Any:
        """What the hook returns, without gradients."""
        self.batch = [batch]
        received: tuple[Tensor, ...] = ()
        with torch.no_grad():
            for stage in self.stages:
                stage.replay.hook, stage.replay.chunk = hook, 0
                given = stage.replay(*received)
                received = given if isinstance(given, tuple) else (given,)
        return self.stages[-1].replay.outputs.pop(0)

    def gradients(self) -> dict[str, Tensor]:
        """Sums over the stages, by name."""
        found: dict[str, Tensor] = {}
        for stage in self.stages:
            for name, parameter in stage.module.named_parameters():
                if parameter.grad is not None:
                    found[name] = found[name] + parameter.grad if name in found else parameter.grad
        return found


def fresh(batch: Any) -> Any:
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch)


def cuts_of(recording: StepRecording, first: int = 1) -> list[str]:
    """All blocks that a stage may begin with, but those before ``first``."""
    return [block for block in recording.blocks[first:] if block not in recording.uncuttable]


def assert_parity(
    module: Any,
    batch: Any = None,
    *,
    cuts: Sequence[str] | None = None,
    batches: Sequence[Any] | None = None,
    tolerance: float = 1e-6,
    **options: Any,
) -> Chained:
    """Losses and gradients in stages, by default cut everywhere, are the whole module's; on two micro-batches, the second is smaller."""
    batch = numbers() if batch is None else batch
    recording = recorded(copy.deepcopy(module), batch, **options)
    chosen = cuts_of(recording) if cuts is None else list(cuts)
    assert chosen, f"it can't be cut: {recording.uncuttable}"
    staging = Staging(hooks={"training_step": recording})
    batches = (
        [batch, tree_map(lambda leaf: leaf[:-1] if isinstance(leaf, Tensor) and leaf.dim() else leaf, batch)]
        if batches is None
        else batches
    )
    whole = copy.deepcopy(module)
    whole.__dict__["log"] = lambda *_, **__: None
    expected = []
    for each in batches:
        output = whole.training_step(fresh(each), 0)
        loss = output["loss"] if isinstance(output, dict) else output
        (loss / len(batches)).backward()
        expected.append(float(loss.detach()))
    chained = Chained(module, staging, chosen)
    losses = chained.train(batches)
    torch.testing.assert_close(losses, expected, rtol=tolerance, atol=tolerance)
    theirs = {name: parameter.grad for name, parameter in whole.named_parameters() if parameter.grad is not None}
    torch.testing.assert_close(chained.gradients(), theirs, rtol=tolerance, atol=tolerance)
    return chained
