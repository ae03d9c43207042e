"""HTML and inline SVG from values: elements, pages and fragments. This module alone escapes what isn't markup.

It knows no report, nor how anything looks: that is :mod:`.style`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
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
