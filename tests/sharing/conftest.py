"""The ledger that a test's runs share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import ledger_folder


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The ledger that runs share here."""
    with ledger_folder() as found:
        monkeypatch.setenv("AUTOPAR_LEDGER", str(found))
        yield found
