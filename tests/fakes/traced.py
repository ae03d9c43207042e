"""A footprint with its operations, whose seconds a test can reckon by head, and devices to run it on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.work.work import Work
from tests.fakes.values import MIB, block, cpu, footprint, gpu, inventory

HERE = inventory(cpu(0), cpu(1), cpu(2, threads=2), *(gpu(index) for index in range(4)), gpu(4, utilization=0.5), gpu(5, node=1))
GPUS = tuple(f"GPU-{index:04x}" for index in range(6))
BLOCKS = ("net.0", "net.1", "net.2", "net.3")


def work(flops: int, *, count: int = 1) -> tuple[Work, ...]:
    """Products without a shape, all of which grows with the batch."""
    return (Work(kind="matmul", name="mm", dtype="fp32", count=count, flops=flops // count, moved_bytes=1),)


def traced(*, blocks: int = 4, gradient_bytes: int = 100 * MIB, forward: int = 10**12, update: int = 0, **figures: Any) -> Footprint:
    """Blocks of a second forward and two backward at a TFLOP/s, and a head of nothing."""
    layers = tuple(
        block(
            f"net.{index}",
            parameter_bytes=gradient_bytes,
            work=work(forward),
            backward_work=work(2 * forward),
            parameter_rows=((gradient_bytes // 4, 4, True),),
        )
        for index in range(blocks)
    )
    outer = tuple(
        block("", parameter_bytes=0, gradient_bytes=0, activation_bytes=0, parameters=0, optimizer_bytes=0, flops=0)
        for _ in range(blocks + 1)
    )
    optimizer = (Work(kind="pointwise", name="_foreach", dtype="fp32", flops=0, moved_bytes=update, fixed_bytes=update),)
    values: dict[str, Any] = {"input_bytes": 0, "optimizer_work": optimizer}
    return replace(footprint(blocks=blocks, parameter_bytes=gradient_bytes), blocks=layers, outer=outer, **{**values, **figures})
