"""How pages look: colours, and a style sheet that is confined to one element. Knows no report.

The page's own theme is the browser's (``prefers-color-scheme``); a notebook's is what its front end says it is. A fragment has a paper of
its own, so that it is readable wherever it stands. Widths are its own as well, by container queries: a notebook's cell is no window.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

#: A drawing sets all its colours, so that no surrounding page makes it unreadable.
PAPER, INK, FAINT, ALARM = "#fbfbf9", "#24292f", "#b9bdc3", "#c62828"
#: The colour of what other processes hold of a device.
HELD = "#e4e5e8"
#: Colours of bytes by category: Okabe and Ito's palette, which people with any colour vision can tell apart. Other categories are "other".
CATEGORIES: Mapping[str, str] = {
    "parameters": "#0072b2",
    "gradients": "#e69f00",
    "optimizer": "#009e73",
    "activations": "#d55e00",
    "temporary": "#cc79a7",
    "communication": "#56b4e9",
    "context": "#6b6f76",
    "rounding": "#a9adb3",
}
OTHER = "#8a6d3b"
#: Colours of what a rank does during a step.
KINDS: Mapping[str, str] = {
    "forward": "#0072b2",
    "backward": "#e69f00",
    "recompute": "#cc79a7",
    "communication": "#56b4e9",
    "optimizer": "#009e73",
    "offload": "#8a6d3b",
    "input": "#6b6f76",
    "idle": "#ffffff",
}

#: Colours of a rank's second and fourth stage, to tell them from the first and third.
_LIGHTER = {"forward": "#7cc0ea", "backward": "#f7d27a"}
#: Colours of a step's seconds by part.
_PARTS = {"compute": KINDS["forward"], "overhead": KINDS["input"]}
_LIGHT = {"paper": PAPER, "ink": INK, "soft": "#57606a", "faint": FAINT, "line": "#dfe1e4", "panel": "#f1f1ee", "alarm": ALARM}
_LIGHT |= {"good": "#1a6f37", "held": HELD, "link": "#00588a"}
_DARK = {"paper": "#171a1f", "ink": "#e8eaed", "soft": "#aab2bd", "faint": "#59616c", "line": "#343a43", "panel": "#20242b"}
_DARK |= {"alarm": "#ff8f86", "good": "#6fd08c", "held": "#3a4049", "link": "#7cc0ea"}

#: The style of drawings.
_DRAWN = """
& text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; fill: var(--ink); }
& .frame { fill: none; stroke: var(--faint); }
& .held { fill: var(--held); }
& .hatch { fill: url(#HATCH); }
& .tick { stroke: var(--line); stroke-width: 1; }
& .mark { stroke: var(--ink); stroke-width: 2.5; }
& .mark.over { stroke: var(--alarm); }
& text.soft { fill: var(--soft); }
& .cell { stroke: var(--paper); stroke-width: 1; }
& svg.cells text { font-size: 11px; text-anchor: middle; pointer-events: none; }
"""
_SHEET = """
& { box-sizing: border-box; container-type: inline-size; max-width: 1280px; padding: 20px 24px 28px; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; text-align: left;
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere; -webkit-text-size-adjust: 100%; print-color-adjust: exact;
  -webkit-print-color-adjust: exact; }
& *, & *::before, & *::after { box-sizing: border-box; }
& h1, & h2, & h3, & p, & ul, & ol, & table, & dl, & dd, & figure { margin: 0; padding: 0; border: 0; background: none; font: inherit;
  color: inherit; }
& h1 { font-size: 26px; line-height: 1.25; font-weight: 650; margin-bottom: 4px; }
& h2 { font-size: 18px; line-height: 1.3; font-weight: 650; margin: 34px 0 10px; }
& h3 { font-size: 15px; font-weight: 650; margin: 14px 0 6px; }
& .eyebrow, & .soft, & figcaption { color: var(--soft); font-size: 13.5px; }
& .alarm { color: var(--alarm); font-weight: 600; }
& .good { color: var(--good); font-weight: 600; }
& ul, & ol { padding-left: 20px; list-style-position: outside; }
& ul { list-style-type: disc; }
& li { margin: 3px 0; }
& svg { display: block; overflow: hidden; max-width: none; height: auto; }
& .tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 10px; margin: 18px 0 4px; }
& .tiles > div { background: var(--panel); border-radius: 8px; padding: 10px 14px 12px; }
& .tiles dt { color: var(--soft); font-size: 13px; font-weight: 400; margin: 0; padding: 0; }
& .tiles dd { font-size: 22px; line-height: 1.25; font-weight: 620; margin: 0; }
& .tiles dd span { display: block; font-size: 13px; font-weight: 400; color: var(--soft); }
& .advice { border-left: 4px solid var(--link); background: var(--panel); border-radius: 0 8px 8px 0; padding: 10px 14px;
  margin-top: 12px; }
& .legend { display: flex; flex-wrap: wrap; gap: 4px 16px; list-style: none; padding: 0; margin: 8px 0 12px; font-size: 13px; }
& .legend li { display: flex; align-items: center; gap: 6px; margin: 0; }
& .legend svg { flex: none; width: 13px; height: 13px; border-radius: 2px; }
& .rows { display: grid; grid-template-columns: minmax(60px, max-content) minmax(0, 1fr) minmax(80px, max-content); gap: 7px 12px;
  align-items: center; }
& .rows > .name { font-size: 13.5px; max-width: 220px; }
& .rows > .words { font-size: 13.5px; line-height: 1.3; max-width: 220px; }
& .rows > .words span { display: block; }
& .rows > .axis { grid-column: 2; }
& .kind { font-weight: 600; }
& table { width: 100%; border-collapse: collapse; border-spacing: 0; font-size: 14px; table-layout: auto; }
& th, & td { text-align: left; vertical-align: top; padding: 7px 14px 7px 0; border: 0; border-bottom: 1px solid var(--line);
  background: none; color: inherit; font-weight: 400; white-space: normal; max-width: none; line-height: 1.4; }
& tr { background: none; border: 0; }
& thead th { color: var(--soft); font-size: 13px; border-bottom: 1px solid var(--faint); }
& .figures th:not(:first-child), & .figures td { text-align: right; white-space: nowrap; }
& .figures thead th:not(:first-child) { white-space: normal; min-width: 84px; }
& .figures th:last-child, & .figures td:last-child { padding-right: 0; }
& .figures tbody th { font-weight: 400; min-width: 130px; }
& .figures tr.sum > * { font-weight: 650; }
& .scroll { overflow-x: auto; max-width: 100%; }
& .scroll:focus-visible, & summary:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
& .plans { table-layout: fixed; }
& .plans .rank { width: 52px; } & .plans .plan { width: 25%; } & .plans .memory { width: 22%; } & .plans .step { width: 16%; }
& .plans tr.best > * { background: var(--panel); }
& .plans tr.best > :first-child { border-left: 4px solid var(--good); padding-left: 8px; }
& .plans tr > :first-child { padding-left: 8px; }
& .plans .bar { margin-top: 5px; }
& .plans tbody th { font-weight: 600; }
& .plans tbody th span { display: block; font-weight: 400; color: var(--soft); font-size: 13px; }
& details { margin: 0; }
& summary { cursor: pointer; color: inherit; }
& summary.head { font-size: 15px; font-weight: 600; padding: 8px 0; color: var(--link); }
& td details[open] > summary { margin-bottom: 6px; }
& td details ul { font-size: 13.5px; }
& code { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; background: none; color: inherit; padding: 0; }
& footer { margin-top: 30px; color: var(--soft); font-size: 13px; }
@container (max-width: 1000px) {
  & text.wide { display: none; }
}
@container (max-width: 820px) {
  & .plans, & .plans tbody { display: block; }
  & .plans thead { display: none; }
  & .plans tr { display: grid; grid-template-columns: 1fr 1fr; gap: 2px 16px; padding: 10px 0; border-bottom: 1px solid var(--line); }
  & .plans tr > * { border: 0; padding: 0 0 0 8px; width: auto; }
  & .plans tr > .rank { display: none; }
  & .plans tr > .plan, & .plans tr > .why { grid-column: 1 / -1; width: auto; }
  & .plans tr > .memory, & .plans tr > .step { width: auto; }
  & .plans tr.best { background: var(--panel); border-left: 4px solid var(--good); padding-left: 4px; }
}
@container (max-width: 640px) {
  & h1 { font-size: 22px; }
  & .tiles { grid-template-columns: 1fr 1fr; }
  & .rows { grid-template-columns: minmax(0, 1fr) auto; grid-auto-flow: row dense; gap: 3px 10px; }
  & .rows > svg, & .rows > .axis { grid-column: 1 / -1; margin-bottom: 10px; }
  & .rows > .words { grid-column: 2; text-align: right; max-width: none; }
  & .rows > .words span { display: inline; }
  & .rows > .name { grid-column: 1; max-width: none; }
  & svg.cells text { display: none; }
}
@media (max-width: 640px) { & { padding-left: 14px; padding-right: 14px; } }
@media print {
  & { max-width: none; padding: 0; }
  & h2 { break-after: avoid; } & tr, & .rows, & .tiles, & li { break-inside: avoid; }
  & .scroll { overflow: visible; }
}
@media print { & details::details-content { content-visibility: visible; display: block; block-size: auto; } }
"""


def style(scope: str, hatch: str) -> str:
    """The style sheet for the element with the id ``scope`` alone.

    Args:
        scope: an id; its rules outweigh what a notebook says of tables and lists by class.
        hatch: the id of the pattern for what is hatched.
    """
    here = f"#{scope}"
    light, dark = _variables(_LIGHT), _variables(_DARK)
    themes = [
        f"{here}{{{light};color-scheme:light}}",
        f"@media screen and (prefers-color-scheme:dark){{{here}{{{dark};color-scheme:dark}}}}",
        # JupyterLab and Notebook 7, VS Code, Colab: their theme may differ from the browser's.
        f"@media screen{{{_within('[data-jp-theme-light=true],.vscode-light,[theme=light]', here)}{{{light};color-scheme:light}}"
        f"{_within('[data-jp-theme-light=false],.vscode-dark,[theme=dark]', here)}{{{dark};color-scheme:dark}}}}",
    ]
    return "".join(themes) + _confined(_DRAWN + _SHEET, here, hatch)


def _confined(sheet: str, here: str, hatch: str) -> str:
    """A sheet, with the colours' classes, limited to the inside of an element."""
    colors = "".join(f"{here} .{color_class(name)}{{fill:{color}}}" for name, color in _palette().items())
    words = "".join(f"{here} .on-{color_class(name)}{{fill:{on_color(color)}}}" for name, color in _palette().items())
    return re.sub(r"\s+", " ", sheet.replace("HATCH", hatch)).replace("&", here).strip() + colors + words


def page_style() -> str:
    """The style around the fragment on a page of its own."""
    light, dark = _LIGHT["paper"], _DARK["paper"]
    return (
        f"html{{color-scheme:light dark}}body{{margin:0;background:{light}}}main{{display:block;max-width:1280px;margin:0 auto}}"
        f"@media screen and (prefers-color-scheme:dark){{body{{background:{dark}}}}}"
    )


def hatching(identifier: str) -> str:
    """The hatching pattern for a page: for waiting, and for the margin."""
    return (
        '<svg width="0" height="0" aria-hidden="true" style="position:absolute">'
        f'<defs><pattern id="{identifier}" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="6" height="6" fill="var(--paper)"/>'
        '<line x1="0" y1="0" x2="0" y2="6" stroke="var(--faint)" stroke-width="2"/></pattern></defs></svg>'
    )


def color_class(name: str) -> str:
    """The class that has a category's, a kind's or a part's colour: ``"c-parameters"``."""
    return "hatch" if name in ("idle", "bubble", "allowed") else f"c-{name}"


def on_color(color: str) -> str:
    """The class of dark or light words, whichever can be read better on a colour."""
    return max((INK, "#ffffff"), key=lambda ink: contrast(ink, color))


def contrast(one: str, other: str) -> float:
    """WCAG 2's contrast ratio of two colours such as ``"#0072b2"``, 1 to 21."""
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(color: str) -> float:
    parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _palette() -> dict[str, str]:
    """Every colour that has a class."""
    lighter = {f"{kind}-2": color for kind, color in _LIGHTER.items()}
    found = {**CATEGORIES, **KINDS, **_PARTS, **lighter, "other": OTHER}
    return {name: color for name, color in found.items() if name != "idle"}


def _variables(colors: Mapping[str, str]) -> str:
    return ";".join(f"--{name}:{color}" for name, color in colors.items())


def _within(outer: str, inner: str) -> str:
    """A selector of the element inside of any of these."""
    return ",".join(f"{each} {inner}" for each in outer.split(","))
