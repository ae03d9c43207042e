"""Where prediction and reality part: each operation's real scratch beside what ``memory/kernels/cpu_workspace.py`` says of it.

    PYTHONPATH=benchmarks python -m memory.explain "U-Net"

The job runs for real; around every operation that torch dispatches lies a mark, so that the profiler's memory events can be told apart by
operation. Scratch is what an operation holds at its fullest moment beyond the outputs that it returns.
"""

from __future__ import annotations

import sys
import warnings
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from lightning_autopar._fork import run_forked
from lightning_autopar.memory.kernels.cpu_workspace import CPU_HIDDEN, CPU_SCRATCH
from memory.job import Batches
from memory.measure import RealPeak, make_trainer
from memory.zoo import JOBS

PREFIX = "operation "


@dataclass
class Operation:
    """One call: what it returned, what it took, and what is said of that."""

    name: str
    arguments: str
    output_bytes: int
    said_bytes: int
    real_bytes: int = 0
    returned_bytes: int = 0
    level_bytes: int = 0
    events: tuple[int, ...] = ()

    @property
    def missed_bytes(self) -> int:
        return self.real_bytes - self.said_bytes


class Marks(TorchDispatchMode):
    """Puts a mark around every operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        number = len(self.operations)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = {tensor.untyped_storage()._cdata for tensor in inputs if tensor.layout is torch.strided}
        self.operations.append(Operation(str(func), _shapes(args), 0, 0))
        with record_function(f"{PREFIX}{number}"):
            output = func(*args, **kwargs)
        made = {
            tensor.untyped_storage()._cdata: _made_bytes(func, args, kwargs, output, tensor)
            for tensor in tree_leaves(output)
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided and tensor.untyped_storage()._cdata not in known
        }
        scratch = CPU_SCRATCH[func](args, kwargs, output) if func in CPU_SCRATCH else None
        operation = self.operations[number]
        operation.output_bytes = sum(made.values())
        operation.said_bytes = operation.output_bytes + (sum(scratch) if scratch is not None else 0)
        return output


def _made_bytes(func: Any, args: Any, kwargs: Any, output: Any, tensor: Tensor) -> int:
    """As the tracker counts an output: by its storage, or by the formula where that is hidden from it."""
    hidden = CPU_HIDDEN.get(func)
    if hidden is not None:
        empty = tensor.is_mkldnn or tensor.dtype is torch.uint8
        size = hidden(args, kwargs, output, tensor) if empty else None
        if size is not None:
            return size
    return tensor.untyped_storage().nbytes()


def _shapes(args: Any) -> str:
    def show(value: Any) -> str:
        if isinstance(value, Tensor):
            order = "" if value.is_contiguous() else f" {tuple(value.stride())}"
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{order}"
        if isinstance(value, (list, tuple)):
            return "[" + ", ".join(map(show, value[:6])) + "]"
        return str(value)[:24]

    return ", ".join(map(show, args))


class MarkedPeak(RealPeak):
    """The real peak, with marks around the operations of the first counted batch."""

    def __init__(self) -> None:
        super().__init__(1)
        self.marks = Marks()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, module, batch, batch_idx)
        if batch_idx == self.counted:
            self.marks.__enter__()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.counted:
            self.marks.__exit__(None, None, None)
        super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)


def operations(name: str) -> list[Operation]:
    """Every operation of a step of the job."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    job = JOBS[name]
    module, batch = job.build(), job.batch()
    peak = MarkedPeak()
    make_trainer(job, callbacks=[peak]).fit(module, DataLoader(Batches(batch, peak.last + 1), batch_size=None))
    times = [time for time, _ in peak.events]
    levels, level = [peak.resident_bytes], peak.resident_bytes
    for _, size in peak.events:
        level += size
        levels.append(level)
    for start, duration, label in peak.names:
        if label.startswith(PREFIX):
            operation = peak.marks.operations[int(label.removeprefix(PREFIX))]
            begin, end = bisect_left(times, start), bisect_left(times, start + duration)
            operation.level_bytes = levels[begin]
            operation.real_bytes = max(levels[begin : end + 1]) - levels[begin]
            operation.returned_bytes = levels[end] - levels[begin]
            operation.events = tuple(size for _, size in peak.events[begin:end])
    return peak.marks.operations


def main() -> None:
    found = run_forked(operations, sys.argv[1])
    top = max(operation.level_bytes + operation.real_bytes for operation in found)
    table = Table(
        "operation", "arguments", "level MiB", "outputs", "said", "real", "returned", title=f"{sys.argv[1]}: peak {top / 2**20:.2f} MiB"
    )
    misses = sorted(
        (o for o in found if abs(o.missed_bytes) > 1024), key=lambda o: o.level_bytes + max(o.real_bytes, o.said_bytes), reverse=True
    )
    for o in misses[:40]:
        table.add_row(
            o.name,
            o.arguments,
            f"{o.level_bytes / 2**20:.2f}",
            *(f"{size:,}" for size in (o.output_bytes, o.said_bytes, o.real_bytes, o.returned_bytes)),
        )
    Console(width=220).print(table)


if __name__ == "__main__":
    main()
