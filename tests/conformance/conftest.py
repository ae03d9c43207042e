"""What the suite shares in one session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.harness import clear_scratch


@pytest.fixture(scope="session", autouse=True)
def _scratch() -> Iterator[None]:
    yield
    clear_scratch()
