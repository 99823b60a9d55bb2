"""`posattn lengths`: how a model and its heads fare on longer inputs, and where in a prompt it can still retrieve."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from posattn.commands import checks, options, output
from posattn.commands.documents import DEFAULT
from posattn.errors import InputError
from posattn.words import count

#: lengths of a text, as far as the model goes
TEXT_LENGTHS = (64, 128, 256, 512)


def lengths(
    model: options.Model,
    text: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--text",
            "--data",
            metavar="SOURCE",
            help="Loss on this text. By default the task that the model was trained on; for a model of no task, "
            f"bundled:python-docs at lengths {', '.join(map(str, TEXT_LENGTHS))}, as far as it goes.",
        ),
    ] = None,
    task: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--task", help="Expect a checkpoint of this task."),
    ] = None,
    lengths: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--lengths", metavar="LIST", help="Whole lengths in tokens, as 17,34,68; or +50,+100 added ones."),
    ] = None,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Samples of the task, or documents.")] = 64,
    score_samples: Annotated[int, typer.Option("--score-samples", min=0, help="Of them for the heads.")] = 8,
    targets: Annotated[int, typer.Option("--targets", min=1, help="Tokens of a text whose loss is measured.")] = 32,
    purity: Annotated[float, typer.Option("--purity", help="γ of a pure head.")] = 0.2,
    no_ablate: Annotated[bool, typer.Option("--no-ablate", help="Do not remove classes of heads.")] = False,
    mode: Annotated[str, typer.Option("--mode", help="How heads are removed: zero or mean.")] = "zero",
    pairs: Annotated[int, typer.Option("--pairs", min=0, help="Lines of the retrieval prompts; 0: none.")] = 8,
    field: options.Field = "text",
    batch_size: options.BatchSize = 8,
    bos: options.Bos = None,
    seed: options.Seed = 0,
    device: options.Device = None,
    dtype: options.Dtype = None,
    out: options.Out = Path("posattn-out/lengths"),
    overwrite: options.Overwrite = False,
    quiet: options.Quiet = False,
) -> None:
    """Accuracy or loss by length, heads by length, the predicted breaking length, and retrieval by position."""
    output.check_target(out, overwrite)
    output.quiet_libraries()
    if text is not None and task is not None:
        raise InputError("name a --text or a --task, not both")
    checks.choice("--mode", mode, ("zero", "mean"))
    checks.purity(purity)
    checks.machine(device, dtype)
    checks.source(text)
    with output.collected_warnings() as warnings, output.new_folder(out, overwrite) as folder:
        from posattn.models.loading import load_model
        from posattn.tasks.lengths import length_generalisation, model_task
        from posattn.tokens import load_tokens

        own = None if text is not None else model_task(model, task)
        if task is not None and own is None:
            raise InputError(f"{model} does not say which task it was trained on, so --task {task} cannot be checked")
        wanted = None if lengths is None else parse_lengths(lengths, own.length if own is not None else None)
        check_lengths(wanted, own, targets)
        output.say(f"loading {model}", quiet)
        loaded = load_model(model, device=device, dtype=dtype)
        source: Any = own
        if own is None:
            if wanted is None:
                wanted = [n for n in TEXT_LENGTHS if targets < n <= (loaded.context or n)]
                if not wanted:
                    raise InputError(
                        f"{model} takes {count(loaded.context or 0, 'token')}: name shorter --lengths and --targets"
                    )
            source = load_tokens(
                text or DEFAULT,
                loaded,
                length=max(wanted),
                samples=samples,
                batch_size=batch_size,
                bos=bos,
                seed=seed,
                field=field,
            )
        curve = length_generalisation(
            loaded,
            source,
            wanted,
            samples=samples,
            score_samples=score_samples,
            ablate=not no_ablate,
            purity=purity,
            mode=mode,
            targets=targets,
            batch_size=batch_size,
            seed=seed,
            progress=lambda message: output.say(message, quiet),
        )
        retrieval = profiles = None
        if own is None and pairs:
            retrieval, profiles = retrieve(loaded, pairs, min(samples, 32), batch_size, seed, quiet)
        summary = write_lengths(curve, retrieval, profiles, folder, warnings, quiet)
    output.tell(out, summary)


def parse_lengths(text: str, base: int | None) -> list[int]:
    """Lengths from a list; `+n` adds to the task's own length.

    Raises:
        InputError: no whole numbers, or added lengths without a task.
    """
    found = []
    for part in text.split(","):
        part = part.strip()
        if not part.removeprefix("+").isdigit():
            raise InputError(f"--lengths {text}: give whole numbers, separated by commas")
        if part.startswith("+") and base is None:
            raise InputError(f"--lengths {part}: only a task can be made longer; give whole lengths for a text")
        found.append(int(part) + (base or 0) if part.startswith("+") else int(part))
    return sorted(set(found))


def check_lengths(wanted: list[int] | None, task: Any, targets: int) -> None:
    """Refuse lengths that nothing can be measured at.

    Raises:
        InputError: shorter than a sample of the task, or than the measured tokens of a text and what is before them.
    """
    if wanted is None:
        return
    if task is not None:
        checks.task_length("--lengths", wanted[0], task)
    elif wanted[0] <= targets or wanted[0] < 3:
        raise InputError(
            f"--lengths {wanted[0]} leaves no context before the {count(targets, 'measured token')} (--targets)"
        )


def retrieve(model: Any, pairs: int, samples: int, batch_size: int, seed: int, quiet: bool) -> tuple[Any, Any]:
    """Key–value retrieval, with the profiles that the model's layers predict for the same prompts."""
    import warnings

    from posattn.probes.contribution import ContributionProbe
    from posattn.probes.measure import measure
    from posattn.rollout.dense import rollout
    from posattn.rollout.energy import energy_rollout
    from posattn.tasks.lengths import key_value_prompts, key_value_retrieval, key_value_tokens
    from posattn.tokens import load_tokens

    output.say(f"key-value retrieval: {count(pairs, 'line')}, {count(samples, 'prompt')}", quiet)
    rows = key_value_tokens(key_value_prompts(model, pairs, samples, seed))
    probe = ContributionProbe(kinds=("energy",))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a few short prompts nothing more is asked
        measurement = measure(model, load_tokens(rows, model, batch_size=batch_size), progress=False, probes=[probe])
    contributions = probe.result(model)
    profiles = {
        "energy": energy_rollout(contributions.kernels["energy"], parallel=contributions.parallel).last,
        "residual": rollout(measurement.mixing.token.double(), measurement.kernels.double()).last,
    }
    found = key_value_retrieval(model, pairs, samples, profile=profiles["energy"], batch_size=batch_size, seed=seed)
    return found, profiles


def write_lengths(
    curve: Any, retrieval: Any, profiles: Any, folder: Path, warnings: list[str], quiet: bool
) -> dict[str, Any]:
    """Write the results into `folder`; returns the summary."""
    from posattn.reports.write import plain, write_folder

    summary = plain(lengths_summary(curve, retrieval, warnings))
    arrays = {name: getattr(curve, name) for name in ("positional", "symbolic", "gap", "weight", "predicted")}
    tables = {"lengths": curve.to_dataframe(), "heads": curve.heads_dataframe()}
    if retrieval is not None:
        arrays |= {f"profile.{name}": value for name, value in profiles.items()}
        arrays["retrieval.log_probability"] = retrieval.log_probability
        tables["retrieval"] = retrieval.to_dataframe()
    output.say("drawing", quiet)
    write_folder(folder, summary, arrays, tables)
    curve.save(folder / "lengths.safetensors")
    if retrieval is not None:
        retrieval.save(folder / "retrieval.safetensors")
    return summary


def lengths_summary(curve: Any, retrieval: Any, warnings: list[str]) -> dict[str, Any]:
    """What `posattn lengths` found, as plain numbers."""
    from posattn.results import SCHEMA

    summary: dict[str, Any] = {
        "schema": SCHEMA,
        "command": "lengths",
        "provenance": curve.provenance,
        "metric": curve.metric,
        "lengths": curve.lengths,
        "value": curve.value,
        "interval": curve.interval,
        "hops": curve.hops,
        "value_hops": curve.value_hops,
        "chance": curve.chance,
        "ablated": curve.ablated,
        "heads": curve.heads,
        "labels": curve.labels,
        "predicted_break": {"first": curve.predicted_break("first"), "median": curve.predicted_break("median")},
        "observed_break": curve.observed_break(),
        "positional": curve.positional,
        "symbolic": curve.symbolic,
        "discrepancy": curve.gap,
        "weight": curve.weight,
        "predicted": curve.predicted,
        "warnings": warnings,
    }
    if retrieval is not None:
        summary["retrieval"] = {
            "place": retrieval.place,
            "tokens": retrieval.tokens,
            "prompts": retrieval.accuracy.shape[1],
            **{
                name: {"mean": getattr(retrieval, name).mean(1), "interval": getattr(retrieval, f"{name}_interval")}
                for name in ("accuracy", "choice", "log_probability")
            },
            "predicted": retrieval.predicted,
            "agreement": retrieval.agreement,
        }
    return summary
