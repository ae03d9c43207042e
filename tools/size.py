"""How large the package, its folders and the tests are; fails above a ceiling, and where a folder's docstring lists other modules than it
has. `make check` runs it.

Whoever takes something away lowers the ceiling. Raising it is a commit of its own, with its reason.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

#: Lines of Python, by folder of the repository.
CEILINGS = {"lightning_autopar": 88_138, "tests": 80_586}
#: Modules of a folder of the package, ``__init__.py`` not counted.
MOST_MODULES = 15
#: Lines of a module of the package; ``_lightning_compat`` is the one door to Lightning's private names.
MOST_LINES = 600
_NO_LIMIT = ("lightning_autopar/_lightning_compat.py",)


def main() -> int:
    """Prints the sizes; 1 where one is above its ceiling."""
    listed = subprocess.run(["git", "ls-files", *(f"{folder}/*.py" for folder in CEILINGS)], capture_output=True, text=True, check=True)
    lines = {Path(name): Path(name).read_text().count("\n") for name in listed.stdout.split("\n") if name and Path(name).exists()}
    too_much = []
    for folder, ceiling in CEILINGS.items():
        total = sum(count for path, count in lines.items() if path.parts[0] == folder)
        print(f"{folder}: {total:,} lines of at most {ceiling:,}")
        if total > ceiling:
            too_much.append(f"{folder} has {total:,} lines, {total - ceiling:,} above its ceiling")
    package = {path: count for path, count in lines.items() if path.parts[0] == "lightning_autopar"}
    sizes: Counter[Path] = Counter()
    for path, count in package.items():
        sizes[path.parent] += count
    modules = Counter(path.parent for path in package if path.name != "__init__.py")
    for parent, size in sorted(sizes.items()):
        print(f"  {parent}: {size:,} lines, {modules[parent]} modules")
    too_much += [f"{parent} has {count} modules, above {MOST_MODULES}" for parent, count in sorted(modules.items()) if count > MOST_MODULES]
    too_much += [
        f"{path} has {count} lines, above {MOST_LINES}"
        for path, count in sorted(package.items())
        if count > MOST_LINES and str(path) not in _NO_LIMIT
    ]
    too_much += wrong_lists(Path("lightning_autopar"))
    print("\n".join(too_much), file=sys.stderr)
    return 1 if too_much else 0


def wrong_lists(root: Path) -> list[str]:
    """A sentence on each folder whose docstring lists modules, and not those that it has."""
    wrong = []
    for path in sorted(root.rglob("__init__.py")):
        listed = set(re.findall(r"^    (\w+)/?  +\S", ast.get_docstring(ast.parse(path.read_text())) or "", re.MULTILINE))
        has = {each.stem for each in path.parent.glob("*.py")} | {each.parent.name for each in path.parent.glob("*/__init__.py")}
        if listed and (differing := sorted(listed ^ (has - {"__init__"}))):
            wrong.append(f"the list of modules in {path} is wrong about {', '.join(differing)}")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
