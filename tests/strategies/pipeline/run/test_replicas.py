"""Replicas of pipelines, with stages made by hand on torch's own schedules, in real processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_autopar.plans import SCHEDULES, Plan, Schedule
from lightning_autopar.strategies.pipeline.run import replicas
from lightning_autopar.strategies.pipeline.run.replicas import Replicas
from lightning_autopar.strategies.pipeline.run.stage_shapes import Signature
from lightning_autopar.strategies.pipeline.run.torch_schedules import Stage, make_schedule
from tests.ranks import run_ranks

BLOCKS, WIDTH, ROWS, MICRO_BATCHES = 4, 6, 16, 4
CPU = torch.device("cpu")


class Chain(nn.Module):
    """Blocks between two layers, with parameters of the root's own: one that few batches use, one that none does.

    Args:
        shares: whether the third block uses a parameter of the first one.
    """

    def __init__(self, *, shares: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(BLOCKS))
        if shares:
            self.blocks[2][0].weight = self.blocks[0][0].weight  # type: ignore[index]
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.rare = nn.Parameter(torch.ones(WIDTH))
        self.never = nn.Parameter(torch.ones(WIDTH))
        self.last = nn.Linear(WIDTH, 1)

    def run(self, x: Tensor, begin: int = 0, end: int = BLOCKS, *, rare: bool = False) -> Tensor:
        """From a block to another; the last one is followed by the loss."""
        if begin == 0:
            x = self.first(x)
        for block in self.blocks[begin:end]:
            x = block(x)
        if end < BLOCKS:
            return x
        loss: Tensor = self.last(x * self.scale * (self.rare if rare else 1)).square().mean()
        return loss


class Part(nn.Module):
    """Some of the chain's blocks, and a replica's micro-batches."""

    def __init__(self, chain: Chain, begin: int, end: int, replica: int = 0) -> None:
        super().__init__()
        self.hidden = (chain,)  # no child
        self.begin, self.end = begin, end
        self.rows = [part(replica, index) for index in range(MICRO_BATCHES)]
        self.chunk = 0

    @property
    def names(self) -> frozenset[str]:
        mine = [f"blocks.{index}." for index in range(self.begin, self.end)]
        mine += ["first."] if self.begin == 0 else []
        mine += ["last.", "scale", "rare", "never"] if self.end == BLOCKS else []
        return frozenset(name for name, _ in self.hidden[0].named_parameters(remove_duplicate=False) if name.startswith(tuple(mine)))

    def forward(self, *received: Tensor) -> Tensor:
        rows = self.rows[self.chunk]
        (x,) = received or (whole_batch()[rows],)
        return self.hidden[0].run(x, self.begin, self.end, rare=uses_rare(rows))


def make_plan(schedule: Schedule, *, shard: bool) -> Plan:
    stages = 4 if schedule == "interleaved_1f1b" else 2
    return Plan(
        engine="pipeline",
        devices=tuple(f"cpu:{index}" for index in range(4)),
        replicas=2,
        schedule=schedule,
        micro_batches=MICRO_BATCHES,
        cuts=tuple(f"blocks.{BLOCKS * stage // stages}" for stage in range(1, stages)),
        shard=tuple(f"blocks.{index}" for index in range(BLOCKS)) if shard else (),
    )


def whole_batch() -> Tensor:
    return torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(5))


def uses_rare(rows: slice) -> bool:
    """In the first replica's third micro-batch only."""
    return rows == slice(4, ROWS, 8)


def part(replica: int, index: int) -> slice:
    return slice(replica + 2 * index, ROWS, 2 * MICRO_BATCHES)


def train(rank: int, world_size: int, plan: Plan, shares: bool) -> dict[str, Any]:
    """Two steps of SGD on this rank's stages; gradients of both steps, whole, and what was seen on the way."""
    chain = Chain(shares=shares)
    several = Replicas(plan, CPU)
    place, replica = rank % 2, plan.data_rank(rank)
    bounds = [0, *(int(cut.split(".")[1]) for cut in plan.cuts), BLOCKS]
    indices = range(place, plan.stages, 2)
    modules = [Part(chain, bounds[index], bounds[index + 1], replica) for index in indices]
    names = [module.names for module in modules]
    own = {id(chain.get_parameter(name)) for some in names for name in some}
    for name, parameter in list(chain.named_parameters(remove_duplicate=False)):  # as in a worker: what isn't its own has no values
        if id(parameter) not in own:
            owner, _, leaf = name.rpartition(".")
            setattr(chain.get_submodule(owner), leaf, nn.Parameter(parameter.to("meta")))

    @contextmanager
    def around(stage: Stage, work: str, chunk: int) -> Iterator[None]:
        modules[list(indices).index(stage.stage_index)].chunk = chunk
        yield

    before = [parameter for parameter in chain.parameters() if not parameter.is_meta]
    assert several.pipeline is not None
    stages = [
        Stage(
            parts,
            index,
            plan.stages,
            CPU,
            group=several.pipeline,
            host_group=several.pipeline,
            around=around,
            reduce=partial(several.reduce, parts),
        )
        for index, parts in zip(indices, several.prepare(modules, chain, names), strict=True)
    ]
    assert plan.schedule is not None
    schedule = make_schedule(plan.schedule, stages, MICRO_BATCHES, lambda loss, _: loss / MICRO_BATCHES)
    optimizer = torch.optim.SGD([p for p in chain.parameters() if not p.is_meta], 0.1, weight_decay=0.1)
    ends = any(stage.is_last for stage in stages)
    found: dict[str, Any] = {"gradients": []}
    for _ in range(2):
        for stage in stages:
            stage.begin([Signature("alike")] * MICRO_BATCHES)
        with several.step():
            schedule.step(target=torch.arange(MICRO_BATCHES) if ends else None, return_outputs=False)
        for stage in stages:
            stage.finish()
        owned = {name: chain.get_parameter(name) for some in names for name in some}
        found["gradients"].append({name: None if p.grad is None else whole(p.grad) for name, p in owned.items()})
        found["sharded"] = sorted(name for name, parameter in owned.items() if isinstance(parameter, DTensor))
        optimizer.step()
        optimizer.zero_grad()
    found["left"] = sum(parameter.numel() for parameter in before)
    found["weights"] = {name: whole(parameter.detach()) for name, parameter in owned.items()}
    found["local"] = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in owned.values())
    return found


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def expected(*, shares: bool) -> dict[str, Any]:
    """The same on one device."""
    chain = Chain(shares=shares)
    optimizer = torch.optim.SGD(chain.parameters(), 0.1, weight_decay=0.1)
    gradients = []
    for _ in range(2):
        for replica in range(2):
            for index in range(MICRO_BATCHES):
                rows = part(replica, index)
                (chain.run(whole_batch()[rows], rare=uses_rare(rows)) / MICRO_BATCHES / 2).backward()
        gradients.append({name: None if p.grad is None else p.grad.clone() for name, p in chain.named_parameters(remove_duplicate=False)})
        optimizer.step()
        optimizer.zero_grad()
    return {"gradients": gradients, "weights": {name: p.detach() for name, p in chain.named_parameters(remove_duplicate=False)}}


def check(plan: Plan, *, shares: bool = False) -> None:
    """All ranks' gradients and weights are those of one device."""
    ranks, wanted = run_ranks(train, 4, plan, shares), expected(shares=shares)
    seen: set[str] = set()
    for found in ranks:
        for gradients, theirs in zip(found["gradients"], wanted["gradients"], strict=True):
            for name, gradient in gradients.items():
                assert (gradient is None) == (theirs[name] is None), name
                if gradient is not None:
                    torch.testing.assert_close(gradient, theirs[name], rtol=1e-5, atol=1e-6)
        for name, weight in found["weights"].items():
            torch.testing.assert_close(weight, wanted["weights"][name], rtol=1e-5, atol=1e-6)
        seen.update(found["weights"])
        assert found["sharded"] == (sorted(found["weights"]) if plan.shard else [])
        assert (found["left"] == 0) == bool(plan.shard)  # nobody who knew the parameters before keeps the whole of them
    assert seen == set(wanted["weights"])
    for one, other in ((0, 2), (1, 3)):
        torch.testing.assert_close(ranks[one]["weights"], ranks[other]["weights"], rtol=0, atol=0)
        if plan.shard:
            assert ranks[one]["local"] + ranks[other]["local"] < 1.3 * sum(weight.numel() for weight in ranks[one]["weights"].values())


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("shard", [False, True], ids=["whole", "sharded"])
def test_replicas_compute_what_one_device_does(schedule: Schedule, shard: bool) -> None:
    check(make_plan(schedule, shard=shard))


def test_a_parameter_that_two_stages_of_a_rank_use_is_averaged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And large gradients are averaged where they are, small ones in several buckets."""
    monkeypatch.setattr(replicas, "LARGE_BYTES", 100)
    monkeypatch.setattr(replicas, "BUCKET_BYTES", 60)
    check(make_plan("interleaved_1f1b", shard=False), shares=True)


def test_what_two_stages_of_a_rank_use_is_not_sharded() -> None:
    with pytest.raises(RuntimeError, match=r"two stages of one rank use the parameter 'blocks\.[02]\.0\.weight', which can't be sharded"):
        run_ranks(train, 4, make_plan("interleaved_1f1b", shard=True), True)


def _sparse(rank: int, world_size: int) -> str:
    module = nn.Embedding(4, 2, sparse=True)
    several = Replicas(Plan(engine="pipeline", devices=tuple("abcd"), replicas=2, schedule="1f1b", micro_batches=2, cuts=("x",)), CPU)
    (parts,) = several.prepare([nn.Identity()], module, [["weight"]])
    module(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError) as raised:
        several.reduce(parts)
    return str(raised.value)


def test_sparse_gradients_are_refused() -> None:
    assert "the gradient of 'weight' is sparse" in run_ranks(_sparse, 4)[0]


def test_one_pipeline_needs_no_mesh() -> None:
    plan = Plan(engine="pipeline", devices=("a", "b"), schedule="1f1b", micro_batches=2, cuts=("blocks.2",))
    chain = Chain()
    alone = Replicas(plan, CPU)
    assert (alone.mesh, alone.pipeline, alone.data, alone.shards) == (None, None, None, False)
    stage = Part(chain, 0, 2)
    (parts,) = alone.prepare([stage], chain, [stage.names])
    assert {name for name, _ in parts.named_parameters()} == stage.names
    assert parts.get_parameter("first.weight") is chain.first.weight
    with alone.step():
        parts().sum().backward()
        alone.reduce(parts)
    assert chain.first.weight.grad is not None
