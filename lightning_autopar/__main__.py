"""``python -m lightning_autopar`` is the command ``lightning-autopar``, as torchrun and srun want it."""

import sys

from lightning_autopar.cli import main

if __name__ == "__main__":
    sys.exit(main())
