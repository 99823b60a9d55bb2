"""How much of a layer's update comes from attention: the mixing coefficient λ.

With x_i the residual stream before the block and a_i what attention adds to it, at position i of one document:

    token-wise   λ(x) = mean_i ‖a_i‖₂ / (‖x_i‖₂ + ‖a_i‖₂)
    Frobenius    λ(x) = ‖a‖_F / (‖x‖_F + ‖a‖_F)

each averaged over documents (Herasimchyk et al., arXiv 2602.16837; the paper writes the second, its figures use the
first). They part company when a single position holds most of ‖X‖_F, so the share of ‖X‖_F² at the largest position
is measured too. 0/0 is λ = 0.

Each layer leaves two norms per token; everything else is computed once a batch, when all layers have reported, so
that a forward pass that was interrupted leaves no trace.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posattn.errors import NothingMeasuredError
from posattn.models.base import Batch, Model, Point
from posattn.probes.base import Probe, expect_shape
from posattn.probes.statistics import Aligner, Moments, Pending, Sums, share
from posattn.results import Result

if TYPE_CHECKING:
    import pandas as pd


@dataclasses.dataclass(frozen=True, eq=False)
class Mixing(Result):
    """Mixing coefficients of T layers at N positions, averaged over documents. All λ are in [0,1].

    `token` and `frobenius` [T]; their standard deviations over documents (n−1); `per_position` [T,N] with its standard
    deviation; `counts` [N] documents that reach each position; `largest_position_share` [T]: the largest share of
    ‖X‖_F² that one position of a document holds; `stream_share` [T,N]: the share of each position.
    """

    kind: ClassVar[str] = "mixing"

    token: Float[Tensor, " t"]
    frobenius: Float[Tensor, " t"]
    per_position: Float[Tensor, "t n"]
    token_std: Float[Tensor, " t"]
    frobenius_std: Float[Tensor, " t"]
    per_position_std: Float[Tensor, "t n"]
    largest_position_share: Float[Tensor, " t"]
    stream_share: Float[Tensor, "t n"]
    counts: Int[Tensor, " n"]
    documents: int

    def to_dataframe(self) -> pd.DataFrame:
        """Columns layer, position (missing for whole documents), quantity, value, std."""
        import pandas as pd

        layers, positions = self.per_position.shape
        nothing = [float("nan")] * layers
        tables = [
            pd.DataFrame(
                {"layer": range(layers), "position": pd.NA, "quantity": name, "value": value.tolist(), "std": std}
            )
            for name, value, std in (
                ("token", self.token, self.token_std.tolist()),
                ("frobenius", self.frobenius, self.frobenius_std.tolist()),
                ("largest_position_share", self.largest_position_share, nothing),
            )
        ]
        tables.append(
            pd.DataFrame(
                {
                    "layer": [t for t in range(layers) for _ in range(positions)],
                    "position": list(range(positions)) * layers,
                    "quantity": "per_position",
                    "value": self.per_position.flatten().tolist(),
                    "std": self.per_position_std.flatten().tolist(),
                }
            )
        )
        table = pd.concat([t.astype({"position": "Int64"}) for t in tables], ignore_index=True)
        return table

    def plot(self, ax: Any = None) -> Any:
        """λ against the layer, both norms, with one standard deviation over documents."""
        from posattn import plotting

        ax = plotting.axes(ax)
        for name, value, std in (
            ("token-wise", self.token, self.token_std),
            ("Frobenius", self.frobenius, self.frobenius_std),
        ):
            plotting.curve(ax, value, label=name, spread=std, marker="o")
        return plotting.finish(ax, x="layer", y="mixing coefficient λ", legend=True, ylim=(0, 1))


class MixingProbe(Probe):
    """Measures λ of every layer; see the module docstring."""

    name: ClassVar[str] = "mixing"

    def __init__(self) -> None:
        self._layers = 0
        self._pending = Pending()
        self._align = Aligner()
        self.restart({})

    @property
    def needs(self) -> frozenset[Point]:
        return frozenset({"resid_pre", "attn_out"})

    @property
    def documents(self) -> int:
        return int(self._whole.count.min()) if self._layers else 0

    def begin(self, model: Model) -> None:
        self._check_layers(self._layers, model)
        self._pending.clear()
        if not self._layers:
            self._layers = model.n_layers
            self.restart({})

    def update(self, layer: int, record: Mapping[str, Tensor], batch: Batch) -> None:
        for point in ("resid_pre", "attn_out"):
            expect_shape(point, layer, record[point], batch)
        norms = (_norms(record["resid_pre"]), _norms(record["attn_out"]))
        if finished := self._pending.put(layer, norms, batch.mask, self._layers):
            self._flush(finished, batch.mask)

    def _flush(self, norms: list[tuple[Tensor, Tensor]], mask: Tensor) -> None:
        """One finished forward pass, whose norms are [b,n] for each layer."""
        alignment = self._align(mask)
        # layers may live on different devices; these tensors are small
        x, a = (
            torch.stack([alignment.rows(pair[i].to(mask.device)) for pair in norms], 1).cpu().double() for i in (0, 1)
        )  # [b,t,n]
        valid, lengths = alignment.valid.cpu()[:, None], alignment.lengths.cpu()[:, None]
        position = share(a, x + a)
        squares = x.square()
        total = squares.sum(-1)
        shares = share(squares, total[..., None])
        frobenius = a.square().sum(-1).sqrt()
        whole = torch.stack(
            [position.sum(-1) / lengths, share(frobenius, total.sqrt() + frobenius), shares.amax(-1)], -1
        )
        self._whole.update(whole)
        self._position.update(position, valid.expand_as(position))
        self._share.update(shares, valid.expand_as(shares))

    def result(self, model: Model | None = None) -> Mixing:
        if not self.documents:
            raise NothingMeasuredError("the mixing probe saw no document: run the model while the probe is attached")
        token, frobenius, largest = self._whole.mean.unbind(-1)
        return Mixing(
            token=token.clone(),
            frobenius=frobenius.clone(),
            per_position=self._position.mean.clone(),
            token_std=self._whole.std[:, 0].clone(),
            frobenius_std=self._whole.std[:, 1].clone(),
            per_position_std=self._position.std,
            largest_position_share=largest.clone(),
            stream_share=self._share.mean.clone(),
            counts=self._position.count[0].long(),
            documents=self.documents,
        )

    def statistics(self) -> dict[str, Moments | Sums]:
        return {"whole": self._whole, "position": self._position, "share": self._share}

    def restart(self, facts: Mapping[str, Tensor]) -> None:
        self._whole = Moments((self._layers, 3))  # token, frobenius, largest share
        self._position, self._share = (Moments((self._layers, 0), grows=True) for _ in range(2))

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        super().load_state(tensors)
        self._layers = self._whole.shape[0]


def _norms(tensor: Tensor) -> Tensor:
    """L2 norm over features [b,n], accumulated in float32 at least."""
    dtype = tensor.dtype if tensor.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(tensor, dim=-1, dtype=dtype)
