"""What a GPU is asked in its first nine minutes: part by part, each with its own time and its own result, whatever becomes of the others.

    python3 benchmarks/gpu_all.py FOLDER            # or benchmarks/gpu_all.sh FOLDER
    python3 benchmarks/gpu_all.py FOLDER offload    # another nine minutes: the largest models that train with offload to host memory

Each part leaves ``FOLDER/<number>-<part>.json``: how it ended, its own figures, and the last it said.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: All parts together, with what is between them.
MOST_SECONDS = 540
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


#: Tests of one GPU: the others are of two, or of the stub alone.
_TESTS = (
    "tests/test_gpu.py",
    "tests/strategies/processes/test_waits.py",
    "tests/strategies/calibration/test_on_gpus.py",
    "tests/memory/fakes/test_saved_on_device.py",
)
PARTS = (
    Part(name="stub", command=("benchmarks/nullgpu_against_gpu.py", "--json", "{json}", "--seconds", "80"), seconds=100),
    Part(name="fits", command=("benchmarks/gpu_checks.py", "fits", "--json", "{json}", "--seconds", "115"), seconds=130),
    Part(name="tests", command=("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu and not two_gpus", *_TESTS), seconds=90),
    Part(name="caps", command=("benchmarks/gpu_checks.py", "caps", "--json", "{json}", "--seconds", "48"), seconds=60),
    Part(name="seconds", command=("benchmarks/gpu_checks.py", "seconds", "--json", "{json}", "--seconds", "108"), seconds=120),
)
OFFLOAD = (Part(name="offload", command=("benchmarks/offload_gpu.py", "--seconds", "500", "--json", "{json}"), seconds=530),)


def run(part: Part, target: Path) -> dict[str, Any]:
    """One part, to its end or its time's; what it found is written to ``target``."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        command = [sys.executable, *(word.replace("{json}", str(figures)) for word in part.command)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
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


def run_all(parts: Sequence[Part], folder: Path) -> bool:
    """All parts in order; whether each of them passed."""
    folder.mkdir(parents=True, exist_ok=True)
    good = True
    for number, part in enumerate(parts, start=1):
        result = run(part, folder / f"{number}-{part.name}.json")
        print(*sentences(result), sep="\n", flush=True)
        good = good and result["status"] == "passed"
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the results go")
    parser.add_argument("which", nargs="?", choices=["first", "offload"], default="first")
    arguments = parser.parse_args()
    return 0 if run_all(PARTS if arguments.which == "first" else OFFLOAD, arguments.folder) else 1


if __name__ == "__main__":
    sys.exit(main())
