"""Footprints of what rows ask, each traced once and kept on disk. Knows questions; no row and no plan."""

from __future__ import annotations

import hashlib
import pickle
import warnings
from functools import lru_cache
from pathlib import Path

import lightning_autopar.memory
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.trace import trace
from rows.question import Question
from rows.shape import Shape
from rows.taller import FEW, FEWER, taller

#: Models of at most so many blocks are traced whole.
_LOW = 8
#: What here comes after the trace: hardware, plan, judgement.
_AFTERWARDS = ("foretold.py", "hardware.py", "judged.py", "planned.py", "score.py")


@lru_cache(maxsize=1)
def code_digest() -> str:
    """Of all code that a footprint depends on."""
    digest = hashlib.sha256()
    for folder in (Path(__file__).parent, Path(lightning_autopar.memory.__file__).parent):
        for file in sorted(set(folder.glob("*.py")) - {folder / name for name in _AFTERWARDS}):
            digest.update(file.read_bytes())
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
            whole: traced block by block, with a tape, rather than extended from a few blocks.
        """
        shape = asked.shape
        whole = whole or not isinstance(shape, Shape) or shape.layers <= _LOW or shape.kind == "encoder-decoder"
        key = asked, whole
        if key not in self._known:
            self._known.clear()
            self._known[key] = self._kept(asked, whole)
        return self._known[key]

    def _kept(self, asked: Question, whole: bool) -> Footprint:
        name = hashlib.sha256(f"{asked!r} {whole} {self.digest}".encode()).hexdigest()[:32]
        file = None if self.folder is None else self.folder / f"{name}.pickle"
        if file is not None and file.is_file():
            with file.open("rb") as stream:
                found: Footprint = pickle.load(stream)
            return found
        made = self._made(asked, whole)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            (file.parent / ".gitignore").write_text("*\n", encoding="utf-8")
            part = file.with_suffix(f".{id(made)}.part")
            part.write_bytes(pickle.dumps(made))
            part.replace(file)
        return made

    def _made(self, asked: Question, whole: bool) -> Footprint:
        if whole or not isinstance(asked.shape, Shape):
            return _trace(asked)
        if asked.shape.recompute == "every 2nd":  # blocks take turns in what they do
            return _trace(asked)
        few, fewer = _trace(asked.with_layers(FEW)), _trace(asked.with_layers(FEWER))
        return taller(few, fewer, asked.shape.layers)


def _trace(asked: Question) -> Footprint:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = trace(asked.build(), None, asked.batch(), precision=asked.precision, target="cuda")
    if not found.traced:
        raise RuntimeError(f"the step can't be traced: {found.assumptions[0] if found.assumptions else 'no reason'}")
    return found
