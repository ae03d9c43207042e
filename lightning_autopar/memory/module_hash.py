"""A module's identity as far as memory goes: its structure and its code, not its values."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn

_FOREIGN = ("torch.", "lightning.", "builtins")


def module_hash(module: nn.Module) -> str:
    """A digest of names, classes, shapes and dtypes of all parts, and of the source of the module's class and of each part's ``forward``.

    Two modules with the same digest take the same memory for the same batch, unless something outside of them says otherwise.

    Args:
        module: as it is before a run, whole.
    """
    digest = hashlib.sha256()
    for line in _lines(module):
        digest.update(line.encode(errors="backslashreplace"))
        digest.update(b"\0")
    return digest.hexdigest()


def _lines(module: nn.Module) -> Iterator[str]:
    classes: dict[type, None] = {}
    for name, part in module.named_modules():
        classes[type(part)] = None
        yield f"{name}: {type(part).__module__}.{type(part).__qualname__}"
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield f"{name}: {tuple(parameter.shape)} {parameter.dtype} {parameter.requires_grad}"
    for name, buffer in module.named_buffers(remove_duplicate=False):
        yield f"{name}: {tuple(buffer.shape)} {buffer.dtype}"
    for base in type(module).__mro__:
        if not f"{base.__module__}.".startswith(_FOREIGN):
            yield _source(base)
    for each in classes:
        yield _source(getattr(each, "forward", None))


def _source(code: Any) -> str:
    """Its text; nothing where there is none, as for what was typed into an interpreter."""
    try:
        return inspect.getsource(code)
    except (OSError, TypeError, IndentationError):
        return ""
