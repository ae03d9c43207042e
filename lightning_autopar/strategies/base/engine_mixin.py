"""EngineMixin: what every engine adds to Lightning's own strategy, which is the exact split of the global batch and a record of what ran.

It stands before the Lightning strategy in an engine's bases. It knows the plan and the batch's shares, not how a plan was found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lightning_autopar._lightning import Trainer
from lightning_autopar._lightning_compat import (
    TrainerFn,
    bare_optimizer,
    before_transfers,
    data_of_one_device,
    hyperparameters_added,
    loaders_of_batch,
    loaders_of_one_device,
    step_name,
)
from lightning_autopar._root import names_all_gather
from lightning_autopar._temporary import Calls, Exits, patched
from lightning_autopar.exact.data.counted_entries import BatchCounts
from lightning_autopar.exact.data.loader import BatchShare, ExactLoader
from lightning_autopar.exact.data.loader_pass import without_group
from lightning_autopar.exact.data.longest_batch import LongerBatches
from lightning_autopar.exact.data.rank_share import common_share
from lightning_autopar.exact.logs.logging_hooks import may_stop
from lightning_autopar.exact.logs.self_log import GlobalLogging
from lightning_autopar.exact.random.whole_batch_draws import GlobalDraws
from lightning_autopar.exact.step import users_backward
from lightning_autopar.exact.step.batch_norm import restore as restore_batch_norm
from lightning_autopar.exact.step.batch_norm import synchronise as synchronise_batch_norm
from lightning_autopar.exact.step.gradient_hooks import GradientHooks, trained
from lightning_autopar.exact.step.gradient_scaler import scaled_as_on_one_device
from lightning_autopar.exact.step.micro_batches import MicroBatches
from lightning_autopar.exact.step.recompute import recomputed
from lightning_autopar.exact.step.step_rollback import StepState
from lightning_autopar.memory.trace.bare_step import take_hooks
from lightning_autopar.state.checkpoint import put_in_one_order, whole_optimizer_state, whole_state_dict
from lightning_autopar.strategies.base import rank_measurement
from lightning_autopar.strategies.base.out_of_memory.evaluations import Evaluations
from lightning_autopar.strategies.base.out_of_memory.gpu_limit import GpuLimit
from lightning_autopar.strategies.base.out_of_memory.predictions import Predictions
from lightning_autopar.strategies.base.out_of_memory.rerun import Reruns
from lightning_autopar.strategies.base.out_of_memory.running_step import BACKWARD, BOTH, FORWARD, OPTIMIZER, RunningStep
from lightning_autopar.strategies.base.process_group import all_alike, everyones, hidden_from_users, stopped_together, told_of_one_device
from lightning_autopar.strategies.base.rank_measurement import Meter
from lightning_autopar.strategies.base.resume import ResumedStrategy
from lightning_autopar.strategies.base.run_plan import PlanChanges, RunPlan
from lightning_autopar.strategies.base.saved_modules import SavedModules
from lightning_autopar.strategies.base.trainer_loaders import Dropped, exact_loader


class EngineMixin(ResumedStrategy):
    """Splits the user's batch over the ranks so that the run computes what one device would.

    Gradients, logged values, BatchNorm statistics and random draws are those of the whole batch; each has a module of its name.
    """

    #: Whether a batch that runs out of memory can be run again by this rank alone: ranks exchange nothing within a step's forward.
    reruns_batches = False
    #: Whether an engine's ranks average the gradients of their parts of a batch.
    averages = False
    #: Whether the gradients that backward leaves in the parameters are the whole batch's, so that the user's hooks can be called then.
    completes_gradients = False
    _layer_sync: Any
    _in_order: tuple[Parameter, ...] = ()  # the trained parameters, where the engine knows them

    def attach(self, run_plan: RunPlan) -> None:
        """Give the engine its run plan; called once, before the trainer sees the engine."""
        self.run_plan, self._longer = run_plan, None if run_plan.lengths is None else LongerBatches.of(run_plan.lengths)
        #: Whether a batch is split at all.
        self.splits = run_plan.data_ranks > 1 and run_plan.batch == "global"
        #: Whether a rank runs its batch in parts, one after the other.
        self.in_parts = run_plan.plan.micro_batches > 1
        self._share: BatchShare | None = None
        #: How many samples the current batch was made of, where this rank has all of them.
        self._samples: int | None = None
        gather = partial(everyones, group=lambda: cast(Any, self._logging).host_group) if self.splits else None
        replicated = run_plan.plan.world_size // run_plan.plan.data_ranks
        self._counts = BatchCounts(run_plan.log_rules, gather, replicated, run_plan.unweighed)
        self._exit: ExitStack = Exits()
        self._draws: GlobalDraws | None = None
        self._logging: GlobalLogging | None = None
        self._micro: MicroBatches | None = None
        #: The user's hooks on parameters in the running batch.
        self._hooks = GradientHooks()
        #: The state in which the running step began; None where no batch is run again.
        self._found: StepState | None = None
        self._reruns: Reruns | None = None
        self.running = RunningStep()
        #: Whether this rank runs its batches in more parts than planned, and so than others may.
        self._alone = False
        self._arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})  # of the running step
        self._losses: tuple[Tensor, ...] = ()  # from which its backward pass begins
        self._drawing: bool | None = False  # None in backward
        self._in_backward = self._stepping = self._arrived = False  # the second while the parts of a batch run
        self._positions: dict[int, int] = {}
        self._prediction_limits: list[float] = []
        self._asked_predictions: int | float | None = None
        #: What this rank may take of its GPU; None where nothing limits it.
        self.gpu_limit: GpuLimit | None = None
        #: How an elastic run came to this plan.
        self.plan_changes = PlanChanges()
        #: Called when a batch begins, of whatever loop, before anything is done with it; who raises there ends the run between two batches.
        self.at_batch = Calls()

    def _configure_launcher(self) -> None:
        """The processes exist already."""

    # -- who and how many --------------------------------------------------------------------------------------------------------------

    @property
    def _rank(self) -> int:
        return int(getattr(self, "global_rank", 0))

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks that have other parts of a batch for the same parameters; None for all ranks."""
        return None

    def share(self) -> BatchShare | None:
        """This rank's part of the current batch; None between batches and where batches aren't split."""
        return self._share

    # -- data --------------------------------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Do what needs neither the module's state nor the user's code: the process group, the device's context."""
        super().connect(self._module)  # the run's own call tells the loggers
        self.setup_environment()
        if self.root_device.type == "cuda":
            torch.empty(1, device=self.root_device)

    def process_dataloader(self, dataloader: object) -> object:
        """Give Lightning a loader in the user's order, with this rank's samples of each batch, resumable at any batch."""
        dataloader = super().process_dataloader(dataloader)
        trainer = self._trainer
        alike = partial(all_alike, group=lambda: cast(Any, self._logging).host_group)
        loader = exact_loader(dataloader, trainer, self.run_plan, rank=self._rank, broadcast=self.broadcast, alike=alike)
        if loader is None:
            return dataloader
        if trainer.training:
            self.resume_loader(trainer, loader)
        if trainer.predicting and self.splits:
            self._limit_predictions(trainer, dataloader)
        return loader

    def _limit_predictions(self, trainer: Trainer, dataloader: object) -> None:
        """Read ``limit_predict_batches`` as batches of all ranks together, for each loader: right after this, the loop applies it."""
        if self._asked_predictions is None:
            self._asked_predictions = trainer.limit_predict_batches
            self._exit.callback(setattr, trainer, "limit_predict_batches", self._asked_predictions)
        limit = self._asked_predictions
        limit = int(len(dataloader) * limit) if isinstance(limit, float) and isinstance(dataloader, Sized) else limit
        self._prediction_limits.append(limit if isinstance(limit, int) else float("inf"))
        trainer.limit_predict_batches = -(-limit // self.run_plan.plan.data_ranks) if isinstance(limit, int) else limit

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Lightning calls this once for each batch, in order, before its step: here the batch's share becomes the current one."""
        for begins in self.at_batch:
            begins()
        self._share, self._drawing, self._samples, self.running.place = None, False, None, ""
        loaders = self._current_loaders(dataloader_idx) if self.splits or self.in_parts else []
        shares = [loader.shares.popleft() for loader in loaders]
        if self._micro is not None:
            self._micro.arrives(shares)
        step, in_parts = step_name(self._trainer), self.run_plan.plan.micro_batches > 1 or self._micro is not None
        if (known := self.run_plan.known.get(step)) is not None and (self.splits or in_parts):
            known.check(batch)
        if self._counts.needed:
            self._counts.arrives(step, batch, shares, in_parts=in_parts)
        if shares and not self.splits:
            self._samples = shares[0].of if loaders[0].knows_samples else None
        elif shares:
            share = common_share(shares)
            self._share = self._counts.on(share) if self._counts.needed else share
            self._positions[dataloader_idx] = self._positions.get(dataloader_idx, -1) + 1
            self._drawing = True
        if not self._arrived:
            self.batch_arrives()
        self._arrived = False
        if self._longer is not None:
            self._longer.look(self._trainer, batch, self._rank)
        return super().batch_to_device(batch, device, dataloader_idx)

    def _current_loaders(self, dataloader_idx: int) -> list[ExactLoader]:
        """The loaders that the current batch came from; where there are several, those that aren't exhausted."""
        loaders = loaders_of_batch(self._trainer, dataloader_idx)
        return [loader for loader in loaders if isinstance(loader, ExactLoader) and loader.shares]

    def _arrives(self, dataloader_idx: int) -> None:
        """The batch's share is known a hook before :meth:`batch_to_device`."""
        if loaders := self._current_loaders(dataloader_idx):
            self._share, self._drawing, self._arrived = loaders[0].shares[0], True, True
            if self._micro is not None:
                self._micro.part = None
            self.batch_arrives()

    def batch_arrives(self) -> None:
        """The batch's share is known, and its transfer begins: random draws in the transfer's hooks belong to the batch."""
        if self._share is not None and self._draws is not None and self._draws.moved:
            self._draws.begin()

    # -- the step ----------------------------------------------------------------------------------------------------------------------

    def connect(self, model: Any) -> None:
        """The run's call: from here on, loggers get the plan with a training run's hyperparameters, and data is set up as on one device."""
        super().connect(model)
        if model._trainer is None:
            return  # a rehearsal runs a step before there is a run
        if self.restore_checkpoint_after_setup and getattr(model, "hparams", None):
            self.saved_modules = SavedModules(model)
        if self._trainer.state.fn == TrainerFn.FITTING:
            self._exit.enter_context(hyperparameters_added(self._trainer, self.run_plan.hyperparameters))
        if self.run_plan.batch == "global" and self.run_plan.plan.world_size > 1:
            self._exit.enter_context(data_of_one_device(self._trainer, without_group))
            if not self.run_plan.needs_group:
                whole = self.run_plan.data_ranks == 1 or self.run_plan.plan.stages > 1  # there, self.all_gather gathers nothing
                self._exit.enter_context(told_of_one_device(whole, names_all_gather(model)))

    def setup(self, trainer: Trainer) -> None:
        """Prepare the module for split batches and recomputation, then let Lightning's strategy set it up."""
        self.meter.begin(self.root_device)
        module = self._module
        self._exit.enter_context(recomputed(module, self.run_plan.plan.recompute))
        if self.run_plan.batch == "global" and self.run_plan.plan.world_size > 1:
            self._exit.enter_context(loaders_of_one_device(trainer, without_group))
            if not self.run_plan.needs_group:
                self._exit.enter_context(hidden_from_users())
        if self.splits:
            self._layer_sync = None  # Lightning's layer sync works on CUDA only; ours replaces it
            synchronise_batch_norm(module, self._share_for_draws, self.data_group)
            self._exit.callback(restore_batch_norm, module)
            self._exit.enter_context(before_transfers(trainer, self._arrives))
            if (scaler := getattr(self.precision_plugin, "scaler", None)) is not None:
                self._exit.enter_context(scaled_as_on_one_device(scaler, self.run_plan.data_ranks))
        if self.splits or self.in_parts or self.run_plan.shared:
            self.prepare_steps(trainer)
        self._exit.enter_context(patched(self.precision_plugin, "pre_backward", self._before_backward))
        self._exit.enter_context(patched(self.precision_plugin, "post_backward", self._after_backward))
        if self.run_plan.plan.world_size > 1 and may_stop(trainer):
            self._exit.enter_context(stopped_together(trainer))
        fits = trainer.state.fn == TrainerFn.FITTING and module.automatic_optimization and self.run_plan.undivided is None
        if fits and (self.reruns_batches or self.running.leaves):
            found = StepState(trainer, self.run_plan.kept_rules.get("training_step", {}))
            if self.reruns_batches:
                self._found = found
                self._exit.enter_context(patched(self.precision_plugin, "backward", self._run_backward))
            else:
                self.running.found = found
        super().setup(trainer)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Make the user's optimizers; a collective."""
        super().setup_optimizers(trainer)
        take_hooks(map(bare_optimizer, self.optimizers))
        put_in_one_order(self._module, self.optimizers, ranks=self.run_plan.plan.world_size)

    def prepare_steps(self, trainer: Trainer) -> None:
        """Make the objects around the steps of a split batch: for logging, draws, and running the batch's parts."""
        rules, kept = self.run_plan.log_rules, self.run_plan.kept_rules
        self._logging = GlobalLogging(
            trainer, self.share, device=self.root_device, rules=rules, kept=kept, metrics=self.run_plan.metric_rules, parts=self.in_parts
        )
        self._logging.install()
        self._exit.callback(self._logging.uninstall)
        if self.run_plan.draws is not None:
            self._draws = self._exit.enter_context(GlobalDraws(self._share_for_draws, self.run_plan.draws))
        if self.in_parts:
            self._prepare_parts(trainer)

    def _prepare_parts(self, trainer: Trainer) -> None:
        assert self._logging is not None
        note = partial(self.meter.note, self)
        self._micro = MicroBatches(
            trainer, self.run_plan.plan, self._logging, draws=self._draws, before_last=self.before_last_part, note=note
        )

    def run_in(self, parts: int) -> MicroBatches:
        """From now on, run each training batch in so many parts on this rank; the other ranks may go on as before."""
        trainer, self.in_parts = self._trainer, True
        if self._logging is None:
            self.prepare_steps(trainer)
        elif self._micro is None:
            self._logging.begin_parts()
            self._prepare_parts(trainer)
        assert self._micro is not None
        self._micro.number, self._micro.gradients.apart, self._alone = parts, True, True
        return self._micro

    def teardown(self) -> None:
        """Undo what :meth:`setup` patched."""
        self.meter.stop(self)
        self._exit.close()
        super().teardown()
        if self.gpu_limit is not None:
            self.gpu_limit.release()

    def wait_for_peers(self) -> None:
        """Wait until the GPU has done what this rank has begun, and until all ranks have come here; every rank calls it before it ends.
        NCCL's calls return when they are enqueued: if a process ended before they are done, its peers would wait for ever.
        """
        if self.root_device.type == "cuda":
            torch.cuda.synchronize(self.root_device)
        self.barrier()

    def _share_for_draws(self) -> BatchShare | None:
        """The share while draws belong to its batch: from the transfer to forward's end, and in backward, which recomputes; else None."""
        if self._drawing is False or (self._drawing is None and torch._C._current_graph_task_id() == -1):
            return None
        return self._share if self._micro is None or self._micro.part is None else self._micro.part

    def release(self) -> None:
        """Make the module whole and plain again, for what comes after the run; where ranks have parts of it, a collective."""
        own: Any = super()  # the engine's class comes next in the order of bases; if it has no release(), the module is whole already
        if hasattr(own, "release"):
            own.release()

    @property
    def holders(self) -> int:
        """How many ranks, from rank 0 on, together have the module's state, each a part of it."""
        return 1

    def hand_over(
        self, module: Any, optimizers: list[Any], *, keep: bool, affordable: Callable[[int], bool]
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The states of the module and of the optimizers, for the process that started the run; a collective.

        Args:
            affordable: says whether that process can take the optimizers' states, if so many ranks each have as much of them as this one;
                if not, none are returned.
        """
        state = whole_state_dict(module, keep=keep)
        return state, [whole_optimizer_state(each, keep=keep) for each in optimizers] if affordable(1) else []

    def held_tensors(self) -> dict[str, Iterable[Tensor]]:
        """What a step finds on this rank, by kind (see :mod:`.rank_measurement`); on a CPU device also what is offloaded to the host."""
        return rank_measurement.held_tensors(self)

    def held_gradients(self) -> Iterator[Tensor]:
        """Complete gradients on this rank."""
        return rank_measurement.held_gradients(self)

    def held_on_host(self) -> Iterator[Tensor]:
        """The tensors that the plan offloads; to be called between steps."""
        return rank_measurement.held_on_host(self)

    def new_gradients_on_host(self) -> Iterator[Tensor]:
        """Gradients in host memory that this step has made."""
        return iter(())

    def before_last_part(self) -> AbstractContextManager[None]:
        """The context for forward and backward of each part of the batch but the last."""
        return nullcontext()

    @contextmanager
    def _step(self) -> Iterator[None]:
        with nullcontext() if self._share is None or self._logging is None else self._logging.step():
            yield

    def step_begins(self, place: str) -> None:
        """The user's training step begins; ``place`` says what runs in it."""
        self.running.place = place
        if self.running.found is not None:
            self.running.found.note(self._logging, self._draws)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's ``training_step`` on this rank's share."""
        own, found = super().training_step, self._found
        self.step_begins(FORWARD)
        if found is None:
            return self._train(own, args, kwargs)

        def step(*args: Any, **kwargs: Any) -> Any:
            output = own(*args, **kwargs)
            if found.exchanges():
                self._rerun.exchanged()
            return output

        self._arguments = args, kwargs
        found.note(self._logging, self._draws)
        while True:
            try:
                output = self._train(step, args, kwargs)
                found.drop()
                return output
            except Exception as error:  # it may be any of several classes
                if not self._rerun.may_begin_anew(error):
                    raise
            # Outside of the handler, as the exception holds the failed step's tensors.
            self._rerun.begin_anew()

    @cached_property
    def _evaluations(self) -> Evaluations:
        return (Predictions if self._trainer.predicting else Evaluations)(self)

    @property
    def samples_at_once(self) -> int | None:
        """How many samples fitted at once, after a batch ran out of memory and was run again; None where none was."""
        return None if self._reruns is None else self._reruns.samples_at_once

    @property
    def _rerun(self) -> Reruns:
        """Made where the first batch runs out of memory."""
        if self._reruns is None:
            assert self._found is not None
            self._reruns = Reruns(self, self._found)
        return self._reruns

    def _train(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self._module
        self._drawing = self._share is not None  # again where an optimizer calls the step several times
        if self._micro is not None:
            return self._step_in_parts(self._micro, step, args, kwargs)
        with self._step(), self._own_backward():
            output = step(*args, **kwargs)
            if self._logging is not None and module.automatic_optimization:
                self._logging.note_loss(output)
        self._drawing = None if module.automatic_optimization else False  # by hand, its backward passes are over
        self.meter.note(self, "forward")
        return output

    @contextmanager
    def _own_backward(self) -> Iterator[None]:
        """The context of a step of manual optimization, in which the user may call ``loss.backward()`` without Lightning."""
        if (share := self._share) is None or self._module.automatic_optimization:
            yield
            return
        with users_backward.noticed(lambda: share.weight, lambda: self._in_backward, self.exchange_gradients, self._hooks):
            yield

    def exchange_gradients(self, reached: list[Parameter]) -> None:
        """The user's own backward pass is over, and these parameters got gradients; it has reduced those of sharded parameters already."""

    def _step_in_parts(self, micro: MicroBatches, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._share, self._drawing = self._share or self._counts.on(micro.share(args[0], self._samples)), True
        optimizer, self._stepping = self.optimizers[0], True
        micro.gradients.apart |= self._hooks.hold()
        try:
            with self._step():
                return micro.run(step, lambda loss: self.backward(loss, optimizer), self._share, args, kwargs)
        finally:
            self._stepping, self._drawing = False, None

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's ``validation_step`` on this rank's share."""
        return self._evaluate(super().validation_step, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's ``test_step`` on this rank's share."""
        return self._evaluate(super().test_step, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's ``predict_step`` on a whole batch; ``batch_idx`` is its index among all ranks' batches."""
        if self._share is None:
            return self._evaluations.run(self.evaluation(super().predict_step), args, kwargs)
        share, self._share = self._share, None  # the batch is whole: nothing in it is split
        loader, plan = args[2] if len(args) > 2 else 0, self.run_plan.plan
        index = self._positions[loader] * plan.data_ranks + plan.data_rank(self._rank)
        args = (args[0], *([index] if len(args) > 1 else []), *args[2:])
        output = self._evaluations.run(self.evaluation(super().predict_step), args, kwargs)
        return output if share.rows and index < self._prediction_limits[loader] else Dropped()

    def _evaluate(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = self._evaluations.run(self.evaluation(step), args, kwargs)
        self._drawing = False
        return output

    def evaluation(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """A step without a backward pass, of that name, with what the engine does around it."""
        return step

    def weighted(self, loss: Tensor) -> Tensor:
        """A step's loss, as this rank runs backward from it: weighed by its share of the batch where ranks average their gradients."""
        share = self._share if self.averages else None
        return loss if share is None or share.weight == 1.0 else users_backward.weighed(loss, share.weight)

    def _before_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """The precision plugin's ``pre_backward``: backward begins from the weighed loss. The parts of a batch weigh their own."""
        loss = tensor if self._stepping else self.weighted(tensor)
        scaled: Tensor = type(self.precision_plugin).pre_backward(self.precision_plugin, loss, module)
        self._losses = () if self._found is None or self._stepping else (tensor, loss)
        return scaled

    def _after_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """The precision plugin's ``post_backward``, after the user's hooks on parameters, which its own hooks follow."""
        if self._hooks and not self._stepping:
            self._hooks.call()
        output: Tensor = type(self.precision_plugin).post_backward(self.precision_plugin, tensor, module)
        return output

    def _run_backward(self, tensor: Tensor, *more: Any, **options: Any) -> None:
        """The precision plugin's ``backward``, where a batch can be run again. Where it runs out of memory, it completes the
        gradients in parts of the batch; the parts of a batch that runs in several don't.
        """
        found, losses, self._losses = self._found, self._losses, ()
        run = partial(type(self.precision_plugin).backward, self.precision_plugin, tensor, *more, **options)
        if found is None or not losses:
            run()
            return
        if self._micro is not None:
            self._micro.gradients.take_up()
        marks = self.gradient_marks()
        found.note_gradients()
        try:
            run()
            found.drop()
            return
        except Exception as error:  # as in training_step
            if not self._rerun.may_complete(error, marks):
                raise
        self._rerun.complete([tensor, *losses])
        self._drawing = None

    def gradient_marks(self) -> list[int] | None:
        """A number for each trained parameter that changes when its gradient goes to the other ranks; None where none does in the backward
        pass that begins.
        """
        return None

    def send_gradients(self, parameters: list[Parameter]) -> None:
        """These parameters' gradients, which no backward pass of this batch has added to, are complete: let them go to the other ranks."""

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Put the gradients of the batch's earlier parts in place before the last part's backward."""
        if not self._stepping:
            self._hooks.begin()
        if self._micro is not None and not self._stepping and not self._micro.gradients.watched:
            self._micro.gradients.take_up()
        self.meter.note(self, "backward")
        self._in_backward, self.running.place = True, BOTH if self._stepping else BACKWARD
        super().pre_backward(closure_loss)

    def post_backward(self, closure_loss: Tensor) -> None:
        """Gradients are complete; after those of the whole batch, draws don't belong to the batch any more."""
        super().post_backward(closure_loss)
        self._in_backward = False
        self.meter.note(self, "gradients")
        module = self._module
        if module.automatic_optimization and not self._stepping:
            self._drawing, self._arguments = False, ((), {})
            self.running.place = OPTIMIZER
            if self.running.before_optimizer is not None:
                self.running.before_optimizer()
            if self.running.found is not None:
                self.running.found.drop()

    # -- what ran ----------------------------------------------------------------------------------------------------------------------

    @cached_property
    def meter(self) -> Meter:
        """Measures what this rank uses."""
        return Meter(self.run_plan.devices[self._rank].id)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Measure time and memory at the boundary between two steps."""
        self.running.begun += 1
        self.meter.boundary(self, batch_idx)
        if self.gpu_limit is not None:
            self.gpu_limit.step(steps=int(batch_idx % self._trainer.accumulate_grad_batches == 0))
        split = self.completes_gradients and (self.splits or bool(self.run_plan.shared) or self._micro is not None)
        self._hooks = GradientHooks((self._in_order or trained(self._module)) if split else ())
        super().on_train_batch_start(batch, batch_idx)

    def on_validation_start(self) -> None:
        """An evaluation between two steps is no part of either."""
        self.meter.pause(self)
        super().on_validation_start()

    def on_train_end(self) -> None:
        """The last step is over."""
        self.meter.finish(self)
        super().on_train_end()

    @property
    def _module(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _trainer(self) -> Trainer:
        trainer: Trainer = self._module.trainer
        return trainer
