"""What all pictures share: their colours, matplotlib without anybody's settings, and how a figure becomes a file.

It draws nothing itself, and knows neither reports nor runs. matplotlib is optional (``pip install 'lightning-autopar[report]'``).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Every colour is a picture's own, so that neither a dark page nor somebody's matplotlibrc makes it unreadable.
PAPER, INK, FAINT, ALARM = "#fbfbf9", "#24292f", "#b9bdc3", "#c62828"
#: What other processes hold of a device.
HELD = "#e4e5e8"
#: Of bytes by category. Okabe and Ito's palette, which people with any colour vision can tell apart. What isn't named here is "other".
CATEGORIES: Mapping[str, str] = {
    "parameters": "#0072b2",
    "gradients": "#e69f00",
    "optimizer": "#009e73",
    "activations": "#d55e00",
    "temporary": "#cc79a7",
    "communication": "#56b4e9",
    "context": "#6b6f76",
    "rounding": "#a9adb3",
}
OTHER = "#8a6d3b"
#: Of what a rank does during a step.
KINDS: Mapping[str, str] = {
    "forward": "#0072b2",
    "backward": "#e69f00",
    "recompute": "#cc79a7",
    "communication": "#56b4e9",
    "optimizer": "#009e73",
    "offload": "#8a6d3b",
    "input": "#6b6f76",
    "idle": "#ffffff",
}
#: Of a run's memory, and of the plans that ran; these are light, so that dark words are read on them.
OURS, OTHERS = "#0072b2", "#b0a99a"
PLANS = ("#8cc5e8", "#f3c567", "#7fcdb5", "#eda680", "#e0b4cf", "#d9d07a", "#b7c0cc", "#c9a98f")


def own_matplotlib(*, instead: str = "") -> tuple[type[Figure], Any]:
    """The class of figures, which belong to no window and no pyplot, and a context in which only our own settings count.

    Args:
        instead: what to do without matplotlib, for the message.

    Raises:
        ValueError: if it isn't installed.
    """
    try:
        from matplotlib import style
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            f"the picture needs matplotlib, which isn't installed; pip install 'lightning-autopar[report]'{instead and ', or ' + instead}"
        ) from error
    # The text of an SVG stays text, with names for its identifiers that are the same each time.
    ours = {"text.color": INK, "axes.labelcolor": INK, "hatch.color": FAINT, "hatch.linewidth": 0.6}
    return Figure, style.context(["default", {**ours, "svg.fonttype": "none", "svg.hashsalt": "autopar"}])


def is_page(path: str | Path) -> bool:
    """Whether a picture's file is to be an HTML page, by its ending."""
    return Path(path).suffix.lower() in (".html", ".htm")


def write(figure: Figure, path: str | Path) -> None:
    """The figure as a file, in the format that its ending names; the same figure gives the same file.

    Raises:
        ValueError: if the ending names no format that matplotlib writes, or the file can't be written.
    """
    ending = Path(path).suffix.lstrip(".").lower()
    if ending not in figure.canvas.get_supported_filetypes():
        raise ValueError(f"the picture's file {str(path)!r} has an ending that names no format; choose '.png', '.svg', '.pdf' or '.html'")
    try:
        with own_matplotlib()[1]:
            # Without the date, which would be another each time.
            figure.savefig(path, format=ending, dpi=150, facecolor=PAPER, metadata={"Date": None} if ending == "svg" else None)
    except OSError as error:
        raise ValueError(
            f"the picture can't be written to {str(path)!r} ({error.strerror}); give a path in a folder that is there"
        ) from error
