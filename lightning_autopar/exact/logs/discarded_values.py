"""Whether the user's code throws a metric's value away, as in ``self.accuracy(y, target)``. The code of the running call tells.

Where the code doesn't tell, the value counts as used. Knows frames and metrics; nothing of what is exchanged.
"""

from __future__ import annotations

import ast
import dis
import linecache
import sys
import types
from functools import lru_cache
from itertools import islice
from typing import Any

from torchmetrics import Metric, MetricCollection

_FORWARDS = ("forward", "_forward", "_forward_full_state_update", "_forward_reduce_state_update")
_BETWEEN = ("torchmetrics.", "torch.", "lightning_autopar.", "contextlib.", "functools.")


def is_thrown_away(metric: Metric) -> bool:
    """Whether the metric's ``forward`` needs the states, and its caller, also through a collection, discards its value."""
    frame, forward = sys._getframe(2), False
    while f"{frame.f_globals.get('__name__')}.".startswith(_BETWEEN):
        owner = frame.f_locals.get("self")
        if isinstance(owner, Metric) and owner is not metric:
            return False  # another metric is computed from this one's value
        forward |= frame.f_code.co_name in _FORWARDS
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return forward and _drops(frame.f_code, frame.f_lasti) and _calls(frame, metric)


@lru_cache(maxsize=256)
def _drops(code: types.CodeType, place: int) -> bool:
    """Whether the caller there discards the call's result at once."""
    return next((each.opname for each in dis.get_instructions(code) if each.offset > place), "") == "POP_TOP"


def _calls(frame: types.FrameType, metric: Metric) -> bool:
    """Whether the call that runs there is one of the metric, or of a collection with it: ``values.extend(map(self.accuracy, …))`` isn't.

    Judged by the source of the call; without source, the value counts as used, which is safe and costs an exchange.
    """
    names = _called(frame.f_code, frame.f_lasti)
    if names is None:
        return False
    try:
        found: Any = frame.f_locals[names[0]] if names[0] in frame.f_locals else frame.f_globals[names[0]]
        for name in names[1:]:
            found = found[name[0]] if isinstance(name, tuple) else getattr(found, name)
    except (AttributeError, LookupError, TypeError):
        return False
    found = getattr(found, "__self__", found)
    return found is metric or (isinstance(found, MetricCollection) and any(each is metric for each in found.modules()))


@lru_cache(maxsize=256)
def _called(code: types.CodeType, place: int) -> tuple[Any, ...] | None:
    """The called object there, as names: attributes, and keys in tuples; None where the source doesn't show it."""
    positions = getattr(code, "co_positions", None)  # of Python 3.11 and later
    if positions is None:
        return None
    first, last, begin, end = next(islice(positions(), place // 2, None), (None,) * 4)
    if first is None or last is None or begin is None:
        return None
    lines = [line.encode() for line in linecache.getlines(code.co_filename)[first - 1 : last]]
    if not lines:
        return None
    lines[-1] = lines[-1][:end]
    try:
        call = ast.parse(b"(" + b"".join(lines)[begin:] + b")", mode="eval").body
    except (SyntaxError, ValueError):
        return None
    names: list[Any] = []
    node: ast.expr | None = call.func if isinstance(call, ast.Call) else None
    while node is not None:
        if isinstance(node, ast.Name):
            return (node.id, *reversed(names))
        if isinstance(node, ast.Attribute):
            names.append(node.attr)
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            names.append((node.slice.value,))
        else:
            return None
        node = node.value
    return None
