"""The end of a sweep, when no run waits any more and devices fall idle: which of the runs that can move should get them. Reads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_autopar.sharing.sweep.jobs import Job, RunOption, SweepDevice
from lightning_autopar.sharing.sweep.scheduler import Listing


@dataclass(frozen=True, kw_only=True)
class Underway:
    """A run that is on.

    Args:
        job: with its ways, whose seconds are of the whole run.
        devices: that it has.
        left_share: how much of its work is left, from 0 to 1.
        left_seconds: how long it takes from now on as it is.
        elastic: whether it can be given other devices.
    """

    job: Job
    devices: tuple[str, ...]
    left_share: float
    left_seconds: float
    elastic: bool = False


def widened(
    underway: Sequence[Underway], idle: Sequence[SweepDevice], devices: Sequence[SweepDevice], *, move_seconds: float
) -> dict[str, tuple[str, ...]]:
    """The devices that runs get from now on, because they are over sooner there; by the job's name, only those that change. The run that
    would be over last chooses first. A run keeps the devices that it has.

    Args:
        underway: all that is on.
        idle: devices that nobody has or waits for.
        devices: all of them.
        move_seconds: what a move costs.
    """
    left = {device.id: device for device in idle}
    found: dict[str, tuple[str, ...]] = {}
    for run in sorted(underway, key=lambda run: -run.left_seconds):
        if not run.elastic or not left:
            continue
        own = [device for device in devices if device.id in run.devices]
        listing_devices = [*own, *left.values()]
        best_seconds, best_way = run.left_seconds, None
        for option in run.job.options:
            seconds = move_seconds + run.left_share * option.seconds
            if len(option.needs) > len(own) and seconds < best_seconds and _fits(option, run.job, listing_devices):
                best_seconds, best_way = seconds, option
        if best_way is None:
            continue
        busy = {device.id: 1.0 for device in left.values()}  # its own devices first
        chosen = Listing([Job(name=run.job.name, options=(best_way,))], listing_devices, busy).schedule([0], [0]).placed[0].devices
        found[run.job.name] = tuple(dict.fromkeys([*run.devices, *chosen]))
        for device in chosen:
            left.pop(device, None)
    return found


def _fits(option: RunOption, job: Job, devices: Sequence[SweepDevice]) -> bool:
    try:
        Listing([Job(name=job.name, options=(option,))], devices)
    except ValueError:
        return False
    return True
