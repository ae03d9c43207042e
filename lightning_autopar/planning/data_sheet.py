"""Rates by data sheet: the catalogue's peaks, and what kernels reach of them in practice. It measures nothing.

A GPU that the catalogue doesn't know counts as a slow one. Of CPU devices only a rough rule is known, which calibration replaces.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from statistics import NormalDist

from lightning_autopar.memory import catalogue
from lightning_autopar.memory.inventory import Device, Inventory
from lightning_autopar.memory.work import Work
from lightning_autopar.planning.collectives import collective_seconds, known_model, topology
from lightning_autopar.planning.rates import Collective, Phase, Rates
from lightning_autopar.planning.timing_kernels import kernel_seconds
from lightning_autopar.plans import Engine

#: About a T4, so that a GPU of which nothing is known, a MIG instance, say, isn't preferred to a known one.
UNKNOWN_GPU = catalogue.KNOWN_DEVICES["T4-16GB"]
#: Eager PyTorch, by the operation that a footprint counts: its own Python, dispatch, allocation and autograd's record, and its part of what
#: isn't counted, views and the modules' Python. Measured with tensors so small that nothing is computed, torch 2.13 on one core of an AMD
#: EPYC: BERT, GPT-2 and Llama of Hugging Face and two plain transformers take 18 to 28 µs in forward, 8 to 15 in backward, where there is
#: no Python, and 4 in an update. ``cudaLaunchKernel`` takes 3 more. A rough rule: hosts differ by a factor of two, and SAM 2 on an A6000's
#: host needs 45 µs a kernel (facebookresearch/sam2#768).
_GPU_ISSUE_SECONDS: Mapping[Phase, float] = {"forward": 26e-6, "backward": 15e-6, "optimizer": 10e-6}
_CPU_ISSUE_SECONDS = 5e-6
_CPU_FLOPS_PER_THREAD = 30e9  # fp32 matrix products of one core with AVX2
_CPU_FLOPS_SHARE = {"fp64": 0.5, "bf16": 0.25, "fp16": 0.1, "int8": 0.5}  # beside fp32, without units for them
_CPU_BYTES_PER_SECOND = 10e9
_CPU_MATMUL_SHARE = {"matmul": 1.0, "attention": 0.5, "convolution": 0.6, "recurrent": 0.5}
_CPU_VECTOR_FLOPS = 2e9  # of one core, in operations other than products
#: Of PCIe's rate, what a copy out of pinned memory reaches: 55.4 of 63 GB/s on 8 H200 (https://github.com/stas00/ml-engineering,
#: network/README.md, 744d01e); 12 to 13 of 15.75 on PCIe 3.
_PINNED_SHARE = 0.85
_COPY_LATENCY_SECONDS = 10e-6
#: DeepSpeed's CPU-Adam: 1 billion parameters in 0.22 s on two 24-core Xeon Platinum 8168 with AVX512 and OpenMP ("ZeRO-Offload:
#: Democratizing Billion-Scale Model Training", https://arxiv.org/abs/2101.06840, table 4).
_HOST_ADAM_SECONDS = 0.22e-9
#: NCCL's kernels take multiprocessors, memory and power from those that compute beside them: 18.9 % of their speed in the mean over A100,
#: H100 and MI250 ("Characterizing Compute-Communication Overlap in GPU-Accelerated Distributed Deep Learning",
#: https://arxiv.org/abs/2507.03114).
_GPU_OVERLAP = 1 - 0.189
_CPU_OVERLAP = 0.0  # gloo's copies run on the cores that compute
_LOOP_SECONDS = 1e-3  # the trainer's loop, callbacks and loggers
_RANK_SECONDS = 0.5e-3  # hooks, sampler and the wait for the slowest, in every rank of a plan with several
_ACTION_SECONDS = 0.9e-3  # replaying the step up to its stage, meeting the neighbour: measured as calibration does, two cores, AMD EPYC
_ADAM_BYTES = 28  # of an element: parameter and two moments both ways, and the gradient
_CALL_SECONDS = 0.5e-6  # of the trainer's loop, by how many it makes: measured as calibration does, AMD EPYC
_UNIT_SECONDS = 0.2e-3  # two hooks forward, two backward, and the collectives that they issue
#: GPUs of one model differ by their power and heat: products take 8 % longer on the slow than on the fast ones of a cluster, in the mean
#: over five clusters ("Not All GPUs Are Created Equal", https://arxiv.org/abs/2208.11035). That is taken for the range between the whiskers
#: of a box plot, outliers left out, which of a normal distribution is 5.4 standard deviations.
_DEVICE_SPREAD = 0.08 / 5.4


@lru_cache(maxsize=1024)
def _expected_largest(count: int) -> float:
    """Of so many draws from a normal distribution the largest, in standard deviations (Blom, "Statistical Estimates", 1958)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


class DataSheet(Rates):
    """The catalogue's rates; one object is as good as another.

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
        """CPU devices that want more threads than the host has cores take turns on them."""
        threads = sum(device.threads or 1 for device in devices if device.kind == "cpu")
        crowded = max(1.0, threads / inventory.host_threads) if inventory.host_threads else 1.0
        return self if crowded == self._crowded else DataSheet(crowded)

    def device_class(self, device: Device) -> Hashable:
        """By model; of a CPU device by its threads."""
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
        return _LOOP_SECONDS + (0.0 if engine == "single" else _RANK_SECONDS)

    def unit_seconds(self, device: Device) -> float:
        """What the hooks of one unit of FSDP cost the host in one step."""
        return _UNIT_SECONDS

    def slowest_of(self, device: Device, count: int) -> float:
        """How much longer the slowest of so many GPUs of one model takes than the one in the middle."""
        return 1.0 if device.kind == "cpu" else 1.0 + _DEVICE_SPREAD * _expected_largest(count)

    def call_seconds(self, device: Device) -> float:
        """A call in a framework's Python."""
        return _CALL_SECONDS

    def action_seconds(self, device: Device) -> float:
        """Of a CPU device; a GPU's host runs ahead, by how much wasn't measured."""
        return _ACTION_SECONDS if device.kind == "cpu" else 0.0

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
        """AdamW's update of so many fp32 elements on the host's cores; a CPU device has its threads, and is bound by what it goes over."""
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
        """A core's rate times the cores; memory is what all of them share."""
        if work.kind in _CPU_MATMUL_SHARE:
            rate = _CPU_FLOPS_PER_THREAD * _CPU_FLOPS_SHARE.get(work.dtype, 1.0) * _CPU_MATMUL_SHARE[work.kind]
        else:
            rate = _CPU_VECTOR_FLOPS
        return max(work.flops / (rate * threads), work.moved_bytes / _CPU_BYTES_PER_SECOND)
