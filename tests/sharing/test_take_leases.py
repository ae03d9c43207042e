"""Runs that share devices by leases: each sees what others were promised, has its own while it lasts, and goes on without a ledger."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_autopar import AutoParallelStrategy, CheckpointMigrate, NothingFits, Plan
from lightning_autopar.sharing import ledger as promised
from lightning_autopar.sharing.lease_files import LeaseFile
from lightning_autopar.sharing.ledger import Ledger
from lightning_autopar.strategies.preparation.decision import MoveRequest
from lightning_autopar.strategies.preparation.planning_inputs import decide_again
from tests.strategies.modules import QUIET, TWO, Regression, fit, loader, on_rank

GIB = 1 << 30


@contextmanager
def somebody(folder: Path, wants: dict[str, int]) -> Iterator[int]:
    """Another process that has been promised this."""
    told, end = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(end[1])
        try:
            held = Ledger(folder).claim(wants, lambda: lambda leases: wants, run="somebody")
            os.write(told[1], b"1" if isinstance(held, LeaseFile) else b"0")
            os.read(end[0], 1)
        finally:
            os._exit(0)
    try:
        assert os.read(told[0], 1) == b"1"
        yield pid
    finally:
        os.close(end[1])
        os.waitpid(pid, 0)
        for one in (*told, end[0]):
            os.close(one)


@pytest.mark.filterwarnings("ignore:autopar. the module writes")  # as it does, on each rank
@pytest.mark.parametrize("allow", [["single"], ["ddp"]])
def test_a_run_has_leases_while_it_lasts(allow: list[str], folder: Path, tmp_path: Path) -> None:
    seen = tmp_path / "seen.json"

    def look(module: Regression, index: int) -> None:
        leases = [(lease.pid, dict(lease.bytes), lease.run) for lease in Ledger(folder).leases()]
        seen.write_text(json.dumps(leases), encoding="utf-8")

    trainer = fit(tmp_path, Regression(at={"training_step": look}), allow=allow)
    ((pid, sizes, run),) = json.loads(seen.read_text(encoding="utf-8"))
    assert pid == os.getpid(), "the process that outlives its workers"
    assert str(os.getpid()) in run
    assert sizes == trainer.strategy.report.best_candidate.needs
    assert set(sizes) == set(trainer.strategy.plan.devices)
    assert os.listdir(folder) == []


def test_what_others_were_promised_is_not_planned_with(folder: Path, tmp_path: Path) -> None:
    with somebody(folder, {"cpu:0": GIB - 1000}):
        trainer = fit(tmp_path, allow=["single"])
        assert trainer.strategy.plan.devices == ("cpu:1",)
        (first, second) = trainer.strategy.report.inventory.devices
        assert (first.free_bytes, second.free_bytes) == (1000, GIB)
    assert fit(tmp_path, allow=["ddp"]).strategy.plan.world_size == 2


def test_who_is_slower_plans_again(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with somebody(folder, {"cpu:0": GIB - 1000}):
        see, looks = promised.without_leased, []

        def late(inventory: Any, leases: Any) -> Any:  # as if the lease had come between planning and asking
            looks.append(leases)
            return see(inventory, leases if len(looks) > 2 else [])

        monkeypatch.setattr("lightning_autopar.sharing.take_leases.without_leased", late)
        with caplog.at_level("INFO"):
            trainer = fit(tmp_path, allow=["single"])
        assert trainer.strategy.plan.devices == ("cpu:1",)
        assert "planned again, as another run took the memory first" in caplog.text
        assert "promised to somebody of" in caplog.text
    assert Ledger(folder).leases() == []


def test_nothing_fits_beside_others(folder: Path, tmp_path: Path) -> None:
    with somebody(folder, {"cpu:0": GIB - 1000, "cpu:1": GIB - 1000}), pytest.raises(NothingFits):
        fit(tmp_path)
    assert Ledger(folder).leases() == []


def test_a_run_that_fails_gives_its_leases_back(folder: Path, tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("unwell")

    with pytest.raises(RuntimeError, match="unwell"):
        fit(tmp_path, Regression(at={"training_step": on_rank(0, fail)}), allow=["ddp"])
    assert os.listdir(folder) == []


def test_a_full_disk_under_the_ledger_ends_no_run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lightning_autopar.sharing.ledger.LeaseFile", full)
    with pytest.warns(UserWarning, match="knows the driver.s figures alone: OSError: .*No space left"):
        trainer = fit(tmp_path, allow=["single"])
    assert trainer.global_step > 0


def test_a_ledger_that_nobody_named_may_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOPAR_LEDGER", raising=False)
    monkeypatch.setattr(promised, "ledger_folder", lambda: tmp_path / "missing")
    with pytest.warns(UserWarning, match="knows the driver.s figures alone"):
        assert fit(tmp_path, allow=["single"]).global_step > 0


def test_a_ledger_that_is_named_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_LEDGER", str(tmp_path / "missing"))
    with pytest.raises(ValueError, match=r"AUTOPAR_LEDGER=.*missing can't be used: No such file.*or 'off'"):
        fit(tmp_path)
    monkeypatch.setenv("AUTOPAR_LEDGER", "off")
    assert fit(tmp_path, allow=["single"]).global_step > 0


def test_leases_go_with_an_elastic_run(folder: Path, tmp_path: Path) -> None:
    plans = [Plan(engine="ddp", devices=("cpu:0", "cpu:1")), Plan(engine="single", devices=("cpu:1",))]
    seen: list[tuple[tuple[str, ...], list[tuple[str, ...]]]] = []

    class Tour(pl.Callback):
        """Takes the run through the plans; what it finds is no state of its own, which would come back from the last worker."""

        interval_seconds = 0.05

        def look(self, run: Any) -> MoveRequest | None:
            leases = [tuple(sorted(lease.bytes)) for lease in Ledger(folder).leases() if lease.pid == os.getpid()]
            seen.append((run.decision.run_plan.plan.devices, leases))
            if run.step is None or run.step < 2 * (3 - len(plans)) or not plans:
                return None
            decision = decide_again(trainer, run.decision, run.inventory(), plan=plans.pop(0))
            return MoveRequest(action="move", decision=decision, reason="tour")

        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            """Ends the run under the last plan: on a busy machine, 20 epochs were over before the second look."""
            trainer.should_stop = trainer.strategy.run_plan.plan.devices == ("cpu:1",)  # type: ignore[attr-defined]

    trainer = pl.Trainer(
        strategy=AutoParallelStrategy(devices=TWO, calibrate="off", plan=Plan(engine="single", devices=("cpu:0",))),
        max_epochs=2000,
        default_root_dir=tmp_path,
        accelerator="cpu",
        enable_checkpointing=False,
        callbacks=[CheckpointMigrate(), Tour()],
        **QUIET,  # type: ignore[arg-type]
    )
    trainer.fit(Regression(), loader(), loader())
    assert plans == []
    assert [(devices, leases) for devices, leases in seen if leases != [devices]] == []
    assert {devices for devices, _ in seen} >= {("cpu:0",), ("cpu:0", "cpu:1")}
    assert trainer.strategy.plan.devices == ("cpu:1",)
    assert os.listdir(folder) == []
