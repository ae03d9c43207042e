"""What it takes to plan for a Llama of 8 billion parameters on eight H100s, built on meta from its configuration alone.

Runs ``lightning-autopar plan`` of the fine-tuning example some times, each in a process of its own, and measures seconds by the clock, of
the processor in all processes of the command, and the peak of the host memory that they hold together (PSS, looked at five times a second).

    python benchmarks/plan_8b.py                # writes benchmarks/results/plan_8b.json
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "plan_8b.json"
EXAMPLES = ROOT / "examples" / "hf"
GOAL_SECONDS, GOAL_BYTES = 15.0, 2 * 1024**3
_RUNS, _TIMEOUT_SECONDS, _LOOK_SECONDS = 3, 180.0, 0.2


def planned(folder: Path) -> dict[str, Any]:
    """One run of the command in a folder: its report, ``seconds``, ``cpu_seconds`` and ``peak_bytes``."""
    options = ["--devices=8xH100-80GB", "--json", str(EXAMPLES / "causal_lm.py"), f"--model={EXAMPLES / 'llama-8b'}", "--config-only"]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "lightning_autopar", "plan", *options, "--precision=bf16-true", "--length=2048"],
        cwd=folder,
        env={**os.environ, "AUTOPAR_CACHE": "off"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    peak_bytes, ended = [0], threading.Event()

    def watch() -> None:
        parent = psutil.Process(process.pid)
        while not ended.wait(_LOOK_SECONDS):
            held = 0
            try:
                for each in (parent, *parent.children(recursive=True)):
                    held += each.memory_full_info().pss
            except psutil.Error:
                continue  # one of them has just ended
            peak_bytes[0] = max(peak_bytes[0], held)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        printed, said = process.communicate(timeout=_TIMEOUT_SECONDS)
    finally:
        process.kill()
        ended.set()
        watcher.join()
    seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    assert process.returncode == 0, said
    cpu_seconds = (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime)
    return {"report": json.loads(printed), "seconds": seconds, "cpu_seconds": cpu_seconds, "peak_bytes": peak_bytes[0]}


def main() -> None:
    """Measure, print and keep it."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.machine import machine

    runs = []
    for _ in range(_RUNS):
        with tempfile.TemporaryDirectory() as name:
            found = planned(Path(name))
        del found["report"]
        runs.append(found)
        print(f"{found['seconds']:.1f} s, {found['cpu_seconds']:.1f} s of the processor, {found['peak_bytes'] / 2**20:.0f} MiB", flush=True)
    RESULTS.write_text(
        json.dumps({**machine(), "goal_seconds": GOAL_SECONDS, "goal_bytes": GOAL_BYTES, "runs": runs}, indent=1) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
