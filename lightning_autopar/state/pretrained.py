"""Loads weights from Hugging Face's files into a module without a copy for each process; and puts tensors without values in a module's
places.

Where a file has the wanted dtype, ``from_pretrained`` maps it: pages come as they are read, all processes share them, and the kernel drops
them when memory is short. This module does the rest: what must be computed (another dtype, weights that the files lack) may be larger than
memory, and a process that only needs the shapes gets no weights. Knows transformers' loading; no plan, no ranks.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from lightning_autopar._temporary import patched
from lightning_autopar.memory.fakes.fake_copies import give_attributes
from lightning_autopar.state.scratch_files import SMALL_BYTES, ScratchFile, hand_back_freed, hand_back_pages


def move_tensors(module: nn.Module, device: str, which: Callable[[Tensor], bool]) -> None:
    """Replace some of a module's tensors by tensors without values on another device; tied ones stay tied.

    Args:
        device: of what takes their place.
        which: tells the ones.
    """
    fresh: dict[int, Any] = {}
    for child in module.modules():
        slots: dict[str, Any]
        for slots in (child._parameters, child._buffers):
            for name, tensor in slots.items():
                if tensor is None or not which(tensor):
                    continue
                if id(tensor) not in fresh:
                    empty = torch.empty_like(tensor.detach(), device=device)
                    parameter = isinstance(tensor, nn.Parameter)
                    new = fresh[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if parameter else empty
                    give_attributes(new, vars(tensor))
                slots[name] = fresh[id(tensor)]


_CPU = torch.device("cpu")
#: Tensors that a load computes stay in ordinary memory up to this share of the free memory.
MEMORY_SHARE = 0.5
#: How many bytes of a scratch file may be written before its pages are handed back.
_WINDOW_BYTES = 256 * 1024**2
#: Tells transformers (5.x, ``core_model_loading.convert_and_load_state_dict_in_model``) to convert one tensor after the other: its threads
#: hold many of them at a time, and no mode of this thread sees them.
_ONE_BY_ONE = "HF_DEACTIVATE_ASYNC_LOAD"


def load_pretrained(model_class: Any, source: str | os.PathLike[str], **options: Any) -> Any:
    """``model_class.from_pretrained(source, **options)``, for models larger than memory as well.

    Weights that the files have in the wanted dtype are mapped, as transformers does. What has to be computed, such as 32-bit weights from a
    16-bit file or a head that the files lack, is computed tensor by tensor. If all of it would take more than half of the free memory, it
    lies in a nameless file in the working folder (or the system's folder for temporary files), whose pages the kernel loads and drops. A
    forked process's writes to the weights are its own, wherever they lie. It works with and without this package's strategy, in a script, a
    module's ``__init__`` and its ``configure_model``.

    Args:
        model_class: ``AutoModelForCausalLM`` or another class of transformers with ``from_pretrained``.
        source: a folder, or a name on the hub.
        options: as of ``from_pretrained``, such as ``dtype=torch.float32``.

    Returns:
        What ``from_pretrained`` returns; as there, the model is in evaluation mode.
    """
    if torch.get_default_device().type == "meta" or _fakes():
        return model_class.from_pretrained(source, **options)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or 1)
    with ScratchFile(Path.cwd()) as scratch:
        room = _Room(scratch, int(psutil.virtual_memory().available * MEMORY_SHARE / processes))
        return _loaded(lambda: model_class.from_pretrained(source, **options), room.place)


@contextmanager
def shapes_only() -> Iterator[None]:
    """While open, modules are built on the meta device, and ``from_pretrained``, which refuses that device, gives shapes, too. For
    processes whose part of the weights comes from another one. The result has all that a load would give: dtypes, tied weights and so on.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.device("meta"))
        if "transformers" in sys.modules:  # transformers imports this part of itself at its first use, which may be in here
            modeling = importlib.import_module("transformers.modeling_utils")
            load = modeling.PreTrainedModel.__dict__["from_pretrained"].__func__

            def shapes(cls: Any, *args: Any, **options: Any) -> Any:
                return _shapes(lambda: load(cls, *args, **options))

            stack.enter_context(patched(modeling.PreTrainedModel, "from_pretrained", classmethod(shapes)))
        yield


#: Copies a tensor's values, in a dtype, to new memory.
_Place = Callable[[Tensor, torch.dtype], Tensor]


class _Room:
    """Memory for what a load computes: ordinary memory first, then a scratch file.

    Args:
        scratch: for what is more than that.
        memory_bytes: what may lie in ordinary memory.
    """

    def __init__(self, scratch: ScratchFile, memory_bytes: int) -> None:
        self._scratch = scratch
        self._left_bytes = memory_bytes
        self._since_bytes = 0

    def place(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """A tensor with these values in its own memory; one that lies there already stays, if it may."""
        size_bytes = values.numel() * dtype.itemsize
        if self._left_bytes >= size_bytes:
            self._left_bytes -= size_bytes
            return values.to(dtype)
        kept = self._scratch.keep(values, dtype)
        self._since_bytes += size_bytes
        if self._since_bytes >= _WINDOW_BYTES:
            self._since_bytes = 0
            hand_back_pages()
        return kept


class _Placed(TorchDispatchMode):
    """A mode that decides where each large tensor lies that an operator makes on the CPU, except views."""

    def __init__(self, place: _Place) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._place = place

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and _is_large(args[0]) and kwargs.get("device") in (None, _CPU):
            dtype = kwargs.get("dtype") or args[0].dtype
            if dtype != args[0].dtype:
                return self._place(args[0], dtype)
        made = func(*args, **kwargs)
        if any(each.alias_info is not None for each in func._schema.returns):
            return made
        return tree_map_only(Tensor, lambda tensor: self._place(tensor, tensor.dtype) if _is_large(tensor) else tensor, made)


def _is_large(tensor: Tensor) -> bool:
    plain = type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.is_contiguous()
    return plain and tensor.nbytes >= SMALL_BYTES


def _loaded(load: Callable[[], Any], place: _Place) -> Any:
    with _variable(_ONE_BY_ONE, "1"), _Placed(place):
        loaded = load()
    hand_back_pages()
    hand_back_freed()
    return loaded


def _shapes(load: Callable[[], Any]) -> Any:
    """The result of a load on the meta device: files are mapped but not read, and nothing is computed."""
    with torch.device("cpu"):
        loaded = _loaded(load, lambda values, dtype: torch.empty_like(values, dtype=dtype, device="meta"))
    move_tensors(loaded[0] if isinstance(loaded, tuple) else loaded, "meta", lambda tensor: True)
    return loaded


def without_values(module: nn.Module) -> str | None:
    """The first tensor on the meta device that nothing will give values, by its name: its module has no ``reset_parameters``."""
    for path, child in module.named_modules():
        if callable(getattr(child, "reset_parameters", None)):
            continue
        for name, tensor in (*child.named_parameters(recurse=False), *child.named_buffers(recurse=False)):
            if tensor.is_meta:
                return f"{path}.{name}".lstrip(".")
    return None


def check_values(module: nn.Module) -> None:
    """Refuse a module that would be trained from uninitialised memory.

    Raises:
        ValueError: if one of its tensors is on the meta device, and nothing gives it values.
    """
    if (name := without_values(module)) is not None:
        raise ValueError(
            f"{name!r} is on the meta device: it has a shape and no values, which is enough to plan for, not to run. Load the module's "
            "weights in the script, or in configure_model, as by lightning_autopar.load_pretrained(AutoModelForCausalLM, folder)"
        )


def _fakes() -> bool:
    """Whether operators make fake tensors now."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """While open, the environment has another value."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
