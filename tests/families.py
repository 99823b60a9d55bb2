"""Tiny models with random weights, one of every family, through the real transformers classes.

`tiny(name, **overrides)` builds one (float32, evaluation mode, seeded); `FAMILIES` maps the names to a config maker.
Weights are larger than a fresh initialisation's, and biases and norms are random too, so that every term of every
formula shows in the result: a forgotten bias, "+1" or scale fails a test at once.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import torch

VOCAB = 97
WINDOW = 5  # smaller than any length the tests use


@dataclasses.dataclass(frozen=True)
class Family:
    """One tiny configuration: the transformers class names and the config's keywords."""

    model: str
    config: str
    keywords: dict[str, Any]

    def make_config(self, **overrides: Any) -> Any:
        import transformers

        return getattr(transformers, self.config)(**{**self.keywords, **overrides})


def _llama_like(model: str, config: str, **keywords: Any) -> Family:
    return Family(
        model,
        config,
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            **keywords,
        },
    )


def _rope(kind: str, **keywords: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **keywords}}


_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_NEOX = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_FALCON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "new_decoder_architecture": False,
    **_SPECIAL,
}
_GEMMA = {"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": WINDOW}

FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": VOCAB,
            "n_embd": 32,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "gptj": Family(
        "GPTJForCausalLM",
        "GPTJConfig",
        {
            "vocab_size": VOCAB,
            "n_embd": 32,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 64,
            "rotary_dim": 4,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "tie_word_embeddings": False,
        },
    ),
    "gpt_neox": Family("GPTNeoXForCausalLM", "GPTNeoXConfig", {**_NEOX, **_rope("default", partial_rotary_factor=1.0)}),
    "gpt_neox_partial": Family(
        "GPTNeoXForCausalLM", "GPTNeoXConfig", {**_NEOX, **_rope("default", partial_rotary_factor=0.25)}
    ),
    "opt": Family(
        "OPTForCausalLM",
        "OPTConfig",
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "word_embed_proj_dim": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            **_SPECIAL,
        },
    ),
    "bloom": Family(
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 3, "n_head": 4, **_SPECIAL},
    ),
    "bloom12": Family(
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": VOCAB, "hidden_size": 48, "n_layer": 2, "n_head": 12, **_SPECIAL},
    ),
    "mpt": Family(
        "MptForCausalLM",
        "MptConfig",
        {
            "vocab_size": VOCAB,
            "d_model": 36,
            "n_heads": 6,  # not a power of two
            "n_layers": 3,
            "expansion_ratio": 2,
            "max_seq_len": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "falcon_rope": Family("FalconForCausalLM", "FalconConfig", {**_FALCON, "multi_query": True, "alibi": False}),
    "falcon_alibi": Family(
        "FalconForCausalLM",
        "FalconConfig",
        {**_FALCON, "multi_query": False, "alibi": True, "parallel_attn": False, "bias": True},
    ),
    "llama": _llama_like("LlamaForCausalLM", "LlamaConfig", num_key_value_heads=4),
    "llama_grouped": _llama_like("LlamaForCausalLM", "LlamaConfig", attention_bias=True),
    "llama_mqa": _llama_like("LlamaForCausalLM", "LlamaConfig", num_key_value_heads=1, head_dim=12),
    "llama_linear": _llama_like("LlamaForCausalLM", "LlamaConfig", **_rope("linear", factor=3.0)),
    "llama_dynamic": _llama_like(
        "LlamaForCausalLM", "LlamaConfig", max_position_embeddings=8, **_rope("dynamic", factor=3.0)
    ),
    "llama_llama3": _llama_like(
        "LlamaForCausalLM",
        "LlamaConfig",
        **_rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16),
    ),
    "llama_yarn": _llama_like(
        "LlamaForCausalLM", "LlamaConfig", **_rope("yarn", factor=4.0, original_max_position_embeddings=16)
    ),
    "mistral": _llama_like("MistralForCausalLM", "MistralConfig", sliding_window=WINDOW),
    "qwen2": _llama_like("Qwen2ForCausalLM", "Qwen2Config"),
    "qwen3": _llama_like("Qwen3ForCausalLM", "Qwen3Config", head_dim=12),
    "gemma2": _llama_like(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        **_GEMMA,
        num_hidden_layers=2,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=10.0,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gemma3": _llama_like(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        **_GEMMA,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
        },
    ),
    "phi": _llama_like(
        "PhiForCausalLM", "PhiConfig", num_key_value_heads=4, **_rope("default", partial_rotary_factor=0.5)
    ),
    "phi3": _llama_like("Phi3ForCausalLM", "Phi3Config"),
    "phi3_longrope": _llama_like(
        "Phi3ForCausalLM",
        "Phi3Config",
        original_max_position_embeddings=8,
        **_rope(
            "longrope",
            short_factor=[1.0, 1.1, 1.2, 1.3],
            long_factor=[2.0, 3.0, 4.0, 5.0],
            original_max_position_embeddings=8,
        ),
    ),
    "olmo2": _llama_like("Olmo2ForCausalLM", "Olmo2Config"),
    "smollm3": _llama_like("SmolLM3ForCausalLM", "SmolLM3Config", no_rope_layers=[1, 0, 1]),
    "gpt_oss": _llama_like(
        "GptOssForCausalLM",
        "GptOssConfig",
        head_dim=8,
        num_hidden_layers=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
        **_rope("yarn", factor=4.0, original_max_position_embeddings=16),
    ),
    "granite": _llama_like(
        "GraniteForCausalLM",
        "GraniteConfig",
        residual_multiplier=0.3,
        attention_multiplier=0.2,
        embedding_multiplier=2.0,
        logits_scaling=3.0,
    ),
}


#: more architectures, for the self-check alone
EXTRA: dict[str, Family] = {
    "cohere": _llama_like("CohereForCausalLM", "CohereConfig"),
    "cohere2": _llama_like(
        "Cohere2ForCausalLM", "Cohere2Config", num_hidden_layers=4, head_dim=8, sliding_window=WINDOW
    ),
    "stablelm": _llama_like("StableLmForCausalLM", "StableLmConfig"),
    "starcoder2": _llama_like("Starcoder2ForCausalLM", "Starcoder2Config", sliding_window=WINDOW),
    "glm4": _llama_like("Glm4ForCausalLM", "Glm4Config", head_dim=8),
    "olmo3": _llama_like("Olmo3ForCausalLM", "Olmo3Config", num_hidden_layers=4, sliding_window=WINDOW),
    "exaone4": _llama_like(
        "Exaone4ForCausalLM",
        "Exaone4Config",
        num_hidden_layers=4,
        sliding_window=WINDOW,
        sliding_window_pattern=4,
    ),
    "qwen2_window": _llama_like(
        "Qwen2ForCausalLM", "Qwen2Config", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "gpt_neo": Family(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": WINDOW,
            "max_position_embeddings": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
}


def randomise(model: torch.nn.Module, seed: int = 0, scale: float = 0.25) -> None:
    """Give every parameter a visible random value: matrices N(0, scale²), vectors perturbed around what they are."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() < 2:
                parameter.add_((0.2 if "norm" in name or "ln" in name else 0.3) * noise)
            else:
                parameter.copy_(scale * noise)


def tiny(name: str, *, seed: int = 0, attn_implementation: str | None = None, **overrides: Any) -> Any:
    """A tiny random model of family `name` (also of `EXTRA`); `overrides` are config fields and win over its own."""
    import transformers

    family = FAMILIES[name] if name in FAMILIES else EXTRA[name]
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = family.make_config(**overrides)
        if attn_implementation is not None:
            config._attn_implementation = attn_implementation
        model = getattr(transformers, family.model)(config)
    randomise(model, seed)
    return model.float().eval()


def tokens(batch: int = 2, length: int = 12, seed: int = 0) -> torch.Tensor:
    """Random token ids [batch, length] without the special ones."""
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def names(*, without: tuple[str, ...] = ()) -> list[str]:
    """The family names, for `pytest.mark.parametrize`."""
    return [name for name in FAMILIES if name not in without]


def assert_output_map(output: Any, values: Any, atol: float = 2e-5) -> None:
    """z through an `OutputMap` is attn_out (values: z, attn_out and, with a post-norm, post_scale)."""
    out = torch.einsum("bnhd,hde->bne", values["z"], output.weight)
    if output.bias is not None:
        out = out + output.bias
    if output.norm_weight is not None:
        if output.norm_centres:
            out = out - out.mean(-1, keepdim=True)
        out = out / values["post_scale"] * output.norm_weight
        if output.norm_bias is not None:
            out = out + output.norm_bias
    torch.testing.assert_close(out * output.multiplier, values["attn_out"], rtol=0, atol=atol)
