"""Small JSON files in the user's cache folder. Each is replaced as a whole, so that runs at the same time can't spoil one. Knows no
content.

A failed write costs a run nothing. Of two runs that write at the same moment, one may be lost.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

log = logging.getLogger(__name__)

Record = TypeVar("Record")

#: The variable for the cache's folder, or "off".
VARIABLE = "AUTOPAR_CACHE"
_OFF = ("off", "0", "no", "false")
#: The most files in a folder; and the largest size of a file of ours.
MOST_FILES, MOST_BYTES = 256, 1 << 20


def cache_folder(kind: str) -> Path | None:
    """The folder for files of a kind; None if AUTOPAR_CACHE is "off". It may name another folder than the user's cache."""
    asked = os.environ.get(VARIABLE, "").strip()
    if asked.lower() in _OFF:
        return None
    if asked:
        return Path(asked).expanduser() / kind
    home = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(home) if os.path.isabs(home) else Path.home() / ".cache"  # a relative path is invalid by the XDG specification
    except RuntimeError:  # no home
        return None
    return base / "lightning_autopar" / kind


def read_json(path: Path) -> Any:
    """A file's contents; None where there is no file.

    Raises:
        OSError: if it can't be read.
        ValueError: if it is no JSON, or too large to be ours.
    """
    if not path.exists():
        return None
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES} bytes")
    data = json.loads(path.read_text(encoding="utf-8"))
    if data is None:
        raise ValueError("it holds nothing")
    return data


def read_records(path: Path | None, read: Callable[[Any], Record], what: str) -> tuple[Record, ...]:
    """A file's ``records``, in order; empty where there are none, or, with a warning, where they can't be read.

    Args:
        path: the file; None where nothing is kept.
        read: makes a record of its JSON; raises ValueError where that is none.
        what: they are, for the warning.
    """
    try:
        data = None if path is None else read_json(path)
        if data is None:
            return ()
        if not isinstance(data, dict) or not isinstance(data.get("records"), list):
            raise ValueError("it holds no list of records")
        return tuple(read(each) for each in data["records"])
    except (OSError, ValueError, RecursionError) as error:
        log.warning("autopar: %s is left out: %s can't be read (%s)", what, path, error)
        return ()


def from_json(kind: type[Record], data: Any) -> Record:
    """A dataclass of its values in JSON.

    Raises:
        ValueError: if a value is missing, or isn't of its field's type.
    """
    types = _types(kind)  # type: ignore[arg-type]  # a class has a hash
    try:
        return kind(**{name: _typed(types[name], value) for name, value in data.items()})
    except (AttributeError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"not a record: {error}") from error


_types = lru_cache(get_type_hints)


def _typed(wanted: Any, value: Any) -> Any:
    if is_dataclass(wanted):
        return from_json(wanted, value)  # type: ignore[arg-type]  # an annotation is a class
    if get_origin(wanted) is tuple and isinstance(value, (list, tuple)):
        return tuple(_typed(get_args(wanted)[0], each) for each in value)
    kinds = get_args(wanted) or (wanted,)
    if float in kinds and type(value) is int:
        return float(value)
    if type(value) not in kinds:
        raise TypeError(f"{value!r} is no {wanted}")
    return value


def write_json(path: Path, data: Any) -> bool:
    """Write a file, and remove the oldest ones of its folder; returns whether that worked."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(data, file)
            os.replace(name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise
        _make_room(path.parent)
    except OSError:
        log.debug("%s can't be kept", path, exc_info=True)
        return False
    return True


def _make_room(folder: Path) -> None:
    """Remove the files that were written longest ago."""
    found = []
    for path in folder.glob("*.json"):
        with suppress(OSError):  # another run has removed it
            found.append((path.stat().st_mtime, path))
    for _, path in sorted(found)[:-MOST_FILES]:
        path.unlink(missing_ok=True)
