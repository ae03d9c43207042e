"""A step's number, which notes at which other numbers the step would do something else. Knows numbers only.

A term of a loss may begin at some step, or come in every hundredth one; no first step has it. The numbers that a step compares its own
with, and what it computes of it before, tell where to look.
"""

from __future__ import annotations

import dis
import math
import operator
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from types import CodeType
from typing import Any

#: Numbers of later steps: with 0 on both sides of what each n up to 12, 100 or 1000 divides.
LATER = (1, 27_719_999)
#: So many numbers are looked through for one at which a comparison comes out otherwise, and so many comparisons are.
_SCANNED, _COMPARISONS = 5_000, 50
_LARGEST = 1 << 40
#: How many integers of a function's code are tried at most.
_INTEGERS = 8


@dataclass(frozen=True, kw_only=True)
class Noted:
    """What steps ask of their numbers.

    Args:
        numbers: those at which a step does something else than at others.
        answers: to a comparison at a place in the code, as far as numbers are known that give them.
    """

    numbers: dict[int, None] = field(default_factory=dict)
    answers: dict[tuple[CodeType, int, float], set[bool]] = field(default_factory=dict)


def integers_in(code: CodeType, named: Mapping[str, Any] | None = None) -> list[int]:
    """The integers that code may compare a number with, each with the one before it, as some steps count first; the first few.

    Args:
        named: what the code may name.
    """
    loaded = [each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_CONST", "LOAD_SMALL_INT")]
    found = chain.from_iterable(each if isinstance(each, (frozenset, tuple)) else (each,) for each in loaded)
    values = (*found, *(value for name, value in (named or {}).items() if name in code.co_names))
    numbers = (value - off for value in values if type(value) is int and 1 < value < _LARGEST for off in (0, 1))
    return list(dict.fromkeys(numbers))[:_INTEGERS]


class _OfStep:
    """What a step computes of its number: it notes other numbers at which what is asked of it would be answered otherwise."""

    at: Callable[[int], Any]
    step: int
    noted: Noted

    def _with(self, at: Callable[[int], Any]) -> Any:
        value = at(self.step)
        kind = {int: StepNumber, float: _StepShare}.get(type(value))
        return value if kind is None else _made(kind, value, self.step, self.noted, at)

    def _note(self, answer: Callable[[Any], bool], other: float) -> bool:
        now, caller = answer(self.at(self.step)), sys._getframe(2)
        asked = (caller.f_code, caller.f_lasti, other)
        answers = self.noted.answers.setdefault(asked, set())
        answers.add(now)
        if len(answers) < 2 and len(self.noted.answers) < _COMPARISONS:
            near = [bisect(range(_LARGEST), other, key=self.at) for bisect in (bisect_left, bisect_right)]  # where it grows
            near += [round(other)] if math.isfinite(other) else []
            around = (max(0, number + off) for number in near for off in (-1, 0, 1))
            numbers = chain(range(self.step, self.step + _SCANNED), around)
            found = next((number for number in numbers if answer(self.at(number)) != now), None)
            if found is not None:
                answers.add(not now)
                self.noted.numbers[found] = None
        return now

    def __bool__(self) -> bool:
        return self._note(bool, 0)

    def _leave(self) -> Any:
        """The value, for code that makes something of it that notes nothing: a number of its own, or an item of a set."""
        self.noted.numbers.update(dict.fromkeys((*LATER, *integers_in(sys._getframe(2).f_code))))
        return self.at(self.step)

    def __float__(self) -> float:
        return float(self._leave())

    def __int__(self) -> int:
        return int(self._leave())

    def __hash__(self) -> int:
        return hash(self._leave())


def _compares(name: str) -> Any:
    asks = getattr(operator, name)
    return lambda self, other: self._note(lambda value: asks(value, other), other) if isinstance(other, (int, float)) else NotImplemented


def _computes(name: str) -> Any:
    plain = getattr(operator, name.removeprefix("r"))

    def compute(self: Any, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            self.noted.numbers.update(dict.fromkeys(LATER))  # a tensor, which goes by the number
            return NotImplemented
        return self._with(lambda number: plain(other, self.at(number)) if name.startswith("r") else plain(self.at(number), other))

    return compute


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(_OfStep, f"__{_name}__", _compares(_name))
for _name in ("add", "sub", "mul", "mod", "floordiv", "truediv", "radd", "rsub", "rmul"):
    setattr(_OfStep, f"__{_name}__", _computes(_name))


class StepNumber(_OfStep, int):
    """A step's number."""

    __hash__ = _OfStep.__hash__


class _StepShare(_OfStep, float):
    """A step's number, divided."""

    __hash__ = _OfStep.__hash__


def _made(kind: type[Any], value: float, step: int, noted: Noted, at: Callable[[int], Any]) -> Any:
    made = kind(value)
    made.at, made.step, made.noted = at, step, noted
    return made


def step_number(step: int, noted: Noted) -> int:
    """A step's number, which enters into ``noted`` at which other numbers the step would do something else."""
    made: int = _made(StepNumber, step, step, noted, lambda number: number)
    return made
