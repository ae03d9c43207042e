"""What only a GPU can show: a plan of one device on it, against plain Lightning there. Skipped where there is none."""

import gc
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_autopar import AutoParallelStrategy
from lightning_autopar.devices.discover import probe
from lightning_autopar.strategies.base.out_of_memory.gpu_limit import CudaAllocator
from tests.fresh import fresh

pytestmark = pytest.mark.gpu


class Wide(pl.LightningModule):
    """Large enough that the allocator's rounding is small beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(256, 2048), nn.GELU(), nn.Linear(2048, 2048), nn.GELU(), nn.Linear(2048, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-4)


def fit(strategy: Any, precision: Any) -> tuple[pl.Trainer, Wide]:
    pl.seed_everything(1)
    module = Wide()
    x = torch.randn(512, 256)
    trainer = pl.Trainer(
        accelerator="gpu", devices=1, strategy=strategy, precision=precision, max_epochs=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=64, shuffle=True))
    return trainer, module


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_plan_of_one_gpu_is_plain_lightnings_run(precision: Any) -> None:
    plain, expected = fit("auto", precision)
    strategy = AutoParallelStrategy()
    trainer, module = fit(strategy, precision)
    assert strategy.plan is not None
    assert strategy.plan.devices[0] in {device.id for device in probe(accelerator="cuda").devices}
    assert float(trainer.callback_metrics["loss"]) == pytest.approx(float(plain.callback_metrics["loss"]), rel=1e-5)
    for name, weight in expected.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], weight, rtol=1e-5, atol=1e-6)


def bytes_of_a_fit() -> tuple[int | None, int]:
    """The measured peak and the predicted one."""
    strategy = AutoParallelStrategy()
    fit(strategy, "32-true")
    (device,) = strategy.plan.devices
    return strategy.measured[device]["peak_bytes"], strategy.report.best_candidate.bytes[device].allocated


def test_the_predicted_memory_is_the_allocators() -> None:
    """In a process of its own: of one that has used the device before, the peak is no figure of the run's."""
    measured_bytes, predicted_bytes = fresh(bytes_of_a_fit)
    assert measured_bytes == pytest.approx(predicted_bytes, rel=0.1)


MIB = 1 << 20


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_what_was_held_before_a_run_is_no_figure_of_its() -> None:
    gc.collect()
    before = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda:0")
    del before
    torch.cuda.empty_cache()
    strategy = AutoParallelStrategy()
    fit(strategy, "32-true")
    (measured,) = strategy.measured.values()
    assert (measured["peak_bytes"], measured["reserved_bytes"], measured["bytes"]) == (None, None, {})
    assert measured["step_seconds"] > 0


def test_the_allocator_takes_no_more_than_it_may() -> None:
    device = torch.device("cuda", 0)
    allocator = CudaAllocator(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    limit_bytes = torch.cuda.memory_reserved(device) + 256 * MIB
    allocator.cap(limit_bytes)
    try:
        held = torch.empty(128 * MIB, dtype=torch.uint8, device=device)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(512 * MIB, dtype=torch.uint8, device=device)
        assert allocator.most_bytes() <= limit_bytes
        del held
    finally:
        allocator.cap(None)
    torch.empty(512 * MIB, dtype=torch.uint8, device=device)
    torch.cuda.empty_cache()
