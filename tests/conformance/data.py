"""The zoo's data: seeded, small, and of sizes that the batch size doesn't divide. Knows no module.

The last batch of an epoch is ragged: 27 samples in batches of 8 leave 3, 25 leave a single sample, which two ranks can't share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sequences(samples: int, seed: int) -> Dataset[Any]:
    """Bytes with a pattern: each is a few more than the last."""
    g = generator(seed)
    start, stride = torch.randint(0, 256, (samples, 1), generator=g), torch.randint(1, 4, (samples, 1), generator=g)
    return TensorDataset((start + stride * torch.arange(17)) % 256)


def images(samples: int, seed: int) -> Dataset[Any]:
    g = generator(seed)
    labels = torch.randint(0, 4, (samples,), generator=g)
    return TensorDataset(torch.randn(samples, 3, 6, 6, generator=g) + labels[:, None, None, None] * 0.3, labels)


def vectors(samples: int, seed: int, classes: int = 4) -> Dataset[Any]:
    g = generator(seed)
    x = torch.randn(samples, 10, generator=g)
    return TensorDataset(x, (x[:, :classes] + 0.3 * torch.randn(samples, classes, generator=g)).argmax(-1))


def values(samples: int, seed: int) -> Dataset[Any]:
    g = generator(seed)
    x = torch.randn(samples, 10, generator=g)
    return TensorDataset(x, x[:, 0] * x[:, 1] + 0.1 * torch.randn(samples, generator=g))


def series(samples: int, seed: int) -> Dataset[Any]:
    g = generator(seed)
    x = torch.randn(samples, 7, 4, generator=g)
    return TensorDataset(x, x.mean(1)[:, :3].argmax(-1))


def points(samples: int, seed: int, width: int = 12) -> Dataset[Any]:
    return TensorDataset(torch.randn(samples, width, generator=generator(seed)))


def narrow_points(samples: int, seed: int) -> Dataset[Any]:
    return points(samples, seed, 6)


def masked(samples: int, seed: int) -> Dataset[Any]:
    g = generator(seed)
    ids = torch.randint(0, 20, (samples, 9), generator=g)
    chosen = torch.rand(samples, 9, generator=g) < torch.linspace(0.1, 0.9, samples)[:, None]
    chosen[:, 0] = True
    return TensorDataset(ids.masked_fill(chosen, 0), ids.masked_fill(~chosen, -100))


def views(samples: int, seed: int) -> Dataset[Any]:
    g = generator(seed)
    x = torch.randn(samples, 10, generator=g)
    return TensorDataset(x + 0.1 * torch.randn(x.shape, generator=g), x + 0.1 * torch.randn(x.shape, generator=g))


class Translations(Dataset[Any]):
    def __init__(self, samples: int, seed: int) -> None:
        self.source = torch.randint(0, 20, (samples, 6), generator=generator(seed))

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"source": self.source[index], "target": self.source[index].flip(0)}


class Graphs(Dataset[Any]):
    """Random graphs of 3 to 7 nodes with their edges in both directions."""

    def __init__(self, samples: int, seed: int) -> None:
        g = generator(seed)
        self.graphs = []
        for _ in range(samples):
            nodes = int(torch.randint(3, 8, (), generator=g))
            edges = torch.randint(0, nodes, (2, nodes + 2), generator=g)
            x = torch.randn(nodes, 4, generator=g)
            self.graphs.append({"x": x, "edge_index": torch.cat([edges, edges.flip(0)], dim=1), "y": x[:, 0].sum()})

    def __len__(self) -> int:
        return len(self.graphs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.graphs[index]

    @staticmethod
    def collate(graphs: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        sizes = torch.tensor([len(graph["x"]) for graph in graphs])
        offsets = sizes.cumsum(0) - sizes
        return {
            "x": torch.cat([graph["x"] for graph in graphs]),
            "edge_index": torch.cat([graph["edge_index"] + offset for graph, offset in zip(graphs, offsets, strict=True)], dim=1),
            "graph": torch.repeat_interleave(torch.arange(len(graphs)), sizes),
            "y": torch.stack([graph["y"] for graph in graphs]),
        }


class Records(Dataset[Any]):
    def __init__(self, samples: int, seed: int) -> None:
        g = generator(seed)
        self.image, self.text = torch.randn(samples, 6, generator=g), torch.randint(0, 20, (samples, 5), generator=g)

    def __len__(self) -> int:
        return len(self.image)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, text = self.image[index], self.text[index]
        targets = [image.sum(), text.float().mean() / 10]
        return {"name": f"sample {index}", "inputs": {"image": image, "text": text}, "targets": targets}


class Stream(IterableDataset[Any]):
    """Samples one after another, their number not known beforehand."""

    def __init__(self, samples: int, seed: int) -> None:
        self.samples = samples
        self.seed = seed

    def __iter__(self) -> Iterator[Any]:
        g = generator(self.seed)
        for _ in range(self.samples):
            x = torch.randn(10, generator=g)
            yield x, x[:4].argmax()


class House(pl.LightningDataModule):
    """A DataModule that splits its data itself, and validates on two loaders."""

    def __init__(self, batch_size: int = 8, num_workers: int = 0, shuffle: bool = True) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.prepared = False

    def prepare_data(self) -> None:
        self.prepared = True

    def setup(self, stage: str) -> None:
        self.train_set, self.val_set, self.other_set = torch.utils.data.random_split(values(41, 13), [27, 7, 7], generator=generator(3))

    def train_dataloader(self) -> Any:
        return DataLoader(self.train_set, self.hparams.batch_size, shuffle=self.hparams.shuffle, num_workers=self.hparams.num_workers)

    def val_dataloader(self) -> Any:
        return [DataLoader(part, 5, num_workers=self.hparams.num_workers) for part in (self.val_set, self.other_set)]


def loaders(dataset: Callable[[int, int], Dataset[Any]], *, train: int = 27, collate_fn: Any = None) -> Callable[..., dict[str, Any]]:
    """Train and validation loaders: ``train`` samples in batches of 8, and 11 in batches of 4, the last batches ragged."""

    def build(*, shuffle: bool = True, num_workers: int = 0) -> dict[str, Any]:
        train_set = dataset(train, 1)
        shuffle = shuffle and not isinstance(train_set, IterableDataset)
        common = {"num_workers": num_workers, "collate_fn": collate_fn}
        return {
            "train_dataloaders": DataLoader(train_set, 8, shuffle=shuffle, **common),
            "val_dataloaders": DataLoader(dataset(11, 2), 4, **common),
        }

    return build


def house(**options: Any) -> dict[str, Any]:
    return {"datamodule": House(**options)}


def binary(samples: int, seed: int) -> Dataset[Any]:
    return vectors(samples, seed, classes=2)
