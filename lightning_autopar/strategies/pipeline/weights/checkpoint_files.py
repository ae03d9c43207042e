"""What a Lightning strategy does about weights, gradients and files where the module's stages lie on several ranks.

A mixin that comes after :class:`.EngineMixin` in an engine's bases. It joins :mod:`.gathered_weights` and :mod:`.clipping_norms` to
Lightning's interface. A module may also be built on one rank for all, and is made whole again on every rank. Knows the trainer, ranks and
absent tensors; not how stages run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_autopar._lightning_compat import bare_optimizer, optimizers_to_device
from lightning_autopar.exact.absent.absent_tensor import is_absent
from lightning_autopar.exact.step.initial_weights import random_states, set_random_states
from lightning_autopar.state import scratch_files as scratch
from lightning_autopar.state.checkpoint import OneFile, spread_metrics
from lightning_autopar.state.pretrained import shapes_only
from lightning_autopar.state.scratch_files import hand_back_pages
from lightning_autopar.strategies.base.process_group import refuse_one_rank
from lightning_autopar.strategies.pipeline.weights import gathered_weights as weights
from lightning_autopar.strategies.pipeline.weights.clipping_norms import SharedParameters, StageGradients
from lightning_autopar.strategies.pipeline.weights.gathered_weights import Group, Pipeline


class StagedState(OneFile):
    """Handles weights, gradients and checkpoint files of a module in stages."""

    #: Whether a rank has only its stages' weights and optimizer states.
    run_plan: Any
    _exit: ExitStack
    _pipeline: Pipeline | None = None
    _replica: int = 0
    _shared: SharedParameters | None = None
    _gradients: StageGradients | None = None
    _built_in: scratch.ScratchFile | None = None

    # -- what the engine calls ---------------------------------------------------------------------------------------------------------

    def join_stages(self, group: Group, replicas: Sequence[Sequence[int]]) -> None:
        """The module has its absent tensors and its optimizers; every rank calls it at the same time.

        Args:
            group: of this rank's pipeline; None stands for all ranks.
            replicas: every pipeline's global ranks, in the order of their first stages.
        """
        module = self._module
        self._pipeline = Pipeline.of(group, self.root_device)
        self._replica = [tuple(ranks) for ranks in replicas].index(self._pipeline.ranks)
        self._shared = SharedParameters(module, self._pipeline, replicas)
        self._exit.callback(self._shared.close)
        self._gradients = StageGradients(module, self._pipeline, [bare_optimizer(optimizer) for optimizer in self.optimizers])
        self._exit.callback(self._gradients.close)

    def sum_shared(self, gradients: MutableMapping[Any, Tensor]) -> None:
        """Add up tied parameters' gradients over the stages; every rank calls it once a backward, with that backward's gradients alone."""
        assert self._shared is not None
        self._shared.sum_gradients(gradients)

    def gradients_there(self) -> None:
        """A backward is over, and its gradients are where hooks look for them."""
        assert self._gradients is not None
        self._gradients.show()

    def gradients_hidden(self) -> AbstractContextManager[None]:
        """The context of code that uses all gradients: absent tensors have none there."""
        assert self._gradients is not None
        return self._gradients.hidden()

    # -- a module that no rank should build whole --------------------------------------------------------------------------------------

    @contextmanager
    def build_context(self) -> Iterator[None]:
        """Where ``configure_model`` builds a large module: the first rank builds it on disk, the others get its shapes."""
        if not self.run_plan.large:
            yield
            return
        if self._is_first:
            self._built_in = scratch.ScratchFile(self._scratch_folder)
            with scratch.parameters_in(self._built_in):
                yield
        else:
            with shapes_only():
                yield

    def originals(self) -> dict[str, Tensor]:
        """The tensors that the first rank has built, before it gives away other ranks' parts; empty elsewhere."""
        return tensors_of(self._module) if self.run_plan.large and self._is_first else {}

    def spread(self, originals: Mapping[str, Tensor]) -> None:
        """The module has its absent tensors: give each rank its part of what the first rank has built; every rank calls it."""
        module = self._module
        everyone = Pipeline.of(None, self.root_device)
        # Also if it was built before the fork: then every rank has values, and there is nothing to give.
        if self.run_plan.large and any(everyone.tell(any(tensor.is_meta for tensor in tensors_of(module).values()))):
            spread(module, originals, everyone)
        if self._built_in is not None:
            self._built_in.close()
            self._built_in = None

    @property
    def _is_first(self) -> bool:
        return int(getattr(self, "global_rank", 0)) == 0

    # -- files -------------------------------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole state dict on rank 0, the rank's own part with absent tensors elsewhere; a collective."""
        refuse_one_rank("the state dict was asked for")
        assert self._pipeline is not None
        with scratch.ScratchFile(self._scratch_folder) as room:
            return weights.whole_state_dict(self._module, self._pipeline, keep=self._replica == 0, scratch=room)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The optimizer's whole state on rank 0, the rank's own part elsewhere; a collective."""
        assert self._pipeline is not None
        with scratch.ScratchFile(self._scratch_folder) as room:
            return weights.whole_optimizer_state(bare_optimizer(optimizer), self._pipeline, keep=self._replica == 0, scratch=room)

    # -- afterwards --------------------------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Make the module whole and plain again on every rank, for code after the run in this process; a collective."""
        assert self._pipeline is not None
        make_whole(self._module, self._pipeline)
        optimizers_to_device(self.optimizers, torch.device("cpu"))


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, under each of their names."""
    return dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))


def spread(module: nn.Module, originals: Mapping[str, Tensor], everyone: Pipeline) -> None:
    """Give each rank its part of what only the first rank has built, one tensor at a time, and the random state after that.

    Args:
        module: with absent tensors. This rank's part is on the meta device; the first rank has it, in memory that will be freed.
        originals: all of the module's tensors by name, on the first rank; nothing elsewhere.
        everyone: the ranks of all pipelines.
    """
    first = everyone.place == 0
    fresh: dict[int, Any] = {}
    for child in module.modules():
        slots: dict[str, Any]
        for slots in (child._parameters, child._buffers):
            for key, tensor in slots.items():
                if tensor is None or is_absent(tensor) or not (first or tensor.is_meta):
                    continue
                if id(tensor) not in fresh:
                    values = tensor.detach().clone() if first else torch.empty_like(tensor, device="cpu")
                    fresh[id(tensor)] = _in_place_of(tensor, values)
                slots[key] = fresh[id(tensor)]
    made = {id(tensor) for tensor in fresh.values()}
    here = {name: tensor for name, tensor in _firsts(module).items() if id(tensor) in made and not first}
    wanted = everyone.tell(set(here))
    for name, tensor in (originals if first else here).items():
        if not first:
            everyone.receive(tensor.detach(), 0)
            continue
        for rank, names in enumerate(wanted):
            if name in names:
                everyone.send(tensor, rank)
        hand_back_pages()
    spread_metrics(module, first=first)
    dist.broadcast_object_list(states := [random_states(everyone.device)], src=0)
    set_random_states(states[0], everyone.device)


def make_whole(module: nn.Module, pipeline: Pipeline) -> None:
    """Fill every rank's absent tensors permanently, and make all parameters plain ones on the CPU; every rank must call it.

    Args:
        module: with absent tensors; which names are tied is the same on every rank.
    """
    tensors = _firsts(module)
    holders = pipeline.tell({name for name, tensor in tensors.items() if not is_absent(tensor)})
    fresh: dict[int, Any] = {}
    for name, tensor in tensors.items():
        ranks = [rank for rank, names in enumerate(holders) if name in names]
        assert ranks, f"no stage has {name!r}"
        if is_absent(tensor):
            values = torch.empty(tensor.shape, dtype=tensor.dtype)
            fresh[id(tensor)] = _in_place_of(tensor, values)
        else:
            values = tensor.detach()
            if isinstance(values, DTensor):
                values = values.full_tensor()
                fresh[id(tensor)] = _in_place_of(tensor, values.cpu())
        if len(ranks) < len(holders):
            pipeline.broadcast(values.contiguous(), ranks[0])
    for child in module.modules():
        slots: dict[str, Any]
        for slots in (child._parameters, child._buffers):
            for key, slot in slots.items():
                if id(slot) in fresh:
                    slots[key] = fresh[id(slot)]
    module.cpu()


def _firsts(module: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, each under the first of its names."""
    return dict(module.named_parameters()) | dict(module.named_buffers())


def _in_place_of(tensor: Tensor, values: Tensor) -> Tensor:
    """The new tensor, as a parameter where the old one is a parameter."""
    return nn.Parameter(values, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values
