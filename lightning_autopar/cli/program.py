"""``lightning-autopar COMMAND``: the parser of all commands, and which module does what."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from lightning_autopar.cli import devices, doctor, plan, run, runs, sweep
from lightning_autopar.cli.arguments import script_as_value

FAILED = 2
_EXAMPLES = """\
examples:
  lightning-autopar devices                             what there is, who uses it, what a plan would see
  lightning-autopar plan train.py --lr 0.1              how this script would run here
  lightning-autopar run train.py --lr 0.1               and run it so, whatever strategy it names
  lightning-autopar plan --devices 8xH100-80GB train.py plan for what isn't here
  lightning-autopar sweep sweep.yaml                    many runs, so that the last one ends soonest
  lightning-autopar status                              what all runs on this host do, and why
  lightning-autopar yield train-gpt-3f2a                ask one of yours to move off its devices now
  lightning-autopar cancel train-gpt-3f2a               or end it
  lightning-autopar clean                               remove what killed runs have left
  lightning-autopar doctor                              one file for a bug report, without your code or data

Each command says more: lightning-autopar COMMAND --help

exit codes: 0 done; 1 plan: nothing fits, sweep: a run failed, yield and cancel: no answer came;
2 the command can't be done, with the reason on stderr. run ends with the exit code of the script.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """The entry point of ``lightning-autopar``; returns the exit code.

    Args:
        arguments: those of the command line, without the program's name; ``sys.argv``'s by default.
    """
    parser = make_parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        words = f"{options.command} has no option {unknown[0]}"
        if options.command in ("plan", "run"):
            words += f"; options of the script go behind it, as in {options.command} train.py --lr 0.1"
            words = script_as_value(options) or words
        parser.error(words)
    try:
        if options.command == "devices":
            return devices.show_devices(options.devices, as_json=options.json)
        if options.command == "calibrate":
            return devices.calibrate_devices(options.devices, as_json=options.json)
        if options.command == "plan":
            return plan.plan_script(options)
        if options.command == "run":
            return run.run_script(options)
        if options.command in ("status", "yield", "pause", "resume", "cancel", "clean"):
            return runs.run_command(options)
        if options.command == "sweep":
            return sweep.sweep_scripts(options)
        assert options.command == "doctor", options.command
        return doctor.write_report(options.file)
    except ValueError as error:
        print(f"lightning-autopar: {error}", file=sys.stderr)
        return FAILED


class _WholeNames(argparse.ArgumentParser):
    """Takes no abbreviated options: ``clean --snapshot``, a typing error, would remove snapshots."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(allow_abbrev=False, **arguments)


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="lightning-autopar",
        description="What devices there are, how a training script would run on them, and what the runs on this host do.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands: argparse._SubParsersAction[argparse.ArgumentParser]
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_WholeNames)
    devices.add_commands(commands)
    plan.add_command(commands)
    run.add_command(commands)
    sweep.add_command(commands)
    runs.add_run_commands(commands)
    doctor.add_command(commands)
    return parser
