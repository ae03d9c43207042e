"""Gradients of parameters that several stages use: one device's, however often backward runs before a step; and their values stay one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_autopar.exact.absent.absent_tensor import is_absent
from lightning_autopar.strategies.pipeline.weights.clipping_norms import SharedParameters
from lightning_autopar.strategies.pipeline.weights.gathered_weights import Pipeline
from tests.ranks import run_ranks
from tests.strategies.pipeline.by_hand import CPU, hollow

#: What each of three ranks has of :class:`Uses`; the middle one has no part in the tied weight.
KEPT = (("first", "last", "scale"), ("middle", "scale", "spare"), ("last", "first", "scale", "spare"))


class Uses(nn.Module):
    """Stages that use parameters; the gradient of each use is known."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.first = nn.Embedding(6, 3, sparse=sparse)
        self.middle = nn.Linear(3, 3)
        self.last = nn.Linear(3, 6, bias=False)
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(3))
        self.spare = nn.Parameter(torch.zeros(2))

    def use(self, stage: int, seed: int) -> Tensor:
        """One stage's part of the loss."""
        draw = torch.Generator().manual_seed(10 * seed + stage)
        x = torch.randn(4, 3, generator=draw)
        if stage == 0:
            return (self.first(torch.randint(0, 6, (4,), generator=draw)) * self.scale * x).sum()
        if stage == 1:
            return (self.middle(x) * self.scale).pow(2).sum()
        return (x * self.scale @ self.last.weight.T).pow(2).sum()


def uses(sparse: bool = False) -> Uses:
    torch.manual_seed(4)
    return Uses(sparse)


def one_device(batches: list[int], steps: int) -> Uses:
    module = uses()
    optimizer = torch.optim.AdamW(module.parameters(), 1e-1)
    for step in range(steps):
        optimizer.zero_grad()
        for batch in batches:
            for stage in range(3):
                module.use(stage, batch + 7 * step).backward()
        optimizer.step()
    return module


def in_stages(rank: int, world_size: int, batches: list[int], steps: int, threads: int) -> dict[str, Tensor]:
    torch.set_num_threads(1 + rank * threads)
    module = uses()
    stage = rank % 3
    hollow(module, KEPT[stage])
    replicas = [list(range(start, start + 3)) for start in range(0, world_size, 3)]
    groups = [dist.new_group(ranks) for ranks in replicas]
    shared = SharedParameters(module, Pipeline.of(groups[rank // 3], CPU), replicas)
    assert shared.places == {"first.weight": (0, 2), "scale": (0, 1, 2), "spare": (1, 2)}
    optimizer = torch.optim.AdamW(module.parameters(), 1e-1)
    for step in range(steps):
        optimizer.zero_grad()
        for batch in batches:
            earlier = {each: each.grad for each in module.parameters() if not is_absent(each)}
            for each in earlier:
                each.grad = None
            module.use(stage, batch + 7 * step).backward()
            gradients = {each: each.grad for each in earlier if each.grad is not None}
            shared.sum_gradients(gradients)
            for each, before in earlier.items():
                now = gradients.get(each)
                each.grad = now if before is None else before if now is None else before + now
        optimizer.step()
    shared.close()
    return {name: each.detach() for name, each in module.named_parameters() if not is_absent(each)}


@pytest.mark.parametrize(("world_size", "batches", "threads"), [(3, [1, 2, 3], 1), (6, [1], 0)])
def test_copies_take_one_devices_steps_and_stay_equal(world_size: int, batches: list[int], threads: int) -> None:
    ranks = run_ranks(in_stages, world_size, batches, 3, threads)
    expected = dict(one_device(batches, 3).named_parameters())
    for rank, weights in enumerate(ranks):
        for name, weight in weights.items():
            torch.testing.assert_close(
                weight, expected[name].detach(), rtol=1e-5, atol=1e-6, msg=lambda text, at=(rank, name): f"{at} {text}"
            )
            for other in ranks:
                assert name not in other or torch.equal(weight, other[name]), (rank, name)
    assert torch.equal(ranks[1]["spare"], torch.zeros(2)), "what has no gradient anywhere takes no step"


def kinds(rank: int, world_size: int) -> Any:
    """What comes of gradients that are missing, sparse, or not contiguous on some of the ranks."""
    weight = nn.Parameter(torch.zeros(4, 3))
    module = nn.ParameterDict({"weight": weight})
    shared = SharedParameters(module, Pipeline.of(None, CPU), [[0, 1]])
    dense = torch.arange(12.0).view(4, 3)
    rows = torch.tensor([[1, 3]]) if rank == 0 else torch.tensor([[1, 2]])
    sparse = torch.sparse_coo_tensor(rows, torch.tensor([[1.0, 2, 3], [0, 0, 0]]), (4, 3), check_invariants=False)
    found = []
    for mine in (dense if rank else None, dense if rank else sparse, sparse, dense.T.contiguous().T, None):
        gradients = {} if mine is None else {weight: mine.clone()}
        shared.sum_gradients(gradients)
        found.append(gradients.get(weight))
    return found


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # torch 2.11, also of explicit ones
def test_gradients_that_are_missing_sparse_or_transposed_are_added_up() -> None:
    dense, row = torch.arange(12.0).view(4, 3), torch.zeros(4, 3)
    row[1] = torch.tensor([1.0, 2, 3])
    for missing, mixed, sparse, transposed, none in run_ranks(kinds, 2):
        assert torch.equal(missing, dense)
        assert torch.equal(mixed, dense + row)
        assert torch.equal(sparse, 2 * row)
        assert torch.equal(transposed, 2 * dense)
        assert none is None
