"""What CUDA's libraries and driver take beside tensors. Arithmetic on a device's name: imports no torch, asks no device.

Workspaces of cuBLAS come from torch's allocator, and so count as allocated; the CUDA context and NCCL's buffers lie outside of it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from lightning_autopar.devices.catalogue import KNOWN_DEVICES, KnownDevice, find_by_device_name
from lightning_autopar.devices.inventory import Device
from lightning_autopar.memory.footprint import Footprint

MIB = 1 << 20
KIB = 1 << 10

#: The kind of device: a CPU, a GPU, or one of Hopper or data-centre Blackwell, on which attention tries cuDNN first.
Target = Literal["cpu", "cuda", "sm90", "sm100"]


class _Kind(NamedTuple):
    """A GPU's chip, as far as it matters here.

    Args:
        major: of its compute capability; 0 for AMD's.
        processors: streaming multiprocessors (compute units of AMD's).
    """

    major: int
    processors: int


_MAJOR = {"maxwell": 5, "pascal": 6, "volta": 7, "turing": 7, "ampere": 8, "ada": 8, "hopper": 9, "cdna2": 0, "cdna3": 0}
#: Chips that the catalogue lacks, from their makers' data sheets.
_OTHERS = {"gb300": _Kind(10, 160), "b300": _Kind(10, 160), "mi250": _Kind(0, 104)}
#: For an unknown device: the largest.
_UNKNOWN = _Kind(9, 148)

#: Bare CUDA contexts as they were seen: 256 MiB on 82 multiprocessors (RTX 3090, https://github.com/invoke-ai/InvokeAI/issues/9413),
#: 426 MiB on 142 (RTX 6000 Ada, torch 2.10, https://github.com/unslothai/unsloth-zoo/pull/1053): the driver reserves for each of them.
_CONTEXT_BYTES_A_PROCESSOR = 3 * MIB
#: Kernels of torch, cuBLAS and cuDNN that a step loads as it needs them (``CUDA_MODULE_LOADING=LAZY``, the default from CUDA 12.2 on).
#: Measured on an H200 with driver 580 and CUDA 13: context and kernels together take 742 MiB in every plan of one device. With CUDA 12
#: others saw 400 to 600 MiB from A100 to H200; of these the larger counts, as no plan may run out of memory.
_LOADED_BYTES = 346 * MIB
#: All of them, loaded at once: "over 1000 MB" (https://github.com/pytorch/pytorch/issues/107667).
_LOADED_EAGERLY_BYTES = 1000 * MIB

#: A communicator of two GPUs, and of more, as they were seen on A100s with NVLink (https://github.com/NVIDIA/nccl/issues/964). It grows
#: with the number of channels, so links that are slower take less (https://github.com/NVIDIA/nccl/issues/864).
_NCCL_PAIR_BYTES = 544 * MIB
_NCCL_BYTES = 688 * MIB
#: That of one rank alone, as FSDP2 with offload makes it on one GPU; measured on an H200.
_NCCL_ALONE_BYTES = 558 * MIB


def workspaces(footprint: Footprint, device_name: str, *, environment: Mapping[str, str] | None = None) -> tuple[int, ...]:
    """Sizes of the workspaces that cuBLAS keeps from its first product on, one for each thread that multiplies, and for each stream.

    Forward runs in the caller's thread, backward in one of autograd's own; each has its handle, and each handle a workspace for each stream
    (``setWorkspaceForHandle``, aten/src/ATen/cuda/CublasHandlePool.cpp, torch 2.13). cuBLASLt shares it. A step that multiplies nothing
    has none.

    Args:
        device_name: as the driver or a spec names it; an unknown one counts as the largest.
        environment: has ``CUBLAS_WORKSPACE_CONFIG``; by default this process's.
    """
    if not footprint.flops:
        return ()
    size = cublas_bytes(device_name, environment=environment)
    return (size,) * (1 + footprint.training) * (1 + footprint.streams)


def workspace_bytes(footprint: Footprint, device_name: str, *, environment: Mapping[str, str] | None = None) -> int:
    """The sum of :func:`workspaces`."""
    return sum(workspaces(footprint, device_name, environment=environment))


def cublas_bytes(device_name: str, *, environment: Mapping[str, str] | None = None) -> int:
    """A handle's workspace (``parseChosenWorkspaceSize``): 8.125 MiB, 32 MiB from Hopper on.

    AMD's libraries don't share it: 128 MiB of hipBLAS and 76 MiB of hipBLASLt on MI300.
    """
    return _cublas_bytes(device_name, (os.environ if environment is None else environment).get("CUBLAS_WORKSPACE_CONFIG", ""))


@lru_cache(maxsize=256)
def _cublas_bytes(device_name: str, config: str) -> int:
    kind = _kind(device_name)
    pairs = re.findall(r":([0-9]+):([0-9]+)", config)
    if pairs:
        return sum(int(size) * int(count) for size, count in pairs) * KIB
    if not kind.major:
        return (128 + 76) * MIB
    return 32 * MIB if kind.major in (9, 10, 12) else 2 * 4096 * KIB + 8 * 16 * KIB


def context_bytes(device_name: str, *, environment: Mapping[str, str] | None = None) -> int:
    """What a process holds on the device besides tensors: the CUDA context and the kernels loaded into it.

    Args:
        device_name: as the driver or a spec names it; an unknown one counts as the largest.
        environment: has ``CUDA_MODULE_LOADING``; by default this process's.
    """
    eager = (os.environ if environment is None else environment).get("CUDA_MODULE_LOADING", "").upper() == "EAGER"
    return _kind(device_name).processors * _CONTEXT_BYTES_A_PROCESSOR + (_LOADED_EAGERLY_BYTES if eager else _LOADED_BYTES)


def target_of(devices: Sequence[Device]) -> Target:
    """The target of a trace: the first GPU of these devices; a CPU where there is none."""
    name = next((device.name for device in devices if device.kind != "cpu"), None)
    if name is None:
        return "cpu"
    chips: dict[int, Target] = {9: "sm90", 10: "sm100"}
    return chips.get(_kind(name).major, "cuda")


def nccl_bytes(*sizes: int) -> int:
    """NCCL's buffers on each device, for communicators of so many devices, which share nothing."""
    return sum({1: _NCCL_ALONE_BYTES, 2: _NCCL_PAIR_BYTES}.get(size, _NCCL_BYTES) for size in sizes)


def _of(model: KnownDevice) -> _Kind:
    blackwell = 10 if model.nvlink_links else 12  # of data centres, and of workstations
    return _Kind(_MAJOR.get(model.generation, blackwell), model.multiprocessors)


@lru_cache(maxsize=256)
def _kind(device_name: str) -> _Kind:
    """The chip of a name such as ``"NVIDIA H100 80GB HBM3"`` or ``"H100-80GB-PCIe"``; of one that the catalogue doesn't list, by the
    longest name of a chip in it.
    """
    if (model := KNOWN_DEVICES.get(device_name) or find_by_device_name(device_name)) is not None:
        return _of(model)
    words = " ".join(re.findall(r"[a-z0-9]+", device_name.lower()))
    chips = _OTHERS | {name.partition("-")[0].lower(): _of(known) for name, known in KNOWN_DEVICES.items()}
    found = [chip for chip in chips if re.search(rf"\b{' ?'.join(chip)}(?!\d)", words)]
    return chips[max(found, key=len)] if found else _UNKNOWN
