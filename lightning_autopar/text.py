"""Sizes and durations as people write and read them; text from outside, made safe for a terminal or a log; and an exception in a line.

Knows no torch, device or plan.
"""

from __future__ import annotations

import math
import os
import re
import sys
import traceback
import unicodedata
from types import FrameType

from lightning_autopar._root import is_installed, is_users

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[_letter] = _UNITS[_letter + "ib"] = 1024**_power
    _UNITS[_letter + "b"] = 1000**_power

_SECONDS = {"": 1.0, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def is_number(value: object) -> bool:
    """Whether a user's argument is a number; True and False are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def parse_memory(value: int | str) -> int:
    """Bytes from ``4294967296``, ``"4GiB"``, ``"500MB"`` or ``"1.5g"`` (a bare letter counts in powers of 1024).

    Raises:
        ValueError: if the text is no size, or the size isn't positive.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        match = _SIZE.fullmatch(value) if isinstance(value, str) else None
        if match is None or match[2].lower() not in _UNITS:
            raise ValueError(f"{value!r} is no memory size; write bytes as a number or a size such as '4GiB' or '500MB'")
        size = int(float(match[1]) * _UNITS[match[2].lower()])
    if size <= 0:
        raise ValueError(f"a memory size must be positive, but {value!r} is {size} bytes; write a size such as '4GiB'")
    return size


def parse_seconds(value: float | str) -> float:
    """Seconds from ``90``, ``"90s"``, ``"30min"``, ``"2h"`` or ``"1.5d"``.

    Raises:
        ValueError: if it is no duration, or a negative one.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = float(value)
    else:
        match = _SIZE.fullmatch(value) if isinstance(value, str) else None
        if match is None or match[2].lower() not in _SECONDS:
            raise ValueError(f"{value!r} is no duration; write seconds as a number, or '90s', '30min' or '2h'")
        seconds = float(match[1]) * _SECONDS[match[2].lower()]
    if not 0 <= seconds < math.inf:
        raise ValueError(f"a duration must be 0 or more seconds, but {value!r} isn't; write one such as '30min'")
    return seconds


def format_bytes(size_bytes: float) -> str:
    """``1536`` → ``"1.5 KiB"``; three significant digits, binary units."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" or abs(size) >= 1000 else f"{size:.3g} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def format_of(size_bytes: float, whole_bytes: float) -> str:
    """``"3.1 / 3.8 GiB"``: the unit only once where both have the same."""
    amount, unit = format_bytes(size_bytes).split()
    whole = format_bytes(whole_bytes)
    return f"{amount} / {whole}" if whole.endswith(f" {unit}") else f"{amount} {unit} / {whole}"


#: Of fewer bytes a percentage says nothing: the allocator's rounding is as large.
_WORTH_A_SHARE = 1 << 20


def format_share(part_bytes: float, whole_bytes: float) -> str:
    """``"82%"``; empty where either is below 1 MiB."""
    return f"{part_bytes / whole_bytes:.0%}" if min(part_bytes, whole_bytes) >= _WORTH_A_SHARE else ""


def format_change(after_bytes: float, before_bytes: float) -> str:
    """``"+2.3%"``; of less than 1 MiB before, the difference in bytes: ``"+340 KiB"``."""
    if before_bytes >= _WORTH_A_SHARE:
        return f"{after_bytes / before_bytes - 1:+.1%}"
    return f"{'+' if after_bytes >= before_bytes else ''}{format_bytes(after_bytes - before_bytes)}"


#: From how many seconds on a longer unit is used, its seconds and its name.
_LONG = ((48 * 3600, 86400, "d"), (7200, 3600, "h"), (120, 60, "min"))


def format_seconds(seconds: float) -> str:
    """``0.0123`` → ``"12.3 ms"``."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} µs"
    if seconds < 0.9995:  # from here on, three digits of milliseconds would be 1000
        return f"{seconds * 1e3:.3g} ms"
    for least, unit_seconds, unit in _LONG:
        if seconds >= least:
            return f"{seconds / unit_seconds:.3g} {unit}" if seconds < 1000 * unit_seconds else f"{seconds / unit_seconds:.0f} {unit}"
    return f"{seconds:.3g} s"


def format_length(seconds: float) -> str:
    """``5400`` → ``"90 min"``; no fractions."""
    for least, unit_seconds, unit in _LONG:
        if seconds >= least:
            return f"{seconds / unit_seconds:.0f} {unit}"
    return f"{seconds:.0f} s"


#: Control and format characters (escape sequences, changes of direction), halves of characters, and ends of lines.
_UNFIT = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
#: What stands for each of these.
_INSTEAD = "\N{REPLACEMENT CHARACTER}"


def counted(number: int, noun: str) -> str:
    """``1 batch norm``, ``2 batch norms``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def printable(text: str, most: int = 500) -> str:
    """The text on one line, without characters that move a cursor, set a title or change the direction of writing.

    Args:
        text: anybody's.
        most: characters of it that are kept; an ellipsis says that there were more.
    """
    short = text if len(text) <= most else f"{text[: most - 1]}…"
    if short.isascii() and short.isprintable():
        return short
    return "".join(_INSTEAD if unicodedata.category(character) in _UNFIT else character for character in short)


def error_line(error: BaseException) -> str:
    """An exception in a line: its class, the first line of what it says, and the user's line that led to it."""
    said = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {said}{users_line(error)}"


def users_line(error: BaseException | None) -> str:
    """Where the user's own code was, or if none was there an installed package's, when an exception or what led to it was raised:
    ``, at file:line``, or nothing if no such code was there.
    """
    own = installed = ""
    while error is not None and not own:
        for frame, line in traceback.walk_tb(error.__traceback__):
            file = frame.f_code.co_filename
            if not is_users(frame) or file.startswith("<"):
                continue
            if is_installed(file):
                installed = f", at {os.path.basename(file)}:{line}"
            else:
                own = f", at {os.path.basename(file)}:{line}"
        error = error.__cause__ or error.__context__
    return own or installed


def running_line() -> str:
    """The innermost such line of the code that runs now, the user's own or a package's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (not is_users(frame) or frame.f_code.co_filename.startswith("<")):
        frame = frame.f_back
    return "" if frame is None else f", at {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
