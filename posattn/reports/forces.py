"""The section on the four forces, shared by the reports that have it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from posattn.reports import charts
from posattn.reports.kit import Block, Chart, Column, Control, Section, Table
from posattn.words import count

_FORCES = {
    "causal": "causal mask",
    "residual": "residual connections",
    "position": "positional encoding",
    "content": "content",
}
_QUANTITIES = {"mean_position": "mean position", "primacy": "first eighth", "recency": "last eighth"}


def forces_section(
    summary: Mapping[str, Any],
    arrays: Mapping[str, Any],
    lead: str = "Which part of the architecture makes the profile what it is.",
) -> Section:
    """Shares and path by length, from `summary["forces"]` and the arrays `forces.N.path`."""
    views, paths, rows = {}, {}, []
    for n, part in summary["forces"].items():
        distance = part.get("distance")
        quantities = [_QUANTITIES.get(str(q), str(q)) for q in part["quantities"]]
        traces = [
            charts.bars(
                _FORCES.get(str(force), str(force)), quantities, part["shares"][i], colour=f"@c{i}", hover="%{y:+.3f}"
            )
            for i, force in enumerate(part["forces"])
        ]
        layout = charts.axes("", "change due to the force", barmode="group", hovermode="closest")
        views[count(int(n), "position")] = {"traces": traces, "layout": layout}
        for i, force in enumerate(part["forces"]):
            rows.append([int(n), _FORCES.get(str(force), str(force)), *part["shares"][i]])
            if distance:
                rows[-1].append(distance["shares"][i])
        rows.append([int(n), "all together", *(t - b for t, b in zip(part["total"], part["baseline"], strict=True))])
        if distance:
            rows[-1].append(distance["total"] - distance["baseline"])
        path = arrays.get(f"forces.{n}.path")
        if path is not None:
            names = ["none", *(f"+ {_FORCES.get(str(force), str(force))}" for force in part["order"])]
            scale = max(int(n) - 1, 1)
            curves = []
            for i, (name, curve) in enumerate(zip(names, np.asarray(path), strict=True)):
                x, y = charts.blocks(curve)
                curves.append(
                    charts.line(
                        name,
                        y * int(n),
                        (np.asarray(x) / scale).tolist(),
                        colour="@muted" if i == 0 else f"@c{i - 1}",
                        # a force that does next to nothing lies on the curve before it: both are to be seen
                        dash="dot" if i == 0 else ("solid", "longdash", "dashdot", "dash")[(i - 1) % 4],
                        hover="%{y:.3g}",
                    )
                )
            paths[count(int(n), "position")] = {
                "traces": curves,
                "layout": charts.axes("position in the context (0 first, 1 last)", "density (1 = even share)"),
            }
    controls = (Control("length", tuple(views)),) if len(views) > 1 else ()
    blocks: list[Block] = [
        Chart(
            "forces-chart",
            "What each force does",
            "Bars of each force's share of the change in mean position, first-eighth and last-eighth mass; the "
            "figures are in the table.",
            views,
            note="Shapley shares over the 16 combinations: independent of the order in which the forces are "
            "switched on, adding up to the whole change. The mean position is a share of the context's length, the "
            "eighths are shares of the influence.",
            controls=controls,
        )
    ]
    if paths:
        blocks.append(
            Chart(
                "path-chart",
                "One force after the other",
                "The profile as the forces are switched on one after the other, from an even share.",
                paths,
                controls=controls,
                log_axis="y",
                log_first=True,
            )
        )
    measured = any(part.get("distance") for part in summary["forces"].values())
    columns = (
        Column("length", format="d"),
        Column("force", numeric=False),
        *(Column(t, format="+.3f") for t in _QUANTITIES.values()),
        *(
            [Column("distance", format="+.3f", help="To the measured influence. Below 0: the force brings it nearer.")]
            if measured
            else []
        ),
    )
    blocks.append(
        Table(
            "forces-table",
            "Shares",
            columns,
            rows,
            note="Change against a profile in which every position counts alike.",
        )
    )
    return Section("forces", "Four forces", tuple(blocks), lead)
