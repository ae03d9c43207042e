"""Hands a run's loggers to its next generation before anything else, so that they go on with the same experiment.

Knows loggers' experiments and Lightning's CSV files; nothing else of what is handed over.
"""

from __future__ import annotations

import csv
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers import CSVLogger

from lightning_autopar.state.objects.survey import Part
from lightning_autopar.state.objects.unpacking import put
from lightning_autopar.strategies.processes.handover import run_objects as pristine
from lightning_autopar.strategies.processes.handover.carried_files import CarriedObjects, read, unpacking_of, warn_of, write
from lightning_autopar.strategies.processes.handover.run_objects import PLAIN, RunObjects

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_autopar.strategies.processes.handover.results import Before

_LOGGERS = "carried_loggers"


def write_loggers(things: RunObjects, folder: Path) -> None:
    """Write what differs of the loggers, after they have written what they can't keep."""
    survey, trainer = things.survey, things.trainer
    paths = [path for path in map(things.path, trainer.loggers) if path]

    values: dict[Part, tuple[Any, Any]] = {}
    gone: list[Part] = []
    for path in paths:
        its, without = survey.differing(things.names, under=path, reached=False, lazy=True)
        values |= its
        gone += [part for part in without if part not in gone]
    files: dict[int, tuple[int, int, list[str]]] = {}
    parcel = CarriedObjects(data=b"", signature=survey.signature, reached_signature=survey.reached_signature, gone=gone)
    for index, logger in enumerate(trainer.loggers):
        number = survey.number(logger)
        assert number is not None, "loggers are there before the fork"
        experiment = vars(logger).get("_experiment")
        if callable(flush := getattr(experiment, "flush", None)):
            flush()
        if type(logger).__getstate__ is not object.__getstate__:
            # Loggers whose experiment can't be pickled say here by what it is found again (wandb's and Comet's ids).
            state = logger.__getstate__()
            for name, value in state.items() if isinstance(state, dict) else ():
                if name != "_attach_id" and vars(logger).get(name, logger) is not value:  # that one is of a process that is about to end
                    values[number, name] = (value, None)
        parcel.loggers.append(
            (_class_of(logger), _portable(logger, {part: value for (owner, part), (value, _) in values.items() if owner == number}))
        )
        if isinstance(logger, CSVLogger) and experiment is not None and os.path.isfile(experiment.metrics_file_path):
            content = Path(experiment.metrics_file_path).read_bytes()
            files[index] = len(content), content.count(b"\n"), list(experiment.metrics_keys)
    write(parcel, things, values, folder / _LOGGERS, sent={}, extras={"files": files}, digests=False)


def carry_loggers_in(trainer: Trainer, before: Before, folder: Path) -> None:
    """Let the loggers go on with the run that they had; first thing on every rank, before the trainer's function runs.

    Args:
        trainer: as it was before the fork.
        before: the survey of the parent.
        folder: that :func:`write_loggers` wrote into.
    """
    survey = before.survey
    pristine.remember(survey)
    parcel = read(folder / _LOGGERS)
    things = RunObjects(trainer, before).for_loggers()
    first = trainer.global_rank == 0
    if parcel.signature == survey.signature:
        parts = {part for part in parcel.parts if first or part[1] != "_experiment"}
        unpacking = unpacking_of(parcel.data, parcel, things, folder / _LOGGERS, parts)
        payloads, _ = unpacking.load()
        for part in parts:
            put(survey, part, payloads[part])
        for number, attribute in parcel.gone:
            vars(survey.target(number)).pop(attribute, None)
        lost = [*(name for part, name in parcel.kept.items() if part not in parcel.parts), *unpacking.lost]
        if first and lost:
            warn_of(lost)
    else:
        for logger, (kind, its) in zip(trainer.loggers, parcel.loggers, strict=False):
            if _class_of(logger) == kind:
                vars(logger).update({name: pickle.loads(data) for name, data in its.items() if first or name != "_experiment"})
    for logger in trainer.loggers:
        options = vars(logger).get("_wandb_init")
        if isinstance(options, dict) and vars(logger).get("_id"):
            options.update(id=vars(logger)["_id"], resume="allow")
    _, extras = unpacking_of(parcel.extras, parcel, things, folder / _LOGGERS, set()).load()
    for index, where in extras["files"].items() if first else ():
        experiment = vars(trainer.loggers[index]).get("_experiment") if index < len(trainer.loggers) else None
        path = getattr(experiment, "metrics_file_path", None)
        if path is not None:
            _cut(Path(path), *where)


def _class_of(target: Any) -> str:
    return f"{type(target).__module__}.{type(target).__qualname__}"


def _portable(logger: Any, values: Mapping[str, Any]) -> dict[str, bytes]:
    """What of a logger means the same to a process that wasn't forked from the same parent: the run's names, and a CSV file's open rows."""
    its = {
        name: value for name, value in values.items() if type(value) in PLAIN or (isinstance(logger, CSVLogger) and name == "_experiment")
    }
    return {name: pickle.dumps(value) for name, value in its.items()}


def _cut(path: Path, size_bytes: int, lines: int, keys: list[str]) -> None:
    """Take out of a CSV file what was written after the snapshot, by a run that then was lost."""
    if not path.is_file() or path.stat().st_size == size_bytes:
        return
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))[: lines - 1]
    partial = path.with_name(f".{path.name}.part")
    with partial.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=keys, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    partial.replace(path)
