"""The letter task: a path that is followed by symbol.

Every token is a pair. Targets are (letter, integer), pre-targets and the query are (letter, letter). The
second letter of
a pair points to the earlier pair whose first letter it is; jumps go on until a target is reached, which is the answer.
Within a sequence a letter always stands with the same integer, so that equal first letters among targets are
equal pairs.
Facts: arXiv 2605.31558, the letter task (8 letters, 8 integers: 128 tokens; 8 targets, 8 pre-targets, 1 to 4 hops).

`distractors` says how pairs off the path are made:

* "published": first letters are drawn from the letters off the path only, second letters are the first letter
of a random
  earlier pair. Letters on the path then stand out (each is the first letter of exactly one pair), which can be learned
  instead of the path.
* "clean": the letters are split at random into target letters and pre-target letters; all target letters occur equally
  often among the targets and all pre-target letters among the pre-targets, on the path or not. Every letter
  then has one
  meaning in its sequence (repeated pairs are identical) and nothing but the path tells the answer.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from posattn.errors import InputError
from posattn.tasks.base import Samples, Task, check_counts, check_vocabulary, choose_stops
from posattn.tasks.number import letter_names


@dataclasses.dataclass(frozen=True)
class LetterTask(Task):
    """The letter task. Cells: target position x answer pair x hops.

    Raises:
        InputError: a count is below 1, `distractors` is unknown, or there are too few letters or pre-targets
        for the hops.
    """

    targets: int = 8
    pre_targets: int = 8
    max_hops: int = 4
    letters: int = 8
    integers: int = 8
    distractors: str = "published"  # or "clean"

    name: ClassVar[str] = "letter"

    def __post_init__(self) -> None:
        counts = {k: v for k, v in dataclasses.asdict(self).items() if k != "distractors"}
        check_counts(self.name, **counts)
        size = self.letters * (self.integers + self.letters)
        check_vocabulary(self.name, size, f"{self.letters} letters and {self.integers} integers")
        if self.distractors not in ("published", "clean"):
            raise InputError(f"task 'letter': distractors must be 'published' or 'clean', not {self.distractors!r}")
        if self.max_hops > self.pre_targets + 1:
            raise InputError(
                f"task 'letter' is too small for {self.max_hops} hops: they need {self.max_hops - 1} "
                f"pre-targets, it has {self.pre_targets}"
            )
        if self.distractors == "published" and self.letters <= self.max_hops:
            raise InputError(
                f"task 'letter' needs more letters than hops: {self.letters} letters, {self.max_hops} hops"
            )
        if self.distractors == "clean" and (self.letters < 2 or self._split[1] < self.max_hops - 1):
            raise InputError(
                f"task 'letter' with clean distractors: {self.max_hops} hops need {self.max_hops - 1} letters "
                f"for the pre-targets, "
                f"{self.letters} letters leave {self._split[1]}"
            )

    @property
    def _split(self) -> tuple[int, int]:
        """How many letters stand in targets and in pre-targets (clean distractors)."""
        return min(self.targets, (self.letters + 1) // 2), min(self.pre_targets, self.letters // 2)

    @property
    def length(self) -> int:
        return self.targets + self.pre_targets + 1

    @property
    def vocabulary(self) -> tuple[str, ...]:
        names = letter_names(self.letters)
        return (*(f"{a}{k + 1}" for a in names for k in range(self.integers)), *(a + b for a in names for b in names))

    @property
    def cells(self) -> tuple[int, ...]:
        return (self.targets, self.letters * self.integers, self.max_hops)

    def _first(self, tokens: np.ndarray) -> np.ndarray:
        pairs = self.letters * self.integers
        return np.where(tokens < pairs, tokens // self.integers, (tokens - pairs) // self.letters)

    def _second(self, tokens: np.ndarray) -> np.ndarray:
        """Second letter of (letter, letter) pairs, -1 for targets."""
        pairs = self.letters * self.integers
        return np.where(tokens < pairs, -1, (tokens - pairs) % self.letters)

    def _fill(
        self, cell: tuple[np.ndarray, ...], rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        target, answer, hops = cell[0], cell[1], cell[2] + 1
        count, rows = len(target), np.arange(len(target))
        letter = answer // self.integers
        integer = rng.integers(0, self.integers, (count, self.letters))
        integer[rows, letter] = answer % self.integers
        order = rng.random((count, self.letters))
        order[rows, letter] = -1.0
        order = order.argsort(axis=1)  # a random order of the letters in which the answer's comes first
        make = self._published if self.distractors == "published" else self._clean
        first, second = make(order, target, hops, rng)
        tokens = np.empty((count, self.length), dtype=np.int64)
        tokens[:, : self.targets] = (
            first[:, : self.targets] * self.integers + integer[rows[:, None], first[:, : self.targets]]
        )
        tokens[:, self.targets :] = self.letters * self.integers + first[:, self.targets :] * self.letters + second
        return tokens, answer, hops, target

    def _published(
        self, order: np.ndarray, target: np.ndarray, hops: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        count, rows = len(target), np.arange(len(target))
        # letters order[:h] are the path's, answer first; the others are free
        free = hops[:, None] + (rng.random((count, self.length)) * (self.letters - hops)[:, None]).astype(np.int64)
        first = order[rows[:, None], free]
        first[rows, target] = order[:, 0]
        stops = choose_stops(hops, self.pre_targets, rng)
        rank = stops.cumsum(axis=1)  # the c-th stop from the left carries path letter c and points to path letter c - 1
        first[:, self.targets : -1] = np.where(stops, order[rows[:, None], rank], first[:, self.targets : -1])
        places = np.arange(self.targets, self.length)
        earlier = (rng.random((count, len(places))) * places).astype(np.int64)
        second = first[rows[:, None], earlier]
        second[:, :-1] = np.where(stops, order[rows[:, None], np.maximum(rank - 1, 0)], second[:, :-1])
        second[:, -1] = order[rows, hops - 1]
        return first, second

    def _clean(
        self, order: np.ndarray, target: np.ndarray, hops: np.ndarray, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        count, rows = len(target), np.arange(len(target))
        ends, ways = self._split
        # targets: each of the first `ends` letters equally often, rotated so that the target position has the answer's
        slot = rng.random((count, self.targets)).argsort(axis=1) % ends
        slot = (slot - slot[rows, target][:, None]) % ends
        first = np.empty((count, self.length), dtype=np.int64)
        first[:, : self.targets] = order[rows[:, None], slot]
        # pre-targets: each of `ways` letters equally often, numbered by first appearance
        slot = rng.random((count, self.pre_targets)).argsort(axis=1) % ways
        seen = (slot[:, :, None] == np.arange(ways)).argmax(axis=1)  # [samples, ways] place of the first appearance
        number = seen.argsort(axis=1).argsort(axis=1)
        slot = number[rows[:, None], slot]
        way = order[:, ends : ends + ways]
        first[:, self.targets : -1] = way[rows[:, None], slot]
        first[:, -1] = rng.integers(0, self.letters, count)
        # where each pre-target letter points: along the path for its stops, else to any target or earlier
        # pre-target letter
        stops = choose_stops(hops, ways, rng)
        last = np.maximum.accumulate(np.where(stops, np.arange(ways), -1), axis=1)
        before = np.concatenate([np.full((count, 1), -1), last[:, :-1]], axis=1)
        any_earlier = (rng.random((count, ways)) * (ends + np.arange(ways))).astype(np.int64)
        goal = np.where(stops, np.where(before < 0, 0, ends + before), any_earlier)
        second = np.empty((count, self.pre_targets + 1), dtype=np.int64)
        second[:, :-1] = order[rows[:, None], goal[rows[:, None], slot]]
        second[:, -1] = order[rows, np.where(last[:, -1] < 0, 0, ends + last[:, -1])]
        return first, second

    def _solve(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, str]:
        count, length = tokens.shape
        rows, places = np.arange(count), np.arange(length)
        first = self._first(tokens)
        position = np.full(count, length - 1)
        wanted = self._second(tokens[:, -1])
        failed, reason = wanted < 0, "the query is no (letter, letter) pair"
        reason = reason if failed.any() else ""
        path = [position]
        for _ in range(length):
            going = (wanted >= 0) & ~failed
            if not going.any():
                break
            match = (first == wanted[:, None]) & (places < position[:, None])
            found = length - 1 - match[:, ::-1].argmax(axis=1)  # the most recent one
            pair = tokens[rows, found]
            clash = (match & (tokens != pair[:, None])).any(axis=1)
            bad = going & (clash | ~match.any(axis=1))
            if bad.any() and not reason:
                row = int(bad.argmax())
                why = "starts several different earlier pairs" if clash[row] else "starts no earlier pair"
                reason = f"letter '{letter_names(self.letters)[wanted[row]]}' on the path {why}"
            failed |= bad
            position = np.where(going & ~bad, found, position)
            path.append(np.where(going & ~bad, found, -1))
            wanted = np.where(going & ~bad, self._second(pair), wanted)
        steps = np.stack(path, axis=1)
        hops = (steps >= 0).sum(axis=1) - 1
        return np.where(failed, -1, tokens[rows, position]), np.where(failed, -1, hops), steps, reason

    def _filler(self, samples: Samples, extra: int, rng: np.random.Generator) -> np.ndarray:
        # copies of the sample's own targets keep every letter's meaning; "published" leaves out the path's, as
        # in the sample
        tokens = samples.tokens.cpu().numpy()
        is_target = tokens < self.letters * self.integers
        allowed = is_target
        if self.distractors == "published":
            off_path = is_target & (tokens != samples.answers.cpu().numpy()[:, None])
            allowed = np.where(off_path.any(axis=1, keepdims=True), off_path, is_target)
        pick = (rng.random((len(tokens), extra)) * allowed.sum(axis=1, keepdims=True)).astype(np.int64)
        ranked = np.argsort(~allowed, axis=1, kind="stable")  # allowed places first
        rows = np.arange(len(tokens))[:, None]
        return tokens[rows, ranked[rows, pick]]
