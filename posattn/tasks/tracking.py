"""Following heads while a model learns, in any training loop or over saved checkpoints.

At each measured step one forward pass over a fixed set of prompts gives, for every head and the last query: positional
and symbolic score over all swaps (`heads.swaps`), entropy of the attention row in nats, and, where the layer is rotary,
the mean over prompts of the largest logit of each frequency. From these:

* purity γ of a head: the smallest γ at which it counts as pure (`heads.taxonomy`), its label at a chosen γ;
* frequency id of a layer: Σ_t t·softmax_t(mean maximum logit of t), ids from 1 (arXiv 2605.31558), mean over heads. The
  logit is the product q·k before its scale 1/√d: with the scale the softmax over t is nearly flat, and the ids come out
  near the middle of the spectrum and not where the published ones lie.

The model that is training is never touched: a transformers model is copied once, the copy is wrapped, and each later
step only copies weights into it (and checks that both give the same logits). Training mode, random state and hooks of
the original stay as they are.

**Emergence.** A head has emerged as a label at the first measured step from which it keeps that label to the end
(`stays`), and was first seen as it at `first`. Accuracy milestones likewise: the first step at which it is reached.

**Relation of accuracy and purity.** Per run, over its measured steps: Spearman correlation of accuracy with the number
of pure heads and with mean purity 1 − γ (γ to the two pure corners only); and the lag, in steps, from accuracy .99 to
the median pure head. Runs are the units: intervals are `scipy.stats.bootstrap` percentile intervals over seeds, NaN
with a single run. Steps of one run are not independent, so nothing is resampled within a run.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from posattn.errors import DataError, InputError
from posattn.heads.crosslogits import check_movable, move_query, split_frequencies
from posattn.heads.documents import as_documents, batches, check_varied, seen
from posattn.heads.swaps import TAU, swap_scores
from posattn.heads.taxonomy import LABELS, label_of
from posattn.models.base import Batch, Model
from posattn.results import Provenance, Result, provenance
from posattn.tasks.base import Samples, Task
from posattn.words import count

if TYPE_CHECKING:
    import pandas as pd

#: returns what to remember of a model: numbers, or a dictionary of them
Callback = Callable[[Any], Mapping[str, Any]]
ACCURACIES = (0.5, 0.9, 0.99)
_CORNERS = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)


class HeadTracker:
    """Measures every head each `every` steps. Call it in a training loop: `tracker(model, step)`.

    Args:
        prompts: the fixed prompts: token ids, `Tokens`, or a `Samples` of a task; a few dozen are enough.
        every: steps between measurements (step 0 included); other steps are ignored.
        accuracy: called with the live model in evaluation mode; returns numbers such as
            `{"accuracy": .., "accuracy_by_hops": {..}, "loss": ..}`.
        frequencies: whether to measure frequency use too.

    Raises:
        DataError, InputError: prompts without two different earlier tokens, or `every` below 1.
    """

    def __init__(
        self,
        prompts: Any,
        every: int = 50,
        accuracy: Callback | None = None,
        *,
        frequencies: bool = True,
        tau: float = TAU,
        batch_size: int = 32,
    ) -> None:
        if every < 1:
            raise InputError(f"every must be at least 1 step, not {every}")
        documents = as_documents(prompts.tokens if isinstance(prompts, Samples) else prompts)
        for index, row in enumerate(documents):
            if len(row) < 3:
                raise DataError(f"prompt {index} has {len(row)} tokens: two earlier keys need three")
            check_varied(row, len(row) - 1, index)
        self.documents, self.every, self.accuracy = documents, every, accuracy
        self.frequencies, self.tau, self.batch_size = frequencies, tau, batch_size
        self.records: list[dict[str, Any]] = []
        self._twin: _Twin | None = None

    @classmethod
    def for_task(cls, task: Task, every: int = 50, prompts: int = 32, seed: int = 0, **options: Any) -> HeadTracker:
        """A tracker on samples of a task that no training run of that seed has seen."""
        samples = task.generate(prompts, seed=seed + 2_000_003)
        return cls(samples, every, **options)

    def __call__(self, model: Any, step: int) -> dict[str, Any]:
        """Measure at `step` (nothing, an empty dictionary, when it is not due). The record is kept and returned."""
        if step % self.every:
            return {}
        record = self.measure(model)
        record["step"] = step
        if self.records and self.records[-1]["step"] >= step:  # a resumed loop measures a step again
            self.records = [r for r in self.records if r["step"] < step]
        self.records.append(record)
        return {k: v for k, v in record.items() if k != "step"}

    def follow(self, checkpoints: Iterable[tuple[int, Any]]) -> Dynamics:
        """The same for saved checkpoints: (step, model or a function that loads it), in any order.

        Each is dropped before the next is loaded.
        """
        for step, checkpoint in checkpoints:
            load = callable(checkpoint) and not isinstance(checkpoint, (nn.Module, Model))
            self.measure_at(checkpoint() if load else checkpoint, step)  # pyright: ignore[reportCallIssue]
        self.records.sort(key=lambda r: r["step"])
        return self.result()

    def measure_at(self, model: Any, step: int) -> dict[str, Any]:
        """Measure at `step` whether it is due or not."""
        record = {**self.measure(model), "step": step}
        self.records = [r for r in self.records if r["step"] != step] + [record]
        return record

    @torch.no_grad()
    def measure(self, model: Any) -> dict[str, Any]:
        """One record: positional, symbolic, entropy [T][H], frequency ids, and what `accuracy` returns. JSON-able."""
        with _undisturbed(model):
            record = dict(self.accuracy(model)) if self.accuracy is not None else {}
            return {**record, **self._heads(self._face(model))}

    def result(self, **facts: Any) -> Dynamics:
        """What was tracked so far, as one run."""
        if not self.records:
            raise DataError("nothing has been tracked yet: call the tracker at a step that is due")
        return Dynamics.from_records({"run": self.records}, **facts)

    def _face(self, model: Any) -> Model:
        if isinstance(model, Model) or not isinstance(model, nn.Module):
            return seen(model)
        if any(cls.__name__ in ("TransformerBridge", "HookedTransformer") for cls in type(model).__mro__):
            return seen(model)
        if self._twin is None or not self._twin.update(model, self.documents[0]):
            self._twin = _Twin(model)
        return self._twin.face

    def _heads(self, model: Model) -> dict[str, Any]:
        layers, heads = model.n_layers, max(layer.n_heads for layer in model.layers)
        sums = torch.zeros(3, layers, heads, dtype=torch.float64)
        largest: list[Tensor | None] = [None] * layers

        def observer(layer: int, points: Mapping[str, Tensor], batch: Batch) -> None:
            query = points["q"].shape[1] - 1
            scheme = model.scheme(layer, query + 1)
            check_movable(scheme, layer)
            moved = move_query(points["q"][:, query], points["k"], scheme, query)
            weights = moved.weights()
            flat = [x[..., :-1, :].flatten(0, -3) for x in (moved.queries, moved.keys)]
            found = swap_scores(flat[0], flat[1], weights[..., :-1].flatten(0, -2), moved.softcap, self.tau)
            shape = weights.shape[:-1]
            entropy = torch.special.entr(weights.double()).sum(-1)
            for place, value in enumerate((found[0].view(shape), found[1].view(shape), entropy)):
                sums[place, layer, : shape[-1]] += value.double().sum(0).cpu()
            if self.frequencies and scheme.rotary is not None:
                used = scheme.rotary.frequencies.shape[0]
                part = split_frequencies(moved, scheme).logits().amax(-1).double().sum(0).cpu()[:, :used] / scheme.scale
                before = largest[layer]
                largest[layer] = part if before is None else before + part

        for _, rows in batches(self.documents, self.batch_size):
            with model.observe(["q", "k"], observer):
                model(rows.to(model.device))
        sums /= len(self.documents)
        record: dict[str, Any] = dict(zip(("positional", "symbolic", "entropy"), sums.tolist(), strict=True))
        ids = [None if m is None else frequency_id((m / len(self.documents)).mean(0)) for m in largest]
        if any(value is not None for value in ids):
            record["frequency_id"] = ids
        return record


def frequency_id(largest: Float[Tensor, "f"]) -> float:
    """Σ_t t·softmax_t(mean maximum q·k of frequency t), t from 1 on."""
    weights = torch.softmax(largest.double(), -1)
    return float((weights * torch.arange(1, len(weights) + 1, dtype=torch.float64)).sum())


class _Twin:
    """A wrapped copy of a transformers model that takes over new weights without being wrapped again."""

    def __init__(self, model: nn.Module) -> None:
        from posattn.models.loading import as_model, quiet

        inner = copy.deepcopy(model).eval()
        for parameter in inner.parameters():
            parameter.grad = None
        self._own = [*inner.parameters(), *inner.buffers()]
        with quiet():
            self.face = as_model(inner)

    def update(self, model: nn.Module, probe: Tensor) -> bool:
        """Copy the weights; False when the copy does not compute what the model does (it must be made anew)."""
        theirs = [*model.parameters(), *model.buffers()]
        if len(theirs) != len(self._own) or any(
            a.shape != b.shape or a.device != b.device for a, b in zip(self._own, theirs, strict=True)
        ):
            return False
        with torch.no_grad():
            for mine, other in zip(self._own, theirs, strict=True):
                mine.data.copy_(other.data)
            row = probe[None].to(theirs[0].device)
            mine, other = self.face(row).float(), model(row).logits.float()
        return bool((mine - other).abs().max() <= 1e-3 * other.abs().max().clamp_min(1.0))


@contextlib.contextmanager
def _undisturbed(model: Any) -> Iterator[None]:
    """Evaluation mode inside; training mode and random state as before afterwards."""
    module = model if isinstance(model, nn.Module) else getattr(model, "module", None)
    modes = {m: m.training for m in module.modules()} if isinstance(module, nn.Module) else {}
    parameters = module.parameters() if isinstance(module, nn.Module) else ()
    devices = {p.device for p in parameters if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)):
        if isinstance(module, nn.Module):
            module.eval()
        try:
            yield
        finally:
            for part, mode in modes.items():
                part.training = mode


def purity(
    positional: Float[Tensor, "*shape"], symbolic: Float[Tensor, "*shape"], uniform: bool = True
) -> Float[Tensor, "*shape"]:
    """The smallest γ at which a head is pure: its Chebyshev distance to the nearest corner of the plane.

    `uniform=False` leaves out the corner (1, 1), where heads stand before they have learned anything.
    """
    points = torch.stack([positional, symbolic], -1).double().unsqueeze(-2)
    return (points - _CORNERS[: 3 if uniform else 2]).abs().amax(-1).amin(-1)


@dataclasses.dataclass(frozen=True, eq=False)
class Dynamics(Result):
    """Curves of one or more runs on a common grid of steps. R runs, S steps, K hop counts, T layers, H heads.

    `accuracy`, `loss` [R,S]; `accuracy_hops` [R,S,K] for the hop counts `hops`; `positional`, `symbolic`, `entropy`
    [R,S,T,H]; `frequency_id` [R,S,T]. What was not measured is NaN. `facts` holds a dictionary for each run.
    """

    kind: ClassVar[str] = "learning dynamics"

    runs: Sequence[str]
    steps: Sequence[int]
    hops: Sequence[int]
    accuracy: Float[Tensor, "runs steps"]
    loss: Float[Tensor, "runs steps"]
    accuracy_hops: Float[Tensor, "runs steps hops"]
    positional: Float[Tensor, "runs steps layers heads"]
    symbolic: Float[Tensor, "runs steps layers heads"]
    entropy: Float[Tensor, "runs steps layers heads"]
    frequency_id: Float[Tensor, "runs steps layers"]
    facts: dict[str, Any]
    provenance: Provenance

    @classmethod
    def from_records(cls, runs: Mapping[str, Sequence[Mapping[str, Any]]], **facts: Any) -> Dynamics:
        """From records by run: a tracker's, or the curves of `train(config, evaluate=tracker)` (curves.jsonl).

        Runs are cut to the steps that all of them measured heads at.

        Raises:
            DataError: no run, no common step, or runs of models of different shapes.
        """
        if not runs:
            raise DataError("no run to show")
        tables = {name: {int(r["step"]): r for r in records if "positional" in r} for name, records in runs.items()}
        steps = sorted(set.intersection(*(set(table) for table in tables.values())))
        if not steps:
            raise DataError("the runs have no step in common at which heads were measured")
        rows = [[table[step] for step in steps] for table in tables.values()]
        shapes = {(len(r["positional"]), len(r["positional"][0])) for run in rows for r in run}
        if len(shapes) > 1:
            raise DataError(f"runs of models of different shapes cannot be shown together: {sorted(shapes)}")
        hops = sorted({int(k) for run in rows for r in run for k in r.get("accuracy_by_hops", {})})

        def table(get: Callable[[Mapping[str, Any]], Any]) -> Tensor:
            return torch.tensor([[get(r) for r in run] for run in rows], dtype=torch.float64)

        layers = shapes.pop()[0]
        missing = [math.nan] * layers
        return cls(
            runs=tuple(runs),
            steps=tuple(steps),
            hops=tuple(hops),
            accuracy=table(lambda r: r.get("accuracy", math.nan)),
            loss=table(lambda r: r.get("eval_loss", r.get("loss", math.nan))),
            accuracy_hops=table(lambda r: [r.get("accuracy_by_hops", {}).get(str(k), math.nan) for k in hops]).reshape(
                len(rows), len(steps), len(hops)
            ),
            positional=table(lambda r: r["positional"]),
            symbolic=table(lambda r: r["symbolic"]),
            entropy=table(lambda r: r["entropy"]),
            frequency_id=table(lambda r: [math.nan if v is None else v for v in r.get("frequency_id") or missing]),
            facts={name: facts.get(name, {}) for name in runs} if facts else {},
            provenance=provenance(**{k: v for k, v in facts.items() if k not in runs}),
        )

    # ------------------------------------------------------------------------------------------------------ derived

    @property
    def gamma(self) -> Float[Tensor, "runs steps layers heads"]:
        """Smallest γ at which each head is pure."""
        return purity(self.positional, self.symbolic)

    def labels(self, gamma: float = 0.2) -> list[list[list[list[str]]]]:
        """Label of every head [R][S][T][H] at γ."""
        _check_gamma(gamma)
        points = torch.stack([self.positional, self.symbolic], -1).tolist()
        return [[[[label_of(p, s, gamma) for p, s in row] for row in step] for step in run] for run in points]

    def counts(self, gamma: float = 0.2) -> Float[Tensor, "runs steps labels"]:
        """How many heads have each label of `heads.taxonomy.LABELS` at γ."""
        flat = [[[h for row in step for h in row] for step in run] for run in self.labels(gamma)]
        return torch.tensor([[[s.count(x) for x in LABELS] for s in run] for run in flat], dtype=torch.float64)

    def emergence(self, gamma: float = 0.2, accuracies: Sequence[float] = ACCURACIES) -> Emergence:
        """The timeline: when accuracy is reached, and when each head becomes, and stays, pure."""
        rows: list[dict[str, Any]] = []
        for r, run in enumerate(self.runs):
            curves = [("accuracy", self.accuracy[r])]
            curves += [
                (f"accuracy, {k} hop{'s' * (k != 1)}", self.accuracy_hops[r, :, i]) for i, k in enumerate(self.hops)
            ]
            for name, curve in curves:
                for level in accuracies:
                    rows.append(_event(run, f"{name} ≥ {level:g}", self.steps, (curve >= level).tolist()))
                if bool(torch.isfinite(curve).any()) and name == "accuracy":
                    best = int(curve.nan_to_num(-1.0).argmax())
                    rows.append(
                        {"run": run, "event": "largest accuracy", "layer": None, "head": None,
                         "first": self.steps[best], "stays": None, "final": float(curve[-1])}
                    )  # fmt: skip
        for r, run in enumerate(self.labels(gamma)):
            for t in range(self.positional.shape[2]):
                for h in range(self.positional.shape[3]):
                    seen_as = [step[t][h] for step in run]
                    for label in ("positional", "symbolic"):
                        hit = [x == label for x in seen_as]
                        if any(hit):
                            row = _event(self.runs[r], label, self.steps, hit)
                            rows.append({**row, "layer": t, "head": h, "final": seen_as[-1]})
        return Emergence(rows=rows, gamma=gamma, runs=tuple(self.runs), provenance=self.provenance)

    def relation(self, gamma: float = 0.2, resamples: int = 2000, confidence: float = 0.95) -> PurityRelation:
        """How accuracy goes with purity, each run by itself, with intervals over runs."""
        _check_gamma(gamma)
        pure = self.counts(gamma)[..., :2].sum(-1)
        # heads that have learned nothing are uniform: that corner is no purity here
        mean = 1 - purity(self.positional, self.symbolic, uniform=False).flatten(2).mean(-1)
        figures: dict[str, list[float]] = {"pure_heads": [], "mean_purity": [], "lag": [], "final_pure": []}
        timeline = self.emergence(gamma)
        for r, run in enumerate(self.runs):
            figures["pure_heads"].append(_spearman(self.accuracy[r], pure[r]))
            figures["mean_purity"].append(_spearman(self.accuracy[r], mean[r]))
            figures["lag"].append(timeline.lag(run))
            figures["final_pure"].append(float(pure[r, -1]))
        values = {name: torch.tensor(column, dtype=torch.float64) for name, column in figures.items()}
        intervals = {name: _bootstrap(column, resamples, confidence) for name, column in values.items()}
        return PurityRelation(
            runs=tuple(self.runs),
            values=values,
            intervals=intervals,
            gamma=gamma,
            confidence=confidence,
            accuracy=self.accuracy,
            pure=pure,
            provenance=self.provenance,
        )

    def to_dataframe(self) -> pd.DataFrame:
        """One row a run, step, layer and head: accuracy, loss, scores, γ, entropy and the layer's frequency id."""
        import pandas as pd

        gamma = self.gamma
        rows = []
        for r, run in enumerate(self.runs):
            for s, step in enumerate(self.steps):
                head = {
                    "run": run,
                    "step": step,
                    "accuracy": float(self.accuracy[r, s]),
                    "loss": float(self.loss[r, s]),
                }
                head.update({f"accuracy_{k}_hops": float(self.accuracy_hops[r, s, i]) for i, k in enumerate(self.hops)})
                for t in range(self.positional.shape[2]):
                    for h in range(self.positional.shape[3]):
                        at = (r, s, t, h)
                        rows.append(
                            {
                                **head,
                                "layer": t,
                                "head": h,
                                "positional": float(self.positional[at]),
                                "symbolic": float(self.symbolic[at]),
                                "gamma": float(gamma[at]),
                                "entropy": float(self.entropy[at]),
                                "frequency_id": float(self.frequency_id[r, s, t]),
                            }
                        )
        return pd.DataFrame(rows)

    def curves_dataframe(self, gamma: float = 0.2) -> pd.DataFrame:
        """One row a run and step: accuracy, by hops, loss, counts of labels, mean γ."""
        import pandas as pd

        counts, mean = self.counts(gamma), self.gamma.flatten(2).mean(-1)
        rows = []
        for r, run in enumerate(self.runs):
            for s, step in enumerate(self.steps):
                row = {"run": run, "step": step, "accuracy": float(self.accuracy[r, s]), "loss": float(self.loss[r, s])}
                row.update({f"accuracy_{k}_hops": float(self.accuracy_hops[r, s, i]) for i, k in enumerate(self.hops)})
                row.update({label: int(counts[r, s, i]) for i, label in enumerate(LABELS)})
                rows.append({**row, "mean_gamma": float(mean[r, s])})
        return pd.DataFrame(rows)

    def plot(self, ax: Any = None, run: int = 0, gamma: float = 0.2) -> Any:
        """Accuracy (by hops where known) and the share of positional and symbolic heads over steps, one run."""
        from posattn import plotting

        ax = plotting.axes(ax)
        steps = list(self.steps)
        plotting.curve(ax, self.accuracy[run], steps, label="accuracy", color="black", linestyle="-")
        for i, k in enumerate(self.hops):
            shade = str(0.35 + 0.45 * i / max(1, len(self.hops) - 1))  # the more hops, the lighter
            plotting.curve(
                ax, self.accuracy_hops[run, :, i], steps, label=count(k, "hop"), color=shade, index=i, lw=0.9
            )
        share = self.counts(gamma)[run] / self.positional.shape[2] / self.positional.shape[3]
        for i, label in enumerate(LABELS[:2]):
            plotting.curve(ax, share[:, i], steps, label=f"{label} heads", index=i)
        return plotting.finish(ax, x="step", y=f"accuracy; share of heads (γ = {gamma:g})", legend=True, ylim=(0, 1.02))


def _event(run: str, name: str, steps: Sequence[int], hit: Sequence[bool]) -> dict[str, Any]:
    first = next((step for step, yes in zip(steps, hit, strict=True) if yes), None)
    last_no = max((i for i, yes in enumerate(hit) if not yes), default=-1)
    stays = steps[last_no + 1] if last_no + 1 < len(steps) else None
    return {"run": run, "event": name, "layer": None, "head": None, "first": first, "stays": stays, "final": None}


def _check_gamma(gamma: float) -> None:
    if not 0 < gamma < 0.5:
        raise InputError(f"purity (γ) lies above 0 and below 0.5, where the corners meet; got {gamma}")


def _spearman(a: Tensor, b: Tensor) -> float:
    keep = torch.isfinite(a) & torch.isfinite(b)
    a, b = a[keep], b[keep]
    if len(a) < 3 or float(a.std()) == 0 or float(b.std()) == 0:
        return math.nan  # a constant curve goes with nothing
    from scipy.stats import spearmanr

    return float(spearmanr(a.numpy(), b.numpy())[0])  # pyright: ignore[reportArgumentType]


def _bootstrap(values: Tensor, resamples: int, confidence: float) -> Tensor:
    """Percentile interval [2] of the mean over runs; NaN below two runs."""
    kept = values[torch.isfinite(values)]
    if len(kept) < 2:
        return torch.full((2,), math.nan, dtype=torch.float64)
    import numpy as np
    from scipy.stats import bootstrap

    found = bootstrap(
        (kept.numpy(),),
        np.mean,
        n_resamples=resamples,
        confidence_level=confidence,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return torch.tensor([found.low, found.high], dtype=torch.float64)


@dataclasses.dataclass(frozen=True, eq=False)
class Emergence(Result):
    """The timeline of one or more runs.

    `rows`: dictionaries of run, event, layer, head, `first` (first step it is so), `stays` (first step from which it is
    so to the end; None: not at the end) and `final`. Events: "accuracy ≥ x", "largest accuracy", "positional",
    "symbolic".
    """

    kind: ClassVar[str] = "emergence"

    rows: Sequence[dict[str, Any]]
    gamma: float
    runs: Sequence[str]
    provenance: Provenance

    def step(self, run: str, event: str, which: str = "first") -> int | None:
        """The step of an accuracy event, None when it never came."""
        return next((r[which] for r in self.rows if r["run"] == run and r["event"] == event), None)

    def lag(self, run: str, level: float = 0.99) -> float:
        """Median step at which heads become pure for good, minus the step of that accuracy; NaN where either lacks."""
        reached = self.step(run, f"accuracy ≥ {level:g}")
        pure = [r["stays"] for r in self.rows if r["run"] == run and r["layer"] is not None and r["stays"] is not None]
        if reached is None or not pure:
            return math.nan
        return float(torch.tensor(pure, dtype=torch.float64).quantile(0.5) - reached)

    def to_dataframe(self) -> pd.DataFrame:
        """The rows, as they are."""
        import pandas as pd

        columns = ["run", "event", "layer", "head", "first", "stays", "final"]
        frame = pd.DataFrame(list(self.rows), columns=columns)
        return frame.astype({"layer": "Int64", "head": "Int64", "first": "Int64", "stays": "Int64"})

    def plot(self, ax: Any = None, run: str | None = None) -> Any:
        """Heads by layer against the step from which they are pure, with lines where accuracy reached its levels."""
        from posattn import plotting

        ax = plotting.axes(ax)
        run = self.runs[0] if run is None else run
        rows = [r for r in self.rows if r["run"] == run]
        for index, label in enumerate(("positional", "symbolic")):
            found = [(r["stays"], r["layer"]) for r in rows if r["event"] == label and r["stays"] is not None]
            if found:
                plotting.scatter(ax, [s for s, _ in found], [t for _, t in found], label=label, index=index)
        for row in rows:
            if row["event"].startswith("accuracy ≥") and row["first"] is not None:
                ax.axvline(row["first"], color="grey", lw=0.8, ls=":")
                place = {"transform": ax.get_xaxis_transform(), "va": "bottom", "ha": "left", "rotation": 45}
                ax.text(row["first"], 1.01, row["event"], fontsize=7, **place)
        return plotting.finish(ax, x="step from which the head is pure", y="layer", legend=True)


@dataclasses.dataclass(frozen=True, eq=False)
class PurityRelation(Result):
    """Accuracy against purity, per run: `values` [R] and bootstrap `intervals` [2] of their mean over runs, by name.

    "pure_heads", "mean_purity": Spearman correlation with accuracy over the measured steps. "lag": steps from accuracy
    .99 to the median pure head. "final_pure": pure heads at the end. `accuracy`, `pure` [R,S]: the curves themselves.
    """

    kind: ClassVar[str] = "accuracy and purity"

    runs: Sequence[str]
    values: dict[str, Float[Tensor, "runs"]]
    intervals: dict[str, Float[Tensor, "2"]]
    gamma: float
    confidence: float
    accuracy: Float[Tensor, "runs steps"]
    pure: Float[Tensor, "runs steps"]
    provenance: Provenance

    def to_dataframe(self) -> pd.DataFrame:
        """One row a figure and run, and one row a figure with the mean and its interval (run "mean")."""
        import pandas as pd

        rows: list[dict[str, Any]] = []
        for name, column in self.values.items():
            for run, value in zip(self.runs, column.tolist(), strict=True):
                rows.append({"figure": name, "run": run, "value": value, "low": math.nan, "high": math.nan})
            low, high = self.intervals[name].tolist()
            rows.append({"figure": name, "run": "mean", "value": float(column.nanmean()), "low": low, "high": high})
        return pd.DataFrame(rows)

    def plot(self, ax: Any = None) -> Any:
        """Pure heads against accuracy, a path a run."""
        from posattn import plotting

        ax = plotting.axes(ax)
        for r, run in enumerate(self.runs):
            plotting.curve(ax, self.pure[r], self.accuracy[r], label=run, marker="o", linewidth=0.8)
        return plotting.finish(ax, x="accuracy", y=f"pure heads (γ = {self.gamma:g})", legend=True)


def combine(parts: Sequence[Dynamics]) -> Dynamics:
    """Runs of several results as one, on the steps they share.

    Raises:
        DataError: nothing given, two runs of one name, no common step, or different models.
    """
    if not parts:
        raise DataError("no run to combine")
    names = [name for part in parts for name in part.runs]
    if len(set(names)) != len(names):
        raise DataError(f"two runs have one name: {sorted({n for n in names if names.count(n) > 1})}")
    steps = sorted(set.intersection(*(set(part.steps) for part in parts)))
    shapes = {tuple(part.positional.shape[2:]) for part in parts}
    hops = {tuple(part.hops) for part in parts}
    if not steps or len(shapes) > 1 or len(hops) > 1:
        raise DataError("the runs share no step, or differ in the model's shape or in their hops")
    first = parts[0]
    merged = {
        name: torch.cat([getattr(p, name)[:, [p.steps.index(s) for s in steps]] for p in parts])
        for name in ("accuracy", "loss", "accuracy_hops", "positional", "symbolic", "entropy", "frequency_id")
    }
    facts = {name: value for part in parts for name, value in part.facts.items()}
    return dataclasses.replace(first, runs=tuple(names), steps=tuple(steps), facts=facts, **merged)
