"""The nightly form's option."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly-chaos", action="store_true", help="as many moves and kills as `make chaos` has")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "nightly_chaos: run with --nightly-chaos only")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--nightly-chaos", default=False):
        return
    later = [item for item in items if item.get_closest_marker("nightly_chaos") is not None]
    config.hook.pytest_deselected(items=later)
    items[:] = [item for item in items if item not in later]
