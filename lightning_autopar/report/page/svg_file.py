"""Figures as one self-contained SVG file in the colours of a light page, for documents, talks and notebooks.

What is drawn comes from :mod:`.drawing`, as on the page; this module knows no report. SVG neither wraps text nor makes room for it, so
places are computed here from a generous guess at the width of words.
"""

from __future__ import annotations

import hashlib
import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_autopar.report.page.drawing import SWATCH_PIXELS, Figure, Row
from lightning_autopar.report.page.markup import Html, element, join, write
from lightning_autopar.report.page.style import pattern, picture_style

_WIDTH, _EDGE, _GAP, _ROW_GAP = 1100, 20, 12, 7
#: The greatest width of names before the rows and words after them; longer ones are wrapped.
_MOST_SIDE = 210
#: For words: the height of a line, and the largest average width of a character, as shares of the font size.
_LINE_SHARE, _CHARACTER_SHARE = 1.35, 0.58
#: The font sizes in the style sheet.
_TITLE, _HEADING, _WORDS = 20.0, 16.0, 13.0
#: Characters that XML 1.0 doesn't allow, not even escaped; a user's text may have them.
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class Picture:
    """A drawing as SVG. A notebook shows it as a cell's last value.

    Args:
        svg: the whole file.
    """

    def __init__(self, svg: str) -> None:
        self.svg = svg

    def save(self, path: str | Path) -> None:
        """Write it to a file.

        Raises:
            ValueError: if the path's ending isn't ``.svg``, or the file can't be written.
        """
        if is_page(path):
            raise ValueError(f"the picture's file {str(path)!r} must end in '.svg'; for a page call save_picture of the report")
        write(self.svg, path)

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"<Picture: {len(self.svg):,} characters of SVG; save('plan.svg') writes it>"


def is_page(path: str | Path) -> bool:
    """Whether a file's ending names a page rather than a picture.

    Raises:
        ValueError: if that names neither.
    """
    ending = Path(path).suffix.lower()
    if ending not in (".svg", ".html", ".htm"):
        raise ValueError(
            f"the picture's file {str(path)!r} has an ending that names no format; choose '.svg' for a picture or '.html' for a page"
        )
    return ending != ".svg"


def save(path: str | Path, *, picture: Callable[[], Picture], page: Callable[[], str]) -> None:
    """Write a picture or a page, as the path's ending says.

    Raises:
        ValueError: if it names neither, or the file can't be written.
    """
    write(page() if is_page(path) else picture().svg, path)


def picture_of(title: str, figures: Sequence[Figure]) -> Picture:
    """The figures one below the other."""
    title = _NO_XML.sub("�", title)
    drawn, height = _lines(title, _EDGE, _EDGE, _TITLE, _WIDTH - 2 * _EDGE, class_="title")
    place = _EDGE + height
    side = [row for figure in figures for row in figure.rows]
    names = max((_wide(line, _WORDS) for row in side for line in _wrapped(row.name, _WORDS, _MOST_SIDE)), default=0.0)
    words = max((_wide(line, _WORDS) for row in side for said, _ in row.words for line in _wrapped(said, _WORDS, _MOST_SIDE)), default=0.0)
    for figure in figures:
        parts, place = _figure(figure, place, names, words)
        drawn += parts
    inner = Html(_NO_XML.sub("�", join(drawn)))
    scope = "autopar-" + hashlib.sha256(inner.encode()).hexdigest()[:10]
    tall = round(place + _EDGE)
    whole = element(
        "svg",
        element("title", title),
        element("style", Html(picture_style(scope, f"{scope}-hatch"))),
        Html(pattern(f"{scope}-hatch")),
        element("rect", class_="paper", width=_WIDTH, height=tall),
        inner,
        xmlns="http://www.w3.org/2000/svg",
        id=scope,
        role="img",
        width=_WIDTH,
        height=tall,
        viewBox=f"0 0 {_WIDTH} {tall}",
    )
    return Picture(whole)


def _figure(figure: Figure, place: float, names: float, words: float) -> tuple[list[Html], float]:
    """A figure that begins at a place, and where it ends."""
    left = _EDGE + names + (_GAP if names else 0)
    wide = _WIDTH - _EDGE - left - words - (_GAP if words else 0)
    drawn: list[Html] = []

    def tell(said: str, size: float, class_: str, above: float = 0.0) -> None:
        nonlocal place
        parts, height = _lines(said, _EDGE, place + above, size, _WIDTH - 2 * _EDGE, class_=class_)
        drawn.extend(parts)
        place += above + height

    tell(figure.title, _HEADING, "heading", above=14)
    if figure.caption:
        tell(figure.caption, _WORDS, "soft")
    parts, place = _legend(figure.legend, place + 4)
    drawn += parts
    for row in figure.rows:
        parts, height = _row(row, left, place + _ROW_GAP, wide)
        drawn += parts
        place += height + _ROW_GAP
    if figure.axis is not None:
        drawn.append(_chart(figure.axis, left, place + _ROW_GAP, wide))
        place += figure.axis.height + _ROW_GAP
    for note in figure.notes:
        tell(note, _WORDS, "note", above=3)
    return drawn, place


def _row(row: Row, left: float, place: float, wide: float) -> tuple[list[Html], float]:
    """A row's name, drawing and words, vertically centred; and its height."""
    tall = _WORDS * _LINE_SHARE
    names = [(line, None) for line in _wrapped(row.name, _WORDS, _MOST_SIDE)]
    words = [(line, class_) for said, class_ in row.words for line in _wrapped(said, _WORDS, _MOST_SIDE)]
    height = max(row.height, tall * len(names), tall * len(words))
    drawn = [_chart(row, left, place + (height - row.height) / 2, wide)]
    for lines, at in ((names, float(_EDGE)), (words, left + wide + _GAP)):
        first = place + (height - tall * len(lines)) / 2
        drawn += [_text(line, at, first + tall * index, _WORDS, class_) for index, (line, class_) in enumerate(lines)]
    return drawn, height


def _chart(row: Row, left: float, place: float, wide: float) -> Html:
    label = element("title", row.label) if row.label else None
    return element("svg", label, *row.drawn, x=left, y=place, width=wide, height=float(row.height), class_=row.class_)


def _legend(marks: Sequence[tuple[str, str]], place: float) -> tuple[list[Html], float]:
    """Colours with their words, as many in a line as fit."""
    drawn: list[Html] = []
    at, tall = float(_EDGE), SWATCH_PIXELS + 7
    for class_, words in marks:
        takes = SWATCH_PIXELS + 6 + _wide(words, _WORDS)
        if at > _EDGE and at + takes > _WIDTH - _EDGE:
            at, place = float(_EDGE), place + tall
        size = {"width": SWATCH_PIXELS, "height": SWATCH_PIXELS}
        drawn.append(element("rect", class_=class_, x=at, y=place + 2.0, **size))
        drawn.append(_text(words, at + SWATCH_PIXELS + 6, place, _WORDS, None))
        at += takes + 16
    return drawn, place + tall if marks else place


def _lines(said: str, left: float, place: float, size: float, wide: float, *, class_: str) -> tuple[list[Html], float]:
    """A text in as many lines as it needs, and their height."""
    tall = size * _LINE_SHARE
    lines = _wrapped(said, size, wide)
    return [_text(line, left, place + tall * index, size, class_) for index, line in enumerate(lines)], tall * len(lines)


def _text(words: str, left: float, place: float, size: float, class_: str | None) -> Html:
    """A line of text whose upper edge is at a place."""
    # The baseline, with the line's leading divided above and below.
    return element("text", words, x=left, y=place + size * (_LINE_SHARE / 2 + 0.36), class_=f"words {class_ or ''}".strip())


def _wrapped(words: str, size: float, wide: float) -> list[str]:
    return textwrap.wrap(words, max(1, int(wide / (size * _CHARACTER_SHARE))))


def _wide(words: str, size: float) -> float:
    return len(words) * size * _CHARACTER_SHARE
