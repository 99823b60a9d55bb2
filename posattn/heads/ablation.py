"""Does it matter? Heads removed, frozen, and the loss with each class of heads removed.

`ablate_heads` replaces z, a head's weighted values before the output projection, by zero, by its mean over data, or
by its mean at each position over data (which keeps what depends on position alone). It is a context manager and
leaves no trace: the hook is removed on exit, whatever happens, and no weight is touched.

`freeze_heads` stops gradients instead: none flows through a head's z, so none reaches its query, key and value (a key
head shared with other heads still learns from those), and the rows of the output projection that read it get none.

`ablation_study` measures the loss per document at several lengths, with each class of heads removed, and beside it
with random sets of heads: as many in each layer, outside the class where the layer has enough of them. Documents are
resampled for the intervals; every set sees the same documents, so differences are paired.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from posattn.distributed import combined, world
from posattn.errors import DataError, InputError, UnsupportedModelError
from posattn.heads.documents import Schemes, as_documents, batches, run_facts, seen
from posattn.heads.taxonomy import HeadTaxonomy
from posattn.models.base import Batch, Model
from posattn.models.positions import real_positions
from posattn.results import Provenance, Result, provenance

if TYPE_CHECKING:
    import pandas as pd

#: (layer, head) pairs, names such as "L3H2", entries of a head list, or a whole head list (`head_list`, `heads.json`)
Heads = Iterable[Any] | Mapping[str, Any]
MODES = ("zero", "mean", "position_mean")


def as_pairs(heads: Heads) -> list[tuple[int, int]]:
    """`heads` as (layer, head) pairs, ascending and without repeats.

    Raises:
        InputError: an entry that is neither a pair, nor a name, nor an entry of a head list.
    """
    if isinstance(heads, Mapping):
        if "heads" not in heads:
            raise InputError(f'a head list has an entry "heads", this one only {", ".join(map(repr, heads)) or "none"}')
        heads = heads["heads"]
    elif isinstance(heads, str):
        heads = [heads]
    return sorted({_pair(entry) for entry in heads})


def _pair(entry: Any) -> tuple[int, int]:
    try:
        if isinstance(entry, str):
            layer, head = re.fullmatch(r"L(\d+)H(\d+)", entry).groups()  # pyright: ignore[reportOptionalMemberAccess]
        elif isinstance(entry, Mapping):
            layer, head = entry["layer"], entry["head"]
        else:
            layer, head = entry
        return int(layer), int(head)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise InputError(f'a head is a pair (layer, head) or a name such as "L3H2", not {entry!r}') from None


def by_layer(model: Model, heads: Heads) -> dict[int, list[int]]:
    """Heads by layer, checked against the model.

    Raises:
        InputError: no heads, or one that does not exist.
    """
    chosen: dict[int, list[int]] = {}
    for layer, head in as_pairs(heads):
        if not 0 <= layer < model.n_layers:
            raise InputError(f"layer {layer} does not exist: {model.name} has layers 0 to {model.n_layers - 1}")
        if not 0 <= head < model.layers[layer].n_heads:
            raise InputError(f"layer {layer} has heads 0 to {model.layers[layer].n_heads - 1}, not {head}")
        chosen.setdefault(layer, []).append(head)
    if not chosen:
        raise InputError("no heads given")
    return chosen


def head_means(
    model: Any,
    tokens: Any,
    by_position: bool = False,
    layers: Iterable[int] | None = None,
    batch_size: int = 8,
) -> dict[int, Tensor]:
    """Mean z over documents and positions, by layer: [H,d], or over documents alone: [N,H,d].

    Several processes share the documents; each gets the mean over all of them.
    """
    model = seen(model)
    documents = as_documents(tokens)
    longest = max(map(len, documents))
    chosen = sorted(set(range(model.n_layers) if layers is None else layers))
    sums: dict[int, Tensor] = {}
    counts = torch.zeros(longest, dtype=torch.float64)
    for row in documents:
        counts[: len(row)] += 1

    def observer(layer: int, points: Mapping[str, Tensor], batch: Batch) -> None:
        z = points["z"].double().sum(0).cpu()
        if layer not in sums:
            sums[layer] = torch.zeros(longest, *z.shape[1:], dtype=torch.float64)
        sums[layer][: len(z)] += z

    schemes = Schemes(model)
    for _, batch_tokens in batches(documents, batch_size, shared=True):
        schemes(batch_tokens.shape[-1])
        with torch.no_grad(), model.observe(["z"], observer, chosen):
            model(batch_tokens.to(model.device))
    if world().size > 1:
        sums = combined(world().gather(sums), _added)
    if by_position:
        return {layer: total / counts[:, None, None] for layer, total in sums.items()}
    return {layer: total.sum(0) / counts.sum() for layer, total in sums.items()}


def _added(a: dict[int, Tensor], b: dict[int, Tensor]) -> dict[int, Tensor]:
    """Sums by layer of two processes, of which one may have had no document."""
    return {**a, **b, **{layer: a[layer] + b[layer] for layer in a.keys() & b.keys()}}


@contextmanager
def ablate_heads(
    model: Any,
    heads: Heads,
    mode: str = "zero",
    *,
    tokens: Any = None,
    means: Mapping[int, Tensor] | None = None,
) -> Iterator[None]:
    """While open, `heads` give zero, their mean or their mean at each position.

    Args:
        heads: (layer, head) pairs, names ("L3H2"), or a list from `head_list` or `heads.json`.
        mode: "zero", "mean" or "position_mean".
        tokens: the data for a mean; or `means` from `head_means`, measured before.

    Raises:
        InputError: a head that does not exist, an unknown mode, a mean without data, or (on the forward pass) an input
            longer than the documents that the means by position were measured on.
    """
    model = seen(model)
    chosen = by_layer(model, heads)
    if mode not in MODES:
        raise InputError(f"mode is one of {', '.join(MODES)}, not {mode!r}")
    if mode != "zero" and means is None:
        if tokens is None:
            raise InputError(f'mode="{mode}" needs tokens to take the mean over, or means measured before')
        means = head_means(model, tokens, mode == "position_mean", chosen)

    def change(layer: int, z: Tensor, batch: Batch) -> Tensor:
        picked = chosen[layer]
        z = z.clone()
        if mode == "zero" or means is None:
            z[:, :, picked] = 0
            return z
        mean = means[layer].to(z)
        if mode == "mean":
            z[:, :, picked] = mean[picked]
            return z
        positions = real_positions(batch.mask)
        if int(positions.max()) >= len(mean):
            raise InputError(
                f"an input of {int(positions.max()) + 1} tokens, but means by position were measured on {len(mean)}: "
                "measure them on longer documents"
            )
        z[:, :, picked] = mean[positions.to(mean.device)][:, :, picked]
        return z

    with model.intervene("z", change, chosen):
        yield


@contextmanager
def freeze_heads(model: Any, heads: Heads) -> Iterator[None]:
    """While open, backward passes give the heads no gradient: not to q, k, v, nor to their rows of the output
    projection. `heads` as for `ablate_heads`.

    Raises:
        InputError: a head that does not exist.
        UnsupportedModelError: the output projection is not a parameter of the live model (a quantised one).
    """
    model = seen(model)
    chosen = by_layer(model, heads)

    def change(layer: int, z: Tensor, batch: Batch) -> Tensor:
        keep = torch.ones(z.shape[2], 1, dtype=torch.bool, device=z.device)
        keep[chosen[layer]] = False
        return torch.where(keep, z, z.detach())

    with ExitStack() as stack:
        for layer, picked in chosen.items():
            parameter, frozen = _output_rows(model, layer, picked)
            if parameter.requires_grad:
                handle = parameter.register_hook(lambda gradient, frozen=frozen: gradient.masked_fill(frozen, 0))
                stack.callback(handle.remove)
        stack.enter_context(model.intervene("z", change, chosen))
        yield


def _output_rows(model: Model, layer: int, heads: list[int]) -> tuple[torch.nn.Parameter, Tensor]:
    """The parameter that holds the output projection, and a mask, in its shape, of the entries that read `heads`."""
    weight = model.output_map(layer).weight  # a view [H,d,D] of the parameter
    for parameter in model.module.parameters():
        if parameter.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr():
            mask = torch.zeros(parameter.shape, dtype=torch.bool, device=parameter.device)
            offset = weight.storage_offset() - parameter.storage_offset()
            mask.as_strided(weight.shape, weight.stride(), offset)[heads] = True
            return parameter, mask
    raise UnsupportedModelError(
        f"layer {layer} of {model.name}: its output projection is not a plain parameter, so heads cannot be frozen"
    )


@dataclasses.dataclass(frozen=True, eq=False)
class AblationStudy(Result):
    """Loss (nats a token) with each class of heads removed. C classes, K control sets, S documents, L lengths.

    `baseline` [S,L], `loss` [C,S,L], `control` [C,K,S,L]: each document's mean loss over its first `lengths[l]` tokens;
    `late_*`: over the second half of them only, where a limit of length shows first. `increase` [C,L] = mean of
    loss − baseline; `control_increase` likewise for random sets; `excess` = their difference, `late_excess` the same in
    the second half. `*_interval` [C,L,2]: bootstrap over documents (and over control sets too, for the controls and the
    excess); NaN for a single document. `heads` by class as [layer, head] pairs; `overlap` by class: how many heads of a
    control set, on average, had to be taken from the class itself, because its layers hold too few others.
    """

    kind: ClassVar[str] = "ablation study"

    classes: Sequence[str]
    lengths: Sequence[int]
    factors: Sequence[float]
    baseline: Float[Tensor, "docs lengths"]
    loss: Float[Tensor, "classes docs lengths"]
    control: Float[Tensor, "classes controls docs lengths"]
    late_baseline: Float[Tensor, "docs lengths"]
    late_loss: Float[Tensor, "classes docs lengths"]
    late_control: Float[Tensor, "classes controls docs lengths"]
    increase: Float[Tensor, "classes lengths"]
    increase_interval: Float[Tensor, "classes lengths 2"]
    control_increase: Float[Tensor, "classes lengths"]
    control_increase_interval: Float[Tensor, "classes lengths 2"]
    excess: Float[Tensor, "classes lengths"]
    excess_interval: Float[Tensor, "classes lengths 2"]
    late_excess: Float[Tensor, "classes lengths"]
    late_excess_interval: Float[Tensor, "classes lengths 2"]
    heads: dict[str, Any]
    overlap: dict[str, float]
    mode: str
    confidence: float
    provenance: Provenance

    def to_dataframe(self) -> pd.DataFrame:
        """One row a class and length: size, loss, increase, control increase and excess with their intervals."""
        import pandas as pd

        rows = []
        for c, name in enumerate(self.classes):
            for n, length in enumerate(self.lengths):
                row: dict[str, Any] = {
                    "class": name,
                    "heads": len(self.heads[name]),
                    "length": length,
                    "factor": self.factors[n],
                    "baseline": float(self.baseline[:, n].mean()),
                    "loss": float(self.loss[c, :, n].mean()),
                    "late_increase": float((self.late_loss[c, :, n] - self.late_baseline[:, n]).mean()),
                    "overlap": self.overlap[name],
                }
                for figure in ("increase", "control_increase", "excess", "late_excess"):
                    low, high = getattr(self, f"{figure}_interval")[c, n].tolist()
                    row.update(
                        {figure: float(getattr(self, figure)[c, n]), f"{figure}_low": low, f"{figure}_high": high}
                    )
                rows.append(row)
        return pd.DataFrame(rows)

    def plot(self, ax: Any = None) -> Any:
        """Increase of the loss by class, one group a class and one bar a length; random sets as hollow marks."""
        from posattn import plotting

        ax = plotting.axes(ax)
        width = 0.8 / len(self.lengths)
        places = torch.arange(len(self.classes), dtype=torch.float64).numpy()
        for n, length in enumerate(self.lengths):
            at = places + (n - (len(self.lengths) - 1) / 2) * width
            value = self.increase[:, n].numpy()
            spread = abs(self.increase_interval[:, n].numpy() - value[:, None]).T
            bars = None if (spread != spread).any() else spread
            ax.bar(at, value, width, yerr=bars, label=f"{length} tokens", color=plotting.colour(n))
            ax.plot(at, self.control_increase[:, n].numpy(), "o", mfc="none", mec="black", ms=5, ls="")
        ax.set_xticks(places, [f"{name} ({len(self.heads[name])})" for name in self.classes], rotation=20, ha="right")
        plotting.finish(ax, x="", y="increase of loss (nats a token)")
        plotting.legend_outside(ax, title="circles: random heads")
        return ax


def ablation_study(
    model: Any,
    tokens: Any,
    taxonomy: HeadTaxonomy | Mapping[str, Heads],
    *,
    classes: Sequence[str] | None = None,
    base: int | None = None,
    factors: Sequence[float] = (1, 2, 4),
    controls: int = 5,
    mode: str = "zero",
    mean_tokens: Any = None,
    batch_size: int = 2,
    bootstrap: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
) -> AblationStudy:
    """Loss at `factors` times a base length with each class of heads removed, against random heads in the same layers.

    Several processes share the documents; each gets the whole study.

    Args:
        taxonomy: from `classify_heads`, or sets of heads by name.
        classes: labels and roles to remove; None: every one that has heads.
        base: the base length; None: the shortest document's length over the largest factor.
        controls: how many random sets a class.
        mode: as `ablate_heads`; means are taken over `mean_tokens`, or over `tokens`.

    Raises:
        DataError: documents shorter than the base length times the largest factor.
        InputError: nothing to remove, or an argument out of range.
    """
    model = seen(model)
    documents = as_documents(tokens)
    if not factors or any(factor <= 0 for factor in factors):
        raise InputError(f"factors must be above 0, got {list(factors)}")
    if controls < 1:
        raise InputError(f"controls must be at least 1, not {controls}")
    if mode not in MODES:
        raise InputError(f"mode is one of {', '.join(MODES)}, not {mode!r}")
    shortest = min(map(len, documents))
    base = int(shortest / max(factors)) if base is None else base
    lengths = [round(base * factor) for factor in factors]
    if base < 2 or min(lengths) < 2:
        raise DataError(f"documents of {shortest} tokens leave a base length of {base}: a loss needs two tokens")
    if shortest < max(lengths):
        raise DataError(f"{max(factors)} times {base} tokens are needed, the shortest document has {shortest}")
    sets = _classes(model, taxonomy, classes)
    means = (
        None
        if mode == "zero"
        else head_means(model, tokens if mean_tokens is None else mean_tokens, mode == "position_mean")
    )
    schemes = Schemes(model)
    baseline = _losses(model, schemes, documents, lengths, batch_size, nullcontext)
    losses, control_losses, overlap = [], [], {}
    generator = torch.Generator().manual_seed(seed)
    for name, heads in sets.items():

        def removed(heads: Any = heads) -> Any:
            return ablate_heads(model, heads, mode, means=means)

        losses.append(_losses(model, schemes, documents, lengths, batch_size, removed))
        drawn = [_control(model, heads, generator) for _ in range(controls)]
        overlap[name] = sum(len(set(d) & set(heads)) for d in drawn) / controls
        control_losses.append(
            torch.stack(
                [_losses(model, schemes, documents, lengths, batch_size, lambda d=d: removed(d)) for d in drawn]
            )
        )
    loss, control = torch.stack(losses), torch.stack(control_losses)  # [C,2,S,L], [C,K,2,S,L]
    change, late = (loss - baseline).unbind(1)  # [C,S,L]
    control_change, late_control = (control - baseline).unbind(2)  # [C,K,S,L]
    bounds = _intervals(change, control_change, bootstrap, confidence, seed)
    late_bounds = _intervals(late, late_control, bootstrap, confidence, seed)
    return AblationStudy(
        classes=list(sets),
        lengths=lengths,
        factors=[float(factor) for factor in factors],
        baseline=baseline[0],
        loss=loss[:, 0],
        control=control[:, :, 0],
        late_baseline=baseline[1],
        late_loss=loss[:, 1],
        late_control=control[:, :, 1],
        increase=change.mean(1),
        increase_interval=bounds[0],
        control_increase=control_change.mean((1, 2)),
        control_increase_interval=bounds[1],
        excess=change.mean(1) - control_change.mean((1, 2)),
        excess_interval=bounds[2],
        late_excess=late.mean(1) - late_control.mean((1, 2)),
        late_excess_interval=late_bounds[2],
        heads={name: [list(pair) for pair in heads] for name, heads in sets.items()},
        overlap=overlap,
        mode=mode,
        confidence=confidence,
        provenance=provenance(**run_facts(model, tokens, seed=seed)),
    )


def _classes(
    model: Model, taxonomy: HeadTaxonomy | Mapping[str, Heads], names: Sequence[str] | None
) -> dict[str, list[tuple[int, int]]]:
    if isinstance(taxonomy, HeadTaxonomy):
        known = {name: taxonomy.heads(name) for name in (*taxonomy.counts, *taxonomy.role_counts)}
    else:
        known = {name: as_pairs(heads) for name, heads in taxonomy.items()}
    if names is not None:
        if unknown := [name for name in names if name not in known]:
            raise InputError(f"no label or role {unknown[0]!r}: there are {', '.join(known)}")
        if hollow := [name for name in names if not known[name]]:
            raise InputError(f"no head is {hollow[0]!r}: there is nothing to remove")
        known = {name: known[name] for name in names}
    sets = {name: heads for name, heads in known.items() if heads}
    if not sets:
        raise InputError("no class has a head: there is nothing to remove")
    for heads in sets.values():
        by_layer(model, heads)
    return sets


def _control(model: Model, heads: list[tuple[int, int]], generator: torch.Generator) -> list[tuple[int, int]]:
    """As many random heads in each layer, others than `heads` as far as the layer has them."""
    drawn = []
    for layer, taken in by_layer(model, heads).items():
        order = torch.randperm(model.layers[layer].n_heads, generator=generator).tolist()
        others = [h for h in order if h not in taken]
        drawn += [(layer, h) for h in (others + [h for h in order if h in taken])[: len(taken)]]
    return drawn


def _losses(
    model: Model, schemes: Schemes, documents: list[Tensor], lengths: list[int], batch_size: int, removed: Any
) -> Tensor:
    """Mean loss [2,S,L] over each document's first l tokens, and over the second half of those."""
    out = torch.zeros(2, len(documents), len(lengths), dtype=torch.float64)
    longest = max(lengths)
    # one run gives every shorter length, unless positions are scaled by the length of the input
    short, long = schemes(min(lengths)), schemes(longest)
    together = all(
        a.rotary is None or b.rotary is None or torch.equal(a.rotary.cos, b.rotary.cos[: min(lengths)])
        for a, b in zip(short, long, strict=True)
    )
    for length in [longest] if together else sorted(set(lengths)):
        schemes(length)
        with torch.no_grad(), removed():
            for indices, batch_tokens in batches([row[:length] for row in documents], batch_size, shared=True):
                text = batch_tokens.to(model.device)
                logits = model(text)[:, :-1]
                nll = torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1).float(), text[:, 1:].flatten(), reduction="none"
                )
                nll = nll.view(len(text), -1).double().cpu()
                for place, n in enumerate(lengths):
                    if together or n == length:
                        out[0, indices, place] = nll[:, : n - 1].mean(-1)
                        out[1, indices, place] = nll[:, (n - 1) // 2 : n - 1].mean(-1)
    mine = out[:, world().share(len(documents))].transpose(0, 1)  # the others' rows are theirs to fill
    return world().concatenate(mine).transpose(0, 1)


def _intervals(change: Tensor, control: Tensor, resamples: int, confidence: float, seed: int) -> list[Tensor]:
    """Bootstrap bounds [C,L,2] of increase, control increase and excess; documents, and control sets, resampled."""
    classes, documents, lengths = change.shape
    shape = (classes, lengths, 2)
    if documents < 2 or resamples < 1:
        return [torch.full(shape, math.nan, dtype=torch.float64) for _ in range(3)]
    generator = torch.Generator().manual_seed(seed)
    sets = control.shape[1]
    draws = torch.randint(documents, (resamples, documents), generator=generator)
    share = torch.nn.functional.one_hot(draws, documents).sum(1).double() / documents  # [R,S]
    picks = torch.randint(sets, (resamples, sets), generator=generator)
    weight = torch.nn.functional.one_hot(picks, sets).sum(1).double() / sets  # [R,K]
    own = torch.einsum("rs,csl->rcl", share, change)
    other = torch.einsum("rs,rk,cksl->rcl", share, weight, control)
    tail = (1 - confidence) / 2
    levels = torch.tensor([tail, 1 - tail], dtype=torch.float64)
    return [torch.quantile(x, levels, dim=0).movedim(0, -1) for x in (own, other, own - other)]
