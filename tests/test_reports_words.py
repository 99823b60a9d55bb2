"""Sentences of reports: one grammar for one and for many, no number rounded to nothing, equal curves counted once."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posattn import words
from posattn.errors import InputError
from posattn.reports import charts, curves, findings, kit
from posattn.reports.pages import PAGES
from tests.report_samples import (
    compare_summary,
    curve,
    distance,
    heads_arrays,
    heads_summary,
    profile_arrays,
    profile_summary,
    shape_of,
    simulate_summary,
)

# ---- words -------------------------------------------------------------------------------------------------------


def test_nouns_and_verbs_follow_their_number() -> None:
    assert [words.count(n, "head") for n in (0, 1, 2)] == ["0 heads", "1 head", "2 heads"]
    assert words.count(2, "query") == "2 queries"
    assert words.count(3, "measured attention kernel") == "3 measured attention kernels"
    assert (words.plural(1, "is"), words.plural(2, "is"), words.plural(0, "has")) == ("is", "are", "have")


@given(st.floats(-1e3, 1e3), st.integers(0, 4))
def test_no_number_is_rounded_to_nothing(value: float, digits: int) -> None:
    shown = words.number(value, digits)
    back = float(shown.replace("−", "-"))
    assert "-" not in shown
    assert (back == 0) == (abs(value) < 1e-6)
    assert back == pytest.approx(value, abs=0.5 * 10**-digits + 1e-6)
    assert not re.fullmatch(r"−0(\.0*)?", shown)


@given(st.floats(0, 1), st.integers(0, 2))
def test_no_share_is_rounded_to_nothing_or_to_all(share: float, digits: int) -> None:
    shown = words.percent(share, digits)
    figure = float(re.sub(r"[^0-9.]", "", shown))
    if shown.startswith("less than"):
        assert 0 < share < figure / 100
    elif shown.startswith("more than"):
        assert figure / 100 < share < 1
    else:
        assert figure / 100 == pytest.approx(share, abs=0.5 * 10 ** -(digits + 2) + 1e-12)
        assert (figure == 0) == (share == 0)
        assert (figure == 100) == (share == 1)
    assert words.tile(share, digits) == shown.replace("less than ", "<").replace("more than ", ">")


def test_ratios_are_said_in_words_where_digits_would_say_nothing() -> None:
    assert words.times(0.001) == "less than 0.01 times"
    assert words.times(0) == "0 times"
    assert words.times(1.234) == "1.23 times"
    assert words.times(float("inf")) == "unboundedly more than"


# ---- every sentence, with one of everything and with next to nothing -----------------------------------------------


def lengths_summary(many: bool = False, metric: str = "accuracy") -> dict[str, Any]:
    lengths = [6, 13, 27] if many else [6]
    k = len(lengths)
    heads = [(0, 0), (0, 1)] if many else [(0, 0)]
    row = [0.5] * len(heads)
    return {
        "schema": 1,
        "command": "lengths",
        "provenance": {"model": "made-up", "samples": 12 if many else 1, "versions": {}},
        "metric": metric,
        "lengths": lengths,
        "value": [0.9, 0.8, 0.001][:k],
        "interval": [[0.8, 0.95]] * k,
        "hops": [1],
        "value_hops": [[0.5]] * k,
        "chance": 0.1,
        "ablated": {"symbolic": [0.9, 0.7, 0.0001][:k]},
        "heads": {"symbolic": heads},
        "labels": [["symbolic"] * len(heads)],
        "predicted_break": {"first": None, "median": None},
        "observed_break": None,
        **{name: [[row]] * k for name in ("positional", "symbolic", "discrepancy", "weight", "predicted")},
        "warnings": [],
        "retrieval": {
            "place": [0.0, 1.0] if many else [0.0],
            "tokens": [5] * (2 if many else 1),
            "prompts": 4 if many else 1,
            **{
                name: {"mean": [-2.0, -3.0][: 2 if many else 1], "interval": [[-4.0, -1.0]] * (2 if many else 1)}
                for name in ("accuracy", "choice", "log_probability")
            },
            "predicted": [0.4, 0.6][: 2 if many else 1],
            "agreement": {},
        },
    }


def train_summary(many: bool = False) -> dict[str, Any]:
    runs = ["seed-0", "seed-1"] if many else ["seed-0"]
    steps = [0, 4] if many else [1]
    run = {"steps": 4 if many else 1, "converged": False, "stopped": "", "accuracy": 0.0004, "accuracy_by_hops": {}}
    each: dict[str, Any] = {
        "runs": dict(run),
        "accuracy": [0.0004] * len(steps),
        "accuracy_hops": [[0.1]] * len(steps),
        "loss": [1.0] * len(steps),
        "positional": [[0.5]],
        "symbolic": [[0.5]],
        "frequency_id": [1.0],
        "labels": [["uniform"]],
        "counts": {"positional": 0, "symbolic": 0, "uniform": 1, "mixed": 0},
        "pure_by_step": [0] * len(steps),
    }
    return {
        "schema": 1,
        "command": "train",
        "provenance": {"model": "made-up", "versions": {}, "training": {"eval_samples": 1}},
        "task": "number",
        "purity": 0.2,
        "steps": steps,
        "hops": [1],
        "planned_steps": 6750,
        "stopped": [],
        **{name: {one: copy.deepcopy(value) for one in runs} for name, value in each.items()},
        "emergence": [],
        "relation": {"pure_heads": {"values": [-0.3] * len(runs), "interval": [-0.4, -0.2] if many else [None, None]}},
        "warnings": [],
    }


def simulated(length: int = 1, layers: int = 1) -> dict[str, Any]:
    summary = simulate_summary()
    summary["lengths"] = [length]
    values = (
        {"residual": [1.0], "attention_only": [1.0], "half": [1.0]}
        if length == 1
        else {name: curve(kind, length).tolist() for name, kind in (("residual", "sink"), ("half", "sink"))}
    )
    summary["profiles"] = {
        str(length): {name: {"position": list(range(length)), "value": value} for name, value in values.items()}
    }
    figures = {"primacy": 0.125, "recency": 0.125, "middle": 0.5, "mean_position": 0.0, "trough": 0.0, "u_index": 0.0}
    shapes = {name: figures if length == 1 else shape_of(np.array(value)) for name, value in values.items()}
    summary["shape"] = {str(length): shapes}
    forces = summary["forces"].pop("64")
    summary["forces"] = {str(length): {**forces, "shares": [[-0.003, 0.0, 0.0], [1e-4, 0, 0], [0, 0, 0], [0, 0, 0]]}}
    summary["mixing"] = [0.5] * layers
    summary["depth"] = {
        **summary["depth"],
        "length": length,
        **{name: [0.0004] * layers for name in ("first_mass", "off_first", "bound", "last_diagonal", "mixing_sum")},
    }
    summary["monotonicity"] = {"length": length, "worst": 1e-4}
    summary["provenance"]["architecture"] = {"name": "made-up", "layers": layers, "heads": 1, "position": "none"}
    return summary


def single_head() -> dict[str, Any]:
    summary = heads_summary(3, 3)
    for name in ("labels", "nearest"):
        summary[name] = [["uniform"]]
    for name in ("positional", "symbolic", "entropy", "gamma"):
        summary[name] = [[0.004]]
    for name in ("positional_interval", "symbolic_interval"):
        summary[name] = [[[None, None]]]
    summary["certain"] = [[None]]
    summary["roles"] = [[["induction"]]]
    summary["evidence"]["induction_repeat"] = {"measured": [[0.004]], "chance": [[0.0001]], "queries": 1}
    summary["rotary"] = {name: [[1.0]] for name in summary["rotary"]}
    summary["counts"] = {"positional": 0, "symbolic": 0, "uniform": 1, "mixed": 0}
    summary["role_counts"] = {"induction": 1}
    summary |= {"documents": 1, "queries": 1}
    summary["ablation"] = {
        "classes": ["uniform"],
        "lengths": [1],
        "mode": "position_mean",
        "increase": [[0.0]],
        "increase_interval": [[[None, None]]],
        "control_increase": [[0.0]],
        "control_increase_interval": [[[None, None]]],
        "excess": [[0.0001]],
        "excess_interval": [[[0.0001, 0.0004]]],
        "heads": {"uniform": 1},
        "overlap": {"uniform": 1.0},
        "documents": 1,
        "controls": 1,
    }
    return summary


def single_profile() -> dict[str, Any]:
    summary = profile_summary("sink", layers=1, n=1000, massive=True, sink=True)
    summary["mixing"] = {**summary["mixing"], "documents": 1, "token": [0.0004], "frobenius": [0.00001]}
    summary["influence_facts"]["documents"] = 1
    for name in ("primacy", "recency"):
        summary["shape"]["influence"]["without_first"][name] = 1e-5
    summary["profiles"]["attention_only"] = [0.9999, *[0.0001 / 999] * 999]
    summary["first_position_attention"] = [0.9999]
    summary["provenance"]["tokens"]["documents"] = 1
    for figures in summary["comparison"].values():
        figures["wasserstein"] = 0.0001
    summary["comparison"]["uniform"]["wasserstein"] = 0.0003
    return summary


def twice(summary: dict[str, Any]) -> dict[str, Any]:
    return {**summary, "differences": [{**row, "low": 1e-4, "high": 2e-4} for row in summary["differences"]]}


SAMPLES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "profile-1": (single_profile(), {}),
    "profile": (profile_summary("u", massive=True, sink=True), profile_arrays()),
    "profile-none": (profile_summary(None), {}),
    "heads-1": (single_head(), {}),
    "heads": (heads_summary(), heads_arrays()),
    "simulate-1": (simulated(), {}),
    "simulate-sink": (simulated(512, 4), {}),
    "simulate": (simulate_summary(), {}),
    "train-1": (train_summary(), {}),
    "train": (train_summary(True), {}),
    "lengths-1": (lengths_summary(), {}),
    "lengths": (lengths_summary(True), {}),
    "lengths-loss": (lengths_summary(True, "loss"), {}),
    "compare": (twice(compare_summary()), {}),
}

#: what no sentence may say
WRONG = {
    "one with a plural": r"(?<![\d.])\b1 (?:[a-z-]+ ){0,2}(?:heads|kernels|layers|sets|tokens|documents"
    r"|positions|queries|classes|steps|samples|seeds|lines|prompts|hops|runs|models|processes)\b",
    "many with a singular": r"\b(?:0|[2-9]|[1-9]\d+) (?:head|layer|document|token|position|sample|seed|run|step)\b",
    "a verb of the wrong number": r"\b(?:There are|are) 1\b|\b1 \w+ are\b|\b1 \w+ have\b",
    "nothing that is something": r"(?<![\d.−])[−-]?0\.0+(?!\d)(?! to)| by 0%|\^-|\^−?0(?![.\d])|−0(?:\.0*)?(?![\d.])",
    "word order": r"breaks not|holds not|described by flags",
    "an empty place": r"\bNone\b|\bnan\b|\binf\b| \? ",
}


def sentences(page: kit.Page) -> Iterator[str]:
    yield page.title
    yield page.subtitle
    for finding in page.findings:
        yield finding.text
        yield finding.sure
    for figure in page.figures:
        yield f"{figure.value} {figure.note}"
    for section in page.sections:
        if section.id == "provenance":
            continue
        yield section.title
        yield section.intro
        for block in section.blocks:
            yield from (str(getattr(block, name, "")) for name in ("title", "summary", "note"))
            yield from getattr(block, "paragraphs", ())
            for control in getattr(block, "controls", ()):
                yield from control.options


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("fault", WRONG)
def test_no_sentence_of_any_report_has_bad_grammar_or_a_vanished_number(sample: str, fault: str) -> None:
    summary, arrays = SAMPLES[sample]
    page = PAGES[summary["command"]](summary, arrays)
    assert page.findings
    wrong = [(text, found[0]) for text in sentences(page) if (found := re.search(WRONG[fault], text))]
    assert wrong == []
    kit.render(page)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("one with a plural", "Of 1 heads, 0 are positional"),
        ("one with a plural", "with 1 queries"),
        ("one with a plural", "the 1 measured attention kernels"),
        ("many with a singular", "2 head"),
        ("a verb of the wrong number", "There are 1 induction head"),
        ("nothing that is something", "has 0.00 times the influence"),
        ("nothing that is something", "further back, by up to by 0% of"),
        ("nothing that is something", "λ ≈ 0.5·t^-0"),
        ("word order", "It breaks not up to 68 tokens"),
    ],
)
def test_the_faults_looked_for_are_found(fault: str, text: str) -> None:
    assert re.search(WRONG[fault], text)


# ---- equal curves ------------------------------------------------------------------------------------------------


def without_sink(nearest: str = "residual") -> dict[str, Any]:
    """A run in which no sink was found: the rules about sinks change nothing."""
    summary = profile_summary("u")
    profiles = {name: np.array(values) for name, values in summary["profiles"].items()}
    profiles["projection"] = curve("recency", 64) ** 2 / (curve("recency", 64) ** 2).sum()
    for name in ("residual+no-op", "residual+renormalise"):
        profiles[name] = profiles["residual"] * (1 + 1e-12)
    profiles["projection+no-op"] = profiles["projection"]
    profiles["energy"] = curve("u", 64) if nearest == "energy" else curve("sink", 64)
    measured = np.array(summary["influence"])
    profiles[nearest] = 0.9 * measured + 0.1 * profiles[nearest]
    if nearest == "residual":
        for name in ("residual+no-op", "residual+renormalise"):
            profiles[name] = profiles["residual"]
    summary["profiles"] = {name: values.tolist() for name, values in profiles.items()}
    summary["comparison"] = {
        name: distance(values, measured) for name, values in {**profiles, "uniform": curve("flat", 64)}.items()
    }
    summary["shape"] = {name: shape_of(values) for name, values in {"influence": measured, **profiles}.items()}
    summary["per_document"] = {name: {"spearman": 0.5, "interval": [0.4, 0.6], "documents": 16} for name in profiles}
    return summary


def test_equal_curves_count_once_everywhere() -> None:
    summary = without_sink()
    assert len(summary["profiles"]) == 8
    finding = findings.closest_prediction(summary)
    assert finding is not None
    assert finding.text.startswith("Of 5 different predicted profiles, `residual` (")
    assert "+no-op" not in finding.text
    assert "+renormalise" not in finding.text
    assert "`residual+no-op` as `residual`" in finding.sure
    assert "`projection+no-op` as `projection`" in finding.sure
    page = PAGES["profile"](summary, {})
    chart = next(block for section in page.sections for block in section.blocks if block.id == "profiles-chart")  # type: ignore[union-attr]
    drawn = [trace["name"] for trace in chart.views["all positions"]["traces"] if trace.get("meta") != "band"]  # type: ignore[union-attr]
    assert not [name for name in drawn if "+" in name]
    assert len(drawn) == 7  # the measured influence, five predictions and the even curve
    for table in ("shapes-table", "documents-table"):
        rows = next(b for s in page.sections for b in s.blocks if b.id == table).rows  # type: ignore[union-attr]
        assert not [row for row in rows if "+" in str(row[0])]
    # the table of distances still lists every variant, and says which repeats which
    rows = next(b for s in page.sections for b in s.blocks if b.id == "distances-table").rows  # type: ignore[union-attr]
    told = [row[1] for row in rows if str(row[0]).startswith("residual+")]
    assert told == ["the same curve as residual here"] * 2


def test_a_comparison_offers_a_curve_that_repeats_another_in_every_run_once() -> None:
    same = without_sink()
    differs = {**same, "profiles": {**same["profiles"], "residual+no-op": curve("flat", 64).tolist()}}

    def offered(*runs: dict[str, Any]) -> list[str]:
        summary = {**compare_summary(), "runs": [{"folder": "x", **run} for run in runs]}
        page = PAGES["compare"](summary, {})
        return list(next(b for s in page.sections for b in s.blocks if b.id == "curves-chart").views)  # type: ignore[union-attr]

    assert "residual+no-op" not in offered(same, same)
    assert "residual+no-op" in offered(same, differs)


def test_curves_that_differ_are_not_taken_for_equal() -> None:
    a, b = curve("u"), curve("u").copy()
    b[3] += 1e-5
    assert curves.same_curves({"a": a.tolist(), "b": b.tolist()}) == {"a": [], "b": []}
    assert curves.same_curves({"x+no-op": a.tolist(), "x": a.tolist()}) == {"x": ["x+no-op"]}
    assert curves.same_curves({"a": [1.0], "b": [0.5, 0.5]}) == {"a": [], "b": []}


@pytest.mark.parametrize("nearest", ["residual", "energy", "projection", "half", "attention_only"])
def test_the_nearest_curve_is_always_drawn_prominently(nearest: str) -> None:
    summary = without_sink(nearest)
    assert curves.nearest(summary) == nearest
    shown = curves.prominent(summary)
    assert shown[0] == nearest
    assert {"residual", "energy"} <= set(shown)
    page = PAGES["profile"](summary, {})
    chart = next(block for section in page.sections for block in section.blocks if block.id == "profiles-chart")  # type: ignore[union-attr]
    for view in chart.views.values():  # type: ignore[union-attr]
        traces = {trace["name"].removesuffix(" (nearest)"): trace for trace in view["traces"] if trace.get("name")}
        visible = {name for name, trace in traces.items() if trace.get("visible", True) is True}
        assert visible == {"measured influence", "even curve", *shown}
        widths = {name: traces[name]["line"]["width"] for name in visible}
        assert sorted(widths, key=lambda name: -widths[name])[:2] == ["measured influence", nearest]
        looks = [(trace["line"]["color"], trace["line"]["dash"]) for trace in traces.values()]
        assert len(set(looks)) == len(looks)
        colours = [traces[name]["line"]["color"] for name in visible]
        assert len(set(colours)) == len(colours)


def test_the_u_index_of_report_readme_and_finding_is_one_and_says_which() -> None:
    from pathlib import Path

    summary = profile_summary("u")
    inner, whole = summary["shape"]["influence"]["without_first"]["u_index"], summary["shape"]["influence"]["u_index"]
    assert abs(inner - whole) > 0.01
    tile = next(figure for figure in PAGES["profile"](summary, {}).figures if figure.label.startswith("U index"))
    assert tile.value == words.number(inner, sign=True)
    assert "first position left out" in tile.note
    readme = (Path(__file__).parent.parent / "README.md").read_text("utf-8")
    assert "describe_profile(influence).without_first.u_index" in readme
    assert "leave out the first position" in readme


@pytest.mark.parametrize("nearest", ["residual", "energy", "projection"])
def test_the_static_figure_shows_the_few_that_matter_each_with_its_own_look(nearest: str) -> None:
    from matplotlib.figure import Figure

    from posattn.reports.figures import MOST_CURVES, draw_profiles

    def looks(chosen: list[str] | None = None) -> dict[str, tuple[object, object]]:
        ax = draw_profiles(summary, {}, Figure().subplots(), chosen)
        lines = {line.get_label(): (line.get_color(), line._dash_pattern) for line in ax.lines}
        assert len({str(look) for look in lines.values()}) == len(lines)
        return lines

    summary = without_sink(nearest)
    drawn = looks()
    assert set(drawn) == {"measured influence", f"{nearest} (nearest)", *({"residual", "energy"} - {nearest})}
    assert len({colour for colour, _ in drawn.values()}) == len(drawn)
    asked = ["half", "attention_only", "residual", "energy", "projection"]
    assert len(looks(asked)) == 1 + len(asked)
    with pytest.raises(InputError, match="no prediction 'magic'"):
        draw_profiles(summary, {}, Figure().subplots(), ["magic"])
    many = {**summary, "profiles": {f"p{i}": summary["profiles"]["half"] for i in range(MOST_CURVES + 1)}}
    with pytest.raises(InputError, match="cannot be told apart"):
        draw_profiles(many, {}, Figure().subplots(), list(many["profiles"]))


def test_matplotlib_curves_do_not_repeat_a_look() -> None:
    from posattn import plotting

    assert len({(plotting.colour(i), str(plotting.dash(i))) for i in range(49)}) == 49


def test_many_curves_of_one_chart_all_look_different() -> None:
    looks = [tuple(charts.style(index).values()) for index in range(48)]
    assert len(set(looks)) == 48


# ---- what a figure does not settle -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["recency", "primacy", "flat"])
def test_a_u_shape_is_denied_only_where_the_interval_excludes_it(kind: str) -> None:
    def found(ends: list[float]) -> kit.Finding:
        finding = findings.influence_shape(profile_summary(kind, intervals={"influence": {"u_index": ends}}))
        assert finding is not None
        return finding

    settled, open_ = found([-0.5, -0.1]), found([-0.5, 1.3])
    assert "no U shape" in settled.text
    assert "settle" not in settled.text
    assert settled.tone == "plain"
    assert "no U shape" not in open_.text
    assert "these documents do not settle" in open_.text
    assert open_.tone == "caution"


def test_the_tile_of_the_u_index_says_how_sure_it_is() -> None:
    summary = profile_summary("u", intervals={"influence": {"u_index": [-0.93, 1.81]}})
    tile = next(figure for figure in PAGES["profile"](summary, {}).figures if figure.label.startswith("U index"))
    assert tile.note.startswith("95 % interval −0.93 to 1.81; ")


def test_the_reach_of_the_architecture_follows_the_interval_beside_an_even_curve() -> None:
    summary = profile_summary("u")
    even = summary["comparison"]["uniform"]["wasserstein"]
    for name, away in (("positional", even + 0.01), ("positional_content", even + 0.02)):
        summary["comparison"][name] = {**summary["comparison"]["half"], "wasserstein": away}
    finding = findings.theory_reach(summary)
    assert finding is not None
    assert "does not explain" in finding.text
    summary["intervals"] = {"over_uniform": {"positional": [-0.1, 0.2]}}
    finding = findings.theory_reach(summary)
    assert finding is not None
    assert "does not explain" not in finding.text
    assert "these documents do not tell `positional` from it" in finding.text


def ablated(full: bool = True, partial: bool = False, source: str = "a.txt") -> dict[str, Any]:
    """Heads with a class that is all of its layers' heads, and one that is not."""
    names = ["symbolic"] * full + ["positional"] * partial
    rows = len(names)
    summary = heads_summary()
    summary["provenance"] = {**summary["provenance"], "tokens": {"source": source, "documents": 8, "length": 16}}
    change = {"symbolic": -0.9, "positional": 0.5}
    summary["ablation"] = {
        "classes": names,
        "lengths": [4, 16],
        "mode": "zero",
        "increase": [[change[name]] * 2 for name in names],
        "increase_interval": [[[change[name] - 0.1, change[name] + 0.1]] * 2 for name in names],
        "control_increase": [[-0.9 if name == "symbolic" else 0.1] * 2 for name in names],
        "control_increase_interval": [[[-1.0, 0.2]] * 2] * rows,
        "excess": [[0.0 if name == "symbolic" else 0.4] * 2 for name in names],
        "excess_interval": [[[0.0, 0.0] if name == "symbolic" else [0.3, 0.5]] * 2 for name in names],
        "heads": {"symbolic": 12, "positional": 2},
        "overlap": {"symbolic": 12.0, "positional": 0.4},
        "documents": 8,
        "controls": 5,
    }
    return summary


def test_a_class_that_is_all_of_its_layers_is_not_compared_with_itself() -> None:
    finding = findings.removal_matters(ablated())
    assert finding is not None
    assert "random heads do" not in finding.text
    assert finding.text == (
        "At 16 tokens the loss changes with this class of heads removed: symbolic (−0.900 nats, −1.000 to −0.800)."
    )
    assert "No random heads stand beside symbolic" in finding.sure
    assert finding.tone == "caution"
    finding = findings.removal_matters(ablated(partial=True))
    assert finding is not None
    assert "more than random heads do: positional (+0.400 nats, 0.300 to 0.500)" in finding.text
    finding = findings.removal_matters(ablated(full=False, partial=True))
    assert finding is not None
    assert finding.tone == "plain"
    assert "stand beside" not in finding.sure

    blocks = {b.id: b for s in PAGES["heads"](ablated(partial=True), {}).sections for b in s.blocks if hasattr(b, "id")}
    chart, table = blocks["ablation-chart"], blocks["ablation-table"]
    # the length that the finding speaks of is drawn first
    assert list(chart.views) == ["16 tokens", "4 tokens"]  # type: ignore[union-attr]
    removed, random = chart.views["16 tokens"]["traces"]  # type: ignore[union-attr]
    assert removed["x"] == ["symbolic (12)", "positional (2)"]
    assert random["x"] == ["positional (2)"]
    assert [row[4:] for row in table.rows if row[0].startswith("symbolic")] == [[None] * 3] * 2  # type: ignore[union-attr]


def test_the_loss_within_samples_of_a_task_is_not_taken_for_the_task() -> None:
    text = findings.removal_matters(ablated(full=False, partial=True, source="samples of task 'number'"))
    assert text is not None
    assert text.tone == "caution"
    assert "the number task, which a model of that task was not trained to predict" in text.sure
    text = findings.removal_matters(ablated(full=False, partial=True))
    assert text is not None
    assert "trained to predict" not in text.sure


def test_bars_of_intervals_stand_off_every_bar() -> None:
    page = PAGES["heads"](ablated(partial=True), {})
    chart = next(b for s in page.sections for b in s.blocks if b.id == "ablation-chart")  # type: ignore[union-attr]
    colours = {t["error_y"]["color"] for view in chart.views.values() for t in view["traces"]}  # type: ignore[union-attr]
    assert colours == {"@ink"}


def test_removed_heads_are_judged_where_the_model_still_works() -> None:
    summary = lengths_summary(True)
    summary |= {"value": [1.0, 0.9, 0.01], "ablated": {"symbolic": [0.4, 0.5, 0.0]}, "observed_break": 20.0}
    found = findings.FINDINGS["lengths"](summary)
    text = next(f.text for f in found if "removing" in f.text)
    assert text.startswith("At 13 tokens, the longest measured before accuracy breaks, removing the 2 symbolic heads")
    assert text.endswith("90.0% becomes 50.0%.")
    assert "80.0% to 95.0%" in found[0].sure
    text = next(
        f.text for f in findings.FINDINGS["lengths"]({**summary, "observed_break": None}) if "removing" in f.text
    )
    assert text.startswith("At 27 tokens removing")


def test_runs_that_cannot_be_told_apart_are_said_so_once() -> None:
    summary = compare_summary()
    summary["differences"] = [{**row, "low": -0.1, "high": 0.1} for row in summary["differences"]]
    row = summary["differences"][0]
    for rows, said in (
        ([row], "U index is not told apart."),
        ([row, {**row, "figure": "middle"}], ": none of U index and"),
    ):
        first = findings.compare_findings({**summary, "differences": rows})[0]
        assert first.text.count("told apart") == 1
        assert said in first.text
        assert "In brackets" not in first.sure


def test_a_comparison_of_heads_speaks_of_heads() -> None:
    run = {**heads_summary(), "folder": "x"}
    rows = [
        {
            "run": 1,
            "figure": label,
            "first": a,
            "this": b,
            "difference": b - a,
            "low": None,
            "high": None,
            "paired": False,
        }
        for label, a, b in (("positional", 3, 4), ("mixed", 20, 6), ("uniform", 2, 2))
    ]
    summary = {**compare_summary(), "of": "heads", "runs": [run, run], "differences": rows}
    page = PAGES["compare"](summary, {})
    table = next(b for s in page.sections for b in s.blocks if b.id == "differences-table")  # type: ignore[union-attr]
    assert "Shapes" not in table.note  # type: ignore[union-attr]
    assert [column.title for column in table.columns][-1] == "difference"  # type: ignore[union-attr]
    column = table.columns[-1]  # type: ignore[union-attr]
    assert [kit.format_cell(row[-1], column) for row in table.rows] == ["+1", "−14", "0"]  # type: ignore[union-attr]


@given(st.integers(-(10**6), 10**6) | st.floats(-10, 10), st.sampled_from([".3f", "+.3f", ".1%", "+.2f", "d"]))
def test_cells_have_true_signs_and_none_on_nothing(value: float, form: str) -> None:
    if form == "d":
        value = int(value)
    shown = kit.format_cell(value, kit.Column("x", format=form))
    assert "-" not in shown
    if not re.search(r"[1-9]", shown):
        assert not re.match(r"[+−]", shown)
    elif form.startswith("+"):
        assert shown[0] in "+−"


@pytest.mark.parametrize("sample", SAMPLES)
def test_facts_are_written_for_people(sample: str) -> None:
    summary, arrays = SAMPLES[sample]
    provenance = {**summary["provenance"], "dtype": "torch.float32", "per_head": False, "figure": 2.980232238769531e-07}
    page = PAGES[summary["command"]]({**summary, "provenance": provenance}, arrays)
    blocks = [block for section in page.sections for block in section.blocks]
    pairs = [pair for block in blocks if isinstance(block, kit.Facts) for pair in block.pairs]
    pairs += [
        pair for block in blocks if isinstance(block, kit.Group) for entry in block.facts.values() for pair in entry
    ]
    assert ("dtype", "float32") in pairs
    assert ("per head", "no") in pairs
    assert ("figure", "2.98023e-07") in pairs
    assert [pair for pair in pairs if re.search(r"\.\d{6,}|torch\.\w|\b(?:True|False)\b|_", pair[1])] == []


def test_names_may_be_broken_at_their_joints_and_stay_what_they_are() -> None:
    assert str(kit._breakable("positional_content")) == "positional_<wbr>content"
    assert str(kit._breakable("residual+no-op")) == "residual+<wbr>no-op"
    for text in ("<b>_x", "a_b<c", "A_b", "measured influence"):
        assert "<wbr>" not in str(kit._breakable(text))


def test_whole_shares_need_no_decimals() -> None:
    assert [words.percent(share, 1) for share in (0, 1, 1 + 1e-7, 0.5)] == ["0%", "100%", "100%", "50.0%"]
    assert words.percent(1 - 1e-7, 1) == "more than 99.9%"
