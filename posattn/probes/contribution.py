"""What each source position adds to each target position, beyond the attention weight.

In one layer and one document, source j contributes to the update of target i exactly the vector

    c_ij = m · n_i( Σ_h A_h,ij v_hj W_O^h ),    n_i(y) = w ⊙ (y [− mean y]) / s_i with a post-norm, else y

with A the attention pattern, v the value (bias included) that query head h reads, W_O^h its slice of the output
projection, m the residual multiplier, and w, s_i the weight and the divisor of the post-attention norm. Σ_j c_ij is the
attention output a_i up to the output bias. Kernels [T,N,N] are made of it, averaged over documents:

    energy      E[ ‖c_ij‖² / ‖x_j‖² ]              how much a relative change of x_j changes the update of i, squared,
                                                   through the value of j
    key         E[ ‖b_ij‖² / ‖x_j‖² ]              the same through the key of j, see below
    projection  E[ max(0, ⟨c_ij, a_i⟩ / ‖a_i‖²) ]  the share of the update that points where the update points
    value_norm  E[ ‖c_ij‖ ]                        Kobayashi et al., arXiv 2004.10102, section 3, over all heads

The last two are normalised row by row, as a rollout needs them; the first two are squared gains, no distribution (see
`posattn.rollout.energy`, which takes their sum). With the values' Gram matrix per source, G_j[h,k] =
⟨v_hj W_O^h, v_kj W_O^k⟩,

    ‖Σ_h A_h,ij v_hj W_O^h‖² = Σ_hk A_h,ij A_k,ij G_j[h,k]

so that no vector c_ij is ever built: N H D numbers and one [N,H] by [H,H] product a source, half of which the causal
mask saves. `heads="independent"` keeps only h = k, which costs one pass over the pattern.

Through the key, a change of x_j changes the logits by δs_h,ij = scale·⟨q_hi, δk_hj⟩ and the softmax turns that into
A_h,ij (v_hj − z_hi) W_O^h δs_h,ij, with z_hi the head's mixture of values. Heads are taken as independent and queries
as having no preferred direction, so that E δs² = scale² ‖q_hi‖² ‖δk_hj‖² / d; and as in `energy`, where the whole value
answers a relative change of x_j, the part of the key that depends on x_j answers: δk_hj = k_hj − mean_j k_hj over the
document (most of a key is often one constant vector, which no change of x moves). Hence

    ‖b_ij‖² = Σ_h A_h,ij² ‖(v_hj − z_hi) W_O^h‖² · scale² ‖q_hi‖² ‖k_hj − k̄_h‖² / d

Rotations keep norms; the slope of a soft cap and the attention factor of scaled rotary embeddings are taken as 1.

`kinds=("head_gain", ...)` adds the gains of single heads, not squared, E[A_h,ij ‖v_hj W_O^h‖ / ‖x_j‖], as [T,H,N,N],
for `coherent_energy_rollout`; their memory grows with the number of heads, so they are not measured by default.

`cotangent_gains` measures the same gains with random directions instead of the data's own: see there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posattn.errors import HookError, InputError, NothingMeasuredError
from posattn.models.base import Batch, LayerInfo, Model, OutputMap, Point
from posattn.probes.base import Probe, expect_shape
from posattn.probes.statistics import Aligner, Moments, Sums, share
from posattn.results import Result

if TYPE_CHECKING:
    import pandas as pd

KINDS = ("energy", "key", "projection", "value_norm")
#: larger kernels, measured on request: one for each head
HEAD_KINDS = ("head_gain",)
#: how many numbers the value vectors of one chunk of sources may take
_CHUNK = 2**22
_SOURCES = 64


@dataclasses.dataclass(frozen=True, eq=False)
class Contributions(Result):
    """Contribution kernels of T layers over N positions, averaged over documents; see the module docstring.

    `kernels` maps "energy" and "key" (squared gains), "projection" and "value_norm" (rows sum to 1) to [T,N,N], and
    "head_gain" (gains) to [T,H,N,N] where it was asked for.
    `mlp_size` [T,N] is E ‖m_i‖²/‖y_i‖², the squared size of what the MLP adds against what it reads. An attention sink
    is told by `received` [T,N], the attention that position j gets from later positions (mean over those and over
    heads), with its standard deviation over documents `received_std`, and `value_size` [T,N], the root mean square over
    heads of ‖v_hj W_O^h‖. `parallel` [T] says in which layers attention and MLP read the same stream. `counts` [N]
    documents reach each position.
    """

    kind: ClassVar[str] = "contributions"

    kernels: dict[str, Tensor]
    mlp_size: Float[Tensor, "t n"]
    received: Float[Tensor, "t n"]
    received_std: Float[Tensor, "t n"]
    value_size: Float[Tensor, "t n"]
    counts: Int[Tensor, " n"]
    parallel: tuple[bool, ...]
    heads: str
    documents: int

    @property
    def energy(self) -> Float[Tensor, "t n n"]:
        """The energy kernels: squared gains through the values.

        Raises:
            InputError: they were not asked for.
        """
        return self._kernel("energy")

    @property
    def gains(self) -> Float[Tensor, "t n n"]:
        """Squared gains through values and keys together: what the `energy` variant propagates.

        Raises:
            InputError: one of the two was not asked for.
        """
        return self._kernel("energy") + self._kernel("key")

    def _kernel(self, kind: str) -> Tensor:
        if kind not in self.kernels:
            raise InputError(f"the {kind} kernel was not measured, only {', '.join(self.kernels)}: add it to `kinds`")
        return self.kernels[kind]

    def to_dataframe(self) -> pd.DataFrame:
        """The last row of every kernel: columns kernel, layer, position, value."""
        import pandas as pd

        from posattn.probes.kernel import last_rows

        kernels = {name: kernel for name, kernel in self.kernels.items() if name not in HEAD_KINDS}
        tables = [last_rows(kernel).assign(kernel=name) for name, kernel in kernels.items()]
        return pd.concat(tables, ignore_index=True).reindex(columns=["kernel", "layer", "position", "value"])

    def plot(self, ax: Any = None, layer: int = 0, kernel: str = "energy") -> Any:
        """One kernel of one layer as a heat map; energies on a logarithmic scale."""
        from posattn import plotting

        values = self.kernels[kernel][layer]
        if kernel in ("energy", "key"):
            values = values.clamp(min=float(values[values > 0].min()) if bool((values > 0).any()) else 1e-12).log10()
        title = f"{kernel.replace('_', ' ')} kernel of layer {layer}" + (
            " (log10)" if kernel in ("energy", "key") else ""
        )
        return plotting.heatmap(plotting.axes(ax), values, x="source position", y="target position", title=title)


class ContributionProbe(Probe):
    """Measures the contribution kernels of every layer.

    Args:
        kinds: which kernels to keep: "energy", "key", "projection", "value_norm".
        heads: "joint" (exact), or "independent": cross terms between heads are left out of the norms.
    """

    name: ClassVar[str] = "contribution"

    def __init__(self, kinds: tuple[str, ...] = KINDS, heads: str = "joint") -> None:
        unknown = [kind for kind in kinds if kind not in KINDS + HEAD_KINDS]
        if unknown or not kinds:
            raise InputError(f"kinds must be some of {', '.join(KINDS + HEAD_KINDS)}, not {kinds}")
        if heads not in ("joint", "independent"):
            raise InputError(f"heads must be 'joint' or 'independent', not {heads!r}")
        self.kinds = tuple(kind for kind in KINDS + HEAD_KINDS if kind in kinds)
        self.heads = heads
        self._align = Aligner()
        self._layers: tuple[LayerInfo, ...] = ()
        self._outputs: list[OutputMap] = []
        self._scales: list[float] = []
        self._counts: list[Sums] = []
        self.restart({})

    @property
    def needs(self) -> frozenset[Point]:
        points: set[Point] = {"resid_pre", "attn_out", "mlp_out", "v", "pattern"}
        if "key" in self.kinds:
            points |= {"q", "k", "z"}
        if any(output.norm_weight is not None for output in self._outputs):
            points.add("post_scale")
        return frozenset(points)

    @property
    def documents(self) -> int:
        return int(min((counts.value.max() for counts in self._counts), default=0))  # all reach the first position

    def settings(self) -> dict[str, Any]:
        return {"kinds": list(self.kinds), "heads": self.heads}

    def begin(self, model: Model) -> None:
        self._check_layers(len(self._counts), model)
        self._layers = model.layers
        self._outputs = [model.output_map(t) for t in range(model.n_layers)]
        self._scales = [model.scheme(t, 2).scale for t in range(model.n_layers)]
        if not self._counts:
            self.restart(self.facts())

    def update(self, layer: int, record: Mapping[str, Tensor], batch: Batch) -> None:
        info, output = self._layers[layer], self._outputs[layer]
        pattern, values = record["pattern"], record["v"]
        expect_shape("pattern", layer, pattern, batch, square=True)
        for point in ("resid_pre", "attn_out", "mlp_out", "v"):
            expect_shape(point, layer, record[point], batch)
        expected = (info.n_key_heads, info.head_dim)
        if pattern.shape[1] != info.n_heads or tuple(values.shape[2:]) != expected:
            raise HookError(
                f"layer {layer}: {pattern.shape[1]} heads in the pattern and values of shape {list(values.shape[2:])} "
                f"do not fit {info.n_heads} heads reading {list(expected)}"
            )
        alignment = self._align(batch.mask)
        dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
        width = alignment.width
        shapes = {kind: (info.n_heads, width, width) if kind in HEAD_KINDS else (width, width) for kind in self.kinds}
        total = {kind: torch.zeros(shape, dtype=dtype, device=pattern.device) for kind, shape in shapes.items()}
        facts = torch.zeros(pattern.shape[0], 3, width, dtype=dtype, device=pattern.device)
        for b in range(pattern.shape[0]):
            if alignment.full:
                n, pick = width, lambda tensor, b=b: tensor[b]
                weights = pattern[b].to(dtype)
            else:
                # rows and columns of padding are left out, not zeroed: they may hold anything, NaN included
                real = alignment.indices(b).to(pattern.device)
                n, pick = len(real), lambda tensor, b=b, real=real: tensor[b].index_select(0, real)
                weights = pattern[b].index_select(1, real).index_select(2, real).to(dtype)
            x, a, m, v = (pick(record[point]).to(dtype) for point in ("resid_pre", "attn_out", "mlp_out", "v"))
            scale = pick(record["post_scale"]).to(dtype) if output.norm_weight is not None else None
            squares, sizes = squared_norms(weights, v, output, scale, independent=self.heads == "independent")
            size = sizes.square().mean(-1).sqrt()
            stream = x.square().sum(-1)
            if "energy" in total:
                total["energy"][:n, :n] += share(squares, stream)
            if "head_gain" in total:
                gain = weights * share(sizes, stream.sqrt()[:, None]).T[:, None]
                total["head_gain"][:, :n, :n] += gain if scale is None else gain / scale
            if "key" in total:
                q, k, z = (pick(record[point]).to(dtype) for point in ("q", "k", "z"))
                through = key_norms(weights, q, k - k.mean(0), v, z, output, self._scales[layer], scale)
                total["key"][:n, :n] += share(through, stream)
            if "value_norm" in total:
                total["value_norm"][:n, :n] += squares.sqrt()
            if "projection" in total:
                total["projection"][:n, :n] += projections(weights, v, a, output, scale).clamp_(min=0)
            reads = x if info.parallel else x + a
            facts[b, 0, :n] = share(m.square().sum(-1), reads.square().sum(-1))
            later = torch.arange(n - 1, -1, -1, device=x.device).clamp(min=1)
            facts[b, 1, :n] = (weights.sum((0, 1)) - weights.diagonal(dim1=1, dim2=2).sum(0)) / (len(weights) * later)
            facts[b, 2, :n] = size
        for kind, term in total.items():
            self._sums[kind][layer].add(term)
        lengths = alignment.lengths.cpu()
        valid = torch.arange(width) < lengths[:, None]
        self._positions[layer].update(facts.cpu(), valid[:, None].expand(facts.shape))
        self._counts[layer].add(valid.sum(0).to(torch.float32))

    def result(self, model: Model | None = None) -> Contributions:
        if not self.documents:
            raise NothingMeasuredError(
                "the contribution probe saw no document: run the model while the probe is attached"
            )
        counts = self._counts[0].value
        kernels: dict[str, Tensor] = {}
        for kind, sums in self._sums.items():
            layers = []
            for one in sums:
                mean = one.value / counts[:, None]  # counts belong to targets, the last axis but one
                layers.append((as_distribution(mean) if kind in ("projection", "value_norm") else mean).float())
            kernels[kind] = torch.stack(layers)
        facts = torch.stack([moments.mean for moments in self._positions])
        spread = torch.stack([moments.std for moments in self._positions])
        return Contributions(
            kernels=kernels,
            mlp_size=facts[:, 0].clone(),
            received=facts[:, 1].clone(),
            received_std=spread[:, 1].clone(),
            value_size=facts[:, 2].clone(),
            counts=counts.long(),
            parallel=tuple(info.parallel for info in self._layers),
            heads=self.heads,
            documents=self.documents,
        )

    def statistics(self) -> dict[str, Moments | Sums]:
        parts: dict[str, Moments | Sums] = {}
        for t, (counts, positions) in enumerate(zip(self._counts, self._positions, strict=True)):
            parts |= {f"count.{t}": counts, f"position.{t}": positions}
            parts |= {f"{kind}.{t}": self._sums[kind][t] for kind in self.kinds}
        return parts

    def facts(self) -> dict[str, Tensor]:
        return {"parallel": torch.tensor([info.parallel for info in self._layers])}

    def restart(self, facts: Mapping[str, Tensor]) -> None:
        layers = range(len(facts["parallel"]) if facts else len(self._counts))
        self._sums = {kind: [Sums(grow_axes=2) for _ in layers] for kind in self.kinds}
        self._counts = [Sums(grow_axes=1) for _ in layers]
        self._positions = [Moments((3, 0), grows=True) for _ in layers]

    def adopt(self, other: ContributionProbe) -> None:
        self._layers, self._outputs, self._scales = other._layers, other._outputs, other._scales


# ---- one layer of one document --------------------------------------------------------------------------------------


def squared_norms(
    pattern: Float[Tensor, "h n n"],
    values: Float[Tensor, "n k d"],
    output: OutputMap,
    post_scale: Float[Tensor, "n 1"] | None = None,
    *,
    independent: bool = False,
) -> tuple[Float[Tensor, "n n"], Float[Tensor, "n h"]]:
    """‖c_ij‖² for every target i and source j ≤ i, and ‖v_hj W_O^h‖ of every source and head.

    Exact with `independent=False`; otherwise Σ_h A_h,ij² ‖v_hj W_O^h‖², without the cross terms between heads.
    """
    n = pattern.shape[-1]
    squares = pattern.new_zeros(n, n)
    sizes = pattern.new_zeros(n, pattern.shape[0])
    heads, width = pattern.shape[0], output.weight.shape[-1]
    step = max(1, min(_SOURCES, _CHUNK // (heads * width)))
    for start in range(0, n, step):
        stop = min(start + step, n)
        vectors = value_vectors(values[start:stop], output)
        seen = pattern[:, start:, start:stop]  # earlier targets do not see these sources
        if independent:
            diagonal = vectors.square().sum(-1)
            part = torch.einsum("hij,jh->ij", seen.square(), diagonal)
        else:
            gram = vectors @ vectors.mT
            diagonal = gram.diagonal(dim1=1, dim2=2)
            by_source = seen.permute(2, 1, 0).contiguous()
            part = (torch.bmm(by_source, gram) * by_source).sum(-1).T
        squares[start:, start:stop] = part.clamp(min=0)
        sizes[start:stop] = diagonal.clamp(min=0).sqrt()
    if post_scale is not None:
        squares = squares / post_scale.square()
    return squares, sizes


def key_norms(
    pattern: Float[Tensor, "h n n"],
    queries: Float[Tensor, "n h d"],
    key_changes: Float[Tensor, "n k d"],
    values: Float[Tensor, "n k e"],
    mixtures: Float[Tensor, "n h e"],
    output: OutputMap,
    scale: float,
    post_scale: Float[Tensor, "n 1"] | None = None,
) -> Float[Tensor, "n n"]:
    """‖b_ij‖²: the squared change of target i's update when the key of source j changes by `key_changes`."""
    repeats = output.weight.shape[0] // values.shape[1]
    size_q = queries.square().sum(-1).T  # [h,n]
    size_k = key_changes.square().sum(-1).T.repeat_interleave(repeats, dim=0)
    metric = through_norm(output.weight.to(values), output)
    metric = metric @ metric.mT  # [h,e,e]: ‖y W_O^h‖² = y M yᵀ
    total = pattern.new_zeros(pattern.shape[1:])
    for head in range(pattern.shape[0]):
        v, z = values[:, head // repeats], mixtures[:, head]
        towards = z @ metric[head]
        apart = ((v @ metric[head]) * v).sum(-1) + (towards * z).sum(-1, keepdim=True) - 2 * towards @ v.T
        weight = pattern[head].square() * size_q[head, :, None] * size_k[head]
        total += weight * apart.clamp(min=0)
    total *= scale**2 / queries.shape[-1]
    return total if post_scale is None else total / post_scale.square()


def through_norm(vectors: Float[Tensor, "*any D"], output: OutputMap) -> Float[Tensor, "*any D"]:
    """Through the post-norm's weight and the multiplier, but not the norm's divisor."""
    if output.norm_weight is not None:
        if output.norm_centres:
            vectors = vectors - vectors.mean(-1, keepdim=True)
        vectors = vectors * output.norm_weight.to(vectors)
    return vectors if output.multiplier == 1.0 else vectors * output.multiplier


def value_vectors(values: Float[Tensor, "n k d"], output: OutputMap) -> Float[Tensor, "n h D"]:
    """v_hj W_O^h for every query head, through the post-norm's weight and the multiplier but not its divisor."""
    repeats = output.weight.shape[0] // values.shape[1]
    weight = output.weight.to(values)
    return through_norm(torch.einsum("nhd,hdD->nhD", values.repeat_interleave(repeats, dim=1), weight), output)


def projections(
    pattern: Float[Tensor, "h n n"],
    values: Float[Tensor, "n k d"],
    attn_out: Float[Tensor, "n D"],
    output: OutputMap,
    post_scale: Float[Tensor, "n 1"] | None = None,
) -> Float[Tensor, "n n"]:
    """⟨c_ij, a_i⟩ / ‖a_i‖²: rows sum to 1 up to biases and a sink; 0 where a_i is 0."""
    back = attn_out * output.multiplier
    if output.norm_weight is not None:
        back = back * output.norm_weight.to(back) / (1.0 if post_scale is None else post_scale)
        if output.norm_centres:
            back = back - back.mean(-1, keepdim=True)
    towards = torch.einsum("nD,hdD->hnd", back, output.weight.to(back))
    repeats = output.weight.shape[0] // values.shape[1]
    by_head = values.repeat_interleave(repeats, dim=1).permute(1, 2, 0)  # [h,d,n]
    inner = pattern.new_zeros(pattern.shape[1:])
    for head in range(pattern.shape[0]):
        inner += pattern[head] * (towards[head] @ by_head[head])
    return share(inner, attn_out.square().sum(-1, keepdim=True))


def as_distribution(kernel: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n n"]:
    """Rows scaled to sum to 1; a row of zeros becomes its own position (it moves nothing)."""
    mass = kernel.sum(-1, keepdim=True)
    identity = torch.eye(kernel.shape[-1], dtype=kernel.dtype, device=kernel.device)
    return torch.where(mass > 0, kernel / torch.where(mass > 0, mass, torch.ones_like(mass)), identity)
