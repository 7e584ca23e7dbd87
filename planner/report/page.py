"""Self-contained HTML pages with charts: no scripts, no network, light or dark as the reader prefers.

Used by the planner's report and by the sweeps of `pdserve bench`. Charts are drawn by matplotlib as inline SVG in the
colours of the page.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from html import escape
from io import StringIO
from typing import Any, NamedTuple

_COLORS = {
    "#a00000": "var(--c0)",
    "#a00001": "var(--c1)",
    "#a00002": "var(--c2)",
    "#a00003": "var(--c3)",
    "#b00000": "var(--soft)",
    "#b00001": "var(--grid)",
    "#b00002": "var(--card)",
}
"""Colours that matplotlib draws with, and the variables of the style sheet in their places."""
SERIES = list(_COLORS)[:4]
SOFT, GRID, CARD = list(_COLORS)[4:]
_DRAWING = {
    "svg.fonttype": "none",
    "font.size": 9,
    "text.color": SOFT,
    "axes.labelcolor": SOFT,
    "axes.edgecolor": SOFT,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "legend.frameon": False,
    "lines.markersize": 5,
}


STYLE = """
:root{color-scheme:light dark;--bg:#fbfbfa;--card:#fff;--ink:#1c2024;--soft:#667078;--line:#e3e5e8;--grid:#eceef0;
--good:#0f7b57;--warm:#9a5b00;--c0:#2f62d9;--c1:#d9730d;--c2:#0e9384;--c3:#8a4fd0}
@media(prefers-color-scheme:dark){:root{--bg:#121417;--card:#1a1d21;--ink:#e7e9ec;--soft:#98a2ab;--line:#2b3036;
--grid:#262a30;--good:#4cc79b;--warm:#e5a847;--c0:#7ea6ff;--c1:#f5a04a;--c2:#45cdbb;--c3:#c09bff}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1280px;margin:0 auto;padding:40px 24px 64px}
h1{font-size:26px;margin:0 0 4px;letter-spacing:-.01em}
h2{font-size:18px;margin:44px 0 12px}
h3{font-size:14px;margin:0 0 2px;font-weight:600}
p{margin:0 0 8px}
.soft{color:var(--soft)}
.verdict{margin:24px 0;padding:16px 20px;border-left:4px solid var(--good);background:var(--card);
border-radius:0 8px 8px 0;font-size:17px}
.verdict.unclear{border-color:var(--warm)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px}
.tile,.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px 16px;min-width:0}
.tile b{display:block;font-size:21px;font-weight:600;font-variant-numeric:tabular-nums}
.tile span{color:var(--soft);font-size:13px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(440px,100%),1fr));gap:16px}
.scroll{overflow-x:auto;background:var(--card);border:1px solid var(--line);border-radius:10px}
table{border-collapse:collapse;width:100%;font-size:14px}
th,td{padding:8px 12px;text-align:left;border-bottom:1px solid var(--line);white-space:nowrap}
th{color:var(--soft);font-weight:500;font-size:13px}
tr:last-child td{border-bottom:0}
tr.first td{font-weight:600}
.n{text-align:right;font-variant-numeric:tabular-nums}
li{margin:4px 0}
ul{padding-left:20px;margin:0}
details{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 16px;margin:0 0 8px}
summary{cursor:pointer}
dt{margin-top:12px}
dd{margin:0;color:var(--soft);font-size:14px;overflow-wrap:anywhere}
figure{margin:8px 0 0}
svg{display:block;width:100%;height:auto;font-family:inherit}
"""
"""Colours are variables, so that one sheet serves light and dark."""


class Chart(NamedTuple):
    title: str
    svg: str
    note: str


class Column(NamedTuple):
    heading: str
    is_number: bool = True
    is_detail: bool = False
    """Omitted if there is little room."""


def check_drawing(what: str = "--report") -> None:
    """Raise ValueError if matplotlib, which ``what`` needs, is not installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError:
        raise ValueError(f"{what} needs matplotlib: pip install 'pdserve[plan]'") from None


def page(title: str, body: str) -> str:
    """The document around ``body``, which is HTML."""
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width,initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>{body}</main></body></html>\n"
    )


def table(columns: Sequence[Column], rows: Iterable[Sequence[str]], *, marks_first: bool = True) -> str:
    def cells(tag: str, texts: Iterable[str]) -> str:
        return "".join(
            f"<{tag}{' class=n' if column.is_number else ''}>{escape(text)}</{tag}>"
            for column, text in zip(columns, texts, strict=True)
        )

    head = cells("th", (column.heading for column in columns))
    body = "".join(
        f"<tr{' class=first' if marks_first and not index else ''}>{cells('td', row)}</tr>"
        for index, row in enumerate(rows)
    )
    return f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def card(chart: Chart) -> str:
    """The chart with its title and note."""
    return (
        f"<div class=card><h3>{escape(chart.title)}</h3><p class=soft>{escape(chart.note)}</p>"
        f"<figure role=img aria-label='{escape(chart.title, quote=True)}'>{chart.svg}</figure></div>"
    )


def rule(axes: Any, label: str, *, x: float | None = None, y: float | None = None) -> None:
    """A line across the chart, such as an objective."""
    if x is not None:
        axes.axvline(x, color=SOFT, linestyle=":", linewidth=1)
        axes.annotate(label, (x, 0.03), xycoords=("data", "axes fraction"), xytext=(4, 0), textcoords="offset points")
    else:
        axes.axhline(y, color=SOFT, linestyle=":", linewidth=1)
        axes.annotate(label, (0.01, y), xycoords=("axes fraction", "data"), xytext=(0, -11), textcoords="offset points")


def svg(draw: Callable[[Any], None]) -> str:
    """A chart with a legend above it, without a global figure."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_DRAWING):
        figure = Figure(figsize=(6, 3.4), layout="constrained")
        axes = figure.subplots()
        draw(axes)
        figure.legend(loc="outside upper left", ncols=3)
        written = StringIO()
        figure.savefig(written, format="svg", transparent=True)
    text = written.getvalue()
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->| xmlns(:\w+)?=\"[^\"]*\"", "", text, flags=re.DOTALL)
    text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", text)
    return re.sub("#[ab]0000[0-3]", lambda color: _COLORS[color[0]], text)
