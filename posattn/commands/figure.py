"""`posattn figure`: one figure of a finished run, for a paper."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from posattn.errors import InputError
from posattn.words import one_of


def figure(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that a command wrote.")],
    name: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(metavar="[NAME]", help="Which figure; without it, the names are listed."),
    ] = None,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--out", metavar="FILE", help="Where to; the suffix is the format: .pdf, .svg, .png."),
    ] = None,
    curves: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--curves",
            metavar="LIST",
            help="For a profile's figure `profiles`: which predictions, as energy,half. [default: the nearest, "
            "residual and energy]",
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
) -> None:
    """Draw one figure of a finished run, fit for a paper; or list the figures there are."""
    from posattn.reports.figures import names, write_figure
    from posattn.reports.write import as_numpy, read_folder

    summary, arrays = read_folder(folder)
    if name is None:
        known = names(summary, arrays)
        if not known:
            raise InputError(f"{folder} has no figures that can be drawn on their own")
        if out is not None or curves is not None:
            raise InputError(f"name a figure: {one_of(known)} (as in: posattn figure {folder} {known[0]})")
        print("\n".join(known))
        return
    path = out or Path(f"{name}.pdf")
    if not path.suffix:
        path = path.with_suffix(".pdf")
    if path.exists() and not overwrite:
        raise InputError(f"{path} exists already; choose another --out, or add --overwrite to replace it")
    if not path.parent.is_dir():
        raise InputError(f"there is no folder {path.parent} to write {path.name} to")
    chosen = None if curves is None else [part.strip() for part in curves.split(",") if part.strip()]
    write_figure(name, summary, as_numpy(arrays), path, chosen=chosen)
    print(path)
