"""Rates from the data sheet: the catalogue's peaks, and how much of them kernels reach in practice; and the seconds of one GPU kernel.

A GPU that isn't in the catalogue counts as a slow one. For CPU devices there is only a rough rule, which calibration replaces. A matrix
product is cut into tiles, each computed by one multiprocessor; what doesn't fill a tile or the last wave of tiles is lost ("Matrix
Multiplication Background User's Guide", NVIDIA, "tile and wave quantization"). Every other kernel is a roofline: the longer of its
arithmetic and its bytes, each at the rate that its kind reaches. It measures nothing; knows no plan and no links.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from math import ceil
from statistics import NormalDist

from lightning_autopar.devices import catalogue
from lightning_autopar.devices.catalogue import KnownDevice
from lightning_autopar.devices.inventory import Device, Inventory
from lightning_autopar.memory.work.work import Work
from lightning_autopar.plans import Engine, loaded
from lightning_autopar.timing.collectives import collective_seconds, known_model, topology
from lightning_autopar.timing.rates import Collective, Phase, Python, Rates

#: From one kernel's end to the end of an empty one after it, both issued ahead: the least seconds of a kernel.
KERNEL_SECONDS = 2.0e-6
#: The share of the data sheet's bandwidth that a copy of large tensors reaches: 1.43 of 1.56 TB/s on A100 (ekondis/mixbench#18), 304 of 336
#: GB/s on RTX 2060 (BabelStream's triad, alpaka-group/alpaka#1874).
COPY_SHARE = 0.9
#: The share of a copy's bandwidth that other memory-bound kernels of PyTorch reach: a norm or softmax reads its row more than once or waits
#: for sums, rows picked by index come in pieces, rows added by index use atomics. Estimates, except those by name below.
_KIND_SHARE = {"pointwise": 1.0, "copy": 1.0, "reduce": 0.8, "gather": 0.7, "scatter": 0.4, "other": 1.0}
#: PyTorch's kernels for the weights of a layer norm: forward and backward of 8192 × 4096 in fp32 take 1.04 ms on A100, of 8192 × 1024
#: 0.21 ms (pytorch/pytorch#87445), five times the tensor's bytes together.
_NORM_BACKWARD_SHARE = 0.4
#: Norms over groups go over their input once for its moments and once more to apply them: three passes where input and output are two, five
#: backward where they are three. Batch norms do so, too, but there the footprint's bytes count every pass.
_TWICE_READ_SHARE = 0.6
#: Bytes per second and multiprocessor out of the L2 cache, about 5 TB/s on A100's 108 and 6 on H100's 132 (microbenchmarks such as Luo et
#: al., https://arxiv.org/abs/2402.13499). The tests hold the tiles that follow from it to products that were measured.
_L2_BYTES_PER_SECOND = 45e9
#: Filling a tile's pipeline: a round trip to memory and the first barrier (about 600 ns on Volta to Hopper).
_FILL_SECONDS = 0.7e-6
#: How many multiprocessors fetch an operand together: a cluster of Hopper's gets it from L2 once, Blackwell works in pairs besides
#: ("Hopper Tuning Guide" and "Blackwell Tuning Guide", NVIDIA). Their kernels write a tile while they work on the next.
_CLUSTER = {"hopper": 2, "blackwell": 4}
#: Casts don't load in vectors (``unrolled_elementwise_kernel``, aten/src/ATen/native/cuda/CUDALoops.cuh), so that too few bytes are in
#: flight for a wide memory: bytes per second and multiprocessor. From bf16 to fp32 1.11 TB/s on A100's 108 (pytorch/pytorch#195542), from
#: fp32 to fp16 1.45 on the 114 of an H100 PCIe (pytorch/pytorch#137053): 10.3 and 12.7 GB/s, the mean. Those to 16 bits load in vectors
#: from Hopper on (the same, torch 2.6), those to fp32 on AMD (pytorch/pytorch#163869).
_CAST_BYTES_PER_SECOND = 11.5e9
_VECTOR_CASTS: dict[str, tuple[str, ...]] = {
    "hopper": ("bf16", "fp16"),
    "blackwell": ("bf16", "fp16"),
    "cdna2": ("fp32",),
    "cdna3": ("fp32",),
}
_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64), (64, 32), (32, 64), (32, 32))
_SPLITS = (1, 2, 4, 8, 16)
_LEAST_SPLIT = 256
#: cuBLAS on matrices whose rows don't begin at 16 bytes: 107 to 116 of 156 TFLOP/s on an RTX 4090 (pytorch/pytorch#181718).
_UNALIGNED_SHARE = 0.72
_NAME_SHARE = {
    "native_layer_norm_backward": _NORM_BACKWARD_SHARE,
    "_fused_rms_norm_backward": _NORM_BACKWARD_SHARE,
    "native_group_norm": _TWICE_READ_SHARE,
    "native_group_norm_backward": _TWICE_READ_SHARE,
    "embedding_dense_backward": 0.7,  # its sort is counted in its bytes
}
_ELEMENT_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "int8": 1, "fp8": 1}
#: FlashAttention-2 by (backward, width of a head): share of a large matrix product's rate on A100 (230 and 190 TFLOP/s forward, 196 and 170
#: backward of 257; https://arxiv.org/abs/2307.08691, figures 4 to 6), and the most that a multiprocessor reaches with the instructions it
#: uses, as measured on H100's 132 (370, 324, 322, 291 TFLOP/s; https://arxiv.org/abs/2407.08608, figures 5 and 6, 16k tokens, not causal).
_FLASH = {
    (False, 128): (0.89, 370e12 / 132),
    (False, 64): (0.74, 324e12 / 132),
    (True, 128): (0.76, 322e12 / 132),
    (True, 64): (0.66, 291e12 / 132),
}
#: Hopper's tensor cores reach less than their rate by the instructions of those before, which FlashAttention-2 uses: 0.63 (Luo et al.,
#: https://arxiv.org/abs/2402.13499); on H20 it reaches 84 of 142 TFLOP/s (Dao-AILab/flash-attention#1310).
_OLD_INSTRUCTIONS = {"hopper": 0.63}
#: cuDNN's on H100, of a large product's 720 (the same figures): 600 and 413 TFLOP/s forward, 517 and 433 backward.
_CUDNN = {(False, 128): 0.83, (False, 64): 0.57, (True, 128): 0.72, (True, 64): 0.60}
#: xformers' CUTLASS kernel, PyTorch's "efficient" one, beside FlashAttention-2 (FlashAttention-2's figure 4: 100 against 176 TFLOP/s).
_EFFICIENT_SHARE = 0.57
#: Shorter sequences use the kernels less: by L / (L + this), which matches the same figures for 512 to 16k within 3 %.
_HALF_LENGTH = {(False, False): 85, (False, True): 290, (True, False): 250, (True, True): 450}
_WIDE_SHARE = 0.88  # for heads wider than 128, relative to 128 (the same figures)
#: The cost of a convolution's input gather and borders, relative to the equivalent matrix product.
_CONVOLUTION_SHARE = 0.8
#: Winograd's minimal filtering of 3 × 3 convolutions that move by one, which cuDNN uses on cores without matrix units: beside its direct
#: convolution, at batches of 64 ("Fast Algorithms for Convolutional Neural Networks", https://arxiv.org/abs/1509.09308, table 5).
_WINOGRAD_GAIN = 1.48
_WINOGRAD_CHANNELS = 16  # with fewer, transforming the pictures takes longer than it saves
#: For a footprint with only totals: the typical share of a large product's rate, over a transformer's products and what lies between.
_UNKNOWN_SHARE = 0.7


@lru_cache(maxsize=65536)
def kernel_seconds(model: KnownDevice, work: Work) -> float:
    """Seconds of one run of an operation on a GPU that nobody else uses, after it is issued.

    Args:
        work: the operation; ``count`` isn't read.
    """
    if work.kind == "matmul":
        arithmetic = _matmul_seconds(model, work)
    elif work.kind == "attention":
        arithmetic = _attention_seconds(model, work)
    elif work.kind == "convolution":
        arithmetic = _convolution_seconds(model, work)
    elif work.kind == "recurrent":
        arithmetic = _recurrent_seconds(model, work)
    else:
        # Vectors, not matrices: the rate of plain fp32 arithmetic.
        arithmetic = work.flops / model.peak_flops("fp64" if work.dtype == "fp64" else "fp32")
    share = _NAME_SHARE.get(work.name) or _KIND_SHARE.get(work.kind, 1.0)
    moving = memory_seconds(model, work.moved_bytes, share)
    if work.name == "_to_copy" and work.dtype not in _VECTOR_CASTS.get(model.generation, ()):
        moving = max(moving, work.moved_bytes / (_CAST_BYTES_PER_SECOND * model.multiprocessors))
    return KERNEL_SECONDS + max(arithmetic, moving)


def memory_seconds(model: KnownDevice, size_bytes: int, share: float = 1.0) -> float:
    """Seconds to read or write so many bytes of a step's tensors. They always count as memory traffic: a whole step lies between two uses
    of a weight, and forward has saved gigabytes by the time that backward reads them. An operation's input from the one before may be in
    the L2 cache, but no measurement shows a smaller batch to be faster for that: GPT-2 in fp32 on H100 takes 33.2, 31.4, 30.2 and 29.6 ms a
    sample at 4, 8, 16 and 32 of them (``benchmarks/rows/rows.json``, gpt2h100).
    """
    return size_bytes / (model.memory_bytes_per_second * COPY_SHARE * share)


def _cached_seconds(model: KnownDevice, size_bytes: int) -> float:
    """Seconds for so many bytes that are read right after they are written: from the L2 cache if they fit into half of it."""
    if size_bytes > model.l2_bytes / 2:
        return memory_seconds(model, size_bytes)
    return min(memory_seconds(model, size_bytes), size_bytes / (_L2_BYTES_PER_SECOND * model.multiprocessors))


def tiled_seconds(model: KnownDevice, dtype: str, batch: int, m: int, n: int, k: int) -> float:
    """Seconds of a batch of products of an m × k by a k × n matrix, arithmetic alone, with the best of the libraries' tiles. A
    multiprocessor works at its part of the rate that a large product sustains, fetches its operands through L2, fills its pipeline and
    writes its tile. Products with few tiles and a long k are split along k, and the parts added up.
    """
    size = _ELEMENT_BYTES.get(dtype, 4)
    rate = model.sustained_flops(dtype if dtype in ("fp64", "fp32", "tf32", "bf16", "fp16") else "fp16") / model.multiprocessors
    if dtype in ("int8", "fp8"):
        rate *= 2
    if size == 2 and (n % 8 or k % 8):
        rate *= _UNALIGNED_SHARE
    together = _CLUSTER.get(model.generation, 1)
    best = float("inf")
    for rows, columns in _TILES:
        if (rows > 2 * m and rows > 32) or (columns > 2 * n and columns > 32):
            continue
        tiles = batch * ceil(m / rows) * ceil(n / columns)
        step = max(2 * rows * columns / rate, (rows + columns) * size / _L2_BYTES_PER_SECOND / together)  # of k
        write = rows * columns * size / _L2_BYTES_PER_SECOND
        for split in _SPLITS:
            if split > 1 and (k < split * _LEAST_SPLIT or tiles * split > 2 * model.multiprocessors):
                break
            waves = ceil(tiles * split / model.multiprocessors)
            seconds = waves * ceil(k / split) * step + (_FILL_SECONDS + write) * (waves if together == 1 else 1)
            if split > 1:
                seconds += _cached_seconds(model, 2 * 4 * split * batch * m * n)
            best = min(best, seconds)
    return best


def _matmul_seconds(model: KnownDevice, work: Work) -> float:
    """Seconds by its shape; if only FLOPs are known, at a typical share of the rate."""
    if len(work.shape) != 4 or not all(work.shape):
        return work.flops / (_UNKNOWN_SHARE * model.sustained_flops(_known_dtype(work.dtype)))
    batch, m, n, k = work.shape
    return tiled_seconds(model, work.dtype, batch, m, n, k) if work.flops else 0.0


def _attention_seconds(model: KnownDevice, work: Work) -> float:
    """Seconds of a fused kernel, by the width of its heads and the length of its sequences."""
    backward = "backward" in work.name
    dtype = _known_dtype(work.dtype)
    sustained = model.sustained_flops(dtype)
    batch, heads, queries, keys, width = work.shape if len(work.shape) == 5 else (1, 1, 1024, 1024, 64)
    half = dtype in ("bf16", "fp16") and dtype in model.flops
    if half and "cudnn" in work.name:
        narrow, wide = (_CUDNN[backward, size] * sustained for size in (64, 128))
    elif half:
        limit = _OLD_INSTRUCTIONS.get(model.generation, 1.0)
        found = [_FLASH[backward, size] for size in (64, 128)]
        narrow, wide = (min(min(share, limit) * sustained, most * model.multiprocessors) for share, most in found)
        if "efficient" in work.name or model.generation in ("volta", "turing"):
            narrow, wide = narrow * _EFFICIENT_SHARE, wide * _EFFICIENT_SHARE
    else:
        narrow = wide = _EFFICIENT_SHARE * sustained
    # Between the two widths, time a score is linear in the width: the products' part grows with it, the exponential's doesn't.
    slope = (128 / wide - 64 / narrow) / 64
    rate = width / max(width / wide, 64 / narrow + (width - 64) * slope) if width <= 128 else _WIDE_SHARE * wide
    causal = work.name.endswith(".causal")
    flops = work.flops / 2 if causal and queries == keys else work.flops  # tiles above the diagonal are left out
    rate *= keys / (keys + _HALF_LENGTH[backward, causal])
    tiles = batch * heads * ceil(queries / 128) / model.multiprocessors
    return flops / rate * max(1.0, ceil(tiles) / tiles)


def _convolution_seconds(model: KnownDevice, work: Work) -> float:
    """Seconds of the equivalent matrix product; a depthwise convolution uses plain arithmetic and is bound by memory."""
    dtype = _in_library(model, work.dtype)
    if len(work.shape) != 6 or not all(work.shape):
        return work.flops / (_UNKNOWN_SHARE * _CONVOLUTION_SHARE * model.sustained_flops(_known_dtype(dtype)))
    batch, inputs, outputs, positions, kernel, groups = work.shape
    if groups > 1 and inputs // groups <= 4:
        return max(work.flops / model.sustained_flops("fp32"), memory_seconds(model, work.moved_bytes, 0.5))
    m, n, k = batch * positions, max(1, outputs // groups), max(1, inputs // groups) * kernel
    product = 2 * groups * m * n * k
    k = ceil(k / 8) * 8  # cuDNN pads the channels
    seconds = tiled_seconds(model, dtype, groups, m, ceil(n / 8) * 8, k) / _CONVOLUTION_SHARE
    seconds *= max(1.0, work.flops / product)
    if dtype == "fp32" and kernel == 9 and groups == 1 and min(inputs, outputs) >= _WINOGRAD_CHANNELS and _moves_by_one(work):
        seconds /= _WINOGRAD_GAIN
    if dtype in ("tf32", "bf16", "fp16") and dtype in model.flops and "channels_last" not in work.name:
        # Tensor cores need channels last: input and output are transposed, each read and written.
        seconds += memory_seconds(model, 2 * (work.moved_bytes - work.fixed_bytes))
    return seconds


def _moves_by_one(work: Work) -> bool:
    """Whether a convolution's input has as many positions as its output, by the bytes of the two."""
    batch, inputs, outputs, positions, *_ = work.shape
    size = _ELEMENT_BYTES.get(work.dtype, 4) * batch
    return (work.moved_bytes - work.fixed_bytes) / size - outputs * positions < 1.5 * inputs * positions


def _recurrent_seconds(model: KnownDevice, work: Work) -> float:
    """Seconds of the inputs' products of all steps at once, and of the states' step by step, each a kernel that waits for the last."""
    dtype = _in_library(model, work.dtype)
    if len(work.shape) != 5 or not all(work.shape):
        return work.flops / (_UNKNOWN_SHARE * model.sustained_flops(_known_dtype(dtype)))
    steps, batch, inputs, states, layers = work.shape
    gates = max(1, round(work.flops / (2 * steps * batch * states * layers * (inputs + states))))  # rows of the weights, in states
    together = tiled_seconds(model, dtype, 1, steps * batch, gates * states, inputs)
    one = KERNEL_SECONDS + tiled_seconds(model, dtype, 1, batch, gates * states, states)
    return layers * (together + steps * one)


def _in_library(model: KnownDevice, dtype: str) -> str:
    """The type in which cuDNN computes: it may use TF32 for fp32 (``torch.backends.cudnn.allow_tf32`` is true, unlike that of products)."""
    return "tf32" if dtype == "fp32" and "tf32" in model.flops else dtype


def _known_dtype(dtype: str) -> str:
    """The dtype whose rate counts."""
    return dtype if dtype in ("fp64", "fp32", "tf32", "bf16", "fp16") else "fp16" if dtype in ("int8", "fp8") else "fp32"


#: About a T4, so that an unknown GPU, a MIG instance, say, isn't preferred to a known one.
UNKNOWN_GPU = catalogue.KNOWN_DEVICES["T4-16GB"]
#: Eager PyTorch, by the operation that a footprint counts: its own Python, dispatch, allocation and autograd's record, and its share of
#: views and the modules' Python, which aren't counted. Measured with tensors so small that nothing is computed, torch 2.13 on one core of
#: an AMD EPYC: BERT, GPT-2 and Llama of Hugging Face and two plain transformers take 18 to 28 µs in forward, 8 to 15 in backward, where
#: there is no Python, and 4 in an update. ``cudaLaunchKernel`` takes 3 more. A rough rule: hosts differ by a factor of two, and SAM 2 on an
#: A6000's host needs 45 µs a kernel (facebookresearch/sam2#768).
_GPU_ISSUE_SECONDS: Mapping[Phase, float] = {"forward": 26e-6, "backward": 15e-6, "optimizer": 10e-6}
_CPU_ISSUE_SECONDS = 5e-6
_CPU_FLOPS_PER_THREAD = 30e9  # fp32 matrix products of one core with AVX2
_CPU_FLOPS_SHARE = {"fp64": 0.5, "bf16": 0.25, "fp16": 0.1, "int8": 0.5}  # relative to fp32, without units for them
_CPU_BYTES_PER_SECOND = 10e9
_CPU_MATMUL_SHARE = {"matmul": 1.0, "attention": 0.5, "convolution": 0.6, "recurrent": 0.5}
_CPU_VECTOR_FLOPS = 2e9  # of one core, in operations other than products
#: The share of PCIe's rate that a copy from pinned memory reaches: 55.4 of 63 GB/s on 8 H200 (https://github.com/stas00/ml-engineering,
#: network/README.md, 744d01e); 12 to 13 of 15.75 on PCIe 3.
_PINNED_SHARE = 0.85
_COPY_LATENCY_SECONDS = 10e-6
#: DeepSpeed's CPU-Adam: 1 billion parameters in 0.22 s on two 24-core Xeon Platinum 8168 with AVX512 and OpenMP ("ZeRO-Offload:
#: Democratizing Billion-Scale Model Training", https://arxiv.org/abs/2101.06840, table 4).
_HOST_ADAM_SECONDS = 0.22e-9
#: NCCL's kernels take multiprocessors, memory and power from kernels that compute at the same time: 18.9 % of their speed in the mean over
#: A100, H100 and MI250 ("Characterizing Compute-Communication Overlap in GPU-Accelerated Distributed Deep Learning",
#: https://arxiv.org/abs/2507.03114).
_GPU_OVERLAP = 1 - 0.189
_CPU_OVERLAP = 0.0  # gloo's copies run on the cores that compute
_LOOP_SECONDS = 1e-3  # the trainer's loop, callbacks and loggers
_RANK_SECONDS = 0.5e-3  # hooks, sampler and the wait for the slowest, in every rank of a plan with several
_ADAM_BYTES = 28  # of an element: parameter and two moments both ways, and the gradient
#: Measured as calibration does on CPU devices, two cores, AMD EPYC. Assumed of a GPU's host, which runs the same Python; what it launches
#: for NCCL instead of gloo is unmeasured. A call of the trainer's loop, by how many it makes; a unit's two hooks forward, two backward, and
#: the collectives that they issue; of a pipeline's action, replaying the step up to its stage, and meeting the neighbour.
_PYTHON_SECONDS: Mapping[Python, float] = {"call": 0.5e-6, "unit": 0.2e-3, "action": 0.9e-3}
#: GPUs of one model differ by their power and heat: products take 8 % longer on the slow than on the fast ones of a cluster, in the mean
#: over five clusters ("Not All GPUs Are Created Equal", https://arxiv.org/abs/2208.11035). That is assumed to be the range between the
#: whiskers of a box plot, without outliers, which for a normal distribution is 5.4 standard deviations.
_DEVICE_SPREAD = 0.08 / 5.4


@lru_cache(maxsize=1024)
def _expected_largest(count: int) -> float:
    """The expected largest of so many draws from a normal distribution, in standard deviations (Blom, "Statistical Estimates", 1958)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


class DataSheet(Rates):
    """The catalogue's rates; all objects are equal.

    Args:
        crowded: how many threads there are for each of the host's cores; 1 where they have one each.
    """

    def __init__(self, crowded: float = 1.0) -> None:
        self._crowded = crowded

    @property
    def token(self) -> Hashable:
        """The catalogue is the same for all."""
        return "data sheet", self._crowded

    def among(self, devices: Sequence[Device], inventory: Inventory) -> Rates:
        """CPU devices that use more threads than the host has cores take turns on them."""
        threads = sum(device.threads or 1 for device in devices if device.kind == "cpu")
        crowded = max(1.0, threads / inventory.host_threads) if inventory.host_threads else 1.0
        return self if crowded == self._crowded else DataSheet(crowded)

    def device_class(self, device: Device) -> Hashable:
        """The class: a GPU's model, or a CPU device's threads."""
        return device.kind, device.name, device.threads

    def work_seconds(self, device: Device, work: Work) -> float:
        """One run of an operation, without the host's part."""
        if device.kind == "cpu":
            return self._crowded * self._cpu_seconds(device.threads or 1, work)
        return kernel_seconds(known_model(device) or UNKNOWN_GPU, work)

    def issue_seconds(self, device: Device, phase: Phase = "forward") -> float:
        """What the host needs to issue one operation."""
        return self._crowded * (_CPU_ISSUE_SECONDS if device.kind == "cpu" else _GPU_ISSUE_SECONDS[phase])

    def loop_seconds(self, device: Device, engine: Engine) -> float:
        """The trainer's loop and hooks, and what several ranks add."""
        return _LOOP_SECONDS + (_RANK_SECONDS if loaded(engine).several else 0.0)

    def slowest_of(self, device: Device, count: int) -> float:
        """How much longer the slowest of so many GPUs of one model takes than the one in the middle."""
        return 1.0 if device.kind == "cpu" else 1.0 + _DEVICE_SPREAD * _expected_largest(count)

    def python_seconds(self, device: Device, of: Python) -> float:
        """What a CPU device's host takes, assumed of a GPU's as well."""
        return _PYTHON_SECONDS[of]

    def collective_seconds(self, collective: Collective, size_bytes: int, devices: Sequence[Device], inventory: Inventory) -> float:
        """One collective between ranks on these devices."""
        return collective_seconds(collective, size_bytes, topology(inventory).group(devices))

    def host_copy_seconds(self, device: Device, size_bytes: int) -> float:
        """Between pinned host memory and the device, in one direction; 0 on a CPU device."""
        if device.kind == "cpu" or not size_bytes:
            return 0.0
        model = known_model(device) or UNKNOWN_GPU
        return _COPY_LATENCY_SECONDS + size_bytes / (model.pcie_bytes_per_second * _PINNED_SHARE)

    def host_adam_seconds(self, elements: int, device: Device) -> float:
        """AdamW's update of so many fp32 elements on the host's cores; a CPU device uses its threads, and is bound by memory."""
        if device.kind == "cpu":
            moved = _ADAM_BYTES * elements
            return self.work_seconds(
                device, Work(kind="pointwise", name="_fused_adamw_", dtype="fp32", moved_bytes=moved, fixed_bytes=moved)
            )
        return elements * _HOST_ADAM_SECONDS

    def overlap(self, device: Device) -> float:
        """Which share of computing can hide communication."""
        return _CPU_OVERLAP if device.kind == "cpu" else _GPU_OVERLAP

    @staticmethod
    def _cpu_seconds(threads: int, work: Work) -> float:
        """Seconds on a CPU device: a core's rate times the cores; all of them share memory."""
        if work.kind in _CPU_MATMUL_SHARE:
            rate = _CPU_FLOPS_PER_THREAD * _CPU_FLOPS_SHARE.get(work.dtype, 1.0) * _CPU_MATMUL_SHARE[work.kind]
        else:
            rate = _CPU_VECTOR_FLOPS
        return max(work.flops / (rate * threads), work.moved_bytes / _CPU_BYTES_PER_SECOND)


#: The rates where nothing was measured.
DATA_SHEET = DataSheet()
