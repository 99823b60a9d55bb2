"""TransformerLens' `TransformerBridge` (2.16 and newer, default and compatibility mode) as a `Model`.

A bridge keeps the transformers model and wraps its parts; every part has hook points that are modules, so that
PyTorch's own hooks read them without any conversion or copy. What differs between architectures and is settled here:

* what a block adds for attention is the output of the post-attention norm where there is one, times a residual
  multiplier; BLOOM and MPT add the residual inside the attention or MLP module, so their output projection is read;
* queries and keys are read after QK-norm where the model has one;
* positions count real tokens, so position ids are passed along with a mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from posattn.errors import HookError, InputError, UnsupportedModelError
from posattn.models._reading import original, scheme_of, text_config
from posattn.models._taps import (
    PassWatch,
    Tap,
    TappedModel,
    batch_of,
    check_pattern,
    heads_first,
    like_raw,
    scaled_by,
    split_heads,
    whole_stream,
)
from posattn.models.base import Batch, LayerInfo, OutputMap, Point, PositionScheme
from posattn.models.positions import real_positions

#: model types whose attention, or whose MLP, module adds the residual stream itself
_ATTENTION_ADDS_RESIDUAL = {"bloom"}
_MLP_ADDS_RESIDUAL = {"bloom", "mpt"}


class BridgeModel(TappedModel):
    """A loaded `TransformerBridge`, seen through `posattn.models.base.Model`."""

    def __init__(self, bridge: Any, *, name: str | None = None, revision: str | None = None, tokenizer: Any = None):
        self.module = bridge
        self._hf: Any = bridge.original_model
        self._config = text_config(self._hf.config)
        self._blocks = _blocks(bridge)
        set_attention(self._hf, "eager")  # what TransformerLens itself asks for: no other path returns the pattern
        compatibility = bool(getattr(bridge, "compatibility_mode", False))
        self.name = name or getattr(bridge.cfg, "model_name", None) or self._hf.config._name_or_path or "model"
        self.revision = revision or getattr(self._hf.config, "_commit_hash", None)
        self.family = getattr(bridge.cfg, "architecture", None) or type(self._hf).__name__
        self.adapter = "bridge-compat" if compatibility else "bridge"
        self.processing = {"compatibility_mode": compatibility}
        if compatibility:
            self.processing["fold_ln"] = bool(getattr(bridge.cfg, "layer_norm_folding", False))
        self.tokenizer = tokenizer if tokenizer is not None else getattr(bridge, "tokenizer", None)
        self.d_model = int(bridge.cfg.d_model)
        self.vocab_size = int(self._config.vocab_size)
        self.context = _context(self._config)
        self.layers = tuple(self._layer_info(t) for t in range(len(self._blocks)))

    # ------------------------------------------------------------------------------------------------------ running it

    @property
    def device(self) -> torch.device:
        return next(self._hf.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self._hf.parameters()).dtype

    def __call__(
        self, tokens: Int[Tensor, "b n"], mask: Bool[Tensor, "b n"] | None = None
    ) -> Float[Tensor, "b n vocab"]:
        return self._forward(tokens, mask)

    def embed(self, tokens: Int[Tensor, "b n"]) -> Float[Tensor, "b n d"]:
        return self._hf.get_input_embeddings()(tokens.to(self.device))

    def from_embeddings(
        self, embeddings: Float[Tensor, "b n d"], mask: Bool[Tensor, "b n"] | None = None
    ) -> Float[Tensor, "b n vocab"]:
        return self._forward(embeddings, mask)

    def _forward(self, given: Tensor, mask: Tensor | None) -> Tensor:
        given = given.to(self.device)
        if self.context is not None and given.shape[1] > self.context:
            raise InputError(
                f"{given.shape[1]} tokens are more than {self.name} takes ({self.context}): use a shorter length"
            )
        keywords: dict[str, Any] = {}
        if mask is not None:
            if mask.shape != given.shape[:2]:
                raise InputError(f"mask {tuple(mask.shape)} does not fit tokens {tuple(given.shape[:2])}")
            mask = mask.to(self.device)
            if not bool(mask.all()):  # a full mask changes nothing
                keywords["attention_mask"] = mask.long()
                if self._takes_positions:
                    keywords["position_ids"] = real_positions(mask)
        logits = self.module(given, return_type="logits", **keywords)
        if not isinstance(logits, Tensor):
            raise UnsupportedModelError(f"{self.name} returned {type(logits).__name__}, not logits")
        return logits

    @cached_property
    def _takes_positions(self) -> bool:
        return "position_ids" in inspect.signature(self._hf.forward).parameters

    # -------------------------------------------------------------------------------------------------- what it is like

    def _attention(self, layer: int) -> Any:
        return self._blocks[layer].attn

    def _layer_info(self, layer: int) -> LayerInfo:
        block, attention = self._blocks[layer], self._attention(layer)
        heads = int(getattr(original(attention), "num_heads", 0) or self.module.cfg.n_heads)
        inner = _features(attention.o)[0]
        width = inner // heads
        keys = _features(attention.k)[1] // width
        if heads * width != inner or heads % keys:
            raise UnsupportedModelError(
                f"layer {layer} of {self.name}: {heads} query heads and {keys} key heads do not fit a width of {inner}"
            )
        parallel = "Parallel" in type(block).__name__
        return LayerInfo(index=layer, n_heads=heads, n_key_heads=keys, head_dim=width, parallel=parallel)

    def scheme(self, layer: int, length: int) -> PositionScheme:
        if length < 1:
            raise InputError(f"a position scheme needs a length of at least 1, got {length}")
        sinusoidal = getattr(self.module.cfg, "positional_embedding_type", None) == "sinusoidal"
        info = self.layers[self._chosen([layer])[0]]
        return scheme_of(self._hf, original(self._attention(layer)), layer, length, info.head_dim, sinusoidal)

    def output_map(self, layer: int) -> OutputMap:
        info = self.layers[self._chosen([layer])[0]]
        weight, bias = _weight_and_bias(self._attention(layer).o)
        norm = self._post_norm(layer)
        shaped = weight.reshape(info.n_heads, info.head_dim, -1)
        multiplier = self._multiplier(layer)
        if norm is None:
            return OutputMap(weight=shaped, bias=bias, multiplier=multiplier)
        norm_weight, norm_bias, centres = probe_norm(original(norm), weight.shape[-1], weight)
        return OutputMap(shaped, bias, multiplier, norm_weight, norm_bias, centres)

    def _post_norm(self, layer: int) -> Any | None:
        return _residual_norm(self._blocks[layer], "hook_attn_out", "attn")

    def _multiplier(self, layer: int) -> float:
        return float(getattr(original(self._blocks[layer]), "residual_multiplier", 1.0))

    # ----------------------------------------------------------------------------------------------------------- hooks

    def _tap(self, point: Point, layer: int) -> Tap | None:
        block, attention = self._blocks[layer], self._attention(layer)
        width = self.layers[layer].head_dim
        match point:
            case "resid_pre":
                return Tap(block.hook_in)
            case "resid_post":
                return Tap(block.hook_out)
            case "attn_in":
                return Tap(attention.hook_in, read=whole_stream)
            case "attn_out":
                if (norm := self._post_norm(layer)) is not None:
                    source = norm.hook_out
                elif self._config.model_type in _ATTENTION_ADDS_RESIDUAL:
                    source = attention.o.hook_out
                else:
                    source = attention.hook_out
                return Tap(source, read=scaled_by(self._multiplier(layer)))
            case "mlp_out":
                if (norm := _residual_norm(block, "hook_mlp_out", "mlp")) is not None:
                    source = norm.hook_out
                elif self._config.model_type in _MLP_ADDS_RESIDUAL:
                    source = _last_projection(block.mlp)
                elif (getattr(block, "hook_aliases", None) or {}).get("hook_mlp_out") == "mlp.out.hook_out":
                    source = _last_projection(block.mlp)  # OPT: no MLP module, only its two projections
                else:
                    source = block.mlp.hook_out
                return Tap(source, read=scaled_by(self._multiplier(layer)))
            case "q" | "k":
                normed = getattr(attention, f"hook_{point}_normed", None)
                if isinstance(normed, nn.Module) and _part(attention, f"{point}_norm") is not None:
                    # a norm over single heads runs on [B,H,N,d], one over the whole projection on [B,N,H·d]
                    reader = _normed_heads(width)
                    return Tap(normed, read=_clipped(reader, attention), write=_normed_back)
                reader = _clipped(split_heads(width), attention)
                return Tap(getattr(attention, point).hook_out, read=reader, write=like_raw)
            case "v":
                return Tap(attention.v.hook_out, read=_clipped(split_heads(width), attention))
            case "z":
                return Tap(attention.o.hook_in, read=split_heads(width), write=like_raw)
            case "pattern":
                return Tap(attention.hook_pattern, read=check_pattern)
            case "post_scale":
                norm = self._post_norm(layer)
                return None if norm is None else Tap(norm.hook_scale)
        raise InputError(f"unknown point {point!r}")

    def _watch(self, watch: PassWatch, handles: list[Any]) -> None:
        def before(module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            tokens = keywords.get("input_ids", args[0] if args else None)
            for cache in (keywords.get("past_key_values"), keywords.get("cache")):
                if cache is not None and hasattr(cache, "get_seq_length") and cache.get_seq_length() > 0:
                    raise HookError(f"{self.name} was called with cached keys: only whole sequences can be measured")
            mask = keywords.get("attention_mask", args[1] if len(args) > 1 else None)
            watch.begin(batch_of(self.name, tokens, keywords.get("inputs_embeds"), mask))

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            watch.end()

        handles.append(self._hf.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(self._hf.register_forward_hook(after))


# ------------------------------------------------------------------------------------------------------------- helpers


def _blocks(bridge: Any) -> list[Any]:
    name = type(bridge.original_model).__name__
    try:
        blocks = list(bridge.blocks)
    except (AttributeError, TypeError):
        raise UnsupportedModelError(
            f"{name} has no single stack of blocks: only decoder-only models are supported"
        ) from None
    for t, block in enumerate(blocks):
        attention = _part(block, "attn")
        if attention is None:
            raise UnsupportedModelError(f"layer {t} of {name} has no attention: there is no attention to measure")
        missing = [part for part in ("q", "k", "v", "o") if _part(attention, part) is None]
        if missing or not hasattr(attention, "hook_pattern"):
            lacking = ", ".join(missing) or "pattern"
            raise UnsupportedModelError(
                f"layer {t} of {name}: TransformerLens gives no access to its attention's {lacking}: not supported"
            )
    if not blocks:
        raise UnsupportedModelError(f"{name} has no layers")
    return blocks


def _part(component: Any, name: str) -> Any | None:
    """A wrapped part of a component that really exists in this layer."""
    declared = getattr(component, "submodules", None) or {}
    if name not in declared:
        return None
    part = getattr(component, name, None)
    return part if part is not None and getattr(part, "original_component", None) is not None else None


def _residual_norm(block: Any, alias: str, part: str) -> Any | None:
    """The norm that a block applies to a part's output before it adds it to the residual stream, if there is one.

    TransformerLens names it by pointing the block's alias at it, past the part itself.
    """
    path = (getattr(block, "hook_aliases", None) or {}).get(alias)
    if not isinstance(path, str) or path.count(".") != 1:
        return None
    name, leaf = path.split(".")
    return _part(block, name) if leaf == "hook_out" and name != part else None


def set_attention(hf_model: nn.Module, implementation: str) -> None:
    """Choose the attention path of every part of a transformers model."""
    for module in hf_model.modules():
        config = getattr(module, "config", None)
        if config is not None and getattr(config, "_attn_implementation", implementation) != implementation:
            config._attn_implementation = implementation


def _context(config: Any) -> int | None:
    if getattr(config, "model_type", "") == "bloom":  # linear biases, no table
        return None
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    factor = 1.0
    if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) == "dynamic":
        factor = float(rope.get("factor", 1.0))  # made to go beyond the trained length, by this factor
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        if isinstance(value := getattr(config, name, None), int) and value > 0:
            return int(value * factor)
    return None


def _is_transposed(linear: nn.Module) -> bool:
    return type(linear).__name__ == "Conv1D"  # transformers' own [in, out] linear layer


def _features(projection: Any) -> tuple[int, int]:
    linear = original(projection)
    rows, columns = linear.weight.shape[-2:]
    return (rows, columns) if _is_transposed(linear) else (columns, rows)


def _weight_and_bias(projection: Any) -> tuple[Tensor, Tensor | None]:
    """[in, out] weight and [out] bias of an output projection."""
    linear = original(projection)
    weight = linear.weight if _is_transposed(linear) else linear.weight.mT
    bias = getattr(linear, "bias", None)
    return weight.detach(), None if bias is None else bias.detach()


def probe_norm(norm: nn.Module, width: int, like: Tensor) -> tuple[Tensor, Tensor | None, bool]:
    """Weight, bias and whether it centres, of a norm layer, found by running it.

    Whatever the layer's convention ("1 + weight", LayerNorm, RMSNorm), a large input of ±1 comes out as ±weight + bias.
    """
    with torch.no_grad():
        sign = torch.ones(width, dtype=like.dtype, device=like.device)
        sign[1::2] = -1
        shift = norm(torch.zeros_like(sign)[None])[0]
        weight = (norm((sign * 1024)[None])[0] - shift) * sign
        constant = norm(torch.full_like(sign, 1024)[None])[0]
    centres = bool((constant - shift).abs().max() < 0.5 * weight.abs().max())
    return weight, shift if bool(shift.any()) else None, centres


def _normed_heads(width: int) -> Callable[[Tensor, Batch], Tensor]:
    by_head, flat = heads_first(width), split_heads(width)

    def read(raw: Tensor, batch: Batch) -> Tensor:
        if raw.dim() == 4 and raw.shape[2] == batch.mask.shape[1] and raw.shape[1] != batch.mask.shape[1]:
            return by_head(raw, batch)
        if raw.dim() == 4 and raw.shape[1] == raw.shape[2]:
            return by_head(raw, batch)  # as many heads as positions: the norm runs on [B,H,N,d]
        return flat(raw, batch)

    return read


def _normed_back(value: Tensor, raw: Tensor) -> Tensor:
    """The inverse of `_normed_heads`, which cases it tells apart in the same way."""
    n = value.shape[1]
    if raw.dim() == 4 and ((raw.shape[2] == n and raw.shape[1] != n) or raw.shape[1] == raw.shape[2]):
        return value.transpose(1, 2)
    return like_raw(value, raw)


def _clipped(read: Callable[[Tensor, Batch], Tensor], attention: Any) -> Callable[[Tensor, Batch], Tensor]:
    """Models with `clip_qkv` clamp their projections before they use them."""
    inner = original(attention)
    limit = getattr(inner, "clip_qkv", None) or getattr(getattr(inner, "config", None), "clip_qkv", None)
    if not limit:
        return read
    bound = float(limit)
    return lambda raw, batch: read(raw, batch).clamp(-bound, bound)


def _last_projection(mlp: Any) -> nn.Module:
    return mlp.submodules["out"].hook_out if "out" in (getattr(mlp, "submodules", None) or {}) else mlp.hook_out
