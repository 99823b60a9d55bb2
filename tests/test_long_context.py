"""Long contexts on the command line: `--adapter` and `--bins` give what the default does, or say what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from posattn.cli import main
from posattn.probes.kernel_mean import by_bin
from posattn.probes.measure import measure
from posattn.probes.streamed import StreamedKernelProbe, coarser
from posattn.results import Result
from posattn.scale import Job, Shape, advice, estimate, nearest
from posattn.tokens import load_tokens
from tests import families

SHAPE = Shape("m", 10**9, 16, 32, 8, 64, 2048, 8192, 128_000, 32_768)
COMMON = ["--length", "64", "--samples", "3", "--batch-size", "2", "--device", "cpu", "--quiet"]


def run(out: Path, *options: str) -> dict[str, Any]:
    assert main(["profile", "bundled:bytes", *COMMON, *options, "--out", str(out)]) == 0
    return json.loads((out / "summary.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def default(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("default") / "run")


def close(found: Any, expected: Any, atol: float = 1e-5) -> None:
    torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected), rtol=0, atol=atol)


def test_one_position_a_bin_is_the_default_without_patterns(default: dict[str, Any], tmp_path: Path) -> None:
    found = run(tmp_path / "run", "--bins", "1")
    assert (default["provenance"]["adapter"], found["provenance"]["adapter"]) == ("bridge", "plain")
    assert "binning" not in found
    assert set(found["profiles"]) == {"residual", "half", "attention_only", "positional", "positional_content"}
    for name, curve in found["profiles"].items():
        close(curve, default["profiles"][name])
    close(found["influence"], default["influence"])
    close(found["mixing"]["token"], default["mixing"]["token"])
    assert any("energy" in warning and "left out" in warning for warning in found["warnings"])


def test_the_plain_adapter_without_bins_gives_everything(default: dict[str, Any], tmp_path: Path) -> None:
    found = run(tmp_path / "run", "--adapter", "plain")
    assert found["provenance"]["adapter"] == "plain"
    assert found["profiles"].keys() == default["profiles"].keys()
    for name, curve in found["profiles"].items():
        close(curve, default["profiles"][name])


@pytest.mark.parametrize("adapter", ["auto", "bridge"])
def test_bins_are_sums_and_their_error_is_said(default: dict[str, Any], tmp_path: Path, adapter: str) -> None:
    out = tmp_path / "run"
    found = run(out, "--bins", "4", "--adapter", adapter)
    fine = torch.tensor(default["profiles"]["residual"])
    off = float((torch.tensor(found["profiles"]["residual"]) - by_bin(fine, 4)).abs().sum() / 2)
    binning = found["binning"]
    assert (binning["width"], binning["bins"]) == (4, 16)
    assert 0 < off <= binning["bound"]
    assert off / 4 < binning["doubled"] < 16 * off  # an estimate, of the right size
    for name in ("positional", "positional_content"):  # never binned before they are rolled out
        close(found["profiles"][name], by_bin(torch.tensor(default["profiles"][name]), 4))
    close(found["influence"], by_bin(torch.tensor(default["influence"]), 4))
    said = " ".join(found["warnings"])
    assert "positions a bin" in said
    assert f"{binning['doubled']:.2g}" in said
    report = (out / "report.html").read_text("utf-8")
    assert "positions a bin" in report
    assert "in bins of 4" in report
    assert "of 64 tokens" in report
    assert "of 16 tokens" not in report
    assert "binning" not in default
    table = pd.read_csv(out / "profiles.csv")
    assert sorted(table["position"].unique()) == list(range(0, 64, 4))


def test_padded_documents_count_where_they_reach(tmp_path: Path) -> None:
    from posattn.commands.profile import binned_influence
    from posattn.influence.gradients import influence
    from posattn.models.loading import as_plain

    model = as_plain(families.tiny("llama"))
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[1, 5:] = False
    found = binned_influence(influence(model, load_tokens(families.tokens(2, 10), model, mask=mask)), 4)
    assert found.counts.tolist() == [2, 2, 1]
    assert found.per_document.isfinite().tolist() == [[True] * 3, [True, True, False]]
    assert float(found.profile.sum()) == pytest.approx(1, abs=1e-6)


def test_wider_bins_follow_from_narrow_ones(tmp_path: Path) -> None:
    from posattn.models.loading import as_plain

    model = as_plain(families.tiny("llama_grouped"))
    mask = torch.ones(3, 22, dtype=torch.bool)
    mask[2, 9:] = False
    tokens = load_tokens(families.tokens(3, 22), model, mask=mask)
    fine, coarse = (measure(model, tokens, bins=bins, progress=False) for bins in (3, 6))
    close(coarser(fine.kernels, fine.counts), coarse.kernels, 1e-6)
    assert fine.binning is not None
    fine.save(tmp_path / "fine.st")
    again = Result.load(tmp_path / "fine.st")
    assert again.binning == fine.binning  # pyright: ignore[reportAttributeAccessIssue]
    assert measure(model, tokens, progress=False).binning is None
    assert StreamedKernelProbe(3).settings()["bins"] == 3


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--adapter", "other"], "--adapter is one of"),
        (["--bins", "0"], "--bins"),
        (["--bins", "9"], "use --bins 8"),
        (["--bins", "4", "--per-head"], "cannot go together"),
        (["--bins", "4", "--all-variants"], "cannot go together"),
        (["--adapter", "hooked"], "own name"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_made(
    options: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["profile", "bundled:bytes", *COMMON, *options, "--out", str(out)]) == 2
    assert says in capsys.readouterr().err
    assert not out.exists()


def test_the_estimate_knows_the_plain_adapter_and_its_bins() -> None:
    job = Job(8192, 4, 1, "bfloat16", logits=True)
    plain = Job(8192, 4, 1, "bfloat16", logits=True, streamed=True, contributions=False, bins=16)
    need, less = (estimate(SHAPE, one, 10**13) for one in (job, plain))
    assert need.peak > 10 * less.peak
    assert estimate(SHAPE, Job(8192, 4, 1, "bfloat16"), 1).operations < need.operations


def test_the_nearest_setting_may_be_the_plain_adapter() -> None:
    job = Job(8192, 4, 1, "bfloat16", logits=True)
    free = 40 * 10**9
    found = nearest(SHAPE, job, free)
    assert found is not None
    assert (found.job.streamed, found.job.bins, found.job.contributions) == (True, 1, False)
    text = advice(SHAPE, job, free)
    assert "does not fit" in text
    assert "--adapter plain --bins 1 would need about" in text
    tight = nearest(SHAPE, job, 24 * 10**9)
    assert tight is not None
    assert tight.job.bins == 16
    other = nearest(Shape(**{**vars(SHAPE), "interface": False}), job, free)
    assert other is None or not other.job.streamed


def test_dry_run_counts_the_adapter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("llama", "bloom"):
        families.tiny(name).config.save_pretrained(tmp_path / name)
    command = ["--length", "64", "--samples", "2", "--device", "cpu", "--dry-run"]
    needed = {}
    for options in ([], ["--bins", "8"]):
        assert main(["profile", str(tmp_path / "llama"), *command, *options]) == 0
        needed[len(options)] = capsys.readouterr().out
    assert needed[0] != needed[2]
    assert main(["profile", str(tmp_path / "bloom"), *command, "--adapter", "plain"]) == 2
    assert "attention interface" in capsys.readouterr().err
    monkeypatch.setattr("posattn.scale.free_memory", lambda device: 10**5)
    assert main(["profile", str(tmp_path / "llama"), *command]) == 2
    assert "does not fit" in capsys.readouterr().err
