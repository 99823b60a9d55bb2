"""Structured kernels against their definition: every mask, position and content, at the extremes of each parameter."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posattn.errors import InputError
from posattn.rollout.dense import rollout
from posattn.rollout.kernels import Applied, alibi_kernel, distance_kernel, uniform_kernel

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def definition(n, *, slopes=None, scores=None, ahead=None, beta=None, weights=None, window=None, prefix=0, full=False):
    """Softmax of each head over what its mask shows, then the weighted mean; one kernel, no batch."""
    lag = torch.arange(n)[:, None] - torch.arange(n)[None, :]
    block = n if full else min(prefix, n)
    inside = torch.arange(n) < block
    seen = (lag >= 0) | (inside[:, None] & inside[None, :])
    if window is not None:
        seen &= lag.abs() < window
    if slopes is not None:
        logits = -slopes[:, None, None] * lag.abs()
    else:
        back = scores[:, lag.abs().clamp(max=scores.shape[-1] - 1)]
        front = back if ahead is None else ahead[:, lag.abs().clamp(max=ahead.shape[-1] - 1)]
        logits = torch.where(lag >= 0, back, front)
    if beta is not None:
        logits = logits + beta[:, None, None] * torch.eye(n, dtype=torch.float64)
    heads = logits.masked_fill(~seen, -math.inf).softmax(-1)
    return heads.mean(0) if weights is None else (weights[:, None, None] * heads).sum(0)


def check(kernel, exact, seed=0):
    n = exact.shape[-1]
    gen = torch.Generator().manual_seed(seed)
    p = torch.rand(3, n, generator=gen, dtype=torch.float64)
    p = p / p.sum(-1, keepdim=True)
    x = 2 * torch.rand(n, 2, generator=gen, dtype=torch.float64) - 1
    for dtype, tolerance in TOLERANCE.items():
        ready = kernel.at(n, dtype)
        assert (ready.left(p.to(dtype)).double() - p @ exact).abs().max() < tolerance
        assert (ready.right(x.to(dtype)).double() - exact @ x).abs().max() < tolerance
        assert ready.left(p.to(dtype)).dtype == dtype
    assert (kernel.dense(n) - exact).abs().max() < 1e-12
    assert (kernel.at(n).diagonal() - exact.diagonal()).abs().max() < 1e-12
    rows, columns = torch.randint(n, (2, 5), generator=gen)
    assert (kernel.at(n).entries(rows, columns) - exact[rows, columns]).abs().max() < 1e-12


@st.composite
def cases(draw, lengths=(1, 2, 3, 31, 32, 33, 70, 130)):
    n, heads = draw(st.sampled_from(lengths)), draw(st.sampled_from([1, 2, 5]))
    gen = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    options: dict = {"window": draw(st.none() | st.integers(1, n))}
    shape = draw(st.sampled_from(["causal", "prefix", "full"]))
    if shape == "prefix":
        options["prefix"] = draw(st.integers(0, n + 2))
    options["full"] = shape == "full"
    beta = draw(st.none() | st.floats(-200, 200))
    if beta is not None:
        options["diagonal"] = beta + torch.randn(heads, generator=gen, dtype=torch.float64)
        options["diagonal"] = options["diagonal"].clamp(-200, 200)
    if draw(st.booleans()):
        weights = torch.rand(heads, generator=gen, dtype=torch.float64)
        options["weights"] = weights / weights.sum()
    kind = draw(st.sampled_from(["alibi", "distance", "ahead"]))
    if kind == "alibi":
        top = draw(st.sampled_from([0.0, 1e-9, 0.01, 1.0, 50.0]))
        position = {"slopes": top * torch.rand(heads, generator=gen, dtype=torch.float64)}
    else:
        size = draw(st.sampled_from([0.0, 1.0, 60.0]))
        position = {"scores": size * torch.randn(heads, n, generator=gen, dtype=torch.float64)}
        if kind == "ahead":
            position["ahead"] = size * torch.randn(heads, n, generator=gen, dtype=torch.float64)
    return n, position, options


def build(position, options):
    if "slopes" in position:
        return alibi_kernel(position["slopes"], **options)
    return distance_kernel(position["scores"], position.get("ahead"), **options)


def named(options):
    return {("beta" if key == "diagonal" else key): value for key, value in options.items()}


@given(cases())
@settings(deadline=None, max_examples=60)
def test_structured_equals_definition(case):
    n, position, options = case
    check(build(position, options), definition(n, **position, **named(options)))


@pytest.mark.parametrize("slope", [0.0, 2**-8, 50.0])
@pytest.mark.parametrize("beta", [-200.0, 0.0, 200.0])
@pytest.mark.parametrize("window", [None, 1, 2, 64, 699, 700])
def test_extremes(slope, beta, window):
    n, slopes, content = 700, torch.tensor([slope, 0.5]).double(), torch.tensor([beta, 1.0]).double()
    exact = definition(n, slopes=slopes, beta=content, window=window)
    assert exact[0, 0] == 1
    check(alibi_kernel(slopes, diagonal=content, window=window), exact)


@pytest.mark.slow
@pytest.mark.parametrize(("window", "content"), [(None, 200.0), (37, -200.0), (1500, None)])
def test_many_heads_long(window, content):
    heads, n = 112, 2048
    gen = torch.Generator().manual_seed(0)
    slopes = 50 * torch.rand(heads, generator=gen, dtype=torch.float64) ** 4
    beta = None if content is None else torch.linspace(-abs(content), content, heads, dtype=torch.float64)
    exact = torch.zeros(n, n, dtype=torch.float64)
    for h in range(heads):
        one = None if beta is None else beta[h : h + 1]
        exact += definition(n, slopes=slopes[h : h + 1], beta=one, window=window) / heads
    kernel = alibi_kernel(slopes, diagonal=beta, window=window)
    x = torch.rand(n, generator=gen, dtype=torch.float64)
    mixing = torch.tensor([0.0, 1.0, 0.3, 0.7, 1.0], dtype=torch.float64)
    dense = rollout(mixing, exact.expand(5, n, n), validate=False, causal=True).last
    for dtype, tolerance in TOLERANCE.items():
        assert (kernel.right(x.to(dtype)).double() - exact @ x).abs().max() < tolerance
        scans = rollout(mixing, kernel, length=n, impl="structured", dtype=dtype).last
        assert (dense - scans.double()).abs().max() < tolerance


@pytest.mark.parametrize("trend", [-3.0, 0.0, 0.05, 3.0])
@pytest.mark.parametrize("window", [None, 300])
def test_distance_scores_of_any_trend(trend, window):
    """Rising scores give row sums over hundreds of orders of magnitude, which one FFT cannot hold."""
    n = 600
    gen = torch.Generator().manual_seed(5)
    scores = trend * torch.arange(n).double() + torch.randn(2, n, generator=gen, dtype=torch.float64)
    check(distance_kernel(scores, window=window), definition(n, scores=scores, window=window))
    check(distance_kernel(scores, full=True), definition(n, scores=scores, full=True))


def test_hidden_distances():
    """A dilated mask: every second distance is hidden."""
    scores = torch.zeros(1, 90).double()
    scores[:, 1::2] = -math.inf
    check(distance_kernel(scores), definition(90, scores=scores))


@pytest.mark.parametrize("window", [None, 7])
def test_batches_of_layers_and_settings(window):
    n, gen = 40, torch.Generator().manual_seed(1)
    slopes = torch.rand(2, 1, 3, generator=gen, dtype=torch.float64)
    beta = torch.randn(4, 3, generator=gen, dtype=torch.float64)
    kernel = alibi_kernel(slopes, diagonal=beta, window=window)
    assert kernel.batch_shape == (2, 4)
    p = torch.rand(2, 4, 5, n, generator=gen, dtype=torch.float64)
    left = kernel.left(p)
    for s in range(2):
        for t in range(4):
            exact = definition(n, slopes=slopes[s, 0], beta=beta[t], window=window)
            assert (left[s, t] - p[s, t] @ exact).abs().max() < 1e-12
    mixing = torch.rand(2, 4, generator=gen, dtype=torch.float64)
    dense = rollout(mixing, kernel.dense(n), "all", depth="every", impl="reference").profile
    for impl in ("structured", "auto"):
        got = rollout(mixing, kernel, [3, 39], length=n, impl=impl, depth="every")
        assert (got.profile - dense[..., [3, 39], :]).abs().max() < 1e-12
        assert (got.depths == torch.arange(1, 5)).all()


def test_long_sequences_converge_to_shared_tiles():
    """Beyond 45/m positions all rows look alike and heads are merged: the seam must not show."""
    n, slopes = 5000, torch.tensor([1.0, 0.05]).double()
    kernel = alibi_kernel(slopes)
    p = torch.rand(n, generator=torch.Generator().manual_seed(2), dtype=torch.float64) / n
    assert kernel.at(n)._low.saturated < n
    out, back = kernel.left(p), kernel.right(p)
    exact_left = torch.zeros(n, dtype=torch.float64)
    exact_right = torch.zeros(n, dtype=torch.float64)
    for i in range(n):
        row = torch.zeros(i + 1, dtype=torch.float64)
        for m in slopes:
            row += torch.softmax(-m * (i - torch.arange(i + 1)), 0) / 2
        exact_left[: i + 1] += p[i] * row
        exact_right[i] = row @ p[: i + 1]
    assert (out - exact_left).abs().max() < 1e-15
    assert (back - exact_right).abs().max() < 1e-15


def test_gradients_reach_slopes_content_and_mixing():
    n = 12
    slopes = torch.tensor([0.3, 1.0], dtype=torch.float64, requires_grad=True)
    beta = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)
    mixing = torch.tensor([0.2, 0.7], dtype=torch.float64, requires_grad=True)

    def last(m, b, lam):
        kernel = alibi_kernel(m, diagonal=b)
        return rollout(lam, kernel, length=n, impl="structured").last

    assert torch.autograd.gradcheck(last, (slopes, beta, mixing))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: uniform_kernel(window=0), "window of 0"),
        (lambda: uniform_kernel(prefix=-1), "prefix"),
        (lambda: alibi_kernel([0.5, -0.1]), "not negative"),
        (lambda: alibi_kernel([0.5, float("nan")]), "NaN"),
        (lambda: alibi_kernel([0.5, 0.1], heads=3), "2 slopes for 3 heads"),
        (lambda: alibi_kernel([0.5, 0.1], diagonal=[1.0, 2.0, 3.0]), "3 values for 2 heads"),
        (lambda: alibi_kernel([0.5, 0.1], weights=[0.5, 0.6]), "sum to 1"),
        (lambda: alibi_kernel([0.5], diagonal=float("inf")), "finite"),
        (lambda: alibi_kernel("steep"), "slopes cannot be read"),
        (lambda: distance_kernel([float("-inf"), 0.0]), "distance 0"),
        (lambda: distance_kernel([0.0, 1.0]).left(torch.ones(3).double() / 3), "length 3 needs 3"),
        (lambda: uniform_kernel().at(4).left(torch.ones(3).double()), "3 positions"),
        (lambda: uniform_kernel().at(0), "at least 1"),
        (lambda: rollout([0.5], uniform_kernel()), "length"),
        (lambda: rollout([0.5], uniform_kernel(), length=4, impl="matmul"), "dense kernels"),
        (lambda: rollout([0.5] * 2, [uniform_kernel()] * 3, length=4), "2 layers"),
        (lambda: rollout([1.5] * 2, uniform_kernel(), length=4), r"\[0, 1\]"),
    ],
)
def test_wrong_use(call, message):
    with pytest.raises(InputError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_applied_is_public():
    assert isinstance(uniform_kernel().at(3), Applied)
