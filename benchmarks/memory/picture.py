"""The picture of the memory benchmark: each job's error, ours and the others', on a logarithmic scale. Readable on light and dark pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_INK = "#808890"
_OURS = "#2a9d5c"
_MARKERS = {
    "MemTracker": ("D", "#d9822b"),
    "DeepSpeed ZeRO-2": ("v", "#7b6fd0"),
    "accelerate": ("s", "#c0508f"),
    "16 bytes a parameter": ("x", _INK),
}
#: Smaller errors are drawn here.
_LEAST = 1e-4


def draw(report: dict[str, Any], out: Path) -> None:
    """One row a job, the best predicted at the top."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    jobs = sorted(report["jobs"].items(), key=lambda item: -abs(item[1]["error"]))
    rows = range(len(jobs))
    figure, axes = pyplot.subplots(figsize=(9.5, 0.185 * len(jobs) + 1.8))
    for bound, text in ((0.1, "0.1 %"), (1, "1 %"), (5, "5 %")):
        axes.axvline(bound, color=_INK, linewidth=0.7, linestyle=(0, (4, 4)), zorder=0)
        axes.text(bound, len(jobs) + 0.1, text, color=_INK, fontsize=7, ha="center", va="bottom")
    for name, (marker, color) in _MARKERS.items():
        points = [
            (row, job["rivals"][name]["error"]) for row, (_, job) in zip(rows, jobs, strict=True) if "error" in job["rivals"].get(name, {})
        ]
        axes.scatter(
            [_percent(error) for _, error in points],
            [row for row, _ in points],
            marker=marker,
            s=46 if marker == "D" else 17,
            color=color,
            label=name,
            linewidths=1,
        )
    axes.scatter([_percent(job["error"]) for _, job in jobs], rows, marker="o", s=20, color=_OURS, label="lightning-autopar", zorder=3)
    flagged = [(row, job["error"]) for row, (_, job) in zip(rows, jobs, strict=True) if job["flagged"]]
    if flagged:
        places = [_percent(error) for _, error in flagged], [row for row, _ in flagged]
        axes.scatter(*places, marker="o", s=90, facecolors="none", edgecolors=_OURS, label="… which said that it was guessing")
    axes.set_xscale("log")
    axes.set_xlim(_LEAST * 0.7, 1000)
    axes.set_ylim(-1, len(jobs))
    axes.set_yticks(list(rows), [name for name, _ in jobs], fontsize=7)
    axes.set_xticks(
        [0.0001, 0.001, 0.01, 0.1, 1, 10, 100, 1000], ["≤ 0.0001 %", "0.001 %", "0.01 %", "0.1 %", "1 %", "10 %", "100 %", "1000 %"]
    )
    axes.minorticks_off()
    axes.set_xlabel("error against the measured peak of a training step on the CPU", color=_INK, fontsize=9)
    axes.tick_params(colors=_INK, labelsize=7, length=2)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.grid(axis="y", color=_INK, alpha=0.18, linewidth=0.5)
    axes.legend(loc="lower center", bbox_to_anchor=(0.42, 1.01), ncols=3, frameon=False, labelcolor=_INK, fontsize=8)
    figure.savefig(out, dpi=150, transparent=True, bbox_inches="tight")
    pyplot.close(figure)


def _percent(error: float) -> float:
    return max(_LEAST, 100 * abs(error))
