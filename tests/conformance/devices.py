"""Which devices the suite runs on: CPU devices with a memory budget, or GPUs. Knows of no engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from lightning_autopar.plans import Plan


@dataclass(frozen=True, kw_only=True)
class Devices:
    """A kind of devices.

    Args:
        accelerator: as the Trainer calls it.
        ids: the ids of so many.
        trainer: keyword arguments of a Trainer that may use so many.
        strategy: keyword arguments of the strategy that may use so many.
    """

    accelerator: Literal["cpu", "gpu"]
    ids: Callable[[int], tuple[str, ...]]
    trainer: Callable[[int], dict[str, Any]]
    strategy: Callable[[int], dict[str, Any]]

    def place(self, plan: Plan) -> Plan:
        """The plan on devices of this kind; it was written for CPU devices."""
        return replace(plan, devices=self.ids(plan.world_size))


def _gpus(count: int) -> tuple[str, ...]:
    from lightning_autopar.devices.discover import probe

    return tuple(device.id for device in probe(accelerator="cuda").devices[:count])


CPUS = Devices(
    accelerator="cpu",
    ids=lambda count: tuple(f"cpu:{rank}" for rank in range(count)),
    trainer=lambda count: {},
    strategy=lambda count: {"devices": f"{count}xcpu:4GiB"},
)
GPUS = Devices(accelerator="gpu", ids=_gpus, trainer=lambda count: {"devices": count}, strategy=lambda count: {})


def composed_attention() -> None:
    """Compute attention by its parts in this process: each rank of a split batch draws the dropout inside a fused kernel by itself."""
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
