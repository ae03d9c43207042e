"""What random convolutions take inside of one operation on the CPU: asked of a few samples and carried on to the batch, beside the batch's.

Convolutions of one to three dimensions, forward and backward, strided, dilated, in groups, depthwise, transposed, channels last, at the
process's number of threads. Each is asked in a process of its own, as oneDNN crashes in some (torch 2.13), which are counted.

    python benchmarks/convolutions.py                # writes benchmarks/results/convolutions.json, a minute
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

import torch  # noqa: E402

from benchmarks.machine import machine  # noqa: E402
from lightning_autopar._fork import ChildFailed, run_forked  # noqa: E402
from lightning_autopar.memory.kernels import measured_workspace as scratch_convolution  # noqa: E402

aten = torch.ops.aten
RESULTS = HERE / "results" / "convolutions.json"
#: Off by no more than this share of all that the operation holds, or so many bytes, is as good as equal.
_CLOSE, _LITTLE_BYTES = 0.02, 4096


def drawn(draw: random.Random) -> dict[str, Any]:
    """One convolution's numbers."""
    space = draw.choice([1, 2, 2, 2, 3])
    kernel, dilation = draw.choice([1, 2, 3, 3, 3, 5, 7]), draw.choice([1, 1, 1, 2, 4])
    inputs, outputs = draw.choice([1, 3, 4, 12, 16, 32, 64, 96]), draw.choice([1, 10, 16, 32, 48, 64, 128])
    kind = draw.choice(["plain"] * 6 + ["depthwise", "depthwise", "groups", "transposed", "channels last"])
    if kind == "depthwise":
        outputs = inputs * draw.choice([1, 2])
    groups = inputs if kind == "depthwise" else 4 if kind == "groups" and not inputs % 4 and not outputs % 4 else 1
    return {
        "rows": draw.choice([2, 4, 8, 16]),
        "image": [inputs] + [draw.choice({1: [33, 128, 520], 2: [7, 14, 28, 56], 3: [4, 8, 12]}[space])] * space,
        "outputs": outputs,
        "kernel": kernel,
        "stride": draw.choice([1, 1, 1, 2]),
        "padding": draw.choice([0, kernel // 2, (kernel - 1) * dilation // 2]),
        "dilation": dilation,
        "groups": groups,
        "kind": kind,
        "backward": draw.random() < 0.5,
    }


def asked(numbers: dict[str, Any]) -> dict[str, int] | None:
    """Bytes that the operation holds on the whole batch: carried on from few samples, and by running it; None where there is none such."""
    space, inputs = len(numbers["image"]) - 1, numbers["image"][0]
    image = torch.zeros(numbers["rows"], *numbers["image"])
    transposed = numbers["kind"] == "transposed"
    shape = (inputs, numbers["outputs"]) if transposed else (numbers["outputs"], inputs // numbers["groups"])
    weight = torch.zeros(*shape, *[numbers["kernel"]] * space)
    if numbers["kind"] == "channels last" and space == 2:
        image = image.to(memory_format=torch.channels_last)
    each = ([numbers[name]] * space for name in ("stride", "padding", "dilation"))
    args: tuple[Any, ...] = (image, weight, None, *each, transposed, [0] * space, numbers["groups"])
    try:
        output = aten.convolution.default(*args)
    except RuntimeError:
        return None  # the kernel is larger than the padded image
    batched: tuple[int, ...] = (0,)
    function, few = aten.convolution.default, scratch_convolution.convolution
    if numbers["backward"]:
        args = (torch.zeros_like(output), *args[:2], None, *args[3:], [True, True, False])
        function, few, batched = aten.convolution_backward.default, scratch_convolution.convolution_backward, (0, 1)
        output = function(*args)
    whole = scratch_convolution._run(function, args, batched, numbers["rows"])
    scratch_convolution._MOST_OPERATIONS = 1  # in this process alone: as few samples as it goes
    carried = few(args, {}, output)
    made = sum(each.numel() * each.element_size() for each in (output if isinstance(output, tuple) else (output,)) if each is not None)
    return {"real_bytes": whole + made, "said_bytes": sum(carried or (0,)) + made}


def main() -> None:
    """Draw, ask, print and keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw, crashed = random.Random(arguments.seed), 0
    rows: list[dict[str, Any]] = []
    while len(rows) + crashed < arguments.count:
        numbers = drawn(draw)
        try:
            found = run_forked(asked, numbers, timeout_seconds=60)
        except ChildFailed as error:
            if not error.crashed:
                raise
            crashed += 1
            continue
        if found is not None:
            rows.append(numbers | found | {"error": found["said_bytes"] / max(1, found["real_bytes"]) - 1})
    close = [abs(row["error"]) <= _CLOSE or abs(row["said_bytes"] - row["real_bytes"]) <= _LITTLE_BYTES for row in rows]
    worst = max(rows, key=lambda row: 0 if abs(row["said_bytes"] - row["real_bytes"]) <= _LITTLE_BYTES else abs(row["error"]))
    capability = torch.backends.cpu.get_cpu_capability()
    figures = {"asked": len(rows), "crashed": crashed, "close": sum(close) / len(rows), "worst": worst, "capability": capability}
    print(
        f"{len(rows)} convolutions on {capability}: {sum(close)} as close as {_CLOSE:.0%}, worst {worst['error']:+.1%}; {crashed} crashed"
    )
    RESULTS.write_text(json.dumps(machine() | {"threads": torch.get_num_threads()} | figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
