"""The same on GPUs, where a peer's host runs ahead and a collective waits for a rank that has left."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_autopar import AutoParallelStrategy
from tests.fresh import fresh
from tests.strategies.base.out_of_memory.test_rerun import Short
from tests.strategies.fitted import QUIET, numbers

pytestmark = [pytest.mark.gpu, pytest.mark.two_gpus]


def _fit(make: Any, root: Path, devices: int) -> tuple[dict[str, Any], list[int], int]:
    pl.seed_everything(3, verbose=False)
    module = make()
    strategy: Any = "auto" if devices == 1 else AutoParallelStrategy(calibrate="off", allow=["fsdp"])
    trainer = pl.Trainer(
        accelerator="gpu", devices=devices, strategy=strategy, max_epochs=2, log_every_n_steps=1, default_root_dir=root, **QUIET
    )
    trainer.fit(module, DataLoader(numbers(), batch_size=8, shuffle=True), DataLoader(numbers(), batch_size=8))
    parts = 1 if devices == 1 else strategy.plan.micro_batches
    return {name: value.cpu() for name, value in module.state_dict().items()}, module.begun, parts


@pytest.mark.parametrize(("point", "layer", "rank", "batch"), [("forward", 3, 1, 0), ("backward", 5, 0, 1)])
def test_sharded_ranks_leave_the_step_together(point: str, layer: int, rank: int, batch: int, tmp_path: Path) -> None:
    make = partial(Short, point, layer, rank, {batch: 2})
    ours, begun, parts = fresh(_fit, make, tmp_path, 2)
    theirs, plain, _ = fresh(_fit, make, tmp_path, 1)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert begun == plain, "no batch begins twice"
    assert parts == 2
