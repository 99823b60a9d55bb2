"""`posattn compare`: two or more finished runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from posattn.commands import options, output
from posattn.errors import InputError

#: command -> settings that must be equal, as paths in summary.json, and what they are called
MUST_AGREE: dict[str, dict[str, str]] = {
    "profile": {
        "influence_facts.method": "method of the influence",
        "influence_facts.target": "target of the influence",
        "influence_facts.normalize": "normalisation of the influence",
    },
    "heads": {"level": "level of the scores", "tau": "τ", "thresholds.purity": "purity γ", "thresholds.rule": "rule"},
}
DRAWS = 1000


def compare(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR DIR...", help="Folders that a command wrote.")],
    out: options.Out = Path("posattn-out/compare"),
    overwrite: options.Overwrite = False,
) -> None:
    """Set finished runs side by side: models, checkpoints, lengths or data sets; differences and how sure they are."""
    from posattn.reports.write import plain, read_folder, write_folder

    if len(folders) < 2:
        raise InputError("compare needs at least two folders")
    output.check_target(out, overwrite)
    runs = [read_folder(folder) for folder in folders]
    summaries = [summary for summary, _ in runs]
    check_comparable(folders, summaries)
    kind = summaries[0]["command"]
    found = compare_profiles_runs(runs) if kind == "profile" else compare_heads_runs(runs)
    from posattn.results import SCHEMA, provenance

    summary = plain(
        {
            "schema": SCHEMA,
            "command": "compare",
            "of": kind,
            "provenance": provenance(runs=[str(folder) for folder in folders]),
            "runs": [
                {"folder": str(f), "provenance": s["provenance"], **pick(s)}
                for f, s in zip(folders, summaries, strict=True)
            ],
            "names": names(folders, summaries),
            "differing": differing(summaries),
            **found,
            "warnings": [],
        }
    )
    with output.new_folder(out, overwrite) as folder:
        import pandas as pd

        write_folder(folder, summary, {}, {"differences": pd.DataFrame(summary["differences"])}, figures=False)
    output.tell(out, summary)


def check_comparable(folders: Sequence[Path], summaries: Sequence[Mapping[str, Any]]) -> None:
    """Refuse runs of which no figure means the same.

    Raises:
        InputError: naming the setting and both values.
    """
    first = summaries[0]
    if first["command"] not in MUST_AGREE:
        raise InputError(f"runs of `posattn {first['command']}` cannot be compared, only {', '.join(MUST_AGREE)}")
    for folder, summary in zip(folders[1:], summaries[1:], strict=True):
        for path, name in {"schema": "schema", "command": "command", **MUST_AGREE[first["command"]]}.items():
            mine, theirs = _at(first, path), _at(summary, path)
            if mine != theirs:
                raise InputError(
                    f"{folders[0]} and {folder} cannot be compared: {name} is {mine} there and {theirs} here"
                )


def _at(summary: Mapping[str, Any], path: str) -> Any:
    value: Any = summary
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {
            k: v for name, inner in value.items() for k, v in _flat(inner, f"{prefix}{name} ".replace("_", " ")).items()
        }
    return {prefix.strip(): value}


def differing(summaries: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Every setting of the provenance in which the runs differ: name -> value of each run."""
    facts = [
        {k: v for k, v in _flat(s["provenance"]).items() if k != "time" and not k.startswith("self check")}
        for s in summaries
    ]
    keys = list(dict.fromkeys(key for one in facts for key in one))
    return {key: [one.get(key) for one in facts] for key in keys if len({repr(one.get(key)) for one in facts}) > 1}


def names(folders: Sequence[Path], summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """A short name for each run: the folder's, made unique."""
    short = [folder.resolve().name for folder in folders]
    return [name if short.count(name) == 1 else f"{name} ({i + 1})" for i, name in enumerate(short)]


def pick(summary: Mapping[str, Any]) -> dict[str, Any]:
    """What the page of a comparison draws of one run."""
    keys = (
        "mixing",
        "influence",
        "influence_facts",
        "profiles",
        "comparison",
        "shape",
        "intervals",
        "counts",
        "labels",
    )
    keys += ("certain", "positional", "symbolic", "documents", "different_documents", "queries", "role_counts")
    return {key: summary[key] for key in keys if key in summary}


def compare_profiles_runs(runs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> dict[str, Any]:
    """Differences of every later run to the first, in figures of shape and mixing, with 95 % intervals."""
    import torch

    from posattn.influence.distances import describe_profile

    generator = torch.Generator().manual_seed(0)
    edges = torch.tensor([0.025, 0.975], dtype=torch.float64)
    (first, first_arrays), rows = runs[0], []

    def figures(profile: Any) -> dict[str, float]:
        shape = describe_profile(profile)
        rest = shape.without_first or shape
        return {name: getattr(rest, name) for name in ("u_index", "primacy", "middle", "recency", "mean_position")}

    def draws(arrays: Mapping[str, Any], picks: Any) -> Any:
        values = arrays["influence_per_document"].double().nan_to_num(0.0)
        mean = values[picks].mean(1)
        return mean / mean.sum(-1, keepdim=True)

    for index, (other, arrays) in enumerate(runs[1:], start=1):
        if "influence_per_document" in first_arrays and "influence_per_document" in arrays:
            m, n = len(first_arrays["influence_per_document"]), len(arrays["influence_per_document"])
            same = _at(first, "provenance.tokens.fingerprint") == _at(other, "provenance.tokens.fingerprint")
            picks = torch.randint(m, (DRAWS, m), generator=generator)
            others = picks if same and m == n else torch.randint(n, (DRAWS, n), generator=generator)
            a = [figures(p) for p in draws(first_arrays, picks)] if m > 1 and n > 1 else []
            b = [figures(p) for p in draws(arrays, others)] if a else []
            mine, theirs = first["shape"]["influence"], other["shape"]["influence"]
            mine, theirs = mine.get("without_first") or mine, theirs.get("without_first") or theirs
            for name in ("u_index", "primacy", "middle", "recency", "mean_position"):
                if mine[name] is None or theirs[name] is None:
                    continue
                spread = torch.tensor([y[name] - x[name] for x, y in zip(a, b, strict=True)], dtype=torch.float64)
                low, high = spread.quantile(edges).tolist() if a else (None, None)
                rows.append(
                    {
                        "run": index,
                        "figure": name,
                        "first": mine[name],
                        "this": theirs[name],
                        "difference": theirs[name] - mine[name],
                        "low": low,
                        "high": high,
                        "paired": bool(same and m == n),
                    }
                )
        x, y = first["mixing"], other["mixing"]
        rows.append(_mixing_row(index, x, y))
    return {"differences": rows}


def _mixing_row(index: int, x: Mapping[str, Any], y: Mapping[str, Any]) -> dict[str, Any]:
    """The difference of mean λ. Layers of one run share their documents: their errors add up and do not average out."""
    mean = [sum(one["token"]) / len(one["token"]) for one in (x, y)]
    half = None
    if all(one.get("token_std") and (one.get("documents") or 0) > 1 for one in (x, y)):
        errors = [sum(one["token_std"]) / len(one["token_std"]) / one["documents"] ** 0.5 for one in (x, y)]
        half = 1.96 * (errors[0] ** 2 + errors[1] ** 2) ** 0.5
    difference = mean[1] - mean[0]
    return {
        "run": index,
        "figure": "mean_mixing",
        "first": mean[0],
        "this": mean[1],
        "difference": difference,
        "low": None if half is None else difference - half,
        "high": None if half is None else difference + half,
        "paired": False,
    }


def compare_heads_runs(runs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> dict[str, Any]:
    """How many heads have each label, and which heads changed theirs (models of one size only)."""
    first = runs[0][0]
    rows, changed = [], []
    for index, (other, _) in enumerate(runs[1:], start=1):
        for label in first["counts"]:
            a, b = first["counts"][label], other["counts"].get(label, 0)
            rows.append(
                {
                    "run": index,
                    "figure": label,
                    "first": a,
                    "this": b,
                    "difference": b - a,
                    "low": None,
                    "high": None,
                    "paired": False,
                }
            )
        same_size = [len(row) for row in first["labels"]] == [len(row) for row in other["labels"]]
        for t, row in enumerate(first["labels"] if same_size else []):
            for h, label in enumerate(row):
                if other["labels"][t][h] != label:
                    settled = first["certain"][t][h] is True and other["certain"][t][h] is True
                    changed.append(
                        {
                            "run": index,
                            "head": f"L{t}H{h}",
                            "from": label,
                            "to": other["labels"][t][h],
                            "settled": settled,
                        }
                    )
    return {"differences": rows, "changed": changed}
