"""TransformerLens' `HookedTransformer` (2.x and 3.x) as a `Model`.

The class is gone from TransformerLens 4, so nothing here imports it: an object is recognised by its class's name, and
everything is read from the object itself. Its weights were processed when it was loaded (norms folded, weights
centred); that changes the residual stream against the checkpoint and is recorded in `processing`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from posattn.errors import InputError, UnsupportedModelError
from posattn.models._taps import PassWatch, Tap, TappedModel, batch_of, check_pattern, like_raw, split_heads
from posattn.models.base import Alibi, Batch, LayerInfo, OutputMap, Point, PositionScheme, Rotary

_KINDS = {"standard", "rotary", "alibi", "shortformer"}


class HookedModel(TappedModel):
    """A loaded `HookedTransformer`, seen through `posattn.models.base.Model`."""

    adapter = "hooked"

    def __init__(self, model: Any, *, name: str | None = None, revision: str | None = None):
        cfg: Any = model.cfg
        self._kind: str = cfg.positional_embedding_type
        if self._kind not in _KINDS:
            raise UnsupportedModelError(f"positions of the kind {self._kind!r} are not supported")
        if cfg.attention_dir != "causal":
            raise UnsupportedModelError(f"{cfg.model_name} attends both ways: only causal models are supported")
        self.module = model
        self._blocks = list(model.blocks)
        self.name = name or cfg.model_name or "HookedTransformer"
        self.revision = revision
        self.family = cfg.original_architecture or "HookedTransformer"
        normalization = cfg.normalization_type
        self.processing = {
            "normalization": normalization,
            "fold_ln": bool(normalization and normalization.endswith("Pre")),
        }
        self.tokenizer = model.tokenizer
        self.d_model, self.vocab_size = int(cfg.d_model), int(cfg.d_vocab)
        self.context = None if self._kind == "alibi" else int(cfg.n_ctx)
        heads = int(cfg.n_heads)
        grouped = cfg.n_key_value_heads is not None and not cfg.ungroup_grouped_query_attention
        keys = int(cfg.n_key_value_heads or heads) if grouped else heads
        parallel = bool(cfg.parallel_attn_mlp)
        self.layers = tuple(LayerInfo(t, heads, keys, int(cfg.d_head), parallel) for t in range(len(self._blocks)))

    # ------------------------------------------------------------------------------------------------------ running it

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.module.parameters()).dtype

    def __call__(
        self, tokens: Int[Tensor, "b n"], mask: Bool[Tensor, "b n"] | None = None
    ) -> Float[Tensor, "b n vocab"]:
        tokens = tokens.to(self.device)
        return self.module(tokens, return_type="logits", attention_mask=self._mask(tokens, mask))

    def embed(self, tokens: Int[Tensor, "b n"]) -> Float[Tensor, "b n d"]:
        return self.module.embed(tokens.to(self.device))

    def from_embeddings(
        self, embeddings: Float[Tensor, "b n d"], mask: Bool[Tensor, "b n"] | None = None
    ) -> Float[Tensor, "b n vocab"]:
        embeddings = embeddings.to(self.device)
        real = self._mask(embeddings, mask)
        residual, shortformer = embeddings, None
        if self._kind in ("standard", "shortformer"):
            shape = torch.zeros(embeddings.shape[:2], dtype=torch.long, device=self.device)
            positions = self.module.hook_pos_embed(self.module.pos_embed(shape, 0, real))
            if self._kind == "standard":
                residual = embeddings + positions
            else:
                shortformer = positions
        return self.module(
            residual,
            return_type="logits",
            start_at_layer=0,
            shortformer_pos_embed=shortformer,
            attention_mask=real,
        )

    def _mask(self, given: Tensor, mask: Tensor | None) -> Tensor | None:
        if self.context is not None and given.shape[1] > self.context:
            raise InputError(
                f"{given.shape[1]} tokens are more than {self.name} takes ({self.context}): use a shorter length"
            )
        if mask is not None:
            if mask.shape != given.shape[:2]:
                raise InputError(f"mask {tuple(mask.shape)} does not fit tokens {tuple(given.shape[:2])}")
            if not bool(mask.all()):
                return mask.long().to(self.device)
        if self.tokenizer is not None and getattr(self.tokenizer, "padding_side", "right") == "left":
            # without a mask the model would guess one from the padding token, and take real tokens for padding
            return torch.ones(given.shape[:2], dtype=torch.long, device=self.device)
        return None

    # -------------------------------------------------------------------------------------------------- what it is like

    def scheme(self, layer: int, length: int) -> PositionScheme:
        if length < 1:
            raise InputError(f"a position scheme needs a length of at least 1, got {length}")
        cfg, attention = self.module.cfg, self._blocks[self._chosen([layer])[0]].attn
        cap = float(getattr(cfg, "attn_scores_soft_cap", -1.0) or -1.0)
        facts: dict[str, Any] = {
            "scale": 1.0 / float(attention.attn_scale),
            "window": int(cfg.window_size) if getattr(attention, "attn_type", "global") == "local" else None,
            "softcap": cap if cap > 0 else None,
            "sinks": attention.sinks.detach() if isinstance(getattr(attention, "sinks", None), Tensor) else None,
        }
        if self._kind == "rotary":
            return PositionScheme(kind="rotary", rotary=self._rotary(attention, length), **facts)
        if self._kind == "alibi":
            bias = attention.create_alibi_bias(cfg.n_heads, 2, self.device)
            return PositionScheme(kind="alibi", alibi=Alibi(slopes=-bias[:, 1, 0]), **facts)
        kind = "shortformer" if self._kind == "shortformer" else "absolute"
        return PositionScheme(kind=kind, absolute="learned", **facts)

    def _rotary(self, attention: Any, length: int) -> Rotary:
        cfg = self.module.cfg
        stretched = getattr(cfg, "use_dynamic_ntk_rope", False) or getattr(cfg, "use_logn_attn", False)
        trained = getattr(cfg, "train_seq_length", None) or cfg.n_ctx
        if stretched and length > trained:
            raise UnsupportedModelError(
                f"{self.name} rescales its positions beyond {trained} tokens, which is not supported: use fewer"
            )
        rows = max(length, 2)
        sin, cos = attention.rotary_sin, attention.rotary_cos
        if sin.shape[0] < rows:  # the table grows with the input: ask for what the model would make
            base = attention._rotary_base() if hasattr(attention, "_rotary_base") else cfg.rotary_base
            sin, cos = attention.calculate_sin_cos_rotary(cfg.rotary_dim, rows, base=base, dtype=cfg.dtype)
        interleaved = bool(cfg.rotary_adjacent_pairs)
        columns = slice(0, None, 2) if interleaved else slice(0, sin.shape[-1] // 2)
        sin = sin[:rows, columns].detach().float().to(self.device)
        cos = cos[:rows, columns].detach().float().to(self.device)
        return Rotary(cos[:length], sin[:length], interleaved, frequencies=torch.atan2(sin[1], cos[1]))

    def output_map(self, layer: int) -> OutputMap:
        attention = self._blocks[self._chosen([layer])[0]].attn
        weight, bias = attention.W_O.detach(), attention.b_O.detach()
        norm = self._post_norm(layer)
        if norm is None:
            return OutputMap(weight=weight, bias=bias)
        scale = getattr(norm, "w", None)
        scale = torch.ones_like(bias) if scale is None else scale.detach()
        shift = getattr(norm, "b", None)
        centres = type(norm).__name__.startswith("LayerNorm")
        return OutputMap(weight, bias, 1.0, scale, None if shift is None else shift.detach(), centres)

    def _post_norm(self, layer: int) -> Any | None:
        block = self._blocks[layer]
        if getattr(self.module.cfg, "use_normalization_before_and_after", False):
            return block.ln1_post
        code = sys.modules.get(type(block).__module__)
        post = getattr(code, "POST_NORM_ARCHITECTURES", ())  # OLMo 2: the block's only norms follow its parts
        return block.ln1 if self.family in post else None

    # ----------------------------------------------------------------------------------------------------------- hooks

    def _tap(self, point: Point, layer: int) -> Tap | None:
        block = self._blocks[layer]
        attention = block.attn
        width = self.layers[layer].head_dim
        match point:
            case "resid_pre" | "resid_post" | "attn_out":
                return Tap(getattr(block, f"hook_{point}"))
            case "mlp_out":
                if getattr(self.module.cfg, "attn_only", False):
                    return None
                return Tap(block.hook_mlp_out)
            case "attn_in":
                return Tap(attention, read=_whole, arguments=("query_input", "key_input", "value_input"))
            case "q" | "k":
                norm = getattr(attention, f"{point}_norm", None)
                source = getattr(attention, f"hook_{point}") if norm is None else norm
                return Tap(source, read=self._clipped(split_heads(width)), write=like_raw)
            case "v":
                return Tap(attention.hook_v, read=self._clipped(split_heads(width)))
            case "z":
                return Tap(attention.hook_z)
            case "pattern":
                return Tap(attention.hook_pattern, read=check_pattern)
            case "post_scale":
                norm = self._post_norm(layer)
                return None if norm is None else Tap(norm.hook_scale)
        raise InputError(f"unknown point {point!r}")

    def _clipped(self, read: Callable[[Tensor, Batch], Tensor]) -> Callable[[Tensor, Batch], Tensor]:
        limit = getattr(self.module.cfg, "clip_qkv", None)
        return read if limit is None else lambda raw, batch: read(raw, batch).clamp(-limit, limit)

    def _watch(self, watch: PassWatch, handles: list[Any]) -> None:
        seen: dict[str, Any] = {}

        def opened(module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            seen.clear()
            whole = not keywords.get("start_at_layer") and keywords.get("stop_at_layer") is None
            seen.update(open=True, whole=whole)

        def embedded(module: nn.Module, args: tuple[Any, ...]) -> None:
            if seen.get("open") and args and isinstance(args[0], Tensor):
                seen["tokens"] = args[0]

        def entered(module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            # the mask is known only here: the model may have made it from the padding tokens
            if seen.get("open") and not seen.get("begun"):
                seen["begun"] = True
                watch.begin(batch_of(self.name, seen.get("tokens"), args[0], keywords.get("attention_mask")))

        def closed(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if seen.get("whole"):
                watch.end()
            else:
                watch.abandon()
            seen.clear()

        handles.append(self.module.register_forward_pre_hook(opened, with_kwargs=True))
        handles.append(self.module.embed.register_forward_pre_hook(embedded))
        for block in self._blocks:
            handles.append(block.register_forward_pre_hook(entered, with_kwargs=True))
        handles.append(self.module.register_forward_hook(closed))


def _whole(raw: Tensor, batch: Batch) -> Tensor:
    if raw.dim() != 3 or raw.shape[:2] != batch.mask.shape:
        raise RuntimeError("not [batch, position, feature]")
    return raw
