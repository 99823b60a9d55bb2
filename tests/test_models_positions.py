"""Position functions against brute force, one query and one key at a time."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from posattn.errors import InputError
from posattn.models.base import Alibi, PositionScheme, Rotary
from posattn.models.positions import attention, logits, real_positions, rotate, table_logits, visible


def table(n: int, width: int, *, interleaved: bool = False, factor: float = 1.0) -> Rotary:
    theta = 100.0 ** (-torch.arange(0, width, 2).double() / width)
    angles = torch.arange(n).double()[:, None] * theta
    return Rotary(angles.cos() * factor, angles.sin() * factor, interleaved, theta)


def rotate_one(x: Tensor, rotary: Rotary, position: int) -> Tensor:
    """One vector, pair by pair, with the 2×2 matrix written out."""
    out, half = x.clone(), rotary.width // 2
    for t in range(half):
        a, b = (2 * t, 2 * t + 1) if rotary.interleaved else (t, t + half)
        c, s = float(rotary.cos[position, t]), float(rotary.sin[position, t])
        out[a], out[b] = c * x[a] - s * x[b], s * x[a] + c * x[b]
    return out


def brute(q: Tensor, k: Tensor, scheme: PositionScheme, mask: Tensor) -> Tensor:
    batch, n, heads, _ = q.shape
    weights = torch.zeros(batch, heads, n, n, dtype=q.dtype)
    for b in range(batch):
        places = [i for i in range(n) if mask[b, i]]
        for h in range(heads):
            g = h // (heads // k.shape[2])
            for i in places:
                scores: dict[int, float] = {}
                for j in places:
                    if j > i or (scheme.window is not None and i - j >= scheme.window):
                        continue
                    x, y = q[b, i, h], k[b, j, g]
                    if scheme.rotary is not None:
                        x = rotate_one(x, scheme.rotary, places.index(i))
                        y = rotate_one(y, scheme.rotary, places.index(j))
                    score = float(x @ y) * scheme.scale
                    if scheme.alibi is not None:
                        score -= float(scheme.alibi.slopes[h]) * (places.index(i) - places.index(j))
                    if scheme.softcap is not None:
                        score = scheme.softcap * math.tanh(score / scheme.softcap)
                    scores[j] = score
                sink = math.exp(float(scheme.sinks[h])) if scheme.sinks is not None else 0.0
                total = sum(math.exp(s) for s in scores.values()) + sink
                for j, score in scores.items():
                    weights[b, h, i, j] = math.exp(score) / total
    return weights


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, Tensor, PositionScheme, Tensor]:
    torch.manual_seed(draw(st.integers(0, 10_000)))
    n, groups, repeats, d = draw(st.integers(1, 6)), draw(st.integers(1, 2)), draw(st.integers(1, 2)), 6
    heads = groups * repeats
    kind = draw(st.sampled_from(["rotary", "alibi", "none"]))
    scheme = PositionScheme(
        kind=kind,  # type: ignore[arg-type]
        scale=draw(st.sampled_from([1.0, 0.4])),
        rotary=table(n, draw(st.sampled_from([2, 4, 6])), interleaved=draw(st.booleans()), factor=1.2)
        if kind == "rotary"
        else None,
        alibi=Alibi(torch.rand(heads).double()) if kind == "alibi" else None,
        window=draw(st.sampled_from([None, 1, 2])),
        softcap=draw(st.sampled_from([None, 1.5])),
        sinks=torch.randn(heads).double() if draw(st.booleans()) else None,
    )
    q = torch.randn(2, n, heads, d, dtype=torch.float64)
    k = torch.randn(2, n, groups, d, dtype=torch.float64)
    mask = torch.ones(2, n, dtype=torch.bool)
    mask[1, : draw(st.integers(0, n - 1))] = False
    return q, k, scheme, mask


@given(cases())
@settings(deadline=None, max_examples=40)
def test_attention_is_the_definition(case: tuple[Tensor, Tensor, PositionScheme, Tensor]) -> None:
    q, k, scheme, mask = case
    ours = attention(q, k, scheme, mask)
    torch.testing.assert_close(ours, brute(q, k, scheme, mask), rtol=0, atol=1e-9)
    assert ours.isfinite().all()


@given(interleaved=st.booleans(), factor=st.sampled_from([1.0, 1.3]), shift=st.integers(0, 5), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=20)
def test_rotation_is_relative_linear_and_has_its_transpose(
    interleaved: bool, factor: float, shift: int, seed: int
) -> None:
    torch.manual_seed(seed)
    rotary = table(20, 4, interleaved=interleaved, factor=factor)
    x, y = torch.randn(2, 7, dtype=torch.float64)
    i, j = torch.tensor(9), torch.tensor(4)
    product = rotate(x, rotary, i) @ rotate(y, rotary, j)
    moved = rotate(x, rotary, i + shift) @ rotate(y, rotary, j + shift)
    torch.testing.assert_close(product, moved, rtol=1e-9, atol=1e-9)
    back = rotate(rotate(x, rotary, i), rotary, j, inverse=True) @ y
    torch.testing.assert_close(product, back, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(rotate(x, rotary, i)[4:], x[4:], rtol=0, atol=0)
    torch.testing.assert_close(rotate(x, rotary, torch.tensor(0))[:4], x[:4] * factor, rtol=1e-12, atol=0)


def test_rotation_broadcasts_positions() -> None:
    rotary, x = table(8, 4), torch.randn(2, 5, 3, 6, dtype=torch.float64)
    positions = torch.arange(5).expand(2, 5)
    ours = rotate(x, rotary, positions[..., None])
    for i in range(5):
        torch.testing.assert_close(ours[1, i, 2], rotate_one(x[1, i, 2], rotary, i), rtol=1e-12, atol=1e-12)
    half = rotate(x.bfloat16(), rotary, positions[..., None])
    assert half.dtype == torch.float64  # never less than the table or float32
    assert (
        rotate(
            x.bfloat16(), Rotary(rotary.cos.float(), rotary.sin.float(), False, rotary.frequencies), torch.tensor(3)
        ).dtype
        == torch.float32
    )


def test_what_lies_outside_the_table_is_refused() -> None:
    for position in (-1, 8):
        with pytest.raises(InputError, match="outside the rotary table of 8"):
            rotate(torch.zeros(6), table(8, 4), torch.tensor(position))
    with pytest.raises(InputError, match="cannot rotate 4 features"):
        rotate(torch.zeros(3), table(8, 4), torch.tensor(1))
    with pytest.raises(InputError, match="3 query heads cannot share 2"):
        logits(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 2, 4), PositionScheme("none", 1.0))


def test_visible_counts_the_querys_own_key() -> None:
    assert visible(PositionScheme("none", 1.0), 5).sum(-1).tolist() == [1, 2, 3, 4, 5]
    assert visible(PositionScheme("none", 1.0, window=2), 5).sum(-1).tolist() == [1, 2, 2, 2, 2]
    assert bool(visible(PositionScheme("none", 1.0, window=1), 5).diagonal().all())


def test_real_positions_count_real_tokens() -> None:
    mask = torch.tensor([[False, False, True, True], [True, True, True, False], [True, False, True, True]])
    assert real_positions(mask).tolist() == [[0, 0, 0, 1], [0, 1, 2, 2], [0, 0, 1, 2]]


def test_a_rounded_bias_table_is_used_as_it_is() -> None:
    slopes = torch.tensor([0.5])
    exact, rounded = Alibi(slopes), Alibi(slopes, table=torch.tensor([[0.0, 0.5, 1.0, 2.0]]))
    q = k = torch.zeros(1, 4, 1, 2)
    given_exact = logits(q, k, PositionScheme("alibi", 1.0, alibi=exact))
    given_table = logits(q, k, PositionScheme("alibi", 1.0, alibi=rounded))
    assert given_exact[0, 0, 3].diff().tolist() == [0.5, 0.5, 0.5]
    assert given_table[0, 0, 3].diff().tolist() == [0.5, 0.5, 1.0]
    bias = table_logits(PositionScheme("alibi", 1.0, alibi=exact), 3)
    assert bias is not None
    assert bias[0].tolist() == [[0, 0.5, 1], [-0.5, 0, 0.5], [-1, -0.5, 0]]
    assert table_logits(PositionScheme("none", 1.0), 3) is None
