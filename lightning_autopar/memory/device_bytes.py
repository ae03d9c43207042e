"""What a plan takes of a device and of the host, by category. Data only: it doesn't know how the figures were found."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from lightning_autopar.devices.inventory import Inventory
from lightning_autopar.text import format_bytes, format_of

Occasion = Literal["step", "validation", "checkpoint", "start"]


@dataclass(frozen=True, kw_only=True)
class DeviceBytes:
    """What one device holds at its fullest moment, by category.

    Args:
        parameters: its part of the parameters, as they are between steps.
        gradients: complete gradients at that moment; 0 if the peak is at forward's end.
        optimizer: its part of the optimizers' state.
        activations: tensors that forward made and that are still held.
        temporary: the rest of the peak: gradients of activations, gradients in the making, the optimizer's scratch.
        input: its part of the batch.
        communication: gathered parameters, whole gradients on their way and buffers of collectives.
        workspace: what libraries keep inside of torch's allocator (cuBLAS's workspaces).
        context: the bytes outside of torch's allocator: the CUDA context, cuDNN's handles and NCCL's buffers.
        rounding: the bytes that the allocator holds but can't hand out.
        correction: the bytes that earlier runs of this module took beyond the prediction; may be negative.
        occasion: when that moment is: in a ``"step"``, in a ``"validation"`` between two, while a ``"checkpoint"`` is saved, at the
            ``"start"``.
        updates: whether a step's fullest moment is the optimizer's own, as far as that is known.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    temporary: int = 0
    buffers: int = 0
    input: int = 0
    communication: int = 0
    workspace: int = 0
    context: int = 0
    rounding: int = 0
    correction: int = 0
    occasion: Occasion = "step"
    updates: bool = False

    @property
    def allocated(self) -> int:
        """Bytes of tensors at the peak: ``torch.cuda.max_memory_allocated`` on a GPU."""
        return self.reserved - self.context - self.rounding

    @property
    def reserved(self) -> int:
        """Bytes that the device must have free for the process: all of it."""
        states = self.parameters + self.gradients + self.optimizer + self.buffers
        passing = self.activations + self.temporary + self.input + self.communication
        return states + passing + self.workspace + self.context + self.rounding + self.correction

    def to_dict(self) -> dict[str, Any]:
        """The categories by name, with ``allocated`` and ``reserved``, and the occasion."""
        values = dataclasses.asdict(self)
        del values["updates"]  # a reader of sizes would take this value for a size
        return {**values, "allocated": self.allocated, "reserved": self.reserved}


@dataclass(frozen=True, kw_only=True)
class HostBytes:
    """What a plan takes of one host's memory at its fullest moment, over all of its processes, besides what CPU devices hold.

    Args:
        module: the user's module in the process that started the run.
        checkpoint: the whole state on its way to or from a file.
        input: batches on their way from workers, page-locked copies included.
        offload: states, gradients and parameters that lie on the host between their uses.
        pinned: page-locked buffers through which they pass.
    """

    module: int = 0
    checkpoint: int = 0
    input: int = 0
    offload: int = 0
    pinned: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(dataclasses.asdict(self).values())

    def to_dict(self) -> dict[str, int]:
        """The categories by name, with ``total``."""
        return {**dataclasses.asdict(self), "total": self.total}


@dataclass(frozen=True, kw_only=True)
class HostNeed:
    """What a plan takes of the memory of the host that has least to spare for it, in bytes.

    Args:
        node: which host that is.
        offload: what all ranks there keep in pageable memory.
        pinned: what they keep in page-locked memory.
        module: the module in the process that starts the run, or in each rank that builds it.
        checkpoint: the state on its way to a file.
        devices: what the CPU devices hold there, which are the host's memory.
        budget: what the plan may use: what is free, less the margin.
        assumed: whether nobody said what the host has.
    """

    node: int
    offload: int
    pinned: int = 0
    module: int = 0
    checkpoint: int = 0
    devices: int = 0
    budget: int
    assumed: bool = False

    @property
    def total(self) -> int:
        """At the fullest moment: while the module is built, or while a checkpoint is saved."""
        return self.offload + self.pinned + max(self.module, self.checkpoint + self.devices)

    @property
    def fits(self) -> bool:
        """Whether the host has enough."""
        return self.total <= self.budget

    def words(self) -> str:
        """``"121 / 45.6 GiB"``."""
        return format_of(self.total, self.budget)

    def shortage(self, inventory: Inventory, margin: float) -> str:
        """The sentence with the figures and the remedy, for a plan that doesn't fit.

        Args:
            margin: share of the free memory that is left alone.
        """
        told = [f"{format_bytes(self.offload + self.pinned)} offloaded"]
        told += [f"{format_bytes(self.pinned)} of it page-locked"] if self.pinned else []
        besides = {"for the module": self.module, "for a checkpoint": self.checkpoint, "on its CPU devices": self.devices}
        told += [f"{format_bytes(size)} {what}" for what, size in besides.items() if size]
        whole = format_bytes(inventory.host_free_on(self.node))
        there = f"{whole} assumed" if self.assumed else f"{whole} free"
        less = f" less the {margin * 100:.3g} % margin" if margin else ""
        where = f" of node {self.node}" if len({device.node for device in inventory.devices}) > 1 else ""
        if (device := inventory.devices[0]).kind == "catalogue":
            enough_gib = 1 << (math.ceil(self.total / (1 - margin) / 2**30) - 1).bit_length()
            remedy = f"if it has more, say so in the spec, as in '{device.name}@{enough_gib}GiB'"
        else:
            remedy = "free as much, as the system would kill the job, or choose an optimizer with less state"
        return (
            f"needs {format_bytes(self.total)} of the host's memory{where}, which has {format_bytes(self.budget)} "
            f"({there}{less}; {', '.join(told)}); {remedy}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with ``total``."""
        return {**dataclasses.asdict(self), "total": self.total}
