"""Models of pictures by their public dimensions: conv nets, Mixer, Swin, U-Net. Knows no row."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

#: Names that a row's type or model may hold, and the builder's name with its dimensions; the first match counts.
_KNOWN: tuple[tuple[str, str], ...] = (
    (r"se-?resnext-?101[ _-]*(?:\(?32x4d)?", "resnet 101 32 4 se"),
    (r"resnext-?101[ _-]*32x(\d+)d", "resnet 101 32 {0}"),
    (r"resnext-?50[ _-]*32x4d", "resnet 50 32 4"),
    (r"resnetv2_(\d+)x(\d+)", "bit {0} {1}"),
    (r"wide_resnet(\d+)_2", "resnet {0} 1 128"),
    (r"resnet-?(18|26|34|50|101|152)\b", "resnet {0} 1 64"),
    (r"vgg(11|13|16|19)(_bn)?", "vgg {0} {1}"),
    (r"densenet(121|161|169|201)", "densenet {0}"),
    (r"convnext_(tiny|small|base|large|xlarge)", "convnext {0}"),
    (r"mixer_(s|b|l)(\d+)", "mixer {0} {1}"),
    (r"swin_(tiny|small|base|large)_patch4_window(\d+)", "swin {0} {1}"),
    (r"u-net depth (\d+), num_convs (\d+), base (\d+)", "unet {0} {1} {2}"),
    (r"regnety_(160|320)", "regnety {0}"),
    (r"mobilenetv2_100", "mobilenetv2"),
)


def known_name(said: str) -> str | None:
    """The builder's name for what a row calls its model; None where there is none."""
    for pattern, name in _KNOWN:
        found = re.search(pattern, said.casefold())
        if found is not None:
            return name.format(*(group or "" for group in found.groups())).strip()
    return None


def build(name: str, classes: int, image: int) -> nn.Module:
    """The model of a name that :func:`known_name` gave."""
    kind, *rest = name.split()
    return _BUILDERS[kind](rest, classes, image)


def _conv(inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Convolution and batch norm."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False), nn.BatchNorm2d(outputs))


class _Squeeze(nn.Module):
    """Squeeze and excitation."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(width, inner, 1), nn.Conv2d(inner, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.up(F.relu(self.down(x.mean((2, 3), keepdim=True)), inplace=True)))


class _Bottleneck(nn.Module):
    """ResNet's, v1.5: the stride is in the middle convolution."""

    def __init__(self, inputs: int, width: int, outputs: int, stride: int, groups: int, squeeze: int) -> None:
        super().__init__()
        self.a, self.b, self.c = _conv(inputs, width, 1), _conv(width, width, 3, stride, groups), _conv(width, outputs, 1)
        self.squeeze = _Squeeze(outputs, squeeze) if squeeze else nn.Identity()
        self.beside = _conv(inputs, outputs, 1, stride) if stride > 1 or inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.b(F.relu(self.a(x), inplace=True)), inplace=True)
        y = self.squeeze(self.c(y))
        y += self.beside(x)
        return F.relu(y, inplace=True)


class _Basic(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.a, self.b = _conv(inputs, outputs, 3, stride), _conv(outputs, outputs, 3)
        self.beside = _conv(inputs, outputs, 1, stride) if stride > 1 or inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(F.relu(self.a(x), inplace=True))
        y += self.beside(x)
        return F.relu(y, inplace=True)


class _Pooled(nn.Module):
    """What a stack of blocks makes of a picture, averaged, to classes."""

    def __init__(self, first: nn.Module, blocks: Sequence[nn.Module], last: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.first, self.blocks, self.last = first, nn.ModuleList(blocks), last
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(self.last(x).mean((2, 3)))
        return y


_DEPTHS = {18: (2, 2, 2, 2), 26: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


def _resnet(rest: list[str], classes: int, image: int) -> nn.Module:
    depth, groups, base = (int(word) for word in rest[:3])
    blocks: list[nn.Module] = []
    inputs = 64
    for stage, count in enumerate(_DEPTHS[depth]):
        for index in range(count):
            stride = 2 if stage and not index else 1
            if depth < 50 and depth != 26:
                outputs = 64 << stage
                blocks.append(_Basic(inputs, outputs, stride))
            else:
                outputs = 256 << stage
                blocks.append(_Bottleneck(inputs, groups * base << stage, outputs, stride, groups, outputs // 16 if "se" in rest else 0))
            inputs = outputs
    stem = nn.Sequential(_conv(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    return _Pooled(stem, blocks, nn.Identity(), inputs, classes)


class _Standardised(nn.Conv2d):
    """A convolution whose weight is standardised each time (BiT)."""

    def forward(self, x: Tensor) -> Tensor:
        weight = F.batch_norm(self.weight.reshape(1, self.out_channels, -1), None, None, training=True, eps=1e-8).reshape_as(self.weight)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


class _PreAct(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        width = outputs // 4
        self.norms = nn.ModuleList(nn.GroupNorm(32, size) for size in (inputs, width, width))
        self.a = _Standardised(inputs, width, 1, bias=False)
        self.b = _Standardised(width, width, 3, stride, 1, bias=False)
        self.c = _Standardised(width, outputs, 1, bias=False)
        self.beside = _Standardised(inputs, outputs, 1, stride, bias=False) if stride > 1 or inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        seen = F.relu(self.norms[0](x), inplace=True)
        y = self.a(seen)
        y = self.b(F.relu(self.norms[1](y), inplace=True))
        y = self.c(F.relu(self.norms[2](y), inplace=True))
        return y + (x if self.beside is None else self.beside(seen))


def _bit(rest: list[str], classes: int, image: int) -> nn.Module:
    depth, factor = int(rest[0]), int(rest[1])
    blocks: list[nn.Module] = []
    inputs = 64 * factor
    for stage, count in enumerate(_DEPTHS[depth]):
        outputs = 256 * factor << stage
        for index in range(count):
            blocks.append(_PreAct(inputs, outputs, 2 if stage and not index else 1))
            inputs = outputs
    stem = nn.Sequential(_Standardised(3, 64 * factor, 7, 2, 3, bias=False), nn.MaxPool2d(3, 2, 1))
    return _Pooled(stem, blocks, nn.Sequential(nn.GroupNorm(32, inputs), nn.ReLU(inplace=True)), inputs, classes)


_VGG = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}


def _vgg(rest: list[str], classes: int, image: int) -> nn.Module:
    layers: list[nn.Module] = []
    inputs = 3
    for stage, count in enumerate(_VGG[int(rest[0])]):
        outputs = min(512, 64 << stage)
        for _ in range(count):
            layers.append(nn.Conv2d(inputs, outputs, 3, padding=1))
            layers += [nn.BatchNorm2d(outputs)] if "_bn" in rest else []
            layers.append(nn.ReLU(inplace=True))
            inputs = outputs
        layers.append(nn.MaxPool2d(2, 2))
    side = image // 32
    layers += [nn.Flatten(), nn.Linear(512 * side * side, 4096), nn.ReLU(inplace=True), nn.Linear(4096, 4096), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Linear(4096, classes))


class _Dense(nn.Module):
    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm_1, self.conv_1 = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        self.norm_2, self.conv_2 = nn.BatchNorm2d(4 * growth), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, made: list[Tensor]) -> Tensor:
        y = self.conv_1(F.relu(self.norm_1(torch.cat(made, 1)), inplace=True))
        z: Tensor = self.conv_2(F.relu(self.norm_2(y), inplace=True))
        return z


class _DenseStage(nn.Module):
    def __init__(self, inputs: int, growth: int, count: int, last: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Dense(inputs + index * growth, growth) for index in range(count))
        width = inputs + count * growth
        passed = [nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        self.after = (
            nn.Sequential(*passed) if last else nn.Sequential(*passed, nn.Conv2d(width, width // 2, 1, bias=False), nn.AvgPool2d(2, 2))
        )

    def forward(self, x: Tensor) -> Tensor:
        made = [x]
        for layer in self.layers:
            made.append(layer(made))
        y: Tensor = self.after(torch.cat(made, 1))
        return y


_DENSE = {
    121: (32, (6, 12, 24, 16)),
    161: (48, (6, 12, 36, 24)),
    169: (32, (6, 12, 32, 32)),
    201: (32, (6, 12, 48, 32)),
}


def _densenet(rest: list[str], classes: int, image: int) -> nn.Module:
    growth, counts = _DENSE[int(rest[0])]
    inputs = 2 * growth
    stem = nn.Sequential(_conv(3, inputs, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    stages: list[nn.Module] = []
    for index, count in enumerate(counts):
        last = index == len(counts) - 1
        stages.append(_DenseStage(inputs, growth, count, last))
        inputs = (inputs + count * growth) // (1 if last else 2)
    return _Pooled(stem, stages, nn.Identity(), inputs, classes)


class _Norm2d(nn.LayerNorm):
    """Over channels, of (batch, channels, height, width)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias).permute(0, 3, 1, 2)


class _NextBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(self.norm(self.conv(x).permute(0, 2, 3, 1))))).permute(0, 3, 1, 2)
        return x + y * self.scale.reshape(1, -1, 1, 1)


_NEXT = {
    "tiny": ((3, 3, 9, 3), 96),
    "small": ((3, 3, 27, 3), 96),
    "base": ((3, 3, 27, 3), 128),
    "large": ((3, 3, 27, 3), 192),
    "xlarge": ((3, 3, 27, 3), 256),
}


def _convnext(rest: list[str], classes: int, image: int) -> nn.Module:
    counts, width = _NEXT[rest[0]]
    blocks: list[nn.Module] = []
    for stage, count in enumerate(counts):
        if stage:
            blocks.append(nn.Sequential(_Norm2d(width), nn.Conv2d(width, 2 * width, 2, 2)))
            width *= 2
        blocks += [_NextBlock(width) for _ in range(count)]
    first = _NEXT[rest[0]][1]
    return _Pooled(nn.Sequential(nn.Conv2d(3, first, 4, 4), _Norm2d(first)), blocks, _Norm2d(width), width, classes)


class _Mlp(nn.Sequential):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))


class _MixerBlock(nn.Module):
    def __init__(self, width: int, tokens: int, across: int, inner: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens, self.channels = _Mlp(tokens, across), _Mlp(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm_1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm_2(x))


class _Mixer(nn.Module):
    def __init__(self, width: int, depth: int, patch: int, image: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, patch, patch)
        tokens = (image // patch) ** 2
        self.blocks = nn.ModuleList(_MixerBlock(width, tokens, width // 2, 4 * width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(self.norm(x).mean(1))
        return y


def _mixer(rest: list[str], classes: int, image: int) -> nn.Module:
    width, depth = {"s": (512, 8), "b": (768, 12), "l": (1024, 24)}[rest[0]]
    return _Mixer(width, depth, int(rest[1]), image, classes)


class _SwinBlock(nn.Module):
    """Attention in windows, every second time shifted by half of one; on (batch, height, width, channels)."""

    def __init__(self, width: int, heads: int, window: int, shifted: bool, side: int) -> None:
        super().__init__()
        self.heads, self.window = heads, min(window, side)
        self.shift = self.window // 2 if shifted and side > window else 0
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out, self.mlp = nn.Linear(width, 3 * width), nn.Linear(width, width), _Mlp(width, 4 * width)
        self.table = nn.Parameter(torch.zeros((2 * self.window - 1) ** 2, heads))
        count = self.window**2
        self.register_buffer("index", torch.zeros(count * count, dtype=torch.long))
        if self.shift:
            self.register_buffer("mask", torch.zeros((side // self.window) ** 2, count, count))

    def forward(self, x: Tensor) -> Tensor:
        batch, side, _, width = x.shape
        w, count = self.window, self.window**2
        y = self.norm_1(x)
        y = torch.roll(y, (-self.shift, -self.shift), (1, 2)) if self.shift else y
        y = y.reshape(batch, side // w, w, side // w, w, width).permute(0, 1, 3, 2, 4, 5).reshape(-1, count, width)
        q, k, v = self.qkv(y).reshape(len(y), count, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q * (q.shape[-1] ** -0.5)) @ k.transpose(-2, -1)
        scores = scores + self.table[self.index].reshape(count, count, -1).permute(2, 0, 1).unsqueeze(0)
        if self.shift:
            masked = scores.reshape(batch, -1, self.heads, count, count) + self.mask.unsqueeze(1).unsqueeze(0)  # type: ignore[operator]
            scores = masked.reshape(-1, self.heads, count, count)
        y = self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(len(y), count, width))
        y = y.reshape(batch, side // w, side // w, w, w, width).permute(0, 1, 3, 2, 4, 5).reshape(batch, side, side, width)
        x = x + (torch.roll(y, (self.shift, self.shift), (1, 2)) if self.shift else y)
        return x + self.mlp(self.norm_2(x))


class _Merge(nn.Module):
    """Four neighbours become one position of twice the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.down = nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = [x[:, a::2, b::2] for a in (0, 1) for b in (0, 1)]
        y: Tensor = self.down(self.norm(torch.cat(parts, -1)))
        return y


class _Swin(nn.Module):
    def __init__(self, width: int, counts: Sequence[int], heads: int, window: int, image: int, classes: int) -> None:
        super().__init__()
        self.embed, self.norm_in = nn.Conv2d(3, width, 4, 4), nn.LayerNorm(width)
        side, blocks = image // 4, []
        for stage, count in enumerate(counts):
            if stage:
                blocks.append(_Merge(width))
                width, side, heads = 2 * width, side // 2, 2 * heads
            blocks += [_SwinBlock(width, heads, window, bool(index % 2), side) for index in range(count)]
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm_in(self.embed(x).permute(0, 2, 3, 1))
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(self.norm(x).mean((1, 2)))
        return y


def _swin(rest: list[str], classes: int, image: int) -> nn.Module:
    width, counts, heads = {
        "tiny": (96, (2, 2, 6, 2), 3),
        "small": (96, (2, 2, 18, 2), 3),
        "base": (128, (2, 2, 18, 2), 4),
        "large": (192, (2, 2, 18, 2), 6),
    }[rest[0]]
    return _Swin(width, counts, heads, int(rest[1]), image, classes)


class _Unet(nn.Module):
    """As torchgpipe's benchmark: ``convs`` convolutions a level, skip connections by concatenation."""

    def __init__(self, depth: int, convs: int, base: int) -> None:
        super().__init__()

        def level(inputs: int, inner: int, outputs: int) -> nn.Sequential:
            layers: list[nn.Module] = []
            widths = [inputs, *[inner] * (convs - 1), outputs]
            for a, b in pairwise(widths):
                conv = nn.Conv2d(a, b, 3, padding=1, bias=False)
                layers += [conv, nn.Dropout2d(0.1), nn.InstanceNorm2d(b), nn.LeakyReLU()]
            return nn.Sequential(*layers)

        widths = [base << index for index in range(depth)]
        self.down = nn.ModuleList(level(a, b, b) for a, b in zip([3, *widths[:-1]], widths, strict=True))
        self.middle = level(widths[-1], 2 * widths[-1], widths[-1])
        self.up = nn.ModuleList(level(2 * width, width // 2, width // 2) for width in reversed(widths))
        self.last = nn.Conv2d(base // 2, 1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        skipped = []
        for level in self.down:
            x = level(x)
            skipped.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for level in self.up:
            x = level(torch.cat((F.interpolate(x, scale_factor=2), skipped.pop()), 1))
        y: Tensor = self.last(x)
        return y


def _unet(rest: list[str], classes: int, image: int) -> nn.Module:
    return _Unet(*(int(word) for word in rest))


class _RegNetBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, group: int) -> None:
        super().__init__()
        self.a, self.b, self.c = _conv(inputs, outputs, 1), _conv(outputs, outputs, 3, stride, outputs // group), _conv(outputs, outputs, 1)
        self.squeeze = _Squeeze(outputs, inputs // 4)
        self.beside = _conv(inputs, outputs, 1, stride) if stride > 1 or inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.squeeze(F.relu(self.b(F.relu(self.a(x), inplace=True)), inplace=True))
        return F.relu(self.c(y) + self.beside(x), inplace=True)


def _regnety(rest: list[str], classes: int, image: int) -> nn.Module:
    counts, widths, group = {
        "160": ((2, 4, 11, 1), (224, 448, 1232, 3024), 112),
        "320": ((2, 5, 12, 1), (232, 696, 1392, 3712), 232),
    }[rest[0]]
    blocks: list[nn.Module] = []
    inputs = 32
    for count, outputs in zip(counts, widths, strict=True):
        for index in range(count):
            blocks.append(_RegNetBlock(inputs, outputs, 1 if index else 2, group))
            inputs = outputs
    return _Pooled(nn.Sequential(_conv(3, 32, 3, 2), nn.ReLU(inplace=True)), blocks, nn.Identity(), inputs, classes)


class _Inverted(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, factor: int) -> None:
        super().__init__()
        width = inputs * factor
        layers: list[nn.Module] = [] if factor == 1 else [_conv(inputs, width, 1), nn.ReLU6(inplace=True)]
        self.run = nn.Sequential(*layers, _conv(width, width, 3, stride, width), nn.ReLU6(inplace=True), _conv(width, outputs, 1))
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.run(x)
        return x + y if self.adds else y


def _mobilenetv2(rest: list[str], classes: int, image: int) -> nn.Module:
    plan = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    blocks: list[nn.Module] = []
    inputs = 32
    for factor, outputs, count, stride in plan:
        for index in range(count):
            blocks.append(_Inverted(inputs, outputs, 1 if index else stride, factor))
            inputs = outputs
    stem = nn.Sequential(_conv(3, 32, 3, 2), nn.ReLU6(inplace=True))
    return _Pooled(stem, blocks, nn.Sequential(_conv(inputs, 1280, 1), nn.ReLU6(inplace=True)), 1280, classes)


_BUILDERS: dict[str, Callable[[list[str], int, int], nn.Module]] = {
    "resnet": _resnet,
    "bit": _bit,
    "vgg": _vgg,
    "densenet": _densenet,
    "convnext": _convnext,
    "mixer": _mixer,
    "swin": _swin,
    "unet": _unet,
    "regnety": _regnety,
    "mobilenetv2": _mobilenetv2,
}
