"""The support table is what these tests find: every family through both adapters, against the committed table.

    POSATTN_WRITE_SUPPORT=1 pytest tests/test_support_table.py

writes `posattn/reports/static/support.json` and the table of `docs/support.md`; without it a difference fails. The
versions are recorded and not compared: what fails is a family that works differently from what is said.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posattn.errors import PosattnError, SelfCheckError
from posattn.heads.scores import score_heads
from posattn.models.base import Model, PositionScheme
from posattn.models.check import self_check
from posattn.models.loading import as_model, as_plain
from posattn.reports.support import as_markdown, support_table
from tests import families

ROOT = Path(__file__).parent.parent
DATA = ROOT / "posattn" / "reports" / "static" / "support.json"
PAGE = ROOT / "docs" / "support.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"
LENGTH = 12
NAMES = [*families.FAMILIES, *families.EXTRA]
WRITING = os.environ.get("POSATTN_WRITE_SUPPORT") == "1"
PACKAGES = ("transformers", "transformer-lens", "torch")


def versions() -> str:
    return ", ".join(f"{name} {importlib.metadata.version(name).split('+')[0]}" for name in PACKAGES)


def answer(make: Callable[[Any], Model], name: str) -> tuple[str, Model | None]:
    """Whether an adapter takes the family and passes the self-check, and the model if so."""
    try:
        model = make(families.tiny(name))
    except PosattnError:
        return "refused", None
    try:
        self_check(model, families.tokens(2, LENGTH))
    except SelfCheckError:
        return "fails the check", None
    return "yes", model


def by_keys(model: Model) -> str:
    """Whether hidden keys can be exchanged: not where they carry their position."""
    try:
        score_heads(model, families.tokens(1, LENGTH), bootstrap=0, evidence=False)
    except PosattnError:
        return "no"
    return "yes"


def in_words(scheme: PositionScheme, width: int, scaling: str | None) -> str:
    words = [scheme.kind if scheme.absolute is None else f"{scheme.absolute} absolute"]
    if scheme.rotary is not None:
        words += ["partial"] if scheme.rotary.width < width else []
        words += ["interleaved"] if scheme.rotary.interleaved else []
        words += [scaling] if scaling else []
    words += ["window"] if scheme.window is not None else []
    words += ["soft cap"] if scheme.softcap is not None else []
    words += ["learned sink"] if scheme.sinks is not None else []
    return " ".join(words[:1]) + (f" ({', '.join(words[1:])})" if words[1:] else "")


def scaling_of(name: str, kind: str | None) -> str | None:
    rope = (families.FAMILIES.get(name) or families.EXTRA[name]).keywords.get("rope_parameters") or {}
    # models whose layers differ have one entry for each kind of layer
    rope = rope.get(kind, rope) if isinstance(rope, dict) else {}
    found = rope.get("rope_type")
    return found if found != "default" else None


@functools.cache
def row(name: str) -> dict[str, str]:
    family = families.FAMILIES.get(name) or families.EXTRA[name]
    bridge, model = answer(as_model, name)
    plain, other = answer(as_plain, name)
    shown = model or other
    schemes: list[str] = []
    keys = ""
    if shown is not None:
        keys = by_keys(shown)
        kinds = family.keywords.get("layer_types") or [None] * shown.n_layers
        for layer, kind in zip(shown.layers, kinds, strict=True):
            words = in_words(shown.scheme(layer.index, LENGTH), layer.head_dim, scaling_of(name, kind))
            schemes += [words] if words not in schemes else []
    return {
        "family": family.model,
        "configuration": name,
        "scheme": " + ".join(schemes),
        "bridge": bridge,
        "plain": plain,
        "keys": keys,
    }


@pytest.mark.skipif(not WRITING, reason="writes the support table: POSATTN_WRITE_SUPPORT=1")
def test_write() -> None:
    rows = [{**row(name), "tested": versions()} for name in NAMES]
    DATA.write_text(json.dumps({"families": rows}, indent=1) + "\n", encoding="utf-8")
    before, rest = PAGE.read_text("utf-8").split(BEGIN)
    PAGE.write_text(before + BEGIN + as_markdown(rows) + END + rest.split(END)[1], encoding="utf-8")


def test_every_family_is_in_the_table() -> None:
    assert [entry["configuration"] for entry in support_table()] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_family_does_what_the_table_says(name: str) -> None:
    said = next(entry for entry in support_table() if entry["configuration"] == name)
    lens = f"transformer-lens {importlib.metadata.version('transformer-lens').split('.')[0]}."
    if lens not in said["tested"]:
        pytest.skip(f"the table was made with another transformer-lens: {said['tested']}")
    found = row(name)
    assert {key: said[key] for key in found} == found


def test_the_page_shows_the_table() -> None:
    assert as_markdown(support_table()) in PAGE.read_text("utf-8")


def test_the_command_shows_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    from posattn.commands.models import models

    models(as_json=True)
    assert json.loads(capsys.readouterr().out)["families"] == support_table()
    models(as_json=False)
    lines = capsys.readouterr().out.splitlines()
    for entry in support_table():
        line = next(line for line in lines if entry["configuration"] in line.split())
        assert entry["scheme"] in line
        assert entry["family"] in line
    assert any(versions_line.strip().startswith("Tested with") for versions_line in lines)
