"""A question with one thing changed is the one that a module with that thing changed asks."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_autopar.devices.spec import parse_spec
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.trace.first_batch import FirstBatch
from lightning_autopar.memory.work.work import moved_bytes
from lightning_autopar.planning.plan_bytes import predict
from lightning_autopar.planning.plan_seconds import predict_seconds
from lightning_autopar.planning.what_if import eight_bit, fused, more_devices, validated, with_host
from lightning_autopar.plans import Plan
from tests.fakes.values import GIB, MIB, cpu, footprint, gpu, inventory

SINGLE = Plan(engine="single", devices=("RTX4090-24GB:0",))
HERE = parse_spec("RTX4090")


class Layers(L.LightningModule):
    """Few samples and much to update, so that the optimizer's step is the fullest moment."""

    def __init__(self, optimizer: str, clip: bool, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(4)))
        self.optimizer, self.clip, self.arguments = optimizer, clip, arguments

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self.net(batch).mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return getattr(torch.optim, self.optimizer)(self.parameters(), lr=0.1, **self.arguments)  # type: ignore[no-any-return]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.clip:
            nn.utils.clip_grad_norm_(self.parameters(), 1.0)


@cache
def traced(optimizer: str = "AdamW", clip: bool = False, **arguments: Any) -> Footprint:
    from lightning_autopar.memory.trace.trace import trace

    with torch.device("meta"):
        module = Layers(optimizer, clip, arguments)
    return trace(module, None, FirstBatch(batch=torch.zeros(8, 512), batch_size=8), stage="fit", precision="32-true", target="cuda")


@pytest.mark.parametrize(("optimizer", "clip"), [("AdamW", False), ("AdamW", True), ("SGD", False)])
def test_a_fused_optimizer_is_predicted_as_if_it_had_been_traced(optimizer: str, clip: bool) -> None:
    guessed, known = fused(traced(optimizer, clip)), traced(optimizer, clip, fused=True)
    assert guessed is not None
    assert moved_bytes(guessed.optimizer_work) == pytest.approx(moved_bytes(known.optimizer_work), rel=0.01)
    before, then, really = (predict(one, SINGLE, HERE)[SINGLE.devices[0]].allocated for one in (traced(optimizer, clip), guessed, known))
    assert then == pytest.approx(really, rel=0.01)
    assert before - then > 2 * MIB or optimizer == "SGD"
    seconds = [predict_seconds(one, SINGLE, HERE, precision="32-true").optimizer for one in (guessed, known)]
    assert seconds[0] == pytest.approx(seconds[1], rel=0.1)
    assert guessed.tape is not None
    assert known.tape is not None
    peaks = [_peak(one) for one in (guessed, known)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.01)


def _peak(step: Footprint) -> int:
    """The most that the tape holds at once."""
    assert step.tape is not None
    held: dict[int, int] = {}
    most = 0
    for action, storage, size, _ in step.tape.rows():
        if action in ("allocate", "resize"):
            held[storage] = size
        elif action == "free":
            held.pop(storage)
        most = max(most, sum(held.values()))
    return most


def test_what_is_fused_or_unknown_stays() -> None:
    assert fused(traced(fused=True)) is None
    assert fused(traced("Adamax")) is None
    assert fused(replace(traced(), training=False)) is None
    assert eight_bit(traced("SGD")) is None
    assert eight_bit(replace(traced(), optimizer_bytes=traced().trainable_parameters)) is None, "it is as small already"


def test_a_state_of_8_bits_is_a_quarter_of_one_in_fp32() -> None:
    plain, small = traced(), eight_bit(traced())
    assert small is not None
    assert small.optimizer_bytes / plain.optimizer_bytes == pytest.approx(0.25, rel=0.02)
    layers = [sum(layer.optimizer_bytes for layer in (*one.blocks, *one.outer)) for one in (plain, small)]
    assert layers[1] / layers[0] == pytest.approx(0.25, rel=0.02)
    assert plain.optimizer_bytes - small.optimizer_bytes <= _peak(plain) - _peak(small)
    assert small.optimizer_classes == ()


def test_validation_shrinks_with_its_batch() -> None:
    step = replace(footprint(), evaluation_bytes=8 * GIB, evaluation_parts=(GIB, 8 * GIB))
    assert (validated(step, 0.25).evaluation_bytes, validated(step, 0.25).evaluation_parts) == (2 * GIB, (GIB // 4, 2 * GIB))
    assert validated(footprint(), 0.5) == footprint()


def test_devices_more_are_linked_as_the_others_are() -> None:
    changed = more_devices(parse_spec("2x2xA100-80GB"), 1)
    assert changed is not None
    device = changed.devices[2]
    assert (device.id, device.node, device.index) == ("A100-80GB:4", 0, 2)
    assert [one.id for one in changed.devices] == ["A100-80GB:0", "A100-80GB:1", "A100-80GB:4", "A100-80GB:2", "A100-80GB:3"]
    assert changed.link("A100-80GB:0", device.id) == replace(changed.link("A100-80GB:0", "A100-80GB:1"), b=device.id)
    assert changed.link("A100-80GB:2", device.id).kind == "network"
    assert changed.node_host_bytes == parse_spec("2x2xA100-80GB").node_host_bytes, "a GPU brings no host memory, not even an assumed one's"
    four = more_devices(parse_spec("A100-80GB"), 3)
    assert four is not None
    assert four.devices == parse_spec("4xA100-80GB").devices
    here = more_devices(inventory(gpu(0, GIB), gpu(1)), 2)
    assert here is not None
    assert [one.free_bytes == one.total_bytes for one in here.devices] == [False, True, True, True]
    assert here.link(here.devices[0].id, here.devices[3].id).kind == "host"
    for alone in (parse_spec("A100-80GB,L4"), inventory(cpu(0)), inventory(replace(gpu(0), part_of="GPU-0000"))):
        assert more_devices(alone, 1) is None


def test_a_host_has_so_much_at_least() -> None:
    assert with_host(parse_spec("2xL4@16GiB"), 64 * GIB).node_host_bytes == (64 * GIB,)
    assert with_host(parse_spec("2xL4@16GiB"), 8 * GIB) == parse_spec("2xL4@16GiB")
    assert with_host(inventory(cpu(0)), 1 << 45).host_free_on(0) == 1 << 45
