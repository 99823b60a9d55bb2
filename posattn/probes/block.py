"""Mixing coefficients that know of the MLP, and of what is common to all tokens.

With x the stream before the block, a what attention adds and m what the MLP adds, token by token,

    attention   λ = ‖a‖ / (‖x‖ + ‖a‖)
    block       λ = ‖a‖ / (‖x‖ + ‖a‖ + ‖m‖)

averaged over positions and then over documents. `centred`: of x − x̄, a − ā, m − m̄, the means taken per layer over all
documents and positions, so that a constant vector in the stream (which carries no influence) no longer counts. The
means must be known first, so that takes a second pass over the same documents (`measure_block_mixing`): exact, and
independent of the order of the documents, which means of the first few documents would not be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posattn.errors import InputError, NothingMeasuredError
from posattn.models.base import Batch, Model, Point
from posattn.probes.base import Probe, expect_shape
from posattn.probes.session import Session, as_a_model
from posattn.probes.statistics import Moments, Sums, share
from posattn.results import Result
from posattn.tokens import Tokens, load_tokens

if TYPE_CHECKING:
    import pandas as pd

_PARTS: tuple[Point, ...] = ("resid_pre", "attn_out", "mlp_out")


@dataclasses.dataclass(frozen=True, eq=False)
class BlockMixing(Result):
    """λ of T layers: `attention` and `block` [T] with standard deviations over documents.

    `means` [T,3,D] are those of x, a and m over documents and positions; `centred` says whether they were taken away.
    """

    kind: ClassVar[str] = "block_mixing"

    attention: Float[Tensor, " t"]
    block: Float[Tensor, " t"]
    attention_std: Float[Tensor, " t"]
    block_std: Float[Tensor, " t"]
    means: Float[Tensor, "t 3 d"]
    centred: bool
    documents: int

    def to_dataframe(self) -> pd.DataFrame:
        """One row a layer and quantity: columns layer, quantity, value, std."""
        import pandas as pd

        rows = []
        for name in ("attention", "block"):
            value, std = getattr(self, name), getattr(self, f"{name}_std")
            rows += [
                {"layer": t, "quantity": name, "value": float(value[t]), "std": float(std[t])}
                for t in range(len(value))
            ]
        return pd.DataFrame(rows)

    def plot(self, ax: Any = None) -> Any:
        """Both λ against the layer."""
        from posattn import plotting

        ax = plotting.axes(ax)
        for name in ("attention", "block"):
            plotting.curve(ax, getattr(self, name), label=name, spread=getattr(self, f"{name}_std"), marker="o")
        return plotting.finish(ax, x="layer", y="mixing coefficient λ", legend=True, ylim=(0, 1))


class BlockMixingProbe(Probe):
    """Measures `attention` and `block` mixing; `centres` [T,3,D] is taken away from x, a and m first when given."""

    name: ClassVar[str] = "block_mixing"

    def __init__(self, centres: Float[Tensor, "t 3 d"] | None = None) -> None:
        self.centres = centres
        self._lambda: list[Moments] = []
        self._vectors: list[Sums] = []

    @property
    def needs(self) -> frozenset[Point]:
        return frozenset(_PARTS)

    @property
    def documents(self) -> int:
        return int(min((moments.count.min() for moments in self._lambda), default=0))

    def settings(self) -> dict[str, Any]:
        return {"centred": self.centres is not None}

    def begin(self, model: Model) -> None:
        self._check_layers(len(self._lambda), model)
        if self.centres is not None and tuple(self.centres.shape) != (model.n_layers, 3, model.d_model):
            raise InputError(
                f"centres of shape {list(self.centres.shape)} do not fit {model.n_layers} layers of {model.d_model}"
            )
        if not self._lambda:
            self.restart({"layers": torch.tensor(model.n_layers)})

    def update(self, layer: int, record: Mapping[str, Tensor], batch: Batch) -> None:
        for point in _PARTS:
            expect_shape(point, layer, record[point], batch)
        real = batch.mask.to(record["attn_out"].device)
        parts = [record[point] for point in _PARTS]
        dtype = torch.promote_types(parts[0].dtype, torch.float32)
        parts = [part.to(dtype).where(real[..., None], 0.0) for part in parts]
        count = real.sum().to(dtype)
        # sums of vectors, and the number of tokens behind them, in one tensor [4,D]
        total = torch.stack([part.sum((0, 1)) for part in parts] + [count.expand(parts[0].shape[-1])])
        self._vectors[layer].add(total)
        if self.centres is not None:
            shift = self.centres[layer].to(parts[0])
            parts = [part - shift[i] for i, part in enumerate(parts)]
        x, a, m = (part.norm(dim=-1) for part in parts)
        values = torch.stack([share(a, x + a), share(a, x + a + m)], -1)
        weight = real.to(dtype) / real.sum(-1, keepdim=True)
        self._lambda[layer].update((values * weight[..., None]).sum(1).cpu())

    def result(self, model: Model | None = None) -> BlockMixing:
        if not self.documents:
            raise NothingMeasuredError("the block mixing probe saw no document: run the model while it is attached")
        mean = torch.stack([moments.mean for moments in self._lambda])
        std = torch.stack([moments.std for moments in self._lambda])
        totals = torch.stack([sums.value for sums in self._vectors])
        return BlockMixing(
            attention=mean[:, 0].clone(),
            block=mean[:, 1].clone(),
            attention_std=std[:, 0].clone(),
            block_std=std[:, 1].clone(),
            means=totals[:, :3] / totals[:, 3:],
            centred=self.centres is not None,
            documents=self.documents,
        )

    def statistics(self) -> dict[str, Moments | Sums]:
        parts: dict[str, Moments | Sums] = {f"lambda.{t}": one for t, one in enumerate(self._lambda)}
        return parts | {f"vectors.{t}": one for t, one in enumerate(self._vectors)}

    def facts(self) -> dict[str, Tensor]:
        return {"layers": torch.tensor(len(self._lambda))}

    def restart(self, facts: Mapping[str, Tensor]) -> None:
        layers = range(int(facts["layers"]) if facts else len(self._lambda))
        self._lambda, self._vectors = [Moments((2,)) for _ in layers], [Sums() for _ in layers]


def measure_block_mixing(model: Any, tokens: Tokens | Int[Tensor, "m n"]) -> tuple[BlockMixing, BlockMixing]:
    """Raw and centred mixing of the same documents, in two passes.

    Raises:
        NothingMeasuredError: no documents.
    """
    model = as_a_model(model)
    tokens = tokens if isinstance(tokens, Tokens) else load_tokens(tokens, model)
    found: list[BlockMixing] = []
    for _ in range(2):
        probe = BlockMixingProbe(found[0].means if found else None)
        with Session(model, (probe,)), torch.no_grad():
            for ids, mask in tokens:
                model(ids.to(model.device), None if mask is None else mask.to(model.device))
        found.append(probe.result(model))
    return found[0], found[1]
