import pytest
import torch

from lightning_autopar.text import error_line, format_bytes, format_change, format_seconds, format_share, parse_memory


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("4GiB", 4 << 30), ("500MB", 500_000_000), ("1.5g", 3 << 29), ("1 KiB", 1024), ("7", 7), (123, 123), ("2tb", 2 * 10**12)],
)
def test_parse_memory_reads_sizes_as_people_write_them(text: str | int, size_bytes: int) -> None:
    assert parse_memory(text) == size_bytes


@pytest.mark.parametrize("text", ["", "many", "4 XiB", "-1", "GiB", "1e9", True, None, 0, "0GiB", -5])
def test_parse_memory_refuses_what_is_no_size_and_says_what_is(text: object) -> None:
    with pytest.raises(ValueError, match="4GiB") as caught:
        parse_memory(text)  # type: ignore[arg-type]
    assert repr(text) in str(caught.value)


def test_sizes_are_written_with_three_digits() -> None:
    assert [format_bytes(size) for size in (0, 512, 1536, 5 << 20, 1010 << 30)] == ["0 B", "512 B", "1.5 KiB", "5 MiB", "1010 GiB"]


def test_durations_are_written_with_their_unit() -> None:
    assert [format_seconds(seconds) for seconds in (5e-5, 0.0123, 1.5, 300)] == ["50 µs", "12.3 ms", "1.5 s", "5 min"]
    assert [format_seconds(seconds) for seconds in (7199, 70200, 54.2 * 3600, 1234 * 86400)] == ["120 min", "19.5 h", "2.26 d", "1234 d"]


def test_kibibytes_are_told_without_a_percentage() -> None:
    assert format_share(820 << 20, 1000 << 20) == "82%"
    assert format_share(8 << 20, 19) == ""
    assert format_change(1100 << 20, 1000 << 20) == "+10.0%"
    assert format_change(35 << 10, 1 << 10) == "+34 KiB"
    assert format_change(1 << 10, 35 << 10) == "-34 KiB"


def _torch_refuses() -> None:
    torch.ones(2) @ torch.ones(3)


def test_an_error_names_the_users_line_that_led_to_it() -> None:
    with pytest.raises(RuntimeError) as found:
        _torch_refuses()
    line = _torch_refuses.__code__.co_firstlineno + 1
    assert error_line(found.value).startswith("RuntimeError: inconsistent tensor size")
    assert error_line(found.value).endswith(f", at test_text.py:{line}")
    wrapped = ValueError("it failed\nat length")
    wrapped.__cause__ = found.value
    assert error_line(wrapped) == f"ValueError: it failed, at test_text.py:{line}"
    assert error_line(ValueError()) == "ValueError: no message"
