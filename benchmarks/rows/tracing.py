"""Footprints of what rows ask, each traced once and kept on disk. Knows questions; no row and no plan."""

from __future__ import annotations

import hashlib
import pickle
import re
import warnings
from functools import lru_cache
from pathlib import Path

import lightning_autopar.memory
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.trace.trace import trace
from rows.question import Question
from rows.shape import Shape
from rows.taller import FEWER, fewest, taller

#: Models of at most so many blocks are traced whole.
_LOW = 8
#: Where a footprint comes from: the trace, and the module that is traced.
_ORIGINS = ("lightning_autopar.memory.trace.trace", "rows.question")
_IMPORTED = re.compile(r"^\s*(?:from|import) ((?:lightning_autopar|rows)(?:\.\w+)*)(?: import \(?([\w, ]*))?", re.MULTILINE)


def sources() -> dict[str, bytes]:
    """The modules of the package and of this folder that the trace and the question import, and theirs in turn, by name."""
    roots = {"lightning_autopar": Path(lightning_autopar.memory.__file__).parents[1], "rows": Path(__file__).parent}
    found: dict[str, bytes] = {}
    waiting = list(_ORIGINS)
    while waiting:
        name = waiting.pop()
        root, *rest = name.split(".")
        file = roots[root].joinpath(*rest).with_suffix(".py")
        if name in found or not rest or not file.is_file():
            continue
        found[name] = file.read_bytes()
        for module, names in _IMPORTED.findall(found[name].decode()):
            waiting += [module, *(f"{module}.{one.strip().split(' ')[0]}" for one in names.split(",") if one.strip())]
    return found


@lru_cache(maxsize=1)
def code_digest() -> str:
    """Of all code that a footprint depends on."""
    digest = hashlib.sha256()
    for name, code in sorted(sources().items()):
        digest.update(name.encode() + code)
    return digest.hexdigest()


class Footprints:
    """Traces, and what became of them.

    Args:
        folder: where they are kept; None for nowhere.
        digest: of the code that made them.
    """

    def __init__(self, folder: Path | None, digest: str) -> None:
        self.folder = folder
        self.digest = digest
        self._known: dict[tuple[Question, bool], Footprint] = {}

    def of(self, asked: Question, *, whole: bool) -> Footprint:
        """The footprint of a micro-batch.

        Args:
            asked: what.
            whole: traced block by block rather than extended from a few blocks.
        """
        shape = asked.shape
        # Where blocks take turns in what they do, none is like the one before it.
        alike = isinstance(shape, Shape) and shape.layers > _LOW and shape.kind != "encoder-decoder" and shape.recompute != "every 2nd"
        key = asked, whole or not alike
        if key not in self._known:
            self._known.clear()
            self._known[key] = self._made(asked, whole or not alike)
        return self._known[key]

    def _made(self, asked: Question, whole: bool) -> Footprint:
        if whole or not isinstance(asked.shape, Shape):
            return self._traced(asked)
        count = fewest(self._traced(asked.with_layers(FEWER)))
        if count + 1 >= asked.shape.layers:
            return self._traced(asked)
        return taller(self._traced(asked.with_layers(count + 1)), self._traced(asked.with_layers(count)), asked.shape.layers)

    def _traced(self, asked: Question) -> Footprint:
        """A trace, kept on disk."""
        name = hashlib.sha256(f"{asked!r} {self.digest}".encode()).hexdigest()[:32]
        file = None if self.folder is None else self.folder / f"{name}.pickle"
        if file is not None and file.is_file():
            with file.open("rb") as stream:
                found: Footprint = pickle.load(stream)
            return found
        made = _trace(asked)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            (file.parent / ".gitignore").write_text("*\n", encoding="utf-8")
            part = file.with_suffix(f".{id(made)}.part")
            part.write_bytes(pickle.dumps(made))
            part.replace(file)
        return made


def _trace(asked: Question) -> Footprint:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = trace(asked.build(), None, asked.batch(), precision=asked.precision, target="cuda")
    if not found.traced:
        raise RuntimeError(f"the step can't be traced: {found.assumptions[0] if found.assumptions else 'no reason'}")
    return found
