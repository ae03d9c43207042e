"""Shows the user's code a whole parameter of ZeRO-3 wherever it looks, and keeps what it writes there.

At stage 3 a parameter is empty except while DeepSpeed lends it to a module. A hook that takes its norm would get 0, silently. So each use
of a parameter by torch passes through here first. Knows parameters and their parts, and how DeepSpeed gathers; no plan, no trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_autopar._lightning import rank_zero_warn
from lightning_autopar._temporary import patched
from lightning_autopar.state.flat_parts import FlatPart
from lightning_autopar.strategies.base.process_group import wait_for_all_ranks
from lightning_autopar.strategies.zero.partitions.module import is_partitioned, is_whole, part_of, register_external, running_modules

#: Functions that need only the whole parameter's shape.
_SHAPES = frozenset(
    {
        Tensor.shape.__get__,  # type: ignore[attr-defined]
        Tensor.ndim.__get__,  # type: ignore[attr-defined]
        Tensor.nbytes.__get__,  # type: ignore[attr-defined]
        Tensor.size,
        Tensor.numel,
        Tensor.nelement,
        Tensor.dim,
        Tensor.stride,
        Tensor.is_contiguous,
        Tensor.__len__,
    }
)
#: Functions that don't use the parameter's values.
_OTHERS = frozenset(
    {
        *(
            getattr(getattr(Tensor, name), access)
            for name in ("requires_grad", "grad", "data", "_backward_hooks", "_post_accumulate_grad_hooks")
            for access in ("__get__", "__set__", "__delete__")
            if hasattr(Tensor, name) and (name, access) != ("data", "__get__")
        ),
        *(
            getattr(Tensor, name).__get__
            for name in (
                "dtype",
                "device",
                "layout",
                "is_leaf",
                "grad_fn",
                "_version",
                "is_cuda",
                "is_cpu",
                "is_meta",
                "is_sparse",
                "itemsize",
            )
            if hasattr(Tensor, name)
        ),
        Tensor.requires_grad_,
        Tensor.register_hook,
        Tensor.register_post_accumulate_grad_hook,
        Tensor.is_floating_point,
        Tensor.is_complex,
        Tensor.element_size,
        Tensor.__hash__,
    }
)


_GET_DATA: Any = Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]


class _Watched(nn.Parameter):
    """A parameter whose uses are noticed; assigning an object's class makes it one, or plain again."""

    _watch: ParameterViews

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Handle the parameters among the arguments, then call the function."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func == _SET_DATA and not cls._watch.busy:
                cls._watch.exchanged(args[0], args[1])
            elif func not in _OTHERS and not cls._watch.busy:
                if func in _SHAPES and is_partitioned(args[0]):
                    return func(cls._watch.shape_of(args[0]), *args[1:], **kwargs)
                if func not in _SHAPES:
                    for leaf in tree_leaves((args, kwargs)):
                        if isinstance(leaf, _Watched):
                            cls._watch.used(leaf, taken=func == _GET_DATA)
            if not (others := tuple(kind for kind in types if not issubclass(kind, _Watched))):
                return func(*args, **kwargs)
        # With a tensor of the user's class, it is that class's call, as if the parameter were a plain one.
        called = (kind.__torch_function__(func, others, args, kwargs) for kind in others)
        return next((result for result in called if result is not NotImplemented), NotImplemented)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A copy is a plain parameter."""
        memo[id(self)] = copied = nn.Parameter(self.detach().clone(), requires_grad=self.requires_grad)
        return copied


class ParameterViews:
    """Lets the user's code use whole parameters.

    In a user's step, DeepSpeed gathers parameters for the modules that are called. Others that the step uses (all parameters, for a
    penalty, say) are gathered in the way in which DeepSpeed handles those that a module takes from another one. Outside of steps, a
    parameter is gathered when it is used, and stays whole until the next step begins. What the user's code writes to a whole parameter is
    copied into the parts before DeepSpeed frees it: each rank has written the same, and takes its own part.

    Args:
        module: the root, after DeepSpeed's initialisation.
        weight_parts: this rank's parts of the parameters, by their ids.
        forget_order: makes DeepSpeed learn anew in which order parameters are needed.
    """

    def __init__(
        self, module: nn.Module, weight_parts: Callable[[], Mapping[int, FlatPart]], forget_order: Callable[[], None] = lambda: None
    ) -> None:
        self._module = module
        self._parts = weight_parts
        self._forget_order = forget_order
        #: Whether this package itself is handling parameters.
        self.busy = False
        self._depth = 0
        self._nested = len(running_modules())
        self._visits = 0
        self._warned = False
        self._used: dict[int, nn.Parameter] = {}
        #: Whether the user's step is running, and what it has used: each parameter, and its version when it was first used.
        self._stepping = False
        self._seen: dict[int, tuple[nn.Parameter, int]] = {}
        self._opened: list[Any] = []
        self._handles: list[Any] = []
        kind = type("WatchedParameter", (_Watched,), {"_watch": self, "__doc__": _Watched.__doc__})
        self._plain = [each for each in module.parameters() if type(each) is nn.Parameter and is_partitioned(each)]
        if not self._plain:
            return
        for parameter in self._plain:
            parameter.__class__ = kind
            parameter.partition = partial(self._partition, parameter, parameter.partition)  # type: ignore[attr-defined]
        for child in module.modules():
            self._handles.append(child.register_forward_pre_hook(self._enter, prepend=True))
            self._handles.append(child.register_forward_hook(self._leave, always_call=True))

    @contextmanager
    def inside(self, *, step: bool = False) -> Iterator[None]:
        """The context of the user's steps and what belongs to them.

        Args:
            step: whether it is the user's own step; not backward, nor the optimizer's step, after which whole parameters are stale.
        """
        if not self._depth:
            self._settle()
        self._keep_seen()
        before, self._stepping = self._stepping, step
        self._depth += 1
        try:
            yield
        finally:
            self._keep_seen()
            self._depth -= 1
            self._stepping = before

    @contextmanager
    def handling(self) -> Iterator[None]:
        """The context in which this package handles parts of parameters: no use gathers a parameter."""
        with self.inside(), patched(self, "busy", True):
            yield

    def close(self) -> None:
        """Keep what was written, and make parameters and module plain again."""
        self._settle()
        for parameter in self._plain:
            parameter.__class__ = nn.Parameter
            parameter.partition = parameter.partition.args[1]  # type: ignore[attr-defined]
        for handle in self._handles:
            handle.remove()
        self._plain, self._handles = [], []

    # -- a parameter is used -----------------------------------------------------------------------------------------------------------

    @staticmethod
    def shape_of(parameter: Any) -> Tensor:
        """A tensor without memory that looks like the whole parameter."""
        return torch.empty(parameter.ds_shape, dtype=parameter.dtype, device="meta")

    def used(self, parameter: Any, *, taken: bool = False) -> None:
        """Make it whole, if it isn't.

        Args:
            parameter: that is about to be used.
            taken: whether its ``data`` is used, which may be written to without a trace.
        """
        if not self._depth:
            self._used[id(parameter)] = parameter
        elif self._stepping and (taken or id(parameter) not in self._seen):
            self._seen[id(parameter)] = parameter, -1 if taken else parameter._version
        if is_whole(parameter) or parameter.ds_status.name != "NOT_AVAILABLE":
            return
        self.busy = True
        try:
            if self._depth:
                if (len(running_modules()) > self._nested or not _in_backward()) and _lend(parameter):
                    self._forget_order()
            else:
                name = next((name for name, each in self._module.named_parameters() if each is parameter), "a parameter")
                self._warn(name)
                wait_for_all_ranks(f"the parameter {name} was used outside of a step")
                parameter.all_gather()
                self._opened.append(parameter)
        finally:
            self.busy = False

    def exchanged(self, parameter: Any, value: Tensor) -> None:
        """Its ``data`` is set: by DeepSpeed after it has gathered it (which is in flight then) and when it frees it, or by the user."""
        if is_partitioned(parameter) and value.shape == parameter.ds_shape and parameter.ds_status.name != "INFLIGHT":
            self.used(parameter, taken=True)

    def _partition(self, parameter: nn.Parameter, original: Callable[..., None], param_list: Any = None, *args: Any, **kwargs: Any) -> None:
        """DeepSpeed's ``partition``, which frees whole parameters."""
        for each in [parameter] if param_list is None else param_list:
            self._keep_written(each)
        original(param_list, *args, **kwargs)

    def _keep_seen(self) -> None:
        """Keep what the step has written so far."""
        for parameter, _ in list(self._seen.values()):
            self._keep_written(parameter)
        self._seen.clear()

    def _keep_written(self, parameter: nn.Parameter) -> None:
        _, version = self._seen.get(id(parameter), (parameter, None))
        if version is None:
            return
        if version != parameter._version:
            with patched(self, "busy", True), torch.no_grad():
                self._keep(parameter, part_of(parameter))
                self._seen[id(parameter)] = parameter, parameter._version

    def _warn(self, name: str) -> None:
        if not self._warned:
            self._warned = True
            rank_zero_warn(
                f"autopar: {name} is used outside of a step, where ZeRO-3 leaves each device a part of it. It is gathered, and stays whole "
                "until the next step begins; the prediction doesn't include that time and memory"
            )

    # -- a module is called ------------------------------------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self._depth and not self._visits:
            return
        if not self._visits:
            wait_for_all_ranks(f"{type(module).__name__} was called outside of a step")
            self._settle()
            self._depth += 1
            self._stepping = True
        self._visits += 1

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._visits:
            self._visits -= 1
            if not self._visits:
                self._keep_seen()
                self._depth -= 1
                self._stepping = False

    # -- the next step begins ----------------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Keep what was written into whole parameters since the last step, and put them back into parts; no communication."""
        used, self._used = self._used, {}
        opened, self._opened = self._opened, []
        self.busy = True
        try:
            if used:
                parts = self._parts()
                with torch.no_grad():
                    for parameter in used.values():
                        self._keep(parameter, parts[id(parameter)])
            if opened:
                opened[0].partition(opened)
        finally:
            self.busy = False

    @staticmethod
    def _keep(parameter: nn.Parameter, part: FlatPart) -> None:
        """Copy a whole parameter's values into this rank's part."""
        if is_whole(parameter) and part.flat.numel():
            own = part.cut(parameter.data)
            if own.data_ptr() != part.flat.data_ptr():
                part.flat.copy_(own)


def _lend(parameter: Any) -> bool:
    """Gather a parameter for the running module until that ends, and again for its backward pass; returns whether this is the first time.
    DeepSpeed does the same when a module's forward takes a parameter from another module (``parameter_offload.py``, ``ZeROOrderedDict``).
    """
    stack = running_modules()
    new = bool(stack) and register_external(stack[-1], parameter)
    parameter.all_gather()
    return new


def _in_backward() -> bool:
    """Whether autograd's engine is calling: outside of a recomputed forward it is then DeepSpeed, which looks for gradients."""
    return bool(torch._C._current_graph_task_id() != -1)
