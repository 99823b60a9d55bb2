"""The tables of docs/theory/learning.md, made from the summaries that scripts/learning_tables.py wrote.

    python scripts/learning_page.py docs/results/learning docs/theory/learning.md

Everything between the two marks of the page is replaced. Figures are printed as they are; nothing is picked.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- tables: begin -->\n", "<!-- tables: end -->\n"
LABELS = ("positional", "symbolic", "uniform", "mixed")


def table(head: list[str], rows: list[list[Any]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


def step(value: int | None) -> str:
    return "never" if value is None else f"{value:,}"


def symbolic_layers(facts: dict[str, Any]) -> range:
    """Layers published as symbolic: from the first to the last that the figure's description names."""
    named = re.findall(r"L(\d+)", facts.get("symbolic_layers") or facts["symbolic_steps"])
    return range(int(named[0]), int(named[-1]) + 1)


def timeline(runs: dict[str, dict[str, Any]], published: dict[str, Any]) -> str:
    """Accuracy and heads of every run."""
    rows = []
    for name, run in runs.items():
        counts = {label: sum(h["label"] == label for h in run["heads"]) for label in LABELS}
        rows.append(
            [
                name,
                f"{run['steps']:,}",
                step(run["reached"]["0.5"]),
                step(run["reached"]["0.99"]),
                f"{run['best_accuracy']:.4f} at {run['best_step']:,}",
                f"{run['final_accuracy']:.4f}",
                *(counts[label] for label in LABELS),
            ]
        )
    for task in ("number", "letter"):
        facts = published["pure_heads_digitised"][task]
        positional = facts.get("positional_step", {})
        symbolic = len(symbolic_layers(facts))
        rows.append(
            [
                f"{task}, published",
                "6,750",
                "",
                "",
                f"at {facts['max_accuracy_step']:,}",
                "",
                len(positional),
                symbolic,
                "",
                "",
            ]
        )
    head = ["run", "steps", "accuracy ≥ .5 at", "≥ .99 at", "largest accuracy", "final", *LABELS]
    return table(head, rows)


def emergence(runs: dict[str, dict[str, Any]], published: dict[str, Any]) -> str:
    """Each layer's label and the step from which it stays; one-headed models only."""
    layers = max(len(run["heads"]) for run in runs.values())
    rows = []
    for task in ("number", "letter"):
        facts = published["pure_heads_digitised"][task]
        told = facts.get("positional_step", {})
        sure = symbolic_layers(facts)
        cells = [f"pos {told[f'L{i}']:,}" if f"L{i}" in told else "sym" if i in sure else "" for i in range(layers)]
        rows.append([f"{task}, published", *cells])
    for name, run in runs.items():
        rows.append([name, *(f"{h['label'][:3]} {h['since']:,}" for h in run["heads"])])
    return table(["run", *(f"L{i}" for i in range(layers))], rows)


def scores(runs: dict[str, dict[str, Any]]) -> str:
    """s_pos / s_sym by layer at the end."""
    layers = max(len(run["heads"]) for run in runs.values())
    rows = [
        [name, *(f"{h['positional']:.2f} / {h['symbolic']:.2f}" for h in run["heads"])] for name, run in runs.items()
    ]
    return table(["run", *(f"L{i}" for i in range(layers))], rows)


def frequency(runs: dict[str, dict[str, Any]], published: dict[str, Any]) -> str:
    rows = [[f"{task}, published", *published["frequency_id_per_layer_read"][task]] for task in ("number", "letter")]
    rows += [[name, *(f"{value:.0f}" for value in run["frequency_id"])] for name, run in runs.items()]
    return table(["run", *(f"L{i}" for i in range(12))], rows)


def lengths(groups: dict[str, dict[str, Any]], published: dict[str, Any]) -> str:
    """Accuracy by tokens added."""
    facts = published["length_generalisation_digitised"]
    curves = {
        f"{task}, published": dict(zip(facts["added_tokens"], facts[task], strict=True))
        for task in ("number", "letter")
    }
    for group, summary in groups.items():
        for seed, curve in summary.get("lengths", {}).items():
            curves[f"{group}, {seed}"] = dict(zip(curve["added"], curve["accuracy"], strict=True))
    added = sorted({n for curve in curves.values() for n in curve})
    rows = [[name, *(f"{curve[n]:.3f}" if n in curve else "" for n in added)] for name, curve in curves.items()]
    return table(["run", *(f"+{n:,}" for n in added)], rows)


def carried(groups: dict[str, dict[str, Any]]) -> str:
    """Positional score with the carried position moved and kept, and how much position the states hold."""
    rows = []
    for group, summary in groups.items():
        for seed, found in summary.get("carried", {}).items():
            by_layer: dict[int, list[int]] = {}
            for index, layer in enumerate(found["layer"]):
                by_layer.setdefault(layer, []).append(index)
            for what, key in (
                ("s_pos, carried position moves", "moves_positional"),
                ("s_pos, carried position stays", "stays_positional"),
                ("s_pos, exchanges within a kind", "within_positional"),
                ("s_sym, exchanges within a kind", "within_symbolic"),
                ("position decoded", "decoded"),
                ("share of variance", "share"),
            ):
                cells = [sum(found[key][i] for i in of) / len(of) for of in by_layer.values()]
                rows.append([f"{group}, {seed}", what, *(f"{cell:.2f}" for cell in cells)])
    return table(["run", "mean over heads", *(f"L{i}" for i in range(max(len(row) for row in rows) - 2))], rows)


def shares(runs: dict[str, dict[str, Any]]) -> str:
    """Shares of heads by label."""
    rows = []
    for name, run in runs.items():
        total = len(run["heads"])
        counts = [sum(h["label"] == label for h in run["heads"]) for label in LABELS]
        rows.append([name, total, *(f"{count / total:.0%}" for count in counts)])
    return table(["run", "heads", *LABELS], rows)


def page(folder: Path, published: dict[str, Any]) -> str:
    """All tables."""
    groups = {path.parent.name: json.loads(path.read_text()) for path in sorted(folder.glob("*/summary.json"))}
    for path in sorted(folder.glob("*/far.json")):
        for seed, curve in json.loads(path.read_text()).items():
            for name in ("added", "accuracy"):
                groups[path.parent.name]["lengths"][seed][name] += curve[name]
    if not groups:
        raise SystemExit(f"{folder} holds no group of scripts/learning_tables.py")
    runs = {f"{group}, {seed}": run for group, summary in groups.items() for seed, run in summary["runs"].items()}
    paper = {name: run for name, run in runs.items() if "-paper-" in name}
    parts = [
        ("Accuracy, and heads at the end (γ = .2)", timeline(runs, published)),
        ("Label of each layer's head at the end, and the step from which it keeps it", emergence(paper, published)),
        ("Positional / symbolic score of each layer's head at the end", scores(paper)),
        ("Frequency id by layer at the end (ids from 1)", frequency(paper, published)),
        ("Shares of heads", shares(runs)),
    ]
    if any("lengths" in summary for summary in groups.values()):
        parts.append(("Accuracy by tokens added", lengths(groups, published)))
    if any("carried" in summary for summary in groups.values()):
        parts.append(("Position carried in hidden states (final models)", carried(groups)))
    return "\n".join(f"**{title}**\n\n{body}" for title, body in parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("page", type=Path)
    args = parser.parse_args()
    published = json.loads((Path(__file__).parent / "data" / "published_heads.json").read_text())
    text = args.page.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    args.page.write_text(before + BEGIN + "\n" + page(args.folder, published) + "\n" + END + after)


if __name__ == "__main__":
    main()
