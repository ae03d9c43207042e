"""What a rank under DeepSpeed holds from one step to the next, and what of it is the host's memory. Reads DeepSpeed's attributes alone.

On a CPU device both lie in one allocator, and nothing but these names tells them apart. Tested with DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn


def held_by_zero(engine: Any, module: nn.Module) -> dict[str, list[Tensor]]:
    """What lies on the device, by kind: ``"parameters"``, ``"gradients"``, ``"optimizer"`` (without the optimizer's state), ``"rest"``.

    Args:
        engine: DeepSpeed's.
        module: that it trains.
    """
    zero, offloads = engine.optimizer, _offloads(engine)
    masters = [] if "optimizer" in offloads else _masters(zero)
    if not _is_stage_3(zero):
        passed = getattr(zero, "temp_grad_buffer_for_gpu_offload", None)
        rest = [buffer for bucket in zero.ipg_buckets.values() for buffer in bucket.buffer]
        waiting = [*getattr(zero, "all_grad_tensors", {}).values(), *getattr(zero, "averaged_gradients", {}).values()]
        return {
            "parameters": list(module.parameters()),
            # Of earlier batches, where they accumulate.
            "gradients": [gradient for group in waiting if group is not None for gradient in group],
            "optimizer": masters,
            "rest": [*rest, *_there([passed])],
        }
    return {
        "parameters": [] if "parameters" in offloads else _parts(module),
        "gradients": [] if "optimizer" in offloads else [zero.grad_partitions_flat_buffer],
        "optimizer": masters,
        # Those that stay gathered.
        "rest": [*(bucket.buffer for bucket in zero.ipg_buckets.values()), *module.parameters()],
    }


def host_held_by_zero(engine: Any, module: nn.Module) -> list[Tensor]:
    """What lies in the host's memory, without the optimizer's state.

    Args:
        engine: DeepSpeed's.
        module: that it trains.
    """
    zero, offloads = engine.optimizer, _offloads(engine)
    found: list[Tensor] = []
    if "optimizer" in offloads:
        masters = _masters(zero)
        found += [*masters, *_there(master.grad for master in masters)]
        found += getattr(zero, "param_buffer_of_bit16_for_cpu_offload_groups", [])
        found += getattr(zero, "accumulated_grads_in_cpu", {}).values()
        found += _there([getattr(zero, "temp_grad_buffer_for_cpu_offload", None), getattr(zero, "grad_partitions_flat_buffer", None)])
    if "parameters" in offloads:
        found += [*_parts(module), *zero.param_groups_fp16_flat_cpu_memory]
    return found


def _offloads(engine: Any) -> tuple[str, ...]:
    zero = engine.optimizer
    if _is_stage_3(zero):
        return tuple(name for name, on in (("optimizer", zero.offload_optimizer), ("parameters", zero.offload_param)) if on)
    return ("optimizer",) if zero.cpu_offload else ()


def _is_stage_3(zero: Any) -> bool:
    return hasattr(zero, "fp32_partitioned_groups_flat")


def _masters(zero: Any) -> list[Tensor]:
    """What the optimizer steps: a copy of this rank's part of the parameters, in 32 bits."""
    found: list[Tensor] = zero.fp32_partitioned_groups_flat if _is_stage_3(zero) else zero.single_partition_of_fp32_groups
    return found


def _parts(module: nn.Module) -> list[Tensor]:
    return [*_there(getattr(parameter, "ds_tensor", None) for parameter in module.parameters())]


def _there(tensors: Iterable[Tensor | None]) -> Iterator[Tensor]:
    return (tensor for tensor in tensors if tensor is not None)
