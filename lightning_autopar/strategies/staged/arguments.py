"""Arguments of torch's operators: walked through, and put in words. Knows tensors only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


def map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """Over the containers that the dispatcher knows."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind(map_leaves(item, function) for item in value)
    if isinstance(value, (tuple, list)):
        items = [map_leaves(item, function) for item in value]
        return kind(*items) if hasattr(kind, "_fields") else tuple(items) if isinstance(value, tuple) else items
    if kind is dict:
        return {name: map_leaves(item, function) for name, item in value.items()}
    return function(value)


def leaves_of(value: Any) -> Iterator[Any]:
    """What is in containers."""
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from leaves_of(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from leaves_of(item)
    else:
        yield value


def indices_for_masks(args: Any) -> Any:
    """An index by real masks as one by positions, whose number is known."""
    indices: list[Any] = []
    for index in args[1]:
        if isinstance(index, Tensor) and type(index) is Tensor and index.dtype in (torch.bool, torch.uint8):
            with _disable_current_modes():
                indices.extend(index.nonzero().unbind(1))
        else:
            indices.append(index)
    return (args[0], indices, *args[2:])


def title(func: Any) -> str:
    """A function's name, quoted."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        name = str(getattr(func.__self__, "__name__", name))
    return f"{name!r}"


def first_line(error: BaseException) -> str:
    """What an error says, in short."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
