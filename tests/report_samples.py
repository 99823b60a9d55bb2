"""Made-up results with known answers, for the tests of reports: no model is needed to draw a page."""

from __future__ import annotations

from typing import Any

import numpy as np


def shape_of(profile: np.ndarray, nested: bool = True) -> dict[str, Any]:
    """The shape figures of a curve, computed plainly here (the library has its own)."""
    p = np.asarray(profile, float) / np.sum(profile)
    n = len(p)
    edges = np.arange(n + 1) / n
    cumulative = np.concatenate([[0], np.cumsum(p)])
    mass = lambda a, b: float(np.interp(b, edges, cumulative) - np.interp(a, edges, cumulative))  # noqa: E731
    primacy, recency, middle = mass(0, 1 / 8), mass(7 / 8, 1), mass(1 / 4, 3 / 4)
    figures: dict[str, Any] = {
        "primacy": primacy,
        "recency": recency,
        "middle": middle,
        "mean_position": float((p * np.arange(n)).sum() / (n - 1)),
        "trough": float(np.argmin(p) / (n - 1)),
        "u_index": min(primacy, recency) / 0.125 / (middle / 0.5) - 1 if middle else float("inf"),
    }
    if nested:
        figures["without_first"] = shape_of(p[1:], nested=False)
    return figures


def curve(kind: str, n: int = 64) -> np.ndarray:
    """A normalised curve: u, flat, recency, primacy, sink."""
    x = np.linspace(0, 1, n)
    values = {
        "u": 0.4 + np.exp(-12 * x) + 2 * np.exp(-12 * (1 - x)),
        "flat": np.ones(n),
        "recency": np.exp(4 * x),
        "primacy": np.exp(-4 * x),
        "sink": np.where(np.arange(n) == 0, 3.0 * n, 1.0),
    }[kind]
    return values / values.sum()


def distance(a: np.ndarray, b: np.ndarray) -> dict[str, float]:
    return {
        "wasserstein": float(np.abs(np.cumsum(a) - np.cumsum(b))[:-1].sum() / (len(a) - 1)),
        "spearman": float(np.corrcoef(np.argsort(np.argsort(a)), np.argsort(np.argsort(b)))[0, 1]),
        "total_variation": float(np.abs(a - b).sum() / 2),
    }


def profile_summary(
    influence: str | None = "u", layers: int = 4, n: int = 64, *, massive: bool = False, sink: bool = False, **more: Any
) -> dict[str, Any]:
    """A summary.json of `posattn profile` whose measured influence has the shape `influence`."""
    token = np.linspace(0.6, 0.3, layers)
    frobenius = token / (25 if massive else 1.3)
    profiles = {
        "residual": curve("sink" if sink else "recency", n),
        "attention_only": curve("primacy", n),
        "half": curve("flat", n),
    }
    measured = None if influence is None else curve(influence, n)
    curves = {**({} if measured is None else {"influence": measured}), **profiles}
    comparison = (
        {}
        if measured is None
        else {k: distance(v, measured) for k, v in {**profiles, "uniform": curve("flat", n)}.items()}
    )
    return {
        "schema": 1,
        "command": "profile",
        "provenance": {
            "model": "tests/made-up",
            "tokens": {"source": "bundled:python-docs", "documents": 16, "length": n, "bos": "added"},
            "seed": 0,
            "device": "cpu",
            "versions": {"posattn": "0.1.0", "torch": "2.13.0"},
            "time": "2026-01-02T03:04:05+00:00",
        },
        "mixing": {
            "token": token.tolist(),
            "frobenius": frobenius.tolist(),
            "token_std": [0.02] * layers,
            "frobenius_std": [0.01] * layers,
            "largest_position_share": [0.9 if massive else 0.05] * layers,
            "documents": 16,
        },
        "profiles": {k: v.tolist() for k, v in profiles.items()},
        "influence": None if measured is None else measured.tolist(),
        "influence_facts": {"method": "gradient_norm", "target": "argmax_probability", "documents": 16},
        "comparison": comparison,
        "shape": {k: shape_of(v) for k, v in curves.items()},
        "first_position_attention": np.linspace(0.1, 0.7, layers).tolist(),
        "sink_mass": [0.0] * layers,
        "warnings": [],
        **more,
    }


def profile_arrays(layers: int = 4, n: int = 64, heads: int | None = None) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shape = (layers, n, n) if heads is None else (layers, heads, n, n)
    kernels = np.tril(rng.gamma(0.3, size=shape) + 1e-4)
    kernels[..., 0] += 2
    kernels = kernels / kernels.sum(-1, keepdims=True)
    return {"kernels": kernels, "mixing_per_position": rng.uniform(0.2, 0.6, (layers, n))}


#: text that would do harm if any of it were taken for markup or script
HOSTILE = [
    "</script><script>window.__pwned=1</script>",
    "<img src=x onerror=window.__pwned=1>",
    '"><svg onload=window.__pwned=1>',
    "'-window.__pwned=1-'",
    "{{ 7*7 }}{% for x in y %}",
    "<!--<script>",
    "]]>&lt;b&gt;\u2028\u2029",
    "javascript:window.__pwned=1",
]
