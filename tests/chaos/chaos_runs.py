"""Runs a variant plainly and through its actions, and compares the two: sample by sample, loss by loss, weight by weight."""

from __future__ import annotations

import csv
import json
import os
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lightning_autopar import AutoParallelStrategy
from lightning_autopar.callbacks.checkpoint_migrate import CheckpointMigrate
from lightning_autopar.plans import ENGINES, Plan
from lightning_autopar.strategies.preparation.decision import Decision
from tests.chaos.chaos_modules import Chaotic, MeanWeights, Variant, loaders, make_trainer
from tests.chaos.chaos_stage import Action, Notes, Stage, Watching, on_stage

#: How far a run whose plan changes may be from a plain one, in any loss.
LOSSES = 1e-5
#: And in any weight: AdamW divides by the root of a small number.
WEIGHTS = 1e-4


@dataclass(kw_only=True)
class Run:
    """What is left of a run.

    Args:
        rows: what its workers wrote, in the order of their generations.
        logged: the CSV file's rows.
        timeline: the agent's; empty of a plain run.
    """

    variant: Variant
    module: Chaotic
    trainer: pl.Trainer
    folder: Path
    rows: list[dict[str, Any]]
    logged: list[dict[str, str]]
    stage: Stage | None = None
    timeline: tuple[Any, ...] = ()


@dataclass(kw_only=True)
class Figures:
    """How far two runs are apart.

    Args:
        loss, weight, logged: the largest differences.
        again: batches that were done again after a failure.
    """

    loss: float = 0.0
    weight: float = 0.0
    logged: float = 0.0
    again: int = 0
    moves: int = 0
    parks: int = 0
    faults: int = 0
    entered: dict[str, int] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)
    struck: dict[str, int] = field(default_factory=dict)
    pauses: list[float] = field(default_factory=list)


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """While open, this variable has this value."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def fit_plainly(variant: Variant, folder: Path, accelerator: str = "cpu") -> Run:
    """The undisturbed run, under plain Lightning."""
    return _fit(variant, folder, "auto", [], accelerator=accelerator)


def fit_with(
    variant: Variant,
    folder: Path,
    actions: Sequence[Action],
    *,
    decisions: dict[Plan, Decision] | None = None,
    devices: str | None = "3xcpu:2GiB",
    migrate: dict[str, Any] | None = None,
    allow: Sequence[Any] = ENGINES,
    watchers: Sequence[Any] = (),
    loud: bool = False,
) -> Run:
    """The same run under autopar, with what happens to it; on the GPUs there are where no devices are named."""
    stage = Stage(actions=list(actions), decisions={} if decisions is None else decisions)
    strategy = AutoParallelStrategy(allow=list(allow), calibrate="off")
    callbacks = [CheckpointMigrate(**{"snapshot_seconds": 0.3, "failures": 6, **(migrate or {})}), Watching(), *watchers]
    named = nullcontext() if devices is None else environment("AUTOPAR_DEVICES", devices)
    with named, on_stage(stage):
        run = _fit(variant, folder, strategy, callbacks, stage, loud=loud, accelerator="gpu" if devices is None else "cpu")
    run.stage = stage
    run.timeline = () if stage.run is None else stage.run.recorder.spans
    return run


def _fit(
    variant: Variant,
    folder: Path,
    strategy: Any,
    callbacks: list[Any],
    stage: Stage | None = None,
    *,
    loud: bool = False,
    accelerator: str = "cpu",
) -> Run:
    folder.mkdir(parents=True, exist_ok=True)
    pl.seed_everything(variant.seed, workers=True, verbose=False)
    module = Chaotic(variant)
    trainer = make_trainer(variant, folder, strategy, [*callbacks, Notes(folder)], accelerator)
    if stage is not None:
        stage.trainer = trainer
    with warnings.catch_warnings():  # which workers inherit
        warnings.simplefilter("ignore")
        if loud:
            warnings.filterwarnings("default", message="autopar:")
        warnings.filterwarnings("error", message="these changes")  # of the run are lost
        trainer.fit(module, *loaders(variant))
    return Run(variant=variant, module=module, trainer=trainer, folder=folder, rows=notes(folder), logged=logged(folder))


def notes(folder: Path) -> list[dict[str, Any]]:
    """All that workers wrote; a last line that was cut off by a kill isn't one."""
    rows = []
    for path in folder.glob("notes-*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                assert line == path.read_text(encoding="utf-8").splitlines()[-1], f"{path} is damaged"
    return rows


def logged(folder: Path) -> list[dict[str, str]]:
    """The CSV logger's rows, of the last version: a run that failed before its first snapshot began anew."""
    found = sorted((folder / "csv").glob("version_*/metrics.csv"))
    with found[-1].open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def compare(plain: Run, run: Run, *, exact: bool = False) -> Figures:
    """That the run was the plain one; how far it is from it.

    Args:
        exact: whether it never ran under another plan than on one device, so that no bit may differ.
    """
    figures, faults = Figures(), 0 if run.stage is None else run.stage.faults
    figures.faults = faults
    compare_batches(plain, run.rows, figures, redone=faults > 0)
    for name, theirs in plain.module.state_dict().items():
        ours = run.module.state_dict()[name]
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), name
        figures.weight = max(figures.weight, float((ours - theirs).abs().max()))
    compare_logged(plain, run.logged, figures)
    _compare_callbacks(plain, run, figures)
    versions = len(list((run.folder / "csv").iterdir()))
    assert versions == 1 or faults, versions
    assert run.trainer.global_step == plain.trainer.global_step
    assert run.trainer.current_epoch == plain.trainer.current_epoch
    for name, bound in (("loss", LOSSES), ("weight", WEIGHTS), ("logged", LOSSES)):
        found = getattr(figures, name)
        assert found <= (0.0 if exact else bound), f"{name} differs by {found}"
    _count(run, figures)
    return figures


def compare_batches(plain: Run, rows: Sequence[dict[str, Any]], figures: Figures, *, redone: bool) -> None:
    """Each batch of the plain run was done, with its samples and its loss; where it was done again, too."""
    expected = {(row["epoch"], row["batch"]): row for row in plain.rows}
    assert len(expected) == len(plain.rows) > 0
    found: dict[tuple[int, int], dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        found[row["epoch"], row["batch"]][row["generation"]].append(row)
    assert found.keys() == expected.keys(), f"lost {sorted(expected.keys() - found.keys())}, more {sorted(found.keys() - expected.keys())}"
    for key, theirs in expected.items():
        wanted = {tuple(sample[:2]): sample[2] for sample in theirs["samples"]}
        whole = []
        for generation, its in found[key].items():
            assert len({row["rank"] for row in its}) == len(its), f"batch {key} was done twice by {generation}"
            seen = {tuple(sample[:2]): sample[2] for row in its for sample in row["samples"]}
            complete = len(its) == its[0]["ranks"]
            assert seen.items() <= wanted.items(), f"batch {key} of {generation} had {seen}, and plainly {wanted}"
            assert not complete or seen == wanted, f"batch {key} of {generation} lacks {wanted.keys() - seen.keys()}"
            for row in its:
                assert row["step"] == theirs["step"], (key, row["step"], theirs["step"])
                assert row["rate"] == theirs["rate"], (key, row["rate"], theirs["rate"])
                figures.loss = max(figures.loss, abs(row["loss"] - theirs["loss"]))
            whole += [generation] * complete
        assert whole, f"batch {key} was never done by all ranks"
        figures.again += len(whole) - 1
        assert redone or len(found[key]) == 1, f"batch {key} was done by {sorted(found[key])}, though nothing failed"


def compare_logged(plain: Run, rows: Sequence[dict[str, str]], figures: Figures) -> None:
    """The same rows in the same order, none lost and none doubled."""
    assert len(rows) == len(plain.logged), f"{len(rows)} rows logged, and plainly {len(plain.logged)}"
    for number, (ours, theirs) in enumerate(zip(rows, plain.logged, strict=True)):
        names = {name for name, value in theirs.items() if value}
        assert {name for name, value in ours.items() if value} == names, f"row {number}: {ours}, and plainly {theirs}"
        for name in names:
            if name in ("step", "epoch"):
                assert ours[name] == theirs[name], f"row {number}: {ours}, and plainly {theirs}"
            figures.logged = max(figures.logged, abs(float(ours[name]) - float(theirs[name])))


def _compare_callbacks(plain: Run, run: Run, figures: Figures) -> None:
    """What the callbacks hold in the end."""

    def one(of: Run, kind: type[Any]) -> Any:
        return next((callback for callback in of.trainer.callbacks if type(callback) is kind), None)  # type: ignore[attr-defined]

    ours, theirs = one(run, EarlyStopping), one(plain, EarlyStopping)
    assert (ours.wait_count, ours.stopped_epoch) == (theirs.wait_count, theirs.stopped_epoch)
    figures.logged = max(figures.logged, abs(float(ours.best_score) - float(theirs.best_score)))
    ours, theirs = one(run, ModelCheckpoint), one(plain, ModelCheckpoint)
    best = {Path(path).name: score for path, score in ours.best_k_models.items()}
    wanted = {Path(path).name: score for path, score in theirs.best_k_models.items()}
    assert best.keys() == wanted.keys(), f"{sorted(best)}, and plainly {sorted(wanted)}"
    files = {path.name for path in (run.folder / "checkpoints").iterdir()}
    assert files == {path.name for path in (plain.folder / "checkpoints").iterdir()}, files
    for name, score in best.items():
        figures.logged = max(figures.logged, abs(float(score) - float(wanted[name])))
    saved, plainly = (
        torch.load(of.folder / "checkpoints" / sorted(files)[0], map_location="cpu", weights_only=True)["state_dict"] for of in (run, plain)
    )
    for name, value in plainly.items():
        figures.weight = max(figures.weight, float((saved[name] - value).abs().max()))
    ours, theirs = one(run, MeanWeights), one(plain, MeanWeights)
    if theirs is not None:
        assert ours.mean.keys() == theirs.mean.keys()
        for name, value in theirs.mean.items():
            figures.weight = max(figures.weight, float((ours.mean[name] - value).abs().max()))
    metrics = {name: float(value) for name, value in plain.trainer.callback_metrics.items()}
    assert run.trainer.callback_metrics.keys() == metrics.keys()
    for name, value in metrics.items():
        figures.logged = max(figures.logged, abs(float(run.trainer.callback_metrics[name]) - value))


def _count(run: Run, figures: Figures) -> None:
    assert run.stage is not None
    for action in run.stage.done:
        if action.what == "fault":
            figures.struck[action.where] = figures.struck.get(action.where, 0) + 1
    spans = run.timeline
    for before, after in pairwise(spans):
        if after.title == "parked":
            figures.parks += 1
        if "a test at batch" in after.reason:
            figures.moves += 1
            figures.left[before.title] = figures.left.get(before.title, 0) + 1
            figures.entered[after.title] = figures.entered.get(after.title, 0) + 1
        if after.pause_seconds is not None:
            figures.pauses.append(after.pause_seconds)
