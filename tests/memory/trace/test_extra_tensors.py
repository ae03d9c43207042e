"""Tensors that hang on a module's attributes."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn

from lightning_autopar.memory.trace.extra_tensors import in_attributes, in_callbacks


class Irrep(tuple[Any, ...]):
    """As e3nn has it."""

    def __len__(self) -> int:
        raise NotImplementedError


def test_a_tuple_needs_no_length() -> None:
    module = LightningModule()
    module.held = [Irrep((1, torch.ones(3)))]
    assert [tensor.tolist() for tensor in in_attributes(module)] == [[1.0, 1.0, 1.0]]


def test_parameters_of_lazy_modules_lie_nowhere_yet() -> None:
    module, callback = LightningModule(), Callback()
    module.layer, callback.held = nn.LazyLinear(2), nn.Linear(2, 3, bias=False)  # type: ignore[attr-defined]
    assert [tuple(tensor.shape) for tensor in in_callbacks([callback], module)] == [(3, 2)]
