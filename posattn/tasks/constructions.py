"""Attention heads written down instead of trained: their q, k and v, how far they work, and what they solve together.

A rotary head with angles θ_f gives a query at i and a key at j the logit Σ_f w_f cos(φ_q − φ_k + θ_f (i − j)), so a
head is a choice of angles, weights w (they sum to 1) and phases φ. Distances Δ = i − j run from 1 to n, the number of
keys before the query; the query's own key is left out, as in the swaps of the scores.

* **Index** (positional): φ_k = 0 for every token and φ_q = −kθ for the query "k back", so the logit is
  Σ w_f cos(θ_f (Δ − k)): largest at Δ = k, and the same whatever the keys are.
* **Retrieval** (symbolic): φ_q = ωa for the wanted symbol a, φ_k = ωb for a key's symbol b, ω = 2π/|alphabet|, and one
  slow angle θ, 0 for none: cos(ω(a − b) + θΔ).
* **Induction** (both): two angles, 0 for the symbol and θ₂ for recency: w₁ cos(ω(a − b)) + w₂ cos(φ + θ₂Δ), which
  falls with Δ: the most recent of the matching keys. With φ = π/4 and θ₂ = π/(2n₀) neighbours differ by the order of
  1/n₀, with φ = 0 by that of 1/n₀² (both work).

**Discrepancy** at length n is the worst case over all inputs with n earlier keys of (logit of the right key − largest
other logit): computed exactly, never sampled. It cannot rise with n, is below the published bounds (`discrepancy`), and
`n0` is the last length at which it is above `RESOLUTION`. With hard attention the head is then right at every length up
to n0; with softmax its weight on the right key is at least 1/(1 + (n−1)e^(−s·discrepancy)), so `scale_for(n, share)`
gives the scale s that guarantees any share below 1.

**Compositions.** Every token that points somewhere keeps pointing there, layer after layer, and what travels is the
state: s⁽⁰⁾ = one-hot of the token, s⁽ᵗ⁾ = A s⁽ᵗ⁻¹⁾ where a token points, s⁽⁰⁾ where it is a target (the only gate).
After as many layers as the longest path the query's state is the answer: hops are resolved at the token that makes
them, by the same head in every layer, and softmax attention costs at most share^hops of the answer's mass.

Facts: index, retrieval and discrepancy arXiv 2605.31558; one- and two-angle heads of the canonical tasks arXiv
2511.11579 (a single angle for index, none for retrieval, 0 and θ₂ for partial induction). Weights, phase, exact worst
cases and the composition are ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from posattn.errors import InputError
from posattn.heads.crosslogits import Moved, move_query
from posattn.heads.swaps import TAU, swap_scores
from posattn.models.base import PositionScheme, Rotary
from posattn.models.positions import rotate
from posattn.tasks.base import Task
from posattn.tasks.canonical import IndexTask, InductionTask, RetrievalTask
from posattn.tasks.letter import LetterTask
from posattn.tasks.number import NumberTask

#: a discrepancy below this is no longer told apart (float32 cosines are good to about 1e-7)
RESOLUTION = 1e-6
#: lengths are searched up to here
LONGEST = 2**16
HARD = math.inf


class RotaryHead(nn.Module):
    """One attention head with explicit angles [F], amplitudes √w [F] and a softmax scale (`HARD`: arg max, ties share).

    Queries and keys are [batch, n, 2F]: one interleaved pair (√w cos φ, √w sin φ) per angle.

    Raises:
        InputError: no angle, weights that are not positive, or a scale that is not above 0.
    """

    angles: Tensor
    weights: Tensor

    def __init__(
        self, angles: float | Sequence[float], weights: Sequence[float] | None = None, scale: float = HARD
    ) -> None:
        super().__init__()
        given = torch.as_tensor(angles, dtype=torch.float64).reshape(-1)
        share = torch.ones_like(given) if weights is None else torch.as_tensor(weights, dtype=torch.float64)
        if not given.numel() or not torch.isfinite(given).all():
            raise InputError("a head needs at least one finite angle")
        if share.shape != given.shape or not bool((share > 0).all()):
            raise InputError(f"{given.numel()} angles need as many positive weights, not {share.tolist()}")
        if not scale > 0:
            raise InputError(f"the softmax scale must be above 0 (or HARD), not {scale}")
        self.register_buffer("angles", given)
        self.register_buffer("weights", share / share.sum())
        self.scale = float(scale)

    def pairs(self, phases: Float[Tensor, "*shape f"]) -> Float[Tensor, "*shape f2"]:
        """Phases as interleaved pairs with this head's amplitudes."""
        phases = phases.double()
        pair = torch.stack([phases.cos(), phases.sin()], -1) * self.weights.sqrt()[:, None]
        return pair.flatten(-2)

    def scheme(self, length: int, scale: float | None = None) -> PositionScheme:
        """What the head does with position, for `posattn.heads`. A hard head is told by its scale alone (1)."""
        turns = torch.arange(length, dtype=torch.float64)[:, None] * self.angles
        scale = self.scale if scale is None else scale
        return PositionScheme(
            "rotary",
            1.0 if math.isinf(scale) else scale,
            rotary=Rotary(turns.cos(), turns.sin(), interleaved=True, frequencies=self.angles),
        )

    def logits(self, q: Float[Tensor, "b n d"], k: Float[Tensor, "b n d"]) -> Float[Tensor, "b n n"]:
        """Σ_f w_f cos(φ_q − φ_k + θ_f (i − j)), unscaled; −inf at and after the query."""
        n = q.shape[1]
        rotary, places = self.scheme(n).rotary, torch.arange(n)
        assert rotary is not None
        scores = rotate(q, rotary, places) @ rotate(k, rotary, places).mT
        return scores.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(-1), -math.inf)

    def pattern(self, q: Float[Tensor, "b n d"], k: Float[Tensor, "b n d"]) -> Float[Tensor, "b n n"]:
        """Attention weights; the first row, which sees nothing, is 0."""
        logits = self.logits(q, k)
        if math.isinf(self.scale):
            best = logits >= logits.amax(-1, keepdim=True) - 1e-12  # rounding of equal cosines
            weights = best.double() * torch.isfinite(logits)
        else:
            weights = torch.exp(self.scale * (logits - logits.amax(-1, keepdim=True))).nan_to_num(0.0)
        return weights / weights.sum(-1, keepdim=True).clamp_min(1e-300)

    def forward(
        self, q: Float[Tensor, "b n d"], k: Float[Tensor, "b n d"], v: Float[Tensor, "b n w"]
    ) -> Float[Tensor, "b n w"]:
        """Attended values."""
        return self.pattern(q, k) @ v

    # -------------------------------------------------------------------------------------------- how far it works

    def discrepancy(self, n: int) -> float:
        """Worst case over inputs with n earlier keys of (right key's logit − largest other), unscaled."""
        raise NotImplementedError

    @property
    def n0(self) -> int:
        """The last length at which the discrepancy is above `RESOLUTION` (at most `LONGEST`)."""
        low, high = 1, LONGEST  # one key is never confused
        if self.discrepancy(LONGEST) > RESOLUTION:
            return LONGEST
        while high - low > 1:  # more inputs cannot raise a worst case: it only falls with n
            middle = (low + high) // 2
            low, high = (middle, high) if self.discrepancy(middle) > RESOLUTION else (low, middle)
        return low

    def scale_for(self, n: int, share: float = 0.99) -> float:
        """The softmax scale that puts at least `share` on the right key among n.

        Raises:
            InputError: `share` outside (0, 1), or n beyond `n0`.
        """
        if not 0 < share < 1:
            raise InputError(f"share must lie between 0 and 1, not {share}")
        worst = self.discrepancy(n)
        if worst <= RESOLUTION:
            raise InputError(f"this head works up to {self.n0} keys; no scale makes it right among {n}")
        return max(1.0, math.log(max(n - 1, 1) * share / (1 - share)) / worst)

    def scores(
        self,
        q: Float[Tensor, "b n d"],
        k: Float[Tensor, "b n d"],
        scale: float | None = None,
        tau: float = TAU,
    ) -> tuple[Float[Tensor, "b"], Float[Tensor, "b"]]:
        """Positional and symbolic score of the last query over all swaps of two earlier keys.

        `scale` (default: the head's own; `scale_for` the length when it is hard) is the softmax scale of the weights.
        """
        n = q.shape[1] - 1
        if scale is None:
            scale = self.scale_for(n) if math.isinf(self.scale) else self.scale
        moved: Moved = move_query(q[:, -1, None], k[:, :, None], self.scheme(n + 1, scale), n)
        queries, keys = moved.queries[:, 0, :-1], moved.keys[:, 0, :-1]
        weights = torch.softmax((queries * keys).sum(-1), -1)
        return swap_scores(queries, keys, weights, None, tau)


class IndexHead(RotaryHead):
    """Attends k tokens back. One angle, or several (each further one slows the loss of discrepancy with length).

    Args:
        angles: radians per position; None: the single angle 2π/longest, which tells all of `longest` keys apart.
    """

    def __init__(
        self,
        angles: float | Sequence[float] | None = None,
        weights: Sequence[float] | None = None,
        scale: float = HARD,
        longest: int = 17,
    ) -> None:
        super().__init__(2 * math.pi / longest if angles is None else angles, weights, scale)

    def queries(self, back: Int[Tensor, "b n"]) -> Float[Tensor, "b n d"]:
        """q of "so many back"."""
        return self.pairs(-back[..., None].double() * self.angles)

    def keys(self, tokens: Int[Tensor, "b n"]) -> Float[Tensor, "b n d"]:
        """k: the same for every token."""
        return self.pairs(torch.zeros(*tokens.shape, len(self.angles), dtype=torch.float64))

    def discrepancy(self, n: int) -> float:
        """min over 0 < m < n of Σ w_f (1 − cos mθ_f)."""
        _check_length(n)
        if n == 1:
            return math.inf
        m = torch.arange(1, n, dtype=torch.float64)
        # 1 − cos x = 2 sin²(x/2) keeps small values exact
        return float((2 * (m[:, None] * self.angles / 2).sin().square() * self.weights).sum(-1).min())


class RetrievalHead(RotaryHead):
    """Attends to the key whose symbol is the wanted one.

    Args:
        alphabet: number of symbols.
        angle: slow rotary angle; 0: no position at all.
    """

    def __init__(self, alphabet: int = 8, angle: float = 0.0, scale: float = HARD) -> None:
        if alphabet < 2:
            raise InputError(f"an alphabet needs at least 2 symbols, not {alphabet}")
        super().__init__(angle, None, scale)
        self.alphabet = alphabet
        self.omega = 2 * math.pi / alphabet

    def queries(self, wanted: Int[Tensor, "b n"]) -> Float[Tensor, "b n d"]:
        """q of the wanted symbol."""
        return self.pairs(self.omega * wanted[..., None].double())

    def keys(self, symbols: Int[Tensor, "b n"]) -> Float[Tensor, "b n d"]:
        """k of a token's symbol."""
        return self.pairs(self.omega * symbols[..., None].double())

    def discrepancy(self, n: int) -> float:
        """min over distances Δ ≠ Δ' and symbols s ≠ 0 of cos(θΔ) − cos(sω + θΔ')."""
        _check_length(n)
        if n == 1:
            return math.inf
        turn = float(self.angles[0]) * torch.arange(1, n + 1, dtype=torch.float64)
        others = (self.omega * torch.arange(1, self.alphabet, dtype=torch.float64)[:, None] + turn).cos().amax(0)
        return _least_difference(turn.cos(), others)


class InductionHead(RotaryHead):
    """Attends to the most recent key whose symbol is the wanted one.

    Args:
        alphabet: number of symbols.
        longest: the length it is made for: sets θ₂ and the balance of both terms, unless they are given.
        angle: θ₂; phase: φ; weight: w₂, the share of the recency term.
    """

    def __init__(
        self,
        alphabet: int = 4,
        longest: int = 17,
        angle: float | None = None,
        phase: float = math.pi / 4,
        weight: float | None = None,
        scale: float = HARD,
    ) -> None:
        if alphabet < 2:
            raise InputError(f"an alphabet needs at least 2 symbols, not {alphabet}")
        if longest < 2:
            raise InputError(f"longest must be at least 2, not {longest}")
        self.alphabet, self.phase = alphabet, phase
        self.omega = 2 * math.pi / alphabet
        angle = (math.pi - 2 * phase) / (longest + 1) if angle is None else angle
        if weight is None:  # both ways to fail equally far: w₂·gap = w₁·(1 − cos ω) − w₂·range
            curve = (phase + angle * torch.arange(1, longest + 1, dtype=torch.float64)).cos()
            gap = float((curve[:-1] - curve[1:]).min())
            ratio = (1 - math.cos(self.omega)) / (max(gap, 0.0) + float(curve.max() - curve.min()))
            weight = ratio / (1 + ratio)
        if not 0 < weight < 1:
            raise InputError(f"the weight of the recency term must lie between 0 and 1, not {weight}")
        super().__init__((0.0, angle), (1 - weight, weight), scale)

    def queries(self, wanted: Int[Tensor, "b n"]) -> Float[Tensor, "b n d"]:
        """q: the wanted symbol, and the phase φ."""
        symbol = self.omega * wanted.double()
        return self.pairs(torch.stack([symbol, torch.full_like(symbol, self.phase)], -1))

    def keys(self, symbols: Int[Tensor, "b n"]) -> Float[Tensor, "b n d"]:
        """k: a token's symbol, and phase 0."""
        symbol = self.omega * symbols.double()
        return self.pairs(torch.stack([symbol, torch.zeros_like(symbol)], -1))

    def discrepancy(self, n: int) -> float:
        """The smaller of: two matches, the nearer against any farther; a match against any other symbol elsewhere."""
        _check_length(n)
        if n == 1:
            return math.inf
        first, second = self.weights.tolist()
        curve = (self.phase + float(self.angles[1]) * torch.arange(1, n + 1, dtype=torch.float64)).cos()
        later = curve.flip(0).cummax(0).values.flip(0)[1:]
        recent = float((curve[:-1] - later).min())
        return min(second * recent, first * (1 - math.cos(self.omega)) + second * _least_difference(curve, curve))


def _check_length(n: int) -> None:
    if n < 1:
        raise InputError(f"the number of earlier keys must be at least 1, not {n}")


def _least_difference(a: Tensor, b: Tensor) -> float:
    """min over i ≠ j of a_i − b_j: the two extremes of each are enough."""
    low, high = a.topk(2, largest=False), b.topk(2)
    return min(
        float(low.values[i] - high.values[j])
        for i in range(2)
        for j in range(2)
        if int(low.indices[i]) != int(high.indices[j])
    )


class Solver(nn.Module):
    """A composition of one head, as many layers as the task's longest path, and the gate that keeps targets.

    `solver(tokens)` gives the mass [samples, vocabulary] that the last position holds on each token; the answer is its
    arg max. The sequence may be longer than the task's, up to `n0` tokens before the query.
    """

    def __init__(self, task: Task, head: Any, layers: int) -> None:
        super().__init__()
        self.task, self.head, self.layers = task, head, layers

    @property
    def n0(self) -> int:
        """The most tokens before the query at which the solution is guaranteed."""
        return self.head.n0

    def queries(self, tokens: Int[Tensor, "b n"]) -> Float[Tensor, "b n d"]:
        """q of every position."""
        raise NotImplementedError

    def keys(self, tokens: Int[Tensor, "b n"]) -> Float[Tensor, "b n d"]:
        """k of every position."""
        raise NotImplementedError

    def points(self, tokens: Int[Tensor, "b n"]) -> Tensor:
        """Which positions point elsewhere [b, n]; the others are targets and keep their token."""
        raise NotImplementedError

    def forward(self, tokens: Int[Tensor, "b n"]) -> Float[Tensor, "b vocab"]:
        """Mass of every token of the vocabulary at the last position."""
        pattern = self.head.pattern(self.queries(tokens), self.keys(tokens))
        start = nn.functional.one_hot(tokens, self.task.vocabulary_size).double()
        moves = self.points(tokens)[..., None]
        state = start
        for _ in range(self.layers):
            state = torch.where(moves, pattern @ state, start)
        return state[:, -1]

    def answers(self, tokens: Int[Tensor, "b n"]) -> Int[Tensor, "b"]:
        """The token with the largest mass."""
        return self(tokens).argmax(-1)

    def scores(
        self, tokens: Int[Tensor, "b n"], scale: float | None = None
    ) -> tuple[Float[Tensor, "b"], Float[Tensor, "b"]]:
        """Positional and symbolic score of the head at the last position of each sample."""
        return self.head.scores(self.queries(tokens), self.keys(tokens), scale)

    def with_scale(self, scale: float) -> Solver:
        """The same solver with another softmax scale (`HARD` for arg max)."""
        if not scale > 0:
            raise InputError(f"the softmax scale must be above 0 (or HARD), not {scale}")
        self.head.scale = float(scale)
        return self


class NumberSolver(Solver):
    """The number task (and index, its one-hop form) by an index head."""

    def queries(self, tokens: Int[Tensor, "b n"]) -> Float[Tensor, "b n d"]:
        return self.head.queries((tokens - self._letters + 1).clamp_min(0))

    def keys(self, tokens: Int[Tensor, "b n"]) -> Float[Tensor, "b n d"]:
        return self.head.keys(tokens)

    def points(self, tokens: Int[Tensor, "b n"]) -> Tensor:
        return tokens >= self._letters

    @property
    def _letters(self) -> int:
        return self.task.letters  # type: ignore[attr-defined]


class LetterSolver(Solver):
    """The letter task by a retrieval head."""

    def queries(self, tokens: Int[Tensor, "b n"]) -> Float[Tensor, "b n d"]:
        return self.head.queries(((tokens - self._pairs) % self.task.letters).clamp_min(0))  # type: ignore[attr-defined]

    def keys(self, tokens: Int[Tensor, "b n"]) -> Float[Tensor, "b n d"]:
        letters, integers = self.task.letters, self.task.integers  # type: ignore[attr-defined]
        return self.head.keys(torch.where(tokens < self._pairs, tokens // integers, (tokens - self._pairs) // letters))

    def points(self, tokens: Int[Tensor, "b n"]) -> Tensor:
        return tokens >= self._pairs

    @property
    def _pairs(self) -> int:
        return self.task.letters * self.task.integers  # type: ignore[attr-defined]


class RetrievalSolver(LetterSolver):
    """Retrieval and partial induction: (letter, integer) pairs, then a letter."""

    def queries(self, tokens: Int[Tensor, "b n"]) -> Float[Tensor, "b n d"]:
        return self.head.queries((tokens - self._pairs).clamp_min(0))

    def keys(self, tokens: Int[Tensor, "b n"]) -> Float[Tensor, "b n d"]:
        letter = torch.where(tokens < self._pairs, tokens // self.task.integers, tokens - self._pairs)  # type: ignore[attr-defined]
        return self.head.keys(letter)


def construct(
    task: Task, longest: int | None = None, angles: float | Sequence[float] | None = None, scale: float | None = HARD
) -> Solver:
    """The composition that solves a task, right at every length up to `longest` tokens before the query.

    Args:
        longest: default: the task's own.
        angles: instead of the default: 2π/longest (index), a quarter of what `longest` allows (retrieval), the
            recency angle (induction).
        scale: softmax scale; `HARD`; None: large enough for `longest`.

    Raises:
        InputError: the angles do not reach `longest`, or there is no construction for the task.
    """
    longest = task.length - 1 if longest is None else longest
    if longest < 2:
        raise InputError(f"a construction needs at least 2 tokens before the query, not {longest}")
    layers, letters = getattr(task, "max_hops", 1), getattr(task, "letters", 2)
    solver: Solver
    if isinstance(task, (NumberTask, IndexTask)):
        solver = NumberSolver(task, IndexHead(angles, longest=longest), layers)
    elif isinstance(task, InductionTask):
        solver = RetrievalSolver(task, InductionHead(letters, longest, _one(angles)), 1)
    elif isinstance(task, (RetrievalTask, LetterTask)):
        alphabet = max(2, letters)
        slow = _one(angles)
        slow = 2 * math.pi / alphabet / (8 * longest) if slow is None else slow
        kind = LetterSolver if isinstance(task, LetterTask) else RetrievalSolver
        solver = kind(task, RetrievalHead(alphabet, slow), layers)
    else:
        raise InputError(f"there is no construction for task '{task.name}'")
    if solver.n0 < longest:
        raise InputError(f"these angles work up to {solver.n0} tokens before the query, not {longest}")
    share = 0.99 ** (1 / layers)
    return solver.with_scale(solver.head.scale_for(longest, share) if scale is None else scale)


def _one(angles: float | Sequence[float] | None) -> float | None:
    if angles is None or isinstance(angles, (int, float)):
        return angles
    if len(angles) != 1:
        raise InputError(f"this head takes one angle, not {len(angles)}")
    return float(angles[0])
