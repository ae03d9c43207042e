"""Code that names a GPU runs in a process that sees none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_autopar._gpus_as_cpu import gpus_as_cpu


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(3, device="cuda"),
        lambda: torch.tensor([1.0], device=torch.device("cuda", 1)),
        lambda: torch.ones(2, device=0),
        lambda: torch.ones(2, pin_memory=True).to("cuda:0", non_blocking=True),
        lambda: torch.ones(2).to(1),
        lambda: torch.ones(2).cuda().new_zeros(3, device="cuda"),
        lambda: torch.randn(2, device="cuda", generator=torch.Generator(device="cuda").manual_seed(3)),
        lambda: nn.Linear(2, 2, device="cuda").cuda(0).to("cuda").weight.detach(),
    ],
)
def test_what_is_made_on_a_gpu_is_made_on_the_cpu(make: object) -> None:
    with gpus_as_cpu():
        made: Tensor = make()  # type: ignore[operator]
        torch.cuda.synchronize()
    assert made.device.type == "cpu"


def test_what_names_no_gpu_is_as_ever() -> None:
    with gpus_as_cpu():
        assert torch.ones(2).to(torch.float64).dtype is torch.float64
        assert torch.arange(0, 5).tolist() == [0, 1, 2, 3, 4]
        assert isinstance(torch.Generator(), torch.Generator)
        assert isinstance(torch.default_generator, torch.Generator)
    assert torch.Generator is torch._C.Generator


def test_streams_and_events_are_done_at_once() -> None:
    with gpus_as_cpu():
        side, current = torch.cuda.Stream(priority=-1), torch.cuda.current_stream()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        side.wait_stream(current)
        with torch.cuda.device(0), torch.cuda.stream(side):
            made = torch.ones(2, device="cuda")
        end.record(side)
        current.wait_event(side.record_event())
        made.record_stream(current)
        torch.cuda.reset_peak_memory_stats()
        assert end.query()
        assert start.elapsed_time(end) > 0
        assert isinstance(current, torch.cuda.Stream)
    assert made.sum() == 2
    assert not hasattr(torch.cuda.Stream, "elapsed_time")
