"""A rank's rows of a GPU's random draw, bit for bit, without drawing all the others.

ATen's kernels go over a large draw in windows: every thread that the GPU holds makes one call of Philox, and fills some elements by it. A
window's numbers depend on the seed, the thread and how far the generator has moved. So a window is drawn by itself where the generator's
offset is set to where the whole draw would have come to by then (``calc_execution_policy`` and its kernel in
ATen/native/cuda/DistributionTemplates.h; ``dropout_cuda`` in Dropout.cu). Rows are drawn from the beginning of their window on, as numbers
before them in it can't be left out. This goes by torch's own operators and its generator's ``set_offset``; whether they do as is said here
is tried once on each GPU, for each kind of draw.

Whole draws remain for draws that aren't much larger than a window (about a million numbers on a large GPU), or whose samples don't lie one
after the other in memory, and for chances that are a tensor, integers, permutations and ``multinomial``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from lightning_autopar.exact.data.rank_share import BatchShare
from lightning_autopar.exact.random.whole_batch_draws import Rows, default_generator, has_gaps, memory_order

_LOG = logging.getLogger(__name__)
_Call: TypeAlias = Callable[..., Any]
_Draw: TypeAlias = Callable[[int], Tensor]
#: One call of Philox gives four numbers of 32 bits; the generator's offset counts in these.
_WORDS = 4
_BLOCK = 256
_INDEXED_BYTES = 2**31 - 1  # ATen's kernels draw a larger tensor piece by piece
#: From this share of the whole draw on, making all of it is cheaper: each piece is a kernel, and each row a copy.
_WORTH_SHARE, _MOST_PIECES = 0.7, 8
FILLS = frozenset(("bernoulli_", "normal_", "uniform_", "exponential_", "log_normal_", "cauchy_", "geometric_"))


@dataclass(frozen=True, kw_only=True)
class Window:
    """What all threads of a GPU fill at once.

    Args:
        offset: by how much the generator moves on in it.
        least: a draw of fewer elements isn't given to all the threads.
    """

    elements: int
    offset: int
    least: int


def fill_own(
    op: str, call: _Call, out: Tensor, args: tuple[Any, ...], generator: torch.Generator | None, rows: Rows, share: BatchShare
) -> bool:
    """Fill the rank's rows ``out`` of the whole batch's ``op``; False, with nothing drawn, where a whole draw must be made."""
    if out.device.type != "cuda" or op not in FILLS or any(isinstance(arg, Tensor) for arg in args):
        return False
    flat = _by_sample(out, rows, share)
    if flat is None or flat.shape[1] * share.of * out.element_size() > _INDEXED_BYTES:
        return False
    base = generator or default_generator(out.device)

    def draw(count: int) -> Tensor:
        piece = torch.empty(count, dtype=out.dtype, device=out.device)
        call(piece, *args, generator=base)
        return piece

    each = _WORDS // 2 if out.dtype == torch.float64 else _WORDS
    window = _window(out.device, each, _WORDS)
    return _drawn(flat, draw, share, base, window, window, (op, out.dtype))


def drop_own(call: _Call, input: Tensor, p: float, mask: Tensor, rows: Rows, share: BatchShare) -> bool:
    """Fill the rank's rows ``mask`` of the mask of the whole batch's fused dropout; False as in :func:`fill_own`."""
    width = 16 // input.element_size()  # how many neighbours a thread takes at a time, if they fill the tensor
    flat = _by_sample(mask, rows, share)
    if flat is None or (flat.shape[1] * share.of) % width or has_gaps(input):
        return False

    def draw(count: int) -> Tensor:
        piece = torch.empty(-(-count // width) * width, dtype=input.dtype, device=input.device)
        return cast(Tensor, call(piece, p, True)[1])

    window = _window(input.device, width, _WORDS * -(-width // _WORDS))
    # However many it takes at a time, the generator advances as for four.
    counted = _window(input.device, _WORDS, _WORDS)
    return _drawn(flat, draw, share, default_generator(input.device), window, counted, ("native_dropout", input.dtype))


def pieces(whole: int, row: int, own: Sequence[int], window: Window) -> list[tuple[int, int]]:
    """The ranges to draw, so that they contain all own rows; empty where a whole draw is cheaper.

    Args:
        whole: elements of the whole draw.
        row: elements of each row.
        own: the numbers of the rows, ascending.
    """
    if whole < window.least:
        return []
    found: list[tuple[int, int]] = []
    for index in own:
        first = index * row // window.elements * window.elements
        end = max((index + 1) * row, first + window.least)
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((first, end))
    drawn = sum(end - first for first, end in found)
    return found if drawn <= _WORTH_SHARE * whole and len(own) <= _MOST_PIECES else []


def _drawn(
    flat: Tensor, draw: _Draw, share: BatchShare, generator: torch.Generator, window: Window, counted: Window, kind: tuple[str, torch.dtype]
) -> bool:
    """Draw the rank's rows, if that is less work, and was shown to be right on this GPU.

    Args:
        flat: what is filled, (samples, elements of each).
        draw: makes so many numbers, from where the generator stands.
        generator: ends where the whole draw would have left it.
        counted: the unit in which the kernel advances the generator.
        kind: of the draw, by which it is proven once.
    """
    row, own = flat.shape[1], list(share.indices)
    found = pieces(row * share.of, row, own, window)
    if not found or torch.cuda.is_current_stream_capturing() or not _proven(flat.device, draw, generator, window, kind):
        return False
    before = generator.get_offset()
    _draw_pieces(flat, draw, found, own, generator, window)
    generator.set_offset(before + -(-row * share.of // counted.elements) * counted.offset)
    return True


def _draw_pieces(
    flat: Tensor, draw: _Draw, found: Sequence[tuple[int, int]], own: Sequence[int], generator: torch.Generator, window: Window
) -> None:
    """Draw each piece from its window's offset on, and copy the rows out."""
    before, row = generator.get_offset(), flat.shape[1]
    for first, end in found:
        generator.set_offset(before + first // window.elements * window.offset)
        piece = draw(end - first)
        for place, index in enumerate(own):
            if first <= index * row < end:
                flat[place].copy_(piece[index * row - first : (index + 1) * row - first])


_PROVEN: dict[tuple[object, ...], bool] = {}


def _proven(device: torch.device, draw: _Draw, generator: torch.Generator, window: Window, kind: tuple[str, torch.dtype]) -> bool:
    """Whether the second half of a draw, drawn alone, equals that of the whole one on this GPU. The host waits for it, once."""
    key = device, *kind
    if key not in _PROVEN:
        before = generator.get_offset()
        row = window.elements + 5 * _BLOCK
        whole = draw(2 * row)
        moved = generator.get_offset()
        generator.set_offset(before)
        half = torch.empty_like(whole[:row]).view(1, row)
        _draw_pieces(half, draw, pieces(2 * row, row, [1], window), [1], generator, window)
        counted = window.elements if kind[0] != "native_dropout" else _window(device, _WORDS, _WORDS).elements
        _PROVEN[key] = torch.equal(half[0], whole[row : 2 * row]) and moved - before == -(-2 * row // counted) * _WORDS
        generator.set_offset(before)
        if not _PROVEN[key]:
            _LOG.warning("%s on %s draws otherwise than is known of torch's kernels; every rank draws for the whole batch", kind[0], device)
    return _PROVEN[key]


@lru_cache(maxsize=64)
def _window(device: torch.device, each: int, offset: int) -> Window:
    """The window of a kernel whose threads fill so many elements while the generator's offset advances by that much."""
    found = torch.cuda.get_device_properties(device)
    blocks = found.multi_processor_count * (found.max_threads_per_multi_processor // _BLOCK)
    return Window(elements=blocks * _BLOCK * each, offset=offset, least=(blocks - 1) * _BLOCK + 1)


def _by_sample(part: Tensor, rows: Rows, share: BatchShare) -> Tensor | None:
    """The rank's rows as they lie in memory, (samples, elements of each); None where samples don't lie one after the other."""
    order, gaps = memory_order(part), has_gaps(part)
    if rows.order and part.shape[rows.dim] == 1:
        order, gaps = rows.order, rows.gaps
    if rows.groups_first or gaps or order[0] != rows.dim:
        return None
    laid = part.permute(order)
    return laid.view(max(share.rows, 1), -1) if laid.is_contiguous() else None
