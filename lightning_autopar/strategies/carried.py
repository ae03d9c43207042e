"""What a generation's workers changed in Python objects, carried to the next generation's workers.

All generations are forked from one pristine parent, so the numbers of its survey mean the same in each. The old one's ranks write what
differs; the new one's, in which the user's ``setup`` and its like have run again, take it over into their own objects. Weights, optimizer
states, loop counters and the loaders' positions travel elsewhere; references to them are references to the new generation's own ones.
"""

from __future__ import annotations

import copy
import csv
import os
import pickle
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import Metric, MetricCollection

from lightning_autopar._lightning_compat import bare_optimizer
from lightning_autopar.strategies.objects import ATOMS, LIMIT_BYTES, Changes, Part, Survey, dispensable, get_items, merged
from lightning_autopar.strategies.parcel import Bin, Packing, Unpacking, pack, put, travels
from lightning_autopar.strategies.staged.hole import is_hole
from lightning_autopar.units import format_bytes

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_autopar.strategies.results import Before

_LOGGERS, _RANK = "carried_loggers", "carried{}"
_MODULE, _DATA = "module", "datamodule"
#: Attributes that a module has from torch and Lightning, and that engines put on it.
_MODULES_OWN = (
    (frozenset(vars(nn.Module())) | frozenset({"training"}))
    | {"_trainer", "_fabric", "_device_mesh", "_device", "_jit_is_scripting", "trainer", "_iterator"}
    | {"forward", "log", "training_step", "validation_step", "test_step", "predict_step"}
)
_SCHEDULERS = "the learning-rate schedulers"
#: Tensors and arrays up to this size are remembered as they were before the trainer's function ran.
_REMEMBERED_BYTES = 1024**2
_PLAIN = (int, float, str, bool, type(None))
#: Of the trainer itself, left as the new generation has it: ``datamodule`` is an object that only may be None; the rest of what is plain
#: says how the process was set up (``barebones``, ``fast_dev_run``, …, which nobody can change in a run), is limits that an engine changes
#: while it predicts (``limit_predict_batches``), or is muted while a run is taken up (``enable_autolog_hparams``). Counters, states and
#: metrics aren't plain: they lie in loops and connectors, and travel with the snapshot.
_NOT_TRAINERS = frozenset(
    {"datamodule", "_model_registry", "barebones", "_default_root_dir", "fast_dev_run", "limit_predict_batches", "enable_autolog_hparams"}
)
#: What counts batches, which are fewer on each rank where ranks draw batches of their own: so the new generation's own count.
_COUNTS = frozenset({"val_check_batch"})
#: Limits in the training loops, which callbacks and users change: by loop.
_LIMITS = (("fit_loop", ("min_epochs", "max_epochs", "_skip_backward")), ("fit_loop.epoch_loop", ("min_steps", "max_steps")))

#: In a process that goes on: the parts as they were before its trainer's function ran.
_pristine: weakref.WeakKeyDictionary[Survey, dict[Part, Any]] = weakref.WeakKeyDictionary()
#: Of CSV files as they were last measured, by path: first line, size, lines.
_csv_files: dict[str, tuple[bytes, int, int]] = {}


@dataclass(kw_only=True)
class Carried(Changes):
    """What one rank carries; the parts' keys are a survey's, or a name with an attribute.

    Args:
        signature: of the survey that the numbers are of.
        ranks: how many ranks' make the whole: the first ones.
        schedulers: their classes, by their position.
        extras: a pickle of what travels by the names of parameters and the like, which mean the same to another process, too.
        loggers: by position, their class's name and what of them another process can take over.
    """

    signature: bytes
    ranks: int = 1
    schedulers: list[Any] = field(default_factory=list)
    extras: bytes = b""
    loggers: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)


# -- in the old generation -------------------------------------------------------------------------------------------------------------


def carry(trainer: Trainer, before: Before, folder: Path, rank: int) -> None:
    """Write what differs on this rank; every rank calls it between two batches, and goes on as if nothing had happened.

    Args:
        trainer: in a run.
        before: the survey of the parent.
        folder: where files go; it exists.
        rank: this rank. Rank 0's state is the one that travels; where a module's stages lie on several ranks, each of these brings what its
            stages changed of the module.
    """
    engine: Any = trainer.strategy
    in_stages = getattr(engine, "in_stages", False)
    ranks = engine.assignment.plan.devices_per_replica if in_stages else 1
    if rank >= ranks:
        return
    things = _Things(trainer, before)
    if rank == 0:
        _write_loggers(things.for_loggers(), folder)
    found, gone = before.survey.differing(things.names, under=_MODULE if rank else None, skip=things.skipped, lazy=True)
    values: dict[Any, tuple[Any, Any]] = {**found, **things.made()}
    extras = things.extras() if rank == 0 else {"buffers": things.buffers()}
    sent = {_SCHEDULERS: things.schedulers()} if rank == 0 else {}
    parcel = Carried(data=b"", signature=before.survey.signature, ranks=ranks, gone=gone)
    for config in engine.lr_scheduler_configs:
        kind = type(config.scheduler)
        parcel.schedulers.append(kind if "<locals>" not in kind.__qualname__ else None)
    _write(parcel, things, values, folder / _RANK.format(rank), sent=sent, extras=extras, digests=in_stages)


def _write(
    parcel: Carried,
    things: _Things,
    values: Mapping[Any, tuple[Any, Any]],
    path: Path,
    *,
    sent: dict[str, Any],
    extras: dict[str, Any],
    digests: bool,
) -> None:
    """Write a parcel's two files, with those of the values that travel."""
    survey, packing = things.survey, things.packing()
    payloads: dict[Any, Any] = {}
    for (owner, part), (value, _) in values.items():
        its = isinstance(owner, int) and value is survey.target(owner)
        payloads[owner, part] = _items(value) if its else value
        packing.look(owner, part, payloads[owner, part] if its and isinstance(value, Tensor) else value)
    looked_at: dict[int, tuple[int | None, Any]] = {}  # layers of one kind may have one configuration
    for (owner, part), (value, digest) in values.items():
        payload = payloads[owner, part]
        size_bytes, alike = looked_at.get(id(payload), (None, None))
        if id(payload) not in looked_at:
            size_bytes = 0 if type(payload) in ATOMS else travels(packing, payload)
        of_data = isinstance(owner, int) and _is_under(survey.path(owner), _DATA)
        if size_bytes is None or (of_data and size_bytes > LIMIT_BYTES):
            del payloads[owner, part]
            if not (isinstance(owner, int) and dispensable(survey.target(owner), part)):
                name = survey.name(owner, part) if isinstance(owner, int) else f"{_MODULE}.{owner[1]}.{part}"
                parcel.kept[owner, part] = name
            continue
        if digest is None and (digests or size_bytes <= LIMIT_BYTES):
            digest = alike if alike is not None else survey.digest(owner, part, value, things.names)
        looked_at[id(payload)] = size_bytes, digest if payload is value and not isinstance(owner, int) else None
        parcel.parts[owner, part] = digest
    parcel.unsent = [key for key, value in sent.items() if travels(packing, value) is None]
    sent = {key: value for key, value in sent.items() if key not in parcel.unsent}
    with _file(path, ".bin").open("wb") as file:
        beside = Bin(file)
        parcel.data = pack(packing, payloads, sent, beside)
        parcel.extras = pack(packing, {}, extras, beside)
    partial = _file(path, ".part")
    partial.write_bytes(pickle.dumps(parcel))
    partial.replace(_file(path, ".pkl"))


def _file(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _items(target: Any) -> Any:
    """What an object from before holds, without a copy of what is large."""
    if isinstance(target, Tensor):
        return target.detach()
    return target.view() if type(target).__module__ == "numpy" and hasattr(target, "view") else get_items(target)


def _is_under(path: str, root: str) -> bool:
    return path == root or path.startswith((f"{root}.", f"{root}["))


class _Things:
    """What a process of a run has: the old generation's, and by the same names the new one's.

    Args:
        trainer: with everything set up.
        before: the survey of the parent.
    """

    def __init__(self, trainer: Trainer, before: Before) -> None:
        self.trainer, self.before, self.survey = trainer, before, before.survey
        self.module: Any = trainer.lightning_module
        self.engine: Any = trainer.strategy
        #: Gone through once: this is done at every batch that leaves notes (``survivor``).
        self._parameters: dict[str, nn.Parameter] = dict(self.module.named_parameters(remove_duplicate=False))
        self._named: dict[str, nn.Module] = dict(self.module.named_modules())
        self.tensors: dict[str, Tensor] = {**self._parameters, **dict(self.module.named_buffers(remove_duplicate=False))}
        self.modules = {name: each for name, each in self._named.items() if self.survey.number(each) is None}
        self.by_name = self._by_name()
        self.names: dict[int, Any] = {id(each): name for name, each in reversed(self.by_name.items()) if each is not None}
        for name, tensor in self.tensors.items():
            self.names[id(tensor)] = before.tensors.get(name, ("tensor", name))
        self._skipped = [type(each).__name__ for each in self._callbacks if isinstance(each, ProgressBar)]
        self._skipped += ["trainer.profiler"]
        self._under: dict[int, bool] = {}
        self._skipped += [path for path in map(self.path, trainer.loggers) if path]
        #: What DeepSpeed has put on each module, by its id.
        self._engines: dict[int, set[str]] = self.engine.own_attributes() if hasattr(self.engine, "own_attributes") else {}
        self._metrics = {
            path: _metrics_own(each)
            for each in self._named.values()
            if isinstance(each, (Metric, MetricCollection)) and (path := self.path(each))
        }

    @property
    def _callbacks(self) -> list[Callback]:
        callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        return callbacks

    def path(self, target: Any) -> str:
        """Where an object was found before; empty for one that came later."""
        number = self.survey.number(target)
        return "" if number is None else self.survey.path(number)

    def _by_name(self) -> dict[tuple[Any, ...], Any]:
        """Objects that both generations have, each its own."""
        engine = self.engine
        found: dict[tuple[Any, ...], Any] = {("strategy",): engine}
        for name in ("accelerator", "precision_plugin", "checkpoint_io", "cluster_environment"):
            found["of strategy", name] = getattr(engine, name, None)
        found |= {("tensor", name): tensor for name, tensor in self.tensors.items()}
        found |= {("module", name): each for name, each in self.modules.items()}
        for index, optimizer in enumerate(engine.optimizers):
            bare = bare_optimizer(optimizer)
            groups = getattr(bare, "param_groups", [])
            found |= {("optimizer", index): bare, ("groups", index): groups, ("state", index): getattr(bare, "state", None)}
            found |= {("group", index, number): group for number, group in enumerate(groups)}
        found |= {("wrapped", index): each for index, each in enumerate(getattr(engine, "_lightning_optimizers", ()))}
        for index, config in enumerate(engine.lr_scheduler_configs):
            found |= {("scheduler", index): config.scheduler, ("config", index): config}
        found["optimizers",], found["configs",] = engine.optimizers, engine.lr_scheduler_configs
        found |= {("callback", index): each for index, each in enumerate(self._callbacks) if isinstance(each, ProgressBar)}
        found |= {("experiment", index): vars(each).get("_experiment") for index, each in enumerate(self.trainer.loggers)}
        return found

    def for_loggers(self) -> _Things:
        """The same, where the loggers' experiments aren't what is referred to but what is carried."""
        its = copy.copy(self)
        its.names = {number: name for number, name in self.names.items() if type(name) is int or name[0] != "experiment"}
        return its

    def skipped(self, number: int, part: str) -> bool:
        """Whether a part isn't carried here.

        Progress bars and profilers live on in each process, loggers are carried first, the states of the module's metrics are restored from
        all ranks' together, and an engine hangs its own on modules.
        """
        path = self.survey.path(number)
        if number not in self._under:
            self._under[number] = any(_is_under(path, root) for root in self._skipped)
        if self._under[number] or part in self._engines.get(id(self.survey.target(number)), ()):
            return True
        for root, its in self._metrics.items():
            if path == root and part in its:
                return True
            if path != root and _is_under(path, root) and path[len(root) + 1 :].partition(".")[0].partition("[")[0] in its:
                return True
        return False

    def made(self) -> dict[Any, tuple[Any, Any]]:
        """The attributes of layers that weren't there before."""
        return {
            (("module", name), attribute): (value, None)
            for name, each in self.modules.items()
            for attribute, value in vars(each).items()
            if attribute not in _modules_own(each) and attribute not in self._engines.get(id(each), ())
        }

    def packing(self) -> Packing:
        """For parts of this process."""
        own = {name for name, _ in self._own_buffers()}
        bases = {("tensor", name): each for name, each in self.tensors.items() if name not in own}
        return Packing(self.survey, self.names, bases, leave)

    def _own_buffers(self) -> list[tuple[str, Tensor]]:
        """Buffers that no state dict has; sharded ones aside."""
        found: list[tuple[str, Tensor]] = []
        for prefix, each in self._named.items():
            for name in each._non_persistent_buffers_set:
                buffer = each._buffers.get(name)
                if buffer is not None and not is_hole(buffer) and not hasattr(buffer, "device_mesh"):
                    found.append((f"{prefix}.{name}".lstrip("."), buffer))
        return found

    def buffers(self) -> dict[str, Tensor]:
        """The values of these."""
        return {name: buffer.detach() for name, buffer in self._own_buffers()}

    def extras(self) -> dict[str, Any]:
        """What travels besides attributes."""
        return {
            "buffers": self.buffers(),
            "requires_grad": {name: each.requires_grad for name, each in self._parameters.items()},
            "training": {name: each.training for name, each in self._named.items()},
            "trainer": {name: value for name, value in vars(self.trainer).items() if type(value) in _PLAIN and name not in _NOT_TRAINERS},
            "limits": {(loop, name): getattr(_loop(self.trainer, loop), name, None) for loop, names in _LIMITS for name in names},
            "max_batches": self.trainer.fit_loop.max_batches,
        }

    def schedulers(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """The schedulers' and their configurations' attributes."""
        return [(dict(vars(config.scheduler)), {**vars(config), "scheduler": None}) for config in self.engine.lr_scheduler_configs]

    # -- in the new generation ---------------------------------------------------------------------------------------------------------

    def all_tensors(self) -> list[Tensor]:
        """Parameters, buffers and optimizer states."""
        states = [state for optimizer in self.engine.optimizers for state in getattr(bare_optimizer(optimizer), "state", {}).values()]
        return [*self.tensors.values(), *(value for state in states for value in state.values() if isinstance(value, Tensor))]

    def resolver(self, schedulers: list[Any]) -> Callable[[Any], Any]:
        """What gives the object that a name stands for.

        Args:
            schedulers: the old generation's classes: one that this one has no scheduler of is made, empty.
        """
        for index, kind in enumerate(schedulers):
            own = self.by_name.get(("scheduler", index))
            if kind is not None and type(own) is not kind:
                self.by_name["scheduler", index] = kind.__new__(kind)

        def resolve(name: Any) -> Any:
            if name[0] == "experiment":
                return getattr(self.trainer.loggers[name[1]], "experiment", None)
            return self.by_name.get(name)

        return resolve

    def set_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Give the module's non-persistent buffers these values."""
        for name, value in buffers.items():
            prefix, _, last = name.rpartition(".")
            own = self.tensors.get(name)
            if own is not None and own.shape == value.shape and own.dtype == value.dtype and not is_hole(own):
                if not hasattr(own, "device_mesh"):
                    own.data.copy_(value)
            elif own is None or not is_hole(own):
                self.module.get_submodule(prefix).register_buffer(last, value.to(self.engine.root_device), persistent=False)

    def set_extras(self, sent: dict[str, Any]) -> None:
        """Take over what :meth:`extras` gave."""
        for name, each in self.module.named_parameters():
            wanted = sent["requires_grad"].get(name, each.requires_grad)
            if each.requires_grad != wanted and not is_hole(each):
                each.requires_grad_(wanted)
        for name, each in self.module.named_modules():
            each.training = sent["training"].get(name, each.training)
        own_batches = getattr(getattr(self.engine, "assignment", None), "batch", "global") == "per_device"
        for name, value in sent["trainer"].items():
            if not (own_batches and name in _COUNTS):
                vars(self.trainer)[name] = value
        for (loop, name), value in sent["limits"].items():
            if getattr(_loop(self.trainer, loop), name, None) != value:
                setattr(_loop(self.trainer, loop), name, value)
        if not own_batches:
            self.trainer.fit_loop.max_batches = sent["max_batches"]

    def set_schedulers(self, sent: list[Any] | None, parcel: Carried) -> list[str]:
        """Take over schedulers that a callback has put in the place of the module's own; the names of what couldn't be."""
        configs = self.engine.lr_scheduler_configs
        if [type(config.scheduler) for config in configs] == parcel.schedulers:
            return []  # their states have come with the snapshot
        if sent is None or None in parcel.schedulers:
            return [_SCHEDULERS]
        new = []
        for index, (state, options) in enumerate(sent):
            scheduler = self.by_name["scheduler", index]
            vars(scheduler).update(state)
            new.append(LRSchedulerConfig(**{**options, "scheduler": scheduler}))
        configs[:] = new
        return []


def _loop(trainer: Trainer, name: str) -> Any:
    found: Any = trainer
    for part in name.split("."):
        found = getattr(found, part)
    return found


def leave(target: Any) -> frozenset[str]:
    """Attributes of an instance that each process has its own of."""
    if isinstance(target, Callback):
        return frozenset({"log", "log_dict"})
    return frozenset({"trainer", "_trainer", "_iterator"}) if isinstance(target, (LightningDataModule, DataLoader)) else frozenset()


def _modules_own(module: nn.Module) -> frozenset[str]:
    """The attributes of a layer that travel elsewhere, or that it has of its framework."""
    if type(module).__module__.startswith("torch._dynamo"):
        return frozenset(vars(module))  # of compiled code, which each process has its own of
    its = frozenset(name for name in vars(module) if name.startswith("__composable_api"))
    return _MODULES_OWN | its | (_metrics_own(module) if isinstance(module, (Metric, MetricCollection)) else frozenset())


def _metrics_own(metric: Any) -> frozenset[str]:
    """The attributes of a metric in which its state is, or that it makes itself."""
    states = getattr(metric, "_defaults", {})
    return frozenset({"update", "compute", "forward", *states, *(name for name in vars(metric) if name.startswith("_"))})


# -- loggers ---------------------------------------------------------------------------------------------------------------------------


def _write_loggers(things: _Things, folder: Path) -> None:
    """Write what differs of the loggers, after they have written what they can't keep."""
    survey, trainer = things.survey, things.trainer
    paths = [path for path in map(things.path, trainer.loggers) if path]

    values: dict[Part, tuple[Any, Any]] = {}
    gone: list[Part] = []
    for path in paths:
        its, without = survey.differing(things.names, under=path, lazy=True)
        values |= its
        gone += [part for part in without if part not in gone]
    files: dict[int, tuple[int, int, list[str]]] = {}
    parcel = Carried(data=b"", signature=survey.signature, gone=gone)
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
            files[index] = *_measured(Path(experiment.metrics_file_path)), list(experiment.metrics_keys)
    _write(parcel, things, values, folder / _LOGGERS, sent={}, extras={"files": files}, digests=False)


def carry_loggers_in(trainer: Trainer, before: Before, folder: Path) -> None:
    """Let the loggers go on with the run that they had; first thing on every rank, before the trainer's function runs.

    Args:
        trainer: as it was before the fork.
        before: the survey of the parent.
        folder: that :func:`carry` wrote into.

    """
    survey = before.survey
    _pristine[survey] = {
        (number, part): kept
        for number in survey.numbers()
        for part, value in survey.parts(number).items()
        if (kept := _kept(survey.target(number), value)) is not None
    }
    parcel = _read(folder / _LOGGERS)
    things = _Things(trainer, before).for_loggers()
    first = trainer.global_rank == 0
    if parcel.signature == survey.signature:
        parts = {part for part in parcel.parts if first or part[1] != "_experiment"}
        unpacking = _unpacking(parcel.data, parcel, things, folder / _LOGGERS, parts)
        payloads, _ = unpacking.load()
        for part in parts:
            put(survey, part, payloads[part])
        for number, attribute in parcel.gone:
            vars(survey.target(number)).pop(attribute, None)
        lost = [*(name for part, name in parcel.kept.items() if part not in parcel.parts), *unpacking.lost]
        if first and lost:
            _warn(lost)
    else:
        for logger, (kind, its) in zip(trainer.loggers, parcel.loggers, strict=False):
            if _class_of(logger) == kind:
                vars(logger).update({name: pickle.loads(data) for name, data in its.items() if first or name != "_experiment"})
    for logger in trainer.loggers:
        options = vars(logger).get("_wandb_init")
        if isinstance(options, dict) and vars(logger).get("_id"):
            options.update(id=vars(logger)["_id"], resume="allow")
    _, extras = _unpacking(parcel.extras, parcel, things, folder / _LOGGERS, set()).load()
    for index, where in extras["files"].items() if first else ():
        experiment = vars(trainer.loggers[index]).get("_experiment") if index < len(trainer.loggers) else None
        path = getattr(experiment, "metrics_file_path", None)
        if path is not None:
            _cut(Path(path), *where)


def _measured(path: Path) -> tuple[int, int]:
    """A CSV file's size and its lines; of one that was only added to since the last time, what is new is read.

    A file that got another column is written anew, with another first line.
    """
    with path.open("rb") as file:
        header = file.readline()
        known_header, size_bytes, lines = _csv_files.get(str(path), (b"", 0, 0))
        if header == known_header and os.fstat(file.fileno()).st_size >= size_bytes:
            file.seek(size_bytes)
        else:
            size_bytes, lines = len(header), header.count(b"\n")
        added = file.read()
    size_bytes, lines = size_bytes + len(added), lines + added.count(b"\n")
    _csv_files[str(path)] = header, size_bytes, lines
    return size_bytes, lines


def _class_of(target: Any) -> str:
    return f"{type(target).__module__}.{type(target).__qualname__}"


def _portable(logger: Any, values: Mapping[str, Any]) -> dict[str, bytes]:
    """What of a logger means the same to a process that wasn't forked from the same parent: the run's names, and a CSV file's open rows."""
    its = {
        name: value for name, value in values.items() if type(value) in _PLAIN or (isinstance(logger, CSVLogger) and name == "_experiment")
    }
    return {name: pickle.dumps(value) for name, value in its.items()}


def _kept(target: Any, value: Any) -> Any:
    """How a part is remembered, to be put back: a value by a tuple of one, items as they are set; None of what is large."""
    if value is not target:
        return (value,)
    if isinstance(value, Tensor) and (is_hole(value) or value.nbytes > _REMEMBERED_BYTES):
        return None
    if not isinstance(value, Tensor) and getattr(value, "nbytes", 0) > _REMEMBERED_BYTES:
        return None
    return (get_items(value),)


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


# -- in the new generation -------------------------------------------------------------------------------------------------------------


def _read(path: Path) -> Carried:
    file = _file(path, ".pkl")
    assert file.is_file(), f"{file} isn't there: nothing was carried"
    parcel: Carried = pickle.loads(file.read_bytes())
    return parcel


def _unpacking(data: bytes, parcel: Carried, things: _Things, path: Path, only: set[Any]) -> Unpacking:
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
        leave,
        only,
    )


def _has_storage(target: Any) -> bool:
    return type(target) in (Tensor, nn.Parameter) and target.layout == torch.strided


def take_over(trainer: Trainer, before: Before, folder: Path) -> None:
    """Make everything what it was in the generation before; on every rank, when all is set up, and the snapshot loaded.

    What the user's code made anew here, alike on rank 0 to what it was there, stays as each rank has it.

    Args:
        trainer: about to enter its loops.
        before: the survey of the parent.
        folder: that :func:`carry` wrote into.

    Where the script was started anew, and its objects aren't what they were, nothing is taken over but what belongs to names of parameters
    and the like; a warning says so.
    """
    survey = before.survey
    first = _read(folder / _RANK.format(0))
    parcels = [first, *(_read(folder / _RANK.format(rank)) for rank in range(1, first.ranks))]
    things = _Things(trainer, before)
    lost: list[str] = []
    if first.signature == survey.signature:
        lost = _take_over_parts(things, parcels, folder)
    elif trainer.global_rank == 0:
        warnings.warn(
            f"the snapshot {folder} was written by a process whose trainer, module, callbacks or data held other objects than now: "
            "what Lightning's checkpoints hold goes on from it, all other attributes are as in a new run",
            stacklevel=2,
        )
    buffers: dict[str, Tensor] = {}
    for number, parcel in enumerate(parcels):
        unpacking = _unpacking(parcel.extras, parcel, things, folder / _RANK.format(number), set())
        _, extras = unpacking.load()
        buffers = {**extras["buffers"], **buffers}
        if number == 0:
            things.set_extras(extras)
    things.set_buffers(buffers)
    for each in things.module.modules():
        if isinstance(each, Metric):
            each.reset()
    if trainer.global_rank == 0 and lost:
        _warn(lost)


def _take_over_parts(things: _Things, parcels: list[Carried], folder: Path) -> list[str]:
    """Take over attributes and items; the names of what couldn't be."""
    trainer, survey = things.trainer, things.survey
    taken, _ = merged(list[Changes](parcels))
    compared: Any = _compare(things, parcels, taken) if trainer.global_rank == 0 else None
    alike, back, mine = trainer.strategy.broadcast(compared)
    lost = _lost(parcels, mine)
    for number, (parcel, parts) in enumerate(zip(parcels, taken, strict=True)):
        wanted = parts - alike
        unpacking = _unpacking(parcel.data, parcel, things, folder / _RANK.format(number), wanted)
        payloads, sent = unpacking.load()
        for owner, attribute in wanted & set(payloads):
            if isinstance(owner, int):
                put(survey, (owner, attribute), payloads[owner, attribute])
            elif owner[1] in things.modules:
                vars(things.modules[owner[1]])[attribute] = payloads[owner, attribute]
            else:
                lost.append(f"{_MODULE}.{owner[1]}.{attribute}")
        for owner, attribute in parts & set(parcel.gone):
            vars(survey.target(owner)).pop(attribute, None)
        if number == 0:
            lost += things.set_schedulers(sent.get(_SCHEDULERS), parcel)
        lost += unpacking.lost
    for part in back:
        if part in _pristine[survey]:
            put(survey, part, _pristine[survey][part][0])
    return lost


def _compare(things: _Things, parcels: list[Carried], taken: list[set[Any]]) -> tuple[set[Any], set[Part], set[Any]]:
    """The parts that are here what they were there; those that changed here alone; and all that have changed here."""
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


def _lost(parcels: list[Carried], mine: set[Any]) -> list[str]:
    """The names of what couldn't travel, and wasn't made anew here."""
    found = {part for parcel in parcels for part in parcel.parts}
    return [name for parcel in parcels for part, name in parcel.kept.items() if part not in found and part not in mine]


def _warn(lost: list[str]) -> None:
    warnings.warn(
        f"these changes could not be carried along when the run moved: {', '.join(sorted(set(lost)))} (they can't be pickled, are parts of "
        f"sharded tensors, or belong to the DataModule and are larger than {format_bytes(LIMIT_BYTES)})",
        stacklevel=3,
    )
