"""An epoch's last batch, shared out among the processes: accelerate would fill it up with samples of the epoch's beginning. Parts of
different sizes weigh by their samples: transformers would count each part equally.

Knows the loader that accelerate makes by its attributes; imports nothing of accelerate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import BatchSampler

from lightning_autopar.memory.trace.first_batch import batch_size_of


class SharedOut(BatchSampler):
    """The batches of all processes, one after the other; an epoch's last step shares out evenly the samples that are left.

    Args:
        batches: those that accelerate would share out, of one size but for the last.
        processes: each takes every ``processes``-th batch.
        accumulation: how many batches each takes for a step.
    """

    def __init__(self, batches: BatchSampler, processes: int, accumulation: int) -> None:
        super().__init__(batches.sampler, batches.batch_size, drop_last=False)
        self._processes, self._step = processes, batches.batch_size * processes * accumulation

    @property
    def shares_evenly(self) -> bool:
        """Whether each batch of an epoch's last step has a sample."""
        left = len(self.sampler) % self._step  # type: ignore[arg-type]
        return left >= self._count(left)

    def __iter__(self) -> Iterator[list[int]]:
        step: list[int] = []
        for sample in self.sampler:
            step.append(sample)
            if len(step) == self._step:
                yield from self._parts(step)
                step = []
        yield from self._parts(step)

    def __len__(self) -> int:
        return self._count(len(self.sampler))  # type: ignore[arg-type]

    def _count(self, samples: int) -> int:
        """Batches for so many samples, equally many for each process."""
        return -(-samples // (self.batch_size * self._processes)) * self._processes

    def _parts(self, step: list[int]) -> Iterator[list[int]]:
        """A step's batches, the earlier ones larger by a sample where they differ."""
        count, first = self._count(len(step)), 0
        for number in range(count):
            size = len(step) // count + (number < len(step) % count)
            yield step[first : first + size]
            first += size


def shared_out(trainer: Any) -> None:
    """From now on the Trainer's training loaders share out an epoch's last step, if each of its batches gets a sample."""
    original = trainer.get_train_dataloader

    def get_train_dataloader() -> Any:
        loader = original()
        shard: Any = getattr(loader, "batch_sampler", None)
        batches: Any = getattr(shard, "batch_sampler", None)
        processes = getattr(shard, "num_processes", 1)
        ordinary = type(batches) is BatchSampler and not batches.drop_last and isinstance(batches.sampler, Sized)
        if ordinary and processes > 1:
            ours = SharedOut(batches, processes, trainer.args.gradient_accumulation_steps)
            if ours.shares_evenly:
                shard.batch_sampler, shard.even_batches, shard.batch_size = ours, False, None  # batches of any size
        return loader

    trainer.get_train_dataloader = get_train_dataloader


def weighed(trainer: Any) -> None:
    """From now on the parts of an epoch's last batch weigh by their samples. For a Trainer whose loss is a mean over each part."""
    original, loss_of, accelerator = trainer.get_batch_samples, trainer.compute_loss, trainer.accelerator
    each: float | None = None  # what a sample of the last batch weighs, times the equal weight of a part; None where parts are equal

    def get_batch_samples(*args: Any, **kwargs: Any) -> Any:
        nonlocal each
        parts, items = original(*args, **kwargs)
        each = None
        if accelerator.gradient_state.end_of_dataloader:  # of all processes at once
            mine = torch.tensor([batch_size_of(part) for part in parts], device=accelerator.device)
            sizes = accelerator.gather(mine).tolist()
            each = len(sizes) / sum(sizes) if len(set(sizes)) > 1 else None
        return parts, items

    def compute_loss(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        weight = batch_size_of(inputs) * each if each is not None and model.training else None
        found = loss_of(model, inputs, *args, **kwargs)
        if weight is None:
            return found
        return (found[0] * weight, *found[1:]) if isinstance(found, tuple) else found * weight

    trainer.get_batch_samples, trainer.compute_loss = get_batch_samples, compute_loss
