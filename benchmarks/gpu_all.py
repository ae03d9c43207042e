"""What a GPU is asked in its first minutes: part by part, each with its own time and its own result, whatever becomes of the others.

    python3 benchmarks/gpu_all.py FOLDER            # or benchmarks/gpu_all.sh FOLDER: at most seven minutes
    python3 benchmarks/gpu_all.py FOLDER memory     # four more: predicted beside measured bytes of many models
    python3 benchmarks/gpu_all.py FOLDER offload    # nine more: the largest models that train with offload to host memory
    python3 benchmarks/gpu_all.py FOLDER large      # four: seven billion parameters where 24 GiB may be used
    python3 benchmarks/gpu_all.py FOLDER checks     # the first three of the seven minutes: all that says nothing of time
    python3 benchmarks/gpu_all.py FOLDER plans      # the last two of them

Parts that say nothing of time run side by side. Each leaves ``FOLDER/<group>-<part>.json``: how it ended, its own figures, and the last it
said.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_SAID_CHARACTERS = 6000


@dataclass(frozen=True, kw_only=True)
class Part:
    """One question.

    Args:
        name: of its result.
        command: after ``python3``; ``{json}`` is where its own figures go.
        seconds: after which it is ended, with all that it started.
    """

    name: str
    command: tuple[str, ...]
    seconds: int


#: Tests of one GPU: the others are of two, of the stub alone, or want the GPU for themselves.
_TESTS = (
    "tests/test_gpu.py",
    "tests/test_fork.py",
    "tests/strategies/processes/test_waits.py",
    "tests/strategies/processes/test_stalled_workers.py",
    "tests/memory/fakes/test_saved_on_device.py",
    "tests/nullgpu/test_stub.py",
    "tests/nullgpu/test_random.py",
)


def _checks(section: str, seconds: int) -> Part:
    """A section of gpu_checks.py."""
    command = ("benchmarks/gpu_checks.py", section, "--json", "{json}", "--seconds", str(seconds))
    return Part(name=section, command=command, seconds=seconds + 12)


#: Parts of a group run side by side: only what says nothing of time does so.
CHECKS = (
    Part(name="stub", command=("benchmarks/nullgpu_against_gpu.py", "--json", "{json}", "--seconds", "80"), seconds=100),
    _checks("fits", 130),
    _checks("workers", 150),
    Part(name="tests", command=("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu and not two_gpus", *_TESTS), seconds=150),
    _checks("caps", 90),
    _checks("commands", 110),
)
PLANS = (Part(name="plans", command=("benchmarks/plans_gpu.py", "--json", "{json}", "--seconds", "100"), seconds=140),)
LARGE = (Part(name="large", command=("benchmarks/large_gpu.py", "--json", "{json}"), seconds=240),)
MEMORY = ((Part(name="memory", command=("benchmarks/memory_gpu.py", "--seconds", "270", "--json", "{json}"), seconds=400),),)
OFFLOAD = ((Part(name="offload", command=("benchmarks/offload_gpu.py", "--seconds", "500", "--json", "{json}"), seconds=530),),)
GROUPS = {
    "first": (CHECKS, (_checks("seconds", 75),), PLANS),
    "checks": (CHECKS,),
    "plans": (PLANS,),
    "large": (LARGE,),
    "memory": MEMORY,
    "offload": OFFLOAD,
}


def run(part: Part, target: Path) -> dict[str, Any]:
    """One part, to its end or its time's; what it found is written to ``target``."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        command = [sys.executable, *(word.replace("{json}", str(figures)) for word in part.command)]
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *paths]), "PYTHONUNBUFFERED": "1"}
        with (Path(folder) / "said").open("w+", encoding="utf-8", errors="replace") as said:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=said, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
            )
            try:
                code = process.wait(timeout=part.seconds)
                status = "passed" if code == 0 else f"failed with exit code {code}"
            except subprocess.TimeoutExpired:
                status = f"stopped after {part.seconds} s"
            with contextlib.suppress(ProcessLookupError):  # what it started, and left behind
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            said.seek(0)
            words = said.read()[-_SAID_CHARACTERS:]
        found = None
        if figures.exists():
            try:
                found = json.loads(figures.read_text(encoding="utf-8"))
            except ValueError:
                status += "; its figures are cut off"
    result = {
        "part": part.name,
        "status": status,
        "seconds": round(time.monotonic() - begun, 1),
        "command": part.command,
        "found": found,
        "said": words,
    }
    target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def sentences(result: dict[str, Any]) -> list[str]:
    """What came of a part and of each of its checks.

    Args:
        result: of :func:`run`.
    """
    found = result["found"] if isinstance(result["found"], dict) else {}
    told = []
    for row in found.get("checks", ()):
        how = "passed" if row["passed"] else f"FAILED, its process {row['status']}"
        told.append(f"{result['part']}: the check {row['check']} {how}, in {row['seconds']:.1f} s.")
    told += [f"{result['part']}: the check {name} wasn't made, as the part's time was up." for name in found.get("left_out", ())]
    last = next((line.strip("= ") for line in reversed(result["said"].splitlines()) if line.strip("= ")), "nothing")
    return [*told, f"{result['part']}: the part {result['status']}, in {result['seconds']} s; the last it said was: {last}"]


def run_all(groups: Sequence[Sequence[Part]], folder: Path) -> bool:
    """All groups in order; whether each of their parts passed."""
    folder.mkdir(parents=True, exist_ok=True)
    good = True
    for number, group in enumerate(groups, start=1):
        with ThreadPoolExecutor(len(group)) as pool:
            results = [pool.submit(run, part, folder / f"{number}-{part.name}.json") for part in group]
            for result in as_completed(results):
                print(*sentences(result.result()), sep="\n", flush=True)
                good = good and result.result()["status"] == "passed"
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the results go")
    parser.add_argument("which", nargs="?", choices=sorted(GROUPS), default="first")
    arguments = parser.parse_args()
    return 0 if run_all(GROUPS[arguments.which], arguments.folder) else 1


if __name__ == "__main__":
    sys.exit(main())
