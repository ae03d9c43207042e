"""One rank of a larger world on the one GPU that there is: rank 0 of FSDP over eight, each stage of a pipeline of four.

torch's fake process group answers the collectives, so that memory is real and values aren't. Runs in pool processes; knows no table.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_autopar.constraints import Constraints
from lightning_autopar.devices.discover import probe
from lightning_autopar.memory.cuda_overhead import target_of
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.trace.trace import trace
from lightning_autopar.planning.block_units import shardable
from lightning_autopar.planning.make_report import make_report
from lightning_autopar.planning.plan_bytes import predict
from lightning_autopar.plans import Plan
from lightning_autopar.report.report import NothingFits
from memory.fake_world import measure_fsdp_rank
from memory.gpu_job import STEPS, adamw, clean, model_of
from memory.stage_rank import GPT, measure_stage
from memory.zoo_unseen import judging_models

FSDP_RANKS, STAGES, MICRO_BATCHES = 8, 4, 8
FSDP_MODELS = ("GPT-2", "Llama", "BERT", "ViT", "nn.Transformer", "MLP")


@dataclass(frozen=True, kw_only=True)
class RankTask:
    """One row.

    Args:
        model: a model of the GPU zoo or one that judges the replay, or ``"GPT"`` for the pipeline.
        engine: ``"fsdp"`` or ``"pipeline"``.
        precision: the Trainer's.
        setting: FSDP ``"reshard"`` or ``"keep"``; the pipeline's schedule.
        rank: which one.
        small: sizes for a CPU.
    """

    model: str
    engine: str
    precision: str
    setting: str
    rank: int
    small: bool


def rank_tasks(small: bool) -> list[RankTask]:
    """Every rank that is measured. On a CPU, where FSDP's peak can't be read without a library of its own, the pipeline alone."""
    stages = [
        RankTask(model="GPT", engine="pipeline", precision="32-true", setting=schedule, rank=rank, small=small)
        for schedule in ("1f1b", "gpipe")
        for rank in range(STAGES)
    ]
    if small:
        return stages
    sharded = [
        RankTask(model=model, engine="fsdp", precision=precision, setting=setting, rank=0, small=small)
        for precision in ("32-true", "bf16-mixed", "bf16-true")
        for setting in ("reshard", "keep")
        for model in FSDP_MODELS
    ]
    judging = [
        RankTask(model=model.name, engine="fsdp", precision="bf16-mixed", setting="reshard", rank=0, small=small)
        for model in judging_models()
    ]
    return sharded + stages + judging


def predict_rank(task: RankTask, spec: str) -> tuple[dict[str, int], Plan, float]:
    """What is said of the rank: bytes by category; the plan; seconds of tracing.

    Args:
        spec: the one device's name, such as ``"H100-80GB"``; a world of them is planned for.
    """
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    inventory = probe(f"{FSDP_RANKS if task.engine == 'fsdp' else STAGES}x{spec}")
    devices = tuple(device.id for device in inventory.devices)
    module, whole = _built(task)
    begun = time.perf_counter()
    footprint = trace(module, None, whole, precision=task.precision, target=target_of(inventory.devices))
    seconds = time.perf_counter() - begun
    plan = _plan(task, footprint, devices)
    if plan.engine == "pipeline":
        held = predict(footprint, plan, inventory, precision=task.precision)[devices[task.rank]].to_dict()
    else:
        constraints = Constraints(allow=("fsdp",), pinned=plan, precision=task.precision, memory_margin=0.0)
        try:
            report = make_report(footprint, inventory, constraints)
        except NothingFits as error:
            report = error.report
        held = report.candidates[0].bytes[devices[task.rank]].to_dict()
    return {name: size for name, size in held.items() if isinstance(size, int)}, plan, seconds


def _plan(task: RankTask, footprint: Footprint, devices: tuple[str, ...]) -> Plan:
    if task.engine == "fsdp":
        return Plan(engine="fsdp", devices=devices, reshard_after_forward=task.setting == "reshard", shard=shardable(footprint)[0])
    blocks = [block.fqn for block in footprint.blocks]
    cuts = tuple(blocks[index * len(blocks) // STAGES] for index in range(1, STAGES))
    return Plan(engine="pipeline", devices=devices, cuts=cuts, schedule=task.setting, micro_batches=MICRO_BATCHES)  # type: ignore[arg-type]


def _built(task: RankTask) -> tuple[LightningModule, Any]:
    """The module, and the batch of all ranks together."""
    if task.engine == "pipeline":
        sizes = {} if task.small else {"width": 1024, "depth": 16, "words": 32000, "length": 1024, "heads": 16}
        model = GPT(**sizes)
        return model, torch.randint(0, model.words, (2 * MICRO_BATCHES, model.length))
    found = model_of(task.model, small=task.small)
    share = found.batch()
    whole = tree_map(lambda leaf: torch.cat([leaf] * FSDP_RANKS) if isinstance(leaf, Tensor) else leaf, share)
    return found.build(adamw("foreach", not task.small)), whole


def measure_rank(task: RankTask, plan: Plan) -> dict[str, Any]:
    """Train that rank for a few steps; ``allocated`` and ``reserved`` bytes, or ``error``."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        if device.type == "cuda":
            clean()
        module, whole = _built(task)
        if task.engine == "fsdp":
            share = tree_map(lambda leaf: leaf[: len(leaf) // FSDP_RANKS] if isinstance(leaf, Tensor) else leaf, whole)
            module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]  # there is no Trainer
            return measure_fsdp_rank(
                module, share, plan, precision=task.precision, device=device, **({"steps": STEPS} if device.type == "cuda" else {})
            )
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=task.rank, world_size=STAGES)
        try:
            assert isinstance(module, GPT)
            return {"reserved": None, **measure_stage(module, plan, task.rank, whole, device=device, fake=True)}
        finally:
            dist.destroy_process_group()
    except Exception as error:  # one rank that can't be run here must not end the others
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[:1]}"}
    finally:
        if device.type == "cuda":
            clean()


def rank_row(task: RankTask, predicted: dict[str, int], seconds: float, measured: dict[str, Any]) -> dict[str, Any]:
    """What the result file keeps of it."""
    found: dict[str, Any] = {**asdict(task), "predicted": predicted, "measured": measured, "trace_seconds": seconds}
    for name in ("allocated", "reserved"):
        if measured.get(name):
            found[f"{name}_error"] = (predicted[name] - (predicted["context"] if name == "reserved" else 0)) / measured[name] - 1
    return found
