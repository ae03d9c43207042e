"""The operators that draw random numbers, and how each is made to draw for the whole batch.

Their kernels are replaced by ``torch.library``'s documented means (``get_kernel``, ``Library.impl``), below autograd: whatever draws on the
CPU or a GPU ends in one of them, but for recurrent kernels. Knows what ``whole_batch_draws.GlobalDraws`` decides,
not why.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from lightning_autopar.exact.data.rank_share import index_of
from lightning_autopar.exact.random.rows_of_gpu_draws import drop_own, fill_own
from lightning_autopar.exact.random.whole_batch_draws import Choice, GlobalDraws, Rows, pick_rows, scatter_rows, whole_like

_Call: TypeAlias = Callable[..., Any]
_Generator: TypeAlias = torch.Generator | None
#: The one that decides.
_installed: list[GlobalDraws] = []
#: For each :func:`held` that is open: its library; None where an outer one has it.
_holding: list[Any] = []


def override(draws: GlobalDraws) -> Callable[[], None]:
    """Let ``draws`` decide on every random draw of this process; returns what undoes it."""
    assert not _installed, "another GlobalDraws is installed"
    library = None if _holding else _replaced()
    _installed.append(draws)

    def undo() -> None:
        _installed.remove(draws)
        if library is not None:
            library._destroy()

    return undo


@contextmanager
def held() -> Iterator[None]:
    """While open, the kernels stay replaced where one of many ``GlobalDraws`` after each other is undone: replacing them takes 2 ms."""
    _holding.append(_replaced() if not _holding else None)
    try:
        yield
    finally:
        if (library := _holding.pop()) is not None:
            library._destroy()


def _replaced() -> Any:
    """The library whose kernels ask whoever is installed; those before come back by its ``_destroy``."""
    library = cast(Any, torch.library).Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for name, handler in {**_ANYWHERE, **_ON_CUDA}.items():
            for key in ("CPU", "CUDA") if name in _ANYWHERE else ("CUDA",):
                if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key):
                    library.impl(name, _kernel(name, key, handler), key, allow_override=True)
    return library


def _kernel(name: str, key: str, handler: Callable[..., Any]) -> _Call:
    native = torch.library.get_kernel(f"aten::{name}", key)
    call = partial(native.call_boxed, torch._C.DispatchKeySet(torch._C.DispatchKey.__members__[key]))

    def kernel(*args: Any, **kwargs: Any) -> Any:
        draws = _installed[0] if _installed else None
        return call(*args, **kwargs) if draws is None or draws.share is None else handler(draws, call, *args, **kwargs)

    return kernel


# -- in-place draws: what nearly everything comes down to ----------------------------------------------------------------------------------


def _fill(op: str, draws: GlobalDraws, call: _Call, out: Tensor, *args: Any, generator: _Generator = None) -> Tensor:
    """``out.normal_(…)`` and similar."""
    choice = draws.rows_for(op, out, generator)
    share = draws.share
    assert share is not None
    if draws.seeded or choice == "own":
        with draws.with_own_generator(out.device, generator, own=choice is not None):
            call(out, *args, generator=generator)
    elif isinstance(choice, Rows) and share.of > max(share.rows, 1) and not fill_own(op, call, out, args, generator, choice, share):
        # With MKL, the CPU's kernel always draws into integers of 32 bits (DistributionKernels.cpp): no need to hold both.
        integers = op == "bernoulli_" and out.device.type == "cpu" and not any(isinstance(arg, Tensor) for arg in args)
        whole = whole_like(out, choice, share, torch.int32 if integers else None)
        # A tensor argument (bernoulli_'s probabilities) doesn't change how far the generator advances: zeros suffice for others' rows.
        spread = [_spread(arg.expand(out.shape), whole, draws, choice) if isinstance(arg, Tensor) else arg for arg in args]
        call(whole, *spread, generator=generator)
        pick_rows(whole, out, choice, share)
    elif not isinstance(choice, Rows) or share.of == max(share.rows, 1):
        call(out, *args, generator=generator)
    return out


def _spread(part: Tensor, like: Tensor, draws: GlobalDraws, rows: Rows) -> Tensor:
    """A tensor in the layout of the whole batch's draw ``like``, with the rank's rows from ``part`` and zeros elsewhere."""
    assert draws.share is not None
    whole = torch.zeros_like(like, dtype=part.dtype)
    scatter_rows(part, whole, rows, draws.share)
    return whole


# -- draws composed of in-place ones, where torch's own kernel doesn't ask the dispatcher again --------------------------------------------


def _normal(
    draws: GlobalDraws, call: _Call, mean: Any, std: Any = 1.0, *, generator: _Generator = None, out: Tensor | None = None
) -> Tensor:
    """As ``normal_out_impl`` in ATen/native/DistributionTemplates.h composes it, to the bit."""
    if isinstance(std, Tensor):
        if isinstance(mean, Tensor):
            result = torch.empty(torch.zeros_like(mean).add(std).shape, dtype=mean.dtype, device=mean.device)
        else:
            result = torch.empty_like(std)
        result.normal_(generator=generator).mul_(std).add_(mean)
    else:
        result = torch.empty_like(mean).normal_(0, std, generator=generator).add_(mean)
    return _into(out, result)


def _bernoulli_out(draws: GlobalDraws, call: _Call, p: Tensor, *, generator: _Generator = None, out: Tensor) -> Tensor:
    return _into(out, torch.empty_like(p, dtype=out.dtype).bernoulli_(p, generator=generator))


def _into(out: Tensor | None, result: Tensor) -> Tensor:
    return result if out is None else out.resize_(result.shape).copy_(result)


# -- draws with a shape of their own -------------------------------------------------------------------------------------------------------


def _multinomial(
    draws: GlobalDraws,
    call: _Call,
    weights: Tensor,
    num_samples: int,
    replacement: bool = False,
    *,
    generator: _Generator = None,
    out: Tensor | None = None,
) -> Tensor:
    share = draws.share
    assert share is not None

    def native(weights: Tensor, num_samples: int) -> Tensor:
        given = {} if out is None else {"out": torch.empty_like(out)}
        return cast(Tensor, call(weights, num_samples, replacement, generator=generator, **given))

    if weights.ndim == 2 and (num_samples == 1 or not replacement):
        return _into(out, native(weights, num_samples))  # calls exponential_, which comes here again
    shape = (*weights.shape[:-1], num_samples)
    choice = draws.rows_for("multinomial", weights, generator, shape)
    if isinstance(choice, Rows) and choice.dim != 0:
        choice = "own"
    with draws.paused():
        if draws.seeded or choice == "own":
            with draws.with_own_generator(weights.device, generator, own=choice is not None):
                result = native(weights, num_samples)
        elif isinstance(choice, Rows) and share.of > max(share.rows, 1):
            result = torch.empty(shape, dtype=torch.int64, device=weights.device)
            many = share.of * (shape[0] // max(share.rows, 1))
            if weights.ndim == 2:
                whole_weights = torch.ones((many, weights.shape[1]), dtype=weights.dtype, device=weights.device)
                scatter_rows(weights, whole_weights, choice, share)
                whole = native(whole_weights, num_samples)
            else:
                whole = native(weights, many)
            pick_rows(whole, result, choice, share)
        else:
            result = native(weights, num_samples)
    return _into(out, result)


def _randperm(draws: GlobalDraws, call: _Call, n: int, *, generator: _Generator = None, out: Tensor) -> Tensor:
    """A permutation of the samples: the whole batch's, of which each rank keeps the order of its own samples.

    It mixes only a rank's own samples where one device would mix all.
    """
    share = draws.share
    assert share is not None
    choice = draws.rows_for("randperm", out, generator, (n,))
    if draws.seeded or choice == "own":
        with draws.with_own_generator(out.device, generator, own=choice is not None):
            call(n, generator=generator, out=out)
    elif isinstance(choice, Rows) and share.of > max(share.rows, 1):
        draws.unreproducible.add("randperm over the samples")
        each = n // max(share.rows, 1)
        whole = torch.empty(share.of * each, dtype=out.dtype, device=out.device)
        call(share.of * each, generator=generator, out=whole)
        own = index_of(tuple(share.indices), out.device)
        place = torch.full((share.of,), -1, dtype=out.dtype, device=out.device)
        place.index_copy_(0, own, torch.arange(len(own), dtype=out.dtype, device=out.device))
        # The number of own rows is known; a mask would make the host wait for it.
        others_last = (place[whole // each] < 0).to(torch.uint8).argsort(stable=True)
        mine = whole[others_last[: len(own) * each]]
        _into(out, place[mine // each] * each + mine % each)
    else:
        call(n, generator=generator, out=out)
    return out


def _native_dropout(draws: GlobalDraws, call: _Call, input: Tensor, p: float, train: bool | None) -> Sequence[Tensor]:
    """CUDA's dropout, whose mask depends on the number of all elements."""
    draws_a_mask = train is not False and 0 < p < 1 and input.numel() > 0
    # The CPU's dropout, and so the probe, calls it "bernoulli_".
    choice = draws.rows_for("bernoulli_", input, None) if draws_a_mask else None
    share = draws.share
    assert share is not None
    with draws.paused():
        if draws_a_mask and (draws.seeded or choice == "own"):
            with draws.with_own_generator(input.device, None, own=choice is not None):
                return cast(Sequence[Tensor], call(input, p, train))
        if not isinstance(choice, Rows) or share.of == max(share.rows, 1):
            return cast(Sequence[Tensor], call(input, p, train))
        mask = torch.empty_like(input, dtype=torch.bool)
        if not drop_own(call, input, p, mask, choice, share):
            pick_rows(call(whole_like(input, choice, share), p, train)[1], mask, choice, share)
        return torch.ops.aten.native_dropout_backward(input, mask, 1 / (1 - p)), mask


# -- what can't be one device's ------------------------------------------------------------------------------------------------------------


def _rejecting(op: str, draws: GlobalDraws, call: _Call, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Draws that consume a number of random values that depends on the data: each rank makes its own, from a seed."""
    if op.startswith("rrelu") and not (args[3] if len(args) > 3 else kwargs.get("training", False)):
        return call(tensor, *args, **kwargs)
    generator = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)), None)
    choice: Choice = draws.rows_for(op, tensor, generator)
    if choice is None and not draws.seeded:
        return call(tensor, *args, **kwargs)
    draws.unreproducible.add(op)
    with draws.with_own_generator(tensor.device, generator, own=choice is not None):
        return call(tensor, *args, **kwargs)


def _fused(op: str, draws: GlobalDraws, call: _Call, query: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Fused attention draws its mask inside: each rank draws its own, from a seed."""
    names = [argument.name for argument in getattr(torch.ops.aten, op).default._schema.arguments]
    assert draws.share is not None
    if draws.share.whole or not {**dict(zip(names[1:], args, strict=False)), **kwargs}.get("dropout_p"):
        return call(query, *args, **kwargs)
    draws.unreproducible.add(op)
    with draws.with_own_generator(query.device, None, own=True):
        return call(query, *args, **kwargs)


_FILLS = ("bernoulli_", "normal_", "uniform_", "random_", "exponential_", "geometric_", "log_normal_", "cauchy_")
_OVERLOADS = {"bernoulli_": (".float", ".Tensor"), "random_": ("", ".from", ".to")}
_REJECTING = ("_standard_gamma", "_sample_dirichlet", "poisson", "binomial", "rrelu_with_noise", "rrelu_with_noise_")
_FUSED = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention")

#: Operators of recurrent layers, whose dropout no kernel here replaces.
_RECURRENT = ("_cudnn_rnn", "miopen_rnn")

_ANYWHERE: dict[str, Callable[..., Any]] = {
    **{op + overload: partial(_fill, op) for op in _FILLS for overload in _OVERLOADS.get(op, ("",))},
    **{f"normal.{kind}": _normal for kind in ("Tensor_float", "float_Tensor", "Tensor_Tensor")},
    **{f"normal.{kind}_out": _normal for kind in ("Tensor_float", "float_Tensor", "Tensor_Tensor")},
    "bernoulli.out": _bernoulli_out,
    "multinomial": _multinomial,
    "multinomial.out": _multinomial,
    "randperm.generator_out": _randperm,
    **{op: partial(_rejecting, op) for op in _REJECTING},
}
_ON_CUDA: dict[str, Callable[..., Any]] = {"native_dropout": _native_dropout, **{op: partial(_fused, op) for op in _FUSED}}


def draws_apart(name: str) -> bool:
    """Whether no rank can make an operator's draw (``aten.poisson``) as one device would, so that each draws its own."""
    return name.removeprefix("aten.") in {*_REJECTING, *_FUSED, *_RECURRENT}
