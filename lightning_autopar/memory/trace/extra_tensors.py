"""What a run holds besides the module's parameters and buffers: callbacks' copies, tensors in attributes, and optimizer state that comes
later.

Knows Lightning's callbacks and torch's optimizers; nothing of fakes or ledgers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from lightning_autopar._lightning import LightningModule, Trainer, callbacks
from lightning_autopar._root import NOT_THE_USERS, package_of
from lightning_autopar.memory.storages import storages

#: Attributes of modules whose tensors are counted elsewhere, or don't belong to the module.
_OTHERS = ("_parameters", "_buffers", "_modules", "_trainer", "_fabric", "_hparams", "_hparams_initial")
#: Objects of these classes hold no copies of weights, whoever wrote the class.
_UNRELATED = (Optimizer, Dataset, DataLoader)


def held_by_callbacks(trainer: Trainer | None, module: LightningModule, *, on_cpu: bool) -> tuple[int, list[str]]:
    """What the trainer's callbacks add to a run of training.

    Args:
        module: the module, or its copy.
        on_cpu: whether the run's device is the CPU.

    Returns:
        Bytes on the device, and a sentence for each callback that changes what a step needs.
    """
    size = sum(tensor.numel() * tensor.element_size() for tensor in (*module.parameters(), *module.buffers()))
    held, notes = 0, []
    for callback in getattr(trainer, "callbacks", None) or []:
        name = type(callback).__name__
        if isinstance(callback, callbacks.BaseFinetuning):
            notes.append(f"{name} freezes parameters at first; the footprint is that of training everything it may unfreeze")
        averages = getattr(callbacks, "WeightAveraging", None)
        if isinstance(callback, callbacks.StochasticWeightAveraging) or (averages is not None and isinstance(callback, averages)):
            place = getattr(callback, "_device", None)
            if place is None or on_cpu or torch.device(place).type != "cpu":
                held += size
                notes.append(f"{name} keeps an averaged copy of the module, which is counted with the buffers")
        if isinstance(callback, callbacks.BatchSizeFinder):
            notes.append(f"{name} changes the batch size; the footprint is that of the batch size as it is now")
        if isinstance(callback, callbacks.GradientAccumulationScheduler):
            notes.append(f"{name} changes the accumulation; the footprint is that of the accumulation at the start")
    return held, notes


def in_attributes(module: nn.Module) -> Iterator[Tensor]:
    """Tensors that a module holds in plain attributes, lists and dictionaries, those of modules inside of them, and copies of its
    parameters that other objects in them hold.
    """
    seen, shapes = set[int](), _shapes(module)
    for child in module.modules():
        for name, value in vars(child).items():
            if name not in _OTHERS and not name.endswith("_hooks"):
                yield from _within(value, seen, shapes)


def in_callbacks(held: Iterable[Any], module: nn.Module) -> Iterator[Tensor]:
    """Copies of a module's parameters, and other modules' tensors, in a run's callbacks: averages, teachers, probes.

    A tensor of another shape may stay on the host, as a callback's samples do, and isn't counted.
    """
    seen, shapes = set(map(id, module.modules())), _shapes(module)
    found = chain.from_iterable(_within(vars(callback), seen, shapes, copies=True) for callback in held)
    return besides(found, (*module.parameters(), *module.buffers()))


def besides(tensors: Iterable[Tensor], others: Iterable[Tensor]) -> Iterator[Tensor]:
    """Those that share no storage with the others."""
    taken = {storage._cdata for each in others for storage in storages(each)}
    return (each for each in tensors if taken.isdisjoint(storage._cdata for storage in storages(each)))


def _shapes(module: nn.Module) -> set[torch.Size]:
    """Of its parameters and buffers, and of one vector with all parameters."""
    own = [each for each in (*module.parameters(), *module.buffers()) if not nn.parameter.is_lazy(each)]
    return {*(each.shape for each in own), torch.Size([sum(each.numel() for each in own if isinstance(each, nn.Parameter))])}


def _within(value: Any, seen: set[int], shapes: set[torch.Size], *, copies: bool = False) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if not copies or value.shape in shapes:
            yield value
    elif id(value) in seen:
        return
    elif isinstance(value, nn.Module):
        seen.add(id(value))
        yield from value.parameters()
        yield from value.buffers()
    elif isinstance(value, (Mapping, list, tuple)):
        seen.add(id(value))
        for child in list(iter(value.values() if isinstance(value, Mapping) else value)):  # without asking a user's class for its length
            yield from _within(child, seen, shapes, copies=copies)
    elif hasattr(value, "__dict__") and not isinstance(value, (type, *_UNRELATED)) and package_of(type(value)) not in NOT_THE_USERS:
        seen.add(id(value))
        for child in list(vars(value).values()):
            yield from _within(child, seen, shapes, copies=True)


def keep_searching(optimizers: list[Optimizer]) -> bool:
    """Make LBFGS run all its iterations, by tolerances that gradients of unknown values don't meet.

    Returns:
        Whether there is an LBFGS.
    """
    found = [optimizer for optimizer in optimizers if isinstance(optimizer, torch.optim.LBFGS)]
    for optimizer in found:
        optimizer.param_groups[0].update(tolerance_grad=-1.0, tolerance_change=-1.0)
    return bool(found)


def fill_history(optimizers: list[Optimizer]) -> None:
    """Give LBFGS the full history that it will have after some steps: ``history_size`` pairs of vectors as long as all parameters.

    It keeps a pair for each sufficiently large change of the gradient (``torch/optim/lbfgs.py``), which fakes don't show.
    """
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.LBFGS):
            continue
        size = optimizer.param_groups[0]["history_size"]
        for state in optimizer.state.values():
            for name in ("old_dirs", "old_stps", "ro"):
                vectors = state.get(name)
                while vectors is not None and len(vectors) < size:
                    like = state["prev_flat_grad"]
                    vectors.append(torch.ones((), dtype=like.dtype) if name == "ro" else torch.empty_like(like))
