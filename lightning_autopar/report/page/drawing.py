"""A drawing as values: rows with a name on the left and words on the right, a legend above, an axis below; and how a page shows it.

Knows no report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_autopar.report.page.markup import Html, chart, element, join, share, text

AXIS_PIXELS, SWATCH_PIXELS = 20, 13
#: The share at the axis' end that has no number, as it would be cut off there.
_LAST_TICK = 0.96


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of a figure.

    Args:
        name: what stands before it.
        height: of what is drawn, in pixels.
        label: what it shows, for those who can't see it; none for an axis.
        drawn: markup whose places are in per cent across and in pixels down.
        words: what stands behind it, line by line, each with its class.
    """

    name: str = ""
    height: float
    label: str = ""
    drawn: tuple[Html, ...]
    words: tuple[tuple[str, str | None], ...] = ()
    class_: str | None = None

    def html(self) -> Html:
        """The cells of a page's grid."""
        said = [part for words, class_ in self.words for part in (element("span", words, class_=class_), " ")]
        return join(
            [
                element("div", self.name, class_="name"),
                chart(self.height, self.label, *self.drawn, class_=self.class_),
                element("div", *said, class_="words"),
            ]
        )


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Rows drawn one below the other on one axis.

    Args:
        caption: how it is to be read.
        legend: classes of colours, and what they mean.
        notes: lines below all of it.
    """

    title: str
    caption: str = ""
    legend: tuple[tuple[str, str], ...] = ()
    rows: tuple[Row, ...] = ()
    axis: Row | None = None
    notes: tuple[str, ...] = ()

    def html(self, heading: str = "h2") -> Html:
        """The markup for a page: the title as a heading, then the rest."""
        parts = [element(heading, self.title)]
        parts += [element("p", self.caption, class_="soft")] if self.caption else []
        parts += [_legend(self.legend)] if self.legend else []
        if self.rows:
            below = []
            if (low := self.axis) is not None:
                below = [element("svg", *low.drawn, class_=low.class_, width="100%", height=low.height, aria_hidden="true")]
            parts.append(element("div", *(row.html() for row in self.rows), *below, class_="rows"))
        return join([*parts, *(element("p", note, class_="soft") for note in self.notes)])


def axis(end: float, unit: str) -> Row:
    """Round numbers below the rows, of which narrow pages show every second one.

    Args:
        end: of the axis, in the unit.
        unit: its name, which the last number has.
    """
    places = [place for place in ticks(end, about=6) if place <= _LAST_TICK * end]
    drawn: list[Html] = []
    for index, place in enumerate(places):
        at, last = share(place, end), place == places[-1]
        anchor = "start" if place == 0 else "end" if last else "middle"
        class_ = "soft wide" if index % 2 and not last else "soft"
        words = f"{place:.4g} {unit}" if last else f"{place:.4g}"
        drawn += [element("line", class_="tick", x1=at, x2=at, y1=0, y2=5), text(words, at, 17, class_=class_, anchor=anchor)]
    return Row(height=AXIS_PIXELS, drawn=tuple(drawn), class_="axis")


def ticks(end: float, about: int = 5) -> list[float]:
    """Round numbers from 0 up to the end of an axis, about so many."""
    if end <= 0:
        return [0.0]
    power = 10.0 ** (len(f"{end / about:.0f}") - 1) if end / about >= 1 else 1.0
    while power > end / about:
        power /= 10
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= end / about * 0.75)
    return [index * step for index in range(int(end / step) + 1)]


def _legend(marks: Sequence[tuple[str, str]]) -> Html:
    """The meaning of colours: their classes, and words."""
    size = {"width": SWATCH_PIXELS, "height": SWATCH_PIXELS}
    items = [
        element("li", element("svg", element("rect", class_=class_, **size), aria_hidden="true", **size), words) for class_, words in marks
    ]
    return element("ul", *items, class_="legend", role="list")
