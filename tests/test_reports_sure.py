"""What few documents, small differences and short contexts do not settle: said in every report, by one rule."""

from __future__ import annotations

import copy
import re
from typing import Any

import numpy as np
import pytest
import torch

from posattn.reports import curves, findings, kit, sure
from posattn.reports.pages import PAGES
from posattn.tokens import Tokens
from tests.report_samples import (
    compare_summary,
    curve,
    distance,
    heads_arrays,
    heads_summary,
    profile_arrays,
    profile_summary,
    shape_of,
)
from tests.report_samples import text_of as said
from tests.test_reports_words import ablated, lengths_summary, simulated

# ---- few documents -----------------------------------------------------------------------------------------------


def rows(*texts: str) -> Tokens:
    return Tokens(torch.tensor([[ord(letter) for letter in text] for text in texts]))


def test_few_documents_are_warned_of_and_enough_are_not() -> None:
    for documents in range(2, sure.FEW):
        warning = sure.few_documents(documents)
        assert warning is not None
        assert f"Only {documents} documents" in warning
        assert "too narrow" in warning
        assert f"at least {sure.FEW}" in warning
    assert sure.few_documents(sure.FEW) is None
    assert sure.few_documents(1) is None  # there are no intervals to believe


def test_equal_documents_are_warned_of_and_count_once() -> None:
    (first, second) = sure.document_warnings(rows("abab", "abab", "abab", "baba"))
    assert "3 of 4 documents are equal" in first
    assert "2 different documents" in first
    assert second.startswith("Only 2 documents")
    (only,) = sure.document_warnings(rows(*["abab"] * 9))
    assert only.startswith("All 9 documents are equal")
    assert sure.document_warnings(rows(*"abcdefgh")) == []
    # what padding holds is no part of a document
    padded = Tokens(torch.tensor([[5, 6, 1], [5, 6, 2]]), torch.tensor([[True, True, False]] * 2))
    assert sure.different_documents(padded) == 1


def few(summary: dict[str, Any], documents: int) -> dict[str, Any]:
    """The same profile, measured over so many documents."""
    summary = copy.deepcopy(summary)
    summary["influence_facts"]["documents"] = summary["mixing"]["documents"] = documents
    return summary


@pytest.mark.parametrize("kind", ["u", "flat", "recency", "primacy"])
@pytest.mark.parametrize("interval", [None, [0.3, 0.9]])
def test_no_shape_is_settled_by_few_documents(kind: str, interval: list[float] | None) -> None:
    summary = profile_summary(kind)
    if kind == "u" and interval:
        summary["intervals"] = {"influence": {"u_index": interval}}
    for documents in range(1, sure.SETTLING):
        finding = findings.influence_shape(few(summary, documents))
        assert finding is not None
        assert re.search(rf"\b{documents} documents? (is|are) too few to settle", finding.text)
        assert finding.tone == "caution"
        assert "is U-shaped:" not in finding.text
        assert "no U shape" not in finding.text
        assert re.search("^Influence on the last position (looks|seems)", finding.text)
        assert "leans" not in finding.text
    assert "too few" not in said(findings.influence_shape(few(summary, sure.SETTLING)))
    # copies of a document are one document
    copies = {**summary, "different_documents": 2}
    assert "2 documents are too few" in said(findings.influence_shape(copies))


def with_margins() -> dict[str, Any]:
    summary = profile_summary("u")
    names = {"residual": 0.05, "positional": 0.09, "positional_content": 0.08, "half": 0.12, "uniform": 0.15}
    summary["comparison"] = {
        name: {"wasserstein": away, "spearman": 0.5, "total_variation": 0.1} for name, away in names.items()
    }
    summary["profiles"] = {}
    summary["intervals"] = {
        "comparison": {name: [away - 0.04, away + 0.04] for name, away in names.items()},
        "over_nearest": {name: [away - 0.06, away - 0.04] for name, away in names.items() if name != "residual"},
        "over_uniform": {name: [away - 0.16, away - 0.14] for name, away in names.items() if name != "uniform"},
        "over_residual": {name: [away - 0.06, away - 0.04] for name, away in names.items() if name != "residual"},
    }
    return summary


def test_no_prediction_is_settled_as_nearest_by_few_documents() -> None:
    enough, scarce = with_margins(), few(with_margins(), 3)
    finding = findings.closest_prediction(enough)
    assert finding is not None
    assert finding.tone == "plain"
    assert "(95 % interval" in finding.text
    finding = findings.closest_prediction(scarce)
    assert finding is not None
    assert finding.tone == "caution"
    assert "3 documents are too few to settle which prediction is nearest" in finding.text
    assert "95 % interval" not in finding.text
    assert "told apart" not in finding.text
    assert "comes nearer, to 0.050" in said(findings.theory_reach(enough))
    text = said(findings.theory_reach(scarce))
    assert "3 documents are too few to settle which is nearer" in text
    assert "comes nearer" not in text
    assert "does not explain" not in text


def test_no_label_and_no_removed_class_is_settled_by_few_documents() -> None:
    assert "12 of 12 labels stay the same" in said(findings.label_counts(heads_summary()))
    for more in ({"documents": 3}, {"different_documents": 3}, {"documents": 3, "interval_over": "queries"}):
        summary = {**heads_summary(), **more}
        text = said(findings.label_counts(summary))
        assert "3 documents are too few to settle a label" in text
        assert "stay the same" not in text
        page = PAGES["heads"](summary, heads_arrays())
        groups = [b for s in page.sections for b in s.blocks if isinstance(b, kit.Group)]
        labels = [
            value for group in groups for pairs in group.facts.values() for name, value in pairs if name == "label"
        ]
        assert labels
        assert not [label for label in labels if "settled" in label]
    summary = ablated(full=False, partial=True)
    assert "more than random heads do: positional" in said(findings.removal_matters(summary))
    summary["ablation"]["documents"] = 4
    finding = findings.removal_matters(summary)
    assert finding is not None
    assert "4 documents are too few to settle which classes" in finding.text
    assert "(positional)" in finding.text
    assert finding.tone == "caution"


@pytest.mark.parametrize("which", [0, 1])
def test_a_comparison_with_a_run_of_few_documents_tells_nothing_apart(which: int) -> None:
    summary = compare_summary()
    assert "0.20 to 0.40" in said(findings.compare_findings(summary)[0])
    summary["runs"][which] = few(summary["runs"][which], 2)
    finding = findings.compare_findings(summary)[0]
    assert "U index is not told apart" in finding.text
    assert "2 documents are too few to settle a difference" in finding.sure
    summary["runs"][which] = few(summary["runs"][which], 6)
    text = said(findings.compare_findings(summary)[0])
    assert "0.20 to 0.40" in text
    assert "Only 6 documents" in text


def test_a_label_that_changed_is_settled_only_between_runs_of_enough_documents() -> None:
    run = {**heads_summary(), "folder": "x"}
    changed = [{"run": 1, "head": "L0H0", "from": "mixed", "to": "symbolic", "settled": True}]
    for documents, word in ((8, "yes"), (3, "no")):
        runs = [run, {**run, "documents": documents}]
        summary = {**compare_summary(), "of": "heads", "runs": runs, "differences": [label_row()], "changed": changed}
        page = PAGES["compare"](summary, {})
        table = next(b for s in page.sections for b in s.blocks if b.id == "changed-table")  # type: ignore[union-attr]
        assert table.rows[0][-1] == word  # type: ignore[union-attr]
        text = said(findings.compare_findings(summary)[0])
        assert ("1 of them beyond the intervals" in text) is (word == "yes")
        assert ("3 documents are too few to settle a label" in text) is (word == "no")


def label_row() -> dict[str, Any]:
    return {"run": 1, "figure": "mixed", "first": 3, "this": 4, "difference": 1, "low": None, "high": None, "paired": 0}


def test_the_interval_of_the_mixing_says_when_it_is_too_narrow() -> None:
    summary = profile_summary("u")
    assert "too narrow" not in said(findings.mixing_strength(summary))
    assert "too narrow" in said(findings.mixing_strength(few(summary, 4)))


# ---- small differences ---------------------------------------------------------------------------------------------


def test_a_difference_below_the_digits_shown_is_none() -> None:
    summary = with_margins()
    summary["comparison"]["half"]["wasserstein"] = 0.05 + 1e-5
    summary["intervals"]["over_nearest"]["half"] = [1e-5, 1e-5]
    text = said(findings.closest_prediction(summary))
    assert "`half` cannot be told apart from it" in text
    assert "0.00001" not in text
    # an even curve that is as near is no worse
    summary["comparison"]["uniform"]["wasserstein"] = 0.05 + 1e-4
    summary["intervals"]["over_uniform"]["residual"] = [-1e-4, -1e-4]
    assert "do not tell the two apart" in said(findings.closest_prediction(summary))
    # nor is `residual`, on which theory is judged
    summary["comparison"]["residual"]["wasserstein"] = 0.08 - 1e-4
    summary["intervals"]["over_residual"]["positional_content"] = [1e-4, 1e-4]
    assert "is not told apart from that" in said(findings.theory_reach(summary))


def test_curves_that_lie_less_than_is_shown_apart_count_once_the_nearest_first() -> None:
    summary = profile_summary("u")
    profiles = {name: np.array(values) for name, values in summary["profiles"].items()}
    measured = np.array(summary["influence"])
    moved = profiles["half"].copy()
    moved[:2] += (1e-4, -1e-4)
    profiles["energy"], profiles["energy_value"] = profiles["half"], moved
    profiles.pop("half")
    summary["profiles"] = {name: values.tolist() for name, values in profiles.items()}
    summary["comparison"] = {name: distance(values, measured) for name, values in profiles.items()}
    ranked = sorted(summary["comparison"], key=lambda name: summary["comparison"][name]["wasserstein"])
    first, other = (name for name in ranked if name.startswith("energy"))
    finding = findings.closest_prediction(summary)
    assert finding is not None
    assert finding.text.startswith("Of 3 different predicted profiles, `" + ranked[0])
    assert f"`{other}` with `{first}`" in finding.sure
    assert f"`{other}`" not in finding.text
    assert curves.nearest(summary) == ranked[0]
    far = {**summary["profiles"], "energy_value": curve("recency", 64).tolist()}
    assert curves.alike({"profiles": far}, ["energy", "energy_value"], sure.SHOWN) == {}


@pytest.mark.parametrize(
    ("difference", "interval", "told"),
    [
        (0.01, None, True),
        (0.0004, None, False),
        (0.01, (0.001, 0.02), True),
        (-0.01, (-0.02, -0.001), True),
        (0.01, (-0.001, 0.02), False),
        (0.0004, (0.0003, 0.0005), False),
        (0.01, (None, None), True),
    ],
)
def test_one_rule_tells_apart(difference: float, interval: Any, told: bool) -> None:
    assert sure.apart(difference, interval) is told


def test_two_findings_of_one_report_tell_apart_by_the_paired_difference() -> None:
    # the two intervals overlap, the paired difference is clear
    summary = with_margins()
    text = said(findings.theory_reach(summary))
    assert "comes nearer, to 0.050" in text
    assert "paired difference excludes 0" in text
    assert "overlap" not in text
    assert "`positional_content` lies 0.030 farther away" in said(findings.closest_prediction(summary))
    summary["intervals"]["over_residual"]["positional_content"] = [-0.01, 0.06]
    summary["intervals"]["over_nearest"]["positional_content"] = [-0.01, 0.06]
    assert "is not told apart from that" in said(findings.theory_reach(summary))
    assert "`positional_content`" in said(findings.closest_prediction(summary)).partition(" cannot be told apart")[0]
    # a folder of before the difference was kept: the old rule
    old = with_margins()
    del old["intervals"]["over_residual"]
    assert "overlap are called equally close" in said(findings.theory_reach(old))


@pytest.mark.parametrize(("away", "word"), [(0.559, "farther than an even curve"), (0.1501, "no nearer than an even")])
def test_four_times_farther_is_farther(away: float, word: str) -> None:
    summary = with_margins()
    summary.pop("intervals")
    for name in ("positional", "positional_content"):
        summary["comparison"][name]["wasserstein"] = away
    assert word in said(findings.theory_reach(summary))


def test_the_flat_curve_has_one_name_in_sentences() -> None:
    better, worse = with_margins(), with_margins()
    worse["comparison"]["uniform"]["wasserstein"] = 0.01
    for summary in (better, worse):
        for finding in findings.profile_findings(summary):
            assert not re.search(r"uniform (curve|one)", said(finding))
    assert "an even curve" in said(findings.closest_prediction(worse))


def test_intervals_of_distances_say_what_they_leave_out() -> None:
    for make in (findings.closest_prediction, findings.theory_reach):
        assert "the predictions are held fixed" in said(make(with_margins()))
    page = PAGES["profile"](profile_summary("u", intervals=with_margins()["intervals"]), {})
    table = next(b for s in page.sections for b in s.blocks if b.id == "distances-table")  # type: ignore[union-attr]
    assert "held fixed" in table.note  # type: ignore[union-attr]


# ---- sinks among the labels ------------------------------------------------------------------------------------------


def with_sinks(label: str, sinks: int, of: int) -> dict[str, Any]:
    """`of` heads of one label in one layer, so many of them sinks."""
    summary = heads_summary(3, of)
    for t in range(3):
        summary["labels"][t] = [label if t == 0 else "mixed" if label != "mixed" else "uniform"] * of
    summary["roles"] = [[[] for _ in range(of)] for _ in range(3)]
    for h in range(sinks):
        summary["roles"][0][h] = ["sink"]
    flat = [one for row in summary["labels"] for one in row]
    summary["counts"] = {name: flat.count(name) for name in summary["counts"]}
    return summary


@pytest.mark.parametrize(("sinks", "told"), [(0, False), (1, False), (2, True), (8, True)])
@pytest.mark.parametrize("label", ["positional", "symbolic", "uniform", "mixed"])
def test_a_label_of_which_many_are_sinks_says_so_and_what_it_means(label: str, sinks: int, told: bool) -> None:
    text = said(findings.label_counts(with_sinks(label, sinks, 8)))
    assert (f"{sinks} of the 8 {label} heads are sinks" in text) is told
    assert ("sinks" in text) is told
    if label == "symbolic" and told:
        assert "the swap that moves the first key moves their attention with it" in text
        tokens = {**with_sinks(label, sinks, 8), "level": "tokens"}
        assert "the first token moves" in said(findings.label_counts(tokens))


def test_the_purest_heads_that_are_sinks_are_named() -> None:
    summary = with_sinks("symbolic", 3, 4)
    summary["gamma"][0] = [0.1, 0.2, 0.3, 0.15]
    text = said(findings.purest_heads(summary))
    assert "Purest symbolic: L0H0, L0H3 and L0H1 (L0H0 and L0H1 are sinks)" in text
    assert "(all of them are sinks)" in said(findings.purest_heads(with_sinks("symbolic", 4, 4)))
    assert "sink" not in said(findings.purest_heads(with_sinks("symbolic", 0, 4)))


@pytest.mark.parametrize(("level", "thing", "never"), [("keys", "keys", "tokens"), ("tokens", "tokens", "keys")])
def test_what_was_exchanged_is_said_the_same_everywhere(level: str, thing: str, never: str) -> None:
    summary = {**heads_summary(), "level": level}
    summary["counts"] = {"positional": 0, "symbolic": 0, "uniform": 12, "mixed": 0}
    assert f"exchanging two {thing} hardly" in said(findings.too_even_to_tell(summary))
    page = PAGES["heads"](summary, heads_arrays())
    plane = next(section for section in page.sections if section.id == "plane")
    assert f"Two {thing} of the context" in plane.intro
    assert never not in plane.intro


# ---- learned sinks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["learned_sink_mass", "sink_mass"])
def test_the_mass_on_learned_sinks_is_called_so_and_its_old_name_is_read(name: str) -> None:
    summary = profile_summary("u")
    del summary["learned_sink_mass"]

    def columns(values: list[float]) -> list[str]:
        page = PAGES["profile"]({**summary, name: values}, profile_arrays())
        table = next(b for s in page.sections for b in s.blocks if b.id == "mixing-table")  # type: ignore[union-attr]
        return [column.title for column in table.columns]  # type: ignore[union-attr]

    assert "learned sink" in columns([0.2] * 4)
    assert "learned sink" not in columns([0.0] * 4)


# ---- one class of removed heads ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ablated_to", "says", "never"),
    [
        ({"uniform": 6.220}, "is not told apart from no effect: 6.216 nats a token becomes 6.220", "most"),
        ({"uniform": 7.5}, "removing the 2 uniform heads makes it worse: 6.216", "most"),
        ({"uniform": 6.1}, "does not make it worse", "most"),
        ({"uniform": 7.5, "mixed": 6.3}, "removing the 2 uniform heads costs most", "told apart"),
        ({"uniform": 6.22, "mixed": 6.21}, "is not told apart from no effect", "costs most:"),
        ({"uniform": 6.0, "mixed": 6.1}, "removing none of the classes", "most"),
    ],
)
def test_removed_heads_are_the_most_only_of_several_and_beyond_the_interval(
    ablated_to: dict[str, float], says: str, never: str
) -> None:
    summary = lengths_summary(True, "loss")
    summary["lengths"], summary["value"], summary["interval"] = [8], [6.216], [[6.15, 6.28]]
    summary["ablated"] = {name: [value] for name, value in ablated_to.items()}
    summary["heads"] = {name: [(0, 0), (0, 1)] for name in ablated_to}
    finding = next(f for f in findings.FINDINGS["lengths"](summary) if "removing" in f.text)
    assert says in finding.text
    assert never not in finding.text


def test_lengths_over_few_documents_say_that_their_intervals_are_too_narrow() -> None:
    for samples, told in ((3, True), (sure.FEW, False)):
        summary = lengths_summary(True, "loss")
        summary["provenance"] = {"model": "made-up", "lengths": {"samples": samples}, "versions": {}}
        found = findings.FINDINGS["lengths"](summary)
        assert f"over {samples} documents" in found[0].sure
        assert ("too narrow" in found[0].sure) is told


# ---- few positions -----------------------------------------------------------------------------------------------


def words_of(page: kit.Page) -> str:
    told = [f"{finding.text} {finding.sure}" for finding in page.findings]
    told += [f"{figure.label} {figure.note}" for figure in page.figures]
    told += [str(getattr(block, "summary", "")) for section in page.sections for block in section.blocks]
    told += [line for s in page.sections for block in s.blocks for line in getattr(block, "paragraphs", ())]
    return " ".join(told)


SHAPES = r"\bU[- ]shape[d]?: a|U index|times the influence|first eighth|last eighth|collapse|bias|infinity"


@pytest.mark.parametrize("length", range(2, sure.LEAST_POSITIONS + 1))
def test_below_eight_positions_no_report_speaks_of_a_shape(length: int) -> None:
    simulation = simulated(length, 3)
    influence = curve("recency", length)
    profile = profile_summary("u", n=sure.LEAST_POSITIONS)
    if length < sure.LEAST_POSITIONS:
        profile["influence"] = influence.tolist()
        profile["profiles"] = {name: influence.tolist() for name in profile["profiles"]}
        profile["profiles"]["attention_only"] = [1.0, *[0.0] * (length - 1)]
    for page in (PAGES["simulate"](simulation, {}), PAGES["profile"](profile, {})):
        told = words_of(page)
        if length < sure.LEAST_POSITIONS:
            assert re.search(SHAPES, told) is None
            assert re.search(rf"\b{length} positions? (is|are) too few for a shape", told)
        else:
            assert "too few for a shape" not in told
            assert re.search(SHAPES, told)


def test_one_simulated_position_has_no_shape() -> None:
    told = words_of(PAGES["simulate"](simulated(1, 3), {}))
    assert re.search(SHAPES, told) is None
    assert "1 position is too few for a shape" in told


def test_the_smallest_length_with_a_shape_is_spoken_of() -> None:
    simulation = simulated(4, 3)
    longer = simulated(64, 3)
    simulation["lengths"] = [4, 64]
    for part in ("profiles", "shape", "forces"):
        simulation[part] = {**simulation[part], **longer[part]}
    told = findings.simulate_findings(simulation)
    assert "4 positions are too few" in told[0].text
    assert any("at 64 positions" in finding.sure for finding in told)
    assert not any("From 4 to" in finding.text for finding in told)


# ---- tables ------------------------------------------------------------------------------------------------------


def test_no_value_of_a_table_is_shown_outside_its_own_interval() -> None:
    summary = heads_summary()
    rng = np.random.default_rng(0)
    for t in range(3):
        for h in range(4):
            for name in ("positional", "symbolic"):
                low, value, high = np.sort(rng.uniform(0, 1, 3) * 10.0 ** -rng.integers(0, 5))
                summary[name][t][h], summary[f"{name}_interval"][t][h] = float(value), [float(low), float(high)]
    summary["positional"][0][0], summary["positional_interval"][0][0] = 0.0012, [0.0011, 0.0013]
    page = PAGES["heads"](summary, heads_arrays())
    table = next(b for s in page.sections for b in s.blocks if b.id == "heads-table")  # type: ignore[union-attr]
    titles = [column.title for column in table.columns]  # type: ignore[union-attr]
    checked = 0
    for row in table.rows:  # type: ignore[union-attr]
        for name in ("positional", "symbolic"):
            at = titles.index(name)
            value = kit.format_cell(row[at], table.columns[at])  # type: ignore[union-attr]
            low, high = row[at + 1].split(" to ")
            assert float(low) <= float(value) <= float(high)
            assert len(low) == len(value) == len(high)
            checked += 1
    assert checked == 24
    assert sure.fixed((-0.0001, 0.2)) == "0.000 to 0.200"
    assert sure.fixed((-0.01, None)) is None
    assert sure.fixed((-0.01, 0.0)) == "−0.010 to 0.000"


def test_the_distances_and_their_intervals_have_the_same_digits() -> None:
    summary = profile_summary("u", intervals={"comparison": {"half": [0.0002, 0.0004]}})
    summary["comparison"]["half"]["wasserstein"] = 0.0003
    page = PAGES["profile"](summary, {})
    table = next(b for s in page.sections for b in s.blocks if b.id == "distances-table")  # type: ignore[union-attr]
    row = next(row for row in table.rows if row[0] == "half")  # type: ignore[union-attr]
    assert (kit.format_cell(row[2], table.columns[2]), row[3]) == ("0.000", "0.000 to 0.000")  # type: ignore[union-attr]


@pytest.mark.parametrize("page", [PAGES["profile"](profile_summary("u"), {}), PAGES["simulate"](simulated(64), {})])
def test_the_columns_of_shapes_are_explained_on_the_page(page: kit.Page) -> None:
    table = next(b for s in page.sections for b in s.blocks if b.id == "shapes-table")  # type: ignore[union-attr]
    told = table.note.lower()  # type: ignore[union-attr]
    assert shape_of(curve("u"))["trough"] >= 0
    for word in ("trough", "u index", "mean position", "eighth", "middle half"):
        assert word in told


# ---- the commands --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["profile", "heads"])
def test_commands_warn_of_few_and_equal_documents(command: str, tmp_path: Any) -> None:
    import json

    from posattn.cli import main

    text = tmp_path / "same.jsonl"
    lines = ["the quick brown fox jumps", "the quick brown fox jumps", "over a lazy dog that sleeps"]
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines), encoding="utf-8")
    more = ["--no-influence"] if command == "profile" else ["--no-rotary", "--queries", "last"]
    out = tmp_path / "out"
    small = ["--length", "16", "--samples", "3", "--out", str(out), "--quiet", *more]
    assert main([command, "bundled:bytes", "--text", str(text), *small]) == 0
    summary = json.loads((out / "summary.json").read_text("utf-8"))
    assert summary["different_documents"] == 2
    assert "sink_mass" not in summary
    warnings = " ".join(summary["warnings"])
    assert "2 of 3 documents are equal" in warnings
    assert "Only 2 documents: bootstrap intervals" in warnings
    report = (out / "report.html").read_text("utf-8")
    assert "2 of 3 documents are equal" in report
