"""Cross-logits, swap scores and exact companions on tensors of our own, against brute force."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posattn.errors import InputError, UnsupportedModelError
from posattn.heads.crosslogits import move_query, split_frequencies
from posattn.heads.exact import exact, exact_from_matrix
from posattn.heads.swaps import swap_scores
from posattn.models.base import Alibi, PositionScheme, Rotary

F64 = torch.float64


def table(width: int, length: int, base: float = 30.0, factor: float = 1.0, interleaved: bool = False) -> Rotary:
    theta = base ** (-torch.arange(0, width, 2, dtype=F64) / width)
    angles = torch.arange(length, dtype=F64)[:, None] * theta
    return Rotary(angles.cos() * factor, angles.sin() * factor, interleaved, theta)


def schemes(d: int, heads: int, length: int) -> dict[str, PositionScheme]:
    slopes = torch.linspace(0.1, 0.9, heads, dtype=F64)
    return {
        "rotary": PositionScheme("rotary", 0.4, rotary=table(d, length)),
        "interleaved": PositionScheme("rotary", 0.4, rotary=table(d, length, interleaved=True)),
        "partial": PositionScheme("rotary", 0.4, rotary=table(d // 2, length, factor=1.3)),
        "partial-interleaved": PositionScheme("rotary", 0.4, rotary=table(d // 2, length, 30, 1.3, True)),
        "window": PositionScheme("rotary", 0.4, rotary=table(d, length), window=5),
        "softcap": PositionScheme("rotary", 0.4, rotary=table(d, length), softcap=2.0),
        "sink": PositionScheme("rotary", 0.4, rotary=table(d, length), sinks=torch.randn(heads, dtype=F64)),
        "alibi": PositionScheme("alibi", 0.4, alibi=Alibi(slopes)),
        "none": PositionScheme("none", 0.4),
    }


def rotate_plainly(x: torch.Tensor, rotary: Rotary, position: int) -> torch.Tensor:
    """One vector rotated pair by pair, in its own layout."""
    out = x.clone()
    half = rotary.width // 2
    for t in range(half):
        a, b = (2 * t, 2 * t + 1) if rotary.interleaved else (t, t + half)
        c, s = rotary.cos[position, t], rotary.sin[position, t]
        out[a], out[b] = x[a] * c - x[b] * s, x[b] * c + x[a] * s
    return out


def attention(q, k, scheme: PositionScheme, query: int) -> torch.Tensor:
    """Attention weights [H, query+1] of one query, key by key, as the model would compute them."""
    heads = q.shape[0]
    group = heads // k.shape[1]
    logits = torch.full((heads, query + 1), -math.inf, dtype=q.dtype)
    for h in range(heads):
        for j in range(query + 1):
            if scheme.window is not None and query - j >= scheme.window:
                continue
            a, b = q[h], k[j, h // group]
            if scheme.rotary is not None:
                a, b = rotate_plainly(a, scheme.rotary, query), rotate_plainly(b, scheme.rotary, j)
            x = scheme.scale * (a @ b)
            if scheme.alibi is not None:
                x = x - scheme.alibi.slopes[h] * (query - j)
            logits[h, j] = x if scheme.softcap is None else scheme.softcap * torch.tanh(x / scheme.softcap)
    if scheme.sinks is not None:
        logits = torch.cat([logits, scheme.sinks[:, None]], -1)
    return torch.softmax(logits, -1)[:, : query + 1]


def cosine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Cosine of vectors of weights, which may be as small as numbers get."""
    a, b = (x / x.amax(-1, keepdim=True) for x in (a, b))
    return (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))


def combine(d: torch.Tensor, swapped, visible, tau: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition: loop over swaps; `swapped(i, j)` gives the weights [H, n] after the swap."""
    gaps, pos, sym = [], [], []
    for i, j in itertools.combinations(visible, 2):
        new = swapped(i, j)
        a, b = torch.stack([new[:, i], new[:, j]], -1), torch.stack([d[:, i], d[:, j]], -1)
        gaps.append((d[:, i] - d[:, j]).abs())
        pos.append(cosine(a, b))
        sym.append(cosine(a, b.flip(-1)))
    gap = torch.stack(gaps, -1)
    if tau == 0:
        rational = [  # a float difference would make ties of 1 − 1e-40 and 1 − 1e-60
            [abs(Fraction(row[i]) - Fraction(row[j])) for i, j in itertools.combinations(visible, 2)]
            for row in d.tolist()
        ]
        alpha = torch.tensor([[float(x == max(row)) for x in row] for row in rational], dtype=d.dtype)
        alpha = alpha / alpha.sum(-1, keepdim=True)
    else:
        alpha = torch.softmax(gap / tau, -1)
    return (alpha * torch.stack(pos, -1)).sum(-1), (alpha * torch.stack(sym, -1)).sum(-1)


def brute(q, k, scheme, query, tau=1e-4):
    first = 0 if scheme.window is None else max(0, query - scheme.window + 1)

    def swapped(i, j):
        exchanged = k.clone()
        exchanged[[i, j]] = k[[j, i]]
        return attention(q, exchanged, scheme, query)

    return combine(attention(q, k, scheme, query), swapped, range(first, query), tau)


def random_qk(heads=4, key_heads=2, n=10, d=8, seed=0, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    return (
        scale * torch.randn(heads, d, generator=g, dtype=F64),
        torch.randn(n, key_heads, d, generator=g, dtype=F64),
    )


@pytest.mark.parametrize("name", list(schemes(8, 4, 10)))
@pytest.mark.parametrize("tau", [1e-4, 0.05])
def test_scores_equal_brute_force(name, tau):
    q, k = random_qk()
    scheme = schemes(8, 4, 10)[name]
    moved = move_query(q, k, scheme, 8)
    weights = moved.weights()
    torch.testing.assert_close(weights, attention(q, k, scheme, 8)[:, moved.first :], atol=1e-13, rtol=0)
    got = swap_scores(moved.queries[:, :-1], moved.keys[:, :-1], weights[:, :-1], moved.softcap, tau)
    torch.testing.assert_close(got, brute(q, k, scheme, 8, tau), atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", list(schemes(8, 4, 10)))
def test_cross_logits_are_the_logits_of_moved_keys(name):
    q, k = random_qk(seed=3)
    scheme = schemes(8, 4, 10)[name]
    moved = move_query(q, k, scheme, 7)
    m = moved.matrix()
    for p in range(moved.n):
        for t in range(moved.n):
            placed = k.clone()
            placed[moved.first + p] = k[moved.first + t]
            logit = move_query(q, placed, scheme, 7).logits()[:, p]
            torch.testing.assert_close(m[:, p, t], logit, atol=1e-12, rtol=0)
    torch.testing.assert_close(m.diagonal(dim1=-2, dim2=-1), moved.logits()[:, :-1], atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ["rotary", "interleaved", "partial", "partial-interleaved", "window", "softcap"])
def test_frequencies_sum_to_the_whole(name):
    q, k = random_qk(seed=5)
    scheme = schemes(8, 4, 10)[name]
    moved = move_query(q, k, scheme, 9)
    parts = split_frequencies(moved, scheme)
    terms = scheme.rotary.width // 2 + (scheme.rotary.width < 8)
    assert parts.matrix().shape[:2] == (4, terms)
    summed = parts.matrix().sum(1)
    if scheme.softcap is not None:
        summed = scheme.softcap * torch.tanh(summed / scheme.softcap)
    torch.testing.assert_close(summed, moved.matrix(), atol=1e-12, rtol=0)
    # M_t = scale f² |q_t||k_t| cos(φ_q − φ_k + θ_t (i − p)), checked for one frequency, position and token
    r, t, p, j = scheme.rotary, 1, 2, 3
    half = r.width // 2
    a, b = (2 * t, 2 * t + 1) if r.interleaved else (t, t + half)
    factor = r.cos[0, 0] ** 2
    qc, kc = torch.complex(q[1, a], q[1, b]), torch.complex(k[moved.first + j, 0, a], k[moved.first + j, 0, b])
    angle = qc.angle() - kc.angle() + r.frequencies[t] * (9 - (moved.first + p))
    expected = scheme.scale * factor * qc.abs() * kc.abs() * angle.cos()
    torch.testing.assert_close(parts.matrix()[1, t, p, j], expected, atol=1e-12, rtol=0)


@settings(deadline=None, max_examples=25)
@given(
    n=st.integers(2, 24),
    scale=st.sampled_from([0.0, 1e-3, 1.0, 5.0, 60.0]),
    seed=st.integers(0, 10**6),
    tau=st.sampled_from([0.0, 1e-4, 1e-2, 10.0]),
)
def test_sorted_blocks_equal_the_plain_sum(n, scale, seed, tau):
    """Sorting, pruning and grouping change nothing: against the plain softmax over all swaps from M."""
    g = torch.Generator().manual_seed(seed)
    u, k = scale * torch.randn(5, n, 3, generator=g, dtype=F64), torch.randn(5, n, 3, generator=g, dtype=F64)
    m = u @ k.mT
    d = torch.softmax(m.diagonal(dim1=1, dim2=2), -1)

    def swapped(i, j):  # proportional is enough: the cosine is scale-free
        pair = torch.softmax(torch.stack([m[:, i, j], m[:, j, i]], -1), -1)
        out = d.clone()
        out[:, i], out[:, j] = pair[:, 0], pair[:, 1]
        return out

    expected = combine(d, swapped, range(n), tau)
    if tau == 0 and scale == 0:  # all weights equal but for rounding: the tie is decided by it
        return
    torch.testing.assert_close(swap_scores(u, k, d, None, tau), expected, atol=1e-9, rtol=0)


def test_float32_is_within_budget():
    q, k = random_qk(n=60, d=16, seed=7, scale=2.0)
    scheme = PositionScheme("rotary", 0.25, rotary=table(16, 60))
    exact64 = move_query(q, k, scheme, 59)
    d = exact64.weights()[:, :-1]
    truth = swap_scores(exact64.queries[:, :-1], exact64.keys[:, :-1], d)
    single = move_query(q.float(), k.float(), scheme, 59)
    got = swap_scores(single.queries[:, :-1], single.keys[:, :-1], d.float())
    for a, b in zip(got, truth, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e4, -1e4])
def test_extreme_logits_are_finite(dtype, size):
    g = torch.Generator().manual_seed(0)
    u = size * torch.randn(3, 12, 2, generator=g).to(dtype)
    k = torch.randn(3, 12, 2, generator=g).to(dtype)
    d = torch.softmax((u * k).sum(-1), -1)
    for tau in (0.0, 1e-4, 1e-12):
        pos, sym = swap_scores(u, k, d, None, tau)
        assert torch.isfinite(pos).all()
        assert torch.isfinite(sym).all()


def test_hand_made_heads():
    """Pure positional (1, 0), pure symbolic (0, 1), constant (1, 1)."""
    n = 9
    eye, ones = torch.eye(n, dtype=F64), torch.ones(n, n, dtype=F64)
    profile = torch.full((n,), -20.0, dtype=F64)
    profile[3] = 20.0
    u = torch.stack([profile[:, None] * eye[0], ones * 0 + profile, ones * 0])  # M[p,t] = profile[p] | profile[t] | 0
    k = torch.stack([ones, eye, ones])
    d = torch.softmax((u * k).sum(-1), -1)
    pos, sym = swap_scores(u, k, d)
    torch.testing.assert_close(pos, torch.tensor([1.0, 0.0, 1.0], dtype=F64), atol=1e-12, rtol=0)
    torch.testing.assert_close(sym, torch.tensor([0.0, 1.0, 1.0], dtype=F64), atol=1e-12, rtol=0)


def test_one_rotated_frequency_points_where_it_was_built_to():
    """k constant, q = R(−offset) k scaled: the logit peaks at distance `offset` and the head is positional."""
    theta, offset, n = 0.3, 4, 12
    angles = torch.arange(n, dtype=F64)[:, None] * theta
    rotary = Rotary(angles.cos(), angles.sin(), False, torch.tensor([theta], dtype=F64))
    scheme = PositionScheme("rotary", 400.0, rotary=rotary)
    key = torch.tensor([1.0, 0.0], dtype=F64)
    query = torch.tensor([math.cos(-theta * offset), math.sin(-theta * offset)], dtype=F64)
    moved = move_query(query[None], key.expand(n, 1, 2), scheme, n - 1)
    assert int(moved.logits()[0].argmax()) == n - 1 - offset
    pos, sym = swap_scores(moved.queries[:, :-1], moved.keys[:, :-1], moved.weights()[:, :-1])
    assert pos.item() == pytest.approx(1, abs=1e-9)
    assert sym.item() < 1e-5


@pytest.mark.parametrize("n", range(1, 8))
def test_exclusion_equals_the_mean_over_all_permutations(n):
    m = torch.randn(3, n, n, dtype=F64, generator=torch.Generator().manual_seed(n))
    e = exact_from_matrix(m)
    own = m.diagonal(dim1=1, dim2=2)
    pos, sym = [], []
    for permutation in itertools.permutations(range(n)):
        where = torch.tensor(permutation)  # token t stands at where[t]
        placed = m[:, where, torch.arange(n)]
        pos.append((placed - own[:, where]).square().mean(-1))
        sym.append((placed - own).square().mean(-1))
    torch.testing.assert_close(e.positional_violation, torch.stack(pos).mean(0))
    torch.testing.assert_close(e.symbolic_violation, torch.stack(sym).mean(0))


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10**6), n=st.integers(2, 30), scale=st.sampled_from([1e-3, 1.0, 1e3]))
def test_exact_without_the_matrix_and_bound(seed, n, scale):
    q, k = random_qk(n=n + 1, seed=seed, scale=scale)
    for scheme in schemes(8, 4, n + 1).values():
        moved = move_query(q, k, scheme, n)
        got, plain = exact(moved), exact_from_matrix(moved.matrix())
        for field in vars(plain):
            torch.testing.assert_close(getattr(got, field), getattr(plain, field), rtol=1e-8, atol=1e-12 * scale**2)
        assert (got.slack >= -1e-9 * (1 + got.logit_variance)).all()
        total = got.position + got.symbol + got.interaction
        constant = moved.matrix().flatten(-2).std(-1) < 1e-10  # a saturated soft cap
        torch.testing.assert_close(total, (~constant).double())


def test_exact_names_pure_heads():
    q, k = random_qk(n=10)
    e = exact(move_query(q, k, PositionScheme("none", 1.0), 9))
    torch.testing.assert_close(e.symbol, torch.ones(4, dtype=F64))
    assert e.symbolic_violation.abs().max() < 1e-12
    alike = k[:1].expand_as(k)
    e = exact(move_query(q, alike, PositionScheme("rotary", 1.0, rotary=table(8, 10)), 9))
    torch.testing.assert_close(e.position, torch.ones(4, dtype=F64))
    assert e.positional_violation.abs().max() < 1e-12
    e = exact(move_query(q, alike, PositionScheme("none", 1.0), 9))
    assert (e.position + e.symbol + e.interaction).abs().max() == 0


def test_wrong_use():
    q, k = random_qk()
    with pytest.raises(UnsupportedModelError, match='level="tokens"'):
        move_query(q, k, PositionScheme("absolute", 1.0, absolute="learned"), 5)
    with pytest.raises(InputError, match="no earlier key"):
        move_query(q, k, PositionScheme("none", 1.0), 0)
    with pytest.raises(InputError, match="share"):
        move_query(q[:3], k, PositionScheme("none", 1.0), 4)
    moved = move_query(q, k, PositionScheme("none", 1.0), 1)
    with pytest.raises(InputError, match="two earlier keys"):
        swap_scores(moved.queries[:, :-1], moved.keys[:, :-1], moved.weights()[:, :-1])
    moved = move_query(q, k, PositionScheme("none", 1.0), 5)
    with pytest.raises(InputError, match="tau"):
        swap_scores(moved.queries[:, :-1], moved.keys[:, :-1], moved.weights()[:, :-1], tau=-1.0)
    with pytest.raises(InputError, match="rotary"):
        split_frequencies(moved, PositionScheme("none", 1.0))
