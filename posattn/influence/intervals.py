"""How sure a measured influence is: percentile bootstrap over documents.

Documents are drawn with replacement and the profile is made again from their magnitudes; whatever is read off the
profile is read off each of those, and the middle 95 % are the interval (Efron and Tibshirani 1993, chapter 13).
Predicted profiles are taken as given, so the interval of a distance covers the documents of the measured influence
alone, and not what else there is to doubt in a prediction that was made from the same few documents. Over few documents
such intervals are too narrow: draws know no document but these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from posattn.errors import InputError
from posattn.influence.gradients import Influence

LEVEL = 0.95


def resampled_profiles(
    measured: Influence, draws: int = 400, seed: int = 0, normalize: str | None = None
) -> Float[Tensor, "draws n"]:
    """Profiles [draws, N] from documents drawn with replacement.

    Raises:
        InputError: a single document, of which nothing can be resampled.
    """
    magnitudes = measured.per_document.double()
    documents = magnitudes.shape[0]
    if documents < 2:
        raise InputError("an interval over documents needs at least two documents")
    real = magnitudes.isfinite()
    values = magnitudes.where(real, 0.0)
    if (normalize or measured.normalize) == "per_document":
        values = values / values.sum(-1, keepdim=True)
    picks = torch.randint(documents, (draws, documents), generator=torch.Generator().manual_seed(seed))
    weights = torch.zeros(draws, documents, dtype=torch.float64).scatter_add_(
        1, picks, torch.ones_like(picks, dtype=torch.float64)
    )
    mean = (weights @ values) / (weights @ real.double()).clamp(min=1)
    return mean / mean.sum(-1, keepdim=True)


def influence_intervals(
    measured: Influence,
    predicted: Mapping[str, Float[Tensor, " n"]] | None = None,
    draws: int = 400,
    seed: int = 0,
) -> dict[str, Any]:
    """95 % intervals as JSON values, each [low, high].

    `profile` [2,N]; `influence.u_index`, without the first position; and for each predicted profile its Wasserstein-1
    distance to the measured one (`comparison`), that distance less the even curve's (`over_uniform`), less the nearest
    prediction's (`over_nearest`) and, where it is among them, less that of `residual` (`over_residual`), paired draw by
    draw.
    """
    from posattn.influence.distances import describe_profile

    profiles = resampled_profiles(measured, draws, seed)
    tail = (1 - LEVEL) / 2
    edges = torch.tensor([tail, 1 - tail], dtype=torch.float64)
    shapes = [describe_profile(profile) for profile in profiles]
    u_index = torch.tensor([(shape.without_first or shape).u_index for shape in shapes], dtype=torch.float64)
    found: dict[str, Any] = {
        "level": LEVEL,
        "documents": int(measured.per_document.shape[0]),
        "profile": profiles.quantile(edges, 0).tolist(),
        "influence": {"u_index": u_index.quantile(edges).tolist()},
    }
    if predicted:
        distances = {name: _wasserstein(profiles, curve) for name, curve in predicted.items()}
        found["comparison"] = {name: draws_of.quantile(edges).tolist() for name, draws_of in distances.items()}
        uniform = _wasserstein(profiles, torch.ones(profiles.shape[-1]))

        def over(other: Tensor, besides: str | None = None) -> dict[str, Any]:
            # the same draws on both sides: what the documents share cancels
            return {name: (d - other).quantile(edges).tolist() for name, d in distances.items() if name != besides}

        found["over_uniform"] = over(uniform)
        nearest = {name: float(_wasserstein(measured.profile[None], curve)) for name, curve in predicted.items()}
        best = min(nearest, key=nearest.__getitem__)
        found["over_nearest"] = over(distances[best], best)
        if "residual" in distances:
            found["over_residual"] = over(distances["residual"], "residual")
    return found


def document_correlations(
    measured: Influence,
    predicted: Mapping[str, Float[Tensor, "..."]],
    draws: int = 1000,
    seed: int = 0,
) -> dict[str, Any]:
    """Spearman's rank correlation over positions of each prediction with each document's own influence, as JSON values.

    Args:
        measured: the influence; `per_document` [M,N] holds NaN beyond a document's length.
        predicted: by name, one curve [N] for all documents, or one for each, [M,N], NaN beyond its length.
        draws, seed: of the bootstrap over documents.

    Returns:
        By name: `spearman` (the mean over documents), `interval` ([low, high], 95 % of that mean; None with fewer than
        two documents) and `documents`. A document in which either curve is constant has no correlation and is left
        out; with none left, `spearman` is None.

    Raises:
        InputError: a prediction of other documents or positions.
    """
    from scipy.stats import rankdata

    magnitudes = measured.per_document.double()
    tail = (1 - LEVEL) / 2
    edges = torch.tensor([tail, 1 - tail], dtype=torch.float64)
    found: dict[str, Any] = {}
    for name, curves in predicted.items():
        if tuple(curves.shape) not in ((magnitudes.shape[-1],), tuple(magnitudes.shape)):
            raise InputError(
                f"{name}: curves of shape {list(curves.shape)} do not fit an influence of shape "
                f"{list(magnitudes.shape)}"
            )
        each = []
        for row, curve in zip(magnitudes, curves.detach().cpu().double().expand_as(magnitudes), strict=True):
            real = row.isfinite() & curve.isfinite()
            if not bool(real.any()):
                continue
            ranks = torch.stack([torch.from_numpy(rankdata(part[real].numpy())) for part in (curve, row)])
            ranks = ranks - ranks.mean(-1, keepdim=True)
            norms = ranks.norm(dim=-1)
            if float(norms.min()) > 0:
                each.append(float(ranks[0] @ ranks[1] / norms.prod()))
        values = torch.tensor(each, dtype=torch.float64)
        interval = None
        if len(each) > 1:
            picks = torch.randint(len(each), (draws, len(each)), generator=torch.Generator().manual_seed(seed))
            interval = values[picks].mean(1).quantile(edges).tolist()
        found[name] = {"spearman": float(values.mean()) if each else None, "interval": interval, "documents": len(each)}
    return found


def _wasserstein(profiles: Float[Tensor, "draws n"], curve: Float[Tensor, " n"]) -> Float[Tensor, " draws"]:
    """W1 of each profile to one curve: on a common grid it is the area between the cumulative curves."""
    target = (curve.double() / curve.double().sum()).cumsum(-1)
    return (profiles.double().cumsum(-1) - target).abs()[:, :-1].sum(-1) / max(len(curve) - 1, 1)
