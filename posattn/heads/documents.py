"""Documents for the heads: padding stripped, documents of one length together, queries chosen.

A padded row gives what the unpadded one would, whatever the padding side, because padding is dropped before the model
runs; documents of equal length share a batch, so neither batch size nor order can reach a result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from posattn.distributed import world
from posattn.errors import DataError, InputError
from posattn.models.base import Model, PositionScheme, Rotary
from posattn.progress import reached
from posattn.tokens import Tokens

#: Which queries of a document: the last, all with two earlier keys, a sample of so many, or chosen indices.
Queries = str | int | Sequence[int]


def seen(model: Any) -> Model:
    """`model` as a `Model`, whatever the user holds."""
    if isinstance(model, Model):
        return model
    from posattn.models.loading import as_model

    return as_model(model)


def as_documents(tokens: Any) -> list[Int[Tensor, "n"]]:
    """The real tokens of every document, one vector each.

    Raises:
        DataError: no document, or one without tokens.
        InputError: not token ids.
    """
    if isinstance(tokens, Tokens):
        masks = [None] * tokens.documents if tokens.mask is None else list(tokens.mask)
        rows = [row if mask is None else row[mask] for row, mask in zip(tokens.tokens, masks, strict=True)]
    elif isinstance(tokens, Tensor):
        rows = list(tokens if tokens.dim() == 2 else tokens.unsqueeze(0))
    else:  # a binding task, or vectors
        rows = [torch.as_tensor(row) for row in getattr(tokens, "documents", tokens)]
    if not rows:
        raise DataError("no documents: nothing to score")
    for index, row in enumerate(rows):
        if row.dim() != 1 or row.is_floating_point():
            raise InputError(f"document {index} is not a vector of token ids but {row.dtype} {list(row.shape)}")
        if not len(row):
            raise DataError(f"document {index} has no tokens")
    return rows


def run_facts(model: Model, tokens: Any, **more: Any) -> dict[str, Any]:
    """What a result says about its origin, for `results.provenance`."""
    describe = getattr(tokens, "describe", None)
    return {
        "model": model.name,
        "revision": model.revision,
        "processing": model.processing,
        "tokens": describe() if describe is not None else {"source": "tensor"},
        "device": str(model.device),
        "dtype": str(model.dtype),
        **more,
    }


def batches(
    documents: list[Tensor], size: int, keys: Sequence[Any] | None = None, shared: bool = False
) -> Iterator[tuple[list[int], Int[Tensor, "b n"]]]:
    """Batches of documents of equal length (and equal `keys`, e.g. query positions), with their indices.

    `shared`: only this process's share of them, where there are several (the caller merges the parts).
    """
    if size < 1:
        raise InputError(f"batch_size must be at least 1, not {size}")
    groups: dict[Any, list[int]] = {}
    mine = range(len(documents))[world().share(len(documents))] if shared else range(len(documents))
    for index in mine:
        row = documents[index]
        groups.setdefault((len(row), None if keys is None else tuple(keys[index])), []).append(index)
    done = 0
    for members in groups.values():
        for start in range(0, len(members), size):
            reached(done, len(mine), "document")
            chosen = members[start : start + size]
            yield chosen, torch.stack([documents[i] for i in chosen])
            done += len(chosen)


class Schemes:
    """The position schemes of every layer by length, each looked up once; call it before running documents of a length.

    transformers' dynamic rotary scaling keeps the frequencies of a longer input until a short one comes by, so that a
    model's output depends on what ran before it. One token resets it; nothing runs for models without such a table.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._known: dict[int, list[PositionScheme]] = {}
        self._follows = False

    def __call__(self, length: int) -> list[PositionScheme]:
        model = self._model
        if length not in self._known and not self._follows:
            probe = self._all(length)
            self._follows = any(
                scheme.rotary is not None and not _alike(scheme.rotary, model.scheme(layer, 1).rotary)
                for layer, scheme in enumerate(probe)
            )
            if not self._follows:
                self._known[length] = probe
        if self._follows:
            with torch.no_grad():
                model(torch.zeros(1, 1, dtype=torch.long, device=model.device))
        if length not in self._known:
            self._known[length] = self._all(length)
        return self._known[length]

    def _all(self, length: int) -> list[PositionScheme]:
        return [self._model.scheme(layer, length) for layer in range(self._model.n_layers)]


def _alike(a: Rotary, b: Rotary | None) -> bool:
    return b is not None and torch.equal(a.frequencies, b.frequencies)


def choose_queries(queries: Queries, length: int, seed: int = 0) -> list[int]:
    """The positions of the queries in a document of `length` tokens, ascending.

    A sample depends on the length and the seed alone, never on the document's place in the data.

    Raises:
        DataError: the document is too short to exchange anything.
        InputError: an index that has fewer than two earlier keys or lies outside the document.
    """
    if length < 3:
        what = "a one-token prompt" if length == 1 else f"a prompt of {length} tokens"
        raise DataError(f"{what} leaves no two earlier keys to exchange: three tokens are the least")
    possible = range(2, length)
    if isinstance(queries, str):
        if queries == "last":
            return [length - 1]
        if queries == "all":
            return list(possible)
        raise InputError(f'queries is "last", "all", a number or a list of positions, not {queries!r}')
    if isinstance(queries, int):
        if queries < 1:
            raise InputError(f"a sample of {queries} queries: ask for at least one")
        generator = torch.Generator().manual_seed(seed)
        picked = torch.randperm(len(possible), generator=generator)[:queries]
        return sorted(possible[int(i)] for i in picked)
    chosen = sorted({int(i) + length if int(i) < 0 else int(i) for i in queries})
    if not chosen:
        raise InputError("an empty list of queries")
    for i in chosen:
        if not 2 <= i < length:
            raise InputError(
                f"query {i} of a document of {length} tokens: it needs two earlier keys (2 to {length - 1})"
            )
    return chosen


def check_varied(document: Tensor, query: int, index: int, tokenizer: Any = None) -> None:
    """Refuse a prompt whose exchangeable tokens are all one: every swap would give back the same prompt.

    Raises:
        DataError: the tokens before `query` (a leading BOS aside) are all the same.
    """
    earlier = document[:query]
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is not None and len(earlier) > 1 and int(earlier[0]) == bos:
        earlier = earlier[1:]
    if len(earlier.unique()) < 2:
        raise DataError(
            f"document {index} holds one token over and over (id {int(earlier[0])}): exchanging equal tokens changes "
            "nothing, so it cannot tell position from symbol; use a prompt with different tokens"
        )
