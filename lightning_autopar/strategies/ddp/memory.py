"""What a rank holds that has a whole copy of the module: one device, or DDP's replicas. Arithmetic only: neither torch nor Lightning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from lightning_autopar.engines import Rank
from lightning_autopar.memory.allocator.options import MIB
from lightning_autopar.memory.device_bytes import DeviceBytes

#: The size of the buffers in which DDP sends rank 0's weights, two at a time (torch ``distributed.py``, ``broadcast_bucket_size``;
#: ``comm.cpp``, ``broadcast_coalesced``), unless the ranks were forked from one process that has them.
_BROADCAST_BYTES = 250 * MIB
_BROADCASTS = 2


def whole_bytes(rank: Rank, *, buckets: bool) -> Iterator[DeviceBytes]:
    """Bytes of one device, or of each replica: it holds everything. DDP's buckets hold every gradient all the time
    (``gradient_as_bucket_view``), and are reduced in place. They are built once: with ``find_unused_parameters`` they aren't rebuilt after
    the first step (``reducer.hpp``, ``should_rebuild_buckets``). Under ``no_sync`` (Lightning's accumulation) gradients lie beside the
    buckets until the last batch's backward moves them there. Where a batch runs in parts, the first part's gradients stay in memory, too;
    the parts add up in DDP's buckets.

    Args:
        rank: of a plan.
        buckets: whether there are DDP's buckets.
    """
    footprint, moments = rank.footprint, rank.moments()
    gradients = moments.gradients
    in_parts = rank.plan.micro_batches > 1
    if buckets or in_parts:
        waiting = np.where(moments.waiting, moments.gradients, 0) if buckets and not in_parts else 0
        gradients = footprint.gradient_bytes + np.zeros_like(moments.gradients) + waiting
    place = int(np.argmax(gradients + moments.activations + moments.temporary))
    step = DeviceBytes(
        parameters=footprint.parameter_bytes,
        gradients=int(gradients[place]),
        optimizer=footprint.optimizer_bytes,
        activations=int(moments.activations[place]),
        temporary=int(moments.temporary[place]),
        buffers=footprint.buffer_bytes,
        input=round(footprint.input_bytes * rank.share),
        updates=not (moments.forward[place] or moments.backward[place]),
    )
    yield step
    if buckets and not rank.on_cpu:  # while replicas receive rank 0's weights
        sent = min(footprint.parameter_bytes + footprint.buffer_bytes, _BROADCASTS * _BROADCAST_BYTES)
        yield DeviceBytes(parameters=footprint.parameter_bytes, buffers=footprint.buffer_bytes, communication=sent, occasion="start")
    if (runs := rank.evaluation_bytes) is not None:  # Lightning has set the gradients to None; buckets stay
        kept = footprint.gradient_bytes if buckets else 0
        yield replace(step, gradients=kept, activations=0, temporary=runs, input=0, occasion="validation")
