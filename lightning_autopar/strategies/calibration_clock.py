"""A clock for measuring operations: of the processor where that is what counts, of the wall else. Knows torch's devices; no operation."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch

#: Of a quarter of the runs: others' work on the machine makes some of them longer, none shorter.
_QUANTILE = 0.25
_LEAST_RUNS, _MOST_RUNS = 3, 200


class Clock:
    """Times something on a device.

    One thread's time is that of its processor, so that others' work on the machine doesn't count; of several it is the wall clock's.

    Args:
        device: which; a GPU is waited for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.now = time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
        self._wait = torch.cuda.synchronize if device.type == "cuda" else lambda _: None

    def seconds(self, run: Callable[[], Any], slot: float) -> float:
        """Seconds of one run: the lower quartile of as many as go into ``slot`` seconds."""
        run()
        self._wait(self._device)
        begun = self.now()
        run()
        self._wait(self._device)
        once = self.now() - begun
        # One run of a GPU is timed with its fellows: waiting for it costs more than many take.
        together = max(1, min(100, math.ceil((2e-3 if self._device.type == "cuda" else 5e-5) / max(once, 1e-7))))
        taken: list[float] = []
        least = _LEAST_RUNS if once < slot else 1
        until = self.now() + slot
        while len(taken) < least or (len(taken) < _MOST_RUNS and self.now() < until):
            begun = self.now()
            for _ in range(together):
                run()
            self._wait(self._device)
            taken.append((self.now() - begun) / together)
        return sorted(taken)[int(_QUANTILE * len(taken))]

    def busy(self, run: Callable[[], Any], slot: float) -> float:
        """Processor seconds of one run, all threads together: the mean over ``slot`` seconds."""
        run()
        until, begun, runs = time.perf_counter() + slot, time.process_time(), 0
        while runs < 1 or time.perf_counter() < until:
            run()
            runs += 1
        return (time.process_time() - begun) / runs
