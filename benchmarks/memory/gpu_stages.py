"""Models in stages on several (stub) GPUs: what planning says of each rank, and what torch's allocator does. Knows no table.

A run isn't planned and nothing is tried before: the engine's own strategy runs in its workers, as calibration runs it. Random numbers are
drawn as for one device.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset

from lightning_autopar import engines
from lightning_autopar.devices.discover import probe
from lightning_autopar.devices.inventory import Inventory
from lightning_autopar.exact.random.whole_batch_draws import DrawPlan
from lightning_autopar.memory.cuda_overhead import target_of, workspaces
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.trace.trace import trace
from lightning_autopar.planning.plan_bytes import predict, replay
from lightning_autopar.plans import Plan, Schedule
from lightning_autopar.strategies.base.run_plan import RunPlan
from lightning_autopar.strategies.calibration import engine_overhead
from memory.gpu_job import STEPS, adamw
from memory.zoo_unseen import judging_models

_BLOCKS = 6
QUIET: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
#: FQNs of each model's blocks, in order; half of them are an encoder's, half a decoder's, where there are two.
FQNS = {
    "Qwen3": ["model.layers"],
    "Phi-3": ["model.layers"],
    "Cohere": ["model.layers"],
    "GPT-Neo": ["transformer.h"],
    "OLMoE": ["model.layers"],
    "MPNet": ["mpnet.encoder.layer"],
    "ESM": ["esm.encoder.layer"],
    "DINOv2": ["dinov2.encoder.layer"],
    "mBART": ["model.encoder.layers", "model.decoder.layers"],
    "PatchTSMixer": ["model.encoder.mlp_mixer_encoder.mixers"],
}
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
#: Schedule, ranks, micro-batches and stages.
_SETTINGS: tuple[tuple[Schedule, int, int, int], ...] = (
    ("gpipe", 2, 2, 2),
    ("1f1b", 2, 4, 2),
    ("1f1b", 3, 4, 3),
    ("interleaved_1f1b", 2, 4, 4),
    ("gpipe", 4, 4, 4),
    ("gpipe", 2, 1, 2),
)
#: Settings of pipelines with replicas, recomputation or accumulated gradients.
_MORE: tuple[dict[str, Any], ...] = (
    {"schedule": "1f1b", "ranks": 2, "micro_batches": 4, "stages": 2, "recompute": 1},
    {"schedule": "gpipe", "ranks": 2, "micro_batches": 2, "stages": 2, "replicas": 2},
    {"schedule": "1f1b", "ranks": 2, "micro_batches": 2, "stages": 2, "accumulate": 2},
    {"schedule": "interleaved_1f1b", "ranks": 2, "micro_batches": 2, "stages": 4, "recompute": 2},
    {"schedule": "1f1b", "ranks": 2, "micro_batches": 2, "stages": 2, "replicas": 2, "sharded": True},
    {"schedule": "gpipe", "ranks": 3, "micro_batches": 4, "stages": 3, "recompute": 2, "accumulate": 2},
    {"schedule": "1f1b", "ranks": 2, "micro_batches": 4, "stages": 2, "replicas": 2, "recompute": 2},
)


@dataclass(frozen=True, kw_only=True)
class StagesTask:
    """A model in a precision, cut into stages.

    Args:
        replicas: how many pipelines of ``ranks`` GPUs each run side by side.
        sharded: whether these shard each block's parameters among them.
        recompute: every so-manieth block is recomputed; 0 for none.
        accumulate: batches to a step of the optimizer.
    """

    model: str
    precision: str
    schedule: Schedule
    ranks: int
    micro_batches: int
    stages: int
    replicas: int = 1
    sharded: bool = False
    recompute: int = 0
    accumulate: int = 1

    @property
    def words(self) -> str:
        """Which it is."""
        more = [
            *([f"{self.replicas} replicas" + (", sharded" if self.sharded else "")] if self.replicas > 1 else []),
            *([f"each {self.recompute}. block recomputed"] if self.recompute else []),
            *([f"{self.accumulate} batches a step"] if self.accumulate > 1 else []),
        ]
        settings = f"{self.schedule} ×{self.micro_batches}, {self.stages} on {self.ranks}"
        return ", ".join([self.model, self.precision, settings, *more])

    @property
    def blocks(self) -> list[str]:
        """The model's, in order."""
        return model_blocks(self.model)

    def plan(self, devices: tuple[str, ...]) -> Plan:
        """The pipeline on the first of these devices."""
        cuts = tuple(self.blocks[_BLOCKS * stage // self.stages] for stage in range(1, self.stages))
        return Plan(
            engine="pipeline",
            devices=devices[: self.ranks * self.replicas],
            cuts=cuts,
            schedule=self.schedule,
            micro_batches=self.micro_batches,
            replicas=self.replicas,
            shard=tuple(self.blocks) if self.sharded else (),
            recompute=tuple(self.blocks[:: self.recompute]) if self.recompute else (),
        )


def stages_tasks() -> list[StagesTask]:
    """Each model four times; precisions and settings take turns. Then twice with one of :data:`_MORE`."""
    plain = [
        StagesTask(
            model=model,
            precision=PRECISIONS[(place + turn) % 3],
            **dict(zip(("schedule", "ranks", "micro_batches", "stages"), _SETTINGS[(place + 5 * turn) % 6], strict=True)),  # type: ignore[arg-type]
        )
        for turn in range(4)
        for place, model in enumerate(FQNS)
    ]
    more = [
        StagesTask(model=model, precision=PRECISIONS[(place + turn + 1) % 3], **_MORE[(place + 5 * turn) % len(_MORE)])
        for turn in range(2)
        for place, model in enumerate(FQNS)
    ]
    return plain + more


def model_blocks(model: str) -> list[str]:
    """FQNs of a model's blocks, in order."""
    return [f"net.{path}.{index}" for path in FQNS[model] for index in range(_BLOCKS // len(FQNS[model]))]


def built(name: str) -> tuple[pl.LightningModule, Any]:
    """A model, and its batch."""
    torch.manual_seed(0)
    model = next(one for one in judging_models() if one.name == name)
    batch = model.batch()
    return model.build(adamw("foreach", True)), batch


def planned(task: Any, devices: str) -> tuple[Footprint, Plan, Inventory]:
    """What planning knows of a task on these devices: its step, its plan and what there is."""
    module, batch = built(task.model)
    inventory = probe(devices)
    trainer = pl.Trainer(accelerator="cpu", devices=1, accumulate_grad_batches=task.accumulate, **QUIET)
    footprint = trace(module, trainer, batch, precision=task.precision, target=target_of(inventory.devices))
    return footprint, task.plan(tuple(device.id for device in inventory.devices)), inventory


def predict_stages(task: StagesTask, spec: str) -> list[dict[str, int]]:
    """Of each rank the bytes that are said to be allocated and reserved, also without the replay."""
    footprint, plan, inventory = planned(task, f"{task.ranks * task.replicas}x{spec}")
    told = predict(footprint, plan, inventory, precision=task.precision).values()
    taken = workspaces(footprint, inventory.devices[0].name)
    played = [replay(footprint, plan, rank, workspaces=taken) for rank in range(len(plan.devices))]
    return [
        {
            "allocated": one.allocated_peak_bytes,
            "reserved": one.reserved_peak_bytes,
            "allocated_without_replay": size.allocated,
            "reserved_without_replay": size.allocated + size.rounding,
        }
        for one, size in zip(played, told, strict=True)
    ]


class _Samples(Dataset[Any]):
    def __init__(self, batch: Any, rows: int, length: int) -> None:
        self.batch, self.rows, self.length = batch, rows, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return tree_map(lambda leaf: leaf[index % self.rows].clone(), self.batch)


class _Measured(pl.Callback):
    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        found = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        (self.folder / str(dist.get_rank())).write_text(json.dumps(found))


def measure_ranks(task: Any) -> list[dict[str, int]]:
    """Of each rank what torch's allocator had given out and held at most, after sixteen steps."""
    module, batch = built(task.model)
    inventory = probe(accelerator="cuda")
    plan = task.plan(tuple(device.id for device in inventory.devices))
    value = engines.of(plan).sample_value(module, tree_map(lambda leaf: leaf[:2], batch), task.blocks)
    devices = tuple(inventory.among(plan.devices))
    run_plan = RunPlan(plan=plan, devices=devices, findings={plan.engine: value}, draws=DrawPlan())
    launcher = engine_overhead._Launcher(run_plan)
    rows = len(tree_leaves(batch)[0])
    with tempfile.TemporaryDirectory() as folder:
        strategy, callbacks = engine_overhead._Calibrating(launcher), [_Measured(folder)]
        trainer = pl.Trainer(
            accelerator="gpu",
            devices=1,
            strategy=strategy,
            precision=task.precision,
            max_steps=STEPS,
            accumulate_grad_batches=task.accumulate,
            callbacks=callbacks,
            **QUIET,
        )
        trainer.fit(module, DataLoader(_Samples(batch, rows, rows * STEPS * task.accumulate), rows))
        return [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(len(plan.devices))]


def ranks_row(task: Any, predicted: list[dict[str, int]], measured: list[dict[str, int]]) -> dict[str, Any]:
    """What the result file keeps of it: each rank's bytes and errors."""
    ranks = [
        {
            "predicted": said,
            "measured": found,
            "allocated_error": said["allocated"] / found["allocated"] - 1,
            "reserved_error": said["reserved"] / found["reserved"] - 1,
            "without_replay_error": said["reserved_without_replay"] / found["reserved"] - 1,
        }
        for said, found in zip(predicted, measured, strict=True)
    ]
    return {**asdict(task), "ranks": ranks}
