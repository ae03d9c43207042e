"""The package's surface and its promises about imports."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_autopar

ROOT = Path(__file__).parents[1]


def test_public_names_are_sorted_and_all_there() -> None:
    assert lightning_autopar.__all__ == sorted(lightning_autopar.__all__)
    for name in lightning_autopar.__all__:
        assert getattr(lightning_autopar, name).__name__ == name
        assert name in dir(lightning_autopar)


def test_a_public_name_is_what_its_module_defines_whatever_was_imported_before() -> None:
    for name, home in lightning_autopar._HOMES.items():
        module = importlib.import_module(home)
        assert getattr(lightning_autopar, name) is getattr(module, name)


def test_no_submodule_can_take_the_place_of_a_public_name() -> None:
    taken = {path.stem for path in Path(lightning_autopar.__file__).parent.iterdir()}
    assert not taken & set(lightning_autopar.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'lightning_autopar' has no attribute 'replan'"):
        _ = lightning_autopar.replan


def test_importing_it_imports_neither_torch_nor_lightning() -> None:
    code = "import sys, lightning_autopar; print([n for n in ('torch', 'lightning', 'pytorch_lightning', 'numpy') if n in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_planning_and_every_engine_import_neither_torch_nor_lightning() -> None:
    code = "import sys, lightning_autopar.planning.make_report as _; from lightning_autopar import engines, plans; "
    code += "[engines.named(each) for each in plans.all_engines()]; "
    code += "print([each for each in ('torch', 'lightning', 'pytorch_lightning', 'deepspeed') if each in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_installed_metadata() -> None:
    distribution = importlib.metadata.distribution("lightning-autopar")
    assert distribution.version == lightning_autopar.__version__
    hooks = [point.value for point in distribution.entry_points if point.group == "torch.backends"]
    assert hooks == ["lightning_autopar._autoload:install"]


def test_lightning_has_the_same_bounds_under_both_names() -> None:
    found = re.findall(r'"(lightning|pytorch-lightning)([><=!][^"]*)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert [name for name, _ in found] == ["pytorch-lightning", "lightning", "lightning"]
    assert {bounds for _, bounds in found} == {">=2.5.3,!=2.6.2,!=2.6.3"}


def test_typed() -> None:
    assert (Path(lightning_autopar.__file__).parent / "py.typed").exists()


def test_constraints_pin_every_requirement() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert "torch==2.13.0" in lines
    pinned = {line.split("==")[0].lower() for line in lines if "==" in line}
    required = [line for line in importlib.metadata.requires("lightning-autopar") or [] if "extra" not in line or "'dev'" in line]
    assert {re.split(r"[^\w-]", line)[0].lower() for line in required} <= pinned
