"""A run that makes room: halfway a neighbour takes a device's memory, the run moves off it, and later back; then its model is compared.

The devices are CPU devices with a memory budget, and the neighbour is a file that says what it takes: so this runs anywhere, in workers
that really end and begin. The same script trains undisturbed first; both runs see the same samples, and come to the same model.

    python examples/elastic.py                    # about a minute
"""

import argparse
import logging
import os
import tempfile
from pathlib import Path

import lightning as L
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from train_gpt import ByteGPT, Passages, standard_library

from lightning_autopar import AutoParallelStrategy, CheckpointMigrate, ElasticReplan
from lightning_autopar.devices.simulated_neighbours import Neighbour, write_neighbours

BUDGET = "2GiB"
#: Of a device: all but a crumb.
TAKEN_BYTES = 2 * 1024**3 - 1024**2


class Neighbourhood(L.Callback):
    """Somebody else's job: comes to a device that the run is on, follows it to where it went, and leaves in the end."""

    def __init__(self, file: Path, steps: int) -> None:
        self.file, self.comes, self.follows, self.leaves = file, steps // 5, steps * 2 // 5, steps * 3 // 5

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_index) -> None:
        if not trainer.is_global_zero:
            return
        if trainer.global_step in (self.comes, self.follows):
            here = trainer.strategy.run_plan.plan.devices[-1]
            write_neighbours(self.file, {here: Neighbour(taken_bytes=TAKEN_BYTES)})
        if trainer.global_step == self.leaves:
            write_neighbours(self.file, {})


def train(steps: int, callbacks: list[L.Callback]) -> tuple[L.Trainer, ByteGPT]:
    """The same run each time, but for the callbacks."""
    L.seed_everything(1, verbose=False)
    text, _ = standard_library()
    model = ByteGPT(layers=2, width=128, context=64, steps=steps)
    trainer = L.Trainer(
        strategy=AutoParallelStrategy(devices=f"2xcpu:{BUDGET}"),
        max_steps=steps,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    trainer.fit(model, DataLoader(Passages(text, 64), batch_size=32, shuffle=True, drop_last=True))
    return trainer, model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.INFO)

    _, undisturbed = train(arguments.steps, [])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "neighbours.json"
        os.environ["AUTOPAR_NEIGHBOURS"] = str(file)
        trainer, disturbed = train(
            arguments.steps,
            [
                CheckpointMigrate(),
                # In a minute, what takes hours on a shared machine: look often, and go back soon.
                ElasticReplan(interval_seconds=0.2, patience=2, min_seconds_between_moves=1.0),
                Neighbourhood(file, arguments.steps),
            ],
        )

    print(f"\n{trainer.strategy.history}")
    _, unseen = standard_library()
    tokens = torch.frombuffer(bytearray(unseen[: 64 * 64]), dtype=torch.uint8).view(64, 64).long()
    with torch.no_grad():
        # Of the logits, not of the weights: a key's bias changes no attention, so that AdamW walks it by rounding alone.
        logits = [model.eval()(tokens) for model in (undisturbed, disturbed)]
        plain, moved = (cross_entropy(each[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).item() for each in logits)
    difference = (logits[0] - logits[1]).abs().max().item()
    print(
        f"loss on a text that neither has seen: {moved:.3f} after the moves, {plain:.3f} without them (sums were rounded in another order;"
    )
    print(f"no logit differs by more than {difference:.1e})")


if __name__ == "__main__":
    main()
