"""One-hop tasks that isolate what a single head must do: by position, by symbol, by both.

* index (positional): symbols, then an integer k; the answer is the symbol k positions before the query.
* retrieval (symbolic): (letter, integer) pairs with distinct letters, then a letter; the answer is the pair of
that letter.
* induction (mixed): the same, but a letter occurs in several pairs with different integers; the answer is the *most
  recent* pair of the letter: matching is by symbol, the choice among matches by position.

The three kinds and their names follow arXiv 2511.11579 (its canonical tasks); the concrete token formats are ours.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from posattn.errors import InputError
from posattn.tasks.base import Samples, Task, check_counts, check_vocabulary
from posattn.tasks.number import letter_names


@dataclasses.dataclass(frozen=True)
class IndexTask(Task):
    """Index: `items` symbols and an integer query. Cells: target position x answer symbol."""

    items: int = 16
    letters: int = 16

    name: ClassVar[str] = "index"

    def __post_init__(self) -> None:
        check_counts(self.name, **dataclasses.asdict(self))

    @property
    def length(self) -> int:
        return self.items + 1

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return (*letter_names(self.letters), *(str(k + 1) for k in range(self.items)))

    @property
    def cells(self) -> tuple[int, ...]:
        return (self.items, self.letters)

    def _fill(
        self, cell: tuple[np.ndarray, ...], rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        target, answer = cell
        tokens = rng.integers(0, self.letters, (len(target), self.length))
        tokens[np.arange(len(target)), target] = answer
        tokens[:, -1] = self.letters + self.items - target - 1
        return tokens, answer, np.ones_like(target), target

    def _solve(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, str]:
        count, length = tokens.shape
        position = length - 1 - (tokens[:, -1] - self.letters + 1)
        found = tokens[np.arange(count), np.maximum(position, 0)]
        failed = (tokens[:, -1] < self.letters) | (position < 0) | (found >= self.letters)
        return _one_hop(found, position, failed, length, "the query is no integer that points to a symbol")

    def _filler(self, samples: Samples, extra: int, rng: np.random.Generator) -> np.ndarray:
        return rng.integers(0, self.letters, (len(samples), extra))


@dataclasses.dataclass(frozen=True)
class RetrievalTask(Task):
    """Information retrieval: `items` pairs with distinct letters, a letter query. Cells: target position x
    answer pair."""

    items: int = 8
    letters: int = 16
    integers: int = 8

    name: ClassVar[str] = "retrieval"
    _repeat: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_counts(self.name, **dataclasses.asdict(self))
        size = self.letters * (self.integers + 1)
        check_vocabulary(self.name, size, f"{self.letters} letters and {self.integers} integers")
        if not self._repeat and self.letters < self.items:
            raise InputError(
                f"task 'retrieval' needs a letter for each item: {self.letters} letters, {self.items} items "
                f"(length {self.length})"
            )

    @property
    def length(self) -> int:
        return self.items + 1

    @property
    def vocabulary(self) -> tuple[str, ...]:
        names = letter_names(self.letters)
        return (*(f"{a}{k + 1}" for a in names for k in range(self.integers)), *names)

    @property
    def cells(self) -> tuple[int, ...]:
        return (self.items, self.letters * self.integers)

    def _items(self, target: np.ndarray, letter: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """First letters `[samples, items]`: distinct, the answer's at the target position."""
        order = rng.random((len(target), self.letters))
        rows = np.arange(len(target))
        order[rows, letter] = -1.0
        first = order.argsort(axis=1)[:, : self.items]  # the answer's letter comes first: move it to its place
        displaced = first[rows, target].copy()
        first[rows, target], first[:, 0] = letter, np.where(target == 0, letter, displaced)
        return first

    def _fill(
        self, cell: tuple[np.ndarray, ...], rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        target, answer = cell
        letter = answer // self.integers
        first = self._items(target, letter, rng)
        tokens = np.empty((len(target), self.length), dtype=np.int64)
        tokens[:, :-1] = first * self.integers + rng.integers(0, self.integers, first.shape)
        tokens[np.arange(len(target)), target] = answer
        tokens[:, -1] = self.letters * self.integers + letter
        return tokens, answer, np.ones_like(target), target

    def _solve(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, str]:
        count, length = tokens.shape
        pairs = self.letters * self.integers
        items = tokens[:, :-1]
        match = (items // self.integers == (tokens[:, -1] - pairs)[:, None]) & (items < pairs)
        position = length - 2 - match[:, ::-1].argmax(axis=1)  # the most recent match
        found = tokens[np.arange(count), position]
        failed = (tokens[:, -1] < pairs) | ~match.any(axis=1)
        if not self._repeat:
            failed |= (match & (items != found[:, None])).any(axis=1)
        return _one_hop(
            found, position, failed, length, "the query is no letter with exactly one meaning in the sequence"
        )

    def _filler(self, samples: Samples, extra: int, rng: np.random.Generator) -> np.ndarray:
        tokens = samples.tokens.cpu().numpy()[:, :-1]
        allowed = tokens != samples.answers.cpu().numpy()[:, None]
        allowed = np.where(allowed.any(axis=1, keepdims=True), allowed, True)
        pick = (rng.random((len(tokens), extra)) * allowed.sum(axis=1, keepdims=True)).astype(np.int64)
        rows = np.arange(len(tokens))[:, None]
        return tokens[rows, np.argsort(~allowed, axis=1, kind="stable")[rows, pick]]


@dataclasses.dataclass(frozen=True)
class InductionTask(RetrievalTask):
    """Partial induction: pairs with repeated letters; the most recent pair of the query's letter is the answer."""

    letters: int = 4

    name: ClassVar[str] = "induction"
    _repeat: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.letters < 2:
            raise InputError(f"task 'induction' needs at least 2 letters, not {self.letters}")

    def _items(self, target: np.ndarray, letter: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        first = rng.integers(0, self.letters, (len(target), self.items))
        other = (letter[:, None] + rng.integers(1, self.letters, first.shape)) % self.letters
        later = np.arange(self.items) > target[:, None]
        first = np.where(
            later & (first == letter[:, None]), other, first
        )  # nothing more recent than the target matches
        first[np.arange(len(target)), target] = letter
        return first


def _one_hop(
    found: np.ndarray, position: np.ndarray, failed: np.ndarray, length: int, why: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray, str]:
    path = np.stack([np.full(len(found), length - 1), np.where(failed, -1, position)], axis=1)
    return np.where(failed, -1, found), np.where(failed, -1, 1), path, why if failed.any() else ""
