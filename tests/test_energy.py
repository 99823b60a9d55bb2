"""The energy rollout: the recursion itself, its two exact limits, and the variants around it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posattn.errors import InputError
from posattn.rollout.dense import rollout
from posattn.rollout.energy import EnergyRollout, coherent_energy_rollout, energy_rollout
from posattn.rollout.variants import (
    VARIANTS,
    apply_sink,
    area,
    best_curve,
    calibrate,
    find_sinks,
    predict,
    scaled_mixing,
    sink_warning,
)


def attention(layers: int, n: int, seed: int = 0, sharp: float = 1.0) -> torch.Tensor:
    """Random causal kernels [T,N,N] with rows that sum to 1."""
    scores = sharp * torch.randn(layers, n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return scores.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -torch.inf).softmax(-1)


@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 99), st.booleans(), st.booleans())
def test_recursion_equals_matrix_product(layers: int, n: int, seed: int, with_mlp: bool, parallel: bool) -> None:
    kernels = 3 * attention(layers, n, seed) ** 2
    mlp = 5 * torch.rand(layers, n, dtype=torch.float64) if with_mlp else None
    found = energy_rollout(kernels, "all", mlp=mlp, parallel=parallel)
    product = torch.eye(n, dtype=torch.float64)
    for t in range(layers):  # the first layer is rightmost
        gain = torch.ones(n, dtype=torch.float64) if mlp is None else mlp[t]
        stays = torch.eye(n, dtype=torch.float64)
        product = (gain.diag() + kernels[t] if parallel else gain.diag() @ (stays + kernels[t])) @ product
    torch.testing.assert_close(found.profile * found.log_scale.exp()[:, None], product.sqrt())
    torch.testing.assert_close(found.profile.sum(-1), torch.ones(n, dtype=torch.float64))
    torch.testing.assert_close(energy_rollout(kernels, mlp=mlp, parallel=parallel).last, found.last)


def test_no_attention_leaves_everything_at_the_query() -> None:
    found = energy_rollout(torch.zeros(3, 5, 5), 2)
    assert found.profile.tolist() == [[0, 0, 1, 0, 0]]
    assert found.log_scale is not None
    assert float(found.log_scale) == 0


def test_batch_equals_loop_and_scale_multiplies() -> None:
    kernels = torch.stack([attention(3, 5, seed) for seed in range(2)])
    together = energy_rollout(kernels).profile
    for b in range(2):
        torch.testing.assert_close(together[b], energy_rollout(kernels[b]).profile)
    factors = torch.tensor([0.5, 2.0, 3.0])
    scaled = energy_rollout(kernels, scale=factors).profile
    torch.testing.assert_close(scaled, energy_rollout(kernels * factors[:, None, None]).profile)


def test_deep_and_large_gains_do_not_overflow() -> None:
    found = energy_rollout(1e6 * attention(400, 4))
    assert bool(found.profile.isfinite().all())
    assert float(found.log_scale) > 700  # exp of it would overflow


def test_saves_and_loads(tmp_path) -> None:
    found = energy_rollout(attention(2, 4))
    again = EnergyRollout.load(found.save(tmp_path / "energy.safetensors"))
    torch.testing.assert_close(again.profile, found.profile)
    torch.testing.assert_close(again.log_scale, found.log_scale)
    assert len(found.to_dataframe()) == 4


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda k: k.index_fill(-1, torch.tensor([0]), torch.nan), "layer 0 holds NaN"),
        (lambda k: -k, "negative"),
        (lambda k: k.mT, "above the diagonal"),
    ],
)
def test_refuses_what_is_no_gain(spoil, message: str) -> None:
    with pytest.raises(InputError, match=message):
        energy_rollout(spoil(attention(2, 4)))


def test_refuses_shapes_that_do_not_fit() -> None:
    with pytest.raises(InputError, match="mlp gains"):
        energy_rollout(attention(2, 4), mlp=torch.ones(2, 3))
    with pytest.raises(InputError, match="parallel has 1"):
        energy_rollout(attention(2, 4), parallel=[True])
    with pytest.raises(InputError, match=r"must be \[..., T, N, N\]"):
        energy_rollout(torch.ones(2, 3, 4))


# ---- the two limits -------------------------------------------------------------------------------------------------


def gradient_norms(jacobians: torch.Tensor, cotangent: torch.Tensor) -> torch.Tensor:
    """‖∂⟨g, x_N⟩/∂x_j‖ [N] by autograd for x_i ← x_i + Σ_j J_ij x_j, layer after layer; jacobians [T,N,N,D,D]."""
    layers, n, _, width, _ = jacobians.shape
    start = torch.zeros(n, width, dtype=jacobians.dtype, requires_grad=True)
    x = start
    for t in range(layers):
        x = x + torch.einsum("ijab,jb->ia", jacobians[t], x)
    (gradient,) = torch.autograd.grad((x[-1] * cotangent).sum(), start)
    return gradient.norm(dim=-1)


def test_independent_paths_energy_is_the_expected_gradient_norm() -> None:
    """Every (layer, target, source) has a random matrix of its own: no two paths share all their matrices."""
    layers, n, width, draws = 3, 5, 48, 300
    weights = 1.5 * attention(layers, n, seed=1)
    generator = torch.Generator().manual_seed(2)
    norms = []
    for _ in range(draws):
        matrices = torch.randn(layers, n, n, width, width, generator=generator, dtype=torch.float64) / width**0.5
        cotangent = torch.randn(width, generator=generator, dtype=torch.float64)
        norms.append(gradient_norms(weights[..., None, None] * matrices, cotangent / cotangent.norm()))
    measured = torch.stack(norms)
    found = energy_rollout(weights**2)
    predicted = found.last * found.log_scale.exp()
    squares = measured.square()
    error = squares.std(0) / draws**0.5
    assert float(((squares.mean(0) - predicted.square()) / error).abs()[:-1].max()) < 4  # sampling error
    # a norm of 48 numbers varies little, so that its mean is its root mean square up to a few in a hundred
    ratio = measured.mean(0) / predicted
    assert float(ratio.min()) > 0.97
    assert float(ratio.max()) < 1.03
    # and the plain rollout, which adds what does not add, is far from it
    plain = rollout(torch.full((layers,), 0.6), weights / 1.5).last  # λ = 1.5/(1+1.5): the same transition, scaled
    assert area(plain, measured.mean(0)) > 5 * area(found.last, measured.mean(0))


def test_shared_random_heads_coherent_energy_is_the_expected_gradient_norm() -> None:
    """Every head of every layer has one random matrix, whatever the positions: a network at initialisation."""
    layers, heads, n, width, draws = 3, 2, 6, 48, 300
    weights = torch.stack([1.5 * attention(layers, n, seed=seed, sharp=0.3) for seed in (5, 6)], 1)  # [T,H,N,N]
    generator = torch.Generator().manual_seed(7)
    squares = []
    for _ in range(draws):
        matrices = torch.randn(layers, heads, width, width, generator=generator, dtype=torch.float64) / width**0.5
        jacobians = torch.einsum("thij,thab->tijab", weights, matrices)
        cotangent = torch.randn(width, generator=generator, dtype=torch.float64)
        squares.append(gradient_norms(jacobians, cotangent / cotangent.norm()).square())
    measured = torch.stack(squares)
    kernels = weights.square().sum(1)
    found = coherent_energy_rollout(weights, kernels)
    predicted = (found.last * found.log_scale.exp()).square()
    error = measured.std(0) / draws**0.5
    assert float(((measured.mean(0) - predicted) / error).abs().max()) < 4
    # without the agreement of paths through the same heads it is not
    single = energy_rollout(kernels)
    apart = ((single.last * single.log_scale.exp()).square() - measured.mean(0)) / error
    assert float(apart.abs().max()) > 10


def test_coherent_energy_without_coherence_is_the_energy_rollout() -> None:
    kernels = 2 * attention(3, 5, seed=8) ** 2
    mlp = 1 + torch.rand(3, 5, dtype=torch.float64)
    for parallel in (False, True):
        plain = energy_rollout(kernels, mlp=mlp, parallel=parallel)
        found = coherent_energy_rollout(torch.zeros(3, 2, 5, 5), kernels, mlp=mlp, parallel=parallel)
        torch.testing.assert_close(found.profile, plain.profile)
        torch.testing.assert_close(found.log_scale, plain.log_scale)
    with pytest.raises(InputError, match="do not fit"):
        coherent_energy_rollout(torch.zeros(3, 2, 4, 4), kernels)
    with pytest.raises(InputError, match="head gain of layer 0"):
        coherent_energy_rollout(-torch.ones(3, 2, 5, 5), kernels)


def test_paths_that_agree_plain_rollout_is_exact() -> None:
    """Every matrix is the same multiple of the identity: all paths push the same way and weights add."""
    layers, n, width, mixing = 3, 5, 4, 0.4
    weights = attention(layers, n, seed=3)
    identity = torch.eye(width, dtype=torch.float64)
    transition = mixing * weights - mixing * torch.eye(n, dtype=torch.float64)  # x ← x + λ(A − I)x
    cotangent = torch.ones(width, dtype=torch.float64) / width**0.5
    measured = gradient_norms(transition[..., None, None] * identity, cotangent)
    plain = rollout(torch.full((layers,), mixing, dtype=torch.float64), weights)
    torch.testing.assert_close(plain.last, measured, rtol=1e-12, atol=1e-12)
    # the energy of the same network is another curve: adding squares is wrong here
    energy = energy_rollout((mixing * weights / (1 - mixing)) ** 2)
    assert area(energy.last, measured) > 0.02


# ---- sinks, variants, calibration -----------------------------------------------------------------------------------


def sink_case() -> tuple[torch.Tensor, torch.Tensor]:
    """Kernels [T,N,N] that put .8 of each later row on position 0, and where that sink is."""
    n = 6
    rest = attention(2, n, seed=4)
    kernels = 0.2 * rest
    kernels[:, :, 0] += 0.8
    where = torch.zeros(2, n, dtype=torch.bool)
    where[:, 0] = True
    return kernels, where


def test_sink_rules() -> None:
    kernels, where = sink_case()
    assert apply_sink(kernels, where, "keep") is kernels
    returned = apply_sink(kernels, where, "no-op")
    renormalised = apply_sink(kernels, where, "renormalise")
    for made in (returned, renormalised):
        torch.testing.assert_close(made.sum(-1), kernels.sum(-1))
        assert float(made[:, 1:, 0].abs().max()) == 0
        torch.testing.assert_close(made[:, 0], kernels[:, 0])  # the sink's own row
        assert bool((made.triu(1) == 0).all())
    torch.testing.assert_close(returned[:, 3, 3], kernels[:, 3, 3] + kernels[:, 3, 0])
    torch.testing.assert_close(returned[:, 3, 1:3], kernels[:, 3, 1:3])
    shares = kernels[:, 3, 1:] / kernels[:, 3, 1:].sum(-1, keepdim=True)
    torch.testing.assert_close(renormalised[:, 3, 1:], shares)
    with pytest.raises(InputError, match="sink must be"):
        apply_sink(kernels, where, "drop")


def test_a_sink_needs_all_three_signs() -> None:
    received = torch.tensor([[0.7, 0.1, 0.1, 0.0]])
    spread = torch.tensor([[0.05, 0.01, 0.01, 0.0]])
    value = torch.tensor([[0.1, 1.0, 1.1, 0.9]])
    assert find_sinks(received, spread, value).where.tolist() == [[True, False, False, False]]
    assert not bool(find_sinks(received * 0.1, spread * 0.1, value).where.any())  # little mass
    assert not bool(find_sinks(received, spread, torch.ones(1, 4)).where.any())  # values like all others
    assert not bool(find_sinks(received, spread * 20, value).where.any())  # another place in every document


def test_predict_names_and_distributions() -> None:
    kernels, where = sink_case()
    mixing = torch.full((2,), 0.5)
    few = predict(kernels, mixing)
    assert list(few) == ["residual", "half", "attention_only"]
    every = predict(
        kernels,
        mixing,
        energy=kernels**2,
        key=kernels**2 / 2,
        projection=kernels,
        value_norm=kernels,
        head_gain=kernels[:, None],
        sinks=where,
        block=mixing / 2,
        centred=mixing / 3,
        cotangent=(kernels**2, kernels**2 / 2, torch.ones(2, 6)),
    )
    assert list(every) == list(VARIANTS)
    for name, curve in every.items():
        assert float((curve.sum() - 1).abs()) < 1e-9, name
        assert float(curve.min()) >= 0
    torch.testing.assert_close(every["energy"], energy_rollout(1.5 * kernels.double() ** 2).last)
    torch.testing.assert_close(every["energy_cotangent_key"], every["energy"])
    assert float(every["residual+no-op"][0]) < float(every["residual"][0])


def test_calibration_recovers_a_factor_and_is_judged_elsewhere() -> None:
    kernels, _ = sink_case()
    mixing = torch.full((2,), 0.6, dtype=torch.float64)

    def curve(factor: float) -> torch.Tensor:
        return rollout(scaled_mixing(mixing, factor), kernels).last

    truth = curve(0.5)
    found = calibrate(curve, truth, curve(0.7))
    assert math.isclose(found.factor, 0.5, rel_tol=0.1)
    assert found.fitted < 0.01 < found.judged
    assert float(scaled_mixing(mixing, 10.0).max()) == 1.0


def test_best_curve_and_sink_warning() -> None:
    facts = best_curve({"residual": 0.6, "energy": 0.02, "half": 0.021}, uniform=0.2)
    assert facts["best"] == "energy"
    assert facts["ties"] == ["half"]
    assert facts["times_closer_than_residual"] == pytest.approx(30)
    assert facts["beats_uniform"] is True
    with pytest.raises(InputError, match="no predicted curve"):
        best_curve({})
    _, where = sink_case()
    profile = torch.tensor([0.8, 0.04, 0.04, 0.04, 0.04, 0.04])
    text = sink_warning(profile, where, measured=torch.full((6,), 1 / 6))
    assert text is not None
    assert "80%" in text
    assert "16.7%" in text
    assert sink_warning(torch.full((6,), 1 / 6), where) is None


@pytest.mark.parametrize(
    ("distances", "says"),
    [
        (None, "which prediction tracks it best here is not known"),
        ({"residual": 0.6, "energy": 0.2, "value_norm": 0.05, "uniform": 0.18}, "here is value_norm (Wasserstein-1"),
        ({"residual": 0.6, "energy": 0.05, "uniform": 0.18}, "energy (Wasserstein-1 distance 0.050, residual 0.600)"),
        ({"residual": 0.6, "energy": 0.3, "uniform": 0.18}, "no prediction here comes nearer"),
        ({"residual": 0.1, "energy": 0.3, "uniform": 0.18}, "no other prediction here comes nearer"),
    ],
)
def test_the_sink_warning_names_the_curve_that_tracks_best_in_this_run(distances, says) -> None:
    _, where = sink_case()
    text = sink_warning(torch.tensor([0.8, 0.04, 0.04, 0.04, 0.04, 0.04]), where, distances=distances)
    assert text is not None
    assert says in text
    assert "trust" not in text
