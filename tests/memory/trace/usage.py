"""What users do in a LightningModule's step and hooks: small modules, each with what tracing it must come to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Usage:
    """A pattern of users' code.

    Args:
        module: builds the module.
        batch: builds the batch.
        trainer: arguments of the Trainer.
        within: how far the predicted peak may be from the real one, as a share; None where the run can't be measured this way.
        traced: False where fakes don't do, and the step is run for real.
        flags: a pattern that one of the assumptions must match; None where there must be no assumption.
    """

    module: Callable[[], pl.LightningModule]
    batch: Callable[[], Any]
    trainer: dict[str, Any] = field(default_factory=dict)
    within: float | None = 0.02
    traced: bool = True
    flags: str | None = None


#: By name.
USAGES: dict[str, Usage] = {}


def vectors(rows: int = 128, width: int = 64) -> Any:
    return [torch.randn(rows, width), torch.randint(0, 10, (rows,))]


def usage(name: str, batch: Callable[[], Any] = vectors, **expected: Any) -> Callable[[type], type]:
    """Put a module into the table; its class takes no arguments."""

    def add(module: Any) -> Any:
        assert name not in USAGES
        USAGES[name] = Usage(module=module, batch=batch, **expected)
        return module

    return add


class Classifier(pl.LightningModule):
    """What the modules here have in common: three layers, AdamW."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = net or nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3)
