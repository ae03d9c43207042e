"""Random draws anywhere (dataset, collate function, dropout), with and without worker processes: every plan computes one device's run."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_autopar import AutoParallelStrategy, Plan


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Adds noise to a sample each time it is loaded."""

    def __len__(self) -> int:
        return 21

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return x + 0.1 * torch.randn(8), x.sum(0, keepdim=True)


def mask(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Collates, and drops random features, as a masked language model's collator does."""
    x, y = (torch.stack(parts) for parts in zip(*samples, strict=True))
    return x * (torch.rand_like(x) > 0.1), y


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def train(strategy: Any, num_workers: int) -> tuple[dict[str, float], list[Tensor]]:
    pl.seed_everything(1, workers=True)
    module = Regression()
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_epochs=2, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(Augmented(), batch_size=4, shuffle=True, collate_fn=mask, num_workers=num_workers))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, [p.detach() for p in module.parameters()]


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("engine", ["single", "ddp", "fsdp"])
def test_random_draws_in_the_data_are_those_of_one_device(engine: str, num_workers: int) -> None:
    expected_metrics, expected_weights = train("auto", num_workers)
    metrics, weights = train(AutoParallelStrategy(allow=[engine], devices="2xcpu:1GiB"), num_workers)
    assert metrics == pytest.approx(expected_metrics, abs=1e-5)
    for weight, expected in zip(weights, expected_weights, strict=True):
        torch.testing.assert_close(weight, expected, atol=1e-5, rtol=1e-5)


class Jittered(Regression):
    """Augments before and after the transfer, in the hooks that Lightning has for that."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return x * (1 + 0.1 * torch.rand(len(x), 1)), y

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return x + 0.1 * torch.randn_like(x), y


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize(
    "options",
    [{"allow": ["fsdp"]}, {"plan": Plan(engine="ddp", devices=("cpu:0", "cpu:1"), micro_batches=2)}],
    ids=["fsdp", "ddp in parts"],
)
def test_random_draws_in_transfer_hooks_are_those_of_one_device(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "Regression", Jittered)
    expected_metrics, expected_weights = train("auto", 0)
    strategy = AutoParallelStrategy(devices="2xcpu:1GiB", **options)
    metrics, weights = train(strategy, 0)
    assert metrics == pytest.approx(expected_metrics, abs=1e-5)
    for weight, expected in zip(weights, expected_weights, strict=True):
        torch.testing.assert_close(weight, expected, atol=1e-5, rtol=1e-5)
    assert strategy.report is not None
    assert strategy.report.best_candidate.notes == ()


class Sentences(Dataset[Tensor]):
    """Samples of different lengths."""

    def __len__(self) -> int:
        return 19

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(1, 20, (3 + index % 5,), generator=generator)


class Tagger(Regression):
    """Its loss is the mean over samples of each sample's own mean over its tokens, with dropout on padded embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(20, 8, padding_idx=0), nn.Dropout(0.3), nn.Linear(8, 20))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        losses = nn.functional.cross_entropy(self.net(batch).transpose(1, 2), batch, ignore_index=0, reduction="none")
        loss = (losses.sum(1) / (batch != 0).sum(1)).mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


def test_padded_batches_are_cut_into_rows_of_the_whole() -> None:
    def fit(strategy: Any) -> tuple[dict[str, float], list[Tensor]]:
        pl.seed_everything(3)
        module = Tagger()
        trainer = pl.Trainer(
            accelerator="cpu", devices=1, strategy=strategy, max_epochs=2, logger=False, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=False,
        )  # fmt: skip
        pad = lambda parts: nn.utils.rnn.pad_sequence(parts, batch_first=True)  # noqa: E731
        trainer.fit(module, DataLoader(Sentences(), batch_size=4, shuffle=True, collate_fn=pad, num_workers=0))
        return {name: float(value) for name, value in trainer.callback_metrics.items()}, [p.detach() for p in module.parameters()]

    expected_metrics, expected_weights = fit("auto")
    metrics, weights = fit(AutoParallelStrategy(allow=["ddp"], devices="3xcpu:1GiB"))
    assert metrics == pytest.approx(expected_metrics, abs=1e-5)
    for weight, expected in zip(weights, expected_weights, strict=True):
        torch.testing.assert_close(weight, expected, atol=1e-5, rtol=1e-5)
