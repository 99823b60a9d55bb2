"""A small transformer written out by hand that implements `Model`: for tests that need no TransformerLens.

Pre-norm blocks, learned absolute positions, grouped queries, an optional sink per head. Every point is computed in
plain torch and shown to the observers, so expected values can be recomputed from `record`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from posattn.models.base import Batch, Intervention, LayerInfo, Model, Observer, OutputMap, Point, PositionScheme


class ToyTransformer(nn.Module):
    """The weights of a toy model."""

    def __init__(
        self,
        vocab: int = 23,
        width: int = 12,
        layers: int = 3,
        heads: int = 4,
        key_heads: int = 2,
        head_dim: int = 3,
        context: int = 64,
        sinks: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape: int, scale: float = 0.5) -> nn.Parameter:
            return nn.Parameter(scale * torch.randn(*shape, generator=generator))

        self.embedding = weight(vocab, width, scale=1.0)
        self.positions = weight(context, width)
        self.unembedding = weight(width, vocab)
        self.queries = weight(layers, width, heads, head_dim)
        self.keys = weight(layers, width, key_heads, head_dim)
        self.values = weight(layers, width, key_heads, head_dim)
        self.output = weight(layers, heads, head_dim, width)
        self.up = weight(layers, width, 2 * width)
        self.down = weight(layers, 2 * width, width)
        self.sinks = weight(layers, heads, scale=1.0) if sinks else None


class Toy(Model):
    """A `ToyTransformer` as a `Model`."""

    def __init__(self, module: ToyTransformer | None = None, tokenizer: Any = None, **options: Any) -> None:
        self.module = module or ToyTransformer(**options)
        self.name, self.revision, self.family, self.adapter = "toy", None, "Toy", "toy"
        self.processing = {}
        self.tokenizer = tokenizer
        weights = self.module
        self.vocab_size, self.d_model = weights.embedding.shape
        self.context = len(weights.positions)
        n_layers, _, heads, head_dim = weights.queries.shape
        self.layers = tuple(
            LayerInfo(t, heads, weights.keys.shape[2], head_dim, parallel=False) for t in range(n_layers)
        )
        self._observers: list[tuple[set[Point], Observer, set[int]]] = []

    @property
    def device(self) -> torch.device:
        return self.module.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.module.embedding.dtype

    def embed(self, tokens: Tensor) -> Tensor:
        return self.module.embedding[tokens]

    def __call__(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        return self._run(self.embed(tokens), mask, tokens)

    def from_embeddings(self, embeddings: Tensor, mask: Tensor | None = None) -> Tensor:
        return self._run(embeddings, mask, None)

    def _run(self, embeddings: Tensor, mask: Tensor | None, tokens: Tensor | None) -> Tensor:
        w = self.module
        b, n = embeddings.shape[:2]
        real = torch.ones(b, n, dtype=torch.bool) if mask is None else mask
        batch = Batch(tokens, real)
        positions = (real.long().cumsum(-1) - 1).clamp(min=0)
        x = embeddings + w.positions[positions]
        visible = torch.ones(n, n, dtype=torch.bool).tril() & real[:, None, None, :]
        for t, layer in enumerate(self.layers):
            record: dict[Point, Tensor] = {"resid_pre": x}
            normed = nn.functional.layer_norm(x, x.shape[-1:])
            record["attn_in"] = normed
            for point, matrix in (("q", w.queries), ("k", w.keys), ("v", w.values)):
                record[point] = torch.einsum("bnd,dhe->bnhe", normed, matrix[t])  # type: ignore[literal-required]
            repeat = layer.n_heads // layer.n_key_heads
            k, v = (record[point].repeat_interleave(repeat, 2) for point in ("k", "v"))
            scores = torch.einsum("bihe,bjhe->bhij", record["q"], k) * layer.head_dim**-0.5
            scores = scores.masked_fill(~visible, -torch.inf)
            if w.sinks is not None:
                scores = torch.cat([scores, w.sinks[t][None, :, None, None].expand(b, -1, n, 1)], -1)
            pattern = scores.softmax(-1)[..., :n]  # rows of left padding are NaN, as in some real models
            record["pattern"] = pattern
            record["z"] = torch.einsum("bhij,bjhe->bihe", pattern.nan_to_num(), v)
            record["attn_out"] = torch.einsum("bihe,hed->bid", record["z"], w.output[t])
            middle = x + record["attn_out"]
            hidden = (nn.functional.layer_norm(middle, x.shape[-1:]) @ w.up[t]).relu()
            record["mlp_out"] = hidden @ w.down[t]
            x = record["resid_post"] = middle + record["mlp_out"]
            for points, observer, layers in list(self._observers):
                if t in layers:
                    observer(t, {point: record[point].detach() for point in points}, batch)
        return nn.functional.layer_norm(x, x.shape[-1:]) @ w.unembedding

    def scheme(self, layer: int, length: int) -> PositionScheme:
        sinks = None if self.module.sinks is None else self.module.sinks[layer].detach()
        return PositionScheme("absolute", self.layers[layer].head_dim ** -0.5, absolute="learned", sinks=sinks)

    def output_map(self, layer: int) -> OutputMap:
        return OutputMap(self.module.output[layer].detach(), None)

    @contextmanager
    def observe(
        self, points: Iterable[Point], observer: Observer, layers: Iterable[int] | None = None
    ) -> Iterator[None]:
        entry = (set(points), observer, set(range(self.n_layers) if layers is None else layers))
        self._observers.append(entry)
        try:
            yield
        finally:
            self._observers.remove(entry)

    def intervene(self, point: Any, change: Intervention, layers: Iterable[int] | None = None) -> Any:
        raise NotImplementedError


class ByteTokenizer:
    """One token a letter, modulo the vocabulary; `bos` is added by itself when `adds_bos`."""

    def __init__(self, vocab: int = 23, bos: int | None = 1, eos: int | None = 2, adds_bos: bool = False) -> None:
        self.vocab, self.bos_token_id, self.eos_token_id, self.adds_bos = vocab, bos, eos, adds_bos

    def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> Mapping[str, list[int]]:
        ids = [3 + byte % (self.vocab - 3) for byte in text.encode()]
        head = [self.bos_token_id] if add_special_tokens and self.adds_bos and self.bos_token_id is not None else []
        return {"input_ids": head + ids}
