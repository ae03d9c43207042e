"""Whether tensors are what they were: told by their version counters, and by sums over what they hold.

An update in place counts up a tensor's version, unless it goes by ``.data``, by a view of another library, or by a kernel that doesn't say;
the sums see these. Knows tensors; nothing of a batch or a trainer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

#: Of what lies on the host, blocks of this many bytes at equal distances are summed, as many of a tensor as make up its share of the bound.
_BLOCK_BYTES, _SUMMED_BYTES = 4096, 16 * 1024**2


class Guard:
    """Remembers tensors as they are at one moment, and tells later whether any of them was written to."""

    def __init__(self) -> None:
        self._marks: list[tuple[int, int, int]] = []
        self._summed: list[tuple[int, int]] = []
        self._views: list[Tensor] = []
        self._sums: list[Tensor] = []
        self._beside: list[tuple[int, int, int]] = []

    @torch.no_grad()
    def note(self, tensors: Sequence[Tensor], beside: Sequence[Tensor] = ()) -> None:
        """Remember these.

        Args:
            tensors: anybody might write to them, in any way.
            beside: told by their versions alone: an optimizer's states, which only its step writes to.
        """
        self._marks, self._beside = _marks(tensors), _marks(beside)
        places = [mark[:2] for mark in self._marks]
        if places != self._summed:
            self._summed, self._views = places, _views(tensors)
        self._sums = _sums(self._views)

    @torch.no_grad()
    def is_same(self, tensors: Sequence[Tensor], beside: Sequence[Tensor] = ()) -> bool:
        """Whether these are the tensors that were noted, and nothing was written to them since."""
        if _marks(tensors) != self._marks or _marks(beside) != self._beside:
            return False
        return all(torch.equal(now.cpu(), then.cpu()) for now, then in zip(_sums(self._views), self._sums, strict=True))


def _marks(tensors: Sequence[Tensor]) -> list[tuple[int, int, int]]:
    """Which tensors these are, where they lie, and how often they were written to."""
    return [(id(tensor), tensor.data_ptr(), tensor._version) for tensor in tensors]


def _views(tensors: Sequence[Tensor]) -> list[Tensor]:
    """What of them is summed: of tensors on the host some or all blocks, as words; of others all."""
    host_bytes = sum(tensor.nbytes for tensor in tensors if tensor.device.type == "cpu")
    apart = max(1, -(-host_bytes // _SUMMED_BYTES))
    views: list[Tensor] = []
    for tensor in map(torch.Tensor.detach, tensors):
        if tensor.device.type != "cpu":
            views.append(tensor)
            continue
        if not tensor.is_contiguous() or not tensor.numel():
            views.append(tensor)
            continue
        data = tensor.view(-1).view(torch.uint8)
        if data.numel() >= 2 * apart * _BLOCK_BYTES and apart > 1:
            data = data[: data.numel() // _BLOCK_BYTES * _BLOCK_BYTES].view(-1, _BLOCK_BYTES)[::apart]
        whole = data.shape[-1] % 8 == 0 and data.storage_offset() % 8 == 0
        views.append(data.view(torch.int64) if whole else data)
    return views


def _sums(views: Sequence[Tensor]) -> list[Tensor]:
    """A number for each, on its device, without waiting for it: of words their exact sum, of numbers on a GPU their norm in float64.

    There one kernel adds up many tensors (``torch._foreach_norm``, which clipping by norm uses as well), in a fixed order.
    """
    found: list[Tensor] = []
    together: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for view in views:
        if view.device.type != "cpu" and view.is_floating_point():
            together[view.device, view.dtype].append(view)
        else:
            found.append(view.sum(dtype=torch.float64 if view.is_floating_point() else torch.int64))
    for same in together.values():
        found.append(torch.stack(torch._foreach_norm(same, 2, torch.float64)))
    return found
