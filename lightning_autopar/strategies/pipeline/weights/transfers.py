"""Sends tensors from one rank of a pipeline to another. Knows ranks and bytes; nothing of modules or stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

#: A tensor travels in pieces, so that it takes no room of its size on a device that is full.
_PIECE_BYTES = 32 * 1024**2

Group = dist.ProcessGroup | None


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The ranks among which one copy of the module is spread, as seen by one of them.

    Args:
        ranks: their global ranks, in the order of their first stages.
        group: their process group; None stands for all ranks.
        device: where this rank's part of what is sent must lie: the CPU under gloo.
    """

    ranks: tuple[int, ...]
    group: Group
    device: torch.device

    @classmethod
    def of(cls, group: Group, device: torch.device) -> Pipeline:
        """The pipeline whose process group this is."""
        ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        return cls(ranks=tuple(ranks), group=group, device=device)

    def tell(self, value: Any) -> list[Any]:
        """Each rank's value, in order; a collective."""
        values: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(values, value, group=self.group)
        return values

    def send(self, tensor: Tensor, rank: int) -> None:
        """A tensor's bytes, to the ``rank``-th of the pipeline."""
        for piece in _pieces(tensor.detach().contiguous()):
            dist.send(piece.to(self.device), self.ranks[rank], group=self.group)

    def receive(self, into: Tensor, rank: int) -> None:
        """What the ``rank``-th sends, into a contiguous tensor."""
        for piece in _pieces(into):
            here = piece if piece.device == self.device else torch.empty_like(piece, device=self.device)
            dist.recv(here, self.ranks[rank], group=self.group)
            if here is not piece:
                piece.copy_(here)

    def broadcast(self, tensor: Tensor, rank: int) -> None:
        """The ``rank``-th's contiguous tensor, into everybody's."""
        for piece in _pieces(tensor):
            here = piece.to(self.device)
            dist.broadcast(here, self.ranks[rank], group=self.group)
            if here is not piece:
                piece.copy_(here)

    @property
    def place(self) -> int:
        """This rank's."""
        return self.ranks.index(dist.get_rank())


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """The bytes of a contiguous tensor, some at a time: every type travels, whether the backend knows it or not."""
    if tensor.numel():
        yield from tensor.view(-1).view(torch.uint8).split(_PIECE_BYTES)
