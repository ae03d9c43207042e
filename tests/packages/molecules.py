"""chemprop: message passing over molecules, trained as its command line does."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import numpy as np

from tests.packages.member import Member, Options

_SMILES = [
    *("CC", "CCO", "CCN", "CCC", "c1ccccc1", "CC(=O)O", "CCOC", "CCCl", "CNC", "c1ccncc1"),
    *("CC(C)C", "OCCO", "CC#N", "C1CCCCC1", "CCS", "CCBr", "NCCO", "CC(=O)N", "c1ccsc1", "COC=O"),
]


def _molecules(count: int, tasks: int = 1, missing: float = 0.0, classes: bool = False, seed: int = 0) -> Any:
    from chemprop.data import MoleculeDatapoint

    draw = np.random.default_rng(seed)
    points = []
    for index in range(count):
        target = (draw.random(tasks) < 0.4).astype(float) if classes else draw.normal(size=tasks)
        target[draw.random(tasks) < missing] = np.nan
        smiles = "C" * (index // len(_SMILES)) + _SMILES[index % len(_SMILES)]
        points.append(MoleculeDatapoint.from_smi(smiles, target))
    return points


def _fit(options: Options, module: pl.LightningModule, train: Any, val: Any, **loader: Any) -> None:
    from chemprop.data import build_dataloader

    loaders = build_dataloader(train, batch_size=16, **loader), build_dataloader(val, batch_size=16, shuffle=False)
    pl.Trainer(max_epochs=2, **options).fit(module, *loaders)


def _regression(options: Options) -> None:
    from chemprop import data, models, nn

    train, val = data.MoleculeDataset(_molecules(60)), data.MoleculeDataset(_molecules(20, seed=1))
    val.normalize_targets(train.normalize_targets())
    message_passing = nn.BondMessagePassing(d_h=32, dropout=0.1)
    predictor = nn.RegressionFFN(input_dim=32, hidden_dim=32)
    _fit(options, models.MPNN(message_passing, nn.MeanAggregation(), predictor, batch_norm=True), train, val)


def _many_tasks(options: Options) -> None:
    from chemprop import data, models, nn

    train, val = (data.MoleculeDataset(_molecules(count, tasks=3, missing=0.4, seed=count)) for count in (60, 20))
    predictor = nn.RegressionFFN(n_tasks=3, input_dim=32, hidden_dim=32)
    _fit(options, models.MPNN(nn.AtomMessagePassing(d_h=32), nn.SumAggregation(), predictor), train, val)


def _balanced(options: Options) -> None:
    from chemprop import data, models, nn

    train, val = (data.MoleculeDataset(_molecules(count, classes=True, seed=count)) for count in (60, 20))
    predictor = nn.BinaryClassificationFFN(input_dim=32, hidden_dim=32)
    module = models.MPNN(nn.BondMessagePassing(d_h=32), nn.NormAggregation(), predictor)
    _fit(options, module, train, val, class_balance=True, seed=5)


MEMBERS = (
    Member(name="mpnn", package="chemprop", about="MPNN regression, BatchNorm, dropout", train=_regression),
    Member(name="mpnn-tasks", package="chemprop", about="three tasks, 40 % of the targets missing", train=_many_tasks),
    Member(name="mpnn-balanced", package="chemprop", about="classification, chemprop's class-balanced sampler", train=_balanced),
)
