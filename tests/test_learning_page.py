"""The learning page's tables are those of the committed summaries, and the bundled models are runs among them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results" / "learning"


def script():
    spec = importlib.util.spec_from_file_location("learning_page", ROOT / "scripts" / "learning_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_those_of_the_summaries():
    module = script()
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
