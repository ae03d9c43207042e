"""The comparison of stub and GPU: what counts as a difference, and that the figures it compares with are there."""

import json

import pytest

from benchmarks import nullgpu_against_gpu as against
from benchmarks.nullgpu_probes import GROUPS


def test_a_difference_is_told_and_what_the_stub_lacks_is_none() -> None:
    stub = {
        "calls": {"item": {"synchronised": 1}, "cpu": {"synchronised": 0}},
        "memory_of_layers": {"lstm": "RuntimeError: no", "linear": [8, 0]},
    }
    gpu = {"calls": {"item": {"synchronised": 1}, "cpu": {"synchronised": 1}}, "memory_of_layers": {"lstm": [5, 0], "linear": [8, 0]}}
    lines, counts = against.compare(stub, gpu)
    assert lines == [
        "calls: cpu: THE STUB LIES: stub {'synchronised': 0}, GPU {'synchronised': 1}",
        "memory_of_layers: lstm: not on the stub (RuntimeError: no); a GPU: [5, 0]",
    ]
    assert counts["calls"] == {"equal": 1, "other": 1, "not on the stub": 0}


def test_only_draws_and_values_may_be_near() -> None:
    assert not against.differs("draws", [0.5], [0.5 + 1e-6])
    assert against.differs("draws", [0.5], [0.5001])
    assert against.differs("memory_of_layers", [512], [513])
    assert against.differs("draws", [1.0, 2.0], [1.0])
    assert against.differs("draws", None, [1.0]), "a probe that the stub wasn't asked"


def test_another_model_of_gpu_is_no_lie() -> None:
    lines, _ = against.compare({"device": {"L2_cache_size": 1}}, {"device": {"L2_cache_size": 2}})
    assert lines == ["device: L2_cache_size: another model: stub 1, GPU 2"]


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1", "2.13.0", "2.15.0+cu130"])
def test_there_are_figures_to_compare_with(version: str) -> None:
    figures = json.loads(against.nearest(version).read_text())
    assert figures["stub"]
    assert set(figures["probes"]) == set(GROUPS)
