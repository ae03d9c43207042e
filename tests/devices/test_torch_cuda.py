from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lightning_autopar.devices import torch_cuda as torchcuda
from lightning_autopar.devices.torch_cuda import read_devices

GIB = 2**30
Run = Callable[[Sequence[str], float], "subprocess.CompletedProcess[str]"]


def answer(stdout: str = "", stderr: str = "", status: int = 0) -> Run:
    return lambda arguments, timeout_seconds: subprocess.CompletedProcess(list(arguments), status, stdout, stderr)


def found(devices: list[dict[str, Any]], peers: list[list[int]], notes: Sequence[str] = ()) -> str:
    return torchcuda._MARK + json.dumps({"devices": devices, "peers": peers, "notes": list(notes)})


def device(index: int, uuid: str, name: str = "NVIDIA A40") -> dict[str, Any]:
    return {"index": index, "name": name, "uuid": uuid, "free_bytes": 3 * GIB, "total_bytes": 4 * GIB}


def test_devices_and_links() -> None:
    text = "a library's chatter\n" + found([device(0, "abc"), device(2, "GPU-def"), device(3, "", "new")], [[0, 2]], ["1 is left out"])
    devices, links, notes = read_devices(run=answer(text))
    assert [(each.id, each.kind, each.index, each.free_bytes, each.total_bytes) for each in devices] == [
        ("GPU-abc", "cuda", 0, 3 * GIB, 4 * GIB),
        ("GPU-def", "cuda", 2, 3 * GIB, 4 * GIB),
        ("cuda:3", "cuda", 3, 3 * GIB, 4 * GIB),
    ]
    assert [(link.a, link.b, link.kind) for link in links] == [
        ("GPU-abc", "GPU-def", "p2p"),
        ("GPU-abc", "cuda:3", "host"),
        ("GPU-def", "cuda:3", "host"),
    ]
    assert links[0].bytes_per_second == pytest.approx(31.5e9, rel=1e-3)
    assert links[1].bytes_per_second is None
    assert notes[0] == "1 is left out"
    assert "CUDA context" in notes[1]


def test_a_failure_is_noted_with_its_last_line() -> None:
    assert read_devices(run=answer(stderr="Traceback\nRuntimeError: CUDA driver error\n", status=1)) == (
        (),
        (),
        ("torch.cuda failed (RuntimeError: CUDA driver error), so no GPU is known",),
    )
    assert "exit status 0" in read_devices(run=answer("nothing"))[2][0]


def test_a_child_that_hangs_or_cannot_start_is_noted() -> None:
    def hang(arguments: Sequence[str], timeout_seconds: float) -> subprocess.CompletedProcess[str]:
        raise subprocess.TimeoutExpired(list(arguments), timeout_seconds)

    def missing(arguments: Sequence[str], timeout_seconds: float) -> subprocess.CompletedProcess[str]:
        raise FileNotFoundError("no python")

    assert "didn't answer within 120 s" in read_devices(run=hang)[2][0]
    assert "no python" in read_devices(run=missing)[2][0]


FAKE_TORCH = """
import types
class _Cuda:
    def device_count(self): return 3
    def get_device_properties(self, index): return types.SimpleNamespace(name="NVIDIA A40", uuid=f"u{index}")
    def mem_get_info(self, index):
        if index == 1: raise RuntimeError("CUDA error: busy\\nmore")
        return (5, 9)
    def can_device_access_peer(self, a, b): return True
cuda = _Cuda()
"""


def test_the_childs_program(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run for real, with a small module in torch's place."""
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    devices, links, notes = read_devices()
    assert [(each.id, each.free_bytes, each.total_bytes) for each in devices] == [("GPU-u0", 5, 9), ("GPU-u2", 5, 9)]
    assert [(link.a, link.b, link.kind) for link in links] == [("GPU-u0", "GPU-u2", "p2p")]
    assert notes[0] == "CUDA device 1 can't be read (CUDA error: busy) and is left out"


@pytest.mark.gpu
def test_nvml_and_cuda_agree_on_this_machine() -> None:
    import torch

    from lightning_autopar.devices import nvml

    before = torch.cuda.is_initialized()
    by_nvml = {each.index: each for each in nvml.read_devices()[0]}
    by_torch = {each.index: each for each in read_devices()[0]}
    assert {index: each.id for index, each in by_nvml.items()} == {index: each.id for index, each in by_torch.items()}
    for index, each in by_torch.items():
        assert by_nvml[index].total_bytes == pytest.approx(each.total_bytes, rel=0.01)
        assert by_nvml[index].free_bytes == pytest.approx(each.free_bytes, abs=2 * GIB)
    assert torch.cuda.is_initialized() == before, "reading makes no context"
