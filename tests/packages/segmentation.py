"""segmentation-models-pytorch and MONAI: images cut into regions, and medical ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.packages.member import Member, Options, Supervised, fit, loaders, masks

# Three of the encoder's five levels, as 32 × 32 pixels are one at the fifth: BatchNorm over a few numbers amplifies rounding.
_ENCODER = {"encoder_name": "mobilenet_v2", "encoder_weights": None, "encoder_depth": 3, "classes": 3}


def _unet(options: Options) -> None:
    import segmentation_models_pytorch as smp

    fit(options, Supervised(smp.Unet(decoder_channels=(32, 16, 8), **_ENCODER)), *loaders(masks))


def _unet_plus_plus(options: Options) -> None:
    import segmentation_models_pytorch as smp

    net = smp.UnetPlusPlus(decoder_channels=(32, 16, 8), **_ENCODER)
    fit(options, Supervised(net, smp.losses.FocalLoss("multiclass")), *loaders(masks))


def _dice(options: Options) -> None:
    import segmentation_models_pytorch as smp

    fit(options, Supervised(smp.Linknet(**_ENCODER), smp.losses.DiceLoss("multiclass")), *loaders(masks))


class Medical(Supervised):
    """Batches are dictionaries, as MONAI's transforms make them."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step((batch["image"], batch["label"]), batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step((batch["image"], batch["label"]), batch_idx)


def _dictionaries(count: int, tracked: bool = False, regions: bool = True) -> Any:
    from monai.data import Dataset
    from monai.transforms import Compose, EnsureTyped, Flipd

    draw = torch.Generator().manual_seed(count)
    items = [
        {
            "image": torch.randn(1, 32, 32, generator=draw),
            "label": torch.randint(3, (1, 32, 32) if regions else (), generator=draw),
        }
        for _ in range(count)
    ]
    return Dataset(items, Compose([EnsureTyped(keys="image", track_meta=tracked), Flipd(keys="image", spatial_axis=0)]))


def _monai_unet(options: Options) -> None:
    from monai.losses import DiceCELoss
    from monai.networks.nets import UNet

    net = UNet(spatial_dims=2, in_channels=1, out_channels=3, channels=(8, 16, 32), strides=(2, 2), dropout=0.1)
    fit(options, Medical(net, DiceCELoss(to_onehot_y=True, softmax=True)), *loaders(lambda count: _dictionaries(count)))


def _densenet(options: Options) -> None:
    from monai.data import list_data_collate
    from monai.networks.nets import DenseNet

    net = DenseNet(spatial_dims=2, in_channels=1, out_channels=3, init_features=8, growth_rate=4, block_config=(2, 2))
    data = loaders(lambda count: _dictionaries(count, tracked=True, regions=False), collate_fn=list_data_collate)
    fit(options, Medical(net), *data)


class FirstOutput(nn.Module):
    """MONAI's ViT gives its hidden states as well."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, batch: Tensor) -> Tensor:
        output: Tensor = self.net(batch)[0]
        return output


def _monai_vit(options: Options) -> None:
    from monai.networks.nets import ViT

    sizes = {"hidden_size": 32, "mlp_dim": 64, "num_layers": 4, "num_heads": 2}
    net = ViT(in_channels=1, img_size=(32, 32), patch_size=(8, 8), classification=True, num_classes=3, spatial_dims=2, **sizes)
    fit(options, Medical(FirstOutput(net)), *loaders(lambda count: _dictionaries(count, regions=False)))


MEMBERS = (
    Member(name="smp-unet", package="segmentation-models-pytorch", about="Unet on MobileNetV2, BatchNorm", train=_unet),
    Member(name="unet++", package="segmentation-models-pytorch", about="Unet++, focal loss", train=_unet_plus_plus),
    Member(name="dice", package="segmentation-models-pytorch", about="Linknet, Dice loss over the batch", train=_dice),
    Member(name="monai-unet", package="monai", about="UNet, InstanceNorm, Dice and cross entropy by sample", train=_monai_unet),
    Member(name="densenet", package="monai", about="DenseNet on MetaTensors, BatchNorm", train=_densenet),
    Member(name="monai-vit", package="monai", about="ViT, four blocks", train=_monai_vit),
)
