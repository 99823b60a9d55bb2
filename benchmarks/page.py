"""The tables of `docs/benchmarks.md`, made from the committed `benchmarks/results/*.json`.

    python benchmarks/page.py

A file of a kind that has no table of its own is named, and that is all.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posattn import bench

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- tables: begin -->\n", "<!-- tables: end -->\n"


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """A Markdown table; the first column is text, the others are figures."""
    lines = [list(head), ["---", *["---:"] * (len(head) - 1)], *rows]
    return ["| " + " | ".join(str(cell) for cell in line) + " |" for line in lines]


def size(count: float | None) -> str:
    """Bytes, in MiB with three figures."""
    if count is None:
        return ""
    mib = count / 2**20
    return f"{mib:.3g} MiB" if mib < 999.5 else f"{mib:,.0f} MiB"


def seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def where(report: Mapping[str, Any]) -> str:
    """On what, with what, how busy, and when."""
    machine = report.get("machine")
    facts = machine if isinstance(machine, dict) else report.get("provenance") or report
    hardware = report.get("hardware") or {"cpu": facts.get("processor"), "threads": facts.get("threads")}
    device = (
        facts.get("device") if isinstance(facts.get("device"), dict) else hardware.get("gpu") or hardware.get("cpu")
    )
    device = device.get("name", device) if isinstance(device, dict) else device
    load = hardware.get("load") or report.get("load_average_at_start") or [report.get("load_average") or 0]
    torch = (facts.get("versions") or {}).get("torch") or facts.get("torch")
    parts = [
        device,
        f"{hardware['threads']} thread(s)" if hardware.get("threads") and not hardware.get("gpu") else None,
    ]
    parts += [f"torch {torch}" if torch else None, str(facts.get("time") or report.get("time") or "")[:10]]
    parts += [f"load average {load[0]:.0f}: other work was running" if load and load[0] > 2 else None]
    return "*" + ", ".join(part for part in parts if part) + ".*"


def capture(report: Mapping[str, Any]) -> list[str]:
    model = next(iter(report["model"]))
    lines = [
        f"{model}, {report['layers']} layers, {report['heads']} heads, {report['batch']} documents of "
        f"{report['length']} tokens; median of {report['rounds']} interleaved rounds. Memory is the allocator's peak "
        "above what was held.",
        "",
    ]
    rows = [
        [
            f"`{way}`",
            seconds(time["wall_s"]),
            f"{time['wall_ratio']:.2f}",
            seconds(time["cpu_s"]),
            f"{time['cpu_ratio']:.2f}",
            size(report["peak_bytes"][way]["first_batch"]),
            size(report["peak_bytes"][way]["state"]),
        ]
        for way, time in report["time"].items()
    ]
    return lines + table(["way", "wall", "ratio", "processor", "ratio", "peak memory", "of it statistics"], rows)


def long_context(report: Mapping[str, Any]) -> list[str]:
    shape = report["shape"]
    lines = [
        f"{shape['name']} ({shape['layers']} layers, {shape['heads']} heads, width {shape['width']}, random weights), "
        f"{report['length']:,} tokens, bins of {report['bins']}. Kernels were compared before anything was "
        f"reported: largest difference {max(report['differences'].values(), default=float('nan')):.1e}.",
        "",
    ]
    ratio = report.get("memory_ratio") or {}
    rows = [
        [
            f"`{way}`",
            seconds(found["seconds"]),
            size(found["peak_bytes"]),
            f"{ratio[way]:.1f}×" if way in ratio else "",
            size(found.get("state_bytes")),
        ]
        for way, found in report["ways"].items()
    ]
    lines += table(["way", "wall", "peak memory", "below materialised", "of it running sums"], rows)
    if "streamed, whole" in ratio:
        kernels = 8 * shape["layers"] * report["length"] ** 2
        lines += [
            "",
            "The aim of a peak ten times below the materialised one is for bins. Whole kernels cannot reach it: their "
            f"sums alone, `[layers, N, N]` in float64, are {size(kernels)}, and a pass keeps its own in float32 until "
            "its last layer has reported.",
        ]
    return lines


def structured(report: Mapping[str, Any]) -> list[str]:
    rows = [
        [
            row["case"],
            seconds(row["best_s"]),
            seconds(row["cpu_s"]),
            f"{row['peak_mib']:.0f} MiB" if "peak_mib" in row else "",
            f"{row['times_slower_cpu_s']:.0f}" if "times_slower_cpu_s" in row else "",
        ]
        for row in report["rows"]
    ]
    lines = table(["case", "wall, best", "processor", "peak of the process", "times slower (processor)"], rows)
    checks = [
        [check["what"], f"{check['measured']:.3g}", "yes" if check["holds"] else "**no**"] for check in report["checks"]
    ]
    return [*lines, "", *table(["aim", "measured", "holds"], checks)]


def heads(report: Mapping[str, Any]) -> list[str]:
    rows = []
    for length, run in report["runs"].items():
        forward, scores = run["forward"], run["score_heads"]
        scaled = run.get("brute_force_scaled")
        rows.append(
            [
                f"{int(length):,}",
                f"{run['all_swaps']:,}",
                seconds(forward["cpu_s"]),
                seconds(scores["cpu_s"]),
                f"{run['score_heads_peak_extra_mib'] - run['forward_peak_extra_mib']:.0f} MiB",
                f"{scaled['cpu_s']:,.0f} s" if scaled else "",
            ]
        )
    head = [
        "tokens",
        "swaps a head",
        "forward pass",
        "score_heads",
        "memory beyond it",
        "one swap at a time, scaled up",
    ]
    about = (
        f"{report['model']}, {report['layers']} layers of {report['heads']} heads, one document, processor time; the "
        "pass is part of `score_heads`. The last column is a sample of swaps times their number, and was not run in "
        "full."
    )
    return [about, "", *table(head, rows)]


def energy_study(report: Mapping[str, Any]) -> list[str]:
    shapes = report["cost"]
    ways = list(shapes[0]["seconds"])
    rows = [
        [f"{cost['shape']}, {cost['length']} tokens", *(f"{cost['of_kernel_probe'][way]:.2f}" for way in ways)]
        for cost in shapes
    ]
    return [
        "Processor time as a multiple of a pass with `KernelProbe`; accuracy is on [its own page](theory/energy.md).",
        "",
        *table(["model", *ways], rows),
    ]


def bundled_variants(report: Mapping[str, Any]) -> list[str]:
    return ["Accuracy of all predictions on the bundled models: [its own page](results/bundled_variants.md)."]


def rollout(report: Mapping[str, Any]) -> list[str]:
    note = (
        "`of copy` sets what a row must read, the lower half of each kernel, beside a large copy in the same dtype. "
        "What `rows` spends on bfloat16 is arithmetic. Short jobs on two threads suffer most where other work runs: "
        "the spread of each is in the file."
    )
    return [note, "", *bench.markdown_table(dict(report)).rstrip("\n").split("\n")]


KINDS = {
    "capture": ("What measuring costs", capture),
    "long_context": ("Long contexts", long_context),
    "structured": ("Structured kernels: simulate", structured),
    "heads": ("Head scores", heads),
    "energy_study": ("Energy rollout", energy_study),
    "bundled_variants": ("Every variant", bundled_variants),
    "rollout": ("Rollout kernels", rollout),
}


def kind_of(path: Path, report: Mapping[str, Any]) -> str:
    return "rollout" if "results" in report else report.get("benchmark", path.stem.split("-")[0])


def tables() -> str:
    """One section a result file, in the order of their names."""
    lines: list[str] = []
    for path in sorted(RESULTS.glob("*.json")):
        report = json.loads(path.read_text("utf-8"))
        title, body = KINDS.get(kind_of(path, report), ("Other", lambda report: ["No table is made of this file."]))
        lines += [f"## {title}: {path.stem}", "", f"`benchmarks/results/{path.name}`", "", *body(report), ""]
        lines += [where(report), ""]
    if not any(RESULTS.glob("*-cuda.json")):
        lines += [
            "## On a GPU: not run",
            "",
            "`benchmarks/run_cuda.sh DIR` measures the Triton kernels and capture at 32,768 tokens. It has not been "
            "run for this page: Triton's kernels were compared with their references in its interpreter, and no more.",
            "",
        ]
    return "\n".join(lines)


def main() -> int:
    before, rest = PAGE.read_text("utf-8").split(BEGIN)
    PAGE.write_text(before + BEGIN + tables() + END + rest.split(END)[1], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
