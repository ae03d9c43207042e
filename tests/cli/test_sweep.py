"""``lightning-autopar sweep`` from end to end, on two CPU devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_autopar.cli import main
from tests.processes import lean_path

SCRIPT = """
import sys
if sys.argv[1] == "bad":
    sys.exit("no such rate")
import lightning as L, torch
from torch.utils.data import DataLoader, TensorDataset

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
    def training_step(self, batch, index):
        return self.layer(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=float(sys.argv[1]))

L.seed_everything(1)
trainer = L.Trainer(max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Model(), DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=8))
print("trained", sys.argv[1], trainer.global_step, trainer.strategy.plan.devices)
"""


def test_a_sweep_from_its_file_to_its_result(tmp_path: Path) -> None:
    """Two runs, one of which fails before it comes to fit; then without that one, which leaves nothing to do."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "sweep.yaml").write_text('runs: [{command: "train.py {lr}", matrix: {lr: [0.1, bad]}}]')
    env = {**os.environ, "AUTOPAR_DEVICES": "2xcpu:1GiB", "AUTOPAR_RUNS": str(tmp_path), "PYTHONPATH": lean_path()}
    command = [sys.executable, "-m", "lightning_autopar", "sweep", "--json", "result.json", "sweep.yaml"]
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert run.returncode == 1, run.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["predicted_seconds"] > 0
    good, bad = result["runs"]
    assert (good["name"], good["state"], good["exit_code"], good["attempts"], good["plan"]) == ("lr0.1", "done", 0, 1, "single")
    assert good["predicted_seconds"] > 0
    assert f"trained 0.1 16 ('{good['devices'][0]}',)" in (tmp_path / "sweep-sweep" / "lr0.1.log").read_text()
    assert (bad["name"], bad["state"]) == ("lrbad", "failed")
    assert "no such rate" in (tmp_path / "sweep-sweep" / "plans" / "lrbad.err").read_text()
    assert "1 of 2 runs are done" in run.stdout
    assert "lr0.1 starts on cpu:" in run.stderr

    (tmp_path / "sweep.yaml").write_text('runs: [{command: "train.py {lr}", matrix: {lr: [0.1]}}]')
    again = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert [each["state"] for each in json.loads((tmp_path / "result.json").read_text())["runs"]] == ["done before"]


def test_what_cant_be_done_is_said_on_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", "nowhere.yaml"]) == 2
    assert main(["sweep", "--retries", "-1", "--", "train.py 1", "train.py 2"]) == 2
    assert main(["sweep", "--name", "a/b", "--", "train.py 1"]) == 2
    assert main(["sweep", "--json", "no/result.json", "--", "train.py 1"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    assert all(line.startswith("lightning-autopar: ") for line in lines)
    assert list(tmp_path.iterdir()) == []
