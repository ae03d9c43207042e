"""A job of the memory benchmarks: a LightningModule, its batch, and the Trainer's settings. Knows no single architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One model to train for a few steps.

    Args:
        name: unique.
        family: ``"language"``, ``"vision"``, ``"sequence"``, …; groups the table.
        build: makes the module; called in a process of its own.
        batch: makes a batch as the module's step gets it.
        trainer: further arguments of the Trainer.
        quick: part of the small set.
    """

    name: str
    family: str
    build: Callable[[], pl.LightningModule]
    batch: Callable[[], Any]
    trainer: Mapping[str, Any] = field(default_factory=dict)
    quick: bool = False

    @property
    def precision(self) -> str:
        return str(self.trainer.get("precision", "32-true"))


class Learner(pl.LightningModule):
    """Trains a network with a loss and one optimizer: what most users write.

    Args:
        net: the network.
        loss: of network and batch.
        optimizer: of the trainable parameters.
    """

    def __init__(self, net: nn.Module, loss: Callable[[nn.Module, Any], Tensor], optimizer: MakeOptimizer) -> None:
        super().__init__()
        self.net = net
        self._loss = loss
        self._optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._loss(self.net, batch)
        self.log("loss", loss, batch_size=1)
        return loss

    def configure_optimizers(self) -> Any:
        return self._optimizer([parameter for parameter in self.parameters() if parameter.requires_grad])


class Batches(Dataset[Any]):
    """The same batch again and again, each time in memory of its own."""

    def __init__(self, batch: Any, length: int) -> None:
        self.batch = batch
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, self.batch)


def hugging_face(model: str, config: str, *, checkpointing: bool = False, **settings: Any) -> nn.Module:
    """A model of that class with that configuration, in training mode; nothing is downloaded.

    Args:
        model: class in transformers.
        config: its configuration's class.
        checkpointing: by the model's own means.
    """
    import transformers

    settled = getattr(transformers, config)(**settings)
    if hasattr(settled, "use_cache"):
        settled.use_cache = False
    net: nn.Module = getattr(transformers, model)(settled)
    net.train()
    if checkpointing:
        net.gradient_checkpointing_enable({"use_reentrant": False})
    return net


# -- optimizers and losses that many jobs share ----------------------------------------------------------------------------------------


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-4)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 1e-4)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 1e-3)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 1e-3, momentum=0.9, weight_decay=1e-4)


def own_loss(net: nn.Module, batch: Any) -> Tensor:
    """Hugging Face's models bring their loss."""
    loss: Tensor = net(**batch).loss
    return loss


def classification(net: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(net(inputs), targets)


def regression(net: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(net(inputs), targets)
