"""The cap of a GPU's allocator on an empty GPU: a step that takes more than predicted is no reason to run out of memory there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from modules import QUIET, Regression, loader

from lightning_autopar import AutoParallelStrategy
from lightning_autopar.memory.inventory import probe
from tests.processes import python

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*does not have many workers")]
GIB = 1 << 30
#: Another process, with a small lease on each device.
_SOMEBODY = """
import sys
from pathlib import Path
from lightning_autopar.memory.ledger import Ledger
wants = dict.fromkeys(sys.argv[2:], 1 << 30)
with Ledger(Path(sys.argv[1])).claim(wants, lambda: lambda leases: dict.fromkeys(wants, 64 << 30), run="somebody"):
    print("there", flush=True)
    sys.stdin.read()
"""


class Surprising(Regression):
    """Its third batch takes memory that no step before did: cuDNN tries its kernels out, or the batch is longer."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 2 and torch.cuda.is_initialized():
            torch.empty(2 * GIB, dtype=torch.uint8, device=self.device)
        return super().training_step(batch, batch_idx)


def _fit(folder: Path) -> AutoParallelStrategy:
    strategy, quiet = AutoParallelStrategy(calibrate="off"), dict[str, Any](QUIET)
    trainer = pl.Trainer(
        accelerator="gpu", devices=1, strategy=strategy, max_epochs=1, default_root_dir=folder, enable_checkpointing=False, **quiet
    )
    trainer.fit(Surprising(), loader(), loader())
    return strategy


def test_a_surprise_on_an_empty_gpu_is_no_out_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_LEDGER", str(tmp_path))
    strategy = _fit(tmp_path)
    (device,) = strategy.measured
    assert strategy.measured[device]["reserved_bytes"] >= 2 * GIB


def test_beside_others_a_run_stays_within_what_it_was_promised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_LEDGER", str(tmp_path))
    ids = [device.id for device in probe(accelerator="cuda").devices]
    with python(_SOMEBODY, str(tmp_path), *ids), pytest.raises(torch.OutOfMemoryError) as raised:
        _fit(tmp_path)
    assert "at which its allocator is capped" in "".join(raised.value.__notes__)
