"""What every synthetic task has in common: samples, solutions, the balanced design, longer inputs.

A task is a small frozen object. It *generates* samples (rows of token ids that end in a query, and the answer
token that
must follow), *solves* any rows by following the rules literally (no knowledge of how they were made), and *validates*
them. Generation and solving are vectorised in numpy and never loop over samples.

Balanced design: the cells of a task (say target position x answer x hops) are visited in rounds, so that any two cells
differ by at most one sample; the cells of an incomplete last round are drawn at random.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from posattn.errors import InputError

UNKNOWN = "[UNK]"
#: the most tokens of a task: of a larger vocabulary the embeddings would be nearly all of a small model
MOST_TOKENS = 8192


@dataclasses.dataclass(frozen=True, eq=False)
class Samples:
    """Generated samples, one a row.

    tokens: `[samples, length]`, the query last. answers: `[samples]`, token ids. hops: `[samples]`, jumps from
    the query
    to the answer. target: `[samples]`, 0-based position that holds the answer.
    """

    tokens: Int[Tensor, "samples length"]
    answers: Int[Tensor, " samples"]
    hops: Int[Tensor, " samples"]
    target: Int[Tensor, " samples"]

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def __getitem__(self, rows: slice | Tensor) -> Samples:
        return Samples(self.tokens[rows], self.answers[rows], self.hops[rows], self.target[rows])


@dataclasses.dataclass(frozen=True, eq=False)
class Solution:
    """What following the rules gives.

    answers: `[samples]`, token ids, -1 where the rules lead nowhere. hops: `[samples]`. path: `[samples,
    steps]`, visited
    0-based positions from the query to the answer, padded with -1. reason: why the first unsolvable row cannot
    be solved.
    """

    answers: Int[Tensor, " samples"]
    hops: Int[Tensor, " samples"]
    path: Int[Tensor, "samples steps"]
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Task(abc.ABC):
    """A synthetic task. Subclasses are frozen dataclasses of its parameters and check them when made."""

    name: ClassVar[str]

    # ---- what a task must say about itself
    @property
    @abc.abstractmethod
    def length(self) -> int:
        """Number of tokens of a sample, the query included."""

    @property
    @abc.abstractmethod
    def vocabulary(self) -> tuple[str, ...]:
        """Printable name of every token id."""

    @property
    @abc.abstractmethod
    def cells(self) -> tuple[int, ...]:
        """Shape of the balanced design."""

    @abc.abstractmethod
    def _fill(
        self, cell: tuple[np.ndarray, ...], rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Tokens, answers, hops and target positions for samples of the given cells."""

    @abc.abstractmethod
    def _solve(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, str]:
        """Answers, hops, path and the reason of the first failure."""

    def _filler(self, samples: Samples, extra: int, rng: np.random.Generator) -> np.ndarray:
        """Tokens `[samples, extra]` that can stand before a sample without changing its answer."""
        raise InputError(f"task '{self.name}' has no longer form")

    # ---- what follows from that
    @classmethod
    def parameter_names(cls) -> tuple[str, ...]:
        """What the task can be made with."""
        return tuple(field.name for field in dataclasses.fields(cls))

    @property
    def parameters(self) -> dict[str, Any]:
        """The task's parameters, JSON-able: `make_task(task.name, **task.parameters)` gives the task again."""
        return dataclasses.asdict(self)

    @property
    def vocabulary_size(self) -> int:
        return len(self.vocabulary)

    def generate(self, count: int, seed: int = 0) -> Samples:
        """`count` samples; the same seed gives the same samples. Cells differ by at most one sample.

        Raises:
            InputError: `count` is below 1.
        """
        if count < 1:
            raise InputError(f"the number of samples must be at least 1, not {count}")
        rng = np.random.default_rng([seed, count])
        cell = np.unravel_index(_balanced(count, math.prod(self.cells), rng), self.cells)
        tokens, answers, hops, target = self._fill(cell, rng)
        return Samples(
            *(torch.from_numpy(np.ascontiguousarray(x, dtype=np.int64)) for x in (tokens, answers, hops, target))
        )

    def solve(self, tokens: Int[Tensor, "samples length"]) -> Solution:
        """Follow the rules from the last token of each row, whatever made the rows.

        Raises:
            InputError: `tokens` is not a table of ids of this task's vocabulary.
        """
        if tokens.ndim != 2 or tokens.shape[1] < 2:
            raise InputError(f"task '{self.name}' needs tokens [samples, length >= 2], not {list(tokens.shape)}")
        rows = tokens.detach().cpu().numpy()
        if rows.size and (rows.min() < 0 or rows.max() >= self.vocabulary_size):
            raise InputError(
                f"token ids of task '{self.name}' lie in 0..{self.vocabulary_size - 1}; found "
                f"{rows.min()}..{rows.max()}"
            )
        answers, hops, path, reason = self._solve(rows)
        return Solution(torch.from_numpy(answers), torch.from_numpy(hops), torch.from_numpy(path), reason)

    def validate(self, samples: Samples) -> Solution:
        """Check that every sample is solved by the rules and that its recorded answer and hops are the solver's.

        Raises:
            InputError: a sample is unsolvable or recorded wrongly; the message names the first one.
        """
        solution = self.solve(samples.tokens)
        for what, found, said in (("answer", solution.answers, samples.answers), ("hops", solution.hops, samples.hops)):
            wrong = (found != said.cpu()).nonzero()
            if len(wrong):
                row = int(wrong[0])
                why = (
                    solution.reason
                    if int(found[row]) < 0
                    else f"the rules give {what} {int(found[row])}, recorded is {int(said[row])}"
                )
                raise InputError(f"sample {row} of task '{self.name}' ({self.decode(samples.tokens[row])}): {why}")
        return solution

    def prepend(self, samples: Samples, extra: int, seed: int = 0) -> Samples:
        """The same samples with `extra` tokens before them that leave the answers as they are (length tests).

        Raises:
            InputError: `extra` is negative.
        """
        if extra < 0:
            raise InputError(f"the number of added tokens must be at least 0, not {extra}")
        filler = self._filler(samples, extra, np.random.default_rng([seed, extra, 1]))
        tokens = torch.cat([torch.from_numpy(filler.astype(np.int64)), samples.tokens.cpu()], dim=1)
        return Samples(tokens, samples.answers, samples.hops, samples.target + extra)

    def encode(self, text: str) -> Int[Tensor, " length"]:
        """Token ids of whitespace-separated token names.

        Raises:
            InputError: a name is not in the vocabulary.
        """
        index = {name: i for i, name in enumerate(self.vocabulary)}
        missing = [word for word in text.split() if word not in index]
        if missing:
            raise InputError(f"'{missing[0]}' is not a token of task '{self.name}'")
        return torch.tensor([index[word] for word in text.split()], dtype=torch.long)

    def decode(self, tokens: Int[Tensor, " length"]) -> str:
        """Names of token ids, separated by blanks."""
        return " ".join(self.vocabulary[int(t)] for t in tokens)

    def tokenizer(self) -> Any:
        """A transformers tokenizer with this vocabulary (whitespace-separated names), which can be saved with a model.

        Any other word becomes `[UNK]`, whose id is just outside the model's vocabulary, so that it is never taken
        for a token of the task.
        """
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        names = {name: i for i, name in enumerate((*self.vocabulary, UNKNOWN))}
        words = Tokenizer(models.WordLevel(names, unk_token=UNKNOWN))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
        return PreTrainedTokenizerFast(tokenizer_object=words, unk_token=UNKNOWN)


def _balanced(count: int, cells: int, rng: np.random.Generator) -> np.ndarray:
    """A shuffled list of `count` cell numbers in which any two cells occur equally often, give or take one."""
    full, rest = divmod(count, cells)
    ids = np.concatenate([np.repeat(np.arange(cells), full), rng.choice(cells, size=rest, replace=False)])
    return rng.permutation(ids)


def check_counts(task: str, **counts: int) -> None:
    """Every count is a positive integer, or an `InputError` names the one that is not."""
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"task '{task}': {name} must be a whole number of at least 1, not {value!r}")
        if value > MOST_TOKENS:
            raise InputError(f"task '{task}': {name} must be at most {MOST_TOKENS}, not {value}")


def check_vocabulary(task: str, size: int, why: str) -> None:
    """Refuse a vocabulary that would be nearly all of a small model; `why` says what makes it so large.

    Raises:
        InputError: more than `MOST_TOKENS` tokens.
    """
    if size > MOST_TOKENS:
        raise InputError(f"task '{task}': {why} make {size} tokens, more than {MOST_TOKENS}: use fewer")


def choose_stops(cell_hops: np.ndarray, places: int, rng: np.random.Generator) -> np.ndarray:
    """Mask `[samples, places]` of the pre-target places that a path of `cell_hops` jumps stops at, uniform
    among subsets."""
    rank = rng.random((len(cell_hops), places)).argsort(axis=1).argsort(axis=1)
    return rank < (cell_hops - 1)[:, None]
