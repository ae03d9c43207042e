"""AutoParallelStrategy as a user meets it: its arguments, the Trainer's devices, LightningCLI."""

from __future__ import annotations

import inspect
import math
import sys
import warnings
from collections import UserList
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_autopar import AutoParallelStrategy, Batch, CheckpointMigrate, ElasticReplan, Plan, Turn
from lightning_autopar.strategies.processes import worker_supervisor


class Net(pl.LightningModule):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-2)


class Data(pl.LightningDataModule):
    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=self.batch_size, shuffle=True)


QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
    "max_epochs": 1,
}


def fit(root: Path, **options: Any) -> Any:
    pl.seed_everything(5, verbose=False)
    module = Net()
    trainer = pl.Trainer(default_root_dir=root, **{**QUIET, **options})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, datamodule=Data())
    return trainer


@pytest.fixture(autouse=True)
def _no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])  # LightningCLI warns of arguments in both places


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("a worker was started")

    monkeypatch.setattr(worker_supervisor, "run_generation", refuse)


PINNED = Plan(engine="ddp", devices=("cpu:0", "cpu:7"))


@pytest.mark.parametrize(
    ("arguments", "value", "remedy"),
    [
        ({"allow": ["fsdq"]}, "'fsdq'", "did you mean 'fsdp'"),
        ({"allow": []}, "[]", "name at least one"),
        ({"devices": "2xcpu:banana"}, "banana", "GiB"),
        ({"devices": "0xcpu"}, "0", "at least 1"),
        ({"devices": "four"}, "'four'", "known are"),
        ({"devices": ""}, "''", "write for example"),
        ({"memory_limit": "twenty"}, "'twenty'", "GiB"),
        ({"memory_limit": -1}, "-1", "positive"),
        ({"memory_margin": 1.0}, "1.0", "such as 0.05"),
        ({"memory_margin": -0.1}, "-0.1", "such as 0.05"),
        ({"memory_margin": "much"}, "'much'", "such as 0.05"),
        ({"batch": "each"}, "'each'", "'per_device'"),
        ({"objective": "fun"}, "'fun'", "'memory'"),
        ({"calibrate": "never"}, "'never'", "'auto'"),
        ({"calibrate": 3}, "3", "measure this machine once"),
        ({"calibrate": None}, "None", "take data sheets"),
        ({"plan": "/nowhere/plan.json"}, "'/nowhere/plan.json'", "give the path"),
        ({"plan": '{"engine": "ddp"}'}, "'devices'", "needs"),
        ({"plan": '{"engine": "single", "devices": ["cpu:0", "cpu:1"]}'}, "2", "one device"),
    ],
)
def test_a_bad_argument_is_told_with_value_and_remedy(arguments: dict[str, Any], value: str, remedy: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        AutoParallelStrategy(**arguments)
    assert value in str(caught.value)
    assert remedy in str(caught.value)


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize(("given", "rule"), [("auto", "auto"), (True, "now"), ("now", "now"), (False, "off"), ("off", "off")])
def test_when_to_measure_is_one_of_four_words(given: Any, rule: str) -> None:
    assert AutoParallelStrategy(calibrate=given).settings.calibrate == rule
    assert AutoParallelStrategy().settings.calibrate == "auto"


def test_it_has_at_most_ten_arguments() -> None:
    assert len(inspect.signature(AutoParallelStrategy).parameters) <= 10


def test_a_pinned_plan_needs_its_devices(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cpu:7"):
        fit(tmp_path, strategy=AutoParallelStrategy(devices="2xcpu:1GiB", plan=PINNED))


def test_a_pinned_plan_is_run_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(Plan(engine="ddp", devices=("cpu:1", "cpu:0")).to_json())
    trainer = fit(tmp_path, strategy=AutoParallelStrategy(devices="2xcpu:1GiB", plan=str(path)))
    assert trainer.strategy.plan.devices == ("cpu:1", "cpu:0")
    assert list(trainer.strategy.measured) == ["cpu:1", "cpu:0"]


@pytest.mark.parametrize("devices", [0, []])
def test_no_device_is_refused_before_anything_runs(devices: Any, tmp_path: Path) -> None:
    with pytest.raises((ValueError, MisconfigurationException, TypeError), match="devices"):
        fit(tmp_path, strategy=AutoParallelStrategy(), devices=devices)


@pytest.mark.parametrize(("devices", "count"), [("auto", 1), (1, 1), (2, 2), ("2", 2)])
def test_without_a_spec_the_trainers_number_splits_the_host(devices: Any, count: int, tmp_path: Path) -> None:
    trainer = pl.Trainer(strategy="autopar", devices=devices, default_root_dir=tmp_path, **QUIET)
    inventory, most = trainer.strategy.inventory()
    assert len(inventory.devices) == count
    assert inventory.source == "cpu"
    assert most in (None, count)


@pytest.mark.parametrize("devices", ["auto", 1, 2])
def test_a_spec_alone_says_what_there_is(devices: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_DEVICES", "3xcpu:1GiB")
    for strategy, there in ((AutoParallelStrategy(), 3), (AutoParallelStrategy(devices="2xcpu:1GiB"), 2)):
        trainer = pl.Trainer(strategy=strategy, devices=devices, default_root_dir=tmp_path, **QUIET)
        inventory, most = trainer.strategy.inventory()
        assert (len(inventory.devices), most) == (there, None)


def test_a_malformed_variable_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_DEVICES", "many")
    with pytest.raises(ValueError, match="AUTOPAR_DEVICES"):
        fit(tmp_path, strategy="autopar")


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_batches_of_each_device_are_lightnings_own_ddp(engine: str, tmp_path: Path) -> None:
    plain = fit(tmp_path, strategy="ddp_fork", devices=2, max_epochs=2)
    ours = fit(tmp_path, strategy=AutoParallelStrategy(allow=[engine], devices="2xcpu:1GiB", batch="per_device"), max_epochs=2)
    assert (ours.global_step, ours.num_training_batches) == (4, 2)  # ddp_fork doesn't bring these back
    for name, value in plain.lightning_module.state_dict().items():
        torch.testing.assert_close(ours.lightning_module.state_dict()[name], value, rtol=1e-5, atol=1e-5)
    assert float(ours.callback_metrics["loss_epoch"]) == pytest.approx(float(plain.callback_metrics["loss_epoch"]), rel=1e-5)


# -- LightningCLI ------------------------------------------------------------------------------------------------------------------------

OPTIONS = """
trainer:
  accelerator: cpu
  max_epochs: 1
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
"""
BY_CLASS = """  strategy:
    class_path: lightning_autopar.AutoParallelStrategy
    init_args:
      allow: [ddp, fsdp]
      devices: 2xcpu:1GiB
      memory_limit: 900MiB
      memory_margin: 0.1
      objective: memory
"""


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")  # torch, on importing its compiler
@pytest.mark.parametrize("engine", ["single", "ddp"])
def test_a_module_that_was_compiled_as_a_whole_runs_its_own_steps(engine: str, tmp_path: Path) -> None:
    def trained(strategy: Any, module: Any, **options: Any) -> list[torch.Tensor]:
        trainer = pl.Trainer(strategy=strategy, default_root_dir=tmp_path, **{**QUIET, **options})
        trainer.fit(module, datamodule=Data())
        return [parameter.detach().clone() for parameter in trainer.lightning_module.parameters()]

    pl.seed_everything(5, verbose=False)
    expected = trained("auto", Net(), accelerator="cpu", devices=1)
    pl.seed_everything(5, verbose=False)
    module = Net()
    compiled: Any = torch.compile(module, backend="eager")
    with pytest.warns(UserWarning, match="given to torch.compile as a whole; its steps run uncompiled"):
        found = trained(AutoParallelStrategy(allow=[engine], devices="2xcpu:1GiB"), compiled)
    torch.testing.assert_close(found, expected)
    assert "training_step" not in vars(module)


class Validated(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.layer(batch[0]), batch[1]), batch_size=len(batch[0]))


@pytest.mark.parametrize("engine", ["single", "ddp"])
def test_a_checkpoint_after_a_validation_has_the_fits_optimizers(engine: str, tmp_path: Path) -> None:
    data = DataLoader(TensorDataset(torch.randn(8, 4), torch.randn(8, 1)), batch_size=4)
    strategy = AutoParallelStrategy(allow=[engine], devices="2xcpu:1GiB")
    trainer = pl.Trainer(strategy=strategy, default_root_dir=tmp_path, **{**QUIET, "max_epochs": 1})
    module = Validated()
    trainer.fit(module, data, data)
    trainer.validate(module, data)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["optimizer_states"]
    assert [sorted(each["state"]) for each in saved] == [[0, 1, 2, 3]]


def cli(config: str, root: Path, *arguments: str) -> Any:
    path = root / "config.yaml"
    path.write_text(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return LightningCLI(Net, Data, args=[*arguments[:1], "--config", str(path), *arguments[1:]], save_config_callback=None)


def test_the_command_line_takes_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_DEVICES", "2xcpu:1GiB")
    run = cli(OPTIONS + f"  default_root_dir: {tmp_path}\n  strategy: autopar\n", tmp_path, "fit")
    assert isinstance(run.trainer.strategy, AutoParallelStrategy)
    assert run.trainer.global_step == 4
    assert run.trainer.strategy.plan.engine == "single"


def test_the_command_line_takes_options(tmp_path: Path) -> None:
    run = cli(OPTIONS + f"  default_root_dir: {tmp_path}\n" + BY_CLASS, tmp_path, "fit", "--trainer.strategy.memory_margin=0.2")
    settings = run.trainer.strategy.settings
    assert (settings.allow, settings.memory_margin, settings.objective) == (("ddp", "fsdp"), 0.2, "memory")
    assert settings.memory_limit_bytes == 900 * 2**20
    assert run.trainer.strategy.plan.world_size == 2
    assert run.trainer.global_step == 4


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        LightningCLI(Net, Data, args=list(arguments))
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_a_printed_configuration_gives_itself_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(OPTIONS + BY_CLASS)
    first = printed(capsys, "fit", "--config", str(path), "--print_config")
    assert "lightning_autopar" in first
    assert "memory_limit: 900MiB" in first
    path.write_text(first)
    assert printed(capsys, "fit", "--config", str(path), "--print_config") == first


def test_the_help_tells_each_argument(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "fit", "--trainer.strategy.help=lightning_autopar.AutoParallelStrategy")
    for name in ("allow", "devices", "memory_limit", "memory_margin", "batch", "plan", "objective", "exact"):
        assert f"--trainer.strategy.init_args.{name}" in text or f"--trainer.strategy.{name}" in text
    assert "The share of each device's free memory that is left alone" in " ".join(text.split())


def test_a_bad_value_in_a_file_is_our_own_words(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'much'.*GiB"):
        cli(OPTIONS + BY_CLASS.replace("900MiB", "much"), tmp_path, "fit")


#: Values of no use to an argument that doesn't name them.
ODD: tuple[Any, ...] = (object(), b"x", math.nan, ["x"], {"a": 1}, -1, "x")


@pytest.mark.parametrize("kind", [AutoParallelStrategy, CheckpointMigrate, ElasticReplan, Batch, Turn])
def test_a_value_of_no_use_is_refused_by_its_arguments_name(kind: Any) -> None:
    refused = 0
    for name in inspect.signature(kind).parameters:
        for value in ODD:
            if name in ("folder", "priority") and isinstance(value, (str, int)):
                continue  # a folder's name, and a low priority
            with pytest.raises(ValueError, match=f"{'batch' if name == 'rule' else name}[=:]|the device spec 'x'|the plan file 'x'"):
                kind(**{name: value})
            refused += 1
    assert refused


def test_lists_of_configurations_are_lists() -> None:
    """Hydra's ``instantiate`` hands over its own kind of list, which is none of Python's."""
    assert AutoParallelStrategy(allow=UserList(["ddp"])).settings.allow == ("ddp",)
    assert AutoParallelStrategy(batch=Batch(despite=UserList(["kept"]))).settings.despite == ("kept",)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"devices": 2}, r"devices=2 must be a text .* such as '2xcpu:4GiB'; .* the Trainer's to say: Trainer\(devices=2, "),
        ({"allow": 2}, "allow=2 must be a list of names of engines; the engines are 'single', 'ddp'"),
        ({"plan": "ddp"}, r"for any plan of this engine, set allow=\['ddp'\]"),
        ({"plan": {"engine": "ddp"}}, "must be a Plan, or the path of its JSON"),
        ({"exact": "no"}, "exact='no' must be True or False"),
    ],
)
def test_an_argument_of_the_wrong_kind_names_the_right_one(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AutoParallelStrategy(**options)
