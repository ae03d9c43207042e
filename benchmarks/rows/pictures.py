"""Models of pictures by name. Knows their public dimensions; no row's figures."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import nn

from rows.row import Fields, NotBuilt


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A model of pictures.

    Args:
        name: of a builder in :mod:`rows.convnets`, with its dimensions.
        image: side of the pictures.
        classes: that it tells apart.
        channels_last: how its tensors are laid out (NHWC).
    """

    name: str
    image: int
    classes: int
    channels_last: bool = False

    def build(self) -> nn.Module:
        """The model."""
        from rows.convnets import build

        return build(self.name, self.classes, self.image)


def picture(fields: Fields) -> Picture:
    """What a row's type names.

    Raises:
        NotBuilt: for one that there is no builder for.
    """
    from rows.convnets import known_name

    said = str(fields.arch.get("type") or "")
    name = known_name(f"{said} {fields.row.get('model') or ''}")
    if name is None:
        raise NotBuilt(f"no model of type {said!r}")
    image = fields.dimension("image")
    if image is None:
        image = 224
        fields.assume("the pictures' size isn't published: 224")
    return Picture(name=name, image=image, classes=fields.dimension("classes") or 1000, channels_last=_channels_last(fields))


def _channels_last(fields: Fields) -> bool:
    """Whether the row says so, or its library does it by itself."""
    said = " ".join(fields.text(name) for name in ("framework", "model", "quality_note", "source_url_or_repo_path"))
    if re.search(r"channels[_ ]?last|nhwc", said):
        return True
    # DeepLearningExamples' ConvNets/configs.yml: memory_format nhwc for every model under AMP, and for none in FP32 or TF32.
    compute = str(fields.precision.get("compute")).casefold()
    return fields.family == "nvidia" and "autocast" in compute and "nchw" not in said
