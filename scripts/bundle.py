"""Put a trained model into the package: copy its folder, drop local paths from its record, write its card.

    python scripts/bundle.py NAME TRAINED_MODEL_FOLDER

NAME is one of the bundled names (bytes, bytes-alibi, numbers, letters). Every figure of the card comes from the record
`posattn_training.json` that training left beside the weights.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parent.parent / "posattn" / "models" / "bundled_data"
LIMIT = 5_000_000
LOCAL = ("out", "corpus", "resume", "run", "evaluate", "snapshots", "device")


def card(name: str, facts: dict[str, Any], config: dict[str, Any], size: int) -> str:
    """The model card."""
    arguments = facts.get("arguments", {})
    lines = [f"# bundled:{name}", ""]
    architecture = config["architectures"][0]
    lines += [
        f"- Architecture: `{architecture}`, {facts.get('parameters', '?'):,} parameters, {size:,} bytes as stored"
    ]
    if name.startswith("bytes"):
        context = config.get("max_position_embeddings") or config["max_seq_len"]
        sizes = facts["bytes"]
        lines += [
            f"- Position scheme: {'ALiBi' if architecture.startswith('Mpt') else 'RoPE, grouped queries'}; "
            f"context {context} tokens; one token a byte, token 256 begins a document",
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
    else:
        lines += [
            f"- Task: {facts.get('task', name)}; "
            f"accuracy {facts.get('accuracy', float('nan')):.4f} after {facts['steps']} steps",
            "",
            "The model exists so that positional and symbolic heads can be looked at anywhere.",
        ]
    kept = {key: value for key, value in arguments.items() if key not in LOCAL}
    lines += ["", "Arguments of the training script:", "", "```json", json.dumps(kept, indent=1), "```", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=["bytes", "bytes-alibi", "numbers", "letters"])
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    target = TARGET / args.name
    if target.exists():
        shutil.rmtree(target)
    shutil.copytree(args.folder, target)
    record = target / "posattn_training.json"
    facts = json.loads(record.read_text())
    facts["arguments"] = {key: value for key, value in facts.get("arguments", {}).items() if key not in LOCAL}
    record.write_text(json.dumps(facts, indent=1) + "\n")
    size = sum(path.stat().st_size for path in target.iterdir())
    if size > LIMIT:
        raise SystemExit(f"{target.name} takes {size} bytes, more than {LIMIT}")
    config = json.loads((target / "config.json").read_text())
    (target / "README.md").write_text(card(args.name, facts, config, size))


if __name__ == "__main__":
    main()
