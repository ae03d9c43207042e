"""Plan for a module without a Trainer: ``lightning_autopar.plan(module, batch=…, devices=…)``. Trains nothing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal

from lightning_autopar._fork import run_forked
from lightning_autopar._lightning import LightningModule
from lightning_autopar._root import check
from lightning_autopar.constraints import Constraints, check_allow, check_memory_limit
from lightning_autopar.devices.discover import probe
from lightning_autopar.memory.allocator.options import options_from_environment
from lightning_autopar.memory.cuda_overhead import Target, target_of
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.learned.memory_records import load_residuals
from lightning_autopar.memory.trace.first_batch import FirstBatch, batch_size_of
from lightning_autopar.memory.trace.trace import trace
from lightning_autopar.planning.make_report import make_report
from lightning_autopar.planning.refusals import missing_packages
from lightning_autopar.plans import Plan, offered_engines
from lightning_autopar.report.report import Report
from lightning_autopar.strategies.calibration.calibration import calibrated

_TRACE_SECONDS = 600.0


def plan(
    module: LightningModule,
    *,
    batch: Any,
    devices: str | None = None,
    precision: str | int | None = "32-true",
    allow: Sequence[str] | None = None,
    memory_limit: int | str | None = None,
    memory_margin: float = 0.05,
    objective: Literal["speed", "memory"] = "speed",
    pinned: Plan | None = None,
) -> Report:
    """Every way to train a module on these devices, with predicted memory and time, the best first.

    Times are by this machine's measured rates where an earlier run measured them, else by data sheets; nothing is measured here.

    Args:
        module: a LightningModule; it isn't changed, and no GPU is touched.
        batch: a batch as its ``training_step`` gets it, on the CPU.
        devices: the devices that there are, or that you consider: ``"2xcpu:4GiB"``, ``"8xH100-80GB"``; by default the variable
            AUTOPAR_DEVICES, or else this machine's GPUs, or its CPU.
        precision: as for the Trainer.
        allow: the engines to choose from; all by default.
        memory_limit: the most to use of each device, in bytes or as ``"20GiB"``.
        memory_margin: the share of each device's free memory that is left alone.
        objective: ``"speed"`` for the shortest step, ``"memory"`` for the least memory.
        pinned: predict for this plan only.

    Raises:
        NothingFits: if no plan fits, with the report.
        ValueError: if an argument isn't allowed.
    """
    check(module, "the module")
    inventory = probe(devices, accelerator=_accelerator())
    rates = None if any(device.kind == "catalogue" for device in inventory.devices) else calibrated(inventory)
    constraints = Constraints(
        allow=offered_engines() if allow is None else check_allow(allow),
        memory_limit_bytes=None if memory_limit is None else check_memory_limit(memory_limit),
        memory_margin=memory_margin,
        objective=objective,
        precision=str(precision),
        pinned=pinned,
        excluded=missing_packages(inventory),
        allocator=options_from_environment(os.environ),
        residuals=load_residuals(module, str(precision), inventory, **({} if rates is None else {"rates": rates.name})),
    )
    footprint = run_forked(_trace, module, batch, precision, target_of(inventory.devices), timeout_seconds=_TRACE_SECONDS)
    if isinstance(footprint, ValueError):
        raise footprint
    return make_report(footprint, inventory, constraints, rates=rates)


def _accelerator() -> Literal["cuda", "cpu"]:
    """What the Trainer's ``accelerator="auto"`` would take; asks NVML, so that CUDA stays uninitialised."""
    from lightning_autopar._lightning import num_cuda_devices

    return "cuda" if num_cuda_devices() else "cpu"


def _trace(module: LightningModule, batch: Any, precision: str | int | None, target: Target) -> Footprint | ValueError:
    first = FirstBatch(batch=batch, batch_size=batch_size_of(batch))
    try:
        return trace(module, None, first, stage="fit", precision=precision, target=target)
    except ValueError as error:  # an argument isn't allowed: no failure of the child
        return error
