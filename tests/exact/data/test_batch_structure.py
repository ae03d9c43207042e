"""A rank's rows of batches of all kinds: classes of the user's own, tensors with attributes, lists of samples; the whole one stays."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from lightning_autopar.exact.data.batch_structure import count_rows, shapes_of, take_rows
from lightning_autopar.exact.data.collate import CollateAll
from lightning_autopar.exact.data.rank_share import Dealing
from lightning_autopar.memory.trace.first_batch import copied, tensors_of

HALVES = Dealing.even(2)


class Wrapped(MutableMapping[str, Any]):
    """Holds its items in an attribute, which ``copy.copy`` shares."""

    def __init__(self, items: dict[str, Any]) -> None:
        self.d = items

    def __getitem__(self, key: str) -> Any:
        return self.d[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.d[key] = value

    def __delitem__(self, key: str) -> None:
        del self.d[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.d)

    def __len__(self) -> int:
        return len(self.d)


_STORE: dict[int, dict[str, Any]] = {}


class Elsewhere(Wrapped):
    """Holds its items where no copy can replace them."""

    def __init__(self, items: dict[str, Any]) -> None:
        self.key = 7
        _STORE[self.key] = items

    @property
    def d(self) -> dict[str, Any]:  # type: ignore[override]
        return _STORE[self.key]


class Checked(Wrapped):
    """As a TensorDict: all items have its ``batch_size``, and it is indexed by sample."""

    def __init__(self, items: dict[str, Any], batch_size: int) -> None:
        super().__init__(items)
        self.batch_size = torch.Size([batch_size])
        assert all(len(item) == batch_size for item in items.values())

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self.d[key]
        return Checked({name: item[key] for name, item in self.d.items()}, len(key))


class Tagged(Tensor):
    """A tensor with attributes."""

    names: Any
    scale: Any


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    ids: list[str]
    squared: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "squared", self.x.square())


class Slotted:
    __slots__ = ("_keys", "x")

    def __init__(self, x: Tensor) -> None:
        self.x, self._keys = x, ["a", "b", "c", "d"]


class Custom:
    """As torch's documentation writes a batch with ``pin_memory``."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.inner = x, {"y": x + 1}


Pair = namedtuple("Pair", "x y")
X = torch.arange(8.0).view(4, 2)


def tagged() -> Tensor:
    tensor = X.clone().as_subclass(Tagged)
    tensor.names, tensor.scale = ["a", "b", "c", "d"], 2.0
    return tensor


@pytest.mark.parametrize(
    ("make", "get"),
    [
        (lambda: Wrapped({"x": X.clone()}), lambda batch: batch["x"]),
        (lambda: Wrapped({"deep": Wrapped({"x": X.clone()})}), lambda batch: batch["deep"]["x"]),
        (lambda: UserDict({"x": X.clone()}), lambda batch: batch["x"]),
        (lambda: OrderedDict(x=X.clone()), lambda batch: batch["x"]),
        (lambda: Checked({"x": X.clone()}, 4), lambda batch: batch["x"]),
        (lambda: {"nested": [Checked({"x": X.clone()}, 4)]}, lambda batch: batch["nested"][0]["x"]),
        (lambda: Frozen(X.clone(), list("abcd")), lambda batch: batch.x),
        (lambda: Frozen(X.clone(), list("abcd")), lambda batch: batch.squared.sqrt()),
        (lambda: Slotted(X.clone()), lambda batch: batch.x),
        (lambda: Custom(X.clone()), lambda batch: batch.inner["y"] - 1),
        (lambda: Pair(X.clone(), [numpy.arange(4)]), lambda batch: batch.x),
        (lambda: X.to_sparse(), lambda batch: batch.to_dense()),
        (lambda: torch.nested.as_nested_tensor(list(X), layout=torch.jagged), lambda batch: torch.stack(batch.unbind())),
        (tagged, lambda batch: batch.as_subclass(Tensor)),
    ],
)
def test_rows_of_a_class_are_cut_and_the_whole_one_stays(make: Any, get: Any) -> None:
    whole = make()
    for rank in range(2):
        of, part = take_rows(whole, rank, HALVES)
        assert of == count_rows(whole) == 4
        assert type(part) is type(whole)
        assert torch.equal(get(part), X[rank::2])
        assert torch.equal(get(whole), X)


def test_attributes_of_tensors_come_along() -> None:
    part = take_rows(tagged(), 1, HALVES)[1]
    assert (part.names, part.scale) == (["b", "d"], 2.0)
    assert (copied({"x": tagged()})["x"].names, copied(tagged()).scale) == (list("abcd"), 2.0)
    crooked = tagged()
    crooked.offsets = torch.arange(5)
    with pytest.raises(ValueError, match="the attribute 'offsets'"):
        take_rows(crooked, 0, HALVES)


def test_packed_sequences_keep_their_order() -> None:
    sequences = [torch.arange(float(length)) for length in (2, 5, 1, 3)]
    for ordered in (False, True):
        given = sorted(sequences, key=len, reverse=True) if ordered else sequences
        whole = pack_sequence(given, enforce_sorted=ordered)
        for rank in range(2):
            of, part = take_rows(whole, rank, HALVES)
            assert of == 4
            assert isinstance(part, PackedSequence)
            padded, lengths = pad_packed_sequence(part, batch_first=True)
            assert [row[:length].tolist() for row, length in zip(padded, lengths, strict=True)] == [g.tolist() for g in given[rank::2]]


def test_lists_of_samples_are_told_from_lists_of_tensors() -> None:
    """As detection's ``tuple(zip(*samples))``: images of three channels, also where there are three of them."""

    def collate(samples: Any) -> Any:
        return tuple(zip(*samples, strict=True))

    for count in (2, 3, 4):
        samples = [(torch.full((3, 4, 5 + index), float(index)), {"boxes": torch.ones(index, 4)}) for index in range(count)]
        for rank in range(2):
            of, (images, targets) = CollateAll(collate, rank, HALVES)(samples)
            assert of == count
            assert [image.shape[-1] for image in images] == [5 + index for index in range(rank, count, 2)]
            assert [len(target["boxes"]) for target in targets] == list(range(rank, count, 2))
    records = [{"id": f"sample {index}"} for index in range(4)]
    assert take_rows([X, records], 1, HALVES)[1][1] == records[1::2]
    tokens = [[1, 2, 3, 4], [5], [6, 7], [8]]
    assert take_rows([X, tokens], 1, HALVES, samples=4)[1][1] == tokens[1::2]


def test_batches_of_fewer_rows_than_samples_are_split_those_of_more_are_not() -> None:
    def without_failed(samples: Any) -> Any:
        return torch.stack([sample for sample in samples if sample is not None])

    def nodes(samples: Any) -> Any:
        return {"x": torch.cat([sample.repeat(2, 1) for sample in samples]), "sample": torch.arange(2 * len(samples))}

    of, part = CollateAll(without_failed, 1, HALVES)([X[0], None, X[1], X[2]])
    assert of == 3
    assert torch.equal(part, X[1:2])
    with pytest.raises(ValueError, match=r"this batch, a dict, has no batch dimension.* here 4, the number of samples.*\(8, 2\), \(8,\)"):
        CollateAll(nodes, 0, HALVES)(list(X))
    of, part = CollateAll(nodes, 0, HALVES, by_samples=True)(list(X))
    assert (of, len(part["x"])) == (4, 4)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (Elsewhere({"x": X.clone()}), "a Elsewhere, whose copies share its items, in a batch of 4 samples can't be split"),
        ([X, {1, 2}], "a set in a batch can't be split"),
        (Custom(torch.ones(())), "no batch dimension"),
    ],
)
def test_what_cannot_be_cut_is_named_and_stays(batch: Any, words: str) -> None:
    before = list(shapes_of(batch))
    with pytest.raises(ValueError, match=words):
        take_rows(batch, 0, HALVES)
    assert list(shapes_of(batch)) == before


class Graphs:
    """As torch_geometric's batches: the nodes of all graphs behind one another."""

    def __init__(self, nodes: list[Tensor], **more: Any) -> None:
        self.items, self.sizes = {"x": torch.cat(nodes), **more}, [len(each) for each in nodes]

    def keys(self) -> Any:
        return self.items.keys()

    def to_data_list(self) -> list[Tensor]:
        return list(self.items["x"].split(self.sizes))

    @classmethod
    def from_data_list(cls, graphs: list[Tensor]) -> Graphs:
        return cls(graphs)


def test_what_can_be_collated_anew_is_where_that_is_asked_for() -> None:
    batch = {"graphs": Graphs([X[:1], X[1:], X[:2]]), "y": X[:3]}
    of, part = take_rows(batch, 0, HALVES, samples=3, collates=True)
    assert (of, part["graphs"].sizes) == (3, [1, 2])
    assert torch.equal(part["graphs"].items["x"], X[[0, 0, 1]])
    assert batch["graphs"].sizes == [1, 3, 2]  # type: ignore[union-attr]
    for given, words in (
        ({"graphs": Graphs([X, X])}, "a Graphs of 2 samples in a batch of 3 samples can't be split"),
        ({"graphs": Graphs([X, X, X], added=torch.ones(1))}, "a Graphs whose 'added' isn't of one sample in a batch"),
    ):
        with pytest.raises(ValueError, match=words):
            take_rows(given, 0, HALVES, samples=3, collates=True)
    with pytest.raises(ValueError, match="no batch dimension"):
        take_rows(batch, 0, HALVES, samples=3)


def test_copies_share_no_tensor() -> None:
    for batch in (Wrapped({"x": X.clone()}), Frozen(X.clone(), []), Slotted(X.clone()), [pack_sequence([X[0], X[1]])]):
        ours, theirs = tensors_of(copied(batch)), tensors_of(batch)
        assert theirs
        assert [tensor.shape for tensor in ours] == [tensor.shape for tensor in theirs]
        assert not {tensor.data_ptr() for tensor in ours} & {tensor.data_ptr() for tensor in theirs}


def test_a_tensordict() -> None:
    tensordict = pytest.importorskip("tensordict")
    for size in ([4], []):
        whole = tensordict.TensorDict({"x": X.clone(), "deep": {"y": X + 1}}, batch_size=size)
        of, part = take_rows(whole, 1, HALVES)
        assert (of, len(whole["x"])) == (4, 4)
        assert torch.equal(part["deep", "y"], X[1::2] + 1)
        assert torch.equal(copied(whole)["x"], X)
