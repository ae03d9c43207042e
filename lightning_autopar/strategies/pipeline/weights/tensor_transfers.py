"""Sends tensors from one rank of a pipeline to another. Knows ranks and bytes; nothing of modules or stages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_autopar.exact.data.fingerprint import bytes_of

#: The bytes of a piece: tensors are sent in pieces, as a full device has no room for a whole copy.
_PIECE_BYTES = 32 * 1024**2

Group = dist.ProcessGroup | None


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """The ranks among which one copy of the module is spread, as seen by one of them.

    Args:
        ranks: their global ranks, in the order of their first stages.
        group: their process group; None stands for all ranks.
        device: where tensors must lie to be sent: the CPU under gloo.
    """

    ranks: tuple[int, ...]
    group: Group
    device: torch.device

    @classmethod
    def of(cls, group: Group, device: torch.device) -> Pipeline:
        """The pipeline of a process group."""
        ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        return cls(ranks=tuple(ranks), group=group, device=device)

    def tell(self, value: Any) -> list[Any]:
        """All ranks' values, in order; a collective."""
        values: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(values, value, group=self.group)
        return values

    def send(self, tensor: Tensor, rank: int) -> None:
        """Send a tensor's bytes to the ``rank``-th rank of the pipeline."""
        for piece in _pieces(tensor.detach().contiguous()):
            dist.send(piece.to(self.device), self.ranks[rank], group=self.group)

    def receive(self, into: Tensor, rank: int) -> None:
        """Receive what the ``rank``-th rank sends, into a contiguous tensor."""
        for piece in _pieces(into):
            here = piece if piece.device == self.device else torch.empty_like(piece, device=self.device)
            dist.recv(here, self.ranks[rank], group=self.group)
            if here is not piece:
                piece.copy_(here)

    def broadcast(self, tensor: Tensor, rank: int) -> None:
        """Broadcast the ``rank``-th rank's contiguous tensor into every rank's."""
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
    """The bytes of a contiguous tensor, in pieces: so every type can be sent, even if the backend doesn't support it."""
    if tensor.numel():
        yield from bytes_of(tensor).split(_PIECE_BYTES)
