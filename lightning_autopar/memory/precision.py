"""What a Trainer's ``precision`` means to the types of a step. Knows no module."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Types of a step.

    Args:
        autocast: what operations are cast to under autocast; None without it.
        true: what parameters and inputs are made of; None where they stay as they are.
    """

    autocast: torch.dtype | None = None
    true: torch.dtype | None = None


_PRECISIONS = {
    "16-mixed": Precision(autocast=torch.float16),
    "bf16-mixed": Precision(autocast=torch.bfloat16),
    "16-true": Precision(true=torch.float16),
    "bf16-true": Precision(true=torch.bfloat16),
    "32-true": Precision(),
    "64-true": Precision(true=torch.float64),
    "transformer-engine": Precision(true=torch.bfloat16),
    "transformer-engine-float16": Precision(true=torch.float16),
}
_ALIASES = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true", "None": "32-true"}


def precision_of(setting: str | int | None) -> Precision:
    """The types of a setting.

    Raises:
        ValueError: for an unknown one.
    """
    name = _ALIASES.get(str(setting), str(setting))
    if name not in _PRECISIONS:
        raise ValueError(f"unknown precision {setting!r}; use one of {', '.join(_PRECISIONS)}")
    return _PRECISIONS[name]
