"""Text of somebody else's, made fit for a terminal or a log. Knows nothing of what it says."""

from __future__ import annotations

import unicodedata

#: Control and format characters (escape sequences, changes of direction), halves of characters, and ends of lines.
_UNFIT = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
#: For each of these.
_INSTEAD = "\N{REPLACEMENT CHARACTER}"


def printable(text: str, most: int = 500) -> str:
    """The text on one line, without what would move a cursor, set a title or turn the direction of writing.

    Args:
        text: anybody's.
        most: characters of it that are kept; an ellipsis says that there were more.
    """
    short = text if len(text) <= most else f"{text[: most - 1]}…"
    if short.isascii() and short.isprintable():
        return short
    return "".join(_INSTEAD if unicodedata.category(character) in _UNFIT else character for character in short)
