"""Points from an `ActivationCache` that the user already has, instead of from a forward pass.

A cache is keyed by the names of the hook points that an adapter reads, so the same taps serve: what `observe` would
have delivered is delivered, layer by layer. Points that an adapter reads elsewhere than at a hook point are not in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from posattn.errors import HookError, UnsupportedModelError
from posattn.models._taps import TappedModel
from posattn.models.base import Batch, Model, Point


def read_cache(
    model: Model,
    cache: Mapping[str, Tensor] | Any,
    points: Iterable[Point],
    tokens: Int[Tensor, "b n"] | None = None,
    mask: Bool[Tensor, "b n"] | None = None,
) -> Iterator[tuple[int, Mapping[str, Tensor], Batch]]:
    """Every layer's points, as `observe` would show them. Without `tokens` and `mask`, nothing is taken to be padding.

    Raises:
        HookError: the cache lacks a point, or holds it in a shape that does not fit.
        UnsupportedModelError: this model's points are not read at hook points.
    """
    if not isinstance(model, TappedModel):
        raise UnsupportedModelError(f"{model.name} ({model.adapter}) has no hook points: no cache of it can be read")
    batch = None
    for layer in range(model.n_layers):
        record: dict[Point, Tensor] = {}
        for point in points:
            tap = model._tap(point, layer)
            if tap is None:
                continue
            name = getattr(tap.module, "name", None)
            where = name or "it is not at a hook point"
            if tap.arguments or not name or name not in cache:
                raise HookError(
                    f"layer {layer} of {model.name}: the cache has no {point!r} ({where}); "
                    "make it with run_with_cache and without a names_filter, or with one that lets this name through"
                )
            raw = cache[name]
            batch = batch or _batch(raw, point, tokens, mask)
            try:
                record[point] = tap.read(raw.detach(), batch)
            except RuntimeError as error:
                raise HookError(
                    f"layer {layer} of {model.name}: {name} has shape {list(raw.shape)}, "
                    f"which does not fit {batch.mask.shape[0]} × {batch.mask.shape[1]} tokens"
                ) from error
        if batch is not None:
            yield layer, cast("Mapping[str, Tensor]", record), batch


def _batch(raw: Tensor, point: Point, tokens: Tensor | None, mask: Tensor | None) -> Batch:
    if mask is None:
        if tokens is not None:
            shape = tokens.shape
        elif point == "pattern" and raw.dim() == 4:
            shape = (raw.shape[0], raw.shape[-1])
        elif raw.dim() >= 3:
            shape = raw.shape[:2]
        else:
            raise HookError(f"the cache holds {point!r} as {list(raw.shape)}: keep its batch dimension")
        mask = torch.ones(tuple(shape), dtype=torch.bool, device=raw.device)
    return Batch(tokens, mask.to(raw.device))
