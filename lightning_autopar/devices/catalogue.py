"""Catalogue: known GPUs as data. Reads no device; what a machine really has is the inventory's business.

Peak rates are the makers' data-sheet figures for dense arithmetic (a sheet's "with sparsity" figure halved) with fp32
accumulation, in which GeForce cards with tensor cores run at half their rate; bandwidths are those of one direction. ``total_bytes`` is
what CUDA reports for the card (``torch.cuda.get_device_properties(i).total_memory``, as out-of-memory messages show it), which is less than
the sheet's number: the driver keeps a part, and cards with inline ECC another.

``measured`` is the rate that large matrix products were measured to sustain: what clocks and power leave of the peak. From

- https://github.com/zzc0721/torch-performance-test-data (9d82827): ``torch.matmul`` of square matrices by dtype; of 10240, the longest run,
  in which the power limit shows, where the single sizes are published (issues 78, 79, 95, 97, 107, 108, 112, 120, 126, 140, 177, 180, 185),
  else the best of five sizes of the median machine (database.md);
- https://www.thonking.ai/p/strangely-matrix-multiplications: 8192 on A100, of normally distributed numbers;
- https://github.com/pytorch/ao/pull/2427: 8192 on B200;
- "Maximum achievable matmul FLOPS", https://github.com/stas00/ml-engineering, compute/accelerator/README.md (744d01e): GH200, GB200, A100
  80GB PCIe, MI300X, MI325X, the best shape of a search;
- Markidis et al., "NVIDIA Tensor Core Programmability, Performance & Precision" (https://arxiv.org/abs/1803.04014): V100 PCIe;
- where a row's comment says so, from another model with the same chip: in proportion to the multiprocessors, and to the cube root of the
  power limit for each of them, as dynamic power grows with the cube of the clock.

They are rates of one kernel. None was taken from a training run.
"""

from __future__ import annotations

import difflib
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Literal

_TERA = 1e12
_GIGA = 1e9

#: Bytes per second and lane, in one direction, by PCIe generation, after line coding.
PCIE_LANE_BYTES_PER_SECOND: Mapping[int, float] = MappingProxyType({1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9})
_PCIE_X16 = {generation: 16 * rate for generation, rate in PCIE_LANE_BYTES_PER_SECOND.items()}


Generation = Literal["maxwell", "kepler", "pascal", "volta", "turing", "ampere", "ada", "hopper", "blackwell", "cdna2", "cdna3"]

_DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16")


@dataclass(frozen=True, kw_only=True, eq=False)
class KnownDevice:
    """One GPU model; there is one object of each.

    Args:
        name: its name in a spec, ``"H100-80GB"``.
        aliases: other names that a spec may use; one that several models share is ambiguous.
        device_names: the names that the driver gives it, lower case; a device's name matches if it is one of them.
        total_bytes: memory as CUDA reports it.
        flops: peak floating-point operations per second, a multiply-add counting two, by dtype: ``"fp64"``, ``"fp32"``, ``"tf32"``,
            ``"bf16"``, ``"fp16"``. A dtype that its matrix units don't know is absent.
        measured: the measured rate that large matrix products sustain, by dtype; absent where no measurement is known.
        multiprocessors: streaming multiprocessors (compute units on AMD).
        l2_bytes: the cache that all of them share.
        nvlink_bytes_per_second: NVLink (Infinity Fabric on AMD) of all its links together, one direction; None without.
        mesh: whether each link always leads to one other device, so that fewer devices share fewer links (no switch between them).
        pcie_bytes_per_second: PCIe, one direction.
        peer_access: whether the driver lets it read another's memory over PCIe.
        network_bytes_per_second: of the network adapter that each device has for itself in the maker's reference system; None where
            there is no such system.
        source: where the figures come from.
    """

    name: str
    aliases: tuple[str, ...] = ()
    device_names: tuple[str, ...] = ()
    generation: Generation
    total_bytes: int
    flops: Mapping[str, float]
    measured: Mapping[str, float]
    multiprocessors: int
    l2_bytes: int
    memory_bytes_per_second: float
    nvlink_bytes_per_second: float | None = None
    nvlink_links: int = 0
    mesh: bool = False
    pcie_bytes_per_second: float
    peer_access: bool = True
    network_bytes_per_second: float | None = None
    source: str

    def peak_flops(self, dtype: str) -> float:
        """Peak rate of a dtype; one that the matrix units don't know runs at the rate of fp32.

        Raises:
            ValueError: if the dtype is none of ``"fp32"``, ``"tf32"``, ``"bf16"``, ``"fp16"``, ``"fp64"``.
        """
        if dtype not in _DTYPES:
            raise ValueError(f"there is no peak rate for dtype {dtype!r}; choose one of fp32, tf32, bf16, fp16, fp64")
        return self.flops.get(dtype, self.flops["fp32"])

    def sustained_flops(self, dtype: str) -> float:
        """The rate that a large matrix product sustains: measured, or else the peak times the median share that measured models sustain.

        Raises:
            ValueError: if there is no such dtype.
        """
        peak = self.peak_flops(dtype)
        if dtype in self.measured:
            return self.measured[dtype]
        if dtype not in self.flops:  # runs as fp32 does, with casts around it; the driver's emulation of bf16 is slower still
            return self.sustained_flops("fp32")
        return peak * sustained_share(dtype)


@cache
def sustained_share(dtype: str) -> float:
    """The median share of their peak that measured models sustain; for fp64, which nobody measured, that of fp32."""
    shares = [device.measured[dtype] / device.flops[dtype] for device in KNOWN_DEVICES.values() if dtype in device.measured]
    return statistics.median(shares) if shares else sustained_share("fp32")


def _known(
    name: str,
    gib: float,
    *,
    generation: Generation,
    teraflops: tuple[float, float | None, float | None, float],
    measured: tuple[float | None, float | None, float | None, float | None] = (None, None, None, None),
    fp64: float,
    sms: int,
    l2: float,
    memory_gigabytes: float,
    nvlink: tuple[int, float] | None = None,
    mesh: bool = False,
    pcie: int,
    peer_access: bool = True,
    network_gigabits: float | None = None,
    aliases: str = "",
    device_names: tuple[str, ...],
    source: str,
) -> KnownDevice:
    """A row with a data sheet's figures: (fp32, tf32, bf16, fp16) in TFLOP/s, L2 in MiB, GB/s, (links, GB/s a link), PCIe generation."""
    names = ("fp32", "tf32", "bf16", "fp16")
    rates = {dtype: rate * _TERA for dtype, rate in zip(names, teraflops, strict=True) if rate is not None}
    reached = {dtype: rate * _TERA for dtype, rate in zip(names, measured, strict=True) if rate is not None}
    return KnownDevice(
        name=name,
        aliases=tuple(aliases.split()),
        device_names=device_names,
        generation=generation,
        total_bytes=int(gib * 2**30),
        flops=MappingProxyType({**rates, "fp64": fp64 * _TERA}),
        measured=MappingProxyType(reached),
        multiprocessors=sms,
        l2_bytes=int(l2 * 2**20),
        memory_bytes_per_second=memory_gigabytes * _GIGA,
        nvlink_bytes_per_second=nvlink[0] * nvlink[1] * _GIGA if nvlink else None,
        nvlink_links=nvlink[0] if nvlink else 0,
        mesh=mesh,
        pcie_bytes_per_second=_PCIE_X16[pcie],
        peer_access=peer_access,
        network_bytes_per_second=network_gigabits / 8 * _GIGA if network_gigabits else None,
        source=source,
    )


_HOPPER = "NVIDIA H100 Tensor Core GPU data sheet"
_HOPPER_PAPER = "NVIDIA H100 Tensor Core GPU Architecture white paper"
_H200 = "NVIDIA H200 Tensor Core GPU data sheet"
_A100 = "NVIDIA A100 Tensor Core GPU data sheet and Architecture white paper"
_V100 = "NVIDIA V100 Tensor Core GPU data sheet and Volta Architecture white paper"
_P100 = "NVIDIA Tesla P100 data sheet and white paper"
_ADA = "NVIDIA Ada GPU Architecture white paper"
_GA102 = "NVIDIA Ampere GA102 GPU Architecture white paper"
_TURING = "NVIDIA Turing GPU Architecture white paper"
_BLACKWELL_RTX = "NVIDIA RTX Blackwell GPU Architecture white paper"

#: Every known model, by its name in a spec.
KNOWN_DEVICES: Mapping[str, KnownDevice] = MappingProxyType({
    device.name: device
    for device in (
        _known("B200-180GB", 178.35, generation="blackwell", teraflops=(75.0, 1125.0, 2250.0, 2250.0), fp64=37.0,
               measured=(66.2, None, 1420.0, None), sms=148, l2=126, memory_gigabytes=8000, nvlink=(18, 50), pcie=5,
               network_gigabits=400, aliases="B200", device_names=("nvidia b200",),
               source="NVIDIA HGX B200 data sheet, an eighth of the board"),
        _known("GB200-186GB", 184.0, generation="blackwell", teraflops=(80.0, 1250.0, 2500.0, 2500.0), fp64=40.0,
               measured=(None, None, 1822.0, None), sms=152, l2=126, memory_gigabytes=8000, nvlink=(18, 50), pcie=5,
               network_gigabits=400, aliases="GB200", device_names=("nvidia gb200",),
               source="NVIDIA GB200 NVL72 data sheet, a seventy-second of the rack"),
        _known("H200-141GB", 139.8, generation="hopper", teraflops=(66.9, 494.7, 989.4, 989.4), fp64=66.9,
               measured=(49.6, 376.7, 719.7, 668.4), sms=132, l2=50, memory_gigabytes=4800, nvlink=(18, 25), pcie=5,
               network_gigabits=400, aliases="H200 H200-SXM", device_names=("nvidia h200",), source=_H200),
        _known("H200-141GB-NVL", 139.8, generation="hopper", teraflops=(60.0, 417.5, 835.5, 835.5), fp64=60.0,
               sms=132, l2=50, memory_gigabytes=4800, nvlink=(18, 25), pcie=5,
               aliases="H200-NVL", device_names=("nvidia h200 nvl",), source=_H200),
        # 96 GB, on the Grace Hopper superchip; the measured one has 141 GB and 900 W.
        _known("GH200-96GB", 94.5, generation="hopper", teraflops=(66.9, 494.7, 989.4, 989.4), fp64=66.9,
               measured=(None, None, 828.6, None), sms=132, l2=50, memory_gigabytes=4000, nvlink=(18, 25), pcie=5,
               network_gigabits=400, aliases="GH200", device_names=("nvidia gh200 480gb",),
               source="NVIDIA GH200 Grace Hopper Superchip data sheet"),
        _known("H100-80GB", 79.1, generation="hopper", teraflops=(66.9, 494.7, 989.4, 989.4), fp64=66.9,
               measured=(49.6, 376.7, 719.7, 668.4), sms=132, l2=50, memory_gigabytes=3350, nvlink=(18, 25), pcie=5,
               network_gigabits=400, aliases="H100 H100-SXM H100-80GB-SXM", device_names=("nvidia h100 80gb hbm3",),
               source=_HOPPER_PAPER),
        _known("H800-80GB", 79.1, generation="hopper", teraflops=(66.9, 494.7, 989.4, 989.4), fp64=1.0,
               measured=(49.6, 376.7, 719.7, 668.4),  # the chip and power limit of the H100
               sms=132, l2=50, memory_gigabytes=3350, nvlink=(8, 25), pcie=5,
               network_gigabits=400, aliases="H800 H800-SXM", device_names=("nvidia h800",), source="NVIDIA H800 data sheet"),
        _known("H20-96GB", 95.0, generation="hopper", teraflops=(44.0, 74.0, 148.0, 148.0), fp64=1.0,
               measured=(31.9, 71.8, 142.3, 142.1), sms=78, l2=60, memory_gigabytes=4000, nvlink=(18, 25), pcie=5,
               network_gigabits=400, aliases="H20", device_names=("nvidia h20",), source="NVIDIA H20 data sheet"),
        _known("H100-80GB-PCIe", 79.1, generation="hopper", teraflops=(51.2, 378.0, 756.0, 756.0), fp64=51.2,
               measured=(35.8, 225.7, 471.8, 449.7), sms=114, l2=50, memory_gigabytes=2000, nvlink=(12, 25), pcie=5,
               aliases="H100 H100-PCIe", device_names=("nvidia h100 pcie",), source=_HOPPER_PAPER),
        _known("H100-94GB", 93.0, generation="hopper", teraflops=(60.0, 417.5, 835.5, 835.5), fp64=60.0,
               sms=132, l2=50, memory_gigabytes=3938, nvlink=(12, 25), pcie=5,
               aliases="H100 H100-NVL H100-94GB-NVL", device_names=("nvidia h100 nvl",), source=_HOPPER),
        _known("A100-80GB", 79.15, generation="ampere", teraflops=(19.5, 156.0, 312.0, 312.0), fp64=19.5,
               measured=(19.1, None, 257.0, None), sms=108, l2=40, memory_gigabytes=2039, nvlink=(12, 25), pcie=4,
               network_gigabits=200, aliases="A100 A100-SXM-80GB A100-80GB-SXM",
               device_names=("nvidia a100-sxm4-80gb", "a100-sxm4-80gb"), source=_A100),
        _known("A800-80GB", 79.15, generation="ampere", teraflops=(19.5, 156.0, 312.0, 312.0), fp64=19.5,
               measured=(19.1, None, 257.0, None), sms=108, l2=40, memory_gigabytes=2039, nvlink=(8, 25), pcie=4,
               network_gigabits=200, aliases="A800 A800-SXM", device_names=("nvidia a800-sxm4-80gb",), source="NVIDIA A800 data sheet"),
        _known("A100-80GB-PCIe", 79.15, generation="ampere", teraflops=(19.5, 156.0, 312.0, 312.0), fp64=19.5,
               measured=(17.6, None, 252.9, None), sms=108, l2=40, memory_gigabytes=1935, nvlink=(12, 25), pcie=4,
               aliases="A100-PCIe A100-PCIe-80GB", device_names=("nvidia a100 80gb pcie", "nvidia a100-pcie-80gb"), source=_A100),
        _known("A100-40GB", 39.39, generation="ampere", teraflops=(19.5, 156.0, 312.0, 312.0), fp64=19.5,
               measured=(19.1, None, 257.0, None),  # the chip and power limit of the one with 80 GB
               sms=108, l2=40, memory_gigabytes=1555, nvlink=(12, 25), pcie=4, network_gigabits=200,
               aliases="A100 A100-SXM-40GB A100-40GB-SXM", device_names=("nvidia a100-sxm4-40gb", "a100-sxm4-40gb"), source=_A100),
        _known("A100-40GB-PCIe", 39.39, generation="ampere", teraflops=(19.5, 156.0, 312.0, 312.0), fp64=19.5,
               measured=(16.7, 102.1, 211.7, 205.7), sms=108, l2=40, memory_gigabytes=1555, nvlink=(12, 25), pcie=4,
               aliases="A100-PCIe A100-PCIe-40GB", device_names=("nvidia a100-pcie-40gb", "a100-pcie-40gb"), source=_A100),
        _known("A30-24GB", 23.5, generation="ampere", teraflops=(10.3, 82.0, 165.0, 165.0), fp64=10.3,
               sms=56, l2=24, memory_gigabytes=933, nvlink=(4, 25), pcie=4,
               aliases="A30", device_names=("nvidia a30",), source="NVIDIA A30 data sheet"),
        _known("A40-48GB", 44.35, generation="ampere", teraflops=(37.4, 74.8, 149.7, 149.7), fp64=0.585,
               measured=(22.8, 59.4, 122.3, 119.2),  # 84 multiprocessors, 300 W
               sms=84, l2=6, memory_gigabytes=696, nvlink=(4, 14.0625), pcie=4,
               aliases="A40", device_names=("nvidia a40",), source="NVIDIA A40 data sheet"),
        # From the A40: 72 multiprocessors, 150 W.
        _known("A10-24GB", 21.99, generation="ampere", teraflops=(31.2, 62.5, 125.0, 125.0), fp64=0.488,
               measured=(16.3, 42.5, 87.5, 85.3), sms=72, l2=6, memory_gigabytes=600, pcie=4,
               aliases="A10", device_names=("nvidia a10",), source="NVIDIA A10 data sheet"),
        _known("A10G-24GB", 22.06, generation="ampere", teraflops=(31.5, 35.0, 70.0, 70.0), fp64=0.492,
               measured=(22.4, 34.7, 69.5, 69.5), sms=80, l2=6, memory_gigabytes=600, pcie=4,
               aliases="A10G", device_names=("nvidia a10g",), source="NVIDIA A10G data sheet"),
        # From the A40, which has its chip and power limit.
        _known("A6000-48GB", 47.53, generation="ampere", teraflops=(38.7, 77.4, 154.8, 154.8), fp64=0.605,
               measured=(22.8, 59.4, 122.3, 119.2), sms=84, l2=6, memory_gigabytes=768, nvlink=(4, 14.0625), pcie=4,
               aliases="A6000 RTXA6000 RTX-A6000", device_names=("nvidia rtx a6000",), source=_GA102),
        # From the A40: 64 multiprocessors, 230 W.
        _known("RTXA5000-24GB", 23.68, generation="ampere", teraflops=(27.8, 55.6, 111.1, 111.1), fp64=0.434,
               measured=(17.4, 45.3, 93.2, 90.8), sms=64, l2=6, memory_gigabytes=768, nvlink=(4, 14.0625), pcie=4,
               aliases="A5000 RTX-A5000", device_names=("nvidia rtx a5000",), source="NVIDIA RTX A5000 data sheet"),
        _known("RTXA4000-16GB", 15.73, generation="ampere", teraflops=(19.2, 38.3, 76.7, 76.7), fp64=0.3,
               measured=(10.9, 29.9, 55.9, 57.8), sms=48, l2=4, memory_gigabytes=448, pcie=4,
               aliases="A4000 RTX-A4000", device_names=("nvidia rtx a4000",), source="NVIDIA RTX A4000 data sheet"),
        # From the L40S, which has its chip and 350 W instead of 300.
        _known("RTX6000Ada-48GB", 47.5, generation="ada", teraflops=(91.1, 182.1, 364.2, 364.2), fp64=1.42,
               measured=(44.6, None, 255.7, 250.8), sms=142, l2=96, memory_gigabytes=960, pcie=4,
               aliases="RTX6000Ada RTX-6000-Ada", device_names=("nvidia rtx 6000 ada generation",), source=_ADA),
        _known("L40S-48GB", 44.4, generation="ada", teraflops=(91.6, 183.0, 362.0, 362.0), fp64=1.43,
               measured=(46.9, None, 269.2, 264.0), sms=142, l2=96, memory_gigabytes=864, pcie=4,
               aliases="L40S", device_names=("nvidia l40s",), source="NVIDIA L40S data sheet"),
        _known("L40-48GB", 44.4, generation="ada", teraflops=(90.5, 90.5, 181.0, 181.0), fp64=1.41,
               sms=142, l2=96, memory_gigabytes=864, pcie=4,
               aliases="L40", device_names=("nvidia l40",), source="NVIDIA L40 data sheet"),
        _known("L20-48GB", 44.5, generation="ada", teraflops=(59.8, 59.8, 119.5, 119.5), fp64=0.93,
               measured=(35.3, 58.2, 108.0, 106.5), sms=92, l2=96, memory_gigabytes=864, pcie=4,
               aliases="L20", device_names=("nvidia l20",), source="NVIDIA L20 data sheet"),
        _known("L4-24GB", 22.03, generation="ada", teraflops=(30.3, 60.0, 121.0, 121.0), fp64=0.47,
               measured=(11.1, 26.2, 56.9, 52.5), sms=58, l2=48, memory_gigabytes=300, pcie=4,
               aliases="L4", device_names=("nvidia l4",), source="NVIDIA L4 data sheet"),
        _known("V100-32GB", 31.74, generation="volta", teraflops=(15.7, None, None, 125.0), fp64=7.8,
               measured=(14.5, None, None, 89.4), sms=80, l2=6, memory_gigabytes=900, nvlink=(6, 25), pcie=3, network_gigabits=100,
               aliases="V100 V100-SXM-32GB", device_names=("tesla v100-sxm2-32gb", "tesla v100-sxm3-32gb"), source=_V100),
        _known("V100-16GB", 15.77, generation="volta", teraflops=(15.7, None, None, 125.0), fp64=7.8,
               measured=(14.5, None, None, 89.4), sms=80, l2=6, memory_gigabytes=900, nvlink=(6, 25), pcie=3, network_gigabits=50,
               aliases="V100 V100-SXM-16GB", device_names=("tesla v100-sxm2-16gb",), source=_V100),
        _known("V100-32GB-PCIe", 31.74, generation="volta", teraflops=(14.0, None, None, 112.0), fp64=7.0,
               measured=(None, None, None, 83.0), sms=80, l2=6, memory_gigabytes=900, pcie=3,
               aliases="V100-PCIe V100-PCIe-32GB", device_names=("tesla v100-pcie-32gb",), source=_V100),
        _known("V100-16GB-PCIe", 15.77, generation="volta", teraflops=(14.0, None, None, 112.0), fp64=7.0,
               measured=(None, None, None, 83.0), sms=80, l2=6, memory_gigabytes=900, pcie=3,
               aliases="V100-PCIe V100-PCIe-16GB", device_names=("tesla v100-pcie-16gb",), source=_V100),
        _known("P100-16GB", 15.89, generation="pascal", teraflops=(10.6, None, None, 21.2), fp64=5.3,
               measured=(9.49, None, None, 7.16), sms=56, l2=4, memory_gigabytes=732, nvlink=(4, 20), pcie=3, network_gigabits=50,
               aliases="P100 P100-SXM-16GB", device_names=("tesla p100-sxm2-16gb",), source=_P100),
        # In fp16 PyTorch accumulates in fp32, and the chips' fp16 rate is for accumulation in fp16.
        _known("P100-16GB-PCIe", 15.89, generation="pascal", teraflops=(9.3, None, None, 18.7), fp64=4.7,
               measured=(8.56, None, None, 7.73), sms=56, l2=4, memory_gigabytes=732, pcie=3,
               aliases="P100-PCIe", device_names=("tesla p100-pcie-16gb",), source=_P100),
        _known("P40-24GB", 22.38, generation="pascal", teraflops=(11.8, None, None, 11.8), fp64=0.367,
               measured=(10.1, None, None, 10.0), sms=30, l2=3, memory_gigabytes=346, pcie=3,
               aliases="P40", device_names=("tesla p40",), source="NVIDIA Tesla P40 data sheet"),
        _known("M40-24GB", 22.4, generation="maxwell", teraflops=(6.8, None, None, 6.8), fp64=0.2,
               sms=24, l2=3, memory_gigabytes=288, pcie=3,
               aliases="M40", device_names=("tesla m40 24gb",), source="NVIDIA Tesla M40 data sheet"),
        _known("T4-16GB", 14.74, generation="turing", teraflops=(8.1, None, None, 65.0), fp64=0.254,
               measured=(4.4, None, None, 41.9), sms=40, l2=4, memory_gigabytes=320, pcie=3,
               aliases="T4", device_names=("tesla t4", "nvidia t4"), source="NVIDIA T4 data sheet"),
        _known("RTXPRO6000-96GB", 94.97, generation="blackwell", teraflops=(125.0, 251.9, 503.8, 503.8), fp64=1.95,
               measured=(77.0, None, 409.4, 312.8), sms=188, l2=128, memory_gigabytes=1792, pcie=5,
               aliases="RTX-PRO-6000", device_names=("nvidia rtx pro 6000 blackwell server edition",
                                                     "nvidia rtx pro 6000 blackwell workstation edition"),
               source=_BLACKWELL_RTX),
        _known("RTX5090-32GB", 31.36, generation="blackwell", teraflops=(104.8, 104.8, 209.5, 209.5), fp64=1.64,
               measured=(65.2, 122.2, 235.3, 219.1), sms=170, l2=96, memory_gigabytes=1792, pcie=5, peer_access=False,
               aliases="RTX5090 5090 RTX-5090", device_names=("nvidia geforce rtx 5090",), source=_BLACKWELL_RTX),
        _known("RTX4090-24GB", 23.64, generation="ada", teraflops=(82.6, 82.6, 165.2, 165.2), fp64=1.29,
               measured=(51.4, 84.5, 158.5, 156.9), sms=128, l2=72, memory_gigabytes=1008, pcie=4, peer_access=False,
               aliases="RTX4090 4090 RTX-4090", device_names=("nvidia geforce rtx 4090",), source=_ADA),
        _known("RTX4080-16GB", 15.7, generation="ada", teraflops=(48.7, 48.7, 97.5, 97.5), fp64=0.76,
               sms=76, l2=64, memory_gigabytes=716.8, pcie=4, peer_access=False,
               aliases="RTX4080 4080 RTX-4080", device_names=("nvidia geforce rtx 4080",), source=_ADA),
        _known("RTX4070TiSUPER-16GB", 15.7, generation="ada", teraflops=(44.1, 44.1, 88.2, 88.2), fp64=0.69,
               measured=(30.8, 46.2, 91.1, 91.3), sms=66, l2=48, memory_gigabytes=672, pcie=4, peer_access=False,
               aliases="RTX-4070-Ti-SUPER RTX4070TiSUPER", device_names=("nvidia geforce rtx 4070 ti super",),
               source="NVIDIA GeForce RTX 4070 Ti SUPER specifications"),
        _known("RTX3090-24GB", 23.69, generation="ampere", teraflops=(35.6, 35.6, 71.0, 71.0), fp64=0.556,
               measured=(24.8, None, 76.6, 75.6), sms=82, l2=6, memory_gigabytes=936, nvlink=(4, 14.0625), pcie=4, peer_access=False,
               aliases="RTX3090 3090 RTX-3090", device_names=("nvidia geforce rtx 3090",), source=_GA102),
        _known("RTX3080-10GB", 9.77, generation="ampere", teraflops=(29.8, 29.8, 59.5, 59.5), fp64=0.465,
               measured=(21.1, 32.0, 64.7, 64.1), sms=68, l2=5, memory_gigabytes=760, pcie=4, peer_access=False,
               aliases="RTX3080 3080 RTX-3080", device_names=("nvidia geforce rtx 3080",), source=_GA102),
        _known("RTX3060-12GB", 11.76, generation="ampere", teraflops=(12.7, 12.7, 25.5, 25.5), fp64=0.199,
               sms=28, l2=3, memory_gigabytes=360, pcie=4, peer_access=False,
               aliases="RTX3060 3060 RTX-3060", device_names=("nvidia geforce rtx 3060",), source="NVIDIA GeForce RTX 3060 specifications"),
        # With 22 GB where it was measured; the chip is the same.
        _known("RTX2080Ti-11GB", 10.75, generation="turing", teraflops=(13.4, None, None, 53.8), fp64=0.42,
               measured=(13.0, None, None, 58.6), sms=68, l2=5.5, memory_gigabytes=616, pcie=3, peer_access=False,
               aliases="2080Ti RTX-2080-Ti RTX2080Ti", device_names=("nvidia geforce rtx 2080 ti", "geforce rtx 2080 ti"), source=_TURING),
        _known("TITANRTX-24GB", 23.65, generation="turing", teraflops=(16.3, None, None, 130.5), fp64=0.51,
               sms=72, l2=6, memory_gigabytes=672, nvlink=(2, 25), pcie=3, peer_access=False,
               aliases="TITAN-RTX TITANRTX", device_names=("nvidia titan rtx", "titan rtx"), source="NVIDIA TITAN RTX specifications"),
        _known("GTX1080Ti-11GB", 10.91, generation="pascal", teraflops=(11.3, None, None, 11.3), fp64=0.354,
               measured=(10.1, None, None, 9.6), sms=28, l2=2.75, memory_gigabytes=484, pcie=3,
               aliases="1080Ti GTX-1080-Ti", device_names=("nvidia geforce gtx 1080 ti", "geforce gtx 1080 ti"),
               source="NVIDIA GeForce GTX 1080 Ti specifications"),
        _known("MI325X-256GB", 255.98, generation="cdna3", teraflops=(163.4, 653.7, 1307.4, 1307.4), fp64=163.4,
               measured=(None, None, 784.9, None), sms=304, l2=256, memory_gigabytes=6000, nvlink=(7, 64), mesh=True, pcie=5,
               network_gigabits=400, aliases="MI325X", device_names=("amd instinct mi325x",),
               source="AMD Instinct MI325X Accelerator data sheet"),
        # The cache is the Infinity Cache, which all chiplets share.
        _known("MI300X-192GB", 191.98, generation="cdna3", teraflops=(163.4, 653.7, 1307.4, 1307.4), fp64=163.4,
               measured=(None, None, 668.4, None), sms=304, l2=256, memory_gigabytes=5300, nvlink=(7, 64), mesh=True, pcie=5,
               network_gigabits=400, aliases="MI300X", device_names=("amd instinct mi300x", "amd instinct mi300x oam"),
               source="AMD Instinct MI300X Accelerator data sheet"),
        # One of the two dies of the module, which is what PyTorch sees as a device.
        _known("MI250X-64GB", 63.98, generation="cdna2", teraflops=(23.95, None, 191.5, 191.5), fp64=23.95,
               sms=110, l2=8, memory_gigabytes=1638, nvlink=(4, 50), mesh=True, pcie=4, network_gigabits=100,
               aliases="MI250X", device_names=("amd instinct mi250x", "amd instinct mi250x/mi250"),
               source="AMD Instinct MI250X Accelerator data sheet"),
    )
})  # fmt: skip


def _key(name: str) -> str:
    """The name without differences that don't matter: case, blanks and underscores."""
    return re.sub(r"[\s_-]+", "-", name.strip()).casefold()


_NAMES: dict[str, list[KnownDevice]] = {}
for _device in KNOWN_DEVICES.values():
    for _name in (_device.name, *_device.aliases):
        _NAMES.setdefault(_key(_name), []).append(_device)

_DEVICE_NAMES = {name: device for device in KNOWN_DEVICES.values() for name in device.device_names}


def find(name: str) -> KnownDevice:
    """The model of a spec's name (``"H100-80GB"``, ``"h100-pcie"``, ``"T4"``); case doesn't matter.

    Raises:
        ValueError: if no model has that name, naming the closest, or if several have it, naming them.
    """
    found = _NAMES.get(_key(name), [])
    if len(found) > 1:
        choices = " or ".join(device.name for device in found)
        raise ValueError(f"{name!r} may be several devices: write {choices}")
    if found:
        return found[0]
    close = difflib.get_close_matches(_key(name), _NAMES, n=1, cutoff=0.5)
    remedy = f"did you mean {_NAMES[close[0]][0].name}?" if close else f"known are {', '.join(KNOWN_DEVICES)}"
    raise ValueError(f"there is no device {name!r} in the catalogue; {remedy}")


def find_by_device_name(name: str) -> KnownDevice | None:
    """The model of the name that NVML or CUDA gives (``"NVIDIA H100 80GB HBM3"``); None if it isn't known.

    A MIG instance isn't found: it has only a part of a model's rates.
    """
    return _DEVICE_NAMES.get(" ".join(name.split()).casefold())
