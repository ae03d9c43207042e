"""HTML and inline SVG from values: elements, pages, fragments, figures of rows. This module alone escapes what isn't markup.

It knows no report, nor how anything looks: that is :mod:`.style`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_autopar.report.page.style import hatching, page_style, style

if TYPE_CHECKING:
    from lightning_autopar.report.table import Figures

_VOID = frozenset({"meta", "rect", "line", "path", "col", "polyline", "circle"})


class Html(str):
    """Text that is safe markup: other text is escaped before it becomes part of it."""

    __slots__ = ()


def element(name: str, /, *children: str | None, **attributes: str | float | bool | None) -> Html:
    """``<name attributes>children</name>``.

    Args:
        children: markup as it is, text escaped; None is left out.
        attributes: ``class_`` is ``class``, and ``aria_label`` is ``aria-label``; one that is None or False is left out, True has no value.
    """
    words = [name]
    for key, value in attributes.items():
        attribute = key.rstrip("_").replace("_", "-")
        if value is None or value is False:
            continue
        words.append(attribute if value is True else f'{attribute}="{escape(_number(value) if isinstance(value, float) else str(value))}"')
    opened = " ".join(words)
    if name in _VOID and not children:
        return Html(f"<{opened}/>")
    return Html(f"<{opened}>{join(children)}</{name}>")


def join(parts: Iterable[str | None]) -> Html:
    """The children one after the other; text that isn't markup is escaped."""
    return Html("".join(part if isinstance(part, Html) else escape(part) for part in parts if part is not None))


def _number(value: float) -> str:
    """A number, as short as drawing allows."""
    return f"{value:.6g}"


def share(part: float, whole: float) -> str:
    """A place on an axis, in per cent of it: to a hundredth, which is a tenth of a pixel."""
    return f"{100 * part / whole if whole else 0.0:.2f}".rstrip("0").rstrip(".") + "%"


def percent(part: float) -> str:
    """A share in words: ``"0.26 %"``, ``"7.3 %"``, ``"84 %"``."""
    return f"{100 * part:.0f} %" if part >= 0.0995 else f"{100 * part:.2g} %"


def rect(start: float, end: float, whole: float, *, class_: str, y: float = 0, height: float, title: str | None = None) -> Html:
    """A bar from one place on an axis to another, with a tooltip."""
    children = [] if title is None else [element("title", title)]
    return element("rect", *children, class_=class_, x=share(start, whole), y=y, width=share(end - start, whole), height=height)


def text(words: str, at: str, y: float, *, class_: str | None = None, anchor: str | None = None) -> Html:
    """Words in a drawing; ``at`` is in per cent."""
    return element("text", words, x=at, y=y, class_=class_, text_anchor=anchor)


def chart(height: float, label: str, *children: str, class_: str | None = None) -> Html:
    """A drawing as wide as there is room: its children's places are in per cent across, in pixels down, so that words keep their size.

    Args:
        height: in pixels.
    """
    return element("svg", *children, role="img", aria_label=label, width="100%", height=height, class_=class_)


def figures(corner: str, table: Figures) -> Html:
    """A table of figures; ``corner`` is said above the rows' names."""
    head = element("tr", element("th", corner, scope="col"), *(element("th", title, scope="col") for title in table.columns))
    rows = [
        element("tr", element("th", name, scope="row"), *(element("td", words) for words in cells), class_="sum" if strong else None)
        for name, cells, strong in table.rows
    ]
    drawn = element("table", element("thead", head), element("tbody", *rows), class_="figures")
    # It may be wider than the page, and scrolls separately, also by the keyboard.
    return element("div", drawn, class_="scroll", role="region", aria_label=table.title, tabindex="0")


def fragment(body: Sequence[str]) -> Html:
    """Markup for a place in another page: its style doesn't change that page, and the page's style doesn't change it.

    Args:
        body: may name the hatching ``url(#HATCH)``; that gets a name of its own, as two fragments may stand on one page.
    """
    inner = join(body)
    # The id depends only on the content, so that a file or a notebook that is written again doesn't change.
    scope = "autopar-" + hashlib.sha256(inner.encode()).hexdigest()[:10]
    hatch = f"{scope}-hatch"
    return element("div", element("style", Html(style(scope, hatch))), Html(hatching(hatch)), inner, id=scope)


def page(title: str, body: Sequence[str]) -> Html:
    """A whole page without external files."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Html(page_style())),
    )
    return Html("<!DOCTYPE html>\n" + element("html", head, element("body", element("main", fragment(body))), lang="en") + "\n")


def check_file(path: str | Path) -> None:
    """Refuse a file that isn't named as a page.

    Raises:
        ValueError: if its ending is another one.
    """
    if Path(path).suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"the picture's file {str(path)!r} must end in '.html': it is a page")


def write(markup: str, path: str | Path) -> None:
    """A page as a file.

    Raises:
        ValueError: if its ending is another one, or it can't be written.
    """
    check_file(path)
    try:
        Path(path).write_text(markup, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{str(path)!r} can't be written ({error.strerror}); give a path in a folder that is there") from error


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
