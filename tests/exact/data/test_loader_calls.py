"""Loaders whose code calls the module's network, although their first batch needn't."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_autopar.exact.data.loader_calls import called_by_loaders
from lightning_autopar.memory.trace.first_batch import FirstBatch


class Playing(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.net.inner = nn.ModuleDict({"line": nn.Linear(2, 2), "norm": nn.LayerNorm(2)})
        self.random, self.vocabulary = 1.0, {"a": 1}

    def play(self) -> Tensor:
        return torch.rand(2) if self.random > 0.5 else self.net(torch.rand(2))

    def play_all(self) -> Tensor:
        return torch.rand(2) if self.random > 0.5 else self(torch.rand(2))

    def forward(self, x: Tensor) -> Tensor:
        return x

    def to_numbers(self, samples: list[str]) -> Tensor:
        return torch.tensor([[self.vocabulary[name] for name in samples], [getattr(self, "size", 1)] * len(samples)])

    def by_setting(self, samples: list[Tensor]) -> Tensor:
        return torch.stack(samples).norm() * self.net.training

    def by_inner(self, samples: list[Tensor]) -> Tensor:
        return self.net.inner.line(torch.stack(samples))


def stream(play: Any) -> DataLoader[Any]:
    class Stream(IterableDataset[Tensor]):
        def __iter__(self) -> Any:
            yield from (play() for _ in range(4))

    return DataLoader(Stream(), batch_size=2)


def closing_over(module: Playing) -> DataLoader[Any]:
    class Stream(IterableDataset[Tensor]):
        def __iter__(self) -> Any:
            yield from (module.play() for _ in range(4))

    return DataLoader(Stream(), batch_size=2)


class Holding(Dataset[Tensor]):
    """A dataset that has a network of its own, or another's."""

    def __init__(self, net: nn.Module) -> None:
        self.policy, self.random = net, True

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(2) if self.random else self.policy(torch.rand(2))

    def __len__(self) -> int:
        return 4


def called(loader: Any, module: Playing) -> str | None:
    return called_by_loaders((FirstBatch(batch=None, loaders=(loader,)), None), module)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (closing_over, "may call 'net'"),
        (lambda module: stream(module.play), "may call 'net'"),
        (lambda module: stream(module.play_all), "may call the module"),
        (lambda module: DataLoader(Holding(module.net)), "may call 'policy'"),
        (lambda module: DataLoader(Holding(module)), "may call the module"),
        (lambda module: DataLoader([1], collate_fn=module.by_inner), "may call 'net'"),
        (lambda module: DataLoader([1], collate_fn=lambda samples: module.net(torch.ones(len(samples), 2))), "may call 'net'"),
    ],
)
def test_code_that_calls_the_network_later_is_named(make: Any, words: str) -> None:
    module = Playing()
    assert called(make(module), module) == words


@pytest.mark.parametrize(
    "make",
    [
        lambda module: DataLoader([torch.ones(2)]),
        lambda module: DataLoader(["a"], collate_fn=module.to_numbers),
        lambda module: DataLoader([torch.ones(2)], collate_fn=module.by_setting),
        lambda module: DataLoader([torch.ones(2)], collate_fn=partial(torch.utils.data.default_collate)),
        lambda module: DataLoader(Holding(nn.Linear(2, 2))),
        lambda module: [torch.ones(2, 2)],
    ],
)
def test_code_that_only_belongs_to_the_module_is_no_matter(make: Any) -> None:
    module = Playing()
    assert called(make(module), module) is None


def test_what_the_first_batch_called_is_said_as_a_fact() -> None:
    module = Playing()
    batch = FirstBatch(batch=None, loaders=(closing_over(module),))
    assert called_by_loaders((batch, replace(batch, calls="net")), module) == "calls 'net'"
