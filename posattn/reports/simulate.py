"""The report of `posattn simulate`: what the architecture alone implies, from the summary and the arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from posattn.reports import charts, common, curves
from posattn.reports.findings import simulate_findings
from posattn.reports.forces import forces_section
from posattn.reports.kit import Block, Chart, Column, Control, Figure, Notes, Page, Section, Table
from posattn.reports.profile import SHAPES, SHAPES_NOTE
from posattn.reports.sure import shapeless
from posattn.words import count, listed, number, percent, plural, sentence, tile


def simulate_page(summary: Mapping[str, Any], arrays: Mapping[str, Any]) -> Page:
    """The whole page."""
    provenance = summary["provenance"]
    architecture = provenance["architecture"]
    lengths = summary["lengths"]
    sections = [
        _profiles(summary),
        forces_section(summary, arrays) if summary.get("forces") else None,
        _depth(summary, arrays),
        common.warnings_section(summary),
        common.provenance_section(summary),
    ]
    shown = listed([f"{n:,}".replace(",", "\u2009") for n in lengths])
    return Page(
        command="simulate",
        title=f"What {architecture['name']} implies",
        subtitle=f"{count(architecture['layers'], 'layer')}, {count(architecture['heads'], 'head')}, "
        f"{_position(architecture)}; {shown} {plural(lengths[-1], 'position')}; convention: {provenance['convention']}",
        findings=simulate_findings(summary),
        figures=_key_figures(summary),
        sections=tuple(section for section in sections if section is not None),
        footer=common.footer(provenance),
    )


def _position(architecture: Mapping[str, Any]) -> str:
    kind = architecture.get("position")
    if kind == "alibi":
        rule = architecture.get("slopes")
        return "ALiBi" + (f" ({rule} slopes)" if isinstance(rule, str) else "")
    return "no positional encoding" if kind == "none" else "scores by distance"


def _key_figures(summary: Mapping[str, Any]) -> tuple[Figure, ...]:
    n = str(summary["lengths"][0])
    at = count(int(n), "position")
    shape = summary["shape"][n]["residual"]
    mixing = summary["mixing"]
    figures = [
        Figure(
            "mean mixing λ",
            number(np.mean(mixing)),
            f"Σλ = {number(sum(mixing))} over {count(len(mixing), 'layer')}",
            "schedule-chart",
        ),
    ]
    if shapeless(int(n)):
        return tuple(figures)
    figures += [
        Figure("first eighth", tile(shape["primacy"]), f"of the profile at {at}", "profiles-chart"),
        Figure("last eighth", tile(shape["recency"]), f"of the profile at {at}", "profiles-chart"),
        Figure("mean position", number(shape["mean_position"]), "0 the first position, 1 the last", "shapes-table"),
    ]
    if depth := summary.get("depth"):
        off = depth["off_first"][-1]
        figures.append(Figure("off the first position", tile(off), "at most, after the last layer", "depth-chart"))
    return tuple(figures)


_DASHES = {"residual": "solid", "attention_only": "dash", "half": "dashdot"}


def _profiles(summary: Mapping[str, Any]) -> Section:
    lengths = [str(n) for n in summary["lengths"]]

    def traces(n: str, name: str, colour: str, label: str, width: float, dash: str) -> dict[str, Any]:
        curve = summary["profiles"][n][name]
        scale = max(int(n) - 1, 1)
        x = [position / scale for position in curve["position"]]
        density = [value * int(n) for value in curve["value"]]
        return charts.line(label, density, x, colour=colour, width=width, dash=dash, hover="%{y:.3g}")

    layout = charts.axes(
        "position in the context (0 first, 1 last)", "density (1 = even share)", yaxis={"rangemode": "tozero"}
    )
    views, notes = {}, []
    for n in lengths:
        same = curves.same_curves({name: curve["value"] for name, curve in summary["profiles"][n].items()})
        drawn = [
            traces(n, name, charts.colour_of(name), name, 2.4 if name == "residual" else 1.8, _DASHES.get(name, "dot"))
            for name in same
        ]
        views[count(int(n), "position")] = {"traces": drawn, "layout": layout}
        notes += [f"`{other}` coincides with `{name}`" for name, others in same.items() for other in others]
    if len(lengths) > 1:
        drawn = [
            traces(n, "residual", label=count(int(n), "position"), width=2, **charts.style(i))
            for i, n in enumerate(lengths)
        ]
        views = {"all, residual": {"traces": drawn, "layout": layout}, **views}
    controls = (Control("length", tuple(views)),) if len(views) > 1 else ()
    keys = list(SHAPES)
    columns = (
        Column("length", format="d"),
        Column("variant", numeric=False),
        Column("positions", numeric=False),
        *(Column(title, help=text) for _, title, text in keys),
    )
    rows = []
    for n in lengths:
        for name, shape in summary["shape"][n].items():
            rows.append([int(n), name, "all", *(shape.get(key) for key, _, _ in keys)])
            if trimmed := shape.get("without_first"):
                rows.append([int(n), name, "without the first", *(trimmed.get(key) for key, _, _ in keys)])
    first = summary["shape"][lengths[0]]["residual"]
    blocks: list[Block] = [
        Chart(
            "profiles-chart",
            "Influence on the last position",
            f"At {count(int(lengths[0]), 'position')} the residual profile has "
            + (
                f"{percent(summary['profiles'][lengths[0]]['residual']['value'][0])} on the first position."
                if shapeless(int(lengths[0]))
                else f"{percent(first['primacy'])} on the first eighth, {percent(first['middle'])} on the middle half "
                f"and {percent(first['recency'])} on the last eighth."
            ),
            views,
            note="`residual`: with the mixing coefficients given. `attention_only`: λ = 1. `half`: λ = ½."
            + "".join(f" {note}." for note in dict.fromkeys(notes)),
            controls=controls,
            log_axis="y",
            log_first=True,
            height=420,
        ),
        Table("shapes-table", "Shapes", columns, rows, note=SHAPES_NOTE, filterable=len(rows) > 8),
    ]
    return Section(
        "profiles",
        "Predicted profiles",
        tuple(blocks),
        "From mask, residual strength, positional encoding and coarse content alone; no model was run.",
    )


def _depth(summary: Mapping[str, Any], arrays: Mapping[str, Any]) -> Section:
    mixing = summary["mixing"]
    layers = list(range(1, len(mixing) + 1))
    layout = charts.axes("layer t, from 1", "mixing coefficient λ", yaxis={"rangemode": "tozero"})
    blocks: list[Block] = [
        Chart(
            "schedule-chart",
            "Mixing by layer",
            f"λ from {number(min(mixing), 3)} to {number(max(mixing), 3)}; the sum is {number(sum(mixing))}.",
            {
                "": {
                    "traces": [charts.line("λ", mixing, layers, colour="@c0", markers=True, hover="%{y:.3f}")],
                    "layout": {**layout, "showlegend": False},
                }
            },
            log_axis="y",
            height=280,
        )
    ]
    depth = summary.get("depth")
    if depth:
        traces = [
            charts.line(
                "off the first position, worst row", depth["off_first"], layers, colour="@c0", hover="%{y:.3f}"
            ),
            charts.line("its bound Π(1−ελ)", depth["bound"], layers, colour="@c0", dash="dash", hover="%{y:.3f}"),
            charts.line("last row on the first position", depth["first_mass"], layers, colour="@c1", hover="%{y:.3f}"),
            charts.line("last row on itself", depth["last_diagonal"], layers, colour="@c2", hover="%{y:.3f}"),
        ]
        blocks.append(
            Chart(
                "depth-chart",
                "Influence by depth",
                f"After {count(len(mixing), 'layer')} at most {percent(depth['off_first'][-1], 1)} of a row is off the "
                "first position.",
                {"": {"traces": traces, "layout": charts.axes("depth", "mass", yaxis={"range": [0, 1.02]})}},
                note=f"At {count(depth['length'], 'position')}.",
            )
        )
        profiles = arrays.get("depth.profiles")
        if profiles is not None and len(profiles) > 1:
            n = depth["length"]
            with np.errstate(divide="ignore"):
                grid = np.log10(np.maximum(np.asarray(profiles, float) * n, 1e-3))
            view = charts.grid_view(
                grid, "position", "depth", value="log10 density", low=-2.0, high=2.0, scale="@diverging", format=".2f"
            )
            view["traces"][0]["y"] = [row + 1 for row in view["traces"][0]["y"]]
            blocks.append(
                Chart(
                    "depth-profiles",
                    "The profile at every depth",
                    "A heat map of the last position's profile after each layer, as log10 of the density.",
                    {"": view},
                    note="0 is an even share. Depth 1 is the first layer alone.",
                    height=max(340, min(560, 140 + 8 * len(mixing))),
                )
            )
        if not shapeless(depth["length"]):
            blocks.append(Notes((sentence(depth["implication"]), f"Condition: {depth['condition']}.")))
    return Section("depth", "Depth", tuple(blocks), "What more layers would do, if the schedule went on as it is.")
