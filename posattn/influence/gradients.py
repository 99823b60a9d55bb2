"""Measured influence: how strongly each input position moves the next-token prediction.

For one document with token embeddings e_1 … e_N and a scalar f of the logits at its last real position:

    gradient_norm         m_i = ‖∂f/∂e_i‖₂  (the default, as in Herasimchyk et al., arXiv 2602.16837)
    input_x_gradient      m_i = ‖e_i ⊙ ∂f/∂e_i‖₂
    integrated_gradients  m_i = ‖e_i ⊙ ∫₀¹ ∂f/∂e_i(s·e) ds‖₂, baseline all zero (Sundararajan et al., arXiv 1703.01365)

f is the probability of the most probable next token (`argmax_probability`), its logarithm (`argmax_log_probability`),
or the probability of a given token id. The token is chosen on the actual input. Attributions are made magnitudes
before anything is averaged. The profile is the mean of m over documents, normalised (`after_mean`), or the mean of
each document's normalised m (`per_document`). Positions count real tokens, so padded documents give what the unpadded
would.

captum computes the attributions; the forward function is ours and starts at the embeddings. A method is a function in
`METHODS`; whoever adds one there gets targets, padding, averaging and provenance for free.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from posattn.distributed import world
from posattn.errors import InputError, NothingMeasuredError
from posattn.influence.perturbation import perturbation
from posattn.models.base import Model
from posattn.probes.measure import describe_model
from posattn.probes.session import as_a_model
from posattn.probes.statistics import Alignment, accumulator
from posattn.results import Provenance, Result, provenance
from posattn.tokens import Tokens, load_tokens

if TYPE_CHECKING:
    import pandas as pd

Target = Literal["argmax_probability", "argmax_log_probability"]
NORMALIZE = ("after_mean", "per_document")
TARGETS = ("argmax_probability", "argmax_log_probability")
#: below this a document's total is rounding noise, not an influence
TINY = 1e-30


@dataclasses.dataclass(frozen=True, eq=False)
class Influence(Result):
    """A measured influence profile.

    `profile` [N] sums to 1. `per_document` [M,N] holds the raw magnitudes (NaN beyond a document's length), for
    intervals. `counts` [N]: documents that reach each position. `chosen` [M]: the token id whose probability was
    attributed; `probability` [M]: that probability.
    """

    kind: ClassVar[str] = "influence"

    profile: Float[Tensor, " n"]
    per_document: Float[Tensor, "m n"]
    counts: Int[Tensor, " n"]
    chosen: Int[Tensor, " m"]
    probability: Float[Tensor, " m"]
    method: str
    target: str
    normalize: str
    provenance: Provenance

    def to_dataframe(self) -> pd.DataFrame:
        """One row a position: columns position, value."""
        import pandas as pd

        return pd.DataFrame({"position": range(len(self.profile)), "value": self.profile.tolist()})

    def plot(self, ax: Any = None) -> Any:
        """The profile against the position."""
        from posattn import plotting

        ax = plotting.curve(plotting.axes(ax), self.profile, label=self.method.replace("_", " "))
        return plotting.finish(ax, x="position", y="share of the influence", legend=True)


@dataclasses.dataclass(frozen=True)
class Objective:
    """The scalar that is attributed: what a method calls, one number a document.

    `ids` [b,n]: the documents. `last` [b]: each one's last real position. `token` [b]: the token whose probability is
    taken, or whose log-probability when `log` is set.
    """

    model: Model
    ids: Int[Tensor, "b n"]
    mask: Bool[Tensor, "b n"] | None
    last: Int[Tensor, " b"]
    token: Int[Tensor, " b"]
    log: bool

    def __call__(self, embeddings: Float[Tensor, "e n d"]) -> Float[Tensor, " e"]:
        """The objective for embeddings of the same documents, perhaps several copies of them after one another."""
        copies = embeddings.shape[0] // self.last.shape[0]
        mask = None if self.mask is None else self.mask.repeat(copies, 1)
        logits = self.model.from_embeddings(embeddings, mask)
        logs = log_probabilities(logits, self.last.repeat(copies))
        value = logs.gather(1, self.token.repeat(copies)[:, None])[:, 0]
        return value if self.log else value.exp()


#: magnitudes [b,n] of one batch from its embeddings [b,n,d] and the objective, with the method's own options
Method = Callable[..., Tensor]


def log_probabilities(logits: Float[Tensor, "b n v"], last: Int[Tensor, " b"]) -> Float[Tensor, "b v"]:
    """Log-probabilities of the next token at each document's last real position.

    In float64 (float32 where that is missing): near probability 1 the gradient is 1−p, which float32 rounds to noise.
    """
    chosen = logits[torch.arange(len(last), device=logits.device), last]
    return chosen.to(accumulator(chosen.device)).log_softmax(-1)


def _magnitude(attribution: Tensor) -> Tensor:
    dtype = torch.promote_types(attribution.dtype, torch.float32)
    return torch.linalg.vector_norm(attribution.detach(), dim=-1, dtype=dtype)


def gradient_norm(embeddings: Tensor, objective: Objective) -> Tensor:
    """‖∂f/∂e_i‖₂."""
    from captum.attr import Saliency

    return _magnitude(Saliency(objective).attribute(embeddings, abs=False))


def input_x_gradient(embeddings: Tensor, objective: Objective) -> Tensor:
    """‖e_i ⊙ ∂f/∂e_i‖₂."""
    from captum.attr import InputXGradient

    return _magnitude(InputXGradient(objective).attribute(embeddings))


def integrated_gradients(embeddings: Tensor, objective: Objective, steps: int = 32) -> Tensor:
    """‖integrated gradients‖₂ from an all-zero baseline, by Gauss–Legendre quadrature with `steps` points."""
    from captum.attr import IntegratedGradients

    # one batch's worth of copies at a time: memory does not depend on the number of steps
    attribution = IntegratedGradients(objective).attribute(
        embeddings, n_steps=steps, internal_batch_size=embeddings.shape[0]
    )
    return _magnitude(attribution)


#: name -> method
METHODS: dict[str, Method] = {
    "gradient_norm": gradient_norm,
    "input_x_gradient": input_x_gradient,
    "integrated_gradients": integrated_gradients,
    "perturbation": perturbation,
}


def influence(
    model: Any,
    tokens: Tokens | Int[Tensor, "m n"],
    method: str = "gradient_norm",
    target: str | int = "argmax_probability",
    normalize: str = "after_mean",
    **options: Any,
) -> Influence:
    """Measure the influence of every position on the last prediction, averaged over documents.

    Args:
        model: a `posattn` model or a live TransformerLens model.
        tokens: from `load_tokens`, or token ids [M,N].
        method: a name in `METHODS`; see the module docstring.
        target: "argmax_probability", "argmax_log_probability", or a token id (its probability).
        normalize: "after_mean" or "per_document".
        **options: the method's own, for example `steps` of integrated gradients.

    Raises:
        InputError: an unknown name, or a token id outside the vocabulary.
        NothingMeasuredError: no documents, or a curve whose total is zero or not finite.
    """
    model = as_a_model(model)
    tokens = tokens if isinstance(tokens, Tokens) else load_tokens(tokens, model)
    _check(model, method, target, normalize)
    if not tokens.documents:
        raise NothingMeasuredError("there are no documents to attribute: no samples left")
    here = world()
    # with several processes each attributes its own documents; an empty share has no rows
    none = torch.zeros(0, dtype=torch.float64)
    parts, chosen, probability = [none.view(0, tokens.length)], [none.long()], [none]
    for ids, mask in tokens.part(here.share(tokens.documents)):
        ids = ids.to(model.device)
        mask = None if mask is None or bool(mask.all()) else mask.to(model.device)
        objective, certainty = _objective(model, ids, mask, target)
        embeddings = model.embed(ids).detach()
        magnitudes = METHODS[method](embeddings.requires_grad_(), objective, **options)
        alignment = Alignment(torch.ones_like(ids, dtype=torch.bool) if mask is None else mask)
        aligned = alignment.rows(magnitudes)
        if not bool(aligned.isfinite().all()):
            raise NothingMeasuredError(f"{method} of {target} is not finite at some real token: try a wider dtype")
        aligned = aligned.where(alignment.valid, torch.nan).cpu().double()
        parts.append(torch.nn.functional.pad(aligned, (0, tokens.length - alignment.width), value=torch.nan))
        chosen.append(objective.token.cpu())
        probability.append(certainty.cpu().double())
    return summarise(
        here.concatenate(torch.cat(parts)),
        method=method,
        target=str(target),
        normalize=normalize,
        chosen=here.concatenate(torch.cat(chosen)),
        probability=here.concatenate(torch.cat(probability)),
        facts=provenance(
            **describe_model(model),
            tokens=tokens.describe(),
            seed=tokens.facts.get("seed"),
            method=method,
            target=target,
            normalize=normalize,
            options={name: value for name, value in options.items() if isinstance(value, (str, int, float, bool))},
        ),
    )


def summarise(
    magnitudes: Float[Tensor, "m n"],
    *,
    method: str,
    target: str,
    normalize: str,
    chosen: Int[Tensor, " m"],
    probability: Float[Tensor, " m"],
    facts: Provenance,
) -> Influence:
    """Turn raw magnitudes per document (NaN beyond a document's length) into a profile.

    Raises:
        NothingMeasuredError: the total is zero or not finite.
    """
    real = magnitudes.isfinite()
    counts = real.sum(0)
    width = int((counts > 0).sum())
    magnitudes, real, counts = magnitudes[:, :width], real[:, :width], counts[:width]
    values = magnitudes.where(real, 0.0)
    totals = values.sum(-1)
    if normalize == "per_document":
        dead = int((totals <= TINY).sum())
        if dead:
            raise NothingMeasuredError(
                f"{method}: {dead} of {len(totals)} documents have an influence of zero everywhere; "
                "normalise after the mean"
            )
        values = values / totals[:, None]
    mean = values.sum(0) / counts.clamp(min=1)
    total = float(mean.sum())
    if not total > TINY:
        raise NothingMeasuredError(
            f"{method} of {target} is zero at every position ({total:.1g}): there is no influence to normalise. "
            "The prediction may be saturated: try the target argmax_log_probability"
        )
    return Influence(
        profile=mean / total,
        per_document=magnitudes,
        counts=counts,
        chosen=chosen,
        probability=probability,
        method=method,
        target=target,
        normalize=normalize,
        provenance=facts,
    )


def _check(model: Model, method: str, target: str | int, normalize: str) -> None:
    if method not in METHODS:
        raise InputError(f"unknown method {method!r}: choose one of {', '.join(METHODS)}")
    if normalize not in NORMALIZE:
        raise InputError(f"unknown normalize {normalize!r}: choose one of {', '.join(NORMALIZE)}")
    if isinstance(target, str):
        if target not in TARGETS:
            raise InputError(f"unknown target {target!r}: choose one of {', '.join(TARGETS)}, or a token id")
    elif not 0 <= target < model.vocab_size:
        raise InputError(f"target token {target} is outside the vocabulary of {model.vocab_size}")


@torch.no_grad()
def _objective(
    model: Model, ids: Tensor, mask: Tensor | None, target: str | int
) -> tuple[Objective, Float[Tensor, " b"]]:
    """The objective of one batch, and the probability of its token on the actual input."""
    b, n = ids.shape
    last = torch.full((b,), n - 1, device=ids.device)
    if mask is not None:
        last = n - 1 - mask.flip(-1).long().argmax(-1)
    logs = log_probabilities(model(ids, mask), last)
    if not bool(logs.isfinite().any(-1).all()):
        raise NothingMeasuredError("the model's logits at the last position are not finite")
    token = logs.argmax(-1) if isinstance(target, str) else torch.full_like(last, target)
    objective = Objective(model, ids, mask, last, token, log=target == "argmax_log_probability")
    return objective, logs.gather(1, token[:, None])[:, 0].exp()
