"""Runs on GPUs that are moved and killed, and allocations that fail in each part of a step."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_autopar import AutoParallelStrategy, CheckpointMigrate, Plan
from lightning_autopar.devices.discover import probe
from lightning_autopar.strategies.base.worker_exception import WorkerFailed
from tests.chaos.chaos_modules import Variant
from tests.chaos.chaos_runs import compare, fit_plainly, fit_with
from tests.chaos.chaos_schedules import ddp, fsdp, pipeline, single
from tests.chaos.chaos_stage import Action
from tests.fresh import fresh
from tests.nullgpu import control
from tests.strategies.base.out_of_memory.test_rerun import said_by_reruns
from tests.strategies.fitted import _decided

pytestmark = [pytest.mark.gpu, pytest.mark.two_gpus, pytest.mark.filterwarnings("ignore:.*does not have many workers")]


# -- moves and kills ---------------------------------------------------------------------------------------------------------------------


class Keeps(pl.Callback):
    """Keeps tensors in all the places that a move takes along, and looks at each batch whether they lie where they did.

    ``told`` travels by ``state_dict`` alone, in an object that has no pickle.
    """

    def __init__(self) -> None:
        self.here: dict[str, Any] = {}
        self.host = torch.zeros(3)
        self.told = _Sealed()

    def state_dict(self) -> dict[str, Any]:
        return {"told": self.told.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.told.value = state["told"]

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        device = trainer.strategy.root_device
        if not self.here:
            whole = torch.arange(4.0, device=device)
            self.here = {"whole": whole, "view": whole[1:3], "list": [whole.clone()], "device": device}
            self.told.value, pl_module.kept = whole.clone(), whole.clone()
            trainer.logger.kept = [whole.clone()]  # type: ignore[union-attr]
        whole, view = self.here["whole"], self.here["view"]
        for tensor in (whole, view, *self.here["list"], self.told.value, pl_module.kept, *trainer.logger.kept):  # type: ignore[union-attr]
            assert tensor.device == device, f"it lies on {tensor.device}, and the worker on {device}"
        for value in trainer.callback_metrics.values():
            assert value.device in (device, torch.device("cpu")), f"a metric lies on {value.device}, and the worker on {device}"
        assert self.here["device"] == device
        assert self.host.device.type == "cpu"
        whole += 1
        self.host += 1
        assert torch.equal(view, whole[1:3])
        others = [index for index in range(torch.cuda.device_count()) if index != device.index]
        assert not any(map(torch.cuda.memory_allocated, others)), "something lies on another worker's GPU"


class _Sealed:
    def __init__(self) -> None:
        self.value: Any = None

    def __reduce__(self) -> Any:
        raise TypeError("sealed")


def _moved(folder: Path) -> None:
    ids = [device.id for device in probe(accelerator="cuda").devices[:2]]

    def on_gpus(plan: Plan) -> Plan:
        return replace(plan, devices=tuple(ids[int(name.partition(":")[2])] for name in plan.devices))

    variant = Variant(seed=5, epochs=2, accumulate=2)
    actions = [Action(at=3, what="move", plan=on_gpus(fsdp(0, 1))), Action(at=6, what="fault", where="outside", rank=1)]
    actions += [Action(at=9, what="move", plan=on_gpus(pipeline(0, 1))), Action(at=12, what="fault", where="validation", rank=1)]
    actions += [Action(at=16, what="move", plan=on_gpus(single(1))), Action(at=19, what="move", plan=on_gpus(ddp(0, 1)))]
    keeps = Keeps()
    run = fit_with(variant, folder / "moved", actions, devices=None, allow=["single", "ddp", "fsdp", "pipeline"], watchers=[keeps])
    batches = variant.epochs * variant.batches
    assert torch.equal(keeps.here["whole"], torch.arange(4.0) + batches)
    assert float(keeps.host[0]) == batches
    figures = compare(fit_plainly(variant, folder / "plain", "gpu"), run)
    assert (figures.moves, figures.faults) == (4, 2)


def test_what_is_kept_on_a_gpu_comes_out_on_the_gpu_of_the_next_worker(tmp_path: Path) -> None:
    fresh(_moved, tmp_path, seconds=120)


# -- allocations that fail ---------------------------------------------------------------------------------------------------------------


class Vanishes(pl.Callback):
    """Rank 1's GPU is lost, and NCCL's watchdog ends the process."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3 and trainer.global_rank == 1:
            control.lose(trainer.strategy.root_device.index)
            os.abort()


def _lost(folder: Path) -> None:
    _fit(_pinned("ddp"), [Vanishes()], folder)


@pytest.mark.stub
def test_a_gpu_that_vanishes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NULLGPU_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("AUTOPAR_LEDGER", "off")
    with pytest.raises(WorkerFailed, match=r"rank 1 on GPU.*killed by SIGABRT; of its GPU: GPU 1 can't be read \(GPU is lost\)"):
        fresh(_lost, tmp_path, seconds=150)


class LosesOnce(pl.Callback):
    """The first GPU that the run is on is lost."""

    def __init__(self, folder: Path) -> None:
        self.done = folder / "lost"

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3 and not self.done.exists():
            self.done.touch()
            control.lose(0)


def _moves_off(folder: Path) -> None:
    def run(*callbacks: pl.Callback) -> Any:
        return _fit(AutoParallelStrategy(allow=["single"], calibrate="off"), [CheckpointMigrate(), *callbacks], folder).state_dict()

    torch.testing.assert_close(run(), run(LosesOnce(folder)), rtol=0, atol=0)
    assert (folder / "lost").exists()


@pytest.mark.stub
def test_a_run_whose_first_gpu_vanishes_goes_on_on_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML doesn't show the lost GPU, and nobody knows whether CUDA counts it: workers name the other one by its UUID."""
    monkeypatch.setenv("NULLGPU_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("AUTOPAR_LEDGER", "off")
    fresh(_moves_off, tmp_path, seconds=150)


class Wide(pl.LightningModule):
    """Its gradients and its optimizer's temporary tensors are too large for what the allocator holds in stock."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 2048), nn.Tanh(), nn.Linear(2048, 2048), nn.Tanh(), nn.Linear(2048, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        room = batch[0].new_zeros(4 << 20)
        return nn.functional.mse_loss(self.net(batch[0]) + room[:1], batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-2, momentum=0.9, weight_decay=1e-3, foreach=True)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        room = batch[0].new_zeros(4 << 20)
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]) + room[:1], batch[1]))


class Shortage(pl.Callback):
    """In each part of a step an allocation of one rank's fails.

    Args:
        at: the steps, by the parts.
        folder: where it is noted that one has failed.
        again: whether it fails whenever the run comes there, not only once.
        rank: whose; None for the last.
    """

    def __init__(self, at: dict[str, int], folder: Path, *, again: bool = False, rank: int | None = None) -> None:
        self.at, self.folder, self.again, self.rank = at, folder, again, rank

    def _strike(self, part: str, trainer: pl.Trainer) -> None:
        done = self.folder / part
        here = trainer.global_rank == (trainer.world_size - 1 if self.rank is None else self.rank)
        if trainer.global_step == self.at.get(part) and here and (self.again or not done.exists()):
            done.touch()
            torch.cuda.empty_cache()
            control.fail_allocations(trainer.strategy.root_device.index, from_bytes=8 << 20)

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._strike("forward", trainer)

    def on_before_backward(self, trainer: pl.Trainer, *_: Any) -> None:
        self._strike("backward", trainer)

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        self._strike("optimizer", trainer)

    def on_validation_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._strike("validation", trainer)


def _fit(strategy: Any, callbacks: list[pl.Callback], folder: Path, devices: int = 2) -> Wide:
    pl.seed_everything(3, verbose=False)
    module, x = Wide(), torch.randn(64, 8)
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
    trainer = pl.Trainer(
        accelerator="gpu", devices=devices, strategy=strategy, max_epochs=1, callbacks=callbacks, val_check_interval=3,
        default_root_dir=folder, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, data, data)
    assert trainer.global_step == 8
    return module


PLANS = {
    "ddp": {"engine": "ddp"},
    "fsdp": {"engine": "fsdp", "shard": ("net.0", "net.2"), "reshard_after_forward": True},
}


def _pinned(engine: str) -> AutoParallelStrategy:
    ids = tuple(device.id for device in probe(accelerator="cuda").devices[:2])
    return AutoParallelStrategy(plan=Plan(devices=ids, **PLANS[engine]), calibrate="off")  # type: ignore[arg-type]


def _run_again(engine: str, part: str, rank: int, folder: Path) -> list[str]:
    """What the rank said."""
    shortage = Shortage({part: 3}, folder, rank=rank)
    with said_by_reruns() as said:
        if engine == "ddp":
            module = _fit(_pinned(engine), [shortage], folder)
        else:
            (device,) = (found.id for found in probe(accelerator="cuda").devices[:1])
            with _decided(Plan(engine="single", devices=(device,)), undivided=None):
                module = _fit(AutoParallelStrategy(calibrate="off"), [shortage], folder, devices=1)
    for ours, theirs in zip(module.parameters(), _fit("auto", [], folder, devices=1).parameters(), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs.cpu(), rtol=0, atol=1e-5)
    assert (folder / part).exists()
    return said


def _short_once(folder: Path) -> list[str]:
    parts = {"forward": 1, "backward": 3, "optimizer": 5, "validation": 6}
    migrate = CheckpointMigrate(snapshot_seconds=0.05, failures=6)
    module = _fit(_pinned("fsdp"), [migrate, Shortage(parts, folder)], folder)
    for ours, theirs in zip(module.parameters(), _fit("auto", [], folder, devices=1).parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.cpu(), rtol=0, atol=1e-5)
    return [part for part in parts if (folder / part).exists()]


def _short_for_good(folder: Path) -> None:
    _fit(_pinned("fsdp"), [CheckpointMigrate(failures=2), Shortage({"backward": 3}, folder, again=True)], folder)


@pytest.mark.stub
@pytest.mark.parametrize("ledger", ["on", "off"])
def test_an_elastic_run_goes_on_after_an_allocation_has_failed(ledger: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NULLGPU_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("AUTOPAR_LEDGER", "off" if ledger == "off" else str(tmp_path))
    assert len(fresh(_short_once, tmp_path, seconds=150)) == 4


@pytest.mark.stub
def test_an_elastic_run_whose_allocation_fails_each_time_ends_as_a_want_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NULLGPU_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("AUTOPAR_LEDGER", "off")
    with pytest.raises(torch.OutOfMemoryError, match="GPU 1 has a total capacity"):
        fresh(_short_for_good, tmp_path)


@pytest.mark.stub
@pytest.mark.parametrize("part", ["forward", "backward"])
@pytest.mark.parametrize(("engine", "rank"), [("single", 0), ("ddp", 0), ("ddp", 1)])
def test_a_batch_whose_allocation_fails_is_run_again(
    engine: str, rank: int, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NULLGPU_STATE", str(tmp_path / "state"))
    said = fresh(_run_again, engine, part, rank, tmp_path)
    if engine == "single":  # which runs in this process
        assert f"ran out of memory in the {part} of batch 3, whose 8 samples ran in one piece" in "".join(said)
