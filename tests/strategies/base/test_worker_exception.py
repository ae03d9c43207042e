from __future__ import annotations

import pickle
import subprocess
import threading
import traceback

import pytest
import torch

from lightning_autopar.strategies.base.worker_exception import Failure


class NeedsTwo(ValueError):
    def __init__(self, name: str, value: int) -> None:
        super().__init__(f"{name} is {value}")
        self.name, self.value = name, value


class Doubles(Exception):
    """Its pickle is accepted, and says something else."""

    def __init__(self, message: str) -> None:
        super().__init__(f"bad: {message}")


class Unpicklable(RuntimeError):
    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("no")


def passed_on(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as raised:
        return pickle.loads(pickle.dumps(Failure.of(raised))).exception()


@pytest.mark.parametrize(
    "error",
    [
        ValueError("plain"),
        KeyError("k"),
        OSError(2, "No such file", "/nowhere"),
        SystemExit(3),
        KeyboardInterrupt(),
        StopIteration(7),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        subprocess.CalledProcessError(4, ["ls"]),
        torch.cuda.OutOfMemoryError("CUDA out of memory"),
        NeedsTwo("x", 3),
        Doubles("x"),
        Unpicklable("kept"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_type_words_and_traceback_arrive(error: BaseException) -> None:
    again = passed_on(error)
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert traceback.format_tb(again.__traceback__) == traceback.format_tb(error.__traceback__)
    for name in ("name", "value", "errno", "filename", "code", "returncode"):
        assert getattr(again, name, None) == getattr(error, name, None)


def test_what_led_to_an_exception_arrives_with_it() -> None:
    try:
        try:
            [][1]
        except IndexError as error:
            raise NeedsTwo("x", 3) from error
    except NeedsTwo as raised:
        meant = traceback.format_exception(raised)
        again = pickle.loads(pickle.dumps(Failure.of(raised))).exception()
    assert type(again.__cause__) is IndexError
    assert traceback.format_exception(again) == meant


def test_an_exception_within_another_and_none_of_itself() -> None:
    error = NeedsTwo("x", 3)
    error.__context__ = KeyError("k")
    error.__context__.__context__ = error  # a circle, as a library may leave one
    again = passed_on(error)
    assert type(again.__context__) is KeyError
    assert again.__context__.__context__ is None
    assert not again.__suppress_context__


def test_a_part_that_cannot_be_pickled_is_replaced_by_its_words() -> None:
    error = ValueError("held", threading.Lock())
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    error.kept = 5  # type: ignore[attr-defined]
    again = passed_on(error)
    assert type(again) is ValueError
    assert again.args[0] == "held"
    assert "lock" in again.args[1]
    assert again.kept == 5  # type: ignore[attr-defined]
    assert not hasattr(again, "lock")


def test_a_class_without_an_address_arrives_as_its_nearest_base() -> None:
    class Local(NeedsTwo):
        pass

    again = passed_on(Local("x", 3))
    assert type(again) is NeedsTwo
    assert str(again) == "Local: x is 3"


def test_what_the_other_end_of_a_connection_says_is_an_echo() -> None:
    assert Failure.of(RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1")).echo
    assert not Failure.of(RuntimeError("mat1 and mat2 shapes cannot be multiplied")).echo
    assert not Failure.of(ValueError("gloo is no backend of mine")).echo
