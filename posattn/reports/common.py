"""Sections that every report shares: warnings, provenance, what a run is called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posattn.reports.kit import Facts, Notes, Section
from posattn.words import count


def model_name(provenance: Mapping[str, Any]) -> str:
    """The model's name as a person would say it: the last part of a path."""
    name = str(_model(provenance).get("name") or provenance.get("preset") or "the model")
    return name.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1] or name


def _model(provenance: Mapping[str, Any]) -> Mapping[str, Any]:
    model = provenance.get("model")
    if isinstance(model, Mapping):
        return model
    return {"name": model} if model else {}


def subtitle(provenance: Mapping[str, Any]) -> str:
    """What was measured, in one line."""
    parts = []
    tokens = provenance.get("tokens") or {}
    if isinstance(tokens, Mapping) and tokens.get("documents"):
        parts.append(f"{count(tokens['documents'], 'document')} of {count(tokens.get('length', 0), 'token')}")
        if tokens.get("source"):
            parts.append(f"from {tokens['source']}")
    text = " ".join(parts)
    if time := provenance.get("time"):
        text = " · ".join(part for part in (text, str(time)[:10]) if part)
    return text


def footer(provenance: Mapping[str, Any]) -> str:
    version = (provenance.get("versions") or {}).get("posattn", "")
    return (
        f"Made by posattn {version}. The numbers behind every figure are in summary.json, the .csv files and "
        "arrays.safetensors beside this page."
    )


def warnings_section(summary: Mapping[str, Any]) -> Section | None:
    """The warnings in words; nothing where there are none."""
    warnings = tuple(map(str, summary.get("warnings") or ()))
    if not warnings:
        return None
    return Section(
        "warnings", "Warnings", (Notes(warnings, "caution"),), "What changes how these numbers should be read."
    )


def _value(value: Any) -> str:
    """A setting as a person would write it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value).removeprefix("torch.")


def provenance_section(summary: Mapping[str, Any]) -> Section:
    """Everything that is needed to measure the same again."""
    pairs: list[tuple[str, str]] = []

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for name, inner in value.items():
                add(f"{prefix} {name}".strip().replace("_", " "), inner)
        elif isinstance(value, (list, tuple)):
            shown = ", ".join(map(_value, value[:12])) + (f" … ({len(value)} in all)" if len(value) > 12 else "")
            pairs.append((prefix, shown))
        elif value is not None:
            pairs.append((prefix, _value(value)))

    for name, value in summary["provenance"].items():
        add("" if name == "versions" else name.replace("_", " "), value)
    return Section(
        "provenance",
        "Provenance",
        (Facts(tuple(pairs)),),
        "What was measured, with what, and how: enough to do it again.",
    )
