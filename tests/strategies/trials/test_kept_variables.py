"""``losses = []`` beside the class, as half of all notebooks keep a curve: one device's values under every plan, or named."""

from __future__ import annotations

from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, default_collate
from tqdm import tqdm

from lightning_autopar import AutoParallelStrategy, Plan
from lightning_autopar.exact.step.kept_attributes import variables
from lightning_autopar.strategies.trials.split_probe import probe_split
from tests.strategies.fitted import QUIET
from tests.strategies.trials.test_kept_steps import Meter
from tests.strategies.trials.test_split_probe import first_of

LOSSES: list[float] = []
ORDER: list[tuple[str, float]] = []
METER = Meter()
SUMS = {"targets": 0.0}
SEEN, BEST = 0, float("inf")
BAR = tqdm(disable=True)
CPUS = ("cpu:0", "cpu:1")
PLANS = {
    "ddp": Plan(engine="ddp", devices=CPUS),
    "fsdp": Plan(engine="fsdp", devices=CPUS, reshard_after_forward=True),
    "parts": Plan(engine="single", devices=CPUS[:1], micro_batches=2),
    "ddp in parts": Plan(engine="ddp", devices=CPUS, micro_batches=2),
    "pipeline": Plan(engine="pipeline", devices=CPUS, cuts=("blocks.1",), schedule="gpipe"),
}


class Noting(pl.LightningModule):
    sizes: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        global SEEN
        SEEN += len(batch[0])
        ORDER.append(("before", float(batch[0].mean())))
        error = (self.blocks(batch[0]).sum(1, keepdim=True) - batch[1]).square().mean(1)
        loss = error.mean()
        LOSSES.append(loss.item())
        ORDER.append(("after", float(batch[1].mean())))
        METER.update(loss.item(), len(error))
        SUMS["targets"] += float(batch[1].sum())
        self.sizes.append(1)
        BAR.update()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05)


def with_closure() -> tuple[pl.LightningModule, list[float]]:
    curve: list[float] = []

    class Closed(Noting):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            curve.append(float(loss.detach()))
            source = self.trainer.datamodule  # type: ignore[attr-defined]
            source.steps += 1
            source.targets += float(batch[1].sum())
            return loss

    return Closed(), curve


class Source(pl.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.steps, self.targets = 0, 0.0

    def train_dataloader(self) -> DataLoader[Any]:
        x = torch.randn(19, 4, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=5, shuffle=True)


def noted(strategy: Any) -> list[float]:
    """All that a run of two epochs leaves in variables."""
    global SEEN
    for each in (LOSSES, ORDER, Noting.sizes):
        each.clear()
    METER.__init__()  # type: ignore[misc]
    SUMS["targets"], SEEN = 0.0, 0
    pl.seed_everything(5, verbose=False)
    module, curve = with_closure()
    source = Source()
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=2, **QUIET)
    trainer.fit(module, source)
    held = [METER.average, METER.total, SUMS["targets"], SEEN, source.steps, source.targets]
    return [*LOSSES, *(value for _, value in ORDER), *held, *curve, len(Noting.sizes)]


@pytest.fixture(scope="module")
def plain() -> list[float]:
    return noted("auto")


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("name", list(PLANS))
def test_variables_beside_the_class_hold_one_devices_values(name: str, plain: list[float]) -> None:
    ours = noted(AutoParallelStrategy(devices="2xcpu:1GiB", plan=PLANS[name]))
    assert ours == pytest.approx(plain, rel=1e-5)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_a_pipeline_in_parts_is_refused_by_the_variables_name() -> None:
    plan = Plan(engine="pipeline", devices=CPUS, cuts=("blocks.1",), schedule="1f1b", micro_batches=2)
    with pytest.raises(ValueError, match=r"training_step keeps the global [\w.]+, which each part of a batch would change by itself"):
        noted(AutoParallelStrategy(devices="2xcpu:1GiB", plan=plan))


class Least(Noting):
    """Keeps the least loss, which isn't the mean of the parts' least losses."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        global BEST
        loss = (self.blocks(batch[0]).sum(1, keepdim=True) - batch[1]).square().mean()
        BEST = min(BEST, loss.item())
        return loss


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_least_of_all_losses_is_named_whichever_part_has_it(order: tuple[int, int]) -> None:
    global BEST
    BEST = float("inf")
    targets = torch.tensor([[0.1], [9.0]])[list(order)].repeat_interleave(3, 0)
    torch.manual_seed(order[0])
    module = Least()
    found, _ = probe_split(module, None, first_of(list(zip(torch.randn(6, 4), targets, strict=True)), default_collate))
    assert [each for each in found.notes if each.startswith(f"the global {__name__}.BEST, which training_step changes, is no sum")]
    assert float("inf") == BEST


def test_the_names_of_variables_are_no_attributes_and_each_ones_own() -> None:
    module, curve = with_closure()
    places = variables(module)
    space, key = places["variable curve"]
    assert space.get(key) is curve
    assert {f"global {__name__}.LOSSES", f"global {__name__}.SEEN", "class attribute Noting.sizes"} <= set(places)
    assert not any(callable(space.get(key)) for space, key in places.values())
    assert f"global {__name__}.BAR" not in places
