"""Summaries: result objects as the plain numbers of summary.json, with the tables that go beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from posattn.results import SCHEMA

#: kernels above this many numbers are not kept in arrays.safetensors
MOST_NUMBERS = 64 * 1024 * 1024


def profile_summary(
    measurement: Any,
    profiles: Mapping[str, Tensor],
    influence: Any = None,
    comparison: Mapping[str, Any] | None = None,
    shapes: Mapping[str, Any] | None = None,
    intervals: Mapping[str, Any] | None = None,
    warnings: Sequence[str] = (),
    **more: Any,
) -> dict[str, Any]:
    """What `posattn profile` found. `profiles` [N] by variant, `comparison` and `shapes` as dictionaries by curve."""
    mixing = measurement.mixing
    sink = measurement.sink_mass
    summary: dict[str, Any] = {
        "schema": SCHEMA,
        "command": "profile",
        "provenance": measurement.provenance,
        "mixing": {
            "token": mixing.token,
            "frobenius": mixing.frobenius,
            "token_std": mixing.token_std,
            "frobenius_std": mixing.frobenius_std,
            "largest_position_share": mixing.largest_position_share,
            "documents": mixing.documents,
        },
        "profiles": dict(profiles),
        "influence": None if influence is None else influence.profile,
        "comparison": dict(comparison or {}),
        "shape": dict(shapes or {}),
        "first_position_attention": first_position_attention(measurement.kernels),
        # what goes to learned sink logits, and so to no position; not to be mistaken for attention on the first one
        "learned_sink_mass": sink.mean(-1) if sink.dim() > 1 else sink,
        "warnings": [*measurement.warnings, *(w for w in warnings if w not in measurement.warnings)],
        **more,
    }
    if influence is not None:
        summary["influence_facts"] = {
            "method": influence.method,
            "target": influence.target,
            "normalize": influence.normalize,
            "documents": int(influence.per_document.shape[0]),
            "mean_probability": float(influence.probability.mean()),
        }
    if intervals:
        summary["intervals"] = dict(intervals)
    return summary


def profile_arrays(measurement: Any, influence: Any = None, **more: Tensor) -> dict[str, Tensor]:
    """The arrays that go with it; the kernels only where they are not too large."""
    arrays = {
        "mixing_per_position": measurement.mixing.per_position,
        "mixing_per_position_std": measurement.mixing.per_position_std,
        "learned_sink_mass": measurement.sink_mass,
        **more,
    }
    if measurement.kernels.numel() <= MOST_NUMBERS:
        arrays["kernels"] = measurement.kernels
    if influence is not None:
        arrays["influence_per_document"] = influence.per_document
    return arrays


def forces_summary(shares: Any, distance: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The four forces at one length; `distance` is their part in the distance to a measured profile."""
    names = ("forces", "quantities", "shares", "total", "baseline", "order")
    return {**{name: getattr(shares, name) for name in names}, **({} if distance is None else {"distance": distance})}


def first_position_attention(kernels: Tensor) -> Tensor:
    """Mean weight [T] that queries in the second half put on the first position."""
    mean = kernels.mean(1) if kernels.dim() == 4 else kernels
    return mean[:, mean.shape[-1] // 2 :, 0].mean(-1)


def profile_tables(summary: Mapping[str, Any], measurement: Any) -> dict[str, Any]:
    """The tables of `posattn profile`: mixing, profiles, comparison, shapes (tidy data frames)."""
    import pandas as pd

    curves = dict(summary["profiles"])
    if summary.get("influence") is not None:
        curves = {"influence": summary["influence"], **curves}
    tables: dict[str, Any] = {"mixing": measurement.to_dataframe()}
    width = (summary.get("binning") or {}).get("width", 1)  # a bin goes by its first position
    tables["profiles"] = pd.concat(
        pd.DataFrame(
            {"curve": name, "position": range(0, width * len(curve), width), "value": torch.as_tensor(curve).tolist()}
        )
        for name, curve in curves.items()
    )
    if summary.get("comparison"):
        tables["comparison"] = pd.DataFrame(
            [{"variant": name, **values} for name, values in summary["comparison"].items()]
        )
    if summary.get("per_document"):
        tables["per_document"] = correlations_table(summary["per_document"])
    if summary.get("calibrated"):
        tables["calibrated"] = pd.DataFrame(
            [
                {
                    "variant": name,
                    **{key: figures[key] for key in ("factor", "fitted", "judged", "uncalibrated")},
                    **_ends(figures["interval"]),
                    "documents_fitted": figures["documents"][0],
                    "documents_judged": figures["documents"][1],
                }
                for name, figures in summary["calibrated"].items()
            ]
        )
    rows = []
    for name, figures in (summary.get("shape") or {}).items():
        trimmed = figures.get("without_first")
        rows.append({"curve": name, "positions": "all", **{k: v for k, v in figures.items() if k != "without_first"}})
        if trimmed:
            rows.append({"curve": name, "positions": "without first", **trimmed})
    if rows:
        tables["shapes"] = pd.DataFrame(rows)
    if summary.get("forces"):
        tables["forces"] = forces_table(summary["forces"])
    return tables


def correlations_table(found: Mapping[str, Any]) -> Any:
    """One row for each variant and prediction ("averaged" over documents, or each document's "own")."""
    import pandas as pd

    rows = []
    for name, figures in found.items():
        for prediction, part in (("averaged", figures), ("own", figures.get("own"))):
            if part:
                row = {"variant": name, "prediction": prediction, "spearman": part["spearman"]}
                rows.append({**row, **_ends(part["interval"]), "documents": part["documents"]})
    return pd.DataFrame(rows)


def _ends(interval: Sequence[float] | None) -> dict[str, float | None]:
    low, high = interval or (None, None)
    return {"low": low, "high": high}


def forces_table(forces: Mapping[str, Any]) -> Any:
    """One row for each length, force and quantity (and `distance`, where it was set beside a measured profile)."""
    import pandas as pd

    rows = []
    for n, part in forces.items():
        for i, force in enumerate(part["forces"]):
            shares = dict(zip(part["quantities"], part["shares"][i], strict=True))
            if part.get("distance"):
                shares["distance"] = part["distance"]["shares"][i]
            rows += [{"length": int(n), "force": force, "quantity": q, "share": share} for q, share in shares.items()]
    return pd.DataFrame(rows)


def heads_summary(
    scores: Any, taxonomy: Any, rotary: Any = None, study: Any = None, warnings: Sequence[str] = ()
) -> dict[str, Any]:
    """What `posattn heads` found: scores, labels and roles of every head, with what they rest on."""
    summary: dict[str, Any] = {
        "schema": SCHEMA,
        "command": "heads",
        "provenance": scores.provenance,
        "positional": scores.positional,
        "symbolic": scores.symbolic,
        "entropy": scores.entropy,
        "positional_interval": scores.positional_interval,
        "symbolic_interval": scores.symbolic_interval,
        "interval_over": scores.interval_over,
        "confidence": scores.confidence,
        "level": scores.level,
        "tau": scores.tau,
        "documents": scores.documents,
        "queries": sum(len(positions) for positions in scores.queries),
        "labels": taxonomy.labels,
        "nearest": taxonomy.nearest,
        "certain": taxonomy.certain,
        "gamma": taxonomy.gamma,
        "roles": taxonomy.roles,
        "counts": taxonomy.counts,
        "role_counts": taxonomy.role_counts,
        "thresholds": taxonomy.thresholds,
        "warnings": list(warnings),
    }
    if scores.exact:
        summary["exact"] = dict(scores.exact)
    if scores.distance_share is not None:
        summary["distance_share"] = scores.distance_share
        summary["distance_share_chance"] = scores.distance_share_chance
    if scores.evidence is not None:
        summary["evidence"] = {
            name: {"measured": value, "chance": scores.evidence.chance[name], "queries": scores.evidence.queries[name]}
            for name, value in scores.evidence.measured.items()
        }
    if rotary is not None:
        summary["rotary"] = {
            name: getattr(rotary, name)
            for name in (
                "layer_id",
                "layer_energy_id",
                "head_id",
                "head_energy_id",
                "offset",
                "sharpness",
                "symbol_scale",
                "profile_distance",
            )
        }
    if study is not None:
        summary["ablation"] = {
            "classes": study.classes,
            "lengths": study.lengths,
            "mode": study.mode,
            "baseline": study.baseline.mean(0),
            "heads": {name: len(study.heads[name]) for name in study.classes},
            "overlap": study.overlap,
            **{
                name: getattr(study, name)
                for figure in ("increase", "control_increase", "excess")
                for name in (figure, f"{figure}_interval")
            },
            "documents": study.baseline.shape[0],
            "controls": study.control.shape[1],
        }
    return summary


def heads_tables(scores: Any, taxonomy: Any, rotary: Any = None, study: Any = None) -> dict[str, Any]:
    """The tables of `posattn heads`."""
    tables = {
        "heads": taxonomy.to_dataframe(),
        "scores": scores.to_dataframe(),
        "documents": scores.documents_dataframe(),
    }
    if rotary is not None:
        tables["rotary_heads"] = rotary.heads_dataframe()
        tables["rotary_frequencies"] = rotary.to_dataframe()
    if study is not None:
        tables["ablation"] = study.to_dataframe()
    return tables
