"""Bootstrap intervals of a measured influence."""

from __future__ import annotations

import pytest
import torch

from posattn.errors import InputError
from posattn.influence.distances import compare_profiles
from posattn.influence.gradients import Influence, summarise
from posattn.influence.intervals import _wasserstein, influence_intervals, resampled_profiles


def measured(magnitudes: torch.Tensor, normalize: str = "after_mean") -> Influence:
    documents = len(magnitudes)
    return summarise(
        magnitudes.double(),
        method="gradient_norm",
        target="argmax_probability",
        normalize=normalize,
        chosen=torch.zeros(documents, dtype=torch.long),
        probability=torch.ones(documents, dtype=torch.float64),
        facts={},
    )


def test_equal_documents_leave_no_doubt() -> None:
    row = torch.rand(9, dtype=torch.float64)
    found = influence_intervals(measured(row.repeat(5, 1)), {"flat": torch.ones(9)})
    low, high = torch.tensor(found["profile"])
    torch.testing.assert_close(low, high)
    torch.testing.assert_close(low.double(), row / row.sum(), atol=1e-6, rtol=0)
    assert found["over_uniform"]["flat"] == pytest.approx([0, 0], abs=1e-12)


def test_intervals_hold_the_estimate_and_shrink_with_more_documents() -> None:
    torch.manual_seed(1)
    few, many = torch.rand(8, 16) + 0.1, torch.rand(200, 16) + 0.1
    widths = []
    for magnitudes in (few, many):
        result = measured(magnitudes)
        low, high = torch.tensor(influence_intervals(result)["profile"], dtype=torch.float64)
        assert ((low <= result.profile) & (result.profile <= high)).all()
        widths.append(float((high - low).mean()))
    assert widths[1] < widths[0] / 3


def test_the_fast_distance_is_scipys() -> None:
    torch.manual_seed(2)
    profiles, curve = torch.rand(4, 11), torch.rand(11)
    profiles = profiles / profiles.sum(-1, keepdim=True)
    want = [compare_profiles(profile, curve).wasserstein for profile in profiles]
    assert _wasserstein(profiles, curve).tolist() == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize("normalize", ["after_mean", "per_document"])
def test_resampling_keeps_the_way_of_averaging(normalize: str) -> None:
    torch.manual_seed(3)
    result = measured(torch.rand(300, 5) * torch.logspace(0, 3, 300)[:, None], normalize)
    mean = resampled_profiles(result, draws=2000).mean(0)
    torch.testing.assert_close(mean, result.profile.double(), atol=3e-3, rtol=0)


def test_one_document_has_no_interval() -> None:
    with pytest.raises(InputError, match="at least two documents"):
        influence_intervals(measured(torch.rand(1, 5)))


def test_differences_to_the_measured_attention_are_paired() -> None:
    torch.manual_seed(4)
    result = measured(torch.rand(12, 16) + 0.1)
    near = result.profile + 1e-3 * torch.linspace(-1, 1, 16)
    found = influence_intervals(result, {"residual": torch.linspace(1, 2, 16), "near": near / near.sum()})
    assert set(found["over_residual"]) == {"near"}
    low, high = found["over_residual"]["near"]
    # the draws share their documents: the difference is far surer than either distance
    one, other = (found["comparison"][name] for name in ("near", "residual"))
    assert low <= high < 0
    assert high - low < (one[1] - one[0]) + (other[1] - other[0])
    best = found["over_nearest"]["residual"]
    assert [-high, -low] == pytest.approx(best)
    assert "over_residual" not in influence_intervals(result, {"near": near})


def test_an_interval_over_two_documents_is_the_two_documents() -> None:
    """Why few documents are warned of."""
    torch.manual_seed(5)
    magnitudes = torch.rand(2, 8) + 0.1
    result = measured(magnitudes / magnitudes.sum(-1, keepdim=True))
    low, high = torch.tensor(influence_intervals(result)["profile"], dtype=torch.float64)
    ends = result.per_document / result.per_document.sum(-1, keepdim=True)
    torch.testing.assert_close(low, ends.min(0).values.double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(high, ends.max(0).values.double(), atol=1e-6, rtol=0)
