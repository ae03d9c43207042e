"""The same cells on GPUs: two, or as many as a plan has, against plain Lightning on one. docs/features_cuda.md shows their outcomes.

A part of them runs with `make test-cuda`, all with `make conformance-cuda`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benchmarks.machine import machine
from lightning_autopar import _clean_process
from tests.conformance.devices import GPUS, composed_attention
from tests.conformance.expected import CELLS, ENGINES, Cell, expected, not_on_the_stub, refusal
from tests.conformance.features import PLAIN
from tests.conformance.harness import ROWS, Run
from tests.conformance.pinned import PINNED
from tests.conformance.verdict import CUDA_RESULTS, Verdict, judge, keep
from tests.conformance.verdict import reference as plain_run
from tests.conformance.zoo import ZOO
from tests.fresh import fresh
from tests.nullgpu.control import on_stub

pytestmark = [pytest.mark.gpu, pytest.mark.two_gpus, pytest.mark.timeout(400)]  # two runs or three, each with a bound of its own

#: Of each engine a few, which `make test-cuda` has.
QUICK = {
    "gpt-plain-single",
    "metrics-plain-ddp",
    "gan-plain-fsdp",
    "gpt-checkpoint-fsdp",
    "metrics-plain-pipeline",
    "gpt-plain-zero-3",
    "configure-model-plain-zero-3",
    "encoder-decoder-plain-fsdp-offload",
    "masked-tokens-plain-ddp",
}


def marks(cell: Cell) -> list[Any]:
    reason = not_on_the_stub(cell)
    later = [] if cell.id in QUICK else [pytest.mark.all_cells]
    return later if reason is None else [*later, pytest.mark.not_on_stub(reason)]


def needed_devices(cell: Cell) -> int:
    pinned = PINNED.get(cell.feature)
    return max(2, ENGINES[cell.engine] if pinned is None else pinned.plans[cell.engine].world_size)


def needed_rows(cell: Cell) -> set[str]:
    """The features that the cell is held against."""
    row = PLAIN.name if cell.feature in PINNED else cell.feature
    return {row} if ROWS[row].numbers == "fp32" else {row, PLAIN.name}


@cache
def reference(case: str, row: str) -> Run:
    return fresh(run_plain, case, row)


def run_plain(case: str, row: str) -> Run:
    composed_attention()
    return replace(plain_run(case, row, GPUS), strategy=None)


def judged(cell: Cell, root: Path, expected_runs: dict[tuple[str, str], Run]) -> tuple[Verdict, int]:
    """The verdict, and how many processes the run has left behind."""
    composed_attention()
    verdict = judge(cell, root, GPUS, lambda case, row, devices: expected_runs[case, row])
    if _clean_process._process is not None:  # a second fit's, kept for planning until this process ends
        _clean_process._process.end()
    return verdict, len(psutil.Process().children(recursive=True))


@cache
def run_on() -> dict[str, Any]:
    """When, on what and with what a cell is run."""
    found = machine()
    gpus = f"{'stub ' if on_stub() else ''}{torch.cuda.get_device_name()}"
    return {"date": found["date"][:10], "machine": {**found["machine"], "gpus": gpus}, "versions": found["versions"]}


@pytest.mark.parametrize("cell", [pytest.param(cell, id=cell.id, marks=marks(cell)) for cell in CELLS])
def test_cell(cell: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if cell.engine.startswith("zero"):
        pytest.importorskip("deepspeed")
    needed = needed_devices(cell)
    if on_stub():
        monkeypatch.setenv("NULLGPU_DEVICES", str(needed))
    elif torch.cuda.device_count() < needed:
        pytest.skip(f"not compared: needs {needed} GPUs")
    runs = {(cell.case, row): reference(cell.case, row) for row in needed_rows(cell)}
    verdict, left = fresh(judged, cell, tmp_path, runs)
    assert verdict.outcome == expected(cell), f"{cell.id} came to {verdict}"
    if verdict.outcome == "refused":
        assert (refusal(cell) or "") in verdict.reason
    assert left == 0, f"{cell.id} left {left} processes behind"
    keep(cell.id, verdict, CUDA_RESULTS, run_on())


@pytest.mark.stub
@pytest.mark.parametrize("case", [name for name in ZOO if not_on_the_stub(Cell(case=name, feature=PLAIN.name, engine="single"))])
def test_what_is_not_on_the_stub_fails_there_under_plain_lightning(case: str) -> None:
    with pytest.raises(RuntimeError):
        reference(case, PLAIN.name)
