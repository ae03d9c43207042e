"""The whole matrix, or the models that are named: `python -m tests.packages.matrix [--cuda] [--plans ddp,fsdp] [MODEL...]`.

What the cells come to is entered into results.json beside this file, or into results_cuda.json, and
docs/packages.md is written anew from both.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.packages.plans import PLANS
from tests.packages.render import CUDA_RESULTS, RESULTS, write
from tests.packages.zoo import MEMBERS

ROOT = Path(__file__).parents[2]
#: One thread a process, no network, nothing learned from earlier runs, as for the tests.
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "AUTOPAR_CACHE": "off",
    "AUTOPAR_LEDGER": "off",
    "AUTOPAR_WAIT": "never",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("members", nargs="*", metavar="MODEL", help="all by default")
    parser.add_argument("--plans", default=",".join(PLANS), help="all by default")
    parser.add_argument("--cuda", action="store_true", help="on GPUs, or on stub ones where NULLGPU_DEVICES says so")
    options = parser.parse_args()
    settings = SETTINGS if options.cuda else {**SETTINGS, "CUDA_VISIBLE_DEVICES": ""}
    results, accelerator = (CUDA_RESULTS, "gpu") if options.cuda else (RESULTS, "cpu")
    failed = []
    for name in options.members or MEMBERS:
        with TemporaryDirectory(prefix="packages-runs-") as runs:
            command = [sys.executable, "-m", "tests.packages.cell", name, str(results), accelerator, *options.plans.split(",")]
            if subprocess.run(command, cwd=ROOT, env={**os.environ, **settings, "AUTOPAR_RUNS": runs}).returncode:
                failed.append(name)
    write()
    if failed:
        print(f"not run to their end: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
