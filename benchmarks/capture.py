"""What measuring costs: time and peak memory, against the bare forward pass and against caching everything.

    python benchmarks/capture.py [--model NAME] [--length 256] [--batch 8] [--dtype float32] [--device cpu] [--out FILE]
    python benchmarks/capture.py --compare OLD.json NEW.json

Without `--model`, Llama-like models with random weights are built in place: the size of SmolLM2-135M for the time,
and a grid of
layers × heads for the memory. All ways run the same bridge:

* `bare`: the forward pass, nothing attached;
* `measure`: the same with `MixingProbe` and `KernelProbe` attached;
* `measure per head`: the heads' kernels kept apart;
* `cache everything`: `run_with_cache`.

Time is the median over interleaved rounds (wall clock, and CPU time of the process, which other jobs on the machine
disturb less). Peak memory is what the allocator handed out above what was held before the pass: CUDA's own
statistics, or on a CPU the allocations that PyTorch's profiler records. `state` is the size of the running
statistics, which is the size of the result.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from posattn.models.loading import as_model, load_model
from posattn.probes.kernel import KernelProbe
from posattn.probes.mixing import MixingProbe
from posattn.probes.session import attach
from posattn.results import provenance

WAYS = ("bare", "measure", "measure per head", "cache everything")
SMOLLM2 = {"layers": 30, "heads": 9, "key_heads": 3, "width": 576, "hidden": 1536, "vocab": 49152}
GRID = [(layers, heads) for layers in (4, 8, 16) for heads in (4, 16)]


def random_llama(
    layers: int, heads: int, key_heads: int, width: int, hidden: int, vocab: int, dtype: str, device: str
) -> Any:
    """A Llama with random weights, as a posattn model on a bridge."""
    import transformers
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=8192,
    )
    config._attn_implementation = "eager"
    model = transformers.LlamaForCausalLM(config).to(device, getattr(torch, dtype)).eval()
    bridge = build_bridge_from_module(model, "LlamaForCausalLM", hf_config=config, model_name="random-llama")
    return as_model(bridge)


class Way:
    """One way to run a batch; probes are kept between runs, as in a real measurement."""

    def __init__(self, name: str, model: Any, ids: torch.Tensor) -> None:
        self.name, self.model, self.ids = name, model, ids
        self.probes = (MixingProbe(), KernelProbe("head" in name)) if name.startswith("measure") else ()

    @torch.no_grad()
    def __call__(self) -> None:
        if self.name == "cache everything":
            self.model.module.run_with_cache(self.ids)
        elif self.probes:
            with attach(self.model, *self.probes):
                self.model(self.ids)
        else:
            self.model(self.ids)

    def state_bytes(self) -> int:
        """Size of the running statistics."""
        return sum(t.numel() * t.element_size() for probe in self.probes for t in probe.state_tensors().values())


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(ways: list[Way], rounds: int, device: torch.device) -> dict[str, dict[str, float]]:
    """Median seconds of each way over interleaved rounds."""
    seconds: dict[str, list[tuple[float, float]]] = {way.name: [] for way in ways}
    for turn in range(rounds + 1):
        for way in ways:
            synchronise(device)
            wall, cpu = time.perf_counter(), time.process_time()
            way()
            synchronise(device)
            if turn:  # the first round warms up
                seconds[way.name].append((time.perf_counter() - wall, time.process_time() - cpu))
            gc.collect()
    result = {}
    for name, runs in seconds.items():
        # a ratio is taken round by round, so that a slow spell of the machine hits both sides
        base = seconds["bare"]
        result[name] = {
            "wall_s": statistics.median(w for w, _ in runs),
            "cpu_s": statistics.median(c for _, c in runs),
            "wall_ratio": statistics.median(w / b for (w, _), (b, _) in zip(runs, base, strict=True)),
            "cpu_ratio": statistics.median(c / b for (_, c), (_, b) in zip(runs, base, strict=True)),
        }
    return result


def peak_bytes(run: Callable[[], None], device: torch.device) -> int:
    """Most bytes handed out at once during `run`, above what was held before."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - held
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    held = peak = 0
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def peaks(ways: list[Way], device: torch.device) -> dict[str, dict[str, int]]:
    """Peak bytes of each way, of a later batch (the statistics exist) and of the first one (they are made)."""
    found = {}
    for way in ways:
        first = peak_bytes(way, device)
        later = peak_bytes(way, device)
        found[way.name] = {"first_batch": first, "later_batch": later, "state": way.state_bytes()}
    for name in found:
        for key in ("first_batch", "later_batch"):
            found[name][f"{key}_extra"] = found[name][key] - found["bare"][key]
    return found


def hardware(device: torch.device) -> dict[str, Any]:
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        name = models[0] if models else name
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else None
    load = [round(x, 2) for x in os.getloadavg()] if hasattr(os, "getloadavg") else None  # other jobs on the machine
    return {
        "cpu": name,
        "gpu": gpu,
        "threads": torch.get_num_threads(),
        "system": platform.platform(terse=True),
        "load": load,
    }


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(arguments.device)
    common = {"dtype": arguments.dtype, "device": arguments.device}
    if arguments.model:
        model = load_model(arguments.model, device=arguments.device, dtype=arguments.dtype)
    else:
        model = random_llama(**SMOLLM2, **common)
    ids = torch.randint(0, model.vocab_size, (arguments.batch, arguments.length), device=device)
    ways = [Way(name, model, ids) for name in WAYS]
    result: dict[str, Any] = {
        "benchmark": "capture",
        "model": arguments.model or {"random llama": SMOLLM2},
        "layers": model.n_layers,
        "heads": model.layers[0].n_heads,
        "batch": arguments.batch,
        "length": arguments.length,
        "rounds": arguments.rounds,
        "time": timed(ways, arguments.rounds, device),
        "peak_bytes": peaks(ways, device),
        "hardware": hardware(device),
        "provenance": provenance(device=arguments.device, dtype=arguments.dtype),
        "grid": [],
    }
    del ways, model
    for layers, heads in GRID if arguments.grid else []:
        small = random_llama(layers, heads, heads, 8 * heads, 32, 64, **common)
        ids = torch.randint(0, 64, (arguments.batch, arguments.length), device=device)
        found = peaks([Way(name, small, ids) for name in WAYS], device)
        result["grid"].append({"layers": layers, "heads": heads, "peak_bytes": found})
    return result


def table(result: dict[str, Any]) -> str:
    """The figures in words and columns."""
    size = f"{result['layers']} layers, {result['heads']} heads, batch {result['batch']} × {result['length']} tokens"
    lines = [size, f"{'':18}{'wall s':>9}{'× bare':>8}{'cpu s':>9}{'× bare':>8}{'extra MB':>10}{'state MB':>10}"]
    for name, seconds in result["time"].items():
        memory = result["peak_bytes"][name]
        lines.append(
            f"{name:18}{seconds['wall_s']:9.3f}{seconds['wall_ratio']:8.2f}{seconds['cpu_s']:9.3f}"
            f"{seconds['cpu_ratio']:8.2f}{memory['later_batch_extra'] / 1e6:10.1f}{memory['state'] / 1e6:10.1f}"
        )
    if result["grid"]:
        lines += [
            "",
            "peak MB above the bare pass, a later batch:",
            f"{'layers':>8}{'heads':>7}{'measure':>10}{'cache':>10}",
        ]
    for row in result["grid"]:
        extra = [row["peak_bytes"][name]["later_batch_extra"] / 1e6 for name in ("measure", "cache everything")]
        lines.append(f"{row['layers']:8}{row['heads']:7}{extra[0]:10.2f}{extra[1]:10.2f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--no-grid", dest="grid", action="store_false")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compare", type=Path, nargs=2)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.compare:
        for path in arguments.compare:
            print(f"{path}\n{table(json.loads(path.read_text()))}\n")
        return
    result = run(arguments)
    print(table(result))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
