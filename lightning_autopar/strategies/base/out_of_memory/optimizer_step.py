"""An optimizer's first step on the only device: where it runs out of memory, it is undone and done again with less.

The gradients are complete then, so that more parts of the batch don't help. An optimizer's first step is its largest: it makes the state,
and holds as many temporary tensors as any later one. So parameters and state are copied into host memory before it, and put back. The
second try has the memory that lay about in pieces, and updates one tensor after the other (``foreach=False``). Several ranks don't do so
alone: their parameters would differ by a rounding. Knows torch's optimizers; not how gradients came about.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_autopar._temporary import patched
from lightning_autopar.devices.host import host_memory
from lightning_autopar.strategies.base.out_of_memory.rerun import free_memory
from lightning_autopar.strategies.base.worker_exception import out_of_memory

if TYPE_CHECKING:
    from lightning_autopar.strategies.base.run_plan import RunPlan

#: Where a step is predicted to take no more of a GPU than this, only so many bytes of parameters are copied: 10 GB take seconds.
_ROOMY_SHARE, _QUICK_BYTES = 0.5, 512 << 20
#: No warning: one that somebody has turned into an exception would end the run.
_LOG = logging.getLogger(__name__)


def is_guarded(run_plan: RunPlan, optimizer: Any) -> bool:
    """Whether an optimizer's first step is worth a copy: on a GPU, where the copy is quick, or the plan isn't known to leave half of the
    memory.
    """
    (device,) = run_plan.devices
    reserved_bytes = run_plan.reserved_bytes.get(device.id)
    is_roomy = reserved_bytes is not None and reserved_bytes <= _ROOMY_SHARE * device.free_bytes
    return device.kind == "cuda" and (not is_roomy or sum(each.nbytes for each in _parameters(optimizer)) <= _QUICK_BYTES)


class FirstStep:
    """An optimizer's first step, which may be done twice.

    Args:
        device: where it runs, for the line that says so.
    """

    def __init__(self, optimizer: Any, device: str) -> None:
        self._optimizer, self._device = optimizer, device
        #: Whether the optimizer has made its step.
        self.done = False
        self._losses: list[Any] = []
        self._in_closure = False

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """While open, the optimizer's ``step`` is done again where it runs out of memory."""
        optimizer, step = self._optimizer, self._optimizer.step
        hooks = [getattr(optimizer, f"_optimizer_step_{each}_hooks", None) for each in ("pre", "post")]
        if any(hooks) or not all(isinstance(held, dict) for held in optimizer.state.values()):  # hooks would be called twice
            self.done = True
            yield
            return
        with patched(optimizer, "step", lambda *args, **kwargs: self._run(step, args, kwargs)):
            yield

    def _run(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        closure, others = (args[0], args[1:]) if args else (kwargs.get("closure"), ())
        named = {name: value for name, value in kwargs.items() if name != "closure"}
        if closure is not None:
            named["closure"] = lambda: self._close(closure)
        before = _Before.of(self._optimizer)
        try:
            found = step(*others, **named)
            self.done = True
            return found
        except Exception as error:  # several classes say that memory ran out; the others are raised
            if self._in_closure or not isinstance(error, (RuntimeError, MemoryError)) or not out_of_memory(error):
                raise
            if before is None:
                error.add_note("autopar: the optimizer's step wasn't done again, as host memory had no room for a copy of what it changes")
                raise
        # Outside of the handler, as the exception holds the failed step's tensors.
        before.put_back(self._optimizer)
        free_memory()
        for group in self._optimizer.param_groups:
            if "foreach" in group:
                group["foreach"] = False
        _LOG.warning(
            f"autopar: {self._device} ran out of memory in the optimizer's step. The step is done again: from now on the optimizer updates "
            "one tensor after the other (foreach=False), which takes less memory and more time"
        )
        self.done = True
        known, self._losses = self._losses[:1], []  # the batch's gradients are there: its closure isn't called again
        if known and closure is not None:
            named["closure"] = lambda: known.pop() if known else closure()
        return step(*others, **named)

    def _close(self, closure: Callable[[], Any]) -> Any:
        """The batch's forward and backward: their own shortage isn't the optimizer's."""
        self._in_closure = True
        self._losses.append(closure())
        self._in_closure = False
        return self._losses[-1]


class _Before:
    """What an optimizer's step changes, in host memory."""

    def __init__(self, optimizer: Any) -> None:
        self._groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
        self._parameters = [(each, _copied(each)) for each in _parameters(optimizer)]
        self._state = {each: {name: (value, _copied(value)) for name, value in held.items()} for each, held in optimizer.state.items()}

    @classmethod
    def of(cls, optimizer: Any) -> _Before | None:
        """None where the host has too little room."""
        tensors = [*_parameters(optimizer), *(each for held in optimizer.state.values() for each in held.values())]
        needed_bytes = sum(each.nbytes for each in tensors if isinstance(each, Tensor))
        return cls(optimizer) if 2 * needed_bytes < host_memory()[1] else None

    def put_back(self, optimizer: Any) -> None:
        """Make all of it as it was."""
        with torch.no_grad():
            for parameter, copy in self._parameters:  # whatever was written: an optimizer that writes to ``data`` leaves no trace
                parameter.copy_(copy)
            for key in [key for key in optimizer.state if key not in self._state]:
                del optimizer.state[key]
            for key, held in self._state.items():
                for value, copy in held.values():
                    if isinstance(value, Tensor):
                        value.copy_(copy)
                optimizer.state[key] = {name: value for name, (value, _) in held.items()}
        for group, values in zip(optimizer.param_groups, self._groups, strict=True):
            group.update(values)


def _parameters(optimizer: Any) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _copied(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
