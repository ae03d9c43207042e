"""In a process that goes on with a run: what was there before its trainer's function ran, remembered to be put back.

Knows no generation and no files.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from lightning_autopar.strategies.contents import get_items
from lightning_autopar.strategies.objects import Part, Survey
from lightning_autopar.strategies.staged.hole import is_hole
from lightning_autopar.strategies.unpacking import put

#: Tensors and arrays up to this size are remembered as they were before the trainer's function ran.
_REMEMBERED_BYTES = 1024**2

#: In a process that goes on: the parts as they were before its trainer's function ran.
_pristine: weakref.WeakKeyDictionary[Survey, dict[Part, Any]] = weakref.WeakKeyDictionary()


def remember(survey: Survey) -> None:
    """Remember the parts as they are now, except what is large."""
    _pristine[survey] = {
        (number, part): kept
        for number in survey.numbers()
        for part, value in survey.parts(number).items()
        if (kept := _kept(survey.target(number), value)) is not None
    }


def put_back(survey: Survey, parts: Iterable[Part]) -> None:
    """Make these parts what they were, those that are remembered."""
    for part in parts:
        if part in _pristine[survey]:
            put(survey, part, _pristine[survey][part][0])


def _kept(target: Any, value: Any) -> Any:
    """How a part is remembered, to be put back: a value by a tuple of one, items as they are set; None of what is large."""
    if value is not target:
        return (value,)
    if isinstance(value, Tensor) and (is_hole(value) or value.nbytes > _REMEMBERED_BYTES):
        return None
    if not isinstance(value, Tensor) and getattr(value, "nbytes", 0) > _REMEMBERED_BYTES:
        return None
    return (get_items(value),)
