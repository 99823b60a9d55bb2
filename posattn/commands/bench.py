"""`posattn bench`: how fast the rollout is on this machine, and whether every implementation is right."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from posattn.commands import checks, output
from posattn.errors import InputError


def bench(
    device: Annotated[str, typer.Option("--device", metavar="NAME", help="cpu or cuda.")] = "cpu",
    small: Annotated[
        bool, typer.Option("--small/--full", help="Small problems, or those of the published table.")
    ] = True,
    seconds: Annotated[float, typer.Option("--seconds", min=0.1, help="Timed seconds for each problem.")] = 1.0,
    rounds: Annotated[int, typer.Option("--rounds", min=0, help="At most; 0 checks the results only.")] = 5,
    against: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--compare", metavar="FILE", help="Earlier results (.json) to set these beside."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="DIR")] = Path("posattn-out/bench"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the results in that folder.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
) -> None:
    """Time every implementation of the rollout on this machine, beside a copy and a matrix product, and check it."""
    output.check_target(out, overwrite)
    import torch

    from posattn.bench import compare_reports, describe_row, load_report, markdown_table, rollout_groups, run_benchmarks
    from posattn.bench import save_report as save
    from posattn.results import SCHEMA

    checks.choice("--device", device, ("cpu", "cuda"))
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: PyTorch finds no such device here, so only the cpu can be timed")
    if against is not None and not against.is_file():
        wrong = "that is a folder, name a file" if against.is_dir() else "no such file"
        raise InputError(f"--compare {against}: {wrong}")
    earlier = None if against is None else load_report(against)
    with output.new_folder(out, overwrite) as folder:
        output.say("checking and timing the rollout", quiet)
        found = run_benchmarks(
            rollout_groups(device, small=small),
            seconds=seconds,
            rounds=rounds,
            progress=lambda row: output.say(describe_row(row), quiet, stage=False),
        )
        save(found, folder, "bench")
        (folder / "summary.json").write_text(output.as_json({**found, "command": "bench", "schema": SCHEMA}), "utf-8")
    print(markdown_table(found), end="")
    for row in [] if earlier is None else compare_reports(earlier, found):
        print(f"{row['group']}, {row['job']}: {row['ratio']:.2f} times as fast as before")
    wrong = [f"{row['group']}, {row['job']}" for row in found["results"] if row["status"] in ("failed", "wrong")]
    if wrong:
        raise RuntimeError(f"wrong or failed: {'; '.join(wrong)}")
    print(f"results: {out}")
