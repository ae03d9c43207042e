"""Which parts a generated script has. A seed names the same parts for ever: new kinds are added behind the others, under a new field."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, fields
from typing import Any

#: What each field is drawn from. A kind that stands here twice is drawn twice as often.
KINDS: dict[str, tuple[Any, ...]] = {
    "net": (
        "mlp",
        "residual",
        "batch-norm",
        "conv",
        "attention",
        "lstm",
        "shared",
        "tied",
        "frozen",
        "odd-buffers",
        "lazy-buffer",
        "unlike",
    ),
    "dropout": (0.0, 0.0, 0.2),
    "loss": ("squares", "classes", "smoothed", "huber", "summed", "masked", "pairs", "metric", "penalty", "likelihood"),
    "batch": ("tuple", "list", "dict", "named", "dataclass", "padded"),
    "loader": ("shuffled", "shuffled", "plain", "drop-last", "weighted", "iterable", "batch-sampler", "combined", "datamodule", "own"),
    "samples": (28, 27, 32, 25),
    "validation": ("one", "one", "none", "two"),
    "logs": ("loss", "epoch", "both", "several", "metric", "greatest", "sizes"),
    "hook": ("none", "none", "average-after", "average-inside", "counts", "noise", "norms", "outputs", "clips", "closure", "by-hand"),
    "optimizer": ("sgd", "adam", "adamw", "rmsprop", "groups", "manual", "two-manual"),
    "schedule": ("none", "none", "step", "epoch", "plateau", "cycle"),
    "clip": ("none", "none", "norm", "value"),
    "accumulate": (1, 1, 1, 2, 3),
    "callback": ("none", "none", "stopping", "rates", "averaging", "own"),
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The parts of one script; see :data:`KINDS` for what each may be, and the modules beside this one for what it means."""

    seed: int
    net: str
    dropout: float
    loss: str
    batch: str
    loader: str
    samples: int
    validation: str
    logs: str
    hook: str
    optimizer: str
    schedule: str
    clip: str
    accumulate: int
    callback: str

    @property
    def manual(self) -> bool:
        """Whether the module steps its optimizers itself."""
        return self.optimizer in ("manual", "two-manual")

    @property
    def monitored(self) -> str:
        """The validation's loss, as it is logged."""
        return "val_loss/dataloader_idx_0" if self.validation == "two" else "val_loss"

    def __str__(self) -> str:
        parts = asdict(self)
        return ", ".join(f"{name}={value}" for name, value in parts.items())


def draw(seed: int) -> Recipe:
    """The recipe of a seed. What Lightning itself refuses isn't drawn."""
    drawn = random.Random(seed)
    parts = {name: drawn.choice(kinds) for name, kinds in KINDS.items()}
    recipe = Recipe(seed=seed, **parts)
    changes: dict[str, Any] = {}
    if recipe.manual:  # Lightning neither clips nor accumulates there
        changes |= {"clip": "none", "accumulate": 1, "hook": "none" if recipe.hook == "clips" else recipe.hook}
    elif recipe.hook == "clips":  # which clips by itself
        changes |= {"clip": "none"}
    if recipe.validation == "none":
        changes |= {"schedule": "none"} if recipe.schedule == "plateau" else {}
        changes |= {"callback": "none"} if recipe.callback == "stopping" else {}
    if recipe.callback == "averaging" and (recipe.manual or recipe.accumulate > 1 or recipe.schedule not in ("none", "epoch")):
        changes |= {"callback": "none"}
    if recipe.net in ("conv", "mlp", "residual", "batch-norm", "unlike") and recipe.batch == "padded":  # these take no sequences
        changes |= {"batch": "tuple"}
    if recipe.net == "batch-norm" and recipe.samples == 25:  # a last batch of one sample
        changes |= {"samples": 28}
    if recipe.loader == "combined" and recipe.batch == "padded":
        changes |= {"loader": "shuffled"}
    return Recipe(**{**asdict(recipe), **changes})


assert [field.name for field in fields(Recipe)][1:] == list(KINDS)
