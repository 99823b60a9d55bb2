"""`posattn simulate`: the influence profile that an architecture alone implies, at any length."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from posattn.commands import checks, options, output
from posattn.errors import InputError
from posattn.words import count

#: up to these lengths the figures that cost more than a profile are computed
FORCES_UP_TO, DEPTH_UP_TO, MONOTONE_UP_TO = 8192, 8192, 2048
#: a profile in summary.json has at most so many points (block means); the arrays hold all of them
SUMMARY_POINTS = 1024


def simulate(
    preset: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(metavar="[PRESET]", help="A published model, such as bloom-176b or mpt-7b/wikipedia."),
    ] = None,
    length: Annotated[
        Optional[list[int]],  # noqa: UP045
        typer.Option("--length", min=1, help="How many positions; may be given several times. [default: 256]"),
    ] = None,
    layers: Annotated[Optional[int], typer.Option("--layers", min=1, help="Without a preset.")] = None,  # noqa: UP045
    heads: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--heads", min=1, help="Without a preset. [default: 1]"),
    ] = None,
    mixing: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help="λ: a number, a list 0.5,0.4,..., or power:C,BETA for C·t^−BETA. [default: .5, or the preset's]"
        ),
    ] = None,
    position: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--position", help="none or alibi, without a preset. [default: none]"),
    ] = None,
    slopes: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--slopes", help="With --position alibi: bloom, mpt, published, or a list. [default: published]"),
    ] = None,
    window: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--window", min=1, help="Visible keys, without a preset."),
    ] = None,
    prefix: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--prefix", min=0, help="Positions that see each other both ways, without a preset."),
    ] = None,
    mask: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--mask", help="causal or full, without a preset. [default: causal]"),
    ] = None,
    diagonal: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option("--diagonal", help="Content β: own key's logit over the others', without a preset. [default: 0]"),
    ] = None,
    convention: Annotated[str, typer.Option("--convention", help="own, or published as in arXiv 2602.16837.")] = "own",
    out: options.Out = Path("posattn-out/simulate"),
    overwrite: options.Overwrite = False,
    quiet: options.Quiet = False,
) -> None:
    """Predict the influence profile from the architecture alone: mask, residual strength, positions, coarse content."""
    if preset is None and layers is None:
        raise InputError(
            "name a preset (as bloom-176b; `posattn models` lists them), or describe an architecture with --layers"
        )
    if preset is not None and layers is not None:
        raise InputError("name a preset, or describe the architecture with --layers and the other flags, not both")
    described = {
        "--heads": heads,
        "--position": position,
        "--slopes": slopes,
        "--window": window,
        "--prefix": prefix,
        "--mask": mask,
        "--diagonal": diagonal,
    }
    if preset is not None and (given := [option for option, value in described.items() if value is not None]):
        raise InputError(
            f"{given[0]} describes an architecture, and preset {preset} has its own: leave one of them out"
        )
    checks.choice("--position", position or "none", ("none", "alibi"))
    checks.choice("--mask", mask or "causal", ("causal", "full"))
    checks.choice("--convention", convention, ("own", "published"))
    lengths = sorted(set(length or [256]))
    if prefix is not None and prefix > lengths[0]:
        raise InputError(f"--prefix {prefix} is more than the {count(lengths[0], 'position')} there are (--length)")
    if slopes is not None and position != "alibi":
        raise InputError("--slopes are those of ALiBi: add --position alibi, or leave them out")
    with output.collected_warnings() as warnings, output.new_folder(out, overwrite) as folder:
        from posattn.rollout.simulate import Architecture, resolve

        lam = None if mixing is None else parse_mixing(mixing)
        if preset is not None:
            architecture = resolve(preset, convention=convention, mixing=lam)
        else:
            rule = slopes or "published"
            architecture = Architecture(
                layers=layers or 1,
                heads=heads or 1,
                mixing=0.5 if lam is None else lam,
                mask=mask or "causal",
                window=window,
                prefix=prefix or 0,
                position=position or "none",
                slopes=numbers(rule, "--slopes") if rule[:1].isdigit() or rule[:1] in ".-" else rule,
                diagonal=diagonal or None,
                name=f"an architecture of {count(layers or 1, 'layer')} and {count(heads or 1, 'head')}",
            )
            architecture = resolve(architecture, convention=convention)
        summary = simulate_into(architecture, lengths, folder, convention, warnings, quiet)
    output.tell(out, summary)


def parse_mixing(text: str) -> Any:
    """λ as the library takes it: a number, a list, or a power law.

    Raises:
        InputError: the text is none of these.
    """
    from posattn.rollout.simulate import PowerLaw

    if text.startswith("power:"):
        values = numbers(text.removeprefix("power:"), "--mixing")
        if len(values) != 2:
            raise InputError(f"--mixing {text}: a power law is power:C,BETA")
        return PowerLaw(*values)
    values = numbers(text, "--mixing")
    return values[0] if len(values) == 1 else values


def numbers(text: str, option: str) -> list[float]:
    """Numbers separated by commas.

    Raises:
        InputError: something else.
    """
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise InputError(f"{option} {text}: give numbers, separated by commas") from error
    if not all(math.isfinite(value) for value in found):
        raise InputError(f"{option} {text}: give finite numbers")
    return found


def simulate_into(
    architecture: Any, lengths: list[int], folder: Path, convention: str, warnings: list[str], quiet: bool
) -> dict[str, Any]:
    """Compute everything that `posattn simulate` reports, and write it; returns the summary."""
    import pandas as pd

    from posattn.influence.distances import describe_profile
    from posattn.reports.charts import blocks
    from posattn.reports.summaries import forces_summary, forces_table
    from posattn.reports.write import plain, write_folder
    from posattn.results import SCHEMA, provenance
    from posattn.rollout.depth import collapse, depth_theory
    from posattn.rollout.forces import force_shares
    from posattn.rollout.monotone import monotonicity
    from posattn.rollout.simulate import simulate as run

    profiles: dict[str, dict[str, Any]] = {}
    arrays: dict[str, Any] = {"mixing": architecture.schedule()}
    for n in lengths:
        output.say(f"simulating {architecture.name} at {count(n, 'position')}", quiet)
        curves = {
            "residual": run(architecture, n).last,
            "attention_only": run(architecture, n, mixing=1.0).last,
            "half": run(architecture, n, mixing=0.5).last,
        }
        # rounding can leave −1e-18 where a weight is nothing
        profiles[str(n)] = {name: curve.clamp(min=0) / curve.clamp(min=0).sum() for name, curve in curves.items()}
        arrays.update({f"profile.{n}.{name}": curve for name, curve in profiles[str(n)].items()})
    shapes = {n: {name: describe_profile(c).to_dict() for name, c in curves.items()} for n, curves in profiles.items()}

    summary: dict[str, Any] = {
        "schema": SCHEMA,
        "command": "simulate",
        "provenance": provenance(
            preset=architecture.name, convention=convention, architecture=architecture.describe(), lengths=lengths
        ),
        "lengths": lengths,
        "mixing": architecture.schedule(),
        "profiles": {
            n: {
                name: {"position": blocks(c, SUMMARY_POINTS)[0], "value": blocks(c, SUMMARY_POINTS)[1]}
                for name, c in curves.items()
            }
            for n, curves in profiles.items()
        },
        "shape": shapes,
        "forces": {},
        "warnings": warnings,
    }
    for n in [n for n in lengths if n <= FORCES_UP_TO]:
        output.say(f"the four forces at {count(n, 'position')}", quiet)
        shares = force_shares(architecture, n)
        summary["forces"][str(n)] = forces_summary(shares)
        arrays[f"forces.{n}.path"] = shares.path
    smallest = lengths[0]
    if smallest <= DEPTH_UP_TO:
        output.say(f"depth by depth at {count(smallest, 'position')}", quiet)
        depth = depth_theory(architecture, smallest)
        end = collapse(architecture, smallest)
        summary["depth"] = {
            "length": smallest,
            "first_mass": depth.profiles[:, 0],
            "off_first": depth.off_first,
            "bound": depth.bound,
            "last_diagonal": depth.diagonal[:, -1],
            "mixing_sum": depth.mixing_sum,
            "implication": depth.implication,
            "condition": depth.condition,
            "collapse": {
                "eta": end.eta,
                "depth": end.depth,
                "predicted_depth": end.predicted_depth,
                "bound_depth": end.bound_depth,
                "reason": end.reason,
            },
        }
        arrays["depth.profiles"] = depth.profiles
    if smallest <= MONOTONE_UP_TO:
        kernels = architecture.kernels()
        worst = [monotonicity(kernel, smallest) for kernel in (kernels if isinstance(kernels, list) else [kernels])]
        summary["monotonicity"] = {"length": smallest, "worst": max(float(w.violation.max()) for w in worst)}
    summary = plain(summary)
    tables = {
        "profiles": pd.concat(
            pd.DataFrame({"length": int(n), "variant": name, "position": c["position"], "value": c["value"]})
            for n, curves in summary["profiles"].items()
            for name, c in curves.items()
        ),
        "shapes": pd.DataFrame(
            {
                "length": int(n),
                "variant": name,
                "positions": which,
                **{k: v for k, v in figures.items() if k != "without_first"},
            }
            for n, curves in shapes.items()
            for name, shape in curves.items()
            for which, figures in (("all", shape), ("without first", shape.get("without_first") or {}))
        ),
    }
    if summary["forces"]:
        tables["forces"] = forces_table(summary["forces"])
    output.say("drawing", quiet)
    write_folder(folder, summary, arrays, tables)
    return summary
