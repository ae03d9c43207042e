"""How often a test puts something of its own in the place of a private name; fails above a ceiling. `make check` runs it.

A test that replaces a private name breaks where the name changes, though the package does what it did. Counted are the calls of
``monkeypatch.setattr``, ``delattr`` and ``setitem`` and of ``mock.patch`` whose name begins with one underscore, this package's or
another's. Whoever takes one away lowers the ceiling.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

CEILING = 29


def main() -> int:
    """Prints the number, with ``--list`` each patch; 1 where all together are above the ceiling."""
    found = {path: patches(ast.parse(path.read_text(encoding="utf-8"))) for path in sorted(Path("tests").rglob("*.py"))}
    total = sum(map(len, found.values()))
    if "--list" in sys.argv:
        print("\n".join(f"{path}:{line}: {name}" for path, some in found.items() for line, name in some))
    print(f"tests: {total} patches of private names of at most {CEILING}")
    if total > CEILING:
        print(f"tests patch {total - CEILING} more private names than allowed; --list shows all", file=sys.stderr)
    return int(total > CEILING)


def patches(tree: ast.Module) -> list[tuple[int, str]]:
    """Line and private name of each patch."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            found += [(node.lineno, name) for name in _patched(node) if name.startswith("_") and not name.startswith("__")]
    return found


def _patched(call: ast.Call) -> list[str]:
    """The last parts of the names that this call replaces."""
    function = ast.unparse(call.func)
    last = function.rpartition(".")[2]
    texts = [each.value for each in call.args[:2] if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    if last == "setitem" and call.args and isinstance(call.args[0], ast.Attribute):
        return [call.args[0].attr]
    if function.endswith("patch.multiple"):
        return [keyword.arg for keyword in call.keywords if keyword.arg is not None]
    replaces = last in ("setattr", "delattr", "patch") or function.endswith("patch.object")
    return [texts[0].rpartition(".")[2]] if replaces and texts and function != "setattr" else []


if __name__ == "__main__":
    sys.exit(main())
