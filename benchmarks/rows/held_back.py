"""Which published rows are held back while the planner's model is worked on. Knows ids and sources; no figure of any row.

Two kinds together are a third: all rows of some sources, as runs that others will publish, and some rows of every other source. They are
drawn once by a seed, and the draw is kept beside the rows, so that a row that is added later moves none from one side to the other.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

Part = Literal["shown", "held", "all"]
SEED = 23
_FILE = Path(__file__).with_name("held_back.json")


def draw(rows: Iterable[Mapping[str, Any]], seed: int = SEED) -> dict[str, Any]:
    """A third of the rows: whole sources up to a sixth, and others at random.

    Args:
        rows: with ``id`` and ``source_name``.
        seed: of the draw.

    Returns:
        The seed, the names of the sources that are held back whole, and the ids of all rows that are held back, sorted.
    """
    by_source: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        by_source[row["source_name"]].append(row["id"])
    total, chance = sum(map(len, by_source.values())), random.Random(seed)
    order = sorted(by_source)
    chance.shuffle(order)
    whole: list[str] = []
    held: list[str] = []
    for source in order:
        if len(held) + len(by_source[source]) <= total // 6:
            whole.append(source)
            held += by_source[source]
    others = sorted(one for source in by_source if source not in whole for one in by_source[source])
    held += chance.sample(others, total // 3 - len(held))
    return {"seed": seed, "whole_sources": sorted(whole), "rows": sorted(held)}


def held_back() -> frozenset[str]:
    """The ids of the rows that are held back."""
    return frozenset(json.loads(_FILE.read_text(encoding="utf-8"))["rows"])


def of_part(rows: Iterable[dict[str, Any]], part: Part) -> list[dict[str, Any]]:
    """The rows of a part: those that may be looked at, those that are held back, or all."""
    held = held_back()
    return [row for row in rows if part == "all" or (row.get("id") in held) == (part == "held")]


if __name__ == "__main__":
    drawn = draw(json.loads(_FILE.with_name("rows.json").read_text(encoding="utf-8")))
    _FILE.write_text(json.dumps(drawn, indent=1) + "\n", encoding="utf-8")
