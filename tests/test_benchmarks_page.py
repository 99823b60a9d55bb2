"""The benchmark page shows the committed result files, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import load_script


@pytest.fixture(scope="module")
def page() -> Any:
    return load_script("benchmarks/page.py")


def test_the_page_is_up_to_date(page: Any) -> None:
    assert page.tables() in page.PAGE.read_text("utf-8"), "run: python benchmarks/page.py"


def test_every_result_file_is_on_the_page(page: Any) -> None:
    text = page.PAGE.read_text("utf-8")
    for path in page.RESULTS.glob("*.json"):
        assert f"benchmarks/results/{path.name}" in text


def test_figures_come_from_the_files(page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = json.loads((page.RESULTS / "long-context-cpu.json").read_text("utf-8"))
    report["ways"]["streamed, binned"] |= {"seconds": 12.5, "peak_bytes": 3 * 2**20}
    (tmp_path / "long-context-cpu.json").write_text(json.dumps(report))
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    assert "| `streamed, binned` | 12.5 s | 3 MiB |" in page.tables()


def test_a_rollout_report_is_shown_by_its_own_table(page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"group": "g", "job": "structured", "status": "ok", "median_s": 0.5, "speedup": 2.0}
    (tmp_path / "rollout-cpu.json").write_text(json.dumps({"results": [row], "machine": {}}))
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    assert "| g | structured |" in page.tables()
    assert "2.00×" in page.tables()
