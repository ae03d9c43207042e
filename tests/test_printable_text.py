"""Anybody's text, before it is written to somebody's terminal."""

from __future__ import annotations

import pytest

from lightning_autopar.text import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("train.py", "train.py"),
        ("训练 à 3 × ½.py", "训练 à 3 × ½.py"),
        ("\x1b[2J\x1b]0;title\x07", "\ufffd[2J\ufffd]0;title\ufffd"),
        ("a\r\nb\tc\x00\x7f\x9b", "a\ufffd\ufffdb\ufffdc\ufffd\ufffd\ufffd"),
        ("\u202egnp.exe\u2069\u200b", "\ufffdgnp.exe\ufffd\ufffd"),
        ("\u2028\u2029\ud800\ue000\uffff", "\ufffd" * 5),
        ("", ""),
    ],
)
def test_what_would_do_something_is_replaced(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(shown) == shown


def test_a_long_text_is_cut() -> None:
    assert printable("x" * 500) == "x" * 500
    assert printable("x" * 501) == "x" * 499 + "…"
    assert printable("xyz", most=2) == "x…"
