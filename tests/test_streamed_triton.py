"""The Triton head-mean kernel against the torch one, in Triton's interpreter (a process of its own, because triton
decides when it is imported) and, where there is a CUDA device, compiled.

As a program (`python tests/test_streamed_triton.py OUT.json`) it runs the cases and writes their errors.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from posattn.models.base import PositionScheme

ROOT = Path(__file__).parent.parent
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


class Case(NamedTuple):
    n: int
    heads: int
    groups: int
    width: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    bins: int | None = None
    known: bool = False
    layout: str = "heads first"

    def __str__(self) -> str:
        words = [f"n{self.n}-h{self.heads}-g{self.groups}-d{self.width}"]
        words += [f"w{self.window}"] if self.window else []
        words += [name for name in ("softcap", "sinks", "known") if getattr(self, name)]
        return "-".join([*words, *([f"bins{self.bins}"] if self.bins else []), self.layout.replace(" ", "")])


CASES = [
    Case(1, 1, 1, 4),
    Case(33, 4, 2, 8),
    Case(40, 3, 3, 12, window=5),
    Case(40, 4, 1, 16, softcap=1.5, bins=4),
    Case(37, 4, 2, 8, sinks=True, window=20),
    Case(37, 4, 2, 8, sinks=True, bins=8),
    Case(50, 2, 1, 20, bins=16, window=17),
    Case(70, 2, 2, 8, bins=32),
    Case(33, 4, 2, 8, known=True),
    Case(33, 2, 1, 8, bins=2, known=True, layout="heads last"),
    Case(21, 2, 1, 8, bins=3),
]
LARGE = [
    Case(300, 8, 2, 64),
    Case(513, 8, 8, 128, bins=64),
    Case(700, 8, 2, 128, bins=256, known=True),
    Case(400, 6, 2, 80, window=100, softcap=20.0),
    Case(333, 8, 1, 64, sinks=True, bins=16),
]


def make(case: Case, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor, PositionScheme]:
    generator = torch.Generator().manual_seed(case.n)

    def tensor(heads: int) -> torch.Tensor:
        values = torch.randn(heads, case.n, case.width, generator=generator).to(device, dtype)
        return values.transpose(0, 1) if case.layout == "heads first" else values.transpose(0, 1).contiguous()

    sinks = torch.randn(case.heads, generator=generator).to(device) if case.sinks else None
    scheme = PositionScheme(
        kind="none", scale=case.width**-0.5 * 2, window=case.window, softcap=case.softcap, sinks=sinks
    )
    return tensor(case.heads), tensor(case.groups), scheme


def errors(case: Case, dtype: torch.dtype, device: str) -> dict[str, float]:
    """Largest differences from the torch path in float32, on the same (rounded) numbers."""
    from posattn.probes._triton_kernel_mean import add_document_triton
    from posattn.probes.kernel_mean import add_document

    q, k, scheme = make(case, dtype, device)
    size = case.n if case.bins is None else -(-case.n // case.bins)
    lse = None
    if case.known:
        s = torch.einsum("ihd,jhd->ihj", q.float(), k.float().repeat_interleave(case.heads // case.groups, 1))
        hidden = torch.ones(case.n, case.n, dtype=torch.bool, device=device).triu(1)[:, None]
        lse = (s * scheme.scale).masked_fill(hidden, -torch.inf).logsumexp(-1)
    found = []
    for add, inputs in ((add_document, (q.float(), k.float(), None)), (add_document_triton, (q, k, lse))):
        total = torch.ones(size, size, device=device)  # added to, not overwritten
        stray = torch.ones(0 if case.bins is None else case.n, device=device)
        sinks = add(*inputs, scheme, total, stray, case.bins)
        found.append((total, stray, sinks.to(device)))
    names = ("total", "stray", "sinks")
    return {name: float((a - b).abs().max()) if a.numel() else 0.0 for name, a, b in zip(names, *found, strict=True)}


def check(found: dict[str, float], case: Case) -> None:
    # sums over heads and a bin's rows of weights of at most 1, in float32
    rows = case.bins or 1
    assert found["total"] <= 2e-6 * case.heads * max(rows, 4)
    assert found["stray"] <= 1e-5
    assert found["sinks"] <= 1e-5


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    pytest.importorskip("triton")
    out = tmp_path_factory.mktemp("triton") / "errors.json"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__, str(out)], env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_interpreted(case: Case, dtype: str, interpreted: dict[str, dict[str, float]]) -> None:
    check(interpreted[f"{case} {dtype}"], case)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("case", [*CASES, *LARGE], ids=str)
def test_compiled(case: Case, dtype: str) -> None:
    check(errors(case, DTYPES[dtype], "cuda"), case)


@pytest.mark.cuda
def test_run_to_run() -> None:
    runs = []
    for _ in range(2):
        from posattn.probes._triton_kernel_mean import add_document_triton

        q, k, scheme = make(LARGE[1], torch.bfloat16, "cuda")
        total, stray = torch.zeros(9, 9, device="cuda"), torch.zeros(513, device="cuda")
        add_document_triton(q, k, None, scheme, total, stray, 64)
        runs.append((total, stray))
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])


if __name__ == "__main__":
    torch.set_num_threads(1)
    results = {f"{case} {name}": errors(case, DTYPES[name], "cpu") for case in CASES for name in ("f32", "bf16")}
    Path(sys.argv[1]).write_text(json.dumps(results))
