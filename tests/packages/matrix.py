"""The whole matrix, or the models that are named: `python -m tests.packages.matrix [--plans ddp,fsdp] [MODEL...]`.

What the cells come to is entered into results.json beside this file, and docs/packages.md is written anew from it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.packages.plans import PLANS
from tests.packages.render import RESULTS, write
from tests.packages.zoo import MEMBERS

ROOT = Path(__file__).parents[2]
#: One thread a process, no network, nothing learned from earlier runs, no GPUs, as for the tests.
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "AUTOPAR_CACHE": "off",
    "AUTOPAR_LEDGER": "off",
    "AUTOPAR_WAIT": "never",
    "CUDA_VISIBLE_DEVICES": "",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("members", nargs="*", metavar="MODEL", help="all by default")
    parser.add_argument("--plans", default=",".join(PLANS), help="all by default")
    options = parser.parse_args()
    failed = []
    for name in options.members or MEMBERS:
        with TemporaryDirectory(prefix="packages-runs-") as runs:
            command = [sys.executable, "-m", "tests.packages.cell", name, str(RESULTS), *options.plans.split(",")]
            if subprocess.run(command, cwd=ROOT, env={**os.environ, **SETTINGS, "AUTOPAR_RUNS": runs}).returncode:
                failed.append(name)
    write()
    if failed:
        print(f"not run to their end: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
