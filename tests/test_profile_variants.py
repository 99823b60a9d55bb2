"""`posattn profile --all-variants`, rank correlations document by document, and what the report says of them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import spearmanr

from posattn.cli import main
from posattn.errors import InputError
from posattn.influence.gradients import Influence
from posattn.influence.intervals import document_correlations
from posattn.reports import findings
from posattn.rollout.variants import VARIANTS
from tests.report_samples import profile_summary


def measured(rows: torch.Tensor) -> Influence:
    mean = rows.nanmean(0)
    return Influence(
        profile=mean / mean.sum(),
        per_document=rows,
        counts=rows.isfinite().sum(0),
        chosen=torch.zeros(len(rows), dtype=torch.long),
        probability=torch.ones(len(rows), dtype=torch.float64),
        method="gradient_norm",
        target="argmax_probability",
        normalize="after_mean",
        provenance={},
    )


def rows(documents: int = 4, n: int = 12) -> torch.Tensor:
    return torch.rand(documents, n, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


# ---- document by document ----------------------------------------------------------------------------------------


def test_correlations_are_scipys_document_by_document() -> None:
    found, curve = rows(), rows(1)[0].round(decimals=1)  # rounded: ties
    found[2, 8:] = torch.nan  # a shorter document
    got = document_correlations(measured(found), {"a": curve})["a"]
    each = [spearmanr(curve[row.isfinite()], row[row.isfinite()]).statistic for row in found]  # pyright: ignore
    assert got["spearman"] == pytest.approx(sum(each) / 4, abs=1e-12)
    assert got["documents"] == 4
    assert min(each) <= got["interval"][0] <= got["spearman"] <= got["interval"][1] <= max(each)


def test_a_curve_for_each_document_is_set_beside_that_document() -> None:
    found = rows()
    got = document_correlations(measured(found), {"own": found**3, "shifted": found.roll(1, 0)})
    assert got["own"]["spearman"] == pytest.approx(1, abs=1e-12)
    assert got["own"]["interval"] == pytest.approx([1, 1], abs=1e-12)
    assert got["shifted"]["spearman"] < 0.9


def test_what_has_no_order_has_no_correlation() -> None:
    got = document_correlations(measured(rows()), {"flat": torch.full((12,), 1 / 12)})["flat"]
    assert got == {"spearman": None, "interval": None, "documents": 0}
    assert document_correlations(measured(rows(1)), {"a": rows(1)[0]})["a"]["interval"] is None
    with pytest.raises(InputError, match="do not fit"):
        document_correlations(measured(rows()), {"a": torch.rand(11)})


# ---- words -------------------------------------------------------------------------------------------------------


def test_the_nearest_curve_is_said_to_lead_by_how_much_and_how_surely() -> None:
    summary: dict[str, Any] = profile_summary("u")
    summary["comparison"] = {
        name: {"wasserstein": distance, "spearman": 0.5, "total_variation": 0.1}
        for name, distance in (("energy", 0.04), ("half", 0.05), ("projection", 0.07), ("residual", 0.14))
    }
    summary["intervals"] = {
        "comparison": {"energy": [0.03, 0.06]},
        "over_nearest": {"half": [-0.01, 0.03], "projection": [0.01, 0.05], "residual": [0.08, 0.12]},
    }
    finding = findings.closest_prediction(summary)
    assert finding is not None
    assert "`half` cannot be told apart" in finding.text
    assert "`projection` lies 0.030 farther away (95 % interval 0.010 to 0.050)" in finding.text
    assert "`residual` lies 0.100 farther away (95 % interval 0.080 to 0.120)" in finding.text
    assert "`half` lies" not in finding.text
    assert "0.030 to 0.060" in finding.sure


# ---- the command -------------------------------------------------------------------------------------------------

SMALL = ["--length", "64", "--samples", "4", "--quiet"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("variants") / "all"
    assert main(["profile", "bundled:bytes", "--all-variants", "--out", str(out), *SMALL]) == 0
    return out


@pytest.mark.slow
def test_all_variants_are_measured_compared_and_shown(folder: Path) -> None:
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    assert set(VARIANTS) <= set(summary["profiles"])
    assert set(summary["per_document"]) == set(summary["profiles"])
    for name, curve in summary["profiles"].items():
        assert sum(curve) == pytest.approx(1, abs=1e-5), name
        found = summary["per_document"][name]
        assert found["documents"] == 4
        assert -1 <= found["interval"][0] <= found["spearman"] <= found["interval"][1] <= 1
    assert "own" in summary["per_document"]["energy"]
    assert summary["per_document"]["energy"]["own"]["spearman"] != summary["per_document"]["energy"]["spearman"]
    # each way of measuring λ makes a curve of its own
    profiles = summary["profiles"]
    assert profiles["projection+no-op+block"] != profiles["projection+no-op"]
    assert profiles["projection+no-op+block"] != profiles["projection+no-op+block+centred"]
    report = (folder / "report.html").read_text("utf-8")
    assert 'id="documents-table"' in report
    assert 'id="calibrated-table"' in report
    with (folder / "per_document.csv").open() as file:
        assert {row["prediction"] for row in csv.DictReader(file)} == {"averaged", "own"}


@pytest.mark.slow
def test_a_calibrated_factor_is_judged_where_it_was_not_fitted(folder: Path) -> None:
    from posattn.results import read_tensors
    from posattn.rollout.dense import rollout
    from posattn.rollout.variants import area, scaled_mixing

    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    arrays, _ = read_tensors(folder / "arrays.safetensors")
    found = summary["calibrated"]
    assert set(found) == {"residual", "projection+no-op", "energy", "energy_value"}
    assert not any("calibrated" in name for name in summary["comparison"])  # what saw gradients is ranked apart
    one = found["residual"]
    assert one["documents"] == [2, 2]
    fit, judge = (part.mean(0) for part in arrays["influence_per_document"].double().split(2))
    mixing, kernels = torch.tensor(summary["mixing"]["token"]), arrays["kernels"].double()
    curve = rollout(scaled_mixing(mixing, one["factor"]), kernels).last
    assert one["fitted"] == pytest.approx(area(curve, fit), abs=1e-5)
    assert one["judged"] == pytest.approx(area(curve, judge), abs=1e-5)
    assert one["uncalibrated"] == pytest.approx(area(rollout(mixing.double(), kernels).last, judge), abs=1e-5)
    assert one["fitted"] <= area(rollout(mixing.double(), kernels).last, fit) + 1e-6
    assert one["interval"][0] <= one["interval"][1]


@pytest.mark.slow
def test_by_default_nothing_further_is_measured_and_perturbation_may_stand_in(tmp_path: Path) -> None:
    out = tmp_path / "default"
    arguments = ["--method", "perturbation", "--out", str(out), "--length", "16", "--samples", "2", "--quiet"]
    assert main(["profile", "bundled:bytes", *arguments]) == 0
    summary = json.loads((out / "summary.json").read_text("utf-8"))
    assert summary["influence_facts"]["method"] == "perturbation"
    assert "calibrated" not in summary
    left = {"energy_coherent", "energy_coherent_key", "energy_cotangent", "energy_cotangent_key"}
    left |= {"projection+no-op+block", "projection+no-op+block+centred"}
    assert set(VARIANTS) - set(summary["profiles"]) == left
    assert all("own" not in figures for figures in summary["per_document"].values())
