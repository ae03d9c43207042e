"""The same on GPUs, where a peer's host runs ahead and a collective waits for a rank that has left."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_autopar import AutoParallelStrategy, Plan
from lightning_autopar.devices.discover import probe
from lightning_autopar.strategies import out_of_memory_restart
from lightning_autopar.strategies.elastic import snapshot_schedule
from tests.fresh import fresh
from tests.strategies.base.out_of_memory.test_rerun import Short
from tests.strategies.fitted import QUIET, numbers
from tests.strategies.test_out_of_memory_restart import Elsewhere

pytestmark = [pytest.mark.gpu, pytest.mark.two_gpus]


#: FSDP2 can't run this module under manual optimization.
PLACES = [
    (engine, place, rank)
    for engine, places in (("ddp", ("optimizer", "validation", "manual")), ("fsdp", ("optimizer", "validation", "window")))
    for place in places
    for rank in (0, 1)
]


def on_gpus(ranks: int, engine: Any, **more: Any) -> Plan:
    """A plan for the first GPUs."""
    devices = tuple(device.id for device in probe(accelerator="cuda").devices[:ranks])
    sharded = {"reshard_after_forward": True, "shard": ("net.2", "net.4")} if engine == "fsdp" else {}
    return Plan(engine=engine, devices=devices, **sharded, **more)


def _fit(
    make: Any, root: Path, devices: int, *, under: Callable[[int], Plan] | None = None, soon: bool = False, **options: Any
) -> tuple[Any, ...]:
    pl.seed_everything(3, verbose=False)
    module, pinned = make(), under and under(devices)
    strategy: Any = "auto"
    if devices > 1 or pinned:
        strategy = AutoParallelStrategy(calibrate="off", allow=[pinned.engine] if pinned else ["fsdp"], plan=pinned)
    trainer = pl.Trainer(
        accelerator="gpu",
        devices=devices,
        strategy=strategy,
        log_every_n_steps=1,
        default_root_dir=root,
        **{"max_epochs": 2, **QUIET, **options},
    )
    if soon:  # this process ends after it
        snapshot_schedule.SAVE_SECONDS, out_of_memory_restart._TIGHT_SHARE = 0.0, 0.0
    trainer.fit(module, DataLoader(numbers(), batch_size=8, shuffle=True), DataLoader(numbers(), batch_size=8))
    found = None if strategy == "auto" else strategy.plan
    return {name: value.cpu() for name, value in module.state_dict().items()}, getattr(module, "begun", None), found


@pytest.mark.parametrize(("point", "layer", "rank", "batch"), [("forward", 3, 1, 0), ("backward", 5, 0, 1)])
def test_sharded_ranks_leave_the_step_together(point: str, layer: int, rank: int, batch: int, tmp_path: Path) -> None:
    make = partial(Short, point, layer, rank, {batch: 2})
    ours, begun, found = fresh(_fit, make, tmp_path, 2)
    theirs, plain, _ = fresh(_fit, make, tmp_path, 1)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert begun == plain, "no batch begins twice"
    assert found.micro_batches == 2


def _goes_back(
    place: str, rank: int, under: Callable[[int], Plan], devices: int, root: Path, *, snapshot: bool = False, **options: Any
) -> None:
    step = None if snapshot else 4 if place == "validation" else 2
    make, once = partial(Elsewhere, place, step, rank), root / "once"
    options = {"accumulate_grad_batches": 2 if place == "window" else 1, "max_epochs": 4, **options}
    ours, _, _ = fresh(partial(_fit, under=under, soon=snapshot, **options), partial(make, once), root, devices)
    theirs, _, _ = fresh(partial(_fit, **options), make, root, 1)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert once.exists(), "it has run out"


@pytest.mark.parametrize(
    ("engine", "place", "rank"),
    [pytest.param(*each, marks=[] if each == ("fsdp", "optimizer", 0) else pytest.mark.slow) for each in PLACES],
)
def test_where_the_batch_cant_be_run_again_the_run_goes_back(engine: str, place: str, rank: int, tmp_path: Path) -> None:
    """To its beginning, before there is a snapshot. No plan takes less than what every process takes, so the same one is tried again."""
    _goes_back(place, rank, partial(on_gpus, engine=engine), 2, tmp_path)


def test_on_one_gpu_a_tight_run_of_manual_optimization_goes_back_to_a_snapshot(tmp_path: Path) -> None:
    _goes_back("manual", 0, partial(on_gpus, engine="single"), 1, tmp_path, snapshot=True, max_epochs=12)


def test_a_roomy_one_ends_and_says_that_it_could_go_back_in_an_elastic_run(tmp_path: Path) -> None:
    make = partial(Elsewhere, "manual", 2, 0, tmp_path / "once")
    with pytest.raises(torch.OutOfMemoryError) as raised:
        fresh(partial(_fit, under=partial(on_gpus, engine="single")), make, tmp_path, 1)
    assert "it ran in the script's own process" in "\n".join(raised.value.__notes__)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_it_goes_back_to_a_snapshot(engine: str, tmp_path: Path) -> None:
    _goes_back("optimizer", 1, partial(on_gpus, engine=engine), 2, tmp_path, snapshot=True, max_epochs=12)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["optimizer", "validation", "window"])
@pytest.mark.parametrize("kind", ["hybrid", "pipeline"])
def test_so_do_hybrid_sharding_and_pipelines(kind: str, place: str, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 4:
        pytest.skip("four GPUs")
    if kind == "hybrid":
        _goes_back(place, 2, partial(on_gpus, engine="fsdp", replicas=2), 4, tmp_path)
    else:  # the last stage alone runs the end of a validation
        under = partial(on_gpus, engine="pipeline", cuts=("net.2", "net.4", "net.5"), schedule="1f1b", micro_batches=4)
        _goes_back(place, 3 if place == "validation" else 2, under, 4, tmp_path)
