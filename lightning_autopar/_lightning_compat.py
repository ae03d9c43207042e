"""The one place that imports Lightning's private names. Everything here is a thin, named doorway; it decides nothing.

Each entry says which private name it stands for, so that a change in Lightning is mended in this file alone. Tested with Lightning 2.6.6.
"""

from __future__ import annotations

import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import torch

from lightning_autopar._lightning import (
    CombinedLoader,
    CPUAccelerator,
    CUDAAccelerator,
    DoublePrecision,
    FitRestartStage,
    LightningDataModule,
    LightningEnvironment,
    LightningOptimizer,
    RestartStage,
    SIGTERMException,
    TrainerFn,
    TrainerStatus,
    _AcceleratorConnector,
    call,
    find_free_network_port,
    trainer_module,
    tree_unflatten,
)
from lightning_autopar._lightning import _basic_subprocess_cmd as script_command
from lightning_autopar._lightning import _distributed_is_initialized as distributed_is_initialized
from lightning_autopar._lightning import _DummyExperiment as DummyExperiment
from lightning_autopar._lightning import _get_default_process_group_backend_for_device as default_backend
from lightning_autopar._lightning import _init_dist_connection as init_dist_connection
from lightning_autopar._lightning import _Launcher as Launcher
from lightning_autopar._lightning import _materialize_distributed_module as materialize_module
from lightning_autopar._lightning import _optimizers_to_device as optimizers_to_device
from lightning_autopar._lightning import _set_num_threads_if_needed as share_cores
from lightning_autopar._lightning import _sync_ddp_if_available as reduce_over_ranks
from lightning_autopar._lightning import _TunerExitException as TunerExit
from lightning_autopar._lightning import _update_properties as update_properties
from lightning_autopar._lightning import is_overridden as _is_overridden
from lightning_autopar._root import LIGHTNING
from lightning_autopar._temporary import patched

if TYPE_CHECKING:
    from pathlib import Path

    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import Strategy

# Lightning's own use of torch.utils._pytree, of which a user can change nothing; each process would say it anew.
warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")


def is_overridden(method_name: str, instance: object | None = None, parent: type[object] | None = None) -> bool:
    """Lightning's function, which also handles methods without code to compare: a callable object, a mock, a partial of a builtin."""
    try:
        return _is_overridden(method_name, instance, parent)
    except (AttributeError, TypeError):
        return True
    except ValueError:  # a callback of the other Lightning's
        of_lightning = [base for base in type(instance).__mro__ if base.__module__.startswith(LIGHTNING) and hasattr(base, method_name)]
        return is_overridden(method_name, instance, of_lightning[-1]) if of_lightning else hasattr(instance, method_name)


_CONNECTOR_FIELDS = (
    "accelerator",
    "_accelerator_flag",
    "strategy",
    "_strategy_flag",
    "cluster_environment",
    "_cluster_environment_flag",
    "_parallel_devices",
    "precision_plugin",
    "_precision_flag",
    "use_distributed_sampler",
)


def requested_devices() -> Any:
    """What the user passed as ``Trainer(devices=…)``, read while the Trainer is being built.

    The connector keeps only the parsed value, in which ``devices=2`` (any two) and ``devices=[0, 1]`` (those two) look the same on CUDA.
    Its constructor's argument still shows the difference; this can go when the connector keeps it.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _AcceleratorConnector.__init__.__code__:
            return frame.f_locals.get("devices", "auto")
        frame = frame.f_back
    return "auto"


@contextmanager
def requests_changed(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[None]:
    """While open, every Trainer that is built takes other values for the arguments that say what it runs on.

    Args:
        change: gets the arguments of ``_AcceleratorConnector`` by name (``devices``, ``accelerator``, ``strategy``, ``num_nodes``, …) and
            returns those to take instead.
    """

    class Changed(_AcceleratorConnector):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**change(arguments))

    with patched(trainer_module, "_AcceleratorConnector", Changed):
        yield


@contextmanager
def installed(
    trainer: Trainer,
    engine: Strategy,
    module: LightningModule,
    devices: list[torch.device],
    *,
    keep_sampler: bool,
    external: Any = None,
) -> Iterator[None]:
    """While open, ``engine`` is the trainer's strategy, with its accelerator and precision plugin.

    The connector does the same in its constructor (``_init_strategy``, ``_check_and_init_precision``, ``_lazy_init_strategy``). It replaces
    the strategy rather than wrapping it, since Lightning checks the strategy's class in many places.

    Args:
        devices: the engine's torch devices in rank order.
        keep_sampler: keep Lightning's own distributed sampler (each rank draws batches of its own).
        external: the cluster environment of the processes that a launcher started, if any.
    """
    connector = trainer._accelerator_connector
    before = {name: getattr(connector, name) for name in _CONNECTOR_FIELDS}
    kind = devices[0].type
    connector.accelerator = cast(Any, CPUAccelerator() if kind == "cpu" else CUDAAccelerator())
    connector._accelerator_flag = kind
    connector.strategy = engine
    connector._strategy_flag = engine
    connector.cluster_environment = external or LightningEnvironment()
    connector._cluster_environment_flag = None
    connector._parallel_devices = list(devices)
    connector.use_distributed_sampler = keep_sampler and bool(before["use_distributed_sampler"])
    try:
        # Lightning's ModelParallelStrategy has no 64-true in its list of precisions, though FSDP2 runs it as it runs 32-true.
        double = connector._precision_flag == "64-true" and connector._precision_plugin_flag is None
        connector.precision_plugin = DoublePrecision() if double else connector._check_and_init_precision()
        connector._lazy_init_strategy()
        engine._launcher = None
        engine._lightning_module = module
        for loop in (trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
            loop._results.clear()  # earlier values refer to their own run's engine, which log() compares
        # On ranks that don't log, `logger.experiment.summary["best"] = loss` does nothing. Lightning's own stand-in has methods alone.
        with (
            patched(DummyExperiment, "__getattr__", lambda it, _: it),
            patched(DummyExperiment, "__call__", lambda it, *a, **k: it.nop(*a, **k)),
        ):
            yield
    finally:
        for name, value in before.items():
            setattr(connector, name, value)


@contextmanager
def hyperparameters_added(trainer: Trainer, values: Mapping[str, Any]) -> Iterator[None]:
    """While open, loggers get these hyperparameters together with the user's, when Lightning logs those (``_log_hyperparams``). Both go in
    one call, since TensorBoard shows only a run's first hyperparameters, and writes ``hparams.yaml`` once.

    Args:
        trainer: whose loggers; ``Trainer(enable_autolog_hparams=False)`` gets none.
        values: under names that none of the user's has.
    """
    before = trainer_module._log_hyperparams

    def log(of: Trainer) -> None:
        if of is not trainer:
            before(of)
            return
        with ExitStack() as loggers:
            missing = [loggers.enter_context(_with_hyperparameters(logger, values)) for logger in trainer.loggers]
            if trainer.is_global_zero and not _has_hyperparameters(trainer):
                for add in missing:
                    add()
            before(of)

    with patched(trainer_module, "_log_hyperparams", log):
        yield


@contextmanager
def _with_hyperparameters(logger: Any, values: Mapping[str, Any]) -> Iterator[Callable[[], None]]:
    """While open, the logger's ``log_hyperparams`` adds these; yields a function that logs only them."""
    original = logger.log_hyperparams

    def log_hyperparams(params: Any, *args: Any, **kwargs: Any) -> None:
        params = vars(params) if isinstance(params, Namespace) else params
        original({**params, **values}, *args, **kwargs)

    def log_alone() -> None:
        # TensorBoard's logger would write a metric "hp_metric", which a run without hyperparameters doesn't have.
        placeholder = vars(logger).get("_default_hp_metric")
        if placeholder is not None:
            logger._default_hp_metric = False
        original(dict(values))
        if placeholder is not None:
            logger._default_hp_metric = placeholder

    vars(logger)["log_hyperparams"] = log_hyperparams
    try:
        yield log_alone
    finally:
        vars(logger).pop("log_hyperparams", None)  # already gone for a logger that is listed twice


def _has_hyperparameters(trainer: Trainer) -> bool:
    """Whether ``_log_hyperparams`` calls the loggers: the module or the DataModule has saved hyperparameters."""
    datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]  # set by a connector
    return bool(trainer.lightning_module._log_hyperparams or (datamodule is not None and datamodule._log_hyperparams))


def graph_logger(trainer: Trainer) -> str | None:
    """The class of a logger that is to trace the whole module on rank 0, for a picture of its graph; None where there is none."""
    return next((type(logger).__name__ for logger in trainer.loggers if vars(logger).get("_log_graph")), None)


def attach_data(trainer: Trainer, arguments: dict[str, Any]) -> None:
    """Attach the loaders or the DataModule to the trainer, which ``_fit_impl`` and its siblings do first."""
    model = arguments.get("model") or trainer.lightning_module
    datamodule = arguments.get("datamodule")
    names = ("train_dataloaders", "val_dataloaders") if "train_dataloaders" in arguments else ("dataloaders",)
    loaders = {name: arguments.get(name) for name in names}
    if isinstance(loaders[names[0]], LightningDataModule):
        datamodule, loaders[names[0]] = loaders[names[0]], None
    if "dataloaders" in loaders:
        stage = {"validate": "val", "test": "test", "predict": "predict"}[str(trainer.state.fn.value if trainer.state.fn else "")]
        loaders = {f"{stage}_dataloaders": loaders["dataloaders"]}
    if any(loader is not None for loader in loaders.values()) and datamodule is not None:
        return  # the loop itself refuses it, with Lightning's message
    trainer._data_connector.attach_data(model, datamodule=datamodule, **loaders)


def call_on_exception(trainer: Trainer, error: BaseException, *, finalize: bool) -> None:
    """Call the hooks that ``_call_and_handle_interrupt`` calls when a run ends by an exception (``_interrupt``).

    Args:
        finalize: whether to finalize the loggers too; where the exception goes on to Lightning, it does that.
    """
    trainer.state.status = TrainerStatus.INTERRUPTED
    call._call_callback_hooks(trainer, "on_exception", error)
    if trainer.datamodule is not None:  # type: ignore[attr-defined]  # set by a connector
        call._call_lightning_datamodule_hook(trainer, "on_exception", error)
    trainer.strategy.on_exception(error)
    for logger in trainer.loggers if finalize else ():
        logger.finalize("failed")


def progress_of(trainer: Trainer) -> dict[str, Any]:
    """Loop counters, state and metrics that code sees on the trainer after a run, as picklable values."""
    loops = {name: getattr(trainer, name).state_dict() for name in ("fit_loop", "validate_loop", "test_loop", "predict_loop")}
    loops["fit_loop"].get("state_dict", {}).pop("combined_loader", None)
    connector = trainer._logger_connector
    fit_loop = trainer.fit_loop
    return {
        "loops": loops,
        "state": trainer.state,
        "should_stop": trainer.should_stop,
        "metrics": {name: dict(getattr(connector, name)) for name in ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")},
        "limits": (fit_loop.epoch_loop.min_steps, fit_loop.epoch_loop.max_steps, fit_loop.min_epochs, fit_loop.max_epochs),
        "max_batches": fit_loop.max_batches,
    }


def restore_progress(trainer: Trainer, progress: dict[str, Any]) -> None:
    """Put the values of another process's :func:`progress_of` into this trainer."""
    for name, state in progress["loops"].items():
        loop = getattr(trainer, name)
        loop.load_state_dict(state)
        for inner in (loop, getattr(loop, "epoch_loop", None), getattr(getattr(loop, "epoch_loop", None), "val_loop", None)):
            if inner is not None:
                inner._restarting = inner._loaded_from_state_dict = inner._resuming_from_checkpoint = False
    fit_loop = trainer.fit_loop
    fit_loop.epoch_loop.min_steps, fit_loop.epoch_loop.max_steps, fit_loop.min_epochs, fit_loop.max_epochs = progress["limits"]
    fit_loop.max_batches = progress["max_batches"]
    trainer.state = progress["state"]
    trainer.should_stop = progress["should_stop"]
    for name, values in progress["metrics"].items():
        getattr(trainer._logger_connector, name).clear()
        getattr(trainer._logger_connector, name).update(values)


def _data_loops(trainer: Trainer) -> dict[str, Any]:
    """The loops that read data, by the names of the trainer's properties for their loaders; fitting has a validation loop of its own."""
    return {
        "train_dataloader": trainer.fit_loop,
        "fit's val_dataloaders": trainer.fit_loop.epoch_loop.val_loop,
        "val_dataloaders": trainer.validate_loop,
        "test_dataloaders": trainer.test_loop,
        "predict_dataloaders": trainer.predict_loop,
    }


@contextmanager
def _of_one_device(trainer: Trainer, around: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """While open, neither torch nor the trainer shows other ranks."""
    said = {"world_size": 1, "global_rank": 0, "local_rank": 0, "num_nodes": 1, "num_devices": 1}
    kind: Any = type(trainer)
    own = {name: kind.__dict__[name] for name in said if name in kind.__dict__}
    with around():
        for name, value in said.items():
            setattr(kind, name, value)
        try:
            yield
        finally:
            for name in said:
                delattr(kind, name)
            for name, described in own.items():
                setattr(kind, name, described)


@contextmanager
def data_of_one_device(trainer: Trainer, around: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """The DataModule's next ``setup`` sees no other ranks: one that keeps a rank's part of the data would leave the others to nobody.

    Args:
        around: makes the context manager around the call.
    """
    datamodule = trainer.datamodule  # type: ignore[attr-defined]  # set by a connector
    held = {} if datamodule is None else vars(datamodule)

    def setup(*args: Any, **kwargs: Any) -> Any:
        del held["setup"]  # before anybody looks at the DataModule's attributes
        with _of_one_device(trainer, around):
            return datamodule.setup(*args, **kwargs)

    if datamodule is not None and "setup" not in held:
        held["setup"] = setup
    try:
        yield
    finally:
        if held.get("setup") is setup:
            del held["setup"]


@contextmanager
def loaders_of_one_device(trainer: Trainer, around: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """While open, the user's hooks for loaders see no other ranks, neither through torch nor through the trainer.

    Args:
        around: makes the context manager around each call of a hook.
    """

    def dataloader(source: Any) -> Any:
        with _of_one_device(trainer, around) if source.is_module() else nullcontext():
            return type(source).dataloader(source)

    sources = [loop._data_source for loop in _data_loops(trainer).values()]
    for source in sources:
        source.__dict__["dataloader"] = partial(dataloader, source)
    try:
        yield
    finally:
        for source in sources:
            source.__dict__.pop("dataloader", None)


def loader_sources(trainer: Trainer) -> dict[str, Any]:
    """The loaders that the user passed to the trainer (``_DataLoaderSource.instance``), by property; without those that hooks return."""
    sources = {name: loop._data_source for name, loop in _data_loops(trainer).items()}
    return {
        f"trainer.{name}": source.instance for name, source in sources.items() if source.instance is not None and not source.is_module()
    }


def loaders_apart(combined: CombinedLoader) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The loaders, and a function that puts one value for each into the user's structure (a list of numbers is one loader)."""
    return combined.flattened, lambda each: tree_unflatten(each, combined._spec)


def combined_loaders(trainer: Trainer, unwrap: Callable[[Any], Any]) -> dict[str, tuple[Any, str, Any]]:
    """What ``trainer.train_dataloader`` and its siblings read: loaders, combination mode, and for an evaluation the numbers of batches."""
    found = {}
    for name, loop in _data_loops(trainer).items():
        combined = loop._combined_loader
        if combined is not None:
            flattened, shaped = loaders_apart(combined)
            # fit's number of batches is among its counters
            found[name] = (shaped([unwrap(each) for each in flattened]), combined_mode(combined), getattr(loop, "_max_batches", None))
    return found


def restore_loaders(trainer: Trainer, found: dict[str, tuple[Any, str, Any]]) -> None:
    """Put the values of :func:`combined_loaders` into this trainer; the next run builds its own (``_DataConnector.attach_dataloaders``)."""
    for name, loop in _data_loops(trainer).items():
        if name in found:
            loaders, mode, max_batches = found[name]
            loop._combined_loader = CombinedLoader(loaders, cast(Any, mode))
            if max_batches is not None:
                loop._max_batches = max_batches


def run_attached(trainer: Trainer) -> None:
    """What the trainer's function does once module and data are attached (``_run``)."""
    trainer._run(trainer.lightning_module)


def verify_configuration(trainer: Trainer) -> None:
    """Raise what Lightning raises for a module that lacks what the trainer's function needs (``_verify_loop_configurations``)."""
    from lightning_autopar._lightning import _verify_loop_configurations

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run itself warns
        _verify_loop_configurations(trainer)


def make_result(options: dict[str, Any], metric: Any | None, device: torch.device) -> Any:
    """An entry of a result collection (``_ResultMetric``): for a logged tensor, or for a torchmetrics object."""
    from lightning_autopar._lightning import _Metadata, _ResultMetric, _Sync

    meta = _Metadata(**options)
    meta.sync = _Sync()
    result = _ResultMetric(meta, metric is None).to(device)
    if metric is not None:
        result.value = metric
    return result


def run_arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of ``_fit_impl`` and its siblings by name."""
    import inspect

    return dict(inspect.signature(function).bind(*args, **kwargs).arguments)


def from_snapshot(call: partial[Any], snapshot: Path) -> partial[Any]:
    """The call of one of them, with a snapshot in place of its checkpoint."""
    return partial(call, ckpt_path=str(snapshot), weights_only=False)


# -- for memory/trace/first_batch.py and memory/trace/bare_step.py --------------------


def loader_source(trainer: Trainer, stage: str) -> Any:
    """The loaders of a stage as its loop's ``setup_data`` requests them (``_request_dataloader``); None where the user gave none."""
    from lightning_autopar._lightning import _request_dataloader

    source = getattr(trainer, f"{stage}_loop")._data_source
    if source.instance is None or (stage != "fit" and not source.is_defined()):
        return None  # if fit has none, Lightning's default hook raises
    return _request_dataloader(source)


def attach_loaders(trainer: Trainer, stage: str, combined: CombinedLoader, epoch_batches: int | None, each: list[float]) -> None:
    """Let ``trainer.train_dataloader`` and its siblings (``_combined_loader``) answer as from a run's start on, and
    ``trainer.num_training_batches`` (``max_batches``) and ``num_val_batches`` (``_max_batches``); in a child.

    Args:
        epoch_batches: how many batches an epoch has; None where that isn't known.
        each: how many each loader has; infinite where it has no length.
    """
    getattr(trainer, f"{stage}_loop")._combined_loader = combined  # a fit's trainer.val_dataloaders asks validate_loop as well
    if stage == "fit" and epoch_batches:
        trainer.fit_loop.max_batches = epoch_batches
    if stage == "validate":
        trainer.fit_loop.epoch_loop.val_loop._max_batches = trainer.validate_loop._max_batches = each


def has_own_loaders(trainer: Trainer) -> bool:
    """Whether a fit's loaders are made by the module or the DataModule, each time that they are asked for."""
    return bool(trainer.fit_loop._data_source.is_module())


def undo_compile(module: Any) -> bool:
    """Give a LightningModule its own steps again, where ``from_compiled`` has replaced them (``_compiler_ctx``); whether it had."""
    compiled = getattr(module, "_compiler_ctx", None)
    if compiled is None:
        return False
    for name in ("forward", "training_step", "validation_step", "test_step", "predict_step"):
        own = compiled[f"original_{name}"]
        if getattr(own, "__func__", None) is getattr(type(module), name):
            del module.__dict__[name]
        else:
            setattr(module, name, own)
    module._compiler_ctx = None
    return True


def bare_optimizer(optimizer: Any) -> Any:
    """The user's own optimizer, inside of the one that Lightning may have wrapped around it."""
    return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def combined_mode(combined: Any) -> str:
    """A CombinedLoader's mode (``_mode``)."""
    return str(combined._mode)


def loaders_of_batch(trainer: Trainer, dataloader_idx: int) -> list[Any]:
    """The loaders that the current batch came from (``_combined_loader``)."""
    combined: Any = getattr(trainer.fit_loop if trainer.training else trainer._active_loop, "_combined_loader", None)
    if combined is None:
        return []
    found: list[Any] = combined.flattened
    return found if combined_mode(combined) != "sequential" else [found[dataloader_idx]]


def attach_model_callbacks(trainer: Trainer) -> None:
    """Let the trainer hold the callbacks of the module's ``configure_callbacks``, as Lightning does once the run has begun; in a child."""
    connector: Any = trainer._callback_connector
    connector._maybe_show_litmodels_tip = lambda: None  # the run itself shows it
    if is_overridden("configure_callbacks", trainer.lightning_module):
        connector._attach_model_callbacks()


def transfer_batch(module: LightningModule, batch: Any, loader: int = 0) -> Any:
    """The batch after the transfer hooks of the module or the DataModule, on the CPU (``Strategy.batch_to_device``)."""
    batch = module._on_before_batch_transfer(batch, dataloader_idx=loader)
    return module._apply_batch_transfer_handler(batch, device=torch.device("cpu"), dataloader_idx=loader)


@contextmanager
def evaluating(trainer: Trainer | None, *, testing: bool = False) -> Iterator[None]:
    """While open, the trainer says that it validates, or tests, to a DataModule's hooks, which ask the trainer itself."""
    if trainer is None:
        yield
        return
    before = trainer.state.stage
    try:
        trainer.testing, trainer.validating = testing, not testing
        yield
    finally:
        trainer.state.stage = before


def step_name(trainer: Trainer) -> str:
    """The name of the step that gets the batch that arrives now."""
    stage: Any = trainer.state.stage
    return {"train": "training_step", "test": "test_step", "predict": "predict_step"}.get(stage and stage.value, "validation_step")


def before_transfer(module: LightningModule, batch: Any) -> Any:
    """The batch as the strategy gets it, before it goes to the device."""
    return module._on_before_batch_transfer(batch, dataloader_idx=0)


@contextmanager
def before_transfers(trainer: Trainer, begins: Callable[[int], None]) -> Iterator[None]:
    """While open, a function gets the loader's number before the user's ``on_before_batch_transfer``, which Lightning calls before the
    strategy's ``batch_to_device``. Where the user has no such hook, it isn't called.
    """
    module: Any = trainer.lightning_module
    datamodule = trainer.datamodule  # type: ignore[attr-defined]  # set by a connector
    if not any(each is not None and is_overridden("on_before_batch_transfer", each) for each in (module, datamodule)):
        yield
        return

    def arrives(batch: Any, dataloader_idx: int = 0) -> Any:
        begins(dataloader_idx)
        return type(module)._on_before_batch_transfer(module, batch, dataloader_idx)

    with patched(module, "_on_before_batch_transfer", arrives):
        yield


def parse_optimizers(conf: Any) -> tuple[list[Any], list[Any]]:
    """The optimizers and the schedulers in what ``configure_optimizers`` returned (``_configure_optimizers``)."""
    from lightning_autopar._lightning import _configure_optimizers

    optimizers, schedulers, _ = _configure_optimizers(conf)
    return optimizers, schedulers


# -- for strategies/pipeline/strategy.py --------------------


class NoLoss:
    """Returned by a strategy's ``training_step`` when all ranks know that there is no loss; see :func:`let_steps_be_skipped`."""


def let_steps_be_skipped(trainer: Trainer) -> Callable[[], None]:
    """Let automatic optimization treat :class:`NoLoss` as a step that returned None; returns what undoes it. With several ranks Lightning
    refuses None, since a rank that skips alone would leave the others waiting (``_AutomaticOptimization._training_step``).
    """
    optimization = trainer.fit_loop.epoch_loop.automatic_optimization
    original: Any = optimization.output_result_cls

    class Result(original):  # type: ignore[misc]
        @classmethod
        def from_training_step_output(cls, training_step_output: Any, normalize: int = 1) -> Any:
            output = None if isinstance(training_step_output, NoLoss) else training_step_output
            return original.from_training_step_output(output, normalize)

    optimization.output_result_cls = Result

    def undo() -> None:
        del optimization.output_result_cls

    return undo


# -- for strategies/processes/worker.py --------------------


@contextmanager
def without_word_of_signals(trainer: Trainer) -> Iterator[None]:
    """While open, rank 0 doesn't tell the others before each batch whether it got SIGTERM. That takes a collective, and the host waits
    twice for its GPU (``_TrainingEpochLoop._broadcast_sigterm_tensor``, since Lightning 2.6). Only for processes that aren't to handle
    signals themselves.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    loop.__dict__["_broadcast_sigterm_tensor"] = lambda: None
    try:
        yield
    finally:
        del loop.__dict__["_broadcast_sigterm_tensor"]


# -- for strategies/processes/between_batches.py and strategies/base/resume.py --------------------


def mute_hooks(names: Collection[str], *, heard_by: type) -> Callable[[], None]:
    """Don't run hooks of these names in this process, until the returned function is called (``trainer/call.py``'s functions for hooks).

    Args:
        names: of hooks of callbacks, module and DataModule.
        heard_by: callbacks of this class still get the calls.
    """
    before = {
        name: getattr(call, name) for name in ("_call_callback_hooks", "_call_lightning_module_hook", "_call_lightning_datamodule_hook")
    }

    def callbacks(trainer: Trainer, hook_name: str, *args: Any, monitoring_callbacks: bool | None = None, **kwargs: Any) -> None:
        if hook_name not in names:
            before["_call_callback_hooks"](trainer, hook_name, *args, monitoring_callbacks=monitoring_callbacks, **kwargs)
            return
        for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by a connector
            if isinstance(callback, heard_by):
                getattr(callback, hook_name)(trainer, trainer.lightning_module, *args, **kwargs)

    def module(trainer: Trainer, hook_name: str, *args: Any, **kwargs: Any) -> Any:
        return None if hook_name in names else before["_call_lightning_module_hook"](trainer, hook_name, *args, **kwargs)

    def datamodule(trainer: Trainer, hook_name: str, *args: Any, **kwargs: Any) -> Any:
        return None if hook_name in names else before["_call_lightning_datamodule_hook"](trainer, hook_name, *args, **kwargs)

    muted = {"_call_callback_hooks": callbacks, "_call_lightning_module_hook": module, "_call_lightning_datamodule_hook": datamodule}
    for name, function in muted.items():
        setattr(call, name, function)

    def unmute() -> None:
        for name, function in before.items():
            setattr(call, name, function)

    return unmute


def no_hyperparameters(trainer: Trainer) -> Callable[[], None]:
    """Stop ``_log_hyperparams`` in ``Trainer._run`` from logging the hyperparameters again; returns what undoes it."""
    before = trainer.enable_autolog_hparams
    trainer.enable_autolog_hparams = False

    def undo() -> None:
        trainer.enable_autolog_hparams = before

    return undo


def loop_position(trainer: Trainer) -> dict[str, Any]:
    """The values that the loops of a training run keep between two batches and that aren't in their ``state_dict``."""
    fit_loop, connector = trainer.fit_loop, trainer._logger_connector
    return {
        "should_stop": trainer.should_stop,
        "reloaded": fit_loop._last_train_dl_reload_epoch,
        "validated_at": getattr(trainer, "_last_val_time", None),
        "started_at": getattr(trainer, "_train_start_time", None),
        "metrics": {
            name: {
                key: value.detach().cpu() if isinstance(value, torch.Tensor) else value for key, value in getattr(connector, name).items()
            }
            for name in ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
        },
    }


def set_loop_position(trainer: Trainer, position: dict[str, Any], counters: dict[str, Any]) -> None:
    """When the loops are about to begin, put them just before the next batch of an epoch that has begun, wherever that is. Lightning's own
    guess where a checkpoint was saved (``update_restart_stage``) knows only the places of its hooks.

    Args:
        position: of :func:`loop_position`.
        counters: the fit loop's ``state_dict`` of then.
    """
    fit_loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    fit_loop.load_state_dict({**counters, "state_dict": {}})
    loops: list[Any] = [fit_loop, epoch_loop, epoch_loop.val_loop, epoch_loop.automatic_optimization, epoch_loop.manual_optimization]
    for loop in loops:
        loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
    fit_loop._restart_stage = FitRestartStage.RESTARTED_MID_EPOCH  # so that the epoch isn't begun again
    fit_loop._resuming_from_checkpoint = True  # so that the loaders' iterators aren't made again
    epoch_loop._restart_stage = epoch_loop.val_loop._restart_stage = RestartStage.NONE

    def reset() -> None:
        """``_TrainingEpochLoop.reset`` for an epoch that goes on: it keeps its counters."""
        del epoch_loop.reset

    epoch_loop.reset = reset  # type: ignore[method-assign]
    trainer.should_stop = position["should_stop"]
    fit_loop._last_train_dl_reload_epoch = position["reloaded"]
    for name, value in (("_last_val_time", position["validated_at"]), ("_train_start_time", position["started_at"])):
        if value is not None:
            setattr(trainer, name, value)
    for name, values in position["metrics"].items():
        getattr(trainer._logger_connector, name).clear()
        getattr(trainer._logger_connector, name).update(values)


# -- for strategies/launcher.py --------------------------------------------------------------------------------------------------------


def requested_nodes(trainer: Trainer) -> int:
    """What the user passed as ``Trainer(num_nodes=…)`` (``_num_nodes_flag``); our strategy has no ``num_nodes`` of its own."""
    return int(trainer._accelerator_connector._num_nodes_flag)
