"""The wheel builds, installs into an empty environment, and trains there. ``make test-slow`` runs it: pip fetches the build backend."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]

SCRIPT = """
import sys
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


trainer = L.Trainer(strategy="autopar", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=4))
package = sys.modules["lightning_autopar"]
assert Path(package.__file__).is_relative_to(sys.prefix), package.__file__
print("ran", trainer.strategy.plan.title(), trainer.global_step)
"""


@pytest.mark.slow
def test_it_installs_into_an_empty_environment_and_trains(tmp_path: Path) -> None:
    def run(*command: str | Path, **variables: str) -> str:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "AUTOPAR_", "LIGHTNING_"))}
        done = subprocess.run([*map(str, command)], cwd=tmp_path, env={**clean, **variables}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    venv.create(tmp_path / "empty", with_pip=False)
    python = tmp_path / "empty" / "bin" / "python"
    home = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    run(sys.executable, "-m", "pip", f"--python={python}", "install", "--quiet", "--no-deps", "--no-index", wheel)
    assert (home / "lightning_autopar" / "py.typed").exists()
    # The dependencies are those of this environment; a line of a .pth file doesn't follow that folder's own, which has this checkout.
    (home / "dependencies.pth").write_text(f"{Path(torch.__file__).parents[1]}\n", encoding="utf-8")
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    settings = {"AUTOPAR_CACHE": "off", "AUTOPAR_DEVICES": "2xcpu:1GiB", "AUTOPAR_LEDGER": "off", "CUDA_VISIBLE_DEVICES": ""}
    assert "ran " in run(python, "train.py", **settings)
    assert "cpu:1" in run(tmp_path / "empty" / "bin" / "lightning-autopar", "devices", **settings)
