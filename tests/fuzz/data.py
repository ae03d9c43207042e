"""The data, its batches and its loaders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, WeightedRandomSampler, default_collate

from tests.fuzz.nets import FEATURES, LENGTH, OF_PICTURES, OF_TOKENS, OUTPUTS, PIXELS, TOKENS
from tests.fuzz.recipe import Recipe

BATCH = 8


class Named(NamedTuple):
    """A batch with names."""

    features: Tensor
    classes: Tensor


@dataclass
class Fields:
    """A batch with fields."""

    features: Tensor
    classes: Tensor


class Samples(Dataset[Any]):
    """Some samples; the features are of the kind that the network takes."""

    def __init__(self, recipe: Recipe, count: int) -> None:
        draw = torch.Generator().manual_seed(recipe.seed + count)
        self.classes = torch.randint(OUTPUTS, (count,), generator=draw)
        if recipe.net in OF_TOKENS:
            self.features = torch.randint(1, TOKENS, (count, LENGTH), generator=draw)
        elif recipe.net in OF_PICTURES:
            self.features = torch.randn(count, 3, PIXELS, PIXELS, generator=draw)
        else:
            self.features = torch.randn(count, FEATURES, generator=draw)
        self.lengths = torch.randint(2, LENGTH + 1, (count,), generator=draw).tolist() if recipe.batch == "padded" else None

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        features = self.features[index]
        return features if self.lengths is None else features[: self.lengths[index]], self.classes[index]


class Stream(IterableDataset[Any]):
    """The samples, one after the other."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter([self.samples[index] for index in range(len(self.samples))])


class Own:
    """No DataLoader, but something that gives batches."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader


def _collate(batch: str) -> Callable[[list[Any]], Any]:
    def collate(samples: list[Any]) -> Any:
        if batch == "padded":
            longest = torch.nn.utils.rnn.pad_sequence([features for features, _ in samples], batch_first=True)
            return longest, torch.stack([classes for _, classes in samples])
        features, classes = default_collate(samples)
        match batch:
            case "dict":
                return {"features": features, "classes": classes}
            case "named":
                return Named(features, classes)
            case "dataclass":
                return Fields(features, classes)
            case "list":
                return [features, classes]
            case _:
                return features, classes

    return collate


def apart(batch: Any) -> tuple[Tensor, Tensor]:
    """Features and classes of a batch of any kind."""
    if isinstance(batch, dict):
        return batch["features"], batch["classes"]
    if isinstance(batch, Fields):
        return batch.features, batch.classes
    features, classes = batch
    return features, classes


def training(recipe: Recipe) -> Any:
    """The training loader, or whatever the recipe has instead."""
    samples, collate = Samples(recipe, recipe.samples), _collate(recipe.batch)
    shuffled: DataLoader[Any] = DataLoader(samples, BATCH, shuffle=True, collate_fn=collate)
    match recipe.loader:
        case "plain":
            return DataLoader(samples, BATCH, collate_fn=collate)
        case "drop-last":
            return DataLoader(samples, BATCH, shuffle=True, drop_last=True, collate_fn=collate)
        case "weighted":
            weights = [1.0 + index % 3 for index in range(len(samples))]
            return DataLoader(samples, BATCH, sampler=WeightedRandomSampler(weights, len(samples)), collate_fn=collate)
        case "iterable":
            return DataLoader(Stream(samples), BATCH, collate_fn=collate)
        case "batch-sampler":
            return DataLoader(samples, batch_sampler=BatchSampler(RandomSampler(samples), BATCH, False), collate_fn=collate)
        case "combined":
            return {"first": shuffled, "second": DataLoader(Samples(recipe, recipe.samples + 1), BATCH, collate_fn=collate)}
        case "own":
            return Own(shuffled)
        case _:
            return shuffled


def validation(recipe: Recipe) -> Any:
    """None, one or two loaders to validate with."""
    counts = {"none": (), "one": (12,), "two": (12, 9)}[recipe.validation]
    loaders = [DataLoader(Samples(recipe, count), BATCH, collate_fn=_collate(recipe.batch)) for count in counts]
    return loaders[0] if len(loaders) == 1 else loaders or None


class Module(pl.LightningDataModule):
    """The same loaders from a DataModule."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe

    def train_dataloader(self) -> Any:
        return training(self.recipe)

    def val_dataloader(self) -> Any:
        return validation(self.recipe) or []
