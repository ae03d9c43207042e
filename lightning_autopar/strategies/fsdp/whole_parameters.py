"""When FSDP2's parameters are whole: in the user's steps and in calls from hooks. Everywhere else they are shards. Knows modules, no plan.

FSDP2 gathers a unit's parameters for its ``forward`` and may leave them whole after it. The shards take over a write to a whole parameter
(:mod:`.written_parameters`). After the optimizer has stepped on the shards, a parameter that was left whole is stale: hence this rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_autopar.strategies.base.process_group import wait_for_all_ranks
from lightning_autopar.strategies.fsdp.written_parameters import begin_step, groups_of, keep_writes


def numbers_of_whole_tensors() -> None:
    """Make ``.item()`` and ``float()`` of a sharded tensor give the whole tensor's number, in this process, for good.

    ``float(parameter.norm())`` in a hook would otherwise be this rank's shard's, without a word (torch 2.13, ``DTensor`` dispatches
    ``_local_scalar_dense`` to the local tensor). It becomes a collective: whoever asks on one rank alone waits for the others.
    """
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers  # there is no public registry
    handlers[torch.ops.aten._local_scalar_dense.default] = _whole_number


def _whole_number(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].detach().full_tensor().item()


class WholeParameters:
    """Gathers the root's own parameters for calls from outside of a step, and puts all back into shards where none should be whole.

    A call from outside is one of a hook: ``self(batch)`` or ``self.decoder(latent)`` in ``on_train_epoch_end``, say, or Hugging Face's
    ``generate``. Units gather their own parameters; what the root holds besides them is gathered when any module outside of the units is
    called.

    Args:
        root: the module, sharded.
        optimizers: those that will step on its parameters.
    """

    def __init__(self, root: nn.Module, optimizers: Iterable[Optimizer] = ()) -> None:
        self._root = root
        self._units = [module for module in root.modules() if isinstance(module, FSDPModule)]
        self._inside = False
        self._visits = 0
        keep_writes(self._units)
        self._handles: list[Any] = [optimizer.register_step_pre_hook(lambda *_: self.reshard()) for optimizer in optimizers]
        if isinstance(root, FSDPModule):
            # The root is what runs first, unless it is said before; and a hook may well call a part of it first.
            root._get_fsdp_state()._lazy_init()
            for module in (root, *_outside_units(root)):
                self._handles += [
                    module.register_forward_pre_hook(self._enter, prepend=True),
                    module.register_forward_hook(self._leave, always_call=True),
                ]

    @contextmanager
    def inside(self, *, backward: bool = False) -> Iterator[None]:
        """Around a step or its backward pass, where FSDP2 itself knows when to gather."""
        if not backward:
            begin_step(self._units)
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    def reshard(self) -> None:
        """Put all parameters back into shards; no communication."""
        for unit in self._units:
            unit.reshard()

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(self, module: nn.Module, args: Any) -> None:
        root: Any = self._root
        if self._inside:
            if module is not root and any(group.is_sharded for group in groups_of(root)):
                root.unshard()  # the step has asked for a state dict, which is one of shards
            return
        self._visits += 1
        if self._visits == 1:
            wait_for_all_ranks(f"{type(module).__name__} was called")
            root.unshard()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._inside or not self._visits:
            return
        self._visits -= 1
        differentiable = torch.is_grad_enabled() and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(output))
        if not self._visits and not differentiable:  # a backward pass may follow, and needs them
            self.reshard()


def _outside_units(root: nn.Module) -> Iterator[nn.Module]:
    """The modules under the root whose call needs parameters of the root's: the outermost ones, and those that hold such parameters."""

    def walk(module: nn.Module, outermost: bool) -> Iterator[nn.Module]:
        for child in module.children():
            if isinstance(child, FSDPModule) or next(child.parameters(), None) is None:
                continue
            container = isinstance(child, (nn.ModuleList, nn.ModuleDict))
            if (outermost and not container) or next(child.parameters(recurse=False), None) is not None:
                yield child
            yield from walk(child, outermost and container)

    yield from dict.fromkeys(walk(root, True))
