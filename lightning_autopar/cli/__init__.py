"""One module a command.

Modules, in reading order:

    program           the parser of all commands
    arguments         arguments that commands share
    plan              `plan`: a script up to `fit`
    first_trainer     waits for the script to build its first Trainer
    run               `run`
    replace_strategy  our strategy in place of the script's
    devices           `devices`, `calibrate`
    device_users      who is on a device
    doctor            `doctor`: one file for a bug report
    runs              `status`, `yield`, `pause`, `resume`, `cancel`
    sweep             `sweep`
    spinner           a spinner on a terminal
"""

from lightning_autopar.cli.program import main

__all__ = ["main"]
