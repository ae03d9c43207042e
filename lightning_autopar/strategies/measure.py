"""What a rank really used: seconds a step and peak bytes on its device. Knows nothing of predictions."""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy

#: The steps whose memory is measured on CPU devices: optimizer state is there, and the second one frees the gradients of the first in the
#: profile's sight. What was allocated before the profile began is freed unseen.
_FIRST_PROFILED, _LAST_PROFILED = 2, 3
#: Steps whose time says nothing: lazy initialisation, and those under the profiler.
_WARM_UP = _LAST_PROFILED + 1
#: What the profiler and the allocator write to stderr whenever memory is profiled, and nobody can turn off (torch 2.13, kineto).
_NOISE = (
    b"USDT:",
    b"External init callback must run in same thread",
    b"Memory block of unknown size was allocated before the profiling started",
)


class Meter:
    """Collects the times of step boundaries and one step's peak memory.

    A GPU's peak is the caching allocator's ``max_memory_allocated``. A CPU device has no such counter: there it is what is resident at a
    step's start (parameters, buffers, optimizer state) plus the running sum of the profiler's memory events over two steps. Where the user
    profiles already, or the run is shorter, there is no such figure.
    """

    def __init__(self) -> None:
        self.peak_bytes: int | None = None
        self._steps: list[float] = []
        self._last: float | None = None
        self._count = 0
        self._profile: Any = None
        self._quiet = ExitStack()
        self._resident_bytes = 0

    @property
    def step_seconds(self) -> float | None:
        """Median time from one step's start to the next one's, None before enough steps have run."""
        return statistics.median(self._steps) if self._steps else None

    def boundary(self, strategy: Strategy) -> None:
        """A step starts now, and with it the one before has ended."""
        now = time.perf_counter()
        if self._count > _LAST_PROFILED:
            self._close_profile()
        if self._last is not None and self._count > _WARM_UP:
            self._steps.append(now - self._last)
        if self._count == _FIRST_PROFILED and strategy.root_device.type == "cpu":
            self._open_profile(strategy)
        self._count += 1
        self._last = time.perf_counter()

    def pause(self) -> None:
        """What follows belongs to no step."""
        self._abandon_profile()
        self._last = None

    def stop(self, strategy: Strategy) -> None:
        """The run is over: read what can only be read now."""
        self._abandon_profile()
        device = strategy.root_device
        if device.type == "cuda" and torch.cuda.is_initialized():
            self.peak_bytes = torch.cuda.max_memory_allocated(device)

    def _open_profile(self, strategy: Strategy) -> None:
        if torch.autograd._profiler_enabled():
            return
        self._resident_bytes = _storage_bytes(_resident(strategy))
        self._quiet.enter_context(without_noise())
        self._profile = torch.autograd.profiler.profile(profile_memory=True)
        self._profile.__enter__()

    def _close_profile(self) -> None:
        profile = self._abandon_profile()
        if profile is None:
            return
        events = sorted((event.start_ns(), event.nbytes()) for event in profile.kineto_results.events() if event.name() == "[memory]")
        current = peak = 0
        for _, size_bytes in events:
            current += size_bytes
            peak = max(peak, current)
        self.peak_bytes = self._resident_bytes + peak

    def _abandon_profile(self) -> Any:
        """Stop profiling; what came of it so far is no figure."""
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.__exit__(None, None, None)
            self._quiet.close()
        return profile


@contextmanager
def without_noise(lines: tuple[bytes, ...] = _NOISE) -> Iterator[None]:
    """While open, stderr goes to a file; what it holds then is passed on, without the lines that hold any of these words."""
    sys.stderr.flush()
    real = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(real, 2)
            file.seek(0)
            kept = b"".join(line for line in file if not any(noise in line for noise in lines))
            if kept:
                os.write(real, kept)
            os.close(real)


def _resident(strategy: Strategy) -> Iterator[Tensor]:
    """Every tensor that lives from one step to the next. Gradients are freed and allocated anew, unless they are views of DDP's buckets."""
    module = strategy.lightning_module
    assert module is not None
    model = strategy.model
    in_buckets = isinstance(model, DistributedDataParallel) and model.gradient_as_bucket_view
    for parameter in module.parameters():
        yield parameter
        if in_buckets and parameter.grad is not None:
            yield parameter.grad
    yield from module.buffers()
    states = chain.from_iterable(optimizer.state.values() for optimizer in strategy.optimizers)
    for value in chain.from_iterable(state.values() for state in states):
        if isinstance(value, Tensor):
            yield value


def _storage_bytes(tensors: Iterator[Tensor]) -> int:
    """Bytes of the tensors' storages, each storage once; of a DTensor this rank's part."""
    storages: dict[int, int] = {}
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if local.device.type != "meta":
            storage = local.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
