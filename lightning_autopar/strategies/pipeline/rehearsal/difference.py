"""What a run in stages gives other than the whole module's run, in a sentence; and what a step leaves on the module besides parameters and
buffers.

A stage leaves the user's step at its end, so that only later stages have what the step stores on the module after that (lists of outputs,
counters). A hook that runs on every rank would then read different values. Knows modules, tensors and names; nothing of how a step runs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from torchmetrics import Metric

from lightning_autopar._lightning import LightningModule
from lightning_autopar._lightning_compat import is_overridden
from lightning_autopar.exact.absent.absent_tensor import is_absent
from lightning_autopar.exact.logs.log_rules import Logged

#: Relative difference up to which numbers count as equal.
EQUAL = 1e-6
#: The same for what a step adds to a parameter: the rounding of the parameter is that much of a small step, and Adam's division adds more.
_EQUAL_MOVES = 1e-5
#: A tensor with small entries is judged relative to this share of the largest entry of all: some are zero but for rounding.
_SMALL = 1e-3


@dataclass(kw_only=True)
class Step:
    """The results of one step.

    Args:
        loss: None where it gave none.
        returned: what an evaluation step returned.
        logged: by name.
        gradients: by the parameter's FQN; None where it got none.
        settings: numbers in the optimizers' parameter groups after it.
        moved: by how much parameters have changed since the first step began, by FQN.
        buffers: after it, by FQN.
    """

    loss: float | None = None
    returned: Any = None
    logged: Mapping[str, Logged] = field(default_factory=dict)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    settings: list[dict[str, float]] = field(default_factory=list)
    moved: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


@dataclass(kw_only=True)
class Outcome:
    """The results of one hook's steps.

    Args:
        steps: one after the other.
        notes: what went wrong in hooks.
    """

    steps: list[Step] = field(default_factory=list)
    notes: tuple[str, ...] = ()


def difference(ours: Outcome, theirs: Outcome) -> tuple[float, str] | None:
    """The first value that stages change: by how much, and the sentence; None where they change nothing.

    Args:
        ours: of the stages; names that aren't in it are another stage's.
    """
    failed = Counter(ours.notes) - Counter(theirs.notes)
    if failed:
        return math.inf, of_hook(next(iter(failed)))
    for one, other in zip(ours.steps, theirs.steps, strict=True):
        for words, distance in _differences(one, other):
            if not distance <= EQUAL:
                return distance, words
    return None


def of_hook(note: str) -> str:
    """The sentence about a hook that fails on a stage, from the note of the one who has called it."""
    return "in stages " + note.replace("was left out, as it failed while tracing", "fails").replace("MissingValue: ", "")


def _differences(ours: Step, theirs: Step) -> Iterator[tuple[str, float]]:
    """The differences in the order in which they arise: a wrong loss has wrong gradients."""
    yield f"in stages the loss is {_number(ours.loss)} instead of {_number(theirs.loss)}", number_distance(ours.loss, theirs.loss)
    for name in {**theirs.logged, **ours.logged}:
        values = [step.logged[name].value if name in step.logged else None for step in (ours, theirs)]
        yield f"in stages the value logged as {name!r} is {_number(values[0])} instead of {_number(values[1])}", number_distance(*values)
    yield "in stages the step returns something else", _tree_distance(ours.returned, theirs.returned)
    largest = _largest(theirs.gradients)
    for name, gradient in ours.gradients.items():
        distance = tensor_distance(gradient, theirs.gradients[name], largest)
        yield f"in stages the gradient of {name!r} differs by {_percent(distance)}", distance
    for one_settings, other_settings in zip(ours.settings, theirs.settings, strict=True):
        for name, value in other_settings.items():
            words = f"the optimizer sets {name!r} by all parameters together, and a stage has some of them only"
            yield words, number_distance(one_settings.get(name), value)
    largest = _largest(theirs.moved)
    for name, moved in ours.moved.items():
        distance = tensor_distance(moved, theirs.moved[name], largest)
        yield (
            f"in stages the optimizer's step of {name!r} differs by {_percent(distance)}, as if it looked at all parameters together",
            0.0 if distance <= _EQUAL_MOVES else distance,
        )
    for name, buffer in ours.buffers.items():
        yield f"in stages the buffer {name!r} has other values after the step", tensor_distance(buffer, theirs.buffers[name], 0.0)


def _largest(tensors: Mapping[str, Tensor | None]) -> float:
    return max((float(value.abs().max()) for value in tensors.values() if value is not None and value.numel()), default=0.0)


def number_distance(one: float | None, other: float | None) -> float:
    """The relative difference; infinite where only one number is there."""
    if one is None or other is None:
        return 0.0 if one is other else math.inf
    if math.isnan(one) or math.isnan(other):
        return 0.0 if math.isnan(one) and math.isnan(other) else math.inf
    return 0.0 if one == other else abs(one - other) / max(abs(one), abs(other))


def tensor_distance(one: Tensor | None, other: Tensor | None, largest: float) -> float:
    """The largest difference of an entry, relative to the largest entry of ``other``.

    Args:
        one: a tensor, or None.
        other: what it should be.
        largest: entry of all tensors of its kind.
    """
    if one is None or other is None:
        return 0.0 if one is other else math.inf
    if one.shape != other.shape:
        return math.inf
    if not one.numel() or torch.equal(one, other):
        return 0.0
    if not (one.is_floating_point() or one.is_complex()):
        return math.inf
    one, other = (value.to(torch.complex128 if value.is_complex() else torch.float64) for value in (one, other))
    same = (one == other) | (one.isnan() & other.isnan())
    apart = torch.where(same, torch.zeros_like(one), one - other).abs().max()
    if not math.isfinite(float(apart)):
        return math.inf
    scale = max(float(torch.where(other.isfinite(), other, torch.zeros_like(other)).abs().max()), _SMALL * largest)
    return float(apart) / scale if scale else math.inf if float(apart) else 0.0


def _tree_distance(one: Any, other: Any) -> float:
    """The difference of two outputs, leaf by leaf."""
    ours, theirs = tree_flatten(_plain(one)), tree_flatten(_plain(other))
    if ours[1] != theirs[1]:
        return math.inf
    return max((_leaf_distance(a, b) for a, b in zip(ours[0], theirs[0], strict=True)), default=0.0)


def _plain(value: Any) -> Any:
    """The value with dicts in place of mappings that torch's pytree takes for leaves, such as Hugging Face's outputs."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return [_plain(item) for item in value]
    return value


def _leaf_distance(one: Any, other: Any) -> float:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return tensor_distance(one, other, 0.0)
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return number_distance(one, other)
    return 0.0 if type(one) is type(other) else math.inf


def _number(value: float | None) -> str:
    return "missing" if value is None else f"{value:.6g}"


def _percent(distance: float) -> str:
    return f"{distance:.2g} of it" if math.isfinite(distance) else "all of it"


#: Hooks that run on every rank after steps, and may read what the steps kept.
_LATER = tuple(
    [f"on_{loop}_{point}_end" for loop in ("train", "validation", "test", "predict") for point in ("batch", "epoch")]
    + [f"on_{loop}_end" for loop in ("train", "validation", "test", "predict", "fit")]
    + [f"on_{loop}_epoch_start" for loop in ("train", "validation", "test", "predict")]
    + ["on_save_checkpoint", "on_before_zero_grad", "on_before_optimizer_step"]
)
_DEEP = 4
_EQUAL = 1e-5


def leftovers_apart(
    before: LightningModule, whole: LightningModule, stages: Sequence[LightningModule], blocks: Sequence[str] = ()
) -> str | tuple[str, ...]:
    """Why the stages' modules differ after a step in what a later hook may read. Where they don't, and where there is no such hook, the
    names of lists to which the step has appended what the last stage alone has: that can be handed to the others.

    Args:
        before: the module before the step.
        whole: a copy that ran the step whole.
        stages: a copy for each stage that ran the step in stages.
        blocks: FQNs of the blocks, whose own attributes aren't compared.
    """
    hooks = [hook for hook in _LATER if is_overridden(hook, before)]
    if not hooks:
        return ()
    appended: dict[str, None] = {}
    old, theirs = dict(_attributes(before, blocks)), dict(_attributes(whole, blocks))
    for name, value in theirs.items():
        if name in old and _alike(old[name], value, 0):
            continue  # the step doesn't change it
        last = dict(_attributes(stages[-1], blocks)).get(name)
        begun = old.get(name)
        if isinstance(value, list) and isinstance(begun, list) and _alike(value[: len(begun)], begun, 0) and _alike(last, value, 0):
            appended[name] = None
            continue
        for stage in stages:
            ours = dict(_attributes(stage, blocks))
            if name not in ours or not _alike(ours[name], value, 0):
                return f"the step keeps {name!r} on the module, which only some of the stages would have when {hooks[0]} may read it"
    return tuple(appended)


def _attributes(module: LightningModule, blocks: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """The attributes of the module and its children, without those of blocks and metrics, by a dotted name."""
    within = tuple(f"{name}." for name in blocks)
    for prefix, child in module.named_modules():
        if f"{prefix}.".startswith(within) or isinstance(child, Metric):
            continue
        for name, value in vars(child).items():
            if name not in _TORCH and not name.startswith("_"):
                yield f"{prefix}.{name}" if prefix else name, value


def names_of_absent(module: LightningModule) -> set[str]:
    """The names of attributes, parameters and buffers in which the module has tensors of another stage."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return {name for name, value in (*tensors, *_attributes(module, ())) if _holds_absent(value, 0)}


def _holds_absent(value: Any, depth: int) -> bool:
    if isinstance(value, nn.Module):
        value = [*value.parameters(), *value.buffers()]
    values = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return is_absent(value) or (depth <= _DEEP and any(_holds_absent(each, depth + 1) for each in values))


def _alike(one: Any, other: Any, depth: int) -> bool:
    """Whether two values are the same, judged by numbers, texts, tensors and their containers."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        if not isinstance(one, Tensor) or not isinstance(other, Tensor) or is_absent(one) or is_absent(other) or one.shape != other.shape:
            return False
        return torch.allclose(one.detach().double(), other.detach().double(), rtol=_EQUAL, atol=_EQUAL, equal_nan=True)
    kinds = [(type(each).__module__, type(each).__qualname__) for each in (one, other)]  # each mock has a class of its own
    if depth > _DEEP or kinds[0] != kinds[1]:
        return kinds[0] == kinds[1]
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_alike(value, other[name], depth + 1) for name, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(_alike(a, b, depth + 1) for a, b in zip(one, other, strict=True))
    if isinstance(one, float):
        return math.isclose(one, other, rel_tol=_EQUAL) or (math.isnan(one) and math.isnan(other))
    return one == other if isinstance(one, (bool, int, str, bytes)) else True


#: Attributes that torch and Lightning keep on every module.
_TORCH = frozenset((*vars(nn.Module()), "training", "log", "log_dict", "print", "all_gather", "manual_backward", "optimizers",
                    "lr_schedulers", "clip_gradients", "configure_model", "forward"))  # fmt: skip
