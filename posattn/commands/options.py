"""Arguments and options that several commands share, each written once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

# typer reads these at import time, on every supported Python; hence Optional
Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A hub name, a folder, a .gguf file, or bundled:NAME (`posattn models`).")
]
Data = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--text",
        "--data",
        metavar="SOURCE",
        help="A text, .jsonl, .parquet, .arrow or .csv file (UTF-8), hf:NAME of a data set, or bundled:python-docs "
        "(the default; for a model that was trained on a task: samples of that task).",
    ),
]
Field = Annotated[
    str,
    typer.Option("--field", metavar="NAME", help="Which field or column holds the text, where it is no text file."),
]
Length = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(
        "--length",
        min=2,
        help="Tokens in each document. By default 256, for heads 128, for a model of a task as long as its samples.",
    ),
]
Samples = Annotated[int, typer.Option("--samples", min=1, help="How many documents to measure.")]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Documents in each forward pass.")]
Bos = Annotated[
    Optional[bool],  # noqa: UP045
    typer.Option("--bos/--no-bos", help="Begin each document with the BOS token. By default as the tokenizer does it."),
]
Seed = Annotated[int, typer.Option("--seed", help="Decides which documents are drawn.")]
Device = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--device", metavar="NAME", help="cpu, cuda, cuda:1, mps. By default CUDA where there is one."),
]
Dtype = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--dtype", metavar="NAME", help="float32, bfloat16, float16. By default the model's own."),
]
Adapter = Annotated[
    str,
    typer.Option(
        "--adapter",
        metavar="NAME",
        help="bridge (TransformerLens' TransformerBridge), hooked (its HookedTransformer, before version 4), plain "
        "(the model as it is, with its fast attention), or auto: plain with --bins, else bridge where there is one.",
    ),
]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder for the results.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the results that are in that folder already.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]
