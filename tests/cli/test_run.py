"""``lightning-autopar run``: somebody's script as it is, under autopar whatever it names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.trainer import trainer as trainer_module

from lightning_autopar.cli import main, run
from tests.processes import lean_path

_MODULE = """
import sys, torch, lightning as L
from torch import nn
from torch.utils.data import DataLoader

class Net(L.LightningModule):
    def __init__(self, width: int = 16):
        super().__init__()
        self.layer = nn.Linear(width, width)
    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def data():
    return DataLoader(torch.randn(32, 16), batch_size=16)

def trainer(**more):
    quiet = dict(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    return L.Trainer(**{**quiet, "accelerator": "cpu", **more})
"""
_DDP = """
from lightning.pytorch.strategies import DDPStrategy
from lightning_autopar import CheckpointMigrate
strategy = DDPStrategy(find_unused_parameters=True, process_group_backend="gloo")
made = trainer(strategy=strategy, devices=2, callbacks=[CheckpointMigrate()])
made.fit(Net(), data())
print("it trained", made.global_step, "steps under", type(made.strategy).__name__, sys.argv[1:])
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "_told", set())


def _script(folder: Path, body: str, name: str = "train.py") -> str:
    path = folder / name
    path.write_text(_MODULE + dedent(body))
    return str(path)


def _summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return found


def test_another_strategy_is_replaced_and_said_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOPAR_RUNS", str(tmp_path))
    before = Trainer.__init__, trainer_module._AcceleratorConnector, sys.argv[:], sys.path[:]
    script = _script(tmp_path, _DDP)
    options = ["--json", "run.json", "--picture", "run.html", "--allow", "ddp", "--devices", "2xcpu:1GiB"]
    assert main(["run", *options, script, "--lr", "1"]) == 0
    assert before == (Trainer.__init__, trainer_module._AcceleratorConnector, sys.argv, sys.path)
    shown = capfd.readouterr()
    assert "it trained 2 steps under AutoParallelStrategy ['--lr', '1']" in shown.out
    assert shown.err.count("autopar takes the place of the script's strategy DDPStrategy(") == 1
    for words in ("dropped: find_unused_parameters=True", "dropped: process_group_backend='gloo'", "each of 2 devices took one"):
        assert shown.err.count(words) == 1
    found = _summary(tmp_path)
    assert (found["exit_code"], found["arguments"]) == (0, ["--lr", "1"])
    (trained,) = found["trainers"]
    assert trained["replaced"]["name"] == "DDPStrategy"
    assert (trained["plan"]["engine"], trained["title"]) == ("ddp", "ddp ×2")
    assert trained["predicted"]["seconds"]["step"] > 0
    assert set(trained["measured"]) == {"cpu:0", "cpu:1"}
    assert [(span["title"], span["devices"]) for span in trained["history"]["spans"]] == [("ddp ×2", ["cpu:0", "cpu:1"])]
    assert "ddp ×2" in (tmp_path / "run.html").read_text(encoding="utf-8")


def test_each_devices_own_batch_can_be_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = _script(tmp_path, "trainer(strategy='ddp', devices=2).fit(Net(), data())")
    assert main(["run", "--batch", "per_device", "--allow=single", script]) == 0
    assert "took one" not in capsys.readouterr().err


def test_the_strategys_own_settings_give_way_to_the_command_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = _script(
        tmp_path,
        """
        from lightning_autopar import AutoParallelStrategy
        mine = AutoParallelStrategy(allow=["ddp"], memory_margin=0.3, wait="3h")
        trainer(strategy=mine, devices=1).fit(Net(), data())
        assert mine.plan.engine == "single" and mine.settings.memory_margin == 0.3 and mine.settings.memory_limit_bytes == 2**29
        assert (mine.settings.wait.wait_seconds, mine.settings.wait.rank) == (10800, 5)
        """,
    )
    assert main(["run", "--allow", "single", "--memory-limit", "512MiB", "--priority", "5", script]) == 0
    assert "takes the place" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        ("sys.exit(7)", 7, ""),
        ("sys.exit('it needs an argument')", 1, "it needs an argument\n"),
        ("def deep():\n    raise KeyError('no such dataset')\ndeep()", 1, "KeyError: 'no such dataset'\n"),
        ("raise ValueError('of its own')", 1, "ValueError: of its own\n"),
        (
            "print('no Trainer')",
            0,
            "train.py created no Trainer of Lightning, and called train of no Trainer of transformers; it ran unchanged",
        ),
    ],
)
def test_the_script_ends_as_under_python(
    body: str, code: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("last_type", "last_value", "last_traceback"):
        monkeypatch.setattr(sys, name, None, raising=False)
    script = _script(tmp_path, body)
    assert main(["run", script]) == code
    shown = capsys.readouterr().err
    assert says in shown
    if "Error" in says:
        assert shown.startswith(f'Traceback (most recent call last):\n  File "{script}", line')
        assert "lightning_autopar" not in shown


def test_a_refusal_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = _script(tmp_path, "trainer().fit(Net(), data())")
    assert main(["run", "--devices", "1xcpu:1GiB", "--allow", "ddp", script]) == 1
    shown = capsys.readouterr().err
    assert "lightning-autopar: no plan fits: " in shown
    assert "Traceback" not in shown


def test_a_trainer_fails_in_the_scripts_own_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = _script(tmp_path, "trainer(accelerator='nonsense')")
    assert main(["run", script]) == 1
    assert f'File "{script}"' in capsys.readouterr().err


def test_a_module_is_run_as_python_runs_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = tmp_path / "apackage"
    package.mkdir()
    (package / "__init__.py").touch()
    _script(package, "print(__name__, __spec__.name, sys.argv[1:], sys.path[0])", "train.py")
    assert main(["run", "-m", "apackage.train", "--lr", "1"]) == 0
    assert capsys.readouterr().out == f"__main__ apackage.train ['--lr', '1'] {tmp_path}\n"
    assert main(["run", "-m", "apackage.nothing"]) == 2
    assert "there is no module 'apackage.nothing'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere.py"], "there is no script 'nowhere.py'"),
        ([], "no script is named"),
        (["--plan", "nowhere.json", "here.py"], "the plan file 'nowhere.json' can't be read"),
        (["--plan", "here.py", "here.py"], "holds no JSON"),
        (
            ["--allow", "dpp", "here.py"],
            "names the unknown engine 'dpp'; the engines are 'single', 'ddp', 'fsdp', 'zero', 'pipeline': did you",
        ),
        (
            ["--memory-limit", "20", "here.py"],
            "memory_limit='20' is 20 bytes, and less than 1 MiB is of no use; write the unit, such as '20GiB'",
        ),
        (["--memory-limit", "1kB", "here.py"], "is 1000 bytes, and less than 1 MiB is of no use; write a larger size, such as '4GiB'"),
        (["--memory-limit", "80%", "here.py"], "memory_limit: '80%' is no memory size; write bytes as a number or a size such as '4GiB'"),
        (["--memory-margin", "2", "here.py"], "memory_margin=2.0 must be a share from 0 up to but not including 1, such as 0.05"),
        (["--allow", "here.py"], "--allow got 'here.py' as its value; give --allow a value of its own before the script, or leave it out"),
        (["--json", "here.py"], "--json got 'here.py' as its value"),
        (["--devices", "3xFOO", "here.py"], "the device spec '3xFOO': there is no device 'FOO' in the catalogue"),
        (
            ["accelerate", "launch", "here.py"],
            "'accelerate' starts scripts, but is no script; name the training script itself, as in run train.py",
        ),
        (["--picture", "run.html", "here.py"], "there is nothing to draw into 'run.html': the script ran no Trainer"),
        (["--picture", "run.png", "here.py"], "must end in '.html'"),
        (["--picture", "no/run.html", "here.py"], "--picture 'no/run.html' can't be written; name a file in a folder that is there"),
        (["--json", "no/run.json", "here.py"], "--json 'no/run.json' can't be written; name a file in a folder that is there"),
    ],
)
def test_what_cannot_be_started_is_said_in_a_sentence(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _script(tmp_path, "print('it ran')", "here.py")
    assert main(["run", *arguments]) == 2
    said = capsys.readouterr()
    assert says in said.err
    assert not said.out or "nothing to draw" in says, "before the script runs, which may take days"


def test_a_training_that_sigterm_has_ended_does_not_end_with_zero(tmp_path: Path) -> None:
    """By Lightning's exception it did, so that a sweep took the run for done and never ran it again."""
    body = "from lightning.pytorch.utilities.exceptions import SIGTERMException\nraise SIGTERMException"
    assert main(["run", _script(tmp_path, body)]) == 143


@pytest.mark.parametrize("command", ["run", "plan"])
def test_options_of_the_script_in_front_of_it_are_named(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--lr", "0.1", "train.py"])
    assert f"{command} has no option --lr; options of the script go behind it, as in {command} train.py" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--allow", "--devices", "--memory-limit", "--picture", "--plan"])
@pytest.mark.parametrize("command", ["run", "plan"])
def test_an_option_that_got_the_script_as_its_value_is_named(command: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, option, "train.py", "--lr", "1"])
    said = capsys.readouterr().err
    assert f"{option} got 'train.py' as its value; give {option} a value of its own before the script, or leave it out" in said
    assert "--lr" not in said


@pytest.mark.parametrize("command", ["run", "plan"])
def test_options_after_the_script_are_named_where_the_script_refuses_them(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = _script(tmp_path, "import argparse\nargparse.ArgumentParser().parse_args()")
    assert main([command, script, "--devices", "2xcpu:1GiB"]) != 0
    assert (
        "--devices stands after train.py, so the script got it; options of lightning-autopar go before the script"
        in capsys.readouterr().err
    )
    assert main([command, script, "--lr", "1"]) != 0
    assert "go before the script" not in capsys.readouterr().err


def test_options_after_a_script_that_reads_none_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Else a plan for the devices that are here would pass for one for those that were named."""
    body = "trainer(strategy='ddp', devices=1).fit(Net(), data())"
    own = _script(tmp_path, f"import argparse\nargparse.ArgumentParser().add_argument('--devices')\n{body}", "own.py")
    for command, script, told in (("plan", _script(tmp_path, body), True), ("run", _script(tmp_path, body), True), ("plan", own, False)):
        assert main([command, script, "--devices", "8xH100-80GB"]) == 0
        assert ("--devices stands after train.py, so the script got it" in capsys.readouterr().err) is told


def test_how_long_and_how_important(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = _script(
        tmp_path,
        """
        made = trainer(strategy="ddp", devices=1)
        made.fit(Net(), data())
        assert (made.strategy.settings.wait.wait_seconds, made.strategy.settings.wait.rank) == (7200, -5)
        """,
    )
    assert main(["run", "--allow=single", "--wait", "2h", "--priority=-5", script]) == 0
    assert main(["run", "--wait", "soon", script]) == 2
    assert "wait='soon' must be 'forever', 'never' or how long to wait" in capsys.readouterr().err
    assert main(["run", "--priority", "500", script]) == 2
    assert "priority=500 must be a whole number from -100 to 100" in capsys.readouterr().err


def test_what_plan_prints_is_a_plan_to_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = _script(tmp_path, "trainer().fit(Net(), data())")
    assert main(["plan", "--json", "--devices", "2xcpu:1GiB", "--allow", "ddp", script]) == 0
    report = capfd.readouterr().out
    (tmp_path / "plan.json").write_text(report)
    assert main(["run", "--plan", "plan.json", "--devices", "2xcpu:1GiB", "--json", "run.json", script]) == 0
    found = json.loads(report)
    assert _summary(tmp_path)["trainers"][0]["plan"]["engine"] == found["candidates"][found["best"]]["plan"]["engine"] == "ddp"


def test_nothing_is_imported_before_the_script_imports_it(tmp_path: Path) -> None:
    script = tmp_path / "looks.py"
    script.write_text("import sys; print([name for name in ('torch', 'lightning', 'rich') if name in sys.modules], __file__, __spec__)")
    done = _as_a_program("run", str(script))
    assert (done.returncode, done.stdout) == (0, f"[] {script} None\n")


def test_a_rerun_of_the_script_is_replaced_as_well(tmp_path: Path) -> None:
    body = """
    import os
    import lightning_autopar.strategies.launcher as launcher
    launcher.unforkable = lambda: "this process has used a GPU already"
    made = trainer(strategy="ddp", devices=2)
    made.fit(Net(), data())
    print(f"rank {os.environ['LOCAL_RANK']}: {made.strategy.plan.title()} {sys.argv[1:]}\\n", end="", flush=True)
    """
    done = _as_a_program("run", "--allow=ddp", "--json=run.json", _script(tmp_path, body), "--lr=1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0: ddp ×2 ['--lr=1']", "rank 1: ddp ×2 ['--lr=1']"]
    assert done.stderr.count("takes the place of") == 1
    assert _summary(tmp_path)["trainers"][0]["title"] == "ddp ×2"


def _as_a_program(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lightning_autopar", *arguments]
    environment = {**os.environ, "AUTOPAR_DEVICES": "", "PYTHONPATH": lean_path()}
    return subprocess.run(command, capture_output=True, text=True, timeout=110, cwd=cwd, env=environment, check=False)
