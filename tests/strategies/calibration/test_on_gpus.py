"""Measuring real GPUs: which of them a run measures, how long that takes, and that nothing stays there. Skipped where there are none."""

from __future__ import annotations

import time
import warnings
from pathlib import Path

import pytest
import torch

from lightning_autopar.devices.discover import probe
from lightning_autopar.strategies.calibration import calibration
from lightning_autopar.strategies.calibration.device_curves import Clock
from lightning_autopar.strategies.calibration.idle_devices import may_be_measured
from lightning_autopar.timing.measured_rates import HOST, device_key, group_key
from tests.nullgpu.control import on_stub

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_gpus_are_measured_within_ten_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stub GPUs compute on the host, far slower than a GPU: there each figure may take its time, which on a GPU it mustn't."""
    if on_stub():
        monkeypatch.setitem(calibration._MOST_SECONDS, "cuda", 100.0)
        monkeypatch.setenv("NULLGPU_COMPUTE_BYTES", "65536")
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    monkeypatch.setenv("AUTOPAR_LEDGER", "off")
    inventory = probe()
    idle = [device for device in inventory.devices if may_be_measured(device)]
    if not idle:
        pytest.skip("every GPU is somebody else's")

    monkeypatch.setattr(calibration, "unforkable", lambda: "it is to stay so")  # a new Python measures: this one stays free of CUDA
    begun = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing fails
        found = calibration.calibrate(inventory, progress=False).calibration
    assert time.monotonic() - begun < 25 or on_stub(), "ten seconds, and a new Python's start"
    curves = [(curve.subject, curve.thing, curve.ranks) for curve in found.all()]
    key = device_key(idle[0])
    assert {"matmul/64", "matmul/512", "add", "issue/forward"} <= {thing for subject, thing, _ in curves if subject == key}
    assert {"call", "loop/single", "adam"} <= {thing for subject, thing, _ in curves if subject == HOST}
    alike = [device for device in idle if device_key(device) == key]
    for count in calibration.rank_counts(len(alike))[1:]:
        together = {thing for subject, thing, ranks in curves if (subject, ranks) == (group_key(alike[:count], inventory), count)}
        assert {"all_reduce", "all_gather", "reduce_scatter"} <= together
    assert [device.free_bytes for device in probe().devices] >= [device.free_bytes for device in inventory.devices]


@pytest.mark.skipif(on_stub(), reason="not on the stub: it can't tell time")
def test_what_the_host_takes_to_launch_a_kernel_is_no_part_of_its_time() -> None:
    device = torch.device("cuda", 0)
    tensor = torch.zeros(16, device=device)

    def slowly() -> None:
        until = time.perf_counter() + 2e-4
        while time.perf_counter() < until:
            pass
        tensor.add_(1)

    assert 0 < Clock(device).seconds(slowly, 0.01) < 5e-5
