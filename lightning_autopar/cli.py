"""The command line: ``lightning-autopar devices``, ``calibrate``, ``plan train.py …``, ``status`` and ``yield``.

It parses, asks and prints; no more. What is about runs that are on is in ``cli_runs.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_autopar.cli_runs import add_run_commands, ask_to_yield, show_runs
from lightning_autopar.memory.inventory import DEVICES_VARIABLE, Inventory, probe
from lightning_autopar.units import format_bytes

if TYPE_CHECKING:
    from lightning_autopar.planning.calibrate_curves import Calibration
    from lightning_autopar.strategies.dry_run import DryRun

_FITS, _NOTHING_FITS, _FAILED = 0, 1, 2
_EXAMPLES = """\
examples:
  lightning-autopar devices
  lightning-autopar calibrate                           measure now how fast they are
  lightning-autopar plan train.py --lr 0.1              plan for what is here
  lightning-autopar plan --devices 8xH100-80GB train.py plan for what isn't
  lightning-autopar plan --json train.py > plan.json    for a program to read
  lightning-autopar plan --picture plan.png train.py    for a talk
  lightning-autopar status                              what your elastic runs do, and why
  lightning-autopar yield train-gpt-3f2a                ask one to move off its devices now

exit codes: 0 a plan fits, 1 none does, 2 the command or the script failed; of yield: 0 asked, 1 no answer came, 2 no such run
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """The entry point of ``lightning-autopar``; returns the exit code.

    Args:
        arguments: those of the command line, without the program's name; ``sys.argv``'s by default.
    """
    options = _parser().parse_args(arguments)
    try:
        if options.command == "devices":
            return _devices(options.devices, as_json=options.json)
        if options.command == "calibrate":
            return _calibrate(options.devices, as_json=options.json)
        if options.command == "status":
            return show_runs(as_json=options.json)
        if options.command == "yield":
            return ask_to_yield(options.run, options.device, options.wait, as_json=options.json)
        return _plan(options.script, options.arguments, options.devices, as_json=options.json, picture=options.picture)
    except ValueError as error:
        print(f"lightning-autopar: {error}", file=sys.stderr)
        return _FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-autopar",
        description="What devices there are, how a training script would run on them, and what your elastic runs do.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    devices = commands.add_parser("devices", help="list the devices, what is free on them and who uses them")
    measure = commands.add_parser("calibrate", help="measure now how fast the devices are, alone and together, and keep it")
    plan = commands.add_parser(
        "plan",
        help="run a script up to fit(), print every plan with its memory and time, and train nothing",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for command in (devices, measure, plan):
        command.add_argument(
            "--devices",
            metavar="SPEC",
            help=f"which devices, such as 8xH100-80GB (plan only) or 2xcpu:4GiB; by default {DEVICES_VARIABLE}, or what is here",
        )
        command.add_argument("--json", action="store_true", help="print JSON instead of a table")
    plan.add_argument("--picture", metavar="FILE", help="draw memory and a step's time into a .png, .svg or .pdf file as well")
    plan.add_argument("script", help="a Python script that calls fit() of lightning.pytorch's Trainer")
    plan.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments")
    add_run_commands(commands)
    return parser


def _devices(spec: str | None, *, as_json: bool) -> int:
    from lightning.fabric.accelerators.cuda import num_cuda_devices

    from lightning_autopar.planning.calibrate_cache import load_calibration
    from lightning_autopar.planning.calibrate_words import speeds

    inventory = probe(spec, accelerator="cuda" if num_cuda_devices() else "cpu")
    calibration = load_calibration(inventory)
    if as_json:
        found = inventory.to_dict()
        for device, words in zip(inventory.devices, found["devices"], strict=True):
            words["rates"] = speeds(calibration, device).to_dict()
        print(json.dumps({**found, "measured": calibration.day or None}, indent=2))
    else:
        _print_inventory(inventory, calibration)
    return _FITS


def _calibrate(spec: str | None, *, as_json: bool) -> int:
    from lightning.fabric.accelerators.cuda import num_cuda_devices

    with contextlib.redirect_stdout(sys.stderr):
        from lightning_autopar.strategies.calibration import calibrate

        inventory = probe(spec, accelerator="cuda" if num_cuda_devices() else "cpu")
        if all(device.kind == "catalogue" for device in inventory.devices):
            raise ValueError("there is nothing here to measure: catalogue devices can be planned for only; leave --devices out")
        calibration = calibrate(inventory, again=True).calibration
    if as_json:
        print(json.dumps(calibration.to_dict(), indent=2))
    else:
        _print_inventory(inventory, calibration)
    return _FITS if calibration else _FAILED


def _print_inventory(inventory: Inventory, calibration: Calibration) -> None:
    from rich.console import Console
    from rich.table import Table

    from lightning_autopar.planning.calibrate_words import collective_lines, speeds

    table = Table(box=None, pad_edge=False)
    titles = ["device", "name", "free", "of", "busy", "processes"]
    if calibration:
        titles.insert(5, "measured")
    for title in titles:
        table.add_column(title, justify="right" if title in ("free", "of", "busy") else "left")
    for device in inventory.devices:
        users = ", ".join(
            f"{process.pid}{f' ({format_bytes(process.used_bytes)})' if process.used_bytes is not None else ''}"
            for process in device.processes
        )
        busy = "" if device.utilization is None else f"{device.utilization:.0%}"
        speed = [str(speeds(calibration, device))] if calibration else []
        table.add_row(device.id, device.name, format_bytes(device.free_bytes), format_bytes(device.total_bytes), busy, *speed, users)
    console = Console()
    console.print(table)
    console.print(f"host memory: {format_bytes(inventory.host_free_bytes)} free of {format_bytes(inventory.host_total_bytes)}")
    if calibration:
        console.print(f"measured on {calibration.day}:")
    for line in (*collective_lines(calibration, inventory), *inventory.notes):
        console.print(line)


def _plan(script: str, arguments: Sequence[str], devices: str | None, *, as_json: bool, picture: str | None) -> int:
    # Standard output is the report's alone: what the script prints goes where messages go.
    with contextlib.redirect_stdout(sys.stderr):
        from lightning_autopar.strategies.dry_run import ScriptFailed, dry_run

        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
        try:
            found = dry_run(script, arguments, devices=devices)
        except ScriptFailed as error:
            if error.__cause__ is not None and not isinstance(error.__cause__, SystemExit):
                logging.getLogger(__name__).error("the script's own traceback:", exc_info=error.__cause__)
            print(f"lightning-autopar: {error}", file=sys.stderr)
            return _FAILED
    if picture is not None:
        found.report.save_picture(picture)
    if as_json:
        print(json.dumps({"function": found.function, "replaced_strategy": found.replaced, **found.report.to_dict()}, indent=2))
    else:
        _print_report(found)
    return _FITS if found.report.best is not None else _NOTHING_FITS


def _print_report(found: DryRun) -> None:
    from rich.console import Console

    from lightning_autopar.planning.breakdown import by_category, by_layer, by_part

    console = Console()
    report = found.report
    if found.replaced is not None:
        console.print(f"The script's own strategy, {found.replaced}, is replaced by autopar.")
    if found.function != "fit":
        console.print(f"The script calls {found.function}, not fit; this is its plan.")
    console.print(report.table())
    candidate = report.shown_candidate()
    if candidate is not None:
        console.print(by_category(report, candidate))
        console.print(by_part(report))
    console.print(by_layer(report.footprint))
