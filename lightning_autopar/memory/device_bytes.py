"""What a plan takes of a device and of the host, by category. Data only: it doesn't know how the figures come about."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

Occasion = Literal["step", "validation", "checkpoint", "start"]


@dataclass(frozen=True, kw_only=True)
class DeviceBytes:
    """What one device holds at its fullest moment, by category.

    Args:
        parameters: its part of the parameters, as they are between steps.
        gradients: complete gradients at that moment; there may be none of them yet, if forward's end is the peak.
        optimizer: its part of the optimizers' state.
        activations: tensors that forward made and that are still there.
        temporary: the rest of the peak: gradients of activations, gradients in the making, the optimizer's scratch.
        buffers: the module's buffers.
        input: its part of the batch.
        communication: gathered parameters, whole gradients on their way and buffers of collectives.
        workspace: what libraries keep inside of torch's allocator (cuBLAS's workspaces).
        context: what lies outside of torch's allocator: the CUDA context, cuDNN's handles and NCCL's buffers.
        rounding: what the allocator holds and can't hand out.
        correction: what earlier runs of this module were measured to take beyond the prediction; may be negative.
        occasion: when that is: in a ``"step"``, in a ``"validation"`` between two, while a ``"checkpoint"`` is saved, at the ``"start"``.
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
        del values["updates"]  # a reader of sizes would take it for one
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
