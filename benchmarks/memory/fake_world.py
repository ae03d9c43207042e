"""One rank of a larger FSDP2 world in a process of its own: torch's fake process group answers every collective without the others.

Random numbers are drawn for the whole batch, as a rank draws them under autopar.
Memory is real, values are not. Where a process group is there already, that is used, and the rank is one of a real world.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_map_only

from lightning_autopar.exact.data.rank_share import Dealing, share_of
from lightning_autopar.exact.random.whole_batch_draws import GlobalDraws
from lightning_autopar.exact.step.recompute import recomputed
from lightning_autopar.memory.trace.first_batch import batch_size_of
from lightning_autopar.plans import Plan
from lightning_autopar.strategies.fsdp.shard import shard

_HALF = {"bf16-true": torch.bfloat16, "16-true": torch.float16}
_MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def measure_fsdp_rank(
    module: LightningModule,
    batch: Any,
    plan: Plan,
    *,
    precision: str = "32-true",
    device: torch.device,
    steps: int = 4,
    rank: int = 0,
    live: tuple[Callable[[], int], Callable[[], int], Callable[[], None]] | None = None,
) -> dict[str, int | None]:
    """Peak bytes of a step of a rank in steady state.

    Args:
        module: whole, on the host; it is consumed.
        batch: the rank's share of the batch.
        plan: an fsdp plan of the whole world.
        precision: the Trainer's.
        device: a CUDA device, or the CPU, where ``live`` counts.
        steps: at least two: the first has no optimizer state. On the CPU the one with the lowest peak counts: gloo's threads may let their
            copies go late.
        rank: of the fake world.
        live: of the CPU's allocator, functions that give live and peak bytes and that reset the peak (``live_bytes.py``).

    Returns:
        ``allocated``, and ``reserved`` where the device has a caching allocator.
    """
    own_group = not dist.is_initialized()
    if own_group:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.world_size)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _measure(module, batch, plan, precision, device, steps, live)
    finally:
        if own_group:
            dist.destroy_process_group()


def _measure(
    module: LightningModule, batch: Any, plan: Plan, precision: str, device: torch.device, steps: int, live: Any
) -> dict[str, int | None]:
    half = _HALF.get(precision)
    on_gpu = device.type == "cuda"
    gc.collect()
    before = 0
    if not on_gpu:
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*module.parameters(), *module.buffers())}
        before = live[0]() - sum(storages.values())
    batch = tree_map_only(Tensor, lambda t: t.to(device, half if half and t.is_floating_point() else t.dtype, copy=True), batch)
    mesh = init_device_mesh(device.type, (plan.world_size,))
    shard(module, plan.shard, mesh, reshard_after_forward=bool(plan.reshard_after_forward))
    if half is not None:
        module.to(half)
    module.to(device)
    configured: Any = module.configure_optimizers()
    optimizers = [configured] if isinstance(configured, torch.optim.Optimizer) else list(configured)

    def precise() -> AbstractContextManager[Any]:
        mixed = _MIXED.get(precision)
        return torch.autocast(device.type, dtype=mixed, cache_enabled=on_gpu) if mixed else nullcontext()

    samples, ranks = batch_size_of(batch), plan.world_size
    share = share_of(samples * ranks, dist.get_rank(), Dealing.even(ranks))
    peaks = []
    with recomputed(module, plan.recompute), GlobalDraws(lambda: share) as draws:
        for index in range(steps):
            draws.begin()
            torch.cuda.reset_peak_memory_stats(device) if on_gpu else live[2]()
            with precise():
                loss: Any = module.training_step(batch, index)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            del loss
            peaks.append(torch.cuda.max_memory_allocated(device) if on_gpu else live[1]() - before)
    if on_gpu:
        return {"allocated": peaks[-1], "reserved": torch.cuda.max_memory_reserved(device)}
    return {"allocated": min(peaks[1:]), "reserved": None}
