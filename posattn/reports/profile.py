"""The report of `posattn profile`: its summary from result objects, and its page from the summary and the arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from posattn.reports import charts, common, curves
from posattn.reports.findings import in_words, profile_findings
from posattn.reports.forces import forces_section
from posattn.reports.kit import Block, Chart, Column, Control, Figure, Notes, Page, Section, Table
from posattn.reports.sure import fixed, positions, shapeless
from posattn.words import count, listed, number, percent, span, tile

SHAPES = (
    ("primacy", "first eighth", "Share of the first eighth of the positions."),
    ("recency", "last eighth", "Share of the last eighth of the positions."),
    ("middle", "middle half", "Share of the middle half of the positions."),
    ("mean_position", "mean position", "0 is the first position, 1 the last."),
    ("trough", "trough", "Middle of the lightest eighth of the positions: 0 is the first position, 1 the last."),
    (
        "u_index",
        "U index",
        "Density of the thinner end over the middle half's, minus 1. Above 0: both ends are denser.",
    ),
)

#: what the columns of the shapes mean, on the page itself: a tooltip is not read on paper
SHAPES_NOTE = (
    "Shares of a curve's mass. An even curve has 0.125 on each eighth and 0.5 on the middle half. Mean position and "
    "trough are places, 0 the first position and 1 the last: the trough is the middle of that stretch, an eighth of "
    "the context long, which holds least. The U index is above 0 when both ends are denser than the middle half."
)

_FORCES_LEAD = (
    "What makes the `positional_content` profile what it is: the profile that mask, measured λ, positions and each "
    "head's preference for its own token imply, without the attention patterns themselves."
)


def profile_page(summary: Mapping[str, Any], arrays: Mapping[str, Any]) -> Page:
    """The whole page; `arrays` holds `kernels` [T,N,N] or [T,H,N,N] and `mixing_per_position` [T,N], where kept."""
    provenance = summary["provenance"]
    sections = [_profiles(summary), _mixing(summary, arrays), _kernels(summary, arrays)]
    if summary.get("forces"):
        sections.insert(1, forces_section(summary, arrays, _FORCES_LEAD))
    sections += [common.warnings_section(summary), common.provenance_section(summary)]
    return Page(
        command="profile",
        title=f"Where {common.model_name(provenance)} looks",
        subtitle=common.subtitle(provenance),
        findings=profile_findings(summary),
        figures=_key_figures(summary),
        sections=tuple(section for section in sections if section is not None),
        footer=common.footer(provenance),
    )


def _key_figures(summary: Mapping[str, Any]) -> tuple[Figure, ...]:
    token = summary["mixing"]["token"]
    figures = [
        Figure(
            "mean mixing λ",
            number(np.mean(token)),
            f"{number(min(token))} to {number(max(token))} by layer",
            "mixing-chart",
        )
    ]
    shape = (summary.get("shape") or {}).get("influence")
    if shape and not shapeless(positions(summary)):
        trimmed = shape.get("without_first") or shape
        rest = ", first position left out" if trimmed is not shape else ""
        share = f"of measured influence; even share 12.5%{rest}"
        ends = ((summary.get("intervals") or {}).get("influence") or {}).get("u_index")
        sure = f"95 % interval {span(ends)}; " if ends and None not in ends else ""
        figures += [
            Figure(
                "U index, measured",
                "–" if trimmed["u_index"] is None else number(trimmed["u_index"], sign=True),
                f"{sure}above 0: both ends denser{rest}",
                "shapes-table",
            ),
            Figure("first eighth", tile(trimmed["primacy"]), share, "profiles-chart"),
            Figure("last eighth", tile(trimmed["recency"]), share, "profiles-chart"),
        ]
    if best := curves.nearest(summary):
        comparison = summary["comparison"]
        figures.append(
            Figure(
                "nearest prediction",
                number(comparison[best]["wasserstein"], 3),
                f"{best}, W1 of the length",
                "distances-table",
            )
        )
    return tuple(figures)


def _profiles(summary: Mapping[str, Any]) -> Section:
    profiles, influence = dict(summary["profiles"]), summary.get("influence")
    blocks: list[Block] = [_profile_chart(profiles, influence, summary)]
    if comparison := summary.get("comparison"):
        blocks.append(_distances(comparison, summary))
    if correlations := summary.get("per_document"):
        blocks.append(_per_document(_different(correlations, summary)))
    if calibrated := summary.get("calibrated"):
        blocks.append(_calibrated(calibrated))
    blocks.append(_shapes(_different(summary["shape"], summary)))
    return Section(
        "profiles",
        "Profiles: predicted and measured",
        tuple(blocks),
        "How much each input position matters to the last one. The predicted profiles are rollouts: products of a "
        "layer's averaged attention and its "
        "residual connection, from the last layer to the first. The measured one comes from gradients of the model "
        "itself.",
    )


#: dashes of the curves that are shown at once: their colours are fixed, these tell them apart without colours
_DASHES = {"residual": "dash", "energy": "dashdot"}


def _profile_chart(profiles: Mapping[str, Sequence[float]], influence: Any, summary: Mapping[str, Any]) -> Chart:
    repeated, best = curves.other_names(summary), curves.nearest(summary)
    shown = curves.prominent(summary)
    # those that are shown at once come first in the legend, the rest waits there to be asked for
    names = [*shown, *(name for name in profiles if name not in repeated and name not in shown)]
    styles = _styles(names, shown)

    def label(name: str) -> str:
        return f"{name} (nearest)" if name == best and len(names) > 1 else name

    def view(skip: int) -> dict[str, Any]:
        traces: list[dict[str, Any]] = []
        length = len(next(iter(profiles.values())))

        def drawn(curve: Sequence[float]) -> tuple[list[float], list[float]]:
            values = np.asarray(curve, dtype=float)[skip:]
            x, y = charts.blocks(values / (values.sum() or 1.0))
            return (np.asarray(x) + skip).tolist(), y.tolist()

        if influence:
            x, y = drawn(influence)
            if interval := (summary.get("intervals") or {}).get("profile"):
                whole = sum(influence[skip:]) or 1.0
                low, high = (charts.blocks(np.asarray(edge[skip:]) / whole)[1] for edge in interval)
                traces.append(charts.band(x, low.tolist(), high.tolist(), "@measured"))
            traces.append(charts.line("measured influence", y, x, colour="@measured", width=3.2, hover="%{y:.3%}"))
        for name in names:
            x, y = drawn(profiles[name])
            traces.append(
                charts.line(
                    label(name),
                    y,
                    x,
                    width=2.6 if name == best else 1.8,
                    hover="%{y:.3%}",
                    visible=True if name in shown else "legendonly",
                    **styles[name],
                )
            )
        uniform = 1 / (length - skip)
        traces.append(
            charts.line(
                "even curve",
                [uniform, uniform],
                [skip, length - 1],
                colour="@muted",
                width=1.2,
                dash="dot",
                hover="%{y:.3%}",
            )
        )
        layout = charts.axes(
            f"input position, in bins of {binned['width']}" if (binned := summary.get("binning")) else "input position",
            "share of influence",
            yaxis={"tickformat": ".4~%", "rangemode": "tozero"},
            xaxis={"range": [0, length - 1]},
        )
        return {"traces": traces, "layout": layout}

    shape = (summary.get("shape") or {}).get("influence") or {}
    words = f"A curve each for {listed(['the measured influence'] * bool(influence) + list(map(label, shown)))}"
    if shape and not shapeless(positions(summary)):
        words += (
            f"; of the measured influence {percent(shape['primacy'])} is on the first eighth of the positions, "
            f"{percent(shape['middle'])} on the middle half, "
            f"{percent(shape['recency'])} on the last eighth"
        )
    note = "Every curve sums to 1. The first position is often an attention sink; it is left out at first so that the "
    note += "rest can be seen."
    if len(names) > len(shown):
        note += " Predictions that are grey in the legend are drawn by a click on their name."
    if repeated:
        told = listed([f"`{name}` with `{first}`" for name, first in repeated.items()])
        note += f" Curves that coincide are drawn once: {told}."
    return Chart(
        "profiles-chart",
        "Influence on the last position",
        words + ". The figures are in the tables below.",
        {"without the first": view(1), "all positions": view(0)},
        note=note,
        controls=(Control("positions", ("without the first", "all positions"), "buttons"),),
        log_axis="y",
        log_first=True,
        height=440,
    )


def _styles(names: Sequence[str], shown: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Colour and dash of every prediction, no pair twice: fixed for the known ones, the first free pair for others."""
    styles: dict[str, dict[str, Any]] = {}
    for name in names:
        fixed = {"colour": charts.VARIANT_COLOURS.get(name, ""), "dash": _DASHES.get(name, "solid")}
        free = (charts.style(index) for index in range(8 * len(charts.DASHES)))
        if not fixed["colour"] or fixed in styles.values():
            taken = {one["colour"] for one in styles.values()} | {charts.VARIANT_COLOURS[n] for n in curves.FIRST}
            choices = [one for one in free if one not in styles.values()]
            # what is shown at once has a colour of its own
            fixed = next((one for one in choices if name not in shown or one["colour"] not in taken), choices[0])
        styles[name] = fixed
    return styles


def _distances(comparison: Mapping[str, Mapping[str, float]], summary: Mapping[str, Any]) -> Table:
    intervals = (summary.get("intervals") or {}).get("comparison") or {}
    repeated = curves.other_names(summary)
    columns = [
        Column("prediction", numeric=False),
        Column("what it is", numeric=False),
        Column("Wasserstein-1", help="Share of the context length. 0: the same curve."),
        *([Column("95 % interval", numeric=False, help="Bootstrap over documents.")] if intervals else []),
        Column("Spearman", help="Rank correlation over positions. 1: the same order."),
        Column("total variation", help="Half the summed absolute difference. 0: the same curve, 1: disjoint."),
    ]
    rows = []
    # of curves that coincide the one that counts stands first
    for name, distance in sorted(
        comparison.items(), key=lambda item: (round(item[1]["wasserstein"], 9), item[0] in repeated)
    ):
        interval = intervals.get(name)
        rows.append(
            [
                name,
                f"the same curve as {repeated[name]} here" if name in repeated else in_words(summary, name),
                distance["wasserstein"],
                *([fixed(interval)] if intervals else []),
                distance["spearman"],
                distance["total_variation"],
            ]
        )
    return Table(
        "distances-table",
        "Distance of each prediction to the measured influence",
        tuple(columns),
        rows,
        note="Over all positions, the first included. `uniform` is the even curve, what knowing nothing would give."
        + (
            " Intervals resample the documents of the measured influence alone; the predictions are held fixed."
            if intervals
            else ""
        ),
    )


def _different(figures: Mapping[str, Any], summary: Mapping[str, Any]) -> dict[str, Any]:
    """Figures by curve, without those of curves that repeat another."""
    repeated = curves.other_names(summary)
    return {name: value for name, value in figures.items() if name not in repeated}


def _per_document(found: Mapping[str, Mapping[str, Any]]) -> Table:
    own = any(figures.get("own") for figures in found.values())
    columns = [
        Column("prediction", numeric=False),
        Column("Spearman", help="Rank correlation over positions with one document's influence, mean over documents."),
        Column("95 % interval", numeric=False, help="Bootstrap over documents."),
        Column("documents", format="d"),
    ]
    if own:
        columns += [
            Column("own Spearman", help="The same of a prediction made of that document alone."),
            Column("own 95 % interval", numeric=False, help="Bootstrap over documents."),
        ]
    rows = []
    for name, figures in sorted(found.items(), key=lambda item: -(item[1]["spearman"] or -1)):
        alone = figures.get("own") or {}
        row: list[Any] = [name, figures["spearman"], fixed(figures["interval"]), figures["documents"]]
        rows.append(row + ([alone.get("spearman"), fixed(alone.get("interval"))] if own else []))
    return Table(
        "documents-table",
        "Each prediction against single documents",
        tuple(columns),
        rows,
        note="One curve, averaged over documents, set beside the influence in each of them."
        + (" `own`: each document's own prediction set beside its own influence." if own else ""),
    )


def _calibrated(found: Mapping[str, Mapping[str, Any]]) -> Table:
    columns = (
        Column("prediction", numeric=False),
        Column("factor", help="On λ, or on the squared gains of an energy."),
        Column("Wasserstein-1", help="Judged on the documents that the factor was not fitted on."),
        Column("95 % interval", numeric=False, help="Bootstrap over the documents it is judged on."),
        Column("without the factor", help="The same distance with factor 1, on the same documents."),
        Column("where it was fitted"),
    )
    rows = [
        [name, one["factor"], one["judged"], fixed(one["interval"]), one["uncalibrated"], one["fitted"]]
        for name, one in sorted(found.items(), key=lambda item: item[1]["judged"])
    ]
    fitted, judged = next(iter(found.values()))["documents"]
    return Table(
        "calibrated-table",
        "Calibrated: one fitted factor",
        columns,
        rows,
        note=f"The factor was fitted to the influence in {count(fitted, 'document')} and judged on {judged} others. "
        "The predictions above have nothing fitted.",
    )


def _shapes(shape: Mapping[str, Mapping[str, Any]]) -> Table:
    keys = [(key, title, text) for key, title, text in SHAPES if any(key in figures for figures in shape.values())]
    columns = (
        Column("curve", numeric=False),
        Column("positions", numeric=False),
        *(Column(title, help=text) for _, title, text in keys),
    )
    rows = []
    for name, figures in shape.items():
        label = "measured influence" if name == "influence" else name
        rows.append([label, "all", *(figures.get(key) for key, _, _ in keys)])
        if trimmed := figures.get("without_first"):
            rows.append([label, "without the first", *(trimmed.get(key) for key, _, _ in keys)])
    return Table(
        "shapes-table",
        "Shapes",
        columns,
        rows,
        note=SHAPES_NOTE,
        filterable=len(rows) > 8,
    )


def _mixing(summary: Mapping[str, Any], arrays: Mapping[str, Any]) -> Section:
    mixing = summary["mixing"]
    token, frobenius = mixing["token"], mixing["frobenius"]
    layers = list(range(len(token)))
    traces = []
    documents = mixing.get("documents") or 0
    if documents > 1:
        for name, colour in (("token", "@c0"), ("frobenius", "@c1")):
            if spread := mixing.get(f"{name}_std"):
                half = [1.96 * value / documents**0.5 for value in spread]
                low = [max(v - h, 0.0) for v, h in zip(mixing[name], half, strict=True)]
                high = [min(v + h, 1.0) for v, h in zip(mixing[name], half, strict=True)]
                traces.append(charts.band(layers, low, high, colour))
    traces.append(charts.line("token-wise", token, layers, colour="@c0", markers=True, hover="%{y:.3f}"))
    traces.append(
        charts.line("Frobenius", frobenius, layers, colour="@c1", dash="dash", markers=True, hover="%{y:.3f}")
    )
    layout = charts.axes(
        "layer",
        "mixing coefficient λ",
        yaxis={"rangemode": "tozero"},
        xaxis={"dtick": max(1, len(layers) // 12), "range": [-0.5, len(layers) - 0.5]},
    )
    words = (
        f"Token-wise λ from {number(min(token))} to {number(max(token))} over {count(len(token), 'layer')}; Frobenius "
        f"from {number(min(frobenius), 3)} to {number(max(frobenius), 3)}."
    )
    blocks: list[Block] = [
        Chart(
            "mixing-chart",
            "Mixing by layer",
            words,
            {"": {"traces": traces, "layout": layout}},
            note="λ near 0: the layer passes the residual stream on; near 1: attention replaces it. Bands are 95 % "
            "intervals over documents."
            if documents > 1
            else "λ near 0: the layer passes the residual stream on; near 1: attention replaces it.",
            log_axis="y",
        )
    ]
    if (per_position := arrays.get("mixing_per_position")) is not None:
        view = charts.grid_view(per_position, "position", "layer", value="λ", low=0.0)
        blocks.append(
            Chart(
                "mixing-positions",
                "Mixing by position",
                f"λ of each layer at each position, between {number(np.nanmin(per_position))} and "
                f"{number(np.nanmax(per_position))}.",
                {"": view},
                note="The mean over documents that reach the position.",
                height=max(260, min(520, 120 + 12 * len(token))),
            )
        )
    columns = [
        Column("layer", format="d"),
        Column("λ token-wise"),
        Column("λ Frobenius", format=".4f"),
        Column("ratio", format=".1f", help="Token-wise over Frobenius."),
    ]
    extra = [
        (
            "largest_position_share",
            Column(
                "largest position",
                format=".1%",
                help="Share of the squared norm of the stream at its largest position.",
            ),
        ),
        ("token_std", Column("std over documents", help="Standard deviation of the token-wise λ.")),
    ]
    extra = [(key, column) for key, column in extra if mixing.get(key)]
    first = summary.get("first_position_attention")
    sink = summary.get("learned_sink_mass", summary.get("sink_mass"))  # its name before
    columns += [column for _, column in extra]
    columns += (
        [
            Column(
                "attention to the first",
                format=".1%",
                help="Mean weight that queries of the second half put on the first position.",
            )
        ]
        if first
        else []
    )
    columns += (
        [
            Column(
                "learned sink",
                format=".1%",
                help="Attention that goes to a learned sink logit and so to no position, mean over heads.",
            )
        ]
        if sink and max(sink) > 0
        else []
    )
    rows = []
    for layer in layers:
        ratio = token[layer] / frobenius[layer] if frobenius[layer] else None
        row: list[Any] = [layer, token[layer], frobenius[layer], ratio, *(mixing[key][layer] for key, _ in extra)]
        row += [first[layer]] if first else []
        row += [sink[layer]] if sink and max(sink) > 0 else []
        rows.append(row)
    blocks.append(
        Table(
            "mixing-table",
            "Both norms",
            tuple(columns),
            rows,
            note="They part company where a single position holds most of the residual stream.",
            filterable=len(rows) > 24,
        )
    )
    return Section(
        "mixing",
        "Mixing per layer",
        tuple(blocks),
        "How much attention adds, set against what is already in the residual stream: λ = ‖a‖ / (‖x‖ + ‖a‖), "
        "averaged over positions and documents.",
    )


def _kernels(summary: Mapping[str, Any], arrays: Mapping[str, Any]) -> Section | None:
    kernels = arrays.get("kernels")
    blocks: list[Block] = []
    if kernels is not None:
        kernels = np.asarray(kernels)
        per_head = kernels.ndim == 4
        mean = kernels.mean(1) if per_head else kernels
        layers = [f"layer {t}" for t in range(len(mean))]
        views = {name: charts.kernel_view(kernel) for name, kernel in zip(layers, mean, strict=True)}
        blocks.append(
            Chart(
                "kernels-chart",
                "Attention by target and source",
                "A heat map of the mean attention weight of each source position in each target position, one for "
                "each layer.",
                views,
                note="Mean over documents and heads. The colour is logarithmic; cells of long contexts are averages "
                "over tiles.",
                controls=(Control("layer", tuple(layers)),),
                square=True,
                height=560,
            )
        )
        if per_head:
            heads = [f"head {h}" for h in range(kernels.shape[1])]
            size = 64 if kernels.shape[0] * kernels.shape[1] <= 256 else 40
            blocks.append(
                Chart(
                    "kernels-heads",
                    "The same for one head",
                    "A heat map of one head's mean attention weights.",
                    {
                        f"{layer}|{head}": charts.kernel_view(kernels[t, h], size)
                        for t, layer in enumerate(layers)
                        for h, head in enumerate(heads)
                    },
                    controls=(Control("layer", tuple(layers)), Control("head", tuple(heads))),
                    square=True,
                    height=560,
                )
            )
    if first := summary.get("first_position_attention"):
        # small shares would be no more than a line at the bottom of 0 to 100 %
        fit = {"range": [0, 1]} if max(first) > 0.4 else {"rangemode": "tozero"}
        percentages = ".0%" if max(first) > 0.1 else ".2~%"
        layout = charts.axes("layer", "attention on the first position", yaxis={"tickformat": percentages, **fit})
        blocks.append(
            Chart(
                "first-chart",
                "How much goes to the first position",
                f"From {percent(min(first))} to {percent(max(first))} by layer.",
                {
                    "": {
                        "traces": [
                            charts.bars(
                                "first position", list(range(len(first))), first, colour="@c0", hover="%{y:.1%}"
                            )
                        ],
                        "layout": {**layout, "showlegend": False},
                    }
                },
                note="Mean weight that queries in the second half of the context put on the first position. An even "
                "share would be below "
                f"{percent(2 / len(next(iter(summary['profiles'].values()))), 1)}.",
                height=280,
            )
        )
    if not blocks:
        return None
    if kernels is None:
        blocks.insert(
            0, Notes(("The kernels themselves were too large to keep; the profiles above were made from all of them.",))
        )
    return Section("kernels", "Attention kernels", tuple(blocks), "Where each layer looks, averaged over the data.")
