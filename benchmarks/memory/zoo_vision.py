"""Networks of convolutions, written out as users write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memory.job import Job, Learner, MakeOptimizer, adam, adamw, classification, momentum, regression, sgd


class _Basic(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        same = stride == 1 and inputs == width
        self.down = None if same else nn.Sequential(nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.down is None else self.down(x)
        y = self.relu(self.norm1(self.conv1(x)))
        return self.relu(self.norm2(self.conv2(y)) + identity)


class _Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1, self.norm1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        same = stride == 1 and inputs == outputs
        self.down = None if same else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.down is None else self.down(x)
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.relu(self.norm2(self.conv2(y)))
        return self.relu(self.norm3(self.conv3(y)) + identity)


def _resnet(block: Any, depths: tuple[int, ...], expansion: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for stage, depth in enumerate(depths):
        for index in range(depth):
            layers.append(block(inputs, 64 << stage, 2 if stage and not index else 1))
            inputs = (64 << stage) * expansion
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))


def _vgg() -> nn.Module:
    layers: list[nn.Module] = []
    inputs = 3
    for width, depth in ((32, 1), (64, 1), (128, 2), (256, 2)):
        for _ in range(depth):
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU(inplace=True)]
            inputs = width
        layers.append(nn.MaxPool2d(2))
    head = [nn.Flatten(), nn.Linear(256 * 16, 512), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(512, 10)]
    return nn.Sequential(*layers, *head)


class _Inverted(nn.Module):
    """EfficientNet's block: expand, depthwise, squeeze and excite, project."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int = 4) -> None:
        super().__init__()
        wide = inputs * expansion
        self.expand = nn.Sequential(nn.Conv2d(inputs, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.SiLU(inplace=True))
        self.depthwise = nn.Sequential(
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.SiLU(inplace=True)
        )
        self.excite = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, wide // 4, 1), nn.SiLU(), nn.Conv2d(wide // 4, wide, 1), nn.Sigmoid()
        )
        self.project = nn.Sequential(nn.Conv2d(wide, outputs, 1, bias=False), nn.BatchNorm2d(outputs))
        self.same = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(self.expand(x))
        y = self.project(y * self.excite(y))
        return x + y if self.same else y


def _efficientnet() -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.SiLU())
    shapes = [(16, 24, 1), (24, 24, 1), (24, 40, 2), (40, 40, 1), (40, 80, 2), (80, 80, 1)]
    return nn.Sequential(stem, *(_Inverted(*shape) for shape in shapes), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(80, 10))


class _UNet(nn.Module):
    """Down, up, and across; with a step's embedding it denoises."""

    def __init__(self, channels: int = 3, outputs: int = 3, widths: tuple[int, ...] = (32, 64, 128), timed: bool = False) -> None:
        super().__init__()
        self.timed = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, widths[-1])) if timed else None
        pairs = list(zip((channels, *widths), widths, strict=False))
        self.down = nn.ModuleList(self._block(a, b) for a, b in pairs)
        self.across = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairs[:0:-1])
        self.up = nn.ModuleList(self._block(2 * a, a) for a, _ in pairs[:0:-1])
        self.head = nn.Conv2d(widths[0], outputs, 1)

    @staticmethod
    def _block(inputs: int, outputs: int) -> nn.Module:
        first = nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.SiLU()
        return nn.Sequential(*first, nn.Conv2d(outputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.SiLU())

    def forward(self, x: Tensor, time: Tensor | None = None) -> Tensor:
        kept = []
        for index, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if index else x)
            kept.append(x)
        kept.pop()
        if self.timed is not None and time is not None:
            angles = time[:, None] * torch.logspace(0, -4, 32, device=time.device)
            x = x + self.timed(torch.cat([angles.sin(), angles.cos()], 1))[:, :, None, None]
        for across, block in zip(self.across, self.up, strict=True):
            x = block(torch.cat([across(x), kept.pop()], 1))
        return self.head(x)


def _denoising(net: nn.Module, batch: Tensor) -> Tensor:
    """A step of a diffusion model: predict the noise."""
    time = torch.randint(0, 1000, (len(batch),), device=batch.device)
    share = torch.cos(time / 1000 * 1.57)[:, None, None, None]
    noise = torch.randn_like(batch)
    return F.mse_loss(net(share * batch + (1 - share**2).sqrt() * noise, time.float()), noise)


class _Mixer(nn.Module):
    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(tokens, 4 * tokens), nn.GELU(), nn.Linear(4 * tokens, tokens))
        self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class _MLPMixer(nn.Module):
    def __init__(self, width: int = 256, depth: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.blocks = nn.Sequential(*(_Mixer(64, width) for _ in range(depth)))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.patches(x).flatten(2).transpose(1, 2)).mean(1))


class _VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 32, 4, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 4, 2, 1), nn.ReLU(), nn.Flatten())
        self.statistics = nn.Linear(64 * 256, 128)
        self.decoder = nn.Sequential(
            nn.Linear(64, 64 * 256),
            nn.Unflatten(1, (64, 16, 16)),
            nn.ConvTranspose2d(64, 32, 4, 2, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(32, 3, 4, 2, 1),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.statistics(self.encoder(x)).chunk(2, 1)
        latent = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(latent), mean, log_variance


def _evidence(net: nn.Module, batch: Tensor) -> Tensor:
    image, mean, log_variance = net(batch)
    return F.mse_loss(image, batch) - 0.5 * (1 + log_variance - mean.square() - log_variance.exp()).mean()


def _video() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv3d(inputs, outputs, 3, padding=1), nn.BatchNorm3d(outputs), nn.ReLU(), nn.MaxPool3d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(64, 10))


class _SuperResolution(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, width, 5, padding=2), nn.PReLU(), nn.Conv2d(width, width, 3, padding=1), nn.PReLU())
        self.head = nn.Sequential(nn.Conv2d(width, 3 * 4, 3, padding=1), nn.PixelShuffle(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)) + F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)


def _images(rows: int, side: int, classes: int = 10) -> Callable[[], Any]:
    return lambda: (torch.randn(rows, 3, side, side), torch.randint(0, classes, (rows,)))


def _job(name: str, net: Callable[[], nn.Module], batch: Any, loss: Any = classification, optimizer: MakeOptimizer = adamw,
         quick: bool = False, **trainer: Any) -> Job:  # fmt: skip
    build = lambda: Learner(net(), loss, optimizer)  # noqa: E731
    return Job(name=name, family="vision", build=build, batch=batch, trainer=trainer, quick=quick)


VISION: list[Job] = [
    _job("ResNet-18", lambda: _resnet(_Basic, (2, 2, 2, 2), 1), _images(8, 64), optimizer=momentum, quick=True),
    _job("ResNet-50", lambda: _resnet(_Bottleneck, (3, 4, 6, 3), 4), _images(4, 96)),
    _job("ResNet-18 (bf16-mixed)", lambda: _resnet(_Basic, (2, 2, 2, 2), 1), _images(2, 48), optimizer=momentum, precision="bf16-mixed"),
    _job("VGG", _vgg, _images(8, 64), optimizer=sgd),
    _job("EfficientNet-like", _efficientnet, _images(8, 64), quick=True),
    _job("U-Net", lambda: _UNet(3, 8), lambda: (torch.randn(4, 3, 64, 64), torch.randint(0, 8, (4, 64, 64)))),
    _job("Diffusion U-Net", lambda: _UNet(timed=True), lambda: torch.randn(8, 3, 32, 32), _denoising, quick=True),
    _job("MLP-Mixer", _MLPMixer, _images(8, 64), optimizer=adam),
    _job("VAE", _VAE, lambda: torch.rand(16, 3, 64, 64), _evidence, adam),
    _job("3-D convolutions", _video, lambda: (torch.randn(2, 3, 8, 48, 48), torch.randint(0, 10, (2,))), optimizer=sgd),
    _job("Super-resolution", _SuperResolution, lambda: (torch.randn(4, 3, 48, 48), torch.randn(4, 3, 96, 96)), regression),
]
