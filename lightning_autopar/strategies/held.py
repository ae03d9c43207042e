"""Which tensors a rank's engine holds, by what they are: on its device, and in host memory what its plan offloads.

Knows engines' ways to hold them; measures nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_autopar._lightning_compat import bare_optimizer
from lightning_autopar.memory.recorder import HOST
from lightning_autopar.memory.storages import storage_sizes
from lightning_autopar.strategies.staged.hole import is_hole
from lightning_autopar.strategies.zero_held import held_by_zero, host_held_by_zero

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy

    from lightning_autopar.plans import Plan


def held_storages(strategy: Strategy) -> dict[str, dict[int, int]]:
    """Bytes by storage of all that a step finds there, by kind; of a CPU device also what is the host's."""
    module = strategy.lightning_module
    assert module is not None
    tensors: dict[str, Iterable[Tensor]] = {
        "parameters": _here(module.parameters()),
        "gradients": gradients_of(strategy),
        "optimizer": _states(strategy),
        "buffers": _here(module.buffers()),
    }
    if (zero := _zero(strategy)) is not None:
        for kind, theirs in held_by_zero(zero, module).items():
            if kind != "gradients":
                tensors[kind] = chain(theirs, () if kind == "parameters" else tensors.get(kind, ()))
    if strategy.root_device.type == "cpu":
        tensors[HOST] = _on_host(strategy)
    return {kind: storage_sizes(each, strategy.root_device) for kind, each in tensors.items()}


def plan_of(strategy: Strategy) -> Plan:
    """What an engine executes."""
    plan: Plan = strategy.assignment.plan  # type: ignore[attr-defined]  # every engine has one
    return plan


def _zero(strategy: Strategy) -> Any | None:
    """DeepSpeed's engine, where that is what trains."""
    return strategy.model if plan_of(strategy).engine == "zero" and strategy.optimizers else None


def _states(strategy: Strategy) -> Iterator[Tensor]:
    """The optimizers' states; none where they lie on disk, in pages that the kernel takes back."""
    if plan_of(strategy).optimizer_on_disk:
        return iter(())
    return _here(_tensors(chain.from_iterable(bare_optimizer(optimizer).state.values() for optimizer in strategy.optimizers)))


def _on_host(strategy: Strategy) -> Iterator[Tensor]:
    """What the plan offloads; between steps, when FSDP2's module has its shards."""
    module, offload = strategy.lightning_module, plan_of(strategy).offload
    assert module is not None
    if (zero := _zero(strategy)) is not None:
        yield from host_held_by_zero(zero, module)
    elif "parameters" in offload:
        yield from module.parameters()
        yield from gradients_of(strategy)
    if "optimizer" in offload:
        yield from _states(strategy)


def gradients_on_host(strategy: Strategy) -> Iterator[Tensor]:
    """Those that came about in this step. FSDP2 puts each into host memory when it is reduced; DeepSpeed has buffers all along."""
    plan = plan_of(strategy)
    if plan.engine == "fsdp" and plan.offload:
        for group in chain.from_iterable(bare_optimizer(optimizer).param_groups for optimizer in strategy.optimizers):
            yield from (parameter.grad for parameter in group["params"] if parameter.grad is not None)


def gradients_of(strategy: Strategy) -> Iterator[Tensor]:
    """The optimizers' parameters come first: under FSDP2 the module holds others while it is gathered. DeepSpeed keeps them to itself."""
    module = strategy.lightning_module
    assert module is not None
    if (zero := _zero(strategy)) is not None:
        yield from held_by_zero(zero, module)["gradients"]
    groups = chain.from_iterable(bare_optimizer(optimizer).param_groups for optimizer in strategy.optimizers)
    for parameter in chain(chain.from_iterable(group["params"] for group in groups), module.parameters()):
        if not is_hole(parameter) and parameter.grad is not None:
            yield parameter.grad


def _here(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Those that this rank has, of a module whose stages lie on several."""
    return (tensor for tensor in tensors if not is_hole(tensor))


def _tensors(values: Any) -> Iterator[Tensor]:
    """Those inside of nested containers, as LBFGS and Shampoo keep them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from _tensors(value.values())
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
