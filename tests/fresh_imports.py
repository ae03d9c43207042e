"""What takes seconds to import, and is imported once for all processes of :mod:`tests.fresh`."""

import gc

import lightning.pytorch  # noqa: F401
import transformers  # noqa: F401

import lightning_autopar.strategies.auto  # noqa: F401
import tests.conftest  # noqa: F401

gc.collect()
gc.freeze()  # the processes' collections of garbage would copy each page of it, 80 MiB: conftest.py says more
