"""A member of the pipeline's zoo: a LightningModule as somebody would write it who never thought of stages, and its batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from benchmarks.memory.job import classification, own_loss

#: Samples in a batch.
ROWS = 8


@dataclass(frozen=True, kw_only=True)
class Member:
    """One architecture.

    Args:
        name: unique.
        family: who wrote it: ``"Hugging Face"`` or ``"by hand"``.
        build: makes the module, always with the same weights.
        batch: makes a batch of ``ROWS`` samples, always the same for a number.
        mean: whether the loss is a mean over the samples. Where it isn't, any tool that runs a batch in parts computes another loss,
            and what stages give is compared with one process that works it off in the same parts.
        quick: part of the small set.
    """

    name: str
    family: str
    build: Callable[[], pl.LightningModule]
    batch: Callable[[int], Any]
    mean: bool = True
    quick: bool = False


class Learner(pl.LightningModule):
    """A network with a loss of network and batch."""

    def __init__(self, net: nn.Module, loss: Callable[[nn.Module, Any], Tensor]) -> None:
        super().__init__()
        self.net = net
        self.loss = loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(self.net, batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(self.net, batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def seeded(make: Callable[[], Any], seed: int) -> Any:
    """What a function makes from that seed, with the generator afterwards as before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def by_hand(
    name: str,
    net: Callable[[], nn.Module],
    batch: Callable[[], Any],
    loss: Callable[[nn.Module, Any], Tensor] = classification,
    *,
    mean: bool = True,
    quick: bool = False,
) -> Member:
    """A member of plain torch."""
    return Member(
        name=name,
        family="by hand",
        build=lambda: seeded(lambda: Learner(net(), loss), 1),
        batch=lambda number: seeded(batch, 100 + number),
        mean=mean,
        quick=quick,
    )


def hugging_face(
    name: str, model: str, config: str, batch: Callable[[], Any], *, mean: bool = True, quick: bool = False, **settings: Any
) -> Member:
    """A model of that class with that configuration, in training mode; nothing is downloaded."""

    def build() -> pl.LightningModule:
        import transformers

        settled = getattr(transformers, config)(**settings)
        if hasattr(settled, "use_cache"):
            settled.use_cache = False
        net: nn.Module = getattr(transformers, model)(settled)
        return Learner(net.train(), own_loss)

    return Member(
        name=name,
        family="Hugging Face",
        build=lambda: seeded(build, 1),
        batch=lambda number: seeded(batch, 100 + number),
        mean=mean,
        quick=quick,
    )
