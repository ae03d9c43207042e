"""``loss.backward()`` of the user's own in manual optimization: gradients are the whole batch's, whoever called backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_autopar.exact.step.users_backward import weighed
from tests.strategies.fitted import BLOCKS, Fitted, assert_same, numbers, plan


class Own(Fitted):
    """Two losses, each with a backward of its own, before one step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def optimizer(self) -> Any:
        return self.optimizers()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizer()
        optimizer.zero_grad()
        loss = self.loss(batch)
        loss.backward(retain_graph=True)
        (0.1 * loss).sqrt().detach()
        torch.autograd.backward([self.net(batch[0]).abs().mean()])
        optimizer.step()
        self.log("loss", loss, on_step=True, on_epoch=True)


class OwnOptimizer(Own):
    """Its optimizer isn't Lightning's either, and is made in the first step."""

    def optimizer(self) -> Any:
        if not hasattr(self, "own"):
            self.own = torch.optim.SGD(self.parameters(), 0.05)
        return self.own


class Mixed(Own):
    """One backward through Lightning, one past it, in a closure."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Any:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            self.net(batch[0]).abs().mean().backward()
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

        optimizer.step(closure=closure)


class Players(Own):
    """Two optimizers in turn, each with the other's weights frozen; one looks for a gradient of its input first."""

    def __init__(self) -> None:
        super().__init__()
        self.judge = nn.Linear(1, 1)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), 0.05) for part in (self.net, self.judge)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for index, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            x = batch[0].clone().requires_grad_()
            x.square().sum().backward()  # trains nothing
            made = self.net(batch[0] + 0.01 * x.grad.sign())
            loss = (self.judge(made) - batch[1] * (-1) ** index).square().mean()
            loss.backward()
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        self.log("loss", loss, on_step=True, on_epoch=True)


@pytest.mark.parametrize("make", [Own, OwnOptimizer, Mixed, Players])
def test_replicas_exchange_the_gradients(make: Any) -> None:
    """Of three ranks one has none of the last batch's two samples."""
    assert_same(make, numbers(), plan("ddp", ranks=3))


@pytest.mark.parametrize("make", [Own, OwnOptimizer])
def test_shards_weigh_the_losses(make: Any) -> None:
    assert_same(make, numbers(27), plan("fsdp", shard=BLOCKS))


def test_a_loss_without_weight_has_no_gradient_even_where_it_is_a_mean_over_nothing() -> None:
    layer, mask = nn.Linear(3, 1), torch.zeros(4, 1)
    hidden = torch.ones(4, 3, requires_grad=True)
    loss = weighed((layer(hidden) * mask).sum() / mask.sum(), 0.0)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert all(bool((tensor.grad == 0).all()) for tensor in (*layer.parameters(), hidden))
    layer(torch.ones(4, 3)).mean().backward()  # another graph of the same parameters
    assert layer.bias.grad == 1.0
