"""The operations of a traced step, by kind and size: what is expected of a few modules, and what holds for each."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_autopar.memory.batch_scaling import scaled
from lightning_autopar.memory.footprint import Footprint, LayerFootprint
from lightning_autopar.memory.trace.trace import trace
from lightning_autopar.memory.work.operations import operation
from lightning_autopar.memory.work.work import Work, flops, moved_bytes
from tests.memory.trace.test_trace import GPT, Block, Module, make_trainer, mlp, resnet


class Checkpointed(GPT):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 48, num_layers=2, batch_first=True)
        self.head = nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def vectors(rows: int) -> Any:
    return torch.randn(rows, 128), torch.randint(0, 10, (rows,))


def tokens(rows: int) -> Any:
    data = torch.randint(0, 200, (rows, 64))
    return data, data


def images(rows: int) -> Any:
    return [torch.randn(rows, 16, 24, 24), torch.randint(0, 10, (rows,))]


def series(rows: int) -> Any:
    return torch.randn(rows, 20, 32), torch.randint(0, 10, (rows,))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any], int, dict[str, Any]]] = {
    "mlp": (mlp, vectors, 64, {}),
    "gpt": (GPT, tokens, 16, {}),
    "gpt, bf16-mixed": (GPT, tokens, 16, {"precision": "bf16-mixed"}),
    "gpt, cuda": (GPT, tokens, 16, {"precision": "bf16-mixed", "target": "cuda"}),
    "checkpointed": (lambda: Checkpointed(reentrant=False), tokens, 16, {}),
    "checkpointed, reentrant": (lambda: Checkpointed(reentrant=True), tokens, 16, {}),
    "resnet": (resnet, images, 8, {}),
    "resnet, cuda": (resnet, images, 8, {"precision": "16-mixed", "target": "cuda"}),
    "lstm": (Recurrent, series, 16, {}),
    "lstm, cuda": (Recurrent, series, 16, {"target": "cuda"}),
}


@cache
def traced(name: str, *, share: float = 1.0) -> Footprint:
    net, batch, rows, kwargs = CASES[name]
    torch.manual_seed(0)
    return trace(Module(net()), None, batch(round(rows * share)), **kwargs)


def layers(footprint: Footprint) -> list[LayerFootprint]:
    return [part for _, part in footprint.parts()]


def everything(footprint: Footprint) -> list[Work]:
    return [work for layer in layers(footprint) for work in (*layer.work, *layer.backward_work)]


def shapes(works: Iterable[Work], *kinds: str) -> Counter[tuple[Any, ...]]:
    """How often each shape comes, and what of it grows."""
    found: Counter[tuple[Any, ...]] = Counter()
    for work in works:
        if work.kind in kinds:
            found[(work.name, work.dtype, work.shape, work.growing)] += work.count
    return found


@pytest.mark.parametrize("name", CASES)
def test_work_adds_up_to_the_totals(name: str) -> None:
    footprint = traced(name)
    for layer in layers(footprint):
        assert (flops(layer.work), moved_bytes(layer.work)) == (layer.flops, layer.moved_bytes)
        assert (flops(layer.backward_work), moved_bytes(layer.backward_work)) == (layer.backward_flops, layer.backward_moved_bytes)
    whole = [*everything(footprint), *footprint.optimizer_work]
    assert flops(whole) == footprint.flops > 0
    assert moved_bytes(whole) == footprint.moved_bytes > 0
    assert all(0 <= work.fixed_bytes <= work.moved_bytes and work.count > 0 for work in whole)
    assert not [work for work in whole if work.kind == "other"]
    assert len(set(whole)) <= len(whole)
    restored = pickle.loads(pickle.dumps(footprint))
    assert restored == footprint
    assert not any("work" in name for part in footprint.to_dict()["blocks"] for name in part)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(("gpt", "checkpointed"))])
def test_blocks_that_are_alike_have_one_tuple(name: str) -> None:
    blocks = traced(name).blocks
    assert len(blocks) == 3
    assert all(block.work is blocks[0].work and block.backward_work is blocks[0].backward_work for block in blocks)
    assert list(blocks[0].work) == sorted(blocks[0].work, key=lambda work: (work.kind, work.name, work.dtype, work.shape))
    assert len(set(blocks[0].work)) == len(blocks[0].work)


@pytest.mark.parametrize("name", CASES)
def test_half_the_batch_is_half_the_work(name: str) -> None:
    whole, half = traced(name), traced(name, share=0.5)
    predicted = scaled(whole, half.batch_size)
    assert predicted.flops == pytest.approx(half.flops, rel=1e-9)
    for one, other in zip(layers(predicted), layers(half), strict=True):
        assert (one.flops, one.backward_flops) == (other.flops, other.backward_flops)
        assert shapes(one.work, "matmul", "attention", "convolution", "recurrent") == shapes(
            other.work, "matmul", "attention", "convolution", "recurrent"
        )
        assert shapes(one.backward_work, "matmul", "attention", "convolution", "recurrent") == shapes(
            other.backward_work, "matmul", "attention", "convolution", "recurrent"
        )
        assert one.moved_bytes == pytest.approx(other.moved_bytes, rel=0.002, abs=64)
        assert one.backward_moved_bytes == pytest.approx(other.backward_moved_bytes, rel=0.002, abs=64)
    assert predicted.moved_bytes == pytest.approx(half.moved_bytes, rel=0.002)
    assert predicted.optimizer_work == half.optimizer_work == whole.optimizer_work


class Watched(TorchDispatchMode):
    """Counts the operations of a real step that aren't views and don't just allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation(func).moves:
            self.seen[func._schema.name.removeprefix("aten::").rstrip("_")] += 1
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("name", ["mlp", "gpt", "gpt, bf16-mixed", "checkpointed, reentrant", "resnet", "lstm"])
def test_as_many_operations_as_in_a_real_step(name: str) -> None:
    net, batch, rows, kwargs = CASES[name]
    torch.manual_seed(0)
    module = Module(net())
    module.log = lambda *_, **__: None  # type: ignore[method-assign, assignment]
    data = batch(rows)
    optimizer = module.configure_optimizers()
    mixed = torch.autocast("cpu", torch.bfloat16, enabled="precision" in kwargs, cache_enabled=False)
    for watched in (nullcontext(), Watched()):
        with watched:
            with mixed:
                loss = module.training_step(data, 0)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert isinstance(watched, Watched)
    footprint = traced(name)
    found: Counter[str] = Counter()
    for work in [*everything(footprint), *footprint.optimizer_work]:
        if work.name != "convolution_backward.input":
            found[work.name.partition(".")[0].rstrip("_")] += work.count
    # The loop keeps a copy of the loss, and divides it by the batches that are accumulated, with a gradient for that.
    assert found - watched.seen == Counter({"clone": 1, "div": 2})
    assert not watched.seen - found


def test_a_linear_layer_is_three_products_of_which_other_lengths_grow() -> None:
    footprint = traced("mlp")
    forward = shapes((work for layer in layers(footprint) for work in layer.work), "matmul")
    assert forward == {
        ("addmm", "fp32", (1, 64, 256, 128), 1): 1,
        ("addmm", "fp32", (1, 64, 256, 256), 1): 1,
        ("addmm", "fp32", (1, 64, 10, 256), 1): 1,
    }
    backward = shapes((work for layer in layers(footprint) for work in layer.backward_work), "matmul")
    assert backward == {
        ("mm", "fp32", (1, 64, 256, 10), 1): 1,  # of inputs; the first layer's isn't needed
        ("mm", "fp32", (1, 64, 256, 256), 1): 1,
        ("mm", "fp32", (1, 10, 256, 64), 3): 1,  # of weights
        ("mm", "fp32", (1, 256, 256, 64), 3): 1,
        ("mm", "fp32", (1, 256, 128, 64), 3): 1,
    }
    (product,) = (work for work in everything(footprint) if work.shape == (1, 256, 128, 64))
    assert product.flops == 2 * 64 * 256 * 128
    assert product.moved_bytes == 4 * (64 * (256 + 128) + 256 * 128)
    assert product.fixed_bytes == 4 * 256 * 128
    assert {work.kind for work in everything(footprint)} == {"matmul", "pointwise", "reduce", "copy"}


def test_a_small_gradient_is_known_as_a_parameters_when_it_arrives() -> None:
    footprint = trace(Module(nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3))), None, (torch.randn(6, 8), torch.zeros(6).long()))
    backward = shapes(everything(footprint), "matmul")
    assert backward["mm", "fp32", (1, 4, 8, 6), 3] == 1
    mixed = trace(
        Module(nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3))),
        None,
        (torch.randn(6, 8), torch.zeros(6).long()),
        precision="bf16-mixed",
    )
    assert shapes(everything(mixed), "matmul")["mm", "bf16", (1, 4, 8, 6), 3] == 1
    (bias,) = (work for work in everything(mixed) if work.name == "sum" and work.fixed_bytes == 2 * 4)
    assert bias.moved_bytes == 2 * (6 * 4 + 4)


def test_attention_is_one_kernel_forward_and_one_backward() -> None:
    block = traced("gpt").blocks[0]
    shape = (16, 4, 64, 64, 16)
    name = "_scaled_dot_product_flash_attention_for_cpu"
    assert shapes(block.work, "attention") == {(f"{name}.causal", "fp32", shape, 0): 1}
    assert shapes(block.backward_work, "attention") == {(f"{name}_backward.causal", "fp32", shape, 0): 1}
    (kernel,) = (work for work in block.work if work.kind == "attention")
    assert kernel.flops == 2 * 2 * 16 * 4 * 64 * 64 * 16
    assert kernel.moved_bytes == 4 * (4 * 16 * 4 * 64 * 16 + 16 * 4 * 64)  # query, key, value, output; a sum for each row


def test_attention_in_parts_is_products_of_a_batch() -> None:
    class Unfused(Block):
        def forward(self, x: Tensor) -> Tensor:
            batch, length, width = x.shape
            q, k, v = self.attention(self.norm1(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
            scores = torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1)
            x = x + self.out((scores @ v).transpose(1, 2).reshape(x.shape))
            return x + self.mlp(self.norm2(x))

    class Net(GPT):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Unfused(64) for _ in range(2))

    block = trace(Module(Net()), None, tokens(4)).blocks[1]
    assert Counter({key: n for key, n in shapes(block.work, "matmul").items() if key[0] == "bmm"}) == {
        ("bmm", "fp32", (16, 64, 64, 16), 0): 1,
        ("bmm", "fp32", (16, 64, 16, 64), 0): 1,
    }
    assert sum(n for key, n in shapes(block.backward_work, "matmul").items() if key[0] == "bmm" and key[3] == 0) == 4


def test_autocast_computes_in_its_type_and_casts() -> None:
    footprint = traced("gpt, bf16-mixed")
    block = footprint.blocks[0]
    assert {key[1] for key in shapes((*block.work, *block.backward_work), "matmul", "attention")} == {"bf16"}
    (norm,) = (work for work in block.work if work.name == "native_layer_norm")
    assert (norm.dtype, norm.kind, norm.count) == ("fp32", "reduce", 2)
    weights = [work for work in block.work if work.name == "_to_copy" and work.fixed_bytes]
    assert sum(work.count for work in weights) == 8  # four weights, four biases, each step anew
    assert sum(work.count * work.fixed_bytes for work in weights) == 6 * sum(
        p.numel() for p in Block(64).parameters() if p.dim() > 1
    ) + 6 * (192 + 64 + 256 + 64)


def test_cuda_runs_its_own_kernels_and_its_optimizers_all_parameters_at_once() -> None:
    footprint = traced("gpt, cuda")
    assert shapes(footprint.blocks[0].work, "attention") == {
        ("_scaled_dot_product_flash_attention.causal", "bf16", (16, 4, 64, 64, 16), 0): 1
    }
    lists = [work for work in footprint.optimizer_work if work.name.startswith("_foreach")]
    parameters = 4 * footprint.parameters
    assert max(work.moved_bytes for work in lists) == 4 * parameters  # addcdiv_: state, two lists, and what comes out
    on_cpu = traced("gpt").optimizer_work
    assert not [work for work in on_cpu if "foreach" in work.name]
    (moments,) = (sum(work.count for work in on_cpu if work.name == name) for name in ("lerp_",))
    assert moments == len(list(GPT().parameters()))


def test_float16s_gradients_are_unscaled_in_one_pass() -> None:
    half, plain = (trace(Module(mlp()), None, vectors(64), precision=precision) for precision in ("16-mixed", "bf16-mixed"))
    found = Counter(half.optimizer_work) - Counter(plain.optimizer_work)
    (added,) = (work for work in found if work.moved_bytes > 100)
    # Gradients read and written; whether any wasn't finite, and the scale.
    assert (added.name, added.count) == ("_amp_foreach_non_finite_check_and_unscale_", 1)
    assert added.moved_bytes == 2 * half.gradient_bytes + 2 * 4 + 4


def test_a_fused_optimizer_is_one_kernel_that_writes_what_it_is_given() -> None:
    net = mlp()
    module = Module(net, optimizer=lambda parameters, rate: torch.optim.AdamW(parameters, rate, fused=True))
    footprint = trace(module, None, vectors(64))
    parameters = sum(parameter.numel() for parameter in net.parameters())
    (fused,) = (work for work in footprint.optimizer_work if work.name == "_fused_adamw_")
    # Parameters and both moments read and written, gradients read, a step of each read.
    assert (fused.count, fused.kind) == (1, "pointwise")
    assert fused.moved_bytes == fused.fixed_bytes == 7 * 4 * parameters + 4 * len(list(net.parameters()))


def test_an_embedding_gathers_and_its_backward_scatters() -> None:
    footprint = trace(Module(GPT()), None, tokens(2))
    (gather,) = (work for work in footprint.outer[0].work if work.kind == "gather")
    rows = 2 * 64
    assert (gather.name, gather.moved_bytes, gather.fixed_bytes) == ("embedding", rows * (2 * 64 * 4 + 8), 0)
    (scatter,) = (work for work in footprint.outer[0].backward_work if work.kind == "scatter")
    # Zeros for the whole table; each row of the gradient read, and added to one of the table's.
    assert (scatter.moved_bytes, scatter.fixed_bytes) == (rows * (3 * 64 * 4 + 8) + 200 * 64 * 4, 200 * 64 * 4)
    head = footprint.outer[-1]
    assert shapes(head.work, "matmul") == {("mm", "fp32", (1, rows, 200, 64), 1): 1}
    losses = [work for work in (*head.work, *head.backward_work) if work.name.startswith("nll_loss")]
    # The loss reads a number for each target; its backward writes the whole gradient, and reads no logits.
    assert [work.moved_bytes for work in losses] == [rows * (4 + 8) + 8, rows * (200 * 4 + 8) + 8]


def test_a_convolution_is_one_product_forward_and_two_backward() -> None:
    footprint = traced("resnet")
    kernels = shapes(everything(footprint), "convolution")
    stem = (8, 16, 32, 24 * 24, 9, 1)
    assert kernels["convolution", "fp32", stem, 0] == 1
    assert kernels["convolution_backward.weight", "fp32", stem, 0] == 1
    assert kernels["convolution_backward.input", "fp32", stem, 0] == 0  # pictures need no gradient
    down = (8, 32, 64, 12 * 12, 1, 1)
    assert [kernels[name, "fp32", down, 0] for name in ("convolution", "convolution_backward.input", "convolution_backward.weight")] == [
        1
    ] * 3
    backward = [work for work in everything(footprint) if work.shape == down]
    assert {work.flops for work in backward} == {2 * 8 * 12 * 12 * 32 * 64}
    weights = 4 * 32 * 64
    assert {work.name: work.fixed_bytes for work in backward} == dict.fromkeys((work.name for work in backward), weights)


@pytest.mark.parametrize("transposed", [False, True])
def test_groups_and_transposed_convolutions_count_what_they_multiply(transposed: bool) -> None:
    layer = (nn.ConvTranspose2d if transposed else nn.Conv2d)(16, 16, 4, stride=2, groups=16)
    net = nn.Sequential(nn.Conv2d(16, 16, 1), layer, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    footprint = trace(Module(net), None, (torch.randn(2, 16, 8, 8), torch.zeros(2).long()))
    positions = 8 * 8 if transposed else 3 * 3
    found = [work for work in everything(footprint) if work.kind == "convolution" and work.shape[5] == 16]
    assert {work.name for work in found} == {"convolution", "convolution_backward.input", "convolution_backward.weight"}
    assert {(work.shape, work.flops) for work in found} == {((2, 16, 16, positions, 16, 16), 2 * 2 * positions * 16 * 16)}


def test_convolutions_tell_how_channels_lie() -> None:
    plain, last = images(8), images(8)
    last[0] = last[0].to(memory_format=torch.channels_last)
    names = [
        {work.name for work in everything(trace(Module(resnet()), None, batch)) if work.kind == "convolution"} for batch in (plain, last)
    ]
    assert names[0] == {"convolution", "convolution_backward.input", "convolution_backward.weight"}
    assert names[1] == {f"{name}.channels_last" for name in names[0]}


def test_recurrent_layers_tell_their_steps() -> None:
    on_cpu, on_cuda = (shapes(everything(traced(name)), "recurrent") for name in ("lstm", "lstm, cuda"))
    assert on_cpu == {
        ("mkldnn_rnn_layer", "fp32", (20, 16, 32, 48, 1), 1): 1,
        ("mkldnn_rnn_layer", "fp32", (20, 16, 48, 48, 1), 1): 1,
        ("mkldnn_rnn_layer_backward", "fp32", (20, 16, 32, 48, 1), 1): 1,
        ("mkldnn_rnn_layer_backward", "fp32", (20, 16, 48, 48, 1), 1): 1,
    }
    assert on_cuda == {
        ("_cudnn_rnn", "fp32", (20, 16, 32, 48, 2), 1): 1,
        ("_cudnn_rnn_backward", "fp32", (20, 16, 32, 48, 2), 1): 1,
    }


@pytest.mark.parametrize("name", ["checkpointed", "checkpointed, reentrant"])
def test_a_forward_that_the_module_runs_again_belongs_to_backward(name: str) -> None:
    plain, again = traced("gpt").blocks[0], traced(name).blocks[0]
    assert again.work == plain.work
    forward = shapes(plain.work, "matmul", "attention")
    if "reentrant" not in name:  # the last product's result isn't needed, and torch stops before it
        forward -= Counter([("addmm", "fp32", (1, 16 * 64, 64, 256), 1)])
    assert shapes(again.backward_work, "matmul", "attention") == shapes(plain.backward_work, "matmul", "attention") + forward
    assert again.backward_flops > plain.backward_flops + 0.7 * plain.flops


def test_of_accumulated_batches_work_is_that_of_one_and_the_update_is_whole() -> None:
    plain, accumulating = (trace(Module(mlp()), make_trainer(accumulate_grad_batches=n), vectors(64)) for n in (1, 2))
    assert accumulating.optimizer_work == plain.optimizer_work
    for one, other in zip(layers(plain), layers(accumulating), strict=True):
        assert one.work == other.work
        assert shapes(one.backward_work, "matmul") == shapes(other.backward_work, "matmul")
    added = moved_bytes(everything(accumulating)) - moved_bytes(everything(plain))
    # Of two batches the second one adds its gradients to the first one's.
    assert added == pytest.approx(3 * 4 * plain.parameters / 2, rel=0.02)


def test_an_evaluation_has_no_backward() -> None:
    footprint = trace(Module(mlp()), None, vectors(64), stage="validate")
    assert not footprint.optimizer_work
    assert not any(layer.backward_work for layer in layers(footprint))
    assert flops(everything(footprint)) == footprint.flops


@pytest.mark.parametrize("quiet", [False, True])
def test_a_table_that_is_made_on_the_way_confuses_no_gradient(quiet: bool) -> None:
    """As many elements in the table, the weights and a sample: that a weight's gradient is one is told by its own product's factors."""

    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.head = (nn.Linear(64, 64, bias=False) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            x = x.relu()
            with torch.set_grad_enabled(not quiet):
                table = torch.ones(64, 64).tril()
                table = table.masked_fill(table == 0, -1.0)
            x = self.second(x * 2.0) + table
            return self.head(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Square()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x).unsqueeze(0)

    footprint = trace(Module(Net()), None, (torch.randn(1, 64, 64), torch.zeros(1, 64).long()))
    products = shapes(everything(footprint), "matmul")
    square = (1, 64, 64, 64)
    assert products == {("mm", "fp32", square, 1): 5, ("mm", "fp32", square, 3): 3}


def test_what_is_guessed_has_no_work() -> None:
    class Odd(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise RuntimeError("no step")

    footprint = trace(Odd(mlp()), None, vectors(64))
    assert not footprint.traced
    assert not footprint.optimizer_work
    assert not everything(footprint)


class TestAnotherBatch:
    work = Work(
        kind="matmul", name="mm", dtype="bf16", count=3, flops=2 * 64 * 8 * 4, moved_bytes=1000, fixed_bytes=200, shape=(1, 64, 8, 4)
    )

    def test_what_grows_does(self) -> None:
        grown = replace(self.work, growing=1).at(0.5)
        assert grown == replace(self.work, growing=1, shape=(1, 32, 8, 4), flops=64 * 8 * 4, moved_bytes=600)

    def test_what_is_fixed_stays(self) -> None:
        fixed = replace(self.work, fixed_bytes=1000)
        assert not fixed.grows
        assert fixed.at(0.5) is fixed

    def test_a_length_stays_at_least_one(self) -> None:
        assert replace(self.work, growing=1).at(0.001).shape == (1, 1, 8, 4)


def test_weights_shared_by_experts_grow_by_their_rows() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(128, 32)
            self.weight = nn.Parameter(torch.randn(4, 32, 48))
            self.head = nn.Linear(48, 10)

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            every = torch.stack([x, x * 2, x * 3, x * 4])
            return self.head(F.relu(torch.bmm(every, self.weight)).mean(0))

    products = shapes(everything(trace(Module(Experts()), None, vectors(16))), "matmul")
    assert {key: n for key, n in products.items() if key[0] == "bmm"} == {
        ("bmm", "fp32", (4, 16, 48, 32), 1): 1,
        ("bmm", "fp32", (4, 16, 32, 48), 1): 1,
        ("bmm", "fp32", (4, 32, 48, 16), 3): 1,
    }
