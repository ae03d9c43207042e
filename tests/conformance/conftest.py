"""What the suite shares in one session."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.conformance.harness import clear_scratch


@pytest.fixture(scope="session", autouse=True)
def _scratch() -> Iterator[None]:
    yield
    clear_scratch()


@pytest.fixture(autouse=True)
def _log_levels() -> Iterator[None]:
    """The harness silences Lightning's loggers; tests of other folders run in the same process and read them."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
