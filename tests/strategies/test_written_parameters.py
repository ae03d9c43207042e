"""What a step writes to parameters by itself is in the weights at the end, under every engine that takes the module apart."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from lightning_autopar.strategies.auto import AutoParallelStrategy
from tests.strategies.fitted import BLOCKS, QUIET, assert_same, numbers, plan
from tests.strategies.written import Averaged, Exchanging, InPlace, Normed, Penalised, Spectral

TARGETS = tuple(name.replace("net", "target") for name in BLOCKS)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize(("make", "units"), [(Exchanging, (*BLOCKS, *TARGETS)), (InPlace, (*BLOCKS, *TARGETS)), (Normed, BLOCKS)])
def test_what_is_written_is_kept_on_shards(make: Any, units: tuple[str, ...], reshard: bool) -> None:
    assert_same(make, numbers(), plan("fsdp", shard=units, reshard=reshard))


@pytest.mark.parametrize("make", [Averaged, Spectral, Penalised])
def test_what_is_mixed_with_other_tensors_is_whole_in_one_unit(make: Any) -> None:
    assert_same(make, numbers(), plan("fsdp"))


def test_a_manual_step_writes_before_and_after_its_update() -> None:
    class Manual(InPlace):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            for _ in range(2):
                with torch.no_grad():
                    for target, online in self.pairs():
                        target.lerp_(online, 0.1)
                loss = self.loss(batch)
                self.optimizers().zero_grad()
                self.manual_backward(loss)
                self.optimizers().step()
            self.log("loss", loss, on_step=True)

    assert_same(Manual, numbers(), plan("fsdp", shard=BLOCKS))


@pytest.mark.filterwarnings("ignore:.*is used outside of a step, where ZeRO-3")
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("make", [Exchanging, InPlace, Normed, Averaged])
def test_what_is_written_is_kept_in_partitions(make: Any, stage: int) -> None:
    pytest.importorskip("deepspeed")
    assert_same(make, numbers(), plan("zero", zero_stage=stage))


class Large(pl.LightningModule):
    """A network of 41 MiB and its moving average: more than is rehearsed, in a step of milliseconds."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(1024, 4096), nn.Linear(4096, 1600), nn.Tanh(), nn.Linear(1600, 8))
        self.target = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for target, online in zip(self.target.parameters(), self.net.parameters(), strict=True):
            target.data = target.data * 0.5 + online.data * 0.5
        return mse_loss(self.net(batch[0]), self.target(batch[0]) + 1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), 0.5)


def _trained(strategy: Any, folder: Path) -> dict[str, Tensor]:
    pl.seed_everything(3, verbose=False)
    module = Large()
    trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, default_root_dir=folder, **QUIET)
    trainer.fit(module, DataLoader(TensorDataset(torch.arange(12)), batch_size=4))
    return dict(module.state_dict())


@pytest.mark.parametrize("engine", ["fsdp", pytest.param("zero", marks=pytest.mark.timeout(300))])
def test_a_module_too_large_to_rehearse_trains_as_under_plain_lightning(engine: Any, tmp_path: Path) -> None:
    if engine == "zero":
        pytest.importorskip("deepspeed")
    assert sum(parameter.numel() * 4 for parameter in Large().parameters()) > 80 << 20
    ours = _trained(AutoParallelStrategy(allow=[engine], devices="2xcpu:4GiB"), tmp_path)
    theirs = _trained("auto", tmp_path)
    assert not torch.equal(theirs["target.1.weight"], theirs["net.1.weight"])
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
