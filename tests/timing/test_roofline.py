"""A step's parts and their loads: what is traced, what is guessed, and what is remembered."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from lightning_autopar.devices.inventory import Device, idle_share
from lightning_autopar.memory.batch_scaling import drawn_by_rank
from lightning_autopar.memory.work.work import Work
from lightning_autopar.timing.data_sheet import DataSheet
from lightning_autopar.timing.rank_compute import DRAW, computing_dtype, layout_of, part_load, update_load
from tests.fakes.rates import PlainRates
from tests.fakes.traced import traced
from tests.fakes.values import GIB, MIB, cpu, footprint, gpu


@dataclass(frozen=True, kw_only=True)
class Counting(PlainRates):
    """Rates that remember what they were asked."""

    asked: list[Work]

    def work_seconds(self, device: Device, work: Work) -> float:
        self.asked.append(work)
        return super().work_seconds(device, work)

    def device_class(self, device: Device) -> object:
        return device.name


def test_blocks_and_what_lies_between_them_run_in_order() -> None:
    layout = layout_of(traced(), "32-true")
    assert [layer.fqn for layer in layout.layers] == [None, "net.0", None, "net.1", None, "net.2", None, "net.3", None]
    assert len(layout.works) == 3  # a block's forward and backward, and nothing
    assert layout.layers[1].gradients == (100 * MIB,)
    assert layout_of(traced(training=False), "32-true").layers[1].gradients == ()


def test_alike_parts_are_asked_for_once() -> None:
    layout = layout_of(traced(), "32-true")
    rates = Counting(asked=[])
    first = [part_load(layout, layer.forward, 0.5, gpu(index), rates, "forward") for index, layer in enumerate(layout.layers)]
    assert len(rates.asked) == 1
    assert first[1].stream == pytest.approx(0.5, rel=1e-6)
    assert part_load(layout, layout.layers[1].forward, 0.25, gpu(0), rates, "forward").stream == pytest.approx(0.25, rel=1e-6)
    other = Counting(asked=[])
    part_load(layout, layout.layers[1].forward, 0.5, gpu(0), other, "forward")
    assert len(other.asked) == 1  # other rates, other answers


def test_the_host_issues_each_operation() -> None:
    layout = layout_of(traced(), "32-true")
    load = part_load(layout, layout.layers[1].forward, 1.0, gpu(0), PlainRates(issue=0.5), "forward")
    assert load.issue == pytest.approx(0.5)


def test_a_part_of_the_batch_draws_random_numbers_for_all_of_it() -> None:
    """And copies its rows: of 8 GiB a half, read and written."""
    draw = Work(kind="pointwise", name="bernoulli_", dtype="fp32", count=2, moved_bytes=8 * GIB, drawn=True)
    step = traced()
    whole = replace(step, blocks=tuple(replace(block, work=(draw,)) for block in step.blocks))
    rates = PlainRates(bytes_per_second=GIB, call=0.5)
    for given, share, device, expected, calls in (
        (whole, 1.0, gpu(0), 2 * 8, 0),
        (whole, 0.5, gpu(0), 2 * (8 + 8), 2 * DRAW),
        (whole, 0.25, gpu(0), 2 * (8 + 4), 2 * DRAW),
        (whole, 0.5, cpu(0), 2 * (8 + 8 + 8), 2 * DRAW),  # into memory that is new each time
        (drawn_by_rank(whole), 0.5, gpu(0), 2 * 4, 0),
    ):
        layout = layout_of(given, "32-true")
        load = part_load(layout, layout.layers[1].forward, share, device, rates, "forward")
        assert load.stream == pytest.approx(expected)
        assert load.issue == pytest.approx(0.5 * calls)


def test_an_update_of_a_part_moves_a_part() -> None:
    layout = layout_of(traced(update=8 * GIB), "32-true")
    rates = PlainRates(bytes_per_second=GIB)
    assert update_load(layout, 1.0, gpu(0), rates).stream == pytest.approx(8)
    assert update_load(layout, 0.25, gpu(0), rates).stream == pytest.approx(2)


def test_counters_on_the_host_launch_nothing() -> None:
    step = traced()
    count = Work(kind="copy", name="_local_scalar_dense", dtype="fp32", count=100, moved_bytes=4, fixed_bytes=4)
    step = replace(step, optimizer_work=(*step.optimizer_work, count))
    rates = PlainRates(bytes_per_second=1.0)
    assert update_load(layout_of(step, "32-true"), 1.0, gpu(0), rates).stream == 0
    assert update_load(layout_of(step, "32-true"), 1.0, cpu(0), rates).stream == pytest.approx(400)


def test_what_was_not_traced_is_guessed_from_totals() -> None:
    bare = footprint()  # blocks of 10 GFLOP forward, three times as much in all
    layout = layout_of(bare, "bf16-mixed")
    works = [work for layer in layout.layers for index in (layer.forward, layer.backward) for work in layout.works[index]]
    assert sum(work.flops * work.count for work in works) == pytest.approx(bare.flops, rel=1e-6)
    assert {work.dtype for work in works} == {"bf16"}
    assert all(work.grows for work in works)
    moved = sum(work.moved_bytes * work.count for work in layout.optimizer)
    assert moved == pytest.approx(20 * bare.gradient_bytes, rel=1e-6)  # AdamW on lists of tensors
    plain = layout_of(replace(bare, optimizer_bytes=0), "bf16-mixed")
    assert sum(work.moved_bytes * work.count for work in plain.optimizer) == pytest.approx(3 * bare.gradient_bytes, rel=1e-6)


def test_a_rest_without_bytes_shrinks_with_the_batch() -> None:
    layout = layout_of(footprint(flops=10**16), "32-true")
    rest = layout.layers[-1]
    assert rest.fqn is None
    whole, half = (part_load(layout, rest.forward, share, gpu(0), DataSheet(), "forward").stream for share in (1.0, 0.5))
    assert half == pytest.approx(whole / 2, rel=1e-3)


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("32-true", "fp32"),
        ("bf16-mixed", "bf16"),
        ("bf16-true", "bf16"),
        ("16-mixed", "fp16"),
        ("16-true", "fp16"),
        ("64-true", "fp64"),
        ("transformer-engine", "bf16"),
        ("transformer-engine-float16", "fp16"),
    ],
)
def test_lightnings_names_of_precisions(precision: str, dtype: str) -> None:
    assert computing_dtype(precision) == dtype


def test_a_busy_device_leaves_tenths_and_never_nothing() -> None:
    assert idle_share(gpu(0)) == 1
    assert idle_share(gpu(0, utilization=0.52)) == 0.5
    assert idle_share(gpu(0, utilization=1.0)) == 0.1
