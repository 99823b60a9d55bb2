"""The binding task: which colour belongs to which name, asked about one of n pairs.

A prompt of `pairs` clauses (" Ada likes red.") and a question about one of them (" What does Ada like? Ada likes").
Its last token is the query; the clauses are the blocks that `score_heads(level="tokens")` exchanges. A head that goes
where the asked pair stands is positional for the prompt, one that follows the pair when it is moved is symbolic.
Clauses are tokenised one by one, so that blocks end where tokens end. Without a tokenizer the same structure is made
of random token ids: a block is (name, colour), the question a name.

Source: binding prompts of names and colours, arXiv 2511.11579; the wording is ours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from posattn.errors import DataError, InputError

_NAMES = "Ada Ben Carl Dora Emma Finn Gina Hugo Iris Jack Kate Liam Mary Nora Omar Paul Rosa Sara Tom Vera"
_COLOURS = "red blue green yellow black white pink brown gold grey orange purple silver violet"
NAMES, COLOURS = _NAMES.split(), _COLOURS.split()
_MOST = min(len(NAMES), len(COLOURS))


@dataclasses.dataclass(frozen=True)
class BindingTask:
    """Prompts for `score_heads(model, task, level="tokens")`.

    `documents`: token ids, one vector a prompt; `blocks`: (start, end) of each clause; `queries`: the last position
    of each prompt; `answers`: the first token of the right colour; `asked`: which block the question is about;
    `texts`: the prompts in words (empty without a tokenizer).
    """

    documents: list[Tensor]
    blocks: list[list[tuple[int, int]]]
    queries: list[list[int]]
    answers: list[int]
    asked: list[int]
    texts: list[str]
    facts: dict[str, Any]

    def describe(self) -> dict[str, Any]:
        """Provenance as JSON values."""
        return {**self.facts, "documents": len(self.documents), "lengths": [len(row) for row in self.documents]}


def binding_task(
    model: Any, pairs: int = 5, samples: int = 8, query: int | Sequence[int] | None = None, seed: int = 0
) -> BindingTask:
    """Prompts of `pairs` name–colour pairs for the tokenizer of `model`.

    Args:
        model: anything with `tokenizer` and `vocab_size`.
        query: the block asked about (negative from the end), one a sample, or None: drawn.

    Raises:
        InputError: fewer than two pairs, more than there are names or colours, or no such block.
        DataError: a vocabulary too small for the pairs.
    """
    if not 2 <= pairs <= _MOST:
        raise InputError(f"pairs lies between 2 and {_MOST}, not {pairs}")
    if samples < 1:
        raise InputError(f"samples must be at least 1, not {samples}")
    generator = torch.Generator().manual_seed(seed)
    asked = _asked(query, pairs, samples, generator)
    tokenizer = getattr(model, "tokenizer", None)
    task = BindingTask([], [], [], [], asked, [], {"source": "binding task", "pairs": pairs, "seed": seed})
    for block in asked:
        names = torch.randperm(len(NAMES), generator=generator)[:pairs].tolist()
        colours = torch.randperm(len(COLOURS), generator=generator)[:pairs].tolist()
        if tokenizer is None:
            if model.vocab_size < 2 * pairs:
                raise DataError(f"a vocabulary of {model.vocab_size} tokens cannot hold {pairs} names and colours")
            ids = torch.randperm(model.vocab_size, generator=generator)[: 2 * pairs].tolist()
            start: list[int] = []
            clauses = [[ids[2 * i], ids[2 * i + 1]] for i in range(pairs)]
            question, answer = [ids[2 * block]], ids[2 * block + 1]
        else:
            words = [(NAMES[n], COLOURS[c]) for n, c in zip(names, colours, strict=True)]
            start = _bos(tokenizer)
            texts = [f" {name} likes {colour}." for name, colour in words]
            clauses = [_encode(tokenizer, text) for text in texts]
            ask = f" What does {words[block][0]} like? {words[block][0]} likes"
            question, answer = _encode(tokenizer, ask), _encode(tokenizer, f" {words[block][1]}")[0]
            task.texts.append("".join(texts) + ask)
        row, spans = list(start), []
        for clause in clauses:
            spans.append((len(row), len(row) + len(clause)))
            row += clause
        row += question
        task.documents.append(torch.tensor(row))
        task.blocks.append(spans)
        task.queries.append([len(row) - 1])
        task.answers.append(answer)
    return task


def _asked(query: int | Sequence[int] | None, pairs: int, samples: int, generator: torch.Generator) -> list[int]:
    if query is None:
        return torch.randint(pairs, (samples,), generator=generator).tolist()
    chosen = [query] * samples if isinstance(query, int) else [int(q) for q in query]
    if len(chosen) != samples:
        raise InputError(f"{len(chosen)} query blocks for {samples} samples")
    for block in chosen:
        if not -pairs <= block < pairs:
            raise InputError(f"there is no block {block}: blocks are 0 to {pairs - 1}")
    return [block % pairs for block in chosen]


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:
        raise DataError(f"the tokenizer makes nothing of {text!r}")
    return list(ids)


def _bos(tokenizer: Any) -> list[int]:
    """The BOS token, where the tokenizer puts one first by itself."""
    token = getattr(tokenizer, "bos_token_id", None)
    ids = tokenizer("a")["input_ids"]
    return [token] if token is not None and ids and ids[0] == token else []
