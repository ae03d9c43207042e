"""The ledger against its own tape and against torch: every byte at every moment, whoever makes or frees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_autopar.memory.fakes.as_cuda import as_cuda
from lightning_autopar.memory.fakes.fake_mode import FastFakeMode
from lightning_autopar.memory.kernels.measured_workspace import KernelBytes
from lightning_autopar.memory.tape import KINDS, Tape
from lightning_autopar.memory.trace.attribution import Places
from lightning_autopar.memory.trace.tape_recorder import MemoryTracker
from lightning_autopar.memory.work.tally import collected
from lightning_autopar.memory.work.work import flops, moved_bytes
from tests.memory.cuda import FirstOutput
from tests.memory.tapes import levels, marks

aten = torch.ops.aten


class Probe(TorchDispatchMode):
    """On top of a tracker: notes its totals, and how long its tape is, before each operation."""

    def __init__(self, tracker: MemoryTracker) -> None:
        super().__init__()
        self.tracker = tracker
        self.seen: list[tuple[int, int, dict[str, int]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.tracker.tape is not None:
            self.seen.append((len(self.tracker.tape), self.tracker.total_bytes, dict(self.tracker.live)))
        return func(*args, **kwargs or {})


def step(net: nn.Module, optimizer: torch.optim.Optimizer, tracker: MemoryTracker, x: Tensor) -> None:
    """One step by hand, with everything that a tracker must be told."""
    tracker.begin_step()
    tracker.enter("forward")
    loss = net(x).square().mean()
    optimizer.zero_grad()
    tracker.enter("backward")
    loss.backward()
    for parameter in net.parameters():
        if parameter.grad is not None:
            tracker.mark(parameter.grad, "gradients")
    tracker.enter("optimizer")
    optimizer.step()
    for state in optimizer.state.values():
        for value in state.values():
            tracker.mark(value, "optimizer")


def record(net: nn.Module, x: Tensor, *, probe: bool = False, **kwargs: Any) -> tuple[MemoryTracker, Probe]:
    """Two steps, the second one on tape."""
    optimizer = torch.optim.SGD(net.parameters(), 0.1) if isinstance(net, Sparse) else torch.optim.AdamW(net.parameters())
    tracker = MemoryTracker(batch_size=len(x), **kwargs)
    for parameter in net.parameters():
        tracker.mark(parameter, "parameters")
    for buffer in net.buffers():
        tracker.mark(buffer, "buffers")
    tracker.mark(x, "input")
    probing = Probe(tracker)
    with tracker:
        step(net, optimizer, tracker, x)
        tracker.record()
        if probe:
            with probing:
                step(net, optimizer, tracker, x)
        else:
            step(net, optimizer, tracker, x)
    return tracker, probing


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 32, sparse=True), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x.abs().long().clamp(max=49)).mean(1))


NETS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.LayerNorm(64), nn.Dropout(0.1), nn.Linear(64, 8)),
    "buffers": lambda: nn.Sequential(nn.Unflatten(1, (2, 4, 4)), nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
    "checkpointed": Checkpointed,
    "recurrent": lambda: FirstOutput(nn.GRU(32, 16)),
    "sparse gradients": Sparse,
}


@pytest.mark.parametrize("fake", [True, False])
@pytest.mark.parametrize("name", NETS)
def test_the_tape_adds_up_to_the_ledger_at_every_moment(name: str, fake: bool) -> None:
    torch.manual_seed(0)

    def run() -> tuple[MemoryTracker, Probe]:
        return record(NETS[name](), torch.randn(16, 32), probe=True)

    if fake:
        with FastFakeMode():
            tracker, probe = run()
    else:
        tracker, probe = run()
    tape = tracker.tape
    assert tape is not None
    after = [dict(by_kind) for by_kind in levels(tape)]
    assert len(probe.seen) > 20
    for length, total, live in probe.seen:
        assert after[length - 1] == live
        assert sum(live.values()) == total
    assert after[-1] == tracker.live
    for kind in ("activations", "temporary"):
        assert max(by_kind[kind] for by_kind in after) > 0


def test_the_tape_begins_with_what_is_alive_in_order_of_creation() -> None:
    net = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    tracker, _ = record(net, torch.randn(16, 8))
    assert tracker.tape is not None
    events = list(tracker.tape)
    first_mark = next(index for index, event in enumerate(events) if event.action == "leave")
    prelude = events[:first_mark]
    assert {event.action for event in prelude} == {"allocate"}
    assert [event.storage for event in prelude] == sorted(event.storage for event in prelude)
    by_kind = {kind: [event.size_bytes for event in prelude if event.kind == kind] for kind in KINDS}
    assert by_kind["parameters"] == [8 * 4 * 4, 4 * 4, 4 * 4, 4 * 4]
    assert sorted(by_kind["buffers"]) == [8, 16, 16]
    assert by_kind["input"] == [16 * 8 * 4]
    assert sum(by_kind["gradients"]) == sum(by_kind["parameters"])
    assert len(by_kind["optimizer"]) == 3 * 4
    assert not by_kind["activations"] + by_kind["temporary"] + by_kind["fixed"]
    assert marks(Places(tracker.tape, ()).settled(tracker.tape, (), {})) == [("leave", -1), ("return", 0), ("optimizer", -1)]


def test_gradients_were_fixed_before_they_arrived() -> None:
    tracker, _ = record(nn.Sequential(nn.Linear(32, 4), nn.Linear(4, 2)), torch.randn(16, 32))
    assert tracker.tape is not None
    gradients = {event.storage for event in tracker.tape if event.action == "become" and event.kind == "gradients"}
    assert len(gradients) == 4
    assert gradients <= tracker.arrived


def test_what_a_kernel_takes_inside_is_on_the_tape() -> None:
    scratch = {aten.addmm.default: lambda args, kwargs, output: KernelBytes(1000, 24), aten.mm.default: lambda args, kwargs, output: None}
    hidden = {aten.relu.default: lambda args, kwargs, output, tensor: 5000}
    net = nn.Sequential(nn.Linear(8, 4), nn.ReLU())
    tracker, _ = record(net, torch.randn(16, 8), scratch=scratch, hidden=hidden)
    assert tracker.tape is not None
    events = list(tracker.tape)
    place = next(index for index, event in enumerate(events) if event.size_bytes == 1000)
    assert [(event.action, event.size_bytes, event.kind) for event in events[place - 1 : place + 4]] == [
        ("allocate", 16 * 4 * 4, "activations"),
        ("allocate", 1000, "temporary"),
        ("allocate", 24, "fixed"),
        ("free", 0, "fixed"),
        ("free", 0, "temporary"),
    ]
    assert any(event.size_bytes == 5000 for event in events)
    assert tracker.live["temporary"] == tracker.live["activations"] == 0


def test_resized_storages_are_followed() -> None:
    tracker = MemoryTracker()
    with tracker:
        tracker.record()
        tensor = torch.zeros(256)
        tensor.untyped_storage().resize_(0)
        assert tracker.total_bytes == 0
        tensor.untyped_storage().resize_(2048)
        assert tracker.total_bytes == 2048
        del tensor
    assert tracker.tape is not None
    assert [(event.action, event.size_bytes) for event in tracker.tape if event.kind] == [
        ("allocate", 1024),
        ("resize", 0),
        ("resize", 2048),
        ("free", 0),
    ]


def test_views_and_shared_storages_count_once() -> None:
    tracker = MemoryTracker()
    with tracker:
        base = torch.zeros(16, 16)
        views = [base.t(), base[2:], base.view(-1), *base.unbind(0)]
        assert tracker.total_bytes == 1024
        del base
        assert tracker.total_bytes == 1024
        del views
        assert tracker.total_bytes == 0


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_sparse_tensors_and_wrappers_count_what_they_hold() -> None:
    tracker = MemoryTracker()
    with tracker:
        sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.ones(2, 8), (4, 8), check_invariants=True)
        assert tracker.total_bytes == 2 * 8 * 4 + 2 * 8
        del sparse
        pair = TwoTensor(torch.zeros(8), torch.zeros(8))
        doubled = pair * 2
        assert tracker.total_bytes == 4 * 8 * 4
        del pair, doubled
        assert tracker.total_bytes == 0


def test_nothing_is_written_down_after_the_end() -> None:
    tracker = MemoryTracker()
    with tracker:
        tracker.record()
        kept = torch.zeros(10)
    before = len(tracker.tape or Tape())
    del kept
    assert len(tracker.tape or Tape()) == before
    assert tracker.total_bytes == 40
    assert torch.UntypedStorage.resize_.__name__ == "resize_"
    assert "tracker" not in torch.UntypedStorage.resize_.__qualname__


def test_flops_are_those_of_torchs_own_counter() -> None:
    def run() -> Tensor:
        q = torch.ones(2, 4, 16, 8, requires_grad=True)
        image = torch.ones(2, 3, 8, 8, requires_grad=True)
        weight = torch.ones(5, 3, 3, 3, requires_grad=True)
        loss = (q @ q.transpose(2, 3)).sum() + F.conv2d(image, weight).sum() + F.linear(q, torch.ones(6, 8, requires_grad=True)).sum()
        loss.backward()
        return loss

    with FlopCounterMode(display=False) as counter:
        run()
    tracker = MemoryTracker()
    with tracker:
        tracker.record()
        run()
    (counts,) = tracker.tally.works(()).values()
    assert flops(collected(counts)) == counter.get_total_flops() > 0


def test_bytes_moved_are_inputs_and_outputs() -> None:
    tracker = MemoryTracker()

    def moved() -> int:
        return sum(moved_bytes(collected(counts)) for counts in tracker.tally.works(()).values())

    with tracker:
        torch.ones(100)
        tracker.record()
        a, b = torch.ones(100), torch.ones(100)
        assert moved() == 2 * 400  # nothing from before the record
        a.view(10, 10).t()
        torch.empty(1000)
        assert moved() == 2 * 400
        c = a + b
        assert moved() == 5 * 400
        c.add_(1)
        assert moved() == 7 * 400
        a[:1].expand(100) * 2
        assert moved() == 9 * 400  # no more than the storage holds
        F.embedding(torch.zeros(3, dtype=torch.long), torch.ones(1000, 8))
        # Indices made and read, the table made; of the table no more is read than is picked.
        assert moved() == (total := 9 * 400 + 2 * 24 + 32000 + 2 * 96)
        b.fill_(3)
        b.copy_(a)
        assert moved() == (total := total + 400 + 800)  # what is overwritten isn't read
        torch._foreach_add_([a, b], 1)
        assert moved() == (total := total + 4 * 400)  # lists of tensors that an operation changes and doesn't return
        b.index_add_(0, torch.zeros(3, dtype=torch.long), torch.ones(3))
        assert moved() == total + 2 * 24 + 12 + 3 * 12  # it touches three places: source read, they themselves read and written


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda x: F.dropout(x, 0.5), "aten.bernoulli_"),
        (lambda x: F.dropout(x, 0.0), None),
        (lambda x: F.dropout(x, 0.5, training=False), None),
        (lambda x: torch.rand_like(x), "aten.rand_like"),
        (lambda x: x * 2, None),
    ],
)
def test_random_draws_are_named(draw: Callable[[Tensor], Tensor], name: str | None) -> None:
    tracker = MemoryTracker()
    with tracker:
        draw(torch.ones(4))
    assert list(tracker.random_draws) == ([name] if name else [])


def test_outputs_in_lists_of_outputs_count() -> None:
    """``_cudnn_rnn_backward`` gives three tensors and a list, the gradients of the weights."""
    torch.manual_seed(0)
    with FastFakeMode(), as_cuda({}):
        tracker, _ = record(FirstOutput(nn.LSTM(32, 64)), torch.randn(16, 32))
    events = list(tracker.tape or ())
    begin = next(index for index, event in enumerate(events) if event.action == "leave")
    assert [event for event in events[begin:] if event.action == "allocate" and event.kind == "gradients"] == []
    complete = [event.size_bytes for event in events[begin:] if event.action == "become" and event.kind == "gradients"]
    assert sorted(complete) == [4 * 4 * 64] * 2 + [4 * 4 * 64 * 32, 4 * 4 * 64 * 64]
