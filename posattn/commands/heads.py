"""`posattn heads`: which heads of this model work by position, which by symbol, and does it matter?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from posattn.commands import checks, options, output
from posattn.commands.documents import document_length, read_documents
from posattn.errors import InputError, UnsupportedModelError
from posattn.words import count

#: tokens in each document of a text, unless --length says otherwise
LENGTH = 128


def heads(
    model: options.Model,
    text: options.Data = None,
    field: options.Field = "text",
    length: options.Length = None,
    samples: options.Samples = 16,
    batch_size: options.BatchSize = 4,
    bos: options.Bos = None,
    seed: options.Seed = 0,
    device: options.Device = None,
    dtype: options.Dtype = None,
    level: Annotated[
        str, typer.Option("--level", help="keys: exchange hidden keys (exact); tokens: exchange tokens and run again.")
    ] = "keys",
    queries: Annotated[
        str,
        typer.Option(
            "--queries",
            help="last, all, a number (so many sampled in each document), or positions: 5,9,-1 or 5, for one.",
        ),
    ] = "8",
    tau: Annotated[float, typer.Option("--tau", min=0, help="How much larger changes of attention count more.")] = 1e-4,
    purity: Annotated[float, typer.Option("--purity", help="γ: how near a corner of the plane is pure.")] = 0.2,
    max_swaps: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--max-swaps", min=1, help="For --level tokens: swaps a document. [default: 200]"),
    ] = None,
    no_rotary: Annotated[bool, typer.Option("--no-rotary", help="Leave the rotary frequencies out.")] = False,
    ablate: Annotated[
        bool, typer.Option("--ablate", help="Measure the loss with each class of heads removed.")
    ] = False,
    ablation_mode: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--ablation-mode", help="With --ablate: zero, mean or position_mean. [default: zero]"),
    ] = None,
    out: options.Out = Path("posattn-out/heads"),
    overwrite: options.Overwrite = False,
    quiet: options.Quiet = False,
) -> None:
    """Score every head: does it work by position or by symbol, through which frequencies, and does it matter?"""
    output.check_target(out, overwrite)
    output.quiet_libraries()
    checks.choice("--level", level, ("keys", "tokens"))
    checks.purity(purity)
    checks.machine(device, dtype)
    checks.source(text)
    size = document_length(model, text, length, LENGTH)
    wanted = check_queries(chosen_queries(queries), size, seed)
    check_mode(ablation_mode or "zero")
    if ablation_mode is not None and not ablate:
        raise InputError("--ablation-mode says how --ablate removes heads: add --ablate, or leave it out")
    if max_swaps is not None and level != "tokens":
        raise InputError("--max-swaps goes with --level tokens: with keys every swap is taken, exactly")
    with output.collected_warnings() as warnings, output.new_folder(out, overwrite) as folder:
        from posattn.models.loading import load_model

        output.say(f"loading {model}", quiet)
        loaded = load_model(model, device=device, dtype=dtype)
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
        summary = heads_into(
            loaded,
            tokens,
            folder,
            warnings,
            scores={
                "level": level,
                "queries": wanted,
                "tau": tau,
                "batch_size": batch_size,
                "seed": seed,
                **({"max_swaps": max_swaps or 200} if level == "tokens" else {}),
            },
            purity=purity,
            rotary=not no_rotary,
            ablate=(ablation_mode or "zero") if ablate else None,
            quiet=quiet,
        )
    output.tell(out, summary)


def chosen_queries(text: str) -> str | int | list[int]:
    """What `--queries` asks for: "last", "all", how many to sample, or positions (with a comma: "5," is one).

    Raises:
        InputError: none of these.
    """
    if text in ("last", "all"):
        return text
    try:
        if "," in text:
            return [int(part) for part in text.split(",") if part.strip()]
        return int(text)
    except ValueError:
        raise InputError(f"--queries is last, all, a number or positions such as 5,9,-1; not {text!r}") from None


def check_queries(queries: str | int | list[int], length: int, seed: int) -> str | int | list[int]:
    """The queries themselves, once a document of this length is known to have them.

    Raises:
        PosattnError: a document of `length` tokens has no such queries.
    """
    from posattn.heads.documents import choose_queries

    choose_queries(queries, length, seed)
    return queries


def check_mode(mode: str) -> None:
    """Refuse an unknown way of removing heads.

    Raises:
        InputError: there is none of that name.
    """
    from posattn.heads.ablation import MODES

    checks.choice("--ablation-mode", mode, MODES)


def heads_into(
    model: Any,
    tokens: Any,
    folder: Path,
    warnings: list[str],
    *,
    scores: dict[str, Any],
    purity: float,
    rotary: bool,
    ablate: str | None,
    quiet: bool,
) -> dict[str, Any]:
    """Score, classify, look into the heads, and write it all into `folder`; returns the summary."""
    from posattn.heads.ablation import ablation_study
    from posattn.heads.rotary import rotary_usage
    from posattn.heads.scores import score_heads
    from posattn.heads.taxonomy import classify_heads, head_list
    from posattn.reports.summaries import heads_summary, heads_tables
    from posattn.reports.sure import different_documents, document_warnings
    from posattn.reports.write import plain, write_folder

    heads = count(sum(info.n_heads for info in model.layers), "head")
    documents = f"{count(tokens.documents, 'document')} of {count(tokens.length, 'token')}"
    output.say(f"scoring {heads} on {documents}", quiet)
    found = score_heads(model, tokens, **scores)
    taxonomy = classify_heads(found, purity)
    usage = None
    if rotary:
        try:
            output.say("rotary frequencies", quiet)
            usage = rotary_usage(model, tokens, batch_size=scores["batch_size"], seed=scores["seed"])
        except UnsupportedModelError as none:
            output.say(f"left out: {none}", quiet)
    study = None
    if ablate is not None:
        output.say("ablating each class of heads", quiet)
        study = ablation_study(model, tokens, taxonomy, mode=ablate, batch_size=scores["batch_size"])
    output.say("drawing", quiet)
    arrays = look_inside(model, tokens, keys=scores["level"] == "keys")
    if usage is not None:
        arrays |= {f"rotary.{name}": getattr(usage, name) for name in ROTARY}
    warnings += document_warnings(tokens)
    summary = plain(heads_summary(found, taxonomy, usage, study, warnings))
    summary["different_documents"] = different_documents(tokens)
    write_folder(folder, summary, arrays, heads_tables(found, taxonomy, usage, study))
    named = [*taxonomy.counts, *taxonomy.role_counts]
    lists = {name: head_list(taxonomy, name) for name in named}
    (folder / "heads.json").write_text(json.dumps(plain(lists), indent=1) + "\n", "utf-8")
    return summary


#: what the pages of single heads show of the rotary decomposition
ROTARY = (
    "frequencies",
    "energy",
    "variance_share",
    "positional",
    "symbolic",
    "predicted_attention",
    "real_attention",
)


def look_inside(model: Any, tokens: Any, *, keys: bool) -> dict[str, Any]:
    """Pattern [T,H,N,N] and, for movable keys, cross-logits [T,H,n,n] of the first document."""
    import torch

    document = tokens.tokens[0] if tokens.mask is None else tokens.tokens[0][tokens.mask[0]]
    if keys:
        from posattn.heads.inspect import cross_logits

        found = [cross_logits(model, document, layer) for layer in range(model.n_layers)]
        arrays: dict[str, Any] = {"pattern": _stacked([one.pattern for one in found])}
        if len({tuple(one.logits.shape) for one in found}) == 1:  # windows of their own make layers differ
            arrays["cross_logits"] = torch.stack([one.logits.float() for one in found])
        return {name: value for name, value in arrays.items() if value is not None}
    patterns: list[Any] = []
    with (
        torch.no_grad(),
        model.observe(["pattern"], lambda layer, points, batch: patterns.append(points["pattern"][0].cpu())),
    ):
        model(document[None].to(model.device))
    stacked = _stacked(patterns)
    return {} if stacked is None else {"pattern": stacked}


def _stacked(parts: list[Any]) -> Any:
    import torch

    from posattn.reports.summaries import MOST_NUMBERS

    if len({tuple(part.shape) for part in parts}) > 1 or sum(part.numel() for part in parts) > MOST_NUMBERS:
        return None
    return torch.stack([part.float() for part in parts])
