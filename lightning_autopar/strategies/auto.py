"""AutoParallelStrategy: what a user hands to the Trainer. It checks its arguments, plans by its launcher, and then leaves its place to the
plan's engine.

No ``from __future__ import annotations`` here: jsonargparse reads the annotations as objects.
"""

import sys
from pathlib import Path
from typing import Any, Literal

from lightning_autopar import _root
from lightning_autopar._lightning import Strategy, TrainerFn, rank_zero_warn
from lightning_autopar._lightning_compat import bare_optimizer, combined_loaders, requested_devices, restore_loaders, undo_compile
from lightning_autopar.constraints import check_allow, check_memory_limit, check_memory_margin
from lightning_autopar.devices.discover import probe
from lightning_autopar.devices.inventory import Inventory
from lightning_autopar.devices.spec import parse_spec
from lightning_autopar.exact.data.loader import unwrapped
from lightning_autopar.plans import Plan, all_engines, offered_engines
from lightning_autopar.report.report import Report
from lightning_autopar.report.run_history import RunHistory
from lightning_autopar.sharing.take_leases import Leases
from lightning_autopar.sharing.wait_options import Turn
from lightning_autopar.strategies.base.batch_rule import Batch
from lightning_autopar.strategies.launcher import AutoLauncher
from lightning_autopar.strategies.preparation.planning_inputs import CalibrationRule, Settings
from lightning_autopar.strategies.processes.idle_strategy import IdleStrategy


class AutoParallelStrategy(IdleStrategy):
    """Chooses how to run a module on the devices that are free now, and runs it: one device, DDP, FSDP2, a pipeline, ZeRO.

    Before and after a run, ``report`` holds every candidate with its prediction, ``plan`` the chosen one, ``measured`` what the run used:
    for each device id what :class:`lightning_autopar.strategies.base.rank_measurement.Measured` says, such as ``peak_bytes`` and
    ``step_seconds``. A training run's measured figures correct the next prediction for the same module; the variable AUTOPAR_CACHE names
    the folder where they are stored, or is "off". After an elastic run, ``history`` holds what happened to it, and prints it.

    Args:
        allow: The engines to choose from: "single", "ddp", "fsdp" and "pipeline" by default; "zero" only where it is named.
        devices: The devices to use, such as "2xcpu:4GiB"; by default the variable AUTOPAR_DEVICES, or else the Trainer's devices.
        memory_limit: The most to use of each device, in bytes or as "20GiB".
        memory_margin: The share of each device's free memory that is left alone, from 0 up to but not including 1.
        batch: "global" splits the user's batch over the devices; "per_device" gives each device batches of its own, as Lightning does; a
            :class:`Batch` also says who draws the random numbers of a split batch.
        plan: A Plan, or the path of its JSON: run only this plan.
        objective: "speed" for the shortest step, "memory" for the least memory.
        exact: Leave out plans under which the loss would differ because it isn't a mean over samples.
        calibrate: "auto" measures this machine's rates once, for a few seconds, where there is more than one device to choose from, and
            stores them with the figures of runs; True (or "now") measures them again; False (or "off") takes data sheets.
        wait: Where nothing fits now but would on idle devices: "forever" waits for the run's turn, "never" gives up, and a number of
            seconds, "30min" or "2h" waits so long at most; a :class:`Turn` also says how important the run is. By default as the variables
            AUTOPAR_WAIT and AUTOPAR_PRIORITY say, or else forever, at priority 0. Processes that torchrun or Slurm started never wait.

    Raises:
        ValueError: if an argument isn't allowed, with the value, the bound and the remedy.
    """

    strategy_name = "autopar"

    def __init__(
        self,
        allow: list[str] | None = None,
        devices: str | None = None,
        memory_limit: int | str | None = None,
        memory_margin: float = 0.05,
        batch: Literal["global", "per_device"] | Batch = "global",
        plan: Plan | str | Path | None = None,
        objective: Literal["speed", "memory"] = "speed",
        exact: bool = False,
        calibrate: bool | Literal["auto", "now", "off"] = "auto",
        wait: bool | int | float | str | Turn | None = None,
    ) -> None:
        super().__init__()
        whole_batch = Batch.of(batch)
        if exact and whole_batch.draws == "per-rank":
            raise ValueError(
                "exact=True needs one device's random numbers, but with draws='per-rank' each rank draws its own; use draws='whole' (the "
                "default), or leave exact out"
            )
        if exact and whole_batch.despite:
            raise ValueError(
                f"despite={list(whole_batch.despite)!r} allows a run that differs from one device's, but exact=True forbids that; "
                "leave one of them out"
            )
        if objective not in ("speed", "memory"):
            raise ValueError(f"objective={objective!r} must be 'speed' or 'memory'")
        if exact not in (True, False):
            raise ValueError(f"exact={exact!r} must be True or False")
        if isinstance(devices, (int, list)):
            raise ValueError(
                f"devices={devices!r} must be a text that describes devices, such as '2xcpu:4GiB'; which of those here to use is the "
                f"Trainer's to say: Trainer(devices={devices!r}, strategy=AutoParallelStrategy(...))"
            )
        if devices is not None:
            parse_spec(devices)
        self.settings = Settings(
            allow=check_allow(allow) if allow is not None else offered_engines(),
            memory_limit_bytes=None if memory_limit is None else check_memory_limit(memory_limit),
            memory_margin=check_memory_margin(memory_margin),
            batch=whole_batch.rule,
            own_draws=whole_batch.draws == "per-rank",
            despite=tuple(whole_batch.despite),
            plan=_pinned(plan),
            objective=objective,
            exact=bool(exact),
            calibrate=_calibration_rule(calibrate),
            wait=Turn.of(wait),
        )
        self._devices_spec = devices
        self._requested: Any = "auto"
        self.report: Report | None = None
        self.plan: Plan | None = self.settings.plan
        self.measured: dict[str, dict[str, Any]] = {}
        self.history: RunHistory | None = None
        self.leases = Leases()
        self._muted: tuple[list[Any], Any] | None = None

    def plan_for(self, devices: str) -> None:
        """Plan for these devices from now on, whether they are here or not.

        Raises:
            ValueError: if the spec is malformed.
        """
        parse_spec(devices)
        self._devices_spec = devices

    # -- what Lightning and the launcher use -------------------------------------------------------------------------------------------

    @property
    def _lightning_module(self) -> Any:
        return self.__dict__.get("_module_here")

    @_lightning_module.setter
    def _lightning_module(self, module: Any) -> None:
        """Lightning sets the module here before it asks whether a strategy may run compiled ones."""
        if undo_compile(module):
            rank_zero_warn(
                "the LightningModule was given to torch.compile as a whole; its steps run uncompiled, as plans differ in what a step does. "
                "Compile its networks in __init__ instead (self.net.compile()): one device, DDP and FSDP2 run them compiled"
            )
        self.__dict__["_module_here"] = module

    def _configure_launcher(self) -> None:
        _root.check(self.accelerator, "this Trainer")  # has just put its own accelerator here
        self._requested = requested_devices()
        self._launcher = AutoLauncher(self)

    def inventory(self, *, fewer: bool = False, own_host_bytes: int = 0) -> tuple[Inventory, int | None]:
        """The devices to choose from now, and at most how many of them.

        Args:
            fewer: whether devices that the Trainer asks for may be missing, as in the middle of a run.
            own_host_bytes: what this run's workers hold of the host's memory, which counts as free.

        Raises:
            ValueError: if the Trainer asks for devices that aren't there.
        """
        found = self.leases.see(self.devices_now(own_host_bytes=own_host_bytes))
        if found.source == "spec":
            return found, None
        return found.restrict(self._requested, fewer=fewer)

    def devices_now(self, *, own_host_bytes: int = 0) -> Inventory:
        """All devices as the driver shows them, without regard to leases."""
        kind: Literal["cuda", "cpu"] = "cuda" if self.root_device.type == "cuda" else "cpu"
        wanted = int(self._requested) if kind == "cpu" and str(self._requested).isdigit() else 1
        return probe(self._devices_spec, accelerator=kind, cpu_devices=wanted, own_host_bytes=own_host_bytes)

    def take_over(self, engine: Strategy) -> None:
        """Keep what code after a run may read from the strategy."""
        self._lightning_module = engine.lightning_module
        self.model = engine.lightning_module
        self.precision_plugin = engine.precision_plugin
        assert self._lightning_module is not None
        trainer = self._lightning_module.trainer
        if trainer.state.fn == TrainerFn.FITTING:  # a validation makes none, and leaves the fit's
            self.optimizers = [bare_optimizer(optimizer) for optimizer in engine.optimizers]
            self.lr_scheduler_configs = engine.lr_scheduler_configs
        restore_loaders(trainer, combined_loaders(trainer, unwrapped))

    def mute(self, trainer: Any) -> None:
        """Keep Lightning from running the hooks of a failed run again here, where the state isn't the run's; see :meth:`on_exception`."""
        self._muted = (trainer.callbacks, trainer.datamodule)
        trainer.callbacks, trainer.datamodule = [], None

    def on_exception(self, exception: BaseException) -> None:
        """Lightning calls this after the callbacks' and the DataModule's hooks: unmute them."""
        if self._muted is not None:
            assert self._lightning_module is not None
            trainer: Any = self._lightning_module.trainer
            trainer.callbacks, trainer.datamodule = self._muted
            self._muted = None


def _pinned(plan: Plan | str | Path | None) -> Plan | None:
    """The argument as a plan.

    Raises:
        ValueError: if it is none, and no path of one.
    """
    if plan is None or isinstance(plan, Plan):
        return plan
    if not isinstance(plan, (str, Path)):
        raise ValueError(f"plan={plan!r} must be a Plan, or the path of its JSON")
    if plan in all_engines() and not Path(plan).exists():
        raise ValueError(f"plan={plan!r} must be a Plan, or the path of its JSON; for any plan of this engine, set allow=[{plan!r}]")
    return Plan.from_json(plan)


def _calibration_rule(calibrate: object) -> CalibrationRule:
    """The argument as one of three words.

    Raises:
        ValueError: if it is none of them.
    """
    if isinstance(calibrate, bool):
        return "now" if calibrate else "off"
    if calibrate not in ("auto", "now", "off"):
        raise ValueError(
            f"calibrate={calibrate!r} must be 'auto' (measure this machine once), True (measure again) or False (take data sheets)"
        )
    return calibrate


def let_trainers_take_it(strategies: Any) -> None:
    """Let a Trainer take our class for a strategy where it was made for the other Lightning: it comes as far as the check, which says so.

    Args:
        strategies: the module ``strategies`` of either Lightning; while it is being imported, nothing happens.
    """
    if (base := getattr(strategies, "Strategy", None)) is not None:
        base.register(AutoParallelStrategy)


for _each in _root.ROOTS:
    let_trainers_take_it(sys.modules.get(f"{_each}.strategies"))
