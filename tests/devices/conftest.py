"""Fixtures of the tests of devices and their memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.fakes.nvml import FakeGpu, FakeNvml


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the machine that runs the tests says which devices there are."""
    for name in ("AUTOPAR_DEVICES", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def install_nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FakeNvml]]:
    """``install_nvml(FakeGpu("GPU-a"), …)`` makes these the machine's GPUs; that the library is shut down is checked at the end."""
    installed = []

    def install(*gpus: FakeGpu, **settings: Any) -> FakeNvml:
        nvml = FakeNvml(*gpus, **settings)
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        installed.append(nvml)
        return nvml

    yield install
    assert [nvml.initialised for nvml in installed] == [0] * len(installed)
