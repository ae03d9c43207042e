"""Automatic parallelism for PyTorch Lightning: ``Trainer(strategy="autopar")``.

Importing this package imports neither torch nor Lightning: each public name is fetched from its module when it is first used.
It does make the name ``"autopar"`` known to Lightning, for where ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` keeps torch from doing so.
"""

from lightning_autopar import _autoload

TYPE_CHECKING = False  # typing.TYPE_CHECKING, without the time to import typing in every process that imports torch
if TYPE_CHECKING:
    from typing import Any

    from lightning_autopar._version import __version__ as __version__
    from lightning_autopar.callbacks.checkpoint_migrate import CheckpointMigrate
    from lightning_autopar.callbacks.elastic_replan import ElasticReplan
    from lightning_autopar.callbacks.plan_monitor import PlanMonitor
    from lightning_autopar.plans import Plan
    from lightning_autopar.report.report import NothingFits, Report
    from lightning_autopar.sharing.runs.requests import yield_run
    from lightning_autopar.sharing.wait_options import Turn
    from lightning_autopar.state.pretrained import load_pretrained
    from lightning_autopar.strategies.auto import AutoParallelStrategy
    from lightning_autopar.strategies.base.batch_rule import Batch
    from lightning_autopar.strategies.plan_of_module import plan

__all__ = [
    "AutoParallelStrategy",
    "Batch",
    "CheckpointMigrate",
    "ElasticReplan",
    "NothingFits",
    "Plan",
    "PlanMonitor",
    "Report",
    "Turn",
    "load_pretrained",
    "plan",
    "yield_run",
]

_HOMES = {
    "AutoParallelStrategy": "lightning_autopar.strategies.auto",
    "Batch": "lightning_autopar.strategies.base.batch_rule",
    "CheckpointMigrate": "lightning_autopar.callbacks.checkpoint_migrate",
    "ElasticReplan": "lightning_autopar.callbacks.elastic_replan",
    "NothingFits": "lightning_autopar.report.report",
    "Plan": "lightning_autopar.plans",
    "PlanMonitor": "lightning_autopar.callbacks.plan_monitor",
    "Report": "lightning_autopar.report.report",
    "Turn": "lightning_autopar.sharing.wait_options",
    "__version__": "lightning_autopar._version",
    "load_pretrained": "lightning_autopar.state.pretrained",
    "plan": "lightning_autopar.strategies.plan_of_module",
    "yield_run": "lightning_autopar.sharing.runs.requests",
}


def __getattr__(name: str) -> "Any":
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_autoload.install()
