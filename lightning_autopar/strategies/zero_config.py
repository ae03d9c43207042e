"""DeepSpeed's configuration for a ZeRO plan. Arithmetic on values: imports neither torch nor DeepSpeed.

DeepSpeed reads a dictionary, in which what isn't said has a default. Here all that matters is said: of its defaults some change what is
computed (0.19.8 clips gradients to a norm of 1).
"""

from __future__ import annotations

from typing import Any

from lightning_autopar.memory.zero_settings import ZeroSettings
from lightning_autopar.plans import Plan

#: So many elements are never in one place: the optimizer's part of a group is stepped in one piece.
_UNBOUNDED = 10**12


def deepspeed_config(plan: Plan, settings: ZeroSettings, *, element: str = "fp32") -> dict[str, Any]:
    """What ``deepspeed.initialize`` is given.

    Args:
        plan: a ZeRO plan.
        settings: sizes of DeepSpeed's buffers.
        element: what parameters and gradients are made of, ``"fp32"`` or ``"bf16"``.
    """
    zero: dict[str, Any] = {
        "stage": plan.zero_stage,
        "contiguous_gradients": True,
        "overlap_comm": settings.overlap_comm,
        "allgather_partitions": True,
        "reduce_scatter": True,
        "allgather_bucket_size": settings.reduce_bucket_elements + settings.reduce_bucket_elements % 2,
        "reduce_bucket_size": settings.reduce_bucket_elements,
        "sub_group_size": _UNBOUNDED,
        "round_robin_gradients": False,
        "ignore_unused_parameters": True,
    }
    if plan.zero_stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": settings.prefetch_elements,
            "stage3_max_live_parameters": settings.max_live_elements,
            "stage3_max_reuse_distance": settings.max_reuse_elements,
            "stage3_param_persistence_threshold": settings.persistence_elements,
        }
    if "optimizer" in plan.offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": settings.pin_memory}
    if "parameters" in plan.offload:
        zero["offload_param"] = {"device": "cpu", "pin_memory": settings.pin_memory}
    return {
        # Lightning's loop accumulates and Lightning's loaders make batches: to DeepSpeed each backward pass is a batch of one.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # see zero_gradients
        "steps_per_print": None,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        # Its own bf16 would keep and step a copy of 32 bits, which a plain run at bf16-true doesn't.
        "communication_data_type": element,
        "data_types": {"grad_accum_dtype": element},
    }
