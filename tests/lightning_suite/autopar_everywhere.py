"""A pytest plugin: each Trainer that names no strategy gets ``autopar`` on one CPU device. Knows Lightning's Trainer alone."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer


def pytest_configure() -> None:
    """Before any test is collected."""
    original = Trainer.__init__

    @functools.wraps(original)
    def init(self: Trainer, *args: Any, **options: Any) -> None:
        one = options.get("devices", "auto") in ("auto", 1, "1") and options.get("accelerator", "auto") in ("auto", "cpu")
        if not args and options.get("strategy", "auto") == "auto" and one:
            one_device = {} if "PL_TRAINER_DEVICES" in os.environ else {"devices": 1}  # the variable counts where no argument is given
            options = {**one_device, **options, "strategy": "autopar", "accelerator": "cpu"}
            Path(os.environ["AUTOPAR_EVERYWHERE_USED"]).touch()
        original(self, *args, **options)

    Trainer.__init__ = init  # type: ignore[method-assign]
