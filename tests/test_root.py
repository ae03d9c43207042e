"""Which Lightning a process uses: who says so, what is guessed from, and what is refused."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import lightning_autopar
from lightning_autopar import _root

PACKAGE = Path(lightning_autopar.__file__).parent
L, PL = _root.ROOTS


@pytest.fixture(autouse=True)
def _undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_root, "choice", None)
    monkeypatch.delenv(_root.VARIABLE, raising=False)


def guessed(code: str, **names: Any) -> str:
    """The root that is guessed where code of a user's module needs our class."""
    namespace: dict[str, Any] = {"__name__": "theirs", "chosen": _root.chosen, "later": False, **names}
    exec(compile(f"root = chosen()\n{code}", "theirs.py", "exec"), namespace)
    root: str = namespace["root"]
    return root


class Derived(type("Base", (), {"__module__": "pytorch_lightning.core.module"})):  # type: ignore[misc]
    pass


# -- who knows ---------------------------------------------------------------------------------------------------------------------------


def test_who_knows_settles_it_for_the_process() -> None:
    _root.choose(PL, "this Trainer")
    _root.choose(PL, "this Trainer")
    assert _root.chosen() == PL
    with pytest.raises(ValueError, match=r"this Trainer is lightning\.pytorch's, but autopar serves pytorch_lightning .* from one package"):
        _root.choose(L, "this Trainer")


def test_a_guess_that_was_right_is_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_root.VARIABLE, PL)
    assert _root.chosen() == PL
    with pytest.raises(ValueError, match=r"was imported for pytorch_lightning, since AUTOPAR_LIGHTNING says so; set AUTOPAR_LIGHTNING="):
        _root.choose(L, "this Trainer")
    _root.choose(PL, "this Trainer")
    with pytest.raises(ValueError, match="autopar serves pytorch_lightning in this process already"):
        _root.choose(L, "this Trainer")


def test_the_variable_names_one_of_the_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_root.VARIABLE, "lightning")
    with pytest.raises(ValueError, match=r"AUTOPAR_LIGHTNING='lightning' must be lightning\.pytorch or pytorch_lightning"):
        _root.chosen()


def test_an_objects_class_says_whose_it_is() -> None:
    _root.check(object(), "this thing")
    assert _root.choice is None
    _root.check(Derived(), "this module")
    assert _root.chosen() == PL


def test_a_child_of_ours_is_told_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _root.for_child({"A": "1"}) == {"A": "1"}
    _root.choose(PL, "this Trainer")
    assert _root.for_child({"A": "1"}) == {"A": "1", _root.VARIABLE: PL}


@pytest.mark.parametrize(("found", "why"), [("2.5.2", "is older than 2.5.3"), ("2.4", "is older"), ("2.6.3", "was compromised")])
def test_a_version_that_cannot_be_used_is_refused(found: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: found)
    with pytest.raises(ValueError, match=rf"pytorch-lightning {found} {why}.*pip install --upgrade pytorch-lightning"):
        _root.choose(PL, "this Trainer")
    assert _root.choice is None


@pytest.mark.parametrize("found", ["2.5.3", "2.5.3.post1", "2.6.6", "2.10.0.dev20260101", "3.0"])
def test_other_versions_are_used(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: found)
    _root.choose(L, "this Trainer")
    assert _root.version() == found


# -- the guess ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "root"),
    [
        ("if later: from pytorch_lightning import Trainer", PL),
        ("if later: import lightning as L", L),
        ("if later: from lightning import pytorch as pl", L),
        ("def main():\n    def inner():\n        import pytorch_lightning.callbacks", PL),
        ("if later:\n    from lightning.fabric import seed_everything\n    import pytorch_lightning", PL),
        ("lightning = 1\nif later: import pytorch_lightning", PL),
    ],
)
def test_imports_still_to_come_count(code: str, root: str) -> None:
    assert guessed(code) == root


def test_what_a_notebook_holds_counts() -> None:
    assert guessed("", pl=ModuleType(PL)) == PL
    _root.choice = None
    assert guessed("", Net=Derived) == PL


def test_what_was_imported_says_more_than_what_could_be() -> None:
    either = "if later:\n    import lightning.pytorch as pl\n    import pytorch_lightning as pl"
    assert guessed(either, pl=ModuleType(PL)) == PL


def test_lightnings_own_code_counts() -> None:
    assert guessed("", __name__="pytorch_lightning.cli") == PL


def test_a_module_that_says_nothing_is_passed_over() -> None:
    """As a library that wraps ours, between the user's script and us."""
    code = "if later: import pytorch_lightning\nthrough = outer()"

    def library() -> str:
        return guessed("")

    namespace: dict[str, Any] = {"__name__": "script", "outer": library, "later": False}
    exec(compile(code, "script.py", "exec"), namespace)
    assert namespace["through"] == PL


def guessed_where_no_code_says_it() -> str:
    """On a thread's stack there is no module of a user's."""
    with ThreadPoolExecutor() as pool:
        return pool.submit(_root.chosen).result()


@pytest.mark.parametrize(("loaded", "root"), [((PL,), PL), ((L,), L), ((L, PL), L), ((), L)])
def test_without_a_word_it_is_what_was_imported_or_is_installed(
    loaded: tuple[str, ...], root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in _root.ROOTS:
        monkeypatch.setitem(sys.modules, each, ModuleType(each) if each in loaded else None)  # type: ignore[arg-type]
    assert guessed_where_no_code_says_it() == root


def test_without_lightning_it_is_pytorch_lightning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("lightning", *_root.ROOTS):
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    assert guessed_where_no_code_says_it() == PL
    (tmp_path / "lightning").mkdir()
    (tmp_path / "lightning" / "__init__.py").touch()  # a package of the user's
    monkeypatch.setitem(sys.modules, "lightning", ModuleType("lightning"))
    monkeypatch.delitem(sys.modules, "lightning")
    monkeypatch.syspath_prepend(tmp_path)
    _root.choice = None
    assert guessed_where_no_code_says_it() == PL


# -- the one module that imports Lightning -----------------------------------------------------------------------------------------------


def _imports(tree: ast.AST) -> list[str]:
    """The modules that code imports when it runs, by import statements."""
    found = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            found += [name for each in node.orelse for name in _imports(each)]
            continue
        found += [each.name for each in node.names] if isinstance(node, ast.Import) else []
        found += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        found += _imports(node)
    return found


def _mentioning(words: str) -> Iterator[tuple[Path, str]]:
    """The package's files in whose text a pattern is found; to parse them all takes seconds."""
    texts = ((path, path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py"))
    return ((path, text) for path, text in texts if re.search(words, text, re.MULTILINE))


_ROOTS = "(lightning|pytorch_lightning|lightning_fabric)"


def test_one_module_imports_lightning() -> None:
    mentioning = _mentioning(rf"^\s*(from|import) {_ROOTS}\b")
    found = {path.name for path, text in mentioning if any(re.fullmatch(rf"{_ROOTS}(\..*)?", name) for name in _imports(ast.parse(text)))}
    assert found == {"_lightning.py"}


def test_private_names_are_for_the_doorways_alone() -> None:
    found = {
        path.name
        for path in PACKAGE.rglob("*.py")
        for line in re.findall(r"from lightning_autopar\._lightning import (\([^)]*\)|.*)", path.read_text(encoding="utf-8"))
        if re.search(r"\b_\w+", line)
    }
    assert found == {"_lightning_compat.py"}


@pytest.mark.parametrize("root", _root.ROOTS)
def test_every_name_is_of_the_chosen_root(monkeypatch: pytest.MonkeyPatch, root: str) -> None:
    monkeypatch.setattr(_root, "choice", _root.Choice(root))
    names = runpy.run_path(str(PACKAGE / "_lightning.py"))
    branch = next(each for each in ast.parse((PACKAGE / "_lightning.py").read_text(encoding="utf-8")).body if isinstance(each, ast.If))
    asked = [alias.asname or alias.name for statement in branch.body for alias in statement.names]  # type: ignore[attr-defined]
    assert len(asked) > 70
    assert set(asked) <= set(names)
    homes = {names[name].__module__ for name in asked if isinstance(names[name], type)} | {names["pl"].__name__, names["fabric"].__name__}
    packages = {"lightning"} if root == L else {"pytorch_lightning", "lightning_fabric"}
    assert {home.partition(".")[0] for home in homes} <= packages | {"torch"}


def test_no_string_names_one_root_alone() -> None:
    """A prefix of a class's module that knew one root would take the other's classes for the user's."""
    found = set()
    for path, text in _mentioning(rf"""["']{_ROOTS}\b"""):
        if path.name not in ("_root.py", "_lightning.py", "_autoload.py"):
            texts = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
            found |= {f"{path.name}: {each}" for each in texts if re.fullmatch(rf"{_ROOTS}(\.[\w.]*)?", each)}
    loggers = {f"calibration.py: {name}" for name in (*_root.ROOTS, "lightning", "lightning.fabric", "lightning_fabric")}
    assert found == {*loggers, "host.py: lightning", "doctor.py: lightning"}


def test_packages_are_installed_wherever_pip_has_put_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``pip install --target libraries`` on a cluster: such a package's globals aren't brought back."""
    for name in ("libraries/theirs-1.0.dist-info", "project/mine.egg-info"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "libraries/theirs-1.0.dist-info/RECORD").write_text("theirs/__init__.py,,\nsingle.py,,\ntheirs-1.0.dist-info/RECORD,,\n")
    (tmp_path / "project/mine.egg-info/PKG-INFO").write_text("Name: mine\nVersion: 1\n")
    (tmp_path / "project/mine.egg-info/SOURCES.txt").write_text("mine/train.py\n")
    monkeypatch.setattr(sys, "path", [f"{tmp_path}/libraries", f"{tmp_path}/project/", "", *sys.path])
    found = {
        name: _root.is_installed(str(tmp_path / name))
        for name in ("libraries/theirs/a/b.py", "libraries/single.py", "libraries/script.py", "project/mine/train.py", "elsewhere/x.py")
    }
    assert [name for name, installed in found.items() if installed] == ["libraries/theirs/a/b.py", "libraries/single.py"]
    assert _root.is_installed(str(metadata.distribution("torch").locate_file("torch/__init__.py")))
