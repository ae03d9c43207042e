"""Weights and optimizer states over ranks: gathered whole, loaded in part, spread, made whole again."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_autopar.exact.absent.absent_tensor import is_absent
from lightning_autopar.state import scratch_files as scratch
from lightning_autopar.state.checkpoint import load_whole_optimizer_state, load_whole_state_dict
from lightning_autopar.state.scratch_files import ScratchFile
from lightning_autopar.strategies.pipeline.weights import checkpoint_files
from lightning_autopar.strategies.pipeline.weights import gathered_weights as weights
from tests.ranks import run_ranks
from tests.strategies.pipeline.by_hand import KEPT, hollow, net, pipeline


def optimizer_of(module: nn.Module, kind: str) -> torch.optim.Optimizer:
    decay = [parameter for parameter in module.parameters() if parameter.dim() > 1]
    rest = [parameter for parameter in module.parameters() if parameter.dim() == 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    if kind == "adagrad":
        return torch.optim.Adagrad(groups, lr=1e-2)
    return torch.optim.AdamW(groups, lr=1e-2)


def trained(kind: str = "adamw") -> tuple[Any, torch.optim.Optimizer]:
    """A whole module and its optimizer after two steps."""
    module = net()
    optimizer = optimizer_of(module, kind)
    for seed in range(2):
        tokens = torch.randint(0, 11, (5,), generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(tokens), tokens).backward()
        optimizer.step()
    return module, optimizer


def in_stages(rank: int, kind: str) -> tuple[Any, torch.optim.Optimizer]:
    """The same, as a rank of a pipeline has it."""
    module, optimizer = trained(kind)
    state = copy.deepcopy(optimizer.state_dict())
    hollow(module, KEPT[rank])
    staged = optimizer_of(module, kind)
    load_whole_optimizer_state(staged, state, copies=True)
    return module, staged


def assert_equal(one: Any, other: Any, path: str = "") -> None:
    assert type(one) is type(other), path
    if isinstance(one, dict):
        assert list(one) == list(other), path
        for name in one:
            assert_equal(one[name], other[name], f"{path}.{name}")
    elif isinstance(one, list):
        assert len(one) == len(other), path
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_equal(left, right, f"{path}[{index}]")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other), path
        assert one.dtype == other.dtype, path
    else:
        assert one == other, path


def gathered(rank: int, world_size: int, kind: str) -> Any:
    module, optimizer = in_stages(rank, kind)
    with ScratchFile() as room:
        state = weights.whole_state_dict(module, pipeline(), keep=True, scratch=room)
        states = weights.whole_optimizer_state(optimizer, pipeline(), keep=True, scratch=room)
    if rank:
        assert list(state) == list(module.state_dict())
        return sum(is_absent(value) for value in state.values()), sorted(states["state"])
    whole, expected = trained(kind)
    assert_equal(dict(state), dict(whole.state_dict()))
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
    assert_equal(states, expected.state_dict())
    fresh = net(seed=1)
    fresh.load_state_dict(state)
    optimizer_of(fresh, kind).load_state_dict(states)
    return len(state)


@pytest.mark.parametrize("kind", ["adamw", "adagrad"])
def test_what_three_ranks_have_is_gathered_as_one_has_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "SMALL_BYTES", 64)  # all but the smallest lie in the scratch
    monkeypatch.setattr("lightning_autopar.strategies.pipeline.weights.gathered_weights._PIECE_BYTES", 100)
    assert run_ranks(gathered, 3, kind) == [len(net().state_dict()), _elsewhere(1), _elsewhere(2)]


def _elsewhere(rank: int) -> tuple[int, list[int]]:
    """How many entries of the state dict are absent tensors on a rank, and which positions it has optimizer states of."""
    module = net()
    hollow(module, KEPT[rank])
    parameters = [each for group in optimizer_of(module, "adamw").param_groups for each in group["params"]]
    stepping = list(trained()[1].state_dict()["state"])
    return (
        sum(is_absent(value) for value in module.state_dict().values()),
        [position for position in stepping if not is_absent(parameters[position])],
    )


def loaded(rank: int, world_size: int, path: str) -> Any:
    module = net(seed=5)
    hollow(module, KEPT[rank])
    optimizer = optimizer_of(module, "adamw")
    saved = torch.load(path, mmap=True, weights_only=True)
    load_whole_state_dict(module, saved["state_dict"], strict=True)
    load_whole_optimizer_state(optimizer, saved["optimizer"], copies=True)
    for wrong, words in (({"embed.weight": torch.zeros(2, 2)}, "size mismatch"), ({"more": torch.zeros(2)}, "Unexpected key")):
        with pytest.raises(RuntimeError, match=words):
            load_whole_state_dict(module, {**saved["state_dict"], **wrong}, strict=True)
    with ScratchFile() as room:
        state = weights.whole_state_dict(module, pipeline(), keep=True, scratch=room)
        states = weights.whole_optimizer_state(optimizer, pipeline(), keep=True, scratch=room)
    if rank == 0:
        assert_equal(dict(state), dict(saved["state_dict"]))
        assert_equal(states, saved["optimizer"])
    return sorted(position for position in optimizer.state_dict()["state"])


def test_each_rank_loads_its_part_of_a_whole_file(tmp_path: Path) -> None:
    module, optimizer = trained()
    torch.save({"state_dict": dict(module.state_dict()), "optimizer": optimizer.state_dict()}, tmp_path / "whole.pt")
    positions = run_ranks(loaded, 3, str(tmp_path / "whole.pt"))
    assert positions[1:] == [_elsewhere(1)[1], _elsewhere(2)[1]]


def released(rank: int, world_size: int) -> bool:
    module, whole = net(), net()
    hollow(module, KEPT[rank])
    checkpoint_files.make_whole(module, pipeline())
    assert_equal(dict(module.state_dict()), dict(whole.state_dict()))
    assert torch.equal(module.passing, whole.passing)
    assert module.head.weight is module.embed.weight
    assert not module.frozen.weight.requires_grad
    return all(type(parameter) is nn.Parameter for parameter in module.parameters())


def test_a_module_is_made_whole_again_on_every_rank() -> None:
    assert run_ranks(released, 3) == [True] * 3


def released_shards(rank: int, world_size: int) -> list[type]:
    """A stage that two replicas have, sharded."""
    module, whole = net(), net()
    mesh = init_device_mesh("cpu", (world_size,))
    module.scale = nn.Parameter(distribute_tensor(module.scale.detach(), mesh, [Shard(0)]))
    checkpoint_files.make_whole(module, pipeline())
    assert_equal(dict(module.state_dict()), dict(whole.state_dict()))
    return [type(parameter) for parameter in module.parameters() if type(parameter) is not nn.Parameter]


def test_shards_are_made_whole_again_on_every_rank() -> None:
    assert run_ranks(released_shards, 2) == [[], []]


def spread(rank: int, world_size: int) -> float:
    torch.manual_seed(0)
    if rank == 0:
        with ScratchFile() as room, scratch.parameters_in(room):
            module = net()
    else:
        torch.manual_seed(rank)
        with torch.device("meta"):
            module = net(seed=rank)
    originals = checkpoint_files.tensors_of(module) if rank == 0 else {}
    hollow(module, KEPT[rank])
    checkpoint_files.spread(module, originals, pipeline())
    draw = float(torch.rand(()))
    checkpoint_files.make_whole(module, pipeline())
    assert_equal(dict(module.state_dict()), dict(net().state_dict()))
    return draw


def test_what_one_rank_built_is_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "SMALL_BYTES", 64)
    draws = run_ranks(spread, 3)
    net()
    assert draws == [float(torch.rand(()))] * 3
