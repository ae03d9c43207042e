"""timm, torchvision and lightly: images classified, and learned from without labels."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.packages.member import Member, Options, Supervised, fit, images, loaders

_VIT = {"img_size": 32, "patch_size": 8, "depth": 4, "embed_dim": 48, "num_heads": 2, "num_classes": 4}


def _vit(options: Options) -> None:
    import timm
    from timm.loss import LabelSmoothingCrossEntropy

    net = timm.create_model("vit_tiny_patch16_224", pretrained=False, drop_path_rate=0.1, drop_rate=0.1, **_VIT)
    fit(options, Supervised(net, LabelSmoothingCrossEntropy(0.1)), *loaders(images))


def _resnet(options: Options) -> None:
    import timm

    fit(options, Supervised(timm.create_model("resnet10t", pretrained=False, num_classes=4)), *loaders(images))


class Mixed(Supervised):
    """timm's Mixup draws how the samples of the whole batch are mixed."""

    def __init__(self, net: nn.Module) -> None:
        from timm.data import Mixup

        super().__init__(net)
        self.mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(self.mixup(*batch), batch_idx)


def _mixup(options: Options) -> None:
    import timm

    module = Mixed(timm.create_model("vit_tiny_patch16_224", pretrained=False, **_VIT))
    fit(options, module, *loaders(images, train=32))


def _mobilenet(options: Options) -> None:
    from torchvision.models import mobilenet_v3_small

    fit(options, Supervised(mobilenet_v3_small(num_classes=4)), *loaders(images))


def _convnext(options: Options) -> None:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    net = ConvNeXt([CNBlockConfig(16, 32, 2), CNBlockConfig(32, None, 2)], stochastic_depth_prob=0.2, num_classes=4)
    fit(options, Supervised(net), *loaders(images))


def _swin(options: Options) -> None:
    from torchvision.models.swin_transformer import SwinTransformer

    net = SwinTransformer([4, 4], 16, [2, 2], [1, 2], [2, 2], stochastic_depth_prob=0.1, num_classes=4)
    fit(options, Supervised(net), *loaders(images))


class Views(Dataset[Any]):
    """Two views of each image, a label and a file's name, as lightly's data sets give them."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        draw = torch.Generator().manual_seed(index)
        image, *noise = torch.randn(3, 3, 24, 24, generator=draw)
        return [image + 0.1 * noise[0], image.flip(-1) + 0.1 * noise[1]], 0, f"{index}.png"


def _views() -> Any:
    return DataLoader(Views(), 8, shuffle=True, drop_last=True)


def _backbone() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


class Contrastive(pl.LightningModule):
    """SimCLR as in lightly's examples, or with a bank of earlier representations."""

    def __init__(self, bank: int = 0) -> None:
        from lightly.loss import NTXentLoss
        from lightly.models.modules import heads

        super().__init__()
        self.backbone, self.head = _backbone(), heads.SimCLRProjectionHead(8, 16, 8)
        self.criterion = NTXentLoss(memory_bank_size=(bank, 8) if bank else 0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first, second = (self.head(self.backbone(view)) for view in batch[0])
        loss: Tensor = self.criterion(first, second)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Bootstrapped(pl.LightningModule):
    """BYOL as in lightly's examples: a second network follows the first in ``training_step``."""

    def __init__(self) -> None:
        from lightly.loss import NegativeCosineSimilarity
        from lightly.models.modules import heads
        from lightly.models.utils import deactivate_requires_grad

        super().__init__()
        self.backbone, self.projection = _backbone(), heads.BYOLProjectionHead(8, 16, 8)
        self.prediction = heads.BYOLPredictionHead(8, 16, 8)
        self.backbone_momentum, self.projection_momentum = copy.deepcopy(self.backbone), copy.deepcopy(self.projection)
        deactivate_requires_grad(self.backbone_momentum)
        deactivate_requires_grad(self.projection_momentum)
        self.criterion = NegativeCosineSimilarity()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        from lightly.models.utils import update_momentum
        from lightly.utils.scheduler import cosine_schedule

        momentum = cosine_schedule(self.current_epoch, 10, 0.9, 1)
        update_momentum(self.backbone, self.backbone_momentum, m=momentum)
        update_momentum(self.projection, self.projection_momentum, m=momentum)
        online = [self.prediction(self.projection(self.backbone(view).flatten(1))) for view in batch[0]]
        targets = [self.projection_momentum(self.backbone_momentum(view).flatten(1)).detach() for view in batch[0]]
        loss: Tensor = 0.5 * (self.criterion(online[0], targets[1]) + self.criterion(online[1], targets[0]))
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


MEMBERS = (
    Member(name="vit", package="timm", about="ViT, dropout, stochastic depth, smoothed labels", train=_vit),
    Member(name="resnet", package="timm", about="resnet10t, BatchNorm", train=_resnet),
    Member(name="mixup", package="timm", about="ViT with timm's Mixup in the step", train=_mixup),
    Member(name="mobilenet", package="torchvision", about="MobileNetV3, BatchNorm, dropout", train=_mobilenet),
    Member(name="convnext", package="torchvision", about="ConvNeXt, stochastic depth", train=_convnext),
    Member(name="swin", package="torchvision", about="Swin transformer, stochastic depth", train=_swin),
    Member(
        name="simclr",
        package="lightly",
        about="SimCLR, NTXentLoss over the batch",
        train=lambda options: fit(options, Contrastive(), _views()),
    ),
    Member(
        name="memory-bank",
        package="lightly",
        about="the same with a memory bank",
        train=lambda options: fit(options, Contrastive(32), _views()),
    ),
    Member(
        name="byol",
        package="lightly",
        about="BYOL, a second network follows the first",
        train=lambda options: fit(options, Bootstrapped(), _views()),
    ),
)
