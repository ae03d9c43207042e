"""Modules whose steps write to parameters by themselves, in all the ways that one meets."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from tests.strategies.fitted import Fitted


class Twin(Fitted):
    """Learns from a second network, which follows the first one."""

    def __init__(self, width: int = 16) -> None:
        super().__init__(width)
        self.target: Any = copy.deepcopy(self.net).requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + mse_loss(self.net(batch[0]), self.target(batch[0]))

    def pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return list(zip(self.target.parameters(), self.net.parameters(), strict=True))


class Exchanging(Twin):
    """By ``data``, as lightly does, before the loss; and again after the optimizer's step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for target, online in self.pairs():
            target.data = target.data * 0.9 + online.data * 0.1
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        for target, online in self.pairs():
            target.data = target.data * 0.9 + online.data * 0.1


class InPlace(Twin):
    """In place: by ``data``, without gradients, and now and then by a state dict, as in deep Q-learning."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for target, online in self.pairs():
            target.data.mul_(0.9).add_(0.1 * online.data)
        if self.global_step % 4 == 3:
            self.target.load_state_dict(self.net.state_dict())
        loss = super().training_step(batch, batch_idx)
        with torch.no_grad():
            for target, online in self.pairs():
                target.lerp_(online, 0.1)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for target, online in self.pairs():
                target.lerp_(online, 0.01)
        super().validation_step(batch, batch_idx)


class Normed(Fitted):
    """Weights of norm one, by hand: of the first layer, and of a block's; and bounds on all after each step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        weight = self.net[0].weight
        weight.data = weight.data / weight.data.norm()
        with torch.no_grad():
            self.net[2][0].weight.div_(self.net[2][0].weight.norm())
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        for parameter in self.parameters():
            parameter.data.clamp_(-0.4, 0.4)


class Averaged(Fitted):
    """torch's own averages, of many parameters at once, in the step."""

    def __init__(self) -> None:
        super().__init__()
        function = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        self.ema = torch.optim.swa_utils.AveragedModel(self.net, multi_avg_fn=function).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.ema.update_parameters(self.net)
        return super().training_step(batch, batch_idx) + mse_loss(self.net(batch[0]), self.ema(batch[0]))


class Spectral(Fitted):
    """A spectral norm by hand: a buffer and a block's weight that follow each other."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("left", torch.ones(16))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            weight, left = self.net[2][0].weight, self.left
            right = nn.functional.normalize(weight.t() @ left, dim=0)
            found = weight @ right
            left.copy_(nn.functional.normalize(found, dim=0))
            weight.div_(found.norm())
        return super().training_step(batch, batch_idx)


class Tying(Fitted):
    """Puts a layer's parameter in another one's place."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 16)

    def tie(self) -> None:
        self.other.weight = self.net[0].weight

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.tie()
        return super().training_step(batch, batch_idx) + self.other(batch[0]).square().mean()


class Sharing(Tying):
    """Lets a layer's weight share the values of another one's."""

    def tie(self) -> None:
        self.other.weight.data = self.net[0].weight.data


class Penalised(Fitted):
    """All weights in the loss."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.1 * torch.stack([parameter.square().sum() for parameter in self.parameters()]).sum()


class FollowedByHook(Fitted):
    """A buffer that follows a parameter in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16, 8))

    def on_train_batch_end(self, *_: Any) -> None:
        self.mean.lerp_(self.net[0].weight.detach(), 0.1)


class Held(Twin):
    """Keeps parameters in lists of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.both = [list(self.target.parameters()), list(self.net.parameters())]

    def pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return list(zip(*self.both, strict=True))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            for target, online in self.pairs():
                target.lerp_(online, 0.1)
        return super().training_step(batch, batch_idx)
