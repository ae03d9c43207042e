"""A checkpoint written under any engine is an ordinary Lightning checkpoint: every other engine and plain Lightning go on from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conformance.expected import ENGINES, KINDS
from tests.conformance.features import FEATURES
from tests.conformance.harness import TOLERANCES, Difference, Run, compare, compare_leaves, leaves, run, scratch
from tests.conformance.verdict import autopar
from tests.conformance.zoo import ZOO

WRITERS = ("plain", *(engine for engine in ENGINES if engine not in KINDS))
#: Neither shuffled nor with draws, so that going on from a checkpoint is the uninterrupted run: tied weights under AdamW, and BatchNorm.
STEADY: Mapping[str, Mapping[str, Any]] = {"gpt": {"dropout": 0.0}, "resnet": {}}
CHECKPOINT = replace(FEATURES["checkpoint"], data={"shuffle": False})
#: (module, written under, read under); single reads and writes as plain Lightning does, which one module shows.
RESUMES = [
    (name, writer, reader)
    for name in STEADY
    for writer in WRITERS
    for reader in WRITERS
    if not writer == reader == "plain" and (name == "gpt" or "single" not in (writer, reader)) and "pipeline" not in (writer, reader)
] + [("gpt", "pipeline", reader) for reader in ("plain", "fsdp", "pipeline")]
RESUMES += [("gpt", writer, "pipeline") for writer in ("plain", "ddp")]
RESUMES += [("gpt", "zero-3", reader) for reader in ("plain", "zero-2")] + [("resnet", "fsdp", "zero-3 offload")]
#: Those that `make conformance` has alone: another module's on the engines' ways to each other.
LATER = {resume for resume in RESUMES if resume[0] == "resnet" and "plain" not in resume}
#: What is written, by engine and module.
WRITTEN = [(engine, name) for name in STEADY for engine in WRITERS[1:] if engine != "pipeline" or name == "gpt"] + [("zero-3", "gpt")]
HALF = replace(CHECKPOINT, epochs=1)


def strategy(writer: str) -> Any:
    return "auto" if writer == "plain" else autopar(writer)


@cache
def written(writer: str, name: str) -> Path:
    """The last checkpoint of one epoch under ``writer``; run once a session."""
    root = scratch()
    run(ZOO[name], HALF, strategy(writer), root=root, module=STEADY[name])
    return root / "checkpoints" / "last.ckpt"


@cache
def uninterrupted(name: str) -> Run:
    return run(ZOO[name], CHECKPOINT, module=STEADY[name])


def without_position(part: Any) -> dict[str, Any]:
    """Leaves less the loaders' position and random state, for which Lightning has a place that its own DataLoader leaves empty."""
    return {name: value for name, value in leaves(part) if ".combined_loader." not in name}


@pytest.mark.parametrize(("writer", "name"), WRITTEN)
def test_a_checkpoint_is_the_one_that_plain_lightning_writes(writer: str, name: str) -> None:
    ours, theirs = (torch.load(written(who, name), map_location="cpu", weights_only=True) for who in (writer, "plain"))
    assert set(theirs) <= set(ours)
    assert list(ours["state_dict"]) == list(theirs["state_dict"])
    difference = Difference()
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "loops", "global_step", "epoch", "hyper_parameters"):
        compare_leaves(without_position(theirs[part]), without_position(ours[part]), 1e-5, difference, part)
    assert not difference.beyond


@pytest.mark.parametrize(
    ("name", "writer", "reader"),
    [pytest.param(*resume, marks=[pytest.mark.all_cells] if resume in LATER else []) for resume in RESUMES],
)
def test_going_on_under_another_engine_is_the_uninterrupted_run(name: str, writer: str, reader: str, tmp_path: Path) -> None:
    rest = replace(CHECKPOINT, resume_from=written(writer, name))
    resumed = run(ZOO[name], rest, strategy(reader), root=tmp_path, module=STEADY[name])
    assert resumed.observed["trainer.global_step"] == 8
    whole = uninterrupted(name)
    difference = Difference()
    compare_leaves(whole.weights, resumed.weights, 1e-5, difference, "weights")
    shared = {name: value for name, value in whole.observed.items() if "metrics." in name}
    assert shared
    compare_leaves(shared, {name: resumed.observed.get(name) for name in shared}, 1e-5, difference)
    assert not difference.beyond


def test_a_checkpoint_of_one_epoch_is_not_that_of_two() -> None:
    half = torch.load(written("plain", "gpt"), weights_only=True)["state_dict"]
    difference = Difference()
    compare_leaves(uninterrupted("gpt").weights, half, 1e-5, difference)
    assert difference.beyond


def test_resuming_under_plain_lightning_is_the_uninterrupted_run(tmp_path: Path) -> None:
    rest = replace(CHECKPOINT, resume_from=written("plain", "gpt"))
    resumed = run(ZOO["gpt"], rest, root=tmp_path, module=STEADY["gpt"])
    difference = Difference()
    compare_leaves(uninterrupted("gpt").weights, resumed.weights, 0.0, difference)
    assert not difference.beyond
    assert compare(uninterrupted("gpt"), resumed, TOLERANCES["fp32"]).beyond, "a resumed run has fewer rows than a whole one"
