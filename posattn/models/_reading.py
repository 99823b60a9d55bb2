"""Reading a position scheme from a transformers model as it runs.

Tables come from the model's own code: its rotary module is run (on a copy, so that variants whose frequencies follow
the length keep their state), its ALiBi builder is called, its attention module's own `apply_rotary_pos_emb` decides
which features are paired. Configuration fields serve only where the module has no say (the window of a layer).
"""

from __future__ import annotations

import copy
import inspect
import math
import sys
from typing import Any, Literal

import torch
from torch import Tensor, nn

from posattn.errors import UnsupportedModelError
from posattn.models.base import Alibi, PositionScheme, Rotary


def original(module: Any) -> Any:
    """The transformers module under a TransformerLens component (the module itself where it is not wrapped)."""
    inner = getattr(module, "original_component", None)
    return module if inner is None else inner


def text_config(config: Any) -> Any:
    """The language model's part of a configuration."""
    getter = getattr(config, "get_text_config", None)
    return getter() if getter is not None else config


def scheme_of(
    model: nn.Module, attention: Any, layer: int, length: int, head_dim: int, sinusoidal: bool
) -> PositionScheme:
    """The position scheme of one transformers attention module for inputs of `length` tokens."""
    config = text_config(model.config)
    facts: dict[str, Any] = {
        "scale": _scale(attention, head_dim),
        "window": _window(config, attention, layer, length),
        "softcap": _number(getattr(attention, "attn_logit_softcapping", None)),
        "sinks": _sinks(attention),
    }
    alibi = _alibi(model, attention, length)
    if alibi is not None:
        return PositionScheme(kind="alibi", alibi=alibi, **facts)
    if (rotary := _rotary(model, config, attention, layer, length)) is not None:
        return PositionScheme(kind="rotary", rotary=rotary, **facts)
    absolute: Literal["learned", "sinusoidal"] | None = _absolute(model, sinusoidal)
    return PositionScheme(kind="absolute" if absolute else "none", absolute=absolute, **facts)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _sinks(attention: Any) -> Tensor | None:
    sinks = getattr(attention, "sinks", None)
    return sinks.detach() if isinstance(sinks, Tensor) else None


def _scale(attention: Any, head_dim: int) -> float:
    for name in ("scaling", "softmax_scale", "inv_norm_factor"):
        value = getattr(attention, name, None)
        if isinstance(value, (int, float)):
            return float(value)
    if type(attention).__name__.startswith("GPTNeoSelf"):
        return 1.0  # GPT-Neo does not scale
    divisor = getattr(attention, "scale_attn", None)  # GPT-J keeps √d
    return 1.0 / float(divisor) if divisor is not None else head_dim**-0.5


def layer_type(config: Any, attention: Any, layer: int) -> str | None:
    """The kind of layer in models that mix local and global ones ("sliding_attention", "full_attention", …)."""
    for name in ("layer_type", "attention_type"):
        if isinstance(value := getattr(attention, name, None), str):
            return value
    kinds = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)  # the latter: GPT-Neo
    return kinds[layer] if kinds and layer < len(kinds) else None


def _window(config: Any, attention: Any, layer: int, length: int) -> int | None:
    kind = layer_type(config, attention, layer)
    if kind == "chunked_attention":
        chunk = int(config.attention_chunk_size)
        if length > chunk:
            raise UnsupportedModelError(
                f"layer {layer} attends within chunks of {chunk} tokens, which is no window: use at most {chunk} tokens"
            )
        return None
    if kind in ("local", "global"):  # GPT-Neo
        return int(config.window_size) if kind == "local" else None
    if kind is not None:
        if "sliding" not in kind:
            return None
        window = getattr(attention, "sliding_window", None) or getattr(config, "sliding_window", None)
        return None if window is None else int(window)
    if hasattr(attention, "sliding_window"):
        window = attention.sliding_window
    else:
        window = getattr(config, "sliding_window", None)
        if getattr(config, "use_sliding_window", True) is False:
            window = None
    return None if window is None else int(window)


def _absolute(model: nn.Module, sinusoidal: bool) -> Literal["learned", "sinusoidal"] | None:
    if sinusoidal:
        return "sinusoidal"
    for name, module in model.named_modules():
        leaf = name.rsplit(".", 1)[-1]
        if leaf in ("wpe", "embed_positions", "position_embeddings", "pos_embed", "position_embedding"):
            return "sinusoidal" if "Sinusoidal" in type(original(module)).__name__ else "learned"
    return None


# ---------------------------------------------------------------------------------------------------------------- ALiBi


def _alibi(model: nn.Module, attention: Any, length: int) -> Alibi | None:
    config = model.config
    base = getattr(model, getattr(model, "base_model_prefix", ""), model)
    device = next(model.parameters()).device
    dtype = next(model.parameters()).dtype
    code = sys.modules.get(type(attention).__module__)
    ones = torch.ones(1, max(length, 2), dtype=torch.long, device=device)
    kind = getattr(config, "model_type", "")
    if kind == "mpt":
        slopes = _mpt(base, attention, 2, device)
        table = _mpt(base, attention, length, device)
        return Alibi(slopes=slopes[:, 1] - slopes[:, 0], table=table)
    if kind == "bloom":
        heads = attention.num_heads

        def build(dtype: torch.dtype) -> Tensor:
            return base.build_alibi_tensor(ones, heads, dtype).reshape(heads, -1)  # type: ignore[operator]

        exact = build(torch.float32)
        return Alibi(slopes=exact[:, 1] - exact[:, 0], table=build(dtype)[:, :length].float())
    if kind == "falcon" and getattr(config, "alibi", False):
        heads = attention.num_heads
        # scores are (q·k + bias)/√d, so the bias that enters the softmax is a √d-th of the table
        scale = 1.0 / math.sqrt(attention.head_dim)
        rounded = code.build_alibi_tensor(ones, heads, dtype).reshape(heads, -1)[:, :length]  # type: ignore[union-attr]
        step = code.build_alibi_tensor(ones[:, :2], heads, torch.float32).reshape(heads, -1)  # type: ignore[union-attr]
        return Alibi(slopes=(step[:, 1] - step[:, 0]) * scale, table=rounded.float() * scale)
    return None


def _mpt(base: Any, attention: Any, length: int, device: torch.device) -> Tensor:
    return base.build_mpt_alibi_tensor(attention.n_heads, length, device=device).reshape(attention.n_heads, -1).float()


# --------------------------------------------------------------------------------------------------------------- rotary


def _uses_rotary(config: Any, attention: Any, layer: int) -> bool:
    """False at the layers that a model leaves without positions (NoPE)."""
    if (use := getattr(attention, "use_rope", None)) is not None:
        return bool(use)
    kind = getattr(config, "model_type", "")
    if kind == "cohere2":
        return getattr(attention, "sliding_window", None) is not None
    if kind.startswith("exaone4") or kind == "exaone_moe":
        return getattr(attention, "sliding_window", None) is None or bool(getattr(attention, "is_sliding", False))
    return True


def _rotary(model: nn.Module, config: Any, attention: Any, layer: int, length: int) -> Rotary | None:
    if not _uses_rotary(config, attention, layer):
        return None
    if (buffer := getattr(attention, "embed_positions", None)) is not None and hasattr(attention, "rotary_dim"):
        return _from_buffer(attention, buffer, length)
    found = _rotary_module(model, config, attention, layer)
    if found is None:
        return None
    module, keywords = found
    dtype, device = next(model.parameters()).dtype, _place(model, module)
    # at least two positions: the first one alone (cos 1, sin 0) would not show how the table repeats its columns
    cos, sin = _run(module, keywords, max(length, 2), dtype, device)
    half_cos, half_sin, layout = _halves(cos, sin)
    interleaved = _is_interleaved(attention, cos, sin, half_cos, half_sin, layout)
    # the angle of one step, from a table in full precision
    step_cos, step_sin, _ = _halves(*_run(module, keywords, max(length, 2), torch.float32, device))
    return Rotary(
        cos=half_cos[:length].float(),
        sin=half_sin[:length].float(),
        interleaved=interleaved,
        frequencies=torch.atan2(step_sin[1], step_cos[1]),
    )


def _rotary_module(model: nn.Module, config: Any, attention: Any, layer: int) -> tuple[Any, dict[str, Any]] | None:
    kind = layer_type(config, attention, layer)
    own = getattr(attention, "rotary_emb", None)
    named: dict[str, Any] = {}
    for name, module in model.named_modules():
        leaf = name.rsplit(".", 1)[-1]
        if leaf in ("rotary_emb", "rotary_emb_local") and leaf not in named:
            named[leaf] = original(module)
    module = original(own) if isinstance(own, nn.Module) else named.get("rotary_emb")
    if kind == "sliding_attention" and "rotary_emb_local" in named:
        module = named["rotary_emb_local"]
    if module is None:
        return None
    takes_kind = "layer_type" in inspect.signature(module.forward).parameters
    return module, {"layer_type": kind} if takes_kind and kind is not None else {}


def _place(model: nn.Module, module: Any) -> torch.device:
    """Where the model's tables are made: its parameters may be elsewhere (offloaded) while it does not run."""
    device = next(model.parameters()).device
    if device.type != "meta":
        return device
    return next((b.device for b in module.buffers() if b.device.type != "meta"), torch.device("cpu"))


def _run(
    module: Any, keywords: dict[str, Any], length: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    # frequencies of "dynamic" and "longrope" follow the length and are kept in the module: work on a copy
    module = copy.deepcopy(module)
    positions = torch.arange(length, device=device)[None]
    with torch.no_grad():
        out = module(torch.zeros(1, length, 1, dtype=dtype, device=device), positions, **keywords)
    if isinstance(out, Tensor) and out.is_complex():  # Llama 4 multiplies neighbouring pairs by e^iθ
        out = out.real, out.imag
    if not (isinstance(out, tuple) and len(out) == 2):
        raise UnsupportedModelError(f"the rotary module {type(module).__name__} gives no cosine and sine tables")
    cos, sin = (table.reshape(length, -1) for table in out)
    if not bool(cos[0].any()):  # GPT-J and CodeGen give the sines first: at position 0 they are 0
        cos, sin = sin, cos
    return cos, sin


def _halves(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, str]:
    """One column per pair, and how the table repeats them: "halves", "neighbours", or "once" (not repeated)."""
    half = cos.shape[-1] // 2
    if (
        cos.shape[-1] % 2 == 0
        and torch.equal(sin[:, :half], sin[:, half:])
        and torch.equal(cos[:, :half], cos[:, half:])
    ):
        return cos[:, :half], sin[:, :half], "halves"
    if cos.shape[-1] % 2 == 0 and torch.equal(sin[:, 0::2], sin[:, 1::2]) and torch.equal(cos[:, 0::2], cos[:, 1::2]):
        return cos[:, 0::2], sin[:, 0::2], "neighbours"
    return cos, sin, "once"


def _is_interleaved(attention: Any, cos: Tensor, sin: Tensor, half_cos: Tensor, half_sin: Tensor, layout: str) -> bool:
    """Whether the model pairs neighbouring features: decided by running its own `apply_rotary_pos_emb`."""
    code = sys.modules.get(type(attention).__module__)
    apply = getattr(code, "apply_rotary_pos_emb", None)
    if apply is None:
        return layout == "neighbours" or hasattr(code, "apply_rotary_emb")  # the latter: Llama 4's complex pairs
    n, width = cos.shape[0], 2 * half_cos.shape[-1]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 1, n, width, generator=generator).to(cos.device)
    cosine, sine = cos.float()[None], sin.float()[None]
    try:
        if len(inspect.signature(apply).parameters) == 3:  # GPT-J: one tensor [B,N,H,d], the sines first
            turned = apply(x.transpose(1, 2), sine, cosine).transpose(1, 2)
        else:
            turned = apply(x, x, cosine, sine)[0]
    except (TypeError, RuntimeError, ValueError):
        return layout == "neighbours"
    from posattn.models.positions import rotate

    positions = torch.arange(n, device=x.device)
    for interleaved in (False, True):
        table = Rotary(half_cos.float(), half_sin.float(), interleaved, half_sin)
        ours = rotate(x, table, positions)
        if torch.allclose(turned.float(), ours, atol=1e-5):
            return interleaved
    # some models first sort neighbours into halves (the products of q and k are those of neighbouring pairs)
    raise UnsupportedModelError(
        f"{type(attention).__name__} rotates its queries in a layout that is neither halves nor neighbouring pairs"
    )


def _from_buffer(attention: Any, buffer: Tensor, length: int) -> Rotary:
    """GPT-J and CodeGen keep one table [positions, sin | cos] and pair neighbours."""
    if length > buffer.shape[0]:
        raise UnsupportedModelError(f"length {length} is beyond the model's table of {buffer.shape[0]} positions")
    sin, cos = buffer[: max(length, 2)].chunk(2, dim=-1)
    frequencies = torch.atan2(sin[1].float(), cos[1].float())
    return Rotary(cos=cos[:length].float(), sin=sin[:length].float(), interleaved=True, frequencies=frequencies)
