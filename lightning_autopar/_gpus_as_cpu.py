"""In a process that sees no GPU, code that names one works on the CPU: ``.cuda()``, ``device="cuda"``, ``.to(0)``, streams and events.

For trials of the user's step, whose values are the same there, but for draws. Knows torch's functions that take a device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._device import _device_constructors

from lightning_autopar._temporary import patched

_CPU = torch.device("cpu")
#: Methods of tensors that take a device.
_METHODS = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")


@contextmanager
def gpus_as_cpu() -> Iterator[None]:
    """While open, it is so in this process."""
    makers = [name for name in dir(torch) if not name.startswith("_") and getattr(torch, name) in _device_constructors()]
    with ExitStack() as stack:
        for name in makers:
            stack.enter_context(patched(torch, name, _on_cpu(getattr(torch, name))))
        for name in _METHODS:
            stack.enter_context(patched(Tensor, name, _on_cpu(getattr(Tensor, name))))
        stack.enter_context(patched(Tensor, "to", _on_cpu(Tensor.to, ordinals=True)))
        for name in ("cuda", "pin_memory"):
            stack.enter_context(patched(Tensor, name, lambda self, *args, **kwargs: self))
        stack.enter_context(patched(torch, "Generator", _Generator))
        stack.enter_context(patched(Tensor, "record_stream", _nothing))
        for name, value in _OF_CUDA.items():
            stack.enter_context(patched(torch.cuda, name, value))
        stack.enter_context(_entered(None))  # what the code sets as its stream holds no longer
        yield


def _on_cpu(function: Callable[..., Any], *, ordinals: bool = False) -> Callable[..., Any]:
    """Wraps a function that makes or moves tensors. With ``ordinals``, a number among its arguments is a GPU, as in ``tensor.to(0)``."""

    def is_gpu(device: Any) -> bool:
        if isinstance(device, str):
            return device.startswith("cuda")
        if isinstance(device, torch.device):
            return device.type == "cuda"
        return ordinals and isinstance(device, int) and not isinstance(device, bool)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        args = tuple(_CPU if is_gpu(argument) else argument for argument in args)
        if "device" in kwargs and (is_gpu(kwargs["device"]) or isinstance(kwargs["device"], int)):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return wrapper


class _Kind(type):
    """Whose instances are torch's own generators, which are no objects of a class of Python's."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, torch._C.Generator)


class _Generator(metaclass=_Kind):
    def __new__(cls, device: Any = "cpu") -> Any:
        return torch._C.Generator()


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


class _Done:
    """A stream or an event: all that it was given is done."""

    cuda_stream = 0
    wait_stream = wait_event = wait = record = synchronize = _nothing

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or _Done()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Any) -> float:
        return 1.0  # milliseconds, by which code may divide


_DEFAULT = _Done()
#: The streams that are entered, the current one last.
_streams = [_DEFAULT]


def stream_number(known: dict[object, int]) -> int:
    """The number of the stream on which code works now: 0 of the default one; of others the next one, unless it is known."""
    return known.setdefault(_streams[-1], len(known)) if _streams[-1] is not _DEFAULT else 0


@contextmanager
def _entered(stream: _Done | None) -> Iterator[None]:
    _streams.append(_streams[-1] if stream is None else stream)
    try:
        yield
    finally:
        _streams.pop()


def _set_stream(stream: _Done) -> None:
    _streams[-1] = stream


#: What ``torch.cuda`` has instead meanwhile.
_OF_CUDA: dict[str, Any] = {
    **dict.fromkeys(("Stream", "Event"), _Done),
    **dict.fromkeys(("synchronize", "reset_peak_memory_stats"), _nothing),
    "current_stream": lambda device=None: _streams[-1],
    "default_stream": lambda device=None: _DEFAULT,
    "stream": _entered,
    "set_stream": _set_stream,
    "device": nullcontext,
    "current_device": lambda: 0,
}
