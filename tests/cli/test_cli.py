"""The command line: scripts are run up to ``fit``, and nothing is trained."""

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

from lightning_autopar.cli import main
from lightning_autopar.devices.spec import parse_spec
from lightning_autopar.strategies.calibration import calibration
from lightning_autopar.strategies.calibration.calibration import Measurement
from lightning_autopar.strategies.launcher import AutoLauncher
from lightning_autopar.timing.measured_curves import Curve
from lightning_autopar.timing.measured_rates import device_key
from tests.processes import lean_path

# Lightning's own word on its default logger, once a process.
pytestmark = pytest.mark.filterwarnings("ignore:.*tensorboardX:UserWarning")

_MODULE = """
import sys, torch, lightning as L
from torch import nn
from torch.utils.data import DataLoader

class Net(L.LightningModule):
    def __init__(self, width: int = 256):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3)))
    def training_step(self, batch, batch_idx):
        self.log("loss", loss := self.layers(batch).square().mean())
        return loss
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layers(batch).square().mean())
    def on_exception(self):
        raise AssertionError
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

class Told(L.Callback):
    def on_exception(self, trainer, module, exception):
        print("told of an exception")

def data(width=256):
    return DataLoader(torch.randn(32, width), batch_size=16)
"""


def _script(folder: Path, body: str) -> str:
    path = folder / "train.py"
    path.write_text(_MODULE + dedent(body))
    return str(path)


_FIT = """
    print("words of the script's own", sys.argv[1:])
    trainer = L.Trainer(strategy="autopar", max_epochs=1, callbacks=[Told()])
    trainer.fit(Net(), data(), data())
    print("trained")
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _json(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert main(["plan", "--json", *arguments]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_script_is_planned_for_and_nothing_is_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = _script(tmp_path, _FIT)
    before = Trainer.__init__, AutoLauncher.launch, sys.argv[:], sys.path[:]
    assert main(["plan", "--devices", "2xcpu:1GiB", script, "--lr", "0.1"]) == 0
    shown = capsys.readouterr()
    assert "Chosen:" in shown.out
    assert "activations" in shown.out
    assert "layers.0" in shown.out
    assert "words of the script's own ['--lr', '0.1']" in shown.err
    assert "trained" not in shown.out + shown.err
    assert "told of an exception" not in shown.out + shown.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]
    assert before == (Trainer.__init__, AutoLauncher.launch, sys.argv, sys.path)


def test_json_is_the_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = _json(capsys, "--devices", "2xcpu:1GiB", _script(tmp_path, _FIT))
    assert found["function"] == "fit"
    assert found["replaced_strategy"] is None
    assert found["footprint"]["parameters"] == 3 * (256 * 256 + 256)
    best = found["candidates"][found["best"]]
    assert best["fits"]
    assert found["run"] == {"batches": 2, "batch": "global", "elastic": False}
    assert best["run_seconds"] == 2 * best["seconds"]["step"]


def test_json_says_how_long_a_run_is_and_whether_it_moves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = """
        from lightning_autopar import ElasticReplan
        L.Trainer(strategy="autopar", max_steps=5, max_epochs=-1, callbacks=[ElasticReplan()]).fit(Net(), data())
    """
    assert _json(capsys, "--devices", "cpu:1GiB", _script(tmp_path, body))["run"] == {"batches": 5, "batch": "global", "elastic": True}


@pytest.mark.parametrize("strategy", ["'ddp'", "'auto'", "L.pytorch.strategies.FSDPStrategy()"])
def test_another_strategy_on_gpus_that_are_not_here_is_replaced(strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = _script(tmp_path, f"L.Trainer(strategy={strategy}, accelerator='gpu', devices=4, num_nodes=2).fit(Net(), data())")
    found = _json(capsys, "--devices", "8xH100-80GB", script)
    assert found["replaced_strategy"] == strategy.strip("'").removeprefix("L.pytorch.strategies.").removesuffix("()")
    assert found["candidates"][found["best"]]["plan"]["devices"][0].startswith("H100")


def test_the_strategys_own_settings_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = _script(
        tmp_path,
        """
        from lightning_autopar import AutoParallelStrategy
        L.Trainer(strategy=AutoParallelStrategy(allow=["single"], devices="2xcpu:2GiB")).fit(Net(), data())
        """,
    )
    found = _json(capsys, script)
    assert {candidate["plan"]["engine"] for candidate in found["candidates"] if candidate["fits"]} == {"single"}
    assert len(found["inventory"]["devices"]) == 2
    assert len(_json(capsys, "--devices", "3xcpu:2GiB", script)["inventory"]["devices"]) == 3


def test_validation_before_fit_is_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = _script(
        tmp_path,
        """
        trainer = L.Trainer()
        net = Net()
        assert trainer.validate(net, data()) == []
        trainer.fit(net, data())
        """,
    )
    assert _json(capsys, "--devices", "2xcpu:1GiB", script)["function"] == "fit"


def test_a_script_that_only_validates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--devices", "2xcpu:1GiB", _script(tmp_path, "L.Trainer().validate(Net(), data())")]) == 0
    assert "The script calls validate, not fit" in capsys.readouterr().out


def test_nothing_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = _script(tmp_path, _FIT.replace("Net()", "Net(512)").replace("data()", "data(512)"))  # a layer alone takes it
    assert _json(capsys, "--devices", "2xcpu:1MiB", script, code=1)["best"] is None
    assert main(["plan", "--devices", "2xcpu:1MiB", script]) == 1
    assert "Nothing fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("raise KeyError('no such dataset')", "train.py failed (KeyError: 'no such dataset') before it called fit"),
        ("raise ValueError('no such column')", "train.py failed (ValueError: no such column) before it called fit"),
        ("sys.exit('needs an argument')", "before it called fit"),
        ("pass", "train.py ended before it called fit"),
        ("L.Trainer(accelerator='nonsense').fit(Net(), data())", "nonsense"),
    ],
)
def test_a_script_that_never_comes_to_fit(body: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", _script(tmp_path, body)]) == 2
    shown = capsys.readouterr()
    assert says in shown.err
    assert not shown.out


def test_a_script_that_python_cannot_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its own line alone: no frame of this package stands above it."""
    script = tmp_path / "broken.py"
    script.write_text("def f(:\n")
    assert main(["plan", str(script)]) == 2
    assert "def f(:" in caplog.text
    assert "lightning_autopar/" not in caplog.text.partition("own traceback:")[2]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["plan", "nowhere.py"], "there is no script 'nowhere.py'"),
        (["plan", "--picture", "plan.txt", __file__], "must end in '.html'"),
        (["devices", "--devices", "3xFOO"], "FOO"),
        (["calibrate", "--devices", "8xH100-80GB"], "catalogue devices can be planned for only"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert says in capsys.readouterr().err


def test_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices", "--devices", "2xcpu:4GiB", "--json"]) == 0
    assert [device["free_bytes"] for device in json.loads(capsys.readouterr().out)["devices"]] == [4 << 30] * 2
    assert main(["devices", "--devices", "2xcpu:4GiB"]) == 0
    shown = capsys.readouterr().out
    assert "cpu:1" in shown
    assert "4 GiB" in shown


def test_devices_with_what_was_measured_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    inventory = parse_spec("2xcpu:4MiB")
    key = device_key(inventory.devices[0])
    curves = [
        Curve(subject=key, thing="matmul/512", dtype="fp32", sizes=(512,), seconds=(2 * 512**3 / 90e9,)),
        Curve(subject=key, thing="all_reduce", ranks=2, sizes=(1024,), seconds=(1e-3,)),
    ]
    monkeypatch.setattr(calibration, "measurements", lambda *_: [Measurement(title="it", run=lambda _: curves)])
    assert main(["calibrate", "--devices", "2xcpu:4MiB", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["curves"]) == 2
    for command in ("devices", "calibrate"):
        assert main([command, "--devices", "2xcpu:4MiB"]) == 0
        shown = capsys.readouterr().out
        assert "90 GFLOP/s" in shown
        assert "all_reduce of 2 ranks: 1 ms" in shown
    assert main(["devices", "--devices", "2xcpu:4MiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["measured"]
    assert found["devices"][1]["rates"]["flops_per_second"] == pytest.approx(90e9)
    assert found["devices"][1]["rates"]["bytes_per_second"] is None


def test_lightning_cli_as_a_program(tmp_path: Path) -> None:
    script = _script(
        tmp_path,
        """
        from lightning.pytorch.cli import LightningCLI
        class Data(L.LightningDataModule):
            def train_dataloader(self):
                return data()
        if __name__ == "__main__":
            LightningCLI(Net, Data)
        """,
    )
    program = Path(sys.executable).with_name("lightning-autopar")
    command = [program, "plan", "--json", "--devices", "2xcpu:1GiB", script, "fit", "--model.width=256", "--trainer.strategy=ddp"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, env={**os.environ, "PYTHONPATH": lean_path()})
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert (found["function"], found["replaced_strategy"]) == ("fit", "ddp")
    assert not (tmp_path / "lightning_logs").exists()
