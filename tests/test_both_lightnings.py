"""One implementation serves ``lightning.pytorch`` and ``pytorch_lightning``. Each script is a process of its own, as a process has one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_autopar._root import ROOTS
from tests.rootless import Rootless

L, PL = ROOTS
OTHER = {L: PL, PL: L}
#: A library that imports the other one, before the script imports its own.
LIBRARY = "exec('import {other}', {{'__name__': 'a_library'}})\n"
MODULE = """
import sys, torch
from {root} import Callback, LightningModule, Trainer
from {root}.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Tanh()) for _ in range(3))
        self.layers = nn.Sequential(nn.Linear(8, 8), *blocks, nn.Linear(8, 1))
    def training_step(self, batch, index):
        self.log("loss", loss := self.layers(batch).square().mean(), on_epoch=True)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)

def fit(begin=None, max_epochs=2, **options):
    torch.manual_seed(0)
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing="default_root_dir" in options)
    made = Trainer(max_epochs=max_epochs, accelerator="cpu", **quiet, **options)
    made.fit(net := Net(), DataLoader(torch.randn(24, 8, generator=torch.Generator().manual_seed(1)), 8, shuffle=True), ckpt_path=begin)
    return made, net

def say_root():
    import json
    from lightning_autopar import _root
    print("GOT", json.dumps(_root.chosen()))
"""
FIT = """
from lightning_autopar import AutoParallelStrategy
engine, folder, begin = sys.argv[1:]
keep = ModelCheckpoint(dirpath=folder, filename="{{epoch}}", save_top_k=-1)
trainer, net = fit(begin or None, strategy=AutoParallelStrategy(allow=[engine], calibrate=False), callbacks=[keep], default_root_dir=folder)
assert (trainer.strategy.plan.engine, trainer.global_step) == (engine, 6)
torch.save([net.state_dict(), dict(trainer.callback_metrics)], folder + "/left.pt")
say_root()
"""
#: How each script's process begins: ``pytorch_lightning``'s where the other isn't installed, the other's where a library imports that.
BEGIN = {PL: "import sys; sys.modules['lightning'] = None\n", L: LIBRARY}


def module(root: str, *, before: str = "", after: str = "") -> str:
    return (before + MODULE + after).format(root=root, other=OTHER[root])


def got(result: tuple[int, str]) -> Any:
    """The root that a script used."""
    code, said = result
    assert code == 0, said
    return json.loads(next(line for line in said.splitlines() if line.startswith("GOT")).removeprefix("GOT"))


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rootless]:
    rootless = Rootless(tmp_path_factory.mktemp("scripts"))
    yield rootless
    rootless.close()


Fit = Callable[..., Path]


@pytest.fixture(scope="module")
def fit(python: Rootless, tmp_path_factory: pytest.TempPathFactory) -> Fit:
    """Fits under an engine, with a root; returns the folder of what it left."""

    @cache
    def fit(engine: str, root: str, begin: Path | None = None) -> Path:
        folder = tmp_path_factory.mktemp(f"{root}-{engine}")
        result = python.run(module(root, before=BEGIN[root], after=FIT), engine, str(folder), str(begin or ""))
        assert got(result) == root
        return folder

    return fit


def left(folder: Path) -> Any:
    return torch.load(folder / "left.pt", weights_only=True)


@pytest.mark.parametrize("engine", ["ddp", "fsdp", "pipeline", "zero"])
def test_the_weights_are_the_other_lightnings_bit_for_bit(engine: str, fit: Fit) -> None:
    torch.testing.assert_close(left(fit(engine, L)), left(fit(engine, PL)), rtol=0, atol=0)


@pytest.mark.parametrize(("engine", "root"), [("fsdp", L), ("pipeline", PL)])
def test_a_run_goes_on_from_the_other_lightnings_checkpoint(engine: str, root: str, fit: Fit) -> None:
    went_on = fit(engine, root, fit(engine, OTHER[root]) / "epoch=0.ckpt")
    torch.testing.assert_close(left(went_on)[0], left(fit(engine, root))[0], rtol=0, atol=0)


def test_an_elastic_run_of_pytorch_lightning_moves(python: Rootless, tmp_path: Path) -> None:
    code = """
import json, os, time
from lightning_autopar import AutoParallelStrategy, CheckpointMigrate, ElasticReplan
from lightning_autopar.devices.simulated_neighbours import Neighbour, write_neighbours
from pathlib import Path
home = os.getpid()
class Slow(Callback):
    def on_train_batch_start(self, *args):
        if os.getpid() != home:
            time.sleep(0.02)
class Watch(Callback):
    interval_seconds = 0.01
    def look(self, run):
        if run.step is not None and run.step >= 4:
            write_neighbours(Path(os.environ["AUTOPAR_NEIGHBOURS"]), {{"cpu:0": Neighbour(taken_bytes=1024**3)}})
plain, expected = fit(max_epochs=12, devices=1)
replan = ElasticReplan(interval_seconds=0.05, patience=1, min_seconds_between_moves=0.0)
keep = ModelCheckpoint(dirpath=sys.argv[1])
trainer, net = fit(max_epochs=12, strategy=AutoParallelStrategy(allow=["single"], calibrate=False), default_root_dir=sys.argv[1],
                   callbacks=[CheckpointMigrate(), replan, Watch(), Slow(), keep])
assert [span.devices for span in trainer.strategy.history.spans] == [("cpu:0",), ("cpu:1",)], trainer.strategy.history
assert all(torch.equal(one, other) for one, other in zip(net.parameters(), expected.parameters()))
assert trainer.global_step == plain.global_step == 36 and Path(keep.best_model_path).is_file()
say_root()
"""
    environment = {"AUTOPAR_NEIGHBOURS": str(tmp_path / "neighbours.json"), "AUTOPAR_RUNS": str(tmp_path)}
    assert got(python.run(module(PL, after=code), str(tmp_path), **environment)) == PL


@pytest.mark.parametrize("root", ROOTS)
def test_lightning_cli_finds_the_class_and_the_name(root: str, python: Rootless, tmp_path: Path) -> None:
    code = """
from {root}.cli import LightningCLI
from lightning_autopar import _root
assert _root.choice is None
for config in sys.argv[1:]:
    cli = LightningCLI(Net, args=["--config", config], run=False, save_config_callback=None)
    assert isinstance(cli.trainer.strategy, sys.modules["{root}"].strategies.Strategy)
    assert isinstance(cli.trainer.callbacks[0], Callback)
    print(type(cli.trainer.strategy).__name__, type(cli.trainer.callbacks[0]).__name__)
say_root()
"""
    by_class, by_name = tmp_path / "class.yaml", tmp_path / "name.yaml"
    both = "trainer:\n  logger: false\n  callbacks:\n    - class_path: lightning_autopar.PlanMonitor\n  strategy: "
    by_class.write_text(both + "\n    class_path: lightning_autopar.AutoParallelStrategy\n    init_args: {allow: [single]}\n")
    by_name.write_text(both + "autopar\n")
    code, said = python.run(module(root, before=LIBRARY, after=code), str(by_class), str(by_name))
    assert got((code, said)) == root
    assert said.count("AutoParallelStrategy PlanMonitor") == 2


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("command", ["plan", "run"])
def test_a_script_of_either_is_planned_for_and_run(command: str, root: str, python: Rootless, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    body = """
from lightning_autopar import PlanMonitor
from {root}.strategies import DDPStrategy
trainer, net = fit(strategy=DDPStrategy(find_unused_parameters=True), devices=2, callbacks=[PlanMonitor()], default_root_dir=sys.argv[1])
print("trained", trainer.strategy.plan.title())
"""
    script.write_text(module(root, before="import lightning_autopar\n" + LIBRARY, after=body))
    code = "import sys\nfrom lightning_autopar.cli import main\ncode = main(sys.argv[1:])\n"
    code += "import json; from lightning_autopar import _root; print('GOT', json.dumps(_root.chosen())); sys.exit(code)\n"
    options = ("--devices", "2xcpu:1GiB", "--allow", "fsdp")
    result = python.run(code, command, *options, str(script), str(tmp_path / "left"))
    assert got(result) == root
    assert "dropped: find_unused_parameters=True" in result[1]
    if command == "plan":
        assert "Chosen: fsdp ×2" in result[1]
        assert "trained" not in result[1]
        assert not (tmp_path / "left").exists(), "no checkpoint is written"
    else:
        assert "trained fsdp ×2" in result[1]
        assert list((tmp_path / "left").rglob("*.ckpt"))


def test_who_mixes_them_reads_what_to_do(python: Rootless) -> None:
    code = """
from lightning_autopar import AutoParallelStrategy
import {other} as other
def raised(function):
    try:
        function()
    except ValueError as error:
        print(error)
    else:
        raise AssertionError(function)
fit(strategy="autopar", max_epochs=1)
raised(lambda: other.Trainer(strategy="autopar", logger=False))
raised(lambda: other.Trainer(strategy=AutoParallelStrategy(), accelerator="cpu", logger=False))
raised(lambda: fit(strategy="autopar", callbacks=[other.callbacks.Timer(duration=dict(hours=1))]))
fit(strategy="autopar", max_epochs=1)
say_root()
"""
    result = python.run(module(PL, after=code))
    assert got(result) == PL
    what = "is lightning.pytorch's, but autopar serves pytorch_lightning in this process already; import all Trainers, modules, callbacks"
    assert [result[1].count(f"{each} {what}") for each in ("this Trainer", "Timer")] == [2, 1]


def test_a_wrong_guess_is_told_with_the_remedy(python: Rootless) -> None:
    """The class is needed before anything names a root; then the remedy helps."""
    code = """
import importlib
from lightning_autopar import AutoParallelStrategy
Trainer = importlib.import_module("pytorch_" + "lightning").Trainer
for strategy in (AutoParallelStrategy(), "autopar"):
    try:
        print("is", Trainer(strategy=strategy, accelerator="cpu", logger=False).strategy.strategy_name)
    except ValueError as error:
        print(error)
"""
    told = "this Trainer is pytorch_lightning's, but lightning_autopar was imported for lightning.pytorch, since it is installed; "
    assert python.run(code)[1].count(f"{told}set AUTOPAR_LIGHTNING=pytorch_lightning, or write strategy='autopar'") == 2
    assert python.run(code, AUTOPAR_LIGHTNING=PL)[1].count("is autopar") == 2
