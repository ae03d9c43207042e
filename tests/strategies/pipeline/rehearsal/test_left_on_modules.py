"""What a step leaves on a module, and which hooks may read it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

from lightning_autopar.exact.absent.absent_tensor import absent_like
from lightning_autopar.strategies.pipeline.rehearsal.difference import leftovers_apart


class Keeps(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.tool = nn.Identity()
        self.mean = MeanMetric()
        self.outputs: list[Any] = []
        self.seen: dict[str, Any] = {"count": 0}

    def on_train_epoch_end(self) -> None:
        """Might read any of it."""


class Careless(Keeps):
    on_train_epoch_end = pl.LightningModule.on_train_epoch_end


def apart(change: Callable[[Any], None], *, also: Callable[[Any], None] | None = None, kind: type[Keeps] = Keeps) -> str | tuple[str, ...]:
    """Whether a change in the whole module, and perhaps in the last of two stages, makes these come apart."""
    before = kind()
    whole, first, last = (copy.deepcopy(before) for _ in range(3))
    change(whole)
    (also or change)(last)
    if also is not None:
        change(first)
    return leftovers_apart(before, whole, [first, last], ["blocks.0", "blocks.1"])


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda module: module.seen.update(count=1), "seen"),
        (lambda module: setattr(module.tool, "last", 1.0), "tool.last"),
    ],
)
def test_what_the_last_stage_alone_has(change: Callable[[Any], None], name: str) -> None:
    assert apart(change) == (
        f"the step keeps {name!r} on the module, which only some of the stages would have when on_train_epoch_end may read it"
    )
    assert apart(change, kind=Careless) == (), "nobody reads it"
    assert apart(change, also=change) == (), "all stages have it"


def test_what_the_last_stage_alone_appended_can_be_handed_on() -> None:
    value = torch.ones(1)
    before, change = Keeps(), lambda module: module.outputs.append(value)
    whole, first, last = (copy.deepcopy(before) for _ in range(3))
    for module in (whole, last):
        change(module)
    first.outputs.append(absent_like(value, "a value"))
    assert leftovers_apart(before, whole, [first, last]) == ("outputs",)


def test_holes_are_not_what_the_whole_module_has() -> None:
    value = torch.ones(1)
    found = apart(lambda module: module.outputs.append(value), also=lambda module: module.outputs.append(absent_like(value, "a value")))
    assert isinstance(found, str)
    assert "'outputs'" in found


def test_blocks_and_metrics_are_somebody_elses() -> None:
    def change(module: Any) -> None:
        module.blocks[1].last = 1.0
        module.mean.update(torch.ones(1))

    assert apart(change) == ()
