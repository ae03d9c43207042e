"""What the whole batch's collation costs a rank, beside the collation of its own samples alone.

Collated whole and cut into rows, a batch is exact whatever the collate function does, and each rank loads all its samples. Measured are
seconds of one process (no workers) for a batch: a rank's own samples loaded and collated, all loaded and collated and its rows cut out, and
what it takes two processes to tell each other that their parts are alike (one all-reduce by gloo).

    python benchmarks/collating.py             # writes benchmarks/results/collating.json
    python benchmarks/collating.py --quick     # a smoke test: figures without meaning
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

sys.path.insert(0, str(Path(__file__).parent))

from machine import machine

from lightning_autopar.exact.data.collate import CollateAll, CollateSamples
from lightning_autopar.exact.data.rank_share import Dealing

RESULTS = Path(__file__).resolve().parent / "results/collating.json"
SAMPLES = 64
RANKS = (2, 8)


def text(index: int) -> dict[str, Any]:
    return {"input_ids": list(range(1, 100 + 37 * index % 400)), "label": index}


def padded(samples: Any) -> dict[str, Tensor]:
    ids = [torch.tensor(sample["input_ids"]) for sample in samples]
    return {"input_ids": pad_sequence(ids, batch_first=True), "labels": torch.tensor([sample["label"] for sample in samples])}


def masked(samples: Any) -> dict[str, Tensor]:
    batch = padded(samples)
    drawn = torch.bernoulli(torch.full(batch["input_ids"].shape, 0.15)).bool()
    return {**batch, "labels": torch.where(drawn, batch["input_ids"], -100)}


def row(index: int) -> tuple[Tensor, int]:
    return torch.full((32,), float(index)), index


_PACKED = zlib.compress(torch.randint(0, 40, (3 * 224 * 224,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).numpy())


def image(index: int) -> tuple[Tensor, int]:
    """Unpacked and scaled, as a picture is decoded."""
    pixels = torch.frombuffer(bytearray(zlib.decompress(_PACKED)), dtype=torch.uint8).view(3, 224, 224)
    return pixels.float().div_(255), index


def stacked(samples: Any) -> dict[str, Tensor]:
    return {"image": torch.stack([x for x, _ in samples]), "label": torch.tensor([y for _, y in samples])}


CASES: dict[str, tuple[Callable[[int], Any], Callable[[Any], Any]]] = {
    "rows of 32 numbers, default_collate": (row, default_collate),
    "tokens, padded": (text, padded),
    "tokens, padded and masked": (text, masked),
    "pictures of 224 x 224, stacked": (image, stacked),
}


def median(function: Callable[[], Any], rounds: int) -> float:
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def measured(name: str, ranks: int, rounds: int) -> dict[str, Any]:
    sample, collate = CASES[name]
    dealing = Dealing.even(ranks)
    own, whole = CollateSamples(collate, 0, dealing), CollateAll(collate, 0, dealing)
    mine = list(dealing.indices(SAMPLES, 0))
    pairs = [
        (
            median(lambda: own.collate([sample(index) for index in mine]), 1),
            median(lambda: whole([sample(index) for index in range(SAMPLES)]), 1),
        )
        for _ in range(rounds)
    ]
    less, more = (statistics.median(seconds) for seconds in zip(*pairs, strict=True))
    return {"case": name, "samples": SAMPLES, "ranks": ranks, "own_ms": 1e3 * less, "whole_ms": 1e3 * more, "more_ms": 1e3 * (more - less)}


def told(rank: int, folder: str, rounds: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    word = torch.tensor([7, -7])
    seconds = median(lambda: dist.all_reduce(word, dist.ReduceOp.MAX), rounds)
    if rank == 0:
        Path(folder, "seconds").write_text(str(seconds))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    quick, out = vars(parser.parse_args()).values()
    torch.set_num_threads(1)
    rounds = 2 if quick else 31
    rows = [measured(name, ranks, rounds) for name in CASES for ranks in RANKS]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(told, (folder, 20 if quick else 500), nprocs=2)
        check = 1e3 * float(Path(folder, "seconds").read_text())
    for each in rows:
        print("{case:38s} {ranks} ranks: own {own_ms:8.2f} ms, whole {whole_ms:8.2f} ms".format(**each))
    print(f"a word between two processes: {check:.3f} ms")
    out.write_text(json.dumps({**machine(), "rows": rows, "told_ms": check}, indent=1) + "\n")


if __name__ == "__main__":
    main()
