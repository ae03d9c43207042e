"""What all ranks must do alike under FSDP2, whatever their samples: gather the same units, and reduce the same gradients.

Knows FSDP2's units and groups of parameters; no plan, no trainer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_autopar.exact.step.step_rollback import GRAD, own_gradient
from lightning_autopar.strategies.base.process_group import wait_for_all_ranks

#: By how much ranks may be apart within a step, as they have met where it began.
SKEW = timedelta(seconds=30)
_SAMPLES_DECIDE = (
    "samples decide which modules are called (as with routed experts), and in the batches that planning looked at they didn't; "
    "run with allow=['single', 'ddp'], or let the step call each of them"
)


class GatherOrder:
    """The order in which a step's forward gathers units. A gather takes all ranks: where this one departs from the order that is expected,
    that of the step before, as it skips a unit that none of its samples needs, it waits until all ranks do, rather than gather another unit
    than they.

    Args:
        expected: the units' names, in an order that is as good as any before the first step.
    """

    def __init__(self, expected: list[str]) -> None:
        self._expected = expected

    def begin(self) -> None:
        """A step begins."""
        self._place, self._gathered = 0, list[str]()

    def gathers(self, name: str) -> None:
        """A unit is about to be gathered."""
        left = self._expected[self._place :]
        if name not in left[:1]:
            wait_for_all_ranks(f"{name!r} was called{f' before {left[0]!r}' if left else ' again'}", _SAMPLES_DECIDE, within=SKEW)
        if name in left:
            self._place += left.index(name) + 1
        self._gathered.append(name)

    def end(self) -> None:
        """The step's forward is over."""
        if left := self._expected[self._place :]:
            wait_for_all_ranks(f"a step ended without a call of {left[0]!r}", _SAMPLES_DECIDE, within=SKEW)
        self._expected = self._gathered


def agree_on_gradients(groups: Iterable[Any], uneven: Collection[int]) -> None:
    """From now on, all ranks reduce the same gradients of a group. FSDP2 reduces those that a rank has, in one piece: where another rank
    has others, as its samples went to other experts, the sums are wrong, or the ranks hang.

    Args:
        groups: of parameters, of all units and the root.
        uneven: ids of the modules whose parameters may get a gradient on some ranks only.
    """
    for group in groups:
        if "post_backward" not in vars(group):
            group.post_backward = partial(_post_backward, group, group.post_backward)
        group._always_asks = any(id(parameter._module_info.module) in uneven for parameter in group.fsdp_params)
        group._had = None


def _post_backward(group: Any, original: Any, *args: Any) -> None:
    """Reduce, with gradients of zeros where only other ranks have one; a parameter that nobody has a gradient of gets none."""
    if group.reduce_grads:
        trained = [each for each in group.fsdp_params if hasattr(each, "_unsharded_param") and each.sharded_param.requires_grad]
        has = [each.unsharded_accumulated_grad is not None or own_gradient(each.unsharded_param) is not None for each in trained]
        if group._always_asks or has != group._had:
            if not (group._always_asks or group._had is None):
                wait_for_all_ranks("other parameters than in the batch before got a gradient", _SAMPLES_DECIDE, within=SKEW)
            for parameter, here, anywhere in zip(trained, has, _on_any_rank(group, has), strict=True):
                if anywhere and not here:
                    GRAD.__set__(parameter.unsharded_param, torch.zeros_like(parameter.unsharded_param))
        group._had = has
    original(*args)


def _on_any_rank(group: Any, flags: list[bool]) -> list[bool]:
    """Which flags are set on some rank; a small collective."""
    numbers = torch.tensor(flags, dtype=torch.int32, device=group.device)
    dist.all_reduce(numbers, dist.ReduceOp.MAX, group._reduce_scatter_process_group)
    if group._is_hsdp:
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group._all_reduce_process_group)
    return [bool(number) for number in numbers.tolist()]


def groups_of(unit: Any) -> list[Any]:
    """A unit's groups of parameters: torch 2.11 has one group or None, 2.13 a list."""
    state = unit._get_fsdp_state()
    return [group for group in getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)] if group]


def without_views(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """A unit's output without views: if the step changes a view in place, FSDP2's hook on it is lost, and the gradients are wrong.

    What the unit hands on as it came stays one tensor for all units (T5's position bias): no parameter of the unit has a part in it.
    """
    came = {id(leaf) for leaf in tree_leaves((args, kwargs))}

    def alone(tensor: Tensor) -> Tensor:
        return tensor.clone() if tensor._is_view() and tensor.requires_grad and id(tensor) not in came else tensor

    return tree_map_only(Tensor, alone, output)
