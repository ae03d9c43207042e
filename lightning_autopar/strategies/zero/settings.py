"""The sizes of DeepSpeed's buffers, and its configuration for a ZeRO plan. Arithmetic on values: imports neither torch nor DeepSpeed.

Lightning's defaults are for models of billions of parameters: two buckets of 200 million elements take 1.6 GB for a model of any size, and
stage 3 keeps up to a billion parameters gathered, which is all of most models. Ours are shares of the model, at most Lightning's. The
configuration sets everything that matters, as some of DeepSpeed's defaults change what is computed (0.19.8 clips gradients to a norm of 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.plans import Plan

#: A bucket has a sixteenth of the gradients: as in DDP, all but the last are reduced while backward goes on.
_BUCKETS = 16
#: Buckets smaller than this are sent no faster (DDP's own first one is of 1 MiB), and each costs a call.
_LEAST_BUCKET = 1 << 16
#: Stage 3 keeps an eighth of the parameters gathered at once, and gathers a quarter of that ahead.
_LIVE_SHARE = 8
_PREFETCH_SHARE = 32
#: Norms and biases aren't worth a gather: of a transformer's parameters, some ``12 width² depth``, this is above four times its width.
_PERSISTENT_SHARE = 2_500


@dataclass(frozen=True, kw_only=True)
class ZeroSettings:
    """The settings of DeepSpeed that take memory, in elements, not bytes; the defaults are those of Lightning and DeepSpeed.

    Args:
        reduce_bucket_elements: of a bucket of gradients (``reduce_bucket_size``).
        overlap_comm: whether stages 1 and 2 have two buckets.
        prefetch_elements: of parameters that are gathered ahead (``stage3_prefetch_bucket_size``).
        max_live_elements: of gathered parameters beyond which none is gathered ahead (``stage3_max_live_parameters``).
        max_reuse_elements: how far ahead a use keeps a parameter gathered (``stage3_max_reuse_distance``).
        persistence_elements: up to which a parameter always stays gathered (``stage3_param_persistence_threshold``).
        pin_memory: whether host memory is page-locked. Parts of offloaded parameters always are.
        converts: whether DeepSpeed converts the module to 16 bits under mixed precision, too, as with Lightning's strategy. Our engine
            leaves parameters in 32 bits then, and computes under torch's autocast.
    """

    reduce_bucket_elements: int = 200_000_000
    overlap_comm: bool = True
    prefetch_elements: int = 50_000_000
    max_live_elements: int = 1_000_000_000
    max_reuse_elements: int = 1_000_000_000
    persistence_elements: int = 100_000
    pin_memory: bool = False
    converts: bool = True


_DEFAULT = ZeroSettings()


def zero_settings(plan: Plan, *, parameters: int, trainable: int, on_cpu: bool) -> ZeroSettings:
    """The settings with which our engine runs a plan, and planning predicts it. The engine counts the module's parameters, planning takes
    the footprint's count; nothing else is used, so that both agree.

    Args:
        parameters: elements of all parameters, shared ones once.
        trainable: of those that require a gradient.
        on_cpu: whether its devices are CPUs. There a collective overlaps with nothing, so gathering ahead gains nothing.
    """
    # One rank sends nothing, but would still fill and copy a bucket (up to three times its size); larger gradients bypass it.
    share = trainable // _BUCKETS if plan.world_size > 1 else 0
    return ZeroSettings(
        reduce_bucket_elements=min(_DEFAULT.reduce_bucket_elements, max(_LEAST_BUCKET, share)),
        # Without this, stage 1 reduces nothing before backward is over, and memory holds all gradients.
        overlap_comm=plan.zero_stage == 1 or (not on_cpu and plan.world_size > 1),
        prefetch_elements=0 if on_cpu else min(_DEFAULT.prefetch_elements, parameters // _PREFETCH_SHARE),
        max_live_elements=min(_DEFAULT.max_live_elements, parameters // _LIVE_SHARE),
        max_reuse_elements=0 if on_cpu else min(_DEFAULT.max_reuse_elements, parameters // _LIVE_SHARE),
        persistence_elements=min(_DEFAULT.persistence_elements, parameters // _PERSISTENT_SHARE),
        pin_memory=bool(plan.offload) and not on_cpu,
        converts=False,
    )


def settings_of(footprint: Footprint, plan: Plan, *, on_cpu: bool) -> ZeroSettings:
    """:func:`zero_settings` of a traced module."""
    return zero_settings(plan, parameters=footprint.parameters, trainable=footprint.trainable_parameters, on_cpu=on_cpu)


#: More elements than any group has, so that the optimizer's part of a group is stepped in one piece.
_UNBOUNDED = 10**12


def deepspeed_config(plan: Plan, settings: ZeroSettings, *, element: str = "fp32") -> dict[str, Any]:
    """The configuration for ``deepspeed.initialize``.

    Args:
        element: the type of parameters and gradients, ``"fp32"`` or ``"bf16"``.
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
        # Lightning's loop accumulates, and its loaders make batches: for DeepSpeed, each backward pass is a batch of one.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # see zero_gradients
        "steps_per_print": None,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        # DeepSpeed's own bf16 would keep and step a copy in 32 bits, which a plain run at bf16-true doesn't.
        "communication_data_type": element,
        "data_types": {"grad_accum_dtype": element},
    }
