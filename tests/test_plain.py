"""The plain adapter: what it reads equals what the bridge reads, and the model is left as it was."""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from posattn.errors import HookError, InputError, SelfCheckError, UnsupportedModelError
from posattn.models import _attention
from posattn.models.base import Batch, Model
from posattn.models.check import self_check
from posattn.models.loading import as_model, as_plain, load_model
from posattn.models.plain import PlainModel
from tests import families

N = 12
#: they run their own attention and never ask the registry
OTHERS = ("bloom", "bloom12", "mpt", "falcon_rope", "falcon_alibi")
NAMES = families.names(without=OTHERS)
#: not understood by the bridge either, or nothing new
EXTRA = [name for name in families.EXTRA if name != "gpt_neo"]
POINTS = ("resid_pre", "attn_out", "mlp_out", "resid_post", "attn_in", "q", "k", "v", "z", "pattern", "post_scale")


@functools.cache
def plainly(name: str) -> PlainModel:
    model = as_plain(families.tiny(name))
    assert isinstance(model, PlainModel)
    return model


def record(model: Model, points: Any, tokens: Tensor, mask: Tensor | None = None) -> dict[int, dict[str, Tensor]]:
    found: dict[int, dict[str, Tensor]] = {}

    def observe(layer: int, values: Mapping[str, Tensor], batch: Batch) -> None:
        found[layer] = {name: value.clone() for name, value in values.items()}

    with torch.no_grad(), model.observe(points, observe):
        model(tokens, mask)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_point_is_the_bridges(name: str) -> None:
    model, bridge, tokens = plainly(name), as_model(families.tiny(name)), families.tokens(2, N)
    assert [dataclasses.asdict(info) for info in model.layers] == [dataclasses.asdict(i) for i in bridge.layers]
    assert model.d_model == bridge.d_model
    assert model.context == bridge.context
    mine, theirs = record(model, POINTS, tokens), record(bridge, POINTS, tokens)
    assert mine.keys() == theirs.keys() == set(range(model.n_layers))
    for layer, values in theirs.items():
        assert mine[layer].keys() == values.keys()
        for point, value in values.items():
            if point == "post_scale":
                assert mine[layer][point].shape == value.shape
            torch.testing.assert_close(mine[layer][point], value, rtol=1e-4, atol=2e-5)
        families.assert_output_map(model.output_map(layer), mine[layer])
        assert model.scheme(layer, N).describe() == bridge.scheme(layer, N).describe()


@pytest.mark.parametrize("name", NAMES)
def test_the_model_is_left_as_it_was(name: str) -> None:
    tokens = families.tokens(2, N)
    fresh = families.tiny(name)
    with torch.no_grad():
        expected = fresh(tokens).logits
    model = plainly(name)
    own = fresh.config._attn_implementation
    assert model.module.config._attn_implementation == own
    assert model.processing["attention"] == own
    with model.observe(("q", "z"), lambda *_: None):
        assert model.module.config._attn_implementation == f"posattn_{own}"
        with model.observe(("pattern",), lambda *_: None):
            pass
        assert model.module.config._attn_implementation == f"posattn_{own}"
        with torch.no_grad():
            torch.testing.assert_close(model(tokens), expected, rtol=0, atol=1e-5)
    assert model.module.config._attn_implementation == own
    with pytest.raises(KeyboardInterrupt), model.observe(("q",), lambda *_: None):
        raise KeyboardInterrupt
    assert model.module.config._attn_implementation == own
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.module.modules())
    with torch.no_grad():
        assert torch.equal(model(tokens), expected)
        assert torch.equal(model.from_embeddings(model.embed(tokens)), expected)


@pytest.mark.parametrize("name", [*NAMES, *EXTRA])
def test_self_check_passes_with_and_without_padding(name: str) -> None:
    model, tokens = plainly(name), families.tokens(2, N)
    mask = torch.ones(2, N, dtype=torch.bool)
    mask[1, :5] = False
    for given in (None, mask):
        report = self_check(model, tokens, given)
        assert {"values", "rotation", "pattern"} <= report.keys()
        assert max(report[key]["figure"] for key in ("values", "rotation", "pattern", "residual")) < 1e-5


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_refused(name: str) -> None:
    hf_model = families.tiny(name)
    own = hf_model.config._attn_implementation
    with pytest.raises(UnsupportedModelError, match=r"does not use transformers' attention interface.*bridge"):
        as_plain(hf_model)
    assert hf_model.config._attn_implementation == own


@pytest.mark.parametrize("name", ["llama_grouped", "phi3_longrope", "gpt_neox_partial", "opt"])
@pytest.mark.parametrize("point", ["q", "k", "z", "attn_in", "resid_pre"])
def test_interventions_are_the_bridges(name: str, point: Any) -> None:
    model, bridge, tokens = plainly(name), as_model(families.tiny(name)), families.tokens(2, N)
    weights = torch.linspace(0.5, 1.5, N)

    def change(layer: int, value: Tensor, batch: Batch) -> Tensor:
        return value * weights.view(1, N, *[1] * (value.dim() - 2))

    with torch.no_grad():
        with model.intervene(point, change, layers=[1]):
            mine = model(tokens)
        with bridge.intervene(point, change, layers=[1]):
            theirs = bridge(tokens)
        assert float((mine - model(tokens)).abs().max()) > 1e-2
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_a_wrong_scheme_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = as_plain(families.tiny("llama"))
    true = model.scheme

    def wrong(layer: int, length: int) -> Any:
        scheme = true(layer, length)
        assert scheme.rotary is not None
        if layer != 1:
            return scheme
        return dataclasses.replace(scheme, rotary=dataclasses.replace(scheme.rotary, sin=-scheme.rotary.sin))

    monkeypatch.setattr(model, "scheme", wrong)
    with pytest.raises(SelfCheckError, match=r"layer 1 .*depend on the position"):
        self_check(model, families.tokens(1, N))


def test_another_attention_is_noticed() -> None:
    model = as_plain(families.tiny("llama"))
    port = model._parts[2].ports.z  # type: ignore[attr-defined]
    handle = port.register_forward_hook(lambda module, args, output: output * 1.1, prepend=True)
    try:
        with pytest.raises(SelfCheckError, match=r"layer 2 .*times the values"):
            self_check(model, families.tokens(1, N))
    finally:
        handle.remove()


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_soft_caps_and_sinks_block_by_block(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = plainly(name), families.tokens(2, N)
    mask = torch.ones(2, N, dtype=torch.bool)
    mask[1, :5] = False
    with torch.no_grad():
        expected = model(tokens, mask)
        monkeypatch.setattr(_attention, "EAGER_LIMIT", 0)
        monkeypatch.setattr("posattn.models.tiles.BUDGET", 1)
        with model.observe(("z",), lambda *_: None):
            found = model(tokens, mask)
    torch.testing.assert_close(found[mask], expected[mask], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["llama_grouped", "gemma3", "gpt_oss"])
def test_bfloat16(name: str) -> None:
    model = as_plain(families.tiny(name).to(torch.bfloat16))
    report = self_check(model, families.tokens(2, N))
    assert report["dtype"] == "bfloat16"
    assert model.dtype == torch.bfloat16


def test_row_normalisers_come_with_fast_attention() -> None:
    model, tokens = plainly("llama_grouped"), families.tokens(2, N)
    with torch.no_grad():
        expected = model(tokens)
    found = record(model, ("q_rot", "k_rot", "lse", "pattern"), tokens)
    for layer, values in found.items():
        k = values["k_rot"].repeat_interleave(2, dim=2)
        logits = torch.einsum("bihd,bjhd->bhij", values["q_rot"], k) * model.scheme(layer, N).scale
        logits = logits.masked_fill(~torch.ones(N, N, dtype=torch.bool).tril(), -torch.inf)
        torch.testing.assert_close(values["lse"], logits.logsumexp(-1).transpose(1, 2), rtol=0, atol=1e-5)
        torch.testing.assert_close(values["pattern"], logits.softmax(-1), rtol=0, atol=1e-6)
    with torch.no_grad(), model.observe(("lse",), lambda *_: None):
        torch.testing.assert_close(model(tokens), expected, rtol=0, atol=1e-5)
    windowed = record(plainly("mistral"), ("lse",), tokens)  # a mask: no such by-product
    assert all(values["lse"].numel() == 0 for values in windowed.values())


def test_head_scores_are_the_bridges() -> None:
    from posattn.heads.scores import score_heads

    tokens = families.tokens(2, 10)
    found = [
        score_heads(model, tokens, bootstrap=0, evidence=False)
        for model in (plainly("llama_grouped"), as_model(families.tiny("llama_grouped")))
    ]
    for name in ("positional", "symbolic"):
        torch.testing.assert_close(getattr(found[0], name), getattr(found[1], name), rtol=0, atol=1e-4)


def test_cached_keys_and_wrong_lengths_are_refused() -> None:
    model, tokens = plainly("llama"), families.tokens(1, N)
    with torch.no_grad(), model.observe(("q",), lambda *_: None):
        cache = model.module(tokens, use_cache=True).past_key_values
        with pytest.raises(HookError, match="cached keys"):
            model.module(tokens[:, :1], past_key_values=cache)
    with pytest.raises(InputError, match="more than"):
        model(families.tokens(1, 65))
    with pytest.raises(InputError, match="does not fit"):
        model._forward(torch.ones(2, N, dtype=torch.bool), input_ids=tokens)


def test_ports_go_with_the_model() -> None:
    gc.collect()
    before = len(_attention._PORTS)
    model = as_plain(families.tiny("qwen2"))
    assert len(_attention._PORTS) > before
    del model
    gc.collect()
    assert len(_attention._PORTS) == before


def test_loading(tmp_path: Path) -> None:
    hf_model = families.tiny("llama")
    hf_model.save_pretrained(tmp_path / "m")
    model = load_model(str(tmp_path / "m"), adapter="plain")
    assert model.adapter == "plain"
    tokens = families.tokens(1, N)
    with torch.no_grad():
        assert torch.equal(model(tokens), hf_model(tokens).logits)
    assert as_plain(model) is model
    with pytest.raises(InputError, match="adapter"):
        load_model(str(tmp_path / "m"), adapter="other")
    assert load_model(str(tmp_path / "m"), adapter="auto").adapter == "bridge"
    with pytest.raises(InputError, match="device_map"):
        load_model(str(tmp_path / "m"), device_map="auto")
    wrapped = families.tiny("llama")
    as_model(wrapped)
    with pytest.raises(UnsupportedModelError, match="wrapped"):
        as_plain(wrapped)


@pytest.mark.parametrize("name", ["llama_grouped", "gpt_oss", "gemma3"])
def test_offloaded_layers_are_measured_with_the_same_result(name: str, tmp_path: Path) -> None:
    from posattn.probes.measure import measure

    hf_model = families.tiny(name)
    hf_model.save_pretrained(tmp_path / "m")
    tokens = families.tokens(3, N)
    expected = measure(load_model(str(tmp_path / "m"), adapter="plain"), tokens, progress=False)
    spread = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    spread["lm_head"] = "cpu" if hf_model.config.tie_word_embeddings else "disk"
    spread |= {f"model.layers.{t}": "cpu" if t == 0 else "disk" for t in range(hf_model.config.num_hidden_layers)}
    model = load_model(str(tmp_path / "m"), adapter="plain", device_map=spread, offload_folder=tmp_path / "disk")
    assert any(p.is_meta for p in model.module.parameters())
    found = measure(model, tokens, progress=False)
    assert torch.equal(found.mixing.token, expected.mixing.token)
    assert torch.equal(found.kernels, expected.kernels)
    assert torch.equal(found.sink_mass, expected.sink_mass)
    for layer in range(model.n_layers):
        assert not model.output_map(layer).weight.is_meta
