"""The support table: which model families work, with which position scheme, tested with which versions.

The rows are data that the tests write (`tests/test_families.py --support`, see CONTRIBUTING), kept in `support.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any


def support_table() -> list[dict[str, Any]]:
    """The rows, one a family: family, scheme, works, tested."""
    path = resources.files("posattn.reports").joinpath("static").joinpath("support.json")
    return json.loads(path.read_text("utf-8"))["families"] if path.is_file() else []


def as_text(known: Mapping[str, Any]) -> str:
    """The lists of `posattn models`, for a terminal."""
    lines = ["Bundled models (load_model, posattn profile, posattn heads):"]
    lines += [f"  {name:<24} {kind}" for name, kind in known["bundled"].items()] or ["  none"]
    lines += ["", "Published architectures (posattn simulate):"]
    lines += [f"  {name}" for name in known["presets"]]
    if known["families"]:
        columns = ("family", "scheme", "works", "tested")
        lines += ["", "Model families:", *_table(known["families"], columns)]
    return "\n".join(lines)


def _table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> list[str]:
    cells = [[str(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(len(row[i]) for row in [list(columns), *cells]) for i in range(len(columns))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [list(columns), *cells]
    ]
