"""A rank that is stopped or killed at a collective, under each engine: the run ends in time by one sentence, and nothing is left of it."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch

from lightning_autopar import AutoParallelStrategy
from lightning_autopar.devices.discover import probe
from lightning_autopar.plans import Plan
from lightning_autopar.strategies.base.worker_exception import WorkerFailed
from lightning_autopar.strategies.processes import stalled_workers
from tests.fresh import fresh
from tests.nullgpu import control
from tests.processes import descendants, left_since
from tests.strategies.collectives import Strikes
from tests.strategies.modules import QUIET, Regression, loader, on_rank

ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"shard": ("net.0", "net.3"), "reshard_after_forward": True},
    "zero": {"zero_stage": 2},
    "pipeline": {"cuts": ("net.3",), "schedule": "1f1b", "micro_batches": 2},
}
#: Between looks, instead of seconds.
OFTEN = {"LOOK_SECONDS": 0.2, "SEARCH_SECONDS": 0.5, "AGAIN_SECONDS": 0.3}

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),  # Lightning sets DDP up in a stream of its own
]
on = pytest.mark.parametrize("kind", ["cpu", pytest.param("gpu", marks=[pytest.mark.gpu, pytest.mark.two_gpus])])
under = pytest.mark.parametrize("engine", ENGINES)
by = pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    """Afterwards no run's folder is left that nobody uses."""
    before = set(Path("/dev/shm").glob("autopar-*/in-use"))
    yield
    assert [path for path in set(Path("/dev/shm").glob("autopar-*/in-use")) - before if not _is_locked(path)] == []


def _is_locked(path: Path) -> bool:
    """By a run of somebody else's that goes on, or has just ended."""
    locks = Path("/proc/locks").read_text(encoding="utf-8").splitlines()
    return not path.exists() or any(str(path.stat().st_ino) in line for line in locks)


def _fit(engine: str, kind: str, folder: Path, strikes: pl.Callback | None = None, module: Regression | None = None) -> None:
    if kind == "cpu":
        ids, options = ("cpu:0", "cpu:1"), {"devices": "2xcpu:1GiB"}
    else:
        ids, options = tuple(device.id for device in probe(accelerator="cuda").devices[:2]), {}
    plan = Plan(engine=engine, devices=ids, **ENGINES[engine])  # type: ignore[arg-type]
    quiet: dict[str, Any] = dict(QUIET)
    trainer = pl.Trainer(
        accelerator=kind,
        devices=1 if kind == "cpu" else 2,
        strategy=AutoParallelStrategy(plan=plan, calibrate="off", **options),  # type: ignore[arg-type]
        max_epochs=1,
        default_root_dir=folder,
        callbacks=[] if strikes is None else [strikes],
        enable_checkpointing=False,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        **quiet,
    )
    trainer.fit(module or Regression(), loader(), loader())


def _struck(engine: str, kind: str, at: int, number: int, folder: Path) -> tuple[str | None, list[str]]:
    """Fit, with rank 1 stopped or killed at its n-th collective; what the run ends with, and that rank's collectives."""
    folder.mkdir(exist_ok=True)
    strikes, words = Strikes(at, number, folder), None
    before = descendants()
    with mock.patch.multiple(stalled_workers, STOPPED_SECONDS=2.0, LOOK_SECONDS=0.2):
        try:
            _fit(engine, kind, folder, strikes)
        except WorkerFailed as error:
            words = str(error)
    assert not left_since(before)
    return words, strikes.names


def _strike(engine: str, kind: str, at: int, number: int, folder: Path) -> str:
    """The same in a process that can have GPUs; what the run ends with."""
    words, names = _run(engine, kind, at, number, folder)
    how = "has been stopped by a signal (SIGSTOP)" if number == signal.SIGSTOP else "ended without a word: killed by SIGKILL"
    assert words is not None, names
    assert "the worker of rank 1 on " in words, words
    assert how in words, words
    return words


def _run(engine: str, kind: str, at: int, number: int, folder: Path) -> tuple[str | None, list[str]]:
    if engine == "zero":
        pytest.importorskip("deepspeed")
    if kind == "cpu":
        return _struck(engine, kind, at, number, folder)
    return fresh(_struck, engine, kind, at, number, folder)


@on
@under
@by
def test_a_rank_that_is_lost_in_a_step_ends_the_run_by_a_sentence(engine: str, kind: str, number: int, tmp_path: Path) -> None:
    words = _strike(engine, kind, 2, number, tmp_path)
    assert re.search(r"rank 0 on \S+ (waited|failed) in .+ \(.+:\d+\)", words), words


@pytest.mark.slow
@pytest.mark.timeout(1800)
@on
@under
@by
def test_at_each_collective(engine: str, kind: str, number: int, tmp_path: Path) -> None:
    words, names = _run(engine, kind, 0, number, tmp_path)
    assert words is None
    assert len(names) > 4
    for at in range(1, len(names) + 1):
        _strike(engine, kind, at, number, tmp_path / str(at))


class HangsItsGpu(pl.Callback):
    """From a batch on the GPU of rank 1 does nothing more at its next collective, while its process lives."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 1 and batch_idx == 2:
            control.fault("hang", rank=1)


def _hung(engine: str, folder: Path) -> str | None:
    """Fit while a GPU hangs; what the run ends with."""
    before, words = descendants(), None
    with mock.patch.multiple(stalled_workers, STOOD_SECONDS=2.0, FIRST_SECONDS=2.0, PATIENCE=0, **OFTEN):
        try:
            _fit(engine, "gpu", folder, HangsItsGpu())
        except WorkerFailed as error:
            words = str(error)
    assert not left_since(before)
    return words


@pytest.mark.gpu
@pytest.mark.two_gpus
@pytest.mark.stub
@under
def test_a_gpu_that_hangs_while_its_process_lives(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if engine == "zero":
        pytest.importorskip("deepspeed")
    monkeypatch.setenv("NULLGPU_STATE", str(tmp_path / "state"))
    words = fresh(_hung, engine, tmp_path)
    assert words is not None
    assert "the GPUs don't do what they were given" in words, words
    for rank in (0, 1):
        assert re.search(rf"rank {rank} on \S+ waited in .+ \(.+:\d+\)", words), words


def test_the_bounds_are_what_was_promised() -> None:
    assert stalled_workers.STOPPED_SECONDS + 5 < 60
    around = stalled_workers.SEARCH_SECONDS + stalled_workers.AGAIN_SECONDS + 3 * stalled_workers.LOOK_SECONDS
    assert max(stalled_workers.STOOD_SECONDS, stalled_workers.FIRST_SECONDS) + around < 60


def test_ranks_that_all_wait_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {**OFTEN, "STOOD_SECONDS": 1.0}.items():
        monkeypatch.setattr(stalled_workers, name, seconds)

    def step(module: Regression, index: int) -> None:
        for rank in (0, 1):
            on_rank(rank, lambda other=1 - rank: torch.distributed.recv(torch.empty(1), other), batch_idx=2)(module, index)  # type: ignore[misc]

    with pytest.raises(WorkerFailed, match="as all of them wait for each other") as raised:
        _fit("ddp", "cpu", tmp_path, module=Regression({"training_step": step}))
    for rank in (0, 1):
        assert f"rank {rank} on cpu:{rank} waited in recv (distributed_c10d.py:" in str(raised.value)


def test_a_norm_of_shards_that_one_rank_alone_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {**OFTEN, "STOOD_SECONDS": 1.0}.items():
        monkeypatch.setattr(stalled_workers, name, seconds)

    class Norm(Regression):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2 and self.trainer.global_rank == 0:
                self.log("norm", torch.stack([parameter.norm() for parameter in self.parameters()]).norm())

    with pytest.raises(WorkerFailed, match="as all of them wait for each other") as raised:
        _fit("fsdp", "cpu", tmp_path, module=Norm())
    assert re.search(
        r"rank 0 on cpu:0 waited in wait_tensor \(.*\), called by on_train_batch_end \(test_waits.py:\d+\); rank 1", str(raised.value)
    )


def test_a_rank_that_only_takes_long_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {**OFTEN, "STOOD_SECONDS": 1.0, "STOPPED_SECONDS": 1.0}.items():
        monkeypatch.setattr(stalled_workers, name, seconds)
    _fit("ddp", "cpu", tmp_path, module=Regression({"training_step": on_rank(0, lambda: time.sleep(4), batch_idx=1)}))
