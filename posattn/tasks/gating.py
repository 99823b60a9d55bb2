"""Frequency gating: what a head can do when its rotary angles are restricted, trained that way or gated afterwards.

**Trained** (`gated_training`). One layer, one head, no MLP and no residual: the last token's query attends to the
tokens before it and the attended values give the answer's logits. Every pair of query and key features turns by one of
the allowed angles (`width` pairs an angle), so the head has those frequencies and no others. One model for each entry
of the grid is trained on the same samples, all in one batched computation; a second seed repeats it with other weights
and samples. Result: accuracy by angle and by the position of the answer. A wrong angle leaves a mark: too slow for
index, accuracy is worst in the middle (U-shaped); too fast for retrieval, best there (inverse U).

The grid is a parameter. `ROTARY_GRID` is 0 and every fourth frequency of a 128-wide head with base 10000, the head of
the published models (id t: θ_t = 10000^(−2(t−1)/128)).

**Gated afterwards** (`gate_bands`, `band_gating`). In a model that is already trained, bands of rotary frequencies are

* removed: the query's pairs become 0, so the frequency adds nothing to any logit; or
* frozen: query and key are turned back by their own position, so the frequency still carries symbols, not position.

Both act on q and k before the rotation, in every head of the chosen layers; weights stay as they are. The measured
value (accuracy by position of the answer, or loss of a text) is set beside the ungated model's.

Facts: restricted angles, canonical tasks, U and inverse U arXiv 2511.11579. Freezing is ours.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from posattn.errors import InputError, SelfCheckError, UnsupportedModelError
from posattn.heads.documents import as_documents, batches, run_facts, seen
from posattn.models.base import Batch, Model, Rotary
from posattn.models.positions import attention, real_positions, rotate
from posattn.results import Provenance, Result, provenance
from posattn.tasks.base import Samples, Task
from posattn.tasks.canonical import IndexTask, RetrievalTask

if TYPE_CHECKING:
    import pandas as pd


def rotary_angle(number: int, width: int = 128, base: float = 10000.0) -> float:
    """θ_t of frequency id t = 1, 2, … of a head of that width."""
    if not 1 <= number <= width // 2:
        raise InputError(f"a head of width {width} has frequency ids 1 to {width // 2}, not {number}")
    return base ** (-2 * (number - 1) / width)


#: no rotation, and every fourth frequency of a 128-wide head
ROTARY_GRID: tuple[float, ...] = (0.0, *(rotary_angle(t) for t in range(61, 0, -4)))


class GatedHeads(nn.Module):
    """One single-head model for each of C angle sets, side by side; parameters [C, …], no interaction.

    angles [C,F] radians per position, `width` feature pairs an angle.
    """

    angles: Tensor

    def __init__(
        self, vocabulary: int, angles: Float[Tensor, "c f"], width: int = 8, embedding: int = 64, seed: int = 0
    ) -> None:
        super().__init__()
        copies, generator = len(angles), torch.Generator().manual_seed(seed)
        features = 2 * width * angles.shape[1]

        def weight(rows: int, columns: int, scale: float) -> nn.Parameter:
            # every copy starts from the same weights: grid entries differ in their angles alone
            start = scale * torch.randn(rows, columns, generator=generator)
            return nn.Parameter(start.expand(copies, -1, -1).clone())

        self.register_buffer("angles", angles.float())
        self.width = width
        self.embed = weight(vocabulary, embedding, 1.0)
        self.q = weight(embedding, features, embedding**-0.5)
        self.k = weight(embedding, features, embedding**-0.5)
        self.v = weight(embedding, embedding, embedding**-0.5)
        self.out = weight(embedding, vocabulary, embedding**-0.5)

    def turned(self, x: Float[Tensor, "c b n d"], positions: Int[Tensor, "n"]) -> Float[Tensor, "c b n d"]:
        """Feature pairs rotated by position × angle."""
        turns = positions[:, None] * self.angles[:, None].repeat_interleave(self.width, -1)  # [C,n,F·width]
        cos, sin = turns.cos()[:, None], turns.sin()[:, None]
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)

    def pattern(self, tokens: Int[Tensor, "b n"]) -> Float[Tensor, "c b n1"]:
        """Attention of the last token over the ones before it."""
        x = self.embed[:, tokens]  # [C,B,N,E]
        positions = torch.arange(tokens.shape[1])
        q = self.turned(x[:, :, -1:] @ self.q[:, None], positions[-1:])
        k = self.turned(x[:, :, :-1] @ self.k[:, None], positions[:-1])
        return ((q @ k.mT).squeeze(2) * q.shape[-1] ** -0.5).softmax(-1)

    def forward(self, tokens: Int[Tensor, "b n"]) -> Float[Tensor, "c b vocab"]:
        """Logits of the answer."""
        values = self.embed[:, tokens[:, :-1]] @ self.v[:, None]
        read = (self.pattern(tokens)[:, :, None] @ values).squeeze(2)
        return read @ self.out


@dataclasses.dataclass(frozen=True, eq=False)
class GatingCurve(Result):
    """Accuracy of single-head models by allowed angles. G grid entries, R seeds, P positions of the answer.

    `angles` [G][F] radians per position; `accuracy` [G,R]; `by_position` [G,R,P] (position counted from the start);
    `interval` [G,2]: bootstrap over seeds, NaN for one.
    """

    kind: ClassVar[str] = "frequency gating"

    task: str
    angles: Sequence[Sequence[float]]
    accuracy: Float[Tensor, "grid seeds"]
    by_position: Float[Tensor, "grid seeds positions"]
    interval: Float[Tensor, "grid 2"]
    settings: dict[str, Any]
    provenance: Provenance

    @property
    def u_shape(self) -> Float[Tensor, "grid"]:
        """Mean accuracy of both outer quarters of the positions minus that of the middle half: above 0 is a U."""
        curve = self.by_position.mean(1)
        edge = max(1, curve.shape[-1] // 4)
        ends = (curve[:, :edge].mean(-1) + curve[:, -edge:].mean(-1)) / 2
        return ends - curve[:, edge : curve.shape[-1] - edge].mean(-1)

    def to_dataframe(self) -> pd.DataFrame:
        """One row an entry, seed and position: angles, accuracy there and over all."""
        import pandas as pd

        rows = []
        for g, angles in enumerate(self.angles):
            for r in range(self.accuracy.shape[1]):
                for p in range(self.by_position.shape[2]):
                    rows.append(
                        {
                            "angles": " ".join(f"{a:.6g}" for a in angles),
                            "seed": r,
                            "position": p,
                            "accuracy_here": float(self.by_position[g, r, p]),
                            "accuracy": float(self.accuracy[g, r]),
                        }
                    )
        return pd.DataFrame(rows)

    def plot(self, ax: Any = None) -> Any:
        """Accuracy against the (last) angle, with the interval over seeds."""
        from posattn import plotting

        ax = plotting.axes(ax)
        angle = [entry[-1] for entry in self.angles]
        order = sorted(range(len(angle)), key=angle.__getitem__)
        low, high = self.interval[order].unbind(-1)
        mean = self.accuracy.mean(1)[order]
        plotting.curve(ax, mean, [angle[g] for g in order], label=self.task, low=low, high=high, marker="o")
        positive = [a for a in angle if a > 0]
        ax.set_xscale("symlog", linthresh=min(positive, default=1.0))
        return plotting.finish(ax, x="angle θ (radians a position)", y="accuracy", ylim=(0, 1.02))

    def plot_positions(self, ax: Any = None) -> Any:
        """Accuracy by grid entry (rows) and position of the answer (columns)."""
        from posattn import plotting

        labels = [" ".join(f"{a:.2g}" for a in entry) for entry in self.angles]
        ax = plotting.axes(ax)
        plotting.heatmap(
            ax, self.by_position.mean(1), x="position of the answer", y="angle", value="accuracy", limits=(0, 1)
        )
        ax.set_yticks(range(len(labels)), labels, fontsize=6)
        return ax


def gated_training(
    task: Task,
    grid: Sequence[float | Sequence[float]] = ROTARY_GRID,
    *,
    seeds: Sequence[int] = (0,),
    steps: int = 2000,
    batch: int = 128,
    learning_rate: float = 5e-3,
    width: int = 8,
    embedding: int = 64,
    eval_samples: int = 2048,
    bootstrap: int = 1000,
    progress: Callable[[str], None] | None = None,
) -> GatingCurve:
    """Train the one-layer one-head model with each allowed set of angles on a canonical task.

    Args:
        task: index, retrieval or induction (any task answered in one hop).
        grid: angles, or tuples of as many angles each.

    Raises:
        InputError: a task of several hops, an empty or uneven grid, no seed, or fewer than one step.
    """
    if not isinstance(task, (IndexTask, RetrievalTask)):
        raise InputError(f"one layer makes one hop: use index, retrieval or induction, not '{task.name}'")
    sets = [tuple(map(float, entry)) if isinstance(entry, Sequence) else (float(entry),) for entry in grid]
    if not sets or not seeds or steps < 1 or batch < 1 or eval_samples < 1:
        raise InputError("gating needs at least one angle, one seed, one step and one sample")
    if len({len(entry) for entry in sets}) > 1 or not all(math.isfinite(a) for entry in sets for a in entry):
        raise InputError("every entry of the grid must hold as many (finite) angles as the others")
    angles = torch.tensor(sets)
    accuracy, by_position = [], []
    for seed in seeds:
        if progress:
            progress(f"{task.name}: seed {seed}, {len(sets)} models")
        model = _train_gated(task, angles, int(seed), steps, batch, learning_rate, width, embedding)
        held_out = task.generate(eval_samples, seed=int(seed) + 4_000_037)
        right = _gated_right(model, held_out)
        accuracy.append(right.mean(1))
        places = [right[:, held_out.target == p].mean(1) for p in range(task.length - 1)]
        by_position.append(torch.stack(places, 1))
    table = torch.stack(accuracy, 1)
    from posattn.tasks.tracking import _bootstrap

    return GatingCurve(
        task=task.name,
        angles=tuple(sets),
        accuracy=table,
        by_position=torch.stack(by_position, 1),
        interval=torch.stack([_bootstrap(row, bootstrap, 0.95) for row in table]),
        settings={
            "steps": steps, "batch": batch, "learning_rate": learning_rate, "width": width, "embedding": embedding,
            "seeds": [int(s) for s in seeds], "parameters": task.parameters,
        },
        provenance=provenance(model="one layer, one head", tokens=task.name, seed=int(seeds[0])),
    )  # fmt: skip


def _train_gated(
    task: Task, angles: Tensor, seed: int, steps: int, batch: int, rate: float, width: int, embedding: int
) -> GatedHeads:
    model = GatedHeads(task.vocabulary_size, angles, width, embedding, seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    data = task.generate(steps * batch, seed=seed)
    for step in range(steps):
        part = data[slice(step * batch, (step + 1) * batch)]
        logits = model(part.tokens)
        answers = part.answers.expand(len(angles), -1)
        # the sum over models keeps each one's gradient what it would be alone
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), answers.flatten()) * len(angles)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def _gated_right(model: GatedHeads, samples: Samples, batch: int = 256) -> Tensor:
    parts = []
    for start in range(0, len(samples), batch):
        part = samples[slice(start, start + batch)]
        parts.append(model(part.tokens).argmax(-1) == part.answers)
    return torch.cat(parts, 1).double()


# ----------------------------------------------------------------------------------------- a trained model's bands

MODES = ("remove", "freeze")


@contextlib.contextmanager
def gate_bands(
    model: Any, frequencies: Sequence[int], mode: str = "remove", layers: Sequence[int] | None = None
) -> Iterator[None]:
    """While open, the rotary frequencies with these 0-based numbers (0 the fastest) are removed or frozen.

    Layers without a rotary embedding stay as they are.

    Raises:
        InputError: an unknown mode, no frequency, or one that no layer has.
        UnsupportedModelError: no layer has a rotary embedding.
    """
    model = seen(model)
    if mode not in MODES:
        raise InputError(f"mode is one of {', '.join(MODES)}, not {mode!r}")
    chosen = sorted({int(t) for t in frequencies})
    if not chosen:
        raise InputError("no frequency given")
    wanted = range(model.n_layers) if layers is None else sorted({int(t) for t in layers})
    sizes = {}
    for layer in wanted:
        if not 0 <= layer < model.n_layers:
            raise InputError(f"layer {layer} does not exist: {model.name} has layers 0 to {model.n_layers - 1}")
        rotary = model.scheme(layer, 2).rotary
        if rotary is not None:
            sizes[layer] = rotary.width // 2
    if not sizes:
        raise UnsupportedModelError(f"{model.name} has no rotary embedding in these layers: there is nothing to gate")
    for layer, size in sizes.items():
        if chosen[0] < 0 or chosen[-1] >= size:
            raise InputError(f"layer {layer} has frequencies 0 to {size - 1}, not {chosen[-1]}")

    def change(layer: int, x: Tensor, batch: Batch) -> Tensor:
        rotary = model.scheme(layer, x.shape[1]).rotary
        assert rotary is not None
        features = _features(rotary, chosen, x.device)
        x = x.clone()
        if mode == "remove":
            x[..., features] = 0
            return x
        positions = real_positions(batch.mask)[..., None]
        x[..., features] = rotate(x, _unit(rotary), positions, inverse=True)[..., features].to(x.dtype)
        return x

    with ExitStack() as stack:
        # without its query's pair a frequency has no logit: the keys may stay
        for point in ("q",) if mode == "remove" else ("q", "k"):
            stack.enter_context(model.intervene(point, change, list(sizes)))  # type: ignore[arg-type]
        yield


def _features(rotary: Rotary, frequencies: Sequence[int], device: torch.device) -> Tensor:
    """The feature numbers of both halves of every pair."""
    number = torch.tensor(frequencies, device=device)
    half = rotary.width // 2
    return torch.cat([2 * number, 2 * number + 1] if rotary.interleaved else [number, number + half])


def _unit(rotary: Rotary) -> Rotary:
    """The rotation without its attention factor, so that turning back leaves the factor in the logits."""
    size = (rotary.cos.square() + rotary.sin.square()).sqrt().clamp_min(1e-30)
    return dataclasses.replace(rotary, cos=rotary.cos / size, sin=rotary.sin / size)


@dataclasses.dataclass(frozen=True, eq=False)
class BandGating(Result):
    """A trained model with bands of its rotary frequencies gated. G bands, M modes, S samples or documents.

    `metric` "accuracy" or "loss" (nats a token); `whole` [S] without gating, `gated` [M,G,S]; `target` [S]: position of
    the answer (−1 for text). `bands` [G] as [first, last] frequency numbers, 0 the fastest.
    """

    kind: ClassVar[str] = "band gating"

    metric: str
    modes: Sequence[str]
    bands: Sequence[Sequence[int]]
    whole: Float[Tensor, "samples"]
    gated: Float[Tensor, "modes bands samples"]
    target: Int[Tensor, "samples"]
    provenance: Provenance

    def to_dataframe(self) -> pd.DataFrame:
        """One row a mode and band: value, the whole model's, and their difference with its standard error."""
        import pandas as pd

        rows = []
        for m, mode in enumerate(self.modes):
            for g, (first, last) in enumerate(self.bands):
                change = self.gated[m, g] - self.whole
                error = float(change.std() / len(change) ** 0.5) if len(change) > 1 else math.nan
                rows.append(
                    {
                        "mode": mode, "first": first, "last": last, self.metric: float(self.gated[m, g].mean()),
                        "whole": float(self.whole.mean()), "change": float(change.mean()), "standard_error": error,
                    }
                )  # fmt: skip
        return pd.DataFrame(rows)

    def by_position(self) -> pd.DataFrame:
        """For a task: one row a mode, band and position of the answer."""
        import pandas as pd

        rows = []
        for m, mode in enumerate(self.modes):
            for g, (first, last) in enumerate(self.bands):
                for p in self.target.unique().tolist():
                    here = self.target == p
                    rows.append(
                        {
                            "mode": mode, "first": first, "last": last, "position": p,
                            self.metric: float(self.gated[m, g, here].mean()), "whole": float(self.whole[here].mean()),
                        }
                    )  # fmt: skip
        return pd.DataFrame(rows)

    def plot(self, ax: Any = None) -> Any:
        """Value by band, a curve a mode, with the ungated model as a line."""
        from posattn import plotting

        ax = plotting.axes(ax)
        middle = [(first + last) / 2 for first, last in self.bands]
        for m, mode in enumerate(self.modes):
            plotting.curve(ax, self.gated[m].mean(-1), middle, label=mode, marker="o")
        ax.axhline(float(self.whole.mean()), color="black", lw=0.8, ls=":", label="not gated")
        return plotting.finish(ax, x="frequency (0 the fastest)", y=self.metric, legend=True)


@torch.no_grad()
def band_gating(
    model: Any,
    source: Any,
    bands: int | Sequence[tuple[int, int]] = 8,
    *,
    modes: Sequence[str] = MODES,
    samples: int = 256,
    layers: Sequence[int] | None = None,
    batch_size: int = 16,
    seed: int = 0,
) -> BandGating:
    """Gate each band of a trained model's rotary frequencies and measure what that costs.

    Args:
        source: a `Task` (accuracy), or documents (loss over their whole length).
        bands: how many of (nearly) equal size, or (first, last) frequency numbers, both included.

    Raises:
        InputError: a model of another task, bands out of range.
        SelfCheckError: the model's attention does not follow the gated queries and keys.
    """
    model = seen(model)
    if isinstance(source, Task):
        if model.vocab_size != source.vocabulary_size:
            raise InputError(
                f"{model.name} has {model.vocab_size} tokens, task '{source.name}' has {source.vocabulary_size}"
            )
        drawn = source.generate(samples, seed=seed + 3_000_017)
        documents, answers, target = list(drawn.tokens), drawn.answers, drawn.target
    else:
        documents, answers = as_documents(source), None
        target = torch.full((len(documents),), -1)
    chosen = _bands(model, bands)
    whole = _values(model, documents, answers, batch_size)
    gated = torch.empty(len(modes), len(chosen), len(documents), dtype=torch.float64)
    for m, mode in enumerate(modes):
        for g, (first, last) in enumerate(chosen):
            with gate_bands(model, range(first, last + 1), mode, layers):
                if g == 0:
                    _check_gate(model, documents[0])
                gated[m, g] = _values(model, documents, answers, batch_size)
    facts = {"samples": len(documents), "layers": None if layers is None else list(layers)}
    return BandGating(
        metric="loss" if answers is None else "accuracy",
        modes=tuple(modes),
        bands=tuple(map(tuple, chosen)),
        whole=whole,
        gated=gated,
        target=target,
        provenance=provenance(**run_facts(model, None, seed=seed, gating=facts)),
    )


def _bands(model: Model, bands: int | Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    tables = [model.scheme(t, 2).rotary for t in range(model.n_layers)]
    sizes = [rotary.width // 2 for rotary in tables if rotary is not None]
    if not sizes:
        raise UnsupportedModelError(f"{model.name} has no rotary embedding: there is nothing to gate")
    size = min(sizes)
    if isinstance(bands, int):
        if not 1 <= bands <= size:
            raise InputError(f"{model.name} has {size} frequencies: between 1 and {size} bands, not {bands}")
        edges = [round(i * size / bands) for i in range(bands + 1)]
        return [(a, b - 1) for a, b in itertools.pairwise(edges)]
    found = [(int(a), int(b)) for a, b in bands]
    for first, last in found:
        if not 0 <= first <= last < size:
            raise InputError(f"a band lies in 0 to {size - 1}, first not after last; got {first} to {last}")
    return found


def _values(model: Model, documents: list[Tensor], answers: Tensor | None, batch_size: int) -> Tensor:
    found = torch.zeros(len(documents), dtype=torch.float64)
    for indices, rows in batches(documents, batch_size):
        logits, place = model(rows.to(model.device)).float().cpu(), torch.tensor(indices)
        if answers is not None:
            found[place] = (logits[:, -1].argmax(-1) == answers[place]).double()
        else:
            loss = nn.functional.cross_entropy(logits[:, :-1].mT, rows[:, 1:].cpu(), reduction="none")
            found[place] = loss.double().mean(1)
    return found


def _check_gate(model: Model, document: Tensor) -> None:
    """The attention that the gated model uses is the one that its gated queries and keys give."""

    def compare(layer: int, points: Any, batch: Batch) -> None:
        expected = attention(points["q"], points["k"], model.scheme(layer, points["q"].shape[1]))
        error = float((points["pattern"].float() - expected.float()).abs().max())
        if not error <= (1e-3 if points["pattern"].dtype in (torch.float32, torch.float64) else 0.05):
            raise SelfCheckError(
                f"layer {layer}: the attention of {model.name} does not follow its gated queries and keys (it differs "
                f"by {error:.2g}), so its bands cannot be gated here"
            )

    with model.observe(["q", "k", "pattern"], compare):
        model(document[None].to(model.device))
