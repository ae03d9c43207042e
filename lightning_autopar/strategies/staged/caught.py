"""What leaves a block otherwise than by being returned: hooks within it see it, or an attribute holds it. Data only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from lightning_autopar.strategies.staged.outputs import describe, flattened
from lightning_autopar.strategies.staged.recording import Output


@dataclass
class Caught:
    """What a module within a block gave, where a hook of the user's sees it, or left in an attribute.

    Args:
        output: in terms of the block's arguments; a sentence where it can't be described.
        flat: its leaves.
        numbers: of the leaves that are used after the block.
    """

    output: Output | str
    flat: list[Any]
    numbers: dict[int, int]

    @classmethod
    def of(cls, value: Any, given: list[tuple[Any, Any]], *, module: str, attribute: str | None = None) -> Caught:
        """A value in terms of the block's arguments."""
        output = describe(value, given)
        if isinstance(output, Output):
            output = replace(output, module=module, attribute=attribute)
        return cls(output, flattened(value, given)[0] if isinstance(output, Output) else [], {})

    def is_needed(self, others: list[Caught]) -> bool:
        """Whether it is used after the block, or caught by the same kind of hook as something that is."""
        if not isinstance(self.output, Output) or self.output.attribute is not None:
            return bool(self.numbers)
        return any(each.numbers and isinstance(each.output, Output) and each.output.module == self.output.module for each in others)

    def numbered(self) -> Output:
        """With its leaves' numbers."""
        assert isinstance(self.output, Output)
        leaves = enumerate(self.output.leaves)
        return replace(self.output, leaves=tuple(replace(leaf, index=self.numbers.get(place)) for place, leaf in leaves))
