"""The losses: of what the network gives (samples × OUTPUTS) and targets (classes; samples × OUTPUTS numbers made of them)."""

from __future__ import annotations

import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F

from tests.fuzz.nets import OUTPUTS


class Loss(nn.Module):
    """A loss by its kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.metric = torchmetrics.MeanSquaredError() if kind == "metric" else None

    def forward(self, given: Tensor, classes: Tensor) -> Tensor:
        wanted = F.one_hot(classes, OUTPUTS).to(given.dtype)
        match self.kind:
            case "classes":
                return F.cross_entropy(given, classes)
            case "smoothed":
                return F.cross_entropy(given, classes, label_smoothing=0.1)
            case "huber":
                return F.huber_loss(given, wanted)
            case "summed":
                return (given - wanted).square().sum() / 16
            case "masked":  # a mean over the samples that count
                counts = (classes != 0).to(given.dtype)
                return (F.cross_entropy(given, classes, reduction="none") * counts).sum() / counts.sum().clamp(min=1)
            case "pairs":
                unit = F.normalize(given, dim=1)
                return (unit @ unit.T - (classes[:, None] == classes[None]).to(given.dtype)).square().mean()
            case "metric":
                assert self.metric is not None
                value: Tensor = self.metric(given.contiguous(), wanted)
                return value
            case "likelihood":
                mean, spread = given.chunk(2, dim=1)
                return -torch.distributions.Normal(mean, F.softplus(spread) + 0.1).log_prob(wanted[:, :2]).mean()
            case _:
                return F.mse_loss(given, wanted)
