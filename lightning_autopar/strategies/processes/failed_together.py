"""Whether all ranks have failed at one place, so that they can still gather what lies on several of them.

An exception that depends on nothing but the step (a check of the user's, a callback that ends the run) is raised by every rank, and leaves
no collective behind. One that depends on a rank's own samples, or comes from rank 0's logger alone, is different: a collective would wait
for ever there, or meet another one. Knows no engine and no trainer.
"""

from __future__ import annotations

import pickle
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import distributed_c10d

_LOOK_SECONDS = 5e-3


@dataclass(frozen=True, kw_only=True)
class FailedRank:
    """A rank that has failed, and asks the others whether they are where it is. Each asks the same questions, and gets the same answers.

    Args:
        rank: its number.
        world_size: how many ranks there are.
        folder: where they tell each other.
    """

    rank: int
    world_size: int
    folder: Path

    def failed_alike(self, error: BaseException, *, batches: int, timeout_seconds: float) -> bool:
        """Whether all have raised the same kind of exception in the same line, after as many batches and collectives."""
        lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
        return self._all_say("failed", (type(error).__qualname__, batches, lines, _collectives()), timeout_seconds)

    def went_on_alike(self, *, timeout_seconds: float) -> bool:
        """Whether all have begun as many collectives since: the hooks of an exception may fail, too."""
        return self._all_say("went-on", _collectives(), timeout_seconds)

    def _all_say(self, question: str, answer: Any, timeout_seconds: float) -> bool:
        said = [self.folder / f"{question}-{rank}" for rank in range(self.world_size)]
        own = pickle.dumps(answer)
        _write(said[self.rank], own)
        until = time.monotonic() + timeout_seconds
        while not all(each.exists() for each in said) and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
        alike = all(each.exists() and each.read_bytes() == own for each in said)
        # The first rank to know says it for all: two that stop waiting at one moment would else go two ways.
        verdict, mine = self.folder / f"{question}-alike", self.folder / f"{question}-alike-{self.rank}"
        mine.write_text(str(alike), encoding="utf-8")
        with suppress(FileExistsError):
            verdict.hardlink_to(mine)
        return verdict.read_text(encoding="utf-8") == str(True)


def _write(path: Path, data: bytes) -> None:
    """Nobody reads half of it."""
    hidden = path.with_name(f".{path.name}")
    hidden.write_bytes(data)
    hidden.rename(path)


def _collectives() -> list[int]:
    """How many collectives this rank has begun, in each of its process groups. Only torch's own debug mode reads this number (2.13)."""
    groups: list[Any] = list(distributed_c10d._world.pg_map)
    return [group._get_sequence_number_for_group() for group in groups]
