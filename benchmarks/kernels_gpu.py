"""What cuDNN takes inside one operation, and where a step's time goes, on the first GPU. Both are estimates in the planner's model.

    python benchmarks/kernels_gpu.py --json OUT [--seconds 60]

First convolutions and recurrent layers: for each operation of a forward and a backward the bytes that are held during it alone, beside what
is predicted for it (``memory.kernels.cuda_workspace``). Then whole models: wall seconds of forward, backward and optimizer, with the batch
and with one row of it (which shows what the host needs), and the GPU's seconds by operation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from machine import machine
from memory.gpu_job import adamw, clean, model_of
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from lightning_autopar.memory.kernels.cuda_workspace import CUDA_SCRATCH

aten = torch.ops.aten
WATCHED = (aten.convolution, aten.convolution_backward, aten._cudnn_rnn, aten._cudnn_rnn_backward)
MODELS = (
    ("BERT", "32-true"), ("GPT-2", "bf16-mixed"), ("Llama", "bf16-true"), ("ViT", "bf16-mixed"), ("ConvNeXt", "32-true"),
    ("LSTM", "32-true"),
)  # fmt: skip
_REPEATS = 5


class Watch(TorchDispatchMode):
    """Writes down what the watched operations hold while they run.

    Args:
        rows: gets a row for each.
        labels: what every row says of where it was.
    """

    def __init__(self, rows: list[dict[str, Any]], **labels: Any) -> None:
        super().__init__()
        self.rows, self.labels = rows, labels

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation.overloadpacket not in WATCHED:
            return operation(*args, **(kwargs or {}))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        made = operation(*args, **(kwargs or {}))
        after, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        said = CUDA_SCRATCH[operation](args, kwargs or {}, made)
        outputs = [tensor for tensor in torch.utils._pytree.tree_leaves(made) if isinstance(tensor, Tensor)]
        self.rows.append(
            {
                **self.labels,
                "operation": str(operation),
                "arguments": [_words(each) for each in args],
                "kept": after - before,
                "outputs": [[list(tensor.shape), tensor.numel() * tensor.element_size()] for tensor in outputs],
                "transient": peak - max(before, after),
                "predicted": repr(said),
            }
        )
        return made


def _words(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return [str(argument.dtype).removeprefix("torch."), list(argument.shape), list(argument.stride())]
    if isinstance(argument, (list, tuple)):
        return [_words(each) for each in argument]
    return argument


def layers() -> Iterator[tuple[str, Callable[[], nn.Module], tuple[int, ...]]]:
    """Recurrent layers and convolutions: a name, the layer, the input's shape."""
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        for width, depth, batch, steps in ((512, 2, 32, 128), (256, 1, 16, 64), (1024, 2, 8, 256), (320, 4, 128, 50), (128, 3, 256, 30)):
            for options in ({}, {"batch_first": True}, {"bidirectional": True}, {"dropout": 0.2}):
                shape = (batch, steps, width) if options.get("batch_first") else (steps, batch, width)
                name = f"{kind.__name__} {width} x {depth} {options}"
                yield name, partial(kind, width, width, depth, **options), shape
    for dimensions, kind in ((1, nn.Conv1d), (2, nn.Conv2d), (3, nn.Conv3d)):
        sides = {1: (1024, 8192), 2: (28, 112), 3: (8, 24)}[dimensions]
        for side in sides:
            for channels, made, kernel, stride in ((64, 64, 3, 1), (3, 64, 7, 2), (128, 256, 1, 1), (64, 128, 3, 2), (96, 96, 7, 1)):
                groups = channels if kernel == 7 and channels == made else 1
                name = f"{kind.__name__} {channels} to {made}, kernel {kernel}, stride {stride}, groups {groups}, side {side}"
                shape = (8, channels, *[side] * dimensions)
                yield name, partial(kind, channels, made, kernel, stride, kernel // 2, groups=groups), shape


def watch_layers(rows: list[dict[str, Any]], left: Callable[[], float]) -> int:
    """Each layer in each type, twice: the second time no handle is made. Says how many there was no time for."""
    missed = 0
    for name, build, shape in layers():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            if left() < 0:
                missed += 1
                continue
            layer = build().to("cuda", dtype)
            data = torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)
            for time_ in range(2):
                with Watch(rows, layer=name, dtype=str(dtype)) if time_ else nullcontext():
                    made = layer(data)
                    (made[0] if isinstance(made, tuple) else made).sum().backward()
            del layer, data, made
    clean()
    return missed


def step_times(name: str, precision: str, operations: list[dict[str, Any]]) -> dict[str, Any]:
    """A model's seconds by part, with the whole batch and with a row of it."""
    torch.manual_seed(0)
    model = model_of(name, small=False)
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    module = model.build(adamw("foreach", True)).to("cuda", dtype)
    whole = tree_map(lambda x: x.to("cuda", dtype if x.is_floating_point() else x.dtype) if isinstance(x, Tensor) else x, model.batch())
    optimizer: Any = module.configure_optimizers()
    found: dict[str, Any] = {"model": name, "precision": precision, "parameters": sum(1 for _ in module.parameters())}

    def step(batch: Any) -> list[float]:
        torch.cuda.synchronize()
        clocks = [time.perf_counter()]
        with torch.autocast("cuda", torch.bfloat16) if precision == "bf16-mixed" else nullcontext():
            loss = module.training_step(batch, 0)
        for part in (lambda: loss.backward(), optimizer.step, lambda: optimizer.zero_grad()):
            clocks.append(time.perf_counter())
            part()
        torch.cuda.synchronize()
        clocks.append(time.perf_counter())
        return [clocks[1] - clocks[0], clocks[2] - clocks[1], clocks[3] - clocks[2], clocks[-1] - clocks[0]]

    module.log = lambda *args, **kwargs: None
    for label, batch in (("whole", whole), ("row", tree_map(lambda x: x[:1] if isinstance(x, Tensor) else x, whole))):
        for _ in range(2):
            step(batch)
        times = [step(batch) for _ in range(_REPEATS)]
        found[label] = dict(
            zip(
                ("forward_issue", "backward_issue", "optimizer_issue", "step"),
                map(statistics.median, zip(*times, strict=True)),
                strict=True,
            )
        )
    with Watch(operations, model=name, precision=precision):
        step(whole)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step(whole)
    averages = profiler.key_averages()
    found["gpu_seconds_by_operation"] = {
        row.key: [row.count, row.self_device_time_total / 1e6] for row in averages if row.self_device_time_total > 20
    }
    found["operations"] = sum(row.count for row in averages if row.key.startswith("aten::"))
    found["kernels"] = sum(row.count for row in averages if row.key.startswith("cudaLaunch") or row.key.startswith("cuLaunch"))
    clean()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60.0, help="take up nothing new after so long")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    deadline = time.monotonic() + arguments.seconds
    rows: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    missed = []

    def keep() -> None:
        result = {**machine(), "device": torch.cuda.get_device_name(0), "steps": steps, "missed": missed, "operations": rows}
        arguments.json.write_text(json.dumps(result) + "\n", encoding="utf-8")

    for name, precision in MODELS:
        if time.monotonic() > deadline:
            missed.append(f"{name}, {precision}")
            continue
        steps.append(step_times(name, precision, rows))
        keep()
    missed.append(f"{watch_layers(rows, lambda: deadline - time.monotonic())} layers")
    keep()
    print("missed:", missed)
    for each in steps:
        print(each["model"], each["precision"], each["whole"], each["row"], each["operations"], each["kernels"])


if __name__ == "__main__":
    main()
