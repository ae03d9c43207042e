"""The same on GPUs, where a peer's host runs ahead and a collective waits for a rank that has left."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_autopar import AutoParallelStrategy, Plan
from tests.fresh import fresh
from tests.strategies.base.out_of_memory.test_rerun import Short
from tests.strategies.fitted import QUIET, numbers
from tests.strategies.test_smaller_plans import Elsewhere, fails

pytestmark = [pytest.mark.gpu, pytest.mark.two_gpus, pytest.mark.timeout(240)]


def _fit(make: Any, root: Path, devices: int, *, under: Plan | None = None, allow: Any = ("fsdp",), **options: Any) -> tuple[Any, ...]:
    pl.seed_everything(3, verbose=False)
    module = make()
    strategy: Any = "auto" if devices == 1 else AutoParallelStrategy(calibrate="off", allow=allow, plan=under)
    trainer = pl.Trainer(
        accelerator="gpu", devices=devices, strategy=strategy, max_epochs=2, log_every_n_steps=1, default_root_dir=root, **QUIET, **options
    )
    trainer.fit(module, DataLoader(numbers(), batch_size=8, shuffle=True), DataLoader(numbers(), batch_size=8))
    found = None if devices == 1 else strategy.plan
    return {name: value.cpu() for name, value in module.state_dict().items()}, getattr(module, "begun", None), found


@pytest.mark.parametrize(("point", "layer", "rank", "batch"), [("forward", 3, 1, 0), ("backward", 5, 0, 1)])
def test_sharded_ranks_leave_the_step_together(point: str, layer: int, rank: int, batch: int, tmp_path: Path) -> None:
    make = partial(Short, point, layer, rank, {batch: 2})
    ours, begun, found = fresh(_fit, make, tmp_path, 2)
    theirs, plain, _ = fresh(_fit, make, tmp_path, 1)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert begun == plain, "no batch begins twice"
    assert found.micro_batches == 2


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("place", ["optimizer", "validation", "window", "manual"])
def test_where_the_batch_cant_be_run_again_the_run_goes_back(place: str, rank: int, tmp_path: Path) -> None:
    """From DDP, or a window's FSDP2; at the second epoch's beginning, before there is a snapshot."""
    make, options = partial(Elsewhere, place, 4, rank), {"accumulate_grad_batches": 2 if place == "window" else 1}
    ours, _, found = fresh(_fit, make, tmp_path, 2, allow=["fsdp"] if place == "window" else ["ddp", "fsdp"], **options)
    theirs, _, _ = fresh(_fit, make, tmp_path, 1, **options)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert not fails(place, found)
