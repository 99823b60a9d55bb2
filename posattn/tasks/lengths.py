"""Length generalisation: what a model loses when its input grows, and whether its heads foretold it.

**Tasks.** Samples of the task's own length are made longer by prepending tokens that leave the answer as it is; every
length sees the same samples. Value: accuracy at the last position, overall and by hops.

**Text.** Every length n sees the same targets, the last `targets` tokens of each document, behind the n − targets
tokens before them (and BOS, where the document begins with it). So a change of loss is the context's doing, never the
text's. Value: mean loss in nats a token.

At each length also, on fewer samples and for the last query: positional and symbolic score of every head, discrepancy
and weight of the best key; and the value again with each class of heads removed (labels at the shortest length).

**Prediction.** From the shortest length alone, a head whose best key holds w > ½ keeps half of the attention up to
1 + (n−1)·w/(1−w) keys (`discrepancy.predicted_break`). The model is predicted to break where the first of these heads
does (and, less strictly, their median). Beside it the observed break: for accuracy the length at which it has lost half
of its lead over chance, for loss the length at which it exceeds its lowest value by `TOLERANCE`; both interpolated in
the logarithm of the length.

**Key–value retrieval by gold position** (`key_value_retrieval`): P lines "key: value", then one of the keys. The same
prompts are asked about each of their P lines in turn, so positions differ in nothing but position. Accuracy (all tokens
of the value are the arg max), choice (the value's first token against those of the other values) and log-probability of
the gold value, by line; set against the mass that a predicted influence profile puts on the line.

Memory: batches shrink so that one layer's attention of a batch stays below `BUDGET` numbers.

Facts: prepending and the lengths arXiv 2605.31558; position bias of retrieval ("lost in the middle") arXiv 2307.03172.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posattn.errors import CheckpointError, DataError, InputError
from posattn.heads.ablation import ablate_heads
from posattn.heads.documents import as_documents, batches, run_facts, seen
from posattn.heads.scores import score_heads
from posattn.heads.taxonomy import HeadTaxonomy, classify_heads
from posattn.models.base import Model
from posattn.results import Provenance, Result, provenance
from posattn.tasks.base import Samples, Task
from posattn.tasks.discrepancy import BUDGET, gaps, predicted_break

if TYPE_CHECKING:
    import pandas as pd

#: tokens prepended in arXiv 2605.31558
PUBLISHED_ADDED = (50, 100, 200, 300, 500, 700, 800, 1000, 2000, 5000)
#: nats above its lowest at which the loss of a text counts as broken
TOLERANCE = 0.1
#: tokens at the end of each document whose loss is measured
TARGETS = 32


@dataclasses.dataclass(frozen=True, eq=False)
class LengthCurve(Result):
    """Value by length. L lengths, K hop counts, T layers, H heads, C classes.

    `metric` "accuracy" or "loss" (nats a token); `value` [L] with `interval` [L,2] (bootstrap over samples);
    `value_hops` [L,K]. `positional`, `symbolic`, `gap` (mean discrepancy), `weight` [L,T,H], NaN where not measured.
    `ablated` [L] by class, `heads` by class as [layer, head] pairs. `chance`: value of guessing. `predicted` [T,H]:
    length at which each head is predicted to hold half, from the shortest length alone.
    """

    kind: ClassVar[str] = "length generalisation"

    metric: str
    lengths: Sequence[int]
    value: Float[Tensor, "lengths"]
    interval: Float[Tensor, "lengths 2"]
    hops: Sequence[int]
    value_hops: Float[Tensor, "lengths hops"]
    positional: Float[Tensor, "lengths layers heads"]
    symbolic: Float[Tensor, "lengths layers heads"]
    gap: Float[Tensor, "lengths layers heads"]
    weight: Float[Tensor, "lengths layers heads"]
    predicted: Float[Tensor, "layers heads"]
    ablated: dict[str, Float[Tensor, "lengths"]]
    heads: dict[str, Any]
    labels: Sequence[Sequence[str]]
    chance: float
    confidence: float
    provenance: Provenance

    def predicted_break(self, which: str = "first") -> float:
        """Predicted breaking length: of the "first" head with w > ½ at the shortest length, or their "median".

        NaN where no head is that sharp (then nothing is predicted).

        Raises:
            InputError: another word.
        """
        if which not in ("first", "median"):
            raise InputError(f'which is "first" or "median", not {which!r}')
        sharp = self.predicted[(self.weight[0] > 0.5) & torch.isfinite(self.weight[0])]
        if not len(sharp):
            return math.nan
        return float(sharp.min() if which == "first" else sharp.quantile(0.5))

    def observed_break(self, tolerance: float = TOLERANCE) -> float:
        """The length at which the value breaks (see the module docstring); NaN when it does not up to the last one."""
        values, lengths = self.value.tolist(), list(self.lengths)
        if self.metric == "accuracy":
            limit, start = (values[0] + self.chance) / 2, 0
            if values[0] <= self.chance:
                return math.nan
            excess = [limit - v for v in values]
        else:
            start = min(range(len(values)), key=values.__getitem__)
            excess = [v - values[start] - tolerance for v in values]
        for i in range(start + 1, len(values)):
            if excess[i] > 0:
                share = -excess[i - 1] / (excess[i] - excess[i - 1])
                low, high = math.log(lengths[i - 1]), math.log(lengths[i])
                return math.exp(low + share * (high - low))
        return math.nan

    def to_dataframe(self) -> pd.DataFrame:
        """One row a length: value, interval, by hops, each class removed, mean and extreme head figures."""
        import pandas as pd

        rows = []
        for n, length in enumerate(self.lengths):
            row: dict[str, Any] = {
                "length": length,
                self.metric: float(self.value[n]),
                "low": float(self.interval[n, 0]),
                "high": float(self.interval[n, 1]),
            }
            row.update({f"{self.metric}_{k}_hops": float(self.value_hops[n, i]) for i, k in enumerate(self.hops)})
            row.update({f"without_{name}": float(value[n]) for name, value in self.ablated.items()})
            rows.append(row)
        return pd.DataFrame(rows)

    def heads_dataframe(self) -> pd.DataFrame:
        """One row a length, layer and head: label, scores, discrepancy, weight and predicted breaking length."""
        import pandas as pd

        rows = []
        for n, length in enumerate(self.lengths):
            for t in range(self.weight.shape[1]):
                for h in range(self.weight.shape[2]):
                    rows.append(
                        {
                            "length": length,
                            "layer": t,
                            "head": h,
                            "label": self.labels[t][h] if self.labels else "",
                            "positional": float(self.positional[n, t, h]),
                            "symbolic": float(self.symbolic[n, t, h]),
                            "discrepancy": float(self.gap[n, t, h]),
                            "weight": float(self.weight[n, t, h]),
                            "predicted_break": float(self.predicted[t, h]),
                        }
                    )
        return pd.DataFrame(rows)

    def plot(self, ax: Any = None) -> Any:
        """Value by length with its interval, each class removed, and the predicted breaking length."""
        from posattn import plotting

        ax = plotting.axes(ax)
        lengths = list(self.lengths)
        low, high = self.interval.unbind(-1)
        plotting.curve(ax, self.value, lengths, label="whole model", low=low, high=high, marker="o", color="black")
        for index, (name, value) in enumerate(self.ablated.items()):
            plotting.curve(ax, value, lengths, label=f"without {name}", index=index, marker="o")
        if math.isfinite(predicted := self.predicted_break()) and predicted <= 4 * lengths[-1]:
            ax.axvline(predicted, color="grey", ls=":", label="predicted break")
        ax.set_xscale("log")
        ticks = [n for n in lengths if n == lengths[0] or n >= 1.25 * max(m for m in lengths if m < n)]
        ax.set_xticks(ticks, [str(n) for n in ticks])
        ax.minorticks_off()
        right = self.metric == "accuracy"
        name = "accuracy" if right else "loss (nats a token)"
        return plotting.finish(ax, x="length", y=name, legend=True, ylim=(0, 1.05) if right else None)


def length_generalisation(
    model: Any,
    source: Any,
    lengths: Sequence[int] | None = None,
    *,
    samples: int = 256,
    score_samples: int = 16,
    classes: HeadTaxonomy | Mapping[str, Any] | None = None,
    ablate: bool = True,
    purity: float = 0.2,
    mode: str = "zero",
    targets: int = TARGETS,
    batch_size: int = 16,
    bootstrap: int = 1000,
    confidence: float = 0.95,
    budget: int = BUDGET,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> LengthCurve:
    """How a model fares on longer inputs, and its heads with it.

    Args:
        model: a `posattn` model or anything `as_model` takes.
        source: a `Task` (accuracy), or documents of text (loss; at least as long as the largest length).
        lengths: whole lengths in tokens, ascending; default: the task's × 1, 2, 4, 8, 16; a text's in halves.
        samples: samples of the task (a text uses its documents); `score_samples` of them for the heads.
        classes: heads to remove, by name; default: the labels at the shortest length. `ablate=False`: none.
        mode: "zero" or "mean", as `ablate_heads`.

    Raises:
        InputError: lengths that are too short or too long, another vocabulary than the task's, or a bad mode.
    """
    model = seen(model)
    if samples < 1 or score_samples < 0 or targets < 1:
        raise InputError("samples and targets must be at least 1, score_samples at least 0")
    if mode not in ("zero", "mean"):
        raise InputError(f'mode is "zero" or "mean", not {mode!r}')
    run: _TaskRun | _TextRun
    if isinstance(source, Task):
        run = _TaskRun(model, source, lengths, samples, seed)
    else:
        run = _TextRun(model, source, lengths, targets)
    _check_context(model, run.lengths)
    say = progress or (lambda message: None)
    count = max(layer.n_heads for layer in model.layers)
    blank = torch.full((len(run.lengths), model.n_layers, count), math.nan, dtype=torch.float64)
    positional, symbolic, gap, weight = (blank.clone() for _ in range(4))
    values: list[Tensor] = []
    taxonomy: HeadTaxonomy | None = None
    movable = all(model.scheme(t, 3).kind not in ("absolute", "shortformer") for t in range(model.n_layers))
    for i, length in enumerate(run.lengths):
        say(f"length {length}")
        size = _batch(model, length, batch_size, budget)
        values.append(run.measure(i, size))
        rows = run.documents(i)[:score_samples]
        if rows and movable:
            found = score_heads(
                model, rows, companions=False, evidence=False, bootstrap=0, batch_size=min(size, len(rows)), seed=seed
            )
            positional[i], symbolic[i] = found.positional, found.symbolic
            if i == 0:
                taxonomy = classify_heads(found, purity)
            delta, _, best = gaps(model, rows, batch_size=size, budget=budget)
            gap[i], weight[i] = delta.mean(0), best.mean(0)
    chosen = _classes(taxonomy, classes) if ablate else {}
    ablated: dict[str, Tensor] = {}
    for name, heads in chosen.items():
        say(f"without {name} heads")
        data = run.documents(0)[: max(score_samples, 1)] if mode == "mean" else None
        with ablate_heads(model, heads, mode, tokens=data):
            parts = [run.measure(i, _batch(model, n, batch_size, budget)).mean() for i, n in enumerate(run.lengths)]
        ablated[name] = torch.stack(parts)
    table = torch.stack(values)  # [L,S]
    facts = {"source": run.describe(), "samples": table.shape[1], "score_samples": score_samples, "mode": mode}
    return LengthCurve(
        metric=run.metric,
        lengths=tuple(run.lengths),
        value=table.mean(1),
        interval=_interval(table, bootstrap, confidence, seed),
        hops=tuple(run.hops),
        value_hops=torch.stack([table[:, run.hop == k].mean(1) for k in run.hops], 1)
        if run.hops
        else torch.zeros(len(run.lengths), 0, dtype=torch.float64),
        positional=positional,
        symbolic=symbolic,
        gap=gap,
        weight=weight,
        predicted=predicted_break(weight[0].nan_to_num(0.0), run.lengths[0]).where(weight[0].isfinite(), math.nan),
        ablated=ablated,
        heads={name: [list(h) for h in heads] for name, heads in chosen.items()},
        labels=tuple(map(tuple, taxonomy.labels)) if taxonomy else (),
        chance=run.chance,
        confidence=confidence,
        provenance=provenance(**run_facts(model, None, seed=seed, lengths=facts)),
    )


def _classes(taxonomy: HeadTaxonomy | None, classes: Any) -> dict[str, list[tuple[int, int]]]:
    if isinstance(classes, HeadTaxonomy):
        taxonomy, classes = classes, None
    if classes is not None:
        return {str(name): [(int(t), int(h)) for t, h in heads] for name, heads in classes.items()}
    if taxonomy is None:
        return {}
    found = {name: taxonomy.heads(name) for name in taxonomy.counts}
    return {name: heads for name, heads in found.items() if heads}


def _check_context(model: Model, lengths: Sequence[int]) -> None:
    if model.context is not None and lengths[-1] > model.context:
        raise InputError(f"length {lengths[-1]} is more than {model.name} takes ({model.context} tokens)")


def _batch(model: Model, length: int, batch_size: int, budget: int) -> int:
    heads = max(layer.n_heads for layer in model.layers)
    return max(1, min(batch_size, budget // (heads * length**2)))


def _interval(table: Tensor, resamples: int, confidence: float, seed: int) -> Tensor:
    """Percentile bootstrap over samples (the same draws at every length); NaN for one sample."""
    count = table.shape[1]
    if count < 2 or resamples < 1:
        return torch.full((len(table), 2), math.nan, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    tail = (1 - confidence) / 2
    ends = torch.tensor([tail, 1 - tail], dtype=torch.float64)
    means = []
    for _ in range(resamples):
        drawn = torch.randint(count, (count,), generator=generator)
        means.append(table[:, drawn].mean(1))
    return torch.quantile(torch.stack(means), ends, dim=0).T


class _TaskRun:
    """Samples of a task, made longer."""

    metric = "accuracy"

    def __init__(self, model: Model, task: Task, lengths: Sequence[int] | None, samples: int, seed: int) -> None:
        if model.vocab_size != task.vocabulary_size:
            raise InputError(
                f"{model.name} has {model.vocab_size} tokens, task '{task.name}' has {task.vocabulary_size}: it was "
                "trained on another task"
            )
        self.model, self.task = model, task
        default = [task.length * 2**i for i in range(5) if task.length * 2**i <= (model.context or math.inf)]
        self.lengths = sorted({int(n) for n in (default if lengths is None else lengths)})
        if not self.lengths or self.lengths[0] < task.length:
            raise InputError(f"task '{task.name}' has {task.length} tokens; lengths start there, not at {self.lengths}")
        self.samples: Samples = task.generate(samples, seed=seed + 3_000_017)
        self.hop = self.samples.hops
        self.hops = [int(k) for k in self.hop.unique()]
        self.seed = seed
        self.chance = 1 / len(self.samples.answers.unique())

    def describe(self) -> dict[str, Any]:
        return {"task": self.task.name, "parameters": self.task.parameters}

    def _longer(self, index: int) -> Samples:
        return self.task.prepend(self.samples, self.lengths[index] - self.task.length, seed=self.seed)

    def documents(self, index: int) -> list[Tensor]:
        return list(self._longer(index).tokens)

    @torch.no_grad()
    def measure(self, index: int, batch: int) -> Tensor:
        longer, hit = self._longer(index), []
        for start in range(0, len(longer), batch):
            rows = longer.tokens[start : start + batch].to(self.model.device)
            hit.append(self.model(rows)[:, -1].float().argmax(-1).cpu())
        return (torch.cat(hit) == longer.answers).double()


class _TextRun:
    """The ends of documents, with more and more of what comes before them."""

    metric = "loss"

    def __init__(self, model: Model, source: Any, lengths: Sequence[int] | None, targets: int) -> None:
        self.model, self.targets = model, targets
        self.rows = as_documents(source)
        shortest = min(map(len, self.rows))
        if lengths is None:
            found, n = [], shortest
            while n > targets and len(found) < 6:
                found.insert(0, n)
                n //= 2
            lengths = found
        self.lengths = sorted({int(n) for n in lengths})
        if not self.lengths:
            raise DataError(f"documents of {shortest} tokens leave nothing before the last {targets}: use longer ones")
        if self.lengths[0] <= targets or self.lengths[0] < 3:
            raise InputError(f"a length of {self.lengths[0]} leaves no context before the {targets} measured tokens")
        if self.lengths[-1] > shortest:
            raise InputError(f"length {self.lengths[-1]} was asked for, but a document has {shortest} tokens")
        bos = getattr(model.tokenizer, "bos_token_id", None)
        self.bos = bos if bos is not None and all(int(row[0]) == bos for row in self.rows) else None
        self.hop, self.hops = torch.zeros(0), []
        self.chance = math.log(model.vocab_size)
        describe = getattr(source, "describe", None)
        self.facts = describe() if describe is not None else {"source": "tensor"}

    def describe(self) -> dict[str, Any]:
        return {**self.facts, "targets": self.targets}

    def documents(self, index: int) -> list[Tensor]:
        n = self.lengths[index]
        if self.bos is None:
            return [row[len(row) - n :] for row in self.rows]
        return [torch.cat([row[:1], row[len(row) - n + 1 :]]) for row in self.rows]

    @torch.no_grad()
    def measure(self, index: int, batch: int) -> Tensor:
        documents = self.documents(index)
        found = torch.zeros(len(documents), dtype=torch.float64)
        for indices, rows in batches(documents, batch):
            rows = rows.to(self.model.device)
            logits = self.model(rows)[:, -self.targets - 1 : -1].float()
            loss = torch.nn.functional.cross_entropy(logits.mT, rows[:, -self.targets :], reduction="none")
            found[torch.tensor(indices)] = loss.double().mean(1).cpu()
        return found


def model_task(source: str | os.PathLike[str], expected: str | None = None) -> Task | None:
    """The task that a model folder (or `bundled:` model) was trained on, None where it says nothing.

    Raises:
        CheckpointError: it is of another task than `expected`, or its description cannot be read.
        UnsupportedModelError: no such bundled model.
    """
    from posattn.models.bundled import PREFIX, bundled_path
    from posattn.tasks import make_task

    name = os.fspath(source)
    folder = bundled_path(name) if name.startswith(PREFIX) else Path(name).expanduser()
    path = folder / "posattn_task.json"
    if not path.is_file():
        return None
    try:
        facts = json.loads(path.read_text("utf-8"))
        task = make_task(facts["task"], **facts["parameters"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read as a task ({type(error).__name__})") from error
    if expected is not None and task.name != expected:
        raise CheckpointError(f"{name} is a checkpoint of task '{task.name}', not of '{expected}'")
    return task


# ------------------------------------------------------------------------------------------------ key–value retrieval


@dataclasses.dataclass(frozen=True, eq=False)
class KeyValuePrompts:
    """Prompts of P lines, asked about each line in turn. S prompts.

    `documents[p][s]`: ids of prompt s asked about line p, the gold value's tokens last. `values[p][s]`: how many tokens
    the gold value has. `first[s]`: first token of each line's value. `spans[s]`: (start, end) of each line.
    """

    documents: list[list[Tensor]]
    values: list[list[int]]
    first: list[list[int]]
    spans: list[list[tuple[int, int]]]


def key_value_prompts(model: Any, pairs: int = 8, samples: int = 16, seed: int = 0) -> KeyValuePrompts:
    """Lines "key: value" with random three-letter keys and values of a letter and three digits, in the model's tokens.

    Values begin with different letters. Without a tokenizer keys and values are single random tokens.

    Raises:
        InputError: fewer than 2 or more than 24 pairs, or no sample.
        DataError: a vocabulary too small for them.
    """
    if not 2 <= pairs <= 24:
        raise InputError(f"pairs lies between 2 and 24, not {pairs}")
    if samples < 1:
        raise InputError(f"samples must be at least 1, not {samples}")
    generator = torch.Generator().manual_seed(seed)
    tokenizer = getattr(model, "tokenizer", None)
    found = KeyValuePrompts([[] for _ in range(pairs)], [[] for _ in range(pairs)], [], [])
    for _ in range(samples):
        if tokenizer is None:
            if model.vocab_size < 2 * pairs:
                raise DataError(f"a vocabulary of {model.vocab_size} tokens cannot hold {pairs} keys and values")
            ids = torch.randperm(model.vocab_size, generator=generator)[: 2 * pairs].tolist()
            start: list[int] = []
            keys, values, ends = [[i] for i in ids[:pairs]], [[i] for i in ids[pairs:]], [[] for _ in range(pairs)]
        else:
            start = _bos(tokenizer)
            keys, values, ends = [], [], []
            letters = torch.randperm(26, generator=generator)[:pairs].tolist()
            words: set[str] = set()
            while len(words) < pairs:
                words.add("".join(chr(97 + int(i)) for i in torch.randint(26, (3,), generator=generator)))
            for word, letter in zip(sorted(words), letters, strict=True):
                digits = "".join(str(int(i)) for i in torch.randint(10, (3,), generator=generator))
                keys.append(_encode(tokenizer, f"{word}:"))
                values.append(_encode(tokenizer, f" {chr(65 + letter)}{digits}"))
                ends.append(_encode(tokenizer, "\n"))
            order = torch.randperm(pairs, generator=generator).tolist()
            keys, values = [keys[i] for i in order], [values[i] for i in order]
        row, spans = list(start), []
        for key, value, end in zip(keys, values, ends, strict=True):
            spans.append((len(row), len(row) + len(key) + len(value)))
            row += key + value + end
        found.spans.append(spans)
        found.first.append([_first_own(value, values) for value in values])
        for p in range(pairs):
            found.documents[p].append(torch.tensor(row + keys[p] + values[p]))
            found.values[p].append(len(values[p]))
    return found


def _encode(tokenizer: Any, text: str) -> list[int]:
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if not ids:
        raise DataError(f"the tokenizer makes nothing of {text!r}")
    return ids


def _bos(tokenizer: Any) -> list[int]:
    token = getattr(tokenizer, "bos_token_id", None)
    ids = list(tokenizer("a")["input_ids"])
    return [token] if token is not None and ids and ids[0] == token else []


def _first_own(value: list[int], values: list[list[int]]) -> int:
    """Index of the first token at which this value differs from all others (a blank may be a token of its own)."""
    for i in range(len(value)):
        if all(other is value or other[: i + 1] != value[: i + 1] for other in values):
            return i
    return len(value) - 1


@dataclasses.dataclass(frozen=True, eq=False)
class KeyValueRetrieval(Result):
    """Retrieval by the gold line's place. P lines, S prompts.

    `accuracy`, `choice` (chance 1/P), `log_probability` (nats, of the whole value) [P,S]; `*_interval` [P,2] bootstrap
    over prompts. `place` [P]: middle of the line in [0,1] of the prompt. `predicted` [P]: share of the influence
    profile on the line (sums to 1 over lines), None where no profile was given. `agreement`: Spearman correlation of
    `predicted` with each figure's mean over prompts, NaN where one of them is constant.
    """

    kind: ClassVar[str] = "key-value retrieval"

    accuracy: Float[Tensor, "lines prompts"]
    choice: Float[Tensor, "lines prompts"]
    log_probability: Float[Tensor, "lines prompts"]
    accuracy_interval: Float[Tensor, "lines 2"]
    choice_interval: Float[Tensor, "lines 2"]
    log_probability_interval: Float[Tensor, "lines 2"]
    place: Float[Tensor, "lines"]
    predicted: Float[Tensor, "lines"] | None
    agreement: dict[str, float]
    tokens: float
    confidence: float
    provenance: Provenance

    def to_dataframe(self) -> pd.DataFrame:
        """One row a line: place, accuracy, choice, log-probability with intervals, predicted share."""
        import pandas as pd

        frame: dict[str, Any] = {"line": range(len(self.place)), "place": self.place.tolist()}
        for name in ("accuracy", "choice", "log_probability"):
            low, high = getattr(self, f"{name}_interval").unbind(-1)
            frame |= {name: getattr(self, name).mean(1).tolist(), f"{name}_low": low.tolist()}
            frame[f"{name}_high"] = high.tolist()
        if self.predicted is not None:
            frame["predicted"] = self.predicted.tolist()
        return pd.DataFrame(frame)

    def plot(self, ax: Any = None) -> Any:
        """Log-probability of the gold value by place, and the predicted share on a second axis."""
        from posattn import plotting

        ax = plotting.axes(ax)
        low, high = self.log_probability_interval.unbind(-1)
        mean = self.log_probability.mean(1)
        plotting.curve(ax, mean, self.place, label="gold value", low=low, high=high, marker="o")
        if self.predicted is not None:
            twin = ax.twinx()
            plotting.curve(twin, self.predicted, self.place, label="predicted", index=1, marker="s")
            twin.set_ylabel("predicted share of influence")
        return plotting.finish(ax, x="place of the gold line", y="log-probability of its value (nats)")


@torch.no_grad()
def key_value_retrieval(
    model: Any,
    pairs: int = 8,
    samples: int = 16,
    *,
    profile: Float[Tensor, "n"] | None = None,
    ablate: Sequence[tuple[int, int]] | None = None,
    batch_size: int = 8,
    bootstrap: int = 1000,
    confidence: float = 0.95,
    budget: int = BUDGET,
    seed: int = 0,
) -> KeyValueRetrieval:
    """Can the model say the value of a key, depending on where the pair stands?

    Args:
        profile: predicted (or measured) influence of positions on the last one, of any length: it is stretched to the
            prompt by its cumulative sum.
        ablate: heads to remove meanwhile.

    Raises:
        InputError: pairs or samples out of range, a prompt longer than the model takes, or a profile without mass.
    """
    model = seen(model)
    prompts = key_value_prompts(model, pairs, samples, seed)
    _check_context(model, [max(len(row) for line in prompts.documents for row in line)])
    figures = torch.zeros(3, pairs, samples, dtype=torch.float64)
    with ablate_heads(model, ablate) if ablate else contextlib.nullcontext():
        for p in range(pairs):
            size = _batch(model, max(map(len, prompts.documents[p])), batch_size, budget)
            for indices, rows in batches(prompts.documents[p], size):
                logits = model(rows.to(model.device)).float().cpu()
                for place, s in enumerate(indices):
                    count = prompts.values[p][s]
                    gold = rows[place, -count:].cpu()
                    scores = logits[place, -count - 1 : -1].log_softmax(-1)
                    own = prompts.first[s][p]
                    others = torch.tensor(_candidates(prompts, s, own))
                    figures[0, p, s] = float((scores.argmax(-1) == gold).all())
                    figures[1, p, s] = float(others[scores[own, others].argmax()] == gold[own])
                    figures[2, p, s] = float(scores.gather(-1, gold[:, None]).sum())
    place, predicted = _places(prompts, profile)
    means = figures.mean(-1)
    names = ("accuracy", "choice", "log_probability")
    agreement = {}
    if predicted is not None:
        from posattn.tasks.tracking import _spearman

        agreement = {name: _spearman(predicted, mean) for name, mean in zip(names, means, strict=True)}
    facts = {"pairs": pairs, "samples": samples, "ablate": [list(h) for h in ablate or ()]}
    return KeyValueRetrieval(
        **dict(zip(names, figures.unbind(0), strict=True)),
        **{f"{n}_interval": _interval(f, bootstrap, confidence, seed) for n, f in zip(names, figures, strict=True)},
        place=place,
        predicted=predicted,
        agreement=agreement,
        tokens=sum(len(row) for row in prompts.documents[0]) / samples,
        confidence=confidence,
        provenance=provenance(**run_facts(model, None, seed=seed, key_value=facts)),
    )


def _candidates(prompts: KeyValuePrompts, s: int, own: int) -> list[int]:
    """The tokens that the values of prompt s have at place `own`."""
    found = []
    for p in range(len(prompts.documents)):
        value = prompts.documents[p][s][-prompts.values[p][s] :]
        if own < len(value):
            found.append(int(value[own]))
    return sorted(set(found))


def _places(prompts: KeyValuePrompts, profile: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Middle of each line in [0,1], and the profile's share on it, both averaged over prompts."""
    lengths = [len(row) - count for row, count in zip(prompts.documents[0], prompts.values[0], strict=True)]
    spans = torch.tensor(prompts.spans, dtype=torch.float64) / torch.tensor(lengths).double()[:, None, None]
    place = spans.mean(-1).mean(0)
    if profile is None:
        return place, None
    mass = profile.detach().double().cpu()
    if bool((mass < 0).any()) or not float(mass.sum()) > 0:
        raise InputError("a profile is a distribution over positions: its values are not negative and have a sum")
    total = torch.cat([torch.zeros(1, dtype=torch.float64), (mass / mass.sum()).cumsum(0)])
    at = spans.clamp(0, 1) * len(mass)
    low = at.floor().long().clamp(max=len(mass) - 1)
    cumulative = total[low] + (at - low) * (total[low + 1] - total[low])
    share = (cumulative[..., 1] - cumulative[..., 0]).mean(0)
    return place, share / share.sum().clamp_min(1e-300)


def key_value_tokens(prompts: KeyValuePrompts) -> Int[Tensor, "prompts n"]:
    """The prompts (asked about their last line, without the value) as one table, cut at the front to equal length."""
    rows = [row[: len(row) - n] for row, n in zip(prompts.documents[-1], prompts.values[-1], strict=True)]
    shortest = min(map(len, rows))
    return torch.stack([row[len(row) - shortest :] for row in rows])
