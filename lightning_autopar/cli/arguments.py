"""Arguments that several commands have in common, and what they mean to our strategy. Imports no torch."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from lightning_autopar.constraints import check_allow, check_memory_limit, check_memory_margin
from lightning_autopar.devices.discover import DEVICES_VARIABLE
from lightning_autopar.devices.spec import parse_spec
from lightning_autopar.strategies.processes.users_script import Script

#: Values that Lightning's Trainer takes as devices, and that aren't a spec.
_TRAINER_DEVICES = re.compile(r"auto|-1|\d+|\d+(,\d+)*,?")
#: Programs that users write in front of a script.
_STARTERS = re.compile(r"accelerate|deepspeed|torchrun|mpirun|srun|python[\d.]*")
#: Options of ``plan`` and ``run`` that users may write after the script by mistake.
_OPTIONS = {"--allow", "--batch", "--devices", "--exact", "--json", "--memory-limit", "--memory-margin", "--objective", "--picture"}
_OPTIONS |= {"--plan", "--priority", "--wait"}


def add_devices(command: argparse.ArgumentParser, what: str) -> None:
    """Add ``--devices``."""
    command.add_argument("--devices", metavar="SPEC", help=f"which devices, such as {what}; by default {DEVICES_VARIABLE}, or what is here")


def add_strategy_options(command: argparse.ArgumentParser) -> None:
    """Add the strategy's options; each overrides what the script says."""
    options = command.add_argument_group("options of the strategy, which override the script's")
    options.add_argument("--allow", metavar="ENGINES", help="the engines to choose from, such as single,ddp")
    options.add_argument(
        "--batch",
        choices=("global", "per_device"),
        help="split the script's batch over the devices, or give each device a batch of its own",
    )
    options.add_argument("--memory-limit", metavar="SIZE", help="the most memory to use of each device, such as 20GiB")
    options.add_argument("--memory-margin", metavar="SHARE", type=float, help="the share of free memory to leave unused, such as 0.05")
    options.add_argument("--objective", choices=("speed", "memory"), help="speed: the shortest step; memory: the least memory")
    options.add_argument("--exact", action="store_true", help="exclude plans under which the loss would differ from one device's")
    options.add_argument("--plan", metavar="FILE", help="run just this plan: its JSON, or that of lightning-autopar plan --json")


def add_turn_options(command: argparse.ArgumentParser) -> None:
    """Add how long the run waits where nothing fits now, and how important it is."""
    options = command.add_argument_group("waiting, where other runs hold the memory that this one needs")
    options.add_argument(
        "--wait", metavar="TIME", help="how long to wait for the run's turn: 90s, 30min, 2h, forever (the default) or never"
    )
    options.add_argument(
        "--priority",
        metavar="N",
        type=int,
        help="from -100 to 100, by default 0: of the runs that wait, the one with the largest number goes first",
    )


def add_script(command: argparse.ArgumentParser) -> None:
    """Add the script and its own arguments, after which none of our options come."""
    command.add_argument(
        "-m", dest="module", metavar="MODULE", nargs=argparse.REMAINDER, help="a module to run, as python -m, and its arguments"
    )
    command.add_argument(
        "script", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="a script that uses Lightning's Trainer, and its arguments"
    )


def script_of(options: argparse.Namespace) -> Script:
    """The named script.

    Raises:
        ValueError: if none was, or a program that starts scripts.
    """
    words = options.module or options.script
    if words[:1] == ["--"]:
        words = words[1:]
    if not words:
        raise ValueError(
            script_as_value(options) or "no script is named; give the path of the Python file that calls fit, or -m and a module"
        )
    if not options.module and _STARTERS.fullmatch(Path(words[0]).name) and not words[0].endswith(".py"):
        raise ValueError(
            f"{words[0]!r} starts scripts, but is no script; name the training script itself, as in {options.command} train.py: "
            "autopar starts its processes"
        )
    return Script(target=words[0], arguments=tuple(words[1:]), is_module=bool(options.module))


def script_as_value(options: argparse.Namespace) -> str | None:
    """A sentence if an option got a script as its value, so that none seems to be named; None if none did."""
    for name, value in vars(options).items():
        if isinstance(value, str) and value.endswith(".py"):
            option = "--" + {"summary": "json"}.get(name, name.replace("_", "-"))
            return f"{option} got {value!r} as its value; give {option} a value of its own before the script, or leave it out"
    return None


def strategy_options(options: argparse.Namespace) -> dict[str, Any]:
    """The given options, as arguments of ``AutoParallelStrategy``.

    Raises:
        ValueError: if an engine is unknown, a size or a share is none, the plan's file holds none, or the time to wait is none.
    """
    found = {name: value for name in ("batch", "objective") if (value := getattr(options, name)) is not None}
    if options.memory_margin is not None:
        found["memory_margin"] = check_memory_margin(options.memory_margin)
    if options.memory_limit is not None:
        found["memory_limit"] = check_memory_limit(options.memory_limit)
    if options.allow is not None:
        found["allow"] = list(check_allow([engine.strip() for engine in options.allow.split(",")]))
    if options.exact:
        found["exact"] = True
    if options.plan is not None:
        found["plan"] = _read_plan(options.plan)
    if (wait := getattr(options, "wait", None)) is not None or getattr(options, "priority", None) is not None:
        from lightning_autopar.sharing.wait_options import Turn

        found["wait"] = Turn(wait=wait, priority=options.priority)
    return found


def misplaced_options(script: Script, *, understood: bool = False) -> str | None:
    """A sentence if the script got options of ours, which it may not know; None if it didn't.

    Args:
        understood: whether it took them without complaint: then those that its file names are its own.
    """
    own = Path(script.target).read_text(encoding="utf-8", errors="replace") if understood and not script.is_module else ""
    given = [word for word in script.arguments if (name := word.partition("=")[0]) in _OPTIONS and name not in own]
    if not given:
        return None
    return (
        f"lightning-autopar: {given[0]} stands after {script.name}, so the script got it; options of lightning-autopar go before the script"
    )


def option_words(options: argparse.Namespace) -> list[str]:
    """The same options as words of a command line, for the script to be started again."""
    names = ("devices", "allow", "batch", "memory_limit", "memory_margin", "objective", "wait", "priority")
    given = {name: value for name in names if (value := getattr(options, name, None)) is not None}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    words += ["--exact"] if options.exact else []
    return words + ([f"--plan={Path(options.plan).resolve()}"] if options.plan is not None else [])


def split_devices(devices: str | None) -> tuple[str | None, str | None]:
    """``--devices`` as a spec, and as the Trainer's argument; one of them, or none.

    Raises:
        ValueError: if it is a malformed spec.
    """
    if devices is not None and _TRAINER_DEVICES.fullmatch(devices.strip()):
        return None, devices.strip()
    if devices is not None:
        parse_spec(devices)
    return devices, None


def check_files(*, json: str | None = None, picture: str | None = None) -> None:
    """Refuse files that couldn't be written, before the script runs rather than hours later.

    Raises:
        ValueError: if a file's folder isn't there, the file is a folder, or the picture's file isn't named as a page.
    """
    for option, path in (("--json", json), ("--picture", picture)):
        if path is not None and (Path(path).is_dir() or not Path(path).absolute().parent.is_dir()):
            raise ValueError(f"{option} {path!r} can't be written; name a file in a folder that is there")
    if picture is not None:
        from lightning_autopar.report.page.markup import check_file

        check_file(picture)


def _read_plan(path: str) -> Any:
    """A plan, or the best one of a report's JSON."""
    from lightning_autopar.plans import Plan

    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"the plan file {path!r} can't be read ({error.strerror}); give the path of a plan's JSON") from error
    except ValueError as error:
        raise ValueError(f"the plan file {path!r} holds no JSON ({error}); lightning-autopar plan --json SCRIPT writes one") from error
    if isinstance(data, dict) and "candidates" in data:
        if data.get("best") is None:
            raise ValueError(f"in the report {path!r} no plan fits; plan again, or name a plan's own JSON")
        data = data["candidates"][data["best"]]["plan"]
    if not isinstance(data, dict):
        raise ValueError(
            f"the plan file {path!r} holds a {type(data).__name__} where a plan belongs; lightning-autopar plan --json SCRIPT writes one"
        )
    return Plan.from_dict(data)
