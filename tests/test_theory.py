"""The structural theory: forces, depth, collapse, bounds, monotonicity."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from posattn.errors import InputError
from posattn.results import Result
from posattn.rollout.dense import rollout
from posattn.rollout.kernels import alibi_kernel, uniform_kernel
from posattn.rollout.simulate import Architecture, PowerLaw, simulate
from posattn.rollout.theory import (
    FORCES,
    attention_only_bounds,
    collapse,
    depth_theory,
    fit_schedule,
    force_shares,
    monotonicity,
    quantities,
    without,
)

# ---- forces ---------------------------------------------------------------------------------------------------------


def random_architecture(seed, layers, heads, sign):
    gen = torch.Generator().manual_seed(seed)
    return Architecture(
        layers=layers,
        heads=heads,
        mixing=0.05 + 0.9 * torch.rand(layers, generator=gen, dtype=torch.float64),
        position="alibi",
        slopes=0.01 + torch.rand(heads, generator=gen, dtype=torch.float64),
        diagonal=sign * (0.1 + 2 * torch.rand(heads, generator=gen, dtype=torch.float64)),
    )


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 3), st.sampled_from([-1, 1]), st.integers(9, 24))
@settings(deadline=None, max_examples=8)
def test_shares_add_up_and_have_the_proved_signs(seed, layers, heads, sign, n):
    architecture = random_architecture(seed, layers, heads, sign)
    found = force_shares(architecture, n)
    assert (found.shares.sum(0) - (found.total - found.baseline)).abs().max() < 1e-14
    assert torch.allclose(found.profiles[0], torch.full((n,), 1 / n, dtype=torch.float64))
    assert torch.allclose(found.profiles[15], simulate(architecture, n).last, atol=1e-13)
    small = 1e-12
    assert found.share("causal", "primacy") > -small
    assert found.share("causal", "mean_position") < small
    assert found.share("residual", "recency") > -small
    assert found.share("residual", "mean_position") > -small
    # with the mask; without one, influence that spreads from the end is thin at both ends
    for index in range(16):
        if index & 1 and not index & 4:
            assert float(found.values[index | 4, 2] - found.values[index, 2]) > -small
    assert found.share("position", "mean_position") > -small
    assert sign * found.share("content", "mean_position") > -small


@pytest.mark.parametrize("force", FORCES)
def test_a_force_that_is_off_gets_nothing(force):
    architecture = Architecture(3, 2, 0.4, position="alibi", slopes=[0.5, 0.1], diagonal=1.0)
    found = force_shares(without(architecture, force), 20)
    assert (found.shares[FORCES.index(force)] == 0).all()
    assert (found.shares.abs().sum(1) > 1e-4).sum() == 3


def test_shapley_by_its_definition_over_orders():
    import itertools

    architecture = Architecture(2, 2, 0.3, position="alibi", slopes=[0.5, 0.1], diagonal=-0.5)
    found = force_shares(architecture, 12)
    value = {}
    for size in range(5):
        for on in itertools.combinations(FORCES, size):
            kept = without(architecture, *(set(FORCES) - set(on)))
            value[frozenset(on)] = quantities(simulate(kept, 12, impl="structured").last)
    shares = torch.zeros(4, 3, dtype=torch.float64)
    for order in itertools.permutations(FORCES):
        for k, force in enumerate(order):
            shares[FORCES.index(force)] += value[frozenset(order[: k + 1])] - value[frozenset(order[:k])]
    assert (found.shares - shares / 24).abs().max() < 1e-12


def test_path_and_quantities():
    architecture = Architecture(2, 1, 0.3, position="alibi", slopes=[0.5])
    found = force_shares(architecture, 16, order=("residual", "causal", "content", "position"))
    assert found.path.shape == (5, 16)
    assert torch.equal(found.path[0], found.profiles[0])
    assert torch.equal(found.path[1], found.profiles[2])
    assert torch.equal(found.path[4], found.profiles[15])
    got = quantities(torch.eye(12, dtype=torch.float64))
    assert got[1].tolist() == pytest.approx([1 / 11, 0.5, 0])  # an eighth of 12 positions is one and a half
    assert got[11].tolist() == pytest.approx([1, 0, 1])
    with pytest.raises(InputError, match="four forces"):
        force_shares(architecture, 8, order=("causal",))
    with pytest.raises(InputError, match="unknown force"):
        without(architecture, "gravity")


# ---- depth ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("exponent", "says"), [(0.0, "λ_t ≈ 0.5 at every depth"), (1e-5, "λ_t ≈ 0.5 at every depth"), (0.8, "0.5·t^−0.8")]
)
def test_a_schedule_that_does_not_fall_has_no_power_in_its_formula(exponent, says):
    theory = depth_theory(Architecture(6, 1, PowerLaw(0.5, exponent)), 8)
    assert says in theory.implication
    assert "^-" not in theory.implication
    assert theory.fit is not None
    rising = dataclasses.replace(theory.fit, exponent=-0.2)
    assert rising.law.endswith("t^0.2")


@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 8))
@settings(deadline=None, max_examples=20)
def test_depth_theory_of_any_kernel(seed, layers, n):
    gen = torch.Generator().manual_seed(seed)
    scores = 2 * torch.randn(layers, n, n, generator=gen, dtype=torch.float64)
    kernels = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -math.inf).softmax(-1)
    mixing = torch.rand(layers, generator=gen, dtype=torch.float64)
    found = depth_theory((mixing, kernels))
    every = rollout(mixing, kernels, "all", depth="every", impl="reference").profile
    assert torch.allclose(found.profiles, every[:, -1], atol=1e-12)
    assert torch.allclose(found.diagonal, every.diagonal(dim1=-2, dim2=-1), atol=1e-12)
    assert torch.allclose(found.off_first, (1 - every[:, :, 0]).amax(-1), atol=1e-12)
    assert (found.off_first <= found.bound + 1e-12).all()
    assert torch.allclose(found.mixing_sum[-1], mixing.sum())


def test_dense_and_structured_depth_agree():
    kernel = alibi_kernel([0.3, 0.05], diagonal=[[0.2, 1.0], [0.0, -1.0], [0.5, 0.5]])
    mixing = torch.tensor([0.5, 0.2, 0.9], dtype=torch.float64)
    structured, dense = depth_theory((mixing, kernel), 40), depth_theory((mixing, kernel.dense(40)))
    for name in ("profiles", "log_diagonal", "off_first", "bound", "least_first"):
        assert torch.allclose(getattr(structured, name), getattr(dense, name), atol=1e-12)
    assert structured.implication == dense.implication


def test_square_summable_schedule_keeps_every_diagonal():
    """λ_t = c/t²: the diagonals stay above a positive limit at any depth, which is computed beforehand."""
    c, n = 0.9, 12
    shallow = depth_theory(Architecture(8, 1, PowerLaw(c, 2)), n)
    assert shallow.fit.exponent == pytest.approx(2)
    assert shallow.fit.total == pytest.approx(c * math.pi**2 / 6)
    assert shallow.diagonal_limit > 0.05
    deep = depth_theory(Architecture(2000, 1, PowerLaw(c, 2)), n)
    assert (deep.diagonal >= shallow.diagonal_limit).all()
    assert float(deep.diagonal.min()) == pytest.approx(shallow.diagonal_limit, rel=2e-3)
    assert "no depth collapses" in shallow.implication
    found = collapse(Architecture(8, 1, PowerLaw(c, 2)), n, max_depth=500)
    assert found.depth is None
    assert found.predicted_depth is None
    assert 0 < found.floor <= float(found.off_first[-1])
    assert found.reason.startswith("never")


def test_harmonic_schedule_collapses_at_the_predicted_rate():
    """λ_t = c/t: what is left falls as T^(-c g), g the gap; its depth is predicted from there."""
    c, n = 1.0, 6
    system = Architecture(20, 1, PowerLaw(c, 1))
    found = collapse(system, n, eta=1e-9, max_depth=4000)
    gap = 1 - 1 / 2  # uniform causal rows: A_22 = 1/2
    assert found.gap == pytest.approx(gap)
    rates = [math.log(found.off_first[d // 2 - 1] / found.off_first[d - 1]) / math.log(2) for d in (400, 4000)]
    assert rates[0] < rates[1] < c * gap  # faster modes die out first: the rate is approached from one side
    assert rates[1] == pytest.approx(c * gap, rel=0.12)
    # two positions have one mode, so that rate and depth are exact from the start
    near = collapse(system, 2, eta=0.025, max_depth=4000)
    assert near.depth == pytest.approx(1 / (math.pi * 0.025**2), rel=0.01)  # Π(1 - 1/2t) → (πT)^-1/2
    early = collapse(system, 2, eta=0.025, max_depth=near.depth // 4)
    assert early.depth is None
    assert early.predicted_depth == pytest.approx(near.depth, rel=0.01)
    bound = 1.0
    for t in range(1, 4001):
        bound *= 1 - min(1, c / t) / n
    assert float(found.off_first[-1]) <= bound
    assert "first token" in depth_theory(system, n).implication
    assert "ε" in depth_theory(system, n).condition


def test_identity_never_collapses_and_says_why():
    identity = torch.eye(5, dtype=torch.float64).expand(4, 5, 5)
    found = collapse((PowerLaw(1.0, 1).values(4), identity), max_depth=200)
    assert found.depth is None
    assert found.predicted_depth is None
    assert found.floor == 1
    assert "A = I" in found.reason
    theory = depth_theory((PowerLaw(1.0, 1).values(4), identity))
    assert "nothing collapses" in theory.implication
    assert "A_ii = 1" in theory.implication
    assert "A_ii stays 1" in theory.condition


def test_collapse_depth_is_where_the_profile_says():
    system = Architecture(6, 2, 0.5, position="alibi", slopes=[0.5, 0.1])
    for schedule in ("last", "repeat", "fit"):
        found = collapse(system, 10, eta=0.05, schedule=schedule)
        depth = found.depth
        cut = [Architecture(d, 2, 0.5, position="alibi", slopes=[0.5, 0.1]) for d in (depth - 1, depth)]
        first = [float(simulate(architecture, 10).last[0]) for architecture in cut]
        assert first[0] < 0.95 <= first[1]
        assert found.bound_depth is None or found.bound_depth >= depth
    windowed = collapse(Architecture(6, 1, 0.5, window=3), 10, eta=0.05)
    assert windowed.depth is not None
    assert windowed.bound_depth is None
    nothing = collapse(Architecture(3, 1, 0.0), 5)
    assert nothing.reason == "never: λ is 0"
    assert collapse(Architecture(3, 1, 0.5, mask="full"), 5).reason.startswith("never guaranteed")
    for call in (lambda: collapse(system, 10, eta=1.0), lambda: collapse(system, 10, schedule="linear")):
        with pytest.raises(InputError):
            call()


def test_fit_schedule():
    fit = fit_schedule(PowerLaw(0.7, 1.5).values(30))
    assert (fit.c, fit.exponent, fit.error) == pytest.approx((0.7, 1.5, 0), abs=1e-9)
    total = float(PowerLaw(0.7, 1.5).values(400_000).sum()) + 0.7 * 2 / math.sqrt(400_000)
    assert fit.total == pytest.approx(total, rel=1e-6)
    assert fit_schedule([0.5] * 6).total is None
    assert fit_schedule([0.5] * 6).exponent == 0
    with pytest.raises(InputError, match="two layers"):
        fit_schedule([0.5])


# ---- attention alone ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "mask"),
    [
        (uniform_kernel(), "causal"),
        (alibi_kernel([0.3]), "causal"),
        (alibi_kernel([0.3, 0.01], diagonal=[1.0, -2.0]), "causal"),
        (uniform_kernel(window=4), "window"),
        (alibi_kernel([0.5], window=2), "window"),
        (uniform_kernel(prefix=3), "prefix"),
        (alibi_kernel([0.2], prefix=5), "prefix"),
        (uniform_kernel(full=True), "full"),
        (uniform_kernel(window=1), "window"),
    ],
)
def test_attention_only_bounds_hold(kernel, mask):
    n, depth = 11, 40
    found = attention_only_bounds(kernel, n, depth)
    assert found.mask == mask
    power = torch.eye(n, dtype=torch.float64)
    exact = kernel.dense(n)
    for t in range(depth):
        power = exact @ power
        assert float(found.outside[t]) == pytest.approx(float((1 - power[:, : found.target].sum(-1)).max()), abs=1e-12)
        assert torch.allclose(found.last_row[t], power[-1], atol=1e-12)
    assert (found.outside <= found.bound + 1e-12).all()
    if mask in ("causal", "prefix"):
        assert float(found.bound[-1]) < 0.9
        assert float(found.outside[-1]) < 0.1
    if found.lower is not None:
        assert (found.lower <= found.last_row * (1 + 1e-9)).all()
        assert (found.last_row <= found.upper * (1 + 1e-9)).all()
        assert (found.lower > 0).all()


def test_decay_bounds_are_tight_without_a_mask_edge():
    """For one step they are A's own extremes."""
    found = attention_only_bounds(alibi_kernel([0.4]), 9, 1)
    row = alibi_kernel([0.4]).dense(9)[-1]
    assert (found.lower[0] <= row * (1 + 1e-12)).all()
    assert float(found.lower[0, 0]) == pytest.approx(float(row[0]))
    assert attention_only_bounds(alibi_kernel([0.4], window=3), 9, 1).lower is None


# ---- monotonicity ---------------------------------------------------------------------------------------------------


def brute(kernel):
    sums = kernel.cumsum(-1)
    n = len(kernel)
    found = [(float(sums[k, j] - sums[i, j]), i, k, j) for i in range(n) for k in range(i + 1, n) for j in range(n)]
    return max(found, default=(0.0, 0, 0, 0))


@given(st.integers(0, 10**6), st.integers(1, 9))
@settings(deadline=None, max_examples=30)
def test_worst_violation_by_brute_force(seed, n):
    gen = torch.Generator().manual_seed(seed)
    kernels = torch.randn(2, n, n, generator=gen, dtype=torch.float64).softmax(-1)
    found = monotonicity(kernels)
    for index in range(2):
        worst, *_ = brute(kernels[index])
        assert float(found.violation[index]) == pytest.approx(max(worst, 0), abs=1e-12)
        if worst > 0:
            i, k, j = int(found.earlier[index]), int(found.later[index]), int(found.cut[index])
            assert i < k
            sums = kernels[index].cumsum(-1)
            assert float(sums[k, j] - sums[i, j]) == pytest.approx(worst)


def test_monotonicity_across_blocks_of_rows():
    kernel = torch.eye(600, dtype=torch.float64)
    kernel[580] = 0
    kernel[580, 3] = 1.0
    found = monotonicity(kernel)
    assert float(found.violation) == 1
    assert int(found.later) == 580
    assert 3 < int(found.earlier) < 580
    assert not found.holds()


def test_structured_monotonicity_and_heads():
    kernel = alibi_kernel([[0.3, 0.01], [2.0, 0.5]], diagonal=[1.0, -1.0])
    found = monotonicity(kernel, 40, per_head=True)
    assert found.violation.shape == (2,)
    assert found.head_violation.shape == (2, 2)
    assert bool(found.holds().all())
    # a favourite distance of 3 makes row 3 look at the first position, which row 2 cannot reach
    from posattn.rollout.kernels import distance_kernel

    rising = distance_kernel(5.0 * (torch.arange(30) == 3).double())
    dense, structured = monotonicity(rising.dense(30)), monotonicity(rising, 30)
    assert float(structured.violation) > 0.1
    assert float(dense.violation) == pytest.approx(float(structured.violation))
    assert (int(dense.earlier), int(dense.cut)) == (int(structured.earlier), int(structured.cut))
    heads = torch.stack([rising.dense(30), uniform_kernel().dense(30)])
    both = monotonicity(heads, per_head=True)
    assert float(both.violation) < float(both.head_violation[0])
    assert float(both.head_violation[1]) < 1e-12
    with pytest.raises(InputError, match="length=N"):
        monotonicity(rising)


# ---- results --------------------------------------------------------------------------------------------------------


def test_every_result_has_a_table_a_figure_and_a_file(tmp_path):
    import matplotlib.pyplot as plt

    architecture = Architecture(4, 2, 0.4, position="alibi", slopes=[0.5, 0.1], diagonal=1.0)
    found = [
        force_shares(architecture, 12),
        depth_theory(architecture, 12),
        collapse(architecture, 12),
        attention_only_bounds(uniform_kernel(), 12, 5),
        monotonicity(architecture.kernels(), 12, per_head=True),
    ]
    for index, result in enumerate(found):
        assert len(result.to_dataframe()) > 0
        result.plot()
        back = Result.load(result.save(tmp_path / f"{index}.safetensors"))
        assert type(back) is type(result)
        assert back.to_dataframe().equals(result.to_dataframe())
    found[0].plot_shares()
    assert len(fit_schedule([0.5, 0.3]).to_dataframe()) == 1
    plt.close("all")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: depth_theory(3), "Architecture"),
        (lambda: depth_theory("mpt-7b"), "length"),
        (lambda: depth_theory("mpt-8b", 8), "unknown preset"),
        (lambda: depth_theory(([0.5] * 2, torch.eye(3).expand(3, 3, 3))), "2 layers"),
        (lambda: depth_theory(([0.5] * 2, torch.ones(2, 3, 3))), "sums to 3"),
        (lambda: attention_only_bounds(uniform_kernel(window=2, prefix=3), 8), "no bound"),
        (lambda: attention_only_bounds(uniform_kernel(), 8, 0), "depth"),
        (lambda: monotonicity(torch.ones(3, 3)), "sums to 3"),
    ],
)
def test_wrong_use(call, message):
    with pytest.raises(InputError, match=message):
        call()
