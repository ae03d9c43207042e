"""A script of somebody's, run here and started again."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from lightning_autopar.devices.spec import parse_spec
from lightning_autopar.strategies.processes.users_script import Script, is_ours, own_traceback, rerun_command, started_by


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("import sys; import beside; beside.seen += [sys.argv[:], sys.path[0], __name__]")
    (tmp_path / "beside.py").write_text("seen = []")
    return path


def test_it_finds_what_python_gives_it(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    before = sys.argv[:], sys.path[:], sys.modules["__main__"]
    Script(target=str(script), arguments=("--lr", "1")).run()
    assert sys.modules.pop("beside").seen == [[str(script), "--lr", "1"], str(script.parent), "__main__"]
    assert before == (sys.argv, sys.path, sys.modules["__main__"])


def test_this_programs_own_folder_is_no_place_of_the_scripts(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/opt/program/bin/lightning-autopar"])
    monkeypatch.setattr(sys, "path", ["/opt/program/bin", *sys.path])
    script.write_text("import sys; raise SystemExit(sys.path[:2])")
    with pytest.raises(SystemExit) as left:
        Script(target=str(script)).run()
    assert left.value.code[0] == str(script.parent)
    assert "/opt/program/bin" not in left.value.code


def test_the_traceback_is_the_scripts_own(script: Path) -> None:
    script.write_text("def deep():\n    1 / 0\ndeep()")
    with pytest.raises(ZeroDivisionError) as caught:
        Script(target=str(script)).run()
    found = own_traceback(caught.value)
    assert found is not None
    assert (found.tb_frame.f_code.co_filename, found.tb_lineno) == (str(script), 3)
    assert own_traceback(ValueError("raised nowhere")) is None


def test_a_refusal_is_no_error_of_python_in_this_package() -> None:
    with pytest.raises(ValueError, match="the device spec") as refused:
        parse_spec("2x")
    assert is_ours(refused.value)
    with pytest.raises(ValueError, match="invalid literal") as failed:
        exec(compile("int('two')", parse_spec.__code__.co_filename, "exec"))
    assert not is_ours(failed.value)
    assert not is_ours(RuntimeError("of somebody's"))


def test_it_is_started_again_as_it_was_started(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(script), "--lr", "1"])
    with started_by(["python", "-m", "lightning_autopar", "run", str(script)]):
        assert rerun_command() == ["python", "-m", "lightning_autopar", "run", str(script), "--lr", "1"]
    main = ModuleType("__main__")
    main.__file__, main.__spec__ = str(script), None
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert rerun_command() == [sys.executable, str(script), "--lr", "1"]


@pytest.mark.parametrize("file", [None, "<stdin>"])
def test_a_notebook_and_what_is_piped_to_python_cannot_be_started_again(file: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    main = ModuleType("__main__")
    if file is not None:
        main.__file__ = file
    monkeypatch.setitem(sys.modules, "__main__", main)
    with pytest.raises(ValueError, match="restart the kernel and call fit before anything else"):
        rerun_command()


@pytest.mark.parametrize("target", ["nothing", "nothing.at.all", "xml.nothing"])
def test_a_module_that_is_not_there(target: str) -> None:
    with pytest.raises(ValueError, match=f"there is no module '{target}'"):
        Script(target=target, is_module=True).run()
