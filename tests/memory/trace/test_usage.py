"""Whatever a LightningModule does is traced, to the percent, or falls back with a flag; and it is left as it was."""

from __future__ import annotations

import random
import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

import tests.memory.trace.usage_parts
import tests.memory.trace.usage_steps  # noqa: F401
from lightning_autopar.memory.trace.first_batch import tensors_of
from lightning_autopar.memory.trace.trace import trace
from tests.memory.measured import Copies, make_trainer, peak_bytes, real_peak_bytes
from tests.memory.trace.usage import USAGES

pytestmark = [pytest.mark.filterwarnings("ignore")]


def contents(module: nn.Module) -> dict[str, Any]:
    """Everything in a module that could change: what its tensors hold, who they are, and its attributes' names."""
    found: dict[str, Any] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        held = None if is_lazy(tensor) else tensor.detach().clone()
        found[name] = (id(tensor), type(tensor), tensor.requires_grad, held, tensor.grad)
    for name, child in module.named_modules():
        found[f"{name}."] = (id(child), child.training, sorted(set(vars(child)) - {"_compiled_call_impl"}))
        found[f"{name}.hooks"] = [len(getattr(child, kind, ())) for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")]
    return found


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        left, right = (tensor.to_dense() if tensor.layout is not torch.strided else tensor for tensor in (left, right))
        return left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return np.array_equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(same(*pair) for pair in zip(left, right, strict=True))
    return bool(left == right)


@pytest.mark.parametrize("name", USAGES)
def test_usage(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    usage = USAGES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module, batch, trainer = usage.module(), usage.batch(), make_trainer(**usage.trainer)
    before, attributes = contents(module), dict(vars(trainer))
    values = [tensor.clone() for tensor in tensors_of(batch)]
    generator = vars(module).get("generator")
    drawn = None if not isinstance(generator, torch.Generator) else generator.get_state()
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    footprint = trace(module, trainer, batch)

    assert same(states, (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()))
    assert drawn is None or torch.equal(drawn, generator.get_state())
    assert same(before, contents(module))
    assert same(values, tensors_of(batch))
    assert vars(trainer) == attributes
    assert list(tmp_path.rglob("*")) == []

    assert footprint.traced is usage.traced, footprint.assumptions
    if usage.flags is None:
        assert footprint.assumptions == ()
        assert footprint.margin == 0
    else:
        assert any(re.search(usage.flags, assumption) for assumption in footprint.assumptions), footprint.assumptions
    if not usage.traced:
        assert footprint.margin > 0
    if usage.within is not None:
        real = real_peak_bytes(module, Copies(batch), **usage.trainer)
        assert peak_bytes(footprint) == pytest.approx(real, rel=usage.within)
