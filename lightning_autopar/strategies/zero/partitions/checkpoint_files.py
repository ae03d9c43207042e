"""What a Lightning strategy does about weights, optimizer states and files where ZeRO has partitioned them.

A mixin that comes after :class:`.EngineMixin` in an engine's bases. It joins :mod:`.gathered_state` and :mod:`.module` to Lightning's
interface, and to that of snapshots. Knows the trainer, ranks and parts; not how a step runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lightning_autopar._lightning_compat import bare_optimizer
from lightning_autopar.state import scratch_files as scratch
from lightning_autopar.state.checkpoint import OneFile
from lightning_autopar.state.flat_parts import FlatPart
from lightning_autopar.strategies.base.process_group import refuse_one_rank
from lightning_autopar.strategies.base.run_plan import RunPlan
from lightning_autopar.strategies.zero import deepspeed_compat as doorway
from lightning_autopar.strategies.zero.partitions import gathered_state as partitioned
from lightning_autopar.strategies.zero.partitions.module import Traces, gather_again, make_whole, parts
from lightning_autopar.strategies.zero.partitions.optimizer_pieces import ParameterPart, fragment_parts
from lightning_autopar.strategies.zero.partitions.parameter_views import ParameterViews


class ZeroFiles(OneFile):
    """Reads and writes weights and optimizer states of a module under ZeRO: whole and plain, in one file."""

    # What the engine provides.
    pieces: list[list[ParameterPart]]
    weights_changed: Any
    deepspeed_engine: Any
    run_plan: RunPlan
    _exit: ExitStack
    _traces: Traces | None = None
    _watch: ParameterViews | None = None

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Where ``configure_model`` builds the module: a large one on disk, of which each rank then takes its part. With Lightning,
        DeepSpeed would partition each layer as soon as it is built (``zero.Init``), before the user's optimizer exists.
        """
        if not self.run_plan.large:
            yield
            return
        with scratch.ScratchFile(self._scratch_folder) as room, scratch.parameters_in(room):
            yield

    def init_deepspeed(self) -> None:
        """Record the module as it is before DeepSpeed."""
        traces = Traces(self._module)
        super().init_deepspeed()  # type: ignore[misc]  # the next class' in the engine's bases
        traces.noted()
        self._traces = traces
        self._watch = ParameterViews(self._module, self.weight_parts, lambda: doorway.forget_order(self.deepspeed_engine))
        self._exit.callback(self._watch.close)

    def own_attributes(self) -> dict[int, set[str]]:
        """What DeepSpeed has put on each module, by the module's id."""
        return {} if self._traces is None else self._traces.attributes()

    # -- what the user's code sees -----------------------------------------------------------------------------------------------------

    def inside(self, *, step: bool = False) -> AbstractContextManager[None]:
        """The context of the user's steps and what belongs to them."""
        return nullcontext() if self._watch is None else self._watch.inside(step=step)

    def handling_parts(self) -> AbstractContextManager[None]:
        """The context of code that handles the parts of parameters, rather than whole parameters."""
        return nullcontext() if self._watch is None else self._watch.handling()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's step, with parameters that DeepSpeed gathers."""
        with self.inside(step=True):
            return super().training_step(*args, **kwargs)

    def backward_parts(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """The backward pass, without the hooks around it."""
        with self.inside():
            super().backward_parts(loss, *args, **kwargs)  # type: ignore[misc]  # the next class' in the engine's bases

    def step_parts(self) -> None:
        """The optimizer's step, with DeepSpeed's work around it."""
        with self.inside():
            super().step_parts()  # type: ignore[misc]  # as above

    # -- parts -------------------------------------------------------------------------------------------------------------------------

    def weight_parts(self) -> dict[int, FlatPart]:
        """This rank's part of each partitioned parameter, by its id."""
        return {id(part.parameter): part for part in parts(self._module)}

    def optimizer_parts(self) -> dict[int, FlatPart]:
        """This rank's part of each trained parameter, by the id of the tensor that stands for it in the user's optimizer."""
        return fragment_parts((piece for group in self.pieces for piece in group), self.weight_parts())

    def parts_loaded(self) -> None:
        """To be called after writes to the parts of :meth:`weight_parts`, or to whole parameters; a collective."""
        with self.handling_parts():
            gather_again(self._module)
            if self.optimizers:
                self.weights_changed()

    # -- files -------------------------------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole state dict on rank 0, nothing elsewhere; a collective."""
        refuse_one_rank("the state dict was asked for")
        with self.handling_parts(), scratch.ScratchFile(self._scratch_folder) as room:
            return partitioned.whole_state_dict(
                self._module, self.weight_parts(), keep=self.is_global_zero, scratch=room, device=self._between
            )

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The optimizer's whole state on rank 0, nothing elsewhere; a collective."""
        with self.handling_parts(), scratch.ScratchFile(self._scratch_folder) as room:
            return partitioned.whole_optimizer_state(
                bare_optimizer(optimizer), self.optimizer_parts(), keep=self.is_global_zero, scratch=room, device=self._between
            )

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Take this rank's part of the checkpoint's weights."""
        with self.handling_parts():
            partitioned.load_state_dict(self._module, self.weight_parts(), checkpoint["state_dict"], strict=strict)
            if self.optimizers:
                self.weights_changed()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take this rank's part of the checkpoint's optimizer states."""
        own = self.optimizer_parts()
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            partitioned.load_optimizer_state(bare_optimizer(optimizer), own, state)

    @property
    def _between(self) -> torch.device:
        """The device from which the group's backend takes tensors."""
        return self.root_device

    # -- afterwards --------------------------------------------------------------------------------------------------------------------

    def let_go(self) -> None:
        """Take DeepSpeed off module and optimizers, whose weights and states have been handed over; no communication."""
        by_fragment = {id(piece.fragment): piece.parameter for group in self.pieces for piece in group}
        for optimizer in self.optimizers:
            bare = bare_optimizer(optimizer)
            for group in bare.param_groups:
                group["params"] = [by_fragment.get(id(parameter), parameter) for parameter in group["params"]]
            bare.state.clear()
        if self._traces is not None:
            self.deepspeed_engine.destroy()
            self._traces.undo()
            self._traces = None

    def release(self) -> None:
        """Make the module whole and plain again on every rank, for code after the run in this process; a collective."""
        make_whole(self._module)
        self.let_go()
