from dataclasses import replace
from typing import Any

import pytest

from lightning_autopar.constraints import Constraints
from lightning_autopar.devices.inventory import Inventory, Link
from lightning_autopar.devices.spec import parse_spec
from lightning_autopar.planning.device_sets import coarse_sizes, device_sets, islands, largest_size, single_sets, sizes_between
from tests.fakes.values import GIB, cpu, gpu, inventory


def speeds(here: Inventory) -> dict[str, float]:
    return {device.id: (0.1 if "T4" in device.name else 1.0) * (1 - round(device.utilization or 0.0, 1)) for device in here.devices}


def alone(here: Inventory) -> list[tuple[str, ...]]:
    return [tuple(device.id for device in devices) for devices in single_sets(here, Constraints(), speeds(here))]


def chosen(here: Inventory, batch_size: int = 8, **constraints: Any) -> list[tuple[str, ...]]:
    found = device_sets(batch_size, here, Constraints(**constraints), speeds(here))
    order = [device.id for device in here.devices]
    return [tuple(sorted((device.id for device in devices), key=order.index)) for devices in found]


def test_of_equal_devices_the_freest_stands_for_all_and_different_ones_stand_for_themselves() -> None:
    here = inventory(gpu(0, 10 * GIB), gpu(1, 40 * GIB), gpu(2, 20 * GIB, utilization=0.5), gpu(3, 30 * GIB, name="Tesla T4"))
    assert alone(here) == [("GPU-0001",), ("GPU-0003",), ("GPU-0002",)]


def test_the_freest_devices_are_taken_and_the_idler_of_equally_free_ones() -> None:
    here = inventory(gpu(0, 10 * GIB), gpu(1, 40 * GIB), gpu(2, 20 * GIB), gpu(3, 30 * GIB))
    assert chosen(here, batch_size=12) == [
        ("GPU-0001", "GPU-0003"),
        ("GPU-0001", "GPU-0002", "GPU-0003"),
        tuple(d.id for d in here.devices),
    ]
    here = inventory(gpu(0, utilization=0.04), gpu(1, utilization=0.0), gpu(2, utilization=0.01))
    assert alone(here) == [("GPU-0001",)]


def test_a_slow_device_does_not_keep_the_fast_ones_from_being_a_set() -> None:
    here = inventory(gpu(0, 70 * GIB, utilization=0.9), gpu(1, 40 * GIB), gpu(2, 30 * GIB))
    assert ("GPU-0001", "GPU-0002") in chosen(here)
    assert ("GPU-0000", "GPU-0001") in chosen(here)


def test_devices_linked_by_nvlink_are_a_set_and_so_are_those_of_one_node() -> None:
    here = inventory(
        gpu(0, 40 * GIB),
        gpu(1, 30 * GIB),
        gpu(2, 40 * GIB),
        gpu(3, 30 * GIB),
        links=(
            Link(a="GPU-0000", b="GPU-0001", kind="nvlink"),
            Link(a="GPU-0002", b="GPU-0003", kind="nvlink"),
            Link(a="GPU-0000", b="GPU-0002", kind="pcie"),
        ),
    )
    # Of islands that are alike one stands for both.
    assert {("GPU-0000", "GPU-0001"), ("GPU-0000", "GPU-0002")} == {devices for devices in chosen(here) if len(devices) == 2}
    nodes = inventory(gpu(0, 40 * GIB), gpu(1, 30 * GIB), gpu(2, 40 * GIB, node=1), gpu(3, 30 * GIB, node=1))
    assert ("GPU-0000", "GPU-0001") in chosen(nodes)


def test_devices_of_different_kinds_are_never_in_one_plan() -> None:
    here = inventory(cpu(0), cpu(1), gpu(0))
    assert chosen(here) == [("cpu:0", "cpu:1")]


def test_no_more_ranks_than_samples_or_than_devices_allowed() -> None:
    here = inventory(*(cpu(index) for index in range(4)))
    assert max(map(len, chosen(here, batch_size=3))) == 3
    assert max(map(len, chosen(here, max_devices=2))) == 2
    assert min(map(len, chosen(here, min_devices=3))) == 3


def test_of_nodes_that_are_alike_one_stands_for_all_and_whole_nodes_are_sets() -> None:
    found = chosen(parse_spec("64x8xH100-80GB"), batch_size=4096)
    sizes = [len(devices) for devices in found]
    assert len(found) < 100
    assert {2, 8, 16, 64, 256, 512} <= set(sizes)
    assert len([size for size in sizes if size == 8]) <= 2
    whole = next(devices for devices in found if len(devices) == 64)
    assert {device.rpartition(":")[2] for device in whole} >= {"0", "63"}


@pytest.mark.parametrize(
    ("least", "most", "node", "sizes"),
    [
        (2, 6, 0, [2, 3, 4, 5, 6]),
        (30, 90, 0, [30, 31, 32, 48, 64, 90]),
        (36, 90, 8, [48, 64, 88, 90]),
        (3, 2, 0, []),
    ],
)
def test_small_numbers_all_and_large_ones_in_steps(least: int, most: int, node: int, sizes: list[int]) -> None:
    assert coarse_sizes(least, most, node) == sizes


def test_between_the_sizes_tried_those_that_spare_the_fullest_rank_a_sample() -> None:
    assert sorted(sizes_between(100, [16, 24, 32], 24)) == [17, 20, 25]
    assert sizes_between(0, [16, 20], 20) == [17, 18, 19]
    assert sizes_between(64, [2, 3, 4], 3) == []


def test_islands_are_what_the_best_links_connect() -> None:
    four = [gpu(index) for index in range(4)]
    pairs = (Link(a="GPU-0000", b="GPU-0001", kind="nvlink"), Link(a="GPU-0002", b="GPU-0003", kind="nvlink"))
    slow = Link(a="GPU-0001", b="GPU-0002", kind="pcie")
    found = islands(inventory(*four, links=(*pairs, slow)), four)
    assert [[device.id for device in island] for island in found] == [["GPU-0000", "GPU-0001"], ["GPU-0002", "GPU-0003"]]
    assert islands(inventory(*four), four) == [four]


def test_of_the_mig_instances_of_a_gpu_one_is_in_a_plan_of_several() -> None:
    here = inventory(
        *(replace(gpu(number, (20 - number) * GIB), part_of=whose) for number, whose in enumerate(("GPU-a", "GPU-a", "GPU-b", "GPU-b"))),
        replace(gpu(4, 10 * GIB)),
    )
    assert chosen(here) == [("GPU-0000", "GPU-0002"), ("GPU-0000", "GPU-0002", "GPU-0004")]
    assert largest_size(8, here, Constraints()) == 3
