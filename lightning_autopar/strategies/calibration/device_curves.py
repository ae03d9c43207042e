"""Measures one device: operations at several sizes, and what it costs the host to issue an operation. Knows torch; no planning, no other
rank.

It runs in a forked child, on a device that this process alone uses, and changes nothing outside it. Its clock is the processor's where that
counts, else the wall's. The host's cost is measured on a model so small that there is nothing else to do.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_autopar.timing.measured_curves import Curve
from lightning_autopar.timing.measured_rates import RARE, SMALLEST_DIMENSIONS

#: The quantile of the runs' times that counts: others' work on the machine makes some runs longer, none shorter.
_QUANTILE = 0.25
_LEAST_RUNS, _MOST_RUNS = 3, 200
#: Of the clock that a sleeping kernel counts: about the fastest of any GPU, as a longer sleep does no harm.
_GPU_CYCLES_PER_SECOND, _MOST_ASLEEP_SECONDS = 2e9, 0.02


class Clock:
    """Times something on a device.

    A single thread is timed by its processor time, so that others' work on the machine doesn't count; several by the wall clock; a GPU by
    its own events, while the host runs ahead of it. Otherwise of a small kernel the host's part would be timed, which is longer.

    Args:
        device: which; the clock waits for a GPU to finish.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.now = time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
        self._wait = torch.cuda.synchronize if device.type == "cuda" else lambda _: None

    def seconds(self, run: Callable[[], Any], slot: float) -> float:
        """Seconds of one run: the lower quartile of as many runs as fit into ``slot`` seconds."""
        run()
        self._wait(self._device)
        begun = self.now()
        run()
        issued = self.now() - begun
        self._wait(self._device)
        once = self.now() - begun
        # Runs are timed several at once: waiting for one costs more than many runs take.
        together = max(1, min(100, math.ceil((1e-3 if self._device.type == "cuda" else 5e-5) / max(once, 1e-7))))
        timed = self._events if self._device.type == "cuda" else self._span
        taken: list[float] = []
        least = _LEAST_RUNS if once < slot else 1
        until = self.now() + slot
        while len(taken) < least or (len(taken) < _MOST_RUNS and self.now() < until):
            taken.append(timed(run, together, issued) / together)
        return sorted(taken)[int(_QUANTILE * len(taken))]

    def _span(self, run: Callable[[], Any], times: int, issued: float) -> float:
        """Seconds of so many runs, one after the other."""
        begun = self.now()
        for _ in range(times):
            run()
        return self.now() - begun

    def _events(self, run: Callable[[], Any], times: int, issued: float) -> float:
        """The GPU's seconds of so many runs. It is kept busy until the host has issued them all, each in ``issued`` seconds."""
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(round(_GPU_CYCLES_PER_SECOND * min(_MOST_ASLEEP_SECONDS, 2 * times * issued + 5e-5)))
        first.record()
        for _ in range(times):
            run()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) * 1e-3

    def busy(self, run: Callable[[], Any], slot: float) -> float:
        """Processor seconds of one run, all threads together: the mean over ``slot`` seconds."""
        run()
        until, begun, runs = time.perf_counter() + slot, time.process_time(), 0
        while runs < 1 or time.perf_counter() < until:
            run()
            runs += 1
        return (time.process_time() - begun) / runs


class _Small(nn.Module):
    """A block of the common operations, so small that a step on it only takes the time to issue them."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = self.mix(self.norm(x)).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(mixed)
        return torch.add(x, self.down(F.relu(self.up(x))))


class _Names(TorchDispatchMode):
    """Records the names of the operations that run, without views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func.namespace == "aten":
            self.names.append(func._overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def issue_curves(device: torch.device, subject: str, least: dict[str, float], *, steps: int = 40) -> list[Curve]:
    """Host seconds to issue an operation, in forward, backward and the optimizer's step of a very small model.

    Args:
        subject: under which the curves are kept.
        least: what the smallest measured run of each operation takes beyond that.
    """
    now = Clock(device).now
    model = nn.Sequential(_Small(), _Small()).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(2, 4, 8, device=device)
    loss: list[Tensor] = []
    phases: dict[str, Callable[[], Any]] = {
        "forward": lambda: loss.append(model(x).square().mean()),
        "backward": lambda: loss.pop().backward(),
        "optimizer": lambda: (optimizer.step(), optimizer.zero_grad()),
    }
    for run in [*phases.values()] * 3:
        run()
    taken: dict[str, list[float]] = {phase: [] for phase in phases}
    for _ in range(steps):  # as in training, the host never waits for the GPU: after a wait it is slower
        for phase, run in phases.items():
            begun = now()
            run()
            taken[phase].append(now() - begun)
    curves = []
    for phase, run in phases.items():
        with _Names() as seen:
            run()
        known = 0.0 if device.type == "cuda" else sum(least.get(name, 0.0) for name in seen.names)
        spent = sorted(taken[phase])[steps // 4]
        curves.append(
            Curve(subject=subject, thing=f"issue/{phase}", sizes=(1,), seconds=(max(spent - known, spent / 4) / max(1, len(seen.names)),))
        )
    return curves


aten = torch.ops.aten

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
#: Bytes of operands that together fill a processor's caches: a step's weights come from memory, not from a cache.
_COLD_BYTES = 32 << 20
#: Operands up to this size stay in caches during a step, too.
_WARM_BYTES = 512 << 10
_FILL_SECONDS = 5e-3
_MOST_TIMES = 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing at one size.

    Args:
        thing: as :mod:`lightning_autopar.timing.measured_rates` names it.
        size: by which its curve is kept.
        run: does it ``times`` times.
    """

    thing: str
    dtype: str
    size: float
    run: Callable[[], Any]
    times: int = 1


def measure_device(
    device: torch.device, subject: str, *, seconds: float, common: bool = True, rare: Collection[str] = tuple(RARE)
) -> list[Curve]:
    """Measure the curves of one device that no other process of ours uses.

    Args:
        common: whether to measure what every step has.
        rare: the kinds of :data:`RARE` to measure.
        seconds: how long it may take. Later cases run only a few times; after three times as long none runs any more. A thing that wasn't
            measured at all of its sizes, or fails on this device, is left to the data sheet: a curve through its smallest size alone would
            be wrong for large ones by as much as small operations are slow.
    """
    clock = Clock(device)
    bare = 0.0 if device.type == "cuda" else _bare_seconds(clock)  # a GPU's events count nothing of the host
    if common:
        issue_curves(device, subject, {}, steps=1)  # let torch do its one-time work before the clock runs
    found: dict[tuple[str, str], dict[float, float]] = {}
    cut: set[tuple[str, str]] = set()
    slot = seconds / 300
    until, at_last = clock.now() + seconds, time.perf_counter() + _MOST_TIMES * seconds
    for case in cases(device, common=common, rare=rare):
        key = case.thing, case.dtype
        if time.perf_counter() > at_last:
            cut.add(key)
            continue
        try:
            taken = clock.seconds(case.run, slot if clock.now() < until else slot / 10) / case.times - bare
        except RuntimeError:
            cut.add(key)
            continue
        found.setdefault(key, {})[case.size] = max(taken, bare / 20, 1e-8)
    curves = [
        Curve(
            subject=subject, thing=thing, dtype=dtype, sizes=tuple(sorted(points)), seconds=tuple(points[size] for size in sorted(points))
        )
        for (thing, dtype), points in found.items()
        if (thing, dtype) not in cut
    ]
    if not common:
        return curves
    return [*curves, *issue_curves(device, subject, {curve.thing: curve.seconds[0] for curve in curves if curve.dtype == "fp32"})]


def _bare_seconds(clock: Clock) -> float:
    """Seconds to call an operation that has nothing to do: they belong to issuing operations, not to the operation."""
    tiny = torch.zeros(1)
    relu = aten.relu_.default
    return clock.seconds(lambda: relu(tiny), 2e-3)


# -- the cases -------------------------------------------------------------------------------------------------------------------------


def cases(device: torch.device, *, common: bool = True, rare: Collection[str] = tuple(RARE)) -> Iterator[Case]:
    """The cases to measure, the most important first: on a GPU, time is left for the last ones only where torch must load little."""
    gpu = device.type == "cuda"
    if common:
        yield from _common(device, gpu=gpu)
    rows = _rows(device, (1 << 12, 1 << 20, 1 << 22) if gpu else (1 << 10, 1 << 18))
    for wanted, each in (
        ("pictures" in rare, _convolutions(device)),
        ("attention" in rare, _attention(device)),
        (common, rows),
        ("pictures" in rare, _images(device)),
        (common, _indices(device)),
        ("recurrent layers" in rare, _recurrent(device)),
    ):
        if wanted:
            yield from _able(each)
    if common and not gpu:
        yield from _products(device, "bf16", (64, 256), (64,))


def _common(device: torch.device, *, gpu: bool) -> Iterator[Case]:
    """The cases of what every step has, without operations on rows."""
    yield from _products(device, "fp32", (16, 64, 256, 1024, 4096) if gpu else (16, 64, 256, 1024), SMALLEST_DIMENSIONS)
    for dtype in ("bf16", "fp16") if gpu else ():
        yield from _products(device, dtype, (64, 512, 4096), (64, 512))
    elements = (1 << 12, 1 << 20, 1 << 22) if gpu else (1 << 10, 1 << 14, 1 << 18, 1 << 20)
    yield from _pointwise(device, (*elements, 1 << 24) if gpu else (*elements, 1 << 22))
    if gpu:
        yield from _host_copies(device)


def _able(group: Iterator[Case]) -> Iterator[Case]:
    """The cases that the device can run: a library may not support the larger sizes of a thing. Then that thing's last case fails."""
    last: Case | None = None
    try:
        for case in group:
            last = case
            yield case
    except RuntimeError as error:
        missing = str(error)

        def fail() -> None:
            raise RuntimeError(missing)

        if last is not None:
            yield Case(thing=last.thing, dtype=last.dtype, size=last.size, run=fail)


def cold_product(device: torch.device, dtype: torch.dtype, m: int, n: int, k: int) -> Callable[[], None]:
    """Multiplies an (m, k) by a (k, n) matrix; the second comes from memory, if in a step it would."""
    size_bytes = max(n * k, m * k) * dtype.itemsize
    copies = 1 if size_bytes <= _WARM_BYTES else max(1, min(16, _COLD_BYTES // size_bytes))
    left = torch.full((m, k), 0.5, device=device, dtype=dtype)
    rights = itertools.cycle([torch.full((k, n), 0.5, device=device, dtype=dtype) for _ in range(copies)])
    return _fresh(lambda: torch.mm(left, next(rights)))[1]


def _products(device: torch.device, dtype: str, wides: tuple[int, ...], smallest: tuple[int, ...]) -> Iterator[Case]:
    for least in smallest:
        for wide in (wide for wide in wides if wide >= least) if least < 512 else (max(512, wides[-1] // 2), wides[-1]):
            kind = DTYPES[dtype]
            # The small dimension is the output's in a forward, and the inner dimension in a weight's gradient.
            forward, gradient = cold_product(device, kind, least, wide, wide), cold_product(device, kind, wide, wide, least)

            def both(forward: Callable[[], None] = forward, gradient: Callable[[], None] = gradient) -> None:
                forward()
                gradient()

            yield Case(thing=f"matmul/{least}", dtype=dtype, size=wide, run=both, times=2)


def _host_copies(device: torch.device) -> Iterator[Case]:
    for size in (1 << 12, 1 << 20, 1 << 26):
        there, here = torch.empty(size, dtype=torch.uint8, device=device), torch.empty(size, dtype=torch.uint8, pin_memory=True)
        yield Case(thing="host_copy", dtype="", size=size, run=partial(there.copy_, here, non_blocking=True))


def _fresh(function: Any, *args: Any) -> tuple[float, Callable[[], None]]:
    """(bytes moved, run): results are kept for a while, as in a step, so that each is written to memory that isn't in a cache."""
    output = function(*args)
    written = _bytes(output)
    count = max(1, min(64, _COLD_BYTES // max(1, written)))
    kept: deque[Any] = deque([output], maxlen=count)
    until = time.perf_counter() + _FILL_SECONDS
    while len(kept) < count and time.perf_counter() < until:  # the kernel provides the first pages; later runs reuse them
        kept.append(function(*args))
    return _bytes(args) + written, lambda: kept.append(function(*args))


def _bytes(values: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def _moving(thing: str, function: Any, *args: Any, dtype: str = "fp32") -> Case:
    size, run = _fresh(function, *args)
    return Case(thing=thing, dtype=dtype, size=size, run=run)


def _pointwise(device: torch.device, elements: tuple[int, ...]) -> Iterator[Case]:
    for count in elements:
        one = torch.full((count,), 0.5, device=device)
        yield _moving("add", aten.add.Tensor, one, torch.ones_like(one))
        yield _moving("clone", aten.clone.default, one)
        yield Case(thing="add_", dtype="fp32", size=3 * _bytes(one), run=_cold_add(one))
    for count in elements[1:-1] if device.type == "cuda" else elements[1:-2]:
        one = torch.linspace(-3.0, 3.0, count, device=device)
        yield _moving("gelu", aten.gelu.default, one)
        yield _moving("gelu_backward", aten.gelu_backward.default, one, one.clone())
        yield _moving("tanh", aten.tanh.default, one)
        yield _moving("div", aten.sqrt.default, one.abs())
        yield _moving("sum", aten.sum.dim_IntList, one.view(-1, 64), [0])
        mask = torch.empty(count, device=device)
        draws: dict[str, Callable[[], Any]] = {
            "bernoulli_": partial(aten.bernoulli_.float, mask, 0.9),
            "uniform_": partial(aten.uniform_.default, mask),
            "normal_": partial(aten.normal_.default, mask),
            "exponential_": partial(aten.exponential_.default, mask),
        }
        for thing, draw in draws.items():
            yield Case(thing=thing, dtype="fp32", size=_bytes(mask), run=draw)


def _cold_add(one: Tensor) -> Callable[[], Any]:
    """Adds to several tensors in turns: an optimizer's states aren't in a cache when their turn comes; the gradient is."""
    copies = max(1, min(16, 2 * _COLD_BYTES // _bytes(one))) if _bytes(one) > _WARM_BYTES else 1
    ring = itertools.cycle([torch.full_like(one, 0.5) for _ in range(copies)])
    return lambda: aten.add_.Tensor(next(ring), one, alpha=0)


def _rows(device: torch.device, elements: tuple[int, ...]) -> Iterator[Case]:
    for count in elements:
        width = 1024 if count >= 1 << 20 else 128  # large ones are of wide models, whose rows a GPU takes four times as fast
        x = torch.linspace(-3.0, 3.0, count, device=device).view(-1, width)
        weight, bias = torch.ones(width, device=device), torch.zeros(width, device=device)
        output, mean, rstd = aten.native_layer_norm(x, [width], weight, bias, 1e-5)
        yield _moving("native_layer_norm", aten.native_layer_norm.default, x, [width], weight, bias, 1e-5)
        masks = [True, True, True]
        backward = aten.native_layer_norm_backward.default
        yield _moving("native_layer_norm_backward", backward, output, x, [width], mean, rstd, weight, bias, masks)
        yield _moving("_softmax", aten._softmax.default, x, -1, False)
        yield _moving("_softmax_backward_data", aten._softmax_backward_data.default, x, x.softmax(-1), -1, torch.float32)


def _indices(device: torch.device) -> Iterator[Case]:
    table = torch.randn(4096, 128, device=device)
    for rows in (64, 4096, 1 << 16) if device.type == "cuda" else (64, 4096):
        index = torch.randint(4096, (rows,), device=device)
        picked = aten.embedding(table, index)
        # As many bytes are read from the table as are written.
        for case in (_moving("embedding", aten.embedding.default, table, index),):
            yield Case(thing=case.thing, dtype=case.dtype, size=case.size - _bytes(table) + _bytes(picked), run=case.run)
        # By the rows' bytes, which are read twice: filling the table is another operation's time (measured_rates).
        back = _fresh(aten.embedding_dense_backward.default, picked, index, 4096, -1, False)[1]
        yield Case(thing="embedding_dense_backward", dtype="fp32", size=2 * _bytes(picked) + _bytes(index), run=back)


def _convolutions(device: torch.device) -> Iterator[Case]:
    """Convolutions by what decides on the kernel: channels in groups, one position, a picture's few channels, or none of these. The time at
    a size is the mean over some shapes with equally many FLOPs: wide pictures with few channels, small ones with many.
    """
    shapes: dict[str, tuple[tuple[tuple[int, int, int, int], ...], ...]] = {
        "convolution": (((2, 8, 8, 8),), ((8, 16, 16, 32),), ((8, 32, 32, 32), (8, 64, 64, 16), (8, 128, 128, 8))),
        "depthwise": (((2, 8, 8, 8),), ((8, 64, 64, 16),)),
        "one_position": (((2, 8, 8, 8),), ((8, 64, 64, 16), (8, 128, 128, 8))),
        "few_channels": (((2, 3, 8, 8),), ((16, 3, 32, 32),)),
    }
    more = 1 if device.type == "cpu" else 8
    for thing, points in shapes.items():
        for point in points:
            runs = [_convolution(device, thing, batch * more, *shape) for batch, *shape in point]
            flops = sum(each[0] for each in runs) / len(runs)
            for ending, size, each in (("", flops, [run[1] for run in runs]), ("_backward", 2 * flops, [run[2] for run in runs])):
                yield Case(thing=f"{thing}{ending}", dtype="fp32", size=size, run=partial(_all, each), times=len(each))


def _convolution(device: torch.device, thing: str, batch: int, before: int, after: int, edge: int) -> tuple[int, Any, Any]:
    """(FLOPs, forward, backward) of one shape."""
    width, groups = 1 if thing == "one_position" else 3, before if thing == "depthwise" else 1
    x = torch.full((batch, before, edge, edge), 0.5, device=device)
    y = torch.full((batch, after, edge, edge), 0.5, device=device)
    weight = torch.full((after, before // groups, width, width), 0.5, device=device)
    rest = ([1, 1], [width // 2, width // 2], [1, 1], False, [0, 0], groups)
    forward = _fresh(aten.convolution.default, x, weight, None, *rest)[1]
    backward = _fresh(aten.convolution_backward.default, y, x, weight, None, *rest, [True, True, False])[1]
    return 2 * batch * edge * edge * after * (before // groups) * width * width, forward, backward


def _all(runs: Sequence[Callable[[], Any]]) -> None:
    for run in runs:
        run()


def _attention(device: torch.device) -> Iterator[Case]:
    larger = ((8, 12, 512, 64),) if device.type == "cuda" else ()  # the others leave most of a GPU idle
    for ending, causal in ((".causal", True), ("", False)):
        attention = partial(F.scaled_dot_product_attention, is_causal=causal)
        for batch, heads, length, width in ((2, 2, 16, 16), (4, 4, 64, 32), (4, 4, 256, 64), *larger):
            shape = (batch, heads, length, width)
            query, key, value = (torch.full(shape, 0.5, device=device, requires_grad=True) for _ in range(3))
            output = attention(query, key, value)
            flops = 4 * batch * heads * length * length * width
            yield Case(thing=f"attention{ending}", dtype="fp32", size=flops, run=_fresh(attention, query, key, value)[1])
            back = _fresh(_gradients, output, (query, key, value), torch.ones_like(output))[1]
            yield Case(thing=f"attention_backward{ending}", dtype="fp32", size=flops * 5 // 2, run=back)


def _gradients(output: Tensor, inputs: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(output, inputs, gradient, retain_graph=True)


def _recurrent(device: torch.device) -> Iterator[Case]:
    for batch, length, width in ((4, 4, 16), (16, 16, 64), (16, 32, 256)):
        layer = nn.LSTM(width, width, batch_first=True, device=device)
        x = torch.randn(batch, length, width, device=device, requires_grad=True)
        flops = 2 * batch * length * sum(weight.numel() for weight in layer.parameters() if weight.dim() == 2)
        run = _fresh(lambda value, layer=layer: layer(value)[0], x)[1]
        yield Case(thing="recurrent", dtype="fp32", size=flops, run=run)
        output = layer(x)[0]
        back = _fresh(_gradients, output, (x, *layer.parameters()), torch.ones_like(output))[1]
        yield Case(thing="recurrent_backward", dtype="fp32", size=2 * flops, run=back)


def _images(device: torch.device) -> Iterator[Case]:
    for batch, channels, edge in ((2, 8, 8), (16, 32, 32)):
        x = torch.randn(batch, channels, edge, edge, device=device)
        scale, shift = torch.ones(channels, device=device), torch.zeros(channels, device=device)
        running = torch.zeros(channels, device=device), torch.ones(channels, device=device)
        yield _moving("native_batch_norm", aten.native_batch_norm.default, x, scale, shift, *running, True, 0.1, 1e-5)
        _, mean, rstd = aten.native_batch_norm(x, scale, shift, *running, True, 0.1, 1e-5)
        masks = [True, True, True]
        backward = aten.native_batch_norm_backward.default
        yield _moving("native_batch_norm_backward", backward, x, x, scale, *running, mean, rstd, True, 1e-5, masks)
        pooled, index = aten.max_pool2d_with_indices(x, [2, 2], [2, 2])
        yield _moving("max_pool2d_with_indices", aten.max_pool2d_with_indices.default, x, [2, 2], [2, 2])
        rest = ([2, 2], [2, 2], [0, 0], [1, 1], False, index)
        yield _moving("max_pool2d_with_indices_backward", aten.max_pool2d_with_indices_backward.default, pooled, x, *rest)
