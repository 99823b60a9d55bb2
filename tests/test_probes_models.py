"""The probes on real transformers classes, against a computation that knows neither hooks nor TransformerLens' points.

Everything is taken from the plain model: the pattern from `output_attentions`, X and what attention adds from hooks on
the transformers modules that receive and produce them. λ and kernels then follow from the formulas as they are
written, document by document.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from posattn.errors import HookError
from posattn.probes.kernel import KernelProbe
from posattn.probes.measure import Measurement, measure, measurement
from posattn.probes.mixing import MixingProbe
from posattn.probes.session import attach, from_cache
from posattn.tokens import load_tokens
from tests import families
from tests.test_probes import _assert_same

#: the module of a block whose output is what attention adds to the stream (attention's own module when not named)
ADDS = {"gemma2": "post_attention_layernorm", "gemma3": "post_attention_layernorm", "olmo2": "post_attention_layernorm"}
ATTENTION = ("self_attn", "attn", "self_attention", "attention")
MULTIPLIER = {"granite": 0.3}
#: families that this adapter refuses, or whose bridge computes another function than the checkpoint
SPECIAL = ("falcon_alibi",)
NAMES = families.names(without=SPECIAL)


def bridged(name: str, **overrides: Any) -> tuple[Any, Any]:
    """A tiny transformers model, and the same weights in a bridge (the live object, as a user holds it)."""
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    plain = families.tiny(name, attn_implementation="eager", **overrides)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bridge = build_bridge_from_module(
            copy.deepcopy(plain), type(plain).__name__, hf_config=plain.config, model_name=name
        )
    return plain, bridge


def seen(bridge: Any) -> Any:
    from posattn.models.bridge import BridgeModel

    return BridgeModel(bridge)


def blocks_of(plain: Any) -> Any:
    for module in plain.modules():
        if isinstance(module, torch.nn.ModuleList) and any(hasattr(module[0], name) for name in ATTENTION):
            return module
    raise AssertionError("no blocks")


@torch.no_grad()
def plainly(name: str, plain: Any, document: Tensor, attentions: bool = True) -> dict[str, Tensor]:
    """X [T,N,D], a [T,N,D] and pattern [T,H,N,N] of one document, in float64, from transformers alone."""
    found: dict[int, dict[str, Tensor]] = {}
    handles = []
    for t, block in enumerate(blocks_of(plain)):
        record = found.setdefault(t, {})
        attention = next(getattr(block, part) for part in ATTENTION if hasattr(block, part))
        key = next((family for family in ADDS if name.startswith(family)), None)
        source = attention if key is None else getattr(block, ADDS[key])

        def before(module, args, kwargs, record=record):
            record["x"] = (args[0] if args else kwargs["hidden_states"])[0]

        def after(module, args, output, record=record):
            record["a"] = (output[0] if isinstance(output, tuple) else output)[0]

        def within(module, args, kwargs, output, record=record):
            if name.startswith("bloom"):  # its attention module adds the residual itself: take that away again
                record["a"] = (output[0] - args[1])[0]

        handles += [
            block.register_forward_pre_hook(before, with_kwargs=True),
            source.register_forward_hook(after),
            attention.register_forward_hook(within, with_kwargs=True),
        ]
    try:
        out = plain(document[None], output_attentions=attentions, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    layers = range(len(found))
    kept = {
        "x": torch.stack([found[t]["x"] for t in layers]).double(),
        "a": torch.stack([found[t]["a"] for t in layers]).double() * MULTIPLIER.get(name, 1.0),
    }
    if attentions:
        kept["pattern"] = torch.stack([attention[0] for attention in out.attentions]).double()
    return kept


def expected(name: str, plain: Any, documents: list[Tensor]) -> dict[str, Tensor]:
    """The means over documents of one length."""
    return means([plainly(name, plain, document) for document in documents])


def means(documents: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """What the probes must say of these documents, by the formulas."""
    rows = []
    for found in documents:
        x, a = found["x"], found["a"]
        token = a.norm(dim=-1) / (x.norm(dim=-1) + a.norm(dim=-1))
        whole_x, whole_a = x.flatten(1).norm(dim=-1), a.flatten(1).norm(dim=-1)
        pattern = found["pattern"]
        rows.append(
            {
                "token": token.mean(-1),
                "per_position": token,
                "frobenius": whole_a / (whole_x + whole_a),
                "largest": (x.norm(dim=-1) / whole_x[:, None]).square().amax(-1),
                "heads": pattern,
                "kernel": pattern.mean(1),
                "sink": 1 - pattern.sum(-1).mean(-1),
            }
        )
    return {key: torch.stack([row[key] for row in rows]).mean(0) for key in rows[0]}


def check(result: Measurement, want: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    mixing = result.mixing
    for got, name in (
        (mixing.token, "token"),
        (mixing.per_position, "per_position"),
        (mixing.frobenius, "frobenius"),
        (mixing.largest_position_share, "largest"),
        (result.kernels.double() * result.row_mass[..., None], "heads" if result.per_head else "kernel"),
        (result.sink_mass, "sink"),
    ):
        assert float(want[name].abs().max()) > 0 or name == "sink"
        torch.testing.assert_close(got, want[name], atol=tolerance, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
    rows = result.kernels.sum(-1)
    torch.testing.assert_close(rows, torch.ones_like(rows), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_probes_equal_transformers(name: str) -> None:
    plain, bridge = bridged(name)
    model, ids = seen(bridge), families.tokens(3, 12)
    want = expected(name, plain, list(ids))
    for per_head in (False, True):
        tokens = load_tokens(ids, model, batch_size=2)
        check(measure(model, tokens, per_head=per_head, progress=False, check=False), want)


def test_probes_equal_the_default_path_of_falcon_with_alibi(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its eager path counts ALiBi twice, so the pattern is taken from what the default kernel receives."""
    from posattn.models.loading import as_model

    plain = families.tiny("falcon_alibi", attn_implementation="sdpa")
    fused = torch.nn.functional.scaled_dot_product_attention
    patterns: list[Tensor] = []

    def recorded(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, **keywords: Any) -> Tensor:
        logits = query.double() @ key.double().mT / query.shape[-1] ** 0.5 + attn_mask.double()
        patterns.append(logits.softmax(-1)[0])
        return fused(query, key, value, attn_mask=attn_mask, **keywords)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recorded)

    def default_path(document: Tensor) -> dict[str, Tensor]:
        patterns.clear()
        kept = plainly("falcon_alibi", plain, document, attentions=False)
        return kept | {"pattern": torch.stack(patterns)}

    ids = families.tokens(3, 12)
    want = means([default_path(document) for document in ids])
    monkeypatch.undo()
    model = as_model(families.tiny("falcon_alibi"))
    for per_head in (False, True):
        tokens = load_tokens(ids, model, batch_size=2)
        check(measure(model, tokens, per_head=per_head, progress=False), want)


@pytest.mark.parametrize(
    ("name", "left"),
    [(n, True) for n in NAMES if n not in ("llama_dynamic", "phi3_longrope")]
    + [(n, False) for n in ("gpt2", "bloom", "gemma2", "gpt_oss")],
)
def test_padding_changes_nothing(name: str, left: bool) -> None:
    """Rows of another length in a batch: as each document alone (dynamic scaling depends on the padded length)."""
    model = seen(bridged(name)[1])
    rows = [families.tokens(1, n, seed=n)[0] for n in (7, 11, 9)]
    ids, mask = torch.zeros(3, 11, dtype=torch.long), torch.zeros(3, 11, dtype=torch.bool)
    for i, row in enumerate(rows):
        where = slice(11 - len(row), 11) if left else slice(0, len(row))
        ids[i, where], mask[i, where] = row, True
    with attach(model, MixingProbe(), KernelProbe()) as alone, torch.no_grad():
        for row in rows:
            model(row[None])
    with attach(model, MixingProbe(), KernelProbe()) as together, torch.no_grad():
        model(ids, mask)
    _assert_same(measurement(together), measurement(alone), 1e-5)


@pytest.mark.parametrize("name", ["gpt2", "bloom", "gemma2", "gptj", "llama_grouped", "gpt_oss"])
def test_a_cache_gives_what_the_pass_gives(name: str) -> None:
    bridge = bridged(name)[1]
    model, ids = seen(bridge), families.tokens(3, 12)
    with torch.no_grad(), attach(model, MixingProbe(), KernelProbe()) as session:
        _, cache = bridge.run_with_cache(ids)
    _assert_same(measurement(from_cache(cache, model)), measurement(session))
    _assert_same(measurement(from_cache(cache, model, MixingProbe(), KernelProbe(), tokens=ids)), measurement(session))
    few = {key: value for key, value in cache.items() if "pattern" not in key}
    with pytest.raises(HookError, match=r"layer 0 .*'pattern' \(blocks.0.attn.hook_pattern\)"):
        from_cache(few, model)
    with pytest.raises(HookError, match="keep its batch dimension"):
        from_cache({key: value[0] for key, value in cache.items()}, model)
    with pytest.raises(HookError, match=r"does not fit|has shape"):
        from_cache(cache, model, tokens=ids[:, 1:])


# ---- hooks -------------------------------------------------------------------------------------------------------


def hooks_of(bridge: Any) -> dict[str, tuple[int, ...]]:
    """How many hooks of each kind every module has."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    found = {}
    for name, module in bridge.named_modules(remove_duplicate=False):
        lists = tuple(len(getattr(module, kind)) for kind in kinds)
        lens = tuple(len(getattr(module, kind, ())) for kind in ("fwd_hooks", "bwd_hooks"))
        found[name] = (*lists, *lens)
    return found


class Stop(Exception):
    pass


@pytest.mark.parametrize(("name", "warm"), [("gpt2", True), ("gpt2", False), ("llama_grouped", True)])
@pytest.mark.parametrize("how", ["normal", "exception", "interrupt", "nested", "nested exception", "probe fails"])
def test_only_the_users_hooks_remain(name: str, warm: bool, how: str) -> None:
    bridge, ids = bridged(name)[1], families.tokens(2, 8)
    other = bridged(name)[1]
    fired = []
    for each in (bridge, other):
        point = each.blocks[1].hook_in
        point.add_hook(lambda value, hook: fired.append(hook.name) or value)
        each.blocks[0].attn.register_forward_hook(lambda *a: fired.append("own") and None)
        if warm:  # a bridge adds permanent hooks of its own at its first forward
            each(ids)
    model = seen(bridge)

    error = {"exception": Stop, "nested exception": Stop, "probe fails": Stop, "interrupt": KeyboardInterrupt}.get(how)

    def stop(module, args, output):
        if error is not None and how != "probe fails":
            raise error

    class Failing(MixingProbe):
        name = "failing"

        def update(self, layer, record, batch):
            if how == "probe fails" and layer == 1:
                raise Stop

    def run() -> None:
        with attach(model, MixingProbe(), KernelProbe(), Failing()):
            if "nested" in how:
                with attach(model, MixingProbe()):
                    model(ids)
            model(ids)

    handle = bridge.blocks[2].register_forward_hook(stop)
    try:
        if error is None:
            run()
        else:
            with pytest.raises(error):
                run()
    finally:
        handle.remove()
    if not warm:  # exactly what one forward pass of the user's own leaves
        bridge(ids)
        other(ids)
    assert hooks_of(bridge) == hooks_of(other)
    fired.clear()
    bridge(ids)
    assert fired.count("own") == 1
    assert len(fired) == 2


def test_a_session_measures_the_users_own_calls() -> None:
    """The live bridge is called, not ours: strings of calls, a mask of 0 and 1, generation of gradients."""
    bridge = bridged("llama_grouped")[1]
    model, ids = seen(bridge), families.tokens(4, 8)
    with attach(model, MixingProbe(), KernelProbe()) as session:
        bridge(ids[:2])
        bridge(ids[2:]).sum().backward()
    with attach(model, MixingProbe(), KernelProbe()) as whole, torch.no_grad():
        model(ids)
    _assert_same(measurement(session), measurement(whole))
