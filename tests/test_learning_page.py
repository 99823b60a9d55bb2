"""The learning page's tables are those of the committed summaries, and the bundled models are runs among them."""

from __future__ import annotations

import json

from tests.scripts import ROOT, load_script

RESULTS = ROOT / "docs" / "results" / "learning"


def test_tables_are_those_of_the_summaries():
    module = load_script("scripts/learning_page.py")
    published = json.loads((ROOT / "scripts" / "data" / "published_heads.json").read_text("utf-8"))
    text = (ROOT / "docs" / "theory" / "learning.md").read_text("utf-8")
    made = text.split(module.BEGIN)[1].split(module.END)[0].strip()
    assert made == module.page(RESULTS, published).strip()


def test_trained_models_reach_their_task_and_letters_have_no_positional_head():
    for folder in RESULTS.iterdir():
        summary = json.loads((folder / "summary.json").read_text("utf-8"))
        for run in summary["runs"].values():
            assert run["best_accuracy"] >= 0.99
            labels = [head["label"] for head in run["heads"]]
            if summary["task"] == "letter":
                assert "positional" not in labels
                assert labels.count("symbolic") >= 9
