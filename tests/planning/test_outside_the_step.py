"""What is held outside of a step: by hand, and a whole state dict against what gathering it really takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_autopar import engines
from lightning_autopar.memory.footprint import Footprint
from lightning_autopar.memory.fullest_moments import moments_of
from lightning_autopar.planning.plan_bytes import host_bytes, predict
from lightning_autopar.plans import Plan
from tests.planning.test_plan_bytes import FOOTPRINT, INVENTORY, moment, one
from tests.strategies.fsdp.test_memory import NAMES
from tests.strategies.fsdp.test_memory import footprint as sharded_footprint

MIB = 1 << 20


def plan(engine: str, world_size: int = 2, *, kind: str = "cpu", **values: Any) -> Plan:
    more = {"fsdp": {"reshard_after_forward": True, "shard": NAMES}, "zero": {"zero_stage": 2}}.get(engine, {})
    return Plan(engine=engine, devices=tuple(f"{kind}:{index}" for index in range(world_size)), **{**more, **values})  # type: ignore[arg-type]


def found(occasion: str, footprint: Footprint, of: Plan, *, number: int = 0, share: float = 0.5) -> Any:
    """What a rank holds then; None where its engine says nothing of it."""
    rank = engines.Rank(
        footprint=footprint,
        plan=of,
        number=number,
        rows=round(share * footprint.batch_size),
        device=INVENTORY.device(of.devices[number]),
        precision="32-true",
        moments=lambda: moments_of(footprint, frozenset(), share),
    )
    return next((held for held in engines.of(of).bytes(rank) if held.occasion == occasion), None)


def test_validation_between_steps_has_no_gradients_but_ddps_buckets() -> None:
    known = replace(FOOTPRINT, evaluation_bytes=6000)
    single = found("validation", known, plan("single", 1), share=1.0)
    assert (single.gradients, single.temporary, single.activations, single.input) == (0, 6000, 0, 0)
    assert (single.parameters, single.optimizer, single.buffers) == (2500, 5000, 16)
    assert found("validation", known, plan("ddp")).gradients == 2500
    assert found("validation", known, plan("ddp")).temporary == 3000
    assert found("validation", FOOTPRINT, plan("single", 1)) is None
    assert found("validation", replace(known, training=False), plan("single", 1)) is None


@pytest.mark.parametrize("engine", ["single", "ddp", "zero"])
def test_validation_holds_the_copies_that_callbacks_set_aside(engine: str) -> None:
    known, of = replace(FOOTPRINT, evaluation_bytes=6000, set_aside_bytes=700), plan(engine, 1 if engine == "single" else 2)
    assert [found(occasion, known, of).buffers for occasion in ("step", "validation")] == [16, 716]


def test_validation_of_shards_gathers_as_forward_does() -> None:
    moments = (moment("forward", held=2, gradient_bytes=2500),)
    known = sharded_footprint(*moments, evaluation_bytes=6000)
    held = found("validation", known, plan("fsdp"))
    # While a block computes: the root, the block, and its buffer. While one begins there is a buffer more, and nothing of the step's yet.
    assert (held.communication, held.temporary) == (600 + 2000, 3000)
    few = found("validation", replace(known, evaluation_bytes=100), plan("fsdp"))
    assert (few.communication, few.temporary) == (600 + 3000, 40)
    assert held.gradients == few.gradients == 0


@pytest.mark.parametrize("engine", ["single", "ddp", "fsdp"])
def test_the_fullest_occasion_is_named(engine: str) -> None:
    names = {"single": 1}
    of = plan(engine, names.get(engine, 2), **({"shard": ("blocks.0", "blocks.1")} if engine == "fsdp" else {}))
    small, large = (predict(replace(FOOTPRINT, evaluation_bytes=size), of, INVENTORY)["cpu:0"] for size in (10, 100_000))
    assert (small.occasion, large.occasion) == ("step", "validation")
    assert large.temporary == round(100_000 / of.world_size)
    assert large.to_dict()["occasion"] == "validation"


def test_a_checkpoint_of_shards_is_made_whole_a_tensor_at_a_time() -> None:
    known = sharded_footprint(moment("forward", held=2), rows=((11, 100, True),))
    first, last = (found("checkpoint", known, plan("fsdp", kind="cuda"), number=rank) for rank in (0, 1))
    # Twelve rows of 100 bytes; the last rank has five and pads its part to six.
    assert first.communication == 12 * 100
    assert last.communication == 12 * 100 + 600
    assert found("checkpoint", known, plan("fsdp")).communication == 2 * 12 * 100
    assert first.gradients == 300 + 600 + 600
    assert first.occasion == "checkpoint"
    assert found("checkpoint", known, plan("ddp")) is None
    # Where a step never makes the largest parameter whole twice at once, that is the fullest.
    wide = replace(known.outer[0], parameter_bytes=500, parameter_rows=((5, 100, True), (2, 100_000, False)))
    assert one(replace(known, outer=(wide, *known.outer[1:])), plan("fsdp", shard=NAMES)).occasion == "checkpoint"


def test_replicas_that_are_not_forked_are_sent_the_weights() -> None:
    frozen = replace(FOOTPRINT, parameter_bytes=2000 * MIB, gradient_bytes=8, optimizer_bytes=16, moments=())
    held = found("start", frozen, plan("ddp", kind="cuda"))
    assert (held.parameters, held.communication, held.occasion) == (2000 * MIB, 500 * MIB, "start")
    assert found("start", FOOTPRINT, plan("ddp", kind="cuda")).communication == 2516
    assert found("start", frozen, plan("ddp")) is None
    assert found("start", frozen, plan("single", 1)) is None
    assert one(frozen, plan("ddp", kind="cuda")).occasion == "start"


def test_the_hosts_memory() -> None:
    known = replace(FOOTPRINT, largest_parameter_bytes=400)
    state = 2500 + 16 + 5000
    single = host_bytes(known, plan("single", 1), workers=2)
    assert (single.module, single.checkpoint, single.input, single.offload) == (0, state + 400, 5 * 80, 0)
    assert single.total == sum(value for name, value in single.to_dict().items() if name != "total") == single.to_dict()["total"]
    # Rank 0 makes one shard after the other whole, on disk.
    shards = host_bytes(known, plan("fsdp", 4))
    assert (shards.module, shards.checkpoint) == (2516, 400)
    # Each replica reads the whole file; FSDP maps it.
    assert host_bytes(known, plan("ddp", 4), resumes=True).checkpoint == 4 * state
    assert host_bytes(known, plan("fsdp", 4), resumes=True).checkpoint == shards.checkpoint
    assert host_bytes(replace(known, training=False), plan("ddp", 4)).checkpoint == 0


def test_what_is_offloaded_lies_on_the_host() -> None:
    known = sharded_footprint(moment("forward", held=2))
    held = host_bytes(known, plan("fsdp", 2, offload=("parameters", "optimizer")), on_cpu=True)
    # Padded parameters and gradients of both ranks, and the state.
    assert (held.offload, held.pinned) == (2 * 1300 + 2 * 1300 + 5000, 0)
    twice = host_bytes(known, plan("fsdp", 4, replicas=2, offload=("parameters", "optimizer")), on_cpu=True)
    assert twice.offload == 2 * held.offload
    # Of GPUs each shard and each gradient is page-locked by itself, in a block of a power of two bytes.
    gpus = host_bytes(known, plan("fsdp", 2, offload=("parameters", "optimizer")))
    shards = [-(-rows // 2) * row_bytes for layer in (*known.blocks, *known.outer) for rows, row_bytes, _ in layer.parameter_rows]
    assert gpus.offload == 5000
    assert gpus.pinned == 2 * 2 * sum(1 << (size - 1).bit_length() for size in shards)
    assert host_bytes(known, plan("zero", 2, zero_stage=2, offload=("optimizer",))).offload > 0
