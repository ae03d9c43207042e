"""Bytes beside tensors: known cases, every device of the catalogue, and what the environment says."""

from __future__ import annotations

import dataclasses

import pytest

from lightning_autopar.devices.catalogue import KNOWN_DEVICES
from lightning_autopar.devices.discover import probe
from lightning_autopar.memory.cuda_overhead import (
    _LOADED_BYTES,
    KIB,
    MIB,
    _kind,
    context_bytes,
    cublas_bytes,
    nccl_bytes,
    target_of,
    workspace_bytes,
    workspaces,
)
from lightning_autopar.memory.footprint import Footprint

STEP = Footprint(
    parameters=1,
    trainable_parameters=1,
    batch_size=1,
    parameter_bytes=4,
    gradient_bytes=4,
    optimizer_bytes=8,
    buffer_bytes=0,
    activation_bytes=0,
    temporary_bytes=0,
    input_bytes=0,
    flops=10,
)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("NVIDIA A100-SXM4-80GB", 8192 * KIB + 128 * KIB),
        ("Tesla V100-SXM2-32GB", 8_519_680),
        ("NVIDIA GeForce RTX 4090", 8_519_680),
        ("NVIDIA L4", 8_519_680),
        ("NVIDIA H100 80GB HBM3", 32 * MIB),
        ("NVIDIA H200", 32 * MIB),
        ("NVIDIA B200", 32 * MIB),
        ("NVIDIA GeForce RTX 5090", 32 * MIB),
        ("a GPU of tomorrow", 32 * MIB),
    ],
)
def test_cublas_workspace_by_architecture(name: str, size: int) -> None:
    assert cublas_bytes(name, environment={}) == size


@pytest.mark.parametrize(
    ("config", "size"), [(":4096:8", 32 * MIB), (":16:8", 128 * KIB), (":4096:2:16:8", 8_519_680), ("nonsense", 8_519_680)]
)
def test_cublas_workspace_as_configured(config: str, size: int) -> None:
    assert cublas_bytes("NVIDIA A100-SXM4-40GB", environment={"CUBLAS_WORKSPACE_CONFIG": config}) == size


def test_a_workspace_for_each_thread_that_multiplies() -> None:
    name = "NVIDIA A100-SXM4-40GB"
    assert workspaces(STEP, name, environment={}) == (8_519_680, 8_519_680)
    assert workspace_bytes(dataclasses.replace(STEP, training=False), name, environment={}) == 8_519_680
    assert workspace_bytes(dataclasses.replace(STEP, flops=0), name, environment={}) == 0
    assert workspace_bytes(dataclasses.replace(STEP, streams=1), name, environment={}) == 4 * 8_519_680


@pytest.mark.parametrize("name", KNOWN_DEVICES)
def test_every_known_device_is_told_apart(name: str) -> None:
    """By the name in a spec and by the driver's alike."""
    kind = _kind(name)
    assert all(_kind(other) == kind for other in KNOWN_DEVICES[name].device_names)
    assert kind.processors == KNOWN_DEVICES[name].multiprocessors


@pytest.mark.parametrize(
    ("name", "alike"),
    [
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "H100-80GB"),
        ("NVIDIA A100-SXM-64GB", "A100-80GB"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX4090-24GB"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTXPRO6000-96GB"),
        ("NVIDIA L40G", "L40-48GB"),
    ],
)
def test_a_name_that_the_catalogue_lacks_is_told_by_its_chip(name: str, alike: str) -> None:
    assert _kind(name) == _kind(alike)


@pytest.mark.parametrize(("name", "seen"), [("NVIDIA GeForce RTX 3090", 256), ("NVIDIA RTX 6000 Ada Generation", 426)])
def test_bare_contexts_as_they_were_seen(name: str, seen: int) -> None:
    """Within 5 % of what the sources printed, the kernels loaded later taken off."""
    assert context_bytes(name, environment={}) - _LOADED_BYTES == pytest.approx(seen * MIB, rel=0.05)


def test_contexts_of_data_centre_cards_are_what_was_seen_of_the_newest_driver() -> None:
    assert context_bytes("NVIDIA H200", environment={}) == 742 * MIB
    for name in ("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"):
        assert 600 * MIB <= context_bytes(name, environment={}) <= 750 * MIB
    assert context_bytes("NVIDIA H200", environment={"CUDA_MODULE_LOADING": "EAGER"}) > 1000 * MIB


def test_nccl_by_world_size() -> None:
    assert [nccl_bytes(size) for size in (1, 2, 3, 8)] == [558 * MIB, 544 * MIB, 688 * MIB, 688 * MIB]
    assert nccl_bytes(8, 4, 2) == (2 * 688 + 544) * MIB


@pytest.mark.parametrize(
    ("spec", "target"), [("1xcpu:4GiB", "cpu"), ("1xH100-80GB", "sm90"), ("1xA100-80GB", "cuda"), ("1xB200-180GB", "sm100")]
)
def test_a_step_is_traced_for_the_chip(spec: str, target: str) -> None:
    assert target_of(probe(spec).devices) == target
