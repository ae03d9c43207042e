"""The rows of a collated batch: how many it has, and a rank's rows of it, whatever the batch is made of.

A batch's tensors and arrays hold a row a sample in dimension 0; a list may hold an entry a sample. They lie in mappings, sequences,
dataclasses and objects of the user's own, which are made anew and never changed. Knows no loader, no random state, no Lightning.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from random import SystemRandom
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from lightning_autopar.exact.data.rank_share import Dealing, cut, index_of

_NO_BATCHES = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, nn.Module, torch.Generator)
_Path = tuple[Any, ...]


def count_rows(batch: Any) -> int:
    """The size of dimension 0 that a collated batch's tensors and arrays agree on.

    Raises:
        ValueError: if they disagree, or there are none.
    """
    shapes = list(shapes_of(batch))
    sizes = {shape[0] for shape in shapes if shape}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(_no_rows(batch, shapes))
    return sizes.pop()


def take_rows(
    batch: Any,
    rank: int,
    dealing: Dealing,
    *,
    samples: int | None = None,
    one: Callable[[], Any] | None = None,
    collates: bool = False,
) -> tuple[int, Any]:
    """How many samples a collated batch has, and the rank's rows of it.

    Every tensor and array is cut along dimension 0; so are lists with an entry a sample. Numbers, strings and scalar tensors have no
    dimension: they belong to the whole batch and stay as they are.

    Args:
        batch: the whole batch. It isn't changed.
        samples: how many samples it was made of, where that is known. It may have fewer rows, as a collate function may leave samples out,
            but not more: those are nodes, or views, and nobody knows which sample's.
        one: makes such a batch of a single sample. It shows whether a list holds samples or tensors, where it could be either.
        collates: whether a batch is taken apart into its samples and collated anew where its class can do that, as torch_geometric's can:
            its tensors have no row a sample.

    Raises:
        ValueError: if there is no batch dimension, or something in the batch can't be cut.
    """
    if samples is None:
        of = count_rows(batch)
        return of, _Cutter(batch, of, rank, dealing).cut(batch)
    try:
        cutter = _Cutter(batch, samples, rank, dealing, collates=collates)
        part = cutter.cut(batch)
        if cutter.ambiguous and (single := _single(one)) is not None:
            cutter.listed = {path for path in cutter.ambiguous if len(_at(single, path)) == 1}
            part = cutter.cut(batch) if cutter.listed else part
        return samples, part
    except ValueError:
        sizes = {shape[0] for shape in shapes_of(batch) if shape}
        fewer = sizes.pop() if len(sizes) == 1 else samples
        if not 0 < fewer < samples or ((single := _single(one)) is not None and _lengths(single) != _lengths(batch)):
            raise
        return fewer, _Cutter(batch, fewer, rank, dealing).cut(batch)


def shapes_of(batch: Any) -> Iterator[tuple[int, ...]]:
    """The shapes of all tensors and arrays in a batch, and of other values that are indexed by sample."""
    return map(_shape, _arrays(batch, frozenset()))


def alike(one: Any, other: Any) -> bool:
    """Whether two batches have tensors of the same shapes and types, one after the other."""
    return [*shapes_of(one), *_types(one)] == [*shapes_of(other), *_types(other)]


def part_number(part: Any, rows: int) -> int:
    """A number that is the same for parts of a batch whose tensors have a row for each sample and agree in all other sizes and in type."""
    shapes = [shape for shape in shapes_of(part) if shape]
    if any(shape[0] != rows for shape in shapes):
        return SystemRandom().getrandbits(62)
    return zlib.crc32(repr(([shape[1:] for shape in shapes], _types(part))).encode())


def _types(batch: Any) -> list[str]:
    return [str(getattr(array, "dtype", None)) for array in _arrays(batch, frozenset())]


def _arrays(value: Any, seen: frozenset[int]) -> Iterator[Any]:
    if _is_array(value) or isinstance(value, PackedSequence) or _has_batch_size(value):
        yield value
    elif id(value) not in seen:
        inside = seen | {id(value)}
        for item in _children(value):
            yield from _arrays(item, inside)


def _shape(value: Any) -> tuple[int, ...]:
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0]), len(value.batch_sizes)
    if isinstance(value, Tensor) and value.is_nested:
        return (value.size(0),)
    return tuple(value.shape if _is_array(value) else value.batch_size)


def _no_rows(batch: Any, shapes: list[tuple[int, ...]], samples: str = "") -> str:
    found = ", ".join(str(shape) for shape in shapes[:6]) or "no tensors"
    return (
        f"this batch, a {type(batch).__name__}, has no batch dimension: its tensors' sizes in dimension 0 must be one and the same, "
        f"at least 1{samples}, but it has {found}"
    )


def _single(one: Callable[[], Any] | None) -> Any:
    """A batch of a single sample; None where there is none."""
    try:
        return None if one is None else one()
    except Exception:  # the user's collate function may leave out this very sample
        return None


def _is_array(value: Any) -> bool:
    return isinstance(value, (Tensor, numpy.ndarray))


def is_leaf(value: Any) -> bool:
    """Whether a value has no rows at all."""
    kinds = (str, bytes, int, float, complex, torch.dtype, torch.device)
    return value is None or isinstance(value, (*kinds, numpy.generic))


def _is_leaves(value: Any) -> bool:
    return bool(value) and all(map(is_leaf, value))


def _has_batch_size(value: Any) -> bool:
    """Whether it is indexed by sample as a whole, as a TensorDict is."""
    size = None if is_leaf(value) or isinstance(value, (dict, list, tuple)) else getattr(value, "batch_size", None)
    return isinstance(size, torch.Size) and len(size) > 0 and hasattr(type(value), "__getitem__")


def is_collection(value: Any) -> bool:
    """Whether its own methods can take it apart into samples and collate it from them, as those of torch_geometric's batches can."""
    return all(hasattr(type(value), name) for name in ("to_data_list", "from_data_list", "keys"))


def is_object(value: Any) -> bool:
    """Whether it is an instance of a class that holds a batch in its attributes; another library's array, which looks like one, isn't."""
    return not isinstance(value, _NO_BATCHES) and not hasattr(type(value), "__array__") and bool(state_of(value))


def state_of(value: Any) -> dict[str, Any]:
    """What an object's attributes hold."""
    slots = [name for kind in type(value).__mro__ for name in _names(kind.__dict__.get("__slots__", ()))]
    return {**{name: getattr(value, name) for name in slots if hasattr(value, name)}, **getattr(value, "__dict__", {})}


def _names(slots: Any) -> tuple[str, ...]:
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__") and not name.startswith("__"))


def _children(value: Any) -> list[Any]:
    if is_leaf(value) or isinstance(value, (set, frozenset)):
        return []
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return list(value)
    return list(state_of(value).values()) if is_object(value) else []


def _at(value: Any, path: _Path) -> Any:
    for key in path:
        value = value[key]
    return value


def _lengths(value: Any) -> list[int]:
    """Of all sequences in a batch."""
    own = [len(value)] if isinstance(value, (list, tuple)) and not isinstance(value, PackedSequence) else []
    return own + [length for item in _children(value) if not _is_array(item) for length in _lengths(item)]


@dataclass
class _Cutter:
    """Cuts a rank's rows out of one batch.

    Args:
        batch: the whole one, to be named where it can't be cut.
        of: how many samples it has.
        listed: sequences that are known to hold an entry a sample.
        ambiguous: sequences that may do so, and whose entries were cut.
    """

    batch: Any
    of: int
    rank: int
    dealing: Dealing
    listed: set[_Path] = field(default_factory=set)
    ambiguous: set[_Path] = field(default_factory=set)
    cuts: int = 0
    collates: bool = False

    def cut(self, value: Any, path: _Path = ()) -> Any:
        """The rank's rows of a part of the batch."""
        if _is_array(value):
            return self._cut_array(value)
        if is_leaf(value):
            return value
        if isinstance(value, PackedSequence):
            return self._cut_packed(value)
        if self.collates and is_collection(value):
            return self._cut_collection(value)
        if _has_batch_size(value):
            if value.batch_size[0] != self.of:
                raise ValueError(self._words(f"a {type(value).__name__} of {value.batch_size[0]} samples"))
            return value[index_of(tuple(self._own), torch.device("cpu"))]
        if type(value) is dict:
            return {key: self.cut(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return self._cut_sequence(value, path)
        if isinstance(value, Mapping) or is_dataclass(value) or (is_object(value) and any(True for _ in shapes_of(value))):
            return self._cut_object(value)
        raise ValueError(f"a {type(value).__name__} in a batch can't be split: it is no tensor, no array and holds none")

    @property
    def _own(self) -> range | tuple[int, ...]:
        """The rank's rows; the first one where it has none."""
        return self.dealing.indices(self.of, self.rank) or range(1)

    def _words(self, what: str) -> str:
        return f"{what} in a batch of {self.of} samples can't be split"

    def _cut_array(self, value: Any) -> Any:
        if not value.ndim:
            return value
        if _shape(value)[0] != self.of:
            raise ValueError(_no_rows(self.batch, list(shapes_of(self.batch)), f" and here {self.of}, the number of samples"))
        self.cuts += 1
        if not isinstance(value, Tensor):
            return cut(value, self.rank, self.dealing)
        if value.is_nested:
            rows = value.unbind()
            return torch.nested.as_nested_tensor([rows[index] for index in self._own], layout=value.layout)
        try:
            if value.layout is torch.strided:
                part: Tensor = cut(value, self.rank, self.dealing)
            else:
                part = value.index_select(0, index_of(tuple(self._own), value.device))
            if type(value).__torch_dispatch__ is Tensor.__torch_dispatch__:
                part = part if type(part) is type(value) else part.as_subclass(type(value))
        except (RuntimeError, NotImplementedError, TypeError) as error:
            raise ValueError(self._words(f"a {type(value).__name__} ({str(error).splitlines()[0]})")) from error
        if type(value).__torch_dispatch__ is Tensor.__torch_dispatch__ and vars(value):
            vars(part).update({name: self._attribute(name, item) for name, item in vars(value).items()})
        return part

    def _cut_packed(self, value: PackedSequence) -> PackedSequence:
        padded, lengths = pad_packed_sequence(value, batch_first=True)
        if len(padded) != self.of:
            raise ValueError(self._words(f"a PackedSequence of {len(padded)} sequences"))
        rows, own = (cut(each, self.rank, self.dealing) for each in (padded, lengths))
        return pack_padded_sequence(rows, own, batch_first=True, enforce_sorted=value.sorted_indices is None)

    def _cut_collection(self, value: Any) -> Any:
        """The collection, collated anew from the rank's samples; refused where that would lose what was added later."""
        try:
            samples = value.to_data_list()
            part = type(value).from_data_list([samples[index] for index in self._own]) if len(samples) == self.of else None
        except Exception as error:  # a batch that was made by hand
            words = f"a {type(value).__name__}, which can't be taken apart ({type(error).__name__}: {error}),"
            raise ValueError(self._words(words)) from error
        if part is None:
            raise ValueError(self._words(f"a {type(value).__name__} of {len(samples)} samples"))
        if lost := sorted(map(str, {*value.keys()} - {*part.keys()})):
            raise ValueError(self._words(f"a {type(value).__name__} whose {lost[0]!r} isn't of one sample"))
        self.cuts += 1
        return part

    def _cut_sequence(self, value: Any, path: _Path) -> Any:
        named = hasattr(value, "_fields")
        listable, before = len(value) == self.of and not named, self.cuts
        if _is_leaves(value) and not named and not listable:
            raise ValueError(self._words(f"a {type(value).__name__} of {len(value)} values"))
        if path in self.listed or (listable and _is_leaves(value)):
            return self._cut_list(value)
        try:
            parts = [self.cut(item, (*path, index)) for index, item in enumerate(value)]
        except ValueError:
            if listable:
                return self._cut_list(value)
            raise
        if listable and self.of > 1:
            if self.cuts == before:
                return self._cut_list(value)
            self.ambiguous.add(path)
        if isinstance(value, tuple):
            return type(value)(*parts) if named else tuple(parts)
        return parts

    def _cut_list(self, value: Any) -> Any:
        self.cuts += 1
        return cut(value, self.rank, self.dealing)

    def _cut_object(self, value: Any) -> Any:
        """A copy whose attributes and items are cut. A container of items that the copy shares is cut first, as an attribute."""
        try:
            result = copy.copy(value)
            for name, item in state_of(value).items():
                object.__setattr__(result, name, self._attribute(name, item))
            if isinstance(value, Mapping):
                self._cut_items(value, result)
        except ValueError:
            raise
        except Exception as error:  # of the user's class
            words = f"a {type(value).__name__}, which can't be copied with other items ({type(error).__name__}: {error}),"
            raise ValueError(self._words(words)) from error
        return result

    def _cut_items(self, value: Any, result: Any) -> None:
        for key, item in list(value.items()):
            part, now = self.cut(item), result[key]
            if part is item or (now is not item and list(shapes_of(now)) == list(shapes_of(part))):
                continue
            result[key] = part
            if value[key] is not item:
                value[key] = item
                raise ValueError(self._words(f"a {type(value).__name__}, whose copies share its items,"))

    def _attribute(self, name: str, value: Any) -> Any:
        """The rank's part of an attribute. A value that holds neither tensors nor an entry a sample belongs to the whole batch."""
        if isinstance(value, (list, tuple)) and _is_leaves(value):
            return self._cut_list(value) if len(value) == self.of and not name.startswith("_") else value
        if is_leaf(value):
            return value
        try:
            return self.cut(value)
        except ValueError as error:
            if any(True for _ in shapes_of(value)):
                raise ValueError(f"the attribute {name!r}: {error}") from error
            return value
