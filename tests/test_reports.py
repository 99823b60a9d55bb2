"""Reports: each finding on results with known answers; text never becomes markup; charts say what they were given."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posattn.reports import charts, findings, kit
from posattn.reports.profile import profile_page
from tests.report_samples import HOSTILE, curve, profile_arrays, profile_summary, shape_of


def text_of(finding: kit.Finding | None) -> str:
    assert finding is not None
    return finding.text + " " + finding.sure


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


def test_every_link_of_a_finding_leads_to_something_on_the_page() -> None:
    page = profile_page(profile_summary("u", massive=True, sink=True), profile_arrays())
    html = kit.render(page)
    anchors = {anchor for finding in page.findings for anchor, _ in finding.links}
    anchors |= {figure.link for figure in page.figures if figure.link}
    assert anchors
    for anchor in anchors:
        assert f'id="{anchor}"' in html, anchor


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
