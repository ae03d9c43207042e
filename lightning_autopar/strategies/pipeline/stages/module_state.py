"""The state that a step uses (parameters, buffers and generators), and which of it is a stage's own. The rest is replaced by absent
tensors.

Knows modules and recordings; nothing of processes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from lightning_autopar.exact.absent.absent_tensor import absent_like, hole_parameter, is_absent
from lightning_autopar.exact.random import generator_states as rng
from lightning_autopar.memory.trace.first_batch import tensors_of
from lightning_autopar.strategies.pipeline.stages.cut_tensors import Staging
from lightning_autopar.strategies.trials.undo import same_values


@dataclass
class Changes:
    """What a step writes to.

    Args:
        state: FQNs of buffers and parameters.
        batch: whether it writes to tensors of its batch.
    """

    state: set[str] = field(default_factory=set)
    batch: bool = False


class ModuleState:
    """Names of a module's parameters and buffers by identity.

    Args:
        written: FQNs of buffers and parameters that the step writes to.
    """

    def __init__(self, module: nn.Module, written: frozenset[str]) -> None:
        self.written = written
        self._names: dict[int, list[str]] = defaultdict(list)
        self._kept: list[Tensor] = []
        state = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        for name, tensor in state:
            self._names[id(tensor)].append(name)
            self._kept.append(tensor)
        #: Ids of the tensors that count as tainted besides parameters: buffers that are written to.
        self.ids = frozenset(id(tensor) for name, tensor in state if name in written and not isinstance(tensor, nn.Parameter))

    def names(self, tensor: Tensor) -> list[str]:
        """The FQNs of a parameter or buffer; empty for another tensor."""
        return self._names.get(id(tensor), [])

    def is_state(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter or a buffer."""
        return id(tensor) in self._names or isinstance(tensor, nn.Parameter)


@contextmanager
def changes(module: nn.Module, batch: Any) -> Iterator[Changes]:
    """The context of a run of the step: yields what it writes to.

    Args:
        batch: the tensors that the step gets, not copies.
    """
    found = Changes()
    before = [(name, buffer, buffer._version, None if is_fake(buffer) else buffer.detach().clone()) for name, buffer in buffers_of(module)]
    parameters = [(name, parameter, parameter._version) for name, parameter in module.named_parameters(remove_duplicate=False)]
    versions = [(leaf, leaf._version) for leaf in tensors_of(batch)]
    norms = [name for name, child in module.named_modules() if isinstance(child, nn.modules.batchnorm._NormBase) and child.training]
    yield found
    now = dict(buffers_of(module))
    for name, buffer, version, value in before:
        moved = name not in now or now[name] is not buffer or buffer._version != version
        if not moved and value is not None:  # normalisation's kernels write without changing the version counter
            moved = not same_values(buffer, value)
        if not moved and value is None:
            moved = any(name.rpartition(".")[0] == norm for norm in norms)
        if moved:
            found.state.add(name)
    found.state.update(name for name, parameter, version in parameters if parameter._version != version)
    found.batch = any(leaf._version != version for leaf, version in versions)


@dataclass
class Attribute:
    """A tensor that a step leaves in an attribute, and that isn't a parameter or a buffer."""

    name: str
    module: nn.Module
    attribute: str
    value: Tensor
    version: int = 0

    def put(self) -> None:
        """Put it there for the next step, with a mark that shows if that step uses it."""
        self.module.__dict__[self.attribute] = self.value
        self.value._autopar_kept = self.name  # type: ignore[attr-defined]
        self.version = self.value._version

    def is_new(self) -> bool:
        """Whether the next step has left another tensor, or changed it; if not, it is a table that was made once."""
        return self.module.__dict__.get(self.attribute) is not self.value or self.value._version != self.version


@contextmanager
def attributes(module: nn.Module) -> Iterator[list[Attribute]]:
    """The context of a run of the step: yields the tensors that it leaves in attributes."""
    found: list[Attribute] = []
    before = {
        (child, name): (value, value._version)
        for child in module.modules()
        for name, value in vars(child).items()
        if isinstance(value, Tensor)
    }
    yield found
    for prefix, child in module.named_modules():
        for name, value in vars(child).items():
            if isinstance(value, Tensor) and not _is_same(before.get((child, name)), value):
                found.append(Attribute(f"{prefix}.{name}" if prefix else name, child, name, value))


@contextmanager
def counters(module: nn.Module) -> Iterator[list[tuple[str, str]]]:
    """The context of a run of the step: yields the modules and attributes whose numbers it changes."""
    found: list[tuple[str, str]] = []
    before = {prefix: dict(vars(child)) for prefix, child in module.named_modules()}
    yield found
    for prefix, child in module.named_modules():
        for name, value in vars(child).items():
            if isinstance(value, (int, float)) and name in before.get(prefix, ()) and before[prefix][name] != value:
                found.append((prefix, name))


def _is_same(before: tuple[Tensor, int] | None, value: Tensor) -> bool:
    return before is not None and before[0] is value and before[1] == value._version


def buffers_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    """All buffers under all of their names."""
    return list(module.named_buffers(remove_duplicate=False))


def host_generators() -> Any:
    """The states of Python's generator and of NumPy's."""
    state = rng.capture({}, cuda=False)
    numbers: Any = state.get("numpy")
    return state["python"], None if numbers is None else (numbers[1].tobytes(), *numbers[2:])


@dataclass(frozen=True, kw_only=True)
class StageParameters:
    """Which stages have which parameters and buffers.

    Args:
        names: FQNs of those that are here.
        shared: FQN → all stages that use it, of what several do; buffers that each stage has alike aren't among them.
        primary: FQN → the first stage that uses it, of every parameter and buffer.
    """

    names: frozenset[str] = frozenset()
    shared: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    primary: Mapping[str, int] = field(default_factory=dict)


def assign(module: nn.Module, staging: Staging, cuts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """The stages that use each parameter and each buffer, over all hooks. The first stage has what no hook uses. A tied parameter is used
    wherever one of its names is.

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
                if part % 2 == 0 and not _is_written(staging, name):  # it is read outside of blocks, in code that other stages run, too
                    found[id(tensor)].update(range(0 if recording.runs_again else stage, stages))
    return {name: tuple(sorted(found[key])) or (0,) for name, key in names.items()}


def take_stages(module: nn.Module, staging: Staging, cuts: Sequence[str], stages: Sequence[int], device: torch.device) -> StageParameters:
    """Leave in a module only what these stages use; everything else becomes absent tensors, in place.

    Args:
        module: whole, and not yet on the device.
        stages: which ones this process runs.
        device: where they will run: the absent tensors' device.

    Returns:
        Which stages have what. The module's own parameters stay the same objects.

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
                if tensor is None or fqn in here or is_absent(tensor):
                    continue
                if id(tensor) not in made:
                    if kind is child._parameters:
                        made[id(tensor)] = hole_parameter(tensor, f"the parameter {fqn!r}", device=device)
                    else:
                        made[id(tensor)] = absent_like(tensor, f"the buffer {fqn!r}", device=device)
                kind[name] = made[id(tensor)]
        if isinstance(child, nn.RNNBase):
            child._flat_weights = [getattr(child, name) if hasattr(child, name) else None for name in child._flat_weights_names]
    shared = {name: its for name, its in users.items() if len(its) > 1 and not (name in buffers and not _is_written(staging, name))}
    return StageParameters(names=here, shared=shared, primary={name: its[0] for name, its in users.items()})


def _is_written(staging: Staging, name: str) -> bool:
    return any(name in recording.written for recording in staging.hooks.values())
