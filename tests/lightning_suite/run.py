"""Run Lightning's own tests as they are and with ``autopar`` everywhere; what passes without it and fails with it is a difference.

    python -m tests.lightning_suite.run FOLDER [--only WORD]

FOLDER is the folder ``tests`` of Lightning's repository, at the version that is installed. It ends with 1 where a difference isn't told
of in README.md beside this, or where one that is told of there has gone.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.lightning_suite.suite import cases, passing

HERE = Path(__file__).parent
#: What the suite's tests import beside the project's own environment.
NEEDED = ("pytest-rerunfailures", "scikit-learn", "pandas")
PARTS = (
    *(f"models/test_{name}.py" for name in ("hooks", "restore", "cpu")),
    "trainer/test_trainer.py",
    *(f"trainer/{name}" for name in ("optimization", "flags", "logging_", "properties")),
    *("checkpointing", "loops", "tuner", "plugins"),
    *(
        f"callbacks/test_{name}.py"
        for name in ("early_stopping", "stochastic_weight_avg", "weight_averaging", "timer", "finetuning_callback")
    ),
)
_EXPLAINED = re.compile(r"^- `(?P<test>[^`]+)`", re.MULTILINE)


def explained(text: str) -> set[str]:
    """The tests that a page names at the beginning of a list's entry."""
    return {found["test"] for found in _EXPLAINED.finditer(text)}


def main() -> int:
    """Run both and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="for pytest's -k")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as extra:
        install = (sys.executable, "-m", "pip", "install", "--quiet", "--constraint", str(HERE.parent.parent / "constraints.txt"))
        subprocess.run([*install, "--target", extra, *NEEDED], check=True)
        parts = [f"tests_pytorch/{part}" for part in PARTS]
        options = ("-o", "addopts=--strict-markers", "-k", arguments.only)
        plain, ours = (
            passing(cases(arguments.folder, parts, everywhere=everywhere, options=options, paths=(Path(extra),)))
            for everywhere in (False, True)
        )
    found, known = plain - ours, explained((HERE / "README.md").read_text(encoding="utf-8"))
    print(f"{len(plain)} tests pass as they are, {len(plain & ours)} of them with autopar; {len(found)} differ")
    for test in sorted(found - known):
        print(f"not explained: {test}")
    gone = set() if arguments.only else known - found
    for test in sorted(gone):
        print(f"explained, and no difference any more: {test}")
    return int(bool(found - known or gone))


if __name__ == "__main__":
    sys.exit(main())
