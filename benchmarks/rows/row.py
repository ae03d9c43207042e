"""A published row's fields, read with care: what is missing is assumed, and said. Knows the form of a row; no model and no library."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Row = Mapping[str, Any]


class NotBuilt(ValueError):
    """A row whose model or setting there is no word for."""


@dataclass
class Fields:
    """A row, and what had to be assumed to read it.

    Args:
        row: as published.
        assumptions: a sentence each, as they are made.
    """

    row: Row
    assumptions: list[str] = field(default_factory=list)

    @property
    def arch(self) -> Mapping[str, Any]:
        """The model's dimensions; empty where there are none."""
        found = self.row.get("arch")
        return found if isinstance(found, Mapping) else {}

    @property
    def precision(self) -> Mapping[str, Any]:
        """What is stored and computed in which type."""
        found = self.row.get("precision")
        return found if isinstance(found, Mapping) else {}

    def assume(self, sentence: str) -> None:
        """Remember it once."""
        if sentence not in self.assumptions:
            self.assumptions.append(sentence)

    def text(self, name: str, default: str = "") -> str:
        """A field as text in lower case."""
        value = self.row.get(name)
        return default if value is None else str(value).casefold()

    def whole(self, name: str, default: int) -> int:
        """A field as a whole number of at least 1; the default is an assumption."""
        value = whole(self.row.get(name))
        if value is None or value < 1:
            self.assume(f"{name} isn't published: {default}")
            return default
        return value

    def dimension_of(self, name: str) -> float | None:
        """A field of the row as a number."""
        return number(self.row.get(name))

    def dimension(self, *names: str) -> int | None:
        """The first of these dimensions that is there."""
        return next((found for name in names if (found := whole(self.arch.get(name))) is not None), None)

    @property
    def kind(self) -> str:
        """The model's type, one word: ``"decoder"``, ``"convnet"``, …"""
        return str(self.arch.get("type") or "").casefold().split(" ")[0].rstrip(",")

    @property
    def family(self) -> str:
        """Which library was measured, one word; ``"plain"`` where it is none that is known."""
        said = f"{self.text('framework')} {self.text('source_name')}"
        for word, name in _FAMILIES:
            if re.search(word, self.text("framework")):
                return name
        for word, name in _FAMILIES:
            if re.search(word, said):
                self.assume(f"the library is taken to be {name}, from the source's name")
                return name
        return "plain"

    @property
    def torch_version(self) -> tuple[int, int] | None:
        """torch's version, where the framework's field names one."""
        found = re.search(r"torch\s*(\d+)\.(\d+)", self.text("framework"))
        return (int(found[1]), int(found[2])) if found else None

    @property
    def is_old(self) -> bool:
        """Whether torch was older than 2.0: optimizers went parameter by parameter, attention was written out."""
        version = self.torch_version
        if version is not None:
            return version < (2, 0)
        said = self.text("framework")
        if re.search(r"megatron.?(bridge|core)|mcore|nemo", said):
            return False  # these came with torch 2
        return bool(re.search(r"20(1\d|20|21|22)\b|torch eager|trainer 4\.|apex|megatron", said))

    @property
    def keeps_scores(self) -> bool:
        """Whether torch was older than 1.11 of March 2022, whose softmax no longer saves its input (pytorch/pytorch#49600, #66018)."""
        version = self.torch_version
        if version is not None:
            return version < (1, 11)
        return self.is_old and ("2022" not in self.text("framework") or bool(re.search(r"(jan|feb)\w*.2022", self.text("framework"))))

    @property
    def loads_all_kernels(self) -> bool:
        """Whether torch was older than 1.13, which has the driver load kernels when they are first called (pytorch/pytorch#86509)."""
        version = self.torch_version
        return version < (1, 13) if version is not None else self.is_old


#: Words of a framework's name, and what it is called here; the first match counts.
_FAMILIES = (
    (r"litgpt|lit-gpt|tinyllama", "litgpt"),
    (r"torchtune", "torchtune"),
    (r"torchtitan|titan", "torchtitan"),
    (r"nanotron", "nanotron"),
    (r"fsdp_qlora", "fsdp_qlora"),
    (r"swift|llama-?factory|axolotl|trl\b|open-instruct", "hf"),
    (r"automodel|nemo", "automodel"),
    (r"megatron", "megatron"),
    (r"composer|llm-foundry|mosaic", "composer"),
    (r"timm|pytorch-image-models", "timm"),
    (r"torchgpipe", "gpipe"),
    (r"ngc|deeplearningexamples", "nvidia"),
    (r"bingbert", "nvidia"),
    (r"lightning", "lightning"),
    (r"^hf\b|hugging ?face|transformers|accelerate|peft", "hf"),
)


def whole(value: Any) -> int | None:
    """A whole number, from a number or text; of ``"24+24"`` the last one; None where there is none."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, (int, float)):
        return int(value) if value == value else None
    found = re.findall(r"\d+", str(value))
    return int(found[-1]) if found else None


def number(value: Any) -> float | None:
    """A number, from a number or text; None where there is none."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, (int, float)):
        return float(value) if value == value else None
    found = re.search(r"-?\d+(\.\d+)?", str(value))
    return float(found[0]) if found else None
