"""A box's timeline as a picture: what each device is leased to, and below it what each run does.

Run as ``python scenario_picture.py BOX.json OUT.png``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from matplotlib import style
from matplotlib.figure import Figure

from lightning_autopar.report.page.style import ALARM, FAINT, INK, PAPER

_MIB = 1 << 20
#: Colours of runs, on which dark words can be read, and of what others take.
_PLANS = ("#8cc5e8", "#f3c567", "#7fcdb5", "#eda680", "#e0b4cf", "#d9d07a", "#b7c0cc", "#c9a98f")
_OTHERS = "#b0a99a"
_STATES = {"queued": ("#ffffff", "//"), "parked": ("#e4e5e8", ".."), "moving": (ALARM, None), "planning": (FAINT, None)}


def draw(box: dict[str, Any], path: Path) -> None:
    """One row a device, then one a run; a run has the same colour in both."""
    samples: Sequence[dict[str, Any]] = box["samples"]
    names = [spec["name"] for spec in sorted(box["specs"], key=lambda spec: spec["at_seconds"])]
    colours = dict(zip(names, _PLANS, strict=False))
    times = [sample["at"] for sample in samples]
    with style.context("default"):
        figure = Figure(figsize=(11, 7.5), facecolor=PAPER)
        rows = figure.subplots(4, 1, sharex=True, gridspec_kw={"height_ratios": [1, 1, 1, 2.2], "hspace": 0.28})
        for axes, device in zip(rows, ("cpu:0", "cpu:1", "cpu:2"), strict=False):
            heights = [[sample["leases"].get(name, {}).get(device, 0) / _MIB for sample in samples] for name in names]
            heights.append([sample["taken"].get(device, 0) / _MIB for sample in samples])
            axes.stackplot(times, heights, colors=[*colours.values(), _OTHERS], step="post", linewidth=0)
            axes.axhline(box["device_bytes"] / _MIB, color=ALARM, linewidth=1)
            axes.set_ylabel(f"{device}, MiB", color=INK)
            axes.set_ylim(0, 1.08 * box["device_bytes"] / _MIB)
        _runs(rows[3], samples, box["specs"], names, colours)
        rows[3].set_xlabel("seconds", color=INK)
        rows[0].set_title(
            "six runs and a stranger (grey) on three devices: what is leased on each, and what each run does", loc="left", fontsize=10
        )
        for axes in rows:
            axes.set_facecolor(PAPER)
            axes.set_xlim(0, times[-1])
        figure.savefig(path, dpi=150, facecolor=PAPER)


def _runs(axes: Any, samples: Sequence[dict[str, Any]], specs: Sequence[dict[str, Any]], names: list[str], colours: dict[str, str]) -> None:
    """A bar of states for each run, with the devices that it is on."""
    priorities = {spec["name"]: f"{spec['name']} ({spec['priority']}{', elastic' if spec['elastic'] else ''})" for spec in specs}
    for row, name in enumerate(names):
        for state, begun, ended, words in _spans(samples, name):
            colour, hatch = _STATES.get(state, (colours[name], None))
            axes.barh(row, ended - begun, left=begun, height=0.72, color=colour, hatch=hatch, edgecolor=INK, linewidth=0.4)
            if state == "running" and ended - begun > 1.5:
                axes.text(begun + 0.1, row, words, va="center", fontsize=7, color=INK, clip_on=True)
    axes.set_yticks(range(len(names)), [priorities[name] for name in names], fontsize=8)
    axes.invert_yaxis()


def _spans(samples: Sequence[dict[str, Any]], name: str) -> list[tuple[str, float, float, str]]:
    """Times in which a run was in one state on the same devices."""

    def key(sample: dict[str, Any]) -> tuple[str, str] | None:
        found = sample["runs"].get(name)
        if found is None:
            return None
        return found[0], " ".join(device[-1] for device in sorted(sample["leases"].get(name, {})))

    found = []
    marked = [(sample["at"], key(sample)) for sample in samples]
    ends = [at for at, _ in marked[1:]] + [marked[-1][0]]
    for what, group in groupby(zip(marked, ends, strict=True), key=lambda each: each[0][1]):
        parts = list(group)
        if what is not None:
            found.append((what[0], parts[0][0][0], parts[-1][1], f"on {what[1]}" if what[1] else ""))
    return found


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
