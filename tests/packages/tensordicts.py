"""tensordict: batches that are TensorDicts, and networks that write into them."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.packages.member import Member, Options, fit


class Entries(pl.LightningModule):
    """Networks read entries of the batch and write others, which the loss compares."""

    def __init__(self, net: Any, loss: Any) -> None:
        super().__init__()
        self.net, self.criterion = net, loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.criterion(self.net(batch))
        self.log("train_loss", loss, batch_size=batch.batch_size[0])
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.criterion(self.net(batch)), batch_size=batch.batch_size[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def _loaders(nested: bool = False) -> tuple[Any, Any]:
    from tensordict import TensorDict

    def make(count: int) -> Any:
        draw = torch.Generator().manual_seed(count)
        seen, wanted = torch.randn(count, 6, generator=draw), torch.randn(count, 2, generator=draw)
        entries = {"inputs": {"seen": seen, "mask": seen > 0}, "wanted": wanted} if nested else {"seen": seen, "wanted": wanted}
        return TensorDict(entries, batch_size=[count])

    # TensorDicts give several samples at once: the loader asks them for a list of indices.
    return tuple(DataLoader(make(count), 8, shuffle=count == 28, collate_fn=lambda batch: batch) for count in (28, 12))  # type: ignore[return-value]


def _mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))


def _module(options: Options) -> None:
    from tensordict.nn import TensorDictModule

    net = TensorDictModule(_mlp(), in_keys=["seen"], out_keys=["given"])
    fit(options, Entries(net, lambda entries: (entries["given"] - entries["wanted"]).square().mean()), *_loaders())


def _sequential(options: Options) -> None:
    from tensordict.nn import TensorDictModule, TensorDictSequential

    masked = TensorDictModule(lambda seen, mask: seen * mask, in_keys=[("inputs", "seen"), ("inputs", "mask")], out_keys=["masked"])
    net = TensorDictSequential(masked, TensorDictModule(_mlp(), in_keys=["masked"], out_keys=[("outputs", "given")]))
    fit(options, Entries(net, lambda entries: (entries["outputs", "given"] - entries["wanted"]).square().mean()), *_loaders(nested=True))


def _probabilistic(options: Options) -> None:
    from tensordict.nn import NormalParamExtractor, ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
    from torch.distributions import Normal

    parameters = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4), NormalParamExtractor())
    drawn = ProbabilisticTensorDictModule(
        in_keys=["loc", "scale"], out_keys=["given"], distribution_class=Normal, default_interaction_type="random"
    )
    net = ProbabilisticTensorDictSequential(TensorDictModule(parameters, in_keys=["seen"], out_keys=["loc", "scale"]), drawn)
    fit(options, Entries(net, lambda entries: (entries["given"] - entries["wanted"]).square().mean()), *_loaders())


MEMBERS = (
    Member(name="td-module", package="tensordict", about="TensorDictModule on batches that are TensorDicts", train=_module),
    Member(name="td-sequential", package="tensordict", about="TensorDictSequential, nested entries", train=_sequential),
    Member(name="td-actor", package="tensordict", about="ProbabilisticTensorDictModule, reparametrized draws", train=_probabilistic),
)
