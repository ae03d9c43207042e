"""FSDP2 on a rank: its arithmetic by hand, and against real ranks where there is a C compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.live_bytes import compiler
from lightning_autopar.memory.device_bytes import DeviceBytes
from lightning_autopar.memory.footprint import Footprint, LayerFootprint, Moment
from lightning_autopar.memory.fullest_moments import moments_of
from lightning_autopar.plans import Plan
from lightning_autopar.strategies.fsdp.memory import Widths, evaluation_communication, fsdp_bytes, sharding_of, unit_of

ROOT = Path(__file__).resolve().parents[3]
NAMES = ("blocks.0", "blocks.1")


def layer(fqn: str, *rows: tuple[int, int, bool], **values: int) -> LayerFootprint:
    size = sum(count * row_bytes for count, row_bytes, _ in rows)
    learns = sum(count * row_bytes for count, row_bytes, learned in rows if learned)
    return LayerFootprint(fqn=fqn, parameter_bytes=size, gradient_bytes=learns, parameter_rows=rows, **values)


def footprint(*moments: Moment, rows: tuple[tuple[int, int, bool], ...] = ((10, 100, True),), **values: Any) -> Footprint:
    """Two blocks of 1000 bytes and a root of 500; a batch of 8."""
    blocks = tuple(layer(name, *rows, activation_bytes=400) for name in NAMES)
    outer = (layer("", (5, 100, True)), LayerFootprint(fqn=""), LayerFootprint(fqn=""))
    total = sum(part.parameter_bytes for part in (*blocks, *outer))
    figures: dict[str, Any] = {
        "parameters": total // 4,
        "trainable_parameters": total // 4,
        "batch_size": 8,
        "parameter_bytes": total,
        "gradient_bytes": sum(part.gradient_bytes for part in (*blocks, *outer)),
        "optimizer_bytes": 2 * total,
        "buffer_bytes": 16,
        "activation_bytes": 800,
        "temporary_bytes": 0,
        "input_bytes": 80,
        "blocks": blocks,
        "outer": outer,
        "moments": moments,
    }
    return Footprint(**{**figures, **values})


def plan(world_size: int, *, reshard: bool = True, **values: Any) -> Plan:
    devices = tuple(f"cpu:{index}" for index in range(world_size))
    return Plan(**{"engine": "fsdp", "devices": devices, "reshard_after_forward": reshard, "shard": NAMES, **values})


def held_by(of: Footprint, by: Plan, *, rank: int = 0, share: float = 0.5, copies: bool = False) -> DeviceBytes:
    return fsdp_bytes(of, by, moments_of(of, (), share), rank=rank, share=share, copies=copies)


FORWARD = {"phase": "forward", "gradient_bytes": 2500}


def test_parameters_are_cut_by_rows_and_padded_each_by_itself() -> None:
    unit = unit_of([layer("", (10, 4, True), (3, 100, False), (1, 8, True))], 8)
    # Two rows, one and one on each of eight ranks.
    assert unit.gathered == 8 * (2 * 4 + 100 + 8)
    assert unit.shard == 2 * 4 + 100 + 8
    assert unit.whole == 10 * 4 + 300 + 8
    assert (unit.gradients, unit.reduced) == (10 * 4 + 8, 8 * (2 * 4 + 8))
    own = [unit_of([layer("", (10, 4, True), (3, 100, False), (1, 8, True))], 8, rank).own for rank in range(8)]
    assert own == [116, 108, 108, 8, 8, 0, 0, 0]
    assert sum(own) == unit.whole


def test_what_lies_between_steps() -> None:
    sharding = sharding_of(footprint(), plan(4))
    assert (sharding.root.gathered, sharding.root.shard) == (800, 200)
    assert [unit.gathered for unit in sharding.blocks] == [1200, 1200]
    last = held_by(footprint(Moment(**FORWARD)), plan(4), rank=3)
    assert last.parameters == 200 + 300 + 300
    # The last rank has one row of each block and none of the root: of the state it has a share of 200 in 2500.
    assert last.optimizer == round(5000 * 200 / 2500)
    assert (last.input, last.buffers) == (40, 16)
    part = sharding_of(footprint(), plan(4, shard=NAMES[:1]))
    assert part.blocks[1].gathered == 0
    assert part.root.gathered == 800 + 1200
    copies = sharding_of(footprint(), plan(4, replicas=2))
    assert copies.shards == 2
    assert copies.total.shard == 300 + 500 + 500


def test_forward_gathers_a_block_into_a_buffer_and_copies_it_out() -> None:
    runs = footprint(Moment(**FORWARD, held=1, running=True, activation_bytes=400))
    held = held_by(runs, plan(2))
    # The root, the block, and its buffer; gradients of the step before, with their padding.
    assert held.communication == 600 + 1000 + 1000
    assert held.gradients == 300 + 500 + 500
    assert held.activations == 200
    assert held_by(runs, plan(2, reshard=False)).communication == 600 + 2000 + 1000
    begins = footprint(Moment(**FORWARD, held=1, running=True, boundary=True))
    # The buffer of the block before is let go when the copy is done.
    assert held_by(begins, plan(2)).communication == 600 + 1000 + 1000 + 1000
    start = footprint(Moment(**FORWARD, held=0, boundary=True))
    assert held_by(start, plan(2)).communication == held_by(start, plan(2), copies=True).communication == 2 * 600
    whole = footprint(Moment(**FORWARD, held=2))
    assert held_by(whole, plan(2, shard=())).communication == 2 * 2600


@pytest.mark.parametrize("copies", [False, True])
def test_backward_gathers_ahead_and_reduces_at_a_blocks_end(copies: bool) -> None:
    def communication(moment: Moment, **values: Any) -> tuple[int, int]:
        held = held_by(footprint(moment), plan(2, **values), copies=copies)
        return held.communication, held.gradients

    extra = 1000 * copies
    head = Moment(phase="backward", held=2, boundary=True)
    assert communication(head) == (600 + 1000 + extra, 0)
    assert communication(head, reshard=False) == (600 + 2000, 0)
    # Block 1 runs: gathered, with block 0's buffer ahead; nothing is reduced yet.
    runs = Moment(phase="backward", held=1, running=True, gradient_bytes=700)
    assert communication(runs) == (600 + 1000 + 1000, 700)
    # Block 0 runs: block 1's gradients are in shards, and their flat buffer is still there; so is a whole one of its own.
    runs = Moment(phase="backward", held=0, running=True, gradient_bytes=1300)
    assert communication(runs) == (600 + 1000 + 1000, 500 + 300)


def test_a_blocks_end() -> None:
    moments = (
        Moment(phase="backward", held=1, running=True),
        Moment(phase="backward", held=0, running=True, boundary=True, gradient_bytes=1200),
    )
    held = held_by(footprint(*moments), plan(2))
    # Block 1's gradients whole (1000) beside 200 of the root's, the flat buffer for them, and block 0's parameters in their buffer; or
    # the latter copied out, and the gradients in shards (700).
    assert held.gradients + held.communication == max(1200 + 600 + 1000 + 1000, 700 + 600 + 1000 + 1000 + 1000)
    copying = held_by(footprint(*moments), plan(2), copies=True)
    assert copying.gradients + copying.communication == 700 + 600 + 1000 + 1000 + 1000
    frozen = held_by(footprint(*moments, rows=((10, 100, False),)), plan(2))
    assert frozen.gradients == 1200  # nothing of a block's


def test_the_root_reduces_last_and_with_it_a_block_whose_end_nobody_told() -> None:
    optimizer = Moment(phase="optimizer", gradient_bytes=2500, activation_bytes=20_000, fixed_bytes=100)
    told = (Moment(phase="backward", held=index, running=False, boundary=True) for index in (1, 0))
    runs = (Moment(phase="backward", held=index, running=True) for index in (1, 0))
    order = [moment for pair in zip(runs, told, strict=True) for moment in pair]
    held = held_by(footprint(*order, optimizer), plan(2))
    # Blocks in shards, the root whole, and its flat buffer.
    assert (held.gradients, held.communication, held.temporary) == (500 + 500 + 500, 600, 0)
    copying = held_by(footprint(*order, optimizer), plan(2), copies=True)
    assert (copying.gradients, copying.communication) == (500 + 500 + 300, 2 * 600)
    late = held_by(footprint(*order[:-1], optimizer), plan(2))
    assert late.gradients == 500 + 1000 + 500  # block 0's, whole
    assert late.communication == 600 + 1000


def test_the_optimizer_works_on_shards() -> None:
    held = held_by(footprint(Moment(phase="optimizer", gradient_bytes=2500, fixed_bytes=40_000)), plan(4))
    assert (held.temporary, held.communication, held.gradients) == (10_000, 0, 200 + 300 + 300)


def test_mixed_precision_stores_and_reduces_in_more_bytes_than_it_gathers() -> None:
    wide = Widths(stored=2.0, reduced=2.0)
    unit = unit_of([layer("", (10, 4, True), (3, 100, False))], 2, widths=wide)
    plain = unit_of([layer("", (10, 4, True), (3, 100, False))], 2)
    assert (unit.gathered, unit.gradients, unit.own) == (plain.gathered, plain.gradients, plain.own)
    assert (unit.shard, unit.reduced, unit.kept) == (2 * plain.shard, 2 * plain.reduced, 2 * plain.kept)
    runs = footprint(Moment(phase="optimizer", gradient_bytes=2500))
    moments = moments_of(runs, (), 0.5)
    held, before = (fsdp_bytes(runs, plan(4), moments, rank=0, share=0.5, copies=False, widths=one) for one in (wide, Widths()))
    assert held.parameters == 2 * before.parameters
    # At the end the root's flat buffer is there beside the whole gradients.
    root = sharding_of(runs, plan(4)).root.reduced
    assert held.communication == before.communication + root


def test_parts_of_a_batch_add_up_gradients_in_shards() -> None:
    runs = footprint(Moment(phase="backward", held=1, running=True, gradient_bytes=700))
    assert held_by(runs, plan(2, micro_batches=2)).gradients == 700 + 1300
    # A tape of two batches: the second one's backward finds gradients, and is as the first one's otherwise.
    first = Moment(phase="backward", held=1, running=True, gradient_bytes=700)
    between = Moment(phase="forward", held=2)
    head = Moment(phase="backward", held=2, boundary=True, gradient_bytes=2500)
    again = Moment(phase="backward", held=1, running=True, gradient_bytes=2500)
    assert held_by(footprint(first, between, head, again), plan(2)).gradients == 700 + 1300


def test_offloaded_shards_lie_on_the_host() -> None:
    held = held_by(footprint(Moment(**FORWARD, held=2)), plan(2, offload=("parameters", "optimizer")))
    assert (held.parameters, held.gradients, held.optimizer) == (0, 0, 0)
    assert held.communication > 0


@pytest.mark.parametrize("copies", [False, True])
def test_offloaded_gradients_are_the_devices_until_they_are_reduced(copies: bool) -> None:
    offload = plan(2, offload=("parameters", "optimizer"))
    # Block 0 runs: 300 of its gradients are whole, and so are 200 of the root's; those of block 1 lie on the host.
    runs = footprint(Moment(phase="backward", held=0, running=True, gradient_bytes=1500))
    held, there = (held_by(runs, one, copies=copies) for one in (offload, plan(2)))
    assert (held.gradients, there.gradients) == (500, 500 + 500)
    assert held.communication == there.communication
    # A GPU's reduced part is there until it is copied; a CPU device's is made where it stays.
    ends = footprint(
        Moment(phase="backward", held=1, running=True),
        Moment(phase="backward", held=0, running=True, boundary=True, gradient_bytes=1000),
    )
    held = held_by(ends, offload, copies=copies)
    always = 600 + 1000 + 1000  # the root, block 0's buffer ahead, block 1's flat buffer
    assert held.gradients + held.communication == max(always + 1000, always + (1000 if copies else 500))
    # The optimizer works on the host.
    steps = footprint(Moment(phase="optimizer", gradient_bytes=2500, fixed_bytes=40_000))
    assert held_by(steps, offload, copies=copies).temporary == 0


def test_a_rank_of_one_gathers_without_buffers() -> None:
    # Nothing is padded for one rank.
    begins = footprint(Moment(**FORWARD, held=1, running=True, boundary=True))
    runs = footprint(Moment(phase="backward", held=1, running=True, gradient_bytes=700))
    ends = footprint(
        Moment(phase="backward", held=1, running=True),
        Moment(phase="backward", held=0, running=False, boundary=True, gradient_bytes=1000),
    )
    for copies in (False, True):
        assert held_by(begins, plan(1), copies=copies).communication == 500 + 1000
        assert held_by(runs, plan(1), copies=copies).communication == 500 + 1000
        assert held_by(ends, plan(1), copies=copies).communication == 500 + 1000
    sharding = sharding_of(footprint(), plan(1))
    assert evaluation_communication(sharding, reshard=True) == (500 + 1000, 500 + 1000)
    assert evaluation_communication(sharding, reshard=False) == (500 + 2000, 500 + 2000)


def test_without_rows_sizes_are_cut_evenly() -> None:
    moment = Moment(**FORWARD, held=2, activation_bytes=800)
    known = footprint(moment)
    blocks = tuple(replace(block, parameter_rows=()) for block in known.blocks)
    held = held_by(replace(known, blocks=blocks, outer=()), plan(2))
    assert (held.parameters, held.gradients) == (1250, 1250)
    assert held.communication == 500 + 1000


def test_validation_gathers_as_forward_does() -> None:
    sharding = sharding_of(footprint(), plan(2))
    assert evaluation_communication(sharding, reshard=True) == (600 + 1000 + 2000, 600 + 2000)
    assert evaluation_communication(sharding, reshard=False) == (600 + 1000 + 1000 + 2000, 600 + 1000 + 2000)


@pytest.mark.skipif(compiler() is None, reason="live bytes are counted by a library that is compiled first")
def test_real_ranks(tmp_path: Path) -> None:
    """Two ranks under the Trainer, and rank 0 of a world of eight, of a module whose sizes no number of ranks divides."""
    out = tmp_path / "found.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "memory_fsdp.py"), "--quick", "--only", "odd", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=170, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(out.read_text())["rows"]
    assert {row["world"] for row in rows} == {2, 8}
    for row in rows:
        for rank in row["ranks"]:
            assert abs(rank["error"]) <= 0.02, row
