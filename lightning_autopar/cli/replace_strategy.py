"""Gives every Trainer that a script builds our strategy in place of its own, and says which settings that loses.

It plans and runs nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_autopar._lightning import (
    DeepSpeedPrecision,
    FSDPPrecision,
    SingleDeviceStrategy,
    Strategy,
    StrategyRegistry,
    num_cuda_devices,
)
from lightning_autopar._lightning_compat import requests_changed
from lightning_autopar._root import LIGHTNING
from lightning_autopar.cli.first_trainer import Wanted, remembered_arguments
from lightning_autopar.strategies.auto import AutoParallelStrategy
from lightning_autopar.strategies.processes.idle_strategy import IdleStrategy

#: Arguments of strategies that belong to the run, not to its distribution: the Trainer gets them instead.
_PASSED_ON = ("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin")
_OWN_GROUPS = "autopar sets up its process groups itself"
_NO_SUCH_WAY = "no plan does that, as it changes the result"
_WORDS = {
    "find_unused_parameters": "under DDP autopar looks for them itself",
    "gradient_as_bucket_view": "under DDP autopar sets it itself",
    "static_graph": "autopar's plans don't rely on it",
    "start_method": "autopar forks its workers",
    "process_group_backend": _OWN_GROUPS,
    "timeout": _OWN_GROUPS,
    "init_sync": "forked workers have the same parameters already",
    "broadcast_buffers": "buffers that depend on the batch are synchronised where they are computed",
    "ddp_comm_state": _NO_SUCH_WAY,
    "ddp_comm_hook": _NO_SUCH_WAY,
    "ddp_comm_wrapper": _NO_SUCH_WAY,
    "model_averaging_period": _NO_SUCH_WAY,
    "cpu_offload": "autopar offloads where a plan needs it",
    "offload_optimizer": "autopar offloads where a plan needs it",
    "offload_parameters": "autopar offloads where a plan needs it",
    "mixed_precision": "the Trainer's precision counts",
    "auto_wrap_policy": "autopar shards by the module's repeated blocks",
    "activation_checkpointing": "autopar recomputes where a plan needs it",
    "activation_checkpointing_policy": "autopar recomputes where a plan needs it",
    "sharding_strategy": "the plan says what is sharded and when it is gathered",
    "state_dict_type": "checkpoints are one ordinary file",
    "save_distributed_checkpoint": "checkpoints are one ordinary file",
    "device_mesh": "the plan says which devices hold what",
    "stage": "the plan says what is sharded",
    "zero_optimization": "the plan says what is sharded",
    "data_parallel_size": "the plan says which devices hold what",
    "tensor_parallel_size": "autopar has no tensor-parallel plans",
    "config": "its settings for optimizer, precision, clipping and batches are ignored",
    "device": "autopar takes the device that suits the plan",
}


@dataclass(frozen=True, kw_only=True)
class Replaced:
    """A strategy that ours has replaced.

    Args:
        name: as the script names it: ``"ddp"``, ``"FSDPStrategy"``.
        settings: what it was given, by the argument's name, in words.
        dropped: of these what isn't done, with the reason.
        notes: what else differs, a sentence each.
    """

    name: str
    settings: Mapping[str, str] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        return f"{self.name}({settings})" if settings else self.name

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"name": self.name, "settings": dict(self.settings), "dropped": dict(self.dropped), "notes": list(self.notes)}

    def lines(self) -> list[str]:
        """The lines to print."""
        lines = [f"autopar takes the place of the script's strategy {self}"]
        lines += [f"  dropped: {name}={self.settings[name]} ({words})" for name, words in self.dropped.items()]
        return [*lines, *(f"  note: {note}" for note in self.notes)]


@dataclass(frozen=True, kw_only=True)
class Replacement:
    """One Trainer's strategy: ours, and what it replaced; None where the script names autopar itself."""

    strategy: AutoParallelStrategy
    replaced: Replaced | None = None


@contextmanager
def strategies_replaced(
    built: list[Replacement], wanted: Wanted, *, on_replace: Callable[[Replacement], None] = lambda replacement: None
) -> Iterator[None]:
    """While open, every Trainer that is built gets our strategy.

    Args:
        built: each new one is appended, before its Trainer is built.
        on_replace: told of each new one.
    """

    def change(request: dict[str, Any]) -> dict[str, Any]:
        asked = request.get("strategy")
        if isinstance(asked, IdleStrategy) and not isinstance(asked, AutoParallelStrategy):  # a measurement's own Trainer
            return request
        changed, replacement = _replaced(request, wanted)
        built.append(replacement)
        on_replace(replacement)
        return changed

    with requests_changed(change):
        yield


def _replaced(request: dict[str, Any], wanted: Wanted) -> tuple[dict[str, Any], Replacement]:
    """The accelerator connector's arguments, with our strategy."""
    asked = request.get("strategy", "auto")
    if isinstance(asked, AutoParallelStrategy):
        made = AutoParallelStrategy(**wanted.options)
        made.settings = replace(made.settings, wait=made.settings.wait.over(asked.settings.wait))
        asked.settings = replace(asked.settings, **{name: getattr(made.settings, name) for name in _fields_of(wanted.options)})
        ours, replaced = asked, None
    else:
        ours, replaced = AutoParallelStrategy(**wanted.options), None if asked == AutoParallelStrategy.strategy_name else _told(asked)
    request = {**request, "strategy": ours}
    if replaced is not None:
        request, notes = _passed_on(asked, request)
        notes += _batch_notes(asked, request, ours)
        replaced = replace(replaced, notes=(*replaced.notes, *notes))
    if wanted.trainer_devices is not None:
        request = {**request, "devices": wanted.trainer_devices}
    if wanted.devices is not None:
        ours.plan_for(wanted.devices)
        # The script's devices needn't be here; the spec has the ones to plan for.
        request = {**request, "accelerator": "cpu", "devices": 1, "num_nodes": 1}
    return request, Replacement(strategy=ours, replaced=replaced)


def _fields_of(options: Mapping[str, Any]) -> list[str]:
    """The fields of ``Settings`` that arguments of the strategy set."""
    return ["memory_limit_bytes" if name == "memory_limit" else name for name in options]


def _told(asked: str | Strategy) -> Replaced:
    """The name and the arguments of a strategy."""
    if isinstance(asked, str):
        name = asked.lower()
        known = StrategyRegistry[name]["init_params"] if name in StrategyRegistry else {}
        said = {key: value for key, value in known.items() if key != "start_method"}  # for "ddp" it repeats the name
        return Replaced(name=asked, settings=_shown(said), dropped={key: _why(key) for key in said})
    given = _arguments(asked)
    dropped = {key: _why(key) for key in given if key not in _PASSED_ON}
    return Replaced(name=type(asked).__name__, settings=_shown(given), dropped=dropped, notes=_kind_notes(asked))


def _shown(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: words if len(words := repr(value)) <= 60 else f"{words[:57]}…" for name, value in values.items()}


def _why(setting: str) -> str:
    return _WORDS.get(setting, "autopar has no such setting")


def _kind_notes(asked: Strategy) -> tuple[str, ...]:
    kind = type(asked)
    notes = []
    if not kind.__module__.startswith(LIGHTNING):
        notes.append(f"{kind.__name__} isn't one of Lightning's strategies: its methods aren't called")
    if any(base.__name__ == "ModelParallelStrategy" for base in kind.__mro__):
        notes.append("a configure_model that shards by self.device_mesh finds none; leave the sharding to the plan")
    return tuple(notes)


def _passed_on(asked: str | Strategy, request: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Pass on to the Trainer what the strategy holds for it; precision by name if the plugin is the strategy's own."""
    given = {} if isinstance(asked, str) else {name: value for name, value in _arguments(asked).items() if value is not None}
    plugins = request.get("plugins") or []
    plugins = list(plugins) if isinstance(plugins, (list, tuple)) else [plugins]
    plugins += [given[name] for name in ("cluster_environment", "checkpoint_io", "precision_plugin") if name in given]
    notes, kept = [], []
    for plugin in plugins:
        if isinstance(plugin, (FSDPPrecision, DeepSpeedPrecision)):
            request = {**request, "precision": plugin.precision}
            notes.append(f"{type(plugin).__name__} gives way to precision={plugin.precision!r}")
        else:
            kept.append(plugin)
    request = {**request, "plugins": kept or None}
    if "accelerator" in given and request.get("accelerator", "auto") == "auto":
        request = {**request, "accelerator": given["accelerator"]}
    if devices := given.get("parallel_devices"):
        indices = [device.index or 0 for device in devices]
        request = {**request, "devices": len(devices) if devices[0].type == "cpu" else indices, "accelerator": devices[0].type}
    return request, notes


def _batch_notes(asked: str | Strategy, request: Mapping[str, Any], ours: AutoParallelStrategy) -> list[str]:
    """A note on a step's batch, if it was more than one batch of the loader."""
    alone = isinstance(asked, SingleDeviceStrategy) or (isinstance(asked, str) and asked.startswith("single_"))
    count = _device_count(request)
    if alone or count == 1 or ours.settings.batch == "per_device":
        return []
    name = "Lightning's choice" if asked == "auto" else asked if isinstance(asked, str) else type(asked).__name__
    return [
        f"a step's batch is one batch of the loader, split over the devices; under {name} each of {count} devices took one. "
        "batch='per_device' (run --batch per_device) gives each device one"
    ]


def _device_count(request: Mapping[str, Any]) -> int:
    """How many devices the Trainer asks for on each node, as far as is known before it is built."""
    devices = request.get("devices", "auto")
    if isinstance(devices, str) and "," in devices:
        devices = [part for part in devices.split(",") if part.strip()]
    if isinstance(devices, Sequence) and not isinstance(devices, str):
        return len(devices)
    if str(devices) not in ("auto", "-1"):
        return int(devices) if str(devices).isdigit() else 1
    gpus = num_cuda_devices() if str(request.get("accelerator", "auto")) in ("auto", "gpu", "cuda") else 0
    return max(1, gpus)


# -- what a strategy was given ---------------------------------------------------------------------------------------------------------


def _arguments(strategy: Strategy) -> dict[str, Any]:
    """A strategy's constructor arguments, by name; empty if it was made before they were kept."""
    args, kwargs = remembered_arguments(strategy)
    signature = inspect.signature(type(strategy).__init__)
    bound = dict(signature.bind(strategy, *args, **kwargs).arguments)
    bound.pop(next(iter(signature.parameters)), None)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            bound |= bound.pop(name, {})
    return bound
