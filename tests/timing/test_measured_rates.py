"""Measured rates: curves and their interpolation, what is asked of them, and the data sheet behind them."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_autopar.cli.devices import collective_lines, speeds
from lightning_autopar.devices.inventory import Device, Inventory, Link
from lightning_autopar.devices.spec import parse_spec
from lightning_autopar.memory.work.work import Work, WorkKind
from lightning_autopar.plans import Engine
from lightning_autopar.timing.data_sheet import DataSheet
from lightning_autopar.timing.measured_curves import Calibration, Curve
from lightning_autopar.timing.measured_rates import HOST, MeasuredRates, device_key, group_key
from lightning_autopar.timing.rates import Collective, Phase, Python, Rates
from tests.fakes.values import gpu, inventory

GIB = 2**30


class Fake(Rates):
    """A data sheet of round figures, told apart from anything measured."""

    def work_seconds(self, device: Device, work: Work) -> float:
        return 1000.0

    def issue_seconds(self, device: Device, phase: Phase = "forward") -> float:
        return 1001.0

    def loop_seconds(self, device: Device, engine: Engine) -> float:
        return 1002.0

    def python_seconds(self, device: Device, of: Python) -> float:
        return {"unit": 1003.0, "action": 1004.0, "call": 1007.0}[of]

    def collective_seconds(self, collective: Collective, size_bytes: int, devices: Sequence[Device], inventory: Inventory) -> float:
        return 100.0 * (len(devices) - 1)

    def host_copy_seconds(self, device: Device, size_bytes: int) -> float:
        return 1005.0

    def host_adam_seconds(self, elements: int, device: Device) -> float:
        return 1006.0

    def overlap(self, device: Device) -> float:
        return 0.25


def here(count: int = 2, cores: int = 2) -> Inventory:
    return parse_spec(f"{count}xcpu:1GiB", host_bytes=(8 * GIB, 8 * GIB), cores=cores)


def curve(thing: str, points: dict[float, float], *, dtype: str = "", ranks: int = 1, subject: str = "cpu/1") -> Curve:
    return Curve(subject=subject, thing=thing, dtype=dtype, ranks=ranks, sizes=tuple(points), seconds=tuple(points.values()))


def rates(*curves: Curve, inventory: Inventory | None = None, ranks: int = 1) -> MeasuredRates:
    inventory = inventory or here()
    found = MeasuredRates(Calibration().with_curves(curves, day="2026-11-22", took_seconds=1.0), Fake())
    return found.among(inventory.devices[:ranks], inventory)


def work(kind: WorkKind, name: str, *, dtype: str = "fp32", flops: int = 0, moved: int = 0, shape: tuple[int, ...] = ()) -> Work:
    return Work(kind=kind, name=name, dtype=dtype, flops=flops, moved_bytes=moved, shape=shape)


CPU = here().devices[0]


# -- curves ----------------------------------------------------------------------------------------------------------------------------


def test_a_curve_between_and_beyond_its_points() -> None:
    line = curve("add", {100.0: 1.0, 10000.0: 4.0})
    assert line.at(0) == line.at(50) == 1.0, "as little as was measured"
    assert line.at(1000) == pytest.approx(2.0), "halfway between the logarithms"
    assert line.at(20000) == pytest.approx(8.0), "at the largest one's rate"
    assert line.rate(20000) == line.rate(10000) == pytest.approx(2500)


def test_a_curves_line_needn_t_begin_at_zero() -> None:
    line = curve("add", {100.0: 1.0, 200.0: 1.5})
    assert line.line(150) == line.at(150)
    assert line.line(400) == pytest.approx(2.5)
    assert line.at(400) == pytest.approx(3.0)
    assert curve("add", {100.0: 1.0, 200.0: 0.9}).line(400) == pytest.approx(0.9), "what disturbed a measurement makes nothing faster"
    assert curve("add", {100.0: 1.0}).line(400) == pytest.approx(4.0)


@given(st.lists(st.floats(1, 1e12), min_size=2, max_size=6, unique=True), st.floats(0, 1e13))
def test_more_never_takes_less_where_more_was_never_measured_to(sizes: list[float], size: float) -> None:
    sizes = sorted(sizes)
    line = Curve(subject="s", thing="t", sizes=tuple(sizes), seconds=tuple(float(index + 1) for index in range(len(sizes))))
    assert line.at(size) <= line.at(size * 1.5) * (1 + 1e-9)
    assert line.at(size) >= 1.0


@pytest.mark.parametrize(
    ("sizes", "seconds"), [((), ()), ((1,), (1, 2)), ((2, 1), (1, 1)), ((1, 1), (1, 1)), ((1,), (0,)), ((1,), (math.nan,)), ((-1,), (1,))]
)
def test_what_is_no_curve(sizes: tuple[float, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="curve"):
        Curve(subject="s", thing="t", sizes=sizes, seconds=seconds)


def test_a_calibration_comes_back_from_json() -> None:
    before = Calibration().with_curves(
        [curve("add", {1.0: 2.0}, dtype="fp32"), curve("add", {1.0: 3.0}, dtype="fp32", ranks=2)], day="d", took_seconds=2
    )
    after = Calibration.from_dict(json.loads(json.dumps(before.to_dict())))
    assert after.all() == before.all()
    assert (after.day, after.took_seconds) == ("d", 2)
    assert after.ranks_of("cpu/1", "add") == (1, 2)
    assert not Calibration()
    assert after


def test_newer_curves_take_the_place_of_older_ones() -> None:
    before = Calibration().with_curves([curve("a", {1.0: 1.0}), curve("b", {1.0: 1.0})], day="1", took_seconds=1)
    after = before.with_curves([curve("a", {1.0: 5.0})], day="2", took_seconds=1)
    assert [each.seconds for each in after.all()] == [(5.0,), (1.0,)]
    assert [each.seconds for each in before.all()] == [(1.0,), (1.0,)]


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {"day": "d", "took_seconds": 1},
        {"day": 1, "took_seconds": 1, "curves": []},
        {"day": "d", "took_seconds": 1, "curves": [{"subject": "s"}]},
        {"day": "d", "took_seconds": 1, "curves": [{"subject": "s", "thing": "t", "ranks": True, "sizes": [1], "seconds": [1]}]},
        {"day": "d", "took_seconds": 1, "curves": [{"subject": 1, "thing": "t", "sizes": [1], "seconds": [1]}]},
        {"day": "d", "took_seconds": 1, "curves": [], "failures": {"it": "once"}},
        {"day": "d", "took_seconds": 1, "curves": [], "failures": ["it"]},
    ],
)
def test_what_is_no_calibration(data: object) -> None:
    with pytest.raises(ValueError, match=r"calibration|curve"):
        Calibration.from_dict(data)


# -- operations ------------------------------------------------------------------------------------------------------------------------


def test_what_was_not_measured_is_asked_of_the_data_sheet() -> None:
    empty = rates()
    inventory = here()
    assert empty.work_seconds(CPU, work("pointwise", "add", moved=8)) == 1000.0
    assert empty.issue_seconds(CPU, "backward") == 1001.0
    assert empty.loop_seconds(CPU, "ddp") == 1002.0
    assert empty.python_seconds(CPU, "unit") == 1003.0
    assert empty.python_seconds(CPU, "action") == 1004.0
    assert empty.collective_seconds("all_reduce", 8, inventory.devices, inventory) == 100.0
    assert empty.host_copy_seconds(CPU, 8) == 1005.0
    assert empty.host_adam_seconds(8, CPU) == 1006.0
    assert empty.python_seconds(CPU, "call") == 1007.0
    assert empty.overlap(CPU) == 0.25


def test_an_operation_by_its_own_name_then_one_alike_then_its_kind() -> None:
    known = rates(
        curve("gelu", {100.0: 3.0}, dtype="fp32"), curve("add", {100.0: 1.0}, dtype="fp32"), curve("add_", {100.0: 0.5}, dtype="fp32")
    )
    assert known.work_seconds(CPU, work("pointwise", "gelu", moved=100)) == 3.0
    assert known.work_seconds(CPU, work("pointwise", "aten.gelu", moved=200)) == 6.0
    assert known.work_seconds(CPU, work("pointwise", "silu", moved=100)) == 1.0, "nothing like it was measured: an addition"
    assert known.work_seconds(CPU, work("pointwise", "relu", moved=100)) == 1.0
    assert known.work_seconds(CPU, work("pointwise", "lerp_", moved=100)) == 0.5
    assert known.work_seconds(CPU, work("pointwise", "some_new_one_", moved=100)) == 0.5
    assert known.work_seconds(CPU, work("pointwise", "add", dtype="bf16", moved=100)) == 1.0, "bytes are bytes"
    assert known.work_seconds(CPU, work("gather", "embedding", moved=100)) == 1000.0, "no gather was measured"


def test_rows_that_are_added_to_a_table_are_timed_without_the_table() -> None:
    """The gradient of GPT-2's embedding took 0.15 ms on an H200, where its bytes at the rate of many rows in a small table had said 3.2."""
    known = rates(curve("embedding_dense_backward", {100.0: 2.0}, dtype="fp32"), curve("clone", {100.0: 0.5}, dtype="fp32"))
    rows = work("scatter", "embedding_dense_backward", moved=1100)
    assert known.work_seconds(CPU, replace(rows, fixed_bytes=1000)) == pytest.approx(2.0 + 5.0)
    assert known.work_seconds(CPU, rows) == pytest.approx(22.0), "what grows with the batch is no table"


def product(batch: int, m: int, n: int, k: int) -> Work:
    return work("matmul", "mm", flops=2 * batch * m * n * k, shape=(batch, m, n, k))


def test_products_by_their_smallest_dimension_and_the_others() -> None:
    # 2 GFLOP/s at 8, 8 GFLOP/s at 64, whatever the width.
    known = rates(
        curve("matmul/8", {64.0: 2 * 8 * 64**2 / 2e9, 256.0: 2 * 8 * 256**2 / 2e9}, dtype="fp32"),
        curve("matmul/64", {64.0: 2 * 64**3 / 8e9, 256.0: 2 * 64 * 256**2 / 8e9}, dtype="fp32"),
    )
    for shape, rate in (
        ((1, 8, 128, 128), 2e9),
        ((1, 128, 8, 100), 2e9),
        ((3, 64, 64, 64), 8e9),
        ((1, 4, 64, 64), 2e9),
        ((1, 512, 512, 512), 8e9),
    ):
        each = product(*shape)
        assert known.work_seconds(CPU, each) == pytest.approx(each.flops / rate), shape
    few, halfway, many = (known.work_seconds(CPU, product(1, least, 100, 100)) for least in (8, 36, 64))
    assert halfway == pytest.approx((few + many) / 2), "a straight line between the measured ones"
    assert known.work_seconds(CPU, product(1, 8, 8, 8)) > 0
    assert known.work_seconds(CPU, work("matmul", "mm", flops=100)) == 1000.0, "of unknown shape"


@pytest.mark.parametrize(
    ("shape", "thing"),
    [
        ((2, 64, 64, 64, 9, 1), "convolution"),
        ((2, 64, 64, 64, 9, 64), "depthwise"),
        ((2, 64, 64, 64, 1, 1), "one_position"),
        ((2, 3, 64, 64, 49, 1), "few_channels"),
    ],
)
def test_convolutions_by_what_decides_on_their_kernel(shape: tuple[int, ...], thing: str) -> None:
    things = ("convolution", "depthwise", "one_position", "few_channels")
    known = rates(
        *(curve(each, {100.0: 1.0 + index}, dtype="fp32") for index, each in enumerate(things)),
        *(curve(f"{each}_backward", {200.0: 10.0 + index}, dtype="fp32") for index, each in enumerate(things)),
    )
    index = things.index(thing)
    assert known.work_seconds(CPU, work("convolution", "convolution", flops=100, shape=shape)) == 1.0 + index
    halves = [work("convolution", f"convolution_backward.{half}", flops=100, shape=shape) for half in ("input", "weight")]
    assert sum(known.work_seconds(CPU, half) for half in halves) == pytest.approx(10.0 + index)


def test_causal_attention_has_a_curve_of_its_own() -> None:
    known = rates(curve("attention", {100.0: 2.0}, dtype="fp32"), curve("attention.causal", {100.0: 1.0}, dtype="fp32"))
    assert known.work_seconds(CPU, work("attention", "_flash_attention", flops=100)) == 2.0
    assert known.work_seconds(CPU, work("attention", "_flash_attention.causal", flops=100)) == 1.0


# -- several ranks ---------------------------------------------------------------------------------------------------------------------

CROWD = (
    curve("add", {100.0: 1.0}, dtype="fp32"),
    curve("matmul/8", {64.0: 1.0}, dtype="fp32"),
    curve("issue/forward", {1.0: 1.0}),
    curve("loop/ddp", {1.0: 3.0}),
    curve("unit", {1.0: 5.0}),
    curve("action", {1.0: 7.0}),
    *(curve("crowd/matmul", {1.0: seconds}, dtype="fp32", ranks=ranks) for ranks, seconds in ((1, 1.0), (2, 1.1), (4, 2.2))),
    *(curve("crowd/add", {100.0: seconds}, dtype="fp32", ranks=ranks) for ranks, seconds in ((1, 1.0), (2, 1.5), (4, 3.0))),
)


@pytest.mark.parametrize(("ranks", "memory", "compute"), [(1, 1.0, 1.0), (2, 1.5, 1.1), (3, 2.25, 1.65), (4, 3.0, 2.2), (8, 6.0, 4.4)])
def test_ranks_slow_each_other_down(ranks: int, memory: float, compute: float) -> None:
    inventory = here(8)
    known = rates(*CROWD, inventory=inventory, ranks=ranks)
    assert known.work_seconds(CPU, work("pointwise", "add", moved=100)) == pytest.approx(memory)
    assert known.issue_seconds(CPU) == pytest.approx(compute)
    assert known.loop_seconds(CPU, "ddp") == pytest.approx(3 * compute)
    assert known.python_seconds(CPU, "unit") == pytest.approx(5 * compute)
    assert known.python_seconds(CPU, "action") == pytest.approx(7 * compute)


def test_products_that_wait_for_memory_are_crowded_like_additions() -> None:
    known = rates(*CROWD, ranks=2)
    dense, thin = (
        Work(kind="matmul", name="mm", dtype="fp32", flops=65536, moved_bytes=moved, shape=(1, 8, 64, 64)) for moved in (100, 60000)
    )
    assert known.work_seconds(CPU, dense) == pytest.approx(1.1)
    assert known.work_seconds(CPU, thin) == pytest.approx(1.5)


def test_what_lengthened_a_measurement_of_few_ranks_shows_by_that_of_more() -> None:
    """Somebody worked on the machine while two were measured: four took less, and so do two."""
    disturbed = [curve("crowd/add", {100.0: seconds}, dtype="fp32", ranks=ranks) for ranks, seconds in ((1, 1.0), (2, 5.0), (4, 1.8))]
    known = rates(curve("add", {100.0: 1.0}, dtype="fp32"), *disturbed, inventory=here(4), ranks=2)
    assert known.work_seconds(CPU, work("pointwise", "add", moved=100)) == pytest.approx(1.8)


def test_ranks_that_take_turns_take_as_long_as_that() -> None:
    """One was disturbed alone: its four fellows seem to have been no slower, on two cores."""
    disturbed = [curve("crowd/add", {100.0: 2.0}, dtype="fp32", ranks=ranks) for ranks in (1, 2, 4)]
    known = rates(curve("add", {100.0: 1.0}, dtype="fp32"), *disturbed, inventory=here(4, cores=2), ranks=4)
    assert known.work_seconds(CPU, work("pointwise", "add", moved=100)) == pytest.approx(2.0)


def test_without_measurements_of_several_ranks_cores_are_shared_evenly() -> None:
    inventory = here(4, cores=2)
    known = rates(curve("add", {100.0: 1.0}, dtype="fp32"), inventory=inventory, ranks=4)
    assert known.work_seconds(CPU, work("pointwise", "add", moved=100)) == pytest.approx(2.0)


def test_views_are_made_once() -> None:
    inventory = here(4)
    known = rates(*CROWD, inventory=inventory)
    two = known.among(inventory.devices[:2], inventory)
    assert known.among(inventory.devices[1:3], inventory) is two
    assert two.among(inventory.devices[:1], inventory) is known.among(inventory.devices[:1], inventory)
    assert two.among(inventory.devices[:2], inventory) is two


def test_collectives_by_number_of_ranks() -> None:
    inventory = here(4)
    known = rates(
        curve("all_reduce", {100.0: 1.0, 1000.0: 10.0}, ranks=2),
        curve("all_reduce", {100.0: 4.0}, ranks=4),
        curve("send", {100.0: 2.0}, ranks=2),
    )
    devices = inventory.devices
    assert known.collective_seconds("all_reduce", 1000, devices[:2], inventory) == 10.0
    assert known.collective_seconds("all_reduce", 10, devices[:2], inventory) == 1.0, "the latency is the smallest one's"
    assert known.collective_seconds("all_reduce", 100, devices, inventory) == 4.0
    assert known.collective_seconds("all_reduce", 100, devices[:3], inventory) == pytest.approx(4.0 * 3 / 4), (
        "three as four, by their number"
    )
    assert known.collective_seconds("send", 100, devices[2:], inventory) == 2.0
    assert known.collective_seconds("all_gather", 100, devices[:2], inventory) == 100.0, "not measured"


def test_more_ranks_than_were_measured_as_the_data_sheet_has_it_between_them() -> None:
    inventory = here(4)
    known = rates(curve("all_reduce", {100.0: 1.0}, ranks=2))
    assert known.collective_seconds("all_reduce", 100, inventory.devices, inventory) == pytest.approx(3.0), "300 beside 100"


def gpus(count: int, kind: Any = "nvlink", name: str = "NVIDIA H100 80GB HBM3") -> Inventory:
    devices = tuple(gpu(index, name=name) for index in range(count))
    links = tuple(Link(a=a.id, b=b.id, kind=kind) for a, b in itertools.combinations(devices, 2))
    return inventory(*devices, links=links)


def test_what_was_measured_of_a_group_counts_for_every_group_of_that_model_linked_alike() -> None:
    here = gpus(8)
    key = "cuda/NVIDIA H100 80GB HBM3 by nvlink"
    assert {group_key(chosen, here) for chosen in (here.devices, here.devices[3:5], here.devices[5:])} == {key}
    known = rates(
        *(curve("all_reduce", {100.0: seconds}, ranks=ranks, subject=key) for ranks, seconds in ((2, 1.0), (4, 2.0), (8, 4.0))),
        inventory=here,
    )
    assert known.collective_seconds("all_reduce", 100, here.devices, here) == 4.0
    assert known.collective_seconds("all_reduce", 100, here.devices[2:6], here) == 2.0
    assert known.collective_seconds("all_reduce", 100, here.devices[6:], here) == 1.0
    assert known.collective_seconds("all_reduce", 100, here.devices[:3], here) == pytest.approx(1.5), "as four, by their number"
    for other in (gpus(8, "host"), gpus(8, name="NVIDIA A100-SXM4-80GB")):
        assert known.collective_seconds("all_reduce", 100, other.devices, other) == 700.0, "not measured"


def test_operations_of_a_gpu_count_for_all_of_its_model() -> None:
    here = gpus(2)
    known = rates(curve("add", {100.0: 1.0}, dtype="fp32", subject=device_key(here.devices[0])), inventory=here)
    assert known.work_seconds(here.devices[1], work("pointwise", "add", moved=100)) == 1.0
    assert known.device_class(here.devices[0]) == known.device_class(here.devices[1])


def test_products_of_a_batch_keep_a_gpu_as_busy_as_one_large_product() -> None:
    """Attention without a fused kernel: 76 such products of T5 took an H200 14 ms, and 37 were predicted one by one."""
    here = gpus(1)
    points = {256.0: 2 * 64 * 256**2 / 1e12, 4096.0: 2 * 64 * 4096**2 / 16e12}
    (on_gpu,) = here.devices
    on_both = [curve("matmul/64", points, dtype="fp32", subject=subject) for subject in (device_key(on_gpu), "cpu/1")]
    known = rates(*on_both, inventory=here)
    one, batch = product(1, 1024, 1024, 64), product(16, 1024, 1024, 64)
    assert known.work_seconds(on_gpu, batch) == pytest.approx(known.work_seconds(on_gpu, product(1, 4096, 4096, 64)))
    assert known.work_seconds(CPU, batch) == pytest.approx(16 * known.work_seconds(CPU, one)), "a core takes one after the other"


def test_a_gpus_launch_time_is_no_rate() -> None:
    """Attention's backward took 149 and 161 µs on an H200 at sizes of which one of 27 times as many FLOPs took 694."""
    here = gpus(1)
    (device,) = here.devices
    measured = curve("attention_backward", {2.1e7: 149e-6, 6.71e8: 161e-6}, dtype="fp32", subject=device_key(device))
    known = MeasuredRates(rates(measured, inventory=here).calibration, DataSheet())
    large = work("attention", "attention_backward", flops=18_119_393_280, moved=160_727_056, shape=(16, 12, 384, 384, 64))
    assert 0.4e-3 < known.work_seconds(device, large) < 1.5e-3
    small = work("attention", "attention_backward", flops=671_000_000, shape=(1, 12, 384, 384, 64))
    assert known.work_seconds(device, small) == pytest.approx(161e-6)


def test_the_loop_is_the_hosts_and_what_an_engine_adds_the_data_sheets() -> None:
    class Sheet(Fake):
        def loop_seconds(self, device: Device, engine: Engine) -> float:
            return 1.0 if engine == "single" else 1.25

    found = Calibration().with_curves(
        [curve("loop/single", {1.0: 3.0}, subject=HOST), curve("call", {1.0: 5.0}, subject=HOST)], day="d", took_seconds=1.0
    )
    known, (device,) = MeasuredRates(found, Sheet()), gpus(1).devices
    assert known.loop_seconds(device, "single") == 3.0
    assert known.loop_seconds(device, "fsdp") == 3.25
    assert known.python_seconds(device, "call") == 5.0


def test_the_host() -> None:
    known = rates(
        curve("adam", {100.0: 1.0}, subject=HOST),
        curve("adam", {100.0: 4.0}, subject="cpu/2"),
    )
    assert known.host_adam_seconds(1000, CPU) == pytest.approx(10.0)
    assert known.host_adam_seconds(1000, replace(CPU, threads=2)) == pytest.approx(40.0), "a rank's own threads alone"


def test_devices_of_one_class_have_the_same_rates() -> None:
    inventory = here(2)
    known = rates(*CROWD)
    assert len({known.device_class(device) for device in inventory.devices}) == 1
    assert device_key(inventory.devices[0]) == "cpu/1"
    other = parse_spec("2xH100-80GB", host_bytes=(8 * GIB, 8 * GIB), cores=8).devices[0]
    assert MeasuredRates(known.calibration, DataSheet()).device_class(other) == DataSheet().device_class(other)


def test_in_words() -> None:
    inventory = here(2)
    found = Calibration().with_curves(
        [
            curve("matmul/512", {512.0: 2 * 512**3 / 90e9}, dtype="fp32"),
            curve("add", {1e9: 0.1}, dtype="fp32"),
            curve("issue/forward", {1.0: 2e-5}),
            curve("all_reduce", {1024.0: 1e-3, 2.0**20: 2.0**-10}, ranks=2),
        ],
        day="2026-11-22",
        took_seconds=1,
    )
    assert str(speeds(found, inventory.devices[0])) == "90 GFLOP/s, 9.31 GiB/s, 20 µs an operation"
    assert str(speeds(Calibration(), inventory.devices[0])) == ""
    assert list(collective_lines(found, inventory)) == ["  all_reduce of 2 ranks: 1 ms, 1 GiB/s in large messages"]
