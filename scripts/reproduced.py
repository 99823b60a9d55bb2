"""Writes docs/reproduced.md: published figures beside what this library computes.

    python scripts/reproduced.py           # writes the page
    python scripts/reproduced.py --check   # fails where the page is not what would be written

The published side is read from tests/data (each file says where its numbers are from), our side comes from the public
functions. What took training stands on the page on learning dynamics.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import torch

import posattn
from posattn.rollout.depth import collapse, depth_theory
from posattn.rollout.simulate import preset
from posattn.tasks import make_task
from posattn.tasks.constructions import IndexHead, RetrievalHead, construct
from posattn.tasks.discrepancy import index_bound, retrieval_bound
from posattn.words import count, number

ROOT = Path(__file__).parents[1]
PAGE, DATA = ROOT / "docs" / "reproduced.md", ROOT / "tests" / "data"
A = "[arXiv 2602.16837](https://arxiv.org/abs/2602.16837)"
B = "[arXiv 2605.31558](https://arxiv.org/abs/2605.31558)"
#: positions of the published curves
LENGTH = 256
#: the published example paths of the two tasks: sequence, answer (arXiv 2605.31558)
EXAMPLES = {
    "number": ("n h n v h y r s 6 3 2 7 7 8 4 7 2", "n"),
    "letter": ("e1 b2 e1 g6 a2 b2 e1 g6 be db ca ge eb hc dg fh eh", "a2"),
}
MODELS = ("falcon-rw-7b", "mpt-7b", "mpt-30b", "bloom-7b1", "bloom-176b")


def read(name: str) -> dict[str, Any]:
    return json.loads((DATA / name).read_text("utf-8"))


def table(heads: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (heads, ["---"] * len(heads), *rows)]


def below(value: float) -> str:
    """A difference that is rounding, as an order of magnitude that does not change from machine to machine."""
    for power in (12, 9):
        if value < 10**-power:
            return f"below 10⁻{'¹²' if power == 12 else '⁹'}"
    return f"{value:.1g}"


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return posattn.compare_profiles(a / a.sum(), b / b.sum()).wasserstein


def rollouts() -> list[str]:
    """Curves computed from the published λ."""
    golden, rows = read("rollout_golden.json"), []
    cases = [
        ("mpt-7b", "geometric_slopes", {"convention": "published"}, "residual, slopes 2^(−8h/H)"),
        ("mpt-7b", "attention_only", {"mixing": 1.0}, "attention only (λ = 1)"),
        ("bloom-176b", "geometric_slopes", {"convention": "published"}, "residual, slopes 2^(−8h/H)"),
        ("bloom-176b", "hf_slopes", {}, "residual, BLOOM's own slopes"),
        ("bloom-176b", "attention_only", {"mixing": 1.0, "convention": "published"}, "attention only (λ = 1)"),
    ]
    for model, curve, options, words in cases:
        reference = torch.tensor(golden[model][curve], dtype=torch.float64)
        ours = posattn.simulate(model, LENGTH, **options).last
        worst = float((ours - reference).abs().max())
        rows.append([model, words, number(float(reference[0]), 4), number(float(ours[0]), 4), below(worst)])
    return table(["model", "curve", "first position, reference", "posattn", "largest difference"], rows)


def figure() -> list[str]:
    """The panels of the figure for BLOOM-176B."""
    panels = read("bloom_176b_figure.json")
    data = {name: torch.tensor(v, dtype=torch.float64) for name, v in panels.items() if isinstance(v, list)}
    measured = data["d_measured"]
    published, own = (posattn.simulate("bloom-176b", LENGTH, **o).last for o in ({"convention": "published"}, {}))
    alone = posattn.simulate("bloom-176b", LENGTH, mixing=1.0, convention="published").last
    flat = torch.full((LENGTH,), 1 / LENGTH, dtype=torch.float64)
    rows = [
        ["b: residual rollout, W1 to the measured panel d", distance(data["b_residual"], measured), published],
        ["c: residual and content, W1 to panel d", distance(data["c_content"], measured), None],
        ["attention alone, W1 to panel d", None, alone],
        ["residual rollout with the model's own slopes, W1 to panel d", None, own],
        ["an even curve, W1 to panel d", None, flat],
    ]
    lines = []
    for words, theirs, curve in rows:
        ours = None if curve is None else distance(curve, measured)
        lines.append([words, *("–" if value is None else number(value, 3) for value in (theirs, ours))])
    worst = float((published - data["b_residual"]).abs().max())
    lines.insert(0, ["b: residual rollout, largest difference in a position", "–", f"below {_ceiling(worst)}"])
    return table(["panel", "published (digitised)", "posattn"], lines)


def _ceiling(value: float) -> str:
    """The power of ten that a difference stays below."""
    return next(words for step, words in ((1e-5, "10⁻⁵"), (1e-4, "10⁻⁴"), (1.0, "1")) if value < step)


def depth() -> list[str]:
    """What the published λ imply beyond the last layer; the paper has no such numbers."""
    rows = []
    for name in MODELS:
        architecture = preset(name)
        theory, end = depth_theory(architecture, LENGTH), collapse(architecture, LENGTH)
        assert theory.fit is not None
        fit = theory.fit
        reached = "never" if end.depth is None and end.predicted_depth is None else None
        if reached is None:
            reached = str(end.depth) if end.depth else f"about {end.predicted_depth:.2g}"
        rows.append(
            [
                f"{name} (fineweb-edu)",
                str(architecture.layers),
                number(float(architecture.schedule().sum()), 2),
                f"{fit.law} ({number(fit.error, 2)})",
                number(float(theory.profiles[-1, 0]), 3),
                reached,
            ]
        )
    heads = ["model", "layers", "Σλ", "fit from layer 2 on (rms error of log λ)", "first position, last layer"]
    return table([*heads, "depth for 99 %"], rows)


def bounds() -> list[str]:
    """Upper bounds of the discrepancy, and what a head of that kind has."""
    published, rows = read("published_heads_bounds.json"), []
    cases = (
        ("index, θ = 0.866", "index_theta_0.866", lambda n: (index_bound(0.866, n), IndexHead(0.866).discrepancy(n))),
        (
            "retrieval, θ = 0.0027, 8 letters",
            "retrieval_theta_0.0027_alphabet_8",
            lambda n: (retrieval_bound(0.0027, 8, n), RetrievalHead(8, 0.0027).discrepancy(n)),
        ),
    )
    for words, name, compute in cases:
        for n, theirs in zip(published["lengths"], published[name], strict=True):
            bound, exact = compute(n)
            rows.append([words, str(n), f"{theirs:g}", number(bound, 4), number(exact, 4)])
    heads = ["head", "keys", "bound by the formula", "bound, posattn", "discrepancy of our head (exact)"]
    return table(heads, rows)


def examples() -> list[str]:
    rows = []
    for name, (sequence, answer) in EXAMPLES.items():
        task = make_task(name)
        found = task.decode(construct(task).answers(task.encode(sequence)[None]))
        rows.append([name, f"`{sequence}`", f"`{answer}`", f"`{found}`"])
    return table(["task", "sequence", "published answer", "posattn's construction"], rows)


def page() -> str:
    """The whole page."""
    measured = read("bloom_176b_figure.json")
    assert len(measured["d_measured"]) == LENGTH
    parts: list[str | list[str]] = [
        "# Reproduced figures",
        "<!-- written by scripts/reproduced.py; change that, not this -->",
        "Published figures beside what this library computes. Every number of ours on this page is computed from "
        "formulas and published mixing coefficients, in float64 and without running a model, so it has no sampling "
        "error; that of the published measurement beside it is not known here.",
        "## Rollouts of the published mixing coefficients",
        f"Source: the mixing coefficients λ of {A} (256 tokens, 1000 documents, four decimals) and its formula, "
        "evaluated densely in float64 by separate code (`tests/data/rollout_golden.json`); causal ALiBi kernel, mean "
        "over heads, "
        f"{count(LENGTH, 'position')}, the last position's row.",
        rollouts(),
        f"## The figure for BLOOM-176B at {count(LENGTH, 'position')}",
        f"Source: {A}, the figure of four panels for fineweb-edu, digitised from the vector graphic (good to a few "
        "10⁻⁶ per position); panel d is the measured gradient norm of the arg-max probability. W1 is the Wasserstein-1 "
        "distance as a share of the context; in the published column it is computed from the digitised curves.",
        figure(),
        "Panel c needs the model's content coefficients β, which are not among the published numbers used here; only "
        "its distance can be given. The paper's code uses slopes 2^(−8h/H) for every model, which are not BLOOM's for "
        "112 heads: with the model's own slopes the same rollout comes nearer to the measured panel. "
        "[Limits and disagreements](limits.md) has the other differences.",
        "## What the published coefficients imply for depth",
        f"Ours alone, with no published numbers beside them: {A} states the condition (Σλ infinite, and the first "
        "column of A bounded below). The last column is computed where a whole number stands, up to 4096 layers, and "
        "extrapolated otherwise, **provided that** λ goes on as fitted with the last layer's kernel. The error of the "
        "fit is not small, so this is a reading of the fit and no statement about a deeper model. Own slopes of each "
        "model.",
        depth(),
        "## Bounds of the discrepancy",
        f"Source: the formulas of {B}, recomputed: index construction min(1 − cos θ, 2π²/n²), retrieval "
        "1 − cos(ω − nθ) with ω = 2π/8. The discrepancy is the query's largest logit less its second largest, in the "
        "worst case over keys; a head must not exceed its bound.",
        bounds(),
        "## Example paths",
        f"Source: the worked examples of {B}. The constructions have no trained weights.",
        examples(),
        "## Learning dynamics and trained heads",
        "What took training (accuracy by hops, when heads become pure, frequencies by layer, length generalisation) is "
        "set beside the published figures on the page on [learning dynamics](theory/learning.md).",
    ]
    lines: list[str] = []
    for part in parts:
        lines += part if isinstance(part, list) else [textwrap.fill(part, 118, break_on_hyphens=False)]
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    arguments = parser.parse_args()
    text = page()
    if arguments.check:
        if not PAGE.is_file() or PAGE.read_text("utf-8") != text:
            print(f"{PAGE} is not what this script writes: run it without --check", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
