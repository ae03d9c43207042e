"""What operations take on the CPU, measured one by one, against what is said of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.profiler import profile, record_function
from torch.utils._pytree import tree_leaves

from lightning_autopar._fork import run_forked
from lightning_autopar.memory.kernels import measured_workspace as scratch_convolution
from lightning_autopar.memory.kernels.cpu_workspace import CPU_HIDDEN, CPU_SCRATCH, UNREAD, cpu_scratch
from lightning_autopar.memory.kernels.measured_workspace import half_product_bytes

aten = torch.ops.aten
SCRATCH = cpu_scratch({})
R = torch.randn
Call = tuple[Any, tuple[Any, ...]]


def last(tensor: Tensor) -> Tensor:
    return tensor.to(memory_format=torch.channels_last)


def convolve(
    image: Tensor, weight: Tensor, stride: int = 1, padding: int = 0, dilation: int = 1, groups: int = 1, *, t: bool = False
) -> Call:
    space = image.dim() - 2
    settings = [stride] * space, [padding] * space, [dilation] * space, t, [0] * space, groups
    return aten.convolution.default, (image, weight, None, *settings)


def backward(call: Call, *, image: bool = True) -> Call:
    function, args = call
    return aten.convolution_backward.default, (R(function(*args).shape), *args[:2], None, *args[3:], [image, True, False])


def recurrent(steps: int, rows: int, width: int, state: int) -> Call:
    weights = R(4 * state, width), R(4 * state, state), R(4 * state), R(4 * state)
    states = torch.zeros(rows, state), torch.zeros(rows, state)
    return aten.mkldnn_rnn_layer.default, (R(steps, rows, width), *weights, *states, False, [], 2, state, 1, True, False, True, True)


def normalised(kind: str) -> Call:
    x, weight = R(8, 64, 16, 16), torch.ones(64)
    if kind == "batch":
        return aten.native_batch_norm_backward.default, (x, x, weight, weight, weight, weight, weight, True, 1e-5, [True] * 3)
    rows = R(64, 256).t().contiguous().t()
    ones = torch.ones(256)
    return aten.native_layer_norm_backward.default, (rows, rows, [256], R(64, 1), R(64, 1), ones, ones, [True] * 3)


def attention(back: bool) -> Call:
    q, k, v = (R(2, 4, 200, 64) for _ in range(3))
    if not back:
        return aten._scaled_dot_product_flash_attention_for_cpu.default, (q, k, v)
    out, log = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward.default, (out, q, k, v, out, log, 0.0, False)


CALLS: dict[str, Callable[[], Call]] = {
    "3 × 3": lambda: convolve(R(8, 64, 16, 16), R(64, 64, 3, 3), padding=1),
    "three channels": lambda: convolve(R(8, 3, 64, 64), R(64, 3, 7, 7), 2, 3),
    "twelve channels": lambda: convolve(R(8, 12, 28, 28), R(32, 12, 3, 3)),
    "1 × 1": lambda: convolve(R(8, 64, 16, 16), R(128, 64, 1, 1)),
    "1 × 1, sixteen images": lambda: convolve(R(16, 64, 16, 16), R(128, 64, 1, 1)),
    "1 × 1, strided": lambda: convolve(R(8, 64, 16, 16), R(128, 64, 1, 1), 2),
    "one small image": lambda: convolve(R(1, 16, 28, 28), R(32, 16, 3, 3), padding=1),
    "depthwise": lambda: convolve(R(8, 64, 16, 16), R(64, 1, 3, 3), padding=1, groups=64),
    "dilated": lambda: convolve(R(8, 96, 520), R(96, 96, 3), dilation=4),
    "three dimensions": lambda: convolve(R(2, 16, 4, 12, 12), R(32, 16, 3, 3, 3), padding=1),
    "transposed": lambda: convolve(R(8, 64, 16, 16), R(64, 32, 2, 2), 2, t=True),
    "channels last": lambda: convolve(last(R(8, 64, 16, 16)), R(64, 64, 3, 3), padding=1),
    "bfloat16": lambda: convolve(R(8, 64, 16, 16).bfloat16(), R(64, 64, 3, 3).bfloat16(), padding=1),
    "3 × 3, backward": lambda: backward(convolve(R(8, 64, 16, 16), R(64, 64, 3, 3), padding=1)),
    "three channels, backward": lambda: backward(convolve(R(8, 3, 64, 64), R(64, 3, 7, 7), 2, 3), image=False),
    "larger than its image, backward": lambda: backward(convolve(R(8, 128, 2, 2), R(128, 128, 3, 3), padding=1)),
    "strided, backward": lambda: backward(convolve(R(8, 64, 16, 16), R(128, 64, 3, 3), 2, 1)),
    "dilated, backward": lambda: backward(convolve(R(8, 96, 520), R(96, 96, 3), dilation=4)),
    "three dimensions, backward": lambda: backward(convolve(R(2, 16, 4, 12, 12), R(32, 16, 3, 3, 3), padding=1)),
    "transposed, backward": lambda: backward(convolve(R(8, 64, 16, 16), R(64, 32, 2, 2), 2, t=True)),
    "LSTM": lambda: recurrent(48, 8, 256, 256),
    "LSTM, odd widths": lambda: recurrent(10, 3, 65, 30),
    "batch norm, backward": lambda: normalised("batch"),
    "layer norm, backward": lambda: normalised("layer"),
    "attention": lambda: attention(False),
    "attention, backward": lambda: attention(True),
    "masked softmax": lambda: (aten._safe_softmax.default, (R(4, 4, 64, 64), -1)),
    "log softmax across": lambda: (aten._log_softmax.default, (R(8, 48, 500).transpose(1, 2), 1, False)),
    "log softmax of a transposed matrix": lambda: (aten._log_softmax.default, (R(256, 256).t(), 1, False)),
    "embedding, backward": lambda: (aten.embedding_dense_backward.default, (R(64, 512).t(), torch.arange(512) % 9, 9, -1, False)),
    "gelu, backward": lambda: (aten.gelu_backward.default, (R(64, 128).t(), R(128, 64))),
    "upsampled": lambda: (aten.upsample_bilinear2d.default, (R(4, 8, 32, 32), [64, 64], False)),
    "rolled": lambda: (aten.roll.default, (R(64, 64, 8), [1, 2], [0, 1])),
    "sorted": lambda: (aten.sort.default, (torch.randint(0, 9, (4096,)),)),
    "types promoted": lambda: (aten.mul.Tensor, (R(128, 128), torch.ones(128, 128, dtype=torch.long))),
    "booleans summed": lambda: (aten.sum.default, (torch.ones(128, 128, dtype=torch.bool),)),
    "squares": lambda: (aten.mse_loss.default, (R(64, 512), R(64, 512))),
    "cross entropy of logits": lambda: (aten.binary_cross_entropy_with_logits.default, (R(64, 512), torch.rand(64, 512))),
    "in half precision": lambda: (aten.mm.default, (R(64, 96).bfloat16(), R(80, 96).bfloat16().t())),
    "in half precision, turned": lambda: (aten.mm.default, (R(96, 64).bfloat16().t(), R(96, 80).bfloat16())),
    "in half precision, with a bias": lambda: (aten.addmm.default, (R(80).bfloat16(), R(64, 96).bfloat16(), R(96, 80).bfloat16())),
    "in half precision, several": lambda: (aten.bmm.default, (R(4, 64, 96).bfloat16(), R(4, 96, 80).bfloat16())),
    "a matrix of one column": lambda: (aten.mm.default, (R(512, 1).expand(512, 64), R(64, 32))),
}


def measure(name: str) -> tuple[int, int]:
    """What an operation holds at its fullest moment, its outputs included: as the profiler sees it, and as it is said."""
    torch.manual_seed(0)
    function, args = CALLS[name]()
    function(*args)  # oneDNN keeps what it has compiled
    with profile(profile_memory=True) as profiled:
        with record_function("begins"):
            pass
        output = function(*args)
        with record_function("ends"):
            pass
    events = profiled.kineto_results.events()
    begin, end = (next(event.start_ns() for event in events if event.name() == mark) for mark in ("begins", "ends"))
    level = peak = 0
    for time, size in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        level += size if begin < time < end else 0
        peak = max(peak, level)
    made = {leaf.untyped_storage()._cdata: leaf.untyped_storage().nbytes() for leaf in tree_leaves(output) if isinstance(leaf, Tensor)}
    scratch = SCRATCH[function](args, {}, output) if function in SCRATCH else None
    return peak, sum(made.values()) + (sum(scratch) if scratch is not None else 0)


@pytest.fixture(scope="module")
def measured() -> dict[str, tuple[int, int]]:
    """In one child: the profiler remembers what earlier runs in its process allocated."""
    return run_forked(lambda: {name: measure(name) for name in CALLS}, timeout_seconds=100)


@pytest.mark.parametrize("name", CALLS)
def test_scratch_is_what_the_operation_takes(name: str, measured: dict[str, tuple[int, int]]) -> None:
    real, said = measured[name]
    assert said == pytest.approx(real, rel=0.02, abs=2048)


def test_hidden_outputs_are_as_large_as_they_are() -> None:
    """On fakes the tables answer with what real outputs take."""
    sizes = {"workspace": 0, "loss": 0}
    for steps, rows, width, state in ((48, 8, 256, 256), (10, 3, 65, 30), (2, 9, 512, 128)):
        function, args = recurrent(steps, rows, width, state)
        output = function(*args)
        real = output[-1].untyped_storage().nbytes()
        empty = torch.empty(0)
        fake = (*output[:-1], empty)
        assert CPU_HIDDEN[function](args, {}, fake, empty) == pytest.approx(real, rel=1e-3)
        sizes["workspace"] += real
    inputs = R(64, 512), R(64, 512)
    loss = aten.mse_loss(*inputs)
    assert CPU_HIDDEN[aten.mse_loss.default](inputs, {}, loss, loss) == loss.untyped_storage().nbytes() == 64 * 512 * 4
    unreduced = aten.mse_loss(*inputs, 0)
    assert CPU_HIDDEN[aten.mse_loss.default]((*inputs, 0), {}, unreduced, unreduced) is None
    assert sizes["workspace"] > 6_000_000


def test_sparse_operands_are_left_alone() -> None:
    matrix = torch.eye(8).to_sparse()
    assert CPU_SCRATCH[aten.mm.default]((matrix, R(8, 8)), {}, R(8, 8)) is None


def test_a_large_batch_is_carried_on_from_a_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What grows with the batch and what doesn't are told apart by two numbers of samples."""

    def asked(name: str) -> scratch_convolution.KernelBytes:
        torch.manual_seed(0)
        function, args = CALLS[name]()
        found = CPU_SCRATCH[function](args, {}, function(*args))
        assert found is not None
        return found

    def both() -> list[tuple[scratch_convolution.KernelBytes, scratch_convolution.KernelBytes]]:
        names = ("3 × 3", "three channels", "depthwise", "3 × 3, backward")
        whole = [asked(name) for name in names]
        scratch_convolution._known.clear()
        scratch_convolution._MOST_OPERATIONS = 1  # in the child alone: as few images as it goes
        return list(zip(whole, [asked(name) for name in names], strict=True))

    for whole, carried in run_forked(both, timeout_seconds=100):
        assert sum(carried) == pytest.approx(sum(whole), rel=0.02, abs=2048)
        assert carried.scaled_bytes == pytest.approx(whole.scaled_bytes, rel=0.05, abs=2048)


def test_fakes_are_asked_of_as_what_they_stand_for() -> None:
    def both() -> list[Any]:
        function, args = CALLS["three channels"]()
        real = CPU_SCRATCH[function](args, {}, function(*args))
        scratch_convolution._known.clear()
        with FakeTensorMode() as mode:
            fakes = tuple(mode.from_tensor(each) if isinstance(each, Tensor) else each for each in args)
            return [real, CPU_SCRATCH[function](fakes, {}, function(*fakes))]

    real, fake = run_forked(both, timeout_seconds=100)
    assert fake == real
    assert sum(real) > 0


def test_what_takes_long_for_a_single_image_is_a_guess_that_is_said() -> None:
    def guessed() -> tuple[Any, Any, dict[str, None]]:
        notes: dict[str, None] = {}
        function, args = CALLS["three channels"]()
        output = function(*args)
        whole = CPU_SCRATCH[function](args, {}, output)
        scratch_convolution._known.clear()
        scratch_convolution._TOO_MANY_OPERATIONS = 0  # in the child alone
        return whole, cpu_scratch(notes)[function](args, {}, output), notes

    whole, found, notes = run_forked(guessed, timeout_seconds=100)
    assert list(notes) == [UNREAD]
    assert sum(found) > sum(whole)


def test_a_fork_of_a_process_whose_threads_have_worked_can_ask() -> None:
    """OpenMP's threads don't survive a fork; a plan is made in one."""

    def asked() -> int:
        function, args = CALLS["3 × 3, backward"]()
        return sum(SCRATCH[function](args, {}, function(*args)) or ())

    def in_a_fork_of_it() -> list[int]:
        torch.set_num_threads(2)
        return [asked(), run_forked(asked, timeout_seconds=60)]

    here, in_the_fork = run_forked(in_a_fork_of_it, timeout_seconds=100)
    assert here == in_the_fork > 0


def test_of_many_products_few_are_run() -> None:
    """A thread works on one at a time; all of these would take a gigabyte, and minutes."""

    def asked() -> list[int]:
        return [
            half_product_bytes(aten.bmm.default, tuple(torch.empty(count, 256, 256, dtype=torch.bfloat16, device="meta") for _ in "ab"))
            for count in (2 * torch.get_num_threads(), 8192)
        ]

    few, many = run_forked(asked, timeout_seconds=20)
    assert few == many


def test_where_somebody_profiles_it_is_a_guess_that_is_said() -> None:
    def guessed() -> tuple[Any, dict[str, None]]:
        notes: dict[str, None] = {}
        function, args = CALLS["3 × 3"]()
        with profile(profile_memory=True):
            return cpu_scratch(notes)[function](args, {}, function(*args)), notes

    scratch, notes = run_forked(guessed, timeout_seconds=100)
    assert sum(scratch) > 0
    assert list(notes) == [UNREAD]
