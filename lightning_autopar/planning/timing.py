"""Seconds a step that a plan would take, by part.

The seam is :func:`predict_seconds`. Behind it ``timing_ranks`` says what a rank computes, ``timing_replicas`` what of its collectives hides
behind that, ``timing_pipeline`` in which order a pipeline does it. It must not know how memory is predicted or how plans are found, and it
measures nothing.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.inventory import Device, Inventory
from lightning_autopar.memory.work import Work
from lightning_autopar.memory.zero_settings import ZeroSettings
from lightning_autopar.planning.collectives import group_bandwidth, pair_bandwidths
from lightning_autopar.planning.data_sheet import DataSheet
from lightning_autopar.planning.rates import Rates
from lightning_autopar.planning.roofline import computing_dtype, idle_share
from lightning_autopar.planning.slowed import slowed
from lightning_autopar.planning.timing_seconds import Seconds, Wire
from lightning_autopar.planning.timing_stages import PipelineStep
from lightning_autopar.planning.timing_step import Step
from lightning_autopar.plans import Plan

__all__ = ["Seconds", "Wire", "device_speed", "group_bandwidth", "idle_share", "pair_bandwidths", "predict_seconds", "step_of"]

_DATA_SHEET = DataSheet()
#: A product that every device is good at, to compare devices by.
_LARGE = 4096


def predict_seconds(
    footprint: Footprint,
    plan: Plan,
    inventory: Inventory,
    *,
    precision: str = "32-true",
    rates: Rates | None = None,
    input_seconds: float | None = None,
    wire: Wire | None = None,
    zero: ZeroSettings | None = None,
) -> Seconds:
    """Seconds of one step of the traced batch under a plan; the slowest rank decides.

    Args:
        footprint: of the whole batch, which the ranks share as the plan says.
        plan: its devices must be in the inventory.
        inventory: the devices and the links between them.
        precision: Lightning's name of the precision, where the footprint's operations aren't known.
        rates: of single operations and collectives; by data sheet, unless given.
        input_seconds: what the loader needs for a batch of the step: hidden where it is shorter than the step.
        wire: as what parameters and gradients are sent; as they are stored, unless given.
        zero: DeepSpeed's settings, where somebody else has chosen them; those of our engine, unless given.

    Raises:
        ValueError: if a device of the plan isn't in the inventory, or the plan names blocks that the footprint hasn't.
    """
    found = step_of(footprint, plan, inventory, precision=precision, rates=rates, wire=wire, zero=zero).seconds()
    if input_seconds is not None and input_seconds > found.step:
        found = replace(found, input=found.input + input_seconds - found.step)
    return found


def step_of(
    footprint: Footprint,
    plan: Plan,
    inventory: Inventory,
    *,
    precision: str,
    rates: Rates | None,
    wire: Wire | None = None,
    zero: ZeroSettings | None = None,
) -> Step:
    """The step of a plan; the arguments are those of :func:`predict_seconds`."""
    kind = PipelineStep if plan.engine == "pipeline" else Step
    return kind(footprint, plan, inventory, precision, rates or _DATA_SHEET, wire or Wire(), zero)


def device_speed(device: Device, precision: str = "32-true", rates: Rates | None = None) -> float:
    """FLOP/s that a device has to spare for large matrix products."""
    return _speed_of(computing_dtype(precision), slowed(rates or _DATA_SHEET, (device,)), device) * idle_share(device)


def _speed_of(dtype: str, rates: Rates, device: Device) -> float:
    key = dtype, rates.token, rates.device_class(device)
    if key not in _SPEEDS:
        if len(_SPEEDS) > 4096:
            _SPEEDS.clear()
        size, width = _LARGE, 2 if dtype in ("bf16", "fp16") else 4
        work = Work(kind="matmul", name="mm", dtype=dtype, flops=2 * size**3, moved_bytes=3 * width * size**2, shape=(1, size, size, size))
        _SPEEDS[key] = work.flops / rates.work_seconds(device, work)
    return _SPEEDS[key]


_SPEEDS: dict[tuple[Hashable, ...], float] = {}
