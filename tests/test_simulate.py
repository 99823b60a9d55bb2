"""simulate: the published curves, both conventions, architectures and what wrong ones are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from scipy.stats import wasserstein_distance

from posattn.errors import InputError
from posattn.rollout.dense import rollout
from posattn.rollout.simulate import (
    Architecture,
    PowerLaw,
    alibi_slopes,
    preset,
    presets,
    published_influence,
    simulate,
)

DATA = Path(__file__).parent / "data"
GOLDEN = json.loads((DATA / "rollout_golden.json").read_text())
FIGURE = json.loads((DATA / "bloom_176b_figure.json").read_text())


def exactly(values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("impl", ["auto", "structured"])
@pytest.mark.parametrize(
    ("model", "curve", "options"),
    [
        ("mpt-7b", "geometric_slopes", {"convention": "published"}),
        ("mpt-7b", "geometric_slopes", {}),  # 32 heads: the model's own rule gives the same slopes
        ("mpt-7b", "attention_only", {"mixing": 1.0}),
        ("bloom-176b", "geometric_slopes", {"convention": "published"}),
        ("bloom-176b", "hf_slopes", {}),
        ("bloom-176b", "attention_only", {"mixing": 1.0, "convention": "published"}),
    ],
)
def test_golden_curves(model, curve, options, impl):
    got = simulate(model, 256, impl=impl, **options).last
    assert (got - exactly(GOLDEN[model][curve])).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"mixing": 1.0, "convention": "published"}, 0.651),
        ({"convention": "published"}, 0.079),
        ({}, 0.035),
        (None, 0.152),
    ],
)
def test_distance_to_the_measured_curve_of_bloom(options, expected):
    measured = exactly(FIGURE["d_measured"])
    profile = torch.full((256,), 1 / 256) if options is None else simulate("bloom-176b", 256, **options).last
    places = torch.arange(256) / 255
    distance = wasserstein_distance(places, places, profile.numpy(), (measured / measured.sum()).numpy())
    assert abs(distance - expected) < 0.002


def test_the_measured_curve_comes_with_the_package():
    measured = exactly(FIGURE["d_measured"])
    assert torch.equal(published_influence(), measured / measured.sum())


def test_published_figure_of_the_residual_rollout():
    """Digitised from a vector figure: good to a few 1e-6."""
    got = simulate("bloom-176b", 256, convention="published").last
    assert (got - exactly(FIGURE["b_residual"])).abs().max() < 1e-5


def test_slopes_are_those_of_transformers():
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor as bloom
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor as mpt

    for heads in (1, 2, 3, 8, 12, 40, 64, 112):
        reference = bloom(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]  # slope times position 1
        assert torch.allclose(alibi_slopes("bloom", heads).float(), reference, rtol=1e-6)
        reference = -mpt(heads, 2)[:, 0, 0]  # one position back
        assert torch.allclose(alibi_slopes("mpt", heads).float(), reference.flatten(), rtol=1e-6)
    assert torch.allclose(alibi_slopes("published", 112)[:2], exactly([2 ** (-8 / 112), 2 ** (-16 / 112)]))


def test_presets():
    names = presets()
    assert len(names) == 15
    for name in names:
        architecture = preset(name)
        assert architecture.name == name
        assert len(architecture.schedule()) == architecture.layers
    falcon = preset("falcon-rw-7b")
    assert torch.allclose(falcon.effective_slopes(), alibi_slopes("bloom", 64) / 8)
    assert not torch.equal(simulate("bloom-7b1/dclm", 32).last, simulate("bloom-7b1/wikipedia", 32).last)


def test_published_convention_drops_the_scale_of_positions_and_content():
    own = Architecture(4, 2, 0.5, position="alibi", slopes=[0.4, 0.2], diagonal=0.3, head_dim=16, scaled_position=True)
    by_hand = Architecture(4, 2, 0.5, position="alibi", slopes="published", diagonal=1.2)
    assert torch.allclose(simulate(own, 20, convention="published").last, simulate(by_hand, 20).last, atol=1e-15)
    divided = Architecture(4, 2, 0.5, position="alibi", slopes=[0.1, 0.05], diagonal=0.3)
    assert torch.allclose(simulate(own, 20).last, simulate(divided, 20).last, atol=1e-15)


def test_schedules():
    assert torch.allclose(Architecture(4, 1, PowerLaw(0.8, 2)).schedule(), 0.8 / exactly([1, 4, 9, 16]))
    assert float(Architecture(3, 1, PowerLaw(3.0, 1)).schedule()[0]) == 1.0
    assert Architecture(3, 1, 0.25).schedule().tolist() == [0.25] * 3
    assert Architecture(3, 1, [0.1, 0.2, 0.3]).schedule().tolist() == [0.1, 0.2, 0.3]
    assert Architecture(3, 1, torch.tensor([0.1, 0.2, 0.3])).schedule().dtype == torch.float64


def test_architecture_is_the_rollout_of_its_kernels():
    beta = torch.randn(3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scores = torch.randn(2, 30, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for options in (
        {"position": "alibi", "slopes": [0.3, 0.1], "diagonal": beta, "window": 5},
        {"position": "alibi", "slopes": [0.3, 0.1], "window": [None, 4, None]},
        {"position": "distance", "scores": scores, "diagonal": beta, "weights": [0.25, 0.75]},
        {"mask": "full", "position": "distance", "scores": scores},
        {"prefix": 6, "diagonal": 0.7},
    ):
        architecture = Architecture(3, 2, [0.3, 0.9, 0.5], **options)
        kernels = architecture.kernels()
        parts = kernels if isinstance(kernels, list) else [kernels.layer(t) for t in range(3)]
        dense = torch.stack([part.dense(30) for part in parts])
        exact = rollout(exactly([0.3, 0.9, 0.5]), dense, "all", impl="reference").profile
        for impl in ("auto", "structured"):
            got = simulate(architecture, 30, "all", impl=impl)
            assert (got.profile - exact).abs().max() < 1e-12
        every = simulate(architecture, 30, depth="every", impl="structured")
        assert (every.profile[-1] - exact[-1:]).abs().max() < 1e-12
    assert simulate(architecture, 5).provenance["architecture"]["prefix"] == 6


def test_result_can_be_saved(tmp_path):
    from posattn.rollout.dense import Rollout

    result = simulate(Architecture(2, 2, PowerLaw(0.5, 1), diagonal=torch.zeros(2, 2)), 6)
    back = Rollout.load(result.save(tmp_path / "s.safetensors"))
    assert torch.equal(back.profile, result.profile)
    assert back.provenance["architecture"]["mixing"] == {"c": 0.5, "exponent": 1}


def test_long_context_is_a_distribution():
    profile = simulate("mpt-7b", 20_000).last
    assert abs(float(profile.sum()) - 1) < 1e-12
    assert (profile > 0).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: simulate("bloom-175b", 8), "unknown preset 'bloom-175b'.*bloom-176b"),
        (lambda: simulate("bloom-176b/pile", 8), "unknown data set 'pile'"),
        (lambda: simulate("mpt-7b", 8, convention="paper"), "unknown convention"),
        (lambda: simulate("mpt-7b", 0), "length"),
        (lambda: simulate("mpt-7b", 8, impl="triton"), "impl"),
        (lambda: simulate("mpt-7b", 8, mixing=1.5), r"\[0, 1\]"),
        (lambda: simulate("mpt-7b", 8, mixing=float("nan")), "nan"),
        (lambda: simulate("mpt-7b", 8, mixing=[0.5] * 3), "3 values for 32 layers"),
        (lambda: Architecture(0, 2), "layers and heads"),
        (lambda: Architecture(2, 2, mask="diagonal"), "mask"),
        (lambda: Architecture(2, 2, position="rope"), "position"),
        (lambda: Architecture(2, 2, position="distance"), "scores"),
        (lambda: Architecture(2, 2, window=0), "window of 0"),
        (lambda: Architecture(2, 2, window=[3]), "1 windows for 2 layers"),
        (lambda: Architecture(2, 2, position="alibi", slopes=[0.1] * 3), "3 slopes for 2 heads"),
        (lambda: Architecture(2, 2, position="alibi", slopes="steep"), "unknown slope rule"),
        (lambda: Architecture(2, 2, position="alibi", scaled_position=True), "head_dim"),
        (lambda: Architecture(2, 2, diagonal=[0.1] * 3), "3 values for 2 heads"),
        (lambda: Architecture(2, 2, diagonal=torch.zeros(3, 2)), "2 layers"),
        (lambda: Architecture(2, 2, PowerLaw(-1, 1)), "power law"),
        (lambda: simulate(Architecture(2, 2, position="distance", scores=torch.zeros(2, 5)), 6), "length 6 needs 6"),
    ],
)
def test_wrong_use(call, message):
    with pytest.raises(InputError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_one_position_has_nothing_to_collapse() -> None:
    from posattn.rollout.depth import collapse, depth_theory
    from posattn.rollout.simulate import Architecture

    one = Architecture(layers=3, heads=1, mixing=0.5)
    theory = depth_theory(one, 1)
    assert "single position" in theory.implication
    assert "infinity" not in theory.implication
    assert theory.condition == "none"
    assert "only position" in collapse(one, 1).reason
    assert "collapse" not in theory.implication
