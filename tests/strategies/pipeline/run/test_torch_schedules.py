"""torch's schedules on stages whose micro-batches differ in shape, against one process; every order, two and three ranks, odd numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_autopar.plans import SCHEDULES, Schedule
from lightning_autopar.strategies.pipeline.run.stage_shapes import Signature
from lightning_autopar.strategies.pipeline.run.torch_schedules import Stage, count_parts, make_schedule
from tests.ranks import run_ranks

WIDTH = 6
#: Sequence lengths of the micro-batches, two of them alike.
LENGTHS = (3, 5, 3, 2, 7, 4, 5, 1)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


class Block(nn.Module):
    """Hands on what it computes, a number that needs no gradient, and the first block's input as it is."""

    common: nn.Parameter | None

    def __init__(self, kind: str, number: int) -> None:
        super().__init__()
        self.aside = kind == "aside" and number == 3
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.unused = nn.Parameter(torch.ones(2))
        self.kind = kind

    def forward(self, hidden: Tensor, count: Tensor, skip: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.norm(torch.tanh(self.linear(hidden))) + hidden
        if self.kind == "python":
            hidden = Twice.apply(hidden)  # type: ignore[no-untyped-call]
        if self.kind == "shared":  # sums keep nothing for backward, so that one that runs twice isn't noticed
            hidden = hidden + (self.common + self.gain)
        if self.aside:  # a parameter's path that meets that of the inputs nowhere in this stage
            skip = skip.detach() + self.gain
        return hidden, count + 1, skip


def whole(blocks: int, kind: str) -> nn.ModuleList:
    torch.manual_seed(3)
    made = [Block(kind, number) for number in range(blocks)]
    for first, second in zip(made[::2], made[1::2], strict=True):  # the blocks of a stage, the second of which has the parameter
        second.common = nn.Parameter(torch.ones(WIDTH)) if kind == "shared" else None
        first.__dict__["common"] = second.common
    return nn.ModuleList(made)


def batches() -> list[Tensor]:
    return [torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(length)) for length in LENGTHS]


def loss_of(hidden: Tensor, count: Tensor, skip: Tensor) -> Tensor:
    return (hidden * skip).mean() * count.float().mean()


class Part(nn.Module):
    """A stage of two blocks; the first one makes what it works on, the last one the loss."""

    def __init__(self, blocks: nn.ModuleList, index: int, stages: int, broken: int | None = None) -> None:
        super().__init__()
        self.mine = blocks[2 * index : 2 * index + 2]
        self.first, self.last = index == 0, index == stages - 1
        self.chunk = 0
        self.broken = broken

    def forward(self, *received: Tensor) -> Any:
        if self.broken == self.chunk:
            raise KeyError("the user's own")
        given = received
        if self.first:
            rows = batches()[self.chunk]
            given = rows, torch.zeros((), dtype=torch.int64), rows * 1.0
        for block in self.mine:
            given = block(*given)
        return loss_of(*given) if self.last else given


class Around:
    """Sets the micro-batch."""

    def __call__(self, stage: Stage, work: str, chunk: int) -> Around:
        stage.submod.chunk = chunk  # type: ignore[assignment]
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _rank(rank: int, ranks: int, cases: list[tuple[Schedule, int, str]], idle: bool) -> list[Any]:
    host = dist.new_group(backend="gloo")
    results = []
    for schedule, parts, kind in cases:
        per_rank = 2 if schedule == "interleaved_1f1b" else 1
        blocks = whole(2 * ranks * per_rank, kind)
        around = Around()
        stages = [
            Stage(
                Part(blocks, index, ranks * per_rank),
                index,
                ranks * per_rank,
                torch.device("cpu"),
                group=dist.group.WORLD,
                host_group=host,
                around=around,
            )
            for index in range(rank, ranks * per_rank, ranks)
        ]
        losses: list[float] = []

        def weigh(loss: Tensor, chunk: Tensor, losses: list[float] = losses) -> Tensor:
            losses.append(float(loss.detach()))
            return loss * (int(chunk) + 1.0)

        made = make_schedule(schedule, stages, parts, weigh)
        for _ in range(2):  # the second time all shapes are known
            for stage in stages:
                stage.begin([Signature(("batch", LENGTHS[chunk])) for chunk in range(parts)], idle=frozenset({parts - 1} if idle else ()))
            made.step(target=torch.arange(parts) if stages[-1].is_last else None, return_outputs=False)
            for stage in stages:
                stage.finish()
                assert not any((stage.fwd_cache, stage.bwd_cache, stage.output_chunks, stage.backward_state, stage.dw_runner))
        with torch.no_grad():
            for stage in stages:
                stage.begin([None])
            make_schedule(schedule, stages, 1, weigh).eval(target=torch.arange(1) if stages[-1].is_last else None, return_outputs=False)
            for stage in stages:
                stage.finish()
        mine = [index for stage in stages for index in (2 * stage.stage_index, 2 * stage.stage_index + 1)]
        gradients = {
            f"{index}.{name}": None if value.grad is None else value.grad.clone()
            for index in mine
            for name, value in blocks[index].named_parameters()
        }
        results.append((gradients, losses))
    return results


def _expected(blocks: nn.ModuleList, parts: int, idle: bool) -> tuple[dict[str, Tensor | None], list[float]]:
    losses = []
    for chunk in range(parts):
        rows = batches()[chunk]
        given = rows, torch.zeros((), dtype=torch.int64), rows * 1.0
        for block in blocks:
            given = block(*given)
        loss = loss_of(*given)
        losses.append(float(loss.detach()))
        if not (idle and chunk == parts - 1):
            (loss * (chunk + 1) * 2).backward()
    return {name: value.grad for name, value in blocks.named_parameters()}, losses


def check(ranks: int, cases: list[tuple[Schedule, int, str]], *, idle: bool = False) -> None:
    found = run_ranks(_rank, ranks, cases, idle)
    for number, (schedule, parts, kind) in enumerate(cases):
        blocks = whole(2 * ranks * (2 if schedule == "interleaved_1f1b" else 1), kind)
        gradients, losses = _expected(blocks, parts, idle)
        together = {name: value for rank in found for name, value in rank[number][0].items()}
        assert together.keys() == gradients.keys()
        for name, value in gradients.items():
            got = together[name]
            assert (got is None) == (value is None), (schedule, parts, kind, name)
            if value is not None and got is not None:
                torch.testing.assert_close(got, value, rtol=1e-5, atol=1e-6, msg=f"{schedule} ×{parts} {kind}: {name}")
        first = make_first_loss(kind, blocks)
        torch.testing.assert_close(found[-1][number][1], [*losses, *losses, first])


def make_first_loss(kind: str, blocks: nn.ModuleList) -> float:
    rows = batches()[0]
    given = rows, torch.zeros((), dtype=torch.int64), rows * 1.0
    for block in blocks:
        given = block(*given)
    return float(loss_of(*given).detach())


def test_every_schedule_with_two_ranks_and_any_number_of_parts() -> None:
    """Fewer parts than stages, odd numbers, and as many as there are; interleaved in what rounds it takes."""
    cases: list[tuple[Schedule, int, str]] = []
    for schedule in SCHEDULES:
        for rows in (1, 2, 3, 5, 8):
            cases.append((schedule, count_parts(schedule, 8, 2, rows), "plain"))
    check(2, cases)


def test_every_schedule_with_three_ranks() -> None:
    check(3, [("gpipe", 4, "plain"), ("1f1b", 5, "plain"), ("interleaved_1f1b", 6, "plain")])


def test_operations_in_python_and_parameters_that_several_paths_use() -> None:
    check(3, [("interleaved_1f1b", 6, "python"), ("1f1b", 6, "aside"), ("gpipe", 6, "shared")])


def test_idle_parts_run_no_backward() -> None:
    """Whatever they would compute: nothing of it reaches a gradient."""
    check(2, [("gpipe", 3, "plain"), ("interleaved_1f1b", 4, "plain")], idle=True)


def _breaks(rank: int, ranks: int) -> str:
    host = dist.new_group(backend="gloo")
    part = Part(whole(4, "plain"), rank, 2, broken=1 if rank == 0 else None)
    stage = Stage(part, rank, 2, torch.device("cpu"), group=dist.group.WORLD, host_group=host, around=Around())
    schedule = make_schedule("gpipe", [stage], 2, lambda loss, chunk: loss)
    stage.begin([None, None])
    if rank == 1:
        dist.barrier(host)  # a rank that leaves breaks off what the other one still sends
        return "waits"
    try:
        schedule.step(return_outputs=False)
    except KeyError as error:
        dist.barrier(host)
        return f"{error.args[0]}: {error.__cause__!r}"
    return "no error"


class Outputs(Around):
    """Of a stage's outputs, and what it received and passes on, whose memory is there when the next micro-batch's backward is over."""

    def __init__(self) -> None:
        self.made: dict[int, list[StorageWeakRef]] = {}
        self.left: set[int] = set()
        self._work, self._chunk = "", 0

    def __call__(self, stage: Stage, work: str, chunk: int) -> Outputs:
        super().__call__(stage, work, chunk)
        self._work, self._chunk = work, chunk
        return self

    def note(self, part: nn.Module, args: Any, output: Any) -> None:
        self.made[self._chunk] = [StorageWeakRef(each.untyped_storage()) for each in output]

    def __exit__(self, *_: object) -> None:
        if self._work == "backward":
            before = {chunk: made for chunk, made in self.made.items() if chunk < self._chunk}
            self.left |= {chunk for chunk, made in before.items() if not all(each.expired() for each in made)}


def _outputs_left(rank: int, ranks: int) -> set[int]:
    outputs = Outputs()
    part = Part(whole(2 * ranks, "plain"), rank, ranks)
    if not part.last:
        part.register_forward_hook(outputs.note)
    group = dist.group.WORLD
    host = dist.new_group(backend="gloo")
    stage = Stage(part, rank, ranks, torch.device("cpu"), group=group, host_group=host, around=outputs)
    made = make_schedule("gpipe", [stage], 4, lambda loss, chunk: loss)
    stage.begin([Signature(("batch", LENGTHS[chunk])) for chunk in range(4)])
    made.step(target=torch.arange(4) if stage.is_last else None, return_outputs=False)
    stage.finish()
    return outputs.left


def test_what_forward_has_sent_goes_with_its_own_backward() -> None:
    """torch keeps it until the last one is over: on a stub GPU, MPNet's position bias of each micro-batch."""
    assert run_ranks(_outputs_left, 3) == [set()] * 3


def test_what_the_users_code_raises_comes_out_as_it_is() -> None:
    assert run_ranks(_breaks, 2)[0] == "the user's own: None"


def _lies(rank: int, ranks: int) -> str:
    host = dist.new_group(backend="gloo")
    stage = Stage(Part(whole(4, "plain"), rank, 2), rank, 2, torch.device("cpu"), group=dist.group.WORLD, host_group=host, around=Around())
    schedule = make_schedule("gpipe", [stage], 2, lambda loss, chunk: loss)
    stage.begin([Signature("one")] * 2)  # of two micro-batches of lengths 3 and 5
    if rank == 1:
        stage.get_fwd_recv_ops(0)
    try:
        if rank == 0:
            schedule.step(return_outputs=False)
    except RuntimeError as error:
        return str(error)
    finally:
        dist.barrier()
    return "no error"


def test_shapes_that_the_batch_does_not_tell_are_an_error() -> None:
    message = run_ranks(_lies, 2)[0]
    assert "float32[2, 3, 6]" in message
    assert "float32[2, 5, 6]" in message
    assert "depend on the batch's values" in message


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "rows", "parts"),
    [
        ("gpipe", 4, 9, 4),
        ("1f1b", 4, 3, 3),
        ("1f1b", 4, 0, 1),
        ("interleaved_1f1b", 8, 5, 6),
        ("interleaved_1f1b", 8, 7, 8),
    ],
)
def test_a_batch_has_no_more_parts_than_samples_unless_rounds_want_them(
    schedule: Schedule, micro_batches: int, rows: int, parts: int
) -> None:
    assert count_parts(schedule, micro_batches, 2, rows) == parts
