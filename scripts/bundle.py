"""Put a trained model into the package: copy its folder, drop local paths from its record, write its card.

    python scripts/bundle.py NAME TRAINED_MODEL_FOLDER

NAME is one of the bundled names (bytes, bytes-alibi, numbers, letters). Every figure of a language model's card comes
from the record `posattn_training.json` that training left beside the weights; those of a task's model are measured
here, on the stored weights.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parent.parent / "posattn" / "models" / "bundled_data"
LIMIT = 5_000_000
SAMPLES = 10_000
LOCAL = ("out", "corpus", "resume", "run", "evaluate", "snapshots", "device")


def bytes_card(name: str, facts: dict[str, Any], config: dict[str, Any]) -> list[str]:
    """What a byte-level language model's card says."""
    arguments, sizes = facts["arguments"], facts["bytes"]
    context = config.get("max_position_embeddings") or config["max_seq_len"]
    scheme = "ALiBi" if config["architectures"][0].startswith("Mpt") else "RoPE, grouped queries"
    return [
        f"- Position scheme: {scheme}; context {context} tokens; one token a byte, token 256 begins a document",
        "- Training text: documentation of CPython: the topics of `pydoc_data.topics` and the docstrings of "
        f"the standard library ({sizes['train']:,} bytes; "
        f"SHA-256 of the whole text `{facts['corpus_sha256'][:16]}…`). "
        "Nothing of the text is stored here.",
        f"- Held out: a fifth of the topics ({sizes['test']:,} bytes). Paragraphs elsewhere that share "
        "48 bytes in a row with them were dropped from the training text.",
        "",
        "| model | held-out bits per byte |",
        "|---|---|",
        f"| bundled:{name} | {facts['test_bits_per_byte']:.3f} |",
        f"| byte 5-gram, interpolated Kneser-Ney, same split | {facts['ngram5_bits_per_byte']:.3f} |",
        "",
        f"Trained for {facts['steps']} steps of {arguments['batch']} windows of {arguments['window']} bytes, "
        f"the weights of step {facts['best_step']} (best on a validation split) kept.",
        "`bundled:python-docs`, the default text of the commands, holds topics that the model has seen.",
        "",
        "The model exists so that position bias can be measured anywhere. It writes what looks like documentation "
        "and knows nothing.",
    ]


def task_card(facts: dict[str, Any], measured: dict[str, Any], counts: dict[str, int]) -> list[str]:
    """What a task model's card says."""
    training = facts["training"]
    hops = " | ".join(f"{value:.4f}" for value in measured["accuracy_by_hops"].values())
    names = " | ".join(measured["accuracy_by_hops"])
    parameters = ", ".join(f"{name} {value}" for name, value in facts["parameters"].items())
    return [
        f"- Position scheme: RoPE (interleaved pairs, base 10,000); samples of {facts['length']} tokens",
        f"- Task: `{facts['task']}` ({parameters}); `posattn heads` measures it on samples of the task",
        f"- Trained for {facts.get('steps', training['steps'])} steps of {training['batch']} samples (learning rate "
        f"{training['learning_rate']:g}, dropout {training['dropout']:g}, seed {training['seed']}"
        f"{', bfloat16 arithmetic' if training['autocast'] else ''})",
        "",
        f"Accuracy of the stored (float16) weights on {SAMPLES:,} samples it has not seen: "
        f"{measured['accuracy']:.4f}; by hops:",
        "",
        f"| {names} |",
        "|---|" + "---|" * (len(measured["accuracy_by_hops"]) - 1),
        f"| {hops} |",
        "",
        "Heads at γ = .2 (last query, 64 samples): " + ", ".join(f"{n} {label}" for label, n in counts.items()) + ".",
        "",
        "The model exists so that positional and symbolic heads can be looked at anywhere.",
    ]


def measure_task(folder: Path) -> tuple[dict[str, Any], dict[str, int], int]:
    """Accuracy, labels of heads and sample length of a stored task model."""
    import torch
    from transformers import AutoModelForCausalLM

    from posattn.heads.scores import score_heads
    from posattn.heads.taxonomy import classify_heads
    from posattn.tasks.lengths import model_task
    from posattn.tasks.training import accuracy

    task = model_task(folder)
    if task is None:
        raise SystemExit(f"{folder} holds no posattn_task.json: it is no model of a task")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    measured = accuracy(model, task.generate(SAMPLES, seed=4_000_003))
    scores = score_heads(model, task.generate(64, seed=5_000_003).tokens, queries="last", evidence=False)
    return measured, classify_heads(scores, 0.2).counts, task.length


def without_local(facts: dict[str, Any]) -> dict[str, Any]:
    """What does not belong to the machine that trained."""
    return {key: value for key, value in facts.items() if key not in LOCAL}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=["bytes", "bytes-alibi", "numbers", "letters"])
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    target = TARGET / args.name
    if target.exists():
        shutil.rmtree(target)
    shutil.copytree(args.folder, target)
    of_task = not args.name.startswith("bytes")
    record = target / ("posattn_task.json" if of_task else "posattn_training.json")
    facts = without_local(json.loads(record.read_text()))
    config = json.loads((target / "config.json").read_text())
    if of_task:
        measured, counts, facts["length"] = measure_task(target)
        body, settings = task_card(facts, measured, counts), facts["training"]
    else:
        facts["arguments"] = settings = without_local(facts["arguments"])
        body = bytes_card(args.name, facts, config)
    record.write_text(json.dumps(facts, indent=1) + "\n")
    for path in target.iterdir():
        path.chmod(0o644)
    size = sum(path.stat().st_size for path in target.iterdir())
    if size > LIMIT:
        raise SystemExit(f"{target.name} takes {size} bytes, more than {LIMIT}")
    architecture = config["architectures"][0]
    lines = [
        f"# bundled:{args.name}",
        "",
        f"- Architecture: `{architecture}`, {count_weights(target):,} parameters, {size:,} bytes as stored",
        *body,
        "",
        "Settings of the training script:",
        "",
        "```json",
        json.dumps(settings, indent=1),
        "```",
        "",
    ]
    (target / "README.md").write_text("\n".join(lines))


def count_weights(folder: Path) -> int:
    """Number of stored weights."""
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118


if __name__ == "__main__":
    main()
