"""How many calls an engine's Python makes in a step, beside those of the trainer's loop. Counts alone: what a call costs is a rate.

Most are counted by ``benchmarks/python_calls.py`` (``sys.setprofile`` in real steps of modules of several shapes, taken apart by least
squares) with torch 2.13 and DeepSpeed 0.19.8: the same on every machine; other versions make others, about as many. Estimated, and yet to
be counted: stages 1 and 2 without offload; stage 3 without offload by its count with it; ``SHARDED_OPERATION``, which is of one comparison.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_autopar.plans import Plan


@dataclass(frozen=True, kw_only=True)
class Calls:
    """Calls of functions and builtins in one step.

    Args:
        step: however large the module is.
        parameter: for each parameter that is trained.
        module: for each module.
        bucket: for each bucket of gradients that fills.
    """

    step: int
    parameter: int
    module: int
    bucket: int


#: By ZeRO's stage, and by whether the optimizer is offloaded.
ZERO: Mapping[tuple[int, bool], Calls] = {
    (1, False): Calls(step=1100, parameter=200, module=25, bucket=300),
    (2, False): Calls(step=1100, parameter=185, module=25, bucket=300),
    (2, True): Calls(step=1780, parameter=435, module=49, bucket=276),
    (3, False): Calls(step=3292, parameter=1397, module=895, bucket=669),
    (3, True): Calls(step=3292, parameter=1497, module=900, bucket=669),
}
#: FSDP2's, for a parameter beyond the two of the unit by which a unit's hooks are measured.
FSDP_PARAMETER = 197
FSDP_UNIT_PARAMETERS = 2
#: What ``DTensor`` makes of one operation on shards, as the loop of an optimizer without a kernel for lists runs them on a CPU.
SHARDED_OPERATION = 32
#: What a draw of the whole batch's random numbers takes on a rank beside the operations (``benchmarks/draws.py``).
DRAW = 62


def zero_calls(plan: Plan, *, parameters: int, modules: int, buckets: int) -> int:
    """Calls of a step under ZeRO.

    Args:
        plan: of engine ``"zero"``.
        parameters: that are trained.
        modules: all of them.
        buckets: of gradients that fill in a step.
    """
    assert plan.zero_stage is not None
    offloads = "optimizer" in plan.offload and plan.zero_stage > 1
    calls = ZERO[plan.zero_stage, offloads]
    return calls.step + calls.parameter * parameters + calls.module * modules + calls.bucket * buckets


def fsdp_calls(*, parameters: int, units: int) -> int:
    """Calls of a step under FSDP2 beyond those that the measured cost of a unit has in it."""
    return FSDP_PARAMETER * max(0, parameters - FSDP_UNIT_PARAMETERS * units)
