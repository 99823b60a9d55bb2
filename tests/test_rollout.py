"""The dense rollout: published curves, properties, and what wrong input is told."""

from __future__ import annotations

import json
import math
from importlib import resources
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posattn.errors import InputError
from posattn.rollout.dense import Rollout, is_causal, rollout

DATA = Path(__file__).parent / "data"
GOLDEN = json.loads((DATA / "rollout_golden.json").read_text())
PRESETS = json.loads(resources.files("posattn").joinpath("rollout/presets/published_mixing.json").read_text())["models"]


def alibi(slopes: torch.Tensor, n: int) -> torch.Tensor:
    """Head mean of softmax(-m (i-j)) over the causal mask, from the definition."""
    distance = torch.arange(n)[:, None] - torch.arange(n)[None, :]
    scores = (-slopes[:, None, None] * distance).masked_fill(distance < 0, float("-inf"))
    return scores.softmax(-1).mean(0)


def bloom_slopes(heads: int) -> torch.Tensor:
    power = 2 ** (heads.bit_length() - 1)
    base = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    extra = [2 ** (-4 * (h + 1) / power) for h in range(0, 2 * (heads - power), 2)]
    return torch.tensor(base + extra, dtype=torch.float64)


def random_case(seed: int, layers: int, n: int, batch: tuple[int, ...] = (), dtype=torch.float64, causal=True):
    gen = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(*batch, layers, n, n, generator=gen, dtype=torch.float64)
    if causal:
        scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), float("-inf"))
    return torch.rand(*batch, layers, generator=gen, dtype=torch.float64).to(dtype), scores.softmax(-1).to(dtype)


@pytest.mark.parametrize("impl", ["reference", "matmul", "rows", "auto"])
@pytest.mark.parametrize(
    ("model", "rule"), [("mpt-7b", "geometric_slopes"), ("bloom-176b", "geometric_slopes"), ("bloom-176b", "hf_slopes")]
)
def test_golden_residual(model, rule, impl):
    heads, mixing = PRESETS[model]["heads"], PRESETS[model]["mixing"]["fineweb-edu"]
    slopes = bloom_slopes(heads) if rule == "hf_slopes" else 2 ** (-8 * torch.arange(1, heads + 1).double() / heads)
    kernel = alibi(slopes, 256).expand(len(mixing), 256, 256)
    got = rollout(torch.tensor(mixing, dtype=torch.float64), kernel, impl=impl).last
    assert (got - torch.tensor(GOLDEN[model][rule], dtype=torch.float64)).abs().max() < 1e-12


@pytest.mark.parametrize("model", ["mpt-7b", "bloom-176b"])
def test_golden_attention_only(model):
    heads, layers = PRESETS[model]["heads"], PRESETS[model]["layers"]
    kernel = alibi(2 ** (-8 * torch.arange(1, heads + 1).double() / heads), 256).expand(layers, 256, 256)
    got = rollout(1.0, kernel).last
    assert (got - torch.tensor(GOLDEN[model]["attention_only"], dtype=torch.float64)).abs().max() < 1e-12


@given(st.integers(0, 999), st.integers(1, 4), st.integers(1, 9), st.sampled_from([(), (2,), (2, 3)]), st.booleans())
@settings(deadline=None, max_examples=25)
def test_implementations_agree(seed, layers, n, batch, causal):
    mixing, kernels = random_case(seed, layers, n, batch, causal=causal)
    whole = rollout(mixing, kernels, "all", impl="reference").profile
    assert torch.allclose(whole.sum(-1), torch.ones(()).double(), atol=1e-12)
    if causal:
        assert (whole.triu(1) == 0).all()
        assert torch.allclose(
            whole.diagonal(dim1=-2, dim2=-1),
            (1 - mixing[..., None] * (1 - kernels.diagonal(dim1=-2, dim2=-1))).prod(-2),
            atol=1e-12,
        )
    for impl in ("matmul", "rows", "auto"):
        for queries in ("all", "last", [0, -1]):
            got = rollout(mixing, kernels, queries, impl=impl)
            assert torch.allclose(got.profile, whole[..., got.queries, :], atol=1e-12)
            every = rollout(mixing, kernels, queries, impl=impl, depth="every")
            assert every.profile.shape == (*batch, layers, len(got.queries), n)
            for t in range(layers):
                cut = rollout(mixing[..., : t + 1], kernels[..., : t + 1, :, :], queries, impl="reference")
                assert torch.allclose(every.profile[..., t, :, :], cut.profile, atol=1e-12)


def test_zero_mixing_is_identity_and_order_matters():
    mixing, kernels = random_case(1, 3, 6)
    assert torch.equal(rollout(torch.zeros(3).double(), kernels, "all").profile, torch.eye(6).double())
    forward, backward = (rollout(mixing, kernels.flip(f), "all").profile for f in ((), (0,)))
    assert (forward - backward).abs().max() > 1e-3
    explicit = torch.eye(6).double()
    for lam, kernel in zip(mixing, kernels, strict=True):
        explicit = ((1 - lam) * torch.eye(6).double() + lam * kernel) @ explicit
    assert torch.allclose(forward, explicit, atol=1e-14)


def test_leading_dimensions_broadcast():
    _, kernels = random_case(2, 3, 5)
    mixing = torch.rand(4, 3, dtype=torch.float64)
    got = rollout(mixing, kernels).profile
    assert got.shape == (4, 1, 5)
    assert torch.allclose(got[2], rollout(mixing[2], kernels).profile)


@pytest.mark.parametrize("impl", ["matmul", "rows"])
def test_float32_against_float64(impl):
    mixing, kernels = random_case(3, 24, 64)
    exact = rollout(mixing, kernels.float().double()).profile
    got = rollout(mixing, kernels.float(), impl=impl).profile
    assert got.dtype == torch.float32
    assert (got.double() - exact).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_renormalised(dtype):
    mixing, kernels = random_case(4, 24, 64)
    got = rollout(mixing, kernels.to(dtype), "all")
    assert got.provenance["renormalised"]
    assert (got.profile.sum(-1) - 1).abs().max() < 1e-5
    assert (got.profile.double() - rollout(mixing, kernels, "all").profile).abs().max() < 5e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [1, 9, 65, 260])
@pytest.mark.parametrize("impl", ["matmul", "rows", "numba"])
def test_half_precision_is_read_as_it_is_with_float32_sums(impl, n, dtype):
    if impl == "numba":
        pytest.importorskip("numba")
    mixing, kernels = random_case(6, 4, n)
    half = kernels.to(dtype)
    exact = half.double() / half.double().sum(-1, keepdim=True)
    for queries in ("last", [n // 2, 0], "all"):
        for depth in ("final", "every"):
            got = rollout(mixing, half, queries, impl=impl, depth=depth)
            assert got.profile.dtype == torch.float32
            assert got.provenance["renormalised"]
            want = rollout(mixing, exact, queries, impl="reference", depth=depth).profile
            assert (got.profile.double() - want).abs().max() < 1e-6


@pytest.mark.parametrize("impl", ["matmul", "rows"])
def test_gradients_of_half_precision_are_those_of_the_renormalised_kernels(impl):
    mixing, kernels = random_case(7, 3, 70)
    weight = torch.rand(70, dtype=torch.float64)
    half, lam = kernels.bfloat16().requires_grad_(), mixing.float().requires_grad_()
    (rollout(lam, half, impl=impl, validate=False, causal=True).profile * weight).sum().backward()
    wide, exact = half.detach().double().requires_grad_(), mixing.clone().requires_grad_()
    rows = wide / wide.sum(-1, keepdim=True)
    (rollout(exact, rows, impl="reference", validate=False, causal=True).profile * weight).sum().backward()
    for got, want, share in ((half.grad.tril(), wide.grad.tril(), 2**-7), (lam.grad, exact.grad, 1e-5)):
        assert (got.double() - want).abs().max() <= share * want.abs().max()  # bfloat16 gradients are rounded


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 130])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_any_weight_above_the_diagonal_is_seen(n, dtype):
    below = torch.rand(2, 3, n, n).tril().to(dtype)
    assert is_causal(below)
    spots = [(r, c) for r in (0, 1, 62, 63, 64, 127) for c in (1, 63, 64, 65, 128, 129) if r < c < n]
    for r, c in spots:
        for value in (1e-30, -1e-30, math.nan, math.inf):
            one = below.clone()
            one[1, 2, r, c] = value
            assert not is_causal(one), (r, c, value)
    assert bool(spots) == (n > 1)


@pytest.mark.parametrize("impl", ["matmul", "rows"])
def test_gradients_flow(impl):
    mixing, kernels = random_case(5, 3, 4)
    mixing.requires_grad_(), kernels.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda m, k: rollout(m, k.tril(), impl=impl, validate=False, causal=True).profile, (mixing, kernels)
    )


def test_result_table_plot_and_file(tmp_path):
    import matplotlib

    matplotlib.use("Agg")
    mixing, kernels = random_case(6, 3, 5)
    result = rollout(mixing, kernels, [1, 4], depth="every")
    table = result.to_dataframe()
    assert len(table) == 3 * 2 * 5
    assert table.query("depth == 2 and query == 4 and position == 3").value.item() == float(result.profile[1, 1, 3])
    assert result.plot() is not None
    back = Rollout.load(result.save(tmp_path / "r.safetensors"))
    assert torch.equal(back.profile, result.profile)
    assert torch.equal(back.last, result.last)
    with pytest.raises(InputError, match="last position"):
        _ = rollout(mixing, kernels, [0]).last


def _broken(value):
    mixing, kernels = random_case(7, 3, 4)
    kernels[1, 2, 0] = value
    return mixing, kernels


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, k: rollout(m + 1, k), r"layer 0.*\[0, 1\]"),
        (lambda m, k: rollout([0.5, float("nan"), 0.5], k), "layer 1 is nan"),
        (lambda m, k: rollout(m[:2], k), "mixing has 2 layers, the kernels have 3"),
        (lambda m, k: rollout(m, k[..., :3]), r"\[\.\.\., T, N, N\]"),
        (lambda m, k: rollout(m, k, impl="fast"), "unknown impl"),
        (lambda m, k: rollout(m, k, depth="all"), "depth"),
        (lambda m, k: rollout(m, k, "first"), "queries"),
        (lambda m, k: rollout(m, k, [4]), "position 4 is outside the 4"),
        (lambda m, k: rollout(m, k, []), "queries"),
        (lambda m, k: rollout(*_broken(float("nan"))), "layer 1 holds NaN"),
        (lambda m, k: rollout(*_broken(0.9)), "row 2 of the kernel of layer 1 sums"),
        (lambda m, k: rollout(m.expand(2, 3), k.expand(3, 3, 4, 4)), "do not fit"),
        (lambda m, k: rollout(m, k, impl="structured"), "structured kernels"),
        (lambda m, k: rollout(m, k, length=9), "length=9"),
        (lambda m, k: rollout("abc", k), "mixing"),
    ],
)
def test_wrong_use(call, message):
    mixing, kernels = random_case(7, 3, 4)
    with pytest.raises(InputError, match=message) as caught:
        call(mixing, kernels)
    assert "\n" not in str(caught.value)
