"""What a Lightning strategy does about weights, optimizer states and files where ZeRO has partitioned them.

A mixin that comes after :class:`.EngineMixin` in an engine's bases joins :mod:`.module` to Lightning's interface, and to that of snapshots.

Weights and states are gathered whole for a file, and loaded by each rank in part. A rank has a range of each parameter's elements
(:class:`lightning_autopar.state.flat_parts.FlatPart`), and the optimizer's states for those. At stage 3 that holds for the weights as well;
at lower stages every rank has all weights. One tensor at a time is whole, on rank 0, in the pages of a file. Knows the trainer, ranks and
parts, and of DeepSpeed only the parts; not how a step runs.
"""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_autopar._lightning_compat import bare_optimizer
from lightning_autopar.state import checkpoint
from lightning_autopar.state import scratch_files as scratch
from lightning_autopar.state.checkpoint import OneFile
from lightning_autopar.state.flat_parts import FlatPart
from lightning_autopar.state.scratch_files import ScratchFile, hand_back_pages
from lightning_autopar.strategies.base.process_group import refuse_one_rank
from lightning_autopar.strategies.base.run_plan import RunPlan
from lightning_autopar.strategies.zero import deepspeed_compat as doorway
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
            return whole_state_dict(self._module, self.weight_parts(), keep=self.is_global_zero, scratch=room, device=self._between)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The optimizer's whole state on rank 0, nothing elsewhere; a collective."""
        with self.handling_parts(), scratch.ScratchFile(self._scratch_folder) as room:
            return whole_optimizer_state(
                bare_optimizer(optimizer), self.optimizer_parts(), keep=self.is_global_zero, scratch=room, device=self._between
            )

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Take this rank's part of the checkpoint's weights."""
        with self.handling_parts():
            load_state_dict(self._module, self.weight_parts(), checkpoint["state_dict"], strict=strict)
            if self.optimizers:
                self.weights_changed()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take this rank's part of the checkpoint's optimizer states."""
        own = self.optimizer_parts()
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            load_optimizer_state(bare_optimizer(optimizer), own, state)

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


@dataclass(frozen=True, kw_only=True)
class _Held:
    start: int
    count: int
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class _Value:
    """Something that isn't partitioned, such as a count of steps."""

    value: Any


# -- gathered --------------------------------------------------------------------------------------------------------------------------


def whole_state_dict(
    module: nn.Module, parts: Mapping[int, FlatPart], *, keep: bool, scratch: ScratchFile, device: torch.device
) -> dict[str, Any]:
    """The module's state dict on rank 0, whole and on the CPU, an empty one elsewhere; every rank must call it.

    Args:
        parts: of the parameters that are partitioned, by id.
        keep: whether this rank is rank 0, and wants the result.
        scratch: where what is put together lies.
        device: what tensors travel between.
    """
    if not parts:
        return checkpoint.whole_state_dict(module, keep=keep)
    parameters = [parameter for parameter in module.parameters() if id(parameter) in parts]
    flats = [parts[id(parameter)] for parameter in parameters]
    everyones = _tell([_Held(start=part.start, count=part.flat.numel(), dtype=part.flat.dtype) for part in flats])
    whole: dict[int, Tensor] = {}
    for parameter, part, helds in zip(parameters, flats, zip(*everyones, strict=True), strict=True):
        tensor = _gather(part.flat, part.shape, helds, keep=keep, scratch=scratch, device=device)
        if tensor is not None:
            whole[id(parameter)] = tensor
    if not keep:
        return {}
    with _holding(parameters, whole):  # the user's hooks may look at them
        return checkpoint.whole_state_dict(module, keep=True)


@contextmanager
def _holding(parameters: Sequence[nn.Parameter], whole: Mapping[int, Tensor]) -> Iterator[None]:
    """While open, the parameters are whole tensors."""
    before = [parameter.data for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.data = whole[id(parameter)]
        yield
    finally:
        for parameter, data in zip(parameters, before, strict=True):
            parameter.data = data


def whole_optimizer_state(
    optimizer: Optimizer, parts: Mapping[int, FlatPart], *, keep: bool, scratch: ScratchFile, device: torch.device
) -> dict[str, Any]:
    """The optimizer's state dict on rank 0, keyed by position and whole as on one device; every rank must call it.

    Args:
        optimizer: the user's, which has parts in its groups.
        parts: of the tensors in its groups, by id; those that aren't partitioned are missing.
    """
    state = optimizer.state_dict()
    own: dict[int, dict[str, Any]] = {}
    placed = {position: parts.get(id(each)) for position, each in enumerate(_parameters(optimizer))}
    for position, values in state["state"].items():
        part = placed[position]
        if part is not None and not part.flat.numel():
            continue
        own[position] = {
            name: _Held(start=part.start, count=value.numel(), dtype=value.dtype)
            if part is not None and part.is_like(value)
            else _Value(value=value.detach().cpu().clone() if isinstance(value, Tensor) else value)
            for name, value in values.items()
        }
    everyones = _tell(own)
    whole: dict[int, dict[str, Any]] = {}
    for position in sorted({position for each in everyones for position in each}):
        first = next(each[position] for each in everyones if position in each)
        part = placed[position]
        whole[position] = {}
        for name, described in first.items():
            if isinstance(described, _Value):
                whole[position][name] = described.value
                continue
            assert part is not None
            nothing = _Held(start=0, count=0, dtype=described.dtype)
            helds = [each[position][name] if position in each else nothing for each in everyones]
            flat = state["state"][position][name] if position in own else part.flat.new_empty(0, dtype=described.dtype)
            whole[position][name] = _gather(flat, part.shape, helds, keep=keep, scratch=scratch, device=device)
    return {**state, "state": whole} if keep else {}


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _tell(mine: Any) -> list[Any]:
    """All ranks' values; a collective."""
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    return everyones


def _gather(
    flat: Tensor, shape: tuple[int, ...], helds: Sequence[_Held], *, keep: bool, scratch: ScratchFile, device: torch.device
) -> Tensor | None:
    """A tensor on rank 0, from the parts that the ranks have of it."""
    rank = dist.get_rank()
    if rank != 0:
        if helds[rank].count:
            dist.send(flat.detach().to(device).contiguous(), dst=0)
        return None
    assert keep
    whole = scratch.tensor(shape, helds[0].dtype)
    elements = whole.view(-1)
    for source, held in enumerate(helds):
        if not held.count:
            continue
        place = elements.narrow(0, held.start, held.count)
        if source == 0:
            place.copy_(flat.detach())
            continue
        room = place if device.type == "cpu" else torch.empty_like(place, device=device)
        dist.recv(room, src=source)
        if room is not place:
            place.copy_(room)
    hand_back_pages()
    return whole


# -- loaded ----------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class _Place:
    """The place of a parameter or buffer in a module, and what stands there for it while a state dict is loaded.

    Args:
        tensors: its parameters or its buffers.
        path: the tensor's in the root's state dict.
        stand_in: what torch replaces.
    """

    child: nn.Module
    tensors: dict[str, Any]
    path: str
    name: str
    tensor: Tensor
    stand_in: Tensor

    def put_back(self) -> None:
        """Put the tensor back as torch replaced it: by ``__setattr__``, which may update lists of parameters (as in RNNs)."""
        if self.tensors.get(self.name) is not self.stand_in:
            setattr(self.child, self.name, self.tensor)
        self.tensors[self.name] = self.tensor


def load_state_dict(module: nn.Module, parts: Mapping[int, FlatPart], state_dict: Mapping[str, Any], *, strict: bool) -> None:
    """Load this rank's part of a whole state dict; from a mapped file it reads only that part.

    The module's own ways of loading (renamed keys, checks of shapes) run on stand-ins without memory, which torch replaces by what is in
    the state dict.

    Args:
        strict: as for ``Module.load_state_dict``.

    Raises:
        RuntimeError: as ``Module.load_state_dict`` does, on missing or unexpected keys or shapes that differ, where ``strict``; where a
            module writes into its parameters when it loads, rather than leave that to torch; where it keeps the loaded tensors, and would
            go on using them in place of its parameters.
    """
    if not parts:
        module.load_state_dict(state_dict, strict=strict)
        return
    _refuse_kept(_load(module, parts, state_dict, strict=strict))


def _load(
    module: nn.Module, parts: Mapping[int, FlatPart], state_dict: Mapping[str, Any], *, strict: bool
) -> list[tuple[str, weakref.ref[Tensor]]]:
    """Load; returns what stood in the tensors' places meanwhile, which nothing should refer to any more."""
    places: list[_Place] = []
    for path, child in module.named_modules():
        kinds: tuple[dict[str, Any], ...] = (child._parameters, child._buffers)
        for tensors in kinds:
            for name, tensor in tensors.items():
                if tensor is not None and (id(tensor) in parts or tensors is kinds[1]):
                    stand_in = _stand_in(tensor, parts.get(id(tensor)))
                    its_path = f"{path}.{name}".lstrip(".")
                    places.append(_Place(child=child, tensors=tensors, path=its_path, name=name, tensor=tensor, stand_in=stand_in))
    try:
        for place in places:
            place.tensors[place.name] = place.stand_in
        missing = set(module.load_state_dict(_own_objects(state_dict), strict=strict, assign=True).missing_keys)
        found = [place.tensors[place.name] for place in places]
    finally:
        for place in places:
            place.put_back()
    with torch.no_grad():
        for place, loaded in zip(places, found, strict=True):
            _take(place, parts.get(id(place.tensor)), loaded, is_given=place.path in state_dict and place.path not in missing)
    return [
        (place.path, weakref.ref(each))
        for place, loaded in zip(places, found, strict=True)
        for each in (place.stand_in, loaded)
        if each is not None
    ]


def _own_objects(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same tensors, as new objects to which nothing else refers."""
    own = OrderedDict((name, value.detach() if isinstance(value, Tensor) else value) for name, value in state_dict.items())
    if (versions := getattr(state_dict, "_metadata", None)) is not None:
        own._metadata = versions  # type: ignore[attr-defined]  # torch's way of telling modules' versions
    return own


def _take(place: _Place, part: FlatPart | None, loaded: Tensor | None, *, is_given: bool) -> None:
    """Write the loaded values into the tensor that they are for; of a partitioned one, only this rank's part."""
    tensor, stand_in = place.tensor, place.stand_in
    if part is None:
        if loaded is not None and loaded is not stand_in:
            tensor.copy_(loaded)
        elif stand_in._version:
            tensor.copy_(stand_in)
        return
    if loaded is None or loaded is stand_in:
        if stand_in._version or is_given:
            raise RuntimeError(
                f"{place.path} is loaded by its module's own _load_from_state_dict, which can't write into a parameter that is "
                "partitioned; load the checkpoint under a plan without ZeRO-3"
            )
        return
    part.flat.copy_(part.cut(loaded))
    if tensor.shape == loaded.shape and tensor.numel():  # gathered at the moment
        tensor.copy_(loaded)


def _refuse_kept(passed: Sequence[tuple[str, weakref.ref[Tensor]]]) -> None:
    """Refuse to go on if a module still has what stood in a parameter's place: it would be used but not trained."""
    if any(reference() is not None for _, reference in passed):
        gc.collect()
    for path, reference in passed:
        if reference() is not None:
            raise RuntimeError(
                f"the module keeps {path} elsewhere as well since the checkpoint has been loaded (in a hook on loading, or in its own "
                "__setattr__), and would use what it keeps rather than the parameter that is trained; load the checkpoint under a plan "
                "without ZeRO-3"
            )


def _stand_in(tensor: Tensor, part: FlatPart | None) -> Tensor:
    """A tensor with the whole tensor's shape; for a buffer, also with its values."""
    if part is None:
        return tensor.clone()
    return nn.Parameter(torch.empty(part.shape, dtype=tensor.dtype, device="meta"), requires_grad=tensor.requires_grad)


def load_optimizer_state(optimizer: Optimizer, parts: Mapping[int, FlatPart], state: Mapping[str, Any]) -> None:
    """Load this rank's part of an optimizer's whole state dict.

    Args:
        state: whole, keyed by position.

    Raises:
        ValueError: if a parameter's state has another shape than the parameter.
    """
    parameters = _parameters(optimizer)
    own: dict[int, Any] = {}
    for position, values in state["state"].items():
        part = parts.get(id(parameters[position])) if isinstance(position, int) and position < len(parameters) else None
        if part is None:
            own[position] = values  # load_state_dict says what is wrong with it
        elif part.flat.numel():
            own[position] = {name: _own(value, part, name) for name, value in values.items()}
    optimizer.load_state_dict({**state, "state": own})


def _own(value: Any, part: FlatPart, name: str) -> Any:
    if not isinstance(value, Tensor):
        return value
    if part.has_all_of(name, value.shape):
        return part.cut(value).clone()  # the file needn't stay
    if value.ndim:
        raise ValueError(f"the checkpoint's {name!r} has the shape {tuple(value.shape)}, but its parameter has {part.shape}")
    return value.clone()
