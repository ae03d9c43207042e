"""What the README and the pages say is so: every block is run, parsed or compared with what it quotes, and every link leads somewhere."""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import tomllib
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from lightning.pytorch.cli import LightningCLI

import lightning_autopar
from lightning_autopar import AutoParallelStrategy, plans
from lightning_autopar.callbacks.checkpoint_migrate import CheckpointMigrate
from lightning_autopar.callbacks.elastic_replan import ElasticReplan
from lightning_autopar.cli import program
from lightning_autopar.plans import Plan
from tests.doc_blocks import (
    LANGUAGES,
    PAGES,
    ROOT,
    Block,
    anchors,
    blocks_of,
    commands,
    console,
    links,
    same,
    split_command,
    without_blocks,
)

pytestmark = [
    # A page's code is run as a user's would be; what Lightning tells a user is no failure here.
    pytest.mark.filterwarnings("default"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

DOCS = ROOT / "docs"
START = DOCS / "start.md"
BIN = Path(sys.executable).parent

#: What isn't run, only looked up, and why. Everything else is run.
NOT_RUN = {
    r"make [\w-]+": "minutes; the target is looked up in the Makefile",
    r"pip install .*": "the network; the extras are looked up in pyproject.toml",
    r"lightning-autopar calibrate.*": "it measures the machine for seconds; tests/cli/test_cli.py runs it. Its options are parsed",
    r"lightning-autopar (yield|pause|resume|cancel) .*": "it needs a run that is on; tests/cli/test_runs.py has one. Options are parsed",
    r"lightning-autopar sweep .*": "minutes, and a file of runs; tests/cli/test_sweep.py has some. Its options are parsed",
    r"lightning-autopar status --watch.*": "it ends by Ctrl-C; tests/cli/test_status.py presses it. Its options are parsed",
    r"sbatch .*": "it needs Slurm; tests/strategies/processes/test_external_launcher.py does it by Slurm's variables. The job is looked up",
    r"python examples/hf/.*": "half a minute each; tests/test_example_hf.py runs them. Their options are looked up",
    r"lightning-autopar plan .* examples/hf/.*": "as the last; and a hub may be named. The options are looked up",
    r"python examples/(train_gpt|elastic)\.py.*": "tests/test_example.py runs them. Their options are looked up",
}


@pytest.fixture(scope="module")
def prelude() -> dict[str, Any]:
    """What every page's Python has: the model, the loader and a batch of the first page's script."""
    script = next(block for block in blocks_of(START) if block.title == "train.py")
    module = types.ModuleType("train")
    exec(compile("\n" * (script.line - 1) + script.text, str(script.page), "exec"), module.__dict__)
    sys.modules["train"] = module
    loader = module.loader(samples=128, batch_size=32)
    return {"model": module.Classifier(width=16), "train_loader": loader, "val_loader": loader, "batch": next(iter(loader))}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a page's blocks run: a script of the first page's, the examples, and two small CPU devices."""
    script = next(block for block in blocks_of(START) if block.title == "train.py")
    (tmp_path / "train.py").write_text(script.text)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "AUTOPAR_DEVICES": "2xcpu:2GiB",
        "AUTOPAR_CACHE": "off",
        "AUTOPAR_RUNS": str(tmp_path / "runs"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "110",
        "WANDB_MODE": "offline",
    }.items():
        monkeypatch.setenv(name, value)
    return tmp_path


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """Makes a folder with a ``pyproject.toml`` what it is once it is installed: on the path, with its entry points."""

    def install(folder: Path) -> None:
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        lines = [line for group, points in project["entry-points"].items() for line in (f"[{group}]", *map(" = ".join, points.items()))]
        (facts := folder / f"{project['name']}-{project['version']}.dist-info").mkdir()
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
        (facts / "entry_points.txt").write_text("\n".join(lines))
        monkeypatch.syspath_prepend(folder)
        forget()

    def forget() -> None:
        for remembered in (plans.registered, plans.order_of, plans.loaded):
            remembered.cache_clear()

    yield install
    monkeypatch.undo()
    forget()


# -- blocks ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [page for page in PAGES if list(blocks_of(page))], ids=lambda page: page.stem)
def test_the_blocks_of_a_page_do_what_they_say(
    page: Path, folder: Path, prelude: dict[str, Any], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    own = types.ModuleType(f"page_{page.stem}")
    sys.modules[own.__name__] = own  # its classes and functions are pickled by name
    own.__dict__.update(prelude)
    for block in blocks_of(page):
        assert block.language in LANGUAGES, f"{block}: a block in {block.language or 'no language'!r} is tested by nobody; use {LANGUAGES}"
        if block.title is not None:
            (folder / block.title).write_text(block.text)
        if block.title == "pyproject.toml":
            monkeypatch.setenv("AUTOPAR_CACHE", str(folder / "cache"))
            request.getfixturevalue("installed")(folder)
        _do(block, own.__dict__)


def _do(block: Block, namespace: dict[str, Any]) -> None:
    if block.language == "python" and block.title is None:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile("\n" * (block.line - 1) + block.text, str(block.page), "exec"), namespace)
    elif block.language == "bash" and block.title is None:
        for line in commands(block.text):
            _run(block, line)
    elif block.language == "console":
        _show(block)
    elif block.language == "yaml":
        _configure(block)
    elif block.language == "json":
        value = json.loads(block.text)
        if isinstance(value, dict) and "engine" in value:
            Plan.from_dict(value)
    elif block.language == "diff":
        _compare(block)


#: Plans that another page has asked for in the same words, of the same script.
_ran: dict[str, tuple[int, str, str]] = {}


def _show(block: Block) -> None:
    """The commands print what the block shows, but for numbers; and what it shows twice alike, they print alike to the last digit."""
    seen: dict[str, str] = {}
    for line, shown in console(block.text):
        printed = _run(block, line).splitlines()
        for expected in shown:
            found = next((one for one in printed if same(expected) in same(one)), None)
            assert found is not None, f"{block}: {line!r} doesn't print {expected!r} but {printed}"
            assert seen.setdefault(expected, found) == found, (
                f"{block}: {line!r} prints {found!r} where another command prints {seen[expected]!r}"
            )


def _run(block: Block, line: str) -> str:
    """Run a command as the page has it, or look it up where it is among those that aren't run; what it prints."""
    if any(re.fullmatch(pattern, line) for pattern in NOT_RUN):
        _look_up(block, line)
        return ""
    parts = split_command(line)
    if parts is not None and parts[1][0] in ("python", "lightning-autopar"):
        shared = "plan" in parts[1] and parts[2] is None and "--picture" not in parts[1] and "main.py" not in parts[1]
        code, printed, told = _ran[line] if shared and line in _ran else _fork(*parts)
        if shared:
            _ran[line] = code, printed, told
    else:
        run = subprocess.run(["bash", "-euo", "pipefail", "-c", line], capture_output=True, text=True, timeout=200)
        code, printed, told = run.returncode, run.stdout, run.stderr
    assert code == 0, f"{block}: {line!r} ends with {code}:\n{printed}\n{told}"
    return printed + told


def _fork(variables: dict[str, str], words: Sequence[str], output: str | None) -> tuple[int, str, str]:
    """A program of Python's in a child of this process, which has torch and Lightning already: exit code, standard output and error."""
    folder = Path(tempfile.mkdtemp(dir="."))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the fork
        child = os.fork()
    if child == 0:
        code = 1
        try:
            os.environ.update(variables)
            for number, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), number)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            warnings.simplefilter("ignore")
            code = _program(words)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    printed, told = ((folder / name).read_text() for name in ("out", "err"))
    shutil.rmtree(folder)
    if output is not None:
        Path(output).write_text(printed)
    return code, printed, told


def _program(words: Sequence[str]) -> int:
    """``python SCRIPT …`` or ``lightning-autopar …``; the exit code."""
    sys.modules.pop("train", None)  # a script's own import finds the file
    if words[0] == "lightning-autopar":
        return program.main(list(words[1:]))
    sys.argv = list(words[1:])
    sys.path.insert(0, str(Path(words[1]).resolve().parent))
    runpy.run_path(words[1], run_name="__main__")
    return 0


def _look_up(block: Block, line: str) -> None:
    """Of a command that isn't run: whether what it names is there."""
    parts = split_command(line)
    assert parts is not None, f"{block}: {line!r} takes a shell, and isn't run"
    words = parts[1]
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"{block}: the Makefile has no {words[1]}"
        return
    if words[0] == "pip":
        extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1], re.MULTILINE)
        asked = [extra for names in re.findall(r"\[([\w,]+)\]", line) for extra in names.split(",")]
        assert not set(asked) - set(extras), f"{block}: {asked} in {line!r}; there are {extras}"
        return
    if words[0] == "sbatch":
        job = Path(words[1]).read_text()
        assert subprocess.run(["bash", "-n", words[1]]).returncode == 0, f"{block}: {words[1]} is no script"
        (line,) = (line for line in commands(job) if line.startswith("srun "))
        assert Path(line.split()[2]).is_file(), f"{block}: {line!r} runs what isn't there"
        return
    if words[0] == "lightning-autopar":
        options = _parser().parse_args(words[1:])
        assert options.command == words[1]
        words = ["python", *getattr(options, "script", [])]
    if words[0] == "python" and len(words) > 1:
        source = (ROOT / words[1]).read_text(encoding="utf-8")
        unknown = [word for word in words[2:] if word.startswith("--") and f'"{word.partition("=")[0]}"' not in source]
        assert not unknown, f"{block}: {words[1]} has no option {unknown}"


def _configure(block: Block) -> None:
    """LightningCLI's own parser takes a configuration, and makes of it what it says."""
    value = yaml.safe_load(block.text)
    assert isinstance(value, dict), f"{block}: a configuration is a mapping"
    if block.title is not None:
        return  # a command of the page reads it
    path = Path("config.yaml")
    path.write_text(yaml.safe_dump({"trainer": value["trainer"]}))
    model = sys.modules["train"].Classifier
    made = LightningCLI(model, run=False, args=["--config", str(path)], save_config_callback=None)
    named = value["trainer"].get("strategy")
    assert isinstance(made.trainer.strategy, AutoParallelStrategy) == (named is not None), f"{block}: {made.trainer.strategy}"


def _compare(block: Block) -> None:
    """A difference of two files quotes the new one: its lines are there, and those that it takes away aren't."""
    target = next(line[6:].strip() for line in block.text.splitlines() if line.startswith("+++ b/"))
    there = [line.rstrip() for line in (ROOT / target).read_text(encoding="utf-8").splitlines()]
    for line in block.text.splitlines():
        if line.startswith(("+++", "---", "@@")) or not line.strip():
            continue
        assert (line[1:].rstrip() in there) == (line[0] != "-"), f"{block}: {line!r} isn't what {target} has"


# -- links, and the site ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or target.suffix != ".md" or anchor in anchors(target), f"{page.name}: {link}, of {sorted(anchors(target))}"


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path), "--config-file", "mkdocs.yml"]
    run = subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    assert not (run.stdout + run.stderr).strip()
    for page in PAGES[1:]:
        words = (tmp_path / page.relative_to(DOCS).with_suffix(".html")).read_text(encoding="utf-8")
        fetched = re.findall(
            r'<(?:script|img|iframe|link(?=[^>]*rel="(?:stylesheet|preconnect)"))[^>]*(?:src|href)="(https?:[^"]+)"', words
        )
        assert not fetched, f"{page.name} fetches {fetched}"
    api = (tmp_path / "api.html").read_text(encoding="utf-8")
    missing = [name for name in lightning_autopar.__all__ if f'id="lightning_autopar.{name}"' not in api]
    assert not missing


# -- what must not be forgotten --------------------------------------------------------------------------------------------------------


def test_every_argument_and_variable_is_among_the_options() -> None:
    page = (DOCS / "options.md").read_text(encoding="utf-8")
    for kind in (AutoParallelStrategy, CheckpointMigrate, ElasticReplan):
        missing = [name for name in signature(kind).parameters if f"| `{name}` |" not in page]
        assert not missing, f"of {kind.__name__}"
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "lightning_autopar").rglob("*.py"))
    variables = set(re.findall(r"[\"'`]((?:LIGHTNING_)?AUTOPAR_[A-Z_]+)", source))
    assert not [name for name in variables if f"`{name}" not in page]


def test_every_command_and_option_is_on_the_page_of_the_command_line() -> None:
    page = (DOCS / "commandline.md").read_text(encoding="utf-8")
    for name, parser in _commands(_parser()):
        assert f"`{name}" in page, name
        options = {option for action in parser._actions for option in action.option_strings if option.startswith("--")}
        assert not [option for option in options - {"--help"} if f"`{option}" not in page], name


def test_quoted_messages_are_in_the_code() -> None:
    page = without_blocks((DOCS / "troubleshooting.md").read_text(encoding="utf-8"))
    quoted = re.findall(r"^#{2,3} “(.+)”$", page, re.MULTILINE)
    assert len(quoted) >= 20
    sentences = [sentence for path in (ROOT / "lightning_autopar").rglob("*.py") for sentence in _sentences(path)]
    for message in quoted:
        parts = [re.escape(part.strip()) for part in message.replace("`", "").split("…") if part.strip()]
        pattern = re.compile(".*?".join(parts), re.DOTALL)
        assert any(pattern.search(sentence) for sentence in sentences), f"no code says {message!r}"


def test_the_readmes_figures_are_those_of_the_results() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    counts = re.findall(
        r"(\d+) of \d+ cells were tried: (\d+) the same, (\d+) warned of, (\d+) refused", (DOCS / "packages.md").read_text(encoding="utf-8")
    )
    assert len(counts) == 2, "on CPU devices, and on stub GPUs"
    (here, same, warned, refused), (there, *others) = counts
    assert f"of {here}: [{same} the same, {warned} differ and say so, {refused} refused]" in readme
    assert f"of {there}: {', '.join(others)}, and" in readme
    steps = [_result("overhead")["step"][engine]["no_dropout"] for engine in ("single", "ddp", "fsdp")]
    (single, *several), cpu = [step["ratio"] for step in steps], [step["cpu"]["ratio"] for step in steps]
    assert f"| {single:.3f}, {', '.join(f'{ratio:.2f}' for ratio in several)} × (CPU seconds" in readme
    assert f"(CPU seconds {', '.join(f'{ratio:.2f}' for ratio in cpu)} ×)" in readme
    few, few_uneven, many, many_uneven = (row["seconds"] for row in _result("planner_scale")["goals"])
    assert f"| {many:.2f} s ({many_uneven:.1f} s with different free memory); {few:.2f} s ({few_uneven:.2f} s) |" in readme
    published = _result("published")["summary"]
    assert all(f"(all rows {100 * published[f'{what}_median_of_medians']:.1f} %)" in readme for what in ("memory", "seconds"))


def _result(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def _sentences(path: Path) -> Iterator[str]:
    """The texts in a file's code, with an ellipsis for each value that is put into them."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _parser() -> argparse.ArgumentParser:
    return program.make_parser()


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()
