"""Run a function in several ranks that share a gloo process group."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import pickle
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def run_ranks(function: Callable[..., T], world_size: int, *args: Any, timeout_seconds: float = 60) -> list[T]:
    """Call ``function(rank, world_size, *args)`` in ``world_size`` forked processes; their picklable results in rank order.

    Each runs in a fresh thread of its process (OpenMP's threads don't survive a fork), with one torch thread. Nothing outlives the call: a
    rank that fails ends the others, and its traceback is in the RuntimeError; so does the time-out.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        readers, processes = [], []
        try:
            for rank in range(world_size):
                reader, writer = context.Pipe(duplex=False)
                process = context.Process(
                    target=_be_rank, args=(writer, store, rank, world_size, timeout_seconds, function, args), daemon=True
                )
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
                writer.close()
                readers.append(reader)
                processes.append(process)
            return _collect(readers, timeout_seconds)
        finally:
            for process in processes:
                process.kill()
                process.join()
            for reader in readers:
                reader.close()


def _collect(readers: list[Any], timeout_seconds: float) -> list[Any]:
    deadline = time.monotonic() + timeout_seconds
    results: dict[int, Any] = {}
    while len(results) < len(readers):
        waiting = [reader for rank, reader in enumerate(readers) if rank not in results]
        ready = multiprocessing.connection.wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RuntimeError(f"rank {readers.index(waiting[0])} gave no result within {timeout_seconds:g} seconds")
        for reader in ready:
            rank = readers.index(reader)
            try:
                succeeded, value = pickle.loads(reader.recv_bytes())
            except EOFError:
                raise RuntimeError(f"rank {rank} crashed") from None
            if not succeeded:
                raise RuntimeError(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(readers))]


def _be_rank(writer: Any, store: str, rank: int, world_size: int, timeout_seconds: float, function: Callable[..., Any], args: Any) -> None:
    answer: list[Any] = []

    def body() -> None:
        try:
            torch.set_num_threads(1)
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, world_size),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_seconds),
            )
            answer.append((True, function(rank, world_size, *args)))
        except BaseException:
            answer.append((False, traceback.format_exc()))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    try:
        data = pickle.dumps(answer[0])  # by value: multiprocessing itself would share tensors' memory, which ends with this process
    except Exception:
        data = pickle.dumps((False, traceback.format_exc()))
    writer.send_bytes(data)
    writer.close()
