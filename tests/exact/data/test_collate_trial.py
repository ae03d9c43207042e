"""What a collate function makes of a whole batch is what every rank gets its rows of: padding, masks, graphs, batches of varying sizes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, default_collate

from lightning_autopar.exact.data import collate as loading
from lightning_autopar.exact.data.collate import collation_of, loader_key, look_at
from lightning_autopar.memory.trace.first_batch import some_batches
from tests.exact.data.test_batches import Blocks, same, trained


class Lengths(Dataset[tuple[Tensor, Tensor]]):
    """Sequences of these lengths."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, list):
            return padded([self[each] for each in index])
        generator = torch.Generator().manual_seed(index)
        return torch.randn(self.lengths[index], 3, generator=generator), torch.randn(1, generator=generator)


class Streamed(IterableDataset[Any]):
    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return (self.samples[index] for index in range(len(self.samples)))


class Buckets(Sampler[list[int]]):
    """Batches of unequal sizes, one of a single sample."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0, 1, 2], [3], [4, 5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15])

    def __len__(self) -> int:
        return 5


def padded(samples: Any) -> tuple[Tensor, Tensor]:
    return pad_sequence([x for x, _ in samples], batch_first=True), torch.stack([y for _, y in samples])


def as_dict(samples: Any) -> tuple[dict[str, Tensor], tuple[Tensor, None]]:
    """As pytorch-forecasting's: padded to the longest, with lengths, and a weight that is None."""
    x, y = padded(samples)
    return {"x": x, "lengths": torch.tensor([len(sample) for sample, _ in samples])}, (y, None)


def without_failed(samples: Any) -> Any:
    """Leaves samples out, as where a file couldn't be read."""
    return padded([sample for sample in samples if sample[0][0, 0] > -1.2])


def read(batch: Any) -> tuple[Tensor, Tensor]:
    x, y = batch
    return (x.mean(1), y) if isinstance(x, Tensor) else (x["x"].mean(1) + x["lengths"].view(-1, 1) / 10, y[0])


def module() -> Blocks:
    """Its loss is over the plain mean of all time steps, padding included."""
    return Blocks(read)


# Of batches of four, the ranks' parts in turn: in the first one both hold a longest sample, in later ones not.
LENGTHS = (6, 6, 4, 4, 6, 2, 4, 3, 3, 6, 2, 2, 5, 2, 2, 2)
EQUAL = (5,) * 16
LOADERS: dict[str, Any] = {
    "padded": lambda: [DataLoader(Lengths(*LENGTHS), 4, collate_fn=padded)] * 2,
    "padded in the validation": lambda: [DataLoader(Lengths(*lengths), 4, collate_fn=padded) for lengths in (EQUAL, LENGTHS)],
    "several validations": lambda: [
        DataLoader(Lengths(*EQUAL), 4),
        [DataLoader(Lengths(*EQUAL), 4), DataLoader(Lengths(*LENGTHS), 4, collate_fn=as_dict)],
    ],
    "dictionaries": lambda: [DataLoader(Lengths(*LENGTHS), 4, shuffle=shuffle, collate_fn=as_dict) for shuffle in (True, False)],
    "a stream": lambda: [DataLoader(Streamed(Lengths(*LENGTHS, 3, 1)), 4, collate_fn=padded)] * 2,
    "a stream of batches": lambda: (
        [DataLoader(Streamed([padded([Lengths(*LENGTHS)[i] for i in (j, 15 - j)]) for j in range(8)]), None)] * 2
    ),
    "unequal batches": lambda: [DataLoader(Lengths(*LENGTHS), batch_sampler=Buckets(), collate_fn=padded)] * 2,
    "a dataset that loads batches": lambda: [DataLoader(Lengths(*LENGTHS), None, sampler=BatchSampler(range(16), 4, False))] * 2,
    "samples left out": lambda: [DataLoader(Lengths(*LENGTHS), 5, collate_fn=without_failed)] * 2,
}


@pytest.mark.parametrize(
    ("loaders", "engine", "micro"),
    [
        *((loaders, "ddp", 1) for loaders in LOADERS),
        *((loaders, "single", 2) for loaders in ("padded", "a stream", "unequal batches", "samples left out")),
        *((loaders, engine, 1) for loaders in ("padded", "padded in the validation") for engine in ("fsdp", "pipeline")),
    ],
)
def test_ranks_have_rows_of_the_whole_batch(loaders: str, engine: str, micro: int) -> None:
    ours, theirs = (trained(module, LOADERS[loaders], under, micro) for under in (engine, None))
    same(ours, theirs)
    if engine != "single":
        assert ours[2].strategy.report.best_candidate.notes == ()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:.*Consider decreasing.*workers")
def test_parts_that_are_unlike_in_a_batch_that_nobody_looked_at_are_made_anew(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where loading is dear, ranks load their own samples, as long as their parts have one shape."""
    monkeypatch.setattr(loading, "_DEAR_SECONDS", 0.0)
    lengths = [5] * 64
    lengths[15] = 9  # of the fourth batch, which isn't among those looked at
    loaders = lambda: [DataLoader(Lengths(*lengths), 4, collate_fn=padded, num_workers=workers)] * 2  # noqa: E731
    assert look_at(loaders()[:1])[0][loader_key(loaders()[0])].collation == "rows"
    ours, theirs = (trained(module, loaders, under) for under in ("ddp", None))
    same(ours, theirs)


def test_what_is_found_out_about_a_loader() -> None:
    def collation(dataset: Any, collate: Any) -> Any:
        return collation_of(some_batches(DataLoader(dataset, 4, collate_fn=collate), 1.0))

    def graphs(samples: Any) -> Any:
        return {"nodes": torch.cat([x for x, _ in samples]), "targets": torch.stack([y for _, y in samples])}

    def takes_out(samples: Any) -> Any:
        return torch.stack([sample.pop("x") for sample in samples])

    assert collation(Lengths(*LENGTHS), padded) == "whole"
    assert collation(Lengths(*EQUAL), padded) == "whole"
    assert collation(Lengths(*LENGTHS), graphs) == "samples"
    assert collation([{"x": torch.ones(2)} for _ in range(8)], takes_out) == "whole"
    assert collation_of(some_batches(DataLoader(Lengths(1, 1)), 1.0)) is None
    sizes = [batch.batch_size for batch in some_batches(DataLoader(Lengths(*[1] * 91), 4, collate_fn=default_collate), 1.0)]
    assert sizes[:2] == [4, 3]
    assert len(sizes) <= 8


class Pairs(DataLoader[Any]):
    """Batches of two loaders side by side, the second of which begins anew; its second batch is smaller than the other's."""

    def __init__(self) -> None:
        self.each = [DataLoader(Lengths(*[5] * count), 4, collate_fn=padded) for count in (12, 7)]
        super().__init__(self.each[0].dataset)

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return zip(self.each[0], itertools.cycle(self.each[1]), strict=False)


def test_a_loader_that_makes_its_batches_is_looked_at_beyond_the_first_one() -> None:
    sizes = [[len(x) for x, _ in batch.batch] for batch in some_batches(Pairs(), 5.0)]
    assert sizes == [[4, 4], [4, 4], [4, 3]]  # the first, the last and the one between
    assert [batch.batch.item() for batch in some_batches(iter(torch.arange(3)), 5.0)] == [0, 2]


class EndsBadly(Pairs):
    """As scvi-tools' loader of two: past its length it raises, where no run comes to."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Any:
        yield from itertools.islice(super().__iter__(), len(self))
        raise ValueError("zip() argument 2 is longer than argument 1")


def test_a_loader_is_looked_at_up_to_its_length() -> None:
    assert [4, 3] in [[len(x) for x, _ in batch.batch] for batch in some_batches(EndsBadly(), 5.0)]
    both = lambda pair: (pair[0][0].mean(1) + pair[1][0].mean(1).sum(0), pair[0][1])  # noqa: E731
    with pytest.raises(ValueError, match=r"it has \(4, 5, 3\), \(4, 1\), \(3, 5, 3\), \(3, 1\)"):
        trained(lambda: Blocks(both), lambda: [Pairs()] * 2, "single", 2)
    ours, theirs = (trained(lambda: Blocks(both), lambda: [Pairs()] * 2, under) for under in ("ddp", None))
    same(ours, theirs)  # the ranks share the network, and each has the whole batch


class Nodes(Blocks):
    """Means over the nodes of each graph; every graph counts as much."""

    def __init__(self, dropout: float) -> None:
        super().__init__(lambda batch: batch)
        self.dropout = nn.Dropout(dropout)

    def loss(self, batch: Any) -> Tensor:
        x = batch["x"]
        for block in self.blocks:
            x = block(x)
        x = self.dropout(x)
        means = torch.zeros(len(batch["y"]), 3).index_add(0, batch["graph"], x) / torch.bincount(batch["graph"]).view(-1, 1)
        return nn.functional.mse_loss(self.head(means), batch["y"])


def concatenated(samples: Any) -> dict[str, Tensor]:
    graph = torch.tensor([index for index, (x, _) in enumerate(samples) for _ in x])
    return {"x": torch.cat([x for x, _ in samples]), "y": torch.stack([y for _, y in samples]), "graph": graph}


def graph_loaders(*lengths: int) -> Any:
    return lambda: [DataLoader(Lengths(*lengths), 4, collate_fn=concatenated)] * 2


@pytest.mark.parametrize(("engine", "dropout"), [("ddp", 0.0), ("pipeline", 0.0), ("pipeline", 0.3)])
def test_graphs(engine: str, dropout: float) -> None:
    """In the first batch all graphs have one node, so that their nodes look like samples."""
    ours, theirs = (trained(lambda: Nodes(dropout), graph_loaders(1, 1, 1, 1, *LENGTHS), under) for under in (engine, None))
    same(ours, theirs)


def test_dropout_over_nodes_is_no_row_of_samples() -> None:
    """In the first batch the nodes are dealt out evenly by chance. The ranks share the network by nodes, and each has the whole batch."""
    ours, theirs = (trained(lambda: Nodes(0.3), graph_loaders(3, 3, 3, 3, *LENGTHS), under, exact=True) for under in ("ddp", None))
    same(ours, theirs)


@pytest.mark.parametrize("hetero", [False, True], ids=["graphs", "graphs of several kinds"])
def test_torch_geometric(hetero: bool) -> None:
    geometric = pytest.importorskip("torch_geometric")
    x = [torch.randn(length, 3, generator=torch.Generator().manual_seed(length)) for length in LENGTHS]

    def graph(nodes: Tensor) -> Any:
        if not hetero:
            return geometric.data.Data(x=nodes, y=nodes[:1, :1])
        data = geometric.data.HeteroData(y=nodes[:1, :1])
        data["a"].x, data["b"].x = nodes, nodes[:1]
        return data

    class Graphs(Nodes):
        def loss(self, batch: Any) -> Tensor:
            kind = batch["a"] if hetero else batch
            return super().loss({"x": kind.x, "graph": kind.batch, "y": batch.y})

    loaders = lambda: [geometric.loader.DataLoader([graph(nodes) for nodes in x], batch_size=4)] * 2  # noqa: E731
    theirs = trained(lambda: Graphs(0.3), loaders, None)
    same(trained(lambda: Graphs(0.3), loaders, "pipeline"), theirs)
    theirs = trained(lambda: Graphs(0.0), loaders, None)
    same(trained(lambda: Graphs(0.0), loaders, "ddp"), theirs)
    same(trained(lambda: Graphs(0.0), loaders, "single", 2), theirs)


@pytest.mark.parametrize("kind", ["padded", "masked", "labelled"])
def test_hugging_face_collators(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{index}": index + 3 for index in range(20)} | {"[PAD]": 0, "[MASK]": 1, "[UNK]": 2}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]")), pad_token="[PAD]", mask_token="[MASK]"
    )
    texts = [{"input_ids": [3 + (index + each) % 20 for each in range(length)]} for index, length in enumerate(LENGTHS)]
    labelled = [{**text, "labels": text["input_ids"][:2]} for text in texts]

    class Texts(Blocks):
        def __init__(self) -> None:
            super().__init__(lambda batch: batch)
            self.embedding = nn.Embedding(23, 3)
            self.head = nn.Linear(3, 23)

        def loss(self, batch: Any) -> Tensor:
            x = self.embedding(batch["input_ids"])
            for block in self.blocks:
                x = block(x)
            scores = self.head(x).mean(1, keepdim=True)
            target = batch["labels"][:, :1] if "labels" in batch else batch["input_ids"][:, :1]
            return nn.functional.cross_entropy(scores.transpose(1, 2), target.clamp(min=0)) + (batch["input_ids"] == 1).float().mean()

    collator, samples = {
        "padded": (transformers.DataCollatorWithPadding(tokenizer), texts),
        "masked": (transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3), texts),
        "labelled": (transformers.DataCollatorForSeq2Seq(tokenizer), labelled),
    }[kind]

    def loaders() -> list[Any]:
        return [DataLoader(samples, 4, collate_fn=collator)] * 2

    theirs = trained(Texts, loaders, None)
    for engine, micro in (("ddp", 1), ("single", 2)):
        same(trained(Texts, loaders, engine, micro), theirs)
