"""Catalogue: known GPUs as data. Reads no device; what a machine really has is the inventory's business.

Peak rates are the makers' data-sheet figures for dense arithmetic (a sheet's "with sparsity" figure halved) with fp32
accumulation; bandwidths are those of one direction. ``total_bytes`` is what CUDA reports for the card
(``torch.cuda.get_device_properties(i).total_memory``, as out-of-memory messages show it), which is less than the sheet's
number: the driver keeps a part, and cards with inline ECC another.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_TERA = 1e12
_GIGA = 1e9

#: Bytes per second and lane, in one direction, by PCIe generation, after line coding.
PCIE_LANE_BYTES_PER_SECOND: Mapping[int, float] = MappingProxyType({1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9})
_PCIE_X16 = {generation: 16 * rate for generation, rate in PCIE_LANE_BYTES_PER_SECOND.items()}


@dataclass(frozen=True, kw_only=True)
class KnownDevice:
    """One GPU model.

    Args:
        name: its name in a spec, ``"H100-80GB"``.
        aliases: other names that a spec may use; one that several models share is ambiguous.
        device_names: the names that the driver gives it, lower case; a device's name matches if it is one of them.
        total_bytes: memory as CUDA reports it.
        flops: peak floating-point operations per second, a multiply-add counting two, by dtype: ``"fp32"``, ``"tf32"``,
            ``"bf16"``, ``"fp16"``. A dtype that its matrix units don't know is absent.
        memory_bytes_per_second: bandwidth of its memory.
        nvlink_bytes_per_second: NVLink (Infinity Fabric on AMD) of all its links together, one direction; None without.
        nvlink_links: how many links that is.
        pcie_bytes_per_second: PCIe, one direction.
        source: where the figures come from.
    """

    name: str
    aliases: tuple[str, ...] = ()
    device_names: tuple[str, ...] = ()
    total_bytes: int
    flops: Mapping[str, float]
    memory_bytes_per_second: float
    nvlink_bytes_per_second: float | None = None
    nvlink_links: int = 0
    pcie_bytes_per_second: float
    source: str

    def peak_flops(self, dtype: str) -> float:
        """Peak rate of a dtype; one that the matrix units don't know runs at the rate of fp32.

        Raises:
            ValueError: if the dtype is none of ``"fp32"``, ``"tf32"``, ``"bf16"``, ``"fp16"``.
        """
        if dtype not in ("fp32", "tf32", "bf16", "fp16"):
            raise ValueError(f"there is no peak rate for dtype {dtype!r}; choose one of fp32, tf32, bf16, fp16")
        return self.flops.get(dtype, self.flops["fp32"])


def _known(
    name: str,
    gib: float,
    *,
    teraflops: tuple[float, float | None, float | None, float],
    memory_gigabytes: float,
    nvlink: tuple[int, float] | None = None,
    pcie: int,
    aliases: str = "",
    device_names: tuple[str, ...],
    source: str,
) -> KnownDevice:
    """A row as a data sheet has it: (fp32, tf32, bf16, fp16) in TFLOP/s, GB/s, (links, GB/s a link), PCIe generation."""
    rates = {dtype: rate * _TERA for dtype, rate in zip(("fp32", "tf32", "bf16", "fp16"), teraflops, strict=True) if rate is not None}
    return KnownDevice(
        name=name,
        aliases=tuple(aliases.split()),
        device_names=device_names,
        total_bytes=int(gib * 2**30),
        flops=MappingProxyType(rates),
        memory_bytes_per_second=memory_gigabytes * _GIGA,
        nvlink_bytes_per_second=nvlink[0] * nvlink[1] * _GIGA if nvlink else None,
        nvlink_links=nvlink[0] if nvlink else 0,
        pcie_bytes_per_second=_PCIE_X16[pcie],
        source=source,
    )


_HOPPER = "NVIDIA H100 Tensor Core GPU data sheet"
_HOPPER_PAPER = "NVIDIA H100 Tensor Core GPU Architecture white paper"
_H200 = "NVIDIA H200 Tensor Core GPU data sheet"
_A100 = "NVIDIA A100 Tensor Core GPU data sheet"
_V100 = "NVIDIA V100 Tensor Core GPU data sheet"
_P100 = "NVIDIA Tesla P100 data sheet"
_ADA = "NVIDIA Ada GPU Architecture white paper"
_GA102 = "NVIDIA Ampere GA102 GPU Architecture white paper"

#: Every known model, by its name in a spec.
KNOWN_DEVICES: Mapping[str, KnownDevice] = MappingProxyType({
    device.name: device
    for device in (
        _known("B200-180GB", 178.35, teraflops=(75.0, 1125.0, 2250.0, 2250.0), memory_gigabytes=8000, nvlink=(18, 50), pcie=5,
               aliases="B200", device_names=("nvidia b200",), source="NVIDIA HGX B200 data sheet, an eighth of the board"),
        _known("H200-141GB", 139.8, teraflops=(66.9, 494.7, 989.4, 989.4), memory_gigabytes=4800, nvlink=(18, 25), pcie=5,
               aliases="H200 H200-SXM", device_names=("nvidia h200",), source=_H200),
        _known("H200-141GB-NVL", 139.8, teraflops=(60.0, 417.5, 835.5, 835.5), memory_gigabytes=4800, nvlink=(18, 25), pcie=5,
               aliases="H200-NVL", device_names=("nvidia h200 nvl",), source=_H200),
        _known("H100-80GB", 79.1, teraflops=(66.9, 494.7, 989.4, 989.4), memory_gigabytes=3350, nvlink=(18, 25), pcie=5,
               aliases="H100 H100-SXM H100-80GB-SXM", device_names=("nvidia h100 80gb hbm3",), source=_HOPPER_PAPER),
        _known("H100-80GB-PCIe", 79.1, teraflops=(51.2, 378.0, 756.0, 756.0), memory_gigabytes=2000, nvlink=(12, 25), pcie=5,
               aliases="H100 H100-PCIe", device_names=("nvidia h100 pcie",), source=_HOPPER_PAPER),
        _known("H100-94GB", 93.0, teraflops=(60.0, 417.5, 835.5, 835.5), memory_gigabytes=3938, nvlink=(12, 25), pcie=5,
               aliases="H100 H100-NVL H100-94GB-NVL", device_names=("nvidia h100 nvl",), source=_HOPPER),
        _known("A100-80GB", 79.15, teraflops=(19.5, 156.0, 312.0, 312.0), memory_gigabytes=2039, nvlink=(12, 25), pcie=4,
               aliases="A100 A100-SXM-80GB A100-80GB-SXM", device_names=("nvidia a100-sxm4-80gb", "a100-sxm4-80gb"), source=_A100),
        _known("A100-80GB-PCIe", 79.15, teraflops=(19.5, 156.0, 312.0, 312.0), memory_gigabytes=1935, nvlink=(12, 25), pcie=4,
               aliases="A100-PCIe A100-PCIe-80GB", device_names=("nvidia a100 80gb pcie", "nvidia a100-pcie-80gb"), source=_A100),
        _known("A100-40GB", 39.39, teraflops=(19.5, 156.0, 312.0, 312.0), memory_gigabytes=1555, nvlink=(12, 25), pcie=4,
               aliases="A100 A100-SXM-40GB A100-40GB-SXM", device_names=("nvidia a100-sxm4-40gb", "a100-sxm4-40gb"), source=_A100),
        _known("A100-40GB-PCIe", 39.39, teraflops=(19.5, 156.0, 312.0, 312.0), memory_gigabytes=1555, nvlink=(12, 25), pcie=4,
               aliases="A100-PCIe A100-PCIe-40GB", device_names=("nvidia a100-pcie-40gb", "a100-pcie-40gb"), source=_A100),
        _known("A40-48GB", 44.35, teraflops=(37.4, 74.8, 149.7, 149.7), memory_gigabytes=696, nvlink=(4, 14.0625), pcie=4,
               aliases="A40", device_names=("nvidia a40",), source="NVIDIA A40 data sheet"),
        _known("A10-24GB", 21.99, teraflops=(31.2, 62.5, 125.0, 125.0), memory_gigabytes=600, pcie=4,
               aliases="A10", device_names=("nvidia a10",), source="NVIDIA A10 data sheet"),
        _known("A10G-24GB", 22.06, teraflops=(31.5, 35.0, 70.0, 70.0), memory_gigabytes=600, pcie=4,
               aliases="A10G", device_names=("nvidia a10g",), source="NVIDIA A10G data sheet"),
        _known("A6000-48GB", 47.53, teraflops=(38.7, 77.4, 154.8, 154.8), memory_gigabytes=768, nvlink=(4, 14.0625), pcie=4,
               aliases="A6000 RTXA6000 RTX-A6000", device_names=("nvidia rtx a6000",), source=_GA102),
        _known("RTX6000Ada-48GB", 47.5, teraflops=(91.1, 182.1, 364.2, 364.2), memory_gigabytes=960, pcie=4,
               aliases="RTX6000Ada RTX-6000-Ada", device_names=("nvidia rtx 6000 ada generation",), source=_ADA),
        _known("L40S-48GB", 44.4, teraflops=(91.6, 183.0, 362.0, 362.0), memory_gigabytes=864, pcie=4,
               aliases="L40S", device_names=("nvidia l40s",), source="NVIDIA L40S data sheet"),
        _known("L40-48GB", 44.4, teraflops=(90.5, 90.5, 181.0, 181.0), memory_gigabytes=864, pcie=4,
               aliases="L40", device_names=("nvidia l40",), source="NVIDIA L40 data sheet"),
        _known("L4-24GB", 22.03, teraflops=(30.3, 60.0, 121.0, 121.0), memory_gigabytes=300, pcie=4,
               aliases="L4", device_names=("nvidia l4",), source="NVIDIA L4 data sheet"),
        _known("V100-32GB", 31.74, teraflops=(15.7, None, None, 125.0), memory_gigabytes=900, nvlink=(6, 25), pcie=3,
               aliases="V100 V100-SXM-32GB", device_names=("tesla v100-sxm2-32gb", "tesla v100-sxm3-32gb"), source=_V100),
        _known("V100-16GB", 15.77, teraflops=(15.7, None, None, 125.0), memory_gigabytes=900, nvlink=(6, 25), pcie=3,
               aliases="V100 V100-SXM-16GB", device_names=("tesla v100-sxm2-16gb",), source=_V100),
        _known("V100-32GB-PCIe", 31.74, teraflops=(14.0, None, None, 112.0), memory_gigabytes=900, pcie=3,
               aliases="V100-PCIe V100-PCIe-32GB", device_names=("tesla v100-pcie-32gb",), source=_V100),
        _known("V100-16GB-PCIe", 15.77, teraflops=(14.0, None, None, 112.0), memory_gigabytes=900, pcie=3,
               aliases="V100-PCIe V100-PCIe-16GB", device_names=("tesla v100-pcie-16gb",), source=_V100),
        _known("P100-16GB", 15.89, teraflops=(10.6, None, None, 21.2), memory_gigabytes=732, nvlink=(4, 20), pcie=3,
               aliases="P100 P100-SXM-16GB", device_names=("tesla p100-sxm2-16gb",), source=_P100),
        _known("P100-16GB-PCIe", 15.89, teraflops=(9.3, None, None, 18.7), memory_gigabytes=732, pcie=3,
               aliases="P100-PCIe", device_names=("tesla p100-pcie-16gb",), source=_P100),
        _known("T4-16GB", 14.74, teraflops=(8.1, None, None, 65.0), memory_gigabytes=320, pcie=3,
               aliases="T4", device_names=("tesla t4", "nvidia t4"), source="NVIDIA T4 data sheet"),
        _known("RTX5090-32GB", 31.36, teraflops=(104.8, 104.8, 209.5, 209.5), memory_gigabytes=1792, pcie=5,
               aliases="RTX5090 5090 RTX-5090", device_names=("nvidia geforce rtx 5090",),
               source="NVIDIA RTX Blackwell GPU Architecture white paper"),
        _known("RTX4090-24GB", 23.64, teraflops=(82.6, 82.6, 165.2, 165.2), memory_gigabytes=1008, pcie=4,
               aliases="RTX4090 4090 RTX-4090", device_names=("nvidia geforce rtx 4090",), source=_ADA),
        _known("RTX3090-24GB", 23.69, teraflops=(35.6, 35.6, 71.0, 71.0), memory_gigabytes=936, nvlink=(4, 14.0625), pcie=4,
               aliases="RTX3090 3090 RTX-3090", device_names=("nvidia geforce rtx 3090",), source=_GA102),
        _known("MI300X-192GB", 191.98, teraflops=(163.4, 653.7, 1307.4, 1307.4), memory_gigabytes=5300, nvlink=(7, 64), pcie=5,
               aliases="MI300X", device_names=("amd instinct mi300x", "amd instinct mi300x oam"),
               source="AMD Instinct MI300X Accelerator data sheet"),
    )
})  # fmt: skip


def _key(name: str) -> str:
    """Spelling that doesn't matter: case, blanks and underscores."""
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

    A MIG instance is no such model (it has a part of its rates), so it isn't found.
    """
    return _DEVICE_NAMES.get(" ".join(name.split()).casefold())
