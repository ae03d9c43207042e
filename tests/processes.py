"""What Python processes that tests start are given, so that each doesn't spend its first seconds on imports that nobody uses."""

from __future__ import annotations

import os
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def lean_path(*more: Path) -> str:
    """``PYTHONPATH`` for a process that trains but needs no Hugging Face and no pictures: these folders, then the project's."""
    return os.pathsep.join(map(str, (_HERE / "lean", *more, _HERE.parent)))
