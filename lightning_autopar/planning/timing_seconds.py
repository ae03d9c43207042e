"""What a prediction of time says: seconds by part; and as what a plan's bytes are sent. Data only."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Predicted seconds of one training step on the slowest rank, by part; the parts add up to :attr:`step`.

    Args:
        compute: forward and backward.
        recompute: forwards that run a second time.
        optimizer: the update on the device, clipping included.
        communication: what communication adds, beyond what hides behind computing, copies in and out of its buffers included.
        bubble: what the ranks of a pipeline wait for each other.
        offload: copies to host memory and back that nothing hides, and the update there.
        input: copying the batch to the device, and what the loader needs beyond the step.
        overhead: launching, hooks, waiting for the host.
    """

    compute: float
    recompute: float = 0.0
    optimizer: float = 0.0
    communication: float = 0.0
    bubble: float = 0.0
    offload: float = 0.0
    input: float = 0.0
    overhead: float = 0.0

    @property
    def step(self) -> float:
        """Seconds of the whole step."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """The parts by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def to_dict(self) -> dict[str, float]:
        """The parts and ``step``, by name."""
        return {**self.parts(), "step": self.step}


@dataclass(frozen=True, kw_only=True)
class Wire:
    """As what parameters and gradients are sent, where an engine casts them first. None: as they are stored.

    Args:
        parameter_bytes: of an element of gathered parameters (``MixedPrecisionPolicy.param_dtype``).
        gradient_bytes: of an element of reduced gradients (``reduce_dtype``, or a hook that compresses).
    """

    parameter_bytes: int | None = None
    gradient_bytes: int | None = None
