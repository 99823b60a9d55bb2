"""The benchmark harness: it checks before it times, records failures and goes on, and compares reports."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch

from posattn import bench
from posattn.errors import InputError


def group(name: str = "g") -> bench.Group:
    x = torch.rand(64, 64)

    def broken() -> torch.Tensor:
        raise ValueError("no such kernel\nmore")

    def build() -> tuple[list[bench.Job], object]:
        jobs = [
            bench.Job("plain", lambda: x @ x, flops=2 * 64**3),
            bench.Job("broken", broken),
            bench.Job("wrong", lambda: x @ x + 1e-3),
            bench.Job("missing values", lambda: (x @ x) * torch.nan),
            bench.Job("other", lambda: x + 1, bytes=2 * 64 * 64 * 4, reference=lambda: x.double() + 1),
        ]
        return jobs, lambda: x.double() @ x.double()

    return bench.Group(name, "cpu", torch.float32, build, budget=lambda baseline: 2 * baseline + 1e-5)


def test_each_job_is_checked_and_a_failure_does_not_stop_the_others() -> None:
    seen: list[str] = []
    report = bench.run_benchmarks([group()], seconds=0.05, rounds=3, progress=lambda row: seen.append(row["job"]))
    rows = {row["job"]: row for row in report["results"]}
    assert seen == list(rows)
    assert {name: row["status"] for name, row in rows.items()} == {
        "plain": "ok", "broken": "failed", "wrong": "wrong", "missing values": "wrong", "other": "ok",
        bench.COPY: "ok", bench.MATMUL: "ok",
    }  # fmt: skip
    assert rows["broken"]["reason"] == "ValueError: no such kernel"
    assert "median_s" not in rows["broken"]
    assert rows["plain"]["speedup"] == 1.0
    assert rows["plain"]["flops_per_s"] == pytest.approx(2 * 64**3 / rows["plain"]["median_s"])
    assert rows["other"]["of_copy"] > 0
    assert rows[bench.COPY]["rounds"] == 3
    assert "torch" in report["machine"]["versions"]
    json.dumps(report)


def test_a_group_that_cannot_be_built_is_recorded() -> None:
    def build() -> tuple[list[bench.Job], None]:
        raise MemoryError("too big")

    report = bench.run_benchmarks([bench.Group("big", "cpu", torch.float32, build), group()], rounds=0)
    assert report["results"][0]["status"] == "failed"
    assert report["results"][1]["status"] == "ok"
    assert all("median_s" not in row for row in report["results"])  # rounds=0 times nothing


def test_files_and_comparison(tmp_path: Path) -> None:
    report = bench.run_benchmarks([group()], seconds=0.05, rounds=3)
    as_json, as_csv = bench.save_report(report, tmp_path / "new", "x")
    again = bench.load_report(as_json)
    assert again == json.loads(json.dumps(report))
    with as_csv.open() as file:
        table = list(csv.DictReader(file))
    assert [row["job"] for row in table] == [row["job"] for row in report["results"]]
    assert float(table[0]["median_s"]) == pytest.approx(report["results"][0]["median_s"], rel=1e-3)

    for row in again["results"]:
        if row["job"] == "plain":
            row["median_s"] *= 3
            row["of_matmul"] /= 3
    ratios = {row["job"]: row for row in bench.compare_reports(again, report)}
    assert ratios["plain"]["ratio"] == pytest.approx(3)
    assert ratios["plain"]["relative"] == pytest.approx(3)
    assert ratios["other"]["ratio"] == pytest.approx(1)
    assert "broken" not in ratios

    text = bench.markdown_table(report)
    assert "no such kernel" in text
    assert "(wrong)" in text
    assert all(bench.describe_row(row) for row in report["results"])


def test_reading_something_else_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"schema": 99}')
    for path in (other, tmp_path / "absent.json"):
        with pytest.raises(InputError):
            bench.load_report(path)


def test_the_rollout_benchmark_is_right_on_small_shapes() -> None:
    report = bench.run_benchmarks(bench.rollout_groups("cpu", small=True), rounds=0)
    assert {row["status"] for row in report["results"]} == {"ok"}
    assert {"plain", "matmul", "rows"} <= {row["job"] for row in report["results"]}


def test_an_absent_device_is_refused() -> None:
    with pytest.raises(InputError, match="tpu"):
        bench.rollout_groups("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="CUDA"):
            bench.rollout_groups("cuda")
