"""Devices' names as people know them. Knows no plan."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_autopar.memory.inventory import Device


def device_label(device: Device) -> str:
    """A device's name as people know it: ``"cuda:0"`` rather than its UUID."""
    return f"cuda:{device.index}" if device.kind == "cuda" and device.index is not None else device.id


def devices_label(devices: Iterable[Device]) -> str:
    """Several devices' names, runs of numbers drawn together: ``"cuda:0-3,6"``."""
    runs: dict[str, list[list[int]]] = {}
    others: list[str] = []
    for label in sorted(map(device_label, devices), key=_number_last):
        name, number = _number_last(label)
        if number < 0:
            others.append(label)
        elif runs.get(name) and runs[name][-1][-1] == number - 1:
            runs[name][-1].append(number)
        else:
            runs.setdefault(name, []).append([number])
    drawn = [f"{name}:" + ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in parts) for name, parts in runs.items()]
    return ", ".join((*drawn, *others))


def _number_last(label: str) -> tuple[str, int]:
    """``"cpu:3"`` → ``("cpu", 3)``; −1 where there is no number."""
    name, _, number = label.rpartition(":")
    return (name, int(number)) if name and number.isdecimal() else (label, -1)
