"""diffusers: networks that take noise away, and an autoencoder."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from tests.packages.member import Member, Options, fit, images


class Denoiser(pl.LightningModule):
    """The training loop of diffusers' examples: noise of a random strength, which the network tells."""

    def __init__(self, net: nn.Module, labels: bool = False) -> None:
        super().__init__()
        from diffusers import DDPMScheduler

        self.net, self.labels, self.schedule = net, labels, DDPMScheduler(num_train_timesteps=100)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        pictures, classes = batch
        noise = torch.randn_like(pictures)
        times = torch.randint(100, (len(pictures),), device=pictures.device)
        noisy = self.schedule.add_noise(pictures, noise, times)
        given = {"class_labels": classes} if self.labels else {}
        loss = mse_loss(self.net(noisy, times, **given).sample, noise)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Autoencoder(pl.LightningModule):
    """Latents are drawn in the step; the loss has a reconstruction and a divergence."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        posterior = self.net.encode(batch[0]).latent_dist
        restored = self.net.decode(posterior.sample()).sample
        divergence = posterior.kl().mean()
        loss = mse_loss(restored, batch[0]) + 1e-3 * divergence
        self.log_dict({"train_loss": loss, "divergence": divergence})
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def _pictures() -> Any:
    return DataLoader(images(28, size=16), 8, shuffle=True)


def _unet(options: Options) -> None:
    from diffusers import UNet2DModel

    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    sizes = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4, "attention_head_dim": 8}
    fit(options, Denoiser(UNet2DModel(sample_size=16, **blocks, **sizes)), _pictures())


def _dit(options: Options) -> None:
    from diffusers import DiTTransformer2DModel

    sizes = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 4, "sample_size": 16, "patch_size": 4}
    net = DiTTransformer2DModel(in_channels=3, out_channels=3, num_embeds_ada_norm=4, norm_num_groups=4, **sizes)
    fit(options, Denoiser(net, labels=True), _pictures())


def _vae(options: Options) -> None:
    from diffusers import AutoencoderKL

    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    net = AutoencoderKL(block_out_channels=(8, 16), latent_channels=2, norm_num_groups=4, sample_size=16, **blocks)
    fit(options, Autoencoder(net), _pictures())


MEMBERS = (
    Member(name="unet-denoiser", package="diffusers", about="UNet2DModel with DDPM's noise", train=_unet),
    Member(name="dit", package="diffusers", about="DiT, four blocks, conditioned on classes", train=_dit),
    Member(name="vae", package="diffusers", about="AutoencoderKL, latents drawn in the step", train=_vae),
)
