"""Dropout under pipelines on real ranks: the masks, and so the run, are plain Lightning's on one device, whatever the schedule."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_autopar.exact.data.rank_share import Dealing, cut, share_of
from lightning_autopar.exact.random.whole_batch_draws import DrawPlan
from lightning_autopar.plans import Plan
from lightning_autopar.strategies.trials.draw_probe import observe
from tests.strategies.fitted import tokens
from tests.strategies.pipelines import pipeline, run

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning")]


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rate = 0.1 if self.training else 0.0
        q, k, v = (part.view(*x.shape[:2], 2, -1).transpose(1, 2) for part in self.mix(self.before(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        x = x + F.dropout(self.out(attended.transpose(1, 2).flatten(2)), rate)
        return x + F.dropout(self.down(F.gelu(self.up(self.between(x)))), rate)


class GPT(pl.LightningModule):
    """Dropout before, in and after its blocks; an augmentation that Python's generator decides on."""

    checkpoints = False

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(17, 16), nn.Embedding(6, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(16, 17)

    def loss(self, batch: Any) -> Tensor:
        x = batch[0]
        hidden = F.dropout(self.token(x) + self.position(torch.arange(x.shape[1], device=x.device)), 0.1, self.training)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.checkpoints else block(hidden)
        hidden = F.dropout(hidden, 0.1, self.training)
        return F.cross_entropy(self.head(hidden[:, :-1]).flatten(0, 1), x[:, 1:].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scale = random.uniform(0.5, 1.0)
        loss = self.loss(batch) * scale * random.uniform(0.5, 1.0)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))
        self.log("noise", torch.randn(5).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


class Checkpointed(GPT):
    """By its own code."""

    checkpoints = True


BLOCKS = tuple(f"blocks.{index}" for index in range(6))
DATA = tokens(22)


@cache
def draws() -> DrawPlan:
    """As the probe finds them on the first batch."""
    module = GPT()
    batch = torch.stack([DATA[index][0] for index in range(4)])
    shares = [share_of(4, rank, Dealing.even(2)) for rank in range(2)]
    return observe(lambda rows: module.loss([rows]), lambda share: cut(batch, share.rank, share.dealing), shares).draws


@cache
def plain(accumulate: int) -> Any:
    return run(GPT, DATA, None, blocks=BLOCKS, accumulate_grad_batches=accumulate)


@pytest.mark.parametrize(
    ("under", "accumulate", "make"),
    [
        (pipeline(BLOCKS[3:4], schedule="gpipe", micro_batches=3), 2, GPT),
        (pipeline(BLOCKS[2:5:2], schedule="1f1b"), 1, GPT),
        (pipeline(BLOCKS[1:6:2], schedule="interleaved_1f1b", ranks=2), 2, GPT),
        (pipeline(BLOCKS[2:3], schedule="1f1b", recompute=BLOCKS[1:4]), 1, GPT),
        (pipeline(BLOCKS[1:4], schedule="interleaved_1f1b", ranks=2, recompute=BLOCKS), 1, GPT),
        (pipeline(BLOCKS[2:5:2], schedule="1f1b"), 1, Checkpointed),
        (pipeline(BLOCKS[3:4], schedule="1f1b", ranks=4, replicas=2, micro_batches=2), 1, GPT),
    ],
    ids=lambda value: value.title() if isinstance(value, Plan) else str(value),
)
def test_dropout_is_one_devices(under: Plan, accumulate: int, make: type[GPT]) -> None:
    """22 samples in batches of 8: parts of unequal sizes, and of a single sample."""
    ours, losses, trainer, _ = run(make, DATA, under, blocks=BLOCKS, accumulate_grad_batches=accumulate, assigned={"draws": draws()})
    theirs, their_losses, their_trainer, _ = plain(accumulate)
    assert len(losses) == len(their_losses) == 6
    torch.testing.assert_close(losses, their_losses, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(dict(trainer.callback_metrics), dict(their_trainer.callback_metrics), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()), rtol=1e-6, atol=1e-6)
