from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_autopar.exact.data.rank_share import BatchShare, Dealing, cut, share_of
from lightning_autopar.exact.step.batch_norm import restore, synchronise
from tests.ranks import run_ranks


class ActivatedBatchNorm(nn.BatchNorm2d):
    """A subclass that does more than normalise, as timm's does."""

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(super().forward(x)) * 2


class Tagged(Tensor):
    """A tensor with an attribute that goes on to what is computed from it, as MONAI's and torchvision's have."""

    tag = ""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        tags = [value.tag for value in args if isinstance(value, Tagged)]
        if isinstance(result, Tagged) and tags:
            result.tag = tags[0]
        return result


class Tag(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        tagged = x.as_subclass(Tagged)
        tagged.tag = "kept"
        return tagged


class Untag(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(x, Tagged)
        assert x.tag == "kept"
        return x.as_subclass(Tensor)


def build(kind: str) -> tuple[nn.Module, tuple[int, ...]]:
    """A small network and the shape of one of its samples."""
    torch.manual_seed(3)
    if kind == "1d":
        return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 4), nn.BatchNorm1d(4, momentum=None)), (5,)
    if kind == "sequence":
        return nn.Sequential(nn.Conv1d(3, 6, 3), nn.BatchNorm1d(6, affine=False)), (3, 9)
    if kind == "untracked":
        return nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, track_running_stats=False)), (3, 8, 8)
    if kind == "3d":
        return nn.Sequential(nn.Conv3d(2, 4, 2), nn.BatchNorm3d(4), nn.InstanceNorm3d(4, affine=True)), (2, 4, 4, 4)
    if kind == "sync":
        return nn.Sequential(nn.Conv2d(3, 6, 3), nn.SyncBatchNorm(6)), (3, 8, 8)
    if kind == "subclass":
        return nn.Sequential(nn.Conv2d(3, 6, 3), ActivatedBatchNorm(6)), (3, 8, 8)
    if kind == "tagged":
        return nn.Sequential(Tag(), nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True), Untag()), (3, 8, 8)
    if kind == "channels_last":
        return nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)).to(memory_format=torch.channels_last), (3, 8, 8)
    if kind == "frozen":
        frozen = nn.BatchNorm2d(6).eval()
        return nn.Sequential(nn.Conv2d(3, 6, 3), frozen, nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4)), (3, 8, 8)
    assert kind == "lazy"
    lazy = nn.Sequential(nn.Conv2d(3, 6, 3), nn.LazyBatchNorm2d())
    with torch.no_grad():
        lazy[1].initialize_parameters(torch.zeros(1, 6, 2, 2))
        lazy.eval()(torch.zeros(1, 3, 8, 8))
        lazy.train()
    return lazy, (3, 8, 8)


KINDS = ["1d", "sequence", "untracked", "3d", "sync", "subclass", "tagged", "channels_last", "frozen", "lazy"]


def steps(model: nn.Module, batches: list[Tensor], rank: int, world_size: int, share: list[BatchShare | None]) -> dict[str, Any]:
    """Two steps on this rank's rows: outputs and input gradients of its rows, averaged parameter gradients, and what the model then is."""
    outputs, input_gradients = [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        share[0] = share_of(len(batch), rank, Dealing.even(world_size))
        local = cut(batch, rank, Dealing.even(world_size)).clone().requires_grad_()
        output = model(local)
        target = torch.linspace(-1, 1, output[0].numel(), dtype=output.dtype).view(output[0].shape)
        loss = ((output - target) ** 2 * (output + 3)).flatten(1).mean(1).mean()
        optimizer.zero_grad()
        (loss * share[0].weight).backward()
        for parameter in model.parameters():
            if parameter.grad is not None and world_size > 1:
                dist.all_reduce(parameter.grad)
                parameter.grad /= world_size
        outputs.append(output.detach())
        assert local.grad is not None
        input_gradients.append(local.grad / world_size)
        gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
        optimizer.step()
    return {"outputs": outputs, "inputs": input_gradients, "gradients": gradients, "state": dict(model.state_dict())}


def run_kinds(rank: int, world_size: int, sizes: tuple[int, ...], roll: int = 0) -> dict[tuple[str, torch.dtype], dict[str, Any]]:
    results = {}
    for kind in KINDS:
        for dtype in (torch.float32, torch.float64):
            model, shape = build(kind)
            if kind == "sync" and world_size == 1:  # refuses CPUs: the same layer by its plain name
                model = nn.Sequential(model[0], nn.BatchNorm2d(6))  # type: ignore[index]
            model.to(dtype)
            share: list[BatchShare | None] = [None]
            names = synchronise(model, lambda share=share: share[0])  # type: ignore[misc]
            assert bool(names) == (world_size > 1)
            batches = [batch.roll(roll, 0) for batch in make_batches(sizes, shape, dtype)]
            results[kind, dtype] = steps(model, batches, rank, world_size, share)
    return results


def make_batches(sizes: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    # A mean far from zero: where a sum of squares would cancel.
    return [(torch.randn(size, *shape, generator=generator) * 0.7 + 5).to(dtype) for size in sizes]


@pytest.mark.parametrize(("world_size", "sizes"), [(2, (5, 8)), (3, (8, 2))])
def test_ranks_compute_what_one_device_does(world_size: int, sizes: tuple[int, ...]) -> None:
    (singles,) = run_ranks(run_kinds, 1, sizes)
    # The same rows in other orders: how far apart one device's own sums are, whatever kernels this machine has.
    others = [run_ranks(run_kinds, 1, sizes, roll)[0] for roll in (1, 2)]
    for rank, results in enumerate(run_ranks(run_kinds, world_size, sizes)):
        for (kind, dtype), result in results.items():
            single, exact = singles[kind, dtype], singles[kind, torch.float64]
            assert result["gradients"].keys() == single["gradients"].keys()
            for step, size in enumerate(sizes):
                rows, mine = Dealing.even(world_size).rows(size, rank), slice(rank, None, world_size)
                assert not result["inputs"][step][rows:].any(), f"{kind}: a row that a rank was merely fed gets no gradient"
                for part in ("outputs", "inputs"):
                    what = f"{kind}, {part} of rank {rank} in step {step}"
                    check(result[part][step][:rows], [single[part][step][mine]], exact[part][step][mine], what)
            for part in ("gradients", "state"):
                for name, expected in single[part].items():
                    orders = [expected, *(other[kind, dtype][part][name] for other in others)]
                    check(result[part][name], orders, exact[part][name], f"{kind}, {part} {name} of rank {rank}")


def check(actual: Tensor, orders: list[Tensor], exact: Tensor, what: str) -> None:
    """Near what one device computes; where that is badly conditioned, as near the exact result as one device in some order, or nearly."""
    expected = orders[0]
    assert actual.dtype == expected.dtype
    if not expected.numel():
        assert actual.shape == expected.shape
        return
    scale = max(1.0, float(exact.abs().max()))
    bound = scale * {torch.float64: 1e-12, torch.bfloat16: 4e-3}.get(expected.dtype, 1e-6)
    error, *singles = (float((value.double() - exact).abs().max()) for value in (actual, *orders))
    assert error <= bound + 3 * max(singles), f"{what}: off by {error}, one device by {singles}"


def low_precision(rank: int, world_size: int, mode: str) -> dict[str, Tensor]:
    model, shape = build("channels_last")
    dtype = torch.float64 if mode == "exact" else torch.bfloat16
    if mode != "bf16-mixed":
        model.to(torch.bfloat16).to(dtype)
    batch = make_batches((6,), shape, torch.bfloat16)[0].to(torch.float32 if mode == "bf16-mixed" else dtype)
    if world_size > 1:
        synchronise(model, lambda: BatchShare(rows=3, of=6, rank=rank, world_size=world_size))
        batch = batch[rank::world_size]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mode == "bf16-mixed"):
        output = model(batch)
    assert output.is_contiguous(memory_format=torch.channels_last)
    output.to(torch.promote_types(dtype, torch.float32)).square().mean().backward()
    layer = model[1]  # type: ignore[index]
    if world_size > 1:
        dist.all_reduce(layer.weight.grad)
        layer.weight.grad /= world_size
    return {"output": output.detach(), "weight": layer.weight.grad, "mean": layer.running_mean, "variance": layer.running_var}


@pytest.mark.parametrize("mode", ["bf16-mixed", "bf16-true"])
def test_low_precision_agrees_to_its_own_rounding(mode: str) -> None:
    ((exact,), (single,)) = (run_ranks(low_precision, 1, each) for each in ("exact", mode))
    for rank, result in enumerate(run_ranks(low_precision, 2, mode)):
        check(result["output"], [single["output"][rank::2]], exact["output"][rank::2], "output")
        for name in ("weight", "mean", "variance"):
            # bf16 weights aside, autocast keeps these in float32, but what they are made of was rounded.
            check(result[name].bfloat16(), [single[name].bfloat16()], exact[name], name)
            assert result[name].dtype == single[name].dtype


def names_and_copies(rank: int, world_size: int) -> dict[str, Any]:
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.InstanceNorm2d(6, affine=True), nn.BatchNorm1d(4))
    before = list(model.state_dict())
    share = BatchShare(rows=2, of=4, rank=rank, world_size=world_size)
    names = synchronise(model, lambda: share)
    assert synchronise(model, lambda: share) == names
    layer = model[1]
    copied = copy.deepcopy(layer)
    x = torch.randn(2, 6, 4, 4, generator=torch.Generator().manual_seed(rank))
    copied(x)
    untouched = int(layer.num_batches_tracked)
    loaded = pickle.loads(pickle.dumps(layer))
    torch.save(model, buffer := io.BytesIO())
    assert buffer.tell()
    alone = loaded(x)
    layer(x)
    together = layer.running_mean.clone()
    restore(model)
    return {
        "names": names,
        "state": list(model.state_dict()) == before and type(layer) is nn.BatchNorm2d,
        "untouched": untouched,
        "copied": torch.equal(copied.running_mean, together),
        "loaded": torch.equal(alone, nn.BatchNorm2d(6)(x)),
        "restored": "forward" not in layer.__dict__ and torch.equal(layer(x), nn.BatchNorm2d(6)(x)),
        "mean": together,
    }


def test_names_copies_and_restore() -> None:
    first, second = run_ranks(names_and_copies, 2)
    for result in (first, second):
        assert result["names"] == ["1", "3"]
        assert result["state"]
        assert result["untouched"] == 0
        assert result["copied"]
        assert result["loaded"]
        assert result["restored"]
    assert torch.equal(first["mean"], second["mean"])


def edges(rank: int, world_size: int) -> dict[str, Any]:
    layer = nn.BatchNorm1d(3)
    share: list[BatchShare | None] = [BatchShare(rows=1, of=2, rank=rank, world_size=world_size)]
    synchronise(layer, lambda: share[0])
    row = torch.full((1, 3), float(rank))
    with torch.no_grad():
        one_row_each = layer(row)
    share[0] = BatchShare(rows=1 - rank, of=1, rank=rank, world_size=world_size)
    try:
        layer(row)
        message = ""
    except ValueError as error:
        message = str(error)
    tracked = int(layer.num_batches_tracked)
    layer.eval()
    evaluated = layer(row) if rank == 0 else None  # one rank alone: would hang if anything were exchanged
    share[0] = None
    layer.train()
    unshared = layer(torch.randn(4, 3)) if rank == 0 else None
    return {"one": one_row_each, "message": message, "tracked": tracked, "alone": (evaluated, unshared)}


def test_one_row_a_rank_and_one_row_in_all() -> None:
    first, second = run_ranks(edges, 2)
    torch.testing.assert_close(first["one"], torch.full((1, 3), -1.0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(second["one"], torch.full((1, 3), 1.0), rtol=1e-4, atol=1e-4)
    for result in (first, second):
        assert "Expected more than 1 value per channel" in result["message"]
        assert result["tracked"] == 2


def untracked_evaluation(rank: int, world_size: int) -> Tensor:
    layer = nn.BatchNorm1d(3, track_running_stats=False).eval()
    batch = make_batches((5,), (3,), torch.float32)[0]
    if world_size > 1:
        synchronise(layer, lambda: share_of(5, rank, Dealing.even(world_size)))
    output: Tensor = layer(batch[rank::world_size])
    return output


def test_evaluation_without_running_statistics_is_over_the_whole_batch() -> None:
    (single,) = run_ranks(untracked_evaluation, 1)
    for rank, output in enumerate(run_ranks(untracked_evaluation, 2)):
        torch.testing.assert_close(output, single[rank::2], rtol=2e-6, atol=2e-6)
