"""The state that a step uses: parameters, buffers, which of them it writes to, and generators. Knows modules only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from lightning_autopar.memory.batch import tensors_of
from lightning_autopar.state import rng
from lightning_autopar.strategies.undone import same_values


@dataclass
class Changes:
    """What a step writes to.

    Args:
        state: FQNs of buffers and parameters.
        batch: whether it writes to tensors of its batch.
    """

    state: set[str] = field(default_factory=set)
    batch: bool = False


class Sources:
    """Names of a module's parameters and buffers by identity.

    Args:
        module: the root.
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
        #: Ids of the tensors that count as tainted beside parameters: buffers that are written to.
        self.ids = frozenset(id(tensor) for name, tensor in state if name in written and not isinstance(tensor, nn.Parameter))

    def names(self, tensor: Tensor) -> list[str]:
        """The FQNs of a parameter or buffer; none of another tensor."""
        return self._names.get(id(tensor), [])

    def is_state(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter or a buffer."""
        return id(tensor) in self._names or isinstance(tensor, nn.Parameter)


@contextmanager
def changes(module: nn.Module, batch: Any) -> Iterator[Changes]:
    """Around a run of the step: what it writes to.

    Args:
        module: the root.
        batch: the very tensors that the step gets.
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
        if not moved and value is not None:  # normalisation's kernels write without counting
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
        """Let the next step find it, and be told by its mark if that uses it."""
        self.module.__dict__[self.attribute] = self.value
        self.value._autopar_kept = self.name  # type: ignore[attr-defined]
        self.version = self.value._version

    def is_new(self) -> bool:
        """Whether the next step has left another one, or changed it; else it is a table that was made once."""
        return self.module.__dict__.get(self.attribute) is not self.value or self.value._version != self.version


@contextmanager
def attributes(module: nn.Module) -> Iterator[list[Attribute]]:
    """Around a run of the step: the tensors that it leaves in attributes."""
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
    """Around a run of the step: the modules and attributes whose numbers it changes."""
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
