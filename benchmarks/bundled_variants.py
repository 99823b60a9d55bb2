"""All predicted profiles of the bundled models against their measured influence.

    python benchmarks/bundled_variants.py [--samples 32] [--lengths 256 512] [--out FOLDER] [--page FILE]

For each bundled model and length it measures, on the same documents, what `posattn profile` measures, and writes
bundled_variants.json (every figure) and docs/results/bundled_variants.md (the tables and what they say, made from those
figures). Seed 0; on one thread a run takes a few minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

MODELS = ("bundled:bytes-alibi", "bundled:bytes")
TEXT = "bundled:python-docs"
ROOT = Path(__file__).parent.parent
FORCES = {"causal": "causal mask", "residual": "residual", "position": "positions", "content": "content (β)"}


def measured(name: str, length: int, samples: int) -> dict[str, Any]:
    """The figures of one run of `posattn profile`."""
    from posattn.commands.profile import measure_profile
    from posattn.models.loading import load_model
    from posattn.tokens import load_tokens

    start = time.perf_counter()
    model = load_model(name)
    tokens = load_tokens(TEXT, model, length=length, samples=samples, seed=0)
    warnings: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        summary = measure_profile(model, tokens, Path(folder), warnings=warnings, quiet=True)
    kept = ("comparison", "variants", "intervals", "influence_facts", "forces", "shape", "mixing", "warnings")
    case = {key: summary[key] for key in kept}
    case["intervals"] = {k: v for k, v in case["intervals"].items() if k != "profile"}
    return {
        "model": name,
        "length": length,
        "documents": tokens.documents,
        "position": model.scheme(0, length).kind,
        "seconds": time.perf_counter() - start,
        **case,
    }


def page(cases: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    """The page in Markdown."""
    documents, lengths = cases[0]["documents"], sorted({case["length"] for case in cases})
    lines = [
        "# Bundled models: every variant",
        "",
        f"All profiles that `posattn profile` predicts for the two bundled models, against the measured influence "
        f"(gradient norm of the arg-max probability at the last position), {documents} documents of `{TEXT}` at "
        f"{' and '.join(str(n) for n in lengths)} tokens, seed 0. Distances are Wasserstein-1 as a share of the "
        "context length (first position included), in brackets the 95 % bootstrap interval over documents; **bold** is "
        "the nearest, and *italics* cannot be told from it (the interval of the paired difference reaches 0). The "
        "models have seen part of that text in training. Made by `benchmarks/bundled_variants.py` "
        f"(posattn {facts['posattn']}, torch {facts['torch']}, {facts['time'][:10]}), which also writes this page's "
        "sentences from the figures.",
        "",
        "| prediction | what it is | " + " | ".join(f"{c['model'].split(':')[1]}, {c['length']}" for c in cases) + " |",
        "|---|---|" + "---|" * len(cases),
    ]
    names = sorted(cases[0]["comparison"], key=lambda name: cases[0]["comparison"][name]["wasserstein"])
    for name in names:
        cells = []
        for case in cases:
            distance = case["comparison"][name]["wasserstein"]
            interval = case["intervals"]["comparison"].get(name)
            text = f"{distance:.3f}" + (f" ({interval[0]:.3f}–{interval[1]:.3f})" if interval else "")
            margin = case["intervals"]["over_nearest"].get(name)
            if name != "uniform":
                text = f"**{text}**" if margin is None else f"*{text}*" if margin[0] <= 0 else text
            cells.append(text)
        words = cases[0]["variants"].get(name) or "every position counts alike"
        lines.append(f"| `{name}` | {words} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "## Four forces",
        "",
        "Shapley shares in the distance between the measured influence and the `positional_content` profile: below 0, "
        "the force brings the profile nearer. The second figure is its share in the profile's mean position.",
        "",
        "| | " + " | ".join(f"{c['model'].split(':')[1]}, {c['length']}" for c in cases) + " |",
        "|---|" + "---|" * len(cases),
    ]
    parts = [next(iter(case["forces"].values())) for case in cases]
    lines.append("| even curve | " + " | ".join(f"{part['distance']['baseline']:.3f}" for part in parts) + " |")
    for i, force in enumerate(parts[0]["forces"]):
        cells = [f"{part['distance']['shares'][i]:+.3f}, {part['shares'][i][0]:+.3f}" for part in parts]
        lines.append(f"| {FORCES[force]} | " + " | ".join(cells) + " |")
    lines.append("| all four | " + " | ".join(f"{part['distance']['total']:.3f}" for part in parts) + " |")
    lines += ["", "## In words", ""]
    from posattn.reports import findings

    for case in cases:
        summary = {**case, "influence": [0.0] * case["length"]}
        told = [make(summary) for make in (findings.closest_prediction, findings.theory_reach, findings.force_behind)]
        text = " ".join(finding.text for finding in told if finding is not None)
        lines += [f"**{case['model']}, {case['length']} tokens.** {text}", ""]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "results" / "bundled_variants.md")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    import posattn

    cases = []
    for name in MODELS:
        for length in options.lengths:
            cases.append(measured(name, length, options.samples))
            print(f"{name} {length}: {cases[-1]['seconds']:.0f} s", file=sys.stderr, flush=True)
    facts = {
        "benchmark": "bundled_variants",
        "text": TEXT,
        "seed": 0,
        "posattn": posattn.__version__,
        "torch": torch.__version__,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "bundled_variants.json").write_text(json.dumps({**facts, "cases": cases}, indent=1) + "\n")
    options.page.parent.mkdir(parents=True, exist_ok=True)
    options.page.write_text(page(cases, facts), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
