"""Runs another project's tests by pytest in a process of their own, and reads which of them pass and how long they take."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

HERE = Path(__file__).parent
#: One CPU device, and nothing that an earlier run or another one may change.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "AUTOPAR_DEVICES": "cpu:8GiB", "AUTOPAR_CACHE": "off", "AUTOPAR_LEDGER": "off"}


#: The variable that names a file, which :mod:`autopar_everywhere` makes once a Trainer got ``autopar``.
USED = "AUTOPAR_EVERYWHERE_USED"


class Case(NamedTuple):
    """The outcome of one test."""

    passed: bool
    skipped: bool
    seconds: float


def cases(
    folder: Path, tests: Sequence[str], *, everywhere: bool, options: Sequence[str] = (), paths: Sequence[Path] = ()
) -> dict[str, Case]:
    """Run the tests; returns each one's outcome, by class and name.

    Args:
        folder: where pytest runs.
        tests: files and folders below it, and nodes of files.
        everywhere: whether every Trainer gets ``autopar``.
        options: further ones of pytest's.
        paths: where more packages are.

    Raises:
        RuntimeError: pytest wrote no report, collected no test, or no Trainer got ``autopar`` where each was to get it.
    """
    searched = (str(HERE), str(HERE.parents[1]), *(str(path) for path in paths), os.environ.get("PYTHONPATH", ""))
    # a top-level name: `tests` is the other project's own package
    plugin = ("-p", "autopar_everywhere") if everywhere else ()
    with tempfile.TemporaryDirectory() as written:
        report, used = Path(written) / "report.xml", Path(written) / "used"
        command = [sys.executable, "-m", "pytest", *plugin, "-q", "--timeout", "240", "-p", "no:cacheprovider", f"--junit-xml={report}"]
        environment = {**os.environ, **ENVIRONMENT, USED: str(used), "PYTHONPATH": os.pathsep.join(filter(None, searched))}
        ended = subprocess.run([*command, *options, *tests], cwd=folder, env=environment, check=False)
        found = read(report.read_text(encoding="utf-8")) if report.exists() else {}
        if found and everywhere and not used.exists():
            raise RuntimeError(f"no Trainer got autopar in the tests of {folder}, so they show nothing")
    if not found:
        raise RuntimeError(f"pytest ended with {ended.returncode} in {folder}, and ran no test")
    return found


def read(report: str) -> dict[str, Case]:
    """What pytest's JUnit report says of each test; a test that it names twice has passed where it did both times."""
    found: dict[str, Case] = {}
    for each in ElementTree.fromstring(report).iter("testcase"):
        # pytest's root, and so a class's name, is the repository's where the folder lies in one
        name = f"{each.get('classname', '').removeprefix('tests.')}::{each.get('name')}"
        tags = {child.tag for child in each}
        case = Case(passed=not tags & {"failure", "error", "skipped"}, skipped="skipped" in tags, seconds=float(each.get("time", "0")))
        before = found.get(name, case)
        found[name] = Case(passed=case.passed and before.passed, skipped=case.skipped, seconds=max(case.seconds, before.seconds))
    return found


def passing(found: Mapping[str, Case]) -> set[str]:
    """The names of the tests that pass."""
    return {name for name, case in found.items() if case.passed}
