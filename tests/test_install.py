"""What pip is told of where packages come from, uv is told as well; or pip installs."""

from __future__ import annotations

import runpy
from pathlib import Path

_INSTALL = runpy.run_path(str(Path(__file__).parents[1] / "tools" / "install.py"))
_LISTED = """\
:env:.find-links='/wheels'
:env:.disable-pip-version-check='1'
global.find-links='/others'
global.extra-index-url='file:///one file:///two'
global.cert='/ca.crt'
"""


def test_pips_settings_are_uvs() -> None:
    settings = _INSTALL["settings_of"](_LISTED)
    assert settings["find-links"] == "/wheels", "a variable counts more than a file"
    options, variables = _INSTALL["for_uv"](settings)
    assert options[:2] == ["--index-strategy", "unsafe-best-match"]
    pairs = list(zip(options[::2], options[1::2], strict=True))
    assert {*pairs[1:]} == {("--extra-index-url", "file:///one"), ("--extra-index-url", "file:///two"), ("--find-links", "/wheels")}
    assert variables == {"SSL_CERT_FILE": "/ca.crt"}


def test_a_setting_that_uv_does_not_have_leaves_it_to_pip() -> None:
    assert _INSTALL["for_uv"](_INSTALL["settings_of"]("global.no-index='true'\n")) is None
    assert _INSTALL["for_uv"]({}) == ([], {})
