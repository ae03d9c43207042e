"""What a step returns for a whole batch, made of what it returns for parts of it; and whether two such outputs are the same.

Only what has an entry for each sample can be put together. Knows tensors and containers; no step and no trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

#: Of a value in an output: keys, and positions in lists and tuples.
Path = tuple[Any, ...]


def lists_of_samples(outputs: Sequence[Any], rows: Sequence[int], path: Path = ()) -> set[Path]:
    """Where in the outputs a list has an entry for each sample, rather than a fixed number of entries.

    Args:
        outputs: of batches with different numbers of samples.
        path: where in the whole output these are.
    """
    first = outputs[0]
    if not isinstance(first, (Mapping, list, tuple)) or any(type(each) is not type(first) for each in outputs):
        return set()
    if isinstance(first, list) and all(len(each) == max(count, 1) for each, count in zip(outputs, rows, strict=True)):
        return {path}
    return {found for key in _keys(outputs) or () for found in lists_of_samples([each[key] for each in outputs], rows, (*path, key))}


def whole_output(outputs: Sequence[Any], rows: Sequence[int], lists: Container[Path], path: Path = ()) -> Any:
    """The whole batch's output.

    Args:
        outputs: of the parts, which have every ``len(outputs)``-th sample each.
        rows: how many samples each part has; 0 where it was fed one that isn't its own.
        lists: of :func:`lists_of_samples`.

    Raises:
        ValueError: if something in it has no entry for each sample, with a phrase that says what.
    """
    first = outputs[0]
    if isinstance(first, Tensor):
        return _tensor(outputs, rows)
    if any(type(each) is not type(first) for each in outputs):
        raise ValueError("the parts return values of different classes")
    if path in lists:
        whole: list[Any] = [None] * sum(rows)
        _deal(whole.__setitem__, outputs, rows)
        return whole
    if first is None or isinstance(first, (str, bytes, bool, int)):
        if any(each != first for each in outputs):
            raise ValueError(f"the parts return different values of the class {type(first).__name__}")
        return first
    if type(first) is not dict and not _is_model_output(first) and not isinstance(first, (list, tuple)):
        raise ValueError(f"nobody knows how parts of the class {type(first).__name__} make up the whole")
    if any(len(each) != len(first) for each in outputs) or (
        isinstance(first, Mapping) and any(set(each) != set(first) for each in outputs)
    ):
        raise ValueError("the parts return different keys, or lists of different lengths")

    def at(name: Any) -> Any:
        return whole_output([each[name] for each in outputs], rows, lists, (*path, name))

    if isinstance(first, Mapping):
        return type(first)(**{name: at(name) for name in first}) if _is_model_output(first) else {name: at(name) for name in first}
    fields = [at(index) for index in range(len(first))]
    return type(first)(*fields) if hasattr(first, "_fields") else type(first)(fields)


def _keys(outputs: Sequence[Any]) -> Sequence[Any] | None:
    """What dictionaries, or positions in sequences, are asked by; None where they differ."""
    found = [list(each) if isinstance(each, Mapping) else list(range(len(each))) for each in outputs]
    return found[0] if all(set(each) == set(found[0]) for each in found) else None


def same_output(one: Any, other: Any, tolerance: float) -> bool:
    """Whether two outputs are the same but for rounding.

    Args:
        tolerance: by which share of the largest value numbers may differ.
    """
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and _close(one, other, tolerance)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return set(one) == set(other) and all(same_output(value, other[name], tolerance) for name, value in one.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(same_output(*pair, tolerance) for pair in zip(one, other, strict=True))
    return type(one) is type(other) and bool(one == other)


def _close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    scale = float(torch.nan_to_num(one.detach().float()).abs().max()) if one.numel() else 0.0
    return torch.allclose(one.float(), other.float(), rtol=0.0, atol=tolerance * scale, equal_nan=True)


def _tensor(tensors: Sequence[Any], rows: Sequence[int]) -> Tensor:
    if not all(isinstance(each, Tensor) and each.ndim and len(each) == max(count, 1) for each, count in zip(tensors, rows, strict=True)):
        raise ValueError(f"a tensor of shape {tuple(tensors[0].shape)} has no row for each sample")
    if len({(each.shape[1:], each.dtype) for each in tensors}) > 1:
        raise ValueError("the parts' tensors have different shapes or types")
    whole: Tensor = tensors[0].new_empty((sum(rows), *tensors[0].shape[1:]))
    _deal(whole.__setitem__, tensors, rows)
    return whole


def _deal(place: Callable[[slice, Any], None], parts: Sequence[Any], rows: Sequence[int]) -> None:
    for index, (part, count) in enumerate(zip(parts, rows, strict=True)):
        if count:
            place(slice(index, None, len(parts)), part)


def _is_model_output(value: Any) -> bool:
    """Outputs of transformers are dictionaries with attributes, whose constructors take them by name."""
    return any(each.__name__ == "ModelOutput" for each in type(value).__mro__)
