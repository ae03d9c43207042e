"""Installs the project, with the packages of constraints.txt, into the virtual environment whose Python runs this: `make`'s first step.

uv does it in a fraction of pip's time, but doesn't read pip's configuration: where that names other places to install from, uv would take
the packages, torch above all, from elsewhere. So each setting is handed to uv as its option; where one has none, or uv fails, pip installs.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_PACKAGES = ("--constraint", "constraints.txt", "--editable", ".[dev,hf,docs,bench]")
#: Settings of pip, and uv's option for each.
_OPTIONS = {
    "index-url": "--default-index",
    "extra-index-url": "--extra-index-url",
    "find-links": "--find-links",
    "constraint": "--constraint",
}
#: The same as environment variables.
_VARIABLES = {"cert": "SSL_CERT_FILE", "default-timeout": "UV_HTTP_TIMEOUT", "timeout": "UV_HTTP_TIMEOUT"}
#: Settings that say nothing about what is installed.
_OF_PIP = ("disable-pip-version-check", "no-input", "progress-bar", "root-user-action", "quiet", "verbose")


def for_uv(settings: Mapping[str, str]) -> tuple[list[str], dict[str, str]] | None:
    """The options and variables of uv for pip's settings; None where one has none."""
    # pip takes the newest version of any index; uv by default that of the first index that has the package.
    options = ["--index-strategy", "unsafe-best-match"] if "extra-index-url" in settings else []
    variables = {}
    for name, value in settings.items():
        if name in _OPTIONS:
            options += [word for each in value.split() for word in (_OPTIONS[name], each)]
        elif name in _VARIABLES:
            variables[_VARIABLES[name]] = value
        elif name not in _OF_PIP:
            return None
    return options, variables


def settings_of(listed: str) -> dict[str, str]:
    """The settings of pip, from what `pip config list` prints; those of the environment count more than those of files."""
    found = [line.partition("=") for line in listed.splitlines() if "=" in line]
    found.sort(key=lambda each: each[0].startswith(":env:"))
    return {name.rpartition(".")[2]: str(ast.literal_eval(value)) for name, _, value in found}


def main() -> int:
    """Install; returns the exit code."""
    pip: Sequence[str] = (sys.executable, "-m", "pip")
    listed = subprocess.run([*pip, "config", "list"], capture_output=True, text=True, check=True).stdout
    wanted, began = for_uv(settings_of(listed)), time.monotonic()
    print("installing the packages of constraints.txt, once: torch and about 170 others", flush=True)
    if wanted is None:
        print("by pip, as uv has no option for one of pip's settings (pip config list); this can take some minutes", flush=True)
    elif _by_uv(pip, *wanted):
        print(f"installed by uv in {time.monotonic() - began:.0f} s", flush=True)
        return 0
    else:
        print("uv couldn't install them, so pip does; this can take some minutes", flush=True)
    code = subprocess.run([*pip, "install", *_PACKAGES]).returncode
    print(f"{'installed' if code == 0 else 'failed'} by pip in {time.monotonic() - began:.0f} s", flush=True)
    return code


def _by_uv(pip: Sequence[str], options: Sequence[str], variables: Mapping[str, str]) -> bool:
    """Whether uv, which pip brings into a folder of its own, has installed the packages."""
    with tempfile.TemporaryDirectory() as folder:
        if subprocess.run([*pip, "install", "--quiet", "--target", folder, "uv"]).returncode != 0:
            return False
        command = [str(Path(folder, "bin", "uv")), "pip", "install", "--python", sys.executable, *options, *_PACKAGES]
        return subprocess.run(command, env={**os.environ, **variables}).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
