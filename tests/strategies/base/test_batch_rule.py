"""The argument ``batch`` as a whole: who draws a split batch's random numbers, each rank for all of it or for its own samples."""

from __future__ import annotations

from pathlib import Path
from queue import SimpleQueue
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_autopar import AutoParallelStrategy, Batch
from lightning_autopar.exact.random import drawing_operators as random_ops


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"rule": "half"}, "batch='half' must be 'global' .* or 'per_device'"),
        ({"draws": "own"}, "draws='own' must be 'whole' .* or 'per-rank'"),
        ({"despite": ["norms"]}, r"despite=\['norms'\] must be a list of names of refusals, and 'norms' isn't one; they are 'batch_norm'"),
        ({"despite": "kept"}, "despite='kept' must be a list of names"),
        ({"rule": "per_device", "draws": "per-rank"}, "draws='per-rank' needs a batch that is split.*leave one of them out"),
    ],
)
def test_what_can_not_be_is_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Batch(**arguments)


def test_draws_of_each_ranks_own_are_no_exact_run() -> None:
    with pytest.raises(ValueError, match=r"exact=True needs one device's random numbers, but .*; use draws='whole'"):
        AutoParallelStrategy(batch=Batch(draws="per-rank"), exact=True)
    with pytest.raises(ValueError, match=r"despite=\['kept'\] allows a run that differs from one device's, but exact=True forbids that"):
        AutoParallelStrategy(batch=Batch(despite=("kept",)), exact=True)
    assert AutoParallelStrategy(batch=Batch(draws="per-rank")).settings.own_draws
    assert not AutoParallelStrategy(batch=Batch(rule="per_device")).settings.own_draws
    assert AutoParallelStrategy(batch="per_device").settings.batch == "per_device"


#: The dropout masks of this rank's steps. In a list, ranks would exchange them.
MASKS: SimpleQueue[Tensor] = SimpleQueue()


class Dropping(pl.LightningModule):
    """Writes down what each rank dropped."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
        self.folder = folder
        self.losses: list[Tensor] = []

    def on_train_start(self) -> None:
        """In the rank's own process; the probe, which finds out which draws run over the samples, has made them for a whole batch."""

        def draws_whole(*arguments: Any) -> Tensor:
            raise AssertionError("a draw was made for the whole batch")

        while not MASKS.empty():
            MASKS.get()
        if torch.distributed.group.WORLD is not None:
            random_ops.whole_like = draws_whole

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        MASKS.put(F.dropout(torch.ones(len(batch[0]), 64), 0.5))
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(loss.detach())
        return loss

    def on_train_end(self) -> None:
        masks = [MASKS.get() for _ in range(MASKS.qsize())]
        torch.save((torch.stack(masks), torch.stack(self.losses)), self.folder / f"{self.global_rank}.pt")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-2)


def train(folder: Path, seed: int) -> tuple[AutoParallelStrategy, list[Tensor], Tensor, Tensor]:
    """(strategy, masks by rank, weights, rank 0's losses) of a DDP run on two CPU devices."""
    folder.mkdir()
    pl.seed_everything(seed)
    module = Dropping(folder)
    x = torch.linspace(-1, 1, 96 * 8).view(96, 8)
    strategy = AutoParallelStrategy(allow=["ddp"], devices="2xcpu:1GiB", batch=Batch(draws="per-rank"), calibrate="off")
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=8, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16))
    masks, losses = zip(*[torch.load(folder / f"{rank}.pt") for rank in range(2)], strict=True)
    weights = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    return strategy, list(masks), weights, losses[0]


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:autopar. draws='per-rank'. each rank.* results differ:UserWarning")
def test_each_rank_draws_for_its_own_samples(tmp_path: Path) -> None:
    strategy, masks, weights, losses = train(tmp_path / "first", seed=1)
    assert strategy.report is not None
    best = strategy.report.best_candidate
    assert best is not None
    assert best.plan.engine == "ddp"
    assert [note for note in best.notes if "draws='per-rank'" in note and "results differ from one device's" in note]
    assert masks[0].shape == masks[1].shape == (48, 8, 64)
    assert not torch.equal(masks[0], masks[1])
    assert all(0.4 < float((mask == 0).float().mean()) < 0.6 for mask in masks)
    assert not torch.equal(masks[0][0], masks[0][1])
    assert losses[-6:].mean() < losses[:6].mean() / 2
    _, again, weights_again, _ = train(tmp_path / "again", seed=1)
    assert all(torch.equal(one, other) for one, other in zip(masks, again, strict=True))
    assert torch.equal(weights, weights_again)
    _, others, _, _ = train(tmp_path / "other", seed=2)
    assert not torch.equal(masks[0], others[0])
