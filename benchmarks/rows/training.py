"""LightningModules that train a published row's model. Knows models and losses; no file of rows."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rows.fused import cross_entropy
from rows.optimizers import make_optimizer
from rows.shape import Shape
from rows.transformer import Transformer


class _Trained(pl.LightningModule):
    """What all have in common.

    Args:
        net: the model.
        optimizer: its name.
        in_backward: each parameter is updated as soon as its gradient is there, which is then freed.
    """

    def __init__(self, net: nn.Module, optimizer: str, in_backward: bool) -> None:
        super().__init__()
        self.net = net
        self._optimizer = optimizer

    def configure_optimizers(self) -> Any:
        return make_optimizer(self._optimizer, [parameter for parameter in self.parameters() if parameter.requires_grad])


class Published(_Trained):
    """Trains a transformer as the row says.

    Args:
        shape: of the model.
        optimizer: its name.
        in_backward: whether the optimizer's step is part of backward.
    """

    def __init__(self, shape: Shape, optimizer: str, in_backward: bool = False) -> None:
        super().__init__(Transformer(shape), optimizer, in_backward)
        self.shape = shape

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        shape, net = self.shape, self.net
        assert isinstance(net, Transformer)
        if shape.kind == "encoder" and shape.task == "span":
            starts, ends = net(inputs).split(1, dim=-1)
            return (F.cross_entropy(starts.squeeze(-1), targets) + F.cross_entropy(ends.squeeze(-1), targets)) / 2
        if shape.kind in ("encoder", "vit") and shape.task != "masked":
            return F.cross_entropy(net(inputs), targets)
        if shape.chunks > 1:
            return self._chunked(net.norm(net.hidden(inputs)), targets)
        logits = net(inputs)
        targets = targets[:, : logits.shape[1]]
        if shape.softcap:
            logits = torch.tanh(logits / 30.0) * 30.0
        if shape.wide_output:
            logits = logits.float()
        output = logits
        if shape.logits == "shifted":
            logits, targets = logits[:, :-1].contiguous(), targets[:, 1:].contiguous()
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), shape.loss, shape.keeps_scores)
        if shape.holds_output and loss.grad_fn is not None:
            loss.grad_fn.metadata["output"] = output  # type: ignore[index]  # is there as long as the loss is
        return loss

    def _chunked(self, h: Tensor, targets: Tensor) -> Tensor:
        """The loss piece by piece of the sequence."""
        shape, net = self.shape, self.net
        assert isinstance(net, Transformer)
        pieces = h.chunk(shape.chunks, 1)
        asked = targets.chunk(shape.chunks, 1)
        if shape.logits == "one chunk":
            made = (net.head(piece) for piece in pieces)
        else:
            made = iter([self._capped(net.head(piece)) for piece in pieces])
        losses = []
        for logits, target in zip(made, asked, strict=True):
            losses.append(cross_entropy(logits.flatten(0, 1), target.flatten(), shape.loss, shape.keeps_scores))
        return torch.stack(losses).mean()

    def _capped(self, logits: Tensor) -> Tensor:
        capped = torch.tanh(logits / 30.0) * 30.0 if self.shape.softcap else logits
        return capped.float() if self.shape.wide_output else capped


class Pictures(_Trained):
    """Trains a model of pictures: classes, or a picture of the same size."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        y = self.net(inputs)
        if y.dim() == 4:
            return F.binary_cross_entropy_with_logits(y, torch.zeros_like(y))
        return F.cross_entropy(y, targets)


class Numbers(_Trained):
    """Trains a model of numbers: the sum of what comes out."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        y: Tensor = self.net(batch[0])
        return y.sum()
