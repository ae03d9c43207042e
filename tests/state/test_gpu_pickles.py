"""What lies on a GPU comes out on the reader's own, or on the host where the reader may touch no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_autopar import AutoParallelStrategy, Plan
from lightning_autopar.devices.discover import probe
from lightning_autopar.state import gpu_pickles
from tests.fresh import fresh

pytestmark = [pytest.mark.gpu, pytest.mark.two_gpus]


class Box:
    """No container that torch knows."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


@pytest.mark.parametrize("reader", ["cuda:1", "cpu"])
def test_tensors_on_a_gpu_come_out_on_the_readers_device(reader: str) -> None:
    device, whole = torch.device(reader), torch.arange(6.0, device="cuda:0")
    weight, host = nn.Parameter(torch.ones(2, device="cuda:0", dtype=torch.bfloat16)), torch.arange(3)
    kept = {"box": Box(whole), "view": whole[2:4], "weight": weight, "host": host, "none": whole[:0]}
    data = gpu_pickles.dumps({**kept, "where": whole.device, "any": torch.device("cuda")})
    found = gpu_pickles.loads(data, device)
    for tensor in (found["box"].value, found["view"], found["weight"], found["none"]):
        assert tensor.device == device
    assert found["where"] == device
    assert found["any"] == torch.device("cuda")
    assert torch.equal(found["box"].value.cpu(), whole.cpu())
    found["box"].value[2] = 7.0
    assert found["view"].tolist() == [7.0, 3.0], "a view stays one"
    assert isinstance(found["weight"], nn.Parameter)
    assert found["weight"].requires_grad
    assert torch.equal(found["weight"].cpu(), weight.cpu())
    assert found["host"].device.type == "cpu"
    assert torch.equal(found["host"], host)


class Boxes(pl.LightningModule):
    """Predicts what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        return Box(self.net(batch))


def _predict(folder: Path) -> tuple[bool, list[str]]:
    ids = tuple(device.id for device in probe(accelerator="cuda").devices[:2])
    strategy = AutoParallelStrategy(plan=Plan(engine="ddp", devices=ids), calibrate="off")
    trainer = pl.Trainer(accelerator="gpu", devices=2, strategy=strategy, default_root_dir=folder, logger=False, enable_progress_bar=False)
    found = trainer.predict(Boxes(), DataLoader(torch.ones(8, 2), batch_size=4))
    assert found is not None
    return torch.cuda.is_initialized(), [str(box.value.device) for box in found]


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_results_of_a_worker_come_out_on_the_host(tmp_path: Path) -> None:
    touched, devices = fresh(_predict, tmp_path)
    assert set(devices) == {"cpu"}
    assert not touched, "reading results makes no context on a GPU"
