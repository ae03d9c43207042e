"""What holds for every test: one seed, one thread a process, no network, no devices but those the test names."""

from __future__ import annotations

import gc
import os
import random
import signal

# Before torch is imported: two test processes of two threads each would fight over two cores.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["AUTOPAR_CACHE"] = "off"  # what one test's run took must not correct another's prediction, nor the developer's
os.environ["AUTOPAR_LEDGER"] = "off"  # nor what the host's runs were promised
os.environ["AUTOPAR_WAIT"] = "never"  # a test that is to wait says so
# Set by a developer's shell, they would change what a test plans.
_SETTINGS = ("AUTOPAR_DEVICES", "AUTOPAR_NEIGHBOURS", "AUTOPAR_RUNS", "AUTOPAR_PRIORITY", "AUTOPAR_QUANTUM", "PL_TRAINER_STRATEGY")
for _name in (*_SETTINGS, "LIGHTNING_AUTOPAR_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD"):
    os.environ.pop(_name, None)

gc.disable()  # until all is collected: what is imported stays, and looking through it takes a fifth of the time

import pytest  # noqa: E402
import torch  # noqa: E402

from tests.later import left_to_later, wrong_entries  # noqa: E402
from tests.nullgpu.plugin import pytest_report_teststatus, pytest_runtest_setup  # noqa: E402, F401

torch.set_num_threads(1)


#: Tests of these marks run with the option of the same name alone.
LATER_MARKS = {
    "slow": "also run what `make test` leaves to `make test-slow`",
    "all_cells": "also run the cells that `make test` leaves to `make conformance`",
    "nightly_chaos": "also make as many moves and kills as `make chaos` does",
}


def pytest_collection_finish() -> None:
    """What is there by now stays: a full collection, which some code asks for by itself, need not look through it each time."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    for mark, about in LATER_MARKS.items():
        parser.addoption(f"--{mark.replace('_', '-')}", action="store_true", help=about)


def pytest_configure(config: pytest.Config) -> None:
    """Only a run of tests on GPUs alone (``-m gpu``, or files named after them) sees any: all others are the same on every machine."""
    chosen: str = config.option.markexpr
    if not ("gpu" in chosen and "not gpu" not in chosen) and not all("gpu" in path.rpartition("/tests/")[2] for path in config.args):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what runs in the background with Ctrl-C ignored


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    named = [(item, *item.nodeid.removesuffix("]").partition("[")[::2]) for item in items]
    options = config.option
    chosen = options.keyword or options.markexpr or any("::" in name for name in config.args)  # then it hasn't its files whole
    if not chosen and (wrong := wrong_entries((function, case) for _, function, case in named)):
        raise pytest.UsageError(f"tests/later.md names cases that aren't there, or leaves nothing out: {', '.join(wrong)}")
    for item, function, case in named:
        if left_to_later(function, case):
            item.add_marker(pytest.mark.slow)
    wanted = {mark for mark in LATER_MARKS if config.getoption(mark)}
    later = {item for item in items if any(item.get_closest_marker(mark) for mark in LATER_MARKS.keys() - wanted)}
    config.hook.pytest_deselected(items=[*later])
    items[:] = [item for item in items if item not in later]


@pytest.fixture(autouse=True, scope="session")
def _unseen(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The tests' runs aren't shown among the host's."""
    os.environ["AUTOPAR_RUNS"] = str(tmp_path_factory.mktemp("runs"))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    torch.manual_seed(0)
