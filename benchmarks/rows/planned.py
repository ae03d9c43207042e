"""A row's own plan: engine, devices, sharding, stages, micro-batches. Knows the form of a row and of a plan; no model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import accumulate

from lightning_autopar.devices.inventory import Inventory
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.plans import Offload, Plan, Schedule
from rows.row import Fields, NotBuilt


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a row's run is laid out.

    Args:
        engine: of a plan.
        ranks: on how many devices.
        data: replicas that take a part of the batch each.
        stages: of a pipeline.
        accumulate: micro-batches of one step.
        replicas: copies of the model, each sharded.
        reshard: whether FSDP frees what it gathered between forward and backward.
        zero_stage: of DeepSpeed.
        offload: what lies in host memory.
        recompute: every block, by the engine (models of pictures; a transformer does it by itself).
        keeps_gradients: they are set to zero after a step, not freed, as torch did by itself before 2.0.
        whole_gradients: between the micro-batches of a step FSDP's gradients are whole on each rank (``no_sync``, as Fabric and accelerate
            have it), and reduced with the last one.
        frees_late: gradients are let go after the next forward, as in Lightning's closure.
        tf32: products of fp32 matrices run in TF32.
        first_flash: fused attention is FlashAttention's first version.
        inputs_on_host: what recomputed blocks keep is in host memory until backward.
        buckets: DDP's are memory of their own, as they are by default, not views of the gradients.
        holds_loss: the loop's variable keeps a step's loss, and with it what its graph hasn't let go of, until the next one is there.
        reduce_bytes: of an element of gradients while FSDP reduces them, where they are computed in 16 bits.
        balanced: a pipeline's stages are cut so that the slowest is as fast as can be, rather than of as many blocks each.
        host_update: the optimizer's step is on the host; of one device, where the engine doesn't say it.
        fused_update: that step is one vectorised pass.
        slow_host: how many times slower than a server's two sockets the host's memory is.
        bucket_elements: of DeepSpeed's buckets of gradients; None for Lightning's.
        copies_aside: what goes to the host's memory goes in a stream of its own, beside what computes.
        clips: gradients are clipped by their norm.
        tensor_by_tensor: the update, clipping included, takes a kernel for each parameter.
        slow_python: how many times slower the interpreter is than Python 3.11.
        all_kernels: all of torch's kernels are loaded into the CUDA context.
        narrow: in which type of fewer than 16 bits the blocks' products run: ``"fp8"``, ``"fp4"``; empty for none.
        optimizer_shards: over how many ranks the optimizer's state is shared beside what the engine does (ZeRO-1 beside a pipeline).
        masters: apex's amp keeps parameters in 16 bits and masters in fp32 (O2): after each backward the gradients are added up in fp32.
        clips_each: gradients are clipped after each micro-batch, not once a step.
        whole_stages: a pipeline's stages are recomputed whole, rather than block by block.
        caches_casts: under autocast the weights' casts are there to the end of forward, though recomputed blocks don't save them.
        waits: when in each micro-batch the host waits for the device: after ``"backward"``, after ``"both"`` forward and backward, never.
    """

    engine: str
    ranks: int
    data: int
    stages: int = 1
    accumulate: int = 1
    replicas: int = 1
    reshard: bool = True
    zero_stage: int | None = None
    offload: tuple[Offload, ...] = ()
    recompute: bool = False
    keeps_gradients: bool = False
    whole_gradients: bool = False
    frees_late: bool = False
    tf32: bool = False
    first_flash: bool = False
    inputs_on_host: bool = False
    buckets: bool = False
    holds_loss: bool = False
    optimizer_shards: int = 1
    reduce_bytes: int = 2
    balanced: bool = False
    host_update: bool = False
    fused_update: bool = False
    slow_host: float = 1.0
    bucket_elements: int | None = None
    copies_aside: bool = False
    clips: bool = False
    tensor_by_tensor: bool = False
    slow_python: float = 1.0
    all_kernels: bool = False
    narrow: str = ""
    masters: bool = False
    clips_each: bool = False
    whole_stages: bool = False
    caches_casts: bool = False
    waits: str = ""

    def plan(self, footprint: Footprint, inventory: Inventory) -> Plan:
        """The plan for a footprint on these devices."""
        devices = tuple(device.id for device in inventory.devices[: self.ranks])
        names = tuple(block.fqn for block in footprint.blocks)
        again = names if self.recompute else ()
        if self.engine == "fsdp":
            return Plan(
                engine="fsdp",
                devices=devices,
                reshard_after_forward=self.reshard,
                shard=names,
                replicas=self.replicas,
                micro_batches=self.accumulate,
                offload=self.offload,
                recompute=again,
            )
        if self.engine == "zero":
            return Plan(
                engine="zero",
                devices=devices,
                zero_stage=self.zero_stage,
                micro_batches=self.accumulate,
                offload=self.offload,
                recompute=again,
            )
        if self.engine == "pipeline":
            starts = _balanced(footprint, self.stages) if self.balanced else _even(len(names), self.stages)
            if len(set(starts)) != len(starts) or 0 in starts:
                raise NotBuilt(f"{self.stages} stages of {len(names)} blocks")
            schedule: Schedule = "1f1b"
            return Plan(
                engine="pipeline",
                devices=devices,
                cuts=tuple(names[start] for start in starts),
                schedule=schedule,
                micro_batches=self.accumulate,
                replicas=self.data,
                recompute=again,
            )
        return Plan(engine=self.engine, devices=devices, micro_batches=self.accumulate, recompute=again)  # type: ignore[arg-type]


def _even(blocks: int, stages: int) -> list[int]:
    """With which block each stage but the first begins: as many blocks each, as Megatron-LM and DeepSpeed cut."""
    return [round(stage * blocks / stages) for stage in range(1, stages)]


def _balanced(footprint: Footprint, stages: int) -> list[int]:
    """The same so that the stage with most FLOPs has as few as can be, as torchgpipe's balancing and nanotron's by cost do it."""
    costs = [float(block.flops + block.backward_flops) for block in footprint.blocks]
    for index, part in enumerate(footprint.outer):
        costs[max(0, index - 1)] += part.flops + part.backward_flops
    total = [*accumulate(costs, initial=0.0)]
    count = len(costs)
    # By number of stages and of blocks: the slowest stage, and where the last one begins.
    best: list[tuple[float, int]] = [(total[end], 0) for end in range(count + 1)]
    begins: list[list[int]] = []
    for stage in range(2, min(stages, count) + 1):
        found = [(float("inf"), 0)] * (count + 1)
        for end in range(stage, count + 1):
            found[end] = min((max(best[start][0], total[end] - total[start]), start) for start in range(stage - 1, end))
        begins.append([start for _, start in found])
        best = found
    starts, end = [], count
    for begin in reversed(begins):
        end = begin[end]
        starts.append(end)
    return starts[::-1]


def has_first_flash(fields: Fields) -> bool:
    """Whether fused attention is FlashAttention's first version: no other is named, and torch is older than 2.2, which has the second."""
    said, version = fields.text("attention"), fields.torch_version
    if "flash" not in said or version is None or version >= (2, 2):
        return False
    if re.search(r"flash\D{0,12}[23]", said):
        return False
    fields.assume("the attention's version isn't published: FlashAttention's first, as of its torch")
    return True


def has_apex_masters(fields: Fields) -> bool:
    """Whether the run was under apex's amp with masters in fp32 (``opt_level="O2"``); an optimizer of apex's alone doesn't say so."""
    stored = str(fields.precision.get("params") or "").casefold()
    return "apex" in fields.text("framework") and "fp16" in stored and "master" in stored


def host_waits(fields: Fields) -> str:
    """When in each micro-batch the host reads a number off the device, before which it can't issue what comes next.

    apex's amp reads whether gradients overflowed after each backward (``amp/handle.py``, ``scale_loss``); BingBertSquad's script the loss
    before it as well (``nvidia_run_squad_baseline.py``, ``loss.item()``). transformers' Trainer asks after each backward whether the loss
    is a number (``logging_nan_inf_filter``, by default since 4.11 of September 2021, huggingface/transformers#13619; torch was at 1.9).
    """
    said = fields.text("framework")
    if has_apex_masters(fields):
        return "both" if "bingbert" in said else "backward"
    version, own = fields.torch_version, re.search(r"(?:trainer|transformers) (\d+)\.(\d+)", said)
    older = (version is not None and version < (1, 9)) or (own is not None and (int(own[1]), int(own[2])) < (4, 11))
    return "backward" if "hf trainer" in said and not older else ""


def narrow_products(fields: Fields) -> str:
    """The type of fewer than 16 bits in which the blocks' products run."""
    said = str(fields.precision.get("compute") or "").casefold()
    if "fp4" in said:
        return "fp4"
    return "fp8" if any(word in said for word in ("fp8", "float8", "rowwise", "tensorwise")) else ""


def layout(fields: Fields) -> Layout:
    """How the row's run is laid out.

    Raises:
        NotBuilt: for what no plan of ours can say.
    """
    row = fields.row
    for name in ("tp", "cp", "ep"):
        if (fields.dimension_of(name) or 1) > 1:
            raise NotBuilt(f"no plan with {name} {row[name]}")
    strategy = fields.text("strategy", "single")
    count, stages = fields.whole("n_gpus", 1), int(fields.dimension_of("pp") or 1)
    accumulate = int(fields.dimension_of("grad_accum") or 1)
    said = fields.dimension_of("dp")
    data = max(1, int(said) if said else count // stages)
    stage = int(fields.dimension_of("sharding_stage") or 0)
    offload: tuple[Offload, ...] = ()
    away = f"{strategy} {fields.text('offload')}"
    optimizer_away = "offload" in strategy or ("cpu" in fields.text("offload") and "optimizer" in fields.text("offload"))
    if stages > 1:
        group = data if "zero" in strategy or stage else 1
        if "gpipe" in fields.family or fields.family == "gpipe":
            fields.assume("GPipe's order of micro-batches is taken to be 1F1B's in time")
        if row.get("grad_accum") is None:
            accumulate = stages
        return Layout(engine="pipeline", ranks=data * stages, data=data, stages=stages, accumulate=accumulate, optimizer_shards=group)
    if strategy.startswith("zero") or "deepspeed" in strategy:
        stage = stage or next((int(letter) for letter in strategy if letter in "123"), 2)
        if optimizer_away:
            offload = ("optimizer", "parameters") if stage == 3 and "param" in away else ("optimizer",)
        return Layout(engine="zero", ranks=max(1, data), data=data, accumulate=accumulate, zero_stage=stage, offload=offload)
    if data <= 1:
        return Layout(engine="single", ranks=1, data=1, accumulate=accumulate)
    if (strategy.startswith("fsdp") and "no-shard" not in strategy) or (stage == 3 and not strategy.startswith("ddp")):
        policy = fields.text("reshard_policy")
        reshard = not ("shard-grad-op" in strategy or stage == 2 or policy.startswith("keep") or "shard_grad_op" in policy)
        group = int(fields.dimension_of("zero_group_size") or data)
        replicas = data // group if 1 < group < data and data % group == 0 else 1
        if "offload" in strategy:
            offload = ("optimizer", "parameters")
        return Layout(engine="fsdp", ranks=data, data=data, accumulate=accumulate, replicas=replicas, reshard=reshard, offload=offload)
    return Layout(engine="ddp", ranks=data, data=data, accumulate=accumulate)
