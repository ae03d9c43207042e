"""Hands what a generation's workers changed in Python objects to the next generation's workers.

All generations are forked from one unchanged parent, so that the numbers of its survey mean the same in each. The old generation's ranks
write what differs. In the new one the user's ``setup`` and the like have run again, and its ranks take the changes over into their own
objects. Weights, optimizer states, loop counters and the loaders' positions travel elsewhere; references to them become references to the
new generation's own. A rank writes two files: a pickle, and beside it the pickle's tensors and arrays.

Loggers go before anything else, so that they go on with the same experiment.
"""

from __future__ import annotations

import csv
import pickle
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_autopar._lightning import CSVLogger, Trainer
from lightning_autopar.state.objects.contents import ATOMS, dispensable, get_items
from lightning_autopar.state.objects.packing import TensorFile, pack, travels
from lightning_autopar.state.objects.pickles import is_shard
from lightning_autopar.state.objects.survey import LIMIT_BYTES, Changes, Part, Survey, is_under, merged
from lightning_autopar.state.objects.unpacking import Unpacking, put
from lightning_autopar.strategies.processes.handover import run_objects as pristine
from lightning_autopar.strategies.processes.handover.back_to_script import made_whole
from lightning_autopar.strategies.processes.handover.run_objects import DATA, MODULE, PLAIN, SCHEDULERS, RunObjects, not_carried
from lightning_autopar.text import format_bytes

if TYPE_CHECKING:
    from lightning_autopar.strategies.processes.handover.back_to_script import Before


_RANK, _LOGGERS = "carried{}", "carried_loggers"


# -- in the old generation -------------------------------------------------------------------------------------------------------------


def whole_shards(trainer: Trainer, before: Before, rank: int) -> list[tuple[Tensor, Tensor]]:
    """What :func:`made_whole` finds, for :func:`write_objects` on rank 0; every rank calls it."""
    if not any(map(is_shard, trainer.lightning_module.parameters())):
        return []
    with _plain_copies(trainer.strategy):
        return made_whole(trainer.lightning_module, before, RunObjects(trainer, before).names, keep=rank == 0)


def write_objects(trainer: Trainer, before: Before, folder: Path, rank: int, shards: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
    """Write the objects that this rank has changed; every rank calls it between two batches, and then goes on unchanged.

    Args:
        folder: where files go; it exists.
        rank: this rank. Rank 0 writes its state; where a module's stages lie on several ranks, each writes what its stages changed of the
            module.
        shards: of :func:`whole_shards`.
    """
    engine: Any = trainer.strategy
    ranks = getattr(engine, "holders", 1)
    if rank >= ranks:
        return
    things = RunObjects(trainer, before)
    if rank == 0:
        write_loggers(trainer, before, folder)
    found, gone = before.survey.differing(things.names, under=(MODULE,) if rank else None, skip=things.skipped, lazy=True)
    values: dict[Any, tuple[Any, Any]] = {**found, **things.made()}
    extras = things.extras() if rank == 0 else {"buffers": things.buffers()}
    sent = {SCHEDULERS: things.schedulers()} if rank == 0 else {}
    parcel = CarriedObjects(
        data=b"", signature=before.survey.signature, reached_signature=before.survey.reached_signature, ranks=ranks, gone=gone
    )
    parcel.left = sorted(before.left)
    for config in engine.lr_scheduler_configs:
        kind = type(config.scheduler)
        parcel.schedulers.append(kind if "<locals>" not in kind.__qualname__ else None)
    with _plain_copies(engine):
        write(parcel, things, values, folder / _RANK.format(rank), sent=sent, extras=extras, digests=ranks > 1, shards=shards)


def _plain_copies(engine: Any) -> AbstractContextManager[None]:
    found: AbstractContextManager[None] = getattr(engine, "plain_copies", nullcontext)()
    return found


# -- in the new generation -------------------------------------------------------------------------------------------------------------


def read_objects(trainer: Trainer, before: Before, folder: Path) -> None:
    """Give all objects the values of the generation before; on every rank, after setup and loading of the snapshot. Objects that the user's
    code made anew here, and that on rank 0 equal the earlier ones, stay as each rank has them.

    Args:
        trainer: about to enter its loops.
        folder: that :func:`write_objects` wrote into.

    If the script was started anew and has other objects than before, only the values under names of parameters and the like are taken over;
    a warning says so.
    """
    survey = before.survey
    first = read(folder / _RANK.format(0))
    parcels = [first, *(read(folder / _RANK.format(rank)) for rank in range(1, first.ranks))]
    things = RunObjects(trainer, before)
    lost: list[str] = []
    # Processes that were started one by one may hold different objects, and yet must all run the same collectives.
    same = trainer.strategy.reduce_boolean_decision(first.signature == survey.signature, all=True)
    reached = trainer.strategy.reduce_boolean_decision(first.reached_signature == survey.reached_signature, all=True)
    if same:
        lost = _take_over_parts(things, parcels, folder, reached=reached)
    if trainer.global_rank == 0 and not (same and reached):
        what = ("trainer, module, callbacks or data", "all other attributes")
        if same:
            what = ("variables that functions of module and callbacks name", "these variables")
        warnings.warn(
            f"the snapshot {folder} was written by a process whose {what[0]} held other objects than now: "
            f"what Lightning's checkpoints hold goes on from it, {what[1]} are as in a new run",
            stacklevel=2,
        )
    before.left.update(first.left)
    buffers: dict[str, Tensor] = {}
    for number, parcel in enumerate(parcels):
        unpacking = unpacking_of(parcel.extras, parcel, things, folder / _RANK.format(number), set())
        _, extras = unpacking.load()
        buffers = {**extras["buffers"], **buffers}
        if number == 0:
            things.set_extras(extras)
    things.set_buffers(buffers)
    for each in things.module.modules():
        if isinstance(each, Metric):
            each.reset()
    lost = before.leave(lost)
    if trainer.global_rank == 0 and lost:
        warn_of(lost)


def _take_over_parts(things: RunObjects, parcels: list[CarriedObjects], folder: Path, *, reached: bool) -> list[str]:
    """Take over attributes and items; returns the names of those that couldn't be.

    Args:
        parcels: of the ranks that have written one.
        reached: whether the objects that functions reach have the same numbers on all ranks as in the generation before.
    """
    trainer, survey = things.trainer, things.survey
    if not reached:
        for parcel in parcels:
            parcel.parts = {part: digest for part, digest in parcel.parts.items() if not _is_reached(survey, part)}
            parcel.kept = {part: name for part, name in parcel.kept.items() if not _is_reached(survey, part)}
            parcel.gone = [part for part in parcel.gone if not _is_reached(survey, part)]
    taken, _ = merged(list[Changes](parcels))
    compared: Any = _compare(things, parcels, taken) if trainer.global_rank == 0 else None
    alike, back, mine = trainer.strategy.broadcast(compared)
    found = {part for parcel in parcels for part in parcel.parts}
    lost = [name for parcel in parcels for part, name in parcel.kept.items() if part not in found and part not in mine]
    for number, (parcel, parts) in enumerate(zip(parcels, taken, strict=True)):
        wanted = parts - alike
        unpacking = unpacking_of(parcel.data, parcel, things, folder / _RANK.format(number), wanted)
        payloads, sent = unpacking.load()
        for owner, attribute in wanted & set(payloads):
            if isinstance(owner, int):
                put(survey, (owner, attribute), payloads[owner, attribute])
            elif owner[1] in things.modules:
                vars(things.modules[owner[1]])[attribute] = payloads[owner, attribute]
            else:
                lost.append(f"{MODULE}.{owner[1]}.{attribute}")
        for owner, attribute in parts & set(parcel.gone):
            vars(survey.target(owner)).pop(attribute, None)
        if number == 0:
            lost += things.set_schedulers(sent.get(SCHEDULERS), parcel.schedulers)
        lost += unpacking.lost
    pristine.put_back(survey, back)
    return lost


def _is_reached(survey: Survey, part: Any) -> bool:
    return isinstance(part[0], int) and survey.is_reached(part[0])


def _compare(things: RunObjects, parcels: list[CarriedObjects], taken: list[set[Any]]) -> tuple[set[Any], set[Part], set[Any]]:
    """The parts that are equal here and in the generation before; those that changed only here; and all that have changed here."""
    survey = things.survey
    alike = set()
    for parcel, parts in zip(parcels, taken, strict=True):
        for owner, part in parts & set(parcel.parts):
            digest = parcel.parts[owner, part]
            own = survey.parts(owner) if isinstance(owner, int) else vars(things.modules[owner[1]]) if owner[1] in things.modules else {}
            if digest is not None and part in own and survey.digest(owner, part, own[part], things.names) == digest:
                alike.add((owner, part))
    found, gone = survey.differing(things.names, skip=things.skipped, lazy=True)
    changed = {key for parcel in parcels for key in (*parcel.parts, *parcel.gone, *parcel.kept)}
    back = {key for key in (*found, *gone) if key not in changed and survey.had(*key)}
    mine = set(found) | {(("module", name), part) for name, each in things.modules.items() for part in vars(each)}
    return alike, back, mine


# -- loggers ----------------------------------------------------------------------------------------------------------------------------


def write_loggers(trainer: Trainer, before: Before, folder: Path) -> None:
    """Write the loggers' changed state, after flushing what they can't hand over; on rank 0. The arguments are :func:`write_objects`'s."""
    things, survey = RunObjects(trainer, before).for_loggers(), before.survey
    paths = [path for path in map(things.path, trainer.loggers) if path]

    values: dict[Part, tuple[Any, Any]] = {}
    gone: list[Part] = []
    for path in paths:
        its, without = survey.differing(things.names, under=(path,), reached=False, lazy=True)
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
            # Pickling a logger whose experiment can't be pickled stores the experiment's id (wandb, Comet).
            state = logger.__getstate__()
            for name, value in state.items() if isinstance(state, dict) else ():
                own = vars(logger).get(name, logger)
                if name != "_attach_id" and own is not value and survey.number(own) is None:  # is of a process that ends soon
                    values[number, name] = (value, None)
        parcel.loggers.append(
            (_class_of(logger), _portable(logger, {part: value for (owner, part), (value, _) in values.items() if owner == number}))
        )
        if isinstance(logger, CSVLogger) and experiment is not None:
            rows = Path(experiment.metrics_file_path)
            content = rows.read_bytes() if rows.is_file() else b""
            files[index] = len(content), content.count(b"\n"), list(experiment.metrics_keys)
    write(parcel, things, values, folder / _LOGGERS, sent={}, extras={"files": files}, digests=False)


def carry_loggers_in(trainer: Trainer, before: Before, folder: Path) -> None:
    """Let the loggers go on with the run that they had; to be called first on every rank, before the trainer's function runs.

    Args:
        trainer: as it was before the fork.
        folder: that :func:`write_objects` or :func:`write_loggers` wrote into.
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
            Path(path).parent.mkdir(parents=True, exist_ok=True)  # somebody may have removed it; its writer makes it once
            _cut(Path(path), *where)


def _class_of(target: Any) -> str:
    return f"{type(target).__module__}.{type(target).__qualname__}"


def _portable(logger: Any, values: Mapping[str, Any]) -> dict[str, bytes]:
    """The part of a logger's state that a process of another parent can use: the run's names, and a CSV file's unwritten rows."""
    its = {
        name: value for name, value in values.items() if type(value) in PLAIN or (isinstance(logger, CSVLogger) and name == "_experiment")
    }
    return {name: pickle.dumps(value) for name, value in its.items()}


def _cut(path: Path, size_bytes: int, lines: int, keys: list[str]) -> None:
    """Remove from a CSV file the rows that were written after the snapshot and then lost."""
    if not path.is_file() or path.stat().st_size == size_bytes:
        return
    if not size_bytes:  # it was first written later
        path.unlink()
        return
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))[: lines - 1]
    partial = path.with_name(f".{path.name}.part")
    with partial.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=keys, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    partial.replace(path)


@dataclass(kw_only=True)
class CarriedObjects(Changes):
    """What one rank hands over; the parts' keys are a survey's, or a name with an attribute.

    Args:
        signature: of the survey to which the numbers belong.
        reached_signature: the same for objects that functions reach.
        left: names of such objects that changed in earlier generations and couldn't be handed over.
        ranks: how many ranks, from rank 0 on, together have everything.
        schedulers: their classes, by their position.
        extras: a pickle of values under names of parameters and the like, which another process understands, too.
        loggers: by position, each one's class name and the state that another process can take over.
    """

    signature: bytes
    reached_signature: bytes
    left: list[str] = field(default_factory=list)
    ranks: int = 1
    schedulers: list[Any] = field(default_factory=list)
    extras: bytes = b""
    loggers: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)


def write(
    parcel: CarriedObjects,
    things: RunObjects,
    values: Mapping[Any, tuple[Any, Any]],
    path: Path,
    *,
    sent: dict[str, Any],
    extras: dict[str, Any],
    digests: bool,
    shards: Sequence[tuple[Tensor, Tensor]] = (),
) -> None:
    """Write a parcel's two files, with those of the values that can be pickled.

    Args:
        parcel: what is known of it so far; the parts that are written are added to it.
        values: the parts that differ, each with its digest where that is known.
        path: of both files, less their endings.
        sent: to send along, where it can be.
        digests: whether others' versions are compared with this one, however large it is.
    """
    survey, packing = things.survey, things.packing(shards)
    payloads: dict[Any, Any] = {}
    for (owner, part), (value, _) in values.items():
        its = isinstance(owner, int) and value is survey.target(owner)
        payloads[owner, part] = _items(value) if its else value
        packing.look(owner, part, payloads[owner, part] if its and isinstance(value, Tensor) else value)
    looked_at: dict[int, tuple[int | None, Any]] = {}  # layers of one kind may share a configuration
    for (owner, part), (value, digest) in values.items():
        payload = payloads[owner, part]
        size_bytes, alike = looked_at.get(id(payload), (None, None))
        if id(payload) not in looked_at:
            size_bytes = 0 if type(payload) in ATOMS else travels(packing, payload)
        of_data = isinstance(owner, int) and is_under(survey.path(owner), DATA)
        if size_bytes is None or (of_data and size_bytes > LIMIT_BYTES):
            del payloads[owner, part]
            if not (isinstance(owner, int) and dispensable(survey.target(owner), part)):
                name = survey.name(owner, part) if isinstance(owner, int) else f"{MODULE}.{owner[1]}.{part}"
                parcel.kept[owner, part] = name
            continue
        if digest is None and (digests or size_bytes <= LIMIT_BYTES):
            digest = alike if alike is not None else survey.digest(owner, part, value, things.names)
        looked_at[id(payload)] = size_bytes, digest if payload is value and not isinstance(owner, int) else None
        parcel.parts[owner, part] = digest
    parcel.unsent = [key for key, value in sent.items() if travels(packing, value) is None]
    sent = {key: value for key, value in sent.items() if key not in parcel.unsent}
    with _file(path, ".bin").open("wb") as file:
        beside = TensorFile(file)
        parcel.data = pack(packing, payloads, sent, beside)
        parcel.extras = pack(packing, {}, extras, beside)
    partial = _file(path, ".part")
    partial.write_bytes(pickle.dumps(parcel))
    partial.replace(_file(path, ".pkl"))


def _file(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _items(target: Any) -> Any:
    """The contents of an object from before the run, without copying large ones."""
    if isinstance(target, Tensor):
        return target.detach()
    return target.view() if type(target).__module__ == "numpy" and hasattr(target, "view") else get_items(target)


def read(path: Path) -> CarriedObjects:
    """Read what :func:`write` wrote, without the tensors' file."""
    file = _file(path, ".pkl")
    assert file.is_file(), f"{file} isn't there: nothing was handed over"
    parcel: CarriedObjects = pickle.loads(file.read_bytes())
    return parcel


def unpacking_of(data: bytes, parcel: CarriedObjects, things: RunObjects, path: Path, only: set[Any]) -> Unpacking:
    """Makes the object that unpacks one of its pickles into this process's objects; see :class:`Unpacking`."""
    survey = things.survey
    instead: dict[int, Any] = {number: things.tensors[name] for name, number in things.before.tensors.items() if name in things.tensors}
    instead[things.before.strategy] = things.engine
    strangers = {target.untyped_storage()._cdata for target in map(survey.target, survey.numbers()) if _has_storage(target)}
    keep = {each.untyped_storage()._cdata for each in things.all_tensors() if _has_storage(each)}
    return Unpacking(
        data,
        _file(path, ".bin"),
        survey,
        things.resolver(parcel.schedulers),
        instead,
        things.engine.root_device,
        keep | strangers,
        set(things.names),
        not_carried,
        only,
        reached=parcel.reached_signature == survey.reached_signature,
    )


def _has_storage(target: Any) -> bool:
    return type(target) in (Tensor, nn.Parameter) and target.layout == torch.strided


def warn_of(lost: list[str]) -> None:
    """Warn of what couldn't be handed over, by name."""
    warnings.warn(
        f"these changes were lost when the run moved: {', '.join(sorted(set(lost)))} (they can't be pickled, are parts of "
        f"sharded tensors, or belong to the DataModule and are larger than {format_bytes(LIMIT_BYTES)})",
        stacklevel=3,
    )
