"""Structured rollouts against plain ones: `python benchmarks/structured.py [--threads 2] [--out benchmarks/results]`.

Four measurements in one run, each checked against a second way to the same result before it is timed:

1. bloom-176b at 256 positions, against numpy's dense per-head computation, with the head kernels made in every layer
   (the general case: content differs by layer) and, as a stricter base, made once and kept;
2. mpt-7b at 131072 positions: seconds and the process's peak memory;
3. time(2N)/time(N) for mpt-7b from 8192 positions up;
4. a million positions.

Times are wall time, the best and the median of several runs. Each long case runs in a process of its own, so that its
peak memory is its own.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def timed(run: Callable[[], Any], repeats: int) -> dict[str, float]:
    run()
    times, work = [], []
    for _ in range(repeats):
        start, started = time.perf_counter(), time.process_time()
        run()
        times.append(time.perf_counter() - start)
        work.append(time.process_time() - started)
    # processor time, too: it says what the work is when the machine is shared
    return {"best_s": min(times), "median_s": statistics.median(times), "cpu_s": min(work), "repeats": repeats}


def plain_numpy(slopes: Any, mixing: Any, n: int, keep: bool) -> Any:
    """The last row of the rollout from dense kernels, one softmax a head."""
    import numpy as np

    lag = np.arange(n)[:, None] - np.arange(n)[None, :]

    def kernel() -> Any:
        total = np.zeros((n, n))
        for slope in slopes:
            scores = np.where(lag >= 0, -slope * lag, -np.inf)
            weights = np.exp(scores - scores.max(1, keepdims=True))
            total += weights / weights.sum(1, keepdims=True)
        return total / len(slopes)

    kept = kernel() if keep else None
    row = np.zeros(n)
    row[-1] = 1.0
    for weight in mixing[::-1]:
        row = (1 - weight) * row + weight * (row @ (kernel() if kept is None else kept))
    return row


def short(threads: int) -> list[dict[str, Any]]:
    import numpy as np
    import torch

    from posattn.rollout.simulate import preset, simulate

    torch.set_num_threads(threads)
    architecture = preset("bloom-176b")
    slopes, mixing = architecture.effective_slopes().numpy(), architecture.schedule().numpy()
    exact = plain_numpy(slopes, mixing, 256, keep=True)
    rows = []
    for impl in ("auto", "structured"):
        error = float(np.abs(simulate(architecture, 256, impl=impl).last.numpy() - exact).max())
        assert error < 1e-12, error
        rows.append({"case": f"bloom-176b N=256 posattn impl={impl}", "max_error": error})
        rows[-1] |= timed(lambda impl=impl: simulate(architecture, 256, impl=impl), 20)
    for keep, repeats in ((True, 5), (False, 2)):
        name = "kernel kept" if keep else "kernel made in every layer"
        rows.append({"case": f"bloom-176b N=256 numpy dense per head, {name}"})
        rows[-1] |= timed(lambda keep=keep: plain_numpy(slopes, mixing, 256, keep), repeats)
    for row in rows[2:]:
        row["times_slower_than_auto"] = row["median_s"] / rows[0]["median_s"]
    return rows


def long(n: int, threads: int, repeats: int) -> dict[str, Any]:
    import torch

    from posattn.rollout.simulate import simulate

    torch.set_num_threads(threads)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    profile = simulate("mpt-7b", n).last
    error = abs(float(profile.sum()) - 1)
    assert error < 1e-11, error
    found = timed(lambda: simulate("mpt-7b", n), repeats)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"case": f"mpt-7b N={n}", "n": n, "mass_error": error, **found, "peak_mib": peak, "peak_before_mib": before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(long(options.one, options.threads, options.repeats)))
        return

    import torch

    rows = short(options.threads)
    previous = None
    for n in (8192, 16384, 32768, 65536, 131072, 262144, 524288, 1_000_000):
        repeats = options.repeats if n <= 131072 else max(1, options.repeats // 2)
        command = [
            sys.executable,
            __file__,
            "--one",
            str(n),
            "--threads",
            str(options.threads),
            "--repeats",
            str(repeats),
        ]
        answer = subprocess.run(command, check=True, capture_output=True, text=True)
        row = json.loads(answer.stdout)
        if previous is not None and n == 2 * previous["n"]:
            row["time_ratio_to_half"] = row["best_s"] / previous["best_s"]
        rows.append(row)
        previous = row
        print(row, file=sys.stderr, flush=True)
    facts = {
        "benchmark": "structured",
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load_average_at_end": os.getloadavg(),
        "threads": options.threads,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "structured.json").write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    names = sorted({name for row in rows for name in row}, key=lambda name: (name != "case", name))
    with open(options.out / "structured.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    print(json.dumps(rows, indent=1))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


if __name__ == "__main__":
    main()
