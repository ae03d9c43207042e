"""The process group of a generation, and what its ranks agree on. Knows ranks and devices, no plan and no module."""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store, distributed_c10d

from lightning_autopar._lightning import ParallelStrategy, Trainer, rank_zero_only
from lightning_autopar._lightning_compat import distributed_is_initialized, init_dist_connection
from lightning_autopar._root import FRAMEWORK, is_users
from lightning_autopar._temporary import patched

#: The variable in which the parent names the file where its forked workers meet. Unlike a port, nobody else can take a file in between.
RENDEZVOUS_FILE = "AUTOPAR_RENDEZVOUS_FILE"
#: Packages whose code runs the ranks: they see the group.
_SEE_THE_GROUP = FRAMEWORK | {"deepspeed", "accelerate"}
#: Lightning's functions that call callbacks' hooks, and a module's hooks and steps.
_CALLS = ("_call_callback_hooks", "_call_lightning_module_hook", "_call_strategy_hook")
#: The trainer's properties that say how many devices there are, and which one this is.
_SIZES, _RANKS = ("world_size", "num_devices", "num_nodes"), ("global_rank", "local_rank")
#: Where processes that weren't forked meet, if not where the environment says.
_store: Store | None = None
#: How many groups this process has joined.
_joined = 0


def meet_at(store: Store) -> None:
    """Let this process form its group at a store that no earlier processes have used."""
    global _store
    _store = store


@contextmanager
def hidden_from_users() -> Iterator[None]:
    """While open, ``torch.distributed.is_initialized()`` tells a module's code that there is no process group, as on one device, by
    whatever name the code has imported it: what that function asks for is replaced, not the function.

    Code that asks combines its ranks' values by itself (it divides by the labels of all ranks, or gathers embeddings). Here a batch's parts
    are already combined to one device's values, so that it would do so twice; and where ranks run stages, its peers wouldn't come.
    Callbacks see the group: each rank's get its own part of the batch, and ask to let one rank alone write. Loaders' code, which waits for
    no collective, runs under ``exact/data/loader_pass.without_group``; that takes the group away from torch, too.
    """
    kind: Any = distributed_c10d._WorldMeta
    own: Any = kind.WORLD
    code = distributed_c10d.is_initialized.__code__

    def world(owner: Any) -> dist.ProcessGroup | None:
        asks = sys._getframe(1)
        return own.fget(owner) if asks.f_code is not code or _sees_the_group(asks.f_back) else None

    with patched(kind, "WORLD", property(world, own.fset)):
        yield


@contextmanager
def told_of_one_device(whole: bool, gathers: bool) -> Iterator[None]:
    """While open, a module's code that asks the trainer how many devices there are is told one.

    As for :func:`hidden_from_users`: it would scale or gather by the answer, and here the step is one device's already. Callbacks and
    Lightning get the true numbers.

    Args:
        whole: whether a rank's step has the whole batch, so that one that gathers is told that its rank is the first, too.
        gathers: whether the module gathers by ``self.all_gather``; where each rank has its part, it needs the true numbers for that.
    """
    names = (*_SIZES, *_RANKS * gathers) if whole else _SIZES * (not gathers)
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(patched(Trainer, name, property(partial(_said, name, vars(Trainer)[name].fget, int(name in _SIZES)))))
        yield


def _said(name: str, own: Callable[[Any], int], alone: int, trainer: Any) -> int:
    asks: Any = sys._getframe(1)
    asks = asks.f_back if asks.f_code.co_name == name else asks  # the module's own property of this name
    return own(trainer) if _sees_the_group(asks) else alone


def _sees_the_group(caller: FrameType | None) -> bool:
    """Whether the code that asks is a package's that runs the ranks, or called by a callback."""
    if caller is not None and caller.f_globals.get("__name__", "").partition(".")[0] in _SEE_THE_GROUP:
        return True
    while caller is not None and caller.f_code.co_name not in _CALLS:
        caller = caller.f_back
    return caller is not None and caller.f_code.co_name == _CALLS[0]


def all_alike(number: int, group: Callable[[], dist.ProcessGroup | None]) -> bool:
    """Whether all ranks of a group on the host have the same number; a collective."""
    word = torch.tensor([number, -number])
    dist.all_reduce(word, dist.ReduceOp.MAX, group=group())
    return int(word[0]) == -int(word[1])


def everyones(numbers: list[float], group: Callable[[], dist.ProcessGroup | None]) -> Callable[[], list[list[float]]]:
    """Begin to gather each rank's numbers on all ranks of a group on the host; what is returned waits for them."""
    mine = torch.tensor(numbers, dtype=torch.float64)
    gathered = mine.new_empty(dist.get_world_size(group()), len(numbers))
    work = dist.all_gather(list(gathered.unbind()), mine, group=group(), async_op=True)

    def rows() -> list[list[float]]:
        if work is not None:
            work.wait()
        found: list[list[float]] = gathered.tolist()
        return found

    return rows


@contextmanager
def stopped_together(trainer: Trainer) -> Iterator[None]:
    """While open, all ranks end a fit where one of them has set ``trainer.should_stop``: one whose part of the batch has a loss that isn't
    finite, say, or a pipeline's last one, which alone runs the end of the step. The others would wait for it for ever.
    """
    epoch = trainer.fit_loop.epoch_loop

    def then_agree(call: Callable[..., Any], *args: Any) -> Any:
        found = call(*args)
        word = torch.tensor(int(trainer.should_stop), device=trainer.strategy.root_device)
        dist.all_reduce(word, dist.ReduceOp.MAX)  # Lightning's own way begins with a barrier
        trainer.should_stop = bool(word)
        return found

    with ExitStack() as stack:
        for loop, name in ((epoch, "advance"), (epoch.val_loop, "run"), (trainer.fit_loop, "on_advance_end")):
            stack.enter_context(patched(loop, name, partial(then_agree, getattr(loop, name))))
        yield


def join_group(strategy: ParallelStrategy, backend: str) -> None:
    """Join the generation's process group, unless this process is in one that will do.

    A process that wasn't forked stays in its group after a run. If the next run's plan gathers from host memory and that group can't, the
    process leaves it and joins a new one.

    Args:
        backend: ``"gloo"``, ``"nccl"`` or ``"cpu:gloo,cuda:nccl"``.

    Raises:
        ValueError: if the user made the group, and it can't do what the plan needs.
    """
    global _joined
    # What is logged is the whole batch's already. Lightning asks only whether there is a group (``_get_cache``), also of restored results.
    warnings.filterwarnings("ignore", message="It is recommended to use .self.log.*sync_dist=True")
    if distributed_is_initialized():
        if not backend.startswith("cpu:") or "cpu:" in dist.get_backend_config():
            return
        if not _joined:
            raise ValueError(
                f"the process group that this script has made ({dist.get_backend_config()}) has no backend for the tensors that an "
                f"offloading plan keeps in host memory; create it with init_process_group({backend!r}), or ask for no offload"
            )
        dist.destroy_process_group()
    _joined += 1
    device = strategy.root_device
    options: dict[str, Any] = {"timeout": strategy._timeout, "device_id": device if device.type != "cpu" else None}  # type: ignore[attr-defined]
    path = os.environ.get(RENDEZVOUS_FILE)
    if path:
        dist.init_process_group(backend, init_method=f"file://{path}", rank=strategy.global_rank, world_size=strategy.world_size, **options)
    else:
        assert strategy.cluster_environment is not None
        if _store is not None:
            options["store"] = dist.PrefixStore(str(_joined), _store)  # an earlier group's keys must not be read by this one
        init_dist_connection(strategy.cluster_environment, backend, **options)
        if backend == "gloo":  # for NCCL Lightning does the same (``_init_dist_connection``)
            atexit.register(_leave_group)
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _leave_group() -> None:
    """At the end of a process that a launcher started: join gloo's threads while the interpreter still lives. A C++ thread that needs
    Python later is unwound by force, and ``std::terminate`` ends the process after its work is done. A process that failed doesn't wait:
    its peers may never come to the collectives that it has begun.
    """
    if distributed_is_initialized() and not hasattr(sys, "last_value"):
        dist.destroy_process_group()


#: How long a rank waits for the others where the user's code calls the module outside of a step.
PATIENCE = timedelta(minutes=5)


#: The remedy where a condition on the rank lets only some ranks run the code.
_FOR_ALL = (
    "as each rank has a part of the weights, all of them must do it: remove the condition on the rank around it (rank_zero_only, "
    "is_global_zero; MLflow's autolog has it, unless it is told checkpoint=False), save weights by trainer.save_checkpoint or a "
    "ModelCheckpoint, or run with allow=['single', 'ddp']"
)


#: Lines of hooks on which all ranks have met.
_met: set[tuple[CodeType, int]] = set()


def refuse_one_rank(what: str, remedy: str = _FOR_ALL) -> tuple[FrameType | None, str]:
    """Raise at once where a function of the user's runs that is rank 0's alone, as its collective would never end.

    Returns:
        The frame of the user's hook that runs, if one does, and where that is, in words.

    Raises:
        RuntimeError: with what has been done, in words, and the remedy.
    """
    hook, alone = _running()
    where = "" if hook is None else f" in {hook.f_code.co_qualname} ({os.path.basename(hook.f_code.co_filename)}:{hook.f_lineno})"
    if alone and dist.get_world_size() > 1:
        raise RuntimeError(f"{what}{where} on rank {dist.get_rank()} alone; {remedy}")
    return hook, where


def wait_for_all_ranks(what: str, remedy: str = _FOR_ALL, *, within: timedelta | None = None, once: bool = False) -> None:
    """Wait for all ranks: if only some of them come, they get an error instead of a collective that never ends.

    Args:
        what: what has been done, in words.
        remedy: why all ranks must do it, and what to do.
        within: how long to wait; None: some minutes.
        once: whether to wait only the first time that a line of one of the user's hooks comes here. Waiting takes 10 ms.

    Raises:
        RuntimeError: if not all ranks come in that time; at once as :func:`refuse_one_rank`.
    """
    hook, where = refuse_one_rank(what, remedy)
    if once:
        line = None if hook is None else (hook.f_code, hook.f_lineno)
        if line is None or line in _met:
            return
        _met.add(line)
    store: Any = dist.distributed_c10d._get_default_store()
    patience = within or PATIENCE
    key = f"autopar/outside/{store.add(f'autopar/outside/rank{dist.get_rank()}', 1)}/{what}"
    if store.add(key, 1) == dist.get_world_size():
        store.set(f"{key}/all", "")
    try:
        store.wait([f"{key}/all"], patience)
    except RuntimeError as error:
        raise RuntimeError(f"{what}{where} on rank {dist.get_rank()}, but not on all ranks within {patience}; {remedy}") from error


def in_hook() -> bool:
    """Whether a hook of the user's runs."""
    return _running()[0] is not None


def _running() -> tuple[FrameType | None, bool]:
    """The frame of the user's hook that runs, and whether a function under ``rank_zero_only`` does."""
    hook, alone = None, False
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_name not in _CALLS:
        if frame.f_code in rank_zero_only.__code__.co_consts:
            alone = True
        elif is_users(frame):
            hook = frame
        frame = frame.f_back
    return (None if frame is None else hook), alone
