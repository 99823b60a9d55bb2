"""The report of `posattn heads`: the plane, the map, frequencies and a page for every head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from posattn.reports import charts, common
from posattn.reports.findings import REPLACED, compared, heads_findings, label_doubt
from posattn.reports.kit import Chart, Column, Control, Figure, Group, Link, Page, Section, Table
from posattn.reports.sure import fixed, fixed_digits
from posattn.words import count, number, percent

LABELS = ("positional", "symbolic", "uniform", "mixed")
#: colours of the labels, in their order, and a sign for those who cannot tell the colours apart
_COLOURS = {"positional": "@c0", "symbolic": "@c1", "uniform": "@c2", "mixed": "@c7"}
_SIGNS = {"positional": "circle", "symbolic": "diamond", "uniform": "square", "mixed": "x"}
#: digits of a score and of its interval: the same, so that none is shown outside its own interval
DIGITS = 3
#: a head is shown up to this many times along an edge of its grids
_FEW, _MANY = 48, 32


def heads_page(summary: Mapping[str, Any], arrays: Mapping[str, Any]) -> Page:
    """The whole page; `arrays` holds `pattern`, `cross_logits` [T,H,n,n] and `rotary.*` where they were measured."""
    provenance = summary["provenance"]
    sections = [
        _plane(summary),
        _map(summary),
        _frequencies(summary, arrays),
        _ablation(summary),
        _table(summary),
        _pages(summary, arrays),
        common.warnings_section(summary),
        common.provenance_section(summary),
    ]
    return Page(
        command="heads",
        title=f"Heads of {common.model_name(provenance)}",
        subtitle=common.subtitle(provenance),
        findings=heads_findings(summary),
        figures=_key_figures(summary),
        sections=tuple(section for section in sections if section is not None),
        footer=common.footer(provenance),
    )


def _size(summary: Mapping[str, Any]) -> tuple[int, int]:
    return len(summary["positional"]), len(summary["positional"][0])


def _name(layer: int, head: int) -> str:
    return f"L{layer}H{head}"


def _anchor(layer: int, head: int) -> str:
    return f"head:layer {layer}|head {head}"


def _key_figures(summary: Mapping[str, Any]) -> tuple[Figure, ...]:
    layers, heads = _size(summary)
    total = layers * heads
    figures = [
        Figure(
            f"{label} heads",
            str(summary["counts"].get(label, 0)),
            f"of {total}, at γ = {summary['thresholds']['purity']}",
            "map-chart",
        )
        for label in LABELS
    ]
    induction = (summary.get("role_counts") or {}).get("induction")
    if induction is not None:
        figures.append(Figure("induction heads", str(induction), "by attention on repeated tokens", "heads-table"))
    return tuple(figures)


def _plane(summary: Mapping[str, Any]) -> Section:
    layers, heads = _size(summary)
    purity = summary["thresholds"]["purity"]

    def dots(chosen: str) -> list[dict[str, Any]]:
        traces = []
        for label in LABELS:
            if chosen not in ("all", label):
                continue
            where = [(t, h) for t in range(layers) for h in range(heads) if summary["labels"][t][h] == label]
            if not where:
                continue
            traces.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": label,
                    "x": [summary["positional"][t][h] for t, h in where],
                    "y": [summary["symbolic"][t][h] for t, h in where],
                    "customdata": [["#" + _anchor(t, h), _name(t, h)] for t, h in where],
                    "marker": {
                        "symbol": _SIGNS[label],
                        "size": 9,
                        "color": [t for t, _ in where],
                        "cmin": 0,
                        "cmax": max(layers - 1, 1),
                        "colorscale": "@layers",
                        "showscale": not traces,
                        "colorbar": {
                            "title": {"text": "layer", "side": "right"},
                            "thickness": 14,
                            "outlinewidth": 0,
                            "dtick": max(1, -(-layers // 8)),
                        },
                        "line": {"width": 0.5, "color": "@card"},
                    },
                    "hovertemplate": "%{customdata[1]}<br>positional %{x:.3f}, symbolic "
                    "%{y:.3f}<extra>%{fullData.name}</extra>",
                }
            )
        return traces or [{"type": "scatter", "x": [], "y": [], "name": chosen}]

    square = {"type": "rect", "layer": "below", "line": {"color": "@line", "width": 1}, "fillcolor": "@shade"}
    shapes = [
        {**square, "x0": x, "x1": x + purity, "y0": y, "y1": y + purity}
        for x, y in ((1 - purity, 0), (0, 1 - purity), (1 - purity, 1 - purity))
    ]
    layout = charts.axes(
        "positional score",
        "symbolic score",
        xaxis={"range": [-0.04, 1.04], "constrain": "domain"},
        yaxis={"range": [-0.04, 1.04], "scaleanchor": "x", "constrain": "domain"},
        hovermode="closest",
        shapes=shapes,
    )
    options = ("all", *(label for label in LABELS if summary["counts"].get(label)))
    things = "keys" if summary["level"] == "keys" else "tokens"
    words = ", ".join(f"{summary['counts'].get(label, 0)} {label}" for label in LABELS)
    chart = Chart(
        "plane-chart",
        "The plane",
        f"Each head by its positional and symbolic score: {words}. The table of heads holds every figure.",
        {option: {"traces": dots(option), "layout": layout} for option in options},
        note="A mark for each head, coloured by layer; the sign tells the label, the shaded corners are where a "
        "head counts as pure. "
        "Click a mark for that head's page.",
        controls=(Control("label", options),),
        square=True,
        height=560,
    )
    return Section(
        "plane",
        "Position or symbol",
        (chart,),
        f"Two {things} of the context are exchanged. A head whose attention stays where it was works by position "
        "(score near 1 "
        f"on the first axis); one whose attention follows the {things} works by symbol (near 1 on the second). Both "
        "near 1: "
        "the attention is too even to tell.",
    )


def _map(summary: Mapping[str, Any]) -> Section:
    layers, heads = _size(summary)
    codes = np.array([[LABELS.index(label) for label in row] for row in summary["labels"]], float)
    anchors = [
        [["#" + _anchor(t, h), _name(t, h), summary["labels"][t][h]] for h in range(heads)] for t in range(layers)
    ]
    steps = [[edge, _COLOURS[label]] for i, label in enumerate(LABELS) for edge in (i / 4, (i + 1) / 4)]
    views: dict[str, Any] = {
        "label": {
            "traces": [
                {
                    "z": codes.tolist(),
                    "zmin": -0.5,
                    "zmax": 3.5,
                    "colorscale": steps,
                    "colorbar": {
                        "tickvals": [0, 1, 2, 3],
                        "ticktext": list(LABELS),
                        "thickness": 14,
                        "outlinewidth": 0,
                    },
                    "hovertemplate": "%{customdata[1]}: %{customdata[2]}<extra></extra>",
                }
            ]
        }
    }
    quantities = {name: summary[name] for name in ("positional", "symbolic", "entropy")}
    quantities |= {name.replace("_", " "): part["measured"] for name, part in (summary.get("evidence") or {}).items()}
    for name, values in quantities.items():
        grid = np.array([[np.nan if v is None else v for v in row] for row in values], float)
        top = 1.0 if name in ("positional", "symbolic") else float(np.nanmax(grid)) if np.isfinite(grid).any() else 1.0
        views[name] = {
            "traces": [
                {
                    "z": charts.pack(grid, 0.0, top or 1.0),
                    "zmin": 0,
                    "zmax": top or 1.0,
                    "colorscale": "@sequential",
                    "colorbar": {"title": {"text": name, "side": "right"}, "thickness": 14, "outlinewidth": 0},
                    "hovertemplate": "%{customdata[1]}: %{z:.3f}<extra></extra>",
                }
            ]
        }
    base = {
        "traces": [{"type": "heatmap", "customdata": anchors, "xgap": 1, "ygap": 1}],
        "layout": charts.axes(
            "head",
            "layer",
            hovermode="closest",
            showlegend=False,
            xaxis={"showgrid": False, "dtick": max(1, heads // 16)},
            yaxis={"showgrid": False},
        ),
    }
    chart = Chart(
        "map-chart",
        "Layers and heads",
        "A map of every head by layer: its label, its scores, or how much of its attention goes to one kind of "
        "position.",
        views,
        note="Click a cell for that head's page.",
        controls=(Control("shown", tuple(views)),),
        base=base,
        height=max(280, min(720, 140 + 18 * layers)),
    )
    by_layer = [
        charts.bars(
            label,
            list(range(layers)),
            [sum(1 for one in row if one == label) / heads for row in summary["labels"]],
            colour=_COLOURS[label],
            hover="%{y:.0%}",
        )
        for label in LABELS
    ]
    layout = charts.axes("layer", "share of the heads", barmode="stack", yaxis={"tickformat": ".0%", "range": [0, 1]})
    stacked = Chart(
        "layers-chart",
        "Labels by layer",
        "The share of each label among the heads of a layer.",
        {"": {"traces": by_layer, "layout": layout}},
        height=300,
    )
    return Section("map", "Where they are", (chart, stacked))


def _frequencies(summary: Mapping[str, Any], arrays: Mapping[str, Any]) -> Section | None:
    if "rotary.energy" not in arrays:
        return None
    views = {}
    for name, title in (
        ("energy", "energy"),
        ("variance_share", "variance share"),
        ("positional", "positional score"),
        ("symbolic", "symbolic score"),
    ):
        grid = _nanmean(np.asarray(arrays[f"rotary.{name}"], float), 1)  # [T,F], mean over heads
        if name == "energy":
            total = np.nansum(grid, -1, keepdims=True)
            grid = np.divide(grid, total, out=np.full_like(grid, np.nan), where=total > 0)
        if np.isfinite(grid).any():
            views[title] = charts.grid_view(grid, "frequency (0 is the fastest)", "layer", value=title, low=0.0)
    chart = Chart(
        "frequency-chart",
        "Frequencies by layer",
        "A heat map of how much each layer uses each rotary frequency, as the mean over its heads.",
        views,
        note="Energy: ‖q‖‖k‖ of the frequency's pair, as a share of the layer's. Variance share: of the logits. The "
        "last "
        "column is the unrotated rest, where a model has one.",
        controls=(Control("shown", tuple(views)),),
        height=max(280, min(640, 140 + 14 * _size(summary)[0])),
    )
    return Section(
        "frequencies",
        "Rotary frequencies",
        (chart,),
        "Rotary embeddings split a head's logit into one term a frequency: fast ones tell near positions apart, "
        "slow ones hardly turn within the context.",
    )


def _nanmean(values: np.ndarray, axis: int) -> np.ndarray:
    finite = np.isfinite(values).sum(axis)
    return np.where(finite > 0, np.nansum(values, axis) / np.maximum(finite, 1), np.nan)


def _ablation(summary: Mapping[str, Any]) -> Section | None:
    study = summary.get("ablation")
    if not study:
        return None
    names = [f"{name.replace('_', ' ')} ({study['heads'][name]})" for name in study["classes"]]
    beside = [compared(study, name) for name in study["classes"]]
    views, rows = {}, []
    # the longest first: the finding speaks of it
    for n, length in reversed(list(enumerate(study["lengths"]))):
        traces = []
        for key, label, colour in (
            ("increase", "these heads removed", "@c1"),
            ("control_increase", "random heads of the same layers", "@c7"),
        ):
            told = [c for c in range(len(names)) if key == "increase" or beside[c]]
            if not told:
                continue
            value = [study[key][c][n] for c in told]
            bounds = [study[f"{key}_interval"][c][n] for c in told]
            error = {}
            if all(low is not None for low, _ in bounds):
                error = {
                    "error_y": {
                        "type": "data",
                        "symmetric": False,
                        "array": [high - v for v, (_, high) in zip(value, bounds, strict=True)],
                        "arrayminus": [v - low for v, (low, _) in zip(value, bounds, strict=True)],
                        # over a bar as well as over the paper
                        "color": "@ink",
                    }
                }
            shown = [names[c] for c in told]
            traces.append(charts.bars(label, shown, value, colour=colour, hover="%{y:.3f} nats", **error))
        views[count(int(length), "token")] = {
            "traces": traces,
            "layout": charts.axes(
                "",
                "increase of the loss (nats a token)",
                barmode="group",
                xaxis={"categoryorder": "array", "categoryarray": names},
            ),
        }
        for c, name in enumerate(study["classes"]):
            low, high = study["excess_interval"][c][n]
            interval = fixed((low, high))
            rows.append(
                [
                    name,
                    study["heads"][name],
                    length,
                    study["increase"][c][n],
                    study["control_increase"][c][n] if beside[c] else None,
                    study["excess"][c][n] if beside[c] else None,
                    interval if beside[c] else None,
                ]
            )
    chart = Chart(
        "ablation-chart",
        "Loss with a class of heads removed",
        "Bars of the increase of the loss for each class, beside random sets of heads of the same size in the same "
        "layers.",
        views,
        note=f"What a head adds is replaced by {REPLACED.get(study['mode'], study['mode'])}. Lines are 95 % intervals "
        f"over {count(study['documents'], 'document')}; {count(study['controls'], 'random set')} a class"
        + ("." if all(beside) else ", where its layers hold other heads."),
        controls=(Control("length", tuple(views)),) if len(views) > 1 else (),
    )
    columns = (
        Column("class", numeric=False),
        Column("heads", format="d"),
        Column("length", format="d"),
        Column("increase"),
        Column("random heads"),
        Column("excess", help="Increase beyond that of random heads."),
        Column("95 % interval", numeric=False),
    )
    return Section(
        "ablation", "Does it matter", (chart, Table("ablation-table", "Increase of the loss", columns, rows))
    )


def _interval(summary: Mapping[str, Any], name: str, t: int, h: int) -> str | None:
    return fixed(summary[f"{name}_interval"][t][h], DIGITS)


def _table(summary: Mapping[str, Any]) -> Section:
    layers, heads = _size(summary)
    evidence = summary.get("evidence") or {}
    shown = [
        name for name in ("previous_token", "first_position", "local_window", "induction_repeat") if name in evidence
    ]
    rotary = summary.get("rotary")
    columns = (
        Column("head", numeric=False),
        Column("layer", format="d"),
        Column("label", numeric=False),
        Column("positional", format=f".{DIGITS}f"),
        Column("95 %", numeric=False),
        Column("symbolic", format=f".{DIGITS}f"),
        Column("95 %", numeric=False),
        Column("entropy", format=".2f", help="Of the query's attention, in nats."),
        Column("roles", numeric=False),
        *(
            Column(name.replace("_", " ").replace(" repeat", ""), format=".0%", help="Share of attention.")
            for name in shown
        ),
        *([Column("offset", format=".0f", help="The distance a rotary head points to.")] if rotary else []),
    )
    rows = []
    for t in range(layers):
        for h in range(heads):
            rows.append(
                [
                    Link(_name(t, h), _anchor(t, h)),
                    t,
                    summary["labels"][t][h],
                    summary["positional"][t][h],
                    _interval(summary, "positional", t, h),
                    summary["symbolic"][t][h],
                    _interval(summary, "symbolic", t, h),
                    summary["entropy"][t][h],
                    ", ".join(summary["roles"][t][h]).replace("_", " "),
                    *(evidence[name]["measured"][t][h] for name in shown),
                    *([rotary["offset"][t][h]] if rotary else []),
                ]
            )
    return Section(
        "heads",
        "All heads",
        (
            Table(
                "heads-table",
                "Heads",
                columns,
                rows,
                note="Filter by label, role or name; click a heading to sort.",
                filterable=True,
            ),
        ),
    )


def _pages(summary: Mapping[str, Any], arrays: Mapping[str, Any]) -> Section:
    layers, heads = _size(summary)
    keys = {(t, h): f"layer {t}|head {h}" for t in range(layers) for h in range(heads)}
    tiles = _FEW if layers * heads <= 512 else _MANY
    parts: list[Chart] = []
    pattern = arrays.get("pattern")
    if pattern is not None and np.shape(pattern)[:2] == (layers, heads):
        views = {key: charts.kernel_view(pattern[t][h], tiles) for (t, h), key in keys.items()}
        parts.append(
            _shared(
                "head-pattern",
                "Attention pattern",
                "A heat map of the head's attention in one document.",
                views,
                note="First document; logarithmic.",
            )
        )
    logits = arrays.get("cross_logits")
    if logits is not None and np.shape(logits)[:2] == (layers, heads):
        views = {key: _logit_view(logits[t][h], tiles) for (t, h), key in keys.items()}
        parts.append(
            _shared(
                "head-logits",
                "Cross-logits M",
                "A heat map of the logit that the head gives to each token if its key stood at each position.",
                views,
                note="Stripes down: the token decides (symbolic). Stripes across: the position decides "
                "(positional). First document, last query.",
            )
        )
    if "rotary.energy" in arrays:
        parts += _rotary_charts(arrays, keys)
    facts = {key: _facts(summary, t, h) for (t, h), key in keys.items()}
    group = Group(
        "head",
        "One head",
        (
            Control("layer", tuple(f"layer {t}" for t in range(layers))),
            Control("head", tuple(f"head {h}" for h in range(heads))),
        ),
        tuple(parts),
        facts,
        note="Chosen here, or by a click on the plane, on the map, or on a name in the table.",
    )
    return Section("head-pages", "Head by head", (group,))


def _shared(id: str, title: str, words: str, views: dict[str, Any], note: str = "") -> Chart:
    """A chart whose views differ in little: what they share is written once."""
    first = next(iter(views.values()))
    trace = {
        k: v for k, v in first["traces"][0].items() if all(view["traces"][0].get(k) == v for view in views.values())
    }
    slim = {
        name: {"traces": [{k: v for k, v in view["traces"][0].items() if k not in trace}]}
        for name, view in views.items()
    }
    return Chart(
        id, title, words, slim, note=note, base={"traces": [trace], "layout": first["layout"]}, square=True, height=400
    )


def _logit_view(logits: Any, tiles: int) -> dict[str, Any]:
    rows, columns, mean = charts.tiles(logits, tiles)
    low, high = (float(v) for v in np.percentile(mean, [1, 99]))
    trace = {
        "type": "heatmap",
        "z": charts.pack(mean, low, high),
        "x": columns.tolist(),
        "y": rows.tolist(),
        "zmin": low,
        "zmax": high,
        "colorscale": "@sequential",
        "colorbar": {"title": {"text": "logit", "side": "right"}, "thickness": 14, "outlinewidth": 0},
        "hovertemplate": "token of %{x} at position %{y}: %{z:.2f}<extra></extra>",
    }
    layout = charts.axes(
        "token (its place in the document)",
        "position its key is put at",
        xaxis={"constrain": "domain", "showgrid": False},
        yaxis={"autorange": "reversed", "scaleanchor": "x", "constrain": "domain", "showgrid": False},
        hovermode="closest",
        showlegend=False,
    )
    return {"traces": [trace], "layout": layout}


def _rotary_charts(arrays: Mapping[str, Any], keys: Mapping[tuple[int, int], str]) -> list[Chart]:
    share = np.asarray(arrays["rotary.variance_share"], float)
    positional, symbolic = (np.asarray(arrays[f"rotary.{name}"], float) for name in ("positional", "symbolic"))
    predicted, real = (
        np.asarray(arrays[f"rotary.{name}"], float) for name in ("predicted_attention", "real_attention")
    )
    index = list(range(share.shape[-1]))
    spectrum, distance = {}, {}
    for (t, h), key in keys.items():
        spectrum[key] = {
            "traces": [
                {"y": _plain(share[t, h])},
                {"y": _plain(positional[t, h])},
                {"y": _plain(symbolic[t, h])},
            ]
        }
        distance[key] = {
            "traces": [
                {"y": _plain(charts.blocks(real[t, h], 128)[1])},
                {"y": _plain(charts.blocks(predicted[t, h], 128)[1])},
            ]
        }
    x = charts.blocks(real[0, 0], 128)[0].tolist()
    return [
        Chart(
            "head-frequencies",
            "Frequencies",
            "For each rotary frequency its share of the variance of the logits, and its positional and symbolic score.",
            spectrum,
            note="0 is the fastest.",
            base={
                "traces": [
                    {
                        k: v
                        for k, v in charts.bars("variance share", index, [0] * len(index), colour="@c4").items()
                        if k != "y"
                    },
                    {
                        k: v
                        for k, v in charts.line(
                            "positional", [0] * len(index), index, colour="@c0", hover="%{y:.3f}"
                        ).items()
                        if k != "y"
                    },
                    {
                        k: v
                        for k, v in charts.line(
                            "symbolic", [0] * len(index), index, colour="@c1", hover="%{y:.3f}"
                        ).items()
                        if k != "y"
                    },
                ],
                "layout": charts.axes("frequency", "share or score", yaxis={"range": [0, 1.02]}),
            },
            height=340,
        ),
        Chart(
            "head-distance",
            "Attention by distance",
            "The head's attention by distance, as measured and as predicted from its mean query and key alone.",
            distance,
            note="Predicted: from the mean query and the mean key of each frequency, no content.",
            base={
                "traces": [
                    {k: v for k, v in charts.line("measured", [0] * len(x), x, colour="@measured").items() if k != "y"},
                    {
                        k: v
                        for k, v in charts.line("predicted", [0] * len(x), x, colour="@c0", dash="dash").items()
                        if k != "y"
                    },
                ],
                "layout": charts.axes("distance to the query", "attention", yaxis={"rangemode": "tozero"}),
            },
            log_axis="y",
            height=340,
        ),
    ]


def _plain(values: Any) -> list[float | None]:
    return [float(v) if np.isfinite(v) else None for v in values]


#: where a head looks, as evidence measures it
_LOOKS = {
    "previous_token": "on previous token",
    "self": "on itself",
    "first_position": "on first position",
    "local_window": "on positions just before",
    "duplicate": "on same token before",
    "induction": "on what followed it",
    "duplicate_repeat": "on same, repeated text",
    "induction_repeat": "on what followed, repeated text",
}
#: exact figures of the cross-logits: what they are called, and their unit ("share": of M's variance)
_EXACT = {
    "positional_violation": ("departure from positional", "nats²"),
    "symbolic_violation": ("departure from symbolic", "nats²"),
    "logit_variance": ("variance of own logits", "nats²"),
    "position": ("M by position", "share"),
    "symbol": ("M by symbol", "share"),
    "interaction": ("M by both together", "share"),
    "position_scale": ("size of position effect", "nats"),
    "symbol_scale": ("size of symbol effect", "nats"),
}


def _facts(summary: Mapping[str, Any], t: int, h: int) -> list[tuple[str, str]]:
    def shown(value: Any, digits: int = 2) -> str:
        return "–" if value is None else number(value, digits)

    certain = None if label_doubt(summary) else summary["certain"][t][h]
    label = summary["labels"][t][h]
    facts = [
        ("head", _name(t, h)),
        ("label", label + ("" if certain is None else ", settled" if certain else ", not settled by these data")),
    ]
    for name in ("positional", "symbolic"):
        interval = _interval(summary, name, t, h)
        score = "–" if summary[name][t][h] is None else fixed_digits(summary[name][t][h], DIGITS)
        facts.append((name, score + (f" (95 %: {interval})" if interval else "")))
    facts.append(("entropy", f"{shown(summary['entropy'][t][h])} nats"))
    facts.append(("pure from γ", shown(summary["gamma"][t][h])))
    if roles := summary["roles"][t][h]:
        facts.append(("roles", ", ".join(roles).replace("_", " ")))
    for name, part in (summary.get("evidence") or {}).items():
        value = part["measured"][t][h]
        if value is not None:
            chance = part["chance"][t][h]
            facts.append(
                (
                    _LOOKS.get(name, name.replace("_", " ")),
                    percent(value, 1) + ("" if chance is None else f" (chance {percent(chance, 1)})"),
                )
            )
    for name, grid in (summary.get("exact") or {}).items():
        term, unit = _EXACT.get(name, (name.replace("_", " "), ""))
        value = percent(grid[t][h]) if unit == "share" else f"{shown(grid[t][h])} {unit}".rstrip()
        facts.append((term, value))
    if (share := summary.get("distance_share")) is not None:
        facts.append(("explained by distance", percent(share[t][h]) if share[t][h] is not None else "–"))
    if rotary := summary.get("rotary"):
        facts.append(("offset", f"{shown(rotary['offset'][t][h], 0)} (sharpness {shown(rotary['sharpness'][t][h])})"))
    return facts
