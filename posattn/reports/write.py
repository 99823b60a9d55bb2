"""A folder of results: summary.json, tables as .csv, arrays, the figures and the report.

What the report shows is made from the summary and the arrays alone, so that it can be drawn again from the folder.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posattn.errors import CheckpointError
from posattn.reports.kit import Finding
from posattn.results import read_tensors, write_tensors

SUMMARY, ARRAYS, REPORT = "summary.json", "arrays.safetensors", "report.html"


def plain(value: Any) -> Any:
    """A value as JSON knows it: tensors become lists, what is not a finite number becomes null."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (str, int, bool)):
        return value
    return str(value)


def write_folder(
    folder: Path,
    summary: Mapping[str, Any],
    arrays: Mapping[str, Any],
    tables: Mapping[str, Any],
    *,
    figures: bool = True,
) -> None:
    """Write everything but what `tables` (data frames by name) lacks. The folder exists and is empty."""
    text = json.dumps(plain(summary), indent=1, ensure_ascii=False, allow_nan=False)
    (folder / SUMMARY).write_text(text + "\n", "utf-8")
    write_tensors(folder / ARRAYS, arrays, {"class": "arrays", "command": summary["command"]})
    (folder / ARRAYS).chmod((folder / SUMMARY).stat().st_mode)  # it was written through a private temporary file
    for name, table in tables.items():
        table.to_csv(folder / f"{name}.csv", index=False)
    if figures:
        from posattn.reports.figures import write_figures

        write_figures(folder, summary, arrays)
    (folder / REPORT).write_text(render_report(plain(summary), as_numpy(arrays)), "utf-8")


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Summary and arrays of a folder that a command wrote.

    Raises:
        CheckpointError: the folder is not one of ours, or is damaged.
    """
    path = folder / SUMMARY
    if not path.is_file():
        raise CheckpointError(f"{folder} holds no {SUMMARY}: name a folder that posattn wrote")
    try:
        summary = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(summary, dict) or "command" not in summary:
        raise CheckpointError(f"{path} was not written by posattn")
    arrays = read_tensors(folder / ARRAYS)[0] if (folder / ARRAYS).is_file() else {}
    return summary, arrays


def as_numpy(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors as numpy arrays."""
    return {
        name: value.detach().cpu().float().numpy() if hasattr(value, "detach") else value
        for name, value in arrays.items()
    }


def render_report(summary: Mapping[str, Any], arrays: Mapping[str, Any]) -> str:
    """The report of a summary, whichever command it is of."""
    from posattn.reports.kit import render
    from posattn.reports.pages import PAGES

    return render(PAGES[summary["command"]](summary, arrays))


def findings_of(summary: Mapping[str, Any]) -> tuple[Finding, ...]:
    """What a summary says in words, most important first."""
    from posattn.reports import findings

    return findings.FINDINGS[summary["command"]](summary)
