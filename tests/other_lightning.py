"""Runs tests under ``pytorch_lightning``, with ``lightning`` as if it weren't installed: a copy of them imports the other name.

    python -m tests.other_lightning tests/conformance -k test_feature

What follows is pytest's. The copy is ``build/pytorch_lightning``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
COPY = ROOT / "build" / "pytorch_lightning"
_HIDDEN = "import sys\n\nsys.modules['lightning'] = None\n"
#: How a test, and a script that it writes, imports Lightning.
_NAMES = (
    (r"\blightning\.pytorch\b", "pytorch_lightning"),
    (r"\blightning\.fabric\b", "lightning_fabric"),
    (r"\bimport ((?:\w+, )*)lightning as\b", r"import \1pytorch_lightning as"),
    (r"\bfrom lightning import\b", "from pytorch_lightning import"),
)


def copy() -> None:
    """Make the copy, of the files that git knows, with the package's own code linked."""
    shutil.rmtree(COPY, ignore_errors=True)
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        source, target = ROOT / name, COPY / name
        if name.startswith("lightning_autopar/") or not source.is_file():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix != ".py":
            shutil.copy(source, target)
            continue
        text = source.read_text(encoding="utf-8")
        for pattern, word in _NAMES:
            text = re.sub(pattern, word, text)
        target.write_text(text, encoding="utf-8")
    (COPY / "lightning_autopar").symlink_to(ROOT / "lightning_autopar")
    (COPY / "sitecustomize.py").write_text(_HIDDEN)
    lean = COPY / "tests" / "lean" / "sitecustomize.py"
    lean.write_text(lean.read_text(encoding="utf-8") + _HIDDEN, encoding="utf-8")


if __name__ == "__main__":
    copy()
    os.chdir(COPY)
    os.environ["PYTHONPATH"] = str(COPY)
    os.execv(sys.executable, [sys.executable, "-m", "pytest", *sys.argv[1:]])
