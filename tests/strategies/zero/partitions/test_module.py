"""Weights and optimizer states that ZeRO has partitioned: gathered, taken in parts, and seen whole by who looks at them."""

from __future__ import annotations

import copy
import datetime
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_autopar.memory.storages import storage_sizes
from lightning_autopar.plans import Plan
from lightning_autopar.state.flat_parts import FlatPart
from lightning_autopar.state.scratch_files import ScratchFile
from lightning_autopar.strategies.base import process_group
from lightning_autopar.strategies.zero import deepspeed_compat as doorway
from lightning_autopar.strategies.zero.partitions import checkpoint_files as zero_state
from lightning_autopar.strategies.zero.partitions.module import Traces, gather_again, held_by_zero, is_whole, make_whole, parts
from lightning_autopar.strategies.zero.partitions.optimizer_pieces import OptimizerBridge, fragment_parts
from lightning_autopar.strategies.zero.partitions.parameter_views import ParameterViews
from lightning_autopar.strategies.zero.settings import deepspeed_config, zero_settings
from tests.ranks import run_ranks

pytest.importorskip("deepspeed")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def _deepspeed() -> None:
    """Once, for all processes that are forked."""
    doorway.import_deepspeed("cpu")


class Odd(nn.Module):
    """Parameters of many shapes, tied and frozen ones, buffers."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = nn.Linear(5, 7)
        self.tied = nn.Linear(5, 7, bias=False)
        self.tied.weight = self.first.weight
        self.number = nn.Parameter(torch.tensor(0.5))
        self.pair = nn.Parameter(torch.ones(2))
        self.frozen = nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.act = nn.ReLU()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))


def optimizer_of(kind: str, module: nn.Module) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in module.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in module.parameters() if parameter.dim() <= 1]
    groups = [{"params": matrices}, {"params": others, "lr": 0.02}]
    options: dict[str, Any] = {"SGD": {"momentum": 0.9}, "AdamW": {"amsgrad": True}}.get(kind, {})
    made: torch.optim.Optimizer = getattr(torch.optim, kind)(groups, lr=0.01, **options)
    return made


def gradient(name: str, parameter: Any, step: int) -> torch.Tensor | None:
    """``pair`` gets its first one late."""
    if not parameter.requires_grad or (name == "pair" and step == 0):
        return None
    shape = getattr(parameter, "ds_shape", parameter.shape)
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + len(name)))


def plain_steps(kind: str, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    module = Odd()
    optimizer = optimizer_of(kind, module)
    for step in range(steps):
        for name, parameter in module.named_parameters():
            parameter.grad = gradient(name, parameter, step)
        optimizer.step()
    return module, optimizer


class Partitioned:
    """A module under DeepSpeed, whose parts are stepped by hand."""

    def __init__(self, kind: str, stage: int, world_size: int, *, offload: tuple[Any, ...] = (), module: nn.Module | None = None) -> None:
        os.environ.update(LOCAL_SIZE=str(world_size), LOCAL_RANK=str(dist.get_rank()))
        doorway.start("gloo")
        plan = Plan(engine="zero", devices=tuple(f"cpu:{rank}" for rank in range(world_size)), zero_stage=stage, offload=offload)
        self.module = module or Odd()
        self.users = optimizer_of(kind, self.module)
        counts = [parameter.numel() for parameter in self.module.parameters()]
        settings = zero_settings(plan, parameters=sum(counts), trainable=sum(counts), on_cpu=True)
        self.traces = Traces(self.module)
        relay = OptimizerBridge(self.users)
        self.engine = doorway.initialize(self.module, relay, deepspeed_config(plan, settings), device_type="cpu", device_rank=0)
        doorway.share_partitions(self.engine.optimizer)
        relay.attach(doorway.partitions(self.engine.optimizer))
        self.traces.noted()
        self.pieces = [piece for group in relay.pieces for piece in group]

    def weights(self) -> dict[int, FlatPart]:
        return {id(part.parameter): part for part in parts(self.module)}

    def optimized(self) -> dict[int, FlatPart]:
        return fragment_parts(self.pieces, self.weights())

    def steps(self, first: int, last: int) -> None:
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        for step in range(first, last):
            for piece in self.pieces:
                whole = gradient(names[id(piece.parameter)], piece.parameter, step)
                piece.fragment.grad = None if whole is None or not piece.fragment.numel() else piece.cut(whole).clone()
            self.users.step()

    def state(self, rank: int, folder: Path) -> dict[str, Any]:
        with ScratchFile(folder) as room:
            return zero_state.whole_optimizer_state(self.users, self.optimized(), keep=rank == 0, scratch=room, device=CPU)

    def weights_whole(self, rank: int, folder: Path) -> dict[str, Any]:
        with ScratchFile(folder) as room:
            return zero_state.whole_state_dict(self.module, self.weights(), keep=rank == 0, scratch=room, device=CPU)


def assert_like(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_states_come_whole_and_go_in_parts(tmp_path: Path) -> None:
    """Of each of torch's optimizers, at each stage, with parameters smaller than the number of ranks."""

    def work(rank: int, world_size: int) -> None:
        for stage, kind in ((1, "AdamW"), (2, "NAdam"), (3, "ASGD")):
            _, expected = plain_steps(kind, 2)
            under = Partitioned(kind, stage, world_size)
            assert under.state(rank, tmp_path) == ({} if rank else expected_before(kind))
            under.steps(0, 2)
            state = under.state(rank, tmp_path)
            if rank:
                assert state == {}
            else:
                assert list(state["state"]) == sorted(expected.state_dict()["state"])
                assert_like(state, expected.state_dict())
            other = Partitioned(kind, 5 - stage if stage > 1 else 1, world_size)
            zero_state.load_optimizer_state(other.users, other.optimized(), expected.state_dict())
            if rank == 2:
                assert any(part.flat.numel() == 0 for part in other.optimized().values())
            again = other.state(rank, tmp_path)
            if not rank:
                assert_like(again, expected.state_dict())

    run_ranks(work, 3, timeout_seconds=150)


@pytest.mark.parametrize("offload", [(), ("optimizer",)])
def test_deepspeeds_own_copy_is_gone(offload: tuple[Any, ...]) -> None:
    """Its views of it are views of what is stepped, so no memory is kept, and its functions give what was stepped."""
    from deepspeed.utils import safe_get_full_fp32_param

    def work(rank: int, world_size: int) -> None:
        expected, _ = plain_steps("AdamW", 2)
        for stage in (1, 2):
            under = Partitioned("AdamW", stage, world_size, offload=offload)
            under.steps(0, 2)
            stepped = {flat.untyped_storage().data_ptr() for _, flat, _ in doorway.partitions(under.engine.optimizer)}
            kinds = held_by_zero(under.engine, under.module).values()
            sizes = [storage_sizes(tensors, CPU) for tensors in kinds]
            assert len(set().union(*sizes)) == sum(map(len, sizes)), "a tensor is counted in two kinds"
            for (name, parameter), plain in zip(under.module.named_parameters(), expected.parameters(), strict=True):
                if not parameter.requires_grad:
                    continue
                mapping: Any = parameter
                if (its := mapping._hp_mapping) is not None:
                    assert its.hp_fragment.untyped_storage().data_ptr() in stepped, name
                assert_like(safe_get_full_fp32_param(parameter), plain.detach())

    run_ranks(work, 2, timeout_seconds=120)


def expected_before(kind: str) -> dict[str, Any]:
    state = optimizer_of(kind, Odd()).state_dict()
    return {**state, "state": {}}


def test_weights_of_stage_3_come_whole_go_in_parts_and_are_seen_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "PATIENCE", datetime.timedelta(seconds=1))

    def work(rank: int, world_size: int) -> str:
        expected, _ = plain_steps("AdamW", 2)
        under = Partitioned("AdamW", 3, world_size)
        module: Any = under.module
        under.steps(0, 2)
        gather_again(module)
        state = under.weights_whole(rank, tmp_path)
        assert not is_whole(module.first.weight)
        if rank:
            assert state == {}
        else:
            assert list(state) == list(expected.state_dict())
            assert_like(state, dict(expected.state_dict()))
            assert state["tied.weight"].data_ptr() == state["first.weight"].data_ptr()
        # Loaded: renamed by a hook of the module's, as plain torch loads it.
        other = {name: value + 1 for name, value in expected.state_dict().items()}
        with pytest.raises(RuntimeError, match=r"Missing key.*first\.bias"):
            zero_state.load_state_dict(
                module, under.weights(), {name: each for name, each in other.items() if name != "first.bias"}, strict=True
            )
        with pytest.raises(RuntimeError, match="size mismatch for pair"):
            zero_state.load_state_dict(module, under.weights(), {**other, "pair": torch.ones(3)}, strict=True)
        zero_state.load_state_dict(module, under.weights(), other, strict=True)
        again = under.weights_whole(rank, tmp_path)
        if not rank:
            assert_like(again, other)
        # Seen by the user's code.
        watch = ParameterViews(module, under.weights)
        assert tuple(module.first.weight.shape) == (7, 5)
        assert sum(parameter.numel() for parameter in module.parameters()) == sum(each.numel() for each in expected.parameters())
        with pytest.warns(UserWarning, match=r"first\.weight is used outside of a step"):
            assert_like(float(module.first.weight.detach().norm()), float(other["first.weight"].norm()))
        assert_like(copy.deepcopy(module.first.weight).data, other["first.weight"])
        copied = copy.deepcopy(module)
        assert_like(dict(copied.state_dict()), other)
        assert vars(copied).keys() == vars(Odd()).keys()
        copied.first(torch.ones(1, 5)).sum().backward()  # none of DeepSpeed's hooks
        assert pickle.loads(pickle.dumps(nn.Sequential(module.act))) is not None
        with torch.no_grad():
            module.first.bias.mul_(2)
            module.first.weight.data.add_(1)
            module.frozen.bias.zero_()
        seed = torch.ones(1, requires_grad=True)
        seed.register_hook(lambda _: [module.first.weight.view_as(module.first.weight), None][1])
        with watch.inside():
            assert not is_whole(module.first.weight)
            seed.backward()  # DeepSpeed's own hooks look at parameters there, which are no business of its lending
            assert not is_whole(module.first.weight)
        with watch.handling():
            written = under.weights_whole(rank, tmp_path)
        if not rank:
            changed = {
                "first.bias": other["first.bias"] * 2,
                "first.weight": other["first.weight"] + 1,
                "tied.weight": other["first.weight"] + 1,
                "frozen.bias": torch.zeros(3),
            }
            assert_like(written, {**other, **changed})
        watch.close()
        under.engine.destroy()
        make_whole(module)
        under.traces.undo()
        plain = Odd()
        assert {path: sorted(vars(child)) for path, child in module.named_modules()} == {
            path: sorted(vars(child)) for path, child in plain.named_modules()
        }
        assert not any(hooks for child in module.modules() for name, hooks in vars(child).items() if name.endswith("_hooks"))
        assert all(type(each) is nn.Parameter and not vars(each) for each in module.parameters())
        return str(module.first.weight.tolist())

    assert len(set(run_ranks(work, 3))) == 1


def test_a_use_on_one_rank_alone_is_told_from_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "PATIENCE", datetime.timedelta(seconds=1))

    def work(rank: int, world_size: int) -> str:
        module: Any = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        under = Partitioned("AdamW", 3, world_size, module=module)
        ParameterViews(module, under.weights)
        assert not is_whole(module[0].weight)
        if rank == 1:
            return ""
        with pytest.warns(UserWarning, match="used outside of a step"), pytest.raises(RuntimeError) as caught:
            module[0].weight.norm()
        return str(caught.value)

    assert "0.weight was used outside of a step on rank 0, but not on all ranks" in run_ranks(work, 2)[0]


def test_a_module_that_loads_in_its_own_way_is_refused() -> None:
    class Own(nn.Linear):
        def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
            with torch.no_grad():
                self.weight.copy_(state_dict.pop(prefix + "weight"))

    module = nn.Sequential(Own(2, 2, bias=False))
    part = FlatPart(parameter=module[0].weight, shape=(2, 2), flat=torch.zeros(2), start=0)
    with pytest.raises(RuntimeError, match=r"0\.weight is loaded by its module's own _load_from_state_dict"):
        zero_state.load_state_dict(module, {id(module[0].weight): part}, {"0.weight": torch.ones(2, 2)}, strict=True)
    assert module[0].weight is part.parameter


def loaded_in_parts(module: nn.Module) -> dict[str, torch.Tensor]:
    """Load other weights as the second of two ranks does; what its parts were, by name."""
    its: Any = module
    parts = {
        id(parameter): FlatPart(
            parameter=parameter, shape=tuple(parameter.shape), flat=torch.zeros(parameter.numel() // 2), start=parameter.numel() // 2
        )
        for parameter in its.parameters()
    }
    other = {name: torch.full_like(value, number) for number, (name, value) in enumerate(its.state_dict().items(), start=1)}
    shapes = {id(parameter): parameter.data for parameter in its.parameters()}
    for parameter in its.parameters():
        parameter.data = parameter.data.new_empty(0)
    try:
        zero_state.load_state_dict(its, parts, other, strict=True)
    finally:
        for parameter in its.parameters():
            parameter.data = shapes[id(parameter)]
    return {name: parts[id(parameter)].flat for name, parameter in its.named_parameters()}


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_a_module_that_lists_its_parameters_goes_on_with_those_that_are_trained(kind: Callable[..., nn.RNNBase]) -> None:
    """Torch's RNNs compute with a list that their ``__setattr__`` keeps, not with their attributes."""
    module = kind(3, 2, num_layers=2)
    before = dict(module.named_parameters())
    flats = loaded_in_parts(module)
    assert [flat[0].item() for flat in flats.values()] == list(range(1, 9))
    assert all(one is other for one, other in zip(module.parameters(), before.values(), strict=True))
    assert all(one is other for one, other in zip(module._flat_weights, before.values(), strict=True))
    module(torch.ones(1, 1, 3))[0].sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_a_module_that_keeps_what_was_loaded_is_refused() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    kept: list[Any] = []
    hook = module[0].register_load_state_dict_post_hook(lambda child, _: kept.append(child.weight))
    with pytest.raises(RuntimeError, match=r"keeps 0\.weight elsewhere"):
        loaded_in_parts(module)
    hook.remove()
    module[1].register_load_state_dict_post_hook(lambda child, _: kept.append(child.running_mean))
    with pytest.raises(RuntimeError, match=r"keeps 1\.running_mean elsewhere"):
        loaded_in_parts(module)
