"""pytorch-forecasting and gluonts: forecasts of many short series."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import numpy as np

from tests.packages.member import Member, Options


def _waves(series: int, steps: int) -> Any:
    draw = np.random.default_rng(0)
    return np.sin(np.arange(steps) / 3 + np.arange(series)[:, None]) + 0.1 * draw.normal(size=(series, steps)) + 2


def _fit_dataset(options: Options, kind: Any, known: tuple[str, ...] = ("t", "x"), data: Any = None, **arguments: Any) -> None:
    """What pytorch-forecasting's tutorials do."""
    import pandas as pd
    from pytorch_forecasting import TimeSeriesDataSet

    waves = _waves(16, 36)
    rows = [(str(series), t, waves[series, t], float(t % 7)) for series in range(16) for t in range(36)]
    frame = pd.DataFrame(rows, columns=["series", "t", "value", "x"])
    static: dict[str, Any] = {"static_categoricals": ["series"], "time_varying_known_reals": list(known)} if known else {}
    train = TimeSeriesDataSet(
        frame[frame.t < 32],
        time_idx="t",
        target="value",
        group_ids=["series"],
        max_encoder_length=12,
        max_prediction_length=4,
        time_varying_unknown_reals=["value"],
        **static,
        **(data or {}),
    )
    val = TimeSeriesDataSet.from_dataset(train, frame, predict=True, stop_randomization=True)
    module = kind.from_dataset(train, learning_rate=0.01, log_interval=-1, **arguments)
    trainer = pl.Trainer(max_epochs=2, gradient_clip_val=0.1, limit_train_batches=4, **options)
    trainer.fit(module, train.to_dataloader(train=True, batch_size=32), val.to_dataloader(train=False, batch_size=32))


def _fusion_transformer(options: Options) -> None:
    from pytorch_forecasting import TemporalFusionTransformer

    data = {"add_relative_time_idx": True, "add_target_scales": True, "min_encoder_length": 4, "min_prediction_length": 1}
    arguments = {"hidden_size": 8, "attention_head_size": 2, "dropout": 0.1, "hidden_continuous_size": 4}
    _fit_dataset(options, TemporalFusionTransformer, data=data, **arguments)


def _deep_ar(options: Options) -> None:
    from pytorch_forecasting import DeepAR

    _fit_dataset(options, DeepAR, hidden_size=8, rnn_layers=2, dropout=0.1)


def _n_beats(options: Options) -> None:
    from pytorch_forecasting import NBeats

    _fit_dataset(options, NBeats, known=(), widths=[16, 32], backcast_loss_ratio=0.1)


def _estimate(options: Options, kind: Any, **arguments: Any) -> None:
    """What gluonts's tutorials do: its estimators make their own Trainer, with a checkpoint of the best epoch."""
    from gluonts.dataset.common import ListDataset

    data = ListDataset([{"start": "2020-01-01", "target": wave.tolist()} for wave in _waves(20, 80)], freq="D")
    trainer = {"max_epochs": 2, **{name: value for name, value in options.items() if name != "enable_checkpointing"}}
    kind(prediction_length=4, batch_size=16, num_batches_per_epoch=4, trainer_kwargs=trainer, **arguments).train(data)


def _feed_forward(options: Options) -> None:
    from gluonts.torch import SimpleFeedForwardEstimator

    _estimate(options, SimpleFeedForwardEstimator, context_length=12, hidden_dimensions=[16])


def _deep_ar_of_gluonts(options: Options) -> None:
    from gluonts.torch import DeepAREstimator

    _estimate(options, DeepAREstimator, freq="D", context_length=12, hidden_size=8)


def _patches(options: Options) -> None:
    from gluonts.torch import PatchTSTEstimator

    sizes = {"d_model": 16, "nhead": 2, "dim_feedforward": 32, "num_encoder_layers": 4}
    _estimate(options, PatchTSTEstimator, context_length=16, patch_len=4, **sizes)


MEMBERS = (
    Member(name="tft", package="pytorch-forecasting", about="TemporalFusionTransformer, series of many lengths", train=_fusion_transformer),
    Member(name="deepar", package="pytorch-forecasting", about="DeepAR, a distribution as the loss", train=_deep_ar),
    Member(name="nbeats", package="pytorch-forecasting", about="NBeats, backcast in the loss", train=_n_beats),
    Member(name="feed-forward", package="gluonts", about="SimpleFeedForwardEstimator, its own Trainer", train=_feed_forward),
    Member(name="gluonts-deepar", package="gluonts", about="DeepAREstimator", train=_deep_ar_of_gluonts),
    Member(name="patchtst", package="gluonts", about="PatchTSTEstimator, four encoder layers", train=_patches),
)
