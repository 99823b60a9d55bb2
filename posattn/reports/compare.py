"""The report of `posattn compare`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from posattn.reports import charts, common, curves
from posattn.reports.findings import FIGURE_NAMES, compare_findings, label_doubt
from posattn.reports.kit import Block, Chart, Column, Control, Page, Section, Table
from posattn.reports.sure import SETTLING


def compare_page(summary: Mapping[str, Any], arrays: Mapping[str, Any]) -> Page:
    """The whole page."""
    names = summary["names"]
    sections = [_differences(summary)]
    if summary["of"] == "profile":
        sections += [_curves(summary)]
    else:
        sections += [_heads(summary)]
    sections += [_settings(summary), common.provenance_section(summary)]
    return Page(
        command="compare",
        title=" against ".join(names) if len(names) == 2 else f"{len(names)} runs",
        subtitle=f"runs of posattn {summary['of']}: {', '.join(names)}",
        findings=compare_findings(summary),
        sections=tuple(section for section in sections if section is not None),
        footer=common.footer(summary["provenance"]),
    )


def _differences(summary: Mapping[str, Any]) -> Section:
    rows, heads = summary["differences"], summary["of"] == "heads"
    columns = (
        Column("run", numeric=False),
        Column("label" if heads else "figure", numeric=False),
        Column(summary["names"][0]),
        Column("this run"),
        Column("difference", format="+.3f"),
        *([Column("95 % interval", numeric=False)] if any(row["low"] is not None for row in rows) else []),
    )
    shown = []
    for row in rows:
        interval = None if row["low"] is None else f"{row['low']:+.3f} to {row['high']:+.3f}".replace("-", "−")
        shown.append(
            [
                summary["names"][row["run"]],
                FIGURE_NAMES.get(row["figure"], row["figure"]),
                row["first"],
                row["this"],
                row["difference"],
                *([interval] if len(columns) > 5 else []),
            ]
        )
    return Section(
        "differences",
        "Differences to the first run",
        (
            Table(
                "differences-table",
                "Heads by label" if heads else "Figures",
                columns,
                shown,
                note="How many heads have each label."
                if heads
                else "Shapes are without the first position. "
                "Intervals are bootstrap over documents, paired where both runs read the same ones.",
            ),
        ),
    )


def _curves(summary: Mapping[str, Any]) -> Section:
    views: dict[str, Any] = {}
    kinds = ["influence"] if all(run.get("influence") for run in summary["runs"]) else []
    shared = [
        name for name in summary["runs"][0]["profiles"] if all(name in run["profiles"] for run in summary["runs"])
    ]
    # a variant that repeats the same other one in every run is that picture again
    repeated = [curves.other_names(run) for run in summary["runs"]]
    first = {name: {names.get(name) for names in repeated} for name in shared}
    kinds += [name for name in shared if None in first[name] or len(first[name]) > 1]
    for kind in kinds:
        traces = []
        for i, (name, run) in enumerate(zip(summary["names"], summary["runs"], strict=True)):
            curve = np.asarray(run["influence"] if kind == "influence" else run["profiles"][kind], float)[1:]
            x, y = charts.blocks(curve / (curve.sum() or 1.0) * len(curve))
            scale = max(len(curve) - 1, 1)
            traces.append(charts.line(name, y, (np.asarray(x) / scale).tolist(), hover="%{y:.3f}", **charts.style(i)))
        views["measured influence" if kind == "influence" else kind] = {
            "traces": traces,
            "layout": charts.axes(
                "position in the context (0 first, 1 last)", "density (1 = even share)", yaxis={"rangemode": "tozero"}
            ),
        }
    mixing = []
    for i, (name, run) in enumerate(zip(summary["names"], summary["runs"], strict=True)):
        token = run["mixing"]["token"]
        x = [t / max(len(token) - 1, 1) for t in range(len(token))]
        mixing.append(charts.line(name, token, x, markers=True, hover="%{y:.3f}", **charts.style(i)))
    blocks: list[Block] = [
        Chart(
            "curves-chart",
            "Profiles",
            "One curve for each run, without the first position.",
            views,
            note="As densities over the context, so that runs of different lengths can be compared.",
            controls=(Control("curve", tuple(views)),),
            log_axis="y",
            height=420,
        ),
        Chart(
            "mixing-chart",
            "Mixing by depth",
            "One curve for each run.",
            {
                "": {
                    "traces": mixing,
                    "layout": charts.axes(
                        "depth (0 first layer, 1 last)", "mixing coefficient λ", yaxis={"rangemode": "tozero"}
                    ),
                }
            },
        ),
    ]
    return Section("curves", "Curves", tuple(blocks))


def _heads(summary: Mapping[str, Any]) -> Section:
    labels = list(summary["runs"][0]["counts"])
    traces = [
        charts.bars(name, labels, [run["counts"].get(label, 0) for label in labels], colour=f"@c{i % 8}", hover="%{y}")
        for i, (name, run) in enumerate(zip(summary["names"], summary["runs"], strict=True))
    ]
    blocks: list[Block] = [
        Chart(
            "counts-chart",
            "Heads by label",
            "Bars of the number of heads with each label, for each run.",
            {"": {"traces": traces, "layout": charts.axes("", "heads", barmode="group")}},
        )
    ]
    if summary.get("changed"):
        doubtful = [label_doubt(run) is not None for run in summary["runs"]]
        rows = [
            [
                row["head"],
                summary["names"][row["run"]],
                row["from"],
                row["to"],
                "yes" if row["settled"] and not doubtful[0] and not doubtful[row["run"]] else "no",
            ]
            for row in summary["changed"]
        ]
        columns = tuple(Column(title, numeric=False) for title in ("head", "run", "from", "to", "settled"))
        blocks.append(
            Table(
                "changed-table",
                "Heads whose label changed",
                columns,
                rows,
                note="Settled: neither label changes over its 95 % interval"
                + (f", and neither run has fewer than {SETTLING} documents." if any(doubtful) else "."),
                filterable=True,
            )
        )
    return Section("heads", "Heads", tuple(blocks))


def _settings(summary: Mapping[str, Any]) -> Section:
    columns = (Column("setting", numeric=False), *(Column(name, numeric=False) for name in summary["names"]))
    rows = [[name, *(str(value) for value in values)] for name, values in summary["differing"].items()]
    equal = "Everything else that the runs recorded is equal."
    note = equal if rows else "The runs recorded no difference in their settings."
    return Section(
        "settings", "What differs in the settings", (Table("settings-table", "Settings", columns, rows, note=note),)
    )
