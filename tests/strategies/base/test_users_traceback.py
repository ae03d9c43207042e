"""Of an exception, a user sees his own frames."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

import pytest
from torch import nn, zeros
from torch.utils.data import DataLoader, Dataset

from lightning_autopar.strategies.base.worker_exception import received, sent, users_part


def _frame(package: str, body: str, **names: Any) -> Any:
    """A function ``call`` whose frame is of this package."""
    found = {"__name__": package, **names}
    exec(compile(body, f"/site-packages/{package}.py" if package != "mine" else "mine.py", "exec"), found)
    return found["call"]


def _caught(call: Callable[[], Any]) -> TracebackType:
    with pytest.raises(Exception) as caught:  # of any kind
        call()
    assert caught.tb.tb_next is not None
    return caught.tb.tb_next


def _names(found: TracebackType | None) -> list[str]:
    return [frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(found)]


def _stack(*packages: str) -> Callable[[], Any]:
    """Frames that call one another, the outermost first; the last one raises."""
    inner = _frame(packages[-1], "def call():\n    raise ValueError('bad')")
    for package in reversed(packages[:-1]):
        inner = _frame(package, "def call():\n    return inner()", inner=inner)
    return inner  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("frames", "shown"),
    [
        ("lightning lightning_autopar torch mine", "mine"),
        ("lightning mine torch lightning mine torch.nn torch", "mine mine torch.nn torch"),
        ("lightning mine contextlib mine", "mine mine"),
        (
            "lightning lightning.a mine lightning.b lightning.c lightning.d lightning.e lightning.f",
            "mine lightning.c lightning.d lightning.e lightning.f",
        ),
        ("lightning " + "net " * 20 + "mine", "net net net net net net net mine"),
        ("lightning torch", ""),
    ],
)
def test_the_users_frames_and_what_they_called(frames: str, shown: str) -> None:
    assert _names(users_part(_caught(_stack(*frames.split())))) == shown.split()


def test_calls_of_modules_are_left_out() -> None:
    layer = nn.Linear(4, 3)
    found = users_part(_caught(lambda: layer(zeros(2, 2))))
    assert [frame.name for frame in traceback.extract_tb(found)] == ["<lambda>", "forward"]


class Bad(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        raise KeyError(index)


def test_of_a_loaders_worker_its_words_stay() -> None:
    def call() -> None:
        next(iter(DataLoader(Bad(), num_workers=1)))

    found = _caught(call)
    assert found.tb_next is not None
    assert [frame.name for frame in traceback.extract_tb(users_part(found.tb_next))] == ["reraise"]


def test_a_traceback_that_was_sent_reads_the_same() -> None:
    def call() -> Any:
        return [{"a": 1}[key] for key in ("a", "b")]

    found = _caught(call)
    assert traceback.format_tb(received(sent(found))) == traceback.format_tb(found)
    assert _names(received(sent(found))) == _names(found)
    assert received(()) is None
