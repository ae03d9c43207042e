"""What a training step may change beside gradients: noted before it, and put back where it fails half-way.

Noted are the generators' states, what was logged, the metrics' states, the attributes that the step is known to change, and the buffers.
Buffers are rarely written: each one's version is noted, and a copy is made in the first step and of those that a step has written. Nothing
waits for a GPU. Before backward it is noted which gradients there are, so that it can be told which of them a backward pass that failed has
completed: autograd gives a parameter its gradient in one piece. Knows modules, metrics and Lightning's results; not why a step failed, nor
which engine runs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torchmetrics import Metric, MetricCollection

from lightning_autopar._lightning import Trainer
from lightning_autopar.exact.logs.metrics_over_ranks import metrics_of
from lightning_autopar.exact.logs.self_log import GlobalLogging
from lightning_autopar.exact.random import generator_states as rng
from lightning_autopar.exact.random.whole_batch_draws import GlobalDraws
from lightning_autopar.exact.step.attribute_rules import MISSING, PathRules, restored, rewrite, taken
from lightning_autopar.exact.step.kept_attributes import Place, places_of

#: The most bytes of buffers that are copied before a step.
COPIED_BYTES = 16 << 20
#: Of every tensor, whatever a subclass makes of the name.
GRAD: Any = torch._C.TensorBase.__dict__["grad"]


def own_gradient(parameter: Tensor) -> Tensor | None:
    """The gradient that lies in the parameter itself. One that FSDP2 has gathered shows its shard's in whole, for which all ranks meet."""
    gradient: Tensor | None = GRAD.__get__(parameter)
    return gradient


class StepState:
    """The state in which the running step began.

    Args:
        rules: of the attributes and variables that a training step changes.
    """

    def __init__(self, trainer: Trainer, rules: PathRules) -> None:
        self._trainer = trainer
        self._rules = rules
        self._names = tuple(dict.fromkeys(path[0] for path in rules))
        self._looked = False
        self._kept: dict[str, Place] = {}
        self._metrics: list[Metric] = []
        self._collections: list[MetricCollection] = []
        self._parameters: list[Parameter] = []
        self._gradients: list[tuple[Tensor | None, int]] = []
        self._collectives = 0
        #: Whether ranks have exchanged something in the running step, as far as :meth:`exchanges` has looked.
        self.exchanged = False
        self.generators: dict[str, Any] = {}
        self._places: list[tuple[dict[str, Tensor | None], str]] = []
        self._written: set[int] = set()
        self._copies_all = True
        self._noted: dict[str, Any] = {}
        self._buffers: list[tuple[Tensor | None, int, Tensor | None]] = []
        #: The generators' states, and the place in the plan of draws.
        self.draws: tuple[rng.RngState, int] = ({}, 0)

    def note(self, logging: GlobalLogging | None, draws: GlobalDraws | None, *, copy_all: bool = False) -> None:
        """A step begins.

        Args:
            logging: brings together what it logs; None where nothing has to.
            draws: makes its draws those of the whole batch; None where nothing has to.
            copy_all: whether every buffer is copied, whatever is known of it.
        """
        trainer = self._trainer
        connector = trainer._logger_connector
        if not self._looked or connector._first_loop_iter:
            self._look()
        results: Any = trainer._results
        self._collectives, self.exchanged = _collectives(), False
        self.draws = rng.capture(self.generators), 0 if draws is None else draws.place
        self._noted = {
            "fx": connector._current_fx,
            "results": {key: dict(result.__dict__) for key, result in results.items()},
            "logging": None if logging is None else logging.noted(),
            "metrics": [(metric, dict(metric.__dict__), _states(metric)) for metric in self._metrics],
            "groups": [(each, dict(each._groups), each._groups_checked, each._state_is_copy) for each in self._collections],
            "kept": [(place, self._taken(place, name)) for name, place in self._kept.items()],
            "versions": sum(parameter._version for parameter in self._parameters),
        }
        found = [held.get(name) for held, name in self._places]
        for index, (buffer, (before, version, _)) in enumerate(zip(found, self._buffers, strict=False)):
            if buffer is not None and (buffer is not before or _changed(buffer, version)):
                self._written.add(index)
        copied = copy_all or self._copies_all
        self._buffers = [
            (each, _version(each), each.detach().clone() if each is not None and (copied or index in self._written) else None)
            for index, each in enumerate(found)
        ]
        self._copies_all = False

    def exchanges(self) -> bool:
        """Whether this process has begun a collective since the step began; to be asked before what was logged is exchanged."""
        self.exchanged = _collectives() != self._collectives
        return self.exchanged

    def why_not(self) -> str | None:
        """Why what the step has changed can't be put back; None where it can."""
        if sum(parameter._version for parameter in self._parameters) != self._noted["versions"]:
            return "the step has written to parameters in its forward"
        for (_, name), (before, version, copy) in zip(self._places, self._buffers, strict=True):
            if copy is None and before is not None and _changed(before, version):
                return f"the step has written to the buffer {name!r}, for the first time"
        return None

    def put_back(self, logging: GlobalLogging | None, draws: GlobalDraws | None) -> None:
        """Make everything as it was when the step began. The arguments are those of :meth:`note`."""
        assert self.why_not() is None, "asked before"
        trainer, noted = self._trainer, self._noted
        results: Any = trainer._results
        for key in [key for key in results if key not in noted["results"]]:
            del results[key]
        for key, values in noted["results"].items():
            _replace(results[key].__dict__, values)
        trainer._logger_connector._current_fx = noted["fx"]
        if logging is not None and noted["logging"] is not None:
            logging.go_back(noted["logging"])
        for metric, values, states in noted["metrics"]:
            _replace(metric.__dict__, values)
            for name, (state, copy) in states.items():
                metric.__dict__[name] = state
                if isinstance(state, list):
                    state[:] = copy
                elif copy is not None:
                    rewrite(state, copy)
        for collection, groups, checked, is_copy in noted["groups"]:
            collection._groups, collection._groups_checked, collection._state_is_copy = groups, checked, is_copy
        for (space, name), before in noted["kept"]:
            if before is MISSING:
                space.pop(name, None)
            else:
                space[name] = restored(before)
        for (held, name), (before, version, copy) in zip(self._places, self._buffers, strict=True):
            held[name] = before
            if before is not None and _changed(before, version):
                assert copy is not None, "asked before"
                with torch.no_grad():
                    before.copy_(copy)
        rng.restore(self.draws[0], self.generators)
        if draws is not None:
            draws.begin(self.draws[1])

    def drop(self) -> None:
        """A forward or a backward pass has succeeded: hold no tensor for it any longer."""
        self._noted, self._gradients = {}, []
        self._buffers = [(buffer, version, None) for buffer, version, _ in self._buffers]

    def note_gradients(self) -> None:
        """A backward pass begins. Until :meth:`drop` the gradients are held that there are."""
        found = [own_gradient(parameter) for parameter in self._parameters]
        self._gradients = [(each, 0 if each is None else each._version) for each in found]

    def unfinished(self) -> tuple[list[Parameter], bool]:
        """After a backward pass that failed: the parameters to whose gradients it has added nothing, and whether some parameter had a
        gradient before that shares its memory with others', so that nobody can tell whether it was added to.
        """
        left, shared = [], False
        for parameter, (before, version) in zip(self._parameters, self._gradients, strict=True):
            now = own_gradient(parameter)
            shared = shared or (before is not None and before._is_view())
            if parameter.requires_grad and now is before and (now is None or now._version == version):
                left.append(parameter)
        return left, shared

    def _look(self) -> None:
        """Find what a step may change; again at each epoch's first batch."""
        module = self._trainer.lightning_module
        self._looked, self._buffers = True, []
        self._metrics = list(metrics_of(module))
        self._collections = [each for each in module.modules() if isinstance(each, MetricCollection)]
        self._parameters = [parameter for parameter in module.parameters() if not parameter.is_inference()]
        self.generators = rng.find_generators(module.named_modules())
        self._kept = places_of(module, self._names)
        places = [(child._buffers, name) for child in module.modules() if not isinstance(child, Metric) for name in child._buffers]
        # One that was made in inference mode can't be written to in a training step.
        self._places = [(held, name) for held, name in places if held[name] is None or not _of(held[name]).is_inference()]
        self._written.clear()
        sizes = sum(_of(held[name]).nbytes for held, name in self._places if held[name] is not None)
        self._copies_all = sizes <= COPIED_BYTES

    def _taken(self, place: Place, name: str) -> Any:
        space, key = place
        found = space.get(key, MISSING)
        return MISSING if found is MISSING else taken(found, (name,), self._rules)


def _collectives() -> int:
    """How many collectives this process has begun in all its groups."""
    groups: Any = dist.distributed_c10d._world.pg_map  # torch has no public list of them, nor a public count
    return sum(group._get_sequence_number_for_group() for group in groups)


def _version(tensor: Tensor | None) -> int:
    """Counts writes; a tensor of inference mode, such as a validation may put in a buffer's place, counts none."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def _changed(tensor: Tensor, version: int) -> bool:
    return tensor.is_inference() or tensor._version != version


def _of(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def _states(metric: Metric) -> dict[str, tuple[Any, Any]]:
    """A metric's states, each with a copy: of a list, which only grows, its items as they are."""
    found: dict[str, tuple[Any, Any]] = {}
    for name in metric._defaults:
        state = metric.__dict__.get(name)
        if isinstance(state, list):
            found[name] = state, list(state)
        elif isinstance(state, Tensor):
            found[name] = state, state.detach().clone()
    return found


def _replace(held: dict[str, Any], values: dict[str, Any]) -> None:
    held.clear()
    held.update(values)
