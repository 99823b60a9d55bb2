"""Reports: each finding on results with known answers; text never becomes markup; charts say what they were given."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posattn.reports import charts, findings, kit
from posattn.reports.pages import PAGES
from posattn.reports.profile import profile_page
from tests.report_samples import (
    HOSTILE,
    compare_summary,
    curve,
    heads_arrays,
    heads_summary,
    profile_arrays,
    profile_summary,
    shape_of,
    simulate_summary,
    text_of,
)

# ---- findings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "says", "never"),
    [
        ("u", "is U-shaped", "no U shape"),
        ("recency", "leans to the recent end", "is U-shaped"),
        ("primacy", "leans to the beginning", "is U-shaped"),
        ("flat", "shows no U shape and favours neither end", "is U-shaped"),
    ],
)
def test_the_shape_of_the_influence_is_named_only_when_it_has_it(kind: str, says: str, never: str) -> None:
    text = text_of(findings.influence_shape(profile_summary(kind)))
    assert says in text
    assert never not in text


def test_the_shape_says_how_much_denser_over_how_many_documents_and_under_which_measure() -> None:
    summary = profile_summary("u", n=128)
    trimmed = shape_of(curve("u", 128))["without_first"]
    ratio = trimmed["recency"] / 0.125 / (trimmed["middle"] / 0.5)
    text = text_of(findings.influence_shape(summary))
    assert f"{ratio:.2f} times" in text
    assert "16 documents of 128 tokens" in text
    assert "gradient norm of the arg-max probability" in text


def test_a_sink_that_makes_or_hides_a_shape_is_said() -> None:
    # flat but for a huge first position: neither end without it, the beginning with it
    text = text_of(findings.influence_shape(profile_summary("sink")))
    assert "favours neither end" in text
    assert "With it, the reading changes to a primacy bias" in text


def test_an_interval_that_includes_zero_is_not_settled() -> None:
    text = text_of(findings.influence_shape(profile_summary("u", intervals={"influence": {"u_index": [-0.2, 0.9]}})))
    assert "−0.20 to 0.90" in text
    assert "do not settle it" in text
    assert "is U-shaped" not in text
    text = text_of(findings.influence_shape(profile_summary("u", intervals={"influence": {"u_index": [0.3, 0.9]}})))
    assert "do not settle it" not in text
    assert "is U-shaped" in text


def test_the_nearest_prediction_is_named_with_its_distance() -> None:
    summary = profile_summary("u")
    summary["comparison"] = {
        "residual": {"wasserstein": 0.05, "spearman": 0.9, "total_variation": 0.1},
        "half": {"wasserstein": 0.2, "spearman": 0.3, "total_variation": 0.4},
        "uniform": {"wasserstein": 0.15, "spearman": 0.0, "total_variation": 0.3},
    }
    finding = findings.closest_prediction(summary)
    assert finding is not None
    assert "`residual`" in finding.text
    assert "0.050" in finding.text
    assert finding.tone == "plain"
    summary["comparison"]["half"]["wasserstein"] = 0.051
    assert "`half` cannot be told apart" in text_of(findings.closest_prediction(summary))


def test_intervals_decide_what_can_be_told_apart() -> None:
    summary = profile_summary("u")
    summary["comparison"] = {
        name: {"wasserstein": distance, "spearman": 0.5, "total_variation": 0.1}
        for name, distance in (("residual", 0.05), ("half", 0.12), ("uniform", 0.15))
    }
    clear = {
        "comparison": {"residual": [0.04, 0.06], "half": [0.1, 0.14]},
        "over_uniform": {"residual": [-0.12, -0.08], "half": [-0.05, 0.01]},
        "over_nearest": {"half": [0.05, 0.09]},
    }
    text = text_of(findings.closest_prediction({**summary, "intervals": clear}))
    assert "told apart" not in text
    assert "0.040 to 0.060" in text
    unclear = {**clear, "over_nearest": {"half": [-0.01, 0.09]}}
    assert "`half` cannot be told apart" in text_of(findings.closest_prediction({**summary, "intervals": unclear}))
    unclear = {**clear, "over_uniform": {"residual": [-0.12, 0.02]}}
    finding = findings.closest_prediction({**summary, "intervals": unclear})
    assert "do not tell the two apart" in text_of(finding)
    assert finding is not None
    assert finding.tone == "caution"


def test_a_prediction_no_better_than_a_uniform_curve_is_not_praised() -> None:
    summary = profile_summary("u")
    for name in ("residual", "half", "attention_only"):
        summary["comparison"][name]["wasserstein"] = 0.3
    summary["comparison"]["uniform"]["wasserstein"] = 0.15
    finding = findings.closest_prediction(summary)
    assert finding is not None
    assert finding.text.startswith("No predicted profile is closer")
    assert finding.tone == "caution"
    summary["intervals"] = {"over_uniform": {"residual": [0.05, 0.2]}, "over_nearest": {}}
    for name in ("half", "attention_only"):
        summary["intervals"]["over_nearest"][name] = [-0.1, 0.1]
    assert "do not tell the two apart" not in text_of(findings.closest_prediction(summary))
    summary["intervals"]["over_uniform"]["residual"] = [-0.05, 0.2]
    text = text_of(findings.closest_prediction(summary))
    assert "do not tell the two apart (95 % interval of the difference −0.050 to 0.200)" in text


def test_sinks_massive_activations_and_collapse_are_reported_only_where_they_are() -> None:
    plain, odd = profile_summary("u"), profile_summary("u", massive=True, sink=True)
    assert findings.first_position(plain) is None
    assert findings.massive_activations(plain) is None
    assert findings.collapse_without_residual(plain) is None
    assert "holds 75%" in text_of(findings.first_position(odd))
    assert "4 of 4 layers" in text_of(findings.massive_activations(odd))
    odd["profiles"]["attention_only"] = [0.97, *[0.03 / 63] * 63]
    assert "97.0%" in text_of(findings.collapse_without_residual(odd))


def test_mixing_names_mean_range_and_interval() -> None:
    text = text_of(findings.mixing_strength(profile_summary("u")))
    assert "45%" in text
    assert "0.30 in layer 3" in text
    assert "λ = 0.45 over 4 layers" in text
    assert "16 documents" in text
    assert f"±{1.96 * 0.02 / 4:.3f}" in text


def test_predictions_without_a_measured_influence_stand_untested() -> None:
    summary = profile_summary(None)
    texts = [finding.text for finding in findings.profile_findings(summary)]
    assert any("stand untested" in text for text in texts)
    assert not any("U-shaped" in text or "closest" in text for text in texts)
    assert findings.not_measured(profile_summary("u")) is None


def test_heads_are_counted_and_named() -> None:
    summary = heads_summary()
    assert "Of 12 heads, 1 is positional, 1 symbolic, 0 uniform and 10 mixed." in text_of(
        findings.label_counts(summary)
    )
    assert "12 of 12 labels stay the same" in text_of(findings.label_counts(summary))
    assert "64 queries in 8 documents" in text_of(findings.label_counts(summary))
    assert "Purest positional: L0H0; purest symbolic: L1H1." in text_of(findings.purest_heads(summary))
    roles = text_of(findings.named_roles(summary))
    assert "1 induction head (strongest L2H2: 80% of its attention" in roles
    assert "chance 1%" in roles
    assert "sink" not in roles
    assert findings.no_positional_head(summary) is None
    assert findings.too_even_to_tell(summary) is None


def test_no_positional_head_is_said_with_the_nearest() -> None:
    text = text_of(findings.no_positional_head(heads_summary(labels="symbolic")))
    assert text.startswith("No head is positional: the nearest to positional is L0H0 (s_pos 0.05, s_sym 0.95)")
    assert "symbolic:" not in text


def test_uniform_heads_are_not_taken_for_both() -> None:
    finding = findings.too_even_to_tell(heads_summary(labels="uniform"))
    assert finding is not None
    assert "10 of 12 heads are uniform" in finding.text
    assert finding.tone == "caution"


@pytest.mark.parametrize(
    ("interval", "says"),
    [
        ((0.1, 0.3), "more than random heads do: positional (+0.200 nats, 0.100 to 0.300)"),
        ((-0.1, 0.3), "no class of heads raises"),
        ((-0.3, -0.1), "Less than random heads: positional"),
        ((None, None), "no class of heads raises"),
    ],
)
def test_removal_matters_only_beyond_random_heads(interval: tuple[float, float], says: str) -> None:
    text = text_of(findings.removal_matters(ablation_summary(interval)))
    assert says in text
    assert "mostly repeat" not in text


def test_random_sets_that_repeat_the_class_are_mentioned() -> None:
    text = text_of(findings.removal_matters(ablation_summary((0.1, 0.3), overlap=3.0)))
    assert "The random sets mostly repeat the class itself for positional (3 of 4 heads)." in text


def ablation_summary(interval: tuple[float | None, float | None], overlap: float = 1.0) -> dict[str, Any]:
    summary = heads_summary()
    summary["ablation"] = {
        "classes": ["positional"],
        "lengths": [32],
        "mode": "zero",
        "excess": [[0.2]],
        "excess_interval": [[list(interval)]],
        "heads": {"positional": 4},
        "overlap": {"positional": overlap},
        "documents": 8,
        "controls": 5,
    }
    return summary


def test_a_simulated_profile_is_called_what_it_is_and_that_it_is_no_measurement() -> None:
    text = text_of(findings.simulated_shape(simulate_summary()))
    assert "implies a U-shaped profile" in text
    assert "what a trained model's content adds is not in it" in text
    assert "a primacy bias and no U shape" in text_of(findings.simulated_shape(simulate_summary(primacy=True)))


def test_a_profile_with_nothing_in_the_middle_has_no_shape_by_ratio() -> None:
    summary = simulate_summary()
    shape = summary["shape"][str(summary["lengths"][0])]["residual"]
    shape.update(primacy=0.0, middle=0.0, recency=1.0)
    text = text_of(findings.simulated_shape(summary))
    assert "100% of the influence is on the last eighth" in text
    assert "U-shaped" not in text
    assert "unboundedly" not in text


def test_the_strongest_force_and_the_condition_of_a_collapse_are_named() -> None:
    summary = simulate_summary()
    text = text_of(findings.strongest_force(summary))
    assert text.startswith("The causal mask moves the mean position most, towards the beginning")
    assert "the residual +0.20" in text
    assert "content" not in text.split(".")[0]
    text = text_of(findings.more_depth(summary))
    assert "provided that the first column of A stays bounded below" in findings.more_depth(summary).text
    assert "3 layers, computed at 64 positions" in text
    assert "would be reached near depth 900" in text
    assert findings.not_monotone(summary) is None
    summary["monotonicity"]["worst"] = 0.01
    assert "not stochastically monotone" in text_of(findings.not_monotone(summary))


def test_a_comparison_tells_apart_only_what_its_interval_does() -> None:
    apart, unclear = (findings.compare_findings(compare_summary(half=half))[0] for half in (0.1, 0.5))
    assert "U index 0.10 → 0.40 (0.20 to 0.40)" in apart.text
    assert "paired" in apart.sure
    assert "U index is not told apart." in unclear.text


PAGES_TRIED = {
    "profile": (profile_summary("u", massive=True, sink=True), profile_arrays()),
    "heads": (heads_summary(), heads_arrays()),
    "simulate": (
        simulate_summary(),
        {"forces.64.path": np.ones((5, 64)) / 64, "depth.profiles": np.ones((3, 64)) / 64},
    ),
    "compare": (compare_summary(), {}),
}


@pytest.mark.parametrize("command", PAGES_TRIED)
def test_every_link_of_a_page_leads_to_something_on_it(command: str) -> None:
    page = PAGES[command](*PAGES_TRIED[command])
    html = kit.render(page)
    anchors = {anchor for finding in page.findings for anchor, _ in finding.links}
    anchors |= {figure.link for figure in page.figures if figure.link}
    assert anchors
    for anchor in anchors:
        assert f'id="{anchor.split(":")[0]}"' in html, anchor


def test_a_report_of_the_heads_of_a_large_model_stays_small() -> None:
    html = kit.render(PAGES["heads"](heads_summary(32, 32), heads_arrays(32, 32, 64, 32)))
    assert len(html.encode()) < 8_000_000


# ---- markup ------------------------------------------------------------------------------------------------------


class Structure(HTMLParser):
    """Counts the elements of a page, and gathers attributes that could run something."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: dict[str, int] = {}
        self.handlers: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        for name, value in attrs:
            if name.startswith("on"):
                self.handlers.append(f"{tag} {name}")
            if name in ("src", "href", "action", "data") and not str(value).startswith(("#", "data:,")):
                self.addresses.append(f"{tag} {value}")


def structure(html: str) -> Structure:
    parser = Structure()
    parser.feed(html)
    return parser


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_names_and_paths_add_no_element_and_no_handler(text: str) -> None:
    def page(name: str) -> str:
        summary = profile_summary("u", warnings=[name])
        summary["provenance"] = {
            **summary["provenance"],
            "model": name,
            name: name,
            "tokens": {"source": name, "documents": 3, "length": 64},
        }
        summary["profiles"][name] = summary["profiles"]["half"]
        summary["comparison"][name] = summary["comparison"]["half"]
        summary["shape"][name] = summary["shape"]["half"]
        return kit.render(profile_page(summary, profile_arrays()))

    harmless, harmful = structure(page("x")), structure(page(text))
    assert harmful.tags == harmless.tags
    assert harmful.handlers == []
    assert harmful.addresses == []


@given(
    st.recursive(
        st.none() | st.floats() | st.text() | st.sampled_from(HOSTILE),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_json_in_a_script_element_cannot_leave_it_and_keeps_its_text(value: object) -> None:
    text = kit.safe_json(value)
    assert not re.search("[<>&\u2028\u2029]", text)
    assert kit.safe_json(json.loads(text)) == text


def test_backticks_become_code_and_nothing_else_does() -> None:
    assert str(kit._marked("a `b<i>` c")) == "a <code>b&lt;i&gt;</code> c"
    assert str(kit._marked("one ` alone <b>")) == "one ` alone &lt;b&gt;"


def test_the_policy_allows_exactly_the_two_scripts_of_the_page() -> None:
    import hashlib

    html = kit.render(profile_page(profile_summary("u"), profile_arrays()))
    scripts = re.findall(r"<script>(.*?)</script>", html, re.S)
    assert len(scripts) == 2
    for script in scripts:
        assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in html
    assert "default-src &#39;none&#39;" in html


def test_two_charts_of_one_name_are_refused() -> None:
    chart = kit.Chart("x", "t", "s", {"": {"traces": [], "layout": {}}})
    page = kit.Page("profile", "t", "s", (), (kit.Section("a", "A", (chart, kit.Fold("f", "F", (chart,)))),))
    with pytest.raises(ValueError, match="share an id"):
        kit.render(page)


# ---- charts ------------------------------------------------------------------------------------------------------


def unpack(packed: dict) -> np.ndarray:
    data = np.frombuffer(base64.b64decode(packed["packed"]), np.uint8).reshape(packed["rows"], packed["columns"])
    return np.where(data == 255, np.nan, packed["low"] + (packed["high"] - packed["low"]) * data / 254.0)


def test_a_packed_grid_comes_back_to_within_half_a_step() -> None:
    grid = np.random.default_rng(0).normal(size=(7, 5))
    grid[2, 3] = np.nan
    back = unpack(charts.pack(grid, -3, 3))
    assert np.isnan(back[2, 3])
    np.testing.assert_allclose(back, np.clip(grid, -3, 3), atol=3 / 254 + 1e-9)


@pytest.mark.parametrize("n", [3, 96, 97, 250])
def test_tiles_of_a_kernel_are_means_of_its_causal_cells(n: int) -> None:
    kernel = np.tril(np.random.default_rng(n).uniform(size=(n, n)))
    rows, columns, mean = charts.tiles(kernel, 96, causal=True)
    edges = np.linspace(0, n, min(n, 96) + 1).astype(int)
    i, j = len(edges) - 2, (len(edges) - 2) // 2
    block = [kernel[a, b] for a in range(edges[i], edges[i + 1]) for b in range(edges[j], edges[j + 1]) if b <= a]
    assert mean[i, j] == pytest.approx(np.mean(block))
    assert np.isnan(mean[0, -1]) or n == 1
    assert rows[0] >= 0
    assert columns[-1] <= n - 1


def test_long_curves_keep_their_mean() -> None:
    values = np.random.default_rng(0).uniform(size=5120)
    x, y = charts.blocks(values)
    assert len(x) == len(y) == charts.CURVE_POINTS
    assert y.mean() == pytest.approx(values.mean())


def test_a_report_of_a_large_model_stays_small() -> None:
    summary = profile_summary("u", layers=32, n=512)
    html = kit.render(profile_page(summary, profile_arrays(32, 128, heads=32)))
    assert len(html.encode()) < 8_000_000


def test_cells_are_written_as_their_column_says() -> None:
    assert kit.format_cell(-0.1234, kit.Column("x")) == "−0.123"
    assert kit.format_cell(None, kit.Column("x")) == "–"
    assert kit.format_cell(float("nan"), kit.Column("x")) == "–"
    assert kit.format_cell(0.5, kit.Column("x", format=".1%")) == "50.0%"
