"""Distances and shapes: known answers, every length, the definitions written another way."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posattn.errors import InputError
from posattn.influence.distances import Comparison, Shape, compare_profiles, describe_profile

curves = st.lists(st.floats(0, 1, width=32), min_size=1, max_size=40).filter(lambda c: sum(c) > 1e-3)


def _t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_distances_of_the_two_ends() -> None:
    found = compare_profiles(_t(1, 0, 0, 0), _t(0, 0, 0, 1))
    assert found.wasserstein == pytest.approx(1.0)
    assert found.total_variation == pytest.approx(1.0)
    assert found.spearman == pytest.approx(-1 / 3)
    assert compare_profiles(_t(1, 2, 3), _t(10, 20, 30)).to_dict() == pytest.approx(
        {"wasserstein": 0.0, "spearman": 1.0, "total_variation": 0.0}
    )
    assert compare_profiles(_t(1, 2, 3), _t(3, 2, 1)).spearman == pytest.approx(-1.0)
    assert math.isnan(compare_profiles(_t(1, 1, 1), _t(3, 2, 1)).spearman)


@given(a=curves, b=curves)
def test_distances_are_the_definitions(a, b) -> None:
    n = min(len(a), len(b))
    p, q = _t(*a[:n]), _t(*b[:n])
    if float(p.sum()) <= 0 or float(q.sum()) <= 0:
        with pytest.raises(InputError, match="zero everywhere"):
            compare_profiles(p, q)
        return
    found = compare_profiles(p, q)
    p, q = p / p.sum(), q / q.sum()
    # on a line W1 is the area between the cumulative distributions
    area = float((p.cumsum(0) - q.cumsum(0)).abs()[:-1].sum()) / max(n - 1, 1)
    assert found.wasserstein == pytest.approx(area, abs=1e-9)
    assert found.total_variation == pytest.approx(float((p - q).clamp(min=0).sum()), abs=1e-9)
    assert 0 <= found.wasserstein <= 1 + 1e-9


def test_shape_of_sixteen_positions() -> None:
    p = torch.arange(1.0, 17.0)
    found = describe_profile(p)
    p = p.double() / p.sum()
    assert found.primacy == pytest.approx(float(p[:2].sum()))
    assert found.recency == pytest.approx(float(p[14:].sum()))
    assert found.middle == pytest.approx(float(p[4:12].sum()))
    assert found.mean_position == pytest.approx(float((p * torch.arange(16) / 15).sum()))
    assert found.trough == pytest.approx(0.5 / 15)
    assert found.u_index == pytest.approx(8 * float(p[:2].sum()) / (2 * float(p[4:12].sum())) - 1)
    rest = found.without_first
    assert rest is not None
    assert rest.without_first is None
    q = p[1:] / p[1:].sum()
    assert rest.mean_position == pytest.approx(float((q * torch.arange(15) / 14).sum()))


@pytest.mark.parametrize("n", range(1, 20))
def test_a_uniform_profile_has_no_shape(n: int) -> None:
    found = describe_profile(torch.ones(n))
    for shape in (found, found.without_first):
        if shape is None:
            assert n == 1
            continue
        assert shape.primacy == pytest.approx(1 / 8)
        assert shape.recency == pytest.approx(1 / 8)
        assert shape.middle == pytest.approx(1 / 2)
        assert shape.u_index == pytest.approx(0.0, abs=1e-12)
    assert found.mean_position == pytest.approx(0.5 if n > 1 else 0.0)


@given(curve=curves)
def test_shape_of_any_length_is_that_of_the_refined_curve(curve) -> None:
    """Splitting every position in eight equal parts changes no mass, and then eighths are whole positions."""
    n = len(curve)
    found = describe_profile(_t(*curve))
    fine = _t(*curve).repeat_interleave(8) / 8
    fine = fine / fine.sum()
    assert found.primacy == pytest.approx(float(fine[:n].sum()), abs=1e-12)
    assert found.recency == pytest.approx(float(fine[7 * n :].sum()), abs=1e-12)
    assert found.middle == pytest.approx(float(fine[2 * n : 6 * n].sum()), abs=1e-12)
    both = min(found.primacy, found.recency) * 8 > found.middle * 2 * (1 + 1e-9)
    assert (found.u_index > 0) == both or found.u_index == pytest.approx(0, abs=1e-9)
    assert 0 <= found.mean_position <= 1 + 1e-12
    assert -1e-12 <= found.trough <= 1 + 1e-12


def test_a_u_and_its_trough() -> None:
    x = torch.linspace(-1, 1, 64)
    found = describe_profile(0.1 + x**2)
    assert found.u_index > 1
    assert found.trough == pytest.approx(0.5, abs=0.02)
    assert describe_profile(1.1 - x**2).u_index < 0
    assert describe_profile(torch.arange(1.0, 65.0)).u_index < 0


def test_empty_parts() -> None:
    ends = torch.zeros(16)
    ends[0] = ends[-1] = 1
    assert describe_profile(ends).u_index == math.inf
    first = torch.zeros(16)
    first[0] = 1
    found = describe_profile(first)
    assert found.u_index == 0
    assert found.without_first is None
    assert describe_profile(torch.ones(1)).without_first is None


def test_no_distribution_is_refused() -> None:
    for bad in (_t(0, 0), _t(1, -1), _t(1, math.nan), _t(math.inf, 1), torch.zeros(0)):
        with pytest.raises(InputError):
            describe_profile(bad)
        with pytest.raises(InputError):
            compare_profiles(bad, bad)


def test_different_lengths_are_refused() -> None:
    import jaxtyping

    with pytest.raises((InputError, jaxtyping.TypeCheckError)):
        compare_profiles(_t(1, 2), _t(1, 2, 3))


def test_results_round_trip_and_are_drawn(tmp_path) -> None:
    import matplotlib.pyplot as plt

    shape, distance = describe_profile(_t(3, 1, 2, 4)), compare_profiles(_t(1, 2, 3), _t(3, 1, 1))
    assert Shape.load(shape.save(tmp_path / "s")).to_dict() == shape.to_dict()
    assert Comparison.load(distance.save(tmp_path / "c")).to_dict() == distance.to_dict()
    assert set(shape.to_dataframe()["positions"]) == {"all", "without first"}
    assert distance.to_dataframe()["distance"].tolist() == ["wasserstein", "spearman", "total_variation"]
    assert shape.plot().get_ylabel()
    assert distance.plot().get_ylabel()
    plt.close("all")
