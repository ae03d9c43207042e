"""Several pipelines side by side: one mesh of replicas and stages, and each stage's gradients averaged over the replicas.

A stage's parameters are whole on every replica, or sharded over the replicas by FSDP2. Knows torch's pipeline stages, a plan and which
parameters a stage uses; not how a stage runs, nor Lightning.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_autopar.plans import Plan

#: The mesh's dimensions. Rank ``r`` is in replica ``r // ranks``, and has place ``r % ranks`` in its pipeline.
DIMENSIONS = ("replicas", "stages")
#: Small gradients are averaged together, so many bytes at a time, like DDP's ``bucket_cap_mb``.
BUCKET_BYTES = 25 * 1024**2
#: A gradient of so many bytes is averaged in place, without a copy: sending it takes longer than starting to.
LARGE_BYTES = 1024**2


class Replicas:
    """The pipelines of a plan, and this rank's place among them.

    Where parameters are whole on every replica, a stage's gradients are averaged as soon as its last backward is over: stages that finish
    early do so while others still run. DistributedDataParallel, which torch's schedules know, too, isn't used, since

    - a parameter that two of a rank's stages use would be averaged by both of their reducers;
    - its buckets are a second copy of the gradients, or the gradients are views of them, which the next step overwrites if a step's
      gradients are kept.

    Every rank makes one, at the same time: it sets up process groups.
    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self._plan = plan
        self._device = device
        #: The mesh of replicas and stages; None with one replica, whose group is the whole world.
        self.mesh: DeviceMesh | None = None
        if plan.replicas > 1:
            self.mesh = init_device_mesh(device.type, (plan.replicas, plan.devices_per_replica), mesh_dim_names=DIMENSIONS)
        self._parts: list[StageParts] = []
        self._underway: list[_Average] = []

    @property
    def pipeline(self) -> dist.ProcessGroup | None:
        """The ranks of this rank's pipeline; None stands for all ranks."""
        return None if self.mesh is None else self.mesh.get_group("stages")

    @property
    def data(self) -> dist.ProcessGroup | None:
        """The ranks that have this rank's stages; None where there is one replica."""
        return None if self.mesh is None else self.mesh.get_group("replicas")

    @property
    def shards(self) -> bool:
        """Whether parameters are sharded over the replicas."""
        return self.mesh is not None and bool(self._plan.shard)

    def prepare(self, stages: Sequence[nn.Module], module: nn.Module, names: Sequence[Collection[str]]) -> list[StageParts]:
        """Make the submodule of each of this rank's stages for a ``PipelineStage``; sharded where the plan says so.

        Args:
            stages: those of this rank, in the order of the pipeline. They run parts of the module.
            module: the root, shared by the stages.
            names: FQNs of the parameters that each stage uses, including those that another rank's stage uses, too.

        Raises:
            ValueError: if parameters are to be sharded, and two of this rank's stages use one.
        """
        if self.shards:
            _refuse_shared(module, names)
        self._parts = [StageParts(stage, module, own) for stage, own in zip(stages, names, strict=True)]
        if self.shards:
            assert self.mesh is not None
            for parts in self._parts:
                parts.shard(self._plan.shard, self.mesh["replicas"])
        return self._parts

    def reduce(self, parts: StageParts) -> None:
        """The last backward of a stage is over: begin to average its gradients. torch averages those of shards, after the missing ones were
        added here.

        To be called before the ``perform_reduce_grad`` of torch's stage. All replicas must call it for their stages in the same order, as
        the schedule does.
        """
        if self.data is None:
            return
        later = self._parts[: self._parts.index(parts)]  # the earlier a stage, the later its last backward
        theirs = {id(parameter) for other in later for parameter in other.parameters()}
        mine = [name for name, parameter in parts.named_parameters() if parameter.requires_grad and id(parameter) not in theirs]
        self._underway.append(_Average(parts, mine, self.data, 0 if self.shards else self._plan.replicas))

    @contextmanager
    def step(self) -> Iterator[None]:
        """The context of a schedule's step, or of a forward alone: afterwards gradients are averages, parameters shards."""
        try:
            self._gather()
            yield
            for average in self._underway:
                average.wait()
            self.reshard()
            for average in self._underway:
                average.finish()
        finally:
            self._underway.clear()

    def _gather(self) -> None:
        """Gather all parameters. If a rank has several stages, torch's schedules do so when a stage's turn comes."""
        if self.shards and len(self._parts) == 1:
            handles = [unit.unshard(async_op=True) for unit in self._parts[0].modules() if isinstance(unit, FSDPModule)]
            for handle in handles:
                if handle is not None:
                    handle.wait()

    def reshard(self) -> None:
        """Put all parameters back into shards; no communication."""
        for parts in self._parts:
            for unit in parts.modules():
                if isinstance(unit, FSDPModule):
                    unit.reshard()


def _refuse_shared(module: nn.Module, names: Sequence[Collection[str]]) -> None:
    """Refuse parameters of two stages of a rank: the schedule reshards one's, even if the other needs them."""
    users: dict[int, int] = {}
    for stage, own in enumerate(names):
        for name in sorted(own):
            if users.setdefault(id(module.get_parameter(name)), stage) != stage:
                raise ValueError(
                    f"two stages of one rank use the parameter {name!r}, which can't be sharded over the replicas then; "
                    "choose other cuts, schedule '1f1b', or replicas that aren't sharded"
                )


class StageParts(nn.Module):
    """A stage as torch's schedules see it: it has the stage's forward, and those of the module's parameters that the stage uses.

    The stages of a rank share one LightningModule, and so would be each other's children: FSDP2 would take all of a rank's parameters for
    each stage's. Here a stage has a child for each submodule that holds some of its parameters, which shares that submodule's table of
    parameters: what FSDP2 puts into the child, the module has. The user's own modules aren't wrapped, and get no hooks: gathering is left
    to the schedules and to :class:`Replicas`.

    Args:
        names: FQNs of the parameters that the stage uses; those that are tied to one of them are included.
    """

    def __init__(self, stage: nn.Module, module: nn.Module, names: Collection[str]) -> None:
        super().__init__()
        self._hidden = (stage, module)  # not registered as children, as they hold the whole module
        self._tables: dict[str, dict[str, nn.Parameter | None]] = {
            prefix: cast(dict[str, nn.Parameter | None], holder._parameters)
            for prefix, holder in module.named_modules(remove_duplicate=False)
        }
        used = {id(module.get_parameter(name)) for name in names}
        self.names = frozenset(name for name, parameter in module.named_parameters(remove_duplicate=False) if id(parameter) in used)
        self.units = nn.ModuleList([self._unit(self.names)])

    def _unit(self, names: Collection[str]) -> nn.Module:
        """The child for one of the modules that hold the parameters."""
        unit = nn.Module()
        for number, prefix in enumerate(sorted({name.rpartition(".")[0] for name in names})):
            holder = nn.Module()
            holder._parameters = self._tables[prefix]
            unit.add_module(str(number), holder)
        return unit

    def forward(self, *received: Any, **kwargs: Any) -> Any:
        """The stage's."""
        return self._hidden[0](*received, **kwargs)

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """The stage's parameters, each once unless asked otherwise, as they are now: while FSDP2 has gathered them, the gathered ones."""
        seen: set[int] = set()
        for name in sorted(self.names) if recurse else ():
            owner, _, leaf = name.rpartition(".")
            parameter = self._tables[owner].get(leaf)
            if parameter is not None and not (remove_duplicate and id(parameter) in seen):
                seen.add(id(parameter))
                yield f"{prefix}.{name}" if prefix else name, parameter

    def get_parameter(self, target: str) -> nn.Parameter:
        """One of the stage's parameters, as it is now."""
        owner, _, leaf = target.rpartition(".")
        parameter = self._tables[owner][leaf]
        assert parameter is not None, target
        return parameter

    def shard(self, fqns: Collection[str], mesh: DeviceMesh) -> None:
        """Call ``fully_shard`` on the stage's part of each of the named modules, then on the rest.

        A parameter that is tied across several of them belongs to the rest. Gathered parameters are kept until the schedule has averaged
        the gradients: a stage runs many micro-batches. The parameters before sharding are emptied: the survey of the module before the run
        still refers to them, and they would keep the whole module on the device.
        """
        before = list(self.parameters())
        homes: dict[int, set[str]] = {}
        for name in self.names:
            home = next((fqn for fqn in fqns if name.startswith(f"{fqn}.")), "")
            homes.setdefault(id(self.get_parameter(name)), set()).add(home)
        sharing: dict[str, set[str]] = {fqn: set() for fqn in (*fqns, "")}
        for name in self.names:
            home, *more = homes[id(self.get_parameter(name))]
            sharing["" if more else home].add(name)
        _, root = self._hidden
        self.units = nn.ModuleList()
        for names in filter(None, sharing.values()):
            unit, own = self._unit(names), {id(self.get_parameter(name)) for name in names}
            others = {parameter for parameter in root.parameters() if id(parameter) not in own}
            fully_shard(unit, mesh=mesh, reshard_after_forward=False, ignored_params=others)
            self.units.append(unit)
        fully_shard(self, mesh=mesh, reshard_after_forward=False)
        for parameter in before:
            parameter.data = parameter.data.new_empty(0)


class _Average:
    """Averages some of a stage's gradients over its replicas in the background. If one replica's samples left out a parameter and another's
    didn't, its gradient counts as zero there. A parameter that no replica used has no gradient afterwards, so that an optimizer skips it as
    on one device. Small gradients are sent together.

    Args:
        names: of its parameters, the same in every replica.
        size: how many they are; 0 where FSDP2 does the averaging, which needs a gradient of every parameter.
    """

    def __init__(self, parts: StageParts, names: Sequence[str], group: dist.ProcessGroup, size: int) -> None:
        self._parts, self._names = parts, names
        parameters = [parts.get_parameter(name) for name in names]
        self._missing = [index for index, parameter in enumerate(parameters) if parameter.grad is None]
        self._works: list[Any] = []
        self._copies: list[tuple[Tensor, list[Tensor]]] = []
        if not parameters:
            return
        gradients = [_gradient(name, parameter) for name, parameter in zip(names, parameters, strict=True)]
        used = torch.ones(len(names))
        used[self._missing] = 0.0
        self._used = used.to(gradients[0].device, non_blocking=True)
        self._works.append(dist.all_reduce(self._used, group=group, async_op=True))
        for bucket in _buckets(gradients) if size else ():
            alone = len(bucket) == 1 and bucket[0].is_contiguous()
            flat = bucket[0] if alone else torch.cat([gradient.flatten() for gradient in bucket])
            flat.div_(size)  # before the sum, as DDP does, so that it stays in the range of half precision
            self._works.append(dist.all_reduce(flat, group=group, async_op=True))
            if not alone:
                self._copies.append((flat, bucket))

    def wait(self) -> None:
        """Wait until all is sent, and the parameters have their averages."""
        for work in self._works:
            work.wait()
        for flat, bucket in self._copies:
            for gradient, part in zip(bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True):
                gradient.copy_(part.view(gradient.shape))
        self._copies.clear()

    def finish(self) -> None:
        """Remove the gradients that no replica had; the parameters are those in the optimizer."""
        if not self._missing:
            return
        used = self._used.tolist()
        for index in self._missing:
            if not used[index]:
                self._parts.get_parameter(self._names[index]).grad = None


def _gradient(name: str, parameter: nn.Parameter) -> Tensor:
    """The parameter's gradient, zero where it has none.

    Raises:
        RuntimeError: if it is sparse.
    """
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    if parameter.grad.layout != torch.strided:
        raise RuntimeError(
            f"the gradient of {name!r} is sparse, which the replicas of a pipeline can't average; set sparse=False on the embedding, or "
            "run with allow=['single', 'ddp']"
        )
    return parameter.grad


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Gradients of one type that are sent together; a large one is sent alone, without a copy."""
    waiting: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        if gradient.nbytes >= LARGE_BYTES:
            yield [gradient]
            continue
        bucket = waiting.setdefault(gradient.dtype, [])
        if sum(one.nbytes for one in bucket) + gradient.nbytes > BUCKET_BYTES:
            yield bucket
            waiting[gradient.dtype] = bucket = []
        bucket.append(gradient)
    yield from waiting.values()
