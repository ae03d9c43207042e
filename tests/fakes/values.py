"""Footprints and inventories for tests of planning: every figure settable, the rest plausible."""

from __future__ import annotations

from typing import Any

from lightning_autopar.devices.inventory import Device, Inventory, Link
from lightning_autopar.memory.footprint import Footprint, LayerFootprint

MIB = 1024**2
GIB = 1024**3


def block(fqn: str, *, parameter_bytes: int = 32 * MIB, activation_bytes: int = 128 * MIB, **figures: Any) -> LayerFootprint:
    values: dict[str, Any] = {
        "parameters": parameter_bytes // 4,
        "parameter_bytes": parameter_bytes,
        "gradient_bytes": parameter_bytes,
        "optimizer_bytes": 2 * parameter_bytes,
        "activation_bytes": activation_bytes,
        "input_bytes": activation_bytes // 16,
        "flops": 10**10,
    }
    return LayerFootprint(fqn=fqn, **{**values, **figures})


def footprint(*, blocks: int = 4, parameter_bytes: int = 32 * MIB, activation_bytes: int = 128 * MIB, **figures: Any) -> Footprint:
    """A stack of equal blocks under AdamW: sizes are a block's."""
    layers = tuple(block(f"net.{index}", parameter_bytes=parameter_bytes, activation_bytes=activation_bytes) for index in range(blocks))
    values: dict[str, Any] = {
        "parameters": blocks * parameter_bytes // 4,
        "trainable_parameters": blocks * parameter_bytes // 4,
        "batch_size": 8,
        "parameter_bytes": blocks * parameter_bytes,
        "gradient_bytes": blocks * parameter_bytes,
        "optimizer_bytes": 2 * blocks * parameter_bytes,
        "buffer_bytes": 0,
        "activation_bytes": blocks * activation_bytes,
        "temporary_bytes": 16 * MIB,
        "input_bytes": MIB,
        "largest_parameter_bytes": parameter_bytes,
        "flops": 3 * blocks * 10**10,
        "blocks": layers,
    }
    return Footprint(**{**values, **figures})


def cpu(index: int, free_bytes: int = 4 * GIB, **figures: Any) -> Device:
    values: dict[str, Any] = {"kind": "cpu", "name": "CPU", "total_bytes": free_bytes, "threads": 1}
    return Device(id=f"cpu:{index}", free_bytes=free_bytes, index=index, **{**values, **figures})


def gpu(index: int, free_bytes: int = 79 * GIB, **figures: Any) -> Device:
    values: dict[str, Any] = {"kind": "cuda", "name": "NVIDIA H100 80GB HBM3", "total_bytes": 79 * GIB}
    return Device(id=f"GPU-{index:04x}", free_bytes=free_bytes, index=index, **{**values, **figures})


def inventory(*devices: Device, links: tuple[Link, ...] = (), **figures: Any) -> Inventory:
    values: dict[str, Any] = {"host_total_bytes": 1024 * GIB, "host_free_bytes": 1024 * GIB, "source": "spec"}
    return Inventory(devices=devices, links=links, **{**values, **figures})
