"""Operations whose output shape depends on values, or that torch's fakes refuse: their results, as fakes. Knows torch; nothing of steps.

Each function gets the :class:`.shadow_values.ShadowValues` that knows or guesses values. Where the values are unknown the output has the
largest possible shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

if TYPE_CHECKING:
    from lightning_autopar.memory.fakes.shadow_values import ShadowValues

aten = torch.ops.aten
SPREAD = "what the step chooses by computed scores, such as experts for tokens, was taken to be spread evenly"


def _masked_select(shadow: ShadowValues, values: dict[str, Any]) -> Tensor:
    source, mask = values["self"], values["mask"]
    chosen = shadow.get(mask)
    if chosen is not None and mask.shape == source.shape:
        shadow.note(mask, shaped=True)
        with unset_fake_temporarily():
            count = int(chosen.count_nonzero())
    else:
        count = shadow.everything(math.prod(torch.broadcast_shapes(source.shape, mask.shape)))
    return torch.empty(count, dtype=source.dtype, device=source.device)


def _unique(shadow: ShadowValues, values: dict[str, Any]) -> tuple[Tensor, ...]:
    """``unique`` and similar: all values are assumed to differ, so that all are kept."""
    source = values["self"]
    dim = values.get("dim")
    count = shadow.everything(source.numel() if dim is None else source.shape[dim])
    kept = torch.empty_like(source.flatten() if dim is None else source)
    kept = kept.narrow(dim or 0, 0, count)
    inverse = torch.empty(source.shape if dim is None else (source.shape[dim],), dtype=torch.long, device=source.device)
    return kept, inverse, torch.empty(count, dtype=torch.long, device=source.device)


def _bincount(shadow: ShadowValues, values: dict[str, Any]) -> Tensor:
    """Counts of unknown numbers, assumed to be spread evenly over the caller's bins."""
    source, bins = values["self"], values.get("minlength", 0)
    shadow.guess(SPREAD)
    shadow.shaped = True
    counts = torch.empty(max(bins, 1), dtype=torch.long if values.get("weights") is None else torch.double, device=source.device)
    with unset_fake_temporarily():
        even = torch.full((max(bins, 1),), source.numel() // max(bins, 1), dtype=torch.long)
        even[0] += source.numel() - int(even.sum())
    if values.get("weights") is None:
        shadow.assume(counts, even, SPREAD)
    return counts


def _repeat_interleave(shadow: ShadowValues, values: dict[str, Any]) -> Tensor:
    repeats, size = values["repeats"], values.get("output_size")
    return torch.empty(repeats.numel() if size is None else size, dtype=repeats.dtype, device=repeats.device)


def padded(
    shadow: ShadowValues, packed: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """``pad_packed_sequence``: torch's code writes to memory that fakes don't have (``aten/src/ATen/native/PackedSequence.cpp``)."""
    known = shadow.get(batch_sizes)
    assert known is not None, "batch sizes are real, or their values are kept"
    with unset_fake_temporarily():
        sizes = [int(size) for size in known]
    output = packed.new_full((max(total_length, len(sizes)), sizes[0], *packed.shape[1:]), padding_value)
    start = 0
    for step, size in enumerate(sizes):
        output[step, :size].copy_(packed[start : start + size])
        start += size
    lengths = torch.tensor([sum(size > row for size in sizes) for row in range(sizes[0])])
    return output.transpose(0, 1) if batch_first else output, lengths


def _packed(shadow: ShadowValues, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """A padded sequence without its padding (``aten/src/ATen/native/PackedSequence.cpp``)."""
    padded, lengths = args[0], shadow.get(args[1])
    steps, rows = (padded.shape[1], padded.shape[0]) if args[2] else padded.shape[:2]
    if lengths is None:
        shadow.everything(0)
    with unset_fake_temporarily():
        real = torch.full((rows,), steps) if lengths is None else lengths
        sizes = torch.tensor([int((real > step).sum()) for step in range(int(real.max()))])
        total = int(sizes.sum())
    shadow.note(args[1], shaped=True)
    packed = torch.empty((total, *padded.shape[2:]), dtype=padded.dtype, device=padded.device)
    return packed, sizes  # a real tensor: recurrent layers read it in C++


def _ctc(shadow: ShadowValues, values: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The loss and the table of partial paths that it keeps (``aten/src/ATen/native/LossCTC.cpp``)."""
    scores, targets, lengths = values["log_probs"], values["targets"], shadow.get(values["target_lengths"])
    rows = scores.shape[1] if scores.dim() == 3 else 1
    with unset_fake_temporarily():
        longest = int(lengths.max()) if lengths is not None else 0
    if lengths is None:
        longest = targets.shape[1] if targets.dim() > 1 else shadow.everything(len(targets))
    return scores.new_empty(rows), scores.new_empty((rows, scores.shape[0], 2 * longest + 1))


def _grouped(shadow: ShadowValues, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A product of groups of rows with a matrix each; torch's own fake refuses all but bfloat16, its CPU kernel takes all types."""
    left, right = args[0], args[1]
    offsets = kwargs.get("offs", args[2] if len(args) > 2 else None)
    dtype = kwargs.get("out_dtype") or left.dtype
    if left.dim() == right.dim() == 2 and offsets is not None:
        shape: tuple[int, ...] = (offsets.numel(), left.shape[0], right.shape[1])
    elif left.dim() == right.dim() == 3:
        shape = (left.shape[0], left.shape[1], right.shape[2])
    else:
        shape = (left.shape[-2], right.shape[-1])
    return torch.empty(shape, dtype=dtype, device=left.device)


def cloned(source: Tensor) -> Tensor:
    """A sparse tensor's clone; torch's fake loses its entries."""
    return _sparse(source._indices().clone(), source._values().clone(), source)


def _coalesced(shadow: ShadowValues, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A sparse tensor without duplicates: it is assumed to have had none, the upper bound."""
    source = args[0]
    count = shadow.everything(source._nnz())
    return _sparse(source._indices().narrow(1, 0, count).clone(), source._values().narrow(0, 0, count).clone(), source, coalesced=True)


def _masked(shadow: ShadowValues, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """A tensor's entries at a sparse one's places (``sparse_mask``)."""
    source, mask = args
    return _sparse(mask._indices().clone(), torch.empty_like(mask._values(), dtype=source.dtype), mask, coalesced=mask.is_coalesced())


def _sparse(indices: Tensor, values: Tensor, like: Tensor, *, coalesced: bool = False) -> Tensor:
    made: Tensor = aten._sparse_coo_tensor_with_dims_and_tensors(
        like.sparse_dim(), like.dense_dim(), like.shape, indices, values, is_coalesced=coalesced, layout=torch.sparse_coo, device="cpu"
    )
    return made


#: Where values are unknown: the largest output, from the arguments by name.
LARGEST: dict[Any, Callable[[ShadowValues, dict[str, Any]], Any]] = {
    aten.masked_select.default: _masked_select,
    aten._unique2.default: _unique,
    aten._unique.default: lambda shadow, values: _unique(shadow, values)[:2],
    aten.unique_dim.default: _unique,
    aten.unique_consecutive.default: _unique,
    aten.unique_dim_consecutive.default: _unique,
    aten.bincount.default: _bincount,
    aten.repeat_interleave.Tensor: _repeat_interleave,
    aten._ctc_loss.Tensor: _ctc,
}
#: Used always, instead of torch's own.
INSTEAD: dict[Any, Callable[[ShadowValues, Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    aten._ctc_loss_backward.Tensor: lambda shadow, function, args, kwargs: torch.empty_like(args[1]),
    aten._coalesce.default: _coalesced,
    aten.sparse_mask.default: _masked,
    aten._pack_padded_sequence.default: _packed,
    aten._grouped_mm.default: _grouped,
}
