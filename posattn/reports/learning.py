"""The reports of `posattn train` and `posattn lengths`: findings and pages, from their summaries and arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from posattn.reports import charts, common
from posattn.reports.kit import Block, Chart, Column, Control, Figure, Finding, Notes, Page, Section, Table
from posattn.reports.sure import FEW, unsettled
from posattn.words import count, number, percent, plural, span, tile

Summary = Mapping[str, Any]
CONVERGED = 0.99
LABELS = ("positional", "symbolic", "uniform", "mixed")
_DASHES = {"positional": "solid", "symbolic": "dash", "uniform": "dot", "mixed": "dashdot"}
_COLOURS = {"positional": "@c0", "symbolic": "@c1", "uniform": "@c2", "mixed": "@c7"}


# --------------------------------------------------------------------------------------------------------------- train


def train_findings(summary: Summary) -> tuple[Finding, ...]:
    """What `posattn train` found, most important first."""
    found = [_converged(summary), _pure_heads(summary), _timeline(summary), _relation(summary)]
    return tuple(finding for finding in found if finding is not None)


def _converged(summary: Summary) -> Finding:
    runs, task = summary["runs"], summary["task"]
    done = [name for name, run in runs.items() if run["converged"]]
    told = ", ".join(f"{percent(run['accuracy'], 1)} after {count(run['steps'], 'step')}" for run in runs.values())
    missing = len(runs) - len(done)
    which = "It" if len(runs) == 1 else f"{missing} of {count(len(runs), 'run')}"
    if len(done) == len(runs):
        text = f"The {task} task is learned: accuracy {told}."
        tone = "plain"
    else:
        text = f"{which} {plural(missing, 'has')} not converged: accuracy on the {task} task is {told}."
        tone = "caution"
    held_out = (summary["provenance"].get("training") or {}).get("eval_samples")
    on = count(held_out, "sample") if held_out else "samples"
    sure = f"Converged means an accuracy of at least {CONVERGED:.0%} on {on} that {plural(held_out or 2, 'was')} not "
    sure += "trained on."
    if len(done) < len(runs):
        planned = summary["planned_steps"]
        if any(run["steps"] < planned for run in runs.values()):
            sure += f" The learning rate's schedule is made for {count(planned, 'step')}; what heads do before that is "
            sure += "not final."
    return Finding(text, sure, tone=tone, links=(("accuracy-chart", "Accuracy"),))  # type: ignore[arg-type]


def _pure_heads(summary: Summary) -> Finding:
    parts = []
    for name, counts in summary["counts"].items():
        total = sum(counts.values())
        text = f"{counts['positional']} positional and {counts['symbolic']} symbolic of {count(total, 'head')}"
        parts.append(text if len(summary["counts"]) == 1 else f"{name}: {text}")
    uniform = max(counts["uniform"] for counts in summary["counts"].values())
    sure = f"At the last step measured; pure means within γ = {summary['purity']:g} of a corner of the plane."
    if uniform:
        sure += f" Up to {count(uniform, 'head')} {plural(uniform, 'attends')} too evenly to be told apart."
    return Finding("; ".join(parts) + ".", sure, links=(("scores-chart", "Scores by step"), ("heads-table", "Heads")))


def _timeline(summary: Summary) -> Finding | None:
    rows = summary["emergence"]
    parts = []
    for run in summary["runs"]:
        reached = next(
            (r["first"] for r in rows if r["run"] == run and r["event"] == f"accuracy ≥ {CONVERGED:g}"), None
        )
        pure = sorted(r["stays"] for r in rows if r["run"] == run and r["layer"] is not None and r["stays"] is not None)
        if reached is None or not pure:
            continue
        middle = pure[len(pure) // 2]
        name = "" if len(summary["runs"]) == 1 else f"{run}: "
        parts.append(
            f"{name}accuracy {CONVERGED:.0%} at step {reached}, the median pure head stays pure from step {middle}"
        )
    if not parts:
        return None
    text = "; ".join(parts)
    return Finding(
        text[0].upper() + text[1:] + ".", "Steps are those measured.", links=(("emergence-table", "Timeline"),)
    )


def _relation(summary: Summary) -> Finding | None:
    relation = summary["relation"]["pure_heads"]
    values = [v for v in relation["values"] if v is not None]
    if not values:
        return None
    low, high = relation["interval"]
    mean = sum(values) / len(values)
    if low is not None and high is not None:
        sure = f"Mean over {count(len(values), 'seed')}, 95 % bootstrap interval over them: {span((low, high))}."
    else:
        sure = "One seed: no interval. Add more with --seed."
    return Finding(
        f"From step to step, accuracy and the number of pure heads have a rank correlation of {number(mean)}.",
        sure + " Both change with time, so this is no proof that one brings the other about.",
        links=(("relation-chart", "Accuracy and purity"),),
    )


def train_page(summary: Summary, arrays: Mapping[str, Any]) -> Page:
    """The whole page; `arrays` holds the curves by run: positional, symbolic, entropy [R,S,T,H]."""
    provenance = summary["provenance"]
    sections = [
        _train_curves(summary),
        _train_heads(summary, arrays),
        _train_timeline(summary),
        common.warnings_section(summary),
        common.provenance_section(summary),
    ]
    runs = count(len(summary["runs"]), "seed")
    most = max(run["steps"] for run in summary["runs"].values())
    return Page(
        command="train",
        title=f"How the {summary['task']} task is learned",
        subtitle=f"{common.model_name(provenance)} · {runs} · {count(most, 'step')}",
        findings=train_findings(summary),
        figures=_train_figures(summary),
        sections=tuple(section for section in sections if section is not None),
        footer=common.footer(provenance),
    )


def _train_figures(summary: Summary) -> tuple[Figure, ...]:
    name = next(iter(summary["runs"]))
    run, counts = summary["runs"][name], summary["counts"][name]
    note = "not converged" if not run["converged"] else "converged"
    return (
        Figure("accuracy", tile(run["accuracy"], 1), f"{name}, {note}", "accuracy-chart"),
        Figure("positional heads", str(counts["positional"]), f"of {sum(counts.values())}, {name}", "scores-chart"),
        Figure("symbolic heads", str(counts["symbolic"]), f"of {sum(counts.values())}, {name}", "scores-chart"),
    )


def _train_curves(summary: Summary) -> Section:
    steps, views = summary["steps"], {}
    for name in summary["runs"]:
        traces = [charts.line("all", summary["accuracy"][name], steps, colour="@measured", width=3, hover="%{y:.1%}")]
        for i, hops in enumerate(summary["hops"]):
            curve = [row[i] for row in summary["accuracy_hops"][name]]
            label = count(hops, "hop")
            traces.append(charts.line(label, curve, steps, width=1.6, hover="%{y:.1%}", **charts.style(i)))
        layout = charts.axes("step", "accuracy", yaxis={"tickformat": ".0%", "range": [0, 1.02]})
        views[name] = {"traces": traces, "layout": layout}
    relation = []
    rows = {name: _pure_by_step(summary, name) for name in summary["runs"]}
    for i, (name, pure) in enumerate(rows.items()):
        if pure is not None:
            relation.append(
                charts.line(name, pure, summary["accuracy"][name], markers=True, hover="%{y}", **charts.style(i))
            )
    last = next(iter(summary["runs"]))
    blocks: list[Block] = [
        Chart(
            "accuracy-chart",
            "Accuracy by number of hops",
            f"{last}: accuracy {percent(summary['accuracy'][last][-1], 1)} at the last step measured.",
            views,
            controls=(Control("run", tuple(views), "buttons"),) if len(views) > 1 else (),
        )
    ]
    if relation:
        most = max(max(pure, default=0) for pure in rows.values() if pure is not None)
        layout = charts.axes("accuracy", "pure heads", xaxis={"tickformat": ".4~%"})
        layout["yaxis"] |= {"range": [-0.03 * max(most, 1), 1.05 * max(most, 1)], "dtick": max(1, -(-most // 8))}
        blocks.append(
            Chart(
                "relation-chart",
                "Pure heads against accuracy",
                "One path for each seed, one point for each step measured.",
                {"all": {"traces": relation, "layout": layout}},
            )
        )
    intro = "Accuracy is measured on samples that were not trained on; a hop is one jump from token to token."
    return Section("accuracy", "Accuracy", tuple(blocks), intro)


def _pure_by_step(summary: Summary, name: str) -> list[int] | None:
    """Pure heads at each step, from the timeline's curves where the summary keeps them."""
    return (summary.get("pure_by_step") or {}).get(name)


def _train_heads(summary: Summary, arrays: Mapping[str, Any]) -> Section:
    views: dict[str, Any] = {}
    names, steps = list(summary["runs"]), summary["steps"]
    for figure in ("positional", "symbolic", "entropy"):
        if figure not in arrays:
            continue
        table = np.asarray(arrays[figure], float)
        for r, name in enumerate(names):
            grid = table[r].reshape(len(steps), -1).T
            top = 1.0 if figure != "entropy" else None
            axis = "layer" if table.shape[-1] == 1 else "head, layer by layer"
            view = charts.grid_view(grid, "measurement", axis, value=figure, low=0.0, high=top)
            view["traces"][0]["x"] = list(steps)
            view["layout"]["xaxis"]["title"]["text"] = "step"
            if len(steps) > 1:  # no cell reaches to steps before the first
                view["layout"]["xaxis"]["range"] = [steps[0], steps[-1]]
            views[f"{figure}|{name}"] = view
    figures = tuple(dict.fromkeys(key.split("|")[0] for key in views))
    blocks: list[Block] = []
    if views:
        controls = (Control("figure", figures, "buttons"), Control("run", tuple(names)))
        blocks.append(
            Chart(
                "scores-chart",
                "Scores of every head, step by step",
                "One row for each head, layer by layer from below, one column for each step measured.",
                views,
                controls=controls,
                height=420,
            )
        )
    columns = (
        Column("run", numeric=False),
        Column("layer", format="d"),
        Column("head", format="d"),
        Column("label", numeric=False),
        Column("positional"),
        Column("symbolic"),
        Column("frequency id", format=".1f", help="Of its layer: 1 is the fastest rotary frequency."),
    )
    rows: list[list[Any]] = []
    for name in names:
        for t, row in enumerate(summary["labels"][name]):
            for h, label in enumerate(row):
                positional, symbolic = summary["positional"][name][t][h], summary["symbolic"][name][t][h]
                rows.append([name, t, h, label, positional, symbolic, summary["frequency_id"][name][t]])
    blocks.append(Table("heads-table", "Heads at the end", columns, rows, filterable=len(rows) > 12))
    return Section(
        "heads",
        "Heads",
        tuple(blocks),
        "How far each head goes by position and by symbol, on the same prompts throughout.",
    )


def _train_timeline(summary: Summary) -> Section:
    columns = (
        Column("run", numeric=False),
        Column("event", numeric=False),
        Column("layer", format="d"),
        Column("head", format="d"),
        Column("first", format="d", help="First step measured at which it is so."),
        Column("stays", format="d", help="Step from which it is so to the end; a dash: it is not so at the end."),
    )
    rows = [[r[key] for key in ("run", "event", "layer", "head", "first", "stays")] for r in summary["emergence"]]
    rows = [row for row in rows if row[4] is not None]
    blocks: list[Block] = [Table("emergence-table", "Timeline", columns, rows, filterable=len(rows) > 12)]
    if not rows:
        blocks = [Notes(("Nothing has emerged yet: no accuracy level was reached and no head became pure.",))]
    return Section("timeline", "What emerged when", tuple(blocks))


# ------------------------------------------------------------------------------------------------------------- lengths


def lengths_findings(summary: Summary) -> tuple[Finding, ...]:
    """What `posattn lengths` found, most important first."""
    found = [_length_effect(summary), _breaks(summary), _classes(summary), _retrieval(summary)]
    return tuple(finding for finding in found if finding is not None)


def _value(summary: Summary, value: float) -> str:
    return percent(value, 1) if summary["metric"] == "accuracy" else f"{number(value, 3)} nats a token"


def _span(summary: Summary, ends: Sequence[float]) -> str:
    """An interval in the unit of the value it is of."""
    if summary["metric"] == "accuracy":
        return f"{percent(ends[0], 1)} to {percent(ends[1], 1)}"
    return f"{span(ends, 3)} nats a token"


def _length_effect(summary: Summary) -> Finding:
    lengths, values = summary["lengths"], summary["value"]
    name = "Accuracy" if summary["metric"] == "accuracy" else "Loss"
    over = _over(summary)
    ends = [summary["interval"][0], summary["interval"][-1]]
    known = all(v is not None for end in ends for v in end)
    narrow = (_samples(summary) or FEW) < FEW
    few = f" Over fewer than {FEW} such an interval is too narrow to be trusted." if narrow else ""
    if len(lengths) == 1:
        text = f"{name} is {_value(summary, values[0])} at {count(lengths[0], 'token')}, the only length measured."
        sure = f"95 % interval over {over}: {_span(summary, ends[0])}.{few}" if known else "No interval."
        return Finding(text, sure, links=(("lengths-chart", "By length"),))
    text = f"{name} goes from {_value(summary, values[0])} at {count(lengths[0], 'token')} to "
    text += f"{_value(summary, values[-1])} at {count(lengths[-1], 'token')}."
    sure = "No interval."
    if known:
        sure = f"95 % intervals over {over}: {_span(summary, ends[0])}, and {_span(summary, ends[1])}.{few}"
    what = "samples" if summary["metric"] == "accuracy" else "target tokens"
    return Finding(text, f"{sure} The {what} are the same at every length.", links=(("lengths-chart", "By length"),))


def _over(summary: Summary) -> str:
    """What an interval is over, with its number where the summary keeps it."""
    noun = "sample" if summary["metric"] == "accuracy" else "document"
    samples = _samples(summary)
    return f"{noun}s" if samples is None else count(samples, noun)


def _samples(summary: Summary) -> int | None:
    """How many samples or documents an interval is over, where the summary keeps it."""
    facts = summary["provenance"]
    kept = [summary.get("samples"), *((facts.get(part) or {}).get(key) for part, key in _COUNTS)]
    return next((number for number in kept if isinstance(number, int)), None)


#: where provenance keeps how many samples there were
_COUNTS = (("tokens", "documents"), ("lengths", "samples"))


def _breaks(summary: Summary) -> Finding | None:
    predicted, observed = summary["predicted_break"]["first"], summary["observed_break"]
    lengths = summary["lengths"]
    if len(lengths) == 1:
        return None
    name = "Accuracy" if summary["metric"] == "accuracy" else "Loss"
    if observed is None:
        text = f"{name} does not break between {lengths[0]} and {count(lengths[-1], 'token')}; "
    else:
        text = f"{name} breaks at about {count(round(observed), 'token')}; "
    if predicted is None:
        text += f"no head is sharp enough at {count(lengths[0], 'token')} to predict a length at which it would."
    else:
        text += f"by their sharpness the first of its sharp heads would at about {count(round(predicted), 'token')}, "
        text += f"the median one at about {count(round(summary['predicted_break']['median']), 'token')}."
    how = (
        "half of its lead over chance is lost"
        if summary["metric"] == "accuracy"
        else "a tenth of a nat above its lowest loss"
    )
    return Finding(
        text,
        f"Broken means: {how}. The prediction takes the weight of each head's best key at the shortest length, and "
        "supposes that added keys are like those already there.",
        links=(("lengths-chart", "By length"), ("weights-chart", "Heads by length")),
    )


def _classes(summary: Summary) -> Finding | None:
    ablated = summary["ablated"]
    if not ablated:
        return None
    lengths, broken = summary["lengths"], summary["observed_break"]
    # where the model itself has failed, removing heads can show nothing
    last = max((i for i, n in enumerate(lengths) if broken is None or n <= broken), default=0)
    worse = -1 if summary["metric"] == "accuracy" else 1
    costs = {name: worse * (values[last] - summary["value"][last]) for name, values in ablated.items()}
    name = max(costs, key=costs.__getitem__)
    sizes = {label: count(len(summary["heads"][label]), f"{label} head") for label in ablated}
    at = f"At {count(lengths[last], 'token')}"
    if last < len(lengths) - 1:
        what = "accuracy" if summary["metric"] == "accuracy" else "the loss"
        at += f", the longest measured before {what} breaks,"
    alone = len(ablated) == 1
    change = f"{_value(summary, summary['value'][last])} becomes {_value(summary, ablated[name][last])}"
    low, high = summary["interval"][last]
    inside = low is not None and high is not None and low <= ablated[name][last] <= high
    too_few = unsettled(_samples(summary), "sample" if summary["metric"] == "accuracy" else "document")
    if costs[name] <= 0 and alone:
        text = f"{at} removing the {sizes[name]} does not make it worse: {change}."
    elif costs[name] <= 0:
        text = f"{at} removing none of the classes of heads ({', '.join(sizes.values())}) makes it worse."
    elif inside:
        what = f"removing the {sizes[name]}" if alone else f"the most that removing a class costs ({sizes[name]})"
        text = f"{at} {what} is not told apart from no effect: {change}, inside the 95 % interval of the whole model"
        text += f" ({_span(summary, summary['interval'][last])})."
    else:
        text = f"{at} removing the {sizes[name]} {'makes it worse' if alone else 'costs most'}: {change}."
    sure = f"Over the same {_over(summary)}, without an interval of the difference."
    if too_few:
        sure += f" {too_few} it."
    if not alone:
        sure += " Classes differ in size;"
    return Finding(
        text,
        f"{sure} `posattn heads --ablate` sets random heads of the same layers beside "
        f"{'them' if not alone else 'these'}.",
        links=(("lengths-chart", "By length"),),
        asked=True,
    )


def _retrieval(summary: Summary) -> Finding | None:
    retrieval = summary.get("retrieval")
    if not retrieval:
        return None
    values, lines = retrieval["log_probability"]["mean"], len(retrieval["place"])
    best, worst = int(np.argmax(values)), int(np.argmin(values))
    text = f"Of {count(lines, 'line')} the value of line {best + 1} is retrieved best (log-probability "
    text += f"{number(values[best])}), that of line {worst + 1} worst ({number(values[worst])})."
    if lines == 1:
        text = f"The value of the only line has a log-probability of {number(values[best])}."
    choice = sum(retrieval["choice"]["mean"]) / lines
    sure = f"{count(retrieval['prompts'], 'prompt')}; the right value is preferred to the other lines' in "
    sure += f"{percent(choice)} of cases (chance {percent(1 / lines)})."
    agreement = retrieval["agreement"].get("log_probability") if retrieval["agreement"] else None
    if agreement is not None:
        sure += (
            f" Rank correlation with the predicted influence profile: {number(agreement)}, over {count(lines, 'line')}."
        )
    if choice < 1.5 / lines:
        sure += " The model hardly retrieves at all, so the order of the lines says little."
    return Finding(
        text,
        sure,
        tone="caution" if choice < 1.5 / lines else "plain",
        links=(("retrieval-chart", "Retrieval"),),
        asked=True,
    )


def lengths_page(summary: Summary, arrays: Mapping[str, Any]) -> Page:
    """The whole page."""
    provenance = summary["provenance"]
    sections = [
        _length_section(summary),
        _length_heads(summary),
        _retrieval_section(summary),
        common.warnings_section(summary),
        common.provenance_section(summary),
    ]
    first, last = summary["lengths"][0], summary["lengths"][-1]
    key = "accuracy" if summary["metric"] == "accuracy" else "loss"
    figures = (
        Figure(f"{key} at {first}", _value(summary, summary["value"][0]), "shortest length", "lengths-chart"),
        Figure(f"{key} at {last}", _value(summary, summary["value"][-1]), "longest length", "lengths-chart"),
    )
    return Page(
        command="lengths",
        title=f"{common.model_name(provenance)} on longer inputs",
        subtitle=f"{key} from {first} to {count(last, 'token')}"
        if first != last
        else f"{key} at {count(last, 'token')}",
        findings=lengths_findings(summary),
        figures=figures,
        sections=tuple(section for section in sections if section is not None),
        footer=common.footer(provenance),
    )


def _length_section(summary: Summary) -> Section:
    lengths = summary["lengths"]
    traces = []
    low, high = zip(*summary["interval"], strict=True)
    if all(v is not None for v in (*low, *high)):
        traces.append(charts.band(lengths, low, high, "@measured"))
    traces.append(charts.line("whole model", summary["value"], lengths, colour="@measured", width=3, markers=True))
    for i, hops in enumerate(summary["hops"]):
        curve = [row[i] for row in summary["value_hops"]]
        traces.append(charts.line(count(hops, "hop"), curve, lengths, width=1.2, **charts.style(i + 3)))
    for name, values in summary["ablated"].items():
        colour = _COLOURS.get(name, "@c4")
        traces.append(charts.line(f"without {name}", values, lengths, colour=colour, dash="dash", markers=True))
    key = "accuracy" if summary["metric"] == "accuracy" else "loss (nats a token)"
    percentages = {"tickformat": ".0%", "range": [-0.02, 1.05]} if summary["metric"] == "accuracy" else {}
    chart = Chart(
        "lengths-chart",
        f"{key[0].upper()}{key[1:]} by length",
        f"From {_value(summary, summary['value'][0])} to {_value(summary, summary['value'][-1])}.",
        {"all": {"traces": traces, "layout": charts.axes("length in tokens", key, yaxis=percentages)}},
        log_axis="x",
        log_first=True,
        height=420,
    )
    columns = [Column("length", format="d"), Column(summary["metric"]), Column("low"), Column("high")]
    columns += [Column(f"without {name}") for name in summary["ablated"]]
    rows = [
        [n, summary["value"][i], *summary["interval"][i], *(v[i] for v in summary["ablated"].values())]
        for i, n in enumerate(lengths)
    ]
    return Section("lengths", "By length", (chart, Table("lengths-table", "Figures", tuple(columns), rows)))


def _length_heads(summary: Summary) -> Section | None:
    weight = np.asarray([[[math.nan if v is None else v for v in row] for row in t] for t in summary["weight"]], float)
    if not np.isfinite(weight).any():
        return None
    lengths, views = summary["lengths"], {}
    titles = {
        "weight": "weight of the best key",
        "discrepancy": "largest − second logit",
        "positional": "positional score",
        "symbolic": "symbolic score",
    }
    for key, title in titles.items():
        traces = [
            charts.line(
                f"L{t}H{h}",
                [table[t][h] for table in summary[key]],
                lengths,
                colour=_COLOURS.get(summary["labels"][t][h] if summary["labels"] else "mixed", "@c7"),
                width=1.4,
                dash=_DASHES.get(summary["labels"][t][h] if summary["labels"] else "mixed", "solid"),
                hover="%{y:.3f}",
                showlegend=False,
            )
            for t in range(weight.shape[1])
            for h in range(weight.shape[2])
        ]
        # the legend names labels, the hover names heads
        found = {label for row in summary["labels"] or () for label in row}
        traces += [
            charts.line(label, [None], lengths[:1], colour=_COLOURS[label], dash=_DASHES[label])
            for label in LABELS
            if label in found
        ]
        views[title] = {"traces": traces, "layout": charts.axes("length in tokens", title)}
    chart = Chart(
        "weights-chart",
        "Heads by length",
        "One curve for each head, coloured by its label at the shortest length.",
        views,
        note="A curve for each head, by its label at the shortest length. Last query only. With n keys a head needs "
        "a difference of ln(n−1) between its two largest logits to be sure of half of its attention.",
        controls=(Control("figure", tuple(titles.values())),),
        log_axis="x",
        log_first=True,
    )
    return Section("heads", "Heads", (chart,))


def _retrieval_section(summary: Summary) -> Section | None:
    retrieval = summary.get("retrieval")
    if not retrieval:
        return None
    place, views = retrieval["place"], {}
    for key, title in (("log_probability", "log-probability (nats)"), ("choice", "choice"), ("accuracy", "accuracy")):
        traces = []
        low, high = zip(*retrieval[key]["interval"], strict=True)
        if all(v is not None for v in (*low, *high)):
            traces.append(charts.band(place, low, high, "@measured"))
        traces.append(charts.line("gold value", retrieval[key]["mean"], place, colour="@measured", markers=True))
        if retrieval["predicted"]:
            curve = charts.line(
                "predicted share", retrieval["predicted"], place, colour="@c6", dash="dash", markers=True
            )
            traces.append(curve | {"yaxis": "y2"})
        layout = charts.axes("place of the gold line (0 first, 1 last)", title)
        layout["yaxis2"] = {"overlaying": "y", "side": "right", "title": {"text": "predicted share"}, "showgrid": False}
        views[title] = {"traces": traces, "layout": layout}
    columns = [
        Column("line", format="d"),
        Column("place"),
        Column("log-probability"),
        Column("choice"),
        Column("accuracy"),
    ]
    columns.append(Column("predicted share", help="Of the energy rollout's profile on the same prompts."))
    predicted = retrieval["predicted"] or [None] * len(place)
    rows = [
        [i + 1, p, *(retrieval[key]["mean"][i] for key in ("log_probability", "choice", "accuracy")), predicted[i]]
        for i, p in enumerate(place)
    ]
    blocks: tuple[Block, ...] = (
        Chart(
            "retrieval-chart",
            "Retrieval by place of the gold line",
            "The same prompts, asked about each of their lines in turn.",
            views,
            controls=(Control("figure", tuple(views), "buttons"),),
        ),
        Table("retrieval-table", "By line", tuple(columns), rows),
    )
    return Section(
        "retrieval",
        "Key–value retrieval",
        blocks,
        "Lines of a key and a value, then one of the keys: how probable is its value, by where its line stands?",
    )


# ------------------------------------------------------------------------------------------------------------- figures


def draw_accuracy(summary: Summary, arrays: Mapping[str, Any], ax: Any) -> Any:
    """Accuracy over steps, one curve a seed."""
    from posattn import plotting

    for name in summary["runs"]:
        plotting.curve(ax, summary["accuracy"][name], summary["steps"], label=name)
    return plotting.finish(ax, x="step", y="accuracy", legend=True, ylim=(0, 1.02))


def draw_scores(summary: Summary, arrays: Mapping[str, Any], ax: Any) -> Any:
    """Positional minus symbolic score of every head over steps, first seed."""
    from posattn import plotting

    steps = summary["steps"]
    difference = (arrays["positional"] - arrays["symbolic"])[0].reshape(len(steps), -1).T
    plotting.heatmap(
        ax,
        difference,
        x="measurement",
        y="head",
        value="positional − symbolic",
        limits=(-1, 1),
        centred=True,
        origin="lower",
    )
    ticks = sorted({0, len(steps) // 2, len(steps) - 1})
    ax.set_xticks(ticks, [str(steps[i]) for i in ticks])
    ax.set_xlabel("step")
    return ax


def draw_lengths(summary: Summary, arrays: Mapping[str, Any], ax: Any) -> Any:
    """Value by length, with each class of heads removed."""
    from posattn import plotting

    lengths = summary["lengths"]
    plotting.curve(ax, summary["value"], lengths, label="whole model", marker="o", color="black")
    for i, (name, values) in enumerate(summary["ablated"].items()):
        plotting.curve(ax, values, lengths, label=f"without {name}", marker="o", index=i)
    ax.set_xscale("log")
    key = "accuracy" if summary["metric"] == "accuracy" else "loss (nats a token)"
    return plotting.finish(ax, x="length", y=key, legend=True)


def pure_by_step(labels: Sequence[Any]) -> list[int]:
    """Pure heads (positional or symbolic) at each step, from labels [S][T][H]."""
    return [sum(label in LABELS[:2] for row in step for label in row) for step in labels]
