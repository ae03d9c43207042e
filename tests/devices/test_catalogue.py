from __future__ import annotations

import re

import pytest

from lightning_autopar.devices.catalogue import KNOWN_DEVICES, KnownDevice, find, find_by_device_name, sustained_share

GIB = 2**30


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("H100-80GB", "H100-80GB"),
        ("h100-80gb", "H100-80GB"),
        ("H100_PCIe", "H100-80GB-PCIe"),
        ("H100-NVL", "H100-94GB"),
        ("H200", "H200-141GB"),
        ("B200", "B200-180GB"),
        ("A10", "A10-24GB"),
        ("a10g", "A10G-24GB"),
        ("RTX 4090", "RTX4090-24GB"),
        ("3090", "RTX3090-24GB"),
        (" T4 ", "T4-16GB"),
    ],
)
def test_find(name: str, expected: str) -> None:
    assert find(name).name == expected


@pytest.mark.parametrize(("name", "choices"), [("A100", "A100-80GB or A100-40GB"), ("v100", "V100-32GB or V100-16GB")])
def test_an_ambiguous_name_lists_what_it_may_mean(name: str, choices: str) -> None:
    with pytest.raises(ValueError, match=f"{name!r} may be several devices: write {choices}$"):
        find(name)


def test_an_unknown_name_gets_the_closest() -> None:
    with pytest.raises(ValueError, match="no device 'H100-81GB' in the catalogue; did you mean H100-80GB"):
        find("H100-81GB")
    with pytest.raises(ValueError, match="no device 'zzz' in the catalogue; known are B200-180GB, "):
        find("zzz")


@pytest.mark.parametrize(
    ("device_name", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("NVIDIA H100 PCIe", "H100-80GB-PCIe"),
        ("NVIDIA H200", "H200-141GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB-PCIe"),
        ("NVIDIA A10G", "A10G-24GB"),
        ("NVIDIA A10", "A10-24GB"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("NVIDIA GeForce RTX 4090", "RTX4090-24GB"),
        ("NVIDIA GeForce RTX 2080 Ti", "RTX2080Ti-11GB"),
        ("NVIDIA H20", "H20-96GB"),
    ],
)
def test_find_by_device_name(device_name: str, expected: str) -> None:
    found = find_by_device_name(device_name)
    assert found is not None
    assert found.name == expected


@pytest.mark.parametrize("device_name", ["NVIDIA A100-SXM4-40GB MIG 3g.20gb", "NVIDIA GeForce RTX 4090 Laptop GPU", "", "CPU"])
def test_a_lesser_device_is_not_taken_for_the_model(device_name: str) -> None:
    assert find_by_device_name(device_name) is None


@pytest.mark.parametrize("device", KNOWN_DEVICES.values(), ids=lambda device: device.name)
def test_a_row_is_plausible(device: KnownDevice) -> None:
    assert find(device.name) is device
    named_gib = int(re.search(r"-(\d+)GB", device.name)[1])  # type: ignore[index]
    # The name is the sheet's figure, in GB or GiB; CUDA reports less, never more.
    assert 0.87 * named_gib * 1e9 < device.total_bytes <= named_gib * GIB
    assert 5e12 < device.flops["fp32"] <= device.peak_flops("tf32") <= device.peak_flops("fp16")
    assert device.peak_flops("bf16") in (device.flops["fp16"], device.flops["fp32"])
    assert 2e11 < device.memory_bytes_per_second < 1e13
    assert 1.5e10 < device.pcie_bytes_per_second < 7e10
    if device.nvlink_bytes_per_second is None:
        assert device.nvlink_links == 0
    else:
        assert 4e10 < device.nvlink_bytes_per_second < 1e12
        assert device.nvlink_links > 0
    assert 10 < device.multiprocessors < 400
    assert 2**21 < device.l2_bytes < 2**29
    assert 1e11 < device.peak_flops("fp64") <= device.flops["fp32"]
    for dtype in ("fp64", "fp32", "tf32", "bf16", "fp16"):
        # A boost clock beyond the sheet's makes a card of a few per cent more than its sheet says.
        assert 0.3 * device.peak_flops(dtype) < device.sustained_flops(dtype) < 1.2 * device.peak_flops(dtype), dtype
    assert device.source
    assert all(name == name.casefold() for name in device.device_names)


def test_what_the_matrix_units_dont_know_runs_as_fp32() -> None:
    v100 = find("V100-32GB")
    assert "bf16" not in v100.flops
    assert v100.peak_flops("bf16") == v100.peak_flops("fp32") == 15.7e12
    assert v100.peak_flops("fp16") == 125e12
    with pytest.raises(ValueError, match="dtype 'int8'; choose one of fp32"):
        v100.peak_flops("int8")


def test_what_nobody_measured_is_the_median_share_of_the_peak() -> None:
    measured, unmeasured = find("A100-80GB"), find("A30-24GB")
    assert measured.sustained_flops("bf16") == 257e12
    assert unmeasured.sustained_flops("bf16") == pytest.approx(165e12 * sustained_share("bf16"))
    assert 0.6 < sustained_share("bf16") < 1
    assert find("V100-32GB").sustained_flops("bf16") == find("V100-32GB").sustained_flops("fp32")


def test_no_driver_name_belongs_to_two_models() -> None:
    names = [name for device in KNOWN_DEVICES.values() for name in device.device_names]
    assert len(set(names)) == len(names)
