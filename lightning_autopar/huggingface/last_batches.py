"""An epoch's last batch, shared out among the processes: accelerate would fill it up with samples of the epoch's beginning.

Knows the loader that accelerate makes by its attributes; imports nothing of accelerate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import BatchSampler


class SharedOut(BatchSampler):
    """The batches of all processes, one after the other; the samples that are left at the end make as many batches as there are processes.

    Args:
        batches: those that accelerate would share out, of one size but for the last.
        processes: each takes every ``processes``-th batch. At least as many samples are left at the end, or none.
    """

    def __init__(self, batches: BatchSampler, processes: int) -> None:
        super().__init__(batches.sampler, batches.batch_size, drop_last=False)
        self._processes = processes

    def __iter__(self) -> Iterator[list[int]]:
        at_once: list[int] = []
        for sample in self.sampler:
            at_once.append(sample)
            if len(at_once) == self.batch_size * self._processes:
                yield from self._parts(at_once)
                at_once = []
        if at_once:
            yield from self._parts(at_once)

    def __len__(self) -> int:
        samples, at_once = len(self.sampler), self.batch_size * self._processes  # type: ignore[arg-type]
        return -(-samples // at_once) * self._processes

    def _parts(self, samples: list[int]) -> Iterator[list[int]]:
        """As many as there are processes, the earlier ones larger by a sample where they differ."""
        each, more = divmod(len(samples), self._processes)
        for rank in range(self._processes):
            first = rank * each + min(rank, more)
            yield samples[first : first + each + (rank < more)]


def shared_out(trainer: Any) -> None:
    """From now on the Trainer's training loaders share out an epoch's last batch, if it has a sample for each process."""
    original = trainer.get_train_dataloader

    def get_train_dataloader() -> Any:
        loader = original()
        shard: Any = getattr(loader, "batch_sampler", None)
        batches: Any = getattr(shard, "batch_sampler", None)
        processes = getattr(shard, "num_processes", 1)
        ordinary = type(batches) is BatchSampler and not batches.drop_last and isinstance(batches.sampler, Sized)
        if ordinary and processes > 1 and len(batches.sampler) % (batches.batch_size * processes) >= processes:
            shard.batch_sampler, shard.even_batches = SharedOut(batches, processes), False
        return loader

    trainer.get_train_dataloader = get_train_dataloader
