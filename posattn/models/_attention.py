"""posattn's place in the attention interface of transformers.

Models that look their attention function up in `transformers.AttentionInterface` hand it the rotated queries and keys,
the values and the mask. For every implementation X that such a model uses there is a registered `posattn_X`: it shows
q, k and v to the ports of the calling module, lets X itself compute the output, and shows that too. Fast attention so
stays in use. Where X is "eager" and its [heads, N, N] weights would be large (soft caps and sinks have no fast
attention in PyTorch), the same output is computed block by block instead.

A port is a bare `nn.Identity`, so PyTorch's own forward hooks read and change what passes, and nothing happens where
nobody listens. Ports hang on modules from outside (weakly), so that the model holds nothing of ours.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import sys
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from posattn.errors import HookError, UnsupportedModelError
from posattn.models.tiles import blockwise_attention

PREFIX = "posattn_"
#: numbers that an eager pattern may have before the output is computed block by block instead
EAGER_LIMIT = 2**24


@dataclasses.dataclass(frozen=True)
class Call:
    """What an attention module asked of its attention function."""

    heads: int
    key_heads: int
    width: int
    value_width: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: bool


class Ports:
    """Where one attention module's tensors pass: q [B,H,N,d], k, v [B,K,N,d], z [B,N,H,d], and on demand the rest.

    `pattern` [B,H,N,N] and `lse` [B,H,N] are made only when somebody listens; `lse` is empty where the attention
    function in use does not give it.
    """

    def __init__(self) -> None:
        self.q, self.k, self.v, self.z, self.pattern, self.lse = (nn.Identity() for _ in range(6))
        self.call: Call | None = None

    def wants(self, name: str) -> bool:
        """Whether anybody listens at a port."""
        return bool(getattr(self, name)._forward_hooks)


_PORTS: WeakKeyDictionary[nn.Module, Ports] = WeakKeyDictionary()


def ports_of(module: nn.Module) -> Ports:
    """The ports of an attention module, made at the first request."""
    return _PORTS.setdefault(module, Ports())


@contextlib.contextmanager
def through_ports(model: nn.Module) -> Iterator[None]:
    """While open, `model` runs its attention through the ports; then every part has its own implementation again."""
    changed: list[tuple[Any, Any]] = []
    known: set[int] = set()
    try:
        for module in model.modules():
            config = getattr(module, "config", None)
            mine = getattr(config, "_attn_implementation", None)
            if config is None or id(config) in known or (isinstance(mine, str) and mine.startswith(PREFIX)):
                continue
            known.add(id(config))
            if hasattr(config, "_attn_implementation_internal"):
                # not through the property, which would change the parts of a configuration along with the whole
                changed.append((config, mine))
                config._attn_implementation_internal = _register(mine or "eager")
        yield
    finally:
        for config, mine in changed:
            config._attn_implementation_internal = mine


def _register(base: str) -> str:
    """Make `posattn_{base}` known to transformers, once."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise UnsupportedModelError(
            "this version of transformers has no attention interface: install transformers 4.53 or newer"
        ) from error
    name = PREFIX + base
    attentions, masks = AttentionInterface(), AttentionMaskInterface()
    if name not in attentions:
        AttentionInterface.register(name, functools.partial(_attend, base))
        # eager attention wants numbers to add, [N,N] of them; a flag a pair is smaller, and none at all where causal
        source = "sdpa" if base == "eager" else base
        if source in masks:
            AttentionMaskInterface.register(name, masks[source])
    return name


def _attend(
    base: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **keywords: Any,
) -> tuple[Tensor, Tensor | None]:
    ports = _PORTS.get(module)
    if ports is None:
        return _underlying(base, module, query, key, value, attention_mask, keywords)
    if query.shape[2] != key.shape[2]:
        raise HookError(
            f"{type(module).__name__} was called with cached keys ({key.shape[2]} for {query.shape[2]} queries): only "
            "whole sequences can be measured"
        )
    if keywords.get("position_bias") is not None:
        raise UnsupportedModelError(f"{type(module).__name__} adds a learned position bias, which is not supported")
    scale = keywords.get("scaling")
    softcap, sinks = keywords.get("softcap"), keywords.get("s_aux")
    ports.call = Call(
        heads=query.shape[1],
        key_heads=key.shape[1],
        width=query.shape[-1],
        value_width=value.shape[-1],
        scale=float(scale) if scale is not None else 1 / math.sqrt(query.shape[-1]),
        window=keywords.get("sliding_window"),
        softcap=softcap,
        sinks=sinks is not None,
    )
    query, key, value = ports.q(query), ports.k(key), ports.v(value)
    lse = weights = None
    if ports.wants("lse"):
        found = _with_lse(base, module, query, key, value, attention_mask, keywords, ports.call.scale)
        output, lse = found if found is not None else (None, None)
        ports.lse(query.new_empty(0) if lse is None else lse)
    else:
        output = None
    if output is None:
        output, weights = _underlying(base, module, query, key, value, attention_mask, keywords)
    output = ports.z(output)
    if ports.wants("pattern"):
        ports.pattern(_pattern(query, key, attention_mask, ports.call.scale, softcap, sinks))
    return output, weights


def _underlying(
    base: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, keywords: Any
) -> tuple[Tensor, Tensor | None]:
    if base != "eager":
        from transformers import AttentionInterface

        return AttentionInterface()[base](module, query, key, value, mask, **keywords)
    if query.shape[0] * query.shape[1] * query.shape[2] ** 2 > EAGER_LIMIT and not keywords.get("dropout"):
        scale = keywords.get("scaling")
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        softcap, sinks = keywords.get("softcap"), keywords.get("s_aux")
        return blockwise_attention(query, key, value, float(scale), mask, softcap, sinks), None
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise UnsupportedModelError(f"{type(module).__name__} has no eager attention function of its own")
    return eager(module, query, key, value, _additive(mask, query), **keywords)


def _additive(mask: Tensor | None, query: Tensor) -> Tensor:
    """The mask in the form that eager attention adds to its scores."""
    n = query.shape[2]
    if mask is None:
        mask = torch.ones(n, n, dtype=torch.bool, device=query.device).tril()[None, None]
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, torch.finfo(query.dtype).min)


def _pattern(
    query: Tensor, key: Tensor, mask: Tensor | None, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """The weights [B,H,N,N] of what the attention function was given, in float32 or better."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = query.to(dtype) @ key.to(dtype).mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None or (mask.dtype != torch.bool and mask.dim() == 2):
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~causal, torch.finfo(dtype).min)
        if mask is not None:  # flash attention is handed one flag a token
            scores = scores.masked_fill(mask[:, None, None] == 0, torch.finfo(dtype).min)
    elif mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(dtype).min)
    else:
        scores = scores + mask
    if sinks is None:
        return scores.softmax(-1)
    extra = sinks.to(dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
    return torch.cat((scores, extra), -1).softmax(-1)[..., :-1]


def _with_lse(
    base: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    keywords: Any,
    scale: float,
) -> tuple[Tensor, Tensor] | None:
    """Output and row normalisers from one flash attention, where PyTorch has one for this call; else None.

    The normalisers are a by-product that `scaled_dot_product_attention` drops; with them the weights need no second
    pass over the keys.
    """
    plain = base == "sdpa" and mask is None and getattr(module, "is_causal", True) and not keywords.get("dropout")
    if not plain or keywords.get("softcap") is not None or keywords.get("s_aux") is not None:
        return None
    if torch.is_grad_enabled() and query.requires_grad:
        return None
    sharing = query.shape[1] // key.shape[1]
    width = query.shape[-1]
    if value.shape[-1] != width:
        return None
    with torch.no_grad():
        if query.device.type == "cpu":
            key, value = (x.repeat_interleave(sharing, dim=1) if sharing > 1 else x for x in (key, value))
            output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, 0.0, True, scale=scale
            )[:2]
            return output.transpose(1, 2), lse
        half = query.dtype in (torch.bfloat16, torch.float16)
        if query.device.type == "cuda" and half and width % 8 == 0 and width <= 256:
            # grouped key heads are understood by the kernel itself
            output, lse = torch.ops.aten._scaled_dot_product_flash_attention(
                query, key, value, 0.0, True, False, scale=scale
            )[:2]
            return output.transpose(1, 2), lse[..., : query.shape[2]]
    return None
