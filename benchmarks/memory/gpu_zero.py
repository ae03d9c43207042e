"""Models under DeepSpeed's ZeRO on several (stub) GPUs: what planning says of each rank, and what torch's allocator does. Knows no table.

The engine's own strategy runs in its workers, as for :mod:`memory.gpu_stages`.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_autopar.planning.plan_bytes import predict
from lightning_autopar.plans import Offload, Plan
from memory.gpu_stages import FQNS, PRECISIONS, model_blocks, planned

_SETTINGS: tuple[tuple[int, tuple[Offload, ...]], ...] = (
    (1, ()),
    (2, ()),
    (3, ()),
    (2, ("optimizer",)),
    (3, ("optimizer", "parameters")),
)


@dataclass(frozen=True, kw_only=True)
class ZeroTask:
    """A model in a precision under a stage of ZeRO.

    Args:
        recompute: whether all blocks are recomputed.
        accumulate: batches to a step of the optimizer.
    """

    model: str
    precision: str
    stage: int
    offload: tuple[Offload, ...] = ()
    ranks: int = 2
    recompute: bool = False
    accumulate: int = 1

    @property
    def words(self) -> str:
        """Which it is."""
        more = [
            *([f"{' and '.join(self.offload)} offloaded"] if self.offload else []),
            *(["recomputed"] if self.recompute else []),
            *([f"{self.accumulate} batches a step"] if self.accumulate > 1 else []),
        ]
        return ", ".join([self.model, self.precision, f"zero-{self.stage} on {self.ranks}", *more])

    @property
    def blocks(self) -> list[str]:
        """The model's, in order."""
        return model_blocks(self.model)

    def plan(self, devices: tuple[str, ...]) -> Plan:
        """ZeRO on the first of these devices."""
        return Plan(
            engine="zero",
            devices=devices[: self.ranks],
            zero_stage=self.stage,
            offload=self.offload,
            recompute=tuple(self.blocks) if self.recompute else (),
        )


def zero_tasks() -> list[ZeroTask]:
    """Each model under each stage; precisions take turns. Then once recomputed, with accumulated gradients or on four ranks, in turns."""
    settings = [dict(zip(("stage", "offload"), setting, strict=True)) for setting in _SETTINGS]
    plain = [
        ZeroTask(model=model, precision=PRECISIONS[(place + turn) % 3], **setting)  # type: ignore[arg-type]
        for turn, setting in enumerate(settings)
        for place, model in enumerate(FQNS)
    ]
    others = ({"recompute": True}, {"accumulate": 2}, {"ranks": 4})
    more = [
        ZeroTask(model=model, precision=PRECISIONS[(place + 1) % 3], **settings[place % 5], **others[place % 3])  # type: ignore[arg-type]
        for place, model in enumerate(FQNS)
    ]
    return plain + more


def predict_zero(task: ZeroTask, spec: str) -> list[dict[str, int]]:
    """Of each rank the bytes that are said to be allocated and reserved, in categories."""
    footprint, plan, inventory = planned(task, f"{task.ranks}x{spec}")
    told = predict(footprint, plan, inventory, precision=task.precision).values()
    sizes = [{name: size for name, size in one.to_dict().items() if isinstance(size, int) and size} for one in told]
    return [
        size | {"reserved": size["reserved"] - size["context"], "reserved_without_replay": size["reserved"] - size["context"]}
        for size in sizes
    ]
