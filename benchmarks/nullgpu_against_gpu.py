"""Where the stub GPUs (tests/nullgpu) lie: small probes, on the stub as figures to keep, on a real GPU compared with those, line by line.

    build/venv-2.11/bin/python benchmarks/nullgpu_against_gpu.py    # in an environment of stubs: writes results/nullgpu_torch_2_11.json
    python benchmarks/nullgpu_against_gpu.py --json FILE            # on a GPU: its figures, beside those of the stub for this torch

A GPU's figures are held against the stub of its own torch, or the nearest there is. Bytes, calls and draws have to be equal (draws that go
through a GPU's fast functions to 1e-5), values near. What the stub hasn't got is listed as such, and so is what needs two GPUs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]
RESULTS = HERE / "results"

import torch  # noqa: E402

from benchmarks.machine import machine  # noqa: E402
from benchmarks.nullgpu_probes import GROUPS  # noqa: E402

#: By how much figures of a group may differ, as a share; the others are to be equal.
_NEAR = {"draws": 1e-5, "values_of_layers": 2e-2}
#: A stub is a model of GPU of its own: what differs there is told, and no lie.
_OF_THE_MODEL = ("device", "driver")
_SECONDS = 120
NOT_COMPARED = ("memory that NCCL takes", "collectives' values", "peer access and links", "two processes on two devices")


def on_stub() -> bool:
    """Whether this interpreter's torch is on stub libraries."""
    return importlib.util.find_spec("nullgpu_compute") is not None


def ask(stub: bool, seconds: float) -> dict[str, Any]:
    """Every group's probes, each group in a process of its own; what is left when time is up is left out."""
    until = time.monotonic() + seconds
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        settings = {"NULLGPU_DEVICES": "1", "NULLGPU_COMPUTE": "1", "NULLGPU_STATE": f"{folder}/state"} if stub else {}
        for group in GROUPS:
            left = min(_SECONDS, until - time.monotonic())
            if left <= 0:
                print(f"{group}: no time left", file=sys.stderr)
                continue
            command = [sys.executable, str(HERE / "nullgpu_probes.py"), group]
            try:
                done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=left)
            except subprocess.TimeoutExpired:
                print(f"{group}: not done in {left:.0f} s", file=sys.stderr)
                continue
            if done.returncode:
                print(f"{group} failed:\n{done.stderr[-1500:]}", file=sys.stderr)
                continue
            found[group] = json.loads(done.stdout.splitlines()[-1])
    return found


def nearest(version: str) -> Path:
    """The stub's figures for this torch, or for the release that is nearest to it."""
    wanted = int(version.split(".")[1])
    return min(RESULTS.glob("nullgpu_torch_2_*.json"), key=lambda path: abs(int(path.stem.rsplit("_", 1)[1]) - wanted))


def differs(group: str, stub: Any, gpu: Any) -> bool:
    if isinstance(gpu, dict) and isinstance(stub, dict):
        return any(differs(group, stub.get(name), gpu[name]) for name in gpu)
    if isinstance(gpu, list) and isinstance(stub, list):
        # How many come out decides how long lists are; in draws' sums errors add up.
        return len(stub) != len(gpu) or any(differs(group, a, b) for a, b in zip(stub, gpu, strict=True))
    near = _NEAR.get(group)
    if near is None or not isinstance(gpu, (int, float)) or not isinstance(stub, (int, float)):
        return bool(stub != gpu)
    return abs(stub - gpu) > near * max(1e-3, abs(gpu))


def compare(stub: dict[str, Any], gpu: dict[str, Any]) -> tuple[list[str], dict[str, dict[str, int]]]:
    """A line for each probe that differs, and counts by group."""
    lines, counts = [], {}
    for group, probes in gpu.items():
        count = {"equal": 0, "other": 0, "not on the stub": 0}
        for name, figure in probes.items():
            known = stub.get(group, {}).get(name)
            if isinstance(known, str) and not isinstance(figure, str):
                count["not on the stub"] += 1
                lines.append(f"{group}: {name}: not on the stub ({known}); a GPU: {figure}")
            elif differs(group, known, figure):
                count["other"] += 1
                what = "another model" if group in _OF_THE_MODEL else "THE STUB LIES"
                lines.append(f"{group}: {name}: {what}: stub {known}, GPU {figure}")
            else:
                count["equal"] += 1
        counts[group] = count
    return lines, counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="where the figures go; on the stub by default among the results")
    parser.add_argument("--seconds", type=float, default=600, help="no group is begun after so many")
    options = parser.parse_args()
    stub = on_stub()
    if not stub and not torch.cuda.is_available():
        sys.exit("there is no GPU here, and this torch isn't on stub libraries: see tests/nullgpu/README.md")
    found = {**machine(), "stub": stub, "probes": ask(stub, options.seconds)}
    target = options.json or RESULTS / f"nullgpu_torch_{'_'.join(torch.__version__.split('.')[:2])}.json"
    if stub:
        beyond = [
            f"{group}: {name}: {figure}"
            for group, probes in found["probes"].items()
            for name, figure in probes.items()
            if isinstance(figure, str)
        ]
        print(f"{sum(map(len, found['probes'].values()))} figures; not on the stub: {len(beyond)}", *beyond, sep="\n  ")
    elif options.json is None:
        parser.error("on a GPU: say where the figures go, --json FILE")
    else:
        path = nearest(torch.__version__)
        lines, found["counts"] = compare(json.loads(path.read_text())["probes"], found["probes"])
        found["differences"], found["compared_with"], found["not_compared"] = lines, path.name, NOT_COMPARED
        print(*lines, sep="\n")
        print(
            *(f"{group}: {', '.join(f'{number} {what}' for what, number in count.items())}" for group, count in found["counts"].items()),
            sep="\n",
        )
        print("not compared, as it needs two GPUs:", "; ".join(NOT_COMPARED))
    target.write_text(json.dumps(found, indent=1) + "\n")
    print(f"written to {target}")


if __name__ == "__main__":
    main()
