"""Made-up results with known answers, for the tests of reports: no model is needed to draw a page."""

from __future__ import annotations

from typing import Any

import numpy as np

from posattn.reports import kit


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
        "mean_position": float((p * np.arange(n)).sum() / max(n - 1, 1)),
        "trough": float(np.argmin(p) / max(n - 1, 1)),
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
        "learned_sink_mass": [0.0] * layers,
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


def heads_summary(layers: int = 3, heads: int = 4, labels: str = "mixed") -> dict[str, Any]:
    """A summary.json of `posattn heads`: L0H0 positional, L1H1 symbolic, L2H2 an induction head, the rest `labels`.

    With labels "symbolic" there is no positional head at all.
    """
    corner = {"positional": (0.95, 0.05), "symbolic": (0.05, 0.95), "uniform": (0.97, 0.97), "mixed": (0.5, 0.6)}
    grid = [[labels] * heads for _ in range(layers)]
    if labels != "symbolic":
        grid[0][0], grid[1][1] = "positional", "symbolic"
    positional, symbolic = ([[corner[label][i] for label in row] for row in grid] for i in (0, 1))
    roles: list[list[list[str]]] = [[[] for _ in range(heads)] for _ in range(layers)]
    roles[2][2] = ["induction"]
    share = np.full((layers, heads), 0.02)
    share[2][2] = 0.8
    counts = {label: sum(row.count(label) for row in grid) for label in corner}

    def band(values: list[list[float]]) -> list[list[list[float]]]:
        return [[[v - 0.02, v + 0.02] for v in row] for row in values]

    return {
        "schema": 1,
        "command": "heads",
        "provenance": profile_summary()["provenance"],
        "positional": positional,
        "symbolic": symbolic,
        "entropy": [[1.0] * heads for _ in range(layers)],
        "positional_interval": band(positional),
        "symbolic_interval": band(symbolic),
        "interval_over": "documents",
        "confidence": 0.95,
        "level": "keys",
        "tau": 1e-4,
        "documents": 8,
        "queries": 64,
        "labels": grid,
        "nearest": grid,
        "certain": [[True] * heads for _ in range(layers)],
        "gamma": [[0.05 if label in ("positional", "symbolic") else 0.4 for label in row] for row in grid],
        "roles": roles,
        "counts": counts,
        "role_counts": {"induction": 1, "previous_token": 0, "sink": 0},
        "thresholds": {"purity": 0.2, "rule": "corner", "role_evidence": {"induction": "induction_repeat"}},
        "evidence": {
            "induction_repeat": {
                "measured": share.tolist(),
                "chance": np.full((layers, heads), 0.01).tolist(),
                "queries": 99,
            }
        },
        "rotary": {
            name: np.ones((layers, heads)).tolist()
            for name in ("head_id", "offset", "sharpness", "symbol_scale", "profile_distance")
        },
        "warnings": [],
    }


def heads_arrays(layers: int = 3, heads: int = 4, n: int = 24, frequencies: int = 8) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    pattern = np.tril(rng.gamma(0.3, size=(layers, heads, n, n)) + 1e-4)
    arrays = {
        "pattern": pattern / pattern.sum(-1, keepdims=True),
        "cross_logits": rng.normal(size=(layers, heads, n - 1, n - 1)),
        "rotary.frequencies": np.ones((layers, frequencies)),
    }
    for name in ("energy", "variance_share", "positional", "symbolic"):
        arrays[f"rotary.{name}"] = rng.uniform(size=(layers, heads, frequencies))
    for name in ("predicted_attention", "real_attention"):
        arrays[f"rotary.{name}"] = rng.uniform(size=(layers, heads, n))
    return arrays


def simulate_summary(primacy: bool = False) -> dict[str, Any]:
    """A summary.json of `posattn simulate` at 64 and 256 positions."""
    lengths = [64, 256]
    kind = "primacy" if primacy else "u"

    def packed(n: int) -> dict[str, Any]:
        return {
            name: {"position": list(range(n)), "value": curve(which, n).tolist()}
            for name, which in (("residual", kind), ("attention_only", "primacy"), ("half", "flat"))
        }

    return {
        "schema": 1,
        "command": "simulate",
        "provenance": {
            "preset": "made-up",
            "convention": "own",
            "architecture": {"name": "made-up", "layers": 3, "heads": 2, "position": "alibi", "slopes": "mpt"},
            "versions": {},
            "time": "2026-01-02T03:04:05+00:00",
        },
        "lengths": lengths,
        "mixing": [0.5, 0.3, 0.2],
        "profiles": {str(n): packed(n) for n in lengths},
        "shape": {str(n): {name: shape_of(np.array(c["value"])) for name, c in packed(n).items()} for n in lengths},
        "forces": {
            "64": {
                "forces": ["causal", "residual", "position", "content"],
                "quantities": ["mean_position", "primacy", "recency"],
                "shares": [[-0.3, 0.4, -0.1], [0.2, -0.2, 0.2], [0.1, -0.1, 0.2], [0.0, 0.0, 0.0]],
                "total": [0.5, 0.225, 0.425],
                "baseline": [0.5, 0.125, 0.125],
                "order": ["causal", "position", "residual", "content"],
            }
        },
        "depth": {
            "length": 64,
            "first_mass": [0.1, 0.2, 0.3],
            "off_first": [0.9, 0.8, 0.7],
            "bound": [0.95, 0.9, 0.85],
            "last_diagonal": [0.5, 0.4, 0.3],
            "mixing_sum": [0.5, 0.8, 1.0],
            "implication": "λ_t ≈ 0.5·t^−0.8 sums to infinity, so that at infinite depth all influence is on the first "
            "token",
            "condition": "the first column of A stays bounded below",
            "collapse": {"eta": 0.01, "depth": None, "predicted_depth": 900.0, "bound_depth": None, "reason": "slow"},
        },
        "monotonicity": {"length": 64, "worst": 0.0},
        "warnings": [],
    }


def compare_summary(difference: float = 0.3, half: float = 0.1) -> dict[str, Any]:
    """A summary.json of `posattn compare`: two profiles whose U index differs by `difference` ± `half`."""
    runs = [profile_summary("u"), profile_summary("recency")]
    row = {"run": 1, "first": 0.1, "this": 0.1 + difference, "difference": difference, "paired": True}
    return {
        "schema": 1,
        "command": "compare",
        "of": "profile",
        "provenance": {"runs": ["a", "b"], "versions": {}},
        "runs": [{"folder": name, **run} for name, run in zip("ab", runs, strict=True)],
        "names": ["a", "b"],
        "differing": {"seed": [0, 1]},
        "differences": [{**row, "figure": "u_index", "low": difference - half, "high": difference + half}],
        "warnings": [],
    }


def text_of(finding: kit.Finding | None) -> str:
    """What a finding says, with what it rests on."""
    assert finding is not None
    return f"{finding.text} {finding.sure}"
