"""What takes seconds to import, and is imported once for all processes of :mod:`tests.fresh`."""

import gc

import lightning.pytorch  # noqa: F401
import transformers  # noqa: F401

import lightning_autopar.strategies.auto  # noqa: F401
import tests.conftest  # noqa: F401

gc.collect()
gc.freeze()  # a collection of garbage in such a process would write to each page of it, and so copy 80 MiB
