"""What a run leaves behind, carried from the workers to the parent, so that code after ``fit`` sees what it would see after plain Lightning.

Weights and optimizer states travel as files in the run's folder; everything else that a worker changed (counters, metrics, attributes of module,
callbacks, loggers and DataModule) as a pickle in which the parent's own objects are names. What can't travel is named, once.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import Tensor, nn

from lightning_autopar._lightning_compat import LightningOptimizer, TrainerFn, is_overridden, progress_of, restore_progress
from lightning_autopar.state.checkpoint import load_whole_optimizer_state, whole_optimizer_state, whole_state_dict
from lightning_autopar.units import format_bytes

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

#: An attribute whose pickle is larger than this stays behind, and is named.
_ATTRIBUTE_LIMIT_BYTES = 64 * 1024**2
#: Optimizer states larger than this share of the host's free memory stay behind, and are named.
_OPTIMIZER_SHARE = 0.25
#: Attributes that belong to the process they are in.
_PRIVATE = frozenset(
    {"_parameters", "_buffers", "_modules", "_trainer", "_fabric", "_device_mesh", "_device", "_dtype", "_jit_is_scripting", "trainer"}
    | {"forward", "log", "training_step", "validation_step", "test_step", "predict_step"}  # replaced by engines, on the instance
)

Digests = dict[str, bytes | None]


@dataclass(kw_only=True)
class Results:
    """One rank's part of what a run leaves behind."""

    value: Any
    peak_bytes: int | None
    step_seconds: float | None
    progress: dict[str, Any] = field(default_factory=dict)
    attributes: dict[str, bytes] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)


# -- in the worker -----------------------------------------------------------------------------------------------------------------------------


def digest_attributes(trainer: Trainer) -> Digests:
    """Digests of all attributes as they are now, to tell later which ones the run changed; None for one that can't be pickled."""
    names = _names(trainer)
    digests: Digests = {}
    for key, value in _attributes(trainer):
        data = _pickled(value, names)
        digests[key] = None if data is None else hashlib.blake2b(data).digest()
    return digests


def collect(trainer: Trainer, value: Any, before: Digests, folder: Path, rank: int) -> Results:
    """Gather what the run left on this rank; every rank must call it, since sharded weights are gathered together.

    Args:
        value: what the trainer's function returned.
        before: :func:`digest_attributes` of the time before the run.
        folder: where files for the parent go.
        rank: this rank; rank 0's state is the one that travels.
    """
    engine: Any = trainer.strategy
    results = Results(value=_on_cpu(value), peak_bytes=engine.meter.peak_bytes, step_seconds=engine.meter.step_seconds)
    module = trainer.lightning_module
    fitting = trainer.state.fn == TrainerFn.FITTING
    first = rank == 0
    state = whole_state_dict(module, keep=first)
    optimizers = [optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer for optimizer in trainer.optimizers]
    states = [whole_optimizer_state(optimizer, keep=first) for optimizer in optimizers] if fitting and _affordable(optimizers, results) else []
    if not first:
        return results
    persistent = set(state)
    torch.save(
        {
            "state_dict": state if fitting or is_overridden("configure_model", module) else {},
            "buffers": {name: buffer.detach().cpu() for name, buffer in module.named_buffers() if name not in persistent},
            "requires_grad": {name: parameter.requires_grad for name, parameter in module.named_parameters()},
            "training": {name: submodule.training for name, submodule in module.named_modules()},
            "optimizer_states": states,
        },
        folder / "weights.pt",
    )
    results.progress = _on_cpu(progress_of(trainer))
    names = _names(trainer)
    for optimizer in optimizers:
        optimizer.state.clear()  # its tensors are in the file
    if fitting:
        for configs in (trainer.lr_scheduler_configs, []):
            data = _pickled({"optimizers": optimizers, "lr_scheduler_configs": configs}, names)
            if data is not None:
                results.attributes["optimizers"] = data
                break
            results.lost.append("the learning-rate schedulers" if configs else "the optimizers")
    for key, attribute in _attributes(trainer):
        data = _pickled(attribute, names)
        if data is None:
            if before.get(key, b"") is not None:
                results.lost.append(key)
        elif before.get(key) != hashlib.blake2b(data).digest():
            results.attributes[key] = data
    return results


def _affordable(optimizers: list[torch.optim.Optimizer], results: Results) -> bool:
    """Whether the parent has room for the optimizer states; said by every rank alike, from the parameters' sizes."""
    size_bytes = sum(2 * p.numel() * p.element_size() for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
    affordable = size_bytes <= _OPTIMIZER_SHARE * psutil.virtual_memory().total
    if not affordable:
        results.lost.append(f"the optimizers' states ({format_bytes(size_bytes)})")
    return affordable


def _on_cpu(tree: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), tree)


# -- in the parent -----------------------------------------------------------------------------------------------------------------------------


def restore(trainer: Trainer, module: LightningModule, results: Results, folder: Path) -> None:
    """Put rank 0's results into the parent's trainer and module, and warn once of what stayed behind."""
    saved = torch.load(folder / "weights.pt", mmap=True, weights_only=True)
    if set(saved["state_dict"]) - set(module.state_dict()) and is_overridden("configure_model", module):
        with torch.random.fork_rng():
            module.configure_model()
    _load_weights(module, saved, results.lost)
    objects = {name: target for target, name in _named_objects(trainer)}
    if "optimizers" in results.attributes:
        built = _unpickled(results.attributes.pop("optimizers"), objects)
        for optimizer, state in zip(built["optimizers"], saved["optimizer_states"]):
            load_whole_optimizer_state(optimizer, state)
        trainer.strategy.optimizers = built["optimizers"]
        trainer.strategy.lr_scheduler_configs = built["lr_scheduler_configs"]
    for key, data in results.attributes.items():
        owner, _, attribute = key.rpartition(".")
        objects[owner].__dict__[attribute] = _unpickled(data, objects)
    restore_progress(trainer, results.progress)
    if results.lost:
        warnings.warn(
            f"these changes of the run could not be brought back to the main process: {', '.join(sorted(results.lost))} "
            f"(they can't be pickled, or are larger than {format_bytes(_ATTRIBUTE_LIMIT_BYTES)})",
            stacklevel=2,
        )


def _load_weights(module: nn.Module, saved: dict[str, Any], lost: list[str]) -> None:
    """Copy weights in place where they have the same dtype and shape, so that references to them stay good."""
    targets = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    with torch.no_grad():
        for name, value in (saved["state_dict"] | saved["buffers"]).items():
            target = targets.get(name)
            if target is not None and isinstance(value, Tensor) and (target.dtype != value.dtype or target.shape != value.shape or target.is_meta):
                target.data = torch.empty_like(value)
        for name, value in saved["buffers"].items():
            if name in targets:
                targets[name].copy_(value)
            else:
                lost.append(f"the buffer {name}")
        unexpected = module.load_state_dict(saved["state_dict"], strict=False).unexpected_keys if saved["state_dict"] else []
    lost.extend(f"the parameter {name}" for name in unexpected)
    for name, requires_grad in saved["requires_grad"].items():
        if name in targets:
            targets[name].requires_grad_(requires_grad)
    modes = saved["training"]
    for name, submodule in module.named_modules():
        submodule.training = modes.get(name, submodule.training)


# -- attributes, with the parent's own objects as names ------------------------------------------------------------------------------------------


def _owners(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    """The objects whose attributes travel."""
    module = trainer.lightning_module
    for name, submodule in module.named_modules():
        yield f"module.{name}".rstrip("."), submodule
    for index, callback in enumerate(trainer.callbacks):
        yield f"callbacks[{index}] ({type(callback).__name__})", callback
    for index, logger in enumerate(trainer.loggers):
        yield f"loggers[{index}] ({type(logger).__name__})", logger
    if trainer.datamodule is not None:
        yield "datamodule", trainer.datamodule


def _attributes(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    for owner, target in _owners(trainer):
        for attribute, value in list(vars(target).items()):
            # fully_shard keeps its state in the module under keys of that prefix
            if attribute not in _PRIVATE and "_hooks" not in attribute and not attribute.startswith("__composable_api"):
                yield f"{owner}.{attribute}", value


def _named_objects(trainer: Trainer) -> Iterator[tuple[Any, str]]:
    """Objects that both processes have, with the names by which a pickle speaks of them."""
    yield trainer, "trainer"
    yield trainer.strategy, "strategy"
    for name, target in _owners(trainer):
        yield target, name
    for name, parameter in trainer.lightning_module.named_parameters(remove_duplicate=False):
        yield parameter, f"parameter {name}"
    for name, buffer in trainer.lightning_module.named_buffers(remove_duplicate=False):
        yield buffer, f"buffer {name}"


def _names(trainer: Trainer) -> dict[int, str]:
    return {id(target): name for target, name in _named_objects(trainer)}


class _Pickler(pickle.Pickler):
    """Writes shared objects as names, and tensors as they are on the CPU."""

    def __init__(self, file: Any, names: dict[int, str]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._names = names

    def persistent_id(self, target: Any) -> str | None:
        return self._names.get(id(target))

    def reducer_override(self, target: Any) -> Any:
        if isinstance(target, Tensor) and target.device.type != "cpu":
            return target.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, objects: dict[str, Any]) -> None:
        super().__init__(file)
        self._objects = objects

    def persistent_load(self, name: str) -> Any:
        return self._objects[name]


class _Limited(io.BytesIO):
    """A buffer that refuses to grow past the limit, so that a huge attribute costs no more than that."""

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > _ATTRIBUTE_LIMIT_BYTES:
            raise pickle.PicklingError("too large")
        return super().write(data)


def _pickled(value: Any, names: dict[int, str]) -> bytes | None:
    """The value's pickle; None where it has none. Any exception may come out of a stranger's ``__reduce__``: each means the same here."""
    buffer = _Limited()
    try:
        _Pickler(buffer, {key: name for key, name in names.items() if key != id(value)} if isinstance(value, nn.Module) else names).dump(value)
    except Exception:
        return None
    return buffer.getvalue()


def _unpickled(data: bytes, objects: dict[str, Any]) -> Any:
    return _Unpickler(io.BytesIO(data), objects).load()
