"""Tables and figures of finished training runs, beside the published ones.

    python scripts/learning_tables.py OUT RUN [RUN ...] [--lengths] [--carried] [--samples 256]
    python scripts/learning_tables.py OUT RUN [RUN ...] --far --samples 32

A RUN is a folder of scripts/train_tasks.py (curves.jsonl, snapshots/, model/). Runs that differ in their seed alone are
taken together. Heads come from the curves where they were tracked (--track), else from the snapshots; from the final
model where its step was not tracked.
OUT receives, per group, curves.csv, emergence.csv, relation.csv and their figures, on the steps that all its runs have;
lengths.csv with --lengths; carried.csv with --carried; and summary.json, each run on all of its own steps, with the
published figures of arXiv 2605.31558 beside ours (scripts/learning_page.py makes the page's tables of it). No
checkpoint is copied.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from posattn.tasks.lengths import PUBLISHED_ADDED, length_generalisation
from posattn.tasks.tracking import Dynamics, HeadTracker
from posattn.tasks.training import TrainingConfig, accuracy, load_snapshot

#: most tokens added up to which heads are scored too
WITH_HEADS = 100
#: two to four times the tasks' own 17 tokens
MULTIPLES = (17, 34, 51)
PUBLISHED = Path(__file__).parent / "data" / "published_heads.json"


def group_name(config: TrainingConfig) -> str:
    """The name of a run without its seed."""
    parts = [config.task, config.preset, f"lr{config.learning_rate:g}"]
    if config.dropout != 0.1:
        parts.append(f"dropout{config.dropout:g}")
    if config.task_parameters.get("distractors", "published") != "published":
        parts.append(config.task_parameters["distractors"])
    return "-".join(parts)


def final_model(run: Path) -> Any:
    """The final model of a run in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32).eval()


def records_of(run: Path, config: TrainingConfig) -> list[dict[str, Any]]:
    """The run's records with head figures: tracked while it trained, or measured now from what was stored."""
    curves = [json.loads(line) for line in (run / "curves.jsonl").read_text().splitlines()]
    if "positional" in curves[-1]:
        return curves
    tracked = any("positional" in record for record in curves)
    samples = config.make_task().generate(config.eval_samples, seed=config.seed + 1_000_003)
    tracker = HeadTracker.for_task(
        config.make_task(), 1, 32, seed=config.seed, accuracy=lambda model: accuracy(model, samples)
    )
    for path in [] if tracked else sorted((run / "snapshots").glob("step-*.safetensors")):
        model, _, step = load_snapshot(path)
        tracker.measure_at(model, step)
    if (run / "model" / "config.json").is_file():
        tracker.measure_at(final_model(run), curves[-1]["step"])
    return sorted([*(curves[:-1] if tracked else []), *tracker.records], key=lambda record: record["step"])


def run_summary(run: Dynamics, purity: float) -> dict[str, Any]:
    """One run on all of its steps: accuracy, when it was reached, and each head's label, scores and history."""
    labels = run.labels(purity)[0]
    accuracy = run.accuracy[0]
    heads = []
    for layer in range(run.positional.shape[2]):
        for head in range(run.positional.shape[3]):
            history = [step[layer][head] for step in labels]
            label = history[-1]
            since = max((i + 1 for i, x in enumerate(history) if x != label), default=0)
            heads.append(
                {
                    "layer": layer,
                    "head": head,
                    "label": label,
                    "since": run.steps[since],
                    "ever_positional": next((run.steps[i] for i, x in enumerate(history) if x == "positional"), None),
                    "positional": run.positional[0, -1, layer, head].item(),
                    "symbolic": run.symbolic[0, -1, layer, head].item(),
                }
            )
    return {
        "steps": run.steps[-1],
        "final_accuracy": accuracy[-1].item(),
        "best_accuracy": accuracy.max().item(),
        "best_step": run.steps[int(accuracy.argmax())],
        "reached": {str(level): _first(run.steps, accuracy >= level) for level in (0.5, 0.9, 0.99)},
        "heads": heads,
    }


def _first(steps: Sequence[int], hit: torch.Tensor) -> int | None:
    return next((step for step, yes in zip(steps, hit.tolist(), strict=True) if yes), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--lengths", action="store_true", help="length curves of the final models too")
    parser.add_argument("--carried", action="store_true", help="position carried in hidden states of the final models")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--longest", type=int, default=1000, help="most tokens added")
    parser.add_argument("--far", action="store_true", help="only the accuracy at 2,000 and 5,000 tokens, into far.json")
    parser.add_argument("--purity", type=float, default=0.2)
    args = parser.parse_args()
    groups: dict[str, dict[str, tuple[Path, TrainingConfig]]] = defaultdict(dict)
    for run in args.runs:
        config = TrainingConfig.from_json(json.loads((run / "config.json").read_text()))
        groups[group_name(config)][f"seed {config.seed}"] = (run, config)
    if args.far:
        for name, members in groups.items():
            write_far(args.out / name, members, args.samples)
        return
    published = json.loads(PUBLISHED.read_text())
    for name, members in groups.items():
        write_group(args.out / name, members, published, args)


def write_far(folder: Path, members: dict[str, tuple[Path, TrainingConfig]], samples: int) -> None:
    """Accuracy of the final models with the most tokens added, a few samples each."""
    added = [n for n in PUBLISHED_ADDED if n > 1000]
    found = {}
    for seed, (run, config) in members.items():
        own, model = config.make_task(), final_model(run)
        few = own.generate(samples, seed=config.seed + 3_500_003)
        values = [accuracy(model, own.prepend(few, n), batch=1)["accuracy"] for n in added]
        found[seed] = {"added": added, "accuracy": values, "samples": samples}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "far.json").write_text(json.dumps(found, indent=1) + "\n")


def write_group(
    folder: Path, members: dict[str, tuple[Path, TrainingConfig]], published: dict[str, Any], args: argparse.Namespace
) -> None:
    """The tables, figures and summary of one group."""
    import pandas as pd
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    records = {seed: records_of(run, config) for seed, (run, config) in members.items()}
    dynamics = Dynamics.from_records(records)
    emergence, relation = dynamics.emergence(args.purity), dynamics.relation(args.purity)
    dynamics.curves_dataframe(args.purity).to_csv(folder / "curves.csv", index=False)
    dynamics.to_dataframe().to_csv(folder / "heads.csv", index=False)
    emergence.to_dataframe().to_csv(folder / "emergence.csv", index=False)
    relation.to_dataframe().to_csv(folder / "relation.csv", index=False)
    for what, result in (("curves", dynamics), ("emergence", emergence), ("relation", relation)):
        figure = Figure(figsize=(6.4, 4.2), layout="constrained")
        result.plot(figure.subplots())
        figure.savefig(folder / f"{what}.png", dpi=150)
    task = next(iter(members.values()))[1].task
    summary: dict[str, Any] = {
        "task": task,
        "preset": next(iter(members.values()))[1].preset,
        "purity": args.purity,
        "runs": {seed: run_summary(Dynamics.from_records({seed: rows}), args.purity) for seed, rows in records.items()},
        "common_steps": dynamics.steps[-1],
        "relation": relation.to_dataframe().to_dict("records"),
        "published": {
            "pure_heads": published["pure_heads_digitised"].get(task),
            "frequency_id": published["frequency_id_per_layer_read"].get(task),
        },
    }
    for seed, (run, config) in members.items():  # of the final model, whatever the curves hold
        tracker = HeadTracker.for_task(config.make_task(), 1, 64, seed=config.seed)
        summary["runs"][seed]["frequency_id"] = tracker.measure(final_model(run))["frequency_id"]
    if args.carried:
        from posattn.heads import carried_position

        frames = []
        for seed, (run, config) in members.items():
            own = config.make_task()
            rows = own.generate(args.samples, seed=config.seed + 2_500_003).tokens
            # the two kinds of token: targets and pre-targets; numbers end in a digit in one, targets in the other
            digit = torch.tensor([name[-1].isdigit() for name in own.vocabulary])
            found = carried_position(final_model(run), rows, kinds=digit[rows].long())
            frames.append(found.to_dataframe().assign(run=seed, chance=found.chance))
            figure = Figure(figsize=(6.4, 4.2), layout="constrained")
            found.plot(figure.subplots())
            figure.savefig(folder / f"carried-{config.seed}.png", dpi=150)
        carried = pd.concat(frames)
        carried.to_csv(folder / "carried.csv", index=False)
        summary["carried"] = {seed: carried[carried["run"] == seed].to_dict("list") for seed in members}
    if args.lengths:
        summary["lengths"], frames = {}, []
        for seed, (run, config) in members.items():
            own = config.make_task()
            wanted = [0, *(n for n in sorted({*PUBLISHED_ADDED, *MULTIPLES}) if n <= args.longest)]
            added = [n for n in wanted if n <= WITH_HEADS]
            curve = length_generalisation(
                final_model(run),
                own,
                [own.length + n for n in added],
                samples=args.samples,
                score_samples=8,
                ablate=False,
            )
            frames.append(curve.to_dataframe().assign(run=seed, added=added))
            # farther out the answers alone, on fewer samples
            model, few = final_model(run), own.generate(max(1, args.samples // 2), seed=config.seed + 3_500_003)
            beyond = {n: accuracy(model, own.prepend(few, n), batch=2)["accuracy"] for n in wanted if n > WITH_HEADS}
            if beyond:
                rows = [{"length": own.length + n, "value": v, "run": seed, "added": n} for n, v in beyond.items()]
                frames.append(pd.DataFrame(rows).assign(samples=len(few)))
            curve.heads_dataframe().assign(run=seed).to_csv(folder / f"heads-by-length-{config.seed}.csv", index=False)
            figure = Figure(figsize=(6.4, 4.2), layout="constrained")
            curve.plot(figure.subplots())
            figure.savefig(folder / f"lengths-{config.seed}.png", dpi=150)
            summary["lengths"][seed] = {
                "added": [*added, *beyond],
                "accuracy": [*curve.value.tolist(), *beyond.values()],
                "predicted_break": [curve.predicted_break("first"), curve.predicted_break("median")],
                "observed_break": curve.observed_break(),
            }
        pd.concat(frames).to_csv(folder / "lengths.csv", index=False)
        digitised = published["length_generalisation_digitised"]
        summary["published"]["lengths"] = {"added": digitised["added_tokens"], "accuracy": digitised.get(task)}
    from posattn.reports.write import plain

    (folder / "summary.json").write_text(json.dumps(plain(summary), indent=1) + "\n")


if __name__ == "__main__":
    main()
