"""The support table: which model families work, with which position scheme, tested with which versions.

The rows are data that the tests write: `POSATTN_WRITE_SUPPORT=1 pytest tests/test_support_table.py` makes
`support.json` from a tiny model of every family, and the same tests fail where the table says what is not so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

#: key of a row -> heading
COLUMNS = {
    "family": "class",
    "configuration": "configuration",
    "scheme": "positions",
    "bridge": "bridge",
    "plain": "plain",
    "keys": "keys",
}


def support_table() -> list[dict[str, Any]]:
    """The rows, one a tested configuration: the keys of `COLUMNS`, and tested (versions)."""
    path = resources.files("posattn.reports").joinpath("static").joinpath("support.json")
    return json.loads(path.read_text("utf-8"))["families"] if path.is_file() else []


def as_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table for the documentation, with the versions above it."""
    lines = [f"Tested with {versions}." for versions in _versions(rows)]
    lines += ["", "| " + " | ".join(COLUMNS.values()) + " |", "|" + "---|" * len(COLUMNS)]
    for row in rows:
        cells = [str(row.get(key, "")) for key in COLUMNS]
        cells[:2] = [f"`{cell}`" for cell in cells[:2]]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def as_text(known: Mapping[str, Any]) -> str:
    """The lists of `posattn models`, for a terminal."""
    lines = ["Bundled models (load_model, posattn profile, posattn heads):"]
    lines += [f"  {name:<24} {kind}" for name, kind in known["bundled"].items()] or ["  none"]
    lines += ["", "Published architectures (posattn simulate):"]
    lines += [f"  {name}" for name in known["presets"]]
    if known["families"]:
        lines += ["", "Model families, each tested on a tiny model with random weights:"]
        lines += _table(known["families"])
        lines += ["", *(f"Tested with {versions}." for versions in _versions(known["families"]))]
    return "\n".join(lines)


def _versions(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return sorted({str(row.get("tested", "")) for row in rows})


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    cells = [list(COLUMNS.values()), *([str(row.get(key, "")) for key in COLUMNS] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(COLUMNS))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    ]
