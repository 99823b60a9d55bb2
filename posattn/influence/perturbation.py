"""Influence without gradients: what happens to the prediction when one token is another one.

The token at position j of a document x is replaced by a token from elsewhere in the same document, and

    m_j = mean over replacements of KL( p(· | x) ‖ p(· | x with token j replaced) )        [nats]

where p is the distribution of the next token at the last real position. Every replacement is a finite change that the
model could really see, so nothing here depends on gradients, on the scale of the embeddings, or on one target token.

For a small change δ the divergence is ½ δᵀFδ with the Fisher information F, quadratic where a gradient norm is linear:
`root=True` takes √m_j, which is on the gradient's scale. captum's `FeatureAblation` makes the replaced inputs
(Zeiler and Fergus, arXiv 1311.2901, section 4.2), many positions to a forward pass. A replacement costs N rows of it.

Which tokens are put where follows from the document and the seed alone, not from the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from posattn.errors import InputError

if TYPE_CHECKING:
    from posattn.influence.gradients import Objective

#: how many rows a forward pass takes at most
ROWS = 64


def perturbation(
    embeddings: Float[Tensor, "b n d"],
    objective: Objective,
    replacements: int = 2,
    root: bool = False,
    seed: int = 0,
    rows: int = ROWS,
) -> Float[Tensor, "b n"]:
    """m_j of a batch of documents, or √m_j with `root`. A method of `posattn.influence`.

    Args:
        embeddings: not used; methods are called with them.
        objective: the documents, their mask and last positions. Its target token plays no part.
        replacements: how many other tokens are tried at each position.
        root: take the square root of the mean divergence.
        seed: decides which tokens.
        rows: forward passes take at most this many rows.

    Raises:
        InputError: fewer than one replacement, or a document of one and the same token, which has no other to put in.
    """
    from captum.attr import FeatureAblation

    from posattn.influence.gradients import log_probabilities

    if replacements < 1 or rows < 1:
        raise InputError(f"replacements and rows must be at least 1, got {replacements} and {rows}")
    model, ids, mask = objective.model, objective.ids, objective.mask
    documents, length = ids.shape

    def predict(tokens: Tensor) -> Tensor:
        copies = tokens.shape[0] // documents
        repeated = None if mask is None else mask.repeat(copies, 1)
        return log_probabilities(model(tokens, repeated), objective.last.repeat(copies))

    with torch.no_grad():
        before = predict(ids)

        def unchanged(tokens: Tensor) -> Tensor:
            # captum attributes f(input) − f(ablated); f is −KL, and 0 at the input itself, so that this is the KL
            copies = tokens.shape[0] // documents
            reference = before.repeat(copies, 1)
            return -(reference.exp() * (reference - predict(tokens))).sum(-1).clamp(min=0)

        ablation = FeatureAblation(unchanged)
        positions = torch.arange(length, device=ids.device).expand(1, length)
        total = torch.zeros(documents, length, dtype=before.dtype, device=ids.device)
        for draw in range(replacements):
            others = other_tokens(ids, mask, seed=seed * 1_000_003 + draw)
            found = ablation.attribute(
                ids, baselines=others, feature_mask=positions, perturbations_per_eval=max(1, rows // documents)
            )
            total += found.to(total)
    mean = total.clamp(min=0) / replacements
    return mean.sqrt() if root else mean


def other_tokens(ids: Int[Tensor, "b n"], mask: Bool[Tensor, "b n"] | None = None, seed: int = 0) -> Int[Tensor, "b n"]:
    """For each position a token that stands elsewhere in the same document and differs from the one there.

    Padding keeps what it has. The choice depends on the document's real tokens and the seed only.

    Raises:
        InputError: a document whose tokens are all the same.
    """
    chosen = ids.clone()
    for row in range(ids.shape[0]):
        real = torch.arange(ids.shape[1]) if mask is None else mask[row].nonzero()[:, 0].cpu()
        tokens = ids[row].cpu()[real]
        n = len(tokens)
        if bool((tokens == tokens[0]).all()):
            raise InputError(f"a document of {n} equal tokens has no other token to put in their place")
        generator = torch.Generator().manual_seed(seed)
        start = torch.randint(n, (n,), generator=generator)
        picked = tokens[start]
        for step in range(1, n):  # go on to the next position while the token is the one that is to be replaced
            same = picked == tokens
            if not bool(same.any()):
                break
            picked = torch.where(same, tokens[(start + step) % n], picked)
        chosen[row, real.to(ids.device)] = picked.to(ids.device)
    return chosen
