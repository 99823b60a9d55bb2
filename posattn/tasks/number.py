"""The number task: a path that is followed by position.

Tokens: targets (letters), then pre-targets and a query (integers). From the query, an integer k at position i points to
position i - k; jumps go on until a letter is reached, which is the answer. A path of h hops stops at h - 1 pre-targets.
A distractor integer at 0-based position p is uniform on 1..p, so it always points inside the sequence.
Facts: arXiv 2605.31558, the number task (8 targets out of 120 letters, 8 pre-targets, 1 to 4 hops).
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from posattn.errors import InputError
from posattn.tasks.base import Samples, Task, check_counts, choose_stops

_LETTERS = (
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    "αβγδεζηθικλμνξοπρστυφχψω"
    "абвгдежзийклмнопрстуфхцчшщъыьэюя"
    "ΓΔΘΛΞΠΣΦΨΩßð"
)


def letter_names(count: int) -> list[str]:
    """Distinct one-character names for the first 120 letters, then L121, L122, ..."""
    return [_LETTERS[i] if i < len(_LETTERS) else f"L{i + 1}" for i in range(count)]


@dataclasses.dataclass(frozen=True)
class NumberTask(Task):
    """The number task. Cells: target position x answer letter x hops.

    Raises:
        InputError: a count is below 1, or there are too few pre-targets for `max_hops`.
    """

    targets: int = 8
    pre_targets: int = 8
    max_hops: int = 4
    letters: int = 120

    name: ClassVar[str] = "number"

    def __post_init__(self) -> None:
        check_counts(self.name, **dataclasses.asdict(self))
        if self.max_hops > self.pre_targets + 1:
            raise InputError(
                f"task 'number' is too small for {self.max_hops} hops: they need {self.max_hops - 1} "
                f"pre-targets, it has {self.pre_targets}"
            )

    @property
    def length(self) -> int:
        return self.targets + self.pre_targets + 1

    @property
    def integers(self) -> int:
        """The largest integer: the jump from the query to the first target."""
        return self.targets + self.pre_targets

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return (*letter_names(self.letters), *(str(k + 1) for k in range(self.integers)))

    @property
    def cells(self) -> tuple[int, ...]:
        return (self.targets, self.letters, self.max_hops)

    def _fill(
        self, cell: tuple[np.ndarray, ...], rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        target, answer, hops = cell[0], cell[1], cell[2] + 1
        count, rows = len(target), np.arange(len(target))
        tokens = np.empty((count, self.length), dtype=np.int64)
        tokens[:, : self.targets] = rng.integers(0, self.letters, (count, self.targets))
        tokens[rows, target] = answer
        places = np.arange(self.targets, self.length)
        on_path = np.ones((count, self.pre_targets + 1), dtype=bool)  # the query is always on the path
        on_path[:, :-1] = choose_stops(hops, self.pre_targets, rng)
        # where each stop jumps to: the nearest earlier stop, or the target when there is none
        last = np.maximum.accumulate(np.where(on_path, places, -1), axis=1)
        goal = np.concatenate([np.full((count, 1), -1), last[:, :-1]], axis=1)
        goal = np.where(goal < 0, target[:, None], goal)
        distractor = 1 + (rng.random((count, self.pre_targets + 1)) * places).astype(np.int64)
        jump = np.where(on_path, places - goal, distractor)
        tokens[:, self.targets :] = self.letters + jump - 1
        return tokens, answer, hops, target

    def _solve(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, str]:
        count, length = tokens.shape
        rows = np.arange(count)
        position = np.full(count, length - 1)
        path, failed = [position], np.zeros(count, dtype=bool)
        for _ in range(length):
            token = tokens[rows, position]
            is_integer = token >= self.letters
            if not (is_integer & ~failed).any():
                break
            nearer = position - np.where(is_integer & ~failed, token - self.letters + 1, 0)
            failed |= nearer < 0
            position = np.maximum(nearer, 0)
            path.append(np.where(is_integer & ~failed, position, -1))
        steps = np.stack(path, axis=1)
        hops = (steps >= 0).sum(axis=1) - 1
        failed |= hops < 1
        reason = ""
        if failed.any():
            row = int(failed.argmax())
            reason = (
                "the query is no integer"
                if tokens[row, -1] < self.letters
                else "an integer on the path points before the first token"
            )
        return np.where(failed, -1, tokens[rows, position]), np.where(failed, -1, hops), steps, reason

    def _filler(self, samples: Samples, extra: int, rng: np.random.Generator) -> np.ndarray:
        return rng.integers(0, self.letters, (len(samples), extra))
