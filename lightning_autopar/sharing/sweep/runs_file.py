"""The list of a sweep's runs: a YAML file, a text file with one command a line, or commands on the command line; and the
sweep's folder: finished runs, the devices that each run may use, and the logs. One sweep at a time uses it.

It starts nothing and knows no devices.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_autopar.sharing.live_files import let_go, own
from lightning_autopar.sharing.runs.folders import write_json

_KEYS = ("devices", "runs", "name", "retries", "env", "cwd")
_RUN_KEYS = ("command", "name", "priority", "env", "cwd", "matrix")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]*")
_LONGEST_NAME = 60
_MOST_RUNS = 10_000
_PRIORITIES = range(-100, 101)
_PYTHON = re.compile(r"(.*/)?python3?(\.\d+)?")


@dataclass(frozen=True, kw_only=True)
class ListedRun:
    """One run.

    Args:
        words: what follows ``lightning-autopar run``: options, the script, its arguments.
        priority: a larger one starts first.
        env: variables that it gets besides this process's.
    """

    name: str
    words: tuple[str, ...]
    priority: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = "."

    @property
    def command(self) -> str:
        """As it was written, but for quotes."""
        return shlex.join(self.words)


@dataclass(frozen=True, kw_only=True)
class ListedSweep:
    """A sweep as it is asked for.

    Args:
        name: whose folder is ``sweep-<name>``.
        devices: a spec, or as the Trainer takes them.
        retries: how often a run that fails is started again.
    """

    name: str
    runs: tuple[ListedRun, ...]
    devices: str = "auto"
    retries: int = 0


def read_sweep(path: str | Path) -> ListedSweep:
    """The sweep of a file: YAML where its name ends so, else a command a line.

    Raises:
        ValueError: if it can't be read or isn't valid, with the place and the remedy.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ValueError(
            f"the sweep {str(path)!r} can't be read ({why}); give a YAML file, or a text file with a command a line"
        ) from error
    if path.suffix.lower() not in (".yaml", ".yml", ".json"):
        return sweep_of([line for line in map(str.strip, text.splitlines()) if line and line[0] != "#"], name=_slug(path.stem))
    import yaml  # type: ignore[import-untyped]

    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"the sweep {str(path)!r} is no YAML: {error}; quote a command that holds braces or a colon") from error
    try:
        return _sweep(data, _slug(path.stem))
    except ValueError as error:
        raise ValueError(f"the sweep {str(path)!r}: {error}") from error


def sweep_of(commands: Sequence[str], *, name: str = "runs") -> ListedSweep:
    """The sweep of these commands.

    Raises:
        ValueError: if there is none, or one can't be split into words.
    """
    return _sweep({"runs": list(commands)}, name)


def named(sweep: ListedSweep, name: str) -> ListedSweep:
    """The same under another name.

    Raises:
        ValueError: if no folder can have it.
    """
    _check_name(name, "the sweep's name")
    return replace(sweep, name=name)


def _sweep(data: Any, name: str) -> ListedSweep:
    data = {"runs": data} if isinstance(data, list) else data
    if not isinstance(data, dict):
        raise ValueError("it holds no mapping with the key 'runs', nor a list of commands")
    _only(data, _KEYS, "the sweep")
    listed = data.get("runs")
    if not isinstance(listed, list) or not listed:
        raise ValueError("'runs' must be a list of at least one command, such as ['train.py --lr 0.1']")
    common = {"env": _env(data.get("env"), "the sweep"), "cwd": _text(data.get("cwd", "."), "'cwd' of the sweep")}
    runs = [run for number, entry in enumerate(listed, 1) for run in _runs(entry, f"run {number}", common)]
    if len(runs) > _MOST_RUNS:
        raise ValueError(f"it comes to {len(runs)} runs; at most {_MOST_RUNS} can be placed")
    retries = data.get("retries", 0)
    if not isinstance(retries, int) or isinstance(retries, bool) or retries < 0:
        raise ValueError(f"'retries' is {retries!r}, but must be a whole number from 0 on")
    own_name = _text(data.get("name", name), "'name' of the sweep")
    _check_name(own_name, "'name' of the sweep")
    return ListedSweep(name=own_name, runs=_named(runs), devices=str(data.get("devices", "auto")), retries=retries)


def _runs(entry: Any, where: str, common: Mapping[str, Any]) -> list[tuple[bool, ListedRun]]:
    """The runs of one entry, each with whether it was given its name."""
    entry = {"command": entry} if isinstance(entry, str) else entry
    if not isinstance(entry, dict) or not isinstance(entry.get("command"), str):
        raise ValueError(f"{where} is {entry!r}, but must be a command, or a mapping with a 'command'")
    _only(entry, _RUN_KEYS, where)
    priority = entry.get("priority", 0)
    if not isinstance(priority, int) or isinstance(priority, bool) or priority not in _PRIORITIES:
        raise ValueError(f"'priority' of {where} is {priority!r}, but must be a whole number from -100 to 100")
    matrix = entry.get("matrix", {})
    if not isinstance(matrix, dict) or not all(isinstance(values, list) and values for values in matrix.values()):
        raise ValueError(f"'matrix' of {where} must give each name a list of values, such as {{lr: [0.1, 0.3]}}")
    for key in matrix:
        if f"{{{key}}}" not in entry["command"]:
            raise ValueError(f"the command of {where} has no {{{key}}}, which its matrix gives values; write it where the value belongs")
    texts = {
        "command": entry["command"],
        "cwd": _text(entry.get("cwd", common["cwd"]), f"'cwd' of {where}"),
        **({"name": _text(entry["name"], f"'name' of {where}")} if "name" in entry else {}),
    }
    env = {**common["env"], **_env(entry.get("env"), where)}
    found = []
    for values in itertools.product(*matrix.values()):
        chosen = dict(zip(map(str, matrix), map(str, values), strict=True))
        filled = {key: _filled(text, chosen) for key, text in texts.items()}
        words = _words(filled["command"], where)
        own = filled.get("name")
        if own is not None and matrix and own == texts["name"] and len(list(itertools.product(*matrix.values()))) > 1:
            own = _slug("-".join([own, *(f"{key}{value}" for key, value in chosen.items())]))
        if own is not None:
            _check_name(own, f"'name' of {where}")
        name = own if own is not None else _slug("-".join(f"{key}{value}" for key, value in chosen.items()) or _name_of(words))
        run = ListedRun(
            name=name,
            words=words,
            priority=priority,
            env={key: _filled(value, chosen) for key, value in env.items()},
            cwd=filled["cwd"],
        )
        found.append((own is not None, run))
    return found


def _named(runs: Sequence[tuple[bool, ListedRun]]) -> tuple[ListedRun, ...]:
    """The runs, each with a unique name; if two were given the same, that is an error."""
    given = Counter(run.name for named, run in runs if named)
    if twice := next((name for name, count in given.items() if count > 1), None):
        raise ValueError(f"two runs have the name {twice!r}; give each its own, or leave names out")
    taken = set(given)
    found = []
    for named, run in runs:
        name, number = run.name, 1
        while not named and name in taken:
            number += 1
            name = f"{run.name}-{number}"
        taken.add(name)
        found.append(replace(run, name=name))
    return tuple(found)


def _words(command: str, where: str) -> tuple[str, ...]:
    """The words after ``lightning-autopar run``."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"the command of {where}, {command!r}, can't be split into words: {error}") from error
    if words[:2] == ["lightning-autopar", "run"]:
        words = words[2:]
    elif words and _PYTHON.fullmatch(words[0]):
        words = words[1:]
    if not words:
        raise ValueError(f"the command of {where} is empty; write a script and its arguments, such as 'train.py --lr 0.1'")
    return tuple(words)


def _filled(text: str, values: Mapping[str, str]) -> str:
    """The text with each name in braces replaced by its value; other braces stay."""
    for key, value in values.items():
        text = text.replace(f"{{{key}}}", value)
    return text


def _name_of(words: Sequence[str]) -> str:
    script = next((word for word in words if word.endswith(".py")), words[0])
    rest = [word for word in words if word != script]
    return "-".join([Path(script).stem, *rest])


def _slug(text: str) -> str:
    """``"train --lr 0.1"`` → ``"train-lr-0.1"``."""
    return re.sub(r"-+", "-", re.sub(r"[^A-Za-z0-9._+=-]+", "-", text))[:_LONGEST_NAME].strip("-.") or "run"


def _check_name(name: str, where: str) -> None:
    if not _NAME.fullmatch(name) or len(name) > 2 * _LONGEST_NAME:
        raise ValueError(f"{where} is {name!r}, but it names files: take letters, digits, '.', '_', '+', '=' and '-'")


def _env(data: Any, where: str) -> dict[str, str]:
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(value, (str, int, float)) for value in data.values()):
        raise ValueError(f"'env' of {where} must be a mapping of variables to texts, such as {{SEED: '1'}}")
    return {str(key): str(value) for key, value in data.items()}


def _text(data: Any, where: str) -> str:
    if not isinstance(data, (str, int, float)) or not str(data).strip():
        raise ValueError(f"{where} is {data!r}, but must be a text")
    return str(data)


def _only(data: Mapping[Any, Any], keys: Sequence[str], where: str) -> None:
    if unknown := next((key for key in data if key not in keys), None):
        raise ValueError(f"{where} has the unknown key {unknown!r}; there are {', '.join(keys)}")


_DONE = "done.json"


class SweepFolder:
    """The folder ``sweep-<name>``. Made by :func:`sweep_folder`, which locks it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: dict[str, dict[str, Any]] = _read(path / _DONE).get("runs", {})

    def log(self, run: ListedRun) -> Path:
        """Its log's file."""
        return self.path / f"{run.name}.log"

    def devices(self, run: ListedRun) -> Path:
        """The file of the devices that it may use."""
        return self._in("devices", f"{run.name}.txt")

    def summary(self, run: ListedRun) -> Path:
        """What ``lightning-autopar run --json`` writes of it."""
        return self._in("results", f"{run.name}.json")

    def plan(self, run: ListedRun) -> Path:
        """What ``lightning-autopar plan --json`` says of it, while it is read, and where it can't be."""
        return self._in("plans", f"{run.name}.json")

    def is_done(self, run: ListedRun) -> dict[str, Any] | None:
        """What came of it, if this very run has ended well before."""
        entry = self.done.get(run.name)
        return entry if isinstance(entry, dict) and entry.get("exit_code") == 0 and entry.get("key") == key_of(run) else None

    def note(self, run: ListedRun, entry: Mapping[str, Any]) -> None:
        """Keep what came of a run."""
        self.done[run.name] = {"key": key_of(run), "command": run.command, **entry}
        write_json(self.path / _DONE, {"runs": self.done})

    def _in(self, folder: str, name: str) -> Path:
        (self.path / folder).mkdir(exist_ok=True)
        return self.path / folder / name


@contextlib.contextmanager
def sweep_folder(sweep: ListedSweep, parent: str | Path = ".") -> Iterator[SweepFolder]:
    """While open, the sweep's folder, made if need be, belongs to this process alone.

    Raises:
        ValueError: if another process has it, or it can't be made.
    """
    path = Path(parent).absolute() / f"sweep-{sweep.name}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = own(os.open(path / "lock", os.O_CREAT | os.O_RDWR, 0o600))
    except OSError as error:
        raise ValueError(f"the sweep's folder {str(path)!r} can't be made ({error.strerror}); start it where you may write") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"the sweep {sweep.name!r} runs already, in {str(path)!r}; give this one another name (--name)") from error
        yield SweepFolder(path)
    finally:
        let_go(lock)


def key_of(run: ListedRun) -> str:
    """A run's identity: its command, its folder, and its variables."""
    identity = json.dumps([run.words, os.path.abspath(run.cwd), sorted(run.env.items())])
    return hashlib.sha256(identity.encode()).hexdigest()[:32]


def _read(path: Path) -> dict[str, Any]:
    """A file's contents; empty if it is missing or malformed: then the work is done again."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}
