"""Absent tensors: each has the shape, dtype and device of a tensor that another stage holds, and no values.

Code that computes with absent tensors gets absent tensors, of the right shapes. Code that reads the values of one gets an error that names
what is missing, so that no wrong number can come out unnoticed. An absent tensor that was provided with a real one stands for it. Knows
tensors; nothing of modules, stages or recordings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from lightning_autopar.exact.absent.rules import DESCRIBING, READING, RULES, indices_for_masks, leaves_of, map_leaves, title

_META = torch.device("meta")


class MissingValue(RuntimeError):
    """Raised where a tensor's values are needed, and another stage has them."""


class AbsentTensor(Tensor):
    """A tensor without values; see the module. :func:`absent_like` and operations on absent tensors make it."""

    _meta: Tensor
    _value: Tensor | None
    _what: str

    @staticmethod
    def __new__(cls, meta: Tensor, device: torch.device, what: str, requires_grad: bool = False) -> AbsentTensor:
        """An absent tensor of the shape, strides and type of a meta tensor."""
        absent: AbsentTensor = Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=device,
            requires_grad=requires_grad,
        )
        absent._meta, absent._value, absent._what = meta, None, what
        return absent

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Run on the tensors that fill absent tensors; if one isn't filled, only for the result's shape."""
        if func in DESCRIBING and len(args) == 1 and type(args[0]) is AbsentTensor and not kwargs:  # by far the most frequent
            value = args[0]._value
            if value is not None:
                return func(value)
            with torch._C.DisableTorchFunctionSubclass():
                return func(args[0])
        kwargs = kwargs or {}
        missing: list[AbsentTensor] = []
        args = _stand_in(args, missing)
        kwargs = _stand_in(kwargs, missing)
        if not missing:
            return func(*args, **kwargs)
        if func in _DESCRIBING:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        special = _SPECIAL.get(func)
        if special is not None:
            return special(*args, **kwargs)
        if RULES.strict:
            _raise(missing[0], func)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Below autograd: the operator on meta tensors."""
        if torch.Tag.nondeterministic_seeded in func.tags and not (RULES.strict or RULES.hollowing):
            _draw(func, args, kwargs or {})
        lists = func.__name__.startswith("_foreach_") and args and not any(leaf.ndim for leaf in args[1:] if isinstance(leaf, Tensor))
        return (_one_by_one if lists and not RULES.strict else _hollow)(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        """What it is; it has no data to print."""
        if self._value is not None:
            return repr(self._value)
        return f"AbsentTensor({tuple(self.shape)}, {self.dtype}, {str(self.device)!r}: {self._what})"


class OverwrittenTensor(Tensor):
    """A tensor of this process to which another stage's values were written: it is absent from then on."""

    _absent: AbsentTensor

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """As of the absent tensor."""
        result = func(*_put_holes(args), **_put_holes(dict(kwargs or {})))
        for leaf in args:  # an operation in place returns the tensor that the caller holds
            if type(leaf) is OverwrittenTensor and leaf._absent is result:
                return leaf
        return result


def is_absent(tensor: object) -> bool:
    """Whether it is an absent tensor that isn't filled."""
    if type(tensor) is OverwrittenTensor:
        tensor = tensor._absent
    return isinstance(tensor, AbsentTensor) and tensor._value is None


def absent_like(tensor: Tensor, what: str, *, device: torch.device | None = None) -> AbsentTensor:
    """An absent tensor in place of a tensor.

    Args:
        tensor: whose shape, type and ``requires_grad`` it has; may be absent or a meta tensor.
        what: names the value in errors: ``"the parameter 'net.0.weight'"``.
        device: the tensor's by default.
    """
    return AbsentTensor(_described(tensor), tensor.device if device is None else device, what, requires_grad=tensor.requires_grad)


def hole_of(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, what: str, requires_grad: bool = False) -> AbsentTensor:
    """An absent tensor of a shape and type."""
    return AbsentTensor(
        torch.empty(shape, dtype=dtype, device=_META), device, what, requires_grad=requires_grad and dtype.is_floating_point
    )


def hole_shaped_like(tensor: Tensor, dtype: torch.dtype, what: str, requires_grad: bool = False) -> AbsentTensor:
    """An absent tensor of a tensor's shape and device, without gaps in memory; cheap where the tensor is one, too."""
    if type(tensor) is AbsentTensor and tensor._value is None and tensor._meta.dtype is dtype and tensor._meta.is_contiguous():
        with torch._C.DisableTorchFunctionSubclass():
            return AbsentTensor(tensor._meta, tensor.device, what, requires_grad=requires_grad and dtype.is_floating_point)
    return hole_of(tuple(tensor.shape), dtype, tensor.device, what, requires_grad)


def hole_parameter(parameter: Tensor, what: str, *, device: torch.device | None = None) -> AbsentTensor:
    """An absent tensor that is a parameter for ``isinstance``, with the user's attributes of this one."""
    absent = absent_like(parameter, what, device=device)
    vars(absent).update(vars(parameter), _is_param=True)
    return absent


def provide(absent: Tensor, tensor: Tensor) -> None:
    """Fill an absent tensor: from now on it stands for this tensor."""
    inner = absent._absent if type(absent) is OverwrittenTensor else absent
    assert isinstance(inner, AbsentTensor), "only an absent tensor is given values"
    inner._value = tensor


def filled(value: Any) -> Any:
    """The tensor that fills an absent one; anything else is returned as it is."""
    if type(value) is OverwrittenTensor:
        value = value._absent
    if isinstance(value, AbsentTensor) and value._value is not None:
        return value._value
    return value


def resolved(value: Any) -> Any:
    """The arguments with filled absent tensors replaced by their tensors; lists and dictionaries stay the same objects."""
    kind = type(value)
    if kind is AbsentTensor or kind is OverwrittenTensor:
        return filled(value)
    if kind is tuple:
        items = [resolved(item) for item in value]
        return value if all(new is old for new, old in zip(items, value, strict=True)) else tuple(items)
    if kind is list:
        for index, item in enumerate(value):
            new = resolved(item)
            if new is not item:
                value[index] = new
        return value
    if kind is dict:
        for key, item in value.items():
            new = resolved(item)
            if new is not item:
                value[key] = new
        return value
    return value


def name_of(absent: Tensor) -> str:
    """What an absent tensor stands for, in words."""
    inner = absent._absent if type(absent) is OverwrittenTensor else absent
    return inner._what if isinstance(inner, AbsentTensor) else "a tensor"


class AbsentMode(TorchDispatchMode):
    """While open, every operator runs only for its results' shapes, and returns absent tensors; real tensors are neither read nor written.

    Args:
        simulated: no existing tensor becomes absent, whatever is written to it.
    """

    def __init__(self, *, simulated: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._simulated = simulated

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """On meta tensors."""
        if not self._simulated:
            return _hollow(func, args, kwargs or {})
        before, RULES.simulated = RULES.simulated, True
        try:
            with _disable_current_modes():  # such as recordings under fake tensors
                return _hollow(func, args, kwargs or {})
        finally:
            RULES.simulated = before


def _described(tensor: Tensor) -> Tensor:
    """A meta tensor of its shape, strides and type."""
    if isinstance(tensor, AbsentTensor):
        return tensor._meta if tensor._value is None else _described(tensor._value)
    if type(tensor) is OverwrittenTensor:
        return tensor._absent._meta
    if tensor.layout is not torch.strided:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=_META)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)


def _hollow(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Run an operator of the dispatcher on meta tensors; returns absent tensors."""
    if RULES.strict:
        _raise(next((leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, AbsentTensor)), None), func)
    origins: dict[int, Tensor] = {}
    devices: list[torch.device] = []
    what: list[str] = []
    if func in _MASKED:
        args = indices_for_masks(args)

    def to_meta(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            if isinstance(leaf, AbsentTensor):
                if leaf._value is not None:
                    raise MissingValue(
                        f"the step calls {func} on {leaf._what}, which another stage sends, and not by one of torch's functions; its "
                        "gradient would be lost, so the step can't be cut here"
                    )
                meta = leaf._meta
                what.append(leaf._what)
            else:
                meta = _described(leaf)
            if leaf.dim() or not devices:
                devices.append(leaf.device)
            origins[id(meta)] = leaf
            return meta
        if isinstance(leaf, torch.device):
            devices[:] = [leaf]
            return _META
        return leaf

    device_given = kwargs.get("device")
    meta_args, meta_kwargs = map_leaves(args, to_meta), {name: map_leaves(value, to_meta) for name, value in kwargs.items()}
    if device_given is not None:
        devices[:] = [torch.device(device_given)]
    elif not devices:
        devices.append(torch.get_default_device() if not kwargs.get("pin_memory") else torch.device("cpu"))
        meta_kwargs["device"] = _META
    device = devices[-1] if len(devices) == 1 else next((each for each in devices if each.type != "cpu"), devices[0])
    try:
        result = func(*meta_args, **meta_kwargs)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        names = what[0] if what else "a tensor of another stage"
        raise MissingValue(f"{title(func)} needs values that aren't here: {names}") from error
    described = what[0] if what else f"the result of {title(func)}"

    def to_hole(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        origin = origins.get(id(leaf))
        if origin is None:
            return AbsentTensor(leaf, device, described)
        if type(origin) is not AbsentTensor and type(origin) is not OverwrittenTensor:
            _hollow_out(origin, leaf, described)
        return origin

    if what and not func._schema.returns:  # what it writes to isn't among its results
        for argument, value in zip(func._schema.arguments, meta_args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                map_leaves(value, to_hole)
    return map_leaves(result, to_hole)


def _one_by_one(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """A function of lists of tensors, on each of their places: some may have values of other stages, and others not."""
    results: list[Any] = []
    for place in range(len(args[0])):
        one = [[each[place]] if isinstance(each, (list, tuple)) else each for each in args]
        absent = any(isinstance(leaf, (AbsentTensor, OverwrittenTensor)) for leaf in leaves_of((one, kwargs)))
        results.append(_hollow(func, one, kwargs) if absent else func(*one, **kwargs))
    return None if None in results else [result[0] for result in results]


def _draw(func: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
    """Draw what the stage that has the values draws, and drop it.

    A hook of the user's runs on all stages, so that their generators stay those of one device. A step's own draws don't come here.
    """

    def real(leaf: Any) -> Any:
        if not isinstance(leaf, AbsentTensor):
            return leaf
        return torch.empty_strided(leaf._meta.shape, leaf._meta.stride(), dtype=leaf.dtype, device=leaf.device).zero_()

    func(*map_leaves(args, real), **{name: map_leaves(value, real) for name, value in kwargs.items()})


def make_hole(tensor: Tensor, what: str) -> None:
    """Make a real tensor, and the one of which it is a view, absent: another stage's values were written to it."""
    if not isinstance(tensor, (AbsentTensor, OverwrittenTensor)):
        _hollow_out(tensor, _described(tensor), what)


def lacks_memory(tensor: Tensor) -> bool:
    """Whether a real tensor's ``data`` was set to an absent one, which torch asks nobody about: to read it ends the process."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return False
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:  # "an invalid python storage"
        return True
    return False


def _hollow_out(tensor: Tensor, meta: Tensor, what: str) -> None:
    """Make a real tensor that was written to, and the one of which it is a view, absent."""
    if RULES.simulated:
        return
    if not RULES.hollowing:
        raise MissingValue(f"a tensor is written to with {what}, whose values another stage has")
    if isinstance(tensor, nn.Parameter) or id(tensor) in RULES.kept():
        return
    if type(tensor) is not Tensor:
        raise MissingValue(f"a {type(tensor).__name__} is written to with {what}, which isn't here")
    base = tensor._base
    absent = AbsentTensor(meta, tensor.device, what)
    tensor.__class__ = OverwrittenTensor
    tensor._absent = absent  # type: ignore[attr-defined]
    if base is not None and type(base) is Tensor:
        _hollow_out(base, _described(base), what)


def _stand_in(value: Any, missing: list[AbsentTensor]) -> Any:
    """The arguments with filled tensors replaced; those that aren't filled are recorded."""
    kind = type(value)
    if kind is AbsentTensor:
        if value._value is not None:
            return value._value
        missing.append(value)
        return value
    if kind is OverwrittenTensor:
        return _stand_in(value._absent, missing)
    if kind is tuple or kind is list:
        return kind(_stand_in(item, missing) for item in value)
    if kind is dict:
        return {name: _stand_in(item, missing) for name, item in value.items()}
    if isinstance(value, tuple):  # a named one, or a slice's parts
        items = [_stand_in(item, missing) for item in value]
        return kind(*items) if hasattr(kind, "_fields") else kind(items)
    return value


def _put_holes(value: Any) -> Any:
    kind = type(value)
    if kind is OverwrittenTensor:
        return value._absent
    if kind is tuple or kind is list:
        return kind(_put_holes(item) for item in value)
    if kind is dict:
        return {name: _put_holes(item) for name, item in value.items()}
    return value


def _raise(absent: AbsentTensor | None, func: Any) -> NoReturn:
    what = "a tensor" if absent is None else absent._what
    raise MissingValue(
        f"{title(func)} needs the values of {what}, which another stage has and didn't send; the recorded step didn't use it here"
    )


# -- functions that absent tensors answer by themselves ------------------------------------------------------------------------------------


def _reading(func: Callable[..., Any]) -> Callable[..., Any]:
    """An error for a function that reads values."""

    def read(*args: Any, **kwargs: Any) -> NoReturn:
        absent = next((leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, AbsentTensor) and leaf._value is None), None)
        what = "a tensor" if absent is None else absent._what
        raise MissingValue(f"{title(func)} reads the values of {what}, which another stage has")

    return read


def _set_data(absent: Tensor, value: Tensor) -> None:
    """``absent.data = value``, as ``Module.to`` does: another type or device."""
    if not isinstance(absent, AbsentTensor) or not isinstance(value, AbsentTensor):
        raise MissingValue(f"a tensor's data can't be set to or from {name_of(absent)}, which another stage has")
    if value is absent or (value.dtype == absent.dtype and value.device == absent.device and value.shape == absent.shape):
        return
    new = AbsentTensor(value._meta, value.device, absent._what, requires_grad=absent.requires_grad)
    new.__dict__.update({**absent.__dict__, "_meta": value._meta})
    torch.utils.swap_tensors(absent, new)


def _by_lengths(func: Callable[..., Any]) -> Callable[..., Any]:
    """Packs a padded tensor, or pads a packed one, by lengths that are here: the data of the result is absent, and its lengths are not."""

    def call(absent: Tensor, lengths: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        if isinstance(lengths, AbsentTensor):
            raise MissingValue(f"{title(func)} reads lengths that another stage has")
        with _disable_current_modes():
            data, found = func(torch.zeros(absent.shape, dtype=absent.dtype), lengths, *args)
        needs = absent.requires_grad and torch.is_grad_enabled()
        return hole_of(tuple(data.shape), data.dtype, absent.device, name_of(absent), needs), found

    return call


def _deepcopy(absent: Tensor, memo: dict[int, Any]) -> Tensor:
    assert isinstance(absent, AbsentTensor)
    copied = memo.get(id(absent))
    if copied is None:
        copied = AbsentTensor(absent._meta, absent.device, absent._what, requires_grad=absent.requires_grad)
        copied.__dict__.update(absent.__dict__)
        memo[id(absent)] = copied
    return copied


_DESCRIBING = frozenset(
    DESCRIBING
    | {getattr(Tensor, name).__set__ for name in ("requires_grad", "grad") if hasattr(Tensor, name)}
    | {getattr(Tensor, name) for name in ("requires_grad_", "register_hook", "retain_grad", "register_post_accumulate_grad_hook")}
)
_SPECIAL: dict[Any, Callable[..., Any]] = {
    **{func: _reading(func) for func in READING},
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    Tensor.__deepcopy__: _deepcopy,
    **{func: _by_lengths(func) for func in (torch._VF._pack_padded_sequence, torch._VF._pad_packed_sequence)},
}
_aten = torch.ops.aten
_MASKED = frozenset((_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default, _aten._unsafe_index.Tensor))
