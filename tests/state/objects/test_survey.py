"""Changes of several workers put together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_autopar.exact.absent.absent_tensor import hole_of
from lightning_autopar.state.objects.survey import Changes, Survey, merged


def survey_of(module: Any, other: Any) -> Survey:
    return Survey({"module": module, "other": other}, fields=lambda target: None)


def test_each_worker_brings_what_it_alone_has() -> None:
    """Three "workers" one after the other in this process; the first two can't see all values."""
    module, other = SimpleNamespace(count=0, first=0, last=0, list=[1], gone=1, same=0), SimpleNamespace(x=0)
    survey = survey_of(module, other)
    state, state_of_other = dict(vars(module)), dict(vars(other))
    absent = hole_of((2,), torch.float32, torch.device("cpu"), "the output of stage 2")
    workers: list[Changes] = []
    for rank, its in enumerate(
        (
            {"count": 1, "first": "of 0", "last": absent, "logits": absent, "nowhere": absent},
            {"count": 1, "first": 0, "middle": list(range(3)), "nowhere": absent},
            {"count": 1, "first": absent, "last": "of 2", "logits": torch.ones(2), "nowhere": absent},
        )
    ):
        vars(module).update(its)
        if rank == 2:
            module.list.append(2)
            del module.gone
        other.x = rank + 1
        workers.append(survey.changes({}, {"extra": 5} if rank == 0 else {}, under=None if rank == 0 else ("module",)))
        vars(module).clear()
        vars(module).update(state)
        if rank == 2:
            module.list.pop()
        vars(other).update(state_of_other)
    taken, lost = merged(workers)
    sent = [survey.apply(changes, lambda name: name, lost, only=parts) for changes, parts in zip(workers, taken, strict=True)]
    assert sent[0] == {"extra": 5}
    assert torch.equal(module.__dict__.pop("logits"), torch.ones(2))
    assert vars(module) == {"count": 1, "first": "of 0", "last": "of 2", "list": [1, 2], "same": 0, "middle": [0, 1, 2]}
    assert other.x == 1, "outside of the module the first one speaks for all"
    assert lost == ["module.nowhere"]


class Copies:
    """Its pickle's state is a copy of its attributes, as many classes make it; each holds another one."""

    def __init__(self, other: Any = None) -> None:
        self.other, self.items = other, [1]

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))


def test_what_a_class_makes_for_its_pickle_alone_is_not_followed() -> None:
    first = Copies()
    first.other = Copies(first)
    module = SimpleNamespace(holds=first, count=0)
    survey = survey_of(module, None)
    assert len(survey.numbers()) < 20, "a copy holds the object, which makes another copy"
    assert survey.changes({}, {}).parts == {}, "what hasn't changed is equal, though each look at it makes another copy"
    module.count = 1
    assert [survey.name(*part) for part in survey.changes({}, {}).parts] == ["module.count"]


def test_changes_that_travel_one_by_one_travel_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_autopar.state.objects.pickles.MOST_OBJECTS", 100)
    module = SimpleNamespace(**{f"part{index}": 0 for index in range(10)})
    survey = survey_of(module, None)
    vars(module).update({f"part{index}": [str(each) for each in range(30)] for index in range(10)})
    changes = survey.changes({}, {})
    assert len(changes.parts) == 10
    survey.apply(changes, lambda name: name, [])


class Refuses:
    """Can be pickled, but not made anew."""

    def __init__(self) -> None:
        self.left = 1

    def __setstate__(self, state: Any) -> None:
        raise RuntimeError("not twice")


class Made:
    """Needs an argument to be made, and none to be pickled (ema_pytorch's EMA)."""

    def __new__(cls, value: int) -> Any:
        return super().__new__(cls)

    def __init__(self, value: int) -> None:
        self.value = value


def test_an_object_that_can_not_be_made_anew_costs_its_own_part_alone() -> None:
    module = SimpleNamespace(before=1, refuses=None, holds=None, made=None, shared=None)
    survey = survey_of(module, None)
    refuses = Refuses()
    vars(module).update(before=2, refuses=refuses, holds=[3, refuses], made=Made(4), shared={"list": [5]})
    changes = survey.changes({}, {"sent": 6, "spoiled": [refuses]})
    vars(module).update(before=1, refuses=None, holds=None, made=None, shared=None)
    lost: list[str] = []
    assert survey.apply(changes, lambda name: name, lost) == {"sent": 6}
    assert lost == ["module.refuses", "module.holds", "spoiled"]
    assert (module.before, module.refuses, module.holds, module.made.value, module.shared) == (2, None, None, 4, {"list": [5]})
