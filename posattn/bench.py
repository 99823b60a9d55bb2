"""Benchmarks that check what they time.

A `Group` is one problem (shapes, dtype, device) and the ways of solving it, its `Job`s. Each job's result is compared
with the group's float64 reference first; a job that is wrong or raises is recorded with the reason and the others go
on. Then all jobs are warmed up and timed in turns, together with two yardsticks: a large copy (bytes read plus written)
and a square matrix product in the same dtype. What is said about a job, its speed against the group's baseline and
against the yardsticks, is thus said about the same minutes of the same machine; a speed-up is the median over the
rounds of the ratio within a round.

Counts: `bytes` are those that must be moved (the lower half of each kernel that is read), `flops` the operations that a
job makes (N³/3 a layer where only the lower half is computed, 2N³ for a dense product); a multiply-add is two.
"""

from __future__ import annotations

import csv
import datetime
import gc
import importlib.util
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posattn.errors import InputError

SCHEMA = 1
#: yardsticks, beside the jobs in every group
COPY, MATMUL = "copy", "matrix product"
#: seconds for which a job runs on the CPU before it is timed: a library's threads keep a core busy for a while after
#: their work (NumPy's halve the copy that comes next, which would flatter every share of it), and sleep afterwards
SETTLE = 0.1
#: columns of the CSV file, in this order
COLUMNS = (
    "group", "job", "status", "device", "dtype", "batch", "layers", "n", "queries", "median_s", "lowest_s", "spread",
    "rounds", "speedup", "baseline", "bytes", "bytes_per_s", "of_copy", "flops", "flops_per_s", "of_matmul", "error",
    "budget", "reason",
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """One way of solving a group's problem."""

    name: str
    run: Callable[[], Tensor]
    bytes: float = 0.0
    flops: float = 0.0
    reference: Callable[[], Tensor] | None = None  # where it isn't the group's


@dataclass(frozen=True)
class Group:
    """One problem: `build` makes its inputs and gives the jobs and the reference; the first job is the baseline.

    `budget` gives the largest error (absolute) that a job may have, from the baseline's own error, which is only told:
    the baseline stands for what one does without us.
    """

    name: str
    device: str
    dtype: torch.dtype
    build: Callable[[], tuple[list[Job], Callable[[], Tensor] | None]]
    budget: Callable[[float], float] = lambda baseline: math.inf
    facts: dict[str, Any] = field(default_factory=dict)
    precision: str = "highest"  # of float32 matrix products, see torch.set_float32_matmul_precision


# ---- running --------------------------------------------------------------------------------------------------------


def run_benchmarks(
    groups: Iterable[Group],
    *,
    seconds: float = 3.0,
    rounds: int = 9,
    progress: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Check and time every job of every group.

    Args:
        groups: the problems.
        seconds: about how long the timed rounds of one group may take; at least three rounds are made.
        rounds: how many rounds at most; 0 to check the results and time nothing.
        progress: called with each finished row.

    Returns:
        A JSON-able report: `schema`, `time`, `machine`, `load_average` (of the system, at the end), and `results`, one
        row a job (see `COLUMNS`; times in seconds).
    """
    results: list[dict[str, Any]] = []
    for group in groups:
        with _float32_precision(group.precision):
            for row in _run_group(group, seconds, rounds):
                results.append(row)
                if progress is not None:
                    progress(row)
        gc.collect()
        if group.device == "cuda":
            torch.cuda.empty_cache()
    now = datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0).isoformat()
    busy = {"load_average": os.getloadavg()[0]} if hasattr(os, "getloadavg") else {}
    return {"schema": SCHEMA, "time": now, "machine": machine(), **busy, "results": results}


def _run_group(group: Group, seconds: float, rounds: int) -> list[dict[str, Any]]:
    common = {
        "group": group.name,
        "device": group.device,
        "dtype": str(group.dtype).removeprefix("torch."),
        "precision": group.precision,
        **group.facts,
    }
    try:
        jobs, make_reference = group.build()
        reference = None if make_reference is None else make_reference().double()
    except Exception as error:
        return [{**common, "job": "build", "status": "failed", "reason": _reason(error)}]

    rows: dict[str, dict[str, Any]] = {}
    baseline, baseline_error = jobs[0].name, math.nan
    good: list[Job] = []
    for job in jobs:
        row = rows[job.name] = {**common, "job": job.name, "status": "ok", "baseline": baseline}
        row |= {"bytes": job.bytes, "flops": job.flops}
        try:
            result = job.run()
            _synchronise(group.device)
            expected = reference if job.reference is None else job.reference().double()
            if expected is not None:
                error = float((result.double() - expected).abs().max())
                baseline_error = error if job.name == baseline else baseline_error
                budget = group.budget(baseline_error)
                row |= {"error": error, "budget": budget if math.isfinite(budget) else None}
                if job.name != baseline and not error <= budget:
                    row |= {"status": "wrong", "reason": f"error {error:.2g} is over the budget of {budget:.2g}"}
            del result, expected
        except Exception as error:
            row |= {"status": "failed", "reason": _reason(error)}
        else:
            good.append(job)  # a wrong result is still timed: the row says that it is wrong

    if rounds == 0:
        return list(rows.values())
    try:
        good += _yardsticks(group)
        samples = _time_in_turns(good, group.device, seconds, rounds)
    except Exception as error:
        for row in rows.values():
            row |= {"status": "failed", "reason": _reason(error)}
        return list(rows.values())
    copy_rate = _rate(good, samples, COPY)
    matmul_rate = _rate(good, samples, MATMUL)
    for job in good:
        times = samples[job.name]
        row = rows.setdefault(job.name, {**common, "job": job.name, "status": "ok"})
        median = statistics.median(times)
        row |= {
            "median_s": median,
            "lowest_s": min(times),
            "spread": (max(times) - min(times)) / median,
            "rounds": len(times),
            "times_s": times,
        }
        if job.name not in (COPY, MATMUL) and baseline in samples:
            row["speedup"] = statistics.median(b / t for b, t in zip(samples[baseline], times, strict=True))
        if job.bytes:
            row |= {"bytes": job.bytes, "bytes_per_s": job.bytes / median}
            if copy_rate is not None:
                row["of_copy"] = statistics.median(r * job.bytes / t for r, t in zip(copy_rate, times, strict=True))
        if job.flops:
            row |= {"flops": job.flops, "flops_per_s": job.flops / median}
            if matmul_rate is not None:
                row["of_matmul"] = statistics.median(r * job.flops / t for r, t in zip(matmul_rate, times, strict=True))
    return list(rows.values())


def _rate(jobs: Sequence[Job], samples: dict[str, list[float]], name: str) -> list[float] | None:
    """Seconds per byte (or operation) of a yardstick, in each round."""
    job = next((job for job in jobs if job.name == name), None)
    return None if job is None else [t / (job.bytes or job.flops) for t in samples[name]]


def _yardsticks(group: Group) -> list[Job]:
    cuda = group.device == "cuda"
    count = (1 << 30 if cuda else 96 << 20) // group.dtype.itemsize
    source = torch.empty(count, dtype=group.dtype, device=group.device).normal_()
    target = torch.empty_like(source)
    size = 8192 if cuda and group.dtype.itemsize == 2 else 4096 if cuda else 1024
    jobs = [Job(COPY, lambda: target.copy_(source), bytes=2 * count * group.dtype.itemsize)]
    if cuda or group.dtype != torch.float16:  # without hardware for it, a float16 product takes seconds
        x = torch.randn(size, size, device=group.device).to(group.dtype)
        y = torch.randn(size, size, device=group.device).to(group.dtype)
        jobs.append(Job(MATMUL, lambda: x @ y, flops=2 * size**3))
    return jobs


def _time_in_turns(jobs: Sequence[Job], device: str, seconds: float, rounds: int) -> dict[str, list[float]]:
    """Seconds a run for each job, one number a round: the mean of as many runs as the clock needs."""
    clock = _cuda_clock if device == "cuda" else _host_clock
    shortest = 5e-3 if device == "cuda" else 2e-3
    settle = 0.0 if device == "cuda" else SETTLE
    repeats, cost = {}, 0.0
    for job in jobs:
        clock(job.run, 1)
        once = clock(job.run, 1)
        repeats[job.name] = max(1, math.ceil(shortest / max(once, 1e-6)))
        cost += max(once, shortest) + settle
    rounds = max(3, min(rounds, int(seconds / cost)))
    samples: dict[str, list[float]] = {job.name: [] for job in jobs}
    for _ in range(rounds):
        for job in jobs:
            begun = time.perf_counter()
            while time.perf_counter() - begun < settle:
                job.run()
            samples[job.name].append(clock(job.run, repeats[job.name]))
    return samples


def _host_clock(run: Callable[[], Any], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - start) / repeats


def _cuda_clock(run: Callable[[], Any], repeats: int) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3 / repeats


def _synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:400]


@contextmanager
def _float32_precision(name: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def machine() -> dict[str, Any]:
    """What the numbers depend on: processor, threads, device, versions."""
    facts: dict[str, Any] = {
        "system": platform.platform(),
        "processor": _processor(),
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version()},
    }
    for package in ("posattn", "torch", "triton", "numba", "numpy", "transformers", "transformer-lens"):
        try:
            facts["versions"][package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts["device"] = {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
        }
    return facts


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


# ---- results --------------------------------------------------------------------------------------------------------


def save_report(report: dict[str, Any], directory: str | os.PathLike[str], name: str) -> tuple[Path, Path]:
    """Write `name`.json (all of it) and `name`.csv (one line a job) into `directory`, and give the two paths."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    as_json, as_csv = folder / f"{name}.json", folder / f"{name}.csv"
    as_json.write_text(json.dumps(report, indent=1) + "\n")
    with as_csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", restval="")
        writer.writeheader()
        for row in report["results"]:
            writer.writerow({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()})
    return as_json, as_csv


def load_report(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a report that `save_report` wrote.

    Raises:
        InputError: the file is missing, is not JSON, or is not such a report.
    """
    try:
        report = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the benchmark results {path}: {error}") from error
    if not isinstance(report, dict) or report.get("schema") != SCHEMA or "results" not in report:
        raise InputError(f"{path} does not hold benchmark results of this version (schema {SCHEMA})")
    return report


def compare_reports(old: dict[str, Any], new: dict[str, Any]) -> list[dict[str, Any]]:
    """Jobs that both reports hold: `ratio` is the old median time over the new one, above 1 when it is faster now.

    `relative` is the ratio after division by the copy's (by the product's for jobs that count operations): what
    is left when one machine or one day was faster than the other.
    """
    before = {(row["group"], row["job"]): row for row in old["results"] if row.get("median_s")}
    found = []
    for row in new["results"]:
        other = before.get((row["group"], row["job"]))
        if other is None or not row.get("median_s"):
            continue
        ratio = other["median_s"] / row["median_s"]
        key = "of_matmul" if row.get("flops") else "of_copy"
        relative = row[key] / other[key] if row.get(key) and other.get(key) else None
        found.append({"group": row["group"], "job": row["job"], "ratio": ratio, "relative": relative})
    return found


def markdown_table(report: dict[str, Any]) -> str:
    """The report's jobs as a Markdown table, yardsticks left out."""
    lines = ["| problem | job | time | against plain | of copy | of matrix product | error |", "|" + "---|" * 7]
    for row in report["results"]:
        if row["job"] in (COPY, MATMUL):
            continue
        if row["status"] == "failed":
            lines.append(f"| {row['group']} | {row['job']} | failed: {row['reason'].replace('|', '/')} | | | | |")
            continue
        cells = [
            row["group"],
            row["job"] + (" (wrong)" if row["status"] == "wrong" else ""),
            _seconds(row["median_s"]),
            f"{row['speedup']:.2f}×" if "speedup" in row else "",
            f"{row['of_copy']:.2f}" if "of_copy" in row else "",
            f"{row['of_matmul']:.2f}" if "of_matmul" in row else "",
            f"{row['error']:.1e}" if "error" in row else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def describe_row(row: dict[str, Any]) -> str:
    """One line of text about a job."""
    head = f"{row['group']:<44} {row['job']:<34}"
    if "median_s" not in row:
        return f"{head} {row['status']}: {row.get('reason', '')}"
    parts = [f"{_seconds(row['median_s']):>9} ±{row['spread'] / 2:4.0%}"]
    if "speedup" in row:
        parts.append(f"{row['speedup']:6.2f}×")
    if "bytes_per_s" in row:
        parts.append(f"{row['bytes_per_s'] / 1e9:7.1f} GB/s")
        parts.append(f"({row['of_copy']:.2f} of copy)" if row["job"] != COPY and "of_copy" in row else "")
    if "flops_per_s" in row:
        parts.append(f"{row['flops_per_s'] / 1e12:7.3f} TFLOP/s")
        parts.append(f"({row['of_matmul']:.2f} of product)" if row["job"] != MATMUL and "of_matmul" in row else "")
    if "error" in row:
        parts.append(f"error {row['error']:.1e}")
    if row["status"] != "ok":
        parts.append(f"{row['status'].upper()}: {row.get('reason', '')}")
    return f"{head} " + " ".join(part for part in parts if part)


def _seconds(value: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if value * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"


# ---- the rollout's cases --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A rollout problem: batch × layers × n × n kernels; `queries` 0 stands for the whole P."""

    batch: int
    layers: int
    n: int
    queries: int = 0

    def __str__(self) -> str:
        form = f"{self.queries} row{'s' if self.queries > 1 else ''}" if self.queries else "whole"
        return f"{form} {self.batch}×{self.layers}×{self.n}"


_F32, _F64, _BF16, _F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16

#: (shape, dtype, precision of float32 products) of the standard benchmark; the kernels of one row are many times as
#: large as a processor's last cache, which would read them faster than memory does
ROLLOUT_CASES: dict[str, list[tuple[Shape, torch.dtype, str]]] = {
    "cpu": [
        (Shape(1, 32, 1024), _F32, "highest"),
        (Shape(1, 32, 1024), _F64, "highest"),
        (Shape(1, 32, 1024), _BF16, "highest"),
        (Shape(1, 32, 1000), _F32, "highest"),
        (Shape(8, 12, 128), _F32, "highest"),
        (Shape(1, 32, 2048, 1), _F32, "highest"),
        (Shape(1, 32, 2048, 1), _F64, "highest"),
        (Shape(1, 32, 2048, 1), _BF16, "highest"),
        (Shape(1, 8, 4096, 1), _F32, "highest"),
        (Shape(1, 8, 4096, 1), _BF16, "highest"),
        (Shape(1, 8, 2048, 16), _F32, "highest"),
    ],
    "cuda": [
        (Shape(8, 32, 2048, 1), _BF16, "highest"),
        (Shape(8, 32, 2048, 1), _F32, "highest"),
        (Shape(8, 32, 2048, 1), _F16, "highest"),
        (Shape(8, 32, 2048), _BF16, "highest"),
        (Shape(8, 32, 2048), _F32, "highest"),
        (Shape(8, 32, 2048), _F32, "high"),
        (Shape(8, 32, 2048), _F16, "highest"),
        (Shape(1, 32, 2048, 1), _BF16, "highest"),
        (Shape(1, 32, 8192, 1), _BF16, "highest"),
        (Shape(8, 32, 2048, 16), _BF16, "highest"),
        (Shape(8, 32, 2048, 16), _F32, "highest"),
        (Shape(8, 32, 2000, 1), _BF16, "highest"),
        (Shape(1, 32, 1024), _BF16, "highest"),
        (Shape(8, 32, 2000), _BF16, "highest"),
        (Shape(1, 8, 8192), _BF16, "highest"),
    ],
}


def rollout_groups(device: str = "cpu", *, tune: bool = False, small: bool = False) -> list[Group]:
    """The standard rollout benchmark of a device ("cpu" or "cuda").

    Args:
        device: where.
        tune: on CUDA, also the candidate tile sizes of the Triton kernels, one job each.
        small: shapes of a few dozen positions, to try out the benchmark itself.
    """
    if device not in ROLLOUT_CASES:
        raise InputError(f"there is no rollout benchmark for device {device!r}: use 'cpu' or 'cuda'")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("there is no CUDA device here: use device 'cpu'")
    groups = []
    for shape, dtype, precision in ROLLOUT_CASES[device]:
        size = Shape(min(shape.batch, 2), min(shape.layers, 3), 48, shape.queries) if small else shape
        groups.append(
            _rollout_group(
                size, dtype, precision, device, tune and (shape.n, shape.batch) == (2048, 8) and dtype != _F16
            )
        )
    return groups


def _rollout_group(shape: Shape, dtype: torch.dtype, precision: str, device: str, tune: bool) -> Group:
    short = {_F32: "float32", _F64: "float64", _BF16: "bfloat16", _F16: "float16"}[dtype]
    short = "tf32" if precision != "highest" else short

    def budget(baseline: float) -> float:
        if dtype == torch.float64:
            return 1e-12
        if dtype == torch.float32 and precision == "highest":
            return 1e-6
        return 2 * baseline + 1e-6

    return Group(
        name=f"{shape} {short}{' cuda' if device == 'cuda' else ''}",
        device=device,
        dtype=dtype,
        build=lambda: _rollout_jobs(shape, dtype, device, tune),
        budget=budget,
        facts={"batch": shape.batch, "layers": shape.layers, "n": shape.n, "queries": shape.queries},
        precision=precision,
    )


def _rollout_jobs(
    shape: Shape, dtype: torch.dtype, device: str, tune: bool
) -> tuple[list[Job], Callable[[], Tensor] | None]:
    from posattn.rollout import fast

    lam, a = _random_problem(shape, dtype, device)
    batch, layers, n = shape.batch, shape.layers, shape.n
    half_matrix = batch * n * (n + 1) / 2 * dtype.itemsize
    jobs: list[Job] = []
    if shape.queries == 0:
        dense, lower = 2.0 * batch * layers * n**3, batch * (layers - 1) * n**3 / 3
        jobs.append(Job("plain", lambda: plain_whole(lam, a), flops=dense))
        if device == "cpu" or dtype.itemsize >= 4:
            jobs.append(Job("matmul", lambda: fast.rollout_matmul(lam, a), flops=lower))
        if device == "cuda":
            jobs += _triton_jobs(lam, a, None, tune, flops=lower, bytes=0.0)
        return jobs, lambda: plain_whole(lam.double(), a)

    rows = torch.arange(n - shape.queries, n, device=device)
    needed = (layers - 1) * half_matrix  # of the last layer, only the queries' rows
    flops = 2.0 * shape.queries * batch * (layers - 1) * n * (n + 1) / 2
    jobs.append(Job("plain", lambda: plain_rows(lam, a, rows), bytes=layers * batch * n * n * dtype.itemsize))
    if device == "cpu" or dtype.itemsize >= 4:
        jobs.append(Job("rows", lambda: fast.rollout_rows(lam, a, rows), bytes=needed, flops=flops))
    if device == "cpu" and importlib.util.find_spec("numba") is not None:
        from posattn.rollout.numba_kernels import rollout_numba

        jobs.append(Job("numba", lambda: rollout_numba(lam, a, rows), bytes=needed, flops=flops))
    if device == "cuda":
        jobs += _triton_jobs(lam, a, rows, tune, bytes=needed, flops=flops)
    return jobs, lambda: plain_rows(lam.double(), a, rows)


def _triton_jobs(lam: Tensor, a: Tensor, rows: Tensor | None, tune: bool, bytes: float, flops: float) -> list[Job]:
    from posattn.rollout import triton_kernels as kernels

    def run(config: Any = None) -> Callable[[], Tensor]:
        return lambda: kernels.rollout_triton(lam, a, rows, renormalise=False, config=config)

    jobs = [Job("triton", run(), bytes=bytes, flops=flops)]
    if rows is None:
        candidates = kernels.WHOLE_CANDIDATES[a.dtype]
    elif rows.shape[0] == 1:
        candidates = kernels.ROWS_CANDIDATES[a.dtype]
    else:
        candidates = []
    if tune:
        for config in candidates:
            jobs.append(Job("triton " + "x".join(map(str, config)), run(config), bytes=bytes, flops=flops))
    if a.dtype.itemsize == 2:
        # a second pass over A finds the sums of its rows
        n = a.shape[-1]
        again = a.shape[0] * a.shape[1] * n * (n + 1) / 2 * a.dtype.itemsize if rows is not None else 0.0

        def expected() -> Tensor:
            if rows is None:
                return plain_whole(lam.double(), a, renormalise=True)
            return plain_rows(lam.double(), a, rows, renormalise=True)

        jobs.append(
            Job(
                "triton, rows of A renormalised",
                lambda: kernels.rollout_triton(lam, a, rows),
                bytes=bytes + again,
                flops=flops,
                reference=expected,
            )
        )
    return jobs


def _random_problem(shape: Shape, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """λ [B, T], float32 (float64 for float64), and random lower-triangular kernels [B, T, N, N], rows summing to 1."""
    generator = torch.Generator(device).manual_seed(0)
    batch, layers, n = shape.batch, shape.layers, shape.n
    a = torch.zeros(batch, layers, n, n, dtype=dtype, device=device)
    for t in range(layers):
        weights = torch.rand(batch, n, n, generator=generator, device=device).tril_()
        a[:, t] = (weights / weights.sum(-1, keepdim=True)).to(dtype)
    lam = 0.05 + 0.4 * torch.rand(batch, layers, generator=generator, device=device)
    return lam.to(torch.float64 if dtype == torch.float64 else torch.float32), a


def plain_whole(lam: Tensor, a: Tensor, renormalise: bool = False) -> Tensor:
    """The plain loop of dense products, P ← (1-λ) P + λ A P, all in A's dtype (in float64 when λ is float64)."""
    dtype = torch.float64 if lam.dtype == torch.float64 else a.dtype
    p = torch.eye(a.shape[-1], dtype=dtype, device=a.device).expand(a.shape[0], -1, -1)
    weights = lam.to(dtype)[..., None, None]
    for t in range(a.shape[1]):
        p = torch.lerp(p, _product(_plain_layer(a, t, dtype, renormalise), p), weights[:, t])
    return p


def plain_rows(lam: Tensor, a: Tensor, rows: Tensor, renormalise: bool = False) -> Tensor:
    """The plain loop for some rows, p ← (1-λ) p + λ p A from the last layer to the first, A read whole."""
    dtype = torch.float64 if lam.dtype == torch.float64 else a.dtype
    p = torch.zeros(a.shape[0], rows.shape[0], a.shape[-1], dtype=dtype, device=a.device)
    p[:, torch.arange(rows.shape[0], device=a.device), rows] = 1
    weights = lam.to(dtype)[..., None, None]
    for t in range(a.shape[1] - 1, -1, -1):
        p = torch.lerp(p, _product(p, _plain_layer(a, t, dtype, renormalise)), weights[:, t])
    return p


def _plain_layer(a: Tensor, t: int, dtype: torch.dtype, renormalise: bool) -> Tensor:
    layer = a[:, t].to(dtype)
    return layer / layer.sum(-1, keepdim=True) if renormalise else layer


def _product(x: Tensor, y: Tensor) -> Tensor:
    """A batched product; one of two matrices where the batch is 1, which some back ends do faster."""
    return (x[0] @ y[0])[None] if x.shape[0] == 1 else torch.bmm(x, y)
