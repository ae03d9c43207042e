"""Draws are a GPU's: torch's Philox with CUDA's mapping of the elements to threads, by an account of its own in NumPy.

All but the marked ones hold on a real GPU too. Integers, uniform numbers and masks are compared bit for bit; what goes through the fast
sine or logarithm of a GPU, whose last bits are its own, to about 1e-6.
"""

from __future__ import annotations

import ast
import ctypes
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda:0")
LARGE = 1_234_567  # more elements than 132 multiprocessors draw in one go


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.cuda.init()
    torch.cuda.manual_seed(1234)
    torch.cuda.default_generators[0].set_offset(40)


# -- the account ---------------------------------------------------------------------------------------------------------------------------


def philox(counter: np.ndarray[Any, Any], key: tuple[int, int]) -> np.ndarray[Any, Any]:
    """Philox4x32-10 of counters of shape (4, n)."""
    low = np.uint64(0xFFFFFFFF)
    c = [part.astype(np.uint64) for part in counter]
    k0, k1 = key
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(b >> np.uint64(32)) ^ c[1] ^ np.uint64(k0), b & low, (a >> np.uint64(32)) ^ c[3] ^ np.uint64(k1), a & low]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack(c).astype(np.uint32)


def words(thread: Any, call: Any, seed: int = 1234, offset: int = 40) -> np.ndarray[Any, Any]:
    """What threads get at their so-manieth call of curand4: four words of 32 bits each, of shape (4, n)."""
    thread, call = np.asarray(thread, np.uint64), np.asarray(call, np.uint64) + np.uint64(offset // 4)
    thread, call = np.broadcast_arrays(thread, call)
    high, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    return philox(np.stack([call & low, call >> high, thread & low, thread >> high]), (seed & 0xFFFFFFFF, seed >> 32))


def threads(elements: int) -> int:
    device = torch.cuda.get_device_properties(GPU)
    return 256 * min(device.multi_processor_count * (device.max_threads_per_multi_processor // 256), -(-elements // 256))


def drawn(elements: int, each: int = 4) -> np.ndarray[Any, Any]:
    """The words behind each element: one where a call fills four elements, two where it fills two; of shape (4 // each, elements)."""
    index = np.arange(elements)
    many = threads(elements)
    thread, slot = index % many, index // many
    four = words(thread, slot // each)
    part = slot % each * (4 // each)
    return np.stack([np.take_along_axis(four, (part + k)[None], 0)[0] for k in range(4 // each)])


def uniform(word: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return word.astype(np.float32) * np.float32(2**-32) + np.float32(2**-33)


def moved_on(elements: int, each: int = 4) -> int:
    return 40 + ((elements - 1) // (threads(elements) * each) + 1) * 4


def in_memory(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The elements in the order in which they lie in memory."""
    assert tensor.untyped_storage().nbytes() >= tensor.nbytes
    return tensor.cpu().as_strided((tensor.numel(),), (1,)).numpy()


def offset() -> int:
    return torch.cuda.default_generators[0].get_offset()


# -- what is known of real GPUs ------------------------------------------------------------------------------------------------------------


@pytest.mark.stub
def test_philox_gives_its_known_answers() -> None:
    """Those of Random123 (kat_vectors, philox4x32 10)."""
    extension = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libnullgpu_compute.so"))
    for counter, key, answer in (
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ):
        made = (ctypes.c_uint32 * 4)()
        extension.nullgpu_philox((ctypes.c_uint32 * 4)(*counter), (ctypes.c_uint32 * 2)(*key), made)
        assert list(made) == answer
        np.testing.assert_array_equal(philox(np.array(counter)[:, None], (key[0], key[1]))[:, 0], answer)


def test_the_numbers_that_gpus_print() -> None:
    """What users show of torch.manual_seed(0) and (42) on NVIDIA GPUs: the first draws, and the ones after them."""
    torch.manual_seed(0)
    shown = [0.3990, 0.5167, 0.0249, 0.9401, 0.9459, 0.7967, 0.4150, 0.8203, 0.2290, 0.9096]
    assert torch.rand(10, device=GPU).tolist() == pytest.approx(shown, abs=5e-5)
    shown = [0.9722, 0.7910, 0.4690, 0.3300, 0.3345, 0.3783, 0.7640, 0.6405, 0.1103, 0.3594]
    assert torch.rand(10, device=GPU).tolist() == pytest.approx(shown, abs=5e-5)
    torch.manual_seed(0)
    shown = [-0.9247, -0.4253, -2.6438, 0.1452, -0.1209, -0.5797, -0.6229, -0.3284, -1.0745, -0.3631, -1.6711, 2.2655]
    assert torch.randn(8, 8, device=GPU).flatten()[:12].tolist() == pytest.approx(shown, abs=5e-5)
    torch.manual_seed(42)
    shown = [0.6130, 0.0101, 0.3984, 0.0403, 0.1563, 0.4825, 0.7362, 0.4060, 0.5189, 0.2867, 0.2416, 0.9228]
    assert torch.rand(3, 4, device=GPU).flatten().tolist() == pytest.approx(shown, abs=5e-5)
    torch.manual_seed(42)
    shown = [0.1940, 2.1614, -0.1721, 0.8491, -1.9244, 0.6530, -0.6494, -0.8175, 0.5280, -1.2753, -1.6621, -0.3033]
    assert torch.randn(1, 64, device=GPU)[0, :12].tolist() == pytest.approx(shown, abs=5e-5)


# -- by the account ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("elements", [1, 255, 257, 5000, LARGE])
def test_uniform_numbers(elements: int) -> None:
    x = torch.rand(elements, device=GPU)
    expected = uniform(drawn(elements)[0])
    np.testing.assert_array_equal(x.cpu().numpy(), np.where(expected == 1, np.float32(0), expected))
    assert offset() == moved_on(elements)


def test_uniform_doubles() -> None:
    x = torch.rand(LARGE, device=GPU, dtype=torch.float64)
    low, high = drawn(LARGE, 2).astype(np.uint64)
    expected = (low ^ (high << np.uint64(21))).astype(np.float64) * 2.0**-53 + 2.0**-54
    np.testing.assert_array_equal(x.cpu().numpy(), expected)
    assert offset() == moved_on(LARGE, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_uniform_halves(dtype: torch.dtype) -> None:
    expected = torch.from_numpy(uniform(drawn(5000)[0])).to(dtype)
    assert torch.equal(torch.rand(5000, device=GPU, dtype=dtype).cpu(), torch.where(expected == 1, 0, expected))


@pytest.mark.parametrize("layout", ["transposed", "channels_last", "with gaps"])
def test_draws_follow_memory(layout: str) -> None:
    x = {
        "transposed": torch.empty(7, 30, device=GPU).t(),
        "channels_last": torch.empty(2, 3, 5, 7, device=GPU).to(memory_format=torch.channels_last),
        "with gaps": torch.zeros(7, 60, device=GPU)[:, ::2],
    }[layout]
    got = in_memory(x.uniform_()) if layout != "with gaps" else x.uniform_().cpu().numpy().flatten()
    np.testing.assert_array_equal(got, uniform(drawn(210)[0]))


def test_normal_numbers() -> None:
    x = torch.randn(LARGE, device=GPU)
    index, many = np.arange(LARGE), threads(LARGE)
    four = words(index % many, index // many // 4)
    slot = index // many % 4
    first, second = np.where(slot < 2, four[0], four[2]), np.where(slot < 2, four[1], four[3])
    angle = second.astype(np.float64) * 2**-32 * 2 * math.pi + 2**-32 * math.pi
    radius = np.sqrt(-2 * np.log(uniform(first).astype(np.float64)))
    expected = radius * np.where(slot % 2 == 0, np.sin(angle), np.cos(angle))
    np.testing.assert_allclose(x.cpu().numpy(), expected, atol=1e-5)
    assert offset() == moved_on(LARGE)


def test_draws_made_of_uniform_numbers() -> None:
    x = uniform(drawn(1000)[0]).astype(np.float64)
    draws: list[tuple[Callable[[Tensor], Tensor], Any]] = [
        (lambda t: t.exponential_(2), -np.log(x) / 2),
        (lambda t: t.cauchy_(1, 2), 1 + 2 * np.tan(math.pi * (x - 0.5))),
        (lambda t: t.uniform_(-1, 3), x * 4 - 1),
    ]
    for draw, expected in draws:
        torch.cuda.default_generators[0].set_offset(40)
        np.testing.assert_allclose(draw(torch.empty(1000, device=GPU)).cpu().numpy(), expected, rtol=2e-4, atol=1e-5)
        assert offset() == 44


@pytest.mark.parametrize("elements", [5000, LARGE])
def test_bernoulli_by_one_chance(elements: int) -> None:
    mask = torch.empty(elements, device=GPU, dtype=torch.bool).bernoulli_(0.3)
    np.testing.assert_array_equal(mask.cpu().numpy(), uniform(drawn(elements)[0]) < np.float32(0.3))
    assert offset() == moved_on(elements)


def test_bernoulli_by_chances_of_their_own() -> None:
    chances = torch.linspace(0, 1, LARGE, device=GPU)
    mask = torch.bernoulli(chances)
    index = np.arange(LARGE)
    expected = np.take_along_axis(uniform(words(index // 4, 0)), index[None] % 4, 0)[0] <= chances.cpu().numpy()
    np.testing.assert_array_equal(mask.cpu().numpy(), expected)
    assert offset() == 40 + 12


def test_integers() -> None:
    got = torch.randint(-5, 1000, (LARGE,), device=GPU)
    np.testing.assert_array_equal(got.cpu().numpy(), drawn(LARGE)[0].astype(np.int64) % 1005 - 5)
    assert offset() == moved_on(LARGE)
    torch.cuda.default_generators[0].set_offset(40)
    got = torch.randint(0, 1 << 40, (LARGE,), device=GPU)  # from 2^28 on, 64 bits are drawn
    high, low = drawn(LARGE, 2).astype(np.uint64)
    np.testing.assert_array_equal(got.cpu().numpy(), ((high << np.uint64(32) | low) % np.uint64(1 << 40)).astype(np.int64))
    assert offset() == moved_on(LARGE, 2)


def dropout_numbers(elements: int, width: int) -> np.ndarray[Any, Any]:
    """The fused kernel's, where a thread takes ``width`` neighbours at a time."""
    if width == 1:
        return uniform(drawn(elements)[0])
    index = np.arange(elements)
    group, many, calls = index // width, threads(elements), -(-width // 4)
    four = uniform(words(group % many, group // many * calls + index % width // 4))
    made: np.ndarray[Any, Any] = np.take_along_axis(four, index[None] % width % 4, 0)[0]
    return made


@pytest.mark.parametrize(
    ("elements", "dtype", "width"),
    [
        (LARGE - 7, torch.float32, 4),
        (LARGE - 5, torch.float32, 2),
        (LARGE, torch.float32, 1),
        (LARGE - 7, torch.bfloat16, 8),
        (5002, torch.float64, 2),
    ],
)
def test_dropout(elements: int, dtype: torch.dtype, width: int) -> None:
    x = torch.ones(elements, device=GPU, dtype=dtype)
    kept = torch.from_numpy(dropout_numbers(elements, width) < np.float32(0.7))
    got = F.dropout(x, 0.3)
    assert torch.equal(got.cpu() != 0, kept)
    assert offset() == moved_on(elements)
    torch.testing.assert_close(got[got != 0], torch.full_like(got[got != 0], 1 / 0.7))


def test_dropout_goes_by_the_dimensions_where_it_takes_one_at_a_time() -> None:
    whole, gaps = torch.ones(6, 35, device=GPU), torch.ones(6, 70, device=GPU)[:, ::2]
    one_by_one, by_memory = dropout_numbers(210, 1) < 0.5, dropout_numbers(210, 2) < 0.5
    for x, expected in ((gaps, one_by_one.reshape(6, 35)), (whole.t(), by_memory.reshape(6, 35).T), (whole, by_memory.reshape(6, 35))):
        torch.cuda.default_generators[0].set_offset(40)
        np.testing.assert_array_equal(F.dropout(x).cpu().numpy() != 0, expected)


def test_a_permutation_sorts_by_random_keys_and_shuffles_equal_ones() -> None:
    shuffled = 0
    for n, seed in [(10, seed) for seed in range(40)] + [(3000, 1), (100_000, 1)]:
        torch.cuda.manual_seed(seed)
        got = torch.randperm(n, device=GPU).cpu().numpy()
        bits = math.ceil(math.log2(n - (6 * n * n + 1) / (math.log(0.9) * 12)))
        index, many = np.arange(n), threads(n)
        four = words(index % many, index // many // 2, seed, 0).astype(np.uint64)
        high, low = np.where(index // many % 2, four[2:], four[:2])
        size = 32 if bits <= 32 else 64
        keys = (high << np.uint64(32) | low) % np.uint64((1 << size) - 1)
        keys = keys ^ np.uint64(1 << (size - 1)) if bits == size else keys & np.uint64((1 << bits) - 1)
        expected = np.argsort(keys, kind="stable")
        moved = ((n - 1) // (many * 2) + 1) * 4
        keys = keys[expected]
        for first in np.flatnonzero((keys[1:] == keys[:-1]) & np.append(True, keys[1:-1] != keys[:-2])):
            count = int((keys == keys[first]).sum())
            for turn, last in enumerate(range(count - 1, 0, -1)):
                other = int(words(first, turn // 4, seed, moved)[turn % 4]) % (last + 1)
                expected[[first + last, first + other]] = expected[[first + other, first + last]]
                shuffled += 1
        np.testing.assert_array_equal(got, expected)
        assert offset() == moved + 4 * -(-n // 4)
    assert shuffled


def test_samples_with_replacement() -> None:
    chances = torch.tensor([[0.1, 0.2, 0.0, 0.7], [3.0, 0.0, 1.0, 0.0]], device=GPU)
    got = torch.multinomial(chances, 300, replacement=True).cpu().numpy()
    for row, sums in enumerate(((0.1, 0.3, 0.3, 1.0), (0.75, 0.75, 1.0, 1.0))):
        number = uniform(words(row * 384 + np.arange(300), 0)[0])
        np.testing.assert_array_equal(got[row], np.searchsorted(np.array(sums, np.float32), number))
    assert offset() == 44


def test_samples_without_replacement_are_made_of_exponential_draws() -> None:
    chances = torch.rand(50, device=GPU)
    before = offset()
    got = torch.multinomial(chances, 8)
    torch.cuda.default_generators[0].set_offset(before)
    expected = (chances / torch.empty_like(chances).exponential_()).topk(8).indices
    assert torch.equal(got, expected)


@pytest.mark.parametrize("backend", [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
def test_dropout_of_attention(backend: SDPBackend) -> None:
    """Values that are a unit matrix give the weights back; queries of zeros make them equal."""
    query, value = torch.zeros(2, 3, 16, 16, device=GPU), torch.eye(16, device=GPU).expand(2, 3, 16, 16)
    with sdpa_kernel(backend):
        kept = F.scaled_dot_product_attention(query, query, value.contiguous(), dropout_p=0.25).cpu() != 0
    index = np.arange(kept.numel())
    if backend == SDPBackend.MATH:
        expected = dropout_numbers(kept.numel(), 4) < np.float32(0.75)
    else:  # one thread's numbers, from the first to the last pair of a query and a key
        expected = np.take_along_axis(uniform(words(0, index // 4)), index[None] % 4, 0)[0] > np.float32(0.25)
    np.testing.assert_array_equal(kept.flatten().numpy(), expected)


def test_backward_of_efficient_attention_drops_the_same() -> None:
    query = torch.randn(1, 2, 8, 16, device=GPU)
    value = torch.eye(8, 16, device=GPU).expand(1, 2, 8, 16).clone().requires_grad_()
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        out = F.scaled_dot_product_attention(query, query, value, dropout_p=0.5)
    weights = out[..., :8].detach()
    out.backward(torch.ones_like(out))
    torch.testing.assert_close(value.grad, weights.sum(-2, keepdim=True).transpose(-2, -1).expand_as(value), rtol=1e-3, atol=1e-4)


def test_a_draw_is_a_function_of_seed_and_offset() -> None:
    module = nn.Dropout()
    x = torch.ones(64, 64, device=GPU)
    state = torch.cuda.get_rng_state()
    first, second = module(x), module(x)
    assert not torch.equal(first, second)
    torch.cuda.set_rng_state(state)
    assert torch.equal(module(x), first)
    generator = torch.Generator(GPU).manual_seed(7)
    before = offset()
    torch.rand(5, device=GPU, generator=generator)
    assert (generator.get_offset(), offset()) == (4, before)


@pytest.mark.stub
def test_large_draws_depend_on_the_size_of_the_gpu() -> None:
    torch.manual_seed(0)
    here = torch.rand(40_000, device=GPU)[[0, 20_000]].tolist()
    script = "import torch; torch.manual_seed(0); print(torch.rand(40_000, device='cuda')[[0, 20_000]].tolist())"
    smaller = {**os.environ, "NULLGPU_SMS": "8", "NULLGPU_CAPABILITY": "8.6"}  # 12,288 threads
    done = subprocess.run([sys.executable, "-c", script], env=smaller, text=True, check=True, capture_output=True)
    there = ast.literal_eval(done.stdout)
    assert there[0] == here[0]
    assert there[1] != here[1]
