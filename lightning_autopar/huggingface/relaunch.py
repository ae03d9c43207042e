"""The script again, in the plan's processes, in the place of this process; each has its device's memory promised. Knows no Trainer."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from lightning_autopar.devices.discover import probe
from lightning_autopar.devices.inventory import Inventory
from lightning_autopar.huggingface.settings import VARIABLE, Settings
from lightning_autopar.sharing.ledger import Shortage, is_leased, open_ledger, room_bytes
from lightning_autopar.text import format_bytes

log = logging.getLogger(__name__)

#: Environment variables that a launcher sets for its processes.
_LAUNCHED = ("RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")


def launched_by_others() -> str | None:
    """The variable by which a launcher has told this process that it is one of several; None where there is none."""
    return next((name for name in _LAUNCHED if name in os.environ), None) if VARIABLE not in os.environ else None


def command_of(settings: Settings, words: Sequence[str]) -> list[str]:
    """The command that runs the script under the settings.

    Args:
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


@contextmanager
def promised(settings: Settings, spec: str | None) -> Iterator[None]:
    """In each of the plan's processes, before the script uses a device: while open, other runs of this host count with what it will take.

    Args:
        spec: of the devices, from the command line.
    """
    device, wanted = settings.plan.devices[int(os.environ.get("LOCAL_RANK", "0"))], settings.peak_bytes

    def found() -> Inventory:
        return probe(spec, accelerator="cpu" if settings.on_cpu else "cuda", cpu_devices=settings.plan.world_size)

    ledger = open_ledger()
    if ledger is None or not any(each.id == device and is_leased(each) for each in found().devices):
        yield
        return
    held = ledger.claim({device: wanted}, lambda: partial(room_bytes, found()), run=_name())
    if isinstance(held, Shortage):
        log.warning(
            f"autopar: this process is predicted to take {format_bytes(wanted)} of {device}, of which only {format_bytes(held.room_bytes)} "
            "are free; it starts anyway, and may run out of memory"
        )
        yield
        return
    try:
        yield
    finally:
        held.release()


def _name() -> str:
    """The run's name for others: the script and its process."""
    return f"{Path(sys.argv[0]).stem or 'python'} ({os.getpid()})"
