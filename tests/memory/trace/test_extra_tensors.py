"""Tensors that hang on a module's attributes."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule

from lightning_autopar.memory.trace.extra_tensors import in_attributes


class Irrep(tuple[Any, ...]):
    """As e3nn has it."""

    def __len__(self) -> int:
        raise NotImplementedError


def test_a_tuple_needs_no_length() -> None:
    module = LightningModule()
    module.held = [Irrep((1, torch.ones(3)))]
    assert [tensor.tolist() for tensor in in_attributes(module)] == [[1.0, 1.0, 1.0]]
