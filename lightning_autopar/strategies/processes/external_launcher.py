"""Processes that exist already: torchrun or Slurm started them, or they rerun the script because the parent has initialised CUDA.

Rank 0 plans and the others follow. They meet at a key-value store before any process group exists. Knows ranks and messages, no plan's
content.
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lightning_autopar import engines
from lightning_autopar._fork import die_with
from lightning_autopar._lightning import ClusterEnvironment, LightningEnvironment, SLURMEnvironment, rank_zero_info, rank_zero_warn
from lightning_autopar._lightning_compat import find_free_network_port
from lightning_autopar.devices.host import host_cores, host_memory
from lightning_autopar.devices.inventory import Device, Inventory, Link
from lightning_autopar.devices.nvml import NvmlUnavailable, read_links
from lightning_autopar.strategies.base.process_group import meet_at
from lightning_autopar.strategies.base.run_plan import RunPlan
from lightning_autopar.strategies.processes.peer_watch import watch
from lightning_autopar.strategies.processes.users_script import rerun_command

if TYPE_CHECKING:
    from lightning_autopar.strategies.base.engine_mixin import EngineMixin
    from lightning_autopar.strategies.base.strategy_protocol import RunHost

#: Where the reruns of a script meet the process that started them, as ``host:port``.
STORE = "AUTOPAR_STORE"
#: The process id of the one that started a rerun; when it ends, the rerun must end.
PARENT = "AUTOPAR_PARENT"
#: How many runs that process had alone; a rerun runs as many alone before it joins.
EARLIER = "AUTOPAR_EARLIER_RUNS"
_TIMEOUT = timedelta(minutes=30)
_POLL_SECONDS = 0.01
#: How long this process may take to end by itself once a rerun has failed.
_GRACE_SECONDS = 3.0
#: After how long a process says that it waits for the others, which nobody may have started.
SILENT_SECONDS = 10.0
#: Variables by which a launcher gives a process its number, and those with how many processes there are.
_NUMBERED = (("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"))
#: How long the reruns may go on after this process's script has ended.
_FAREWELL_SECONDS = 60.0

_LOG = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Peers:
    """The processes of this run, this one included.

    Args:
        store: where they meet; only their keys are in it.
        rank: of this process.
        node: this process's.
        restartable: whether their launcher may start them anew, in another number.
        messages: how many rank 0 has sent so far.
        children: reruns of the script that this process started.
        running: whether a run is going on that takes all of them.
    """

    store: Any
    rank: int
    world_size: int
    node: int
    environment: ClusterEnvironment
    restartable: bool = False
    messages: int = 0
    children: list[subprocess.Popen[bytes]] = field(default_factory=list)
    running: threading.Event = field(default_factory=threading.Event)
    runs: int = 0

    @property
    def are_reruns(self) -> bool:
        """Whether one process of ours started the others; if not, a launcher started all."""
        return bool(self.children) or PARENT in os.environ

    @contextmanager
    def run(self, run_plan: RunPlan, engine: EngineMixin) -> Iterator[None]:
        """The context of a run that takes all ranks: this process ends if a rerun fails, a rank on this host is stopped, or GPUs hang."""
        self.running.set()
        self.runs += 1
        try:
            own_device = run_plan.torch_devices[self.rank]
            with watch(self.store, self.rank, run_plan.plan.devices, self.runs, own_device=own_device, engine=engine):
                yield
        finally:
            self.running.clear()

    def tell(self, message: Any) -> None:
        """Rank 0: send a picklable object, or an exception, to all others."""
        self.store.set(f"autopar/message/{self.messages}", _pickled(message))
        self.messages += 1

    def hear(self) -> Any:
        """The others: wait for rank 0's object.

        Raises:
            BaseException: the one that rank 0 told.
        """
        message = pickle.loads(self.store.get(f"autopar/message/{self.messages}"))
        self.messages += 1
        if isinstance(message, BaseException):
            raise message
        return message

    def inventory(self, strategy: RunHost) -> tuple[Inventory, int | None]:
        """Rank 0: the devices of all ranks, in rank order; each rank has sent its own by :meth:`introduce`."""
        here, _ = strategy.inventory()
        if here.source == "spec":
            if len(here.devices) < self.world_size:
                raise ValueError(
                    f"{self.world_size} processes were started, but the devices given are {len(here.devices)}; give one for each"
                )
            return replace(here, devices=here.devices[: self.world_size]), None
        told = [self._introduced(rank) for rank in range(self.world_size)]
        devices, ids = [device for device, _ in told], {device.id for device, _ in told}
        links = {frozenset((link.a, link.b)): link for _, its in told for link in its if {link.a, link.b} <= ids}
        total_bytes, free_bytes = host_memory()
        found = Inventory(
            devices=tuple(devices),
            links=tuple(links.values()),
            host_total_bytes=total_bytes,
            host_free_bytes=free_bytes,
            source="peers",
            host_threads=host_cores(),
        )
        return found, None

    def _introduced(self, rank: int) -> tuple[Device, tuple[Link, ...]]:
        found = pickle.loads(self.store.get(f"autopar/device/{self.messages}/{rank}"))
        if isinstance(found, BaseException):
            raise RuntimeError(f"rank {rank} has no device: {found}") from found
        device, links = found
        return device, links

    def introduce(self, strategy: RunHost) -> None:
        """Every rank: send which device is this process's and how others are linked to it, or why it has none."""
        try:
            device = self._own_device(strategy)
            word: Any = device, _links_to(device)
        except Exception as error:
            word = error
        self.store.set(f"autopar/device/{self.messages}/{self.rank}", _pickled(word))
        if isinstance(word, Exception) and self.rank:
            raise word

    def _own_device(self, strategy: RunHost) -> Device:
        here, _ = strategy.inventory()
        local_rank = self.environment.local_rank()
        device = here.devices[min(local_rank, len(here.devices) - 1)]
        if device.in_doubt and not torch.cuda.is_initialized():
            os.environ["CUDA_VISIBLE_DEVICES"] = device.id
            device = device.known_by_name()
        if device.kind == "cpu":
            # Each process sees the whole host, which the processes on this node share.
            share = 1 if here.source == "spec" else max(1, self.local_world_size // len(here.devices))
            device = replace(
                device,
                id=f"cpu:{self.rank}",
                threads=torch.get_num_threads(),
                total_bytes=device.total_bytes // share,
                free_bytes=device.free_bytes // share,
            )
        return replace(device, node=self.node)

    @property
    def local_world_size(self) -> int:
        """How many of the processes are on this node, by torchrun or SLURM; all of them where neither says."""
        for variable in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"):
            if os.environ.get(variable, "").isdigit():
                return int(os.environ[variable])
        return self.world_size

    def local_devices(self, run_plan: RunPlan) -> list[torch.device]:
        """The torch devices of this node's ranks, for Lightning's strategies."""
        devices = zip(run_plan.devices, run_plan.torch_devices, strict=True)
        return [torch_device for device, torch_device in devices if device.node == run_plan.devices[self.rank].node]


def _links_to(device: Device) -> tuple[Link, ...]:
    """The links from this node's GPUs to this process's GPU, whether or not CUDA shows them to it; empty without NVML."""
    if device.kind != "cuda":
        return ()
    try:
        return tuple(link for link in read_links() if device.id in (link.a, link.b))
    except NvmlUnavailable:
        return ()


#: A process has the same peers as long as it lives, whatever strategies it makes.
_peers: Peers | None = None
#: How many runs it has begun without peers.
_alone = 0


def under_external_launcher(strategy: RunHost) -> Peers | None:
    """This process's peers for a run that begins, where a launcher or a script has started several processes; None where it is alone. A
    script and its reruns each run alone what may use only one device, and so does a rerun with the runs before its own.
    """
    global _peers, _alone
    if _peers is not None and _peers.are_reruns and _asks_for_one_device(strategy):
        return None
    if _peers is None and _alone >= int(os.environ.get(EARLIER, "0")):
        _peers = _find_peers(strategy)
    if _peers is None:
        _alone += 1
    else:
        _peers.introduce(strategy)
    return _peers


def _asks_for_one_device(strategy: RunHost) -> bool:
    settings, (here, most) = strategy.settings, strategy.inventory()
    if settings.plan is not None:
        return not engines.of(settings.plan).several
    return not any(engines.named(name).several for name in settings.allow) or 1 in (len(here.devices), most)


def is_alone(environment: ClusterEnvironment) -> bool:
    """Whether a launcher started this process and no other. Slurm's variables may be missing where srun started no process."""
    if isinstance(environment, SLURMEnvironment) and "SLURM_NTASKS" not in os.environ:
        return True
    return environment.world_size() == 1


def unknown_launcher() -> str | None:
    """What to do about a launcher that has started several processes, as its variables say, and that Lightning doesn't know."""
    for number, count in _NUMBERED:
        rank, world_size = os.environ.get(number, ""), os.environ.get(count, "")
        if rank.isdigit() and world_size.isdigit() and int(world_size) > 1:
            plugin = "Trainer(plugins=[KubeflowEnvironment()])" if number == "RANK" else "the package mpi4py"
            return (
                f"{number}={rank} and {count}={world_size} say that this process is one of {world_size}, but Lightning takes it for the "
                f"only one; to train together start the script by torchrun or srun, or tell Lightning by {plugin}"
            )
    return None


@contextmanager
def _waiting(rank: int, world_size: int, environment: ClusterEnvironment) -> Iterator[None]:
    """The context in which this process waits for the others; after some seconds it says so, as nobody may ever start them."""
    remedy = "look into process 0's log" if rank else "look whether they were started, and into their logs"
    if rank == 0 and isinstance(environment, SLURMEnvironment):
        remedy = "start the script by srun, or for one process ask Slurm for one task"
    words = (
        f"autopar: this is process {rank} of {world_size}, and has waited {SILENT_SECONDS:.0f} s for the others at "
        f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}; it goes on when all have come. If they don't come, {remedy}"
    )
    timer = threading.Timer(SILENT_SECONDS, _LOG.warning, (words,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _find_peers(strategy: RunHost) -> Peers | None:
    if STORE in os.environ:
        host, _, port = os.environ[STORE].rpartition(":")
        die_with(int(os.environ[PARENT]))
        world_size = int(os.environ["WORLD_SIZE"])
        store = dist.TCPStore(host, int(port), world_size, is_master=False, timeout=_TIMEOUT)
        meet_at(_groups_part(host, int(port)))
        return Peers(store=store, rank=int(os.environ["LOCAL_RANK"]), world_size=world_size, node=0, environment=LightningEnvironment())
    environment = strategy.cluster_environment
    if environment is None or not environment.creates_processes_externally or is_alone(environment):
        if (words := unknown_launcher()) is not None:
            rank_zero_warn(f"autopar: {words}; now each process trains the whole run by itself, and writes the same files")
        return None
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = environment.main_address, str(environment.main_port)
    rank, world_size = environment.global_rank(), environment.world_size()
    with _waiting(rank, world_size, environment):
        store = _connect(rank, world_size)
        part = _own_part(store, rank, world_size)
        # A separate connection: while one waits for torch's messages, ours must not wait, too.
        meet_at(dist.PrefixStore(f"{part}/group", _connect(rank, world_size)))
    return Peers(
        store=dist.PrefixStore(part, store),
        rank=rank,
        world_size=world_size,
        node=environment.node_rank(),
        environment=environment,
        restartable=True,
    )


def _connect(rank: int, world_size: int) -> Any:
    try:
        store, _, _ = next(iter(dist.rendezvous("env://", rank=rank, world_size=world_size, timeout=_TIMEOUT)))
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        port = os.environ["MASTER_PORT"]
        raise ValueError(
            f"the processes can't meet at port {port}, which another program uses; set MASTER_PORT to a free one, the same for all of them"
        ) from error
    return store


def _groups_part(host: str, port: int) -> Any:
    """The store where the process groups of a script and its reruns meet, by a separate connection as above."""
    return dist.PrefixStore("group", dist.TCPStore(host, port, None, is_master=False, timeout=_TIMEOUT))


def _own_part(store: Any, rank: int, world_size: int) -> str:
    """The name of the part of a store that only these processes use; each must call it. torchrun's agent keeps one store for all processes
    that it starts one after the other, so that a restarted process finds the keys of dead ones: an old plan, or in torch's own process
    group the addresses of processes that are gone ("Gloo connectFullMesh failed: connection refused", seen at one of three restarts; torch
    2.13's ``DynamicRendezvousHandler.next_rendezvous`` keeps its ``_bootstrap_store_info``, while ``_create_c10d_store`` counts on a new
    one). Where the number of nodes changed, they aren't told that they are restarted. So each rank writes a new random word, to which no
    dead process can have replied.
    """
    own = uuid.uuid4().hex
    if rank:
        store.set(f"autopar/hello/{rank}", own)
        part: str = store.get(f"autopar/welcome/{own}").decode()
        store.set(f"{part}/here/{rank}", "")
        return part
    part = f"autopar/{own}"
    missing, until = set(range(1, world_size)), time.monotonic() + _TIMEOUT.total_seconds()
    while missing:
        for each in sorted(missing):
            if store.check([f"autopar/hello/{each}"]):  # from this rank's live process, or from a dead one, which won't reply
                store.set(f"autopar/welcome/{store.get(f'autopar/hello/{each}').decode()}", part)
        missing -= {each for each in missing if store.check([f"{part}/here/{each}"])}
        if time.monotonic() > until:
            raise TimeoutError(
                f"ranks {sorted(missing)} of {world_size} didn't come within {_TIMEOUT.seconds // 60} minutes; look into their logs"
            )
        time.sleep(_POLL_SECONDS)
    return part


def rerun_script(strategy: RunHost, world_size: int, reason: str) -> Peers:
    """Start this script once for each further rank, and become rank 0. Used where a forked child of this process could do nothing. The
    children run the user's code up to this run, including the runs before it. This process's leases cover them, too.

    Args:
        world_size: how many processes the plan takes.
        reason: why no worker can be forked, as :func:`~lightning_autopar._fork.unforkable` says it.

    Raises:
        RuntimeError: in a rerun, if an earlier run would take several processes.
    """
    if STORE in os.environ:
        raise RuntimeError(
            f"the script was started again for a further rank, and there an earlier call of fit planned for {world_size} processes, though "
            "it had run on one device before; give the earlier fit its plan (plan=, or allow=['single']), or a script of its own"
        )
    port = find_free_network_port()
    store = dist.TCPStore("127.0.0.1", port, None, is_master=True, timeout=_TIMEOUT, wait_for_workers=False)
    meet_at(_groups_part("127.0.0.1", port))
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(find_free_network_port()), WORLD_SIZE=str(world_size), LOCAL_RANK="0", NODE_RANK="0"
    )
    peers = Peers(store=store, rank=0, world_size=world_size, node=0, environment=LightningEnvironment())
    rank_zero_info(f"autopar: {reason}, so the script is run again for {world_size - 1} further ranks")
    for rank in range(1, world_size):
        own = {"LOCAL_RANK": str(rank), STORE: f"127.0.0.1:{port}", PARENT: str(os.getpid()), EARLIER: str(_alone - 1)}
        environment = {**os.environ, **own, "AUTOPAR_LEDGER": "off"}
        peers.children.append(subprocess.Popen(rerun_command(), env=environment))
    threading.Thread(target=_watch, args=(peers,), daemon=True, name="autopar-watch").start()
    atexit.register(_see_off, peers.children)
    global _peers
    _peers = peers
    return peers


def _watch(peers: Peers) -> None:
    """End everything when one child fails in a run: ranks that wait for it in a collective would wait for ever."""
    failed = threading.Event()

    def wait(child: subprocess.Popen[bytes]) -> None:
        if child.wait() != 0:
            failed.set()

    waiters = [threading.Thread(target=wait, args=(child,), daemon=True) for child in peers.children]
    for waiter in waiters:
        waiter.start()
    failed.wait()
    peers.running.wait()  # a child that failed after the run is missing only in the next run
    _LOG.error("a rerun of the script for a further rank failed; this run ends with it")
    for child in peers.children:
        child.kill()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_SECONDS)  # Lightning leaves at a batch boundary, which a rank that waits for a dead rank never reaches
    os._exit(1)


def _see_off(children: list[subprocess.Popen[bytes]]) -> None:
    """At the end of this process: let the others finish their work after the run, unless this one failed."""
    deadline = time.monotonic() + (0.0 if hasattr(sys, "last_value") else _FAREWELL_SECONDS)
    for child in children:
        with suppress(subprocess.TimeoutExpired):
            child.wait(timeout=max(0.0, deadline - time.monotonic()))
    for child in children:
        child.kill()


def _pickled(message: Any) -> bytes:
    """The pickled message; of an exception that can't be pickled, its text."""
    try:
        data = pickle.dumps(message)
        if isinstance(message, BaseException):
            pickle.loads(data)
    except Exception:
        if not isinstance(message, BaseException):
            raise
        return pickle.dumps(RuntimeError(f"{type(message).__name__}: {message}"))
    return data
