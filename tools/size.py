"""How large the package, its folders and the tests are; fails above a ceiling. `make check` runs it.

Whoever takes something away lowers the ceiling. Raising it is a commit of its own, with its reason.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

#: Lines of Python, by folder of the repository.
CEILINGS = {"lightning_autopar": 75_894, "tests": 65_927}
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
    print("\n".join(too_much), file=sys.stderr)
    return 1 if too_much else 0


if __name__ == "__main__":
    sys.exit(main())
