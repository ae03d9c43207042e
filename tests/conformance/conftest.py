"""What the suite shares in one session, and which cells not every run of the tests has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance.harness import clear_scratch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-cells", action="store_true", help="also run the cells that `make test` leaves to `make conformance`")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "all_cells: run with --all-cells only")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all-cells", default=False):
        return
    later = [item for item in items if item.get_closest_marker("all_cells") is not None]
    config.hook.pytest_deselected(items=later)
    items[:] = [item for item in items if item not in later]


@pytest.fixture(scope="session", autouse=True)
def _scratch() -> Iterator[None]:
    yield
    clear_scratch()
