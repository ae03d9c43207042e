"""In a process whose PYTHONPATH begins with this folder some packages look as if they weren't installed.

Lightning's imports take five seconds of a core, of which transformers and matplotlib, which torchmetrics imports for metrics that no test
of processes uses, are more than a quarter; under torchrun each process pays that.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from importlib.machinery import ModuleSpec

_HIDDEN = frozenset({"transformers", "matplotlib", "torchvision", "scipy"})
_distribution, _find_spec = importlib.metadata.distribution, importlib.util.find_spec


def _distribution_but(name: str) -> importlib.metadata.Distribution:
    if name.lower() in _HIDDEN:
        raise importlib.metadata.PackageNotFoundError(name)
    return _distribution(name)


def _find_spec_but(name: str, package: str | None = None) -> ModuleSpec | None:
    return None if name.partition(".")[0] in _HIDDEN else _find_spec(name, package)


importlib.metadata.distribution, importlib.util.find_spec = _distribution_but, _find_spec_but
