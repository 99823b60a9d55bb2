"""What the benchmark scripts share: command line, progress, files, comparison with an earlier run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from posattn import bench
from posattn.errors import PosattnError

RESULTS = Path(__file__).parent / "results"


def main(name: str, make_groups: Callable[[argparse.Namespace], list[bench.Group]], argv: Sequence[str] | None) -> int:
    """Run a script's groups and write NAME-DEVICE.json, .csv and .md; 1 when a job failed or was wrong."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="where results go")
    parser.add_argument("--name", default=None, help="name of the result files (default: NAME-DEVICE)")
    parser.add_argument("--only", nargs="*", default=[], metavar="TEXT", help="groups whose name holds every TEXT")
    parser.add_argument("--seconds", type=float, default=6.0, help="of timing for one group, about")
    parser.add_argument("--rounds", type=int, default=15, help="at most, for one group")
    parser.add_argument("--check-only", action="store_true", help="compare with the reference, time nothing")
    parser.add_argument("--tune", action="store_true", help="time the candidate tile sizes of the Triton kernels too")
    parser.add_argument("--small", action="store_true", help="tiny shapes, to try out the script")
    parser.add_argument("--threads", type=int, default=None, help="threads of torch on the CPU")
    parser.add_argument("--compare", type=Path, default=None, metavar="OLD.json", help="an earlier result file")
    args = parser.parse_args(argv)
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.threads:
        torch.set_num_threads(args.threads)
    try:
        old = bench.load_report(args.compare) if args.compare else None
        groups = [group for group in make_groups(args) if all(text in group.name for text in args.only)]
        if not groups:
            print(f"no group's name holds {args.only}", file=sys.stderr)
            return 2
        report = bench.run_benchmarks(
            groups,
            seconds=args.seconds,
            rounds=0 if args.check_only else args.rounds,
            progress=lambda row: print(bench.describe_row(row), flush=True),
        )
    except PosattnError as error:
        print(error, file=sys.stderr)
        return 2
    if not args.check_only:
        paths = bench.save_report(report, args.out, args.name or f"{name}-{args.device}")
        paths[0].with_suffix(".md").write_text(bench.markdown_table(report))
        print(f"written: {', '.join(str(path) for path in paths)}")
    if old is not None:
        for row in bench.compare_reports(old, report):
            relative = "" if row["relative"] is None else f", {row['relative']:.2f}× relative to the machine"
            print(f"{row['group']:<44} {row['job']:<34} {row['ratio']:.2f}× as fast as before{relative}")
    bad = [row for row in report["results"] if row["status"] != "ok"]
    for row in bad:
        print(f"{row['status']}: {row['group']}: {row['job']}: {row.get('reason', '')}", file=sys.stderr)
    return 1 if bad else 0
