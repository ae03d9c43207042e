"""Torch's own samples of each of its operators, numbers and empty and sparse tensors among them: none of the trace's rules fails at one.

A rule that fails keeps the whole step from being traced, whose memory is a guess then.
"""

from __future__ import annotations

import sys
import traceback
from functools import cache
from itertools import islice
from types import SimpleNamespace
from typing import Any
from unittest import TestCase

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lightning_autopar.memory.trace.trace import trace

#: Slices of the operators, and how many samples of each are tried.
SLICES, MOST = 12, 5
TYPES = (torch.float32, torch.int64, torch.bool)
#: Operators of which a rule has failed, or might as theirs did.
FAILED = ("sum", "mean", "nn.functional.rms_norm", "sparse.sampled_addmm", "nn.functional.layer_norm", "softmax")


@cache
def operators() -> list[Any]:
    """Torch's table of its operators. Its module wants a package for tests of torch's own, which this doesn't use."""
    sys.modules.setdefault("expecttest", SimpleNamespace(TestCase=TestCase))  # type: ignore[arg-type]
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


class CallsAll(pl.LightningModule):
    """Calls operators on their samples, and differentiates. Torch may have no fakes for one, or no gradient: that isn't asked here."""

    def __init__(self, chosen: list[Any]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.chosen = chosen
        self.calls = 0
        self.failed: dict[str, str] = {}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for operator in self.chosen:
            for dtype in operator.dtypes.intersection(TYPES):
                for sample in islice(operator.sample_inputs("cpu", dtype), MOST):
                    for differentiated in {False, dtype.is_floating_point}:
                        self.call(operator, sample, differentiated)
        return self.scale * batch.sum()

    def call(self, operator: Any, sample: Any, differentiated: bool) -> None:
        given = []

        def fresh(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            value = value.detach().clone()
            if differentiated and value.is_floating_point():
                given.append(value.requires_grad_())
            return value

        first, args, kwargs = tree_map(fresh, (sample.input, sample.args, sample.kwargs))
        self.calls += 1
        try:
            results = [each for each in tree_leaves(operator(first, *args, **kwargs)) if isinstance(each, Tensor) and each.requires_grad]
            if given and results:
                torch.autograd.grad(sum(each.sum() for each in results), given, allow_unused=True)
        except Exception as error:  # whatever torch raises; what matters is where
            at = traceback.extract_tb(error.__traceback__)[-1]
            if "/lightning_autopar/" in at.filename:
                self.failed[operator.name] = f"{type(error).__name__}: {error}, at {at.filename}:{at.lineno}"


def failed(chosen: list[Any], target: Any) -> dict[str, str]:
    module = CallsAll(chosen)
    seen: list[CallsAll] = []
    step = CallsAll.training_step

    def watched(self: CallsAll, batch: Tensor, batch_idx: int) -> Tensor:
        seen.append(self)  # the trace runs a copy
        return step(self, batch, batch_idx)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CallsAll, "training_step", watched)
        footprint = trace(module, None, torch.ones(2, 2), target=target)
    assert footprint.traced
    assert sum(each.calls for each in seen) >= len(chosen)
    return {name: words for each in seen for name, words in each.failed.items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("target", ["cpu", "sm90"])
def test_rules_that_had_failed_know_torchs_samples(target: str) -> None:
    assert failed([operator for operator in operators() if operator.name in FAILED], target) == {}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("target", ["cpu", "sm90"])
@pytest.mark.parametrize("place", range(SLICES))
def test_the_rules_know_torchs_samples_of_all_operators(place: int, target: str) -> None:
    assert failed(operators()[place::SLICES], target) == {}
