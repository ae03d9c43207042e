"""The command line: ``lightning-autopar devices`` and ``lightning-autopar plan train.py …``. It parses, asks and prints; no more."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_autopar.memory.inventory import DEVICES_VARIABLE, Inventory, probe
from lightning_autopar.units import format_bytes

if TYPE_CHECKING:
    from lightning_autopar.strategies.dry_run import DryRun

#: The report's last column needs it; a narrower terminal wraps its lines.
_LEAST_WIDTH = 110
_FITS, _NOTHING_FITS, _FAILED = 0, 1, 2
_EXAMPLES = """\
examples:
  lightning-autopar devices
  lightning-autopar plan train.py --lr 0.1              plan for what is here
  lightning-autopar plan --devices 8xH100-80GB train.py plan for what isn't
  lightning-autopar plan --json train.py > plan.json    for a program to read

exit codes: 0 a plan fits, 1 none does, 2 the command or the script failed
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
        return _plan(options.script, options.arguments, options.devices, as_json=options.json)
    except ValueError as error:
        print(f"lightning-autopar: {error}", file=sys.stderr)
        return _FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-autopar",
        description="What devices there are, and how a training script would run on them.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    devices = commands.add_parser("devices", help="list the devices, what is free on them and who uses them")
    plan = commands.add_parser(
        "plan",
        help="run a script up to fit(), print every plan with its memory and time, and train nothing",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for command in (devices, plan):
        command.add_argument(
            "--devices",
            metavar="SPEC",
            help=f"what to plan for, such as 8xH100-80GB or 2xcpu:4GiB; by default {DEVICES_VARIABLE}, or what is here",
        )
        command.add_argument("--json", action="store_true", help="print JSON instead of a table")
    plan.add_argument("script", help="a Python script that calls fit() of lightning.pytorch's Trainer")
    plan.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments")
    return parser


def _devices(spec: str | None, *, as_json: bool) -> int:
    from lightning.fabric.accelerators.cuda import num_cuda_devices

    inventory = probe(spec, accelerator="cuda" if num_cuda_devices() else "cpu")
    if as_json:
        print(json.dumps(inventory.to_dict(), indent=2))
    else:
        _print_inventory(inventory)
    return _FITS


def _print_inventory(inventory: Inventory) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("device", "name", "free", "of", "busy", "processes"):
        table.add_column(title, justify="right" if title in ("free", "of", "busy") else "left")
    for device in inventory.devices:
        users = ", ".join(
            f"{process.pid}{f' ({format_bytes(process.used_bytes)})' if process.used_bytes is not None else ''}"
            for process in device.processes
        )
        busy = "" if device.utilization is None else f"{device.utilization:.0%}"
        table.add_row(device.id, device.name, format_bytes(device.free_bytes), format_bytes(device.total_bytes), busy, users)
    console = Console()
    console.print(table)
    console.print(f"host memory: {format_bytes(inventory.host_free_bytes)} free of {format_bytes(inventory.host_total_bytes)}")
    for note in inventory.notes:
        console.print(note)


def _plan(script: str, arguments: Sequence[str], devices: str | None, *, as_json: bool) -> int:
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
    if as_json:
        print(json.dumps({"function": found.function, "replaced_strategy": found.replaced, **found.report.to_dict()}, indent=2))
    else:
        _print_report(found)
    return _FITS if found.report.best is not None else _NOTHING_FITS


def _print_report(found: DryRun) -> None:
    from rich.console import Console

    from lightning_autopar.planning.breakdown import by_category, by_layer

    console = Console()
    console = Console(width=max(console.width, _LEAST_WIDTH))
    report = found.report
    if found.replaced is not None:
        console.print(f"The script's own strategy, {found.replaced}, is replaced by autopar.")
    if found.function != "fit":
        console.print(f"The script calls {found.function}, not fit; this is its plan.")
    console.print(report.table())
    predicted = [candidate for candidate in report.candidates if candidate.bytes]
    if predicted:
        console.print(by_category(report, predicted[0]))
    console.print(by_layer(report.footprint))
