"""The script again, in the plan's processes, in the place of this process. Knows no Trainer."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from lightning_autopar.huggingface.settings import VARIABLE, Settings

#: Environment variables that a launcher sets for its processes.
_LAUNCHED = ("RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")


def launched_by_others() -> str | None:
    """The variable by which a launcher has told this process that it is one of several; None where there is none."""
    return next((name for name in _LAUNCHED if name in os.environ), None) if VARIABLE not in os.environ else None


def command_of(settings: Settings, words: Sequence[str]) -> list[str]:
    """The command that runs the script under the settings.

    Args:
        settings: the plan's.
        words: of Python's command line, after the interpreter: ``-m lightning_autopar run …``.
    """
    if settings.plan.world_size == 1:
        return [sys.executable, *words]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(settings.plan.world_size)]
    return [sys.executable, *launcher, *words]


def environment_of(settings: Settings, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for it: with the settings, and of the GPUs only the plan's."""
    found = settings.hand_over(environment)
    if not settings.on_cpu:
        found["CUDA_VISIBLE_DEVICES"] = ",".join(settings.plan.devices)
    return found


def relaunch(settings: Settings, words: Sequence[str]) -> None:
    """Run the script again in the place of this process, so that nothing of it is left in memory. Doesn't return."""
    command = command_of(settings, words)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.execve(command[0], command, environment_of(settings, os.environ))
