"""From a call of ``fit`` to a running plan: decide in the parent, then run where the plan says.

The parent touches no GPU before the plan is made. It doesn't know how a plan is found (``planning_inputs``), nor how
workers live (``worker_supervisor``).
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from lightning_autopar import _root, engines
from lightning_autopar._fork import unforkable
from lightning_autopar._lightning import MisconfigurationException, ParallelStrategy, Trainer, rank_zero_info, rank_zero_warn
from lightning_autopar._lightning_compat import (
    Launcher,
    TrainerFn,
    TunerExit,
    attach_data,
    call_on_exception,
    installed,
    requested_nodes,
    run_arguments,
)
from lightning_autopar.sharing.runs.own_status import RunDisplay, showing
from lightning_autopar.sharing.runs.progress import RunProgress
from lightning_autopar.sharing.take_leases import words
from lightning_autopar.sharing.waiting import Waiting
from lightning_autopar.strategies.base.engine_mixin import EngineMixin
from lightning_autopar.strategies.base.out_of_memory.gpu_limit import gpu_limit_for
from lightning_autopar.strategies.base.out_of_memory.running_step import explain
from lightning_autopar.strategies.base.run_plan import RunPlan
from lightning_autopar.strategies.base.trainer_loaders import put_together
from lightning_autopar.strategies.base.worker_exception import WHERE, users_part
from lightning_autopar.strategies.elastic.restart.restartable_run import RestartableRun, leaving
from lightning_autopar.strategies.elastic.snapshot_schedule import SnapshotSettings
from lightning_autopar.strategies.elastic.start_elastic_fit import ElasticRun, snapshot_settings
from lightning_autopar.strategies.out_of_memory_restart import SmallerPlans, needs_way_back
from lightning_autopar.strategies.preparation.batch_size_finder import find_batch_size
from lightning_autopar.strategies.preparation.confirmed_plan import Prospect
from lightning_autopar.strategies.preparation.decision import Decision
from lightning_autopar.strategies.preparation.finished_run import announce_measured, learn, learn_shortage
from lightning_autopar.strategies.preparation.planning_inputs import decide_again, find_prospect, has_several
from lightning_autopar.strategies.preparation.trainer_options import finder_of
from lightning_autopar.strategies.processes.external_launcher import Peers, rerun_script, under_external_launcher, unknown_launcher
from lightning_autopar.strategies.processes.handover import back_to_script as handover
from lightning_autopar.strategies.processes.users_script import is_ours
from lightning_autopar.strategies.processes.worker import WorkerJob, make_job
from lightning_autopar.strategies.processes.worker_supervisor import Outcome, run_folder, run_generation

if TYPE_CHECKING:
    from lightning_autopar.devices.inventory import Inventory
    from lightning_autopar.strategies.base.strategy_protocol import RunHost

log = logging.getLogger(__name__)

#: Said where memory runs out in processes of a launcher; in the script's own process; and in a launcher's where the run saves snapshots.
_THEIRS = (
    "autopar: the run ends, as only its launcher can start processes for a smaller plan. With callbacks=[CheckpointMigrate()] and "
    "torchrun's --max-restarts=1 or more it would go on by itself from its latest snapshot"
)
_HERE = (
    "autopar: the run ends, as it ran in the script's own process and has no snapshot. With callbacks=[CheckpointMigrate()] it would go "
    "back to its latest snapshot, and go on under a plan that takes less memory, if there is one"
)
_STARTED_AGAIN = (
    "autopar: if its launcher starts the run again, as torchrun does with --max-restarts=1 or more, it goes on from its snapshot"
)


class AutoLauncher(Launcher):
    """Plans in the parent process, then runs the trainer's function under the plan.

    A plan of one device runs in this process, unless it is tight and a batch that runs out of memory couldn't be run again. Others run in
    forked workers; if torchrun or SLURM started the processes, in those; if this process has already used a GPU, or autograd's threads for
    one, in reruns of the script.
    """

    def __init__(self, strategy: RunHost) -> None:
        self._strategy = strategy
        self._shown = RunDisplay(None, dict)

    @property
    def is_interactive_compatible(self) -> bool:
        """Forked workers run in notebooks too."""
        return True

    def kill(self, signum: Any) -> None:
        """The generation that started the workers ends them."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Decide on a plan and run ``function`` under it.

        Args:
            function: the trainer's ``_fit_impl`` or one of its siblings.
            trainer: the trainer; always given by Lightning.

        Raises:
            NothingFits: if no plan fits, with the report.
            ValueError: if the arguments can't be met.
        """
        assert trainer is not None
        call = partial(function, **run_arguments(function, args, kwargs))
        attach_data(trainer, call.keywords)
        for each in (trainer.datamodule, *trainer.callbacks, *trainer.loggers):  # type: ignore[attr-defined]  # set by connectors
            if not _root.is_of_a_package(type(each)):  # Lightning itself checks the module
                _root.check(each, type(each).__name__)
        peers = under_external_launcher(self._strategy)
        with showing(
            trainer,
            lambda: self._strategy.leases.held_bytes,
            self._strategy.leases.expect,
            silent=peers is not None and peers.rank > 0,
            external=peers is not None and not peers.are_reruns,
        ) as self._shown:
            try:
                if peers is not None:
                    return self._run_with_peers(peers, call, trainer)
                return self._run_alone(call, trainer)
            except BaseException as error:
                log.debug("what ended the run, with all frames", exc_info=True)
                shown = users_part(error.__traceback__)
                if shown is None and not (is_ours(error) or isinstance(error, MisconfigurationException)):
                    raise
                raise error.with_traceback(shown)  # noqa: B904  # the same exception, which keeps its own cause
            finally:
                self._shown = RunDisplay(None, dict)  # so that the module and its trainer can be pickled again

    def _run_alone(self, call: partial[Any], trainer: Trainer) -> Any:
        """Decide and run, where no launcher has started several processes."""
        if (nodes := requested_nodes(trainer)) > 1:
            remedy = unknown_launcher() or f"start the script with torchrun --nnodes={nodes} or srun, or leave num_nodes at 1"
            raise ValueError(f"num_nodes={nodes} needs a process on each device of each node, and there is only this one; {remedy}")
        how = snapshot_settings(trainer, self._strategy.settings.batch)
        if how is not None and (reason := unforkable()) is not None:
            how = None
            rank_zero_warn(
                f"autopar: this run can't be moved: {reason}, so it can fork no workers; call fit before anything touches CUDA, or start "
                "the script anew"
            )
        self._shown.show(elastic=how is not None)
        settings, leases = self._strategy.settings, self._strategy.leases
        leases.ask_as(priority=settings.wait.rank, elastic=how is not None)
        self._shown.show(priority=leases.priority)
        finder = finder_of(trainer) if how is None else None
        if finder is not None and (unforkable() is not None or not has_several(*self._strategy.inventory())):
            finder = None
        present: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # set by a connector
        if finder is not None:
            trainer.callbacks = [each for each in present if each is not finder]  # type: ignore[attr-defined]
        try:
            return self._run_found(finder, how, call, trainer)
        finally:
            if finder is not None:
                trainer.callbacks = present  # type: ignore[attr-defined]

    def _run_found(self, finder: Any, how: SnapshotSettings | None, call: partial[Any], trainer: Trainer) -> Any:
        """Decide and run, with the batch size that a ``BatchSizeFinder`` looks for, if there is one."""
        settings, leases = self._strategy.settings, self._strategy.leases

        def prospects() -> Prospect:
            return find_prospect(trainer, settings, self._strategy.inventory(), arguments=call.keywords, elastic=how is not None)

        prospect = prospects() if finder is None else find_batch_size(finder, trainer, prospects, call)
        if finder is not None and finder._early_exit:
            raise TunerExit
        waiting = Waiting(
            prospect,
            leases,
            inventory=lambda: self._strategy.inventory(fewer=True)[0],
            devices=self._strategy.devices_now,
            wait_seconds=settings.wait.wait_seconds,
            shown=self._shown,
        )
        try:
            return self._run(waiting.start(), how, call, trainer)
        finally:
            leases.release()

    def _promised(
        self, decision: Decision, trainer: Trainer, inventory: Callable[[], tuple[Inventory, int | None]], *, elastic: bool
    ) -> Decision:
        """The decision, or a later one, once the ledger has promised its memory to this run alone.

        Raises:
            NothingFits: if others were promised too much meanwhile.
        """
        leases, devices = self._strategy.leases, self._strategy.devices_now
        while not leases.take_for_run(decision.run_plan.needed_bytes, devices, decision.expected_seconds):
            decision = decide_again(trainer, decision, inventory()[0], elastic=elastic, begun=False)
        return decision

    def _run(self, decision: Decision, how: SnapshotSettings | None, call: partial[Any], trainer: Trainer) -> Any:
        """Run the decision in the way that this process allows."""
        self._strategy.report, self._strategy.plan = decision.report, decision.run_plan.plan
        decision.announce()
        decision.keep()
        if how is not None:
            return self._run_elastic(decision, how, call, trainer)
        first, reason = decision.run_plan.devices[0], unforkable()
        in_worker = reason is None and (first.in_doubt or needs_way_back(decision.run_plan, trainer))
        if not engines.of(decision.run_plan.plan).several and first.index is not None and not in_worker:
            return self._run_here(decision, call, trainer)
        if reason is not None:
            peers = rerun_script(self._strategy, decision.run_plan.plan.world_size, reason)
            peers.tell(replace(decision, look=None))
            return self._run_as_peer(decision, peers, call, trainer)
        return self._run_generation(decision, call, trainer)

    def _show(self, decision: Decision, progress: RunProgress) -> None:
        """From now on, show others on this host which plan runs and how far it is."""
        run_plan = decision.run_plan
        self._shown.running(run_plan.plan.title(), run_plan.plan.devices, run_plan.reserved_bytes, decision.expected_seconds, progress)

    def _show_at_batches(self, decision: Decision, engine: EngineMixin, trainer: Trainer) -> None:
        """In the run's first process: show at its batches how far it is."""
        shown = self._shown
        if shown.run_id is None:
            return
        progress = RunProgress(decision.run_plan.plan.world_size)
        engine.at_batch.append(partial(progress.at_batch, trainer, 0, engine.root_device, shown.look))
        self._show(decision, progress)

    # -- one device: this process ------------------------------------------------------------------------------------------------------

    def _run_here(self, decision: Decision, call: partial[Any], trainer: Trainer) -> Any:
        run_plan = decision.run_plan
        engine = self._strategy.make_engine(run_plan, forked=False)
        device = run_plan.devices[0]
        with installed(trainer, engine, trainer.lightning_module, run_plan.torch_devices, keep_sampler=False), _threads(device.threads):
            engine.gpu_limit = gpu_limit_for(run_plan, 0)
            self._show_at_batches(decision, engine, trainer)
            try:
                value = self._function_with_hooks(engine, call, trainer)
            except BaseException as error:
                if hasattr(error, WHERE) and trainer.state.fn == TrainerFn.FITTING:
                    error.add_note(_HERE)
                raise
            finally:
                self._strategy.take_over(engine)
                self._strategy.measured = {device.id: engine.meter.measured.to_dict()}
        self._account()
        return value

    def _function_with_hooks(self, engine: EngineMixin, call: partial[Any], trainer: Trainer) -> Any:
        """Call the function; on an exception run the trainer's hooks while the engine is installed, so that Lightning doesn't."""
        try:
            return call()
        except BaseException as error:
            explain(engine, error)
            learn_shortage(self._strategy.report, error)
            if not isinstance(error, TunerExit):
                if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as Lightning does: a second Ctrl-C must not interrupt the hooks
                call_on_exception(trainer, error, finalize=False)
                self._strategy.mute(trainer)
            engine.teardown()
            raise

    # -- several devices: workers ------------------------------------------------------------------------------------------------------

    def _run_generation(self, decision: Decision, call: partial[Any], trainer: Trainer) -> Any:
        footprint = decision.report.footprint
        with run_folder(footprint.parameter_bytes + footprint.optimizer_bytes) as folder:
            job = make_job(decision.run_plan, trainer, call, folder)
            smaller = SmallerPlans(self._strategy, decision, trainer, folder)

            def look() -> None:
                self._shown.look()
                smaller.look()

            while True:
                run_plan = replace(decision.run_plan, from_snapshot=decision.run_plan.from_snapshot or smaller.snapshot is not None)
                engines.of(run_plan.plan).before_fork(run_plan.devices)
                progress = RunProgress(run_plan.plan.world_size)
                self._show(decision, progress)
                job = smaller.job(replace(job, run_plan=run_plan, progress=progress))
                outcome = run_generation(job, look)
                found = smaller.after(outcome, job, decision)
                if found is None:
                    return self._take_back(outcome, job, trainer)
                decision = found
                self._strategy.report, self._strategy.plan = decision.report, decision.run_plan.plan

    def _run_elastic(self, decision: Decision, how: SnapshotSettings, call: partial[Any], trainer: Trainer) -> Any:
        for name in self._strategy.settings.allow:  # the run may move to any of them
            engines.named(name).before_fork(decision.run_plan.devices)
        import_module("lightning_autopar.state.snapshot")  # once, for all workers
        run = ElasticRun(self._strategy, trainer, decision, call, how, self._shown)
        try:
            return run.run(lambda outcome, job: self._take_back(outcome, job, trainer))
        finally:
            if run.agent is not None:
                self._strategy.history = run.agent.recorder.history(type(trainer.lightning_module).__name__)

    def _take_back(self, outcome: Outcome, job: WorkerJob, trainer: Trainer) -> Any:
        """Bring the workers' results back into this process; returns the function's value.

        Raises:
            BaseException: what ended the run.
        """
        plan = job.run_plan.plan
        if outcome.error is not None:
            raise self._failed(outcome, trainer, job)
        handover.restore(trainer, job.before, outcome.results, job.folder)
        self._strategy.measured = {device: left.measured.to_dict() for device, left in zip(plan.devices, outcome.results, strict=True)}
        self._account()
        if outcome.tuner_exit:
            raise TunerExit
        if trainer.state.fn == "predict" and job.run_plan.batch == "global":
            return put_together([left.value for left in outcome.results], plan)
        return outcome.results[0].value

    def _failed(self, outcome: Outcome, trainer: Trainer, job: WorkerJob) -> BaseException:
        """Bring back a failed run's state, as plain Lightning leaves it, or say that it is lost; returns the exception to raise."""
        assert outcome.error is not None
        learn_shortage(self._strategy.report, outcome.error)
        try:
            if outcome.results:
                handover.restore(trainer, job.before, outcome.results, job.folder)
        except Exception as error:  # a later error must not hide the failure itself
            rank_zero_warn(f"autopar: the state of the failed run could not be brought back: {error!r}")
        if not outcome.results and not outcome.saved:
            rank_zero_info("autopar: the workers' state is lost; module and trainer in this process are as they were before the run")
        if outcome.hooks_ran:
            self._strategy.mute(trainer)  # with the state that they belong to
        return outcome.error

    # -- processes that somebody else started ------------------------------------------------------------------------------------------

    def _run_with_peers(self, peers: Peers, call: partial[Any], trainer: Trainer) -> Any:
        decision = None
        how = leaving(trainer, peers, self._strategy.settings.batch)
        self._strategy.leases.ask_as(priority=self._strategy.settings.wait.rank, elastic=False)
        if peers.rank == 0:
            try:
                decision = find_prospect(
                    trainer,
                    self._strategy.settings,
                    peers.inventory(self._strategy),
                    arguments=call.keywords,
                    world_size=peers.world_size,
                    elastic=how is not None,
                ).decision()
                if peers.are_reruns:
                    decision = self._promised(decision, trainer, lambda: peers.inventory(self._strategy), elastic=how is not None)
            except BaseException as error:
                peers.tell(error)
                raise
            decision.announce()
            peers.tell(replace(decision, look=None))
        else:
            decision = peers.hear()
        try:
            if not peers.are_reruns:
                # Each process of a launcher takes a lease on its own device. Others then see the memory as this process's.
                device = decision.run_plan.plan.devices[peers.rank]
                needed = decision.run_plan.needed_bytes
                short = self._strategy.leases.take({device: needed[device]} if device in needed else {}, self._strategy.devices_now)
                if short is not None:
                    rank_zero_warn(f"autopar: the launcher gave this run a device that isn't free: {words(short)}")
            return self._run_decided_with_peers(decision, peers, how, call, trainer)
        finally:
            self._strategy.leases.release()

    def _run_decided_with_peers(
        self, decision: Decision, peers: Peers, how: SnapshotSettings | None, call: partial[Any], trainer: Trainer
    ) -> Any:
        self._strategy.report, self._strategy.plan = decision.report, decision.run_plan.plan
        if how is None:
            return self._run_as_peer(decision, peers, call, trainer)
        alone = ElasticRun(self._strategy, trainer, decision, call, how, self._shown)
        run = RestartableRun(peers, how, alone, call, trainer)
        run.find()
        from_snapshot = run.snapshot is not None or decision.run_plan.from_snapshot
        run_plan = replace(decision.run_plan, from_snapshot=from_snapshot, elastic=True)
        return self._run_as_peer(replace(decision, run_plan=run_plan), peers, call, trainer, run)

    def _run_as_peer(
        self, decision: Decision, peers: Peers, call: partial[Any], trainer: Trainer, run: RestartableRun | None = None
    ) -> Any:
        run_plan = decision.run_plan
        engine = self._strategy.make_engine(run_plan, forked=False)
        devices = peers.local_devices(run_plan)
        if isinstance(engine, ParallelStrategy):
            engine.parallel_devices = devices  # of this node, as Lightning counts processes
        keep_sampler = run_plan.batch == "per_device"
        with (
            peers.run(run_plan, engine),
            installed(trainer, engine, trainer.lightning_module, devices, keep_sampler=keep_sampler, external=peers.environment),
        ):
            engine.gpu_limit = gpu_limit_for(run_plan, peers.rank)
            self._show_at_batches(decision, engine, trainer)
            try:
                with nullcontext(call) if run is None else run.going_on() as call:
                    value = self._function_with_hooks(engine, call, trainer)
                engine.release()
            except BaseException as error:
                if hasattr(error, WHERE) and not peers.are_reruns:
                    error.add_note(_THEIRS if run is None else _STARTED_AGAIN)
                raise
            finally:
                self._strategy.take_over(engine)
            measured = self._everyones(engine.meter.measured.to_dict(), run_plan)
            self._strategy.measured = dict(zip(run_plan.plan.devices, measured, strict=True))
            if peers.rank == 0:
                self._account()
            if trainer.state.fn == "predict" and run_plan.batch == "global" and run_plan.plan.world_size > 1:
                value = put_together(self._everyones(value, run_plan), run_plan.plan)
        return value

    @staticmethod
    def _everyones(value: Any, run_plan: RunPlan) -> list[Any]:
        """All ranks' values, in rank order; a collective."""
        if run_plan.plan.world_size == 1:
            return [value]
        values: list[Any] = [None] * run_plan.plan.world_size
        torch.distributed.all_gather_object(values, value)
        return values

    # -- afterwards --------------------------------------------------------------------------------------------------------------------

    def _account(self) -> None:
        """Log what was predicted and measured, and learn from it."""
        report = self._strategy.report
        assert report is not None, "it has been planned"
        announce_measured(report, self._strategy.measured)
        learn(report, self._strategy.measured)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """While open, torch computes with a CPU device's share of the cores."""
    before = torch.get_num_threads()
    if count is None or count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
