"""Processes that exist already: started by torchrun or SLURM, or reruns of the script where the parent has initialised CUDA. Rank 0 plans, all follow.

They meet at a key-value store before any process group exists. This module knows ranks and messages, no plan's content.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import ClusterEnvironment, LightningEnvironment
from lightning.pytorch.utilities import rank_zero_info

from lightning_autopar._lightning_compat import find_free_network_port, script_command
from lightning_autopar.memory.host import host_memory
from lightning_autopar.memory.inventory import Inventory
from lightning_autopar.strategies.engine import Assignment

if TYPE_CHECKING:
    from lightning_autopar.strategies.auto import AutoParallelStrategy

#: Where the reruns of a script meet the process that started them, as ``host:port``.
STORE = "AUTOPAR_STORE"
_TIMEOUT = timedelta(minutes=30)


@dataclass(kw_only=True)
class Peers:
    """The processes of this run, of which this is one."""

    store: Any
    rank: int
    world_size: int
    node: int
    environment: ClusterEnvironment
    messages: int = 0
    children: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def tell(self, message: Any) -> None:
        """Rank 0: send a picklable object, or an exception, to all others."""
        self.store.set(f"autopar/message/{self.messages}", pickle.dumps(message))
        self.messages += 1

    def hear(self) -> Any:
        """The others: wait for what rank 0 tells.

        Raises:
            BaseException: the one that rank 0 told.
        """
        message = pickle.loads(self.store.get(f"autopar/message/{self.messages}"))
        self.messages += 1
        if isinstance(message, BaseException):
            raise message
        return message

    def inventory(self, strategy: AutoParallelStrategy) -> tuple[Inventory, int | None]:
        """Rank 0: the devices of all ranks, in rank order; each rank has said its own by :meth:`introduce`."""
        here, _ = strategy.inventory()
        if here.source == "spec":
            if len(here.devices) < self.world_size:
                raise ValueError(f"{self.world_size} processes were started, but the devices given are {len(here.devices)}; give one for each")
            return replace(here, devices=here.devices[: self.world_size]), None
        devices = [pickle.loads(self.store.get(f"autopar/device/{self.messages}/{rank}")) for rank in range(self.world_size)]
        total_bytes, free_bytes = host_memory()
        return Inventory(devices=tuple(devices), host_total_bytes=total_bytes, host_free_bytes=free_bytes, source="peers"), None

    def introduce(self, strategy: AutoParallelStrategy) -> None:
        """Every rank: say which device is this process's."""
        here, _ = strategy.inventory()
        local_rank = self.environment.local_rank()
        device = here.devices[min(local_rank, len(here.devices) - 1)]
        if device.kind == "cpu":
            threads = torch.get_num_threads()
            device = replace(device, id=f"cpu:{self.rank}", threads=threads)
        self.store.set(f"autopar/device/{self.messages}/{self.rank}", pickle.dumps(replace(device, node=self.node)))

    def local_devices(self, assignment: Assignment) -> list[torch.device]:
        """The torch devices of this node's ranks, as Lightning's strategies want them."""
        devices = zip(assignment.devices, assignment.torch_devices, strict=True)
        return [torch_device for device, torch_device in devices if device.node == assignment.devices[self.rank].node]


def under_external_launcher(strategy: AutoParallelStrategy) -> Peers | None:
    """This process's peers where somebody else has started several processes; None where it is alone."""
    if strategy.peers is not None:
        peers: Peers = strategy.peers
    elif STORE in os.environ:
        host, _, port = os.environ[STORE].rpartition(":")
        world_size = int(os.environ["WORLD_SIZE"])
        store = dist.TCPStore(host, int(port), world_size, is_master=False, timeout=_TIMEOUT)
        peers = Peers(store=store, rank=int(os.environ["LOCAL_RANK"]), world_size=world_size, node=0, environment=LightningEnvironment())
    else:
        environment = strategy.cluster_environment
        if environment is None or not environment.creates_processes_externally or environment.world_size() == 1:
            return None
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = environment.main_address, str(environment.main_port)
        rendezvous = dist.rendezvous("env://", rank=environment.global_rank(), world_size=environment.world_size(), timeout=_TIMEOUT)
        store, rank, world_size = next(iter(rendezvous))
        peers = Peers(store=store, rank=rank, world_size=world_size, node=environment.node_rank(), environment=environment)
    strategy.peers = peers
    peers.introduce(strategy)
    return peers


def rerun_script(strategy: AutoParallelStrategy, world_size: int) -> Peers:
    """Start this very script once for each further rank, and become rank 0.

    For the case that this process has initialised CUDA, after which a forked child can't use it. The children run the user's code up to ``fit``.

    Args:
        world_size: how many processes the plan takes.
    """
    port = find_free_network_port()
    store = dist.TCPStore("127.0.0.1", port, None, is_master=True, timeout=_TIMEOUT, wait_for_workers=False)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(find_free_network_port()), WORLD_SIZE=str(world_size), LOCAL_RANK="0", NODE_RANK="0")
    peers = Peers(store=store, rank=0, world_size=world_size, node=0, environment=LightningEnvironment())
    rank_zero_info(f"autopar: CUDA is initialised in this process already, so the script is run again for {world_size - 1} further ranks")
    for rank in range(1, world_size):
        environment = {**os.environ, "LOCAL_RANK": str(rank), STORE: f"127.0.0.1:{port}"}
        peers.children.append(subprocess.Popen(script_command(), env=environment))
    threading.Thread(target=_watch, args=(peers.children,), daemon=True, name="autopar-watch").start()
    strategy.peers = peers
    peers.introduce(strategy)
    return peers


def _watch(children: list[subprocess.Popen[bytes]]) -> None:
    """End everything when one child fails: a rank that waits for it in a collective would wait for ever."""
    failed = threading.Event()

    def wait(child: subprocess.Popen[bytes]) -> None:
        if child.wait() != 0:
            failed.set()

    waiters = [threading.Thread(target=wait, args=(child,), daemon=True) for child in children]
    for waiter in waiters:
        waiter.start()
    if failed.wait():
        for child in children:
            child.kill()
        os.kill(os.getpid(), signal.SIGTERM)
