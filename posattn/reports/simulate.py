"""The report of `posattn simulate`: what the architecture alone implies, from the summary and the arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from posattn.reports import charts, common
from posattn.reports.findings import sentence, simulate_findings
from posattn.reports.forces import forces_section
from posattn.reports.kit import Block, Chart, Column, Control, Figure, Notes, Page, Section, Table
from posattn.reports.profile import SHAPES


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
    shown = ", ".join(f"{n:,}".replace(",", "\u2009") for n in lengths)
    return Page(
        command="simulate",
        title=f"What {architecture['name']} implies",
        subtitle=f"{architecture['layers']} layers, {architecture['heads']} heads, {_position(architecture)}; "
        f"{shown} positions; convention: {provenance['convention']}",
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
    shape = summary["shape"][n]["residual"]
    mixing = summary["mixing"]
    figures = [
        Figure(
            "mean mixing λ",
            f"{np.mean(mixing):.2f}",
            f"Σλ = {sum(mixing):.2f} over {len(mixing)} layers",
            "schedule-chart",
        ),
        Figure("first eighth", f"{shape['primacy']:.0%}", f"of the profile at {n} positions", "profiles-chart"),
        Figure("last eighth", f"{shape['recency']:.0%}", f"of the profile at {n} positions", "profiles-chart"),
        Figure("mean position", f"{shape['mean_position']:.2f}", "0 the first position, 1 the last", "shapes-table"),
    ]
    if depth := summary.get("depth"):
        off = depth["off_first"][-1]
        figures.append(Figure("off the first position", f"{off:.0%}", "at most, after the last layer", "depth-chart"))
    return tuple(figures)


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
    views = {}
    for n in lengths:
        drawn = [
            traces(
                n,
                name,
                charts.colour_of(name),
                name,
                2.4 if name == "residual" else 1.8,
                "solid" if name == "residual" else "dash",
            )
            for name in summary["profiles"][n]
        ]
        views[f"{n} positions"] = {"traces": drawn, "layout": layout}
    if len(lengths) > 1:
        drawn = [
            traces(n, "residual", f"@c{i % 8}", f"{n} positions", 2, "solid" if i < 4 else "dash")
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
            f"At {lengths[0]} positions the residual profile has {first['primacy']:.0%} on the first eighth, "
            f"{first['middle']:.0%} on the middle half and {first['recency']:.0%} on the last eighth.",
            views,
            note="`residual`: with the mixing coefficients given. `attention_only`: λ = 1. `half`: λ = ½.",
            controls=controls,
            log_axis="y",
            log_first=True,
            height=420,
        ),
        Table("shapes-table", "Shapes", columns, rows, note="Shares of a curve's mass.", filterable=len(rows) > 8),
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
    layout = charts.axes("layer", "mixing coefficient λ", yaxis={"rangemode": "tozero"})
    blocks: list[Block] = [
        Chart(
            "schedule-chart",
            "Mixing by layer",
            f"λ from {min(mixing):.3f} to {max(mixing):.3f}; the sum is {sum(mixing):.2f}.",
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
                f"After {len(mixing)} layers at most {depth['off_first'][-1]:.1%} of a row is off the first position.",
                {"": {"traces": traces, "layout": charts.axes("depth", "mass", yaxis={"range": [0, 1.02]})}},
                note=f"At {depth['length']} positions.",
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
            blocks.append(
                Chart(
                    "depth-profiles",
                    "The profile at every depth",
                    "A heat map of the last position's profile after each layer, as log10 of the density.",
                    {"": view},
                    note="0 is an even share. Depth 0 is the first layer alone.",
                    height=max(340, min(560, 140 + 8 * len(mixing))),
                )
            )
        blocks.append(Notes((sentence(depth["implication"]), f"Condition: {depth['condition']}.")))
    return Section("depth", "Depth", tuple(blocks), "What more layers would do, if the schedule went on as it is.")
