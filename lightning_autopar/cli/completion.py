"""``lightning-autopar completion SHELL``: what a shell needs to complete this command line, made by shtab from the parser itself."""

from __future__ import annotations

import argparse

_SHELLS = ("bash", "zsh")
#: Arguments that are files.
_FILES = ("script", "picture", "plan", "summary", "result", "sweep")
_EXAMPLES = """\
examples:
  eval "$(lightning-autopar completion bash)"           in ~/.bashrc
  eval "$(lightning-autopar completion zsh)"            in ~/.zshrc, after compinit

exit codes: 0 printed, 2 shtab, by which it is made, isn't installed
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``completion`` to the command line's commands."""
    command = commands.add_parser(
        "completion",
        help="print what your shell needs to complete this command line",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("shell", choices=_SHELLS, help="which shell")


def print_completion(parser: argparse.ArgumentParser, shell: str) -> int:
    """``lightning-autopar completion``; returns the exit code.

    Raises:
        ValueError: if shtab isn't installed.
    """
    try:
        import shtab
    except ImportError as error:
        raise ValueError(
            "completion needs the package shtab, which isn't installed; pip install 'lightning-autopar[completion]'"
        ) from error
    for each in (parser, *_commands(parser)):
        for action in each._actions:
            if action.dest in _FILES:
                action.complete = shtab.FILE  # type: ignore[attr-defined]  # how shtab wants to be told
    print(shtab.complete(parser, shell=shell))
    return 0


def _commands(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    choices = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [command for commands in choices for command in commands.values()]
