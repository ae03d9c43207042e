"""Batches of all kinds, under every engine: the same training run as plain Lightning's."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence
from torch.utils.data import DataLoader

from lightning_autopar import AutoParallelStrategy
from lightning_autopar.plans import Plan
from tests.exact.data import test_batch_structure as rows
from tests.strategies.modules import QUIET, TWO

GENERATOR = torch.Generator().manual_seed(1)
X, Y = torch.randn(22, 3, generator=GENERATOR), torch.randn(22, 1, generator=GENERATOR)


class Wrapped(rows.Wrapped):
    """The same, and it goes to a device."""

    def to(self, device: Any, **_: Any) -> Wrapped:
        return self._made({key: value.to(device) for key, value in self.d.items()})

    def _made(self, items: dict[str, Tensor]) -> Wrapped:
        return Wrapped(items)


class Checked(Wrapped):
    """As a TensorDict: all items have its ``batch_size``, and it is indexed by sample."""

    @property
    def batch_size(self) -> torch.Size:
        return torch.Size([len(self.d["x"])])

    def __setitem__(self, key: str, value: Tensor) -> None:
        if len(value) != self.batch_size[0]:
            raise RuntimeError("batch dimension mismatch")
        super().__setitem__(key, value)

    def __getitem__(self, key: Any) -> Any:
        return self.d[key] if isinstance(key, str) else Checked({name: item[key] for name, item in self.d.items()})

    def _made(self, items: dict[str, Tensor]) -> Checked:
        return Checked(items)


class Labelled(Tensor):
    """A tensor with attributes."""

    labels: Any


@dataclass
class Sample:
    x: Tensor
    y: Tensor
    names: tuple[str, ...]


Pair = namedtuple("Pair", "x y")


def labelled(ids: list[int]) -> Tensor:
    tensor = X[ids].as_subclass(Labelled)
    tensor.labels = Y[ids]
    return tensor


def tensordict(ids: list[int]) -> Any:
    from tensordict import TensorDict

    return TensorDict({"x": X[ids], "y": Y[ids]}, batch_size=[len(ids)])


KINDS: dict[str, tuple[Callable[[list[int]], Any], Callable[[Any], tuple[Any, Any]]]] = {
    "mapping": (lambda ids: Wrapped({"x": X[ids], "y": Y[ids]}), lambda b: (b["x"], b["y"])),
    "checked": (lambda ids: Checked({"x": X[ids], "y": Y[ids]}), lambda b: (b["x"], b["y"])),
    "tensordict": (tensordict, lambda b: (b["x"], b["y"])),
    "attributes": (labelled, lambda b: (b.as_subclass(Tensor), b.labels)),
    "dataclass": (lambda ids: Sample(X[ids], Y[ids], tuple(map(str, ids))), lambda b: (b.x[: len(b.names)], b.y)),
    "namedtuple": (lambda ids: Pair(X[ids], [Y[ids].numpy()]), lambda b: (b.x, torch.as_tensor(b.y[0]))),
    "lists": (
        lambda ids: ([X[[i, i, i]] for i in ids], [{"y": Y[i]} for i in ids]),
        lambda b: (torch.stack([x[0] for x in b[0]]), torch.stack([target["y"] for target in b[1]])),
    ),
    "packed": (
        lambda ids: (pack_sequence([X[i : i + 1].expand(1 + i % 3, 3) for i in ids], enforce_sorted=False), Y[ids]),
        lambda b: (pad_packed_sequence(b[0], batch_first=True)[0][:, 0], b[1]),
    ),
}


class Blocks(pl.LightningModule):
    """A regression of two equal blocks, on whatever ``read`` takes out of a batch."""

    def __init__(self, read: Callable[[Any], tuple[Any, Any]]) -> None:
        super().__init__()
        self.read = read
        self.blocks = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])
        self.head = nn.Linear(3, 1)

    def loss(self, batch: Any) -> Tensor:
        x, y = self.read(batch)
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(self.head(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=1)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch), batch_size=1)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.head(self.read(batch)[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def trained(make: Callable[[], pl.LightningModule], loaders: Any, engine: str | None, micro: int = 1, **options: Any) -> Any:
    """Weights, logged values and predictions of a run; under plain Lightning where there is no engine."""
    strategy: Any = "auto"
    if engine is not None:
        pinned = Plan(engine="single", devices=("cpu:0",), micro_batches=micro) if micro > 1 else None
        strategy = AutoParallelStrategy(plan=pinned, devices=TWO, **({} if pinned else {"allow": [engine]}), **options)
    pl.seed_everything(3, verbose=False)
    module = make()
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_epochs=2, enable_checkpointing=False, num_sanity_val_steps=0, **QUIET
    )
    train, validation = loaders()
    trainer.fit(module, train, validation)
    values = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return torch.nn.utils.parameters_to_vector(module.parameters()).detach(), values, trainer


def same(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours[0], theirs[0], atol=1e-5, rtol=1e-5)
    assert ours[1] == pytest.approx(theirs[1], abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "engine", "micro"),
    [
        *((kind, "single", 2) for kind in KINDS if kind != "lists"),
        *((kind, "ddp", 1) for kind in KINDS),
        *((kind, "pipeline", 1) for kind in ("mapping", "checked", "tensordict", "attributes")),
        ("mapping", "fsdp", 1),
        ("checked", "fsdp", 1),
    ],
)
def test_a_batch_of_any_kind(kind: str, engine: str, micro: int) -> None:
    collate, read = KINDS[kind]
    if kind == "tensordict":
        pytest.importorskip("tensordict")

    def loaders() -> Any:
        return [DataLoader(range(22), 4, shuffle=shuffle, collate_fn=collate) for shuffle in (True, False)]

    ours, theirs = (trained(lambda: Blocks(read), loaders, under, micro) for under in (engine, None))
    same(ours, theirs)
