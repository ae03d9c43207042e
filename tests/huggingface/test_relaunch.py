"""What the processes that run a plan of transformers' Trainer tell other runs of this host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lightning_autopar.huggingface.relaunch import promised
from lightning_autopar.huggingface.settings import Batch, Settings
from lightning_autopar.plans import Plan
from lightning_autopar.sharing.ledger import live

_MIB = 1 << 20
_SETTINGS = Settings(
    plan=Plan(engine="ddp", devices=("cpu:0", "cpu:1")),
    number=0,
    batch=Batch(per_device=8, accumulation=1),
    checkpointing=False,
    checkpointed="gradient_checkpointing",
    layers=(),
    on_cpu=True,
    step_seconds=1.0,
    peak_bytes=700 * _MIB,
)


@pytest.fixture(autouse=True)
def _ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ledger").mkdir(mode=0o1777)
    monkeypatch.setenv("AUTOPAR_LEDGER", str(tmp_path / "ledger"))
    monkeypatch.setenv("LOCAL_RANK", "1")


def test_each_process_has_its_devices_memory_promised() -> None:
    with promised(_SETTINGS, "2xcpu:1GiB"):
        (lease,) = live()
        assert lease.bytes == {"cpu:1": 700 * _MIB}
    assert not live()


def test_a_process_without_a_promise_says_so_and_runs(caplog: pytest.LogCaptureFixture) -> None:
    with promised(_SETTINGS, "2xcpu:1GiB"), promised(replace(_SETTINGS, peak_bytes=500 * _MIB), "2xcpu:1GiB"):
        assert len(live()) == 1
    assert "predicted to take 500 MiB of cpu:1, of which only 324 MiB are free" in caplog.text


def test_cpu_devices_are_not_leased_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOPAR_LEDGER")
    with promised(_SETTINGS, "2xcpu:1GiB"):
        assert not live()
