"""torch's fake mode without what costs time and decides nothing. Knows torch; no module, no ledger.

Fake tensors are slow (some 100 µs an operation): most of a trace goes into finding out anew what the same operation gave a layer before.
This mode answers by itself what is asked most: where a tensor lies, what an operation in place gives (its first argument), and what an
operation gave when it was last called with tensors of the same shapes, strides and types. Everything else goes to torch. The answers are
the same; a step of a 7B model takes about half the time.
"""

from __future__ import annotations

import logging
import sys
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

_DEVICE = torch.ops.prim.device.default
_CPU = torch.device("cpu")


class _Known(NamedTuple):
    """What is known of an operator: whether it works in place, and whether its output follows from its arguments' metadata."""

    in_place: bool
    repeatable: bool


class _Made(NamedTuple):
    """A tensor that an operation returned; ``alias``: the place of the argument whose storage it shares, -1 for its own."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    alias: int


class _Unrepeatable(Exception):
    """Raised where a call can't be answered from the cache."""


class FastFakeMode(FakeTensorMode):
    """A fake mode that answers some calls itself; see the module's docstring."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._answers: dict[Any, Any] = {}

    @property
    def avoid_device_init(self) -> bool:
        """False, as all fakes are on the CPU. If true, torch's build for CUDA pretends from then on, in the whole process, that a machine
        without GPUs had eight (``torch._C._ensureCUDADeviceGuardSet``), and the next backward pass starts a thread for each; see
        :mod:`lightning_autopar._fork`.
        """
        return False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Dynamo never traces this mode: without its wrapper (``TorchDispatchMode.__init_subclass__``) a call is cheaper."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:
            return device_of(args[0])
        kwargs = kwargs or {}
        known = _known.get(func)
        if known is None:
            known = _known[func] = _Known(in_place(func), _repeatable(func))
        if known.in_place and _plain(args[0] if func._schema.returns else [item for item in args if isinstance(item, (list, tuple))]):
            return args[0] if func._schema.returns else None
        if not known.repeatable or torch.is_inference_mode_enabled():
            return self.dispatch(func, types, args, kwargs)
        tensors: list[FakeTensor] = []
        try:
            key = (func, _key(args, tensors), _key(tuple(kwargs.items()), tensors) if kwargs else None)
        except _Unrepeatable:
            return self.dispatch(func, types, args, kwargs)
        answer = self._answers.get(key, _UNKNOWN)
        if answer is _UNKNOWN:
            output = self.dispatch(func, types, args, kwargs)
            self._answers[key] = _remember(output, tensors)
            return output
        if answer is _NEVER:
            return self.dispatch(func, types, args, kwargs)
        return self._again(answer, tensors)

    def _again(self, answer: Any, tensors: list[FakeTensor]) -> Any:
        """Make the same output once more."""
        if answer is None:
            return None
        if not isinstance(answer, _Made):
            return type(answer)(self._again(item, tensors) for item in answer)
        if answer.alias < 0:
            meta = torch.empty_strided(answer.shape, answer.stride, dtype=answer.dtype, device="meta")
        else:
            meta = torch.empty(0, dtype=answer.dtype, device="meta")
            meta.set_(tensors[answer.alias].untyped_storage(), answer.offset, answer.shape, answer.stride)
        return FakeTensor(self, meta, _CPU)


def _others(record: logging.LogRecord) -> bool:
    """Whether torch's complaint of an operation isn't about one under this package's mode, whose exception says as much."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), FastFakeMode):
            return False
        frame = frame.f_back
    return True


logging.getLogger("torch._subclasses.fake_tensor").addFilter(_others)


def device_of(tensor: FakeTensor) -> torch.device:
    """What ``FakeTensor.__torch_dispatch__`` answers to ``prim.device``, which C++ asks twice an operation."""
    return torch.device("meta") if tensor.fake_mode.in_kernel_invocation else tensor.fake_device


def another(tensor: Any) -> Any:
    """Another fake on the same storage; a value that isn't a plain fake is returned as it is."""
    if type(tensor) is not FakeTensor or tensor.layout is not torch.strided or (tensor.is_leaf and tensor.requires_grad):
        return tensor
    with _disable_current_modes():
        meta = torch.empty(0, dtype=tensor.dtype, device="meta")
        meta.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        return FakeTensor(tensor.fake_mode, meta, tensor.fake_device)


_known: dict[Any, _Known] = {}
_NEVER = object()
_UNKNOWN = object()
_PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format})


def in_place(function: Any) -> bool:
    """Whether an operator writes to its first argument, or first list of tensors, returns that or nothing, and resizes nothing."""
    schema = function._schema
    name = schema.name
    if not name.startswith("aten::") or not name.endswith("_") or torch.Tag.inplace_view in function.tags:
        return False
    if any(word in name for word in ("resize", "transpose", "sparse", "coalesced", "requires_grad")):
        return False
    if name.startswith("aten::_fused_") and not schema.returns:
        # An optimizer's update of lists of tensors. SGD's and Adagrad's have no kernel for fakes: torch would run them on real zeros, as
        # large as all parameters together (``maybe_run_unsafe_fallback``).
        return not function.has_kernel_for_dispatch_key(torch._C.DispatchKey.Meta)
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments]
    if not written or not written[0] or any(written[1:]) or len(schema.returns) > 1:
        return False
    if not schema.returns:
        return bool(name.startswith("aten::_foreach_"))
    returned = schema.returns[0].alias_info
    return returned is not None and returned.is_write and str(schema.arguments[0].type) == "Tensor"


def _plain(target: Any) -> bool:
    """Whether the target of an operation in place is fake, and not a constant whose value torch stores."""
    if isinstance(target, (list, tuple)):
        return all(_plain(item) for item in target)
    return type(target) is FakeTensor and target.constant is None and target.layout is torch.strided


def _repeatable(function: Any) -> bool:
    """Whether an operator's output depends on nothing but its arguments' metadata, and it changes none of them."""
    schema = function._schema
    unlike = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
    return schema.name.startswith("aten::") and not schema.is_mutable and not unlike & set(function.tags) and "lift" not in schema.name


def _key(values: Any, tensors: list[FakeTensor]) -> tuple[Any, ...]:
    """The key of an operator's arguments, and the tensors among them."""
    found: list[Any] = []
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None or value.layout is not torch.strided or value.fake_device != _CPU or value.is_conj():
                raise _Unrepeatable
            tensors.append(value)
            found.append((value.shape, value.stride(), value.dtype, value.storage_offset()))
        elif kind in _PLAIN:
            found.append((kind, value))  # 1, 1.0 and True are equal, and give different types
        elif kind is list or kind is tuple:
            found.append((kind, _key(value, tensors)))
        else:
            raise _Unrepeatable
    return tuple(found)


def _remember(output: Any, tensors: list[FakeTensor]) -> Any:
    """Cache an operation's output, or that it can't be cached."""
    if type(output) in (list, tuple):
        items = [_remember(item, tensors) for item in output]
        own = [
            item.untyped_storage()._cdata for item, made in zip(output, items, strict=True) if isinstance(made, _Made) and made.alias < 0
        ]
        return _NEVER if any(item is _NEVER for item in items) or len(set(own)) < len(own) else type(output)(items)
    if output is None:
        return None
    if type(output) is not FakeTensor or output.layout is not torch.strided or output.is_conj() or output.is_neg():
        return _NEVER
    if output.constant is not None or output.fake_device != _CPU or any(output is tensor for tensor in tensors):
        return _NEVER
    storage = output.untyped_storage()
    alias = next((place for place, tensor in enumerate(tensors) if tensor.untyped_storage()._cdata == storage._cdata), -1)
    made = _Made(tuple(output.shape), output.stride(), output.dtype, int(output.storage_offset()), alias)
    if alias < 0:
        again = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta")
        if made.offset or again.untyped_storage().nbytes() != storage.nbytes():
            return _NEVER
    return made
