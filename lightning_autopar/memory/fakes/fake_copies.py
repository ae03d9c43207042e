"""Fake copies of modules and batches, and what makes libraries treat them as real. Knows torch; no trainer, no ledger of memory.

A fake tensor has a shape, a dtype and a device, but no storage: a step of a 7B model runs on a laptop in seconds.
"""

from __future__ import annotations

import copy
import functools
import logging
import random
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import CellType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils import _foreach_utils
from torch.utils.data import DataLoader, Dataset

from lightning_autopar._gpus_as_cpu import gpus_as_cpu
from lightning_autopar._temporary import patched
from lightning_autopar.memory.cuda_overhead import Target
from lightning_autopar.memory.fakes.as_cuda import as_cuda
from lightning_autopar.memory.fakes.composites import composites_as_real
from lightning_autopar.memory.fakes.dynamic_shapes import padded
from lightning_autopar.memory.fakes.fake_mode import FastFakeMode
from lightning_autopar.memory.fakes.shadow_values import ShadowValues

log = logging.getLogger(__name__)

UNCOMPILED = "torch.compile was left out; a compiled step may keep less"
#: The widest head that cuDNN's attention takes where it is asked first (``check_cudnn_tensor_shapes``, sdp_utils.cpp).
CUDNN_HEADS: dict[Target, int] = {"sm90": 256, "sm100": 128}


def fake_mode() -> FakeTensorMode:
    """A mode in which real tensors of the user's code become fake automatically."""
    return FastFakeMode(allow_non_fake_inputs=True)


def fake_copy(
    value: Any,
    mode: FakeTensorMode | None,
    shadow: ShadowValues | None,
    *,
    dtype: torch.dtype | None = None,
    known: Mapping[int, Any] | None = None,
) -> Any:
    """A deep copy in which every tensor, wherever it is, is fake and on the CPU. No storage is copied, and tied tensors stay tied.

    ``module.to()`` raises under a fake mode; a deep copy whose tensors are replaced on the way doesn't (see
    https://github.com/pytorch/pytorch/issues/113447).

    Args:
        value: a module, a batch, anything that can be deep-copied. Attributes of modules that can't be are shared.
        mode: where the fakes live; None for real copies of all tensors.
        shadow: gets the values of small tensors other than parameters.
        dtype: for floating-point tensors of the batch, or parameters and buffers of the module; None leaves them.
        known: what stands for objects that aren't to be copied, by their ids.
    """
    cast_ids = None
    if isinstance(value, nn.Module):
        cast_ids = {id(tensor) for module in value.modules() for tensor in (*module._parameters.values(), *module._buffers.values())}

    def to_fake(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        if id(tensor) not in memo:
            wanted = dtype if dtype is not None and tensor.is_floating_point() and (cast_ids is None or id(tensor) in cast_ids) else None
            memo[id(tensor)] = fake = _fake(tensor, mode, wanted)
            if type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__ and vars(tensor):  # a step may need it
                give_attributes(fake, copy.deepcopy(vars(tensor), memo))
            if shadow is not None and not isinstance(tensor, (nn.Parameter, FakeTensor)) and tensor.device.type != "meta":
                shadow.put(memo[id(tensor)], tensor)
        found: Tensor = memo[id(tensor)]
        return found

    memo: dict[int, Any] = dict(known or {})
    modules = list(value.modules()) if isinstance(value, nn.Module) else []
    for module in modules:
        for attribute in vars(module).values():
            if isinstance(attribute, (Dataset, DataLoader, np.ndarray)):
                memo[id(attribute)] = attribute  # not copied: large, and no part of the step
    with patched(Tensor, "__deepcopy__", to_fake), patched(nn.Parameter, "__deepcopy__", to_fake), _copied_along(modules):
        try:
            return copy.deepcopy(value, dict(memo))
        except Exception as error:
            log.debug("a plain deep copy failed (%s); sharing what can't be copied", error)
        for module in modules:
            state = module.__getstate__() if hasattr(module, "__getstate__") else vars(module)
            for name, attribute in state.items():
                if name in ("_parameters", "_buffers", "_modules"):
                    continue
                try:
                    copy.deepcopy(attribute, dict(memo))
                except Exception as error:
                    log.debug("sharing %s.%s: %s", type(module).__name__, name, error)
                    memo[id(attribute)] = attribute
        return copy.deepcopy(value, memo)


def give_attributes(tensor: Tensor, given: Mapping[str, Any]) -> None:
    """Give a tensor the user's attributes of the one whose place it takes. Its own are kept, such as a fake's device and mode."""
    vars(tensor).update({name: value for name, value in given.items() if name not in vars(tensor)})


def _fake(tensor: Tensor, mode: FakeTensorMode | None, dtype: torch.dtype | None) -> Tensor:
    """A tensor's fake on the CPU; a parameter's fake is a parameter."""
    if mode is None:
        fake = tensor.detach().to(device="cpu", dtype=dtype or tensor.dtype, copy=True)
        return nn.Parameter(fake, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
    with mode:
        # A subclass without a dispatcher of its own (points, images) is a plain tensor to every operation.
        plain = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__ or isinstance(tensor, FakeTensor)
        if plain and tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested:
            fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype or tensor.dtype, device="cpu")
        else:
            fake = mode.from_tensor(tensor.detach())
    if isinstance(tensor, nn.Parameter) or getattr(tensor, "_is_param", False):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad and tensor.is_floating_point())


@contextmanager
def as_if_real(shadow: ShadowValues | None, target: Target) -> Iterator[None]:
    """While open, libraries treat fakes like real tensors, and choose the kernels that they would choose on the target.

    Args:
        shadow: answers ``Tensor.numpy``; zeros where it doesn't know. None leaves it.
        target: anything but ``"cpu"`` makes the step use torch's kernels for that target, see :func:`.as_cuda.as_cuda`.
    """
    with ExitStack() as stack:
        stack.enter_context(composites_as_real())
        stack.enter_context(patched(torch, "compile", functools.partial(_no_compile, {} if shadow is None else shadow.guesses)))
        if "torch._dynamo" in sys.modules:
            # Inductor can't compile for fakes that aren't its own.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        import_utils = sys.modules.get("transformers.utils.import_utils")
        if import_utils is not None and hasattr(import_utils, "is_fake_tensor"):
            # Hugging Face takes fakes for an export, and would build other masks.
            stack.enter_context(patched(import_utils, "is_fake_tensor", lambda value: False))
        if shadow is not None:
            stack.enter_context(patched(Tensor, "numpy", lambda self, *, force=False: _numpy(self, shadow)))
            stack.enter_context(patched(Tensor, "__format__", _format))
            stack.enter_context(patched(nn.Module, "_apply", _apply))
            stack.enter_context(patched(torch._VF, "_pad_packed_sequence", functools.partial(padded, shadow)))
            # Clipping runs over all gradients at once on a CPU, too, where their type is known.
            stack.enter_context(patched(_foreach_utils, "_foreach_supported_types", [*_foreach_utils._foreach_supported_types, FakeTensor]))
            stack.enter_context(gpus_as_cpu())  # where the fakes are
        if target != "cpu":
            stack.enter_context(as_cuda({} if shadow is None else shadow.guesses, cudnn_head=CUDNN_HEADS.get(target, 0)))
        yield


def _no_compile(notes: dict[str, None], model: Any = None, **_: Any) -> Any:
    notes[UNCOMPILED] = None
    return model if model is not None else (lambda function: function)


def is_compiled(module: nn.Module) -> bool:
    """Whether a module, or a method of it, was given to ``torch.compile``."""
    functions = (value for value in vars(module).values() if isinstance(value, (FunctionType, MethodType)))
    wrapped = any(hasattr(value, "_torchdynamo_orig_callable") for value in functions)
    return wrapped or isinstance(module, torch._dynamo.OptimizedModule) or getattr(module, "_compiled_call_impl", None) is not None


@contextmanager
def drawing_nothing() -> Iterator[None]:
    """While open, code may draw from the generators of Python, numpy and torch; afterwards their states are restored."""
    python, arrays = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)


@contextmanager
def _copied_along(modules: list[nn.Module]) -> Iterator[None]:
    """Copies what ``copy`` would share with the original: generators (for their draws) and functions. A function that ``torch.compile``
    made from a module's method, or that closes over a module (a hook that uses ``self``), is made anew for the copy. Modules whose class
    has a ``__new__`` with arguments (ema_pytorch's) are copied without it.
    """
    dispatch: dict[type, Any] = copy._deepcopy_dispatch  # type: ignore[attr-defined]
    own = {id(module) for module in modules}
    before = dispatch[FunctionType]

    def generator(value: torch.Generator, memo: dict[int, Any]) -> torch.Generator:
        duplicated: torch.Generator = memo.setdefault(id(value), value.clone_state())
        return duplicated

    def function(value: FunctionType, memo: dict[int, Any]) -> Any:
        written = getattr(value, "_torchdynamo_orig_callable", None)
        if written is not None:
            return copy.deepcopy(written, memo)
        contents = [cell.cell_contents if _filled(cell) else cell for cell in value.__closure__ or ()]
        if not any(id(content) in own for content in contents):
            return value
        cells = tuple(
            CellType(copy.deepcopy(content, memo)) if id(content) in own else cell
            for cell, content in zip(value.__closure__ or (), contents, strict=True)
        )
        made = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
        made.__kwdefaults__ = value.__kwdefaults__
        made.__dict__.update(value.__dict__)
        return made

    def by_state(value: nn.Module, memo: dict[int, Any]) -> nn.Module:
        memo[id(value)] = made = object.__new__(type(value))
        made.__setstate__(copy.deepcopy(value.__getstate__(), memo))
        return made

    others: set[type] = {
        type(module) for module in modules if type(module).__new__ is not nn.Module.__new__ and not hasattr(module, "__deepcopy__")
    }
    dispatch[torch.Generator], dispatch[FunctionType] = generator, function
    dispatch.update(dict.fromkeys(others, by_state))
    try:
        yield
    finally:
        for kind in {torch.Generator, *others}:
            del dispatch[kind]
        dispatch[FunctionType] = before


def _filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # an empty one
        return False


def _numpy(tensor: Tensor, shadow: ShadowValues) -> Any:
    value = shadow.array(tensor)
    with unset_fake_temporarily():
        return _original_numpy(value)


def _format(tensor: Tensor, spec: str) -> str:
    """Format a number, also a fake one."""
    return format(tensor.item(), spec) if tensor.dim() == 0 and spec else _original_format(tensor, spec)


def _apply(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """``Module.to`` and similar on fakes: torch's own swaps tensors, which fails if they have weak references, as a fake's mode has."""
    for child in module.children() if recurse else ():
        child._apply(function)
    known = _APPLIED.setdefault(function, {})
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        with torch.no_grad():
            applied = function(parameter)
        if applied is parameter:
            continue
        if applied.device == parameter.device:
            parameter.data = applied
        else:  # tied ones stay tied
            new = known.setdefault(id(parameter), (parameter, nn.Parameter(applied, parameter.requires_grad)))[1]
            give_attributes(new, vars(parameter))
            module._parameters[name] = new
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = function(buffer)
    return module


#: For each function being applied: what it has replaced, by the old parameter's id (and the parameter itself, to keep the id).
_APPLIED: weakref.WeakKeyDictionary[Any, dict[int, tuple[nn.Parameter, nn.Parameter]]] = weakref.WeakKeyDictionary()


_original_numpy: Callable[..., Any] = Tensor.numpy
_original_format: Callable[..., str] = Tensor.__format__
