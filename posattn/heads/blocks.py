"""`level="tokens"`: exchange blocks of the prompt and run the model again.

D_I is the attention that the query gives to block I (summed over its tokens). For a swap of blocks I and J the prompt
is written anew with the two exchanged, the model runs, and D' is what the query gives to the two *places*: where
block I was there is block J now. Blocks of unequal length shift what lies between them; the query, which comes after
every block, stays where it is. Weights and cosines are those of `swaps`, with D and D' from the runs.

It costs one run a swap and answers another question than level="keys": the layers below the head see the
exchanged prompt too. On a one-layer model the two levels agree, because there hidden keys are token embeddings.

Source: arXiv 2511.11579 (blocks of a binding prompt exchanged).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from posattn.distributed import world
from posattn.errors import InputError
from posattn.heads.crosslogits import visible_from
from posattn.heads.documents import Schemes
from posattn.models.base import Batch, Model, PositionScheme

#: None: each earlier token; a block length; (start, end) pairs for every document; or one such list a document.
Blocks = int | Sequence[Any] | None
Span = tuple[int, int]


def as_blocks(blocks: Blocks, documents: list[Tensor], queries: list[list[int]]) -> list[list[Span]]:
    """The blocks of each document, in order.

    Raises:
        InputError: fewer than two blocks, overlapping ones, or one that does not end before the first query.
    """
    per_document: list[list[Span]]
    before = [positions[0] for positions in queries]
    if blocks is None or isinstance(blocks, int):
        size = 1 if blocks is None else blocks
        if size < 1:
            raise InputError(f"a block has at least one token, not {size}")
        per_document = [[(a, a + size) for a in range(0, end - size + 1, size)] for end in before]
    else:
        entries = list(blocks)
        spans = all(len(e) == 2 and all(isinstance(x, int) for x in e) for e in entries)
        lists = [entries] * len(documents) if spans else entries
        if len(lists) != len(documents):
            raise InputError(f"blocks for {len(lists)} documents, but there are {len(documents)}")
        per_document = [sorted((int(a), int(b)) for a, b in entry) for entry in lists]
    for index, (spans, end) in enumerate(zip(per_document, before, strict=True)):
        if len(spans) < 2:
            raise InputError(f"document {index} has {len(spans)} blocks before its first query: a swap needs two")
        edges = [edge for span in spans for edge in span]
        if edges != sorted(edges) or edges[0] < 0 or any(a >= b for a, b in spans):
            raise InputError(
                f"document {index}: blocks must be (start, end) with start < end, without overlap: {spans}"
            )
        if edges[-1] > end:
            raise InputError(f"document {index}: block {spans[-1]} does not end before its first query at {end}")
    return per_document


def exchange(row: Tensor, first: Span, second: Span) -> tuple[Tensor, Span, Span]:
    """`row` with two blocks exchanged, and the places (start, end) of the first and the second afterwards."""
    (a, b), (c, d) = first, second
    swapped = torch.cat([row[:a], row[c:d], row[b:c], row[a:b], row[d:]])
    shift = (d - c) - (b - a)
    return swapped, (a, a + d - c), (c + shift, d)


def token_scores(
    model: Model,
    documents: list[Tensor],
    blocks: list[list[Span]],
    queries: list[list[int]],
    schemes: Schemes,
    tau: float,
    limit: bool,
    batch_size: int,
    max_swaps: int | None,
    seed: int,
) -> list[dict[str, Tensor]]:
    """Per document: positional, symbolic, entropy (and limits) [Q,T,H], float64. One model run a swap and one more."""
    if max_swaps is not None and max_swaps < 1:
        raise InputError(f"max_swaps must be at least 1, not {max_swaps}")
    found = []
    here = world()
    mine = here.share(len(documents))  # where there are several processes
    for row, spans, positions in zip(documents[mine], blocks[mine], queries[mine], strict=True):
        known = schemes(len(row))
        rows, entropy = _mass(model, row[None], [spans], positions, 1, with_entropy=True)
        weights = rows[0]  # [Q,T,H,blocks]
        swaps = list(itertools.combinations(range(len(spans)), 2))
        if max_swaps is not None and max_swaps < len(swaps):
            generator = torch.Generator().manual_seed(seed)
            swaps = [swaps[i] for i in torch.randperm(len(swaps), generator=generator)[:max_swaps].tolist()]
        prompts = [exchange(row, spans[i], spans[j]) for i, j in swaps]
        after, _ = _mass(model, torch.stack([p[0] for p in prompts]), [p[1:] for p in prompts], positions, batch_size)
        after = after.movedim(0, -2)  # [Q,T,H,swaps,2]
        i, j = torch.tensor(swaps).T
        before = torch.stack([weights[..., i], weights[..., j]], -1)
        same, other = _cosine(after, before), _cosine(after, before.flip(-1))
        usable = _in_sight(known, positions, spans)[..., i] & (before.amax(-1) > 0) & (after.amax(-1) > 0)
        if not usable.any(-1).all():
            layer = int((~usable.any(-1)).nonzero()[0, 1])
            raise InputError(
                f"layer {layer} sees fewer than two of the blocks (window): use blocks nearer to the query"
            )
        gap = (before[..., 0] - before[..., 1]).abs().masked_fill(~usable, -torch.inf)
        values = {"entropy": entropy}
        for name, t in (("", tau), *([("limit_", 0.0)] if limit else [])):
            largest = gap.amax(-1, keepdim=True)
            alpha = torch.exp((gap - largest) / t) if t > 0 else (gap == largest).double()
            alpha = alpha / alpha.sum(-1, keepdim=True)
            values[f"{name}positional"] = (alpha * same).sum(-1)
            values[f"{name}symbolic"] = (alpha * other).sum(-1)
        found.append(values)
    return list(itertools.chain(*here.gather(found)))


def _in_sight(schemes: list[PositionScheme], queries: list[int], spans: list[Span]) -> Tensor:
    """Whether each query sees all of each block in each layer: [Q,T,1,blocks]; windows hide the far ones."""
    starts = torch.tensor([a for a, _ in spans])
    rows = [[starts >= visible_from(scheme, query) for scheme in schemes] for query in queries]
    return torch.stack([torch.stack(row) for row in rows]).unsqueeze(-2)


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    """Cosine of pairs of weights; 0 where one of them is all zero (such swaps are left out)."""
    # divided by the larger entry first: squares of tiny weights would underflow
    a, b = (x / x.amax(-1, keepdim=True).where(x.amax(-1, keepdim=True) > 0, 1) for x in (a, b))
    norm = a.norm(dim=-1) * b.norm(dim=-1)
    return (a * b).sum(-1) / norm.where(norm > 0, 1)


def _mass(
    model: Model,
    tokens: Tensor,
    spans: Sequence[Sequence[Span]],
    queries: list[int],
    batch_size: int,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of each query to each span, [B,Q,T,H,spans] float64, and the rows' entropies [Q,T,H] of the first."""
    heads, n = model.layers[0].n_heads, tokens.shape[-1]
    parts: list[Tensor] = []
    entropy = torch.zeros(len(queries), model.n_layers, heads, dtype=torch.float64)
    for start in range(0, len(tokens), batch_size):
        chunk = tokens[start : start + batch_size]
        member = torch.zeros(len(chunk), len(spans[0]), n, dtype=torch.float64)
        for b, places in enumerate(spans[start : start + batch_size]):
            for s, (a, z) in enumerate(places):
                member[b, s, a:z] = 1
        out = torch.zeros(len(chunk), len(queries), model.n_layers, heads, len(spans[0]), dtype=torch.float64)

        def observer(layer: int, points: Any, batch: Batch, out: Tensor = out, member: Tensor = member) -> None:
            rows = points["pattern"][:, :, queries].double().cpu()  # [B,H,Q,N]
            if rows.shape[1] != heads:
                raise InputError(f"layer {layer} has {rows.shape[1]} heads, layer 0 has {heads}: score them apart")
            out[:, :, layer] = torch.einsum("bhqn,bsn->bqhs", rows, member)
            if with_entropy:
                rows = rows[0] / rows[0].sum(-1, keepdim=True)
                entropy[:, layer] = torch.special.entr(rows).sum(-1).T

        with torch.no_grad(), model.observe(["pattern"], observer):
            model(chunk.to(model.device))
        parts.append(out)
    return torch.cat(parts), entropy
