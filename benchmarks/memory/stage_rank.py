"""One rank of a pipeline, by hand: the package's stages and schedules around modules that need no replay. What its stages really take.

It knows nothing of how the package predicts; a plan tells it what to run.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lightning_autopar.plans import Plan, Schedule
from lightning_autopar.strategies.pipeline.run.replicas import Replicas
from lightning_autopar.strategies.pipeline.run.stage_shapes import Meta, Signature
from lightning_autopar.strategies.pipeline.run.torch_schedules import Stage, make_schedule


class Block(nn.Module):
    """A transformer's block: attention and MLP, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.attention(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm2(x))


class GPT(pl.LightningModule):
    """A language model like GPT, with a training step of its own. The batch is a tensor of tokens.

    Args:
        width: of the residual stream.
        depth: blocks.
        words: of the vocabulary.
        length: tokens of a sample.
        heads: of attention.
        tied: whether the head shares its matrix with the embedding.
    """

    def __init__(self, *, width: int = 64, depth: int = 8, words: int = 512, length: int = 64, heads: int = 4, tied: bool = False) -> None:
        super().__init__()
        self.words, self.length, self.width = words, length, width
        self.tokens, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def embed(self, tokens: Tensor) -> Tensor:
        """The residual stream's beginning."""
        return self.tokens(tokens) + self.places.weight

    def loss(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Of what comes out of the last block."""
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.loss(x, tokens)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3)


class StageModule(nn.Module):
    """The blocks of one stage of a :class:`GPT`, with what comes before or after them at the ends."""

    def __init__(self, model: GPT, first: int, last: int, recompute: frozenset[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(model.blocks[index] for index in range(first, last))
        self.ends = nn.ModuleList()
        if first == 0:
            self.ends += [model.tokens, model.places]
        if last == len(model.blocks):
            self.ends += [model.norm, model.head]
        self._recompute = [first + index in recompute for index in range(last - first)]
        self._embed = model.embed if first == 0 else None
        self._loss = model.loss if last == len(model.blocks) else None

    def forward(self, *received: Tensor, tokens: Tensor) -> Tensor:
        x = received[0] if self._embed is None else self._embed(tokens)
        for block, again in zip(self.blocks, self._recompute, strict=True):
            x = checkpoint(block, x, use_reentrant=False) if again else block(x)
        return x if self._loss is None else self._loss(x, tokens)


class _Told:
    """A neighbour that has said once and for all what it sends, and is content with what it is sent."""

    def __init__(self, word: Any) -> None:
        self.word = word

    def hear(self, signature: Any) -> Any:
        """What comes."""
        return self.word

    def tell(self, signature: Any, word: Any) -> Any:
        """What goes."""
        return word

    def settle(self) -> None:
        """Nothing is on its way."""


def _leave_alone(stage: Stage, between: Meta) -> None:
    """The stage's neighbours aren't there: nobody is asked for shapes."""
    for side in ("_before", "_after"):
        if getattr(stage, side) is not None:
            setattr(stage, side, SimpleNamespace(forward=_Told((between,)), backward=_Told((True,))))


def make_plan(
    schedule: Schedule,
    ranks: int,
    micro_batches: int,
    depth: int,
    *,
    cuts: tuple[int, ...] = (),
    stages: int = 0,
    recompute: int = 0,
    replicas: int = 1,
    shard: bool = False,
    blocks: Sequence[str] = (),
) -> Plan:
    """A pipeline on CPU devices, cut evenly unless the cuts are given.

    Args:
        ranks: of a replica.
        depth: how many blocks there are.
        recompute: how many of them.
        shard: whether the replicas share the parameters.
        blocks: their FQNs; by default those of the models by hand.
    """
    stages, blocks = stages or ranks, blocks or [f"blocks.{index}" for index in range(depth)]
    cuts = cuts or tuple(depth * stage // stages for stage in range(1, stages))
    return Plan(
        engine="pipeline",
        devices=tuple(f"cpu:{index}" for index in range(ranks * replicas)),
        replicas=replicas,
        schedule=schedule,
        micro_batches=micro_batches,
        cuts=tuple(blocks[cut] for cut in cuts),
        recompute=tuple(blocks[:recompute]),
        shard=tuple(blocks) if shard else (),
    )


def measure_stage(model: GPT, plan: Plan, rank: int, batch: Tensor, *, device: torch.device, fake: bool = False) -> dict[str, int]:
    """Run three steps of a rank's stages, and measure the fullest moment of the last one.

    The process group must have been set up: one of as many ranks as the plan's devices. The model is the same on all of them; nothing but
    the rank's own stages is put on the device.

    Args:
        model: the whole of it, on the CPU.
        plan: a pipeline.
        rank: of this process; with a fake process group any.
        batch: tokens of the whole batch, on the CPU.
        device: where to run.
        fake: whether the process group is torch's fake one, where sends and receives do nothing.

    Returns:
        ``allocated`` bytes, as torch's allocator counts them; on a GPU also ``reserved``.
    """
    assert plan.schedule is not None
    names = [f"blocks.{index}" for index in range(len(model.blocks))]
    bounds = [0, *(names.index(cut) for cut in plan.cuts), len(names)]
    recompute = frozenset(names.index(fqn) for fqn in plan.recompute)
    ranks = plan.devices_per_replica
    position, replica = rank % ranks, rank // ranks
    batch = batch[replica :: plan.replicas].clone()
    replicas = Replicas(plan, device)
    numbers = range(position, plan.stages, ranks)
    modules = [StageModule(model, bounds[index], bounds[index + 1], recompute).to(device) for index in numbers]
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    parts = replicas.prepare(modules, model, [{known[id(one)] for one in module.parameters()} for module in modules])
    group = replicas.pipeline or dist.group.WORLD
    rows = -(-len(batch) // plan.micro_batches)
    stages = []
    for index, part in zip(numbers, parts, strict=True):
        reduce = partial(replicas.reduce, part)
        stages.append(Stage(part, index, plan.stages, device, group=group, host_group=group, reduce=reduce))
        if fake:
            _leave_alone(stages[-1], Meta((rows, model.length, model.width), torch.float32, True))
    schedule = make_schedule(plan.schedule, stages, plan.micro_batches, lambda loss, _: loss)
    optimizer = torch.optim.AdamW([parameter for part in parts for parameter in part.parameters()], 1e-3)
    target = torch.zeros(len(batch), device=device) if any(stage.is_last for stage in stages) else None

    def step() -> None:
        tokens = batch.to(device, copy=True)
        for stage in stages:
            stage.begin(list(map(Signature, range(plan.micro_batches))))
        with replicas.step():
            schedule.step(tokens=tokens, target=target, return_outputs=False)
        for stage in stages:
            stage.finish()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return {"allocated": torch.cuda.max_memory_allocated(device), "reserved": torch.cuda.max_memory_reserved(device)}
    return {"allocated": _resident(optimizer, parts) + _peak(step)}


def _resident(optimizer: torch.optim.Optimizer, parts: Sequence[nn.Module]) -> int:
    """Bytes that are there between two steps: parameters and optimizer state."""
    tensors: list[Tensor] = [parameter for part in parts for parameter in part.parameters()]
    tensors += [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    tensors = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def _peak(step: Any) -> int:
    """The most that a step allocates at once, by the profiler's memory events."""
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        step()
    level = peak = 0
    for _, size in sorted((event.start_ns(), event.nbytes()) for event in profile.kineto_results.events() if event.name() == "[memory]"):
        level += size
        peak = max(peak, level)
    return peak


def rank_of_pipeline(rank: int, world_size: int, values: dict[str, Any], plan: Plan, rows: int) -> dict[str, int]:
    """In a rank with a process group: the measurement of its stages on the CPU."""
    torch.manual_seed(0)
    model = GPT(**values)
    batch = torch.randint(0, model.words, (rows, model.length))
    measured = measure_stage(model, plan, rank, batch, device=torch.device("cpu"))
    dist.barrier()
    return measured
