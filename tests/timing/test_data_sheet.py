"""The data sheet's rates: what is known of devices, and the kernels of GPUs by kind and shape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_autopar.devices.catalogue import KNOWN_DEVICES, find
from lightning_autopar.memory.work.work import Work
from lightning_autopar.timing.data_sheet import KERNEL_SECONDS, DataSheet, kernel_seconds
from tests.fakes.values import GIB, cpu, gpu, inventory

SHEET = DataSheet()
WIDTHS = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


def product(batch: int, m: int, n: int, k: int, dtype: str = "bf16") -> Work:
    width = WIDTHS[dtype]
    return Work(
        kind="matmul",
        name="mm",
        dtype=dtype,
        flops=2 * batch * m * n * k,
        moved_bytes=width * batch * (m * n + n * k + k * m),
        shape=(batch, m, n, k),
    )


FLASH = "_scaled_dot_product_flash_attention"


def attention(batch: int, heads: int, length: int, width: int, name: str = FLASH, dtype: str = "bf16") -> Work:
    times = 10 if "backward" in name else 4
    return Work(
        kind="attention",
        name=name,
        dtype=dtype,
        flops=times * batch * heads * length**2 * width,
        moved_bytes=8 * batch * heads * length * width,
        shape=(batch, heads, length, length, width),
    )


def rate(device: str, work: Work) -> float:
    """TFLOP/s."""
    return work.flops / kernel_seconds(find(device), work) / 1e12


def test_large_products_reach_what_was_measured() -> None:
    # MAMF's best shapes, https://github.com/stas00/ml-engineering, compute/accelerator/README.md.
    assert rate("A100-80GB", product(1, 1024, 10240, 5120)) == pytest.approx(271.2, rel=0.1)
    assert rate("H100-80GB", product(1, 2048, 2048, 13312)) == pytest.approx(794.5, rel=0.15)  # before the power limit shows


@pytest.mark.parametrize(
    ("device", "dtype", "measured"),
    [
        # Of the sources in the catalogue: squares of 1024, 2048 and 4096, of which the last alone made its rows.
        ("A40", "bf16", (82, 95, 115)),
        ("A10G", "bf16", (48, 61, 62)),
        ("RTX4090", "bf16", (127, 165, 151)),
        ("B200", "bf16", (423, 1130, 1410)),
        ("V100-16GB", "fp16", (57, 78, 96)),
        ("H20", "bf16", (95, 120, 133)),
        ("A40", "fp32", (17, 21, 23)),
        ("RTX4090", "fp32", (46, 54, 53)),
    ],
)
def test_smaller_products_lose_what_they_do_not_fill(device: str, dtype: str, measured: tuple[float, ...]) -> None:
    for size, flops in zip((1024, 2048, 4096), measured, strict=True):
        assert rate(device, product(1, size, size, size, dtype)) == pytest.approx(flops, rel=0.25), size


def test_a_wave_that_is_not_full_costs_a_whole_one() -> None:
    one, two = (kernel_seconds(find("A100-80GB"), product(1, 128 * tiles, 256, 4096)) for tiles in (108, 109))
    assert two > 1.2 * one
    assert rate("A100-80GB", product(1, 8192, 8192, 64)) < 0.5 * rate("A100-80GB", product(1, 8192, 8192, 8192))  # a short k
    assert rate("A100-80GB", product(1, 2048, 50257, 768)) < 0.8 * rate("A100-80GB", product(1, 2048, 50304, 768))  # an odd width
    assert rate("H100-80GB", product(1, 256, 256, 65536)) > 2 * rate("H100-80GB", product(1, 256, 256, 512))  # split along k


def test_dtypes_and_devices_keep_their_order() -> None:
    sizes = (1, 4096, 4096, 4096)
    for device in ("A100-80GB", "H100-80GB", "RTX3090-24GB"):
        assert rate(device, product(*sizes, "bf16")) > 2 * rate(device, product(*sizes, "fp32")) > 0
    assert rate("V100-32GB", product(*sizes, "bf16")) < 0.5 * rate("V100-32GB", product(*sizes, "fp16"))
    order = ["T4-16GB", "RTX3090-24GB", "A100-80GB", "H100-80GB", "B200-180GB"]
    speeds = [rate(device, product(*sizes, "fp16")) for device in order]
    assert speeds == sorted(speeds)


def test_attention_is_as_fast_as_its_papers_say() -> None:
    back = f"{FLASH}_backward"
    # 2048 tokens in all heads, 16k in the batch (https://arxiv.org/abs/2307.08691, https://arxiv.org/abs/2407.08608).
    assert rate("H100-80GB", attention(8, 16, 2048, 128)) == pytest.approx(362, rel=0.1)
    assert rate("H100-80GB", attention(32, 32, 512, 64)) == pytest.approx(282, rel=0.1)
    assert rate("H100-80GB", attention(8, 16, 2048, 128, back)) == pytest.approx(291, rel=0.1)
    assert rate("H100-80GB", attention(32, 32, 512, 64, back)) == pytest.approx(198, rel=0.1)
    assert rate("A100-80GB", attention(8, 16, 2048, 128)) == pytest.approx(222, rel=0.1)
    assert rate("H20", attention(2, 32, 2048, 128)) == pytest.approx(84, rel=0.1)  # Dao-AILab/flash-attention#1310
    cudnn = "_scaled_dot_product_cudnn_attention"
    assert rate("H100-80GB", attention(8, 16, 2048, 128, cudnn)) == pytest.approx(590, rel=0.1)
    assert rate("A100-80GB", attention(8, 16, 2048, 128, FLASH)) > 1.5 * rate(
        "A100-80GB", attention(8, 16, 2048, 128, "_scaled_dot_product_efficient_attention")
    )
    assert rate("A100-80GB", attention(8, 16, 2048, 128)) > 4 * rate("A100-80GB", attention(8, 16, 2048, 128, dtype="fp32"))


@pytest.mark.parametrize(
    ("device", "elements", "dtype", "measured"),
    [
        ("A100-40GB", 67_108_864, "fp32", 362.46e-6),  # pytorch/pytorch#195542
        ("H100-80GB-PCIe", 536_870_912, "bf16", 1.7357e-3),  # pytorch/pytorch#137053, in vectors
    ],
)
def test_casts_take_what_was_measured(device: str, elements: int, dtype: str, measured: float) -> None:
    cast = Work(kind="copy", name="_to_copy", dtype=dtype, moved_bytes=6 * elements)
    assert kernel_seconds(find(device), cast) == pytest.approx(measured, rel=0.15)
    copy = Work(kind="copy", name="clone", dtype=dtype, moved_bytes=6 * elements)
    assert (kernel_seconds(find(device), cast) > 1.1 * kernel_seconds(find(device), copy)) == (dtype == "fp32")


def test_causal_attention_does_half() -> None:
    whole = attention(4, 16, 4096, 128)
    half = replace(whole, name=f"{whole.name}.causal")
    seconds = kernel_seconds(find("A100-80GB"), half) / kernel_seconds(find("A100-80GB"), whole)
    assert 0.5 < seconds < 0.6


def test_one_pass_over_elements_is_bound_by_memory_and_a_small_one_by_its_launch() -> None:
    device = find("A100-80GB")
    large, small = (Work(kind="pointwise", name="add", dtype="fp32", moved_bytes=size) for size in (GIB, 1024))
    assert GIB / kernel_seconds(device, large) == pytest.approx(0.9 * device.memory_bytes_per_second, rel=0.01)
    assert kernel_seconds(device, small) == pytest.approx(KERNEL_SECONDS, rel=0.01)
    # What would fit into the L2 cache is no faster by the byte: nobody has measured a small batch to be.
    little = Work(kind="pointwise", name="add", dtype="fp32", moved_bytes=8 * 2**20)
    assert little.moved_bytes / (kernel_seconds(device, little) - KERNEL_SECONDS) == pytest.approx(0.9 * device.memory_bytes_per_second)
    norm = Work(kind="reduce", name="native_layer_norm_backward", dtype="fp32", moved_bytes=3 * 8192 * 4096 * 4)
    forward = replace(norm, name="native_layer_norm", moved_bytes=2 * 8192 * 4096 * 4)
    # 1.04 ms on A100 with 40 GB (pytorch/pytorch#87445).
    assert kernel_seconds(find("A100-40GB"), norm) + kernel_seconds(find("A100-40GB"), forward) == pytest.approx(1.04e-3, rel=0.15)


def convolution(device: str = "A100-80GB", dtype: str = "bf16", shape: tuple[int, ...] = (64, 256, 256, 196, 9, 1)) -> float:
    batch, inputs, outputs, positions, kernel, groups = shape
    moved = WIDTHS[dtype] * (batch * positions * (inputs + outputs) + inputs * outputs * kernel // groups)
    flops = 2 * batch * positions * kernel * inputs * outputs // groups
    work = Work(kind="convolution", name="convolution", dtype=dtype, flops=flops, moved_bytes=moved, shape=shape)
    return flops / kernel_seconds(find(device), work) / 1e12


def test_convolutions_use_tensor_cores_unless_they_are_depthwise() -> None:
    assert 60 < convolution() < 230
    assert convolution(dtype="fp32") > 3 * 19.5 * 0.5  # TF32, which cuDNN may use
    assert convolution("V100-32GB", "fp32", shape=(64, 256, 256, 196, 1, 1)) < 15.7
    assert convolution(shape=(64, 256, 256, 196, 9, 256)) < 10


def test_plain_cores_filter_pictures_with_fewer_multiplications() -> None:
    def seconds(inputs_positions: int, kernel: int = 9) -> float:
        moved = 4 * 64 * (256 * inputs_positions + 256 * 196)
        flops = 2 * 64 * 196 * kernel * 256 * 256
        shape = (64, 256, 256, 196, kernel, 1)
        work = Work(kind="convolution", name="convolution", dtype="fp32", flops=flops, moved_bytes=moved, shape=shape)
        return kernel_seconds(find("V100-32GB"), work)

    assert seconds(196 * 4) > 1.4 * seconds(196)  # one that moves by two isn't filtered so
    per_flop = [seconds(196, kernel) / kernel for kernel in (9, 25)]
    assert per_flop[0] < per_flop[1] / 1.4


def test_a_recurrent_layer_waits_for_each_step() -> None:
    def lstm(steps: int, states: int = 256) -> float:
        flops = 2 * steps * 32 * 4 * states * 2 * states
        work = Work(kind="recurrent", name="_cudnn_rnn", dtype="fp16", flops=flops, moved_bytes=10**6, shape=(steps, 32, states, states, 1))
        return kernel_seconds(find("A100-80GB"), work)

    assert lstm(200) > 1.8 * lstm(100)
    assert lstm(100) > 100 * KERNEL_SECONDS


@given(
    name=st.sampled_from(sorted(KNOWN_DEVICES)),
    sizes=st.tuples(*(st.integers(1, 5000) for _ in range(3))),
    dtype=st.sampled_from(sorted(WIDTHS)),
)
def test_no_product_is_faster_than_its_peak(name: str, sizes: tuple[int, int, int], dtype: str) -> None:
    device = find(name)
    work = product(1, *sizes, dtype)
    reached = work.flops / kernel_seconds(device, work)
    assert 0 < reached <= max(device.sustained_flops(dtype), device.peak_flops(dtype))


@given(
    sizes=st.tuples(*(st.integers(1, 4000) for _ in range(3))), more=st.integers(0, 4000), name=st.sampled_from(["A100-80GB", "T4-16GB"])
)
def test_a_longer_k_is_never_faster_by_more_than_a_split(sizes: tuple[int, int, int], more: int, name: str) -> None:
    m, n, k = (8 * size for size in sizes)
    less, greater = (kernel_seconds(find(name), product(1, m, n, length)) for length in (k, k + 8 * more))
    assert greater >= less * 0.5


def test_cpu_devices_have_a_rough_rule() -> None:
    work = product(1, 512, 512, 512, "fp32")
    one, two = (SHEET.work_seconds(cpu(0, threads=threads), work) for threads in (1, 2))
    assert one == pytest.approx(2 * two)
    assert SHEET.work_seconds(cpu(0), replace(work, dtype="bf16")) > one
    assert SHEET.host_copy_seconds(cpu(0), GIB) == 0
    assert SHEET.overlap(cpu(0)) == 0 < SHEET.overlap(gpu(0)) <= 1


def test_cores_that_are_asked_for_twice_are_shared() -> None:
    devices = (cpu(0, threads=2), cpu(1, threads=2))
    work = product(1, 512, 512, 512, "fp32")

    def seconds(**figures: Any) -> float:
        return SHEET.among(devices, inventory(*devices, **figures)).work_seconds(devices[0], work)

    assert seconds() == seconds(host_threads=4) == SHEET.work_seconds(devices[0], work)
    assert seconds(host_threads=2) == pytest.approx(2 * seconds())


def test_an_unknown_gpu_is_a_slow_one() -> None:
    work = product(1, 4096, 4096, 4096)
    assert SHEET.work_seconds(gpu(0, name="GPU of tomorrow"), work) > SHEET.work_seconds(gpu(0), work)
    assert SHEET.host_copy_seconds(gpu(0), GIB) < SHEET.host_copy_seconds(gpu(0, name="GPU of tomorrow"), GIB)


def test_devices_of_a_class_are_alike() -> None:
    assert SHEET.device_class(gpu(0)) == SHEET.device_class(gpu(1)) != SHEET.device_class(cpu(0))
    assert DataSheet().token == DataSheet().token


def test_all_wait_for_the_slowest_of_many_gpus() -> None:
    paces = [SHEET.slowest_of(gpu(0), count) for count in (1, 2, 8, 64, 1024)]
    assert paces[0] == 1.0 == SHEET.slowest_of(cpu(0), 8)
    assert paces == sorted(paces)
    assert paces[2] == pytest.approx(1.021, abs=0.001)  # the largest of eight draws lies 1.42 standard deviations above their middle
    assert paces[-1] < 1.06
