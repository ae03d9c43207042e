"""What a step costs the host: how many functions of Python it calls. The counts are the same on every machine, however busy it is."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import lightning_autopar
from tests.strategies.fitted import BLOCKS, Fitted, fit, numbers, plan

_OURS = str(Path(lightning_autopar.__file__).parent)
_FIRST, _STEPS = 8, 3  # after the steps that are measured


class Counted(Fitted):
    """Counts the calls of a step on rank 0."""

    def __init__(self, out: Path, idle: int) -> None:
        super().__init__()
        self.out, self.found = out, [0, 0]
        self.idle = nn.ModuleList(nn.Identity() for _ in range(idle))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == _FIRST and self.global_rank == 0:
            sys.setprofile(self._count)
        elif batch_idx == _FIRST + _STEPS:
            sys.setprofile(None)

    def _count(self, frame: Any, event: str, _: Any) -> None:
        if event == "call":
            self.found[0] += 1
            self.found[1] += frame.f_code.co_filename.startswith(_OURS)

    def on_train_end(self) -> None:
        if self.global_rank == 0:
            self.out.write_text(json.dumps([number / _STEPS for number in self.found]))


def _calls(under: Any, folder: Path, idle: int = 0) -> tuple[float, float]:
    """A step's calls: all, and those of this package's functions."""
    fit(lambda: Counted(folder / "calls", idle), numbers(8 * (_FIRST + _STEPS + 2)), under, max_epochs=1)
    every, ours = json.loads((folder / "calls").read_text())
    return every, ours


def test_one_device_adds_few_calls(tmp_path: Path) -> None:
    by_hand, _ = _calls(None, tmp_path)
    every, ours = _calls(plan("single", ranks=1), tmp_path)
    assert ours <= 100
    assert every - by_hand <= 180


@pytest.mark.parametrize(("under", "most"), [(plan("ddp"), 320), (plan("fsdp", shard=BLOCKS), 700)], ids=["ddp", "fsdp"])
def test_a_step_walks_through_no_modules(under: Any, most: int, tmp_path: Path) -> None:
    """Modules that a step doesn't call cost it no call."""
    few, ours = _calls(under, tmp_path)
    many, _ = _calls(under, tmp_path, idle=300)
    assert ours <= most
    assert abs(many - few) < 100
