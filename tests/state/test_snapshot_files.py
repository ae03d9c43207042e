"""Tensors of any kind come back from a snapshot's files as they were, also from files that were written over."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from lightning_autopar.state.snapshot import PlainReader, PlainWriter
from lightning_autopar.state.snapshot_folder import provide, set_aside, spare_bytes

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:The given buffer is not writable")


def save(state: dict[str, Any], folder: Path, spare: Path) -> None:
    dcp.save(state, storage_writer=PlainWriter(folder, spare), no_dist=True)


def load(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    dcp.load(state, storage_reader=PlainReader(folder), no_dist=True)
    return state


def kinds() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "float32": torch.randn(5, 3),
        "bfloat16": torch.randn(7).bfloat16(),
        "float16": torch.randn(3).half(),
        "float8": torch.randn(9).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False, True]),
        "int8": torch.arange(-3, 4, dtype=torch.int8),
        "uint64": torch.tensor([2**63], dtype=torch.uint64),
        "complex": torch.randn(4, dtype=torch.complex64),
        "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
        "a number": torch.tensor(3.5),
        "nothing": torch.empty(0, 4),
        "transposed": torch.randn(4, 6).t(),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "a part": torch.randn(100)[10:20],
        "expanded": torch.randn(1, 5).expand(3, 5),
        "sentence": "no tensor",
    }


def room(state: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.empty_like(value) if isinstance(value, Tensor) else "" for name, value in state.items()}


def same(found: dict[str, Any], state: dict[str, Any]) -> bool:
    return all(torch.equal(found[name], value) if isinstance(value, Tensor) else found[name] == value for name, value in state.items())


def test_every_kind_comes_back(tmp_path: Path) -> None:
    state = kinds()
    save(state, tmp_path / "s", tmp_path / "spare")
    found = load(room(state), tmp_path / "s")
    assert same(found, state)
    assert found["a part"].dtype == torch.float32
    assert found["float8"].dtype == torch.float8_e4m3fn


def test_a_tensor_with_a_form_of_its_own_comes_back(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {"quantized": torch.quantize_per_tensor(torch.randn(4, 3), 0.1, 0, torch.qint8)}
        save(state, tmp_path / "s", tmp_path / "spare")
        empty = {"quantized": torch.quantize_per_tensor(torch.zeros(4, 3), 0.1, 0, torch.qint8)}
        assert torch.equal(load(empty, tmp_path / "s")["quantized"].dequantize(), state["quantized"].dequantize())


def test_files_of_another_snapshot_are_written_over_and_cut(tmp_path: Path) -> None:
    spare = tmp_path / "spare"
    save({"long": torch.randn(10_000)}, tmp_path / "s1", spare)
    (file,) = (tmp_path / "s1").glob("*.distcp")
    before = file.stat().st_ino
    set_aside(tmp_path / "s1", spare)
    assert spare_bytes(spare) == 40_000
    state = kinds()
    save(state, tmp_path / "s2", spare)
    (file,) = (tmp_path / "s2").glob("*.distcp")
    assert (file.stat().st_ino, spare_bytes(spare)) == (before, 0)
    assert file.stat().st_size < 10_000
    assert same(load(room(state), tmp_path / "s2"), state)


def test_the_nearest_file_is_taken_and_a_short_one_grows(tmp_path: Path) -> None:
    spare = tmp_path / "spare"
    provide(spare, [100, 5_000, 90_000])
    assert spare_bytes(spare) == 95_100
    save({"a": torch.arange(1_500.0)}, tmp_path / "s", spare)
    assert sorted(file.stat().st_size for file in spare.iterdir()) == [100, 90_000]
    assert torch.equal(load({"a": torch.zeros(1_500)}, tmp_path / "s")["a"], torch.arange(1_500.0))


def test_what_is_set_aside_replaces_what_was(tmp_path: Path) -> None:
    spare = tmp_path / "spare"
    for name, length in (("s1", 100), ("s2", 200)):
        save({"a": torch.zeros(length)}, tmp_path / name, tmp_path / "none")
    set_aside(tmp_path / "s1", spare)
    set_aside(tmp_path / "s2", spare)
    assert spare_bytes(spare) == 800


def test_no_room_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        provide(tmp_path / "spare", [10 * free.f_blocks * free.f_frsize])
    assert spare_bytes(tmp_path / "spare") == 0
    assert [file.name for file in tmp_path.iterdir()] == ["spare"]


def test_a_part_of_a_tensor_is_read_from_the_whole(tmp_path: Path) -> None:
    from lightning_autopar.state.flat_parts import Fragment

    whole = torch.arange(12.0).view(4, 3)
    save({"w": whole}, tmp_path / "s", tmp_path / "spare")
    flat = torch.zeros(5)
    load({"w": Fragment(flat, shape=(4, 3), start=4)}, tmp_path / "s")
    assert torch.equal(flat, whole.reshape(-1)[4:9])
