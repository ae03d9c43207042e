"""The values that a step asks of fake tensors: real ones where they are known, guesses where not. Knows torch; no module, no ledger.

Fakes have shapes and no values. What depends on values (``.item()``, ``nonzero``, boolean indexing, routing to experts) is answered from
real values kept beside small fakes and computed along with them; where there is none, from a guess that is noted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_autopar.memory.fakes.dynamic_shapes import INSTEAD, LARGEST, SPREAD, cloned

log = logging.getLogger(__name__)

aten = torch.ops.aten
#: Tensors up to these sizes keep their real values: token ids and masks on one hand, small tables of numbers on the other.
_SHADOW_ELEMENTS = 1 << 22
_SHADOW_FLOATS = 4096
#: For random numbers, which are cheap to draw, and from which masks are made.
_SHADOW_DRAWS = 1 << 18
#: Up to so many choices, a choice by computed scores counts as routing to experts.
_EXPERTS = 1024

_SELECTED = "a selection by values was taken to select everything"
_DRAWN = "a selection by random numbers was taken to come out as it did in one draw"
_DRAWS_IN_PLACE = {f"aten::{name}" for name in ("uniform_", "normal_", "random_", "exponential_", "bernoulli_")}
_CHOICES = {aten.topk.default, aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim, aten.multinomial.default}
_SORTS = {aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable}


class ShadowValues(TorchDispatchMode):
    """Answers questions about values. Where nothing is known, a number is zero and a comparison is that of zeros (a NaN guard passes);
    boolean indexing selects everything, the upper bound of its memory; choices by scores are spread evenly; random numbers are drawn.

    Args:
        other: make every guess in the other way: numbers are one, comparisons are inverted, choices fall into half of the range and
            selections select half. The additional bytes of such a step show how much the guesses may matter.
    """

    def __init__(self, *, other: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.guesses: dict[str, None] = {}
        #: Whether any value was guessed; whether a shape, or a branch of the step, depends on a guess.
        self.guessed = self.shaped = self.branched = False
        self._other = other
        self._values: Any = WeakTensorKeyDictionary()
        #: Those in ``_values`` that depend on a guess.
        self._reasons: Any = WeakTensorKeyDictionary()
        #: The value that a tensor of unknown values would have everywhere if its inputs were zeros.
        self._uniform: Any = WeakTensorKeyDictionary()

    def guess(self, sentence: str) -> None:
        """Record that a value was guessed."""
        self.guesses[sentence] = None
        self.guessed = True

    def put(self, fake: Tensor, real: Tensor) -> None:
        """Keep a copy of the real tensor's values for the fake, if it is small enough."""
        if self._keeps(real):
            self._values[fake] = real.detach().to(device="cpu", copy=True)

    def get(self, fake: Tensor) -> Tensor | None:
        """The real values, where they are known."""
        if fake not in self._values:
            # A tensor that the step makes from numbers has their values; a real tensor is its own value.
            constant = getattr(fake, "constant", None) if isinstance(fake, FakeTensor) else fake
            if constant is not None and not constant.is_meta:
                with unset_fake_temporarily():
                    self.put(fake, constant)
        value: Tensor | None = self._values.get(fake)
        return value

    def forget(self, fake: Tensor) -> None:
        """Forget the tensor's values."""
        for known in (self._values, self._reasons, self._uniform):
            known.pop(fake, None)

    @staticmethod
    def _keeps(tensor: Tensor, floats: int = _SHADOW_FLOATS) -> bool:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return False
        return tensor.numel() <= (floats if tensor.is_floating_point() or tensor.is_complex() else _SHADOW_ELEMENTS)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """As in :class:`FastFakeMode`."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        answer = _ANSWERS.get(func)
        if answer is not None:
            return answer(self, func, args, kwargs)
        if func in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default):
            simpler = _as_fill(func, args)
            if simpler is not None:
                func, args = simpler
            else:
                args = (args[0], self._integer_indices(args[1]), *args[2:])
        if func is aten.clone.default and args[0].layout is torch.sparse_coo:
            return cloned(args[0])
        output = func(*args, **kwargs)
        self._follow(func, args, kwargs, output)
        return output

    # -- questions -------------------------------------------------------------------------------------------------------------------------

    def _scalar(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        fake = args[0]
        value = self.get(fake)
        if value is not None:
            self.note(fake)
            with unset_fake_temporarily():
                return value.item()
        uniform = self._uniform.get(fake)
        if fake.dtype is torch.bool:
            with unset_fake_temporarily():
                found = bool(uniform.item()) if uniform is not None else False
            self.branched = True
            self.guess("where the step compares computed values, they were taken to be zero")
            return found is not self._other
        self.guess(f"a {fake.dtype} value that the step reads was taken to be zero")
        zero = 1 if self._other else 0
        return complex(zero) if fake.is_complex() else float(zero) if fake.is_floating_point() else zero

    def _equal(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        values = [self.get(tensor) for tensor in args]
        if None not in values:
            with unset_fake_temporarily():
                return bool(function(*values))
        self.branched = True
        self.guess("whether two tensors hold the same was taken to be false")
        return self._other

    def _nonzero(self, fake: Tensor) -> Tensor:
        value = self.get(fake)
        if value is None:
            return torch.empty((self.everything(fake.numel()), fake.dim()), dtype=torch.long, device=fake.device)
        with unset_fake_temporarily():
            real = value.nonzero()
        self.note(fake, shaped=True)
        return self._made(real, fake)

    def everything(self, elements: int) -> int:
        """How many elements unknown values select."""
        self.guess(_SELECTED)
        self.shaped = True
        return (elements + 1) // 2 if self._other else elements

    def _integer_indices(self, indices: list[Tensor | None]) -> list[Tensor | None]:
        """The indices, with integer indices in place of boolean masks."""
        found: list[Tensor | None] = []
        for index in indices:
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                found += self._nonzero(index).unbind(1)
            else:
                found.append(index)
        return found

    def _dynamic(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation whose output's shape depends on values: with the values, or with the largest possible shape."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if all(self.get(tensor) is not None for tensor in tensors):
            with unset_fake_temporarily(), torch.no_grad():
                real = function(*tree_map(self._real, args), **tree_map(self._real, kwargs))
            for tensor in tensors:
                self.note(tensor, shaped=True)
            return tree_map(lambda leaf: self._made(leaf, *tensors) if isinstance(leaf, Tensor) else leaf, real)
        values = dict(zip((argument.name for argument in function._schema.arguments), args, strict=False)) | kwargs
        return LARGEST[function](self, values)

    # -- what is known ---------------------------------------------------------------------------------------------------------------------

    def _made(self, real: Tensor, *sources: Tensor) -> Tensor:
        """A fake of a real tensor whose values are known, or guessed as those of its sources were."""
        fake = torch.empty(real.shape, dtype=real.dtype, device="cpu")
        if self._keeps(real):
            self._values[fake] = real
            self._inherit(fake, sources)
        return fake

    def _inherit(self, fake: Tensor, sources: Any) -> None:
        reason = next((self._reasons[source] for source in sources if source in self._reasons), None)
        if reason is not None:
            self._reasons[fake] = reason

    def assume(self, fake: Tensor, real: Tensor, reason: str) -> None:
        """From now on the tensor has these values, by a guess."""
        self._values[fake] = real
        self._reasons[fake] = reason

    def note(self, fake: Tensor, *, shaped: bool = False) -> None:
        """The step's branches depend on this tensor's values: if they were guessed, add a note."""
        reason = self._reasons.get(fake)
        if reason is not None:
            self.guess(reason)
            self.shaped |= shaped

    def _follow(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Compute the output's values if all inputs' are known; forget those that unknown values have overwritten."""
        if isinstance(output, Tensor) and output.is_floating_point() and output.numel() > _SHADOW_DRAWS:
            return  # no values are kept or supposed for it; most operations return here
        outputs = (output,) if isinstance(output, Tensor) else [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if not outputs and function._schema.is_mutable:
            outputs = [leaf for leaf in tree_leaves(args[:1]) if isinstance(leaf, Tensor)]  # what _foreach_add_ and its kin write to
        if not outputs:
            return
        drawn = torch.Tag.nondeterministic_seeded in function.tags
        if any(not self._keeps(leaf, _SHADOW_DRAWS if drawn else _SHADOW_FLOATS) for leaf in outputs):
            if function in _CHOICES or function in _SORTS:
                self._choose(function, args, kwargs, outputs)
            self._overwritten(function, args)
            self._suppose(function, args, kwargs, output)
            return
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        fresh = function._schema.name in _DRAWS_IN_PLACE and len(tensors) == 1
        if "empty" in function._schema.name or not (fresh or all(self.get(tensor) is not None for tensor in tensors)):
            if function in _CHOICES or function in _SORTS:
                self._choose(function, args, kwargs, outputs)
            self._overwritten(function, args)
            self._suppose(function, args, kwargs, output)
            return
        with unset_fake_temporarily(), torch.no_grad():
            if fresh and args[0] not in self._values:
                self._values[args[0]] = torch.empty(args[0].shape, dtype=args[0].dtype)
            try:
                value = function(*tree_map(self._real, args), **tree_map(self._real, kwargs))
            except RuntimeError as error:
                log.debug("no real value of %s: %s", function, error)
                return
        for fake, real in zip(outputs, (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)), strict=False):
            if fake.shape == real.shape:
                self._values[fake] = real
                if drawn:
                    self._reasons[fake] = _DRAWN
                else:
                    self._inherit(fake, tensors)

    def _overwritten(self, function: Any, args: tuple[Any, ...]) -> None:
        """Forget the values of tensors to which an operation has written unknown ones, and of a view's base."""
        if function._schema.is_mutable:
            for argument, value in zip(function._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for tensor in value if isinstance(value, (list, tuple)) else (value,):
                        if isinstance(tensor, Tensor):
                            self.forget(tensor)
                            if tensor._base is not None:
                                self.forget(tensor._base)

    def _suppose(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """The result of a comparison of unknown values if they are zeros, the same everywhere; and what follows from it."""
        if not isinstance(output, Tensor) or output.dtype is not torch.bool:
            return
        if function is aten._is_all_true.default:  # only checks ask so (torch.distributions of its arguments); the user's values pass them
            with unset_fake_temporarily():
                self._values[output] = torch.tensor(True)
            return
        reduces = function in (aten.any.default, aten.all.default, aten.any.dim, aten.all.dim, aten.any.dims, aten.all.dims)
        if reduces:
            if args[0] in self._uniform:
                self._uniform[output] = self._uniform[args[0]]
            return
        if torch.Tag.pointwise not in function.tags and function is not aten._to_copy.default:
            return
        with unset_fake_temporarily(), torch.no_grad():
            try:
                value = function(*tree_map(self._stand_in, args), **tree_map(self._stand_in, kwargs))
            except (RuntimeError, _Unknown) as error:
                log.debug("nothing to suppose of %s: %s", function, error)
                return
            supposed = value.reshape(()) if isinstance(value, Tensor) and value.numel() == 1 else None
        if supposed is not None:
            self._uniform[output] = supposed

    def _stand_in(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return torch.device("cpu") if isinstance(leaf, torch.device) else leaf
        known = self.get(leaf)
        if known is not None:
            if known.numel() != 1:
                raise _Unknown("its values differ")
            return known.reshape(())
        uniform = self._uniform.get(leaf)
        return uniform.clone() if uniform is not None else torch.zeros((), dtype=leaf.dtype)

    def _choose(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        """Indices chosen by unknown scores: spread evenly over all choices, and different within a row."""
        values = dict(zip((argument.name for argument in function._schema.arguments), args, strict=False)) | kwargs
        source, chosen = values["self"], outputs[-1]
        if chosen.is_floating_point() or not self._keeps(chosen):
            return
        last = values.get("dim", -1)
        choices = source.numel() if last is None or source.dim() == 0 else source.shape[last]
        if not chosen.numel() or (function in _CHOICES and choices > _EXPERTS):
            return
        with unset_fake_temporarily():
            if function in _SORTS:
                shape = [1] * source.dim()
                shape[last] = choices
                real = torch.arange(choices).reshape(shape).expand(source.shape).clone()
            else:
                places = choices
                width = chosen.shape[last] if chosen.dim() == source.dim() and last is not None else 1
                if self._other:
                    places = max(width, (choices + 1) // 2)
                real = torch.arange(chosen.numel()).remainder(places)
                if width > 1:
                    rest = [size for index, size in enumerate(chosen.shape) if index != last % chosen.dim()]
                    real = real.reshape(*rest, width).movedim(-1, last)
                else:
                    real = real.reshape(chosen.shape)
                real = real.contiguous()
        self.assume(chosen, real, SPREAD)

    def _real(self, leaf: Any) -> Any:
        """An argument for the real operation."""
        if isinstance(leaf, Tensor):
            return self._values[leaf]
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    def array(self, tensor: Tensor) -> Tensor:
        """The result of ``Tensor.numpy``: the real values, or zeros."""
        value = self.get(tensor) if isinstance(tensor, FakeTensor) else tensor
        if value is None:
            self.guess("an array of values that the step reads was taken to be zeros")
            with unset_fake_temporarily():
                value = torch.zeros(tensor.shape, dtype=tensor.dtype)
        elif isinstance(tensor, FakeTensor):
            self.note(tensor)
        return value


class _Unknown(Exception):
    """Nothing can be supposed."""


def _as_fill(function: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]] | None:
    """``x[mask] = number`` as the fill that it is (``index_put_``'s ``canDispatchToMaskedFill``), which selects nothing."""
    if function is aten.index.Tensor or (len(args) > 3 and args[3]):
        return None
    target, indices, value = args[:3]
    if value.numel() != 1 or len(indices) != 1 or indices[0] is None or indices[0].dtype is not torch.bool:
        return None
    mask = indices[0]
    if mask.dim() < target.dim():
        mask = mask.reshape(*mask.shape, *[1] * (target.dim() - mask.dim()))
    fill = aten.masked_fill_.Tensor if function is aten.index_put_.default else aten.masked_fill.Tensor
    return fill, (target, mask, value.reshape(()))


_ANSWERS: dict[Any, Callable[[ShadowValues, Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    **dict.fromkeys(LARGEST, ShadowValues._dynamic),
    **INSTEAD,
    aten._local_scalar_dense.default: ShadowValues._scalar,
    aten.item.default: ShadowValues._scalar,
    aten.is_nonzero.default: lambda self, function, args, kwargs: bool(self._scalar(function, args, kwargs)),
    aten.equal.default: ShadowValues._equal,
    aten.nonzero.default: lambda self, function, args, kwargs: self._nonzero(args[0]),
}
