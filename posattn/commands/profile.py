"""`posattn profile`: where in the context does this model look, as its layers predict and as its gradients say?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from posattn.commands import options, output

#: weights (layers × heads × positions²) up to which the four forces are told apart
FORCES_UP_TO = 1 << 31


def profile(
    model: options.Model,
    text: options.Data = "bundled:python-docs",
    field: options.Field = "text",
    length: options.Length = 256,
    samples: options.Samples = 64,
    batch_size: options.BatchSize = 8,
    bos: options.Bos = None,
    seed: options.Seed = 0,
    device: options.Device = None,
    dtype: options.Dtype = None,
    per_head: Annotated[bool, typer.Option("--per-head", help="Keep the kernels of single heads.")] = False,
    method: Annotated[
        str, typer.Option("--method", help="gradient_norm, input_x_gradient or integrated_gradients.")
    ] = "gradient_norm",
    target: Annotated[
        str, typer.Option("--target", help="argmax_probability, argmax_log_probability, or a token id.")
    ] = "argmax_probability",
    no_influence: Annotated[bool, typer.Option("--no-influence", help="Predict only: no gradients.")] = False,
    checkpoint: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--checkpoint", metavar="FILE", help="Keep the state of a long measurement in this file."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint, if there is one.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what memory and time this would take, from the configuration alone.")
    ] = False,
    out: options.Out = Path("posattn-out/profile"),
    overwrite: options.Overwrite = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure a model's position bias, and set what its layers predict beside what its gradients say."""
    output.quiet_libraries()
    if dry_run:
        would_need(model, length, samples, batch_size, device, dtype, per_head, influence=not no_influence)
        return
    output.check_target(out, overwrite)
    with output.collected_warnings() as warnings, output.new_folder(out, overwrite) as folder:
        from posattn.models.loading import load_model
        from posattn.tokens import load_tokens

        output.say(f"loading {model}", quiet)
        loaded = load_model(model, device=device, dtype=dtype)
        tokens = load_tokens(
            text,
            loaded,
            length=length,
            samples=samples,
            batch_size=batch_size,
            bos=bos,
            seed=seed,
            field=field,
        )
        summary = measure_profile(
            loaded,
            tokens,
            folder,
            warnings=warnings,
            per_head=per_head,
            method=None if no_influence else method,
            target=int(target) if target.isdigit() else target,
            checkpoint=checkpoint,
            resume=resume,
            quiet=quiet,
        )
    output.tell(out, summary)


def would_need(
    model: str,
    length: int,
    samples: int,
    batch_size: int,
    device: str | None,
    dtype: str | None,
    per_head: bool,
    influence: bool,
) -> None:
    """Print what the job would take.

    Raises:
        InputError: it would not fit; the message says what would.
    """
    import torch

    from posattn import scale
    from posattn.errors import InputError

    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    number = dtype or ("float32" if place.type == "cpu" else "bfloat16")
    shape = scale.shape_from_config(model)
    job = scale.Job(length, samples, batch_size, number, per_head, influence)
    free = scale.free_memory(place)
    found = scale.estimate(shape, job, free, scale.matmul_rate(place, number))
    for line in found.lines():
        print(line)
    if not found.fits:
        raise InputError(scale.advice(shape, job, free))


def measure_profile(
    model: Any,
    tokens: Any,
    folder: Path,
    *,
    warnings: list[str],
    per_head: bool = False,
    method: str | None = "gradient_norm",
    target: str | int = "argmax_probability",
    checkpoint: Path | None = None,
    resume: bool = False,
    quiet: bool = False,
) -> dict[str, Any]:
    """Measure, predict, compare, and write it all into `folder`; returns the summary."""
    from posattn.influence.distances import compare_profiles, describe_profile
    from posattn.influence.gradients import influence
    from posattn.influence.intervals import influence_intervals
    from posattn.probes.contribution import ContributionProbe
    from posattn.probes.measure import measure
    from posattn.probes.positional import PositionalProbe
    from posattn.reports.summaries import profile_arrays, profile_summary, profile_tables
    from posattn.reports.write import plain, write_folder
    from posattn.rollout.implied import IMPLIED, implied_profiles
    from posattn.rollout.variants import VARIANTS, sink_warning

    probe, positional = ContributionProbe(), PositionalProbe()
    output.say(f"measuring {tokens.documents} documents of {tokens.length} tokens", quiet)
    measurement = measure(
        model,
        tokens,
        per_head=per_head,
        checkpoint=checkpoint,
        resume=resume,
        progress=not quiet,
        probes=[probe, positional],
    )
    profiles, sinks = predicted_profiles(measurement, probe.result(model))
    by_distance = positional.result(model)
    profiles |= implied_profiles(measurement.mixing.token, by_distance)

    measured = comparison = intervals = None
    if method is not None:
        output.say("measuring the influence by gradients", quiet)
        measured = influence(model, tokens, method=method, target=target)
        flat = measured.profile.new_full(measured.profile.shape, 1 / len(measured.profile))
        against = {**profiles, "uniform": flat}
        comparison = {name: compare_profiles(curve, measured.profile).to_dict() for name, curve in against.items()}
        if tokens.documents > 1:
            intervals = influence_intervals(measured, profiles)
    if dominated := sink_warning(profiles["residual"], sinks, None if measured is None else measured.profile):
        warnings.append(f"{dominated[0].upper()}{dominated[1:]}.")
    forces, paths = four_forces(
        measurement.mixing.token, by_distance, None if measured is None else measured.profile, warnings
    )
    curves = {**({} if measured is None else {"influence": measured.profile}), **profiles}
    shapes = {name: describe_profile(curve).to_dict() for name, curve in curves.items()}

    summary = plain(
        profile_summary(
            measurement,
            profiles,
            measured,
            comparison,
            shapes,
            intervals,
            warnings=warnings,
            variants={name: {**VARIANTS, **IMPLIED}.get(name, "") for name in profiles},
            forces=forces,
        )
    )
    output.say("drawing", quiet)
    write_folder(folder, summary, profile_arrays(measurement, measured, **paths), profile_tables(summary, measurement))
    return summary


def predicted_profiles(measurement: Any, contributions: Any) -> tuple[dict[str, Any], Any]:
    """Every predicted profile [N] that a measurement and its contributions allow by the variant's name; sinks [T,N]."""
    from posattn.rollout.variants import find_sinks, predict

    kernels = measurement.kernels.mean(1) if measurement.per_head else measurement.kernels
    sinks = find_sinks(contributions.received, contributions.received_std, contributions.value_size)
    profiles = predict(
        kernels.double(),
        measurement.mixing.token.double(),
        **{name: contributions.kernels[name] for name in ("energy", "key", "projection", "value_norm")},
        sinks=sinks.where,
        parallel=contributions.parallel,
    )
    return profiles, sinks.where


def four_forces(
    mixing: Any, positional: Any, measured: Any, warnings: list[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The four forces' shares in the implied profile, as summary and arrays; empty where they are not to be had."""
    from posattn.reports.summaries import forces_summary
    from posattn.rollout.implied import implied_architecture, implied_forces

    architecture = implied_architecture(mixing, positional)
    layers, heads, length = positional.logits.shape
    if architecture is None:
        warnings.append("The four forces were left out: the layers have different numbers of heads.")
    elif layers * heads * length**2 > FORCES_UP_TO:
        warnings.append(f"The four forces were left out: {layers} × {heads} heads are too many at {length} positions.")
    else:
        shares, distance = implied_forces(architecture, length, measured)
        return {str(length): forces_summary(shares, distance)}, {f"forces.{length}.path": shares.path}
    return {}, {}
