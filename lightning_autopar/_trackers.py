"""What forked processes tell the trackers that the script has begun: TensorBoard's event files and tensorboardX's, queues of ``logging``,
and runs of Weights & Biases, MLflow and ClearML.

One process goes on with them, rank 0's worker, so that one run is one run. A process that tries the user's code, and every other rank,
tells them nothing. Knows the trackers' own classes by their names and imports none of them.
"""

from __future__ import annotations

import os
import sys
import threading
from logging.handlers import QueueListener
from multiprocessing import get_context
from queue import Queue, SimpleQueue
from typing import Any, ClassVar
from uuid import uuid4

#: The threads that write event files (``tensorboard.summary.writer.event_file_writer``, ``tensorboardX.event_file_writer``), and the
#: listeners of ``logging``'s queues, as they were before the last fork.
_EVENT_THREADS: list[Any] = []
_RECORD_THREADS: list[Any] = []
_LISTENERS: list[QueueListener] = []
#: How many calls of trackers this process has dropped.
_untold = 0


def settle() -> None:
    """Before a fork, and before a process ends: what waits for a file is in it, so that a child doesn't write it as well."""
    for known in (_EVENT_THREADS, _RECORD_THREADS, _LISTENERS):
        known.clear()
    for thread in threading.enumerate():
        each: Any = thread
        listener = getattr(getattr(each, "_target", None), "__self__", None)
        if isinstance(listener, QueueListener):
            listener.stop()
            _LISTENERS.append(listener)
        elif type(each).__name__ == "_EventLoggerThread":
            each.stop()
            each._record_writer.flush()
            _RECORD_THREADS.append(each)
        elif type(each).__name__ == "_AsyncWriterThread":
            if each._record_writer.closed:  # in a worker, whose end was brought back
                each.stop()
                continue
            each._queue.join()
            each._record_writer.flush()
            _EVENT_THREADS.append(each)


def _go_on_in_parent() -> None:
    for thread in _RECORD_THREADS:
        _begin_anew(thread)
    for listener in _LISTENERS:
        listener.start()


os.register_at_fork(before=settle, after_in_parent=_go_on_in_parent)


def track(*, here: bool) -> None:
    """What a forked process does with the trackers of its parent. It may start threads.

    Args:
        here: whether this process goes on with them. If not, it tries the user's code, or isn't the rank that speaks for all.
    """
    for thread in (*_EVENT_THREADS, *_RECORD_THREADS):
        _empty(thread._queue)  # with the parent's thread gone, a writer would wait for room in it for ever
        if here:
            _begin_anew(thread)
        else:
            thread._queue.put = _leave_untold
    for listener in _LISTENERS:
        lines: Any = listener.queue
        if isinstance(lines, SimpleQueue):  # has room for all that nobody reads
            if here:
                listener.start()
        elif not here:
            lines.put = lines.put_nowait = _leave_untold
        elif isinstance(lines, Queue):  # else it is one of several processes, and the parent's listener reads it
            _empty(lines)
            listener.start()
    _track_mlflow(here=here)
    if not here and (clearml := sys.modules.get("clearml.backend_interface.metrics.reporter")) is not None:
        for name in [name for name in vars(clearml.Reporter) if name.startswith("report_")]:  # its tasks live on in forked processes
            setattr(clearml.Reporter, name, _leave_untold)
    if (run := run_of_wandb()) is None:
        return
    if here:
        _ = run.dir  # most calls connect a forked process to the run, but not those of its summary
        return
    tracker: Any = sys.modules["wandb"]
    silent = tracker.init(mode="disabled", config=dict(tracker.config), reinit="create_new")
    run.__class__, run.__dict__ = type(silent), {**vars(silent), "log": _leave_untold}
    tracker.log = _leave_untold


def untold() -> int:
    """How many calls of trackers this process has dropped, as it tells them nothing: it grows where a step calls one."""
    return _untold


def _leave_untold(*args: Any, **kwargs: Any) -> None:
    global _untold
    _untold += 1


def run_of_wandb() -> Any:
    """The run of Weights & Biases that this process has begun, or goes on with; None where there is none."""
    return getattr(sys.modules.get("wandb"), "run", None)


def _begin_anew(thread: threading.Thread) -> None:
    threading.Thread.__init__(thread, daemon=True)
    thread.start()


def _empty(queue: Any) -> None:
    """Make it a queue of this process alone, with nothing in it; a lock of the parent's may be held for good."""
    if hasattr(queue, "maxsize"):
        queue.__init__(queue.maxsize)
    else:
        queue.__init__(queue._maxsize, ctx=get_context())


def _track_mlflow(*, here: bool) -> None:
    """MLflow forgets its active run in a forked process, where ``mlflow.log_metric`` would begin another one."""
    if (fluent := sys.modules.get("mlflow.tracking.fluent")) is None:
        return
    active = fluent._active_run_stack  # of each thread and process; what a new one has is by its ``default_factory``
    if not isinstance(active, list):  # of the process, before MLflow 2.14
        runs = active.get_all_thread_values().get(threading.main_thread().ident) or active.default_factory()
        active.default_factory = lambda: [*runs]
    client: Any = sys.modules["mlflow.tracking._tracking_service.client"].TrackingServiceClient
    if here or isinstance(client.store, _Reads):
        return
    client.store = _Reads(client.store)
    artifacts = client._get_artifact_repo
    client._get_artifact_repo = lambda self, *args, **kwargs: _Unwritten(artifacts(self, *args, **kwargs))


class _Reads(property):
    """MLflow's store of a client, which nothing is written to."""

    def __init__(self, store: property) -> None:
        super().__init__(lambda client: _Unwritten(store.__get__(client)))


class _Unwritten:
    """A store of MLflow's, or of a run's files: what it has can be read, and a run that begins here is known here alone."""

    runs: ClassVar[dict[str, Any]] = {}

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        reads = name.startswith(("get_", "search_", "list_", "download_", "_"))
        return found if reads or not callable(found) else _leave_untold

    def get_run(self, run_id: str) -> Any:
        """A run of this process's, or the store's."""
        return self.runs.get(run_id) or self._store.get_run(run_id)

    def create_run(self, experiment_id: str, user_id: str, start_time: int, tags: list[Any], run_name: str | None) -> Any:
        """A run that the store doesn't know."""
        entities: Any = sys.modules["mlflow.entities"]
        info = entities.RunInfo(uuid4().hex, experiment_id, user_id, "RUNNING", start_time, None, "active", run_name=run_name)
        run = self.runs[info.run_id] = entities.Run(info, entities.RunData(tags=tags))
        return run
