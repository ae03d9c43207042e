"""What a block returns, described by its arguments, so that a stage that skips the block knows the shape of its result. Knows no modules.

Some tensors leave a block in another way: a hook inside it sees them, or an attribute holds them. They are described here as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, register_pytree_node, tree_flatten, tree_map

from lightning_autopar.strategies.pipeline.stages.cut_tensors import Leaf, Output

#: Keys and positions that lead from ``(args, kwargs)`` to a leaf.
Place: TypeAlias = tuple[Any, ...]
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, slice, range)


def places(value: Any, at: Place = ()) -> Iterator[tuple[Place, Any]]:
    """The leaves of a call's arguments, with their places; tuples, lists and mappings are searched, everything else is a leaf."""
    if isinstance(value, (tuple, list)) and type(value) is not torch.Size:
        for index, item in enumerate(value):
            yield from places(item, (*at, index))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from places(item, (*at, key))
    else:
        yield at, value


def find(value: Any, place: Place) -> Any:
    """The value at a place among a call's arguments.

    Raises:
        LookupError: if there is none.
    """
    for key in place:
        value = value[key]
    return value


def describe(result: Any, given: Sequence[tuple[Place, Any]]) -> Output | str:
    """A block's result in terms of its arguments' leaves; a sentence if it contains something that can't be made anew.

    Args:
        given: of its arguments, as :func:`places` has them.
    """
    ids = {id(leaf): place for place, leaf in reversed(given) if not isinstance(leaf, _PLAIN)}
    flat, structure = flattened(result, given)
    leaves: list[Leaf] = []
    for leaf in flat:
        if id(leaf) in ids:
            leaves.append(Leaf(same_as=ids[id(leaf)]))
        elif isinstance(leaf, Tensor):
            leaves.append(_tensor(leaf, [(place, each) for place, each in given if isinstance(each, Tensor)]))
        elif isinstance(leaf, (bool, int, float)):
            alike = next((place for place, each in given if type(each) is type(leaf) and each == leaf), None)
            leaves.append(Leaf(value=leaf, computed=True) if alike is None else Leaf(same_as=alike))
        elif isinstance(leaf, _PLAIN):
            leaves.append(Leaf(value=leaf))
        else:
            return f"it returns a {type(leaf).__name__}, which a stage without it can't make"
    return Output(structure=structure, leaves=tuple(leaves))


def flattened(result: Any, given: Sequence[tuple[Place, Any]]) -> tuple[list[Any], TreeSpec]:
    """A block's result as leaves, also of dataclasses; an argument that it returns is one leaf, whatever it contains."""
    ids = {id(leaf) for _, leaf in given if not isinstance(leaf, _PLAIN)}

    def is_leaf(value: Any) -> bool:
        return id(value) in ids

    def opened(value: Any) -> Any:
        if is_leaf(value) or not _is_record(value):
            return value
        return _Record(type(value), {name: tree_map(opened, item, is_leaf=is_leaf) for name, item in vars(value).items()})

    return tree_flatten(tree_map(opened, result, is_leaf=is_leaf), is_leaf=is_leaf)


@dataclass(frozen=True)
class _Record:
    """An instance of a dataclass, which torch's pytree takes for a leaf."""

    kind: type[Any]
    fields: dict[str, Any]


def _is_record(value: Any) -> bool:
    """Whether it is an instance of a dataclass with no other attributes than its fields. A class defined in a function can't be pickled."""
    kind = type(value)
    if not is_dataclass(kind) or "<locals>" in kind.__qualname__:
        return False
    return {field.name for field in fields(kind)} == getattr(value, "__dict__", {}).keys()


def _filled(values: Iterable[Any], context: Any) -> Any:
    """Make the instance anew, without running its class's own code."""
    kind, names = context
    record = object.__new__(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(record, name, value)
    return record


register_pytree_node(_Record, lambda record: (list(record.fields.values()), (record.kind, tuple(record.fields))), _filled)


def _tensor(tensor: Tensor, given: Sequence[tuple[Place, Tensor]]) -> Leaf:
    shape = tuple(tensor.shape)
    same = [(place, each) for place, each in given if tuple(each.shape) == shape]
    alike = next((place for place, each in same if each.dtype == tensor.dtype), same[0][0] if same else None)
    dims = (
        [((alike, dim),) for dim in range(len(shape))] if alike is not None else [_dim(dim, size, given) for dim, size in enumerate(shape)]
    )
    dtype_of = next((place for place, each in given if each.dtype == tensor.dtype and (alike is None or place == alike)), None)
    # Two arguments of one shape, as an encoder's and a decoder's text in one batch, may have two in the next.
    like = dtype_of if shape and len({id(each) for _, each in same}) == 1 else None
    return Leaf(shape=shape, dims=tuple(dims), dtype=tensor.dtype, dtype_of=dtype_of, like=like, requires_grad=tensor.requires_grad)


def _dim(dim: int, size: int, given: Sequence[tuple[Place, Tensor]]) -> tuple[tuple[Place, int], ...]:
    """The arguments' dimensions whose product is a dimension of the result: tries the same one first, then any, then two adjacent ones."""
    if size == 1:
        return ()
    for place, each in given:
        if each.dim() > dim and each.shape[dim] == size:
            return ((place, dim),)
    for place, each in given:
        for other, theirs in enumerate(each.shape):
            if theirs == size:
                return ((place, other),)
    for place, each in given:
        for other in range(each.dim() - 1):
            if each.shape[other] > 1 and each.shape[other] * each.shape[other + 1] == size:
                return ((place, other), (place, other + 1))
    return ()


def shape_of(leaf: Leaf, arguments: Any) -> tuple[int, ...]:
    """A tensor's shape, from the block's present arguments."""
    assert leaf.shape is not None
    shape: list[int] = []
    for size, factors in zip(leaf.shape, leaf.dims, strict=True):
        product = 1
        for place, dim in factors:
            product *= int(find(arguments, place).shape[dim])
        shape.append(product if factors else size)
    return tuple(shape)


@dataclass
class EscapedOutputs:
    """The output of a module within a block that a user's hook sees, or that the block leaves in an attribute.

    Args:
        output: in terms of the block's arguments; a sentence where it can't be described.
        numbers: of the leaves that are used after the block.
    """

    output: Output | str
    flat: list[Any]
    numbers: dict[int, int]

    @classmethod
    def of(cls, value: Any, given: list[tuple[Any, Any]], *, module: str, attribute: str | None = None) -> EscapedOutputs:
        """Describe a value in terms of the block's arguments."""
        output = describe(value, given)
        if isinstance(output, Output):
            output = replace(output, module=module, attribute=attribute)
        return cls(output, flattened(value, given)[0] if isinstance(output, Output) else [], {})

    def is_needed(self, others: list[EscapedOutputs]) -> bool:
        """Whether it is used after the block, or the same kind of hook catches something that is."""
        if not isinstance(self.output, Output) or self.output.attribute is not None:
            return bool(self.numbers)
        return any(each.numbers and isinstance(each.output, Output) and each.output.module == self.output.module for each in others)

    def numbered(self) -> Output:
        """With its leaves' numbers."""
        assert isinstance(self.output, Output)
        leaves = enumerate(self.output.leaves)
        return replace(self.output, leaves=tuple(replace(leaf, index=self.numbers.get(place)) for place, leaf in leaves))
