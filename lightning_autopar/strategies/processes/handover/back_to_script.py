"""Brings what a run leaves from the workers to the parent, so that code after ``fit`` sees what it would see after plain Lightning.

Weights and optimizer states travel as files in the run's folder. Everything else that a worker changed (counters, metrics, random states,
attributes of module, callbacks, loggers, loaders and DataModule, and what their functions reach) travels as differences of Python objects.
What can't travel is named, once. Rank 0 speaks for all; where a module's stages lie on several ranks, each of them brings its part of
weights and states, and its stages' changes.
"""

from __future__ import annotations

import io
import logging
import pickle
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import Metric

from lightning_autopar._fork import of_this_process
from lightning_autopar._lightning import Callback, CombinedLoader, LightningModule, Logger, Trainer, WandbLogger
from lightning_autopar._lightning_compat import (
    TrainerFn,
    bare_optimizer,
    combined_loaders,
    is_overridden,
    loader_sources,
    progress_of,
    restore_loaders,
    restore_progress,
)
from lightning_autopar._root import within
from lightning_autopar._trackers import run_of_wandb
from lightning_autopar.exact.absent.absent_tensor import is_absent
from lightning_autopar.exact.data.loader import unwrapped
from lightning_autopar.exact.logs.metrics_over_ranks import sync_states
from lightning_autopar.exact.random import generator_states as rng
from lightning_autopar.exact.reached_variables import Reached, Variables
from lightning_autopar.state.checkpoint import gathered, load_whole_optimizer_state
from lightning_autopar.state.objects.pickles import is_shard
from lightning_autopar.state.objects.survey import LIMIT_BYTES, Changes, Survey, is_under, merged
from lightning_autopar.state.pretrained import move_tensors
from lightning_autopar.state.scratch_files import save_without_copies
from lightning_autopar.strategies.base.rank_measurement import Measured
from lightning_autopar.strategies.processes.handover.run_objects import NOT_THE_USERS
from lightning_autopar.text import format_bytes

#: Optimizer states larger than this share of the host's memory aren't brought back; a warning says so.
_OPTIMIZER_SHARE = 0.25
_LIGHTNINGS_OWN = within("loops", "trainer", "accelerators", "plugins")
_MODULE = "module"
#: The attributes of each optimizer: what its class adds (another optimizer, slow weights) may not travel.
_EVERY_OPTIMIZERS = frozenset(vars(torch.optim.SGD([torch.zeros(())]))) | {"step"}
_OPTIMIZERS, _LOADERS = "the optimizers", "the trainer's data loaders"


@dataclass(kw_only=True)
class Results:
    """One rank's part of the results of a run.

    Args:
        value: what the trainer's function returned.
        ranks: how many ranks, from rank 0 on, together have the whole state.
        progress: see :func:`progress_of`.
        lost: what else stayed behind.
        built: FQNs at which the run has put modules into others, new ones or others than before.
        steps: how many steps the optimizers had begun and ended.
        held: where the module itself holds an optimizer of the run: its submodule's FQN, the attribute's name, and which optimizer.
        tracked: the configuration of the run of Weights & Biases, where the script has begun one.
    """

    value: Any
    measured: Measured
    rank: int = 0
    ranks: int = 1
    steps: tuple[int, int] = (0, 0)
    progress: dict[str, Any] = field(default_factory=dict)
    random: dict[str, Any] = field(default_factory=dict)
    changes: Changes | None = None
    lost: list[str] = field(default_factory=list)
    built: list[str] = field(default_factory=list)
    held: list[tuple[str, str, int]] = field(default_factory=list)
    tracked: dict[str, Any] = field(default_factory=dict)


# -- before the fork -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Before:
    """The state before the workers were forked.

    Args:
        survey: of the objects that a script can read after a run.
        tensors: the survey's numbers of the module's parameters and buffers, by name.
        strategy: the survey's number of the trainer's strategy.
        modules: the survey's numbers of all modules, by FQN.
        random: the states of the random generators; Python's own generator seeds itself anew in every forked process.
        reached: the names of the objects that the user's functions reach besides these.
        left: in a worker, the names of those that changed in earlier generations and couldn't be handed over; told when the run ends.
    """

    survey: Survey
    tensors: Mapping[str, int]
    strategy: int
    random: rng.RngState
    modules: Mapping[str, int | None] = field(default_factory=dict)
    reached: frozenset[str] = frozenset()
    left: set[str] = field(default_factory=set)

    def is_at(self, name: str, module: nn.Module) -> bool:
        """Whether this module was at this FQN."""
        return name in self.modules and self.survey.number(module) == self.modules[name]

    def leave(self, lost: Iterable[str]) -> list[str]:
        """Record the names of objects that functions reach; returns the other names, for a warning now."""
        names = list(lost)
        self.left.update(name for name in names if any(is_under(name, root) for root in self.reached))
        return [name for name in names if name not in self.left]


def survey(trainer: Trainer) -> Before:
    """Survey everything that a run may change, in the process that will fork; takes some µs an object, and one pass over large arrays."""
    module: Any = trainer.lightning_module
    # The first isinstance() of an abstract class asks all of its subclasses, for 10 ms and more: here once for all workers.
    assert all(isinstance(each, (Metric, nn.Module)) for each in module.modules())
    datamodule = trainer.datamodule  # type: ignore[attr-defined]  # set by a connector
    strategy = trainer.strategy
    tensors = dict(_tensors(module))
    own = [value for value in vars(trainer).values() if type(value).__module__.startswith(_LIGHTNINGS_OWN)]
    inside = {id(submodule) for submodule in module.modules()}
    reached = Reached(each for _, each in _roots(trainer) if each is not trainer)

    def fields(target: Any) -> dict[str, Any] | None:
        if target is trainer:
            return {"callbacks": trainer.callbacks}
        if type(target) is Variables:
            return reached.variables(target)
        if isinstance(target, CombinedLoader):  # Lightning replaces the loaders in it by its own, or an engine's
            return {f"loader {number}": unwrapped(each) for number, each in enumerate(target.flattened)}
        if isinstance(target, Callback):  # Lightning binds its logging to the module of the last run
            return {name: value for name, value in vars(target).items() if name not in ("log", "log_dict")}
        if id(target) in inside or target is datamodule or isinstance(target, DataLoader):
            # fully_shard keeps its state in the module under keys of that prefix
            return {
                name: value for name, value in vars(target).items() if name not in NOT_THE_USERS and not name.startswith("__composable_api")
            }
        return None

    references = [strategy, *own, *tensors.values(), *_of_this_process(trainer)]
    found = Survey(dict(_roots(trainer)), fields=fields, references=references, reached=reached.roots)
    numbers = {name: found.number(tensor) for name, tensor in tensors.items()}
    number = found.number(strategy)
    assert number is not None
    return Before(
        survey=found,
        tensors={name: each for name, each in numbers.items() if each is not None},
        strategy=number,
        random=rng.capture({}, cuda=False),
        modules={name: found.number(each) for name, each in module.named_modules()},
        reached=frozenset(name for name, _ in reached.roots),
    )


def _of_this_process(trainer: Trainer) -> list[Any]:
    """What isn't brought back, as it is of the process that it is in: threads, their queues and pools, and runs of Weights & Biases, which
    are connections. Those of loggers begin now, so that workers go on with them, and the script after its workers.
    """
    runs = [each.experiment for each in trainer.loggers if isinstance(each, WandbLogger)]
    return [*of_this_process(), *runs, *(() if (run := run_of_wandb()) is None else (run,))]


def _roots(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    """The objects whose attributes are brought back, by their names in warnings."""
    module = trainer.lightning_module
    yield "trainer", trainer
    for name, submodule in module.named_modules():
        yield f"{_MODULE}.{name}".rstrip("."), submodule
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
    for callback in callbacks:
        yield type(callback).__name__, callback
    loggers: list[Logger] = trainer.loggers
    for logger in loggers:
        yield type(logger).__name__, logger
    if trainer.datamodule is not None:  # type: ignore[attr-defined]
        yield "datamodule", trainer.datamodule  # type: ignore[attr-defined]
    if trainer.profiler is not None:  # type: ignore[attr-defined]
        yield "trainer.profiler", trainer.profiler  # type: ignore[attr-defined]
    for name, source in loader_sources(trainer).items():
        yield name, source


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


# -- in the worker ---------------------------------------------------------------------------------------------------------------------


def collect(trainer: Trainer, value: Any, before: Before, folder: Path, rank: int, *, apart: bool = False) -> Results:
    """Collect this rank's results; every rank must call it, since sharded weights are gathered together.

    Args:
        before: :func:`survey` of the time before the fork.
        folder: where files for the parent go.
        rank: this rank; only rank 0's state is written.
        apart: whether the ranks may be at different places, after a failure.
    """
    engine: Any = trainer.strategy
    ranks = engine.holders
    steps = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
    value, lost = _on_cpu(value), []
    if not _has_pickle(value):
        value, lost = None, ["what the trainer's function returned"]
    results = Results(
        value=value, lost=lost, measured=engine.meter.measured, rank=rank, ranks=ranks, steps=(int(steps.ready), int(steps.completed))
    )
    module = trainer.lightning_module
    fitting = trainer.state.fn == TrainerFn.FITTING
    keeps = rank < ranks
    if not apart and (engine.splits or ranks > 1):
        _merge_metrics(module)
    optimizers = [bare_optimizer(optimizer) for optimizer in trainer.optimizers]
    named = {id(tensor): "" for _, tensor in _tensors(module)}
    shards = {f"shard {index}": each for index, each in enumerate([] if apart else made_whole(module, before, named, keep=rank == 0))}

    def affordable(holders: int) -> bool:
        return fitting and _affordable(optimizers, results, holders=1 if apart else holders)

    state, states = engine.hand_over(module, optimizers, keep=keeps, affordable=affordable)
    if not keeps:
        return results
    if not (fitting or trainer.ckpt_path or is_overridden("configure_model", module)):  # an evaluation leaves the weights as they were
        state = {}
    persistent = set(state)
    buffers = {name: buffer for name, buffer in module.named_buffers() if name not in persistent and not is_absent(buffer)}
    save_without_copies(
        {
            "state_dict": _with_pickles(state, "module", results.lost),
            "buffers": {name: buffer.detach().cpu() for name, buffer in buffers.items()},
            "named_buffers": [name for name, _ in module.named_buffers()],
            "names": {name for kind in (module.named_parameters, module.named_buffers) for name, _ in kind(remove_duplicate=False)},
            "shards": {name: whole for name, (_, whole) in shards.items()},
            "requires_grad": {
                **{name: parameter.requires_grad for name, parameter in module.named_parameters()},
                **{name: shard.requires_grad for name, (shard, _) in shards.items() if isinstance(shard, nn.Parameter)},
            },
            "training": {name: submodule.training for name, submodule in module.named_modules()},
            # The groups' options are written with the optimizers themselves.
            "optimizer_states": [
                _with_pickles({key: value for key, value in each.items() if key != "param_groups"}, "the optimizer", results.lost)
                for each in states
            ],
        },
        folder / f"weights{rank}.pt",
    )
    names: dict[int, Any] = {id(engine): before.strategy}
    for name, tensor in _tensors(module):
        names[id(tensor)] = before.tensors.get(name, name)
    names |= {id(shard): name for name, (shard, _) in shards.items()}
    for optimizer in optimizers:  # its tensors are in the file; the module may hold the optimizer, too
        for state in optimizer.state.values():
            state.clear()
        optimizer.state.clear()
    if rank != 0:
        results.changes = before.survey.changes(names, {}, under=(_MODULE, "datamodule"))
        return results
    results.lost += sorted(before.left)
    results.progress = _on_cpu(progress_of(trainer))
    results.random = rng.capture({}, cuda=False)
    if (run := run_of_wandb()) is not None:
        results.tracked = dict(run.config)
    for optimizer in optimizers:
        for index, group in enumerate(optimizer.param_groups):
            for option in [option for option, value in group.items() if option != "params" and not before.survey.travels(value, names)]:
                del group[option]  # otherwise the whole optimizer would be lost
                results.lost.append(f"the optimizer.param_groups[{index}].{option}")
    for optimizer in optimizers:
        for name, value in list(vars(optimizer).items()):
            if name in _EVERY_OPTIMIZERS or before.survey.travels(value, names):
                continue
            if isinstance(value, torch.optim.Optimizer):
                value.state.clear()  # of shards, say; where the outer one has a form of its own, it holds this
                if type(optimizer).state_dict is torch.optim.Optimizer.state_dict:
                    results.lost.append(f"the state of the optimizer.{name}")
            if not before.survey.travels(value, names):
                delattr(optimizer, name)
                results.lost.append(f"the optimizer.{name}")
    results.held = [
        (path, name, index)
        for path, child in module.named_modules()
        for name, value in vars(child).items()
        for index, optimizer in enumerate(optimizers)
        if value is optimizer
    ]
    configs = trainer.lr_scheduler_configs
    extra: dict[str, Any] = {_LOADERS: combined_loaders(trainer, unwrapped)}
    as_before = {""}
    for name, submodule in module.named_modules():
        if before.is_at(name, submodule):
            as_before.add(name)
        elif name.rpartition(".")[0] in as_before:
            results.built.append(name)
            extra[f"{_MODULE}.{name}"] = submodule
    if fitting:
        extra |= {_OPTIMIZERS: (optimizers, configs)}
    changes = before.survey.changes(names, extra)
    if _OPTIMIZERS in changes.unsent and configs:
        changes = before.survey.changes(names, {**extra, _OPTIMIZERS: (optimizers, [])})
        changes.unsent.append("the learning-rate schedulers")
    results.changes = changes
    return results


def made_whole(module: nn.Module, before: Before, names: Mapping[int, Any], *, keep: bool) -> list[tuple[Tensor, Tensor]]:
    """The shards that objects hold besides the module (a callback's average of the weights), each with its whole values in host memory; a
    collective.

    A rank's shard alone is of no use to anybody. Where ranks' objects hold other shards than rank 0's, nobody knows which belong together:
    those stay behind, and are named.

    Args:
        names: of objects that aren't looked at, by ``id``.
    """
    if not any(map(is_shard, module.parameters())):
        return []
    found = before.survey.shards(names)
    alike = {part: [(tuple(each.shape), str(each.dtype), str(cast(Any, each).placements)) for each in held] for part, held in found.items()}
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, alike)
    together = [part for part, held in everyones[0].items() if all(other.get(part) == held for other in everyones)]
    wholes: list[tuple[Tensor, Tensor]] = []
    for shard in {id(each): each for part in together for each in found[part]}.values():
        with torch.no_grad():
            whole = gathered(shard)
        if keep:
            wholes.append((shard, whole.cpu()))
    return wholes


def _with_pickles(state: Mapping[Any, Any], name: str, lost: list[str]) -> dict[Any, Any]:
    """A state dict without the values that can't be pickled, whose names are noted: one such value would cost the whole file.

    Args:
        name: what a warning calls it.
        lost: takes the names.
    """
    kept: dict[Any, Any] = {}
    for key, value in state.items():
        if isinstance(key, Tensor):  # a parameter, which is another object there
            lost.append(f"{name}'s entries by parameters")
        elif isinstance(value, dict):
            kept[key] = _with_pickles(value, f"{name}.{key}", lost)
        elif isinstance(value, Tensor) or _has_pickle(value):
            kept[key] = value
        else:
            lost.append(f"{name}.{key}")
    return kept


class _Trial(pickle.Pickler):
    """Tries to pickle everything but tensors, which can always be pickled and may be large."""

    def persistent_id(self, target: Any) -> Any:
        return "" if isinstance(target, Tensor) else None


def _has_pickle(value: Any) -> bool:
    try:
        _Trial(io.BytesIO(), protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception:  # a user's __reduce__ may raise anything
        return False
    return True


def _merge_metrics(module: nn.Module) -> None:
    """Give torchmetrics that saw batches, and weren't reset, the state of all ranks together; a collective."""
    metrics = [each for each in module.modules() if isinstance(each, Metric) and not each._is_synced]
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, [metric._update_count for metric in metrics])
    for metric, seen in zip(metrics, zip(*counts, strict=True), strict=True):
        if any(seen):
            sync_states(metric, None)
            metric._update_count = max(metric._update_count, *seen)  # in a pipeline, only one rank may have called it


def _affordable(optimizers: list[torch.optim.Optimizer], results: Results, *, holders: int) -> bool:
    """Whether the parent has room for the optimizer states; every rank answers alike, from their whole sizes.

    Args:
        results: where it is noted if there is none.
        holders: how many ranks together have the states, each its part; 1 where each has them whole, or as DTensors, which know their whole
            size.
    """
    tensors = [
        value for optimizer in optimizers for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)
    ]
    size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors if not is_absent(tensor))
    if holders > 1:
        sizes: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(sizes, size_bytes)
        size_bytes = sum(sizes) * holders // len(sizes)
    affordable = size_bytes <= _OPTIMIZER_SHARE * psutil.virtual_memory().total
    if not affordable:
        results.lost.append(f"the optimizers' states ({format_bytes(size_bytes)})")
    return affordable


def _on_cpu(tree: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), tree)


# -- in the parent ---------------------------------------------------------------------------------------------------------------------


def restore(trainer: Trainer, before: Before, results: Sequence[Results], folder: Path) -> None:
    """Put a run's results into the parent's trainer and module, and warn once of what couldn't be brought back.

    Args:
        results: of the ranks that wrote any, in rank order.

    Raises:
        RuntimeError: if, after a failure, a rank with a part of the weights wrote none, or those of another step than the others.
    """
    by_rank = {left.rank: left for left in results}
    ranks = results[0].ranks
    if missing := [rank for rank in range(ranks) if rank not in by_rank]:
        raise RuntimeError(f"the results of {', '.join(f'rank {rank}' for rank in missing)} are missing, and with them parts of the module")
    if len({by_rank[rank].steps for rank in range(ranks)}) > 1:
        done = ", ".join(f"rank {rank} {by_rank[rank].steps[1]}" for rank in range(ranks))
        raise RuntimeError(f"the ranks ended at different steps ({done}), and their parts of the module don't belong together")
    module: LightningModule = trainer.lightning_module
    first = by_rank[0]
    # A state may hold any object (a numpy scalar for a learning rate), and this run's own workers have written these files.
    saved = _joined([torch.load(folder / f"weights{rank}.pt", mmap=True, weights_only=False) for rank in range(ranks)])
    if set(saved["state_dict"]) - set(module.state_dict()) and is_overridden("configure_model", module):
        with torch.random.fork_rng():
            module.configure_model()
    everyones = [by_rank[rank].changes for rank in range(ranks)]
    workers = [changes for changes in everyones if changes is not None]
    assert len(workers) == ranks, "each rank collects its own"
    taken, lost = merged(workers)
    lost += [name for rank in range(ranks) for name in by_rank[rank].lost if rank == 0 or name not in first.lost]
    if built := _missing(module, before, first.built):
        sent = _apply(before, workers, taken, dict(_tensors(module)), saved, lost)
        came = [name for name in built if f"{_MODULE}.{name}" in sent]
        for name in came:
            parent, _, own = name.rpartition(".")
            module.get_submodule(parent).add_module(own, sent[f"{_MODULE}.{name}"])
        if len(came) < len(built) and is_overridden("setup", module):
            # It may build by what the data module has found out, and make attributes anew that the run has filled: those come afterwards.
            _set_up(module, trainer.state.fn, lost)
    # One that couldn't be sent may be here all the same: configure_model builds it in this process, too.
    absent = _missing(module, before, first.built)
    lost = [name for name in lost if (fqn := name.removeprefix(f"{_MODULE}.")) not in first.built or fqn in absent]
    if ranks > 1 and saved["state_dict"]:
        lost += [f"the parameter {name}" for name in module.state_dict() if name not in saved["state_dict"]]
    _load_weights(module, saved, absent, lost)
    sent = _apply(before, workers, taken, dict(_tensors(module)), saved, lost)
    optimizers, configs = sent.get(_OPTIMIZERS, ([], []))
    for optimizer, state in zip(optimizers, saved["optimizer_states"], strict=False):  # empty where the states were too large
        try:
            groups = {"param_groups": optimizer.state_dict()["param_groups"]} if "state" in state else {}
            load_whole_optimizer_state(optimizer, state | groups)
        except Exception:  # of a class of the user's, without all of its attributes
            logging.getLogger(__name__).debug("an optimizer's state can't be loaded", exc_info=True)
            lost.append(f"the state of the optimizer {type(optimizer).__name__}")
    for path, name, index in first.held if optimizers else ():
        vars(module.get_submodule(path))[name] = optimizers[index]
    strategy: Any = trainer.strategy
    if _OPTIMIZERS in sent:
        strategy.optimizers, strategy.lr_scheduler_configs = optimizers, configs
    strategy.model = module
    restore_loaders(trainer, sent.get(_LOADERS, {}))
    restore_progress(trainer, first.progress)
    if first.tracked:
        run_of_wandb().config.update(first.tracked, allow_val_change=True)
    rng.restore(first.random, {})
    if lost:
        warnings.warn(
            f"these changes of the run could not be brought back to the main process: {', '.join(sorted(set(lost)))} "
            "(they can't be pickled or unpickled, are shards that not all ranks keep, have weights of another stage, or are larger than "
            f"{format_bytes(LIMIT_BYTES)})",
            stacklevel=2,
        )


def _missing(module: nn.Module, before: Before, built: Iterable[str]) -> list[str]:
    """Of the FQNs at which the run has put modules, those at which there is none here, or still the one from before the run."""
    there = dict(module.named_modules())
    return [name for name in built if name not in there or before.is_at(name, there[name])]


def _apply(
    before: Before, workers: Sequence[Changes], taken: Sequence[Any], tensors: dict[str, Tensor], saved: Mapping[str, Any], lost: list[str]
) -> dict[str, Any]:
    """Change the parent's objects as the workers' have changed; returns what rank 0 has sent besides.

    Args:
        workers: their changes, in rank order.
        taken: for each of them, what is taken of it.
        tensors: the module's, by name.
        saved: the tensors of the workers' module; an optimizer may have one that the module here lacks.
        lost: gets the names of what can't be made anew here.
    """

    def find(name: str) -> Tensor:
        if name not in tensors:
            value = {**saved["shards"], **saved["buffers"], **saved["state_dict"]}.get(name, torch.empty(0)).clone()
            trained = saved["requires_grad"]
            tensors[name] = nn.Parameter(value, requires_grad=trained[name]) if name in trained else value
        return tensors[name]

    sent, *_ = [before.survey.apply(changes, find, lost, only=parts) for changes, parts in zip(workers, taken, strict=True)]
    return sent


def _set_up(module: LightningModule, stage: Any, lost: list[str]) -> None:
    """Let ``setup`` build here what it has built in the workers."""
    try:
        with torch.random.fork_rng():
            module.setup(stage)
    except Exception as error:  # the user's code may rely on anything that only the workers have
        lost.append(f"what {type(module).__name__}.setup builds, which failed in this process ({type(error).__name__}: {error})")


def _joined(files: list[dict[str, Any]]) -> dict[str, Any]:
    """The ranks' parts as one; the first rank's value counts where several have one."""
    whole = dict(files[0])
    for part in files[1:]:
        for kind in ("state_dict", "buffers"):
            whole[kind] = {**part[kind], **whole[kind]}
        if len(part["optimizer_states"]) != len(whole["optimizer_states"]):
            whole["optimizer_states"] = []
        whole["optimizer_states"] = (
            [
                {**one, "state": {**other["state"], **one["state"]}} if "state" in one else one
                for one, other in zip(whole["optimizer_states"], part["optimizer_states"], strict=True)
            ]
            if whole["optimizer_states"]
            else []
        )
    return whole


def _load_weights(module: nn.Module, saved: dict[str, Any], absent: Collection[str], lost: list[str]) -> None:
    """Copy weights in place where they have the same dtype and shape, so that references to them stay valid.

    Args:
        absent: FQNs at which the run had modules that aren't here.
    """
    # Only the workers had values for tensors on the meta device, and such a tensor can't be filled in place.
    move_tensors(module, "cpu", lambda tensor: tensor.is_meta)
    values = saved["state_dict"] | saved["buffers"]
    for prefix in saved["training"].keys() & dict(module.named_modules()).keys():  # the run has removed a tensor, or renamed it (pruning)
        child = module.get_submodule(prefix)
        for slots in () if any(is_under(prefix, name) for name in absent) else (child._parameters, child._buffers):
            for own in [own for own in slots if f"{prefix}.{own}".lstrip(".") not in saved["names"] and slots[own] is not None]:
                del slots[own]
    targets, holders = dict(_tensors(module)), dict(module.named_modules())
    for name in (*saved["named_buffers"], *saved["requires_grad"]):
        prefix, _, own = name.rpartition(".")
        if name in targets or name not in values or (holder := holders.get(prefix)) is None:
            continue
        holder.__dict__.pop(own, None)  # setup, a hook or a step of the run has made it
        new = torch.empty_like(values[name])
        if name in saved["requires_grad"]:
            holder._parameters[own] = targets[name] = nn.Parameter(new, requires_grad=saved["requires_grad"][name])
        else:
            holder._buffers[own] = targets[name] = new
            if name in saved["buffers"]:
                holder._non_persistent_buffers_set.add(own)
    with torch.no_grad():
        for name, value in values.items():
            target = targets.get(name)
            if target is not None and isinstance(value, Tensor) and (target.dtype != value.dtype or target.shape != value.shape):
                target.data = torch.empty_like(value)
        for name, value in saved["buffers"].items():
            if name in targets:
                targets[name].copy_(value)
            else:
                lost.append(f"the buffer {name}")
        unexpected = module.load_state_dict(saved["state_dict"], strict=False).unexpected_keys if saved["state_dict"] else []
    # A module may write more than tensors into its state dict (neuraloperator's _metadata), which it makes of attributes.
    lost.extend(f"the parameter {name}" for name in unexpected if isinstance(values[name], Tensor) or name not in module.state_dict())
    for name, requires_grad in saved["requires_grad"].items():
        if name in targets:
            targets[name].requires_grad_(requires_grad)
    modes = saved["training"]
    for name, submodule in module.named_modules():
        submodule.training = modes.get(name, submodule.training)
