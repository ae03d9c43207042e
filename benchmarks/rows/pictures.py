"""Models of pictures by name. Knows their public dimensions; no row's figures."""

from __future__ import annotations

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
    """

    name: str
    image: int
    classes: int

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
    return Picture(name=name, image=image, classes=fields.dimension("classes") or 1000)
