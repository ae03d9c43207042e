"""What mkdocs does besides: docstrings name things by Sphinx's roles, ``:func:`plan```, which a page shows as code."""

from __future__ import annotations

import re
from typing import Any

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):\s*<code>~?([^<]+)</code>")


def on_page_content(html: str, **_: Any) -> str:
    """Called with each page's HTML: a role is left out, and of a long name all but its last part."""
    return _ROLE.sub(lambda found: f"<code>{found[1].rpartition('.')[2]}</code>", html)
