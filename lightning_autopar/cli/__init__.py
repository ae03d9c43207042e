"""The command line: one module a command, each of which parses, asks and prints; no more."""

from lightning_autopar.cli.program import main

__all__ = ["main"]
