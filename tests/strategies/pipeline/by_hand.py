"""A module in stages without anything that runs it: each rank keeps some parameters, the rest are absent tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_autopar.exact.absent.absent_tensor import hole_parameter
from lightning_autopar.strategies.pipeline.weights.gathered_weights import Pipeline

CPU = torch.device("cpu")


class Net(nn.Module):
    """An embedding, three blocks, and a head that is tied to the embedding; one frozen, one unused parameter and some buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(6))
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(6, 11, bias=True)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.zeros(3))
        self.register_buffer("passing", torch.arange(3.0), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.frozen(self.embed(tokens))
        for block in self.blocks:
            x = block(x) * self.scale
        return self.head(x)


#: What each of three ranks has: the tied weight first and last, the scale everywhere.
KEPT = (
    ("embed", "head.weight", "frozen", "blocks.0", "scale", "unused", "passing"),
    ("blocks.1", "scale"),
    ("blocks.2", "head", "embed", "scale"),
)


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def hollow(module: nn.Module, kept: Sequence[str], *, device: torch.device | None = None) -> None:
    """Make absent tensors of all parameters and buffers that aren't under these names; they say that they are on ``device``."""
    absent_tensors: dict[int, Tensor] = {}
    for path, child in module.named_modules():
        for slots in (child._parameters, child._buffers):
            for key, tensor in slots.items():
                name = f"{path}.{key}".lstrip(".")
                if tensor is None or any(name == each or name.startswith(f"{each}.") for each in kept):
                    continue
                if id(tensor) not in absent_tensors:
                    absent_tensors[id(tensor)] = hole_parameter(tensor, f"{name!r}", device=device)
                slots[key] = absent_tensors[id(tensor)]  # type: ignore[assignment]


def pipeline() -> Pipeline:
    return Pipeline.of(None, CPU)
