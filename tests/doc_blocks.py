"""The fenced blocks of the README and of the pages: where they are, and what each kind of them is put to."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
LANGUAGES = ("python", "bash", "console", "yaml", "json", "diff", "toml")
_FENCE = re.compile(r"^(?P<indent> *)```(?P<rest>[^\n`]*)\n(?P<text>.*?)^(?P=indent)``` *$", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r'title="([^"]+)"')
_NUMBER = re.compile(r"\d[\d.,]*( ?(s|ms|µs|B|KiB|MiB|GiB)\b)?")
_RULES = re.compile(r"[─━│┃┏┓┗┛┡┩└┘┬┴┼]+")


@dataclass(frozen=True, kw_only=True)
class Block:
    """One fenced block.

    Args:
        page: the file.
        line: of its first line of text.
        language: after the fence.
        title: the name of the file that the block is, or None.
        text: without the page's indentation.
    """

    page: Path
    line: int
    language: str
    title: str | None
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    """The blocks of a page, in order."""
    words = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(words):
        language, _, attributes = found["rest"].strip().partition(" ")
        title = _TITLE.search(attributes)
        yield Block(
            page=page,
            line=words.count("\n", 0, found.start()) + 2,
            language=language,
            title=title[1] if title else None,
            text=textwrap.dedent(found["text"]),
        )


def without_blocks(words: str) -> str:
    """A page's text without what is in its fences."""
    return _FENCE.sub("", words)


def commands(text: str) -> list[str]:
    """The command lines of a bash block: continued lines joined, comments left out."""
    joined = re.sub(r"\\\n\s*", " ", text)
    lines = [re.sub(r"(^|\s)#.*$", "", line).strip() for line in joined.splitlines()]
    return [line for line in lines if line]


def console(text: str) -> list[tuple[str, list[str]]]:
    """The commands of a console block, each with the lines that are shown of what it prints; a line of an ellipsis stands for any."""
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif line.strip() not in ("", "…"):
            assert found, f"a console block begins with '$ ', not with {line!r}"
            found[-1][1].append(line)
    return found


def same(line: str) -> str:
    """A line of output without what differs from one machine to the next: numbers, rules and the width of columns."""
    return " ".join(_NUMBER.sub("#", _RULES.sub(" ", line)).split())


def split_command(line: str) -> tuple[dict[str, str], list[str], str | None] | None:
    """A command as variables, words and the file that its output goes to; None where it takes a shell."""
    if re.search(r"[|;&<$`*]", line):
        return None
    words = shlex.split(line)
    output = None
    if ">" in words:
        at = words.index(">")
        if at != len(words) - 2:
            return None
        words, output = words[:at], words[at + 1]
    variables: dict[str, str] = {}
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        name, _, variables[name] = words.pop(0).partition("=")
    return variables, words, output


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as both mkdocs and code hosts make them."""
    found = set()
    for heading in re.findall(r"^#+ +(.+)$", without_blocks(page.read_text(encoding="utf-8")), re.MULTILINE):
        words = re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower()
        found.add(re.sub(r"\s", "-", words))
        found.add(re.sub(r"[-\s]+", "-", words))
    return found


def links(page: Path) -> list[str]:
    """What a page's links and pictures point at."""
    words = re.sub(r"`[^`\n]*`", "", without_blocks(page.read_text(encoding="utf-8")))
    return re.findall(r"!?\[[^\]]*\]\(([^)\s]+)\)", words) + re.findall(r'\b(?:src|srcset|href)="([^"]+)"', words)
