"""Train the bundled byte-level language models on CPython's own documentation text, and say how good they are.

    python scripts/train_bytes.py corpus .corpus/python-docs.jsonl          # extract the text once
    python scripts/train_bytes.py train OUT --arch llama --corpus .corpus/python-docs.jsonl
    python scripts/train_bytes.py evaluate MODEL_FOLDER --corpus .corpus/python-docs.jsonl

Text: the topics of `pydoc_data.topics` (what `help()` shows) and the docstrings of the standard library, both
documentation of CPython. Test and validation documents are topics, chosen by a fixed seed; paragraphs of any other
document that share 48 bytes in a row with them are dropped from what is trained on. Nothing of the text is
stored with a model.

Tokens: bytes 0..255 and 256, which begins a document. Held-out loss is in bits per byte, every byte of the
test documents
counted once; beside it stands an interpolated Kneser-Ney 5-gram model of bytes trained on the same training text.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import inspect
import json
import math
import os
import random
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

BOS = 256
VOCABULARY = 257
CONTEXT = 1024
SPLIT_SEED = 20_240_601
SHINGLE = 48


# ---------------------------------------------------------------- text
def extract() -> list[dict[str, str]]:
    """Documents of the running interpreter: topics first, then one document of docstrings per module."""
    from pydoc_data.topics import topics

    documents = [
        {"kind": "topic", "name": name, "text": inspect.cleandoc(text)} for name, text in sorted(topics.items())
    ]
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {
        "test",
        "tests",
        "site-packages",
        "dist-packages",
        "lib2to3",
        "idlelib",
        "pydoc_data",
        "ensurepip",
        "turtledemo",
        "__pycache__",
    }
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if skipped & set(relative.parts) or path.name.startswith("_sysconfigdata"):
            continue
        try:
            tree = ast.parse(path.read_text("utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        parts = []
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node, clean=True)
                if text and len(text) > 20:
                    parts.append(text)
        if parts:
            documents.append({"kind": "docstring", "name": str(relative), "text": "\n\n".join(parts)})
    return documents


def load_corpus(path: Path | None) -> list[dict[str, str]]:
    if path is not None and path.exists():
        return [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    if path is not None:
        sys.stderr.write(f"{path} is not there: extracting the text of this interpreter ({sys.version.split()[0]})\n")
    return extract()


def _shingles(data: bytes) -> set[bytes]:
    return {data[i : i + SHINGLE] for i in range(max(0, len(data) - SHINGLE + 1))}


def split(documents: list[dict[str, str]]) -> dict[str, list[bytes]]:
    """Training, validation and test documents (bytes). 20 % of the topics are test, 10 % validation."""
    topics = sorted(d["name"] for d in documents if d["kind"] == "topic")
    random.Random(SPLIT_SEED).shuffle(topics)
    n_test, n_valid = round(0.2 * len(topics)), round(0.1 * len(topics))
    part = dict.fromkeys(topics[:n_test], "test") | dict.fromkeys(topics[n_test : n_test + n_valid], "valid")
    parts: dict[str, list[bytes]] = {"train": [], "valid": [], "test": []}
    for document in documents:
        where = part.get(document["name"], "train") if document["kind"] == "topic" else "train"
        parts[where].append(document["text"].encode())
    seen: set[bytes] = set().union(*(_shingles(d) for d in parts["test"]))
    for where in ("valid", "train"):
        cleaned = []
        for data in parts[where]:
            kept = [p for p in data.split(b"\n\n") if not (_shingles(p) & seen)]
            if sum(map(len, kept)) > 64:
                cleaned.append(b"\n\n".join(kept))
        parts[where] = cleaned
        seen |= set().union(*(_shingles(d) for d in cleaned)) if where == "valid" else set()
    return parts


# ---------------------------------------------------------------- baseline
def ngram_bits(train: list[bytes], test: list[bytes], order: int = 5) -> float:
    """Bits per byte of an interpolated Kneser-Ney n-gram model of bytes (one discount per order, estimated
    from counts)."""

    def stream(documents: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
        pad = np.full(order - 1, BOS, dtype=np.int64)
        pieces = [np.concatenate([pad, np.frombuffer(d, dtype=np.uint8).astype(np.int64)]) for d in documents]
        joined = np.concatenate(pieces)
        real = np.concatenate([np.arange(len(p)) >= order - 1 for p in pieces])
        return joined, np.flatnonzero(real)

    def grams(data: np.ndarray, ends: np.ndarray, n: int) -> np.ndarray:
        code = np.zeros(len(ends), dtype=np.int64)
        for back in range(n - 1, -1, -1):
            code = code * VOCABULARY + data[ends - back]
        return code

    data, ends = stream(train)
    test_data, test_ends = stream(test)
    levels = []  # highest order first: n-gram codes and their (continuation) counts
    codes, counts = np.unique(grams(data, ends, order), return_counts=True)
    for n in range(order, 0, -1):
        levels.append((n, codes, counts))
        # lower orders count in how many different left contexts an n-gram occurs
        codes, counts = np.unique(codes % VOCABULARY ** (n - 1), return_counts=True)
    probability = np.full(len(test_ends), 1 / 256)
    for n, codes, counts in reversed(levels):
        ones, twos = (counts == 1).sum(), (counts == 2).sum()
        discount = ones / (ones + 2 * twos) if ones else 0.5
        contexts, first = np.unique(codes // VOCABULARY, return_index=True)
        totals = np.add.reduceat(counts, first)
        kinds = np.diff(np.append(first, len(codes)))
        wanted = grams(test_data, test_ends, n)
        at = np.minimum(np.searchsorted(codes, wanted), len(codes) - 1)
        count = np.where(codes[at] == wanted, counts[at], 0)
        context = np.minimum(np.searchsorted(contexts, wanted // VOCABULARY), len(contexts) - 1)
        known = contexts[context] == wanted // VOCABULARY
        total, kind = totals[context], kinds[context]
        mixed = np.maximum(count - discount, 0) / total + discount * kind / total * probability
        probability = np.where(known, mixed, probability)
    return float(-np.log2(probability).mean())


# ---------------------------------------------------------------- models
def build(arch: str, args: argparse.Namespace) -> Any:
    import transformers

    torch.manual_seed(args.seed)
    if arch == "llama":
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=args.width,
            intermediate_size=args.mlp or args.width * 8 // 3 // 32 * 32,
            num_hidden_layers=args.layers or 6,
            num_attention_heads=args.width // 32,
            num_key_value_heads=max(1, args.width // 96),
            max_position_embeddings=args.window,
            tie_word_embeddings=True,
            attention_dropout=args.dropout,
            bos_token_id=BOS,
            eos_token_id=BOS,
            pad_token_id=None,
            initializer_range=0.02,
        )
        return transformers.LlamaForCausalLM(config)
    config = transformers.MptConfig(
        vocab_size=VOCABULARY,
        d_model=args.width,
        n_heads=args.width // 32,
        n_layers=args.layers or 5,
        expansion_ratio=4,
        max_seq_len=args.window,
        resid_pdrop=args.dropout,
        emb_pdrop=args.dropout,
        bos_token_id=BOS,
        eos_token_id=BOS,
        use_cache=False,
        initializer_range=0.02,
        tie_word_embeddings=True,
    )
    # attn_pdrop stays 0: recent versions accept whole numbers only
    return transformers.MptForCausalLM(config)


def tokenizer(context: int) -> Any:
    """Byte-level tokenizer: id = byte, 256 = beginning of a document (added before every text). Any text
    round-trips."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    # the usual printable stand-ins for bytes: printable Latin-1 as itself, the rest from 256 upwards in order
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in printable]
    names = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(rest)}
    vocabulary = {names[b]: b for b in range(256)} | {"<|bos|>": BOS}
    fast = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken("<|bos|>", special=True, normalized=False)])
    fast.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A <|bos|> $B", special_tokens=[("<|bos|>", BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=fast,
        bos_token="<|bos|>",
        eos_token="<|bos|>",
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def windows(documents: list[bytes], context: int) -> list[tuple[list[int], int]]:
    """Half-overlapping windows of at most `context` tokens, and how many of the last targets each one scores;
    every byte is scored once."""
    found = []
    for data in documents:
        tokens = [BOS, *data]
        start, scored = 0, 1  # the BOS itself is given
        while scored < len(tokens):
            end = min(len(tokens), start + context)
            found.append((tokens[start:end], end - scored))
            scored = end
            start = max(0, end - context + context // 2)
    return found


@torch.no_grad()
def bits_per_byte(model: Any, documents: list[bytes], context: int, device: str, batch: int = 16) -> float:
    model.eval()
    total, count = 0.0, 0
    items = sorted(windows(documents, context), key=lambda w: len(w[0]))
    for i in range(0, len(items), batch):
        part = items[i : i + batch]
        length = max(len(w) for w, _ in part)
        ids = torch.full((len(part), length), BOS)
        keep = torch.zeros(len(part), length - 1, dtype=torch.bool)
        for row, (tokens, scored) in enumerate(part):
            ids[row, : len(tokens)] = torch.tensor(tokens)  # padded on the right: causal, so nothing real sees it
            keep[row, len(tokens) - 1 - scored : len(tokens) - 1] = True
        ids = ids.to(device)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").cpu()
        total += loss[keep].double().sum().item()
        count += int(keep.sum())
    return total / count / math.log(2)


def build_optimizers(model: Any, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for the hidden matrices (fewer steps to the same loss) and AdamW for the rest."""
    hidden, other, plain = [], [], []
    for name, p in model.named_parameters():
        embedding = "embed" in name or "wte" in name or "lm_head" in name
        (plain if p.ndim <= 1 else other if embedding or args.optimizer == "adamw" else hidden).append(p)
    groups = [{"params": other, "weight_decay": args.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98), fused=True)]
    if hidden:
        muon = torch.optim.Muon(hidden, lr=args.lr, weight_decay=args.weight_decay, adjust_lr_fn="match_rms_adamw")
        optimizers.append(muon)
    return optimizers


def train(args: argparse.Namespace) -> None:
    started = time.monotonic()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    device = args.device
    args.out.mkdir(parents=True, exist_ok=True)
    log = open(args.out / "log.jsonl", "w")  # noqa: SIM115

    def say(**facts: Any) -> None:
        facts["seconds"] = round(time.monotonic() - started, 1)
        log.write(json.dumps(facts) + "\n")
        log.flush()
        sys.stderr.write(f"{args.arch} {json.dumps(facts)}\n")
        sys.stderr.flush()

    documents = load_corpus(args.corpus)
    parts = split(documents)
    digest = hashlib.sha256(b"\0".join(d["text"].encode() for d in documents)).hexdigest()
    sizes = {k: sum(map(len, v)) for k, v in parts.items()}
    baseline = ngram_bits(parts["train"], parts["test"])
    say(corpus_sha256=digest, bytes=sizes, ngram5_test=baseline)

    # topics (the text the model is judged by) are repeated: docstrings are several times as long
    stream = np.concatenate(
        [
            np.frombuffer(d, dtype=np.uint8).astype(np.int16) if i % 2 else np.array([BOS], dtype=np.int16)
            for d in parts["train"]
            for i in (0, 1)
        ]
    )
    data = torch.from_numpy(stream).to(device)
    model = build(args.arch, args).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    optimizers = build_optimizers(model, args)
    draw = torch.Generator().manual_seed(args.seed + 1)
    torch.manual_seed(args.seed + 2)
    best, best_weights, best_step = math.inf, None, 0
    offsets = torch.arange(args.window, device=device)
    valid = parts["valid"]
    if args.quick:
        valid = [v[:2000] for v in valid[:1]]
    say(parameters=parameters, stream=len(data), device=str(device))

    def evaluate(step: int, loss: float) -> None:
        nonlocal best, best_weights, best_step
        bits = bits_per_byte(model, valid, args.window, device)
        model.train()
        if bits < best:
            best, best_step = bits, step
            best_weights = {k: v.detach().half().cpu() for k, v in model.state_dict().items()}
        say(step=step, train_loss_bits=loss / math.log(2), valid=bits)

    model.train()
    running, step, stopped, pace_start = torch.zeros((), device=device), 0, "", None
    total = args.steps
    reserve = args.max_seconds * 0.1 if args.max_seconds else 0.0
    while step < total:
        elapsed = time.monotonic() - started
        if args.max_seconds and elapsed > args.max_seconds - reserve:
            stopped = f"time limit of {args.max_seconds:g} s reached after {step} of {total} steps"
            break
        # with a time limit the schedule follows the clock, so that the rate has come down when the time is over
        done = step / total
        if args.max_seconds:
            done = max(done, elapsed / (args.max_seconds - reserve))
        rate = (
            args.lr
            * min(1.0, (step + 1) / args.warmup)
            * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))
        )
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        start = torch.randint(0, len(data) - args.window - 1, (args.batch, 1), generator=draw)
        from_bos = torch.rand(args.batch, generator=draw) < 0.5
        ids = data[start.to(device) + offsets].long()
        ids[:, 0] = torch.where(from_bos.to(device), BOS, ids[:, 0])  # half of the windows begin like a prompt does
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=args.bf16):
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.float().reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1))
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        running += loss.detach()
        step += 1
        if pace_start is None:
            pace_start = time.monotonic()
        if step % args.every == 0:
            evaluate(step, running.item() / args.every)
            running.zero_()
    if step % args.every:
        evaluate(step, running.item() / (step % args.every))
    assert best_weights is not None
    model.load_state_dict({k: v.float() for k, v in best_weights.items()})
    test = bits_per_byte(model, parts["test"] if not args.quick else valid, args.window, device)
    facts = {
        "test_bits_per_byte": test,
        "ngram5_bits_per_byte": baseline,
        "valid_bits_per_byte": best,
        "best_step": best_step,
        "steps": step,
        "stopped": stopped,
        "parameters": parameters,
        "bytes": sizes,
        "corpus_sha256": digest,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "device": str(device),
        "seconds": round(time.monotonic() - started, 1),
        "arguments": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k != "run"},
    }
    target = args.out / "model"
    model.cpu().half().save_pretrained(target)
    tokenizer(args.window).save_pretrained(target)
    described = target / "tokenizer_config.json"  # the class name that transformers 4 and 5 both know
    described.write_text(
        json.dumps(json.loads(described.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}, indent=1) + "\n"
    )
    (target / "posattn_training.json").write_text(json.dumps(facts, indent=1) + "\n")
    say(**facts)


def evaluate_stored(args: argparse.Namespace) -> None:
    from transformers import AutoModelForCausalLM

    parts = split(load_corpus(args.corpus))
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    context = getattr(model.config, "max_seq_len", None) or model.config.max_position_embeddings
    found = {
        "test_bits_per_byte": bits_per_byte(model, parts["test"], context, "cpu"),
        "ngram5_bits_per_byte": ngram_bits(parts["train"], parts["test"]),
    }
    sys.stdout.write(json.dumps(found) + "\n")


def write_corpus(args: argparse.Namespace) -> None:
    documents = extract()
    args.path.parent.mkdir(parents=True, exist_ok=True)
    args.path.write_text("".join(json.dumps(d) + "\n" for d in documents), "utf-8")
    sys.stderr.write(f"{len(documents)} documents, {sum(len(d['text'].encode()) for d in documents)} bytes\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    corpus = commands.add_parser("corpus")
    corpus.add_argument("path", type=Path)
    corpus.set_defaults(run=write_corpus)
    evaluate = commands.add_parser("evaluate")
    evaluate.add_argument("model", type=Path)
    evaluate.add_argument("--corpus", type=Path)
    evaluate.set_defaults(run=evaluate_stored)
    fit = commands.add_parser("train")
    fit.add_argument("out", type=Path)
    fit.add_argument("--arch", choices=["llama", "mpt"], required=True)
    fit.add_argument("--corpus", type=Path)
    fit.add_argument("--width", type=int, default=192)
    fit.add_argument("--layers", type=int)
    fit.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw")
    fit.add_argument("--mlp", type=int)
    fit.add_argument("--window", type=int, default=CONTEXT)
    fit.add_argument("--batch", type=int, default=32)
    fit.add_argument("--steps", type=int, default=4000)
    fit.add_argument("--every", type=int, default=200)
    fit.add_argument("--lr", type=float, default=2e-3)
    fit.add_argument("--warmup", type=int, default=100)
    fit.add_argument("--weight-decay", type=float, default=0.1)
    fit.add_argument("--dropout", type=float, default=0.1)
    fit.add_argument("--seed", type=int, default=0)
    fit.add_argument("--max-seconds", type=float)
    fit.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    fit.add_argument("--bf16", action="store_true")
    fit.add_argument("--quick", action="store_true", help="evaluate on a scrap of text (to try the script)")
    fit.set_defaults(run=train)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
