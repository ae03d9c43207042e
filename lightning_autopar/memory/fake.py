"""Fake copies of modules and batches, and the values that a step asks of them. Knows torch; no trainer, no ledger of memory.

A fake tensor has a shape, a dtype and a device, but no storage: a step of a 7B model runs on a laptop in seconds.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset
from torch.utils.weak import WeakTensorKeyDictionary

log = logging.getLogger(__name__)

Target = Literal["cpu", "cuda"]
aten = torch.ops.aten
#: Tensors up to these sizes keep their real values beside the fake: token ids and masks on one hand, small tables of numbers on the other.
_SHADOW_ELEMENTS = 1 << 22
_SHADOW_FLOATS = 4096


def fake_mode() -> FakeTensorMode:
    """A mode in which real tensors that the user's code brings along become fake by themselves."""
    return FakeTensorMode(allow_non_fake_inputs=True)


class ShadowValues(TorchDispatchMode):
    """Answers what depends on values (``.item()``, ``nonzero``, boolean indexing) from real values kept beside small fakes.

    Where there is none, a question is answered with False or 0, boolean indexing selects everything (the upper bound of its memory), and
    the guess is noted in :attr:`guesses`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.guesses: dict[str, None] = {}
        self._values: Any = WeakTensorKeyDictionary()

    def put(self, fake: Tensor, real: Tensor) -> None:
        """Keep a copy of the real tensor's values beside the fake, if it is small enough."""
        if self._keeps(real):
            self._values[fake] = real.detach().to(device="cpu", copy=True)

    def get(self, fake: Tensor) -> Tensor | None:
        """The real values, where they are known."""
        value: Tensor | None = self._values.get(fake)
        return value

    @staticmethod
    def _keeps(tensor: Tensor) -> bool:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return False
        return tensor.numel() <= (_SHADOW_FLOATS if tensor.is_floating_point() or tensor.is_complex() else _SHADOW_ELEMENTS)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default:
            return self._scalar(func, args[0])
        if func is aten.nonzero.default:
            return self._nonzero(args[0])
        if func in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default):
            args = (args[0], self._integer_indices(args[1]), *args[2:])
        output = func(*args, **kwargs)
        self._follow(func, args, kwargs, output)
        return output

    def _scalar(self, function: Any, fake: Tensor) -> Any:
        value = self.get(fake)
        if value is not None:
            with unset_fake_temporarily():
                return value.item()
        if getattr(fake, "constant", None) is not None:
            return function(fake)
        self.guesses[f"a {fake.dtype} value that the step reads was taken to be zero"] = None
        return False if fake.dtype is torch.bool else 0.0 if fake.is_floating_point() else 0

    def _nonzero(self, fake: Tensor) -> Tensor:
        value = self.get(fake)
        if value is None:
            self.guesses["a selection by values was taken to select everything"] = None
            return torch.empty((fake.numel(), fake.dim()), dtype=torch.long, device=fake.device)
        with unset_fake_temporarily():
            real = value.nonzero()
        output = torch.empty(real.shape, dtype=torch.long, device=fake.device)
        self._values[output] = real
        return output

    def _integer_indices(self, indices: list[Tensor | None]) -> list[Tensor | None]:
        """Boolean masks among the indices as integer indices."""
        found: list[Tensor | None] = []
        for index in indices:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                found += self._nonzero(index).unbind(1)
            else:
                found.append(index)
        return found

    def _follow(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Compute the output's real values where all inputs' are known; forget those that were overwritten with unknown ones."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        known = all(tensor in self._values for tensor in tensors) and not _undefined(function)
        if not outputs or not known or not all(self._keeps(leaf) for leaf in outputs):
            if function._schema.is_mutable:
                for argument, value in zip(function._schema.arguments, args, strict=False):
                    if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor):
                        self._values.pop(value, None)
            return
        with unset_fake_temporarily(), torch.no_grad():
            try:
                value = function(*tree_map(self._real, args), **tree_map(self._real, kwargs))
            except RuntimeError as error:
                log.debug("no real value of %s: %s", function, error)
                return
        for fake, real in zip(outputs, (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)), strict=False):
            if fake.shape == real.shape:
                self._values[fake] = real

    def _real(self, leaf: Any) -> Any:
        """An argument as the real operation gets it."""
        if isinstance(leaf, Tensor):
            return self._values[leaf]
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def _undefined(function: Any) -> bool:
    """Whether an operation's values are random or uninitialised."""
    return torch.Tag.nondeterministic_seeded in function.tags or "empty" in function._schema.name


def fake_copy(value: Any, mode: FakeTensorMode | None, shadow: ShadowValues | None, *, dtype: torch.dtype | None = None) -> Any:
    """A deep copy in which every tensor, wherever it is, is fake and on the CPU. No storage is copied, and tied tensors stay tied.

    ``module.to()`` raises under a fake mode; a deep copy whose tensors are replaced on the way doesn't
    (https://github.com/pytorch/pytorch/issues/113447 has the like).

    Args:
        value: a module, a batch, anything that can be deep-copied. Attributes of modules that can't are shared.
        mode: where the fakes live; None for real copies of all tensors.
        shadow: gets the values of small tensors other than parameters.
        dtype: for floating-point tensors of the batch, or parameters and buffers of the module; None leaves them.
    """
    cast_ids = None
    if isinstance(value, nn.Module):
        cast_ids = {id(tensor) for module in value.modules() for tensor in (*module._parameters.values(), *module._buffers.values())}

    def to_fake(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        if id(tensor) not in memo:
            wanted = dtype if dtype is not None and tensor.is_floating_point() and (cast_ids is None or id(tensor) in cast_ids) else None
            memo[id(tensor)] = _fake(tensor, mode, wanted)
            if shadow is not None and not isinstance(tensor, (nn.Parameter, FakeTensor)) and tensor.device.type != "meta":
                shadow.put(memo[id(tensor)], tensor)
        fake: Tensor = memo[id(tensor)]
        return fake

    memo: dict[int, Any] = {}
    modules = list(value.modules()) if isinstance(value, nn.Module) else []
    for module in modules:
        for attribute in vars(module).values():
            if isinstance(attribute, (Dataset, DataLoader, np.ndarray)):
                memo[id(attribute)] = attribute  # not copied: large, and no part of the step
    with _replaced(Tensor, "__deepcopy__", to_fake), _replaced(nn.Parameter, "__deepcopy__", to_fake):
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


def _fake(tensor: Tensor, mode: FakeTensorMode | None, dtype: torch.dtype | None) -> Tensor:
    """One tensor's fake on the CPU; a parameter's is a parameter."""
    if mode is None:
        fake = tensor.detach().to(device="cpu", dtype=dtype or tensor.dtype, copy=True)
        return nn.Parameter(fake, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
    with mode:
        if type(tensor) in (Tensor, nn.Parameter, nn.Buffer, FakeTensor) and tensor.layout is torch.strided:
            fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype or tensor.dtype, device="cpu")
        else:
            fake = mode.from_tensor(tensor.detach())
    if isinstance(tensor, nn.Parameter) or getattr(tensor, "_is_param", False):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad and tensor.is_floating_point())


@contextmanager
def as_if_real(shadow: ShadowValues | None, target: Target) -> Iterator[None]:
    """While open, libraries treat fakes as they would real tensors, and pick the kernels that they would pick on the target.

    Args:
        shadow: answers ``Tensor.numpy``; zeros where it doesn't know. None leaves it.
        target: ``"cuda"`` makes the step use what torch uses there and not on a CPU: fused attention, dropout with a boolean mask, foreach
            optimizers (never chosen on fakes, ``torch.optim.optimizer._default_to_fused_or_foreach``).
    """
    with ExitStack() as stack:
        stack.enter_context(_replaced(torch, "compile", _no_compile))
        if "torch._dynamo" in sys.modules:
            # Inductor can't compile for fakes that aren't its own.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        import_utils = sys.modules.get("transformers.utils.import_utils")
        if import_utils is not None and hasattr(import_utils, "is_fake_tensor"):
            # Hugging Face takes fakes for an export, and builds other masks then.
            stack.enter_context(_replaced(import_utils, "is_fake_tensor", lambda value: False))
        if shadow is not None:
            stack.enter_context(_replaced(Tensor, "numpy", lambda self, *, force=False: _numpy(self, shadow)))
        if target == "cuda":
            stack.enter_context(_replaced(nn.functional, "scaled_dot_product_attention", _cuda_attention))
            stack.enter_context(_replaced(nn.functional, "dropout", _cuda_dropout))
            optimizer = sys.modules["torch.optim.optimizer"]
            types = optimizer._foreach_supported_types
            stack.enter_context(_replaced(optimizer, "_foreach_supported_types", [*types, FakeTensor]))
            stack.enter_context(_replaced(optimizer, "_get_foreach_kernels_supported_devices", lambda: ["cuda", "cpu"]))
        yield


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute, and put back or remove it on leaving."""
    own = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def _no_compile(model: Any = None, **_: Any) -> Any:
    return model if model is not None else (lambda function: function)


def _numpy(tensor: Tensor, shadow: ShadowValues) -> Any:
    value = shadow.get(tensor) if isinstance(tensor, FakeTensor) else tensor
    with unset_fake_temporarily():
        if value is None:
            shadow.guesses["an array of values that the step reads was taken to be zeros"] = None
            value = torch.zeros(tensor.shape, dtype=tensor.dtype)
        return _original_numpy(value)


_original_numpy = Tensor.numpy
_original_attention = nn.functional.scaled_dot_product_attention
_original_dropout = nn.functional.dropout


def _cuda_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention by the kernel that a GPU would take: flash in half precision without a mask, else memory-efficient."""
    if query.dim() != 4 or (attn_mask is not None and attn_mask.requires_grad):
        return _original_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (tensor.to(torch.get_autocast_dtype("cpu")) for tensor in (query, key, value))
    if enable_gqa and key.size(1) != query.size(1):
        repeats = query.size(1) // key.size(1)
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    with torch.autocast("cpu", enabled=False):
        if query.dtype in (torch.float16, torch.bfloat16) and attn_mask is None and query.size(-1) == value.size(-1):
            flash: Tensor = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
            return flash
        if attn_mask is not None:
            mask = attn_mask
            if mask.dtype is torch.bool:
                mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
            attn_mask = mask.to(query.dtype).expand(query.size(0), query.size(1), query.size(2), key.size(2))
        efficient: Tensor = aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
        )[0]
        return efficient


def _cuda_dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or inplace or not 0 < p < 1:
        return _original_dropout(input, p, training, inplace)
    output: Tensor = torch.native_dropout(input, p, True)[0]
    return output
