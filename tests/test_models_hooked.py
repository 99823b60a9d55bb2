"""HookedTransformer and TransformerBridge in TransformerLens 3 against their own caches.

Run in the environment that has both; skipped where HookedTransformer is gone (TransformerLens 4).
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from posattn.errors import InputError, UnsupportedModelError
from posattn.models.base import Model
from posattn.models.check import self_check
from posattn.models.loading import as_model, load_model, quiet
from posattn.models.positions import attention
from tests import families

pytestmark = [
    pytest.mark.hooked,
    pytest.mark.skipif(
        int(metadata.version("transformer-lens").split(".")[0]) >= 4,  # asking the package itself would import it
        reason="this TransformerLens has no HookedTransformer",
    ),
]

POSITIONS: dict[str, dict[str, Any]] = {
    "rotary": {"positional_embedding_type": "rotary", "rotary_dim": 8, "n_key_value_heads": 2},
    "rotary-pairs": {"positional_embedding_type": "rotary", "rotary_dim": 4, "rotary_adjacent_pairs": True},
    "alibi": {"positional_embedding_type": "alibi"},
    "standard": {"positional_embedding_type": "standard"},
    "shortformer": {"positional_embedding_type": "shortformer"},
    "local": {
        "positional_embedding_type": "standard",
        "use_local_attn": True,
        "attn_types": ["local", "global"],
        "window_size": 5,
    },
    "parallel": {"positional_embedding_type": "rotary", "rotary_dim": 8, "parallel_attn_mlp": True},
    "post-norms": {
        "positional_embedding_type": "rotary",
        "rotary_dim": 8,
        "normalization_type": "RMS",
        "use_normalization_before_and_after": True,
        "use_qk_norm": True,
        "attn_scores_soft_cap": 2.0,
    },
    "scaled-by-layer": {"positional_embedding_type": "standard", "scale_attn_by_inverse_layer_idx": True},
    "attention-only": {"positional_embedding_type": "shortformer", "attn_only": True},
}

CACHE = {
    "resid_pre": "hook_resid_pre",
    "attn_out": "hook_attn_out",
    "mlp_out": "hook_mlp_out",
    "resid_post": "hook_resid_post",
    "v": "attn.hook_v",
    "z": "attn.hook_z",
    "pattern": "attn.hook_pattern",
}


def hooked(kind: str, **overrides: Any) -> Any:
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    keywords = {
        "n_layers": 2,
        "d_model": 32,
        "n_ctx": 24,
        "d_head": 8,
        "n_heads": 4,
        "d_mlp": 48,
        "d_vocab": families.VOCAB,
        "act_fn": "gelu",
        "normalization_type": "LN",
        "device": "cpu",
        "seed": 0,
        **POSITIONS[kind],
        **overrides,
    }
    if keywords.get("attn_only"):
        del keywords["d_mlp"], keywords["act_fn"]
    with quiet():
        model = HookedTransformer(HookedTransformerConfig(**keywords))
    families.randomise(model)
    return model.eval()


def record(model: Model, points: Any, tokens: Tensor, mask: Tensor | None = None) -> dict[int, dict[str, Tensor]]:
    found: dict[int, dict[str, Tensor]] = {}

    def observe(layer: int, values: Any, batch: Any) -> None:
        found[layer] = {name: value.clone() for name, value in values.items()}

    with torch.no_grad(), model.observe(points, observe):
        model(tokens, mask)
    return found


@pytest.fixture(params=list(POSITIONS))
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def test_points_are_the_models_own_cache(kind: str) -> None:
    raw, tokens = hooked(kind), families.tokens()
    model = as_model(raw)
    with torch.no_grad():
        logits, cache = raw.run_with_cache(tokens)
    found = record(model, (*CACHE, "q", "k"), tokens)
    assert sorted(found) == [0, 1]
    for layer, values in found.items():
        for point, name in CACHE.items():
            if point == "mlp_out" and kind == "attention-only":
                assert point not in values
                continue
            torch.testing.assert_close(values[point], cache[f"blocks.{layer}.{name}"], rtol=0, atol=1e-6)
        if kind != "post-norms":  # there the cache holds queries before their norm
            torch.testing.assert_close(values["q"], cache[f"blocks.{layer}.attn.hook_q"], rtol=0, atol=1e-6)
            torch.testing.assert_close(values["k"], cache[f"blocks.{layer}.attn.hook_k"], rtol=0, atol=1e-6)
    torch.testing.assert_close(model(tokens), logits, rtol=0, atol=1e-6)


def test_scheme_and_output_map_give_pattern_and_output_back(kind: str) -> None:
    raw, tokens = hooked(kind), families.tokens()
    model = as_model(raw)
    found = record(model, ("q", "k", "z", "pattern", "attn_out", "post_scale"), tokens)
    for layer, values in found.items():
        again = attention(values["q"], values["k"], model.scheme(layer, tokens.shape[1]))
        torch.testing.assert_close(again, values["pattern"], rtol=0, atol=1e-5)
        families.assert_output_map(model.output_map(layer), values)
    report = self_check(model, tokens)
    assert report["pattern"]["figure"] < 1e-5
    assert report["residual"]["figure"] < 1e-6


def test_scheme_kind_is_reported() -> None:
    kinds = {kind: as_model(hooked(kind)).scheme(0, 6) for kind in POSITIONS}
    assert kinds["rotary"].kind == "rotary"
    assert not kinds["rotary"].rotary.interleaved
    assert kinds["rotary-pairs"].rotary.interleaved
    assert kinds["rotary-pairs"].rotary.width == 4
    assert kinds["standard"].absolute == kinds["shortformer"].absolute == "learned"
    assert (kinds["standard"].kind, kinds["shortformer"].kind) == ("absolute", "shortformer")
    assert kinds["local"].window == 5
    torch.testing.assert_close(kinds["alibi"].alibi.slopes, torch.tensor([0.25, 0.0625, 0.015625, 0.00390625]))


def test_padding_changes_nothing(kind: str) -> None:
    model, tokens = as_model(hooked(kind)), families.tokens()
    for real in (slice(4, None), slice(None, 8)):
        mask = torch.zeros(2, 12, dtype=torch.bool)
        mask[0] = True
        mask[1, real] = True
        with torch.no_grad():
            padded, alone = model(tokens, mask)[1, real], model(tokens[1:, real])[0]
        torch.testing.assert_close(padded, alone, rtol=0, atol=2e-5)
        self_check(model, tokens, mask)


def test_the_masks_real_tokens_reach_the_observer() -> None:
    raw, tokens = hooked("standard"), families.tokens()
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :3] = 0
    seen: list[Any] = []
    with torch.no_grad(), as_model(raw).observe(["pattern"], lambda layer, values, batch: seen.append(batch)):
        raw(tokens, attention_mask=mask)
        raw(tokens)
    assert torch.equal(seen[0].mask, mask.bool())
    assert torch.equal(seen[0].tokens, tokens)
    assert bool(seen[-1].mask.all())


def test_embeddings_give_the_same_logits(kind: str) -> None:
    model, tokens = as_model(hooked(kind)), families.tokens()
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[1, :4] = False
    with torch.no_grad():
        torch.testing.assert_close(model.from_embeddings(model.embed(tokens)), model(tokens), rtol=0, atol=1e-6)
        ours, theirs = model.from_embeddings(model.embed(tokens), mask), model(tokens, mask)
    torch.testing.assert_close(ours[mask], theirs[mask], rtol=0, atol=1e-5)


@pytest.mark.parametrize("point", ["z", "attn_in", "resid_pre"])
def test_interventions_reach_the_logits_and_leave_no_trace(kind: str, point: Any) -> None:
    model, tokens = as_model(hooked(kind)), families.tokens()
    with torch.no_grad():
        before = model(tokens)
        with model.intervene(point, lambda layer, value, batch: value * 0.5, layers=[1]):
            changed = model(tokens)
        with model.intervene(point, lambda layer, value, batch: value.clone()):
            same = model(tokens)
        after = model(tokens)
    assert (changed - before).abs().max() > 1e-3
    torch.testing.assert_close(same, before, rtol=0, atol=1e-6)
    assert torch.equal(after, before)


def test_a_pass_that_stops_early_is_no_fault() -> None:
    raw, tokens = hooked("standard"), families.tokens()
    seen: list[int] = []
    with torch.no_grad(), as_model(raw).observe(["pattern"], lambda layer, values, batch: seen.append(layer)):
        raw(tokens, stop_at_layer=1)
    assert seen == [0]


def test_a_rotary_table_longer_than_the_one_in_use() -> None:
    raw = hooked("rotary", n_ctx=4000)
    model = as_model(raw)
    held = raw.blocks[0].attn.rotary_sin.shape[0]
    scheme = model.scheme(0, held + 10)
    assert scheme.rotary.cos.shape[0] == held + 10
    assert raw.blocks[0].attn.rotary_sin.shape[0] == held  # looking does not change the model
    torch.testing.assert_close(scheme.rotary.cos[:held], raw.blocks[0].attn.rotary_cos[:, :4])


def test_too_long_an_input_is_named() -> None:
    with pytest.raises(InputError, match="30 tokens are more than"):
        as_model(hooked("standard"))(families.tokens(1, 30))


@pytest.mark.skipif(int(metadata.version("transformer-lens").split(".")[0]) < 3, reason="no bridge in version 2")
@pytest.mark.parametrize("compatibility", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama_grouped", "gemma2", "bloom12", "gptj", "opt", "olmo2"])
def test_bridge_points_are_its_own_cache(name: str, compatibility: bool) -> None:
    tokens = families.tokens()
    model = as_model(families.tiny(name))
    bridge = model.module
    if compatibility:
        with quiet():
            bridge.enable_compatibility_mode(disable_warnings=True)
        model = as_model(bridge)
    assert model.adapter == ("bridge-compat" if compatibility else "bridge")
    with torch.no_grad(), quiet():
        _, cache = bridge.run_with_cache(tokens)
    found = record(model, CACHE, tokens)
    own = dict(CACHE)
    if name == "bloom12":  # its attention and MLP hooks hold the residual stream as well
        del own["attn_out"], own["mlp_out"]
    for layer, values in found.items():
        for point, hook in own.items():
            theirs = cache[f"blocks.{layer}.{hook}"].reshape(values[point].shape)
            torch.testing.assert_close(values[point], theirs, rtol=0, atol=1e-6)
    self_check(model, tokens)


def test_loads_by_name_without_processing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from transformer_lens import HookedTransformer

    made, asked = hooked("rotary"), {}

    def load(name: str, **keywords: Any) -> Any:
        asked.update(keywords, name=name)
        return made

    monkeypatch.setattr(HookedTransformer, "from_pretrained_no_processing", load)
    model = load_model("pythia-70m", adapter="hooked", device="cpu", dtype="bfloat16")
    assert (model.module, model.adapter, model.name) == (made, "hooked", "pythia-70m")
    assert asked == {"name": "pythia-70m", "device": "cpu", "dtype": torch.bfloat16}
    monkeypatch.undo()
    with pytest.raises(UnsupportedModelError, match="no-such-model as a HookedTransformer"):
        load_model("no-such-model", adapter="hooked", device="cpu")
    with pytest.raises(InputError, match="own name"):
        load_model(tmp_path, adapter="hooked")
