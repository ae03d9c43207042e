"""What those that run a plan need of the strategy that a user hands to the Trainer. A protocol: it knows no strategy."""

from __future__ import annotations

from typing import Any, Protocol

from lightning_autopar._lightning import Strategy
from lightning_autopar.devices.inventory import Inventory
from lightning_autopar.plans import Plan
from lightning_autopar.report.report import Report
from lightning_autopar.report.run_history import RunHistory
from lightning_autopar.sharing.take_leases import Leases
from lightning_autopar.strategies.base.engine_mixin import EngineMixin
from lightning_autopar.strategies.base.run_plan import RunPlan


class RunHost(Protocol):
    """What ``AutoParallelStrategy`` offers its runs; its public attributes are documented there."""

    settings: Any
    report: Report | None
    plan: Plan | None
    measured: dict[str, dict[str, Any]]
    history: RunHistory | None
    leases: Leases

    @property
    def cluster_environment(self) -> Any:
        """Lightning's environment of the launcher that started the processes."""

    def make_engine(self, run_plan: RunPlan, *, forked: bool = True) -> EngineMixin:
        """The Lightning strategy that executes a plan."""

    def inventory(self, *, fewer: bool = False, own_host_bytes: int = 0) -> tuple[Inventory, int | None]:
        """The devices to choose from now, and at most how many of them."""

    def devices_now(self, *, own_host_bytes: int = 0) -> Inventory:
        """All devices as the driver shows them."""

    def take_over(self, engine: Strategy) -> None:
        """Keep what code after the run may read from the strategy."""

    def mute(self, trainer: Any) -> None:
        """Keep Lightning from running the hooks of a failed run again."""
