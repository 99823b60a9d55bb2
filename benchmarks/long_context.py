"""Long contexts: memory and time of measuring a kernel whole and binned, against reading the pattern.

    python benchmarks/long_context.py [--length 8192] [--bins 64] [--layers 2] [--heads 8] [--threads N] [--out FILE]
    python benchmarks/long_context.py --device cuda --shape llama-8b --length 32768 --dtype bfloat16

A Llama with random weights is built in place. In one run, on the same tokens and after one another:

* `plain forward`: the model alone, with the attention that it chooses itself (fast attention);
* `streamed, binned` and `streamed, whole`: `MixingProbe` and `StreamedKernelProbe` attached;
* `materialised`: `MixingProbe` and `KernelProbe` on the same weights with eager attention, as TransformerLens runs it
  (left out with `--no-materialised`, and on CUDA beyond 4096 tokens, where its patterns would not fit).

Peak memory is what the allocator handed out during the first batch above what was held before it (model and tokens),
running statistics included: CUDA's own statistics, or on a CPU the allocations that PyTorch's profiler records. Before
anything is reported, the streamed kernels are compared: binned with whole, and whole with materialised.

`--minimum F` exits with 1 unless the binned capture's peak is at least F times below the materialised one's;
`--slowdown F` unless it takes at most F times the plain forward's time.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.capture import hardware, peak_bytes, synchronise
from posattn.models.plain import PlainModel
from posattn.probes.kernel import KernelProbe, Kernels
from posattn.probes.mixing import MixingProbe
from posattn.probes.session import attach
from posattn.probes.streamed import StreamedKernelProbe
from posattn.results import provenance

SHAPES = {
    "tiny": {"layers": 2, "heads": 8, "key_heads": 4, "width": 128, "hidden": 256, "vocab": 256},
    "llama-1b": {"layers": 4, "heads": 32, "key_heads": 8, "width": 2048, "hidden": 8192, "vocab": 1024},
    # a slice of Llama 3 8B: layers are alike, so their time and memory add up
    "llama-8b": {"layers": 4, "heads": 32, "key_heads": 8, "width": 4096, "hidden": 14336, "vocab": 1024},
}


def build(shape: dict[str, int], length: int, dtype: str, device: str, attention: str) -> PlainModel:
    """A Llama with random weights, seen through the plain adapter."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=shape["vocab"],
        hidden_size=shape["width"],
        intermediate_size=shape["hidden"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["key_heads"],
        max_position_embeddings=length,
    )
    config._attn_implementation = attention
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config)
    return PlainModel(model.to(getattr(torch, dtype)).eval(), name="random-llama")


class Materialised:
    """The capture that long contexts cannot afford: eager attention writes each pattern, `KernelProbe` reads it."""

    adapter = "eager"

    def __init__(self, model: PlainModel) -> None:
        self.model, self.probes = model, (MixingProbe(), KernelProbe())

    def __call__(self, ids: torch.Tensor) -> None:
        model = self.model
        mixing, kernel = self.probes
        for probe in self.probes:
            probe.begin(model)
        with attach(model, mixing):
            handles = []
            for t, part in enumerate(model._parts):

                def read(module: Any, args: Any, output: Any, t: int = t) -> None:
                    from posattn.models.base import Batch

                    mask = getattr(self, "mask", None)
                    if mask is None:
                        self.mask = mask = torch.ones_like(ids, dtype=torch.bool)
                    kernel.update(t, {"pattern": output[1].detach()}, Batch(ids, mask))

                handles.append(part.attention.register_forward_hook(read))
            try:
                model.run(ids)
            finally:
                for handle in handles:
                    handle.remove()


def seconds(run: Callable[[], Any], device: torch.device, rounds: int) -> list[float]:
    """Wall-clock seconds of each round after one to warm up."""
    found = []
    for turn in range(rounds + 1):
        synchronise(device)
        begun = time.perf_counter()
        run()
        synchronise(device)
        if turn:
            found.append(time.perf_counter() - begun)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--bins", type=int, default=64, help="positions in a bin")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--heads", type=int)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=0, help="timed rounds; 0: each way runs once, for its memory")
    parser.add_argument("--no-materialised", dest="materialised", action="store_false")
    parser.add_argument("--no-whole", dest="whole", action="store_false")
    parser.add_argument("--minimum", type=float)
    parser.add_argument("--slowdown", type=float)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    shape = dict(SHAPES[args.shape])
    for name in ("layers", "heads"):
        if getattr(args, name):
            shape[name] = getattr(args, name)
    model = build(shape, args.length, args.dtype, args.device, "sdpa")
    ids = torch.randint(0, shape["vocab"], (1, args.length), generator=torch.Generator().manual_seed(1)).to(device)

    results: dict[str, Kernels] = {}
    rows: dict[str, dict[str, Any]] = {}

    def measured(name: str, run: Callable[[], Any], kernel: Any = None) -> None:
        with torch.no_grad():
            begun = time.perf_counter()
            peak = peak_bytes(run, device)
            first = time.perf_counter() - begun
            times = seconds(run, device, args.rounds) if args.rounds else [first]
        rows[name] = {"peak_bytes": peak, "seconds": statistics.median(times), "all_seconds": times}
        if kernel is not None:
            rows[name]["state_bytes"] = sum(t.numel() * t.element_size() for t in kernel.state_tensors().values())
            results[name] = kernel.result(model)
        print(f"{name:18} peak {peak / 1e6:10.1f} MB  {rows[name]['seconds']:8.3f} s", flush=True)

    def streamed(bins: int | None) -> tuple[Callable[[], Any], Any]:
        mixing, kernel = MixingProbe(), StreamedKernelProbe(bins)

        def run() -> None:
            with attach(model, mixing, kernel):
                model.run(ids)

        return run, kernel

    measured("plain forward", lambda: model.run(ids))
    measured("streamed, binned", *streamed(args.bins))
    if args.whole:
        measured("streamed, whole", *streamed(None))
    if args.materialised and (device.type == "cpu" or args.length <= 4096):
        eager = Materialised(build(shape, args.length, args.dtype, args.device, "eager"))
        measured("materialised", lambda: eager(ids), eager.probes[1])

    wrong = compare(results, args.bins)
    ratio = None
    if "materialised" in rows:
        ratio = {
            name: rows["materialised"]["peak_bytes"] / rows[name]["peak_bytes"] for name in rows if "stream" in name
        }
        print("peak memory below the materialised capture's:", {name: round(x, 1) for name, x in ratio.items()})
    slower = rows["streamed, binned"]["seconds"] / rows["plain forward"]["seconds"]
    print(f"binned capture / plain forward: {slower:.2f}")
    print("largest differences:", wrong)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        report = {
            "benchmark": "long_context",
            "shape": {"name": args.shape, **shape},
            "length": args.length,
            "bins": args.bins,
            "ways": rows,
            "memory_ratio": ratio,
            "time_ratio": slower,
            "differences": wrong,
            "hardware": hardware(device),
            "provenance": provenance(device=args.device, dtype=args.dtype),
        }
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    # half precision differs by the rounding of patterns that eager attention writes down
    allowed = 4e-3 if args.dtype != "float32" else 1e-5 if device.type == "cpu" else 1e-4
    failed = any(value > allowed for value in wrong.values())
    failed |= args.minimum is not None and (ratio is None or ratio["streamed, binned"] < args.minimum)
    failed |= args.slowdown is not None and slower > args.slowdown
    return int(failed)


def compare(results: dict[str, Kernels], bins: int) -> dict[str, float]:
    """The largest difference of kernels that should be equal, layer by layer (they are large)."""
    found = {}
    whole = results.get("streamed, whole")
    if whole is not None:
        found["binned, whole"] = max(
            float((coarse(a, bins) - b.double()).abs().max())
            for a, b in zip(whole.kernels, results["streamed, binned"].kernels, strict=True)
        )
    if whole is not None and "materialised" in results:
        found["whole, materialised"] = max(
            float((a - b).abs().max()) for a, b in zip(whole.kernels, results["materialised"].kernels, strict=True)
        )
        gc.collect()
    return found


def coarse(kernel: torch.Tensor, bins: int) -> torch.Tensor:
    """Sums over bins of columns, means over the rows of a bin."""
    n = len(kernel)
    columns = torch.nn.functional.pad(kernel.double(), (0, -n % bins)).unflatten(1, (-1, bins)).sum(-1)
    return torch.stack([part.mean(0) for part in columns.split(bins)])


if __name__ == "__main__":
    sys.exit(main())
