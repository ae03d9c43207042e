"""All models of the matrix, in the page's order, and the packages that aren't run."""

from __future__ import annotations

from tests.packages import cells, denoising, forecasting, graphs, language, molecules, segmentation, tensordicts, uncertainty, vision
from tests.packages.member import Member

_MODULES = (molecules, forecasting, cells, vision, segmentation, graphs, language, denoising, tensordicts, uncertainty)
MEMBERS: dict[str, Member] = {member.name: member for module in _MODULES for member in module.MEMBERS}
#: The packages, by distribution: what is imported of each before its models are built.
PACKAGES: dict[str, str] = {
    "chemprop": "chemprop.models",
    "pytorch-forecasting": "pytorch_forecasting",
    "gluonts": "gluonts.torch",
    "scvi-tools": "scvi",
    "timm": "timm",
    "torchvision": "torchvision",
    "lightly": "lightly.loss",
    "segmentation-models-pytorch": "segmentation_models_pytorch",
    "monai": "monai.networks.nets",
    "torch-geometric": "torch_geometric.loader",
    "transformers": "peft",
    "x-transformers": "x_transformers",
    "diffusers": "diffusers",
    "tensordict": "tensordict.nn",
    "torch-uncertainty": "torch_uncertainty.routines",
    "pina-mathlab": "pina",
}
#: Packages whose modules belong to `pytorch_lightning`: this matrix has modules of `lightning.pytorch`.
OTHER_LIGHTNING = ("darts", "neuralforecast")
