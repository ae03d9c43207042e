"""Tensors that lie in a file without a name, and files that are written without a copy of them in memory."""

from __future__ import annotations

import errno
import os
import zipfile
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from lightning_autopar.state import scratch_files as scratch
from lightning_autopar.state.scratch_files import ScratchFile, hand_back_pages, parameters_in, save_without_copies

SHAPE = (1024, 1024)  # 4 MiB


def private_bytes() -> int:
    return int(psutil.Process().memory_full_info().uss)


def test_tensors_keep_their_values_without_private_pages(tmp_path: Path) -> None:
    before = private_bytes()
    with ScratchFile(tmp_path) as room:
        tensors = [room.tensor(SHAPE, torch.float32).fill_(number) for number in range(8)]
        small = room.tensor((3,), torch.int64).fill_(7)
        none = room.tensor((0, 4), torch.bfloat16)
    assert private_bytes() - before > 24 * 2**20
    hand_back_pages()
    assert private_bytes() - before < 8 * 2**20
    assert [float(tensor.sum()) / tensor.numel() for tensor in tensors] == list(range(8))
    assert (small.tolist(), none.shape) == ([7] * 3, (0, 4))
    assert list(tmp_path.iterdir()) == [], "the file has no name"
    tensors[3].add_(0.5)
    hand_back_pages()
    assert float(tensors[3][0, 0]) == 3.5


def test_a_full_disk_means_ordinary_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with ScratchFile() as room:
        assert float(room.tensor(SHAPE, torch.float32).fill_(2.0)[5, 5]) == 2.0


def test_a_file_is_torchs_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_WINDOW_BYTES", 4 * 2**20)
    with ScratchFile() as room:
        big = room.tensor(SHAPE, torch.float32).normal_()
        saved = {"big": big, "again": big, "half": room.tensor(SHAPE, torch.bfloat16).fill_(1.5), "number": 3}
        path = tmp_path / "new" / "a.ckpt"
        save_without_copies(saved, path)
    for mapped in (False, True):
        loaded = torch.load(path, weights_only=True, mmap=mapped)
        assert torch.equal(loaded["big"], big)
        assert loaded["again"].data_ptr() == loaded["big"].data_ptr()
        assert torch.equal(loaded["half"], torch.full(SHAPE, 1.5, dtype=torch.bfloat16))
    assert zipfile.ZipFile(path).testzip() is None
    torch.save(saved, tmp_path / "b.ckpt")
    assert path.stat().st_size == pytest.approx((tmp_path / "b.ckpt").stat().st_size, rel=1e-3)


def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    save_without_copies({"value": 1}, path)
    with pytest.raises(AttributeError, match="local"):
        save_without_copies({"value": torch.ones(5), "function": lambda: 1}, path)
    assert [each.name for each in tmp_path.iterdir()] == ["a.ckpt"]
    assert torch.load(path, weights_only=True) == {"value": 1}


def test_a_module_is_built_in_the_scratch_with_the_values_that_it_would_have() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(6)), nn.Embedding(2000, 1024), nn.LSTM(512, 512))
        net.register_parameter("own", nn.Parameter(torch.randn(1024, 512)))
        return net

    before = private_bytes()
    with ScratchFile() as room, parameters_in(room):
        built = build()
    assert private_bytes() - before < 12 * 2**20, "of 40 MiB"
    plain = build()
    assert all(torch.equal(one, other) for one, other in zip(built.parameters(), plain.parameters(), strict=True))
    x = torch.randn(2, 3, 512)
    assert torch.equal(built[-1](x)[0], plain[-1](x)[0])  # type: ignore[index]
