"""The zoo: which small LightningModules stand for what users write, each with its data. Knows of no plan, engine or strategy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl

from tests.conformance.data import (
    Graphs,
    Records,
    Stream,
    Translations,
    binary,
    house,
    images,
    loaders,
    masked,
    narrow_points,
    points,
    sequences,
    series,
    vectors,
    views,
)
from tests.conformance.models import (
    GAN,
    VAE,
    ConfigureModel,
    Contrastive,
    FrozenBackbone,
    GraphNetwork,
    Metrics,
    Nested,
    Regression,
    ResNet,
    Sums,
    UnusedParameters,
)
from tests.conformance.sequence_models import GPT, LSTM, EncoderDecoder, MaskedTokens


@dataclass(frozen=True, kw_only=True)
class Case:
    """A member of the zoo.

    Args:
        name: the key in every table.
        about: the row's words in docs/features.md.
        module: builds the LightningModule; keyword arguments are the features' own.
        data: builds the keyword arguments of ``Trainer.fit``.
        mean: whether the loss is a mean over samples, or over what the batch counts, so that splitting the batch leaves it as it is.
    """

    name: str
    about: str
    module: Callable[..., pl.LightningModule]
    data: Callable[..., dict[str, Any]]
    mean: bool = True


ZOO: dict[str, Case] = {
    case.name: case
    for case in (
        Case(name="gpt", about="byte GPT, tied embeddings, dropout, AdamW", module=GPT, data=loaders(sequences)),
        Case(name="resnet", about="ResNet with BatchNorm", module=ResNet, data=loaders(images)),
        Case(name="encoder-decoder", about="encoder-decoder transformer, dropout", module=EncoderDecoder, data=loaders(Translations)),
        Case(name="lstm", about="LSTM, last batch of one sample", module=LSTM, data=loaders(series, train=25)),
        Case(name="vae", about="VAE, random draws in the step, Adam", module=VAE, data=loaders(points)),
        Case(name="gan", about="GAN, manual optimization, two optimizers", module=GAN, data=loaders(narrow_points)),
        Case(name="masked-tokens", about="loss is a mean over unmasked tokens", module=MaskedTokens, data=loaders(masked)),
        Case(name="contrastive", about="in-batch contrastive loss", module=Contrastive, data=loaders(views), mean=False),
        Case(name="frozen-backbone", about="frozen backbone in eval mode", module=FrozenBackbone, data=loaders(vectors)),
        Case(name="configure-model", about="layers built in configure_model", module=ConfigureModel, data=loaders(vectors)),
        Case(name="metrics", about="torchmetrics by step and epoch, AUROC", module=Metrics, data=loaders(binary)),
        Case(name="graph", about="graph network on sparse edges", module=GraphNetwork, data=loaders(Graphs, collate_fn=Graphs.collate)),
        Case(name="datamodule", about="DataModule with two validation loaders, AdamW", module=Regression, data=house),
        Case(name="iterable", about="IterableDataset of unknown length", module=ConfigureModel, data=loaders(Stream)),
        Case(name="unused-parameters", about="parameters that get no gradient", module=UnusedParameters, data=loaders(vectors, train=25)),
        Case(name="nested", about="batch of nested dicts, names and lists", module=Nested, data=loaders(Records)),
        Case(name="sums", about="sums and lists kept by the module over an epoch", module=Sums, data=loaders(vectors)),
    )
}
