"""Parameters that several stages use: their gradients are added up over the stages, so that their copies stay one.

A tied embedding, say, which the first stage looks tokens up in and the last one multiplies by: each stage has a gradient of its own use,
and one device would have the sum. Every copy then takes the same step from the same values, and stays equal to the others bit by bit.
Knows ranks, holes and gradients; no plan, no trainer.

When: once a backward, what this backward gave alone. Not on what gradients have come to when the optimizer steps: a sum that lies in
``.grad`` already would be added up again by the next one wherever gradients aren't set to zero in between, which is the user's to say
(accumulation, ``optimizer_zero_grad``, a step left out). And ``on_after_backward`` finds what it would find on one device.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_autopar.strategies.staged.hole import is_hole
from lightning_autopar.strategies.staged.travel import Group, Pipeline


class SharedParameters:
    """The parameters that stages on several ranks use, and the process groups of those ranks.

    Every rank of all replicas must make one at the same time.

    Args:
        module: with holes.
        pipeline: the ranks that it is spread over.
        replicas: the global ranks of every replica, this one's among them, in the pipeline's order.
    """

    def __init__(self, module: nn.Module, pipeline: Pipeline, replicas: Sequence[Sequence[int]]) -> None:
        self._module = module
        self._pipeline = pipeline
        holders = pipeline.tell({name for name, parameter in module.named_parameters() if not is_hole(parameter)})
        #: The places in the pipeline that hold a parameter, by its first name, where there are several.
        self.places: dict[str, tuple[int, ...]] = {}
        for name, _ in module.named_parameters():
            places = tuple(place for place, names in enumerate(holders) if name in names)
            if len(places) > 1:
                self.places[name] = places
        self._groups: dict[tuple[int, ...], Group] = {}
        for places in sorted(set(self.places.values())):  # all ranks make all groups, in one order
            if len(places) == len(pipeline.ranks):
                self._groups[places] = pipeline.group
                continue
            for ranks in replicas:
                group = dist.new_group([ranks[place] for place in places])
                if tuple(ranks) == pipeline.ranks:
                    self._groups[places] = group

    def close(self) -> None:
        """Leave the groups that were made."""
        for places, group in self._groups.items():
            if len(places) < len(self._pipeline.ranks) and self._pipeline.place in places:
                dist.destroy_process_group(group)
        self._groups.clear()

    def sum_gradients(self, gradients: MutableMapping[Any, Tensor]) -> None:
        """Add up what one backward gave on each stage, in place; every rank must call it, once a backward.

        Args:
            gradients: by parameter, of this backward alone. A parameter that got one on another stage only has one afterwards.
        """
        parameters = dict(self._module.named_parameters())
        underway: list[Any] = []
        for places, group in self._groups.items():
            if self._pipeline.place not in places:
                continue
            shared = [parameters[name] for name in self.places if self.places[name] == places]
            kinds = self._kinds([gradients.get(parameter) for parameter in shared], group)
            for parameter, (dense, sparse) in zip(shared, kinds, strict=True):
                if dense or sparse:
                    underway.append(self._sum(parameter, gradients, group, sparse=not dense))
        for finish in underway:
            finish()

    def _kinds(self, gradients: Sequence[Tensor | None], group: Group) -> list[list[int]]:
        """On how many ranks there is a dense gradient of each parameter, and on how many a sparse one.

        What is dense here is dense for all: where that holds of each, this rank needn't wait for what the others say.
        """
        flags = [
            [int(each is not None and each.layout == torch.strided), int(each is not None and each.layout != torch.strided)]
            for each in gradients
        ]
        counted = torch.tensor(flags, dtype=torch.int32).to(self._pipeline.device, non_blocking=True)
        dist.all_reduce(counted, group=group)
        if all(dense for dense, _ in flags):
            return flags
        counts: list[list[int]] = counted.tolist()
        return counts

    def _sum(self, parameter: Tensor, gradients: MutableMapping[Any, Tensor], group: Group, *, sparse: bool) -> Any:
        """Begin with one parameter; what comes back is to be called once all are begun."""
        own = gradients.get(parameter)
        rows = _rows(own, parameter, group) if sparse else None
        if own is None:
            total = torch.zeros_like(parameter, memory_format=torch.contiguous_format).detach()
        else:
            total = own.to_dense() if own.layout != torch.strided else own
        local = total.to_local() if isinstance(total, DTensor) else total
        # Collectives take what is contiguous; a copy of what isn't is put back below.
        sent = local.contiguous()
        work = dist.all_reduce(sent, group=group, async_op=True)

        def finish() -> None:
            assert work is not None
            work.wait()
            if sent is not local:
                local.copy_(sent)
            gradients[parameter] = (
                total
                if rows is None
                else torch.sparse_coo_tensor(rows, total[rows[0]], total.shape, check_invariants=False, is_coalesced=True)
            )

        return finish


def _rows(own: Tensor | None, parameter: Tensor, group: Group) -> Tensor:
    """Of sparse gradients on all ranks, the rows that any of them has: SparseAdam steps on these, whatever their values."""
    present = torch.zeros(parameter.shape[0], dtype=torch.int32, device=parameter.device)
    if own is not None:
        present[own.coalesce().indices()[0]] = 1
    dist.all_reduce(present, group=group)
    return present.nonzero().T
