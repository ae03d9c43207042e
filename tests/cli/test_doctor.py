"""The file for a bug report: it says what runs here and how it was planned, and nothing of the user's code, data, names or paths."""

from __future__ import annotations

import getpass
import json
import os
import socket
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_autopar import AutoParallelStrategy
from lightning_autopar.cli import main
from tests.strategies.modules import QUIET

SECRET = "zanzibar"


class Zanzibar(pl.LightningModule):
    """Everything that the user names or says has the same word in it."""

    def __init__(self) -> None:
        super().__init__()
        blocks = {f"zanzibar{index}": nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1)) for index in range(3)}
        self.zanzibar_net = nn.ModuleDict(blocks)
        self.zanzibar_seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = batch["zanzibar_x"]
        for block in self.zanzibar_net.values():
            hidden = block(hidden)
        self.zanzibar_seen += int(hidden.sum() > 271828)
        self.log("zanzibar_loss", hidden.max())
        return hidden.square().sum()  # no mean over samples: a note says so

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def text_of(value: Any) -> list[str]:
    """All texts in it: names and values."""
    if isinstance(value, dict):
        return [*value, *(text for each in value.values() for text in text_of(each))]
    if isinstance(value, list):
        return [text for each in value for text in text_of(each)]
    return [value] if isinstance(value, str) else []


def test_nothing_of_the_users_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path / "zanzibar_cache"))
    monkeypatch.setenv("ZANZIBAR_TOKEN", "zanzibar")
    monkeypatch.setenv("AUTOPAR_ZANZIBAR_OF_ANOTHER", "zanzibar")
    monkeypatch.setenv("AUTOPAR_WAIT", "90s")
    data = DataLoader([{"zanzibar_x": torch.randn(8)} for _ in range(16)], batch_size=4)
    trainer = pl.Trainer(
        strategy=AutoParallelStrategy(devices="2xcpu:1GiB", calibrate="off"),
        accelerator="cpu",
        max_steps=1,
        default_root_dir=tmp_path,
        enable_checkpointing=False,
        **QUIET,
    )
    trainer.fit(Zanzibar(), data)
    report = trainer.strategy.report.to_json()  # type: ignore[attr-defined]
    assert SECRET in report, "what the report says isn't for others"
    capsys.readouterr()

    monkeypatch.setenv("AUTOPAR_DEVICES", "2xcpu:1GiB")
    target = tmp_path / "report.json"
    assert main(["doctor", str(target)]) == 0
    words = target.read_text(encoding="utf-8").lower()
    found = json.loads(words)
    # What it is for.
    assert found["packages"]["torch"] == torch.__version__.lower()
    assert found["settings"]["autopar_wait"] == "90s"
    assert found["settings"]["autopar_cache"] == "set"
    assert len(found["devices"]["devices"]) == 2
    plan = found["last_plan"]
    assert plan["candidates"][plan["chosen"]]["fits"]
    assert {each["plan"]["engine"] for each in plan["candidates"]} >= {"single", "ddp", "fsdp"}
    assert plan["checks"]["traced"]
    assert plan["checks"]["split"]["difference"] is not None
    # What must not be in it.
    texts = text_of({**found, "settings": {}})
    assert not [text for text in texts if SECRET in text]
    assert not [text for text in texts if "/" in text or os.sep in text or " of " in text]
    assert SECRET not in json.dumps(list(found["settings"].values()))
    for private in (str(tmp_path), str(Path.home()), socket.gethostname(), "271828"):
        assert private.lower() not in words
    assert getpass.getuser() not in texts


def test_it_is_printed_and_says_what_it_cannot_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    monkeypatch.setenv("AUTOPAR_DEVICES", "nonsense of mine")
    (tmp_path / "last_plan").mkdir()
    (tmp_path / "last_plan" / "plan.json").write_text("{", encoding="utf-8")
    assert main(["doctor", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"] == {"failed": "ValueError"}
    assert found["last_plan"] == {"failed": "JSONDecodeError"}
    assert "nonsense" not in json.dumps(found)
    assert main(["doctor", str(tmp_path / "no" / "where.json")]) == 2
    assert "name another file" in capsys.readouterr().err
