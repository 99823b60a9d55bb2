"""`posattn train` and `posattn lengths`: what they write, what they say, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from posattn.cli import main
from posattn.commands.lengths import parse_lengths
from posattn.errors import InputError
from posattn.reports.write import as_numpy, findings_of, read_folder, render_report
from posattn.tasks.tracking import Dynamics
from tests.test_cli import refused, tiny_folder  # noqa: F401

TASK = ["--targets", "3", "--pre-targets", "2", "--hops", "2", "--letters", "5"]
SHAPE = ["--layers", "2", "--heads", "2", "--d-model", "16", "--prompts", "6", "--every", "4"]
TINY = [*TASK, *SHAPE, "--steps", "8"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("train") / "number"
    assert main(["train", "number", *TINY, "--seed", "0", "--seed", "1", "--out", str(out), "--quiet"]) == 0
    return out


def test_train_writes_a_whole_folder_and_says_that_it_has_not_converged(trained: Path) -> None:
    summary, arrays = read_folder(trained)
    assert summary["command"] == "train"
    assert summary["steps"] == [0, 4, 8]
    assert list(summary["runs"]) == ["seed-0", "seed-1"]
    assert arrays["positional"].shape == (2, 3, 2, 2)
    first = findings_of(summary)[0]
    assert "not converged" in first.text
    assert first.tone == "caution"
    page = (trained / "report.html").read_text()
    assert "not converged" in page
    for name in (
        "curves.csv",
        "heads.csv",
        "emergence.csv",
        "relation.csv",
        "figures/accuracy.png",
        "figures/scores.pdf",
    ):
        assert (trained / name).stat().st_size > 0
    assert not (trained.parent / "number.training").exists()
    dynamics = Dynamics.load(trained / "dynamics.safetensors")
    assert torch.equal(dynamics.positional.float(), arrays["positional"].float())
    counts = {label: sum(row.count(label) for row in summary["labels"]["seed-0"]) for label in ("mixed", "uniform")}
    assert counts["mixed"] == summary["counts"]["seed-0"]["mixed"]


def test_a_converged_run_is_called_learned(trained: Path) -> None:
    summary, arrays = read_folder(trained)
    for run in summary["runs"].values():
        run.update(converged=True, accuracy=0.995)
    summary["emergence"] = [
        {
            "run": "seed-0",
            "event": "accuracy ≥ 0.99",
            "layer": None,
            "head": None,
            "first": 4,
            "stays": 4,
            "final": None,
        },
        {"run": "seed-0", "event": "symbolic", "layer": 1, "head": 0, "first": 4, "stays": 8, "final": "symbolic"},
    ]
    texts = [finding.text for finding in findings_of(summary)]
    assert "is learned" in texts[0]
    assert any("accuracy 99% at step 4" in text and "from step 8" in text for text in texts)
    assert "is learned" in render_report(summary, as_numpy(arrays))


def test_killed_command_goes_on_with_resume(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    from posattn.tasks import tracking

    measure, calls = tracking.HeadTracker.measure, []

    def killed(self, model):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return measure(self, model)

    out = tmp_path / "run"
    arguments = ["train", "number", *TINY, "--out", str(out), "--quiet"]
    monkeypatch.setattr(tracking.HeadTracker, "measure", killed)
    assert main(arguments) == 130
    monkeypatch.setattr(tracking.HeadTracker, "measure", measure)
    assert not out.exists()
    capsys.readouterr()
    assert "--resume" in refused(capsys, arguments)
    assert main([*arguments, "--resume"]) == 0
    assert (out / "curves-seed-0.jsonl").read_text() == (trained / "curves-seed-0.jsonl").read_text()


def test_lengths_of_a_trained_model(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "lengths"
    model = trained / "model" / "seed-0"
    arguments = ["lengths", str(model), "--lengths", "+0,+7", "--samples", "12", "--score-samples", "3"]
    assert main([*arguments, "--task", "number", "--out", str(out), "--quiet"]) == 0
    summary, arrays = read_folder(out)
    assert summary["metric"] == "accuracy"
    assert summary["lengths"] == [6, 13]
    assert set(summary["ablated"]) == {label for row in summary["labels"] for label in row}
    assert "By length" in render_report(summary, as_numpy(arrays))
    assert "same at every length" in findings_of(summary)[0].sure


def test_lengths_of_a_text_model_with_retrieval(tiny_folder: Path, tmp_path: Path) -> None:  # noqa: F811
    text, out = tmp_path / "text.txt", tmp_path / "lengths"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20, "utf-8")
    arguments = ["--text", str(text), "--lengths", "12,24", "--targets", "8", "--samples", "3", "--score-samples", "2"]
    assert main(["lengths", str(tiny_folder), *arguments, "--pairs", "3", "--out", str(out), "--quiet"]) == 0
    summary, arrays = read_folder(out)
    assert summary["metric"] == "loss"
    retrieval = summary["retrieval"]
    assert len(retrieval["place"]) == 3
    assert sum(retrieval["predicted"]) == pytest.approx(1)
    page = render_report(summary, as_numpy(arrays))
    assert "retrieval-chart" in page
    assert (out / "retrieval.csv").is_file()
    assert json.loads((out / "summary.json").read_text())["observed_break"] is None or summary["observed_break"] > 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "words"], "unknown task 'words'"),
        (["train", "number", "--hops", "30"], "too small for 30 hops"),
        (["train", "number", "--preset", "huge"], "unknown preset 'huge'"),
        (["train", "number", "--targets", "20", "--length", "17"], "do not fit 17 positions"),
        (["train", "index", "--hops", "2"], "the index task has no --hops: it has --length and --letters"),
        (["train", "number", "--purity", "0.7"], "--purity"),
        (["lengths", "no/such/folder/here"], "no such file or folder"),
        (["lengths", "x", "--task", "number", "--text", "y"], "not both"),
    ],
)
def test_wrong_use(arguments, message, tmp_path, capsys) -> None:
    assert message in refused(capsys, [*arguments, "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_another_task(trained: Path, tmp_path: Path, capsys) -> None:
    model = str(trained / "model" / "seed-0")
    out = ["--out", str(tmp_path / "out")]
    assert "not of 'letter'" in refused(capsys, ["lengths", model, "--task", "letter", *out])
    assert "whole numbers" in refused(capsys, ["lengths", model, "--lengths", "a,b", *out])
    assert "have 6 tokens, or more" in refused(capsys, ["lengths", model, "--lengths", "3", *out])


def test_parse_lengths() -> None:
    assert parse_lengths("+0,+50, 20", 17) == [17, 20, 67]
    with pytest.raises(InputError, match="only a task"):
        parse_lengths("+5", None)
