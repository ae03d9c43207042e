"""One job of the GPU memory benchmark: what is predicted for it (needs no GPU), and what it really takes. Runs in pool processes.

Knows no table and no file. On a CPU, where the benchmark must run from end to end as well, the truth is the profiler's, and there is
nothing reserved.
"""

from __future__ import annotations

import gc
import os
import time
import warnings
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from lightning_autopar.constraints import Constraints
from lightning_autopar.devices.discover import probe
from lightning_autopar.devices.inventory import Inventory
from lightning_autopar.exact.step.recompute import recomputed
from lightning_autopar.memory.cuda_overhead import target_of
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.trace.trace import trace
from lightning_autopar.planning.block_units import recomputable_order
from lightning_autopar.planning.make_report import make_report
from lightning_autopar.plans import Plan
from lightning_autopar.report.report import Candidate, NothingFits
from memory.job import Batches, MakeOptimizer
from memory.measure import RealPeak
from memory.zoo_gpu import GpuModel, gpu_models
from memory.zoo_unseen import judging_models, unseen_models

#: Free blocks go on scattering: what the allocator holds after four steps is up to 15 % less.
STEPS = 16


@dataclass(frozen=True, kw_only=True)
class Task:
    """One row of the table.

    Args:
        model: its name in the GPU zoo, or among those that it lacks.
        precision: the Trainer's.
        optimizer: AdamW ``"foreach"`` (what torch picks by itself on a GPU), ``"fused"`` or in a ``"loop"``; ``"sgd"`` with momentum;
            ``"adafactor"``.
        recompute: whether every block that can be recomputed is.
        small: sizes for a CPU.
    """

    model: str
    precision: str
    optimizer: str
    recompute: bool
    small: bool


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What is said of a task.

    Args:
        categories: bytes by category of the single device, with ``allocated`` and ``reserved``.
        needs_bytes: what the plan is said to need free, margin included.
        fqns: the blocks that are recomputed.
        footprint: the trace that it comes from.
        seconds: what tracing took.
    """

    categories: dict[str, int]
    needs_bytes: int
    fqns: tuple[str, ...]
    footprint: Footprint
    seconds: float


def adamw(kind: str, on_gpu: bool) -> MakeOptimizer:
    """The optimizer of that implementation; on a CPU torch picks no foreach by itself, so it is asked for."""
    if kind == "sgd":
        return lambda parameters: torch.optim.SGD(parameters, 1e-3, momentum=0.9)
    if kind == "adafactor":
        return lambda parameters: torch.optim.Adafactor(parameters)
    if kind == "loop":
        return lambda parameters: torch.optim.AdamW(parameters, 1e-4, foreach=False)
    if kind == "fused":
        return lambda parameters: torch.optim.AdamW(parameters, 1e-4, fused=True)
    return lambda parameters: torch.optim.AdamW(parameters, 1e-4, **({} if on_gpu else {"foreach": True}))


def _model(task: Task) -> GpuModel:
    return model_of(task.model, small=task.small)


def model_of(name: str, *, small: bool) -> GpuModel:
    """A model by its name, of any list."""
    return next(model for model in (*gpu_models(small=small), *unseen_models(), *judging_models()) if model.name == name)


def predict_both(task: Task, spec: str) -> tuple[Predicted, Predicted]:
    """The task without and with recomputation, from one trace.

    Args:
        task: its ``recompute`` is passed over.
        spec: the device, such as ``"1xH100-80GB"`` or ``"1xcpu:16GiB"``.
    """
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    inventory = probe(spec)
    on_gpu = inventory.devices[0].kind != "cpu"
    model = _model(task)
    module, batch = model.build(adamw(task.optimizer, on_gpu)), model.batch()
    begun = time.perf_counter()
    footprint = trace(module, None, batch, precision=task.precision, target=target_of(inventory.devices))
    seconds = time.perf_counter() - begun
    found = []
    for fqns in ((), recomputable_order(footprint)):
        candidate = pinned(footprint, inventory, task.precision, fqns)
        (held,) = candidate.bytes.values()
        (needs,) = candidate.needs.values()
        categories = {name: size for name, size in held.to_dict().items() if isinstance(size, int)}
        found.append(Predicted(categories=categories, needs_bytes=needs, fqns=tuple(fqns), footprint=footprint, seconds=seconds))
    return found[0], found[1]


def pinned(footprint: Footprint, inventory: Inventory, precision: str, fqns: tuple[str, ...], limit_bytes: int | None = None) -> Candidate:
    """The planner's own word on the single plan, with and without a limit."""
    plan = Plan(engine="single", devices=(inventory.devices[0].id,), recompute=tuple(fqns))
    constraints = Constraints(
        allow=("single",), pinned=plan, precision=precision, memory_limit_bytes=limit_bytes, memory_margin=0.0, split_batch=True
    )
    try:
        return make_report(footprint, inventory, constraints).candidates[0]
    except NothingFits as error:
        return error.report.candidates[0]


def says_fits(predicted: Predicted, spec: str, precision: str, limit_bytes: int) -> bool:
    """Whether the planner takes the plan for one that fits within so many bytes."""
    return pinned(predicted.footprint, probe(spec), precision, predicted.fqns, limit_bytes).fits


# -- the truth -------------------------------------------------------------------------------------------------------------------------


def measure(task: Task, fqns: tuple[str, ...], cap_bytes: int | None = None) -> dict[str, Any]:
    """Train the task for a few steps with plain Lightning.

    Args:
        task: the model, the precision and the optimizer.
        fqns: blocks to recompute.
        cap_bytes: the most that the caching allocator may reserve.

    Returns:
        ``allocated``, ``reserved``, ``process`` (bytes, None where there is no such figure), ``retries`` (allocations that needed cached
        blocks freed), or ``error``, with ``oom``.
    """
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    try:
        with _clean_device(cap_bytes) as on_gpu:
            return _train(task, fqns, on_gpu)
    except torch.cuda.OutOfMemoryError as error:
        return {"oom": True, "error": str(error).splitlines()[0]}
    except Exception as error:  # one model that this machine can't build or run must not end the others
        return {"oom": False, "error": f"{type(error).__name__}: {str(error).splitlines()[:1]}"}


def _train(task: Task, fqns: tuple[str, ...], on_gpu: bool) -> dict[str, Any]:
    model = _model(task)
    module, batch = model.build(adamw(task.optimizer, on_gpu)), model.batch()
    peak = None if on_gpu else RealPeak(1)
    trainer = pl.Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=1,
        precision=task.precision,
        max_steps=STEPS,
        callbacks=[] if peak is None else [peak],
        **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    )
    with recomputed(module, fqns):
        trainer.fit(module, DataLoader(Batches(batch, STEPS), batch_size=None))
    if peak is not None:
        return {"allocated": peak.bytes, "reserved": None, "process": None, "retries": 0}
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "process": process_bytes(),
        "retries": stats["num_alloc_retries"],
    }


@contextmanager
def _clean_device(cap_bytes: int | None) -> Any:
    """The allocator as in a new process, whatever the last task left; yields whether there is a GPU."""
    if not torch.cuda.is_available():
        yield False
        return
    clean()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(1.0 if cap_bytes is None else min(1.0, cap_bytes / total))
    try:
        yield True
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        clean()


def clean() -> None:
    """Give back everything: the last task's tensors, cuBLAS's workspaces, cached blocks."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()


def process_bytes() -> int | None:
    """What the driver counts for this process, where it tells (not in most containers)."""
    with suppress(ImportError, OSError):
        import pynvml

        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByIndex(0)
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if process.pid == os.getpid() and process.usedGpuMemory is not None:
                    return int(process.usedGpuMemory)
    return None


def context_bytes() -> int | None:
    """What a process of its own takes beside the allocator, alone on the device: call it before anything else runs there."""
    if not torch.cuda.is_available():
        return None
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    before = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
    layer = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(8 * 30 * 30, 10)).cuda()
    layer(torch.randn(4, 3, 32, 32, device="cuda")).sum().backward()
    torch.cuda.synchronize()
    return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) - before - torch.cuda.memory_reserved()


def row(task: Task, predicted: Predicted, measured: dict[str, Any]) -> dict[str, Any]:
    """What the result file keeps of a task."""
    found: dict[str, Any] = {**asdict(task), "predicted": predicted.categories, "measured": measured, "recomputed": len(predicted.fqns)}
    said = dict(predicted.categories)
    said["process"] = said["reserved"]  # our word for all that must be free: the allocator's segments and the context
    said["reserved"] -= said["context"]
    for name in ("allocated", "reserved", "process"):
        if measured.get(name):
            found[f"{name}_error"] = said[name] / measured[name] - 1
    found["margin"] = predicted.footprint.margin
    found["assumptions"] = list(predicted.footprint.assumptions)
    found["trace_seconds"] = predicted.seconds
    return found
