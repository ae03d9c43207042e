"""Which parameters and buffers are a stage's own; the others make way for holes. Knows modules and recordings; nothing of processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_autopar.strategies.staged.hole import hole_like, hole_parameter, is_hole
from lightning_autopar.strategies.staged.recording import Staging


@dataclass(frozen=True, kw_only=True)
class Owned:
    """Which parameters and buffers are where.

    Args:
        names: FQNs of those that are here.
        shared: FQN → all stages that use it, of what several do; buffers that each stage has alike aren't among them.
        primary: FQN → the first stage that uses it, of every parameter and buffer.
    """

    names: frozenset[str] = frozenset()
    shared: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    primary: Mapping[str, int] = field(default_factory=dict)


def assign(module: nn.Module, staging: Staging, cuts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """The stages that use each parameter and each buffer, over all hooks. What no hook uses is the first stage's.

    Tied parameters are used wherever one of their names is.

    Raises:
        ValueError: if a hook can't be cut there.
    """
    for recording in staging.hooks.values():
        recording.bounds(cuts)
    stages = len(cuts) + 1
    found: dict[int, set[int]] = defaultdict(set)
    names: dict[str, int] = {}
    for name, tensor in (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)):
        names[name] = id(tensor)
        for recording in staging.hooks.values():
            for part in recording.parameters.get(name, ()):
                found[id(tensor)].add(recording.stage_of(part, cuts))
            for part in recording.buffers.get(name, ()):
                stage = recording.stage_of(part, cuts)
                found[id(tensor)].add(stage)
                if part % 2 == 0 and not _is_written(staging, name):  # read outside of blocks: all later stages run that code, too
                    found[id(tensor)].update(range(stage, stages))
    return {name: tuple(sorted(found[key])) or (0,) for name, key in names.items()}


def take_stages(module: nn.Module, staging: Staging, cuts: Sequence[str], stages: Sequence[int], device: torch.device) -> Owned:
    """Leave in a module what some stages use; everything else becomes holes, in place.

    Args:
        module: whole; nothing of it is on the device yet.
        staging: the recordings of its hooks.
        cuts: FQNs of the blocks with which the second and every later stage begins.
        stages: which ones this process runs.
        device: where they will run: the holes' device.

    Returns:
        What is where. The module's own parameters stay the objects that they were.

    Raises:
        ValueError: if a hook can't be cut there.
    """
    users = assign(module, staging, cuts)
    buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    here = frozenset(name for name, its in users.items() if any(stage in stages for stage in its))
    made: dict[int, Tensor] = {}
    for prefix, child in list(module.named_modules()):
        kinds: tuple[dict[str, Any], ...] = (child._parameters, child._buffers)
        for kind in kinds:
            for name, tensor in kind.items():
                fqn = f"{prefix}.{name}" if prefix else name
                if tensor is None or fqn in here or is_hole(tensor):
                    continue
                if id(tensor) not in made:
                    if kind is child._parameters:
                        made[id(tensor)] = hole_parameter(tensor, f"the parameter {fqn!r}", device=device)
                    else:
                        made[id(tensor)] = hole_like(tensor, f"the buffer {fqn!r}", device=device)
                kind[name] = made[id(tensor)]
        if isinstance(child, nn.RNNBase):
            child._flat_weights = [getattr(child, name) if hasattr(child, name) else None for name in child._flat_weights_names]
    shared = {name: its for name, its in users.items() if len(its) > 1 and not (name in buffers and not _is_written(staging, name))}
    return Owned(names=here, shared=shared, primary={name: its[0] for name, its in users.items()})


def _is_written(staging: Staging, name: str) -> bool:
    return any(name in recording.written for recording in staging.hooks.values())
