"""Squared gains with random directions: of attention (through values and keys) and of the token-local MLP.

`ContributionProbe` takes the stream itself as the direction in which a source changes. A backward signal meets other
directions. Averaged over all of them, with J the Jacobian of what one position adds to another,

    E_g ‖Jᵀg‖²/‖g‖² = ‖J‖_F² / D = E_r ‖J r‖²/‖r‖²          (g, r isotropic)

so an isotropic *forward* change measures what an isotropic cotangent would meet, without any backward pass. Each
document runs twice in one batch, as it is and with r added to the stream of every layer, ‖r_j‖ = ε‖x_j‖:

* `resid_pre` of the second copy is that of the first plus r, layer by layer, so that nothing accumulates;
* `z` of the second copy is set to that of the first, so that attention adds the same and the MLP alone answers to r;
* values and keys of the second copy, minus the first's, over ε, are the directions δv, δk that take the place of v and
  k − k̄ in the kernels of `posattn.probes.contribution`.

The MLP's squared gain, its residual connection included, is γ_i = E ‖P_i(r + δm_i)‖² / ‖r‖². P_i removes the part
along the stream after the MLP: every reader of the stream normalises it, so a change of its length alone is (almost)
lost. Without P_i a token that is about to become an attention sink, whose MLP multiplies its length by a hundred, would
seem to have an enormous gain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posattn.errors import InputError, NothingMeasuredError
from posattn.models.base import Batch, Model
from posattn.probes.contribution import key_norms, squared_norms
from posattn.probes.measure import describe_model
from posattn.probes.session import as_a_model
from posattn.probes.statistics import Sums
from posattn.results import Provenance, Result, provenance
from posattn.tokens import Tokens, load_tokens

if TYPE_CHECKING:
    import pandas as pd

#: ε by dtype: large against rounding, small against the curvature of a norm
EPSILON = {torch.float64: 1e-4, torch.float32: 1e-2, torch.float16: 1e-1, torch.bfloat16: 2e-1}


@dataclasses.dataclass(frozen=True, eq=False)
class Gains(Result):
    """Squared gains in random directions, averaged over documents.

    `value` and `key` [T,N,N]: what source j adds to target i through its values and keys, against ‖x_j‖².
    `mlp` [T,N]: γ, the squared gain of the stream through the MLP, its residual connection included; below 1 where the
    MLP undoes what it reads.
    `parallel` [T]: where attention and MLP read the same stream.
    """

    kind: ClassVar[str] = "gains"

    value: Float[Tensor, "t n n"]
    key: Float[Tensor, "t n n"]
    mlp: Float[Tensor, "t n"]
    counts: Int[Tensor, " n"]
    parallel: tuple[bool, ...]
    documents: int
    provenance: Provenance

    def to_dataframe(self) -> pd.DataFrame:
        """One row a layer and position: columns layer, position, mlp, and the last row of value and key."""
        import pandas as pd

        layers, n = self.mlp.shape
        index = pd.MultiIndex.from_product([range(layers), range(n)], names=["layer", "position"])
        columns = {"mlp": self.mlp, "value": self.value[:, -1], "key": self.key[:, -1]}
        return pd.DataFrame({k: v.flatten().tolist() for k, v in columns.items()}, index=index).reset_index()

    def plot(self, ax: Any = None) -> Any:
        """The MLP's squared gain of every layer and position, on a logarithmic scale."""
        from posattn import plotting

        values = self.mlp.clamp(min=1e-6).log10()
        return plotting.heatmap(plotting.axes(ax), values, x="position", y="layer", title="MLP gain (log10)")


@torch.no_grad()
def cotangent_gains(
    model: Any, tokens: Tokens | Int[Tensor, "m n"], seed: int = 0, epsilon: float | None = None
) -> Gains:
    """Measure squared gains in random directions: two forward passes a document, none backward.

    Args:
        model: a `posattn` model or a live TransformerLens model.
        tokens: from `load_tokens`, or token ids [M,N].
        seed: of the directions; each document has its own, so that the batch size does not matter.
        epsilon: ‖r‖/‖x‖; by default after the model's dtype.

    Raises:
        InputError: ε is not positive.
        NothingMeasuredError: no documents.
    """
    model = as_a_model(model)
    tokens = tokens if isinstance(tokens, Tokens) else load_tokens(tokens, model)
    if not tokens.documents:
        raise NothingMeasuredError("there are no documents to measure: no samples left")
    step = EPSILON.get(model.dtype, 1e-2) if epsilon is None else epsilon
    if not step > 0:
        raise InputError(f"epsilon must be positive, got {epsilon}")
    noisy = _Noisy(model, step, seed)
    for ids, mask in tokens:
        noisy.run(ids.to(model.device), None if mask is None else mask.to(model.device))
    counts = noisy.counts()
    value, key = (
        torch.stack([one.value / counts[:, None] for one in sums]).float() for sums in (noisy.value, noisy.key)
    )
    return Gains(
        value=value,
        key=key,
        mlp=torch.stack([one.value / counts for one in noisy.mlp]),
        counts=counts.long(),
        parallel=tuple(info.parallel for info in model.layers),
        documents=tokens.documents,
        provenance=provenance(
            **describe_model(model), tokens=tokens.describe(), seed=seed, epsilon=step, directions="isotropic"
        ),
    )


class _Noisy:
    """The doubled forward passes and their running sums."""

    def __init__(self, model: Model, epsilon: float, seed: int) -> None:
        self.model, self.epsilon, self.seed = model, epsilon, seed
        self.value, self.key = ([Sums(grow_axes=2) for _ in model.layers] for _ in range(2))
        self.mlp = [Sums(grow_axes=1) for _ in model.layers]
        self._counts = Sums(grow_axes=1)
        self._outputs = [model.output_map(t) for t in range(model.n_layers)]
        self._scales = [model.scheme(t, 2).scale for t in range(model.n_layers)]
        self._done = 0

    def counts(self) -> Tensor:
        return self._counts.value

    def run(self, ids: Tensor, mask: Tensor | None) -> None:
        half = ids.shape[0]
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
        points = ["resid_pre", "attn_out", "mlp_out", "q", "k", "v", "z", "pattern"]
        if any(output.norm_weight is not None for output in self._outputs):
            points.append("post_scale")

        def noise(layer: int, x: Tensor, batch: Batch) -> Tensor:
            return torch.cat([x[:half], x[:half] + self._directions(layer, x[:half], real)])

        def same(layer: int, z: Tensor, batch: Batch) -> Tensor:
            return torch.cat([z[:half], z[:half]])

        def observe(layer: int, record: Mapping[str, Tensor], batch: Batch) -> None:
            self._take(layer, record, real)

        twice = None if mask is None else torch.cat([mask, mask])
        with (
            self.model.intervene("resid_pre", noise),
            self.model.intervene("z", same),
            self.model.observe(points, observe),  # type: ignore[arg-type]
        ):
            self.model(torch.cat([ids, ids]), twice)
        self._done += half
        lengths = real.sum(-1).cpu()
        self._counts.add((torch.arange(int(lengths.max())) < lengths[:, None]).sum(0).float())

    def _directions(self, layer: int, x: Tensor, real: Tensor) -> Tensor:
        """r [b,n,D] with ‖r‖ = ε‖x‖, from the seed, the document's number, its own positions and the layer alone."""
        width = x.shape[-1]
        dtype = torch.promote_types(x.dtype, torch.float32)
        drawn = torch.zeros(x.shape, dtype=dtype)
        for b in range(x.shape[0]):
            where = real[b].nonzero()[:, 0].cpu()
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + self._done + b) * 1009 + layer)
            drawn[b, where] = torch.randn(len(where), width, generator=generator).to(dtype)
        drawn = drawn.to(x.device)
        length = x.to(dtype).norm(dim=-1, keepdim=True) / drawn.norm(dim=-1, keepdim=True).clamp(min=1e-30)
        return (self.epsilon * length * drawn).to(x.dtype)

    def _take(self, layer: int, record: Mapping[str, Tensor], real: Tensor) -> None:
        output = self._outputs[layer]
        half, width = real.shape[0], int(real.sum(-1).max())
        dtype = torch.promote_types(record["v"].dtype, torch.float32)
        device = record["v"].device
        value = torch.zeros(width, width, dtype=dtype, device=device)
        key, mlp = torch.zeros_like(value), torch.zeros(width, dtype=dtype, device=device)
        for b in range(half):
            where = real[b].nonzero()[:, 0].to(device)
            n = len(where)

            def pair(point: str, b: int = b, where: Tensor = where) -> tuple[Tensor, Tensor]:
                clean, moved = (record[point][i].index_select(0, where).to(dtype) for i in (b, half + b))
                return clean, moved - clean

            pattern = record["pattern"][b].index_select(1, where).index_select(2, where).to(dtype)
            (x, r), (v, dv), (_, dk) = pair("resid_pre"), pair("v"), pair("k")
            (q, _), (z, _), (a, _), (m, dm) = pair("q"), pair("z"), pair("attn_out"), pair("mlp_out")
            scale = None
            if output.norm_weight is not None:
                scale = record["post_scale"][b].index_select(0, where).to(dtype)
            # the change that really happened, after rounding
            size = r.square().sum(-1)
            size = torch.where(size > 0, size, torch.ones_like(size))
            value[:n, :n] += squared_norms(pattern, dv, output, scale)[0] / size
            key[:n, :n] += key_norms(pattern, q, dk, v, z, output, self._scales[layer], scale) / size
            after = x + a + m
            after = after / after.norm(dim=-1, keepdim=True).clamp(min=1e-30)
            change = r + dm
            change = change - (change * after).sum(-1, keepdim=True) * after
            mlp[:n] += change.square().sum(-1) / size
        self.value[layer].add(value)
        self.key[layer].add(key)
        self.mlp[layer].add(mlp)
