"""From measurement to theory: kernels from schemes, the two variants, forces, and what the report says of them."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from posattn.errors import InputError
from posattn.reports import findings
from posattn.reports.profile import profile_page
from posattn.rollout.dense import rollout
from posattn.rollout.forces import FORCES, shapley
from posattn.rollout.implied import IMPLIED, implied_architecture, implied_forces, implied_kernels, implied_profiles
from posattn.rollout.simulate import simulate
from posattn.rollout.variants import area
from tests.report_samples import curve, profile_arrays, profile_summary

N = 17


def made_up(kinds: tuple[str, ...], windows: tuple[int | None, ...] | None = None, heads: int = 3) -> Any:
    layers = len(kinds)
    return SimpleNamespace(
        logits=torch.randn(layers, heads, N, dtype=torch.float64),
        diagonal=torch.randn(layers, heads, dtype=torch.float64),
        slopes=torch.rand(layers, heads, dtype=torch.float64),
        kinds=kinds,
        windows=windows or (None,) * layers,
        heads=(heads,) * layers,
    )


def dense(found: Any, t: int, content: bool, heads: int = 3) -> torch.Tensor:
    """The kernel of one layer by its definition, number by number."""
    total = torch.zeros(N, N, dtype=torch.float64)
    for h in range(heads):
        beta = float(found.diagonal[t, h])
        for i in range(N):
            weights = {}
            for j in range(max(0, i + 1 - (found.windows[t] or N)), i + 1):
                if found.kinds[t] == "alibi":
                    score = -float(found.slopes[t, h]) * (i - j) + (beta if content and i == j else 0)
                elif found.kinds[t] == "none":
                    score = beta if content and i == j else 0.0
                else:  # the measured score at 0 holds β
                    score = float(found.logits[t, h, i - j]) - (beta if not content and i == j else 0)
                weights[j] = math.exp(score)
            for j, weight in weights.items():
                total[i, j] += weight / sum(weights.values()) / heads
    return total


KINDS = ("rotary", "none", "alibi", "absolute", "shortformer")
WINDOWS = (None, 4, 5, 3, None)


@pytest.mark.parametrize("content", [False, True])
def test_kernels_by_definition(content: bool) -> None:
    found = made_up(KINDS, WINDOWS)
    kernels = implied_kernels(
        found.logits,
        found.diagonal,
        kinds=found.kinds,
        windows=found.windows,
        slopes=found.slopes,
        content=content,
    )
    for t, kernel in enumerate(kernels):
        torch.testing.assert_close(kernel.dense(N), dense(found, t, content), rtol=1e-12, atol=1e-14)


def test_profiles_are_rollouts_of_them_with_the_measured_mixing() -> None:
    found, mixing = made_up(KINDS, WINDOWS), torch.tensor([0.9, 0.2, 0.5, 0.0, 0.7])
    profiles = implied_profiles(mixing, found)
    assert list(profiles) == list(IMPLIED)
    for name, profile in profiles.items():
        kernels = torch.stack([dense(found, t, name == "positional_content") for t in range(5)])
        torch.testing.assert_close(profile, rollout(mixing.double(), kernels).last, rtol=1e-10, atol=1e-13)
    assert area(*profiles.values()) > 1e-4  # β made a difference


def test_layers_with_fewer_heads_use_their_own_only() -> None:
    found = made_up(("rotary", "alibi"))
    found.heads = (3, 2)
    kernels = implied_kernels(
        found.logits, found.diagonal, kinds=found.kinds, windows=found.windows, slopes=found.slopes, heads=found.heads
    )
    torch.testing.assert_close(kernels[1].dense(N), dense(found, 1, True, heads=2))
    assert implied_architecture(torch.tensor([0.5, 0.5]), found) is None


@pytest.mark.parametrize("kinds", [("alibi", "alibi"), ("none", "none"), ("rotary", "none"), ("rotary", "alibi")])
@pytest.mark.parametrize("windows", [(None, None), (6, 6), (None, 4)])
def test_the_architecture_implies_the_same_profile(kinds: tuple[str, str], windows: tuple[int | None, ...]) -> None:
    found, mixing = made_up(kinds, windows), torch.tensor([0.8, 0.3])
    architecture = implied_architecture(mixing, found)
    assert architecture is not None
    expected = implied_profiles(mixing, found)["positional_content"]
    torch.testing.assert_close(simulate(architecture, N).last, expected, rtol=1e-9, atol=1e-12)


def test_shares_add_up_to_the_profile_and_to_its_distance() -> None:
    found, mixing = made_up(("rotary", "rotary")), torch.tensor([0.8, 0.3])
    architecture = implied_architecture(mixing, found)
    assert architecture is not None
    measured = torch.rand(N)
    shares, distance = implied_forces(architecture, N, measured)
    assert distance is not None
    flat, whole = torch.ones(N), implied_profiles(mixing, found)["positional_content"]
    assert distance["baseline"] == pytest.approx(area(flat, measured), abs=1e-12)
    assert distance["total"] == pytest.approx(area(whole, measured), abs=1e-9)
    assert float(distance["shares"].sum()) == pytest.approx(distance["total"] - distance["baseline"], abs=1e-12)
    torch.testing.assert_close(shares.shares.sum(0), shares.total - shares.baseline)
    assert implied_forces(architecture, N)[1] is None
    # a force that is not there takes no part
    found.diagonal.zero_()
    without = implied_architecture(mixing, found)
    assert without is not None
    parts = implied_forces(without, N, measured)[1]
    assert parts is not None
    assert float(parts["shares"][FORCES.index("content")]) == 0


def test_shapley_of_a_sum_and_of_a_product() -> None:
    """Shares of a sum are its terms; a product of two is split evenly between them."""
    bits = torch.tensor([[index >> bit & 1 for bit in range(4)] for index in range(16)], dtype=torch.float64)
    terms = torch.tensor([1.0, -2, 3, 0], dtype=torch.float64)
    torch.testing.assert_close(shapley(bits @ terms), terms)
    assert shapley(bits[:, 0] * bits[:, 2]).tolist() == pytest.approx([0.5, 0, 0.5, 0])


def test_wrong_use_is_said_in_one_line() -> None:
    found = made_up(("rotary", "none"))
    parts = {"windows": found.windows, "slopes": found.slopes}
    with pytest.raises(InputError, match="unknown kind of position 'rope'"):
        implied_kernels(found.logits, found.diagonal, kinds=("rope", "none"), **parts)
    with pytest.raises(InputError, match="1 kinds for 2 layers"):
        implied_kernels(found.logits, found.diagonal, kinds=("rotary",), **parts)


# ---- what the report says -------------------------------------------------------------------------------------------


def told(**distances: float) -> dict[str, Any]:
    summary = profile_summary("u")
    summary["comparison"] = {
        name: {"wasserstein": distance, "spearman": 0.0, "total_variation": 0.1} for name, distance in distances.items()
    }
    return summary


@pytest.mark.parametrize(
    ("distances", "says", "never"),
    [
        ((0.05, 0.04, 0.2), "does not come as near", "does not explain"),
        ((0.05, 0.04, 0.0405), "not told apart from that", "does not explain"),
        ((0.05, 0.04, 0.02), "comes nearer, to 0.020", "as near"),
        ((0.19, 0.18, 0.3), "does not explain where it looks", "an even curve to"),
    ],
)
def test_how_far_theory_reaches(distances: tuple[float, float, float], says: str, never: str) -> None:
    position, content, residual = distances
    finding = findings.theory_reach(
        told(positional=position, positional_content=content, residual=residual, uniform=0.15)
    )
    assert finding is not None
    assert f"{position:.3f}" in finding.text
    assert f"{content:.3f}" in finding.text
    assert says in finding.text
    assert never not in finding.text
    assert (finding.tone == "caution") == (content >= 0.15)


def test_theory_and_attention_whose_intervals_overlap_are_not_told_apart() -> None:
    summary = told(positional=0.133, positional_content=0.125, residual=0.109, uniform=0.3)
    summary["intervals"] = {"comparison": {"positional_content": [0.09, 0.16], "residual": [0.08, 0.14]}}
    finding = findings.theory_reach(summary)
    assert finding is not None
    assert "(`residual`, 0.109) is not told apart from that" in finding.text
    summary["intervals"]["comparison"]["residual"] = [0.05, 0.08]
    finding = findings.theory_reach(summary)
    assert finding is not None
    assert "comes nearer, to 0.109" in finding.text


def test_theory_is_silent_where_it_was_not_measured() -> None:
    assert findings.theory_reach(told(residual=0.1, uniform=0.2)) is None
    assert findings.force_behind(profile_summary("u")) is None


FORCES_SAMPLE = {
    "64": {
        "forces": ["causal", "residual", "position", "content"],
        "quantities": ["mean_position", "primacy", "recency"],
        "shares": [[-0.1, 0.2, -0.05], [0.3, -0.1, 0.2], [0.05, -0.02, 0.03], [0.0, 0.0, 0.0]],
        "total": [0.75, 0.205, 0.305],
        "baseline": [0.5, 0.125, 0.125],
        "order": ["causal", "position", "residual", "content"],
        "distance": {"shares": [0.08, -0.2, -0.04, 0.0], "baseline": 0.3, "total": 0.14},
    }
}


def test_forces_are_named_with_their_shares() -> None:
    summary = profile_summary("u", forces=json.loads(json.dumps(FORCES_SAMPLE)))
    finding = findings.force_behind(summary)
    assert finding is not None
    text = finding.text
    assert "the residual moves the mean position most, towards the end" in text
    assert "the causal mask −0.10" in text
    assert "from 0.300 (an even curve) to 0.140" in text
    assert "nearer: the residual −0.200 and positions −0.040; farther: the causal mask +0.080" in text
    assert "content" not in text.split("profile", 1)[1]
    del summary["forces"]["64"]["distance"]
    finding = findings.force_behind(summary)
    assert finding is not None
    assert "even curve" not in finding.text


def test_the_page_has_a_section_on_forces_only_with_forces() -> None:
    arrays = {**profile_arrays(), "forces.64.path": np.stack([curve("flat")] * 5)}
    page = profile_page(profile_summary("u", forces=FORCES_SAMPLE), arrays)
    section = next(section for section in page.sections if section.id == "forces")
    table = section.blocks[-1]
    assert table.rows[1][-1] == -0.2  # type: ignore[union-attr]
    assert table.rows[-1][-1] == pytest.approx(0.14 - 0.3)  # type: ignore[union-attr]
    assert len(table.columns) == len(table.rows[0])  # type: ignore[union-attr]
    assert "forces" not in [section.id for section in profile_page(profile_summary("u"), profile_arrays()).sections]


@pytest.mark.slow
def test_profile_reports_the_variants_and_the_forces(tmp_path) -> None:
    from posattn.commands.profile import measure_profile
    from posattn.models.loading import load_model
    from posattn.tokens import load_tokens

    model = load_model("bundled:bytes-alibi")
    tokens = load_tokens("bundled:python-docs", model, length=64, samples=4)
    summary = measure_profile(model, tokens, tmp_path, warnings=[], quiet=True)
    assert set(IMPLIED) <= set(summary["profiles"])
    assert set(IMPLIED) <= set(summary["comparison"])
    part = summary["forces"]["64"]
    total = part["distance"]["baseline"] + sum(part["distance"]["shares"])
    assert total == pytest.approx(summary["comparison"]["positional_content"]["wasserstein"], abs=1e-6)
    assert (tmp_path / "forces.csv").exists()
