"""What a process of a run has besides its weights, found under the same names in the old generation and in the new one.

It also remembers what was there before the trainer's function ran, so that it can be put back. Knows what there is to hand over and where
it belongs, not how it travels.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import Metric, MetricCollection

from lightning_autopar._lightning import Callback, LightningDataModule, LRSchedulerConfig, ProgressBar, Trainer
from lightning_autopar._lightning_compat import bare_optimizer
from lightning_autopar.exact.absent.absent_tensor import is_absent
from lightning_autopar.state.objects.contents import get_items
from lightning_autopar.state.objects.packing import Packing
from lightning_autopar.state.objects.survey import Part, Survey, is_under
from lightning_autopar.state.objects.unpacking import put

if TYPE_CHECKING:
    from lightning_autopar.strategies.processes.handover.back_to_script import Before


MODULE, DATA = "module", "datamodule"
#: Attributes that a module, its submodules and a DataModule have from torch and Lightning, and that engines put on them.
NOT_THE_USERS = (
    (frozenset(vars(nn.Module())) | frozenset({"training"}))
    | {"_trainer", "_fabric", "_device_mesh", "_device", "_jit_is_scripting", "trainer", "_iterator"}
    | {"forward", "log", "training_step", "validation_step", "test_step", "predict_step"}
)
SCHEDULERS = "the learning-rate schedulers"
PLAIN = (int, float, str, bool, type(None))
#: Attributes of the trainer that stay as the new generation has them: ``datamodule`` is an object that may be None; plain values say how
#: the process was set up (``barebones``, ``fast_dev_run``, …, which nobody can change in a run), are limits that an engine changes while it
#: predicts (``limit_predict_batches``), or are off while a run is resumed (``enable_autolog_hparams``). Counters, states and metrics aren't
#: plain: they lie in loops and connectors, and come with the snapshot.
_NOT_TRAINERS = frozenset(
    {"datamodule", "_model_registry", "barebones", "_default_root_dir", "fast_dev_run", "limit_predict_batches", "enable_autolog_hparams"}
)
#: Counts of batches: each rank has fewer where ranks draw batches of their own, so the new generation's counts stay.
_COUNTS = frozenset({"val_check_batch"})
#: Limits in the training loops, by loop, which callbacks and users change.
_LIMITS = (("fit_loop", ("min_epochs", "max_epochs", "_skip_backward")), ("fit_loop.epoch_loop", ("min_steps", "max_steps")))


class RunObjects:
    """The objects of a run in one process; the old and the new generation's objects have the same names.

    Args:
        trainer: with everything set up.
        before: the survey of the parent.
    """

    def __init__(self, trainer: Trainer, before: Before) -> None:
        self.trainer, self.before, self.survey = trainer, before, before.survey
        self.module: Any = trainer.lightning_module
        self.engine: Any = trainer.strategy
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
        #: The attributes that DeepSpeed has put on each module, by the module's id.
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
        """The path at which an object was found before the run; empty for one that came later."""
        number = self.survey.number(target)
        return "" if number is None else self.survey.path(number)

    def _by_name(self) -> dict[tuple[Any, ...], Any]:
        """Objects that each generation has its own of, by common names."""
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

    def for_loggers(self) -> RunObjects:
        """The same for handing over loggers: their experiments are pickled, not referred to."""
        its = copy.copy(self)
        its.names = {number: name for number, name in self.names.items() if type(name) is int or name[0] != "experiment"}
        return its

    def skipped(self, number: int, part: str) -> bool:
        """Whether a part isn't handed over here. Progress bars and profilers live on in each process, loggers are handed over first, the
        states of the module's metrics are restored from all ranks' together, and an engine puts its own attributes on modules.
        """
        path = self.survey.path(number)
        if number not in self._under:
            self._under[number] = any(is_under(path, root) for root in self._skipped)
        if self._under[number] or part in self._engines.get(id(self.survey.target(number)), ()):
            return True
        for root, its in self._metrics.items():
            if path == root and part in its:
                return True
            if path != root and is_under(path, root) and path[len(root) + 1 :].partition(".")[0].partition("[")[0] in its:
                return True
        return False

    def made(self) -> dict[Any, tuple[Any, Any]]:
        """The attributes of layers that didn't exist before the run."""
        return {
            (("module", name), attribute): (value, None)
            for name, each in self.modules.items()
            for attribute, value in vars(each).items()
            if attribute not in _modules_own(each) and attribute not in self._engines.get(id(each), ())
        }

    def packing(self, shards: Iterable[tuple[Tensor, Tensor]] = ()) -> Packing:
        """The packing of this process's parts; shards as in :class:`Packing`."""
        own = {name for name, _ in self._own_buffers()}
        bases = {("tensor", name): each for name, each in self.tensors.items() if name not in own}
        return Packing(self.survey, self.names, bases, not_carried, shards)

    def _own_buffers(self) -> list[tuple[str, Tensor]]:
        """Buffers that no state dict has, without sharded ones."""
        found: list[tuple[str, Tensor]] = []
        for prefix, each in self._named.items():
            for name in each._non_persistent_buffers_set:
                buffer = each._buffers.get(name)
                if buffer is not None and not is_absent(buffer) and not hasattr(buffer, "device_mesh"):
                    found.append((f"{prefix}.{name}".lstrip("."), buffer))
        return found

    def buffers(self) -> dict[str, Tensor]:
        """The values of the non-persistent buffers."""
        return {name: buffer.detach() for name, buffer in self._own_buffers()}

    def extras(self) -> dict[str, Any]:
        """What is handed over besides attributes."""
        return {
            "buffers": self.buffers(),
            "requires_grad": {name: each.requires_grad for name, each in self._parameters.items()},
            "training": {name: each.training for name, each in self._named.items()},
            "trainer": {name: value for name, value in vars(self.trainer).items() if type(value) in PLAIN and name not in _NOT_TRAINERS},
            "limits": {(loop, name): getattr(_loop(self.trainer, loop), name, None) for loop, names in _LIMITS for name in names},
            "max_batches": self.trainer.fit_loop.max_batches,
        }

    def schedulers(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """The attributes of schedulers and of their configurations."""
        return [(dict(vars(config.scheduler)), {**vars(config), "scheduler": None}) for config in self.engine.lr_scheduler_configs]

    # -- in the new generation ---------------------------------------------------------------------------------------------------------

    def all_tensors(self) -> list[Tensor]:
        """Parameters, buffers and optimizer states."""
        states = [state for optimizer in self.engine.optimizers for state in getattr(bare_optimizer(optimizer), "state", {}).values()]
        return [*self.tensors.values(), *(value for state in states for value in state.values() if isinstance(value, Tensor))]

    def resolver(self, schedulers: list[Any]) -> Callable[[Any], Any]:
        """The function that returns the object of a name.

        Args:
            schedulers: the old generation's classes; where this one has no such scheduler, an empty one is made.
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
            if own is not None and own.shape == value.shape and own.dtype == value.dtype and not is_absent(own):
                if not hasattr(own, "device_mesh"):
                    own.data.copy_(value)
            elif own is None or not is_absent(own):
                self.module.get_submodule(prefix).register_buffer(last, value.to(self.engine.root_device), persistent=False)

    def set_extras(self, sent: dict[str, Any]) -> None:
        """Take over the values of :meth:`extras`."""
        for name, each in self.module.named_parameters():
            wanted = sent["requires_grad"].get(name, each.requires_grad)
            if each.requires_grad != wanted and not is_absent(each):
                each.requires_grad_(wanted)
        for name, each in self.module.named_modules():
            each.training = sent["training"].get(name, each.training)
        own_batches = getattr(getattr(self.engine, "run_plan", None), "batch", "global") == "per_device"
        for name, value in sent["trainer"].items():
            if not (own_batches and name in _COUNTS):
                vars(self.trainer)[name] = value
        for (loop, name), value in sent["limits"].items():
            if getattr(_loop(self.trainer, loop), name, None) != value:
                setattr(_loop(self.trainer, loop), name, value)
        if not own_batches:
            self.trainer.fit_loop.max_batches = sent["max_batches"]

    def set_schedulers(self, sent: list[Any] | None, kinds: list[Any]) -> list[str]:
        """Take over schedulers with which a callback has replaced the module's; returns the names of those that couldn't be.

        Args:
            sent: the value of :meth:`schedulers`; None if it couldn't be sent.
        """
        configs = self.engine.lr_scheduler_configs
        if [type(config.scheduler) for config in configs] == kinds:
            return []  # their states have come with the snapshot
        if sent is None or None in kinds:
            return [SCHEDULERS]
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


def not_carried(target: Any) -> frozenset[str]:
    """Attributes of an instance that aren't handed over: each process has its own."""
    if isinstance(target, Callback):
        return frozenset({"log", "log_dict"})
    return frozenset({"trainer", "_trainer", "_iterator"}) if isinstance(target, (LightningDataModule, DataLoader)) else frozenset()


def _modules_own(module: nn.Module) -> frozenset[str]:
    """The attributes of a layer that are handed over elsewhere, or that its framework sets."""
    if type(module).__module__.startswith("torch._dynamo"):
        return frozenset(vars(module))  # compiled code: each process has its own
    its = frozenset(name for name in vars(module) if name.startswith("__composable_api"))
    return NOT_THE_USERS | its | (_metrics_own(module) if isinstance(module, (Metric, MetricCollection)) else frozenset())


def _metrics_own(metric: Any) -> frozenset[str]:
    """The attributes of a metric that hold its state, or that the metric makes itself."""
    states = getattr(metric, "_defaults", {})
    return frozenset({"update", "compute", "forward", *states, *(name for name in vars(metric) if name.startswith("_"))})


#: Tensors and arrays up to this size are kept as they were before the trainer's function ran.
_REMEMBERED_BYTES = 1024**2

#: In a process that goes on, the parts as they were before its trainer's function ran.
_pristine: weakref.WeakKeyDictionary[Survey, dict[Part, Any]] = weakref.WeakKeyDictionary()


def remember(survey: Survey) -> None:
    """Keep the parts as they are now, without large ones."""
    _pristine[survey] = {
        (number, part): kept
        for number in survey.numbers()
        for part, value in survey.parts(number).items()
        if (kept := _kept(survey.target(number), value)) is not None
    }


def put_back(survey: Survey, parts: Iterable[Part]) -> None:
    """Give these parts their kept values, if they were kept."""
    for part in parts:
        if part in _pristine[survey]:
            put(survey, part, _pristine[survey][part][0])


def _kept(target: Any, value: Any) -> Any:
    """What is kept of a part: a tuple with the value, or with the items to set; None if it is large."""
    if value is not target:
        return (value,)
    if isinstance(value, Tensor) and (is_absent(value) or value.nbytes > _REMEMBERED_BYTES):
        return None
    if not isinstance(value, Tensor) and getattr(value, "nbytes", 0) > _REMEMBERED_BYTES:
        return None
    return (get_items(value),)
