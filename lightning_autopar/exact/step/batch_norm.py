"""BatchNorm over the whole batch where each rank holds a part of it.

Knows modules, a process group and a rank's share of the batch; it doesn't know which engine runs, and no Lightning.

Each BatchNorm layer keeps its class, its names and its own ``forward`` (a subclass may do more than normalise). Only the one call in which
a forward normalises by batch statistics, ``torch.nn.functional.batch_norm(..., training=True)``, is answered here, from the statistics of
all ranks. torch's SyncBatchNorm does the same on CUDA, but swaps the layer's class, refuses CPUs, counts a row that a rank was merely fed,
and has the host wait for the device. Its kernels are what computes here, too, where there is a GPU.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode, handle_torch_function

from lightning_autopar.exact.data.rank_share import BatchShare

Share = Callable[[], BatchShare | None]

_PATCHED = "_autopar_own_forward"
#: Sums of rows, relative to the sum of their sizes, that are no rounding apart.
_APART = 1e-4


def synchronise(module: nn.Module, share: Share, group: dist.ProcessGroup | None = None) -> list[str]:
    """Make every BatchNorm layer of ``module`` take its batch statistics over all ranks; undone by :func:`restore`.

    Outputs, running statistics and gradients are then those of one device with the whole batch, given that each rank's loss is weighted
    with :attr:`BatchShare.weight` and gradients are averaged over the ranks. Layers in evaluation mode aren't changed, unless they keep no
    running statistics and so normalise by the batch even then. Costs one collective in forward and one in backward per layer.

    Args:
        module: whose layers, itself included; InstanceNorm isn't one.
        share: gives this rank's part of the current batch. A rank with ``rows == 0`` takes part, but its rows enter no statistics and get
            no gradient. While it gives None, layers normalise by their own input.
        group: the ranks that share the batch; all, if None.

    Returns:
        The FQNs of the layers, empty where there is but one rank.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return []
    norms = norms_of(module)
    for layer in norms.values():
        if _PATCHED not in layer.__dict__:
            _patch(layer, share, group)
    return list(norms)


def fix(module: nn.Module, run: Callable[[], object]) -> NormRuns:
    """Give BatchNorm layers the statistics of the batch that ``run`` takes through the module, for good.

    Returns:
        Those that the step had left in training mode, to note what they normalise from now on.
    """
    norms = norms_of(module)
    for norm in norms.values():
        norm.momentum = 1.0
        if norm.running_mean is None and norm.running_var is None:
            norm.running_mean, norm.running_var = torch.zeros(norm.num_features), torch.ones(norm.num_features)
    if norms:
        run()
    training = {name: norm for name, norm in norms.items() if norm.training}
    for norm in norms.values():
        norm.eval()
    return NormRuns(training)


def norms_of(module: nn.Module) -> dict[str, _BatchNorm]:
    """Its BatchNorm layers by FQN, itself included; InstanceNorm isn't one."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, _BatchNorm)}


class NormRuns:
    """What batch norms whose statistics are fixed normalise in one run after another: of the whole batch, then of its parts."""

    def __init__(self, layers: Mapping[str, _BatchNorm]) -> None:
        self._layers = layers
        self._runs: list[_Noted] = []

    def clear(self) -> None:
        """Forget all runs."""
        self._runs.clear()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """The context of a run."""
        with _Noted(self._layers) if self._layers else nullcontext() as run:
            if run is not None:
                self._runs.append(run)
            yield

    def apart(self) -> str | None:
        """Why their statistics over the parts together wouldn't be those of the whole batch; None where they would."""
        if not self._runs:
            return None
        whole, *parts = (run.calls for run in self._runs)
        times = Counter(name for name, *_ in whole)
        for part in parts:
            own = Counter(name for name, *_ in part)
            for name in {**times, **own}:
                if own[name] != times[name]:
                    often = f"{times[name]} × in a step on the whole batch and {own[name]} × on a part of it"
                    return f"the batch norm {name!r} runs {often}, so that it would take its statistics over other samples"
        for (name, rows, total, size), *each in zip(whole, *parts, strict=True):
            apart = (sum(call[2] for call in each) - total).abs() > _APART * size
            if {call[0] for call in each} != {name} or sum(call[1] for call in each) != rows or bool(apart.any()):
                return f"the batch norm {name!r} takes its statistics over some of the batch's rows, which would be others on several ranks"
        return None


class _Noted(TorchFunctionMode):
    """Notes the calls of batch norms: of each the layer, the number of rows, and by channel the sum of the values and of their sizes."""

    def __init__(self, layers: Mapping[str, _BatchNorm]) -> None:
        super().__init__()
        self._names = {id(layer.running_mean): name for name, layer in layers.items()}
        self.calls: list[tuple[str, int, Tensor, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.batch_norm and (name := self._names.get(id(args[1]))) is not None:
            value = args[0].detach().as_subclass(Tensor).double()
            dims = [dim for dim in range(value.dim()) if dim != 1]
            self.calls.append((name, value.numel() // value.shape[1], value.sum(dims), value.abs().sum(dims)))
        return func(*args, **(kwargs or {}))


def restore(module: nn.Module) -> None:
    """Undo :func:`synchronise`."""
    for layer in module.modules():
        if _PATCHED in layer.__dict__:
            own = layer.__dict__.pop(_PATCHED)
            del layer.__dict__["forward"]
            if own is not None:
                layer.__dict__["forward"] = own


def _patch(layer: nn.Module, share: Share, group: dist.ProcessGroup | None) -> None:
    """Shadow the layer's ``forward``. A bound method of that name: a copy of the layer gets its own, an unpickled one the class's."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = self.__dict__.get(_PATCHED)
        if own is None:
            # torch's SyncBatchNorm would exchange statistics by itself, and refuses CPUs.
            kind = _BatchNorm if isinstance(self, nn.SyncBatchNorm) else type(self)
            own = types.MethodType(kind.forward, self)
        current = share()
        if current is None:
            return own(*args, **kwargs)
        with _GlobalStatistics(current.rows > 0, group):
            return own(*args, **kwargs)

    layer.__dict__[_PATCHED] = layer.__dict__.get("forward")
    layer.__dict__["forward"] = types.MethodType(forward, layer)


class _GlobalStatistics(TorchFunctionMode):
    """Computes ``batch_norm`` in training mode from all ranks' statistics; passes everything else on."""

    def __init__(self, counts: bool, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.counts = counts
        self.group = group

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.batch_norm:
            return func(*args, **kwargs)
        if types:  # a subclass of Tensor wraps the result, as it does torch's own: around the operation, never inside of it
            return handle_torch_function(self.batch_norm, [*args, *kwargs.values()], *args, **kwargs)
        return self.batch_norm(*args, **kwargs)

    def batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """The signature of :func:`torch.nn.functional.batch_norm`."""
        if not training:
            return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
        if type(input) is not Tensor:
            input = input.as_subclass(Tensor)
        output: Tensor
        if input.is_cuda:
            output = _ByKernels.apply(  # type: ignore[no-untyped-call]
                input, weight, bias, (running_mean, running_var), momentum, eps, self.counts, self.group
            )
            return output
        with torch.no_grad():
            count, mean, variance = _global_moments(input, self.counts, self.group)
            unbiased = variance * (count / (count - 1))
            for running, new in ((running_mean, mean), (running_var, unbiased)):
                if running is not None:
                    running.copy_(torch.lerp(running.to(new.dtype), new, momentum))
        output = _Normalise.apply(  # type: ignore[no-untyped-call]
            input, weight, bias, count, mean, variance, eps, self.counts, self.group
        )
        return output


def _accumulated(dtype: torch.dtype) -> torch.dtype:
    """The type that torch's own kernels accumulate in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _global_moments(input: Tensor, counts: bool, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """Count (no dimension), mean and biased variance (both of shape (C,), float64) of a channel over all ranks, by one all-gather.

    The ranks' moments are merged as in Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances"
    (1979): unlike a sum of squares, this doesn't cancel where the mean is large.

    Raises:
        ValueError: if the whole batch has but one value per channel, as torch does.
    """
    channels = input.shape[1]
    local_count = input.numel() // channels if counts else 0
    moments = torch.zeros(1 + 2 * channels, dtype=torch.float64, device=input.device)
    if local_count:
        dims = [dim for dim in range(input.dim()) if dim != 1]
        variance, mean = torch.var_mean(input.to(_accumulated(input.dtype)), dims, correction=0)
        moments[0] = local_count
        moments[1 : 1 + channels] = mean
        moments[1 + channels :] = variance
    world_size = dist.get_world_size(group)
    gathered = torch.empty(world_size, moments.numel(), dtype=torch.float64, device=input.device)
    dist.all_gather(list(gathered.unbind()), moments, group=group)
    counts_of, means, variances = gathered[:, :1], gathered[:, 1 : 1 + channels], gathered[:, 1 + channels :]
    count = counts_of.sum()
    _check_count(local_count, count, input)
    mean = (counts_of * means).sum(0) / count
    variance = (counts_of * (variances + (means - mean) ** 2)).sum(0) / count
    return count, mean, variance


def _check_count(local_count: int, count: Tensor, input: Tensor) -> None:
    """Read the count of all ranks only where it may be too small: on CUDA that waits for the device."""
    if local_count <= 1 and (total := int(count)) <= 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got {total} over all ranks, with input size {input.shape} here"
        )


class _ByKernels(torch.autograd.Function):
    """The same with the kernels of torch's SyncBatchNorm (``torch/nn/modules/_functions.py``), which read half precision directly."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running: tuple[Tensor | None, Tensor | None],
        momentum: float,
        eps: float,
        counts: bool,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        input = _dense(input)
        channels, dtype = input.shape[1], _accumulated(input.dtype)
        local_count = input.numel() // channels if counts else 0
        mean, inverse = torch.batch_norm_stats(input, eps)
        count = torch.full((1,), float(local_count), dtype=dtype, device=input.device)
        # Values that don't count must be finite.
        statistics = torch.cat([mean, inverse, count] if counts else [torch.zeros_like(mean), torch.ones_like(inverse), count])
        gathered = statistics.new_empty(dist.get_world_size(group), statistics.numel())
        dist.all_gather_into_tensor(gathered, statistics, group=group)
        # The kernel divides by the count so far: a rank with samples must come first.
        gathered = gathered[gathered[:, -1].argsort(descending=True)]
        means, inverses, counts_of = gathered.split([channels, channels, 1], dim=1)
        counts_of = counts_of.reshape(-1)
        _check_count(local_count, counts_of.sum(), input)
        # The kernel takes counts in the type of the statistics that it updates: half precision would round them.
        kept = [torch.zeros(channels, dtype=dtype, device=input.device) if each is None else each.to(dtype) for each in running]
        mean, inverse = torch.batch_norm_gather_stats_with_counts(
            input, means.contiguous(), inverses.contiguous(), kept[0], kept[1], momentum, eps, counts_of
        )
        for each, new in zip(running, kept, strict=True):
            if each is not None and each is not new:
                each.copy_(new)
        ctx.save_for_backward(input, weight, mean, inverse, counts_of.to(torch.int32))
        ctx.bias_dtype, ctx.counts, ctx.group = None if bias is None else bias.dtype, counts, group
        scale, shift = (None if each is None else each.to(dtype) for each in (weight, bias))
        return torch.batch_norm_elemt(input, scale, shift, mean, inverse, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, inverse, counts_of = ctx.saved_tensors
        gradient = _dense(gradients[0].to(input.dtype))
        scale = None if weight is None else weight.to(mean.dtype)
        sums, moments, weight_gradient, bias_gradient = torch.batch_norm_backward_reduce(
            gradient, input, mean, inverse, scale, True, weight is not None, ctx.bias_dtype is not None
        )
        together = torch.cat([sums, moments])
        if not ctx.counts:
            for each in (together, weight_gradient, bias_gradient):
                if each is not None:
                    each.zero_()
        dist.all_reduce(together, group=ctx.group)
        input_gradient = None
        if ctx.needs_input_grad[0]:
            sums, moments = together.split(len(sums))
            input_gradient = torch.batch_norm_backward_elemt(gradient, input, mean, inverse, scale, sums, moments, counts_of)
            if not ctx.counts:
                input_gradient.zero_()
        return (
            input_gradient,
            weight_gradient.to(weight.dtype) if ctx.needs_input_grad[1] else None,
            bias_gradient.to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None,
            *[None] * 5,
        )


def _dense(tensor: Tensor) -> Tensor:
    """The tensor in the layout that the kernels need."""
    for layout in (torch.channels_last, torch.channels_last_3d):
        if tensor.dim() == (4 if layout == torch.channels_last else 5) and tensor.is_contiguous(memory_format=layout):
            return tensor
    return tensor.contiguous()


class _Normalise(torch.autograd.Function):
    """Normalise by given statistics; in backward, the statistics' gradient is that of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        count: Tensor,
        mean: Tensor,
        variance: Tensor,
        eps: float,
        counts: bool,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        ctx.save_for_backward(input, weight, count, mean, torch.rsqrt(variance + eps))
        ctx.has_bias, ctx.counts, ctx.group = bias is not None, counts, group
        dtype = _accumulated(input.dtype)
        scale, shift = (None if each is None else each.to(dtype) for each in (weight, bias))
        # torch's own kernel, so that rounding is its own, too.
        return F.batch_norm(input, mean.to(dtype), variance.to(dtype), scale, shift, training=False, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, count, mean, inverse = ctx.saved_tensors
        dtype = _accumulated(input.dtype)
        shape = [1, -1] + [1] * (input.dim() - 2)
        dims = [dim for dim in range(input.dim()) if dim != 1]
        gradient = gradients[0].to(dtype)
        # In place, so that only two tensors of the input's size are alive, as in torch's own kernel, with which the plan was made.
        normalised = torch.sub(input, mean.to(dtype).view(shape)).mul_(inverse.to(dtype).view(shape))
        # float64, since the sums' difference to the gradient may be small.
        sums = torch.stack([gradient.sum(dims), (gradient * normalised).sum(dims)]).double()
        if not ctx.counts:
            sums.zero_()
        weight_gradient, bias_gradient = sums[1].clone(), sums[0].clone()
        dist.all_reduce(sums, group=ctx.group)
        input_gradient = None
        if ctx.needs_input_grad[0]:
            scale = inverse if weight is None else inverse * weight.double()
            means = (sums / count).to(dtype)
            input_gradient = (gradient - means[0].view(shape)).sub_(normalised.mul_(means[1].view(shape))).mul_(scale.to(dtype).view(shape))
            del normalised
            input_gradient = input_gradient.to(input.dtype) if ctx.counts else torch.zeros_like(input)
        return (
            input_gradient,
            weight_gradient.to(weight.dtype) if weight is not None and ctx.needs_input_grad[1] else None,
            bias_gradient.to(input.dtype if weight is None else weight.dtype) if ctx.has_bias and ctx.needs_input_grad[2] else None,
            *[None] * 6,
        )
