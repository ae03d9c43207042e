"""A module among the hyperparameters, as many templates have one, in the files of engines whose ranks have parts of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_autopar import AutoParallelStrategy
from lightning_autopar.strategies.base.saved_modules import SavedModules

pytestmark = pytest.mark.filterwarnings("ignore:Attribute 'net' is an instance of")


class Lit(pl.LightningModule):
    def __init__(self, net: nn.Module, parts: dict[str, Any]) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def net() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)), nn.Linear(8, 3))
    made[0].requires_grad_(False)
    return made


@pytest.mark.parametrize("engine", ["fsdp", "pipeline", "zero"])
def test_a_file_has_it_whole(engine: str, tmp_path: Path) -> None:
    whole = net()
    module, saves = Lit(whole, {"first": whole[0], "loss": nn.CrossEntropyLoss()}), ModelCheckpoint(tmp_path, filename="last")
    strategy = AutoParallelStrategy(allow=[engine], devices="2xcpu:1GiB")
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, strategy=strategy, callbacks=[saves], **quiet)
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(16, 8), torch.randint(0, 3, (16,))), 4))
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)
    assert type(saved["hyper_parameters"]["net"]) is nn.Sequential
    found = saved["hyper_parameters"]["net"].state_dict()
    torch.testing.assert_close(found, module.net.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(saved["hyper_parameters"]["parts"]["first"].state_dict(), whole[0].state_dict(), rtol=0, atol=0)
    again = Lit.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=False)
    torch.testing.assert_close(again.state_dict(), module.state_dict(), rtol=0, atol=0)
    assert [one.requires_grad for one in again.parameters()] == [one.requires_grad for one in module.parameters()]


def test_one_whose_weights_a_hook_leaves_out_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """It would have no values, and pass for one that has."""
    module = Lit(net(), {})
    checkpoint = {"hyper_parameters": dict(module.hparams), "state_dict": {"net.4.weight": torch.zeros(3, 8)}}
    SavedModules(module).in_file(checkpoint)
    assert checkpoint["hyper_parameters"]["net"] is None
    assert "lack the module 'net'" in caplog.text
