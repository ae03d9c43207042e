"""Watches code outside blocks: which of its tensors depend on parameters, blocks or random draws (are *tainted*), and in which order.

The recording of a step and its replays in stages must find the same tensors tainted, in the same order, so the rules stand here, once. A
tensor that depends on the batch alone isn't tainted: every stage makes it for itself, and may make more or fewer of them from one batch to
the next. Knows torch functions; nothing of stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _pop_mode, _pop_mode_temporarily, _push_mode
from torch.utils import checkpoint as checkpointing

from lightning_autopar.exact.absent.absent_tensor import AbsentTensor, OverwrittenTensor, filled
from lightning_autopar.exact.absent.rules import DESCRIBING, leaves_of

_MARK = "_autopar_tainted"


class TaintMode(TorchFunctionMode):
    """Sees every torch function that code outside of blocks calls; :meth:`paused` around blocks.

    Args:
        sources: ids of tensors that count as tainted: buffers that the step writes to. Parameters always do.
        call: makes a tainted call: gets the function, its name, and its arguments, and gives its result.
        note: hears of the arguments of other calls.
        on_gradient: is called where code asks for the gradient of a trainable parameter.
        on_padding: gets the mask, true where a batch isn't padded, where ``nn.TransformerEncoder`` would make it a nested tensor. In stages
            it doesn't: its blocks would get tensors whose shapes are values.
    """

    def __init__(
        self,
        sources: frozenset[int],
        call: Callable[[Any, str, Any, Any], Any],
        note: Callable[[Any], None] | None = None,
        on_gradient: Callable[[], None] | None = None,
        on_padding: Callable[[Tensor], None] | None = None,
    ) -> None:
        super().__init__()
        self._sources = sources
        self._call = call
        self._note = note
        self._on_gradient = on_gradient
        self._on_padding = on_padding
        self._off = 0
        self._on = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Tainted calls go to ``call``."""
        kwargs = kwargs or {}
        if self._off or func in DESCRIBING:
            if not self._off and self._on_gradient is not None and _reads_gradient(func, args):
                self._on_gradient()
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "?")
        if not _draws(name, args, kwargs) and not self.tainted(args) and not self.tainted(kwargs):
            if self._note is not None:
                self._note((args, kwargs))
            return func(*args, **kwargs)
        if func is torch._nested_tensor_from_mask_left_aligned:
            if self._on_padding is not None:
                self._on_padding(args[1])
            return False
        known = _constant(func, name, args)
        if known is not None:
            return known
        if name == "__get__" or name == "__set__":
            name = str(getattr(func.__self__, "__name__", name))
        result = self._call(func, name, args, kwargs)
        if name == "rand" and isinstance(result, Tensor):
            result._autopar_uniform = True  # type: ignore[attr-defined]
        return result

    def tainted(self, value: Any) -> bool:
        """Whether a tainted tensor is among arguments."""
        if isinstance(value, Tensor):
            return (
                isinstance(value, (AbsentTensor, OverwrittenTensor, nn.Parameter))
                or getattr(value, _MARK, False)
                or (bool(self._sources) and id(value) in self._sources)
            )
        if isinstance(value, (tuple, list)):
            return any(map(self.tainted, value))
        if isinstance(value, Mapping):
            return any(map(self.tainted, value.values()))
        return False

    def alone(self, args: Any, kwargs: Any) -> list[nn.Parameter]:
        """The parameters among a call's arguments, where nothing else there is tainted."""
        found = [tensor for tensor in tensors((args, kwargs)) if self.tainted(tensor)]
        used = [tensor for tensor in found if isinstance(tensor, nn.Parameter)]
        return used if len(used) == len(found) else []

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While open, nothing is watched; costs nothing where this mode is the innermost, as it nearly always is."""
        depth = torch._C._len_torch_function_stack()
        if depth and torch._C._get_function_stack_at(depth - 1) is self:
            with _pop_mode_temporarily():
                yield
            return
        self._off += 1
        try:
            yield
        finally:
            self._off -= 1

    @contextmanager
    def watching(self, opaque: Sequence[tuple[nn.Module, str]] = ()) -> Iterator[None]:
        """While open, the code that runs is watched, including the user's own ``torch.autograd.Function``.

        Args:
            opaque: modules and names of their methods, each of which is watched as one function, whatever it calls.
        """
        function = torch.autograd.Function
        own = function.__dict__["apply"]
        watch = self

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            args = tuple(map(filled, args))
            if issubclass(cls, checkpointing.CheckpointFunction):
                # Reentrant checkpointing hides a block's inputs from autograd. The other variant computes the same.
                return checkpointing.checkpoint(args[0], *args[2:], use_reentrant=False, preserve_rng_state=args[1])
            return watch.opaque(own.__get__(None, cls), f"{cls.__name__}.apply", args, kwargs)

        before = [(child, name, child.__dict__.get(name)) for child, name in opaque]
        function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
        for child, name in opaque:
            child.__dict__[name] = _Opaque(self, getattr(child, name), f"{type(child).__name__}.{name}")
        _push_mode(self)
        self._on = True
        try:
            yield
        finally:
            self.stop()
            function.apply = own  # type: ignore[method-assign]
            for child, name, value in before:
                child.__dict__.pop(name, None)
                if value is not None:
                    child.__dict__[name] = value

    def stop(self) -> None:
        """Stop watching."""
        if not self._on:
            return
        self._on = False
        stack = []
        while (mode := _pop_mode()) is not self:
            stack.append(mode)
        for mode in reversed(stack):
            _push_mode(mode)

    def forget(self) -> None:
        """Drop the references to the callbacks."""
        self._call, self._note = _nobody, None

    def active(self) -> bool:
        """Whether the code that runs is watched now."""
        if self._off or not self._on:
            return False
        depth = torch._C._len_torch_function_stack()
        return any(torch._C._get_function_stack_at(index) is self for index in range(depth))

    def opaque(self, function: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
        """Call something as if it were a function of torch."""
        if not self.active():
            return function(*args, **kwargs)
        with self.paused():
            if not self.tainted(args) and not self.tainted(kwargs):
                return function(*args, **kwargs)
            return self._call(function, name, args, kwargs)


def _nobody(*_: Any) -> None:
    raise AssertionError("nothing is watched any more")


class _Opaque:
    """A method that is watched as one function."""

    def __init__(self, watch: TaintMode, method: Callable[..., Any], name: str) -> None:
        self._watch, self._method, self.__name__ = watch, method, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._watch.opaque(self._method, self.__name__, args, kwargs)


class Inside(TorchFunctionMode):
    """Sees the functions that run within a block.

    Args:
        use: hears of the arguments.
        make: hears of the results, and of the arguments.
    """

    def __init__(self, use: Callable[[Any], None], make: Callable[[Any, Any], None]) -> None:
        super().__init__()
        self._use, self._make = use, make

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Records what the function uses and makes."""
        kwargs = kwargs or {}
        if func in DESCRIBING:
            return func(*args, **kwargs)
        self._use((args, kwargs))
        result = func(*args, **kwargs)
        self._make(result, (args, kwargs))
        return result


def updates_metric(name: str) -> bool:
    """Whether a call is a metric's ``update``, which changes the metric alone: stages leave it out of other stages' code."""
    return name.endswith(".update")  # no function of torch has a name with a dot


def mark(tensor: Tensor) -> None:
    """Mark a tensor as tainted, and the one of which it is a view: if the tensor isn't new, that one was written to."""
    if not isinstance(tensor, (AbsentTensor, OverwrittenTensor)):
        setattr(tensor, _MARK, True)


def is_marked(tensor: Tensor) -> bool:
    """Whether a tensor was marked as tainted."""
    return bool(getattr(tensor, _MARK, False))


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a function's result or arguments: in tuples, lists and mappings."""
    return (leaf for leaf in leaves_of(value) if isinstance(leaf, Tensor))


def written_by(name: str, args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    """The tensor that a call writes to in place, judged by the function's name; None if there is none."""
    out = kwargs.get("out")
    if isinstance(out, Tensor):
        return out
    if not args or not isinstance(args[0], Tensor):
        return None
    by_name = name == "__setitem__" or name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    in_place = by_name or kwargs.get("inplace") is True
    return args[0] if in_place else None


def results_of(name: str, result: Any, target: Tensor | None, args: Any, is_tainted: Callable[[Any], bool]) -> list[Tensor]:
    """The tainted tensors that a call returned, and the one that it wrote to; it may return an untainted argument unchanged. Of a packed
    sequence, and of one that is padded again, the lengths follow from the lengths that were given.
    """
    if name in _BY_LENGTHS and not is_tainted(args[1]):
        return [result[0]]
    target = filled(target)
    same = {id(tensor) for tensor in tensors(args) if tensor is not target and not is_tainted(tensor)}
    found = [tensor for tensor in tensors(result) if id(tensor) not in same]
    if target is not None and not any(filled(each) is target for each in found):
        found.append(target)
    return found


#: Functions that return data and lengths, and take the same.
_BY_LENGTHS = ("_pack_padded_sequence", "_pad_packed_sequence")


@contextmanager
def replaced_forward(block: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """While open, a module's forward is another function; its class and FQN stay as they are."""
    own = block.__dict__.get("forward")
    block.__dict__["forward"] = forward
    try:
        yield
    finally:
        block.__dict__.pop("forward", None)
        if own is not None:
            block.__dict__["forward"] = own


def _draws(name: str, args: Any, kwargs: Mapping[str, Any]) -> bool:
    if name not in _RANDOM:
        return False
    if name in _DROPPING and not name.startswith("native"):
        probability = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
        training = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))
        return bool(training) and probability != 0
    return True


_gradient: Any = Tensor.grad


def _reads_gradient(func: Any, args: Any) -> bool:
    return bool(func == _gradient.__get__ and isinstance(args[0], nn.Parameter) and args[0].requires_grad)


def _constant(func: Any, name: str, args: Any) -> Tensor | None:
    """What is known of a random number without drawing it: ``torch.rand`` is never below zero. Layers that are dropped at random
    (LayerDrop) compare it with a probability that is zero by default.
    """
    if name in ("lt", "__lt__") and len(args) == 2 and getattr(args[0], "_autopar_uniform", False):
        bound = args[1]
        if isinstance(bound, (int, float)) and bound <= 0:
            return torch.zeros(args[0].shape, dtype=torch.bool, device=args[0].device)
    return None


_IN_PLACE = frozenset(
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift", "matmul")
)
_FILLING = ("bernoulli_", "normal_", "uniform_", "random_", "exponential_", "geometric_", "log_normal_", "cauchy_", "trunc_normal_")
_INITIALISING = ("xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_")
_MAKING = (
    "rand",
    "randn",
    "randint",
    "randperm",
    "rand_like",
    "randn_like",
    "randint_like",
    "bernoulli",
    "multinomial",
    "normal",
    "poisson",
)
_OTHERS = ("binomial", "rrelu", "rrelu_", "gumbel_softmax", "_standard_gamma", "_sample_dirichlet", "native_dropout")
_POOLING = tuple(f"fractional_max_pool{dims}d{suffix}" for dims in (2, 3) for suffix in ("", "_with_indices"))
_DROPPING = tuple(
    f"{kind}{suffix}"
    for kind in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
    for suffix in ("", "_")
)
#: Functions that draw random numbers, or do so for some arguments.
_RANDOM = frozenset((*_FILLING, *_INITIALISING, *_MAKING, *_OTHERS, *_POOLING, *_DROPPING))
