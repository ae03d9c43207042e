"""Where the package asks which engine it has before it, outside of the engines' folders.

    python tools/engine_names.py          # every place, and their number
    python tools/engine_names.py 50       # the same; fails above that number

Counted are, a line once: a comparison with an engine's name, or membership among such names; ``isinstance`` of an engine's class; a table,
or what is kept in one, by such a name; a condition on a field of a plan, or of a running engine, that one engine alone sets. Where
something that is no plan has a field of such a name of its own (``self.cuts``), that is not a plan's.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "lightning_autopar"
FOLDERS = tuple(PACKAGE / "strategies" / name for name in ("ddp", "fsdp", "zero", "pipeline"))
NAMES = frozenset(("single", "ddp", "fsdp", "zero", "pipeline", "zero_3"))
#: Set by one engine alone: fields of a plan, and of a running engine.
FIELDS = frozenset(("zero_stage", "cuts", "schedule", "reshard_after_forward"))
FLAGS = FIELDS | {"in_stages", "staging"}
#: Where ``self`` is a plan.
PLANS = PACKAGE / "plans.py"
CLASSES = [f"{name}{suffix}" for name in ("Single", "DDP", "FSDP", "Zero", "Pipeline") for suffix in ("", "Engine")] + ["ZeroFiles"]


def _named(node: ast.AST) -> bool:
    """Whether it is an engine's name, or several."""
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return any(map(_named, node.elts))
    return isinstance(node, ast.Constant) and node.value in NAMES


def _asks(node: ast.AST) -> bool:
    """Whether this asks which engine it is."""
    if isinstance(node, ast.Compare):
        return any(map(_named, (node.left, *node.comparators)))
    if isinstance(node, ast.Call):
        words = ast.unparse(node.func)
        if words in ("isinstance", "issubclass"):
            return any(each.id in CLASSES for each in ast.walk(node.args[1]) if isinstance(each, ast.Name))
        return any(map(_named, node.args))
    if isinstance(node, ast.Dict):
        return any(key is not None and _named(key) for key in node.keys)
    if isinstance(node, ast.Subscript):
        return _named(node.slice)
    if isinstance(node, (ast.If, ast.IfExp, ast.While, ast.Assert)):
        return any(map(_is_flag, ast.walk(node.test)))
    if isinstance(node, ast.comprehension):
        return any(_is_flag(each) for condition in node.ifs for each in ast.walk(condition))
    return False


def _is_flag(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in FLAGS


class _WithoutOwn(ast.NodeTransformer):
    """Takes fields of ``self`` for names of their own."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if node.attr in FIELDS and isinstance(node.value, ast.Name) and node.value.id == "self":
            return ast.copy_location(ast.Name(id=node.attr, ctx=node.ctx), node)
        return self.generic_visit(node)


def places(path: Path) -> Iterator[int]:
    """The lines of a module that ask."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if path != PLANS:
        tree = _WithoutOwn().visit(tree)
    lines = {getattr(node, "lineno", None) or node.ifs[0].lineno for node in ast.walk(tree) if _asks(node)}  # type: ignore[attr-defined]
    yield from sorted(lines)


def main() -> int:
    """Prints them; 1 where there are more than the argument says."""
    count = 0
    for path in sorted(PACKAGE.rglob("*.py")):
        if any(folder in path.parents for folder in FOLDERS):
            continue
        text = path.read_text(encoding="utf-8").splitlines()
        for line in places(path):
            count += 1
            print(f"{path.relative_to(ROOT)}:{line}: {text[line - 1].strip()}")
    print(f"{count} places ask which engine it is")
    return int(len(sys.argv) > 1 and count > int(sys.argv[1]))


if __name__ == "__main__":
    sys.exit(main())
