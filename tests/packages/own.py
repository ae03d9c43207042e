"""Run another package's own tests as they are and with ``autopar`` everywhere on one device. A test that passes without it and fails
with it is a difference.

    python -m tests.packages.own NAME FOLDER [TEST ...] [--at VERSION]

NAME is the distribution, FOLDER a checkout of its repository at the version that is installed, and each TEST a file or folder in it. The
results are written into ``own.json`` beside this, and `python -m tests.packages.render` shows them in docs/packages.md. It ends with 1
where a difference has no reason in :data:`REASONS`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from tests.lightning_suite.suite import Case, cases, passing

#: The results of each package's tests, by the package's name.
OWN = Path(__file__).parent / "own.json"
#: Tests that look at something which autopar must change, by distribution and test, and why.
REASONS: Mapping[str, str] = {}

HEAD = """## Their own tests

These packages' own tests were run twice on one CPU device: as they are, and with `autopar` as the strategy of every Trainer that names
none. A test that passes as it is and fails with `autopar` is a difference. Seconds are those of the tests that pass both ways. Nothing is
kept from run to run, so each run is planned anew. The machine did other work at the same time.
"""
HOW = """Check out a package's repository at the version of the table, then run its tests by their files or folders:
`python -m tests.packages.own NAME FOLDER TEST...` in the environment of `make packages`. scvi-tools needs `PYTEST_PLUGINS=rich.pretty`
beside it: its code uses that module without importing it."""


@dataclass(frozen=True, kw_only=True)
class Suite:
    """The results of one package's own tests."""

    version: str
    """The checkout's version."""
    beneath: str
    """The versions of torch and Lightning."""
    day: str
    tests: list[str]
    """The files and folders that were run."""
    plain: int
    """How many pass as they are."""
    failing: list[str]
    """Those that fail as they are; what they come to with autopar isn't compared."""
    differing: list[str]
    """Those that pass as they are and don't with autopar."""
    seconds: tuple[float, float]
    """What the tests take that pass both ways: as they are, and with autopar."""


def compared(plain: Mapping[str, Case], ours: Mapping[str, Case], tests: Sequence[str], installed: str) -> Suite:
    """The results of both runs of a package's tests."""
    both = passing(plain) & passing(ours)
    return Suite(
        version=installed,
        beneath=f"torch {version('torch').partition('+')[0]}, lightning {version('lightning')}",
        day=f"{datetime.now(UTC):%Y-%m-%d}",
        tests=list(tests),
        plain=len(passing(plain)),
        failing=sorted(name for name, case in plain.items() if not (case.passed or case.skipped)),
        differing=sorted(passing(plain) - both),
        seconds=(round(sum(plain[name].seconds for name in both), 1), round(sum(ours[name].seconds for name in both), 1)),
    )


def section(suites: Mapping[str, Suite], reasons: Mapping[str, str] = REASONS) -> Iterator[str]:
    """The lines of the page's section."""
    if not suites:
        return
    yield from (
        HEAD,
        "| Package | tests | pass as they are | with autopar | differ | seconds | with autopar |",
        "|---|---|---|---|---|---|---|",
    )
    for name, suite in sorted(suites.items()):
        tests = ", ".join(f"`{test}`" for test in suite.tests)
        same = suite.plain - len(suite.differing)
        plain, ours = suite.seconds
        yield f"| {name} {suite.version} | {tests} | {suite.plain} | {same} | {len(suite.differing)} | {plain:g} | {ours:g} |"
    yield ""
    differing = [f"{name}: {test}" for name, suite in sorted(suites.items()) for test in suite.differing]
    for test in differing:
        yield f"- `{test}`: {reasons.get(test, 'a defect, whose cause is not known yet.')}"
    yield from ([""] if differing else [])
    failing = {name: len(suite.failing) for name, suite in sorted(suites.items()) if suite.failing}
    if failing:
        listed = ", ".join(f"{count} of {name}" for name, count in failing.items())
        yield f"Tests that fail as they are with these versions aren't compared: {listed}."
        yield ""
    yield f"{', '.join(sorted({f'{suite.day} with {suite.beneath}' for suite in suites.values()}))}."
    yield from ("", HOW, "")


def suites(results: Path = OWN) -> dict[str, Suite]:
    """The results as they were written, by the package's name."""
    kept = json.loads(results.read_text(encoding="utf-8")) if results.exists() else {}
    return {name: Suite(**{**suite, "seconds": tuple(suite["seconds"])}) for name, suite in kept.items()}


def main() -> int:
    """Run both, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("folder", type=Path)
    parser.add_argument("tests", nargs="*", default=["tests"])
    parser.add_argument(
        "--at", help="the checkout's version, where it isn't the installed one: pytest imports the checkout's package first"
    )
    arguments = parser.parse_args()
    # the package's own options, such as those for coverage, need plugins that aren't installed
    plain, ours = (
        cases(arguments.folder, arguments.tests, everywhere=everywhere, options=("-o", "addopts=")) for everywhere in (False, True)
    )
    found = compared(plain, ours, arguments.tests, arguments.at or version(arguments.name))
    kept = {**suites(), arguments.name: found}
    OWN.write_text(json.dumps({name: asdict(suite) for name, suite in sorted(kept.items())}, indent=1) + "\n", encoding="utf-8")
    print(f"{found.plain} tests pass as they are; {len(found.differing)} of them differ with autopar; seconds: {found.seconds}")
    unexplained = [test for test in found.differing if f"{arguments.name}: {test}" not in REASONS]
    for test in unexplained:
        print(f"not explained: {test}")
    return int(bool(unexplained))


if __name__ == "__main__":
    sys.exit(main())
