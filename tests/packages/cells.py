"""scvi-tools: variational models of single cells, trained through their ``train``."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import numpy as np

from tests.packages.member import Member, Options


def _cells() -> Any:
    import scvi

    scvi.settings.seed = 0
    np.random.seed(0)
    return scvi.data.synthetic_iid(batch_size=120, n_genes=40)


def _train(options: Options, kind: Any, data: Any, **arguments: Any) -> None:
    pl.seed_everything(7, verbose=False)
    own = {"batch_size": 64, "train_size": 0.8, "check_val_every_n_epoch": 1, "max_epochs": 2}
    kind(data, n_latent=5, n_hidden=32, **arguments).train(**own, **options)


def _scvi(options: Options) -> None:
    from scvi.model import SCVI

    data = _cells()
    SCVI.setup_anndata(data, batch_key="batch", labels_key="labels")
    _train(options, SCVI, data)


def _scanvi(options: Options) -> None:
    from scvi.model import SCANVI

    data = _cells()
    SCANVI.setup_anndata(data, "labels", "label_0", batch_key="batch")
    _train(options, SCANVI, data)


def _peakvi(options: Options) -> None:
    from scvi.model import PEAKVI

    data = _cells()
    PEAKVI.setup_anndata(data, batch_key="batch")
    _train({**options, "early_stopping": False}, PEAKVI, data)


MEMBERS = (
    Member(name="scvi", package="scvi-tools", about="SCVI, KL warm-up, BatchNorm, metrics by epoch", train=_scvi),
    Member(name="scanvi", package="scvi-tools", about="SCANVI, half of the labels unknown", train=_scanvi),
    Member(name="peakvi", package="scvi-tools", about="PEAKVI", train=_peakvi),
)
