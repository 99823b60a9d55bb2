"""`posattn train`: a small GPT-J learns a synthetic task while its heads are followed."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from posattn.commands import checks, options, output
from posattn.errors import InputError
from posattn.interrupts import advice
from posattn.words import count, listed

_Whole = Optional[int]  # noqa: UP045


def train(
    task: Annotated[str, typer.Argument(metavar="TASK", help="number, letter, index, retrieval or induction.")],
    preset: Annotated[str, typer.Option("--preset", help="paper (12 layers × 1 head) or seed (6 × 8).")] = "paper",
    steps: Annotated[int, typer.Option("--steps", min=1, help="Optimiser steps of 64 samples.")] = 6750,
    seed: Annotated[
        Optional[list[int]],  # noqa: UP045
        typer.Option("--seed", help="May be given several times: intervals need seeds. [default: 0]"),
    ] = None,
    every: Annotated[int, typer.Option("--every", min=1, help="Steps between measurements.")] = 50,
    learning_rate: Annotated[float, typer.Option("--lr", help="Peak learning rate.")] = 3e-4,
    dropout: Annotated[float, typer.Option("--dropout")] = 0.1,
    targets: Annotated[_Whole, typer.Option("--targets", help="Number and letter task.")] = None,
    pre_targets: Annotated[_Whole, typer.Option("--pre-targets", help="Number and letter task.")] = None,
    hops: Annotated[_Whole, typer.Option("--hops", help="Longest path, number and letter task.")] = None,
    letters: Annotated[_Whole, typer.Option("--letters", help="Size of the alphabet.")] = None,
    length: Annotated[_Whole, typer.Option("--length", min=2, help="Tokens of a sample, the query included.")] = None,
    distractors: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--distractors", help="Letter task: published, or clean."),
    ] = None,
    layers: Annotated[_Whole, typer.Option("--layers", min=1, help="Instead of the preset's.")] = None,
    heads: Annotated[_Whole, typer.Option("--heads", min=1, help="Instead of the preset's.")] = None,
    d_model: Annotated[_Whole, typer.Option("--d-model", min=2, help="Instead of the preset's.")] = None,
    purity: Annotated[float, typer.Option("--purity", help="γ of a pure head.")] = 0.2,
    prompts: Annotated[int, typer.Option("--prompts", min=1, help="Prompts on which heads are scored.")] = 32,
    max_seconds: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option("--max-seconds", help="Stop cleanly after so long."),
    ] = None,
    threads: Annotated[int, typer.Option("--threads", min=1, help="The model is small: more are rarely faster.")] = 1,
    device: Annotated[str, typer.Option("--device", metavar="NAME", help="cpu or cuda.")] = "cpu",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was interrupted.")] = False,
    out: options.Out = Path("posattn-out/train"),
    overwrite: options.Overwrite = False,
    quiet: options.Quiet = False,
) -> None:
    """Train a model on a task and follow its heads: accuracy by hops, scores, purity and frequencies, step by step."""
    checks.purity(purity)
    checks.machine(device, None)
    if max_seconds is not None and max_seconds <= 0:
        raise InputError(f"--max-seconds must be above 0, not {max_seconds:g}")
    seeds = seed or [0]
    if repeated := [one for i, one in enumerate(seeds) if one in seeds[:i]]:
        raise InputError(f"--seed {repeated[0]} is given twice: the same run again would count as another seed")
    parameters = {
        "targets": targets,
        "pre_targets": pre_targets,
        "max_hops": hops,
        "letters": letters,
        "distractors": distractors,
    }
    output.check_target(out, overwrite)
    output.quiet_libraries()
    from posattn.tasks.training import TrainingConfig

    chosen = chosen_task(task, length, {name: value for name, value in parameters.items() if value is not None})
    shape = {k: v for k, v in {"layers": layers, "heads": heads, "d_model": d_model}.items() if v is not None}
    configs = [
        TrainingConfig(
            task=task,
            task_parameters=chosen.parameters,
            preset=preset,
            steps=steps,
            learning_rate=learning_rate,
            dropout=dropout,
            seed=one,
            every=every,
            model=shape,
        )
        for one in seeds
    ]
    work = out.parent / f"{out.name}.training"
    _prepare(work, resume, overwrite)
    with output.collected_warnings() as warnings, output.new_folder(out, overwrite) as folder:
        import torch

        torch.set_num_threads(threads)
        summary = train_into(
            configs,
            folder,
            work,
            warnings,
            purity=purity,
            prompts=prompts,
            device=device,
            resume=resume,
            max_seconds=max_seconds,
            quiet=quiet,
        )
    if not summary["stopped"]:
        shutil.rmtree(work, ignore_errors=True)
    output.tell(out, summary)


#: how the parameters of a task are written on the command line
OPTIONS = {
    "targets": "--targets",
    "pre_targets": "--pre-targets",
    "max_hops": "--hops",
    "letters": "--letters",
    "distractors": "--distractors",
}


def chosen_task(name: str, length: int | None, parameters: dict[str, Any]) -> Any:
    """The task that the options describe; what is wrong with it is said in their words.

    Raises:
        InputError: an unknown task, an option that it does not have, or a value that it cannot have.
    """
    from posattn.tasks import TASKS, make_task

    if name in TASKS:
        has = [option for parameter, option in OPTIONS.items() if parameter in TASKS[name].parameter_names()]
        for parameter in parameters:
            if OPTIONS[parameter] not in has:
                raise InputError(f"the {name} task has no {OPTIONS[parameter]}: it has {listed(['--length', *has])}")
    try:
        return make_task(name, length, **parameters)
    except InputError as error:
        text = str(error)
        for parameter, option in {**OPTIONS, "length": "--length"}.items():
            text = re.sub(rf"(?<![-\w]){parameter}(?= must )", option, text)
        raise InputError(text) from error


def _prepare(work: Path, resume: bool, overwrite: bool) -> None:
    """See that the folder of the running state may be used.

    Raises:
        InputError: it holds an unfinished run and the caller says neither --resume nor --overwrite, or something else.
    """
    if not work.exists() or resume:
        return
    runs = list(work.glob("*"))
    if any(not (run / "config.json").is_file() for run in runs):
        raise InputError(f"{work} holds something other than a training run; choose another --out")
    if not overwrite:
        raise InputError(f"{work} holds an unfinished run: add --resume to go on, or --overwrite to begin anew")
    shutil.rmtree(work)


def train_into(
    configs: Sequence[Any],
    folder: Path,
    work: Path,
    warnings: list[str],
    *,
    purity: float = 0.2,
    prompts: int = 32,
    device: str = "cpu",
    resume: bool = False,
    max_seconds: float | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Train every config with its heads followed, and write it all into `folder`; returns the summary.

    The state of a run that is under way is in `work/seed-N`; it is there after a kill, and can be resumed from.
    """
    from posattn.reports.write import plain, write_folder
    from posattn.tasks.tracking import Dynamics, HeadTracker
    from posattn.tasks.training import save_model, saved_step, train

    records, facts, stopped = {}, {}, []
    for config in configs:
        name = f"seed-{config.seed}"
        output.say(f"training on the {config.task} task, seed {config.seed}: {count(config.steps, 'step')}", quiet)
        tracker = HeadTracker.for_task(config.make_task(), config.every, prompts, seed=config.seed)
        with advice(lambda folder=work / name: how_to_go_on(folder, saved_step(folder))):
            run = train(
                config,
                tracker,
                work / name,
                resume=resume,
                device=device,
                save_every=max(config.every, 250),
                max_seconds=max_seconds,
                progress=not quiet,
            )
        records[name] = run.curves
        last = run.curves[-1]
        facts[name] = {
            "steps": run.step,
            "converged": run.converged,
            "stopped": run.stopped,
            "accuracy": last["accuracy"],
            "accuracy_by_hops": last["accuracy_by_hops"],
        }
        if run.stopped:
            stopped.append(run.stopped)
        save_model(run.model, config, folder / "model" / name, facts[name])
        lines = "".join(json.dumps(plain(record)) + "\n" for record in run.curves)
        (folder / f"curves-{name}.jsonl").write_text(lines, "utf-8")
    dynamics = Dynamics.from_records(records, **facts)
    emergence, relation = dynamics.emergence(purity), dynamics.relation(purity)
    summary = plain(train_summary(dynamics, emergence, relation, configs, facts, warnings, stopped))
    output.say("drawing", quiet)
    arrays = {
        name: getattr(dynamics, name)
        for name in ("accuracy", "accuracy_hops", "loss", "positional", "symbolic", "entropy", "frequency_id")
    }
    tables = {
        "curves": dynamics.curves_dataframe(purity),
        "heads": dynamics.to_dataframe(),
        "emergence": emergence.to_dataframe(),
        "relation": relation.to_dataframe(),
    }
    write_folder(folder, summary, arrays, tables)
    dynamics.save(folder / "dynamics.safetensors")
    return summary


def how_to_go_on(folder: Path, step: int | None) -> str:
    """What an interrupted training has left."""
    if step is None:
        return "nothing was saved"
    return f"the state after {count(step, 'step')} is in {folder}: add --resume to go on"


def train_summary(
    dynamics: Any,
    emergence: Any,
    relation: Any,
    configs: Sequence[Any],
    facts: dict[str, Any],
    warnings: list[str],
    stopped: list[str],
) -> dict[str, Any]:
    """What `posattn train` found, as plain numbers."""
    import dataclasses

    from posattn.heads.taxonomy import LABELS
    from posattn.reports.learning import pure_by_step
    from posattn.results import SCHEMA, provenance

    config = configs[0]
    shape = config.shape
    size = f"{config.preset} preset"
    if config.model:
        size = f"{count(shape['layers'], 'layer')} × {count(shape['heads'], 'head')}"
    last = dynamics.labels(emergence.gamma)
    names = list(dynamics.runs)
    return {
        "schema": SCHEMA,
        "command": "train",
        "provenance": provenance(
            model={"name": f"GPT-J, {size}", **shape},
            tokens={"source": f"{config.task} task", "parameters": config.make_task().parameters},
            seed=[c.seed for c in configs],
            training=dataclasses.asdict(config),
        ),
        "task": config.task,
        "purity": emergence.gamma,
        "steps": dynamics.steps,
        "hops": dynamics.hops,
        "planned_steps": config.total,
        "runs": {name: facts[name] for name in names},
        "stopped": stopped,
        "accuracy": dict(zip(names, dynamics.accuracy.tolist(), strict=True)),
        "accuracy_hops": dict(zip(names, dynamics.accuracy_hops.tolist(), strict=True)),
        "loss": dict(zip(names, dynamics.loss.tolist(), strict=True)),
        "positional": dict(zip(names, dynamics.positional[:, -1].tolist(), strict=True)),
        "symbolic": dict(zip(names, dynamics.symbolic[:, -1].tolist(), strict=True)),
        "frequency_id": dict(zip(names, dynamics.frequency_id[:, -1].tolist(), strict=True)),
        "labels": {name: last[r][-1] for r, name in enumerate(names)},
        "counts": {
            name: {label: sum(row.count(label) for row in last[r][-1]) for label in LABELS}
            for r, name in enumerate(names)
        },
        "pure_by_step": {name: pure_by_step(last[r]) for r, name in enumerate(names)},
        "emergence": list(emergence.rows),
        "relation": {
            name: {"values": column.tolist(), "interval": relation.intervals[name].tolist()}
            for name, column in relation.values.items()
        },
        "warnings": warnings,
    }
