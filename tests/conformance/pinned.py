"""Plans that are pinned for a run, to see that they too are plain Lightning's: what engines do beside an even split of the batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_autopar.plans import Plan
from tests.conformance.devices import CPUS


@dataclass(frozen=True, kw_only=True)
class Pinned:
    """A kind of plan.

    Args:
        name: the key in every table.
        about: the row's words in docs/features.md.
        cases: the zoo's members that it is tried on.
        plans: the plan, by engine.
    """

    name: str
    about: str
    cases: tuple[str, ...]
    plans: Mapping[str, Plan]


_LAYERS = tuple(f"transformer.{half}.layers.{index}" for half in ("encoder", "decoder") for index in range(2))
_BLOCKS = ("blocks.0", "blocks.1")


PINNED: dict[str, Pinned] = {
    pinned.name: pinned
    for pinned in (
        # The LSTM's last batch has one sample, which leaves a rank without.
        Pinned(
            name="shares",
            about="uneven shares of a batch, 1:2",
            cases=("resnet", "lstm", "gan"),
            plans={
                "ddp": Plan(engine="ddp", devices=CPUS.ids(2), shares=(1, 2)),
                "fsdp": Plan(engine="fsdp", devices=CPUS.ids(2), reshard_after_forward=True, shares=(1, 2)),
            },
        ),
        Pinned(
            name="hybrid",
            about="two replicas of two shards each, four devices",
            cases=("gpt", "gan"),
            plans={"fsdp": Plan(engine="fsdp", devices=CPUS.ids(4), reshard_after_forward=True, replicas=2)},
        ),
        # Three parts of eight samples aren't alike, and a last batch of one sample is no part more.
        Pinned(
            name="micro-batches",
            about="a batch in parts, one after the other: three on one device, two on each of two",
            cases=("gpt", "lstm", "metrics"),
            plans={
                "single": Plan(engine="single", devices=CPUS.ids(1), micro_batches=3),
                "ddp": Plan(engine="ddp", devices=CPUS.ids(2), micro_batches=2),
                "fsdp": Plan(engine="fsdp", devices=CPUS.ids(2), reshard_after_forward=True, micro_batches=2),
            },
        ),
        Pinned(
            name="three-stages",
            about="three uneven stages on three devices, 1F1B, four micro-batches",
            cases=("encoder-decoder",),
            plans={"pipeline": Plan(engine="pipeline", devices=CPUS.ids(3), cuts=_LAYERS[2:], schedule="1f1b", micro_batches=4)},
        ),
        Pinned(
            name="interleaved",
            about="two stages on each of two devices, interleaved 1F1B, four micro-batches",
            cases=("encoder-decoder",),
            plans={
                "pipeline": Plan(engine="pipeline", devices=CPUS.ids(2), cuts=_LAYERS[1:], schedule="interleaved_1f1b", micro_batches=4)
            },
        ),
        Pinned(
            name="recompute",
            about="activations of all blocks recomputed in backward",
            cases=("gpt",),
            plans={
                "ddp": Plan(engine="ddp", devices=CPUS.ids(2), recompute=_BLOCKS),
                "pipeline": Plan(
                    engine="pipeline", devices=CPUS.ids(2), cuts=_BLOCKS[1:], schedule="1f1b", micro_batches=3, recompute=_BLOCKS
                ),
            },
        ),
        Pinned(
            name="pipelines",
            about="two pipelines of two stages side by side, four devices",
            cases=("gpt",),
            plans={
                "pipeline": Plan(engine="pipeline", devices=CPUS.ids(4), replicas=2, cuts=_BLOCKS[1:], schedule="1f1b", micro_batches=2)
            },
        ),
        Pinned(
            name="sharded-pipelines",
            about="the same, each stage sharded over the two pipelines",
            cases=("gpt",),
            plans={
                "pipeline": Plan(
                    engine="pipeline", devices=CPUS.ids(4), replicas=2, cuts=_BLOCKS[1:], schedule="1f1b", micro_batches=2, shard=_BLOCKS
                )
            },
        ),
    )
}
