"""Rates from measurements of this machine, and from a data sheet for what wasn't measured. It measures nothing itself.

A curve is named by an operation (``"gelu"``, ``"add_"``; seconds by bytes moved), ``"matmul/8"`` (of matrices whose smallest dimension is
8; seconds by the mean of the other two), ``"convolution"``, ``"depthwise"``, ``"one_position"``, ``"few_channels"``, ``"attention"`` and
``"recurrent"`` with their ``"…_backward"`` (by FLOPs), a collective (by bytes), ``"issue/forward"`` and the like, ``"loop/ddp"``,
``"unit"``, ``"call"``, ``"action"``, ``"host_copy"``, ``"adam"`` (by elements). Two of them,
``"crowd/matmul"`` and ``"crowd/add"``, say for each number of ranks how much slower several ranks are than one on the same cores.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Hashable, Mapping, Sequence

from lightning_autopar.devices.inventory import Device, Inventory
from lightning_autopar.memory.work.work import Work
from lightning_autopar.plans import Engine, loaded
from lightning_autopar.timing.collectives import topology
from lightning_autopar.timing.measured_curves import Calibration, Curve
from lightning_autopar.timing.rates import Collective, Phase, Python, Rates

#: The subject of curves that belong to no device.
HOST = "host"
#: The smallest dimensions for which matrix products are measured.
SMALLEST_DIMENSIONS = (1, 8, 64, 512)
_SCATTER = "embedding_dense_backward"
#: Operations that cost the same as a measured one: the same passes over memory, the same arithmetic.
_ALIKE: Mapping[str, str] = {
    **dict.fromkeys(("sub", "mul", "relu", "neg", "threshold_backward", "maximum", "where", "ge", "le", "eq", "masked_fill"), "add"),
    **dict.fromkeys(("sub_", "mul_", "relu_", "lerp_", "addcmul_", "neg_", "masked_fill_", "div_"), "add_"),
    **dict.fromkeys(("sigmoid", "silu", "elu", "exp", "sin", "cos", "log", "softplus", "mish", "hardswish"), "tanh"),
    **dict.fromkeys(("sigmoid_backward", "tanh_backward"), "add"),
    **dict.fromkeys(("silu_backward", "mish_backward"), "gelu_backward"),
    **dict.fromkeys(("sqrt", "rsqrt", "reciprocal"), "div"),
    **dict.fromkeys(("native_dropout", "bernoulli"), "bernoulli_"),
    **dict.fromkeys(("rand", "rand_like", "random_", "randint"), "uniform_"),
    **dict.fromkeys(("randn", "randn_like", "normal", "log_normal_"), "normal_"),
    **dict.fromkeys(("cauchy_", "geometric_"), "exponential_"),
    **dict.fromkeys(("_log_softmax", "_safe_softmax", "logsumexp"), "_softmax"),
    **dict.fromkeys(("_log_softmax_backward_data",), "_softmax_backward_data"),
    **dict.fromkeys(("mean", "norm", "linalg_vector_norm", "amax", "max", "var_mean"), "sum"),
    **dict.fromkeys(("index_select", "gather", "index"), "embedding"),
    **dict.fromkeys(("index_put", "index_add", "index_add_", "scatter_add", "scatter_add_"), _SCATTER),
    **dict.fromkeys(("copy_", "_to_copy", "contiguous", "stack", "constant_pad_nd", "expand_copy", "repeat"), "clone"),
    **dict.fromkeys(("_native_batch_norm_legit", "cudnn_batch_norm", "_batch_norm_with_update"), "native_batch_norm"),
    **dict.fromkeys(("cudnn_batch_norm_backward", "batch_norm_backward"), "native_batch_norm_backward"),
    **dict.fromkeys(("native_group_norm",), "native_layer_norm"),
    **dict.fromkeys(("native_group_norm_backward",), "native_layer_norm_backward"),
    **dict.fromkeys(("avg_pool2d",), "max_pool2d_with_indices"),
    **dict.fromkeys(("avg_pool2d_backward",), "max_pool2d_with_indices_backward"),
}
#: The operation that stands for its kind where an operation wasn't measured.
_OF_KIND: Mapping[str, str] = {
    "pointwise": "add",
    "reduce": "sum",
    "gather": "embedding",
    "scatter": _SCATTER,
    "copy": "clone",
    "other": "add",
}
_BY_FLOPS = ("convolution", "attention", "recurrent")
#: FLOPs a byte from which on arithmetic is the bound, not the memory that the cores share.
_COMPUTES = 8
#: What AdamW's update moves for each element: parameter and two moments are read and written, the gradient is only read.
_ADAM_BYTES = 28
#: Channels of pictures, which kernels don't block.
_FEW_CHANNELS = 4
#: Kinds of operations that few steps have, each with a thing whose curve shows that the kind was measured.
RARE: Mapping[str, tuple[str, ...]] = {
    "pictures": ("convolution", "native_batch_norm"),
    "attention": ("attention",),
    "recurrent layers": ("recurrent",),
}


def is_of(kind: str, work: Work) -> bool:
    """Whether an operation is predicted by what was measured of a kind of :data:`RARE`."""
    pictures = kind == "pictures" and (work.kind == "convolution" or "batch_norm" in work.name or "pool" in work.name)
    return pictures or (kind, work.kind) in (("recurrent layers", "recurrent"), ("attention", "attention"))


def device_key(device: Device) -> str:
    """The key of a device's curves: a GPU's model; for CPU devices, all alike, how many threads a rank on one has."""
    return f"cpu/{device.threads or 1}" if device.kind == "cpu" else f"{device.kind}/{device.name}"


def group_key(devices: Sequence[Device], inventory: Inventory) -> str:
    """The key of a group's collectives: the devices' models, and for GPUs the slowest kind of link of their best ring."""
    models = "+".join(sorted({device_key(device) for device in devices}))
    group = topology(inventory).group(devices)
    return models if group.on_cpu else f"{models} by {group.kind}"


class MeasuredRates(Rates):
    """Measured rates; where nothing was measured, other rates.

    Args:
        otherwise: the rates for what wasn't.
    """

    def __init__(self, calibration: Calibration, otherwise: Rates) -> None:
        self.calibration = calibration
        self.otherwise = otherwise
        self._ranks = 1
        self._host_threads = 0
        self._found: dict[object, float] = {}
        #: By number of ranks and cores: the views of these rates, this one among them.
        self._views: dict[tuple[int, int, Rates], MeasuredRates] = {(1, 0, otherwise): self}

    @property
    def name(self) -> str:
        """The rates' name in reports."""
        return f"measured on {self.calibration.day}"

    @property
    def identity(self) -> str:
        """Names the measurement: a run's seconds are compared only with predictions by the same rates."""
        return f"measured on {self.calibration.day} in {self.calibration.took_seconds:.3f} s"

    def device_class(self, device: Device) -> Hashable:
        """The class by what was measured; of devices that weren't measured, by the other rates."""
        key = device_key(device)
        return key if self.calibration.measured(key) else self.otherwise.device_class(device)

    def among(self, devices: Sequence[Device], inventory: Inventory) -> MeasuredRates:
        """These rates while a rank works on each of these devices at once: CPU devices share cores and memory."""
        ranks = max(1, sum(device.kind == "cpu" for device in devices))
        otherwise = self.otherwise.among(devices, inventory)
        asked = ranks, inventory.host_threads, otherwise
        view = self._views.get(asked)
        if view is None:
            view = MeasuredRates(self.calibration, otherwise)
            view._ranks, view._host_threads, view._views = ranks, inventory.host_threads, self._views
            self._views[asked] = view
        return view

    def work_seconds(self, device: Device, work: Work) -> float:
        """Seconds of one run of an operation, without the host's part, by its own curve or that of another operation of its kind."""
        asked = (device_key(device), work.kind, work.name, work.dtype, work.flops, work.moved_bytes, work.fixed_bytes, work.shape)
        seconds = self._found.get(asked)
        if seconds is None:
            alone = self._alone(asked[0], work)
            if alone is not None and device.kind == "cuda" and work.kind == "attention":
                # The largest attention that is measured on a GPU takes little but its launch: its rate is no rate of larger ones. Of
                # convolutions it is: on an H200 they took even longer.
                alone = min(alone, max(self._alone(asked[0], work, Curve.line) or 0.0, self.otherwise.work_seconds(device, work)))
            seconds = self.otherwise.work_seconds(device, work) if alone is None else alone * self._crowding(device, work)
            self._found[asked] = seconds
        return seconds

    def issue_seconds(self, device: Device, phase: Phase = "forward") -> float:
        """The host's seconds to issue one operation in a phase of the step."""
        curve = self._curve(device_key(device), f"issue/{phase}")
        return self.otherwise.issue_seconds(device, phase) if curve is None else curve.seconds[0] * self._crowded(device, "matmul", 0)

    def loop_seconds(self, device: Device, engine: Engine) -> float:
        """Seconds of a step beside operations and collectives: the trainer's loop, the engine's hooks."""
        thing = f"loop/{loaded(engine).loop or engine}"
        curve, otherwise = self._of_host(device, thing), self.otherwise.loop_seconds(device, engine)
        if curve is not None:
            return curve.seconds[0] * self._crowded(device, "matmul", 0)
        if (single := self._of_host(device, "loop/single")) is None:
            return otherwise
        # The data sheet says what an engine adds to the trainer's own loop.
        return single.seconds[0] * self._crowded(device, "matmul", 0) + otherwise - self.otherwise.loop_seconds(device, "single")

    def python_seconds(self, device: Device, of: Python) -> float:
        """Host seconds of a framework's own Python, such as one call as the trainer's loop makes it."""
        curve = self._of_host(device, of)
        return self.otherwise.python_seconds(device, of) if curve is None else curve.seconds[0] * self._crowded(device, "matmul", 0)

    def collective_seconds(self, collective: Collective, size_bytes: int, devices: Sequence[Device], inventory: Inventory) -> float:
        """Seconds of one collective between ranks on these devices, by the measurement with as many ranks."""
        otherwise = self.otherwise.collective_seconds(collective, size_bytes, devices, inventory)
        if len({device.node for device in devices}) > 1:
            return otherwise
        ranks = 2 if collective == "send" else len(devices)
        by_ranks = self._group(collective, devices, inventory)
        if not by_ranks:
            return otherwise
        if ranks in by_ranks:  # more ranks never take less: a rate above theirs was lengthened by others' work
            return min(curve.at(size_bytes) for count, curve in by_ranks.items() if count >= ranks)
        # From the nearest number of ranks that was measured, in the data sheet's ratio.
        nearest = min(by_ranks, key=lambda count: (abs(math.log(count / ranks)), count))
        known = by_ranks[nearest].at(size_bytes)
        if nearest > len(devices):
            return known * ranks / nearest
        fewer = self.otherwise.collective_seconds(collective, size_bytes, devices[:nearest], inventory)
        return known * otherwise / fewer if fewer else known

    def host_copy_seconds(self, device: Device, size_bytes: int) -> float:
        """Seconds of a copy between pinned host memory and the device."""
        curve = self._curve(device_key(device), "host_copy")
        if device.kind == "cpu" or curve is None:
            return self.otherwise.host_copy_seconds(device, size_bytes)
        return curve.at(size_bytes)

    def host_adam_seconds(self, elements: int, device: Device) -> float:
        """AdamW's update on all of the host's cores; on a CPU device's own threads, while the other ranks do the same."""
        own = self._curve(device_key(device), "adam") if device.kind == "cpu" else None
        if own is not None:
            return own.at(elements) * self._crowded(device, "add", _ADAM_BYTES * elements)
        curve = self._curve(HOST, "adam")
        return self.otherwise.host_adam_seconds(elements, device) if curve is None else curve.at(elements)

    def overlap(self, device: Device) -> float:
        """Which share of computing can hide communication; it isn't measured."""
        return self.otherwise.overlap(device)

    # -- one operation -----------------------------------------------------------------------------------------------------------------

    def _alone(self, subject: str, work: Work, at: Callable[[Curve, float], float] = Curve.at) -> float | None:
        """Seconds on a device that nobody shares; None where nothing like it was measured. ``at`` reads a curve."""
        if work.kind == "matmul":
            return self._product(subject, work)
        name = work.name.rpartition("aten.")[2]
        if work.kind in _BY_FLOPS:
            return self._by_flops(subject, name, work, at)
        in_place = name.endswith("_") and not name.endswith("__")
        for candidate in (name, _ALIKE.get(name, ""), "add_" if in_place and work.kind == "pointwise" else "", _OF_KIND.get(work.kind, "")):
            curve = self._curve(subject, candidate, work.dtype) or self._scaled(subject, candidate, work.dtype)
            if curve is None:
                continue
            # Rows that are added to a table: they were measured by themselves, without the table, which is filled with zeros before.
            filled = work.fixed_bytes if curve.thing == _SCATTER else 0
            filling = self._curve(subject, "clone", "fp32") if filled else None
            return at(curve, work.moved_bytes - filled) + (at(filling, filled) if filling is not None else 0.0)
        return None

    def _by_flops(self, subject: str, name: str, work: Work, at: Callable[[Curve, float], float]) -> float | None:
        """Seconds of a kernel by its FLOPs."""
        parts, thing, back = 1, str(work.kind), "_backward" if "_backward" in name else ""
        if thing == "convolution" and len(work.shape) == 6:
            thing = _convolution(work.shape)
            parts = 2 if name.endswith((".input", ".weight")) else 1  # the two halves of backward are measured as one
        thing = thing + back
        curve = (self._curve(subject, f"{thing}.causal", work.dtype) if name.endswith(".causal") else None) or self._curve(
            subject, thing, work.dtype
        )
        return None if curve is None or not work.flops else at(curve, parts * work.flops) / parts

    def _scaled(self, subject: str, thing: str, dtype: str) -> Curve | None:
        """Seconds by bytes: moving them takes about equally long in any dtype; fp32 is measured for all."""
        return None if dtype == "fp32" else self._curve(subject, thing, "fp32")

    def _product(self, subject: str, work: Work) -> float | None:
        """Seconds of a matrix product, between the measured smallest dimensions and sizes of the others."""
        if len(work.shape) != 4 or not all(work.shape):
            return None
        batch, *dimensions = work.shape
        smallest, *others = sorted(dimensions)
        # On a GPU the products of a batch run side by side, and keep it as busy as one large product.
        wide = math.sqrt(others[0] * others[1] * (batch if subject.startswith("cuda") else 1))
        curves = [(least, curve) for least in SMALLEST_DIMENSIONS if (curve := self._curve(subject, f"matmul/{least}", work.dtype))]
        if not curves:
            return None
        flops = 2.0 * smallest * others[0] * others[1]
        index = bisect_right([least for least, _ in curves], smallest)
        if index in (0, len(curves)):
            return batch * flops / _flops_rate(curves[max(0, index - 1)], wide)
        # A straight line: a product takes the time of moving its large operands, and for each row of the small ones that of its arithmetic.
        below, above = curves[index - 1], curves[index]
        least, most = (2.0 * count * others[0] * others[1] / _flops_rate((count, curve), wide) for count, curve in (below, above))
        return batch * (least + (most - least) * (smallest - below[0]) / (above[0] - below[0]))

    # -- several ranks on the same cores -----------------------------------------------------------------------------------------------

    def _crowding(self, device: Device, work: Work) -> float:
        computes = (work.kind == "matmul" or work.kind in _BY_FLOPS) and work.flops > _COMPUTES * work.moved_bytes
        return self._crowded(device, "matmul" if computes else "add", work.moved_bytes)

    def _crowded(self, device: Device, thing: str, size: float) -> float:
        """How much slower it is while all ranks do the same, at least 1."""
        if self._ranks == 1 or device.kind != "cpu":
            return 1.0
        subject = device_key(device)
        by_ranks = self.calibration.curves.get((subject, f"crowd/{thing}", "fp32"), {})
        if 1 not in by_ranks or len(by_ranks) < 2:
            return self._oversubscribed(device, self._ranks)
        counts = sorted(by_ranks)

        def slowdown(count: int) -> float:
            """The slowdown, limited by threads' turns and by that among more ranks, as others may have disturbed measuring."""
            measured = min(by_ranks[more].at(size) for more in counts if more >= count) / by_ranks[1].at(size)
            return max(self._oversubscribed(device, count), measured)

        if self._ranks >= counts[-1]:
            return slowdown(counts[-1]) * self._oversubscribed(device, self._ranks) / self._oversubscribed(device, counts[-1])
        index = bisect_right(counts, self._ranks)
        below, above = counts[index - 1], counts[index]
        part = (self._ranks - below) / (above - below)
        return slowdown(below) * (1 - part) + slowdown(above) * part

    def _oversubscribed(self, device: Device, ranks: int) -> float:
        """How many threads share a core."""
        return max(1.0, ranks * (device.threads or 1) / self._host_threads) if self._host_threads else 1.0

    # -- looking up --------------------------------------------------------------------------------------------------------------------

    def _curve(self, subject: str, thing: str, dtype: str = "") -> Curve | None:
        by_ranks = self.calibration.curves.get((subject, thing, dtype))
        return by_ranks[min(by_ranks)] if by_ranks else None

    def _of_host(self, device: Device, thing: str) -> Curve | None:
        """The host's seconds for a rank on this device."""
        return self._curve(device_key(device), thing) or self._curve(HOST, thing)

    def _group(self, collective: Collective, devices: Sequence[Device], inventory: Inventory) -> Mapping[int, Curve]:
        """What was measured of groups of such devices with the same links, by their number."""
        return self.calibration.curves.get((group_key(devices, inventory), collective, ""), {})


def _convolution(shape: tuple[int, ...]) -> str:
    """Which measured convolution a convolution is like."""
    _, before, _, _, positions, groups = shape
    if 1 < groups == before:
        return "depthwise"
    if before <= _FEW_CHANNELS:
        return "few_channels"
    return "one_position" if positions == 1 else "convolution"


def _flops_rate(measured: tuple[int, Curve], wide: float) -> float:
    """FLOPs a second of a product by the geometric mean of its two larger dimensions; the curve's sizes are those means."""
    least, curve = measured
    nearest = min(max(wide, curve.sizes[0]), curve.sizes[-1])
    return 2.0 * least * nearest * nearest / curve.at(nearest)
