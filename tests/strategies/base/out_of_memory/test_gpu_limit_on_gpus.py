"""The cap of a GPU's allocator on an empty GPU: a step that takes more than predicted is no reason to run out of memory there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_autopar import AutoParallelStrategy, Plan
from lightning_autopar.devices.discover import probe
from tests.fresh import fresh
from tests.processes import python
from tests.strategies.modules import QUIET, Regression, loader

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*does not have many workers")]
GIB = 1 << 30
#: Another process, with a small lease on each device.
_SOMEBODY = """
import sys
from pathlib import Path
from lightning_autopar.sharing.ledger import Ledger
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


def _fit(folder: Path) -> dict[str, dict[str, Any]]:
    """What was measured, by device."""
    strategy, quiet = AutoParallelStrategy(calibrate="off"), dict[str, Any](QUIET)
    trainer = pl.Trainer(
        accelerator="gpu", devices=1, strategy=strategy, max_epochs=1, default_root_dir=folder, enable_checkpointing=False, **quiet
    )
    trainer.fit(Surprising(), loader(), loader())
    return strategy.measured


def test_a_surprise_on_an_empty_gpu_is_no_out_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_LEDGER", str(tmp_path))
    (measured,) = fresh(_fit, tmp_path).values()
    assert measured["reserved_bytes"] >= 2 * GIB


def test_beside_others_a_run_stays_within_what_it_was_promised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_LEDGER", str(tmp_path))
    ids = [device.id for device in probe(accelerator="cuda").devices]
    with python(_SOMEBODY, str(tmp_path), *ids), pytest.raises(torch.OutOfMemoryError) as raised:
        fresh(_fit, tmp_path)
    assert "at which its allocator is capped" in "".join(raised.value.__notes__)


#: Another run of this host's, at this moment: what it sees of each device, with what it was promised to others and without, and the leases.
_LOOK = """
import json
from lightning_autopar.devices.discover import probe
from lightning_autopar.sharing.ledger import without_leased, live
inventory, leases = probe(accelerator="cuda"), live()
left = {device.id: device.free_bytes for device in without_leased(inventory, leases).devices}
print(json.dumps({device.id: {
    "free": device.free_bytes, "left": left[device.id], "used": sum(process.used_bytes for process in device.processes),
    "leased": sum(lease.bytes.get(device.id, 0) for lease in leases)} for device in inventory.devices}))
"""


class LookedAt(pl.Callback):
    """In mid-run another process looks at the devices."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and trainer.is_global_zero and not self.path.exists():
            done = subprocess.run([sys.executable, "-c", _LOOK], capture_output=True, text=True, check=True)
            self.path.write_text(done.stdout.splitlines()[-1], encoding="utf-8")


def _sharded(folder: Path, seen: Path) -> dict[str, tuple[int, int]]:
    """By device what the plan was predicted to hold, and the most that its allocator held."""
    ids = tuple(device.id for device in probe(accelerator="cuda").devices[:2])
    plan = Plan(engine="fsdp", devices=ids, shard=("net.0", "net.3"), reshard_after_forward=True)
    strategy, quiet = AutoParallelStrategy(plan=plan, calibrate="off"), dict[str, Any](QUIET)
    trainer = pl.Trainer(
        accelerator="gpu", devices=2, strategy=strategy, max_epochs=1, default_root_dir=folder, enable_checkpointing=False,
        callbacks=[LookedAt(seen)], **quiet,
    )  # fmt: skip
    trainer.fit(Regression(width=4096), loader(), loader())
    return {device: (strategy.report.best_candidate.needs[device], strategy.measured[device]["reserved_bytes"]) for device in ids}


@pytest.mark.two_gpus
def test_others_see_of_a_run_what_it_leased_and_what_nvml_shows_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_LEDGER", str(tmp_path))
    ran = fresh(_sharded, tmp_path, tmp_path / "seen")
    seen = json.loads((tmp_path / "seen").read_text(encoding="utf-8"))
    assert len(ran) == 2
    for device, (needed_bytes, reserved_bytes) in ran.items():
        found = seen[device]
        assert needed_bytes <= found["leased"], "with what nobody else wanted in its first steps"
        assert reserved_bytes < found["used"] <= found["leased"], "tensors and the context, all of it within the lease"
        assert found["free"] - found["left"] == found["leased"] - found["used"]
