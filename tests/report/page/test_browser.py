"""The pages in a real browser, in light and in dark, narrow and wide: nothing cut off, everything readable, nothing asked of any network.

Skipped where there is neither Chromium nor Chrome.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from lightning_autopar.constraints import Constraints
from lightning_autopar.devices.spec import parse_spec
from lightning_autopar.planning.make_report import make_report
from lightning_autopar.report.report import NothingFits, Report
from tests.browser import Browser, find_browser
from tests.fakes.pages import pipelined
from tests.fakes.values import GIB, MIB, footprint, gpu, inventory

Image = pytest.importorskip("PIL.Image")

_WIDTHS = (400, 1600)
#: For text of ordinary size, WCAG 2.2, 1.4.3.
_LEAST_CONTRAST = 4.5
#: What the page's own script can see of itself. Everything is opened first.
_FIND = """
(() => {
  document.querySelectorAll('details').forEach(each => { each.open = true; });
  const found = {overflow: [], cut: [], faint: [], texts: 0};
  const page = document.documentElement.clientWidth, whole = document.documentElement.scrollWidth;
  if (whole > page) found.overflow.push(`the page is ${whole} of ${page} wide`);
  const parse = color => {
    const [r, g, b, a] = color.match(/[\\d.]+/g).map(Number);
    return {r, g, b, a: a === undefined ? 1 : a};
  };
  const linear = part => (part /= 255) <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  const luminance = ({r, g, b}) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const contrast = (one, other) => {
    const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const paper = element => {
    for (let at = element; at; at = at.parentElement) {
      const color = parse(getComputedStyle(at).backgroundColor);
      if (color.a === 1) return color;
    }
    return {r: 255, g: 255, b: 255, a: 1};
  };
  const under = (words, box) => {  // of the bars that were drawn before these words the last one that lies below their middle
    const x = (box.left + box.right) / 2, y = (box.top + box.bottom) / 2;
    let color = null;
    for (const bar of words.closest('svg').querySelectorAll('rect')) {
      const on = bar.getBoundingClientRect(), fill = getComputedStyle(bar).fill;
      const before = bar.compareDocumentPosition(words) & Node.DOCUMENT_POSITION_FOLLOWING;
      const below = on.left <= x && x <= on.right && on.top <= y && y <= on.bottom;
      if (before && below && fill.startsWith('rgb')) color = parse(fill);
    }
    return color;
  };
  const outside = box => box.left < -0.5 || box.right > page + 0.5;
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode, element = node.parentElement;
    if (!node.data.trim() || ['STYLE', 'SCRIPT', 'TITLE', 'title'].includes(element.tagName)) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const box = range.getBoundingClientRect();
    if (!box.width || !box.height) continue;
    found.texts += 1;
    const said = node.data.trim().slice(0, 40), drawing = element.closest('svg'), style = getComputedStyle(element);
    if (!element.closest('.scroll') && outside(box)) found.cut.push(`${said}: ${box.left} to ${box.right} of ${page}`);
    if (drawing) {
      const frame = drawing.getBoundingClientRect();
      const sideways = box.left < frame.left - 1 || box.right > frame.right + 1;
      if (sideways || box.top < frame.top - 2 || box.bottom > frame.bottom + 2) found.cut.push(`${said}: out of its drawing`);
    }
    const ink = parse(drawing ? style.fill : style.color);
    const ratio = contrast(ink, (drawing && under(element, box)) || paper(drawing ? drawing.parentElement : element));
    if (ratio < LEAST) found.faint.push(`${said}: ${ratio.toFixed(2)}`);
  }
  for (const drawing of document.querySelectorAll('svg')) {
    const box = drawing.getBoundingClientRect();
    if (box.width && !drawing.closest('.scroll') && outside(box)) found.cut.push(`a drawing: ${box.left} to ${box.right}`);
  }
  return found;
})()
""".replace("LEAST", str(_LEAST_CONTRAST))


def reports() -> dict[str, Report]:
    """A pipeline on uneven devices, GPUs that others use, and one that fits nowhere."""
    step = footprint(blocks=8, batch_size=16, parameter_bytes=256 * MIB, activation_bytes=GIB, flops=10**14, margin=0.05)
    step = replace(step, assumptions=("attention runs by the flash kernel, which keeps a row of maxima and sums",))
    shared = make_report(step, inventory(gpu(0), gpu(1, 40 * GIB), gpu(2, 9 * GIB)), Constraints())
    with pytest.raises(NothingFits) as nothing:
        make_report(step, parse_spec("2xcpu:1GiB"), Constraints(allow=("single", "ddp")))
    return {"uneven": pipelined(), "shared": shared, "nothing": nothing.value.report}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = find_browser()
    if path is None:
        pytest.skip("there is neither Chromium nor Chrome on the PATH")
    with Browser(path) as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    markup = {name: report.to_html() for name, report in reports().items()}
    return {name: _written(folder / f"{name}.html", text) for name, text in markup.items()}


def _written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def _pixels(picture: bytes, folder: Path) -> Any:
    (folder / "picture.png").write_bytes(picture)
    with Image.open(folder / "picture.png") as opened:
        return opened.convert("RGB")


@pytest.mark.parametrize("name", ["uneven", "shared", "nothing"])
def test_a_page_can_be_read_in_light_and_dark_narrow_and_wide(name: str, browser: Browser, pages: dict[str, Path], tmp_path: Path) -> None:
    papers = {}
    for width in _WIDTHS:
        for dark in (False, True):
            assert browser.show(pages[name], width=width, dark=dark) == []
            picture = _pixels(browser.picture(), tmp_path)  # before everything is opened, which is a picture of many screens
            found = browser.run(_FIND)
            assert {key: found[key] for key in ("overflow", "cut", "faint")} == {"overflow": [], "cut": [], "faint": []}, (width, dark)
            assert found["texts"] > 40
            assert picture.width == width
            colors = picture.getcolors(maxcolors=1 << 20)
            assert len(colors) > 50
            papers[width, dark] = max(colors)[1]
            if width == _WIDTHS[0]:
                continue
            # Each of these is drawn, in its colour.
            there = {color for _, color in colors}
            assert {"uneven": (0x00, 0x72, 0xB2), "shared": (0xD5, 0x5E, 0x00), "nothing": (0xD5, 0x5E, 0x00)}[name] in there
    assert all(sum(papers[width, False]) > 700 > 200 > sum(papers[width, True]) for width in _WIDTHS)


def test_what_is_found_would_be_found(browser: Browser, tmp_path: Path) -> None:
    bad = "<style>body{margin:0;background:#fff}</style><p style='color:#999'>faint</p><div style='width:900px'>wide</div>"
    bad += (
        "<svg width=50 height=20><rect width=50 height=20 fill='#0072b2'/><text x=5 y=15>on it</text><text x=45 y=15>out of it</text></svg>"
    )
    page = _written(tmp_path / "bad.html", f"<!DOCTYPE html><html><body>{bad}<img src='nowhere.png'><script>x.y</script></body></html>")
    wrong = " ".join(browser.show(page, width=400))
    assert "exception" in wrong
    assert "nowhere.png" in wrong
    found = browser.run(_FIND)
    assert found["overflow"]
    assert any("out of its drawing" in words for words in found["cut"])
    assert any(words.startswith("faint: 2.8") for words in found["faint"])
    assert any(words.startswith("on it: 4.") for words in found["faint"])


def test_a_page_prints_in_light_with_everything_open(browser: Browser, pages: dict[str, Path], tmp_path: Path) -> None:
    browser.show(pages["uneven"], width=800, dark=True, media="print")
    paper = max(_pixels(browser.picture(), tmp_path).getcolors(maxcolors=1 << 20))[1]
    assert sum(paper) > 700
    hidden = "[...document.querySelectorAll('details li')].filter(each => !each.getBoundingClientRect().height).length"
    assert browser.run(hidden) == 0


def test_a_fragment_is_readable_on_a_dark_page_and_leaves_it_alone(browser: Browser, tmp_path: Path) -> None:
    fragment = reports()["shared"]._repr_html_()
    # As JupyterLab does it: its theme isn't the browser's, and it styles tables by class.
    theirs = "body{background:#111;color:#eee}.out td,.out th{text-align:right;padding:40px}.out tr:nth-child(odd){background:#333}"
    page = f"<!DOCTYPE html><html><head><meta charset='utf-8'><style>{theirs}</style></head><body THEME><p id='mine'>mine</p>"
    page += f"<table id='table'><tr><td>x</td></tr></table><div class='out'>{fragment}</div></body></html>"
    styles = {}
    for theme, dark in (("true", True), ("false", False)):
        path = _written(tmp_path / f"{theme}.html", page.replace("THEME", f"data-jp-theme-light='{theme}'"))
        assert browser.show(path, width=900, dark=dark) == []
        found = browser.run(_FIND)
        assert found["faint"] == []
        styles[theme] = browser.run("getComputedStyle(document.querySelector('.out > div')).backgroundColor")
        look = "(({color, fontSize, padding}) => [color, fontSize, padding])(getComputedStyle(document.getElementById('mine')))"
        assert browser.run(look) == ["rgb(238, 238, 238)", "16px", "0px"]
        cell = "(({textAlign, paddingTop}) => [textAlign, paddingTop])(getComputedStyle(document.querySelector('.plans td.why')))"
        assert browser.run(cell) == ["left", "7px"]
    assert styles == {"true": "rgb(251, 251, 249)", "false": "rgb(23, 26, 31)"}


def test_nothing_is_left_of_a_browser() -> None:
    path = find_browser()
    if path is None:
        pytest.skip("there is neither Chromium nor Chrome on the PATH")
    with Browser(path) as found:
        folder = Path(found.folder)
        pid = found.pid
        assert folder.is_dir()
        family = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    assert not folder.exists()
    psutil.wait_procs([psutil.Process(each) for each in family if psutil.pid_exists(each)], timeout=5)
    assert [each for each in family if psutil.pid_exists(each) and psutil.Process(each).ppid() == os.getpid()] == []
