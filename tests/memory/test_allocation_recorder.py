"""What tensors take while a recorder is open, against what they are known to take."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.profiler import profile

from lightning_autopar._temporary import without_noise
from lightning_autopar.memory.allocation_recorder import AllocationRecorder
from lightning_autopar.memory.storages import storage_sizes

CPU = torch.device("cpu")
UNIT = 4096


def sizes(*tensors: Tensor) -> dict[int, int]:
    return storage_sizes(tensors, CPU)


def in_a_thread(action: Callable[[], object]) -> None:
    """As gloo's threads do: without the profiler's thread-local state."""
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with without_noise():
        yield


def test_the_peak_and_what_holds_it() -> None:
    kept = torch.zeros(10 * UNIT, dtype=torch.uint8)
    recorder = AllocationRecorder()
    assert recorder.start(parameters=sizes(kept))
    state = torch.zeros(3 * UNIT, dtype=torch.uint8)
    scratch = torch.zeros(5 * UNIT, dtype=torch.uint8)
    recorder.note(optimizer=sizes(state))
    del scratch
    after = torch.zeros(4 * UNIT, dtype=torch.uint8)
    recorder.note(parameters=sizes(kept), optimizer=sizes(state))
    found = recorder.stop()
    assert found is not None
    assert found.peak_bytes == 18 * UNIT
    assert found.bytes == {"parameters": 10 * UNIT, "optimizer": 3 * UNIT}
    assert after.numel() == 4 * UNIT
    assert not recorder.running


def test_what_is_the_hosts_counts_apart() -> None:
    """What was there before, what is told later, and what is allocated while the host works; within each other such times are one."""
    weights, states = torch.zeros(10 * UNIT, dtype=torch.uint8), torch.zeros(7 * UNIT, dtype=torch.uint8)
    recorder = AllocationRecorder()
    assert recorder.start(parameters=sizes(weights), optimizer=sizes(states), host=sizes(states))
    gathered = torch.zeros(4 * UNIT, dtype=torch.uint8)
    gradient = torch.zeros(2 * UNIT, dtype=torch.uint8)
    recorder.note(gradients=sizes(gradient), host=sizes(gradient))
    del gathered
    for begins in (True, True, False):
        recorder.host_works(begins)
    scratch = torch.zeros(5 * UNIT, dtype=torch.uint8)
    del scratch
    recorder.host_works(False)
    after = torch.zeros(3 * UNIT, dtype=torch.uint8)
    recorder.note(parameters=sizes(weights), optimizer=sizes(states), host=sizes(states))
    found = recorder.stop()
    assert found is not None
    assert (found.peak_bytes, found.host_bytes) == (14 * UNIT, 14 * UNIT)
    assert found.bytes == {"parameters": 10 * UNIT, "optimizer": 0, "gradients": 0}
    assert after.numel() + gradient.numel() == 5 * UNIT


@pytest.mark.parametrize("seed", range(4))
def test_against_a_ledger_kept_by_hand(seed: int) -> None:
    """Tensors come and go, in this thread and in others, some of them from before."""
    draw = random.Random(seed)
    live = [torch.zeros(draw.randrange(1, 9) * UNIT, dtype=torch.uint8) for _ in range(5)]
    before = {id(tensor) for tensor in live}
    recorder = AllocationRecorder()
    assert recorder.start(there=sizes(*live))
    total = peak = sum(tensor.numel() for tensor in live)
    for _ in range(200):
        if live and draw.random() < 0.5:
            index = draw.randrange(len(live))
            total -= live[index].numel()
            recorder.note(there=sizes(*live))  # those from before are known to be there, and seen to go, by this alone
            if draw.random() < 0.5 and id(live[index]) not in before:
                in_a_thread(lambda index=index: live.pop(index))
            else:
                live.pop(index)
            recorder.note(there=sizes(*live))
        else:
            count = draw.randrange(1, 9) * UNIT
            live.append(torch.zeros(count, dtype=torch.uint8))
            total += count
            peak = max(peak, total)
            recorder.note(there=sizes(*live))
    recorder.note(there=sizes(*live))
    found = recorder.stop()
    assert found is not None
    assert found.peak_bytes == found.bytes["there"] == peak


def test_what_other_threads_allocate_and_free_counts() -> None:
    recorder = AllocationRecorder()
    assert recorder.start()
    for _ in range(20):
        sent = [torch.zeros(UNIT, dtype=torch.uint8)]
        in_a_thread(sent.clear)
    received: list[Tensor] = []
    in_a_thread(lambda: received.append(torch.zeros(7 * UNIT, dtype=torch.uint8)))
    torch.zeros(UNIT, dtype=torch.uint8)
    found = recorder.stop()
    assert found is not None
    assert found.peak_bytes == 8 * UNIT
    assert received


def test_gradients_from_before_are_there_until_they_are_seen_gone() -> None:
    old = torch.zeros(6 * UNIT, dtype=torch.uint8)
    recorder = AllocationRecorder()
    assert recorder.start(gradients=sizes(old))
    first = torch.zeros(UNIT, dtype=torch.uint8)
    recorder.note(gradients=sizes(old))
    del old
    recorder.note(gradients={})
    second = torch.zeros(3 * UNIT, dtype=torch.uint8)
    found = recorder.stop()
    assert found is not None
    assert (found.peak_bytes, found.bytes) == (7 * UNIT, {"gradients": 6 * UNIT})
    assert first.numel() + second.numel() == 4 * UNIT


def test_a_second_recording_knows_nothing_of_the_first() -> None:
    recorder = AllocationRecorder()
    left: list[Tensor] = []
    assert recorder.start()
    left.append(torch.zeros(9 * UNIT, dtype=torch.uint8))
    recorder.abandon()
    recorder.abandon()
    assert recorder.start()
    left.clear()  # in the allocator's table since the first
    after = torch.zeros(2 * UNIT, dtype=torch.uint8)
    found = recorder.stop()
    assert found is not None
    assert found.peak_bytes == after.numel()


@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
def test_what_lies_in_a_memory_map_counts_nowhere(first: bool) -> None:
    mapped = torch.zeros(7 * UNIT, dtype=torch.uint8).share_memory_()
    recorder = AllocationRecorder()
    recorder.start()
    kept = torch.zeros(50 * UNIT, dtype=torch.uint8)  # the allocator's table has this at the next start
    recorder.stop()
    recorder.start()
    early = [] if first else [torch.zeros(UNIT, dtype=torch.uint8)]
    del mapped
    received = torch.zeros(9 * UNIT, dtype=torch.uint8).share_memory_()
    late = torch.zeros(2 * UNIT, dtype=torch.uint8)
    recording = recorder.stop()
    assert recording is not None
    # What is copied into the map is there until it has been.
    assert recording.peak_bytes == 9 * UNIT + sum(each.nbytes for each in early)
    del kept, received, late


def test_nothing_happens() -> None:
    recorder = AllocationRecorder()
    assert recorder.start()
    found = recorder.stop()
    assert found is not None
    assert (found.peak_bytes, found.bytes) == (0, {})


def test_somebody_elses_profile_is_left_alone() -> None:
    recorder = AllocationRecorder()
    with profile(profile_memory=True) as theirs:
        assert not recorder.start()
        torch.zeros(UNIT).add(1)
    assert not recorder.running
    assert any(event.key == "aten::add" for event in theirs.key_averages())


@pytest.mark.parametrize("over", [True, False])
def test_who_begins_to_profile_meanwhile_gets_his_profile(over: bool) -> None:
    recorder = AllocationRecorder()
    assert recorder.start()
    theirs = profile(profile_memory=True)
    theirs.start()
    torch.zeros(UNIT).add(1)
    if over:
        theirs.stop()
    recorder.note(gradients={})
    assert recorder.stop() is None
    torch.zeros(UNIT).mul(1)
    if not over:
        theirs.stop()
    names = {event.key for event in theirs.key_averages()}
    assert "aten::add" in names
    assert ("aten::mul" in names) == (not over)
    assert recorder.start()
    assert recorder.stop() is not None


def test_operations_are_not_recorded_but_run() -> None:
    recorder = AllocationRecorder()
    layer = torch.nn.Linear(8, 8)
    assert recorder.start(parameters=sizes(*layer.parameters()))
    layer(torch.ones(4, 8)).sum().backward()
    gradients = sizes(*(parameter.grad for parameter in layer.parameters() if parameter.grad is not None))
    recorder.note(parameters=sizes(*layer.parameters()), gradients=gradients)
    found = recorder.stop()
    assert found is not None
    assert found.bytes["parameters"] == (8 * 8 + 8) * 4
    assert found.peak_bytes > found.bytes["parameters"] + 4 * 8 * 4


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # torch 2.11, also of explicit ones
def test_each_storage_counts_once_wherever_it_is() -> None:
    base = torch.zeros(4, 8)
    assert sum(sizes(base, base[1:], base.t(), torch.zeros(3, device="meta")).values()) == 4 * 8 * 4
    coordinates = torch.tensor([[0, 2], [1, 0]])
    sparse = torch.sparse_coo_tensor(coordinates, torch.ones(2), (3, 3), check_invariants=False)
    assert sum(sizes(sparse).values()) == 2 * 2 * 8 + 2 * 4
    assert storage_sizes([base], torch.device("cuda")) == {}
