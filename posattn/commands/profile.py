"""`posattn profile`: where in the context does this model look, as its layers predict and as its gradients say?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from posattn.commands import checks, options, output
from posattn.commands.documents import document_length, read_documents
from posattn.errors import InputError
from posattn.reports.sure import LEAST_POSITIONS
from posattn.words import count

if TYPE_CHECKING:
    from posattn.models.base import Model
    from posattn.scale import Job

#: tokens in each document of a text, unless --length says otherwise
LENGTH = 256
#: weights (layers × heads × positions²) up to which the four forces are told apart
FORCES_UP_TO = 1 << 31
#: gains of single heads (heads of all layers × positions²) up to which `energy_coherent` is among all variants
HEAD_GAINS_UP_TO = 1 << 26
#: random directions average out soon: so many documents are enough for their gains
GAIN_DOCUMENTS = 8


def profile(
    model: options.Model,
    text: options.Data = None,
    field: options.Field = "text",
    length: options.Length = None,
    samples: options.Samples = 64,
    batch_size: options.BatchSize = 8,
    bos: options.Bos = None,
    seed: options.Seed = 0,
    device: options.Device = None,
    dtype: options.Dtype = None,
    adapter: options.Adapter = "auto",
    bins: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            "--bins",
            min=1,
            metavar="W",
            help="For long contexts: add attention up tile by tile, in bins of W positions (1: every position), and "
            "never write a pattern down. Predictions that need patterns are left out. With an adapter other than plain "
            "the model itself still writes them.",
        ),
    ] = None,
    per_head: Annotated[bool, typer.Option("--per-head", help="Keep the kernels of single heads.")] = False,
    method: Annotated[
        str,
        typer.Option(
            "--method",
            help="gradient_norm, input_x_gradient, integrated_gradients, or perturbation: without gradients, the KL "
            "divergence of the prediction when a token is replaced (two passes for every position).",
        ),
    ] = "gradient_norm",
    target: Annotated[
        str, typer.Option("--target", help="argmax_probability, argmax_log_probability, or a token id.")
    ] = "argmax_probability",
    all_variants: Annotated[
        bool,
        typer.Option(
            "--all-variants",
            help="Every prediction: also λ with the MLP (raw and centred: two more passes), random directions, "
            "energies of single heads (where they are not too many), one fitted factor judged on other documents, and "
            "each document's own predictions (one more pass). These passes are in no checkpoint.",
        ),
    ] = False,
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
    wanted = chosen_target(method, target)
    checks.machine(device, dtype)
    size = document_length(model, text, length, LENGTH)
    adapter = chosen_adapter(adapter, bins, length=size, per_head=per_head, all_variants=all_variants)
    if dry_run:
        would_need(model, size, samples, batch_size, device, dtype, per_head, not no_influence, adapter, bins)
        if all_variants:
            print("The further passes of --all-variants are not counted.")
        return
    output.check_target(out, overwrite)
    checks.source(text)
    checks.checkpoint(checkpoint, resume)
    with output.collected_warnings() as warnings, output.new_folder(out, overwrite) as folder:
        from posattn.models.loading import load_model

        output.say(f"loading {model}", quiet)
        loaded = load_model(model, device=device, dtype=dtype, adapter=adapter)
        if isinstance(wanted, int) and wanted >= loaded.vocab_size:
            raise InputError(f"--target {wanted} is outside the model's vocabulary of {loaded.vocab_size} tokens")
        tokens = read_documents(
            model,
            loaded,
            text,
            length=size,
            samples=samples,
            batch_size=batch_size,
            bos=bos,
            seed=seed,
            field=field,
        )
        number = str(loaded.dtype).removeprefix("torch.")
        asked = job(size, tokens.documents, batch_size, number, per_head, not no_influence, loaded.adapter, bins)
        check_memory(loaded, asked, quiet)
        summary = measure_profile(
            loaded,
            tokens,
            folder,
            warnings=warnings,
            per_head=per_head,
            bins=bins,
            method=None if no_influence else method,
            target=wanted,
            checkpoint=checkpoint,
            resume=resume,
            all_variants=all_variants,
            quiet=quiet,
        )
    output.tell(out, summary)


def chosen_target(method: str, target: str) -> str | int:
    """The target as the library takes it, once method and target are known to be right.

    Raises:
        InputError: an unknown method or target.
    """
    from posattn.influence.gradients import METHODS

    checks.choice("--method", method, METHODS)
    return checks.target(target)


def chosen_adapter(name: str, bins: int | None, *, length: int, per_head: bool, all_variants: bool) -> str:
    """The adapter that `--adapter` and `--bins` ask for, as `load_model` names it.

    Raises:
        InputError: an unknown adapter, or options that cannot go with `--bins`.
    """
    from posattn.models.loading import ADAPTERS

    if name not in ADAPTERS:
        raise InputError(f"--adapter is one of {', '.join(ADAPTERS)}; not {name!r}")
    if bins is None:
        return name
    if per_head or all_variants:
        asked = "--per-head" if per_head else "--all-variants"
        raise InputError(
            f"--bins and {asked} cannot go together: binned kernels are means over heads, without patterns"
        )
    check_bins(bins, length)
    return "plain" if name == "auto" else name


def check_bins(bins: int | None, length: int) -> None:
    """Refuse bins that are too wide for a length."""
    if bins is not None and length < LEAST_POSITIONS * bins:
        fits = f"--bins {length // LEAST_POSITIONS}" if length >= LEAST_POSITIONS else "no --bins"
        raise InputError(f"--bins {bins} leaves fewer than {LEAST_POSITIONS} bins of {length} positions: use {fits}")


def would_need(
    model: str,
    length: int,
    samples: int,
    batch_size: int,
    device: str | None,
    dtype: str | None,
    per_head: bool,
    influence: bool,
    adapter: str = "auto",
    bins: int | None = None,
) -> None:
    """Print what the job would take.

    Raises:
        InputError: it would not fit; the message says what would.
    """
    import torch

    from posattn import scale

    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    number = dtype or ("float32" if place.type == "cpu" else "bfloat16")
    shape = scale.shape_from_config(model)
    if adapter == "plain" and not shape.interface:
        raise InputError(f"{model} does not use transformers' attention interface: --adapter plain cannot read it")
    asked = job(length, samples, batch_size, number, per_head, influence, adapter, bins)
    free = scale.free_memory(place)
    found = scale.estimate(shape, asked, free, scale.matmul_rate(place, number))
    for line in found.lines():
        print(line)
    if not found.fits:
        raise InputError(scale.advice(shape, asked, free))


def job(
    length: int,
    samples: int,
    batch_size: int,
    dtype: str,
    per_head: bool,
    influence: bool,
    adapter: str,
    bins: int | None,
) -> Job:
    """What a profile asks for, as `posattn.scale` counts it."""
    from posattn.scale import Job

    return Job(
        length,
        samples,
        batch_size,
        dtype,
        per_head,
        influence,
        contributions=bins is None,
        logits=True,
        streamed=adapter == "plain",
        bins=bins,
    )


def check_memory(model: Model, asked: Job, quiet: bool) -> None:
    """Before a loaded model is measured: say so where memory may not suffice.

    Raises:
        InputError: it cannot suffice; the message says what would.
    """
    from posattn import scale

    shape, free = scale.shape_of(model), scale.free_memory(model.device)
    found = scale.estimate(shape, asked, free)
    if found.hopeless:
        raise InputError(scale.advice(shape, asked, free))
    if not found.fits:
        output.say(f"memory may not suffice: {scale.advice(shape, asked, free)}", quiet, stage=False)


def measure_profile(
    model: Any,
    tokens: Any,
    folder: Path,
    *,
    warnings: list[str],
    per_head: bool = False,
    bins: int | None = None,
    method: str | None = "gradient_norm",
    target: str | int = "argmax_probability",
    checkpoint: Path | None = None,
    resume: bool = False,
    all_variants: bool = False,
    quiet: bool = False,
) -> dict[str, Any]:
    """Measure, predict, compare, and write it all into `folder`; returns the summary."""
    from posattn.influence.distances import compare_profiles, describe_profile
    from posattn.influence.gradients import influence
    from posattn.influence.intervals import document_correlations, influence_intervals
    from posattn.probes.contribution import KINDS, ContributionProbe
    from posattn.probes.kernel_mean import by_bin
    from posattn.probes.measure import measure
    from posattn.probes.positional import PositionalProbe
    from posattn.reports.summaries import profile_arrays, profile_summary, profile_tables
    from posattn.reports.sure import different_documents, document_warnings
    from posattn.reports.write import plain, write_folder
    from posattn.rollout.implied import IMPLIED, implied_profiles
    from posattn.rollout.variants import VARIANTS, sink_warning

    check_bins(bins, tokens.length)  # documents may be shorter than was asked for
    kinds = KINDS
    if all_variants:
        numbers = sum(info.n_heads for info in model.layers) * tokens.length**2
        if numbers <= HEAD_GAINS_UP_TO:
            kinds = (*KINDS, "head_gain")
        else:
            warnings.append(
                f"energy_coherent was left out: it would keep {numbers} gains of single heads, more than "
                f"{HEAD_GAINS_UP_TO}."
            )
    probe, positional = ContributionProbe(kinds) if bins is None else None, PositionalProbe()
    documents = f"{count(tokens.documents, 'document')} of {count(tokens.length, 'token')}"
    output.say(f"measuring {documents}", quiet)
    measurement = measure(
        model,
        tokens,
        per_head=per_head,
        checkpoint=checkpoint,
        resume=resume,
        progress=not quiet,
        probes=[positional] if probe is None else [probe, positional],
        streamed=bins is not None,
        bins=None if bins == 1 else bins,
    )
    warnings += document_warnings(tokens)
    more: dict[str, Any] = {"different_documents": different_documents(tokens)}
    contributions, further = None if probe is None else probe.result(model), {}
    if probe is None:
        warnings.append(
            "Predictions that need attention patterns (energy, projection, value norm, sinks) were left out: --bins "
            "writes no pattern down."
        )
    if all_variants:
        output.say("measuring what the further variants need", quiet)
        further = further_ingredients(model, tokens)
    profiles, sinks = predicted_profiles(measurement, contributions, **further)
    by_distance = positional.result(model)
    width = bins or 1
    profiles |= {
        name: by_bin(curve, width) for name, curve in implied_profiles(measurement.mixing.token, by_distance).items()
    }
    if measurement.binning is not None:
        more["binning"] = {**measurement.binning, "doubled": doubled_bins(measurement, profiles["residual"])}
        warnings.append(
            f"With bins twice as wide the residual profile would change by {more['binning']['doubled']:.2g} (total "
            "variation): an estimate of what binning does to it."
        )

    measured = comparison = intervals = whole = None
    if method is not None:
        how = "replacing tokens" if method == "perturbation" else "gradients"
        output.say(f"measuring the influence by {how}", quiet)
        measured = influence(model, tokens, method=method, target=target)
        whole, measured = measured.profile, binned_influence(measured, width)
        flat = measured.profile.new_full(measured.profile.shape, 1 / len(measured.profile))
        against = {**profiles, "uniform": flat}
        comparison = {name: compare_profiles(curve, measured.profile).to_dict() for name, curve in against.items()}
        if tokens.documents > 1:
            intervals = influence_intervals(measured, profiles)
        more["per_document"] = document_correlations(measured, profiles)
        if all_variants:
            output.say("predicting document by document", quiet)
            own = document_correlations(measured, own_profiles(model, tokens, measured.per_document.shape[-1]))
            for name, figures in own.items():
                more["per_document"][name]["own"] = figures
            if tokens.documents > 1:
                more["calibrated"] = calibrations(measurement, contributions, sinks, measured)
            else:
                warnings.append("Nothing was calibrated: one document cannot be parted into two halves.")
    distances = {name: found["wasserstein"] for name, found in (comparison or {}).items()}
    if sinks is not None and (dominated := sink_warning(profiles["residual"], sinks, whole, distances)):
        warnings.append(f"{dominated[0].upper()}{dominated[1:]}.")
    forces, paths = four_forces(measurement.mixing.token, by_distance, whole, warnings)
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
            **more,
        )
    )
    if width > 1:
        summary.pop("first_position_attention")  # the first bin's is another figure
    output.say("drawing", quiet)
    write_folder(folder, summary, profile_arrays(measurement, measured, **paths), profile_tables(summary, measurement))
    return summary


def predicted_profiles(measurement: Any, contributions: Any, **further: Any) -> tuple[dict[str, Any], Any]:
    """Every predicted profile [N] that a measurement and its contributions allow by the variant's name; sinks [T,N].

    Without contributions (None) there are the kernel's own variants alone, and no sinks (None). `further` goes to
    `posattn.rollout.variants.predict`.
    """
    from posattn.rollout.variants import find_sinks, predict

    kernels = measurement.kernels.mean(1) if measurement.per_head else measurement.kernels
    if contributions is None:
        return predict(kernels.double(), measurement.mixing.token.double()), None
    sinks = find_sinks(contributions.received, contributions.received_std, contributions.value_size)
    profiles = predict(
        kernels.double(),
        measurement.mixing.token.double(),
        **contributions.kernels,
        sinks=sinks.where,
        parallel=contributions.parallel,
        **further,
    )
    return profiles, sinks.where


def doubled_bins(measurement: Any, profile: Any) -> float:
    """Total variation by which the residual profile changes when the bins become twice as wide."""
    from posattn.probes.kernel_mean import by_bin
    from posattn.probes.streamed import coarser
    from posattn.rollout.dense import rollout

    wide = rollout(measurement.mixing.token.double(), coarser(measurement.kernels.double(), measurement.counts)).last
    return float((wide - by_bin(profile, 2)).abs().sum() / 2)


def binned_influence(measured: Any, width: int) -> Any:
    """A measured influence [N] as sums over bins of so many positions; documents count where they reach into a bin."""
    import dataclasses

    import torch

    from posattn.probes.kernel_mean import by_bin

    if width == 1:
        return measured
    real = measured.per_document.isfinite()
    summed = by_bin(measured.per_document.where(real, 0.0), width)
    return dataclasses.replace(
        measured,
        profile=by_bin(measured.profile, width),
        per_document=summed.where(by_bin(real.double(), width) > 0, torch.nan),
        counts=measured.counts[::width],
    )


def further_ingredients(model: Any, tokens: Any) -> dict[str, Any]:
    """What the variants that are not measured by default need: λ with the MLP, and gains in random directions."""
    from posattn.probes.block import measure_block_mixing
    from posattn.probes.gains import cotangent_gains

    raw, centred = measure_block_mixing(model, tokens)
    gains = cotangent_gains(model, tokens.part(slice(GAIN_DOCUMENTS)))
    return {"block": raw.block, "centred": centred.block, "cotangent": (gains.value, gains.key, gains.mlp)}


def own_profiles(model: Any, tokens: Any, width: int) -> dict[str, Any]:
    """Predictions made of each document alone, [M, width] by the variant's name, NaN beyond a document's length."""
    import torch

    from posattn.probes.contribution import ContributionProbe
    from posattn.probes.kernel import KernelProbe
    from posattn.probes.mixing import MixingProbe
    from posattn.probes.session import attach
    from posattn.rollout.variants import predict

    rows: dict[str, list[Any]] = {}
    for ids, mask in tokens.batches(1):
        probes = ContributionProbe(), KernelProbe(), MixingProbe()
        with attach(model, *probes) as session, torch.no_grad():
            session.model(ids.to(model.device), None if mask is None else mask.to(model.device))
        results: dict[str, Any] = session.results()
        one, kernels, mixing = results["contribution"], results["kernel"].kernels, results["mixing"].token
        curves = predict(kernels.double(), mixing.double(), **one.kernels, parallel=one.parallel)
        for name, curve in curves.items():
            padded = torch.nn.functional.pad(curve.cpu(), (0, width - len(curve)), value=torch.nan)
            rows.setdefault(name, []).append(padded)
    return {name: torch.stack(found) for name, found in rows.items()}


def calibrations(measurement: Any, contributions: Any, sinks: Any, measured: Any) -> dict[str, Any]:
    """One factor on λ (or on the gains), fitted on the first half of the documents and judged on the second.

    By the variant's name: `factor`, the distances `fitted` and `judged`, `uncalibrated` (factor 1, judged on the same
    documents), the 95 % `interval` of `judged`, and how many documents were on either side. The kernels are those of
    all documents, which know nothing of the influence.
    """
    import dataclasses

    from posattn.influence.intervals import influence_intervals
    from posattn.rollout.dense import rollout
    from posattn.rollout.energy import energy_rollout
    from posattn.rollout.variants import apply_sink, area, calibrate, scaled_mixing

    documents = measured.per_document
    half = len(documents) // 2
    fit, judge = (part.nanmean(0).nan_to_num(0.0) for part in (documents[:half], documents[half:]))
    fit, judge = fit / fit.sum(), judge / judge.sum()
    kernels = (measurement.kernels.mean(1) if measurement.per_head else measurement.kernels).double()
    mixing = measurement.mixing.token.double()
    returned = apply_sink(contributions.kernels["projection"].double(), sinks, "no-op")
    values, gains = contributions.energy, contributions.gains
    tried = {
        "residual": lambda factor: rollout(scaled_mixing(mixing, factor), kernels).last,
        "projection+no-op": lambda factor: rollout(scaled_mixing(mixing, factor), returned).last,
        "energy": lambda factor: energy_rollout(gains, scale=factor, validate=False).last,
        "energy_value": lambda factor: energy_rollout(values, scale=factor, validate=False).last,
    }
    chosen = {name: calibrate(curve, fit, judge, steps=13) for name, curve in tried.items()}
    intervals: dict[str, Any] = {}
    if len(documents) - half > 1:
        rest = dataclasses.replace(
            measured,
            profile=judge,
            per_document=documents[half:],
            counts=documents[half:].isfinite().sum(0),
            chosen=measured.chosen[half:],
            probability=measured.probability[half:],
        )
        intervals = influence_intervals(rest, {name: one.profile for name, one in chosen.items()})["comparison"]
    return {
        name: {
            "factor": one.factor,
            "fitted": one.fitted,
            "judged": one.judged,
            "uncalibrated": area(tried[name](1.0), judge),
            "interval": intervals.get(name),
            "documents": [half, len(documents) - half],
        }
        for name, one in chosen.items()
    }


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
