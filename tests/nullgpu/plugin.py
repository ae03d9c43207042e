"""What tests on GPUs say about themselves: that they are about the stub, that it can't run them, or that they need two GPUs.

Its hooks are imported by tests/conftest.py. On the stub, what it can't run is counted apart in the closing line, and never reads as a pass.
"""

from __future__ import annotations

import pytest
import torch

from tests.nullgpu import control

NOT_ON_THE_STUB = "not on the stub"
NOT_COMPARED = "not compared"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if item.get_closest_marker("stub") is not None and not control.on_stub():
        pytest.skip("needs the stub")
    beyond = item.get_closest_marker("not_on_stub")
    if beyond is not None and control.on_stub():
        pytest.skip(f"{NOT_ON_THE_STUB}: {beyond.args[0]}")
    if item.get_closest_marker("two_gpus") is not None and torch.cuda.device_count() < 2:
        pytest.skip(f"{NOT_COMPARED}: needs two GPUs")


def pytest_report_teststatus(report: pytest.TestReport | pytest.CollectReport) -> tuple[str, str, str] | None:
    """Kinds of their own in the closing line, beside "passed" and "skipped"."""
    if not report.skipped or not isinstance(report.longrepr, tuple):
        return None
    reason = report.longrepr[2].removeprefix("Skipped: ")
    for kind in (NOT_ON_THE_STUB, NOT_COMPARED):
        if reason.startswith(kind):
            return kind, "n", kind.upper()
    return None
