"""Measures a rank: seconds a step, and bytes on its device and in host memory by what holds them. Knows nothing of predictions."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_autopar._lightning import Strategy
from lightning_autopar._lightning_compat import bare_optimizer
from lightning_autopar._temporary import Exits, without_noise
from lightning_autopar.devices.host import thread_times, waited_share
from lightning_autopar.devices.nvml import NvmlUnavailable, read_devices
from lightning_autopar.exact.absent.absent_tensor import filled, is_absent
from lightning_autopar.exact.absent.rules import leaves_of
from lightning_autopar.exact.step.step_rollback import own_gradient
from lightning_autopar.memory.allocation_recorder import HOST, AllocationRecorder
from lightning_autopar.memory.storages import storage_sizes
from lightning_autopar.memory.trace.extra_tensors import besides, in_attributes, in_callbacks
from lightning_autopar.plans import Plan


def storages_by_kind(strategy: Strategy) -> dict[str, dict[int, int]]:
    """The bytes of each storage that a step finds on the device, by kind; for a CPU device also those offloaded to the host."""
    found: dict[str, Iterable[Tensor]] = strategy.held_tensors()  # type: ignore[attr-defined]  # every engine has it
    return {kind: storage_sizes(each, strategy.root_device) for kind, each in found.items()}


def held_tensors(strategy: Any) -> dict[str, Iterable[Tensor]]:
    """The tensors that a step finds on a rank, by kind, for engines that keep them in the module and the optimizers."""
    module = strategy.lightning_module
    assert module is not None
    with torch._C.DisableTorchFunctionSubclass():  # an engine may watch uses of parameters, and this isn't one
        own = besides(in_attributes(module), chain(module.parameters(), module.buffers(), strategy.held_gradients()))
        copies = in_callbacks(module.trainer.callbacks, module)
    tensors: dict[str, Iterable[Tensor]] = {
        "parameters": here(module.parameters()),
        "gradients": strategy.held_gradients(),
        "optimizer": optimizer_states(strategy),
        "buffers": here(chain(module.buffers(), copies, own)),
    }
    if strategy.root_device.type == "cpu":
        tensors[HOST] = strategy.held_on_host()
    return tensors


def plan_of(strategy: Strategy) -> Plan:
    """The plan that an engine executes."""
    plan: Plan = strategy.run_plan.plan  # type: ignore[attr-defined]  # every engine has one
    return plan


def optimizer_states(strategy: Strategy) -> Iterator[Tensor]:
    """The optimizers' states."""
    # LBFGS and Shampoo keep them in nested containers.
    found = leaves_of([list(bare_optimizer(optimizer).state.values()) for optimizer in strategy.optimizers])
    return here(leaf for leaf in found if isinstance(leaf, Tensor))


def held_on_host(strategy: Any) -> Iterator[Tensor]:
    """The tensors that the plan offloads; to be called between steps, when FSDP2's module has its shards."""
    module, offload = strategy.lightning_module, plan_of(strategy).offload
    assert module is not None
    if "parameters" in offload:
        yield from module.parameters()
        yield from strategy.held_gradients()
    if "optimizer" in offload:
        yield from optimizer_states(strategy)


def held_gradients(strategy: Any) -> Iterator[Tensor]:
    """The gradients, those of the optimizers' parameters first: under FSDP2 the module has other parameters while it is gathered."""
    module = strategy.lightning_module
    assert module is not None
    groups = chain.from_iterable(bare_optimizer(optimizer).param_groups for optimizer in strategy.optimizers)
    for parameter in chain(chain.from_iterable(group["params"] for group in groups), module.parameters()):
        if not is_absent(parameter) and (gradient := own_gradient(parameter)) is not None:
            yield gradient


def here(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Those tensors that this rank has; under a pipeline other ranks have the rest."""
    return (filled(tensor) for tensor in tensors if not is_absent(tensor))


#: Steps that aren't measured: the first has no optimizer state, and the second doesn't free what a later step frees of the step before.
_WARM_UP = 2
#: How many steps are recorded on CPU devices. The first frees tensors from before the record; the second frees only recorded ones.
_RECORDED = 2
#: An evaluation between the recorded steps spoils the record. After so many spoilt ones, no further step is recorded.
_TRIES = 3
#: Where a step is: its forward is over, its backward begins, its gradients are complete.
Point = Literal["forward", "backward", "gradients"]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one rank used.

    Args:
        peak_bytes: the most that tensors took at once: in the recorded steps on a CPU device, in the whole run on a GPU (torch's
            ``max_memory_allocated``). None where the run was too short, the user profiled, or a GPU had held more before the run.
        step_seconds: median of a step; None where the run was too short.
        step_spread: range of the middle half of the steps' seconds, over the median; None of fewer than four steps.
        waited_share: the share of the measured time in which the process's threads were ready to run and had no core; None where the run
            was too short or the kernel doesn't tell.
        bytes: what held a training step's peak: ``"parameters"``, ``"gradients"``, ``"optimizer"``, ``"buffers"``, and ``"rest"``, which is
            activations, temporaries, communication and input. Without ``"gradients"`` where those can't be told from the rest. Empty where
            the step's peak isn't known: on a GPU if something before the first step took more.
        reserved_bytes: on a GPU the most that torch's allocator held of the device (``max_memory_reserved``).
        context_bytes: on a GPU what the process holds besides, as the driver counts it; None where the driver doesn't tell.
        host_bytes: on a CPU device the most bytes at once that the plan's offloading, and the optimizer's work on it, took of the host's
            memory; no other figure contains them. 0 where nothing is offloaded, None where it wasn't measured.
        lacked_bytes: where batches were run again in more parts, as memory ran out: the bytes of the device that weren't enough, 0 where
            that isn't known. The other figures are then those of more parts than planned. None where that didn't happen.
    """

    peak_bytes: int | None = None
    step_seconds: float | None = None
    step_spread: float | None = None
    waited_share: float | None = None
    bytes: Mapping[str, int] = field(default_factory=dict)
    reserved_bytes: int | None = None
    context_bytes: int | None = None
    host_bytes: int | None = None
    lacked_bytes: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """The dictionary that ``strategy.measured`` has for each device."""
        return asdict(self)


class Meter:
    """Collects the times of step boundaries, and the bytes that steps after the second one hold.

    A CPU device has no counter of its own: two steps run under a :class:`lightning_autopar.memory.allocation_recorder.AllocationRecorder`.
    A GPU's allocator has counters of its own, which are read.
    """

    def __init__(self, device_id: str) -> None:
        self._device_id = device_id
        self._clock = StepClock()
        self._runs = False
        self._begun = 0
        self._recorder = AllocationRecorder()
        #: Whether it runs now; read at every step, though only two are recorded.
        self._recording = False
        self._recorded = 0
        self._tries = 0
        self._quiet = Exits()
        self._gpu: GpuSteps | None = None
        self._before = (0, 0)  # a GPU's counters when the run began: the user may read them too, so they aren't reset
        self._peak_bytes: int | None = None
        self._bytes: dict[str, int] = {}
        self._reserved_bytes: int | None = None
        self._context_bytes: int | None = None
        self._host_bytes: int | None = None
        #: See :class:`Measured`.
        self.lacked_bytes: int | None = None

    @property
    def measured(self) -> Measured:
        """What is known up to now."""
        return Measured(
            peak_bytes=self._peak_bytes,
            step_seconds=self._clock.median_seconds(),
            step_spread=self._clock.spread(),
            waited_share=self._clock.waited_share(),
            bytes=self._bytes,
            reserved_bytes=self._reserved_bytes,
            context_bytes=self._context_bytes,
            host_bytes=self._host_bytes,
            lacked_bytes=self.lacked_bytes,
        )

    def begin(self, device: torch.device) -> None:
        """Called when the run begins and the module is about to go to its device."""
        if device.type == "cuda" and torch.cuda.is_initialized():
            self._before = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)

    def boundary(self, strategy: Strategy, batch_idx: int) -> None:
        """The step of this batch starts now, which ends the step before."""
        self._end_step(strategy)
        if strategy.root_device.type == "cuda":
            if self._begun == 0:
                self._gpu = GpuSteps(torch.cuda.max_memory_allocated(strategy.root_device))
        elif self._wanted and _settled(strategy, batch_idx):
            self._record(strategy)
        self._begun += 1
        self._runs = True
        self._clock.start(strategy.root_device)

    def note(self, strategy: Any, point: Point) -> None:
        """The running step has come to this point; costs nothing in steps that aren't measured."""
        if self._recording:
            self._recorder.note(
                gradients=storage_sizes(strategy.held_gradients(), strategy.root_device),
                host=storage_sizes(strategy.new_gradients_on_host(), strategy.root_device),
            )
        elif self._gpu is not None:
            self._note_on_gpu(strategy, point)

    def pause(self, strategy: Strategy) -> None:
        """The time from here on belongs to no step."""
        self._end_step(strategy)
        self._abandon()

    def finish(self, strategy: Strategy) -> None:
        """The steps are over; their results are known after this. A second call does nothing."""
        self.pause(strategy)
        self._clock.wait()
        self._ask(strategy.root_device)

    def stop(self, strategy: Strategy) -> None:
        """The run is over, well or not: read what can only be read now."""
        self._abandon()
        self._ask(strategy.root_device)

    def _end_step(self, strategy: Strategy) -> None:
        """End the running step, if any: take its time unless it is a warm-up step, and see whether the record is complete."""
        if not self._runs:
            return
        self._runs = False
        if self._recording:
            self._recorded += 1
            if self._recorded == _RECORDED:
                self._conclude(strategy)
        elif self._begun > _WARM_UP:
            self._clock.stop(strategy.root_device)
        if self._gpu is not None:
            self._note_on_gpu(strategy, None)
            if self._begun > _WARM_UP:
                held = {kind: sum(sizes.values()) for kind, sizes in storages_by_kind(strategy).items() if kind != "gradients"}
                self._bytes, self._gpu = self._gpu.bytes(held), None

    # -- CPU devices -------------------------------------------------------------------------------------------------------------------

    @property
    def _wanted(self) -> bool:
        return self._begun >= _WARM_UP and self._tries < _TRIES and not self._bytes and not self._recording

    def _record(self, strategy: Strategy) -> None:
        self._tries += 1
        self._recorded = 0
        self._quiet.enter_context(without_noise())
        self._recording = self._recorder.start(**storages_by_kind(strategy))
        if not self._recording:
            self._abandon()
        elif plan_of(strategy).offload:
            # Patch the object that steps: an engine may have replaced the user's.
            updates = _Updates(self._recorder)
            self._quiet.callback(register_optimizer_step_pre_hook(updates.begin).remove)
            self._quiet.callback(register_optimizer_step_post_hook(updates.end).remove)

    def _conclude(self, strategy: Strategy) -> None:
        self._recorder.note(**storages_by_kind(strategy))
        recording = self._recorder.stop()
        self._recording = False
        self._quiet.close()
        if recording is None:
            return
        self._peak_bytes = recording.peak_bytes
        known = {kind: size for kind, size in recording.bytes.items() if kind != "rest"}
        self._bytes = {**known, "rest": recording.peak_bytes - sum(known.values())}
        self._host_bytes = recording.host_bytes

    def _abandon(self) -> None:
        if self._recording:
            self._recorder.abandon()
            self._recording = False
        self._quiet.close()

    # -- GPUs --------------------------------------------------------------------------------------------------------------------------

    def _note_on_gpu(self, strategy: Any, point: Point | None) -> None:
        assert self._gpu is not None
        gradients = storage_sizes(strategy.held_gradients(), strategy.root_device)
        self._gpu.note(point, torch.cuda.max_memory_allocated(strategy.root_device), sum(gradients.values()))

    def _ask(self, device: torch.device) -> None:
        if device.type == "cuda" and torch.cuda.is_initialized():
            # A counter that hasn't risen since the run began shows memory from before the run, unless as much is allocated now.
            peak_bytes, reserved_bytes = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
            self._peak_bytes = peak_bytes if peak_bytes > self._before[0] else None
            held = peak_bytes > self._before[0] and reserved_bytes == torch.cuda.memory_reserved(device)
            self._reserved_bytes = reserved_bytes if reserved_bytes > self._before[1] or held else None
            process_bytes = _process_bytes(self._device_id)
            if process_bytes is not None:
                self._context_bytes = max(0, process_bytes - torch.cuda.memory_reserved(device))


class StepClock:
    """Measures the seconds of steps: the host's time where the host computes; on a GPU the device's time, as the host runs ahead of it.

    On a GPU each step begins and ends with an event in the device's current stream, read when the device has passed it. Only :meth:`wait`
    waits for the device.

    Args:
        event: makes a GPU's event; torch's own unless given.
    """

    def __init__(self, event: Callable[[], Any] | None = None) -> None:
        self._event = event or partial(torch.cuda.Event, enable_timing=True)
        self._seconds: list[float] = []
        self._begun: Any = None
        #: The threads' times when the first measured step began, and after the last one.
        self._threads_before: dict[str, tuple[int, int]] | None = None
        self._threads_after: dict[str, tuple[int, int]] | None = None
        self._ahead: deque[tuple[Any, Any]] = deque()

    def start(self, device: torch.device) -> None:
        """A step begins."""
        self._begun = self._now(device)

    def stop(self, device: torch.device) -> None:
        """The step has ended on the host."""
        now = self._now(device)
        if self._threads_before is None:
            self._threads_before = thread_times()
        if device.type != "cuda":
            self._seconds.append(now - self._begun)
        else:
            self._ahead.append((self._begun, now))
            self._read()

    def wait(self) -> None:
        """The steps are over: wait until the device has done all of them."""
        self._threads_after = thread_times()
        if self._ahead:
            self._ahead[-1][1].synchronize()
            self._read()

    def median_seconds(self) -> float | None:
        """The median of the steps that are over; None before there are any."""
        return statistics.median(self._seconds) if self._seconds else None

    def spread(self) -> float | None:
        """The range of the middle half of the steps over their median; None of fewer than four."""
        if len(self._seconds) < 4:
            return None
        low, median, high = statistics.quantiles(self._seconds)
        return (high - low) / median

    def waited_share(self) -> float | None:
        """The share of their time that this process's threads waited for a core, from the first measured step to the end."""
        if self._threads_before is None or self._threads_after is None:
            return None
        return waited_share(self._threads_before, self._threads_after)

    def _now(self, device: torch.device) -> Any:
        if device.type != "cuda":
            return time.perf_counter()
        event = self._event()
        event.record(torch.cuda.current_stream(device))
        return event

    def _read(self) -> None:
        """Read the events that the device has passed by now."""
        while self._ahead and self._ahead[0][1].query():
            begun, ended = self._ahead.popleft()
            self._seconds.append(begun.elapsed_time(ended) * 1e-3)


class _Updates:
    """Tells a recorder when an offloaded optimizer works: in its step, except in the closure, where Lightning runs forward and backward."""

    def __init__(self, recorder: AllocationRecorder) -> None:
        self._recorder = recorder
        self._open: list[bool] = []  # for each nested step, whether the host works

    def begin(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Called before a step; returns other arguments for the step, if they change."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        self._open.append(False)
        if closure is None:
            self._set(True)
            return None

        def run() -> Any:
            self._set(False)
            value = closure()
            self._set(True)
            return value

        return ((args[0], run, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": run})

    def end(self, *_: Any) -> None:
        """Called after the step."""
        self._set(False)
        self._open.pop()

    def _set(self, works: bool) -> None:
        if self._open[-1] != works and self._recorder.running:
            self._recorder.host_works(works)
        self._open[-1] = works


class GpuSteps:
    """Which part of a training step makes the peak of a GPU's allocator, and which gradients are there then.

    The counter can't be reset, since the user may read it too; so a part makes the peak if the counter rises during it.

    Args:
        peak_bytes: the counter before the first step.
    """

    def __init__(self, peak_bytes: int) -> None:
        self._peak_bytes = peak_bytes
        self._risen = False
        self._there = 0
        self._at_peak: int | None = None

    def note(self, point: Point | None, peak_bytes: int, gradient_bytes: int) -> None:
        """The part before this point is over; None: the whole step is."""
        if peak_bytes > self._peak_bytes:
            self._peak_bytes, self._risen = peak_bytes, True
            self._at_peak = None if point == "gradients" else self._there  # during backward nobody knows which
        self._there = gradient_bytes

    def bytes(self, held: Mapping[str, int]) -> dict[str, int]:
        """The bytes at the peak, by kind; empty if the peak wasn't in a step.

        Args:
            held: parameters, optimizer states and buffers.
        """
        if not self._risen:
            return {}
        found = dict(held)
        if self._at_peak is not None:
            found["gradients"] = self._at_peak
        return {**found, "rest": self._peak_bytes - sum(found.values())}


def _process_bytes(device_id: str) -> int | None:
    """What this process holds of a GPU, as NVML counts it; None where it doesn't know the process (other namespaces, MIG)."""
    try:
        devices, _, _ = read_devices()
    except NvmlUnavailable:
        return None
    for device in devices:
        if device.id == device_id:
            return next((process.used_bytes for process in device.processes if process.own), None)
    return None


def _settled(strategy: Strategy, batch_idx: int) -> bool:
    """Whether steps from this batch on hold what all later ones hold: with accumulated gradients, from the last batch of a window."""
    module = strategy.lightning_module
    assert module is not None
    trainer = module.trainer
    if not module.automatic_optimization or trainer.accumulate_grad_batches == 1:
        return True
    return trainer.global_step > 0 and (batch_idx + 1) % trainer.accumulate_grad_batches == 0
