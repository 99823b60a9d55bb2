"""Structured rollouts against plain ones: `python benchmarks/structured.py [--threads 1] [--out benchmarks/results]`.

Four measurements in one run, each checked against a second way to the same result before it is timed:

1. bloom-176b at 256 positions, against numpy's dense per-head computation, with the head kernels made in every layer
   (the general case: content differs by layer) and, as a stricter base, made once and kept;
2. mpt-7b at 131072 positions: seconds and the process's peak memory;
3. time(2N)/time(N) for mpt-7b from 8192 positions up;
4. a million positions.

Times are the best and the median wall time of several runs, and the least processor time: on a machine that does other
work too the best of many runs and the processor time say what the work is, the median what it was to wait for. A case
is repeated until its share of the time (`--seconds`) is used up. Each long case runs in a process of its own, so that
its peak memory is its own, and is stopped after `--limit` seconds, which is then what its row says. The last part of
the results sets the figures beside what they must be; the exit status is 1 when one is missed.

One thread by default, for numpy as well: two threads gain little here, and where another program keeps one of them
waiting, the other spins and both its wall and its processor time say nothing.
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


def timed(run: Callable[[], Any], seconds: float, most: int = 50, least: int = 2) -> dict[str, Any]:
    """Times of repeated runs, after one that is not counted, for about so many seconds."""
    run()
    times, work = [], []
    begun = time.perf_counter()
    while len(times) < least or (len(times) < most and time.perf_counter() - begun < seconds):
        start, started = time.perf_counter(), time.process_time()
        run()
        times.append(time.perf_counter() - start)
        work.append(time.process_time() - started)
    return {"best_s": min(times), "median_s": statistics.median(times), "cpu_s": min(work), "repeats": len(times)}


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


def short(threads: int, seconds: float) -> list[dict[str, Any]]:
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
        rows[-1] |= timed(lambda impl=impl: simulate(architecture, 256, impl=impl), seconds)
    for keep in (True, False):
        name = "kernel kept" if keep else "kernel made in every layer"
        rows.append({"case": f"bloom-176b N=256 numpy dense per head, {name}"})
        rows[-1] |= timed(lambda keep=keep: plain_numpy(slopes, mixing, 256, keep), seconds)
    for row in rows[2:]:
        for time_of in ("best_s", "median_s", "cpu_s"):
            row[f"times_slower_{time_of}"] = row[time_of] / rows[0][time_of]
    return rows


def long(n: int, threads: int, seconds: float) -> dict[str, Any]:
    import torch

    from posattn.rollout.simulate import simulate

    torch.set_num_threads(threads)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    profile = simulate("mpt-7b", n).last
    error = abs(float(profile.sum()) - 1)
    assert error < 1e-11, error
    found = timed(lambda: simulate("mpt-7b", n), seconds, most=15)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"case": f"mpt-7b N={n}", "n": n, "mass_error": error, **found, "peak_mib": peak, "peak_before_mib": before}


def checks(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What must hold, what was measured, and whether it does."""
    by_case = {row["case"]: row for row in rows}
    found = []

    def check(what: str, value: float | None, holds: bool) -> None:
        found.append({"what": what, "measured": value, "holds": holds})

    slower = by_case["bloom-176b N=256 numpy dense per head, kernel made in every layer"]["times_slower_best_s"]
    check("bloom-176b at 256 at least 100 times faster than dense per-head numpy", slower, slower >= 100)
    row = by_case["mpt-7b N=131072"]
    best, peak = row.get("best_s"), row.get("peak_mib")
    check("mpt-7b at 131072 under 10 s", best, best is not None and best < 10)
    check("mpt-7b at 131072 under 1 GiB", peak, peak is not None and peak < 1024)
    ratios = [row["time_ratio"] for row in rows if "time_ratio" in row]
    check("time(2N)/time(N) at most 2.3 from 8192 up, wall", max(ratios), max(ratios) <= 2.3)
    work = [row["cpu_ratio"] for row in rows if "cpu_ratio" in row]
    check("time(2N)/time(N) at most 2.3 from 8192 up, processor", max(work), max(work) <= 2.3)
    million = by_case["mpt-7b N=1000000"]
    check("a million positions", million.get("best_s"), "best_s" in million)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=15.0, help="for the repeats of one case, about")
    parser.add_argument("--limit", type=float, default=600.0, help="for one long case, at most")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = str(options.threads)  # before numpy is there
    if options.one:
        print(json.dumps(long(options.one, options.threads, options.seconds)))
        return 0

    import torch

    load = os.getloadavg()
    rows = short(options.threads, options.seconds)
    previous: dict[str, Any] = {"n": 0}
    for n in (8192, 16384, 32768, 65536, 131072, 262144, 524288, 1_000_000):
        command = [sys.executable, __file__, "--one", str(n), "--threads", str(options.threads)]
        command += ["--seconds", str(options.seconds)]
        try:
            answer = subprocess.run(command, check=True, capture_output=True, text=True, timeout=options.limit)
            row = json.loads(answer.stdout)
        except subprocess.TimeoutExpired:
            row = {"case": f"mpt-7b N={n}", "n": n, "stopped_after_s": options.limit}
        if n == 2 * previous["n"] and "best_s" in row and "best_s" in previous:
            row["time_ratio"] = row["best_s"] / previous["best_s"]
            row["cpu_ratio"] = row["cpu_s"] / previous["cpu_s"]
        rows.append(row)
        previous = row
        print(row, file=sys.stderr, flush=True)
    held = checks(rows)
    facts = {
        "benchmark": "structured",
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load_average_at_start": load,
        "load_average_at_end": os.getloadavg(),
        "threads": options.threads,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "structured.json").write_text(json.dumps({**facts, "checks": held, "rows": rows}, indent=1) + "\n")
    names = sorted({name for row in rows for name in row}, key=lambda name: (name != "case", name))
    with open(options.out / "structured.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    print(json.dumps(held, indent=1))
    return 0 if all(one["holds"] for one in held) else 1


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


if __name__ == "__main__":
    raise SystemExit(main())
