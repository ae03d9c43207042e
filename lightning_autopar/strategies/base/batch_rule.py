"""The strategy's argument ``batch``: whether the user's batch is the global batch or each device's, and the settings that belong to it.

No ``from __future__ import annotations`` here: jsonargparse reads the annotations as objects.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from lightning_autopar.constraints import REFUSALS
from lightning_autopar.strategies.base.run_plan import BatchRule


@dataclass(frozen=True, kw_only=True)
class Batch:
    """How several devices take a batch, and who draws the random numbers of its samples.

    Args:
        rule: "global" splits the user's batch over the devices; "per_device" gives each device batches of its own, as Lightning does.
        draws: Random numbers of a split batch, such as dropout's: "whole": each rank draws them for the whole batch and keeps those of its
            samples, so that the run is that of one device; "per-rank": each draws for its own samples alone, from a stream of its own; that
            is less work, and as good a run, but not the same one.
        despite: The names of refusals to overrule. Plans are then taken whose run differs from that on one device: "batch_norm" (each
            micro-batch has its own statistics), "buffers" (each rank keeps only its own samples' values in buffers that the step writes,
            such as a memory bank), "kept" (the same for attributes that the next step's loss depends on) and "later_entries" (a batch with
            entries of which planning couldn't tell what they change is split all the same). The report and the run say so.

    Raises:
        ValueError: if an argument isn't allowed, with the value, the bound and the remedy.
    """

    rule: BatchRule = "global"
    draws: Literal["whole", "per-rank"] = "whole"
    despite: tuple[Literal["batch_norm", "buffers", "kept", "later_entries"], ...] = ()

    def __post_init__(self) -> None:
        if self.rule not in ("global", "per_device"):
            raise ValueError(f"batch={self.rule!r} must be 'global' (split the batch) or 'per_device' (a batch for each device)")
        if self.draws not in ("whole", "per-rank"):
            raise ValueError(f"draws={self.draws!r} must be 'whole' (as one device draws) or 'per-rank' (each rank for its own samples)")
        listed = isinstance(self.despite, Collection) and not isinstance(self.despite, (str, Mapping))
        if not listed or (unknown := [name for name in self.despite if name not in REFUSALS]):
            named = unknown[0] if listed else self.despite
            choices = ", ".join(repr(name) for name in REFUSALS)
            raise ValueError(f"despite={self.despite!r} must be a list of names of refusals, and {named!r} isn't one; they are {choices}")
        if self.draws == "per-rank" and self.rule == "per_device":
            raise ValueError("draws='per-rank' needs a batch that is split, but rule='per_device' splits none; leave one of them out")

    @classmethod
    def of(cls, batch: "BatchRule | Batch") -> "Batch":
        """The strategy's argument as a whole.

        Raises:
            ValueError: if it isn't one.
        """
        return batch if isinstance(batch, Batch) else cls(rule=batch)
