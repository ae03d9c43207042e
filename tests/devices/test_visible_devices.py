from __future__ import annotations

import pytest

from lightning_autopar.devices.nvml import cuda_order, visible_uuids

GPUS = ["GPU-aa1", "GPU-aa2", "GPU-b3"]
INSTANCES = ["MIG-aa1", "MIG-c2"]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, GPUS),
        ("", []),
        ("0", ["GPU-aa1"]),
        ("2,0", ["GPU-b3", "GPU-aa1"]),
        (" 1 , 2 ", ["GPU-aa2", "GPU-b3"]),
        ("+1", ["GPU-aa2"]),
        ("1gpu,2ampere", ["GPU-aa2", "GPU-b3"]),
        ("0,-1,2", ["GPU-aa1"]),
        ("0,,2", ["GPU-aa1"]),
        ("0,x,2", ["GPU-aa1"]),
        ("0,3,2", ["GPU-aa1"]),
        ("3", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("1,1", []),
        ("0,3,0", []),
        ("0,GPU-b3", ["GPU-aa1"]),
        ("GPU-b", ["GPU-b3"]),
        ("GPU-b3,GPU-aa2", ["GPU-b3", "GPU-aa2"]),
        ("GPU-b3,0", ["GPU-b3"]),
        ("GPU-b,GPU-aa,GPU-aa1", ["GPU-b3"]),
        ("GPU-aa1,GPU-x,GPU-b", ["GPU-aa1"]),
        ("GPU-b,GPU-b3", []),
        ("MIG-c,MIG-aa1", ["MIG-c2", "MIG-aa1"]),
        ("MIG-x", []),
        ("MIG-c,GPU-b3", ["MIG-c2"]),
    ],
)
def test_visible_uuids(setting: str | None, expected: list[str]) -> None:
    assert visible_uuids(setting, GPUS, INSTANCES) == expected


@pytest.mark.parametrize("setting", ["0", "2,0", " 1 , 2 ", "1gpu,2ampere", "0,-1,2", "0,,2", "0,x,2", "-1", "NoDevFiles", "1,1", "", "x"])
def test_indices_are_read_as_torch_reads_them(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_cuda = pytest.importorskip("torch.cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    assert visible_uuids(setting, GPUS) == [GPUS[index] for index in torch_cuda._parse_visible_devices()]


@pytest.mark.parametrize("setting", ["GPU-b", "GPU-b3,GPU-aa2", "GPU-b3,0", "GPU-b,GPU-aa,GPU-aa1", "GPU-aa1,GPU-x,GPU-b", "GPU-b,GPU-b3"])
def test_uuids_are_read_as_torch_reads_them(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_cuda = pytest.importorskip("torch.cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    ordinals = torch_cuda._transform_uuid_to_ordinals(torch_cuda._parse_visible_devices(), GPUS)
    assert visible_uuids(setting, GPUS) == [GPUS[index] for index in ordinals]


@pytest.mark.parametrize(
    ("order", "expected"), [(None, [1, 3, 2, 0]), ("FASTEST_FIRST", [1, 3, 2, 0]), ("", [1, 3, 2, 0]), ("PCI_BUS_ID", [0, 1, 2, 3])]
)
def test_cuda_order(order: str | None, expected: list[int]) -> None:
    assert cuda_order([(7, 0), (9, 0), (8, 6), (9, 0)], order) == expected
