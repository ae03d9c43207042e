"""What shows only while a run is at work, and would part it from what one device computes, ends it with the cause."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_autopar import AutoParallelStrategy
from lightning_autopar.report.report import NothingFits


class Layers(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def loss(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class Two(Layers):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch["a"]) + self.loss(batch["b"])


class Validated(Layers):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", sum(self.loss(each) for each in batch.values()), batch_size=4)


def fit(module: pl.LightningModule, loaders: Any, validation: Any = None) -> None:
    trainer = pl.Trainer(
        accelerator="cpu", strategy=AutoParallelStrategy(allow=["ddp"], devices="2xcpu:2GiB"), max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, loaders, validation)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("foretold", "says"),
    [(True, "of one step have 3 and 4 samples"), (False, "of one step have 3, 4 samples")],
    ids=["told before", "a sampler that tells nothing"],
)
def test_loaders_whose_batches_weigh_differently(foretold: bool, says: str) -> None:
    data = torch.randn(7, 4)
    ragged: Any = DataLoader(data, batch_size=4) if foretold else DataLoader(data, batch_sampler=[[0, 1, 2, 3], [4, 5, 6]])
    loaders = {"a": ragged, "b": DataLoader(torch.randn(8, 4), batch_size=4)}
    with pytest.raises(ValueError, match=says):
        fit(Two(), CombinedLoader(loaders, "max_size_cycle"))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_validation_loaders_whose_batches_weigh_differently_are_foretold() -> None:
    """The first step's batches, which the validation before training sees, are of one size."""
    loaders = {"a": DataLoader(torch.randn(8, 4), batch_size=4), "b": DataLoader(torch.randn(7, 4), batch_size=4)}
    with pytest.raises(NothingFits, match="of one step have 4 and 3 samples"):
        fit(Validated(), DataLoader(torch.randn(8, 4), batch_size=4), CombinedLoader(loaders, "max_size"))


class Gathers(Layers):
    """Gathers its loss, or does so where its samples are large."""

    def __init__(self, *, always: bool) -> None:
        super().__init__()
        self.always = always

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if self.always or batch.sum() > 0:
            self.log("mean", self.all_gather(loss.detach()).mean())
        return loss


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.*all_gather is deprecated:FutureWarning")
def test_gathering_on_some_ranks_alone_ends_all_of_them_with_the_line() -> None:
    data = torch.ones(8, 4) * torch.tensor([1.0, -1.0] * 4)[:, None]
    with pytest.raises(ValueError, match=r"training_step calls self.all_gather at test_refused_at_work.py:\d+ on some ranks and not on"):
        fit(Gathers(always=False), DataLoader(data, batch_size=4))
    fit(Gathers(always=True), DataLoader(data, batch_size=4))
