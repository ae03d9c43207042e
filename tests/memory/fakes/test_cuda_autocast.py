"""CUDA's autocast on CPU tensors: against torch's own header, documented dtypes, and values."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from lightning_autopar.memory.fakes import cuda_autocast
from lightning_autopar.memory.fakes.as_cuda import as_cuda
from tests.memory.cuda import BF16, DOUBLE, FLOAT, HALF, amp, on_cuda


def header_list(macro: str) -> set[str]:
    """Operations in one of the header's lists, in the dispatcher's spelling."""
    text = (Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h").read_text()
    body = re.search(rf"#define {macro}\(_\)(.*?)\n\n", text, re.S)
    assert body is not None
    entries = re.findall(r"_\(([\w, ]+)\)", body.group(1).replace("\\\n", " "))
    return {name for name in (".".join(part.strip() for part in entry.split(",")) for entry in entries) if not named_tensors(name)}


def named_tensors(name: str) -> bool:
    """Overloads for tensors with named dimensions, which torch 2.13 has no more."""
    return "dimname" in name.lower() or ".names" in name


@pytest.mark.parametrize(
    ("macro", "ours"),
    [
        ("AT_FORALL_LOWER_PRECISION_FP", cuda_autocast.LOWER),
        ("AT_FORALL_FP32", cuda_autocast.FLOAT32),
        ("AT_FORALL_FP32_SET_OPT_DTYPE", cuda_autocast.FLOAT32_BY_DTYPE),
        ("AT_FORALL_PROMOTE", cuda_autocast.PROMOTE),
    ],
)
def test_lists_are_those_of_the_installed_torch(macro: str, ours: tuple[str, ...]) -> None:
    assert {name for name in ours if name in cuda_autocast.POLICIES} == header_list(macro)


def test_every_operation_that_cuda_casts_has_a_policy() -> None:
    cudas = set(torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"))
    #: Called by torch's own kernels of CUDA alone.
    inner = {"aten::cudnn_convolution", "aten::cudnn_convolution_transpose", "aten::_cudnn_rnn"}
    assert {name for name in cudas - inner if not named_tensors(name)} == {f"aten::{name}" for name in cuda_autocast.POLICIES}


def targets(shape: tuple[int, ...] = (4,)) -> Tensor:
    return torch.zeros(shape, dtype=torch.long)


#: (what runs, dtype of its input, dtype of its output by https://docs.pytorch.org/docs/stable/amp.html, "CUDA Op-Specific Behavior").
DTYPES: dict[str, tuple[Callable[[Tensor], Tensor], torch.dtype, torch.dtype]] = {
    "linear": (lambda x: F.linear(x, torch.ones(4, 4)), FLOAT, BF16),
    "matmul": (lambda x: x @ torch.ones(4, 4), FLOAT, BF16),
    "einsum": (lambda x: torch.einsum("ij,jk", x, torch.ones(4, 4)), FLOAT, BF16),
    "conv1d": (lambda x: F.conv1d(x[None], torch.ones(4, 4, 1)), FLOAT, BF16),
    "prelu": (lambda x: F.prelu(x, torch.ones(1)), FLOAT, BF16),
    "double isn't cast": (lambda x: x @ torch.ones(4, 4, dtype=DOUBLE), DOUBLE, DOUBLE),
    "addmm": (lambda x: torch.addmm(x, x, torch.ones(4, 4)), FLOAT, BF16),
    "attention": (lambda x: F.scaled_dot_product_attention(*[x.view(1, 1, 2, 8)] * 3), FLOAT, BF16),
    "pow": (lambda x: x.pow(2), BF16, FLOAT),
    "2 ** x": (lambda x: 2**x, BF16, FLOAT),
    "exp": (lambda x: x.exp(), BF16, FLOAT),
    "softplus": (F.softplus, BF16, FLOAT),
    "layer_norm": (lambda x: F.layer_norm(x, (4,)), BF16, FLOAT),
    "group_norm": (lambda x: F.group_norm(x, 2), BF16, FLOAT),
    "rms_norm": (lambda x: F.rms_norm(x, (4,)), BF16, FLOAT if "rms_norm" in cuda_autocast.POLICIES else BF16),
    "mse_loss": (lambda x: F.mse_loss(x, x), BF16, FLOAT),
    "cross_entropy": (lambda x: F.cross_entropy(x, targets()), BF16, FLOAT),
    "interpolate": (lambda x: F.interpolate(x.view(1, 1, 4, 4), scale_factor=2), BF16, FLOAT),
    "softmax": (lambda x: x.softmax(-1), BF16, FLOAT),
    "softmax with a dtype": (lambda x: F.softmax(x, -1, dtype=BF16), FLOAT, BF16),
    "log_softmax": (lambda x: x.log_softmax(-1), BF16, FLOAT),
    "sum": (lambda x: x.sum(), BF16, FLOAT),
    "sum over a dimension": (lambda x: x.sum(0, keepdim=True), BF16, FLOAT),
    "sum of integers": (lambda x: x.sum(), torch.int32, torch.int64),
    "cumsum": (lambda x: x.cumsum(0), BF16, FLOAT),
    "prod": (lambda x: x.prod(), BF16, FLOAT),
    "norm": (lambda x: x.norm(), BF16, FLOAT),
    "norm over a dimension": (lambda x: torch.norm(x, 2, 1), BF16, FLOAT),
    "vector_norm": (torch.linalg.vector_norm, BF16, FLOAT),
    "addcmul, mixed": (lambda x: torch.addcmul(x, x, torch.ones(4, 4)), BF16, FLOAT),
    "addcmul, half": (lambda x: torch.addcmul(x, x, x), BF16, BF16),
    "dot, mixed": (lambda x: torch.dot(x[0], torch.ones(4)), BF16, FLOAT),
    "grid_sampler": (lambda x: F.grid_sample(x.view(1, 1, 4, 4), torch.zeros(1, 2, 2, 2), align_corners=False), BF16, FLOAT),
    "no cast: mean": (lambda x: x.mean(), BF16, BF16),
    "no cast: gelu": (F.gelu, BF16, BF16),
    "no cast: add": (lambda x: x + x, BF16, BF16),
    "no cast: cat, as it promotes": (lambda x: torch.cat([x, torch.ones(4, 4)]), BF16, FLOAT),
    "no cast: max_pool2d": (lambda x: F.max_pool2d(x[None], 2), BF16, BF16),
    "no cast: avg_pool3d, which a CPU casts": (lambda x: F.avg_pool3d(x.view(1, 1, 2, 2, 4), 2), BF16, BF16),
    "no cast: batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), BF16, BF16),
}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("name", DTYPES)
def test_output_dtypes_are_cudas(name: str, device: str) -> None:
    run, given, expected = DTYPES[name]
    with on_cuda(), torch.autocast(device, dtype=BF16):
        assert run(torch.ones(4, 4, dtype=given)).dtype is expected


#: These have no kernel on a CPU, of CUDA's kind or in bfloat16.
NOT_HERE = {"attention", "rms_norm", "no cast: avg_pool3d, which a CPU casts"}


@pytest.mark.parametrize("name", sorted(set(DTYPES) - NOT_HERE))
def test_casts_leave_every_argument_in_its_place(name: str) -> None:
    """Real tensors, whose small numbers are exact in bfloat16: the same values as without autocast."""
    run, given, expected = DTYPES[name]
    x = (torch.arange(16).view(4, 4) % 5 + 1).to(given)
    with as_cuda({}), amp():
        found = run(x)
    plain = run(x.float() if expected is FLOAT and given is not DOUBLE else x)
    # The loss asks log_softmax for its input's own dtype (LossNLL.cpp): bfloat16, in autocast, too.
    coarse = expected is BF16 or name == "cross_entropy"
    torch.testing.assert_close(found.double(), plain.double(), rtol=0.01 if coarse else 1e-6, atol=0)


@pytest.mark.parametrize(("dtype", "copies"), [(HALF, 0), (BF16, 3)])
def test_float16_softmax_makes_no_float32_copy_of_its_input(dtype: torch.dtype, copies: int) -> None:
    with on_cuda() as seen:
        x = torch.ones(4, 4, dtype=dtype, requires_grad=True)
        with amp(dtype):
            assert x.softmax(-1).dtype is FLOAT
            assert F.log_softmax(x, 1).dtype is FLOAT
        assert F.softmax(x, -1, dtype=FLOAT).dtype is FLOAT
        assert seen.names().count("_to_copy") == copies
        x.softmax(-1).sum().backward()
    assert x.grad is not None


def test_autocast_nests_and_is_asked() -> None:
    before = torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda")
    with on_cuda():
        x, weight = torch.ones(4, 4), torch.ones(4, 4)
        assert not torch.is_autocast_enabled()
        with torch.autocast("cuda"):
            assert torch.get_autocast_dtype("cuda") is HALF
            assert (x @ weight).dtype is HALF
        with amp():
            assert torch.is_autocast_enabled()
            assert torch.is_autocast_enabled("cuda")
            assert torch.get_autocast_dtype("cuda") is BF16
            with torch.autocast("cuda", enabled=False):
                assert not torch.is_autocast_enabled()
                assert (x @ weight).dtype is FLOAT
                with amp(HALF):
                    assert (x @ weight).dtype is HALF
            with torch.autocast("cpu", enabled=False):  # a user's torch.autocast(x.device.type, …)
                assert not torch.is_autocast_enabled("cuda")
                assert (x @ weight).dtype is FLOAT
            assert (x @ weight).dtype is BF16
        assert torch.cuda.is_bf16_supported()
        assert (x @ weight).dtype is FLOAT
    assert (torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda")) == before
    assert not torch.is_autocast_enabled("cuda")


def test_torchs_own_kernels_are_back_afterwards() -> None:
    x = torch.randn(4, 8, 16)
    expected = F.layer_norm(x, (16,)), F.rms_norm(x, (16,)), F.scaled_dot_product_attention(x, x, x), nn.LSTM(16, 4)(x)[0].shape
    with torch.autocast("cpu", dtype=BF16):
        dtypes = [F.layer_norm(x.bfloat16(), (16,), torch.ones(16, dtype=BF16)).dtype, x.bfloat16().softmax(-1).dtype]
    with on_cuda():
        pass
    after = F.layer_norm(x, (16,)), F.rms_norm(x, (16,)), F.scaled_dot_product_attention(x, x, x), nn.LSTM(16, 4)(x)[0].shape
    assert all(torch.equal(one, other) for one, other in zip(expected[:3], after[:3], strict=True))
    assert expected[3] == after[3]
    with torch.autocast("cpu", dtype=BF16):
        assert [F.layer_norm(x.bfloat16(), (16,), torch.ones(16, dtype=BF16)).dtype, x.bfloat16().softmax(-1).dtype] == dtypes


@pytest.mark.parametrize(("cache", "casts"), [(True, 1), (False, 3)])
def test_weights_are_cast_once_if_the_cache_is_on(cache: bool, casts: int) -> None:
    with on_cuda() as seen:
        weight = nn.Parameter(torch.ones(4, 4))
        x = torch.ones(2, 4, dtype=BF16)
        with amp(cache_enabled=cache):
            for _ in range(3):
                F.linear(x, weight)
            assert seen.names().count("_to_copy") == casts
        with amp(cache_enabled=cache):  # the outermost autocast was left: forgotten
            F.linear(x, weight)
        assert seen.names().count("_to_copy") == casts + 1


class Doubled(torch.autograd.Function):
    """A custom function of CUDA's autocast that remembers what it saw."""

    saw: list[Any] = []  # noqa: RUF012

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=FLOAT)
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Doubled.saw += [x.dtype, torch.is_autocast_enabled("cuda")]
        return x * 2

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        Doubled.saw += [torch.is_autocast_enabled("cuda")]
        return gradient * 2


class Product(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        product = gradient @ weight.t()
        Doubled.saw += [product.dtype]
        return product, x.t() @ gradient


def test_custom_functions_see_cudas_autocast() -> None:
    Doubled.saw = []
    with on_cuda():
        x = torch.ones(4, 4, requires_grad=True)
        with amp():
            y = Doubled.apply(x @ x)
            z = Product.apply(x, x)
        assert (y.dtype, z.dtype) == (FLOAT, BF16)
        (y.sum() + z.sum()).backward()
        assert Doubled.saw[:2] == [FLOAT, False]
        assert set(Doubled.saw[2:]) == {False, BF16}
        assert x.grad is not None


def test_recomputation_in_backward_casts_alike() -> None:
    def block(x: Tensor) -> Tensor:
        return F.dropout(F.layer_norm(F.linear(x, weight), (16,)), 0.1).pow(2)

    with on_cuda() as seen:
        weight = torch.ones(16, 16, requires_grad=True)
        x = torch.ones(2, 16, requires_grad=True)
        with amp():
            loss = checkpoint(block, x, use_reentrant=False).sum()
        made = [(func, tuple(leaf.dtype for leaf in tree_leaves(output) if isinstance(leaf, Tensor))) for func, _, output in seen.calls]
        forward = [call for call in made if call[0].overloadpacket.__name__ in ("mm", "native_layer_norm", "native_dropout", "pow")]
        assert [dtypes[0] for _, dtypes in forward] == [BF16, FLOAT, FLOAT, FLOAT]
        first = len(seen.calls)
        loss.backward()
        again = [
            (func, tuple(leaf.dtype for leaf in tree_leaves(output) if isinstance(leaf, Tensor))) for func, _, output in seen.calls[first:]
        ]
        assert [call for call in again if call[0].overloadpacket.__name__ in ("native_layer_norm", "native_dropout")] == forward[1:3]


def test_what_cuda_refuses_is_told() -> None:
    notes: dict[str, None] = {}
    with on_cuda(notes), amp():
        assert F.binary_cross_entropy(torch.ones(4), torch.ones(4)).dtype is FLOAT
    assert any("binary_cross_entropy" in note and "refuses" in note for note in notes)


def test_the_last_argument_is_cast_first() -> None:
    """As the compiler of torch's wheels evaluates arguments; the order decides which blocks the allocator gives them."""
    with on_cuda() as seen, amp():
        F.linear(torch.ones(4, 8), torch.ones(16, 8), torch.ones(16))
    cast = [tuple(output.shape) for func, _, output in seen.calls if func is torch.ops.aten._to_copy.default]
    assert cast == [(16,), (16, 8), (4, 8)]
