"""Which parameters ZeRO-3 gathers together, and which stay gathered: bytes by part of the step. It knows no seconds."""

from __future__ import annotations

from lightning_autopar.memory.footprint import Footprint, LayerFootprint
from lightning_autopar.planning.roofline import Layout


def gathered_modules(footprint: Footprint, layout: Layout, persistence: int) -> list[tuple[int, ...]]:
    """For each layer of a layout the bytes of each gather: a module is gathered with what it holds directly.

    Args:
        footprint: of the module.
        layout: its parts; more than the footprint's where that wasn't traced.
        persistence: elements up to which a parameter stays gathered.
    """
    parts = [part for _, part in footprint.parts()]
    if len(parts) != len(layout.layers):
        return [(layer.parameters,) if layer.parameters else () for layer in layout.layers]
    element = footprint.parameter_bytes / max(1, footprint.parameters)
    return [_modules(part, persistence * element) for part in parts]


def _modules(part: LayerFootprint, persistent_bytes: float) -> tuple[int, ...]:
    if not part.parameter_rows:
        return (part.parameter_bytes,) if part.parameter_bytes else ()
    found: dict[int, int] = {}
    for index, (rows, row_bytes, _) in enumerate(part.parameter_rows):
        if rows * row_bytes > persistent_bytes:
            # Where it isn't known which module holds a parameter, one with a weight has a bias besides.
            module = part.parameter_modules[index][0] if part.parameter_modules else index // 2
            found[module] = found.get(module, 0) + rows * row_bytes
    return tuple(found.values())


def persistent_bytes(footprint: Footprint, persistence: int) -> int:
    """Of those parameters that stay gathered.

    Args:
        footprint: of the module.
        persistence: elements up to which a parameter stays gathered.
    """
    element = footprint.parameter_bytes / max(1, footprint.parameters)
    sizes = (rows * row_bytes for _, part in footprint.parts() for rows, row_bytes, _ in part.parameter_rows)
    return sum(size for size in sizes if size <= persistence * element)


def modules_with_parameters(footprint: Footprint) -> int:
    """How many modules hold parameters directly."""
    count = 0
    for _, part in footprint.parts():
        known = len({number for number, _ in part.parameter_modules})
        count += known or -(-len(part.parameter_rows) // 2)
    return count
