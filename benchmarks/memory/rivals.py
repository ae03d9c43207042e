"""What others say of the same jobs: torch's MemTracker, DeepSpeed's and accelerate's estimates, and sixteen bytes a parameter.

Each is called as its own documentation does it, for one device and without offloading. The estimates know no activations by design; they
are here because they are what people use.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._pytree import tree_map

from memory.job import Job

TRACKER = "MemTracker"
ZERO2 = "DeepSpeed ZeRO-2"
ZERO3 = "DeepSpeed ZeRO-3"
ACCELERATE = "accelerate"
SIXTEEN = "16 bytes a parameter"
RIVALS = (TRACKER, ZERO2, ZERO3, ACCELERATE, SIXTEEN)


def mem_tracker(job: Job, *, fake: bool = True) -> dict[str, Any]:
    """Two steps, as in the docstring of ``torch.distributed._tools.MemTracker``; the peak of all of it.

    Args:
        job: what to train.
        fake: under fake tensors; else the model is run for real, which MemTracker can watch as well.
    """
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    batch = job.batch()
    begun = time.perf_counter()
    true = {"bf16-true": torch.bfloat16}.get(job.precision)
    torch.set_default_dtype(true or torch.float32)
    mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else None

    def as_input(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        leaf = leaf.to(true) if true is not None and leaf.is_floating_point() else leaf
        return leaf if mode is None else mode.from_tensor(leaf)

    with mode or nullcontext():
        module = job.build()
        inputs = tree_map(as_input, batch)
        found = module.configure_optimizers()
        optimizers = list(found) if isinstance(found, tuple) else [found]
        module.optimizers = lambda: optimizers  # type: ignore[method-assign, assignment]
        module.manual_backward = lambda loss: loss.backward()  # type: ignore[method-assign, assignment]
        tracker = MemTracker()
        tracker.track_external(module, *optimizers, *(leaf for leaf in torch.utils._pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)))
        with tracker:
            for _ in range(2):
                _step(module, inputs, optimizers[0], job, tracker)
                tracker.reset_mod_stats()
        total = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    return {"bytes": int(total), "seconds": time.perf_counter() - begun, "run_for_real": not fake}


def _step(module: Any, inputs: Any, optimizer: torch.optim.Optimizer, job: Job, tracker: MemTracker) -> None:
    """What plain Lightning does in a step, without it."""
    accumulate = int(job.trainer.get("accumulate_grad_batches", 1))
    for index in range(accumulate):
        if index:
            tracker.reset_mod_stats()
        with _autocast(job):
            loss = module.training_step(inputs, index)
        if not module.automatic_optimization:
            return
        if index == 0:
            optimizer.zero_grad()
        (loss / accumulate).backward()
    if "gradient_clip_val" in job.trainer:
        nn.utils.clip_grad_norm_(module.parameters(), job.trainer["gradient_clip_val"])
    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(lambda: loss)
    else:
        optimizer.step()


def _autocast(job: Job) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16) if job.precision == "bf16-mixed" else nullcontext()


def sizes(job: Job) -> dict[str, int]:
    """What the estimates are made from: parameters, the largest layer's, and the bytes that accelerate counts."""
    from accelerate.utils import calculate_maximum_sizes

    warnings.simplefilter("ignore")
    module = job.build()
    # As ``model_to_params`` of deepspeed/runtime/zero/stage3.py.
    layers = [sum(parameter.numel() for parameter in part.parameters(recurse=False)) for part in module.modules()]
    total_bytes, _ = calculate_maximum_sizes(module)
    parameters = sum({parameter.data_ptr(): parameter.numel() for parameter in module.parameters()}.values())
    return {"parameters": parameters, "largest_layer": max(layers), "accelerate_bytes": int(total_bytes)}


def estimates(found: dict[str, int], precision: str) -> dict[str, int]:
    """Bytes by rival."""
    from accelerate.commands.estimate import estimate_training_usage
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    zero2: Callable[..., tuple[int, int]] = estimate_zero2_model_states_mem_needs
    zero3: Callable[..., tuple[int, int, int]] = estimate_zero3_model_states_mem_needs
    count = found["parameters"]
    stages = estimate_training_usage(found["accelerate_bytes"], "float32" if precision == "32-true" else "bfloat16")
    return {
        ZERO2: zero2(count, 1, 1, cpu_offload=False)[1],
        ZERO3: zero3(count, found["largest_layer"], 1, 1, cpu_offload=False, cpu_offload_params=False)[1],
        ACCELERATE: int(max(stages.values())),
        SIXTEEN: 16 * count,
    }
