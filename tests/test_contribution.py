"""Contribution kernels against vectors that are built one by one from the model's own weights and activations."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from posattn.errors import InputError, NothingMeasuredError
from posattn.probes.block import measure_block_mixing
from posattn.probes.contribution import KINDS, ContributionProbe, Contributions, as_distribution, projections
from posattn.probes.gains import cotangent_gains
from posattn.probes.session import Session
from posattn.tokens import load_tokens
from tests import families
from tests.toy import Toy

#: where a transformers model keeps its blocks, its attention, the output projection, and a post-attention norm
PLACES = {
    "gpt2": ("transformer.h", "attn", "c_proj", None),
    "gptj": ("transformer.h", "attn", "out_proj", None),
    "gpt_neox": ("gpt_neox.layers", "attention", "dense", None),
    "bloom": ("transformer.h", "self_attention", "dense", None),
    "mpt": ("transformer.blocks", "attn", "out_proj", None),
    "falcon_rope": ("transformer.h", "self_attention", "dense", None),
    "llama_grouped": ("model.layers", "self_attn", "o_proj", None),
    "phi": ("model.layers", "self_attn", "dense", None),
    "gemma2": ("model.layers", "self_attn", "o_proj", "post_attention_layernorm"),
    "gemma3": ("model.layers", "self_attn", "o_proj", "post_attention_layernorm"),
    "olmo2": ("model.layers", "self_attn", "o_proj", "post_attention_layernorm"),
    "gpt_oss": ("model.layers", "self_attn", "o_proj", None),
    "granite": ("model.layers", "self_attn", "o_proj", None),
}


def values_of(name: str, attention: Any, seen: dict[str, Tensor], heads: int) -> Tensor:
    """v [N,K,d] from what the projection modules gave."""
    if name == "gpt2":
        v = seen["c_attn"].chunk(3, -1)[2]
        return v.reshape(v.shape[0], heads, -1)
    if name in ("gpt_neox", "bloom"):  # [q, k, v] within each head
        fused = seen["query_key_value"]
        return fused.reshape(fused.shape[0], heads, 3, -1)[:, :, 2]
    if name == "mpt":
        v = seen["Wqkv"].chunk(3, -1)[2]
        return v.reshape(v.shape[0], heads, -1)
    if name == "falcon_rope":  # all queries, then one key head and one value head
        fused = seen["query_key_value"]
        return fused.reshape(fused.shape[0], heads + 2, -1)[:, -1:]
    v = seen["v_proj"]
    width = attention.head_dim
    return v.reshape(v.shape[0], -1, width)


def brute_force(name: str, model: Any, tokens: Tensor) -> dict[str, Tensor]:
    """The three kernels, averaged over documents, from vectors c_ij [N,N,D] built explicitly."""
    path, attention_name, output_name, norm_name = PLACES[name]
    blocks = model.get_submodule(path)
    multiplier = getattr(model.config, "residual_multiplier", 1.0)
    heads = model.config.num_attention_heads
    sums: dict[str, list[Any]] = {kind: [0.0] * len(blocks) for kind in ("energy", "projection", "value_norm")}
    for document in tokens:
        records: list[dict[str, Tensor]] = [{} for _ in blocks]
        handles = []
        for t, block in enumerate(blocks):
            record = records[t]

            def before(module, args, keywords, record=record):
                record["x"] = (args[0] if args else keywords["hidden_states"])[0]

            handles.append(block.register_forward_pre_hook(before, with_kwargs=True))
            attention = getattr(block, attention_name)
            for child_name, child in attention.named_children():
                if hasattr(child, "weight") or child_name == "hook_pattern":
                    child_name = {"v": "v_proj", "o": "o_proj"}.get(child_name, child_name)

                    def after(module, args, output, record=record, child_name=child_name):
                        record[child_name] = output[0]

                    handles.append(child.register_forward_hook(after))
        out = model(document[None], output_attentions=True)
        for handle in handles:
            handle.remove()
        for t, block in enumerate(blocks):
            record, attention = records[t], getattr(block, attention_name)
            pattern = record["hook_pattern"] if "hook_pattern" in record else out.attentions[t][0]  # [H,N,N]
            v = values_of(name, attention, record, heads)
            v = v.repeat_interleave(heads // v.shape[1], 1)
            projection = getattr(attention, output_name)
            weight = projection.weight if type(projection).__name__ == "Conv1D" else projection.weight.T
            mixed = torch.einsum("hij,jhd->ijhd", pattern, v).flatten(-2)  # one vector for each (target, source)
            vectors = mixed @ weight
            update = record[output_name]
            if norm_name is not None:
                norm = getattr(block, norm_name)
                epsilon = getattr(norm, "eps", None) or norm.variance_epsilon
                weight = norm.weight + (1 if name.startswith("gemma") else 0)
                divisor = (update.square().mean(-1, keepdim=True) + epsilon).sqrt()
                vectors = vectors * weight / divisor[:, None]
                update = norm(update)
            vectors, update = vectors * multiplier, update * multiplier
            norms = vectors.norm(dim=-1)
            sums["energy"][t] = sums["energy"][t] + (norms / record["x"].norm(dim=-1)) ** 2
            sums["value_norm"][t] = sums["value_norm"][t] + norms
            along = (vectors * update[:, None]).sum(-1) / update.square().sum(-1)[:, None]
            sums["projection"][t] = sums["projection"][t] + along.clamp(min=0)
    kernels = {kind: torch.stack(layers) / len(tokens) for kind, layers in sums.items()}
    return {kind: k if kind == "energy" else k / k.sum(-1, keepdim=True) for kind, k in kernels.items()}


def bridged(name: str) -> tuple[Any, Any]:
    """A tiny model in float64: the transformers one, and the same seen through posattn."""
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    from posattn.models.bridge import BridgeModel

    plain = families.tiny(name, attn_implementation="eager").double()
    plain.config._experts_implementation = "eager"  # the grouped one has no float64
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bridge = build_bridge_from_module(
            copy.deepcopy(plain), type(plain).__name__, hf_config=plain.config, model_name=name
        )
    return plain, BridgeModel(bridge)


@pytest.mark.parametrize("name", PLACES)
@torch.no_grad()
def test_kernels_equal_explicit_vectors(name: str) -> None:
    plain, model = bridged(name)
    tokens = families.tokens(2, 9)
    # GPT-OSS: the bridge's rotation rounds to float32 at another place than transformers', which moves the weights by
    # 1e-7; so its activations are read from the modules inside the bridge
    expected = brute_force(name, plain if name != "gpt_oss" else model.module.original_model, tokens)
    probe = ContributionProbe()
    with Session(model, (probe,)):
        model(tokens)
    found = probe.result()
    for kind, kernel in found.kernels.items():
        if kind == "key":
            continue
        assert float(expected[kind].abs().max()) > 0
        # results are stored in float32, whose own rounding is 6e-8
        torch.testing.assert_close(
            kernel.double(), expected[kind], rtol=1e-6, atol=1e-12, msg=lambda m, k=kind: f"{k}: {m}"
        )


# ---- the same on a toy model whose every point can be recomputed ----------------------------------------------------


def run(probe: ContributionProbe, model: Toy, ids: Tensor, mask: Tensor | None = None, batch: int = 8):
    with Session(model, (probe,)), torch.no_grad():
        for start in range(0, len(ids), batch):
            rows = slice(start, start + batch)
            model(ids[rows], None if mask is None else mask[rows])
    return probe.result()


def record_of(model: Toy, ids: Tensor) -> list[dict[str, Tensor]]:
    seen: list[dict[str, Tensor]] = []
    points = ["resid_pre", "attn_out", "mlp_out", "q", "k", "v", "z", "pattern"]
    with model.observe(points, lambda layer, record, batch: seen.append(dict(record))), torch.no_grad():  # type: ignore[arg-type]
        model(ids)
    return seen


def assert_same(left: Contributions, right: Contributions, rtol: float = 1e-5) -> None:
    for kind in left.kernels:
        torch.testing.assert_close(left.kernels[kind], right.kernels[kind], rtol=rtol, atol=1e-7, msg=kind)
    for name in ("mlp_size", "received", "received_std", "value_size"):
        torch.testing.assert_close(getattr(left, name), getattr(right, name), rtol=rtol, atol=1e-6, msg=name)


def test_padding_changes_nothing() -> None:
    model = Toy(sinks=True)
    ids = torch.randint(3, 23, (3, 7))
    plain = run(ContributionProbe(), model, ids)
    for left in (True, False):
        pad = torch.zeros(3, 2, dtype=torch.long)
        padded = torch.cat([pad, ids] if left else [ids, pad], 1)
        real = torch.cat([pad.bool(), ids > 0] if left else [ids > 0, pad.bool()], 1)
        assert_same(run(ContributionProbe(), model, padded, real), plain)


def test_documents_of_several_lengths_count_separately() -> None:
    model = Toy()
    ids = torch.randint(3, 23, (2, 6))
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[1, 4:] = False
    found = run(ContributionProbe(), model, ids, mask)
    assert found.counts.tolist() == [2, 2, 2, 2, 1, 1]
    alone = run(ContributionProbe(), model, ids[:1])
    torch.testing.assert_close(found.energy[:, 5], alone.energy[:, 5], rtol=1e-5, atol=1e-8)
    short = run(ContributionProbe(), model, ids[1:, :4])
    mean = (alone.energy[:, :4, :4] + short.energy) / 2
    torch.testing.assert_close(found.energy[:, :4, :4], mean, rtol=1e-5, atol=1e-8)


def test_batches_merging_and_states_change_nothing() -> None:
    model = Toy()
    ids = torch.randint(3, 23, (5, 6))
    whole = run(ContributionProbe(), model, ids)
    assert_same(run(ContributionProbe(), model, ids.flip(0), batch=2), whole)
    first, second, again = ContributionProbe(), ContributionProbe(), ContributionProbe()
    run(first, model, ids[:2])
    run(second, model, ids[2:])
    again.begin(model)
    again.load_state(first.state_tensors())
    again.merge(second)
    assert again.documents == 5
    assert_same(again.result(), whole)
    with pytest.raises(InputError, match="cannot merge"):
        again.merge(ContributionProbe(heads="independent"))


def test_independent_heads_drop_the_cross_terms() -> None:
    model = Toy()
    ids = torch.randint(3, 23, (1, 6))
    found = run(ContributionProbe(kinds=("energy",), heads="independent"), model, ids)
    for layer, record in enumerate(record_of(model, ids)):
        vectors = torch.einsum(
            "hij,jhe,hed->hijd",
            record["pattern"][0],
            record["v"][0].repeat_interleave(2, 1),
            model.output_map(layer).weight,
        )
        expected = vectors.square().sum(-1).sum(0) / record["resid_pre"][0].square().sum(-1)
        torch.testing.assert_close(found.energy[layer], expected, rtol=1e-4, atol=1e-8)
        together = vectors.sum(0).square().sum(-1) / record["resid_pre"][0].square().sum(-1)
        assert float((together - expected).abs().max()) > 1e-3  # the cross terms are there


def test_head_gains_equal_explicit_lengths() -> None:
    model = Toy()
    ids = torch.randint(3, 23, (2, 6))
    found = run(ContributionProbe(kinds=("head_gain",)), model, ids).kernels["head_gain"]
    for layer, record in enumerate(record_of(model, ids)):
        v = record["v"].repeat_interleave(2, 2)
        size = torch.einsum("bjhe,hed->bjhd", v, model.output_map(layer).weight).norm(dim=-1)
        expected = record["pattern"] * (size / record["resid_pre"].norm(dim=-1)[..., None]).mT[:, :, None]
        torch.testing.assert_close(found[layer], expected.mean(0), rtol=1e-4, atol=1e-7)


def test_key_kernel_equals_explicit_vectors() -> None:
    model = Toy(sinks=True)
    model.module.double()
    ids = torch.randint(3, 23, (1, 6))
    found = run(ContributionProbe(kinds=("key",)), model, ids)
    for layer, record in enumerate(record_of(model, ids)):
        q, k, v, z = (record[point][0] for point in ("q", "k", "v", "z"))
        k, v = (k - k.mean(0)).repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        apart = v[None] - z[:, None]  # [i,j,h,e]
        vectors = torch.einsum("hij,ijhe,hed->hijd", record["pattern"][0], apart, model.module.output[layer])
        size = q.norm(dim=-1).T[:, :, None] * k.norm(dim=-1).T[:, None] * (1 / 3)  # scale 1/√3, and 1/√d more
        expected = (vectors * size[..., None]).square().sum((0, -1)) / record["resid_pre"][0].square().sum(-1)
        torch.testing.assert_close(found.kernels["key"][layer].double(), expected, rtol=1e-6, atol=1e-12)


def test_key_vectors_are_the_softmax_derivative() -> None:
    """A_ij (v_j − z_i) δs is what attention's output changes by when one logit does, sink or no sink."""
    logits = torch.randn(5, 6, dtype=torch.float64)  # the last column is a sink
    values = torch.randn(5, 3, dtype=torch.float64)

    def output(change: Tensor) -> Tensor:
        weights = torch.cat([logits[:, :5] + change, logits[:, 5:]], 1).softmax(-1)[:, :5]
        return weights @ values

    change = torch.zeros(5, 5, dtype=torch.float64)
    change[4, 2] = 1.0
    _, derivative = torch.func.jvp(output, (torch.zeros_like(change),), (change,))
    weights = logits.softmax(-1)[:, :5]
    torch.testing.assert_close(derivative[4], weights[4, 2] * (values[2] - weights[4] @ values))


def test_facts_about_positions() -> None:
    model = Toy()
    ids = torch.randint(3, 23, (3, 5))
    found = run(ContributionProbe(), model, ids)
    for layer, record in enumerate(record_of(model, ids)):
        pattern = record["pattern"]
        share = torch.stack([pattern[:, :, j + 1 :, j].mean((1, 2)) for j in range(4)], 1)
        torch.testing.assert_close(found.received[layer, :4].float(), share.mean(0), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(found.received_std[layer, :4].float(), share.std(0), rtol=1e-3, atol=1e-6)
        assert float(found.received[layer, 4]) == 0
        size = torch.einsum("bjhe,hed->bjhd", record["v"].repeat_interleave(2, 2), model.module.output[layer])
        expected = size.square().sum(-1).mean(-1).sqrt().mean(0)
        torch.testing.assert_close(found.value_size[layer].float(), expected, rtol=1e-4, atol=1e-6)
        middle = record["resid_pre"] + record["attn_out"]
        mlp = (record["mlp_out"].norm(dim=-1) / middle.norm(dim=-1)).square().mean(0)
        torch.testing.assert_close(found.mlp_size[layer].float(), mlp, rtol=1e-4, atol=1e-6)


def test_projection_rows_sum_to_one_without_biases() -> None:
    """Before the negative parts are dropped, the shares of all sources make up the whole update."""
    model = Toy()
    (first, *_) = record_of(model, torch.randint(3, 23, (1, 6)))
    shares = projections(first["pattern"][0], first["v"][0], first["attn_out"][0], model.output_map(0))
    torch.testing.assert_close(shares.sum(-1), torch.ones(6), rtol=1e-4, atol=1e-5)


def test_saving_table_and_refusals(tmp_path) -> None:
    model = Toy()
    found = run(ContributionProbe(), model, torch.randint(3, 23, (2, 5)))
    again = Contributions.load(found.save(tmp_path / "contributions.safetensors"))
    assert_same(again, found)
    torch.testing.assert_close(again.gains, found.kernels["energy"] + found.kernels["key"])
    table = found.to_dataframe()
    assert len(table) == 4 * 3 * 5
    assert set(table["kernel"]) == set(KINDS)
    only = run(ContributionProbe(kinds=("energy",)), model, torch.randint(3, 23, (1, 5)))
    with pytest.raises(InputError, match="key kernel was not measured"):
        _ = only.gains
    with pytest.raises(NothingMeasuredError):
        ContributionProbe().result()
    with pytest.raises(InputError, match="kinds must be"):
        ContributionProbe(kinds=("attention",))
    with pytest.raises(InputError, match="heads must be"):
        ContributionProbe(heads="some")
    empty = as_distribution(torch.zeros(2, 2))
    assert empty.tolist() == [[1, 0], [0, 1]]


# ---- mixing with the MLP, and gains in random directions ------------------------------------------------------------


def test_block_mixing_raw_and_centred() -> None:
    model = Toy()
    ids = torch.randint(3, 23, (4, 5))
    raw, centred = measure_block_mixing(model, load_tokens(ids, model, batch_size=3))
    for layer, record in enumerate(record_of(model, ids)):
        parts = [record[point] for point in ("resid_pre", "attn_out", "mlp_out")]
        for found, vectors in ((raw, parts), (centred, [part - part.mean((0, 1)) for part in parts])):
            x, a, m = (part.norm(dim=-1) for part in vectors)
            torch.testing.assert_close(found.attention[layer].float(), (a / (x + a)).mean(), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(found.block[layer].float(), (a / (x + a + m)).mean(), rtol=1e-5, atol=1e-6)
    assert centred.centred
    assert not raw.centred


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "gptj"])
def test_random_direction_gains_equal_jacobian_products(name: str) -> None:
    """Every direction is drawn again, and pushed through the model's own modules by forward differentiation."""
    plain, model = bridged(name)
    ids = families.tokens(1, 6)
    found = cotangent_gains(model, load_tokens(ids, model), seed=5)
    blocks = plain.transformer.h
    patterns = plain(ids, output_attentions=True).attentions
    inputs: list[Tensor] = []
    updates: list[Tensor] = []
    handles = [block.register_forward_pre_hook(lambda m, a: inputs.append(a[0].detach())) for block in blocks]
    handles += [block.attn.register_forward_hook(lambda m, a, o: updates.append(o[0].detach())) for block in blocks]
    plain(ids)
    for handle in handles:
        handle.remove()
    for t, block in enumerate(blocks):
        x = inputs[t][0]
        generator = torch.Generator().manual_seed(5 * 1_000_003 * 1009 + t)
        r = torch.randn(6, 32, generator=generator).double()
        r = r / r.norm(dim=-1, keepdim=True)

        def value(y: Tensor, block=block) -> Tensor:
            normed = block.ln_1(y)
            return block.attn.c_attn(normed).chunk(3, -1)[2] if name == "gpt2" else block.attn.v_proj(normed)

        def through_mlp(y: Tensor, block=block) -> Tensor:
            return y + block.mlp(block.ln_2(y) if name == "gpt2" else block.ln_1(y))

        _, change = torch.func.jvp(value, (x,), (r,))
        output = block.attn.c_proj.weight if name == "gpt2" else block.attn.out_proj.weight.T
        mixed = torch.einsum("hij,jhd->ijhd", patterns[t][0], change.reshape(6, 4, -1)).flatten(-2) @ output
        torch.testing.assert_close(found.value[t].double(), mixed.square().sum(-1), rtol=2e-3, atol=1e-8)
        a = updates[t][0]
        reads = x if name == "gptj" else x + a
        after = through_mlp(reads) + (a if name == "gptj" else 0)
        _, change = torch.func.jvp(through_mlp, (reads,), (r,))
        unit = after / after.norm(dim=-1, keepdim=True)
        change = change - (change * unit).sum(-1, keepdim=True) * unit
        torch.testing.assert_close(found.mlp[t], change.square().sum(-1), rtol=2e-3, atol=1e-8)
    assert list(found.parallel) == [name == "gptj"] * len(blocks)


def test_random_direction_gains_do_not_depend_on_batches_or_padding() -> None:
    _, model = bridged("llama_grouped")
    ids = families.tokens(2, 6)
    whole = cotangent_gains(model, load_tokens(ids, model, batch_size=2))
    single = cotangent_gains(model, load_tokens(ids, model, batch_size=1))
    padded = torch.cat([ids, torch.zeros(2, 2, dtype=torch.long)], 1)
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[:, 6:] = False
    shorter = cotangent_gains(model, load_tokens(padded, model, mask=mask))
    for other in (single, shorter):
        for part in ("value", "key", "mlp"):
            torch.testing.assert_close(getattr(other, part), getattr(whole, part), rtol=1e-4, atol=1e-9)
    moved = cotangent_gains(model, load_tokens(ids, model), seed=1)
    assert float((moved.mlp - whole.mlp).abs().max()) > 1e-3
