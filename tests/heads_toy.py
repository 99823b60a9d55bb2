"""An attention-only model whose heads are written by hand: a previous-token head, an induction head that reads it, a
duplicate-token head and heads that do nothing. Their behaviour is known exactly.

The residual stream has four parts: token (one-hot), previous token, output, and a constant 1. Each head has two rotated
dimensions (one frequency) and one unrotated dimension a token.
"""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch import nn

from posattn.models.base import Batch, LayerInfo, Model, OutputMap, PositionScheme, Rotary

VOCAB, THETA, SHARP = 24, 0.1, 6000.0


class HandBuilt(Model):
    """Layer 0: head 0 previous token, head 1 nothing. Layer 1: head 0 induction, head 1 duplicate token."""

    def __init__(self, offset: int = 1) -> None:
        self.name, self.revision, self.family, self.adapter = "hand-built", None, "HandBuilt", "hand"
        self.processing, self.tokenizer, self.context = {}, None, None
        self.vocab_size, self.d_model = VOCAB, 3 * VOCAB + 1
        d = 2 + VOCAB
        self.layers = tuple(LayerInfo(t, 2, 2, d, False) for t in range(2))
        token, previous, output = (slice(i * VOCAB, (i + 1) * VOCAB) for i in range(3))
        q, k, v = (torch.zeros(2, 2, self.d_model, d, dtype=torch.float64) for _ in range(3))
        o = torch.zeros(2, 2, d, self.d_model, dtype=torch.float64)
        eye = torch.eye(VOCAB, dtype=torch.float64)
        angle = torch.tensor(-THETA * offset, dtype=torch.float64)
        q[0, 0, -1, :2] = SHARP * torch.stack([angle.cos(), angle.sin()])
        k[0, 0, -1, 0] = 1
        v[0, 0, token, 2:], o[0, 0, 2:, previous] = eye, eye
        q[1, 0, token, 2:], k[1, 0, previous, 2:] = 30 * eye, eye
        v[1, 0, token, 2:], o[1, 0, 2:, output] = eye, eye
        q[1, 1, token, 2:], k[1, 1, token, 2:] = 30 * eye, eye
        self.module = nn.ParameterList([nn.Parameter(x) for x in (q, k, v, o)])
        self._observers: list = []
        self._changes: list = []

    device, dtype = torch.device("cpu"), torch.float64

    def embed(self, tokens):
        x = torch.zeros(*tokens.shape, self.d_model, dtype=torch.float64)
        x[..., :VOCAB] = torch.nn.functional.one_hot(tokens, VOCAB)
        x[..., -1] = 1
        return x

    def __call__(self, tokens, mask=None):
        return self.from_embeddings(self.embed(tokens), mask, tokens)

    def from_embeddings(self, embeddings, mask=None, tokens=None):
        x, n = embeddings, embeddings.shape[1]
        batch = Batch(tokens, torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask)
        wq, wk, wv, wo = self.module
        for t in range(2):
            x = self._change("resid_pre", t, x, batch)
            q, k, v = (torch.einsum("bnx,hxd->bnhd", x, w[t]) for w in (wq, wk, wv))
            logits = torch.einsum("bihd,bjhd->bhij", self._turn(q), self._turn(k))
            hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
            pattern = logits.masked_fill(hidden, -torch.inf).softmax(-1)
            z = self._change("z", t, torch.einsum("bhij,bjhd->bihd", pattern, v), batch)
            points = {"resid_pre": x, "q": q, "k": k, "v": v, "z": z, "pattern": pattern}
            for wanted, observer, layers in list(self._observers):
                if t in layers:
                    observer(t, {name: points[name].detach() for name in wanted}, batch)
            x = x + torch.einsum("bnhd,hdx->bnx", z, wo[t])
        return 20 * x[..., 2 * VOCAB : 3 * VOCAB]

    def _turn(self, x):
        angle = THETA * torch.arange(x.shape[1], dtype=torch.float64)[:, None]
        a, b = x[..., 0], x[..., 1]
        turned = torch.stack([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)
        return torch.cat([turned, x[..., 2:]], -1)

    def _change(self, point, layer, x, batch):
        for name, change, layers in list(self._changes):
            if name == point and layer in layers:
                new = change(layer, x, batch)
                x = x if new is None else new
        return x

    def scheme(self, layer, length):
        angles = THETA * torch.arange(length, dtype=torch.float64)[:, None]
        rotary = Rotary(angles.cos(), angles.sin(), False, torch.tensor([THETA], dtype=torch.float64))
        return PositionScheme("rotary", 1.0, rotary=rotary)

    def output_map(self, layer):
        return OutputMap(self.module[3][layer].detach(), None)

    @contextmanager
    def observe(self, points, observer, layers=None):
        entry = (tuple(points), observer, set(range(2) if layers is None else layers))
        self._observers.append(entry)
        try:
            yield
        finally:
            self._observers.remove(entry)

    @contextmanager
    def intervene(self, point, change, layers=None):
        entry = (point, change, set(range(2) if layers is None else layers))
        self._changes.append(entry)
        try:
            yield
        finally:
            self._changes.remove(entry)
