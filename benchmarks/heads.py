"""Head scores: the closed form against brute force, time and memory.

    python benchmarks/heads.py MODEL [--length 256] [--long 1024] [--swaps 24] [--threads 2] [--out FILE.json]

MODEL is anything `posattn.load_model` takes (default: a random Llama in the shape of SmolLM2-135M). In one run, for one
document and its last query, all heads of all layers:

* the bare forward pass,
* `score_heads` over all n(n−1)/2 swaps (the forward pass included), plain and with the exact companions,
* brute force: rows exchanged in the input of a layer's attention module, that module alone run again (batched), its
  attention weights read. A sample of swaps in a few layers is timed and scaled to all swaps and layers; nothing that
  combines the weights into scores is counted, which favours brute force. The sampled weights are compared with the
  closed form's, so that both compute the same thing.

Times are wall-clock seconds and, as other work may share the machine, CPU seconds of this process.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import resource
import sys
import time
import warnings
from typing import Any


def random_llama() -> Any:
    """Random weights in SmolLM2-135M's shape."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rope_theta=100000.0,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


@contextlib.contextmanager
def timed(record: dict[str, Any], name: str):
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    record[name] = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
    print(name, record[name], file=sys.stderr, flush=True)


def peak_mib(reset: bool = False) -> float:
    """Peak resident memory since the last reset (Linux; elsewhere since the start)."""
    if reset:
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def brute_force(model: Any, row: Any, layers: list[int], swaps: int, batch: int, record: dict[str, Any]) -> None:
    """Time the re-run of single attention modules on a sample of swaps, and compare weights with the closed form."""
    import torch

    from posattn.heads.crosslogits import move_query

    n, query = len(row), len(row) - 1
    generator = torch.Generator().manual_seed(0)
    pairs = list(itertools.combinations(range(query), 2))
    sample = [pairs[i] for i in torch.randperm(len(pairs), generator=generator)[:swaps].tolist()]
    wall = cpu = worst = 0.0
    for layer in layers:
        module, calls, points = model.module.blocks[layer].attn, [], {}
        handle = module.register_forward_pre_hook(lambda _, a, k, c=calls: c.append((a, dict(k))), with_kwargs=True)
        with torch.no_grad(), model.observe(["q", "k", "pattern"], lambda _, p, b, s=points: s.update(p), [layer]):
            model(row[None])
        handle.remove()
        arguments, keywords = calls[0]
        hidden = keywords.get("hidden_states", arguments[0] if arguments else None)
        moved = move_query(points["q"][0, query], points["k"][0], model.scheme(layer, n), query)
        m = moved.matrix()
        for start in range(0, len(sample), batch):
            chunk = sample[start : start + batch]
            exchanged = hidden.expand(len(chunk), -1, -1).clone()
            for b, (i, j) in enumerate(chunk):
                exchanged[b, [i, j]] = exchanged[b, [j, i]]
            seen: list[Any] = []
            hook = module.hook_pattern.register_forward_hook(lambda _, a, out, s=seen: s.append(out.detach()))
            begun, used = time.perf_counter(), time.process_time()
            with torch.no_grad():
                if "hidden_states" in keywords:
                    module(*arguments, **{**keywords, "hidden_states": exchanged})
                else:
                    module(exchanged, *arguments[1:], **keywords)
                weights = seen[0][:, :, query]
            wall, cpu = wall + time.perf_counter() - begun, cpu + time.process_time() - used
            hook.remove()
            for b, (i, j) in enumerate(chunk):
                ours = torch.softmax(torch.stack([m[:, i, j], m[:, j, i]], -1), -1)
                theirs = weights[b][:, [i, j]]
                theirs = theirs / theirs.sum(-1, keepdim=True)
                worst = max(worst, float((ours - theirs).abs().max()))
    every = len(pairs) * model.n_layers / (len(sample) * len(layers))
    record["brute_force_sample"] = {
        "wall_s": wall,
        "cpu_s": cpu,
        "swaps": len(sample),
        "layers": layers,
        "batch": batch,
    }
    record["brute_force_scaled"] = {"wall_s": wall * every, "cpu_s": cpu * every, "swaps": len(pairs)}
    record["largest_difference_of_swapped_weights"] = worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--long", type=int, default=1024, help="0: leave it out")
    parser.add_argument("--swaps", type=int, default=24)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", str(arguments.threads))
    warnings.simplefilter("ignore")

    import torch

    import posattn.models.loading as loading
    from posattn.heads import score_heads

    torch.set_num_threads(arguments.threads)
    model = loading.load_model(arguments.model) if arguments.model else loading.as_model(random_llama())
    if model.tokenizer is not None:
        from posattn.tokens import load_tokens

        source = load_tokens(
            "bundled:python-docs", model, length=max(arguments.length, arguments.long), samples=1, pack=True
        )
        row = source.tokens[0]
    else:
        row = torch.randint(model.vocab_size, (max(arguments.length, arguments.long),))
    result: dict[str, Any] = {
        "model": model.name if arguments.model else "random Llama in the shape of SmolLM2-135M",
        "layers": model.n_layers,
        "heads": model.layers[0].n_heads,
        "threads": arguments.threads,
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "processor": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "runs": {},
    }
    for length in [arguments.length] + ([arguments.long] if arguments.long else []):
        record: dict[str, Any] = {"all_swaps": (length - 1) * (length - 2) // 2}
        document = row[None, :length]
        with torch.no_grad():
            model(document)
        before = peak_mib(reset=True)
        with torch.no_grad(), timed(record, "forward"):
            model(document)
        record["forward_peak_extra_mib"] = peak_mib() - before
        before = peak_mib(reset=True)
        with timed(record, "score_heads"):
            score_heads(model, document, companions=False, evidence=False, bootstrap=0)
        with timed(record, "score_heads_companions"):
            score_heads(model, document, evidence=False, bootstrap=0)
        record["score_heads_peak_extra_mib"] = peak_mib() - before
        if length == arguments.length:
            layers = sorted({0, model.n_layers // 2, model.n_layers - 1})
            brute_force(model, document[0], layers, arguments.swaps, 8, record)
            for clock in ("wall_s", "cpu_s"):
                record[f"times_faster_{clock}"] = record["brute_force_scaled"][clock] / record["score_heads"][clock]
        result["runs"][str(length)] = record
    text = json.dumps(result, indent=1)
    if arguments.out:
        with open(arguments.out, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
