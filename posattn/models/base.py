"""A loaded model, seen one way.

`Model` is the face that every other floor asks: which tensor is X, a, q, k, v or the attention pattern in layer t, in
one canonical shape; how many heads and key heads; what the layer does with position; how head outputs reach the
residual stream. Adapters (`hooked.py`, `bridge.py`, `plain.py`) implement it; nothing outside this package
may look at a model's modules or hook names.

Points (canonical shapes; B documents, N positions, D = d_model, H heads, K key heads, d head width):

    resid_pre  [B,N,D]   X: raw block input, before any norm
    attn_out   [B,N,D]   a: exactly what the block adds to X for attention (after projection, post-norm, multiplier)
    mlp_out    [B,N,D]   exactly what the block adds for the MLP
    resid_post [B,N,D]   block output
    attn_in    [B,N,D]   what the attention's projections read (after the input norm)
    q          [B,N,H,d] queries as the position scheme receives them (after bias and QK-norm, before rotation)
    k          [B,N,K,d] keys likewise
    v          [B,N,K,d] values
    z          [B,N,H,d] per-head weighted values, before the output projection
    pattern    [B,H,N,N] attention weights actually used (rows sum to 1, or to less where the layer has a sink)
    post_scale [B,N,1]   divisor of the post-attention norm (only layers whose `output.norm_weight` is not None)

and, from the plain adapter only, what its attention function sees (no pattern is ever formed for these):

    q_rot      [B,N,H,d] queries as they enter the product with the keys, after any rotation
    k_rot      [B,N,K,d] keys likewise
    lse        [B,N,H]   logarithm of each row's softmax normaliser; empty where the attention in use does not give it

`observe` delivers points layer by layer, so that nothing needs more than one layer in memory.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Point = Literal[
    "resid_pre",
    "attn_out",
    "mlp_out",
    "resid_post",
    "attn_in",
    "q",
    "k",
    "v",
    "z",
    "pattern",
    "post_scale",
    "q_rot",
    "k_rot",
    "lse",
]


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotary embedding of one layer, tabulated from the model as it runs (never from a config field).

    `cos` and `sin` [N, d_rot/2] hold the attention factor of scaled variants too, so a rotated pair is
    (x·cos − y·sin, y·cos + x·sin) with cos² + sin² = factor². `interleaved` pairs (0,1),(2,3)… (GPT-J) against
    (i, i + d_rot/2) (Llama, NeoX). `frequencies` θ_t [d_rot/2] in radians per position, sign included.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool
    frequencies: Tensor

    @property
    def width(self) -> int:
        """How many leading dimensions of each head are rotated (d_rot)."""
        return 2 * self.cos.shape[-1]


@dataclasses.dataclass(frozen=True)
class Alibi:
    """Linear bias −slope_h·(i−j), in the units of the logits that enter the softmax (scale already applied).

    `table` [H,N] is the bias that the model adds to the key at each position, as it really computes it: up to a
    constant per row the same thing, except that some models round it (Falcon forms slope·position in bfloat16).
    """

    slopes: Tensor  # [H]
    table: Tensor | None = None  # [H,N]


@dataclasses.dataclass(frozen=True)
class PositionScheme:
    """Everything one layer does with position, for one length.

    `kind` is the main scheme: "rotary", "alibi", "absolute" (positions enter through the embeddings only),
    "shortformer" (absolute embeddings added to queries and keys), or "none" (a NoPE layer).
    `window` w: exactly w keys are visible, the query's own included. `softcap` c: logits become c·tanh(logits/c).
    `sinks` [H]: an extra learned logit per head that takes part in the softmax and is then dropped.
    `scale` multiplies q·k. Order: scale, + bias, softcap, mask, sink, softmax, as the model does it.
    """

    kind: Literal["rotary", "alibi", "absolute", "shortformer", "none"]
    scale: float
    rotary: Rotary | None = None
    alibi: Alibi | None = None
    absolute: Literal["learned", "sinusoidal"] | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def describe(self) -> dict[str, Any]:
        """The scheme in words and plain numbers, for provenance and the support table."""
        facts: dict[str, Any] = {"kind": self.kind, "scale": self.scale}
        if self.rotary is not None:
            facts["rotary"] = {"width": self.rotary.width, "interleaved": self.rotary.interleaved}
        if self.alibi is not None:
            facts["alibi"] = {"slopes": [float(s) for s in self.alibi.slopes]}
        for name in ("absolute", "window", "softcap"):
            if (value := getattr(self, name)) is not None:
                facts[name] = value
        if self.sinks is not None:
            facts["sinks"] = True
        return facts


@dataclasses.dataclass(frozen=True)
class OutputMap:
    """How the heads of one layer reach the residual stream.

    attn_out = multiplier · norm(Σ_h z_h W_O^h + b_O), where norm is absent (`norm_weight` None) or
    x ↦ norm_weight ⊙ (x [− mean x if `norm_centres`]) / post_scale [+ norm_bias], with post_scale from the point of
    that name.
    """

    weight: Tensor  # [H, d, D]
    bias: Tensor | None  # [D]
    multiplier: float = 1.0
    norm_weight: Tensor | None = None  # [D], already with any "+1" convention applied
    norm_bias: Tensor | None = None
    norm_centres: bool = False


@dataclasses.dataclass(frozen=True)
class LayerInfo:
    """The shape of one layer's attention."""

    index: int
    n_heads: int
    n_key_heads: int
    head_dim: int
    parallel: bool  # attention and MLP read the same X

    def key_head(self, head: int) -> int:
        """The key head that query head `head` reads."""
        return head // (self.n_heads // self.n_key_heads)


@dataclasses.dataclass(frozen=True)
class Batch:
    """What an observer needs to know of the forward pass it sees. `mask` is True at real tokens (any padding side)."""

    tokens: Int[Tensor, "b n"] | None
    mask: Bool[Tensor, "b n"]


Observer = Callable[[int, Mapping[str, Tensor], Batch], None]
Intervention = Callable[[int, Tensor, Batch], Tensor | None]


class Model(abc.ABC):
    """The one face of a loaded language model. See the module docstring for points and shapes."""

    name: str
    revision: str | None
    family: str  # the architecture's class name, e.g. "LlamaForCausalLM"
    adapter: str  # "bridge", "bridge-compat", "hooked", "plain"
    processing: dict[str, Any]  # folding, centring …: whatever changes X against the checkpoint
    module: Any  # the live object underneath
    tokenizer: Any | None
    d_model: int
    vocab_size: int
    context: int | None  # longest input the model takes; None where there is no limit
    layers: tuple[LayerInfo, ...]

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    @abc.abstractmethod
    def device(self) -> torch.device: ...

    @property
    @abc.abstractmethod
    def dtype(self) -> torch.dtype: ...

    @abc.abstractmethod
    def __call__(
        self, tokens: Int[Tensor, "b n"], mask: Bool[Tensor, "b n"] | None = None
    ) -> Float[Tensor, "b n vocab"]:
        """Logits. Positions count real tokens, so a padded row gives what the unpadded one would."""

    @abc.abstractmethod
    def embed(self, tokens: Int[Tensor, "b n"]) -> Float[Tensor, "b n d"]:
        """Input (token) embeddings, before positions are added: where attributions are taken."""

    @abc.abstractmethod
    def from_embeddings(
        self, embeddings: Float[Tensor, "b n d"], mask: Bool[Tensor, "b n"] | None = None
    ) -> Float[Tensor, "b n vocab"]:
        """Logits from token embeddings; differentiable. `from_embeddings(embed(x)) == self(x)`."""

    @abc.abstractmethod
    def scheme(self, layer: int, length: int) -> PositionScheme:
        """What layer `layer` does with position on an input of `length` tokens, read from the model as it runs."""

    @abc.abstractmethod
    def output_map(self, layer: int) -> OutputMap:
        """How the heads of `layer` reach the residual stream."""

    @abc.abstractmethod
    def observe(
        self, points: Iterable[Point], observer: Observer, layers: Iterable[int] | None = None
    ) -> AbstractContextManager[None]:
        """While the context is open, call `observer(layer, {point: tensor}, batch)` once per layer and forward pass.

        Tensors are detached views in canonical shape: use them at once, do not keep or write to them.
        Only these hooks are removed on exit, whatever happens.

        Raises:
            HookError: on exit from a forward pass in which a point of some layer never fired, naming both.
        """

    @abc.abstractmethod
    def intervene(
        self,
        point: Literal["z", "q", "k", "attn_in", "resid_pre"],
        change: Intervention,
        layers: Iterable[int] | None = None,
    ) -> AbstractContextManager[None]:
        """While the context is open, `point` becomes what `change(layer, tensor, batch)` returns (None: unchanged)."""
