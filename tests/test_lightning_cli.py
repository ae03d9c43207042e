"""LightningCLI: what a YAML file can say, what the help says of it, and what a mistake is answered with."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI

import lightning_autopar
from lightning_autopar.strategies.auto import AutoParallelStrategy

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "examples" / "cli" / "config.yaml"
OPTIONS = {
    "AutoParallelStrategy": {
        "allow": None,
        "devices": None,
        "memory_limit": None,
        "memory_margin": 0.05,
        "batch": "global",
        "plan": None,
        "objective": "speed",
        "exact": False,
        "calibrate": "auto",
        "wait": None,
    },
    "CheckpointMigrate": {
        "snapshot_seconds": None,
        "overhead": 0.01,
        "folder": None,
        "hang_seconds": 600.0,
        "failures": 3,
    },
    "ElasticReplan": {
        "interval_seconds": 5.0,
        "min_gain": 0.05,
        "patience": 3,
        "min_seconds_between_moves": 60.0,
        "price_factor": 2.0,
        "max_overhead": 0.005,
    },
    "PlanMonitor": {},
    "Turn": {"wait": None, "priority": None},
    "Batch": {"rule": "global", "draws": "whole", "despite": ()},
}

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*tensorboardX:UserWarning"),
    # Lightning's own, of a CLI that is run inside of another program.
    pytest.mark.filterwarnings("ignore:LightningCLI's args parameter is intended:UserWarning"),
]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("examples_cli_main", CONFIG.with_name("main.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # the parser looks the classes up by their names
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def cli(example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LightningCLI]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOPAR_DEVICES", "2xcpu:1GiB")
    monkeypatch.setenv("AUTOPAR_RUNS", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # of names that Lightning's CLI uses

    def run(*arguments: str, **more: Any) -> LightningCLI:
        return LightningCLI(example.Classifier, example.Quadrants, args=list(arguments), **more)

    return run


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_the_options_are_these(name: str) -> None:
    parameters = inspect.signature(getattr(lightning_autopar, name)).parameters
    assert {key: parameter.default for key, parameter in parameters.items()} == OPTIONS[name]


def test_the_frozen_lists_name_every_public_callback() -> None:
    from lightning.pytorch.callbacks import Callback

    public = {name: getattr(lightning_autopar, name) for name in lightning_autopar.__all__}
    callbacks = {name for name, value in public.items() if isinstance(value, type) and issubclass(value, Callback)}
    assert callbacks == set(OPTIONS) - {"AutoParallelStrategy", "Batch", "Turn"}


def test_the_example_runs_on_two_devices(cli: Callable[..., LightningCLI], tmp_path: Path) -> None:
    options = [
        "--trainer.strategy.init_args.allow=[ddp]",
        "--trainer.max_steps=4",
        "--trainer.enable_progress_bar=false",
        "--data.samples=2560",
    ]
    ran = cli("fit", "--config", str(CONFIG), *options)
    assert ran.trainer.global_step == 4
    assert ran.trainer.strategy.plan.title() == "ddp ×2"
    logged = yaml.safe_load((tmp_path / "logs" / "version_0" / "hparams.yaml").read_text())
    assert (logged["width"], logged["autopar/engine"]) == (256, "ddp")
    assert "autopar/rank1/measured_bytes/allocated" in (tmp_path / "logs" / "version_0" / "metrics.csv").read_text()


def test_a_printed_config_is_the_same_again(cli: Callable[..., LightningCLI], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    source = CONFIG
    for _ in range(2):
        with pytest.raises(SystemExit) as left:
            cli("fit", "--config", str(source), "--print_config")
        assert left.value.code == 0
        printed.append(capsys.readouterr().out)
        source = tmp_path / "printed.yaml"
        source.write_text(printed[-1])
    assert printed[0] == printed[1]
    trainer = yaml.safe_load(printed[0])["trainer"]
    assert trainer["strategy"]["init_args"] == {**OPTIONS["AutoParallelStrategy"], "allow": ["single", "ddp", "fsdp"], "memory_margin": 0.1}
    assert [each["class_path"] for each in trainer["callbacks"]] == [
        f"lightning_autopar.{name}" for name in ("CheckpointMigrate", "ElasticReplan", "PlanMonitor")
    ]
    built = cli("--config", str(_without_subcommand(source)), run=False)
    assert built.trainer.strategy.settings.memory_margin == 0.1


def _without_subcommand(path: Path) -> Path:
    """What ``fit`` adds to the trainer's options is no part of a CLI without subcommands."""
    words = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({name: words[name] for name in ("seed_everything", "trainer", "model", "data")}))
    return path


def test_a_word_is_enough(cli: Callable[..., LightningCLI]) -> None:
    built = cli("--trainer.strategy=autopar", "--trainer.logger=false", run=False)
    assert isinstance(built.trainer.strategy, AutoParallelStrategy)
    assert built.trainer.strategy.settings.memory_margin == 0.05


@pytest.mark.parametrize("name", sorted(set(OPTIONS) - {"Batch", "PlanMonitor", "Turn"}))
def test_the_help_explains_every_option(name: str, cli: Callable[..., LightningCLI], capsys: pytest.CaptureFixture[str]) -> None:
    what = "strategy" if name == "AutoParallelStrategy" else "callbacks"
    with pytest.raises(SystemExit) as left:
        cli("fit", f"--trainer.{what}.help", f"lightning_autopar.{name}")
    assert left.value.code == 0
    shown = capsys.readouterr().out.split("Help for")[1]
    for option in OPTIONS[name]:
        # the option, a sentence about it, and its type
        found = re.search(rf"^  --trainer\.{what}\.{option}[ ,].*?\(type:.*?\)", shown, re.DOTALL | re.MULTILINE)
        assert found is not None, option
        assert len(" ".join(found[0].split("(type:")[0].split("\n", 1)[1].split())) > 20, option


_STRATEGY = "--trainer.strategy=lightning_autopar.AutoParallelStrategy"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([_STRATEGY, "--trainer.strategy.allow=[fsdq]"], "did you mean 'fsdp'?"),
        ([_STRATEGY, "--trainer.strategy.memory_limit=lots"], "'lots' is no memory size; write bytes as a number or a size such as '4GiB'"),
        ([_STRATEGY, "--trainer.strategy.memory_margin=2"], "must be a share from 0 up to but not including 1, such as 0.05"),
        ([_STRATEGY, "--trainer.strategy.batch=half"], "Expected a typing.Literal['global', 'per_device'] - "),
        ([_STRATEGY, "--trainer.strategy.batch={draws: own}"], "Expected a typing.Literal['whole', 'per-rank']. Got value: own"),
        ([_STRATEGY, "--trainer.strategy.devices=3xFOO"], "there is no device 'FOO' in the catalogue; known are"),
        ([_STRATEGY, "--trainer.strategy.plan=nowhere.json"], "the plan file 'nowhere.json' can't be read"),
        ([_STRATEGY, "--trainer.strategy.alow=[ddp]"], "'alow' is not accepted"),
        ([_STRATEGY, "--trainer.strategy.wait=soon"], "wait='soon' must be 'forever', 'never' or how long to wait"),
        ([_STRATEGY, "--trainer.strategy.wait={priority: 500}"], "priority=500 must be a whole number from -100 to 100"),
        (["--trainer.callbacks=lightning_autopar.ElasticReplan", "--trainer.callbacks.min_gain=3"], "min_gain=3.0 must be a number from 0"),
        (["--trainer.callbacks=lightning_autopar.CheckpointMigrate", "--trainer.callbacks.overhead=2"], "overhead=2.0 must be a share"),
    ],
)  # fmt: skip
def test_a_mistake_is_answered_with_the_remedy(
    arguments: list[str], says: str, cli: Callable[..., LightningCLI], capsys: pytest.CaptureFixture[str]
) -> None:
    # The parser's own refusals leave with a usage; those of our constructors come as the ValueError that the parser makes of them.
    with pytest.raises((SystemExit, ValueError)) as caught:
        cli(*arguments, run=False)
    assert says in " ".join(f"{capsys.readouterr().err} {caught.value}".split())


@pytest.mark.parametrize(
    ("wait", "turn"),
    [
        ("2h", (7200, 0)),
        (90, (90, 0)),
        (0.5, (0.5, 0)),
        (False, (0, 0)),
        ("never", (0, 0)),
        ({"wait": "30min", "priority": 5}, (1800, 5)),
        ({"priority": -3}, (0, -3)),
    ],
)
def test_how_long_a_run_waits(wait: Any, turn: tuple[float, int], cli: Callable[..., LightningCLI], tmp_path: Path) -> None:
    strategy = {"class_path": "lightning_autopar.AutoParallelStrategy", "init_args": {"wait": wait}}
    (tmp_path / "wait.yaml").write_text(yaml.safe_dump({"trainer": {"logger": False, "strategy": strategy}}))
    said = cli("--config", str(tmp_path / "wait.yaml"), run=False).trainer.strategy.settings.wait
    assert (said.wait_seconds, said.rank) == turn, "where it isn't said how long, the variable says so: never, in a test"


def test_a_combination_that_cannot_be_is_refused_before_training(cli: Callable[..., LightningCLI]) -> None:
    options = ["--trainer.strategy.init_args.batch=per_device", "--trainer.logger=false", "--data.samples=512"]
    with pytest.raises(ValueError, match="use batch='global', or leave out CheckpointMigrate and ElasticReplan"):
        cli("fit", "--config", str(CONFIG), *options)


def _blocks() -> list[Any]:
    """Every YAML of the README and the documentation that configures a Trainer."""
    found = []
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))):
        for number, block in enumerate(
            re.findall(r"^( *)```ya?ml[^\n]*\n(.*?)^\1```", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
        ):
            text = textwrap.dedent(block[1])
            if re.search(r"^trainer:", text, re.MULTILINE):
                found.append(pytest.param(text, id=f"{path.relative_to(ROOT)}-{number}"))
    return found


@pytest.mark.parametrize("block", _blocks())
def test_what_the_documentation_says_in_yaml_is_accepted(block: str, cli: Callable[..., LightningCLI], tmp_path: Path) -> None:
    trainer = {"logger": False, **yaml.safe_load(block)["trainer"]}
    (tmp_path / "block.yaml").write_text(yaml.safe_dump({"trainer": trainer}))
    built = cli("--config", str(tmp_path / "block.yaml"), run=False)
    assert isinstance(built.trainer.strategy, AutoParallelStrategy)
