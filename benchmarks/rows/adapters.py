"""Which layers of a row's model get a low-rank addition. Knows what libraries call the layers of a block."""

from __future__ import annotations

import re

from rows.row import Fields, NotBuilt, whole

_ALL = ("q", "k", "v", "o", "gate", "up", "down")
#: What libraries call the linear layers of a block.
_NAMES = {
    "c_attn": ("q", "k", "v"),
    "c_proj": ("o", "down"),
    "w1": ("up",),
    "w2": ("gate",),
    "mlp": ("gate", "up", "down"),
    "all": _ALL,
    "all-linear": _ALL,
    "all linear": _ALL,
    "all *_proj": _ALL,
    "*_proj": _ALL,
    "lm_head": ("head",),
    "output": ("head",),
    "proj": ("o",),
    "qkv": ("q", "k", "v"),
}


def adapters(fields: Fields) -> tuple[int, tuple[str, ...], bool]:
    """Rank of the adapters, the layers that have one, and whether the embeddings are trained beside them.

    Raises:
        NotBuilt: for a layer or a way of training that isn't known.
    """
    said = fields.text("trainable", "full")
    given = fields.row.get("lora")
    if not isinstance(given, dict):
        if said.startswith("full") or not said:
            return 0, (), False
        given = {}
    rank = whole(given.get("rank")) or whole(given.get("r"))
    if rank is None:
        found = re.search(r"\br(?:ank)?\s*=?\s*(\d+)", said)
        rank = int(found[1]) if found else None
    if rank is None:
        raise NotBuilt(f"no word for the trainable part {said!r}")
    names = given.get("targets")
    if not names:
        found = re.search(r"\bon ([^(]+)", said)
        names = re.split(r"[,+]", found[1]) if found else []
    if not names:
        names = ["q", "v"]
        fields.assume("which layers get adapters isn't published: query and value")
    targets: list[str] = []
    for name in (str(name).strip().casefold() for name in names):
        if not name or name.startswith("trainable"):
            continue
        short = name.removesuffix("_proj")
        for layer in _NAMES.get(name, _NAMES.get(short, (short,))):
            if layer not in (*_ALL, "head"):
                raise NotBuilt(f"no layer called {name!r}")
            targets.append(layer)
    return rank, tuple(dict.fromkeys(targets)), "trainable wte" in said or "embed" in said
