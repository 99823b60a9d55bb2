"""The parts that every report is composed of: a page of findings, figures and sections of charts, tables and notes.

A part is plain data; `render` turns a `Page` into one HTML file that asks no network for anything. Text never becomes
markup: the template escapes all of it, data for the charts travels as JSON in which `<`, `>` and `&` are escaped too,
and the page's content security policy runs the two scripts it was written with and no other.

Colours are tokens (`@c0`, `@measured`, `@muted` ...) that the page's script resolves for the light or dark theme.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, Literal

#: What a chart draws for one choice of its controls: plotly's traces and what to change in its layout.
View = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One sentence of the summary, how sure it is, and the figures behind it as (anchor, label).

    `asked`: it answers what the caller asked for with an option, so a command's last lines never leave it out.
    """

    text: str
    sure: str = ""
    tone: Literal["plain", "caution"] = "plain"
    links: tuple[tuple[str, str], ...] = ()
    asked: bool = False


@dataclasses.dataclass(frozen=True)
class Figure:
    """A number worth seeing first."""

    label: str
    value: str
    note: str = ""
    link: str = ""


@dataclasses.dataclass(frozen=True)
class Control:
    """A choice above a chart. The options chosen in all controls, joined by `|`, name the view that is drawn."""

    label: str
    options: tuple[str, ...]
    kind: Literal["select", "buttons"] = "select"


@dataclasses.dataclass(frozen=True)
class Chart:
    """A chart with everything a reader may do with it. `summary` says in words what the eye sees."""

    id: str
    title: str
    summary: str
    views: Mapping[str, View]
    note: str = ""
    controls: tuple[Control, ...] = ()
    log_axis: Literal["", "x", "y"] = ""  # offers a switch between linear and logarithmic
    log_first: bool = False
    height: int = 360
    square: bool = False
    base: View = dataclasses.field(default_factory=dict)  # what all views share; each of them is laid over it
    part: ClassName = "chart"


@dataclasses.dataclass(frozen=True)
class Column:
    """A column: its heading, whether it holds numbers, how they are written, and what the heading means."""

    title: str
    numeric: bool = True
    format: str = ".3f"
    help: str = ""


@dataclasses.dataclass(frozen=True)
class Table:
    """A table that can be sorted, and filtered where it is long. A cell may be text, a number, None, or a `Link`."""

    id: str
    title: str
    columns: tuple[Column, ...]
    rows: Sequence[Sequence[Any]]
    note: str = ""
    filterable: bool = False
    part: ClassName = "table"


@dataclasses.dataclass(frozen=True)
class Link:
    """A cell that leads to another place of the page."""

    text: str
    anchor: str


@dataclasses.dataclass(frozen=True)
class Notes:
    """Paragraphs, or a list of sentences that each deserve attention."""

    paragraphs: tuple[str, ...]
    tone: Literal["plain", "caution"] = "plain"
    part: ClassName = "notes"


@dataclasses.dataclass(frozen=True)
class Facts:
    """Pairs of a name and a value."""

    pairs: tuple[tuple[str, str], ...]
    part: ClassName = "facts"


@dataclasses.dataclass(frozen=True)
class Fold:
    """A part that is closed until it is asked for, by a click or by a link to its id."""

    id: str
    title: str
    blocks: tuple[Block, ...]
    label: str = ""
    part: ClassName = "fold"


@dataclasses.dataclass(frozen=True)
class Group:
    """Charts and facts that show one thing at a time, chosen once for all of them.

    The options chosen, joined by `|`, name the view of every chart and the entry of `facts`. A link to `#id:a|b`
    chooses a and b.
    """

    id: str
    title: str
    controls: tuple[Control, ...]
    charts: tuple[Chart, ...]
    facts: Mapping[str, Sequence[tuple[str, str]]] = dataclasses.field(default_factory=dict)
    note: str = ""
    part: ClassName = "group"


ClassName = str
Block = Chart | Table | Notes | Facts | Fold | Group


@dataclasses.dataclass(frozen=True)
class Section:
    id: str
    title: str
    blocks: tuple[Block, ...]
    intro: str = ""


@dataclasses.dataclass(frozen=True)
class Page:
    """A whole report."""

    command: str
    title: str
    subtitle: str
    findings: tuple[Finding, ...]
    sections: tuple[Section, ...]
    figures: tuple[Figure, ...] = ()
    footer: str = ""


def render(page: Page) -> str:
    """The page as one HTML file."""
    plotly, script = _static("plotly-cartesian.min.js"), _static("report.js")
    charts = {chart.id: _chart_data(chart) for chart in _charts(page)}
    policy = (
        "default-src 'none'; img-src data: blob:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
        f"script-src {_hash(plotly)} {_hash(script)}"
    )
    return _template().render(
        page=page,
        policy=policy,
        style=_static("report.css"),
        plotly=plotly,
        script=script,
        charts={name: safe_json(data) for name, data in charts.items()},
        safe_json=safe_json,
    )


def safe_json(value: Any) -> str:
    """JSON that may stand inside a script element: no character of it can begin or end a tag or a comment.

    Numbers keep five significant digits (a chart shows no more), and what JSON cannot say becomes null.
    """
    text = json.dumps(_rounded(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def format_cell(value: Any, column: Column) -> str:
    """A cell as text: numbers as the column says, a dash for nothing."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "–"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int):
        sign = "+" if column.format.startswith("+") and value else ""
        return f"{value:{sign},}".replace(",", "\u2009").replace("-", "\u2212")
    shown = format(value, column.format)
    if value == 0 or not any(digit in shown for digit in "123456789"):  # no sign of nothing: not +0.000, nor -0.000
        shown = shown.lstrip("+-")
    return shown.replace("-", "\u2212")


def _breakable(text: Any) -> Any:
    """A name that may be broken after its joints (`positional_`content) and not within its words."""
    from markupsafe import Markup, escape

    if not re.fullmatch(r"[a-z]+([_+-][a-z]+)+", str(text)):
        return escape(text)
    return Markup("<wbr>").join(re.split(r"(?<=[_+])", str(text)))


def _marked(text: Any) -> Any:
    """Text in which `names` between backticks are set as code; everything else of it is escaped."""
    from markupsafe import Markup, escape

    parts = str(text).split("`")
    if len(parts) % 2 == 0:  # a backtick without its partner means itself
        return escape(text)
    marked = (Markup("<code>{}</code>").format(part) if i % 2 else escape(part) for i, part in enumerate(parts))
    return Markup("").join(marked)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        shown = float(f"{value:.5g}")
        return shown if math.isfinite(shown) else None
    if isinstance(value, Mapping):
        return {str(key): _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    if hasattr(value, "tolist"):
        return _rounded(value.tolist())
    return value


def _chart_data(chart: Chart) -> dict[str, Any]:
    return {
        "title": chart.title,
        "base": chart.base,
        "views": chart.views,
        "log": chart.log_axis,
        "logFirst": chart.log_first,
        "square": chart.square,
        "height": chart.height,
    }


def _charts(page: Page) -> list[Chart]:
    found: list[Chart] = []

    def visit(blocks: Sequence[Block]) -> None:
        for block in blocks:
            if isinstance(block, Chart):
                found.append(block)
            elif isinstance(block, Fold):
                visit(block.blocks)
            elif isinstance(block, Group):
                visit(block.charts)

    for section in page.sections:
        visit(section.blocks)
    names = [chart.id for chart in found]
    if len(set(names)) != len(names):
        raise ValueError(f"two charts share an id: {sorted({name for name in names if names.count(name) > 1})}")
    return found


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


@functools.cache
def _static(name: str) -> str:
    # newlines as the browser sees them, or the policy's hashes would not match
    return resources.files("posattn.reports").joinpath("static").joinpath(name).read_text("utf-8").replace("\r\n", "\n")


@functools.cache
def _template() -> Any:
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["cell"] = format_cell
    environment.filters["marked"] = _marked
    environment.filters["breakable"] = _breakable
    environment.filters["trusted"] = Markup  # for our own files and for `safe_json` only
    return environment.from_string(_static("report.html"))
